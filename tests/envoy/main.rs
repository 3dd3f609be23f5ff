//! The built filter in a real Envoy, configured by the shipped `envoy/envoy.yaml`, in front of mock replicas.
//!
//! Three files come from the environment: `ENVOY_BIN` (Envoy 1.36 or later), `WARMPATH_WASM` (the built filter) and
//! `WARMPATH_PREPARED` (Qwen3, by `warmpath-prepare`). Without one of them every test says `SKIPPED` on standard error.
//!
//! Each test has an Envoy and replicas of its own, and they run one after another whatever the number of test threads:
//! timing is part of what is tested. Nothing here looks into the filter; what it did is read from its metrics, from
//! what the replicas received, and from what the client was answered.

#![cfg(not(target_family = "wasm"))]

mod client;
mod harness;
mod prompts;
mod shipped;
mod stats;

mod failures;
mod feedback;
mod fleet;
mod prefixes;
mod requests;
mod start;
