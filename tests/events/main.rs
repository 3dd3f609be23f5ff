//! What the agent and the filter make of an engine's cache events: a real engine's, recorded, and those of random ones.

#![cfg(not(target_family = "wasm"))]
// The modules say `cfg(test)`, which is always so here, because clippy lets tests unwrap by that mark.

#[cfg(test)]
mod consumer;
#[cfg(test)]
mod engine;
#[cfg(test)]
mod held;
#[cfg(test)]
mod random;
#[cfg(test)]
mod recording;
#[cfg(test)]
mod replays;
