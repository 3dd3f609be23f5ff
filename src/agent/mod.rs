//! `warmpath-agent`: what one engine holds in its KV cache, from its own events, as a report that the filter can read.
//!
//! A filter in Envoy cannot speak ZeroMQ, and an engine has no endpoint for what its cache holds. The agent stands beside the engine,
//! follows its events and answers `GET /v1/cache`. In reading order: [`events`] decodes a batch, [`cache`] finds our names for
//! its blocks, [`held`] counts copies and knows what can be reached, [`tell`] and [`history`] are what readers are told, and
//! [`rank`] is all of it for one stream of frames, [`sequence`] included. That much is pure. [`zmtp`] speaks ZeroMQ, [`follow`]
//! keeps a rank connected, [`engine`] asks the engine over HTTP, [`server`] answers, and [`stop`] says when that ends.
//!
//! It reads no prompt and no answer, keeps no token, and never asks the engine to do anything.

pub mod cache;
pub mod engine;
pub mod events;
pub mod exposition;
pub mod follow;
pub mod held;
pub mod history;
pub mod rank;
pub mod sequence;
pub mod server;
pub mod stop;
pub mod tell;
pub mod zmtp;

#[cfg(test)]
#[cfg(feature = "demo")]
mod published;
