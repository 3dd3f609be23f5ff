//! [`crate::kept`] for all roots of this VM, which share its memory. What finds no room is counted.

use super::meters;
use crate::kept::{Kept, MAX_KEPT_BLOCKS, Room};
use crate::metrics;
use crate::tokens::blocks::Chain;

thread_local! {
    static ROOM: Room = Room::new(MAX_KEPT_BLOCKS);
}

/// Counts a chain, or drops it where there is no room.
pub fn keep(chain: &mut Option<Chain>) -> Kept {
    let had = chain.is_some();
    let kept = ROOM.with(|room| room.keep(chain));
    if had && chain.is_none() {
        meters::add(&metrics::NO_ROOM, &["prompt"], 1);
    }
    kept
}
