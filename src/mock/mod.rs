//! A replica that behaves like vLLM where routing can tell.

pub mod cache;
pub mod chance;
pub mod digest;
pub mod engine;
