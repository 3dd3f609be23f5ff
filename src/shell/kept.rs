//! How much one VM remembers of the prompts that it has in flight.
//!
//! It holds none of them: it counts their blocks, and says when there is no room for more.

use super::meters;
use crate::metrics;
use crate::tokens::blocks::Chain;
use std::cell::Cell;

/// Blocks of all prompts in flight that one VM remembers: 32 MB. Of the requests beyond it nothing can be taken back or
/// learned. Thousands of long chats fit; of prompts of a million tokens, sixty. Doubled, so is what clients can fill.
const MAX_KEPT_BLOCKS: usize = 4 << 20;

thread_local! {
    /// All roots of a VM share its memory.
    static KEPT: Cell<usize> = const { Cell::new(0) };
}

/// Counts the blocks of one prompt while it is in flight.
pub struct Kept(usize);

impl Kept {
    /// Counts a chain, or drops it where there is no room.
    pub fn within_bounds(chain: &mut Option<Chain>) -> Self {
        let blocks = chain.as_ref().map_or(0, |chain| chain.hashes().len());
        let total = KEPT.get().saturating_add(blocks);
        if total > MAX_KEPT_BLOCKS {
            meters::add(&metrics::NO_ROOM, &["prompt"], 1);
            *chain = None;
            return Self(0);
        }
        KEPT.set(total);
        Self(blocks)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        KEPT.set(KEPT.get().saturating_sub(self.0));
    }
}
