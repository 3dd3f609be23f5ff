//! Warmpath: route each LLM request to the replica that already holds its prefix.

#[cfg(all(feature = "demo", not(target_family = "wasm")))]
pub mod mock;
pub mod model;
pub mod request;
pub mod template;
pub mod tokens;
