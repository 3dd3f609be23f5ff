//! Warmpath routes each LLM request to the replica that already holds the longest part of its
//! prompt in KV cache, unless waiting there costs more than computing the prompt elsewhere.
//!
//! Values go in, a decision comes out, and only the shell touches Envoy. In reading order:
//!
//! 1. [`config`] checks the plugin's JSON once.
//! 2. [`request`] reads a body into a [`request::Prompt`], [`template`] renders it as the engine
//!    would, [`tokens`] turns the text into ids and the ids into a chain of block hashes, and
//!    [`model`] puts these together. [`memo`] knows what was read before, [`budget`] how long the rest will take, by the [`rules`] that are configured of an engine.
//! 3. [`replicas`] says who there is and how they do, [`index`] who holds which blocks, and
//!    [`charge`] what is in flight.
//!    [`identity`] says whose entries of a cache a request can use at all.
//! 4. [`score`] is the cost in seconds, and [`route::decide`] the only path from all of these to a
//!    replica and a reason; where it says that all are overloaded, [`refusal`] is the answer.
//! 5. [`feedback`] reads the response in passing: what it proves goes back into the index, what it contradicts
//!    to [`drift`], which says whose prompts are trusted, and how long it took to [`learn`].
//! 6. [`report`] is what an agent beside an engine says of its cache and load; [`share`] is how the VMs of one Envoy come to
//!    see the same, and [`metrics`] what they count, in [`series`] and by the [`classes`] of requests. [`scaling`] is how many
//!    replicas that load asks for.
//! 7. `shell`, in wasm only, does the host calls; [`loaded`] is what its configurations share, [`kept`] how much is remembered of requests, [`headers`] how Envoy writes a request's, [`secret`] what opens explanations.
//!
//! None of it but the shell has a clock, chance, I/O or globals. `command` (feature `tools`) is what native commands share. `agent` (feature `agent`) makes cache reports of an engine's
//! events. `mock` (feature `demo`) is a
//! replica for tests and demos; of the modules above it shares those that read a prompt, and none
//! that chooses.

// Only the VM's allocator and the shell need `unsafe`, this for the clock as a number and for names that the linker goes by.
#![cfg_attr(not(target_family = "wasm"), forbid(unsafe_code))]

#[cfg(all(feature = "agent", not(target_family = "wasm")))]
pub mod agent;
#[cfg(target_family = "wasm")]
mod allocator;
pub mod budget;
pub mod charge;
pub mod classes;
#[cfg(all(feature = "tools", not(target_family = "wasm")))]
pub mod command;
pub mod config;
pub mod drift;
pub mod feedback;
pub mod headers;
pub mod identity;
pub mod index;
pub mod kept;
pub mod learn;
pub mod loaded;
mod media;
pub mod memo;
pub mod metrics;
#[cfg(all(feature = "demo", not(target_family = "wasm")))]
pub mod mock;
pub mod model;
pub mod refusal;
pub mod replicas;
pub mod report;
pub mod request;
pub mod route;
pub mod rules;
pub mod scaling;
pub mod score;
pub mod secret;
#[cfg(test)]
mod seeded;
pub mod series;
pub mod share;
#[cfg(all(target_family = "wasm", not(test), not(feature = "bench")))]
mod shell;
pub mod template;
pub mod tokens;
