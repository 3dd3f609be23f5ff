//! Handing an index on, run by run, in the order of its memory: no sorting and no pause, however large it is.
//!
//! What arrives is put aside, since a run may come before what it follows, and is put into the tree from the root on when
//! all is there. It knows neither who wants the index nor what it goes through: that is [`crate::share`]'s part.

use super::slab::NONE;
use super::tree::{Hold, NOBODY, Place, Slot, Tree};
use super::{Cursor, LAST_USE, Run};
use crate::tokens::blocks::BlockHash;
use hashbrown::HashMap;

/// Blocks of one run at most: a step of handing on is some microseconds.
const RUN_BLOCKS: u32 = 1024;

/// Blocks put into the tree in one step of settling, and runs looked at: a millisecond or two.
const SETTLED_AT_ONCE: usize = 32 << 10;
const RUN_COST: usize = 16;

impl Tree {
    /// The next run; moves the cursor behind it.
    pub(super) fn export(&mut self, cursor: &mut Cursor) -> Option<Run> {
        while (cursor.hold as usize) < self.holds.len() {
            if let Some(run) = self.export_hold(cursor.hold, &mut cursor.at) {
                return Some(run);
            }
            cursor.hold += 1;
            cursor.at = 0;
        }
        while let Some(last) = self.late.as_mut().and_then(|late| late.last().copied()) {
            if let Some(run) = self.export_hold(last, &mut cursor.at) {
                return Some(run);
            }
            self.late.as_mut()?.pop();
            cursor.at = 0;
        }
        self.late = None;
        None
    }

    /// The next run of one hold, from a place in its chain on. A hold may have been split since the last one, and then the
    /// blocks in front of it are among the late ones.
    fn export_hold(&self, id: u32, at: &mut u32) -> Option<Run> {
        let hold: &Hold = self.holds.get(id).filter(|hold| hold.slot != NOBODY)?;
        let segment = self.segments.get(hold.segment)?;
        let from = at.saturating_sub(segment.start);
        if from >= hold.held {
            return None;
        }
        let to = hold.held.min(from.saturating_add(RUN_BLOCKS));
        let parent = match from.checked_sub(1) {
            Some(last) => segment.block(last),
            None => self.segments.get(segment.parent).and_then(|p| p.block(p.len() - 1)),
        };
        *at = segment.start + to;
        let blocks = (from..to).filter_map(|at| segment.block(at)).collect();
        Some(Run { replica: self.shadow(hold.slot)?.id, used: hold.used(), parent, blocks })
    }
}

/// How far what arrived of a replica is settled.
#[derive(Debug, Default)]
pub struct Settling {
    /// By what they follow.
    runs: HashMap<Option<BlockHash>, Vec<Run>>,
    /// Blocks that were reached and that runs follow.
    reached: Vec<(Spot, Option<BlockHash>)>,
    begun: bool,
    last_use: u64,
}

/// A place by its segment at some time and the blocks in front of it from the root on: still right when the segment has
/// been split.
#[derive(Debug, Clone, Copy)]
struct Spot {
    segment: u32,
    depth: u32,
}

impl Spot {
    fn of(tree: &Tree, place: Place) -> Self {
        let start = tree.segments.get(place.segment).map_or(0, |segment| segment.start);
        Self { segment: place.segment, depth: start + place.blocks }
    }

    fn place(self, tree: &Tree) -> Place {
        let mut at = self.segment;
        while let Some(segment) = tree.segments.get(at) {
            match self.depth.checked_sub(segment.start) {
                None | Some(0) => at = segment.parent,
                Some(blocks) => return Place { segment: at, blocks },
            }
        }
        Place::ROOT
    }
}

impl Settling {
    /// Goes on for one step. Whether all is done.
    pub(super) fn go_on(&mut self, tree: &mut Tree, slot: Slot, arrived: &mut Vec<Run>) -> bool {
        let mut left = SETTLED_AT_ONCE;
        while let Some(run) = arrived.pop() {
            self.runs.entry(run.parent).or_default().push(run);
            left = left.saturating_sub(RUN_COST);
            if left == 0 {
                return false;
            }
        }
        if !self.begun {
            self.begun = true;
            self.reached.push((Spot { segment: NONE, depth: 0 }, None));
        }
        while let Some((spot, last)) = self.reached.last().copied() {
            let Some(run) = self.runs.get_mut(&last).and_then(Vec::pop) else {
                self.reached.pop();
                continue;
            };
            self.settle(tree, slot, spot, &run);
            left = left.saturating_sub(run.blocks.len() + RUN_COST);
            if left == 0 {
                return false;
            }
        }
        tree.sort(slot);
        true
    }

    /// The last use of all that was put into the tree.
    pub(super) fn last_use(&self) -> u64 {
        self.last_use
    }

    fn settle(&mut self, tree: &mut Tree, slot: Slot, spot: Spot, run: &Run) {
        let used = run.used.min(LAST_USE);
        self.last_use = self.last_use.max(used);
        let end = tree.insert(slot, spot.place(tree), &run.blocks, used);
        let end = tree.used_to(slot, end, used);
        let Spot { segment, depth } = Spot::of(tree, end);
        for (depth, block) in (spot.depth + 1..=depth).zip(&run.blocks) {
            if self.runs.contains_key(&Some(*block)) {
                self.reached.push((Spot { segment, depth }, Some(*block)));
            }
        }
    }
}
