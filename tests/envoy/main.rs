//! The built filter in a real Envoy, configured by the shipped `envoy/envoy.yaml`, in front of mock replicas.
//!
//! Three files come from the environment: `ENVOY_BIN` (Envoy 1.36 or later), `WARMPATH_WASM` (the built filter) and
//! `WARMPATH_PREPARED` (Qwen3, by `warmpath-prepare`); for traps `WARMPATH_TRAP_WASM`, too. Without one of them a test
//! says `SKIPPED` on standard error.
//!
//! Each test has an Envoy and replicas of its own, and they run one after another whatever the number of test threads:
//! timing is part of what is tested. Nothing here looks into the filter; what it did is read from its metrics, from
//! what the replicas received, and from what the client was answered.

#![cfg(not(target_family = "wasm"))]
// The modules say `cfg(test)`, which is always so here, because clippy lets tests unwrap by that mark.

#[cfg(test)]
mod client;
#[cfg(test)]
mod harness;
#[cfg(test)]
mod prompts;
#[cfg(test)]
mod shipped;
#[cfg(test)]
mod stats;
#[cfg(test)]
mod tls;
#[cfg(test)]
mod traffic;
#[cfg(test)]
mod wire;

#[cfg(test)]
mod agents;
#[cfg(test)]
mod apis;
#[cfg(test)]
mod bodies;
#[cfg(test)]
mod budget;
#[cfg(test)]
mod chaos;
#[cfg(test)]
mod decisions;
#[cfg(test)]
mod deployments;
#[cfg(test)]
mod drift;
#[cfg(test)]
mod failures;
#[cfg(test)]
mod feedback;
#[cfg(test)]
mod fleet;
#[cfg(test)]
mod framing;
#[cfg(test)]
mod leaving;
#[cfg(test)]
mod manifests;
#[cfg(test)]
mod newcomer;
#[cfg(test)]
mod polling;
#[cfg(test)]
mod prefixes;
#[cfg(test)]
mod reporters;
#[cfg(test)]
mod reports;
#[cfg(test)]
mod requests;
#[cfg(test)]
mod security;
#[cfg(test)]
mod shapes;
#[cfg(test)]
mod start;
#[cfg(test)]
mod stress;
#[cfg(test)]
mod suspension;
#[cfg(test)]
mod transports;
#[cfg(test)]
mod traps;
#[cfg(test)]
mod updates;
#[cfg(test)]
mod watched;
