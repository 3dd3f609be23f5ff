//! Warmpath: route each LLM request to the replica that already holds its prefix.

pub mod charge;
pub mod config;
pub mod feedback;
pub mod index;
pub mod metrics;
#[cfg(all(feature = "demo", not(target_family = "wasm")))]
pub mod mock;
pub mod model;
pub mod replicas;
pub mod request;
pub mod route;
pub mod score;
pub mod share;
#[cfg(all(target_family = "wasm", not(test)))]
mod shell;
pub mod template;
pub mod tokens;
