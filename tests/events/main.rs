//! What the agent and the filter make of an engine's cache events: a real engine's, recorded, and those of random ones.

mod consumer;
mod engine;
mod held;
mod random;
mod recording;
mod replays;
