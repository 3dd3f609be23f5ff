//! What no policy can exceed, and what one that knows the future does: the measures that policies are held against.
//!
//! Neither can be built.

mod future;
pub mod infinite;
pub mod lookahead;

#[cfg(test)]
mod known;
