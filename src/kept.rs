//! How much one VM remembers of the prompts that it has in flight.
//!
//! It holds none of them: it counts their blocks, and says when there is no room for more.

use crate::tokens::blocks::Chain;
use std::cell::Cell;
use std::rc::Rc;

/// Blocks of all prompts in flight that one VM remembers: 32 MB. Of the requests beyond it nothing can be taken back or
/// learned. Thousands of long chats fit; of prompts of a million tokens, sixty. Doubled, so is what clients can fill.
pub const MAX_KEPT_BLOCKS: usize = 4 << 20;

/// Room for so many blocks.
#[derive(Debug, Clone)]
pub struct Room {
    kept: Rc<Cell<usize>>,
    most: usize,
}

/// Counts the blocks of one prompt while it is in flight.
#[derive(Debug)]
pub struct Kept {
    room: Rc<Cell<usize>>,
    blocks: usize,
}

impl Room {
    /// An empty room.
    pub fn new(most: usize) -> Self {
        Self { kept: Rc::default(), most }
    }

    /// Counts a chain, or drops it where there is no room.
    pub fn keep(&self, chain: &mut Option<Chain>) -> Kept {
        let blocks = chain.as_ref().map_or(0, |chain| chain.hashes().len());
        let total = self.kept.get().saturating_add(blocks);
        let mut kept = Kept { room: Rc::clone(&self.kept), blocks: 0 };
        if total > self.most {
            *chain = None;
        } else {
            self.kept.set(total);
            kept.blocks = blocks;
        }
        kept
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.room.set(self.room.get().saturating_sub(self.blocks));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::blocks::{BlockSize, ChainSeed};

    fn chain(blocks: usize) -> Option<Chain> {
        let size = BlockSize::new(16).unwrap();
        Some(Chain::new(ChainSeed::new("m", None), size, &vec![7; blocks * 16 + 3]))
    }

    #[test]
    fn a_prompt_beyond_the_room_is_dropped_and_leaves_the_others_theirs() {
        let room = Room::new(10);
        let (mut first, mut second, mut third) = (chain(6), chain(5), chain(4));
        let kept = room.keep(&mut first);
        let dropped = room.keep(&mut second);
        assert!(first.is_some() && second.is_none());
        // What was dropped takes no room, and gives none back.
        let another = room.keep(&mut third);
        assert!(third.is_some());
        assert_eq!(room.kept.get(), 10);
        drop(dropped);
        assert_eq!(room.kept.get(), 10);
        drop(kept);
        let mut again = chain(6);
        let kept = room.keep(&mut again);
        assert!(again.is_some());
        drop((kept, another));
        assert_eq!(room.kept.get(), 0);
    }

    #[test]
    fn what_has_no_blocks_always_fits() {
        let room = Room::new(0);
        room.keep(&mut None);
        let mut short = chain(0);
        room.keep(&mut short);
        assert!(short.is_some());
    }
}
