//! The filter in Envoy: the only part of Warmpath that calls the host.
//!
//! A callback reads what it needs, calls the core once, and applies the outcome. Host calls go
//! through [`host`], which never panics; what fails is counted and skipped, and the request goes
//! on. Decisions, formats and protocols are the core's; nothing here weighs or encodes anything.

mod calls;
mod classes;
mod fleet;
mod gauges;
mod host;
mod http;
mod kept;
mod link;
mod meters;
mod models;
mod noted;
mod oracle;
mod poller;
mod reading;
mod reports;
mod root;
mod routed;
mod scaling;
mod seat;
mod shadow;
#[cfg(feature = "trap")]
mod trap;
mod trust;
mod wasi;

#[cfg(not(feature = "trap"))]
use root::Root;
#[cfg(feature = "trap")]
use trap::Root;

/// The response header that says why, to those who may know.
const EXPLAIN_HEADER: &str = "x-warmpath-explain";

proxy_wasm::main! {{
    // Libraries log their internals at lower levels; what the filter itself has to say at Info
    // goes through `host::log_info`.
    proxy_wasm::set_log_level(proxy_wasm::types::LogLevel::Warn);
    proxy_wasm::set_root_context(|_| Box::new(Root::default()));
}}
