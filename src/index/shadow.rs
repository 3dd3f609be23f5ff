//! One replica's shadow: how much it holds, in which order it was used, and what goes first when there is no room.
//!
//! A use touches only the hold that it ends in, in constant time, however long the prefix. What is in front inherits that
//! use when what follows is evicted, which is the only moment at which it can matter. So the order has every hold once, by
//! its own last use; one that something follows is taken out of it when it comes first, and comes back in the place of the
//! last that followed.

use super::slab::NONE;
use super::tree::{Slot, Tree};
use crate::replicas::ReplicaId;
use hashbrown::HashMap;

/// In place of a neighbour: not in the order.
pub(super) const UNLINKED: u32 = u32::MAX - 1;

/// Of a shadow's blocks each 16 may have a branch of their own. A branch takes as much as a dozen blocks, so twice as many
/// would double an index of short prompts, of which the tails are worth nothing; with half as many, chats of 500 tokens
/// would be forgotten before the engine does.
const BLOCKS_PER_HOLD: usize = 16;

/// Of what a replica reports, each 8 may: those are exact, so there is more reason to keep them. At worst they take 14 bytes
/// a block beside the block's own eight.
const BLOCKS_PER_OBSERVED_HOLD: usize = 8;

/// And so many more, for caches of a few blocks.
const MORE_HOLDS: usize = 32;

/// Holds that are looked at to say what would go.
const LOOKED_AT: usize = 8;

#[derive(Debug)]
pub(super) struct Shadow {
    pub(super) id: ReplicaId,
    pub(super) capacity: usize,
    /// What the replica itself has room for, where it reports.
    pub(super) stated: usize,
    /// Blocks.
    pub(super) held: usize,
    pub(super) holds: usize,
    pub(super) oldest: u32,
    pub(super) newest: u32,
    /// Blocks that it ever came to hold.
    pub(super) recorded: u64,
    /// Whether this is what the replica itself reports.
    pub(super) is_observed: bool,
    /// Whether its branches are found by their last blocks. It stays so for as long as there are any.
    pub(super) has_ends: bool,
}

impl Shadow {
    pub(super) fn new(id: ReplicaId) -> Self {
        let (oldest, newest) = (NONE, NONE);
        let (is_observed, has_ends) = (id.is_observed(), id.is_observed());
        Self {
            id,
            capacity: 0,
            stated: 0,
            held: 0,
            holds: 0,
            oldest,
            newest,
            recorded: 0,
            is_observed,
            has_ends,
        }
    }

    /// Blocks that it has room for.
    fn room(&self) -> usize {
        if self.is_observed { self.stated } else { self.capacity }
    }

    fn most_holds(&self) -> usize {
        match self.capacity {
            0 => 0,
            capacity if self.is_observed => capacity / BLOCKS_PER_OBSERVED_HOLD + MORE_HOLDS,
            capacity => capacity / BLOCKS_PER_HOLD + MORE_HOLDS,
        }
    }
}

/// What a replica would evict for new blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evicted {
    /// How many blocks.
    pub blocks: usize,
    /// When they were last used, on average over them: microseconds of [`super::PrefixIndex::advance`]'s clock.
    pub used: u64,
}

impl Tree {
    /// Notes a use that ended here.
    pub(super) fn touch(&mut self, at: u32, used: u64) {
        let Some(hold) = self.holds.get_mut(at) else { return };
        if used > hold.used() {
            hold.set_used(used);
        }
        let slot = hold.slot;
        self.unlink(at);
        let Some(newest) = self.shadow(slot).map(|shadow| shadow.newest) else { return };
        self.link_between(at, slot, newest, NONE);
    }

    /// Puts a hold into the order just before another of the same replica. Where that has no place, this gets none.
    pub(super) fn link_before(&mut self, at: u32, other: u32) {
        let Some(other_hold) = self.holds.get(other).copied() else { return };
        if other_hold.older != UNLINKED {
            self.link_between(at, other_hold.slot, other_hold.older, other);
        }
    }

    fn link_between(&mut self, at: u32, slot: Slot, older: u32, newer: u32) {
        self.set_newer(slot, older, at);
        self.set_older(slot, newer, at);
        if let Some(hold) = self.holds.get_mut(at) {
            (hold.older, hold.newer) = (older, newer);
        }
    }

    pub(super) fn unlink(&mut self, at: u32) {
        let Some(hold) = self.holds.get_mut(at).filter(|hold| hold.older != UNLINKED) else {
            return;
        };
        let (slot, older, newer) = (hold.slot, hold.older, hold.newer);
        (hold.older, hold.newer) = (UNLINKED, UNLINKED);
        self.set_newer(slot, older, newer);
        self.set_older(slot, newer, older);
    }

    fn set_newer(&mut self, slot: Slot, at: u32, newer: u32) {
        if let Some(hold) = self.holds.get_mut(at) {
            hold.newer = newer;
        } else if let Some(shadow) = self.shadow_mut(slot) {
            shadow.oldest = newer;
        }
    }

    fn set_older(&mut self, slot: Slot, at: u32, older: u32) {
        if let Some(hold) = self.holds.get_mut(at) {
            hold.older = older;
        } else if let Some(shadow) = self.shadow_mut(slot) {
            shadow.newest = older;
        }
    }

    /// A replica's holds in the order of their use, without those that left it.
    pub(super) fn in_order(&self, slot: Slot) -> impl Iterator<Item = u32> {
        let mut next = self.shadow(slot).map_or(NONE, |shadow| shadow.oldest);
        std::iter::from_fn(move || {
            let at = next;
            next = self.holds.get(at)?.newer;
            Some(at)
        })
    }

    /// Puts a replica's holds in the order of their use.
    pub(super) fn sort(&mut self, slot: Slot) {
        let mut all: Vec<(u64, u32)> =
            self.in_order(slot).filter_map(|at| Some((self.holds.get(at)?.used(), at))).collect();
        all.sort_unstable();
        for (used, at) in all {
            self.touch(at, used);
        }
    }

    /// Evicts what is over the capacity, at most so many blocks (and the rest of the last branch). Returns how many.
    pub(super) fn evict(&mut self, slot: Slot, most: usize) -> usize {
        let mut evicted = 0;
        while evicted < most {
            let Some(shadow) = self.shadow(slot) else { break };
            let blocks = shadow.held.saturating_sub(shadow.capacity);
            let branches = shadow.holds > shadow.most_holds();
            let oldest = shadow.oldest;
            let Some(hold) = self.holds.get(oldest).filter(|_| blocks > 0 || branches) else {
                break;
            };
            if hold.children > 0 {
                self.unlink(oldest);
                continue;
            }
            let blocks = u32::try_from(blocks.min(most - evicted)).unwrap_or(u32::MAX);
            let gone = if branches { hold.held } else { hold.held.min(blocks) };
            let to = hold.held - gone;
            self.cut(oldest, to);
            evicted += gone as usize;
        }
        evicted
    }

    /// What would go for so many new blocks: exact for the first few branches, and the rest as the last of these.
    pub(super) fn would_evict(&self, slot: Slot, new_blocks: usize) -> Evicted {
        let Some(shadow) = self.shadow(slot) else { return Evicted::default() };
        // What is held beyond the room is in a slower tier, and what goes there goes for as many new ones.
        let (held, room) = (shadow.held, shadow.room());
        let over = if shadow.is_observed { held.min(room) } else { held };
        let wanted = (over + new_blocks).saturating_sub(room).min(held);
        if wanted == 0 {
            return Evicted::default();
        }
        let (mut left, mut sum, mut last) = (wanted, 0u128, 0);
        let leaves = self.in_order(slot).filter_map(|at| self.holds.get(at));
        for hold in leaves.take(4 * LOOKED_AT).filter(|hold| hold.children == 0).take(LOOKED_AT) {
            let blocks = left.min(hold.held as usize);
            left -= blocks;
            last = hold.used();
            if blocks == wanted {
                return Evicted { blocks, used: last };
            }
            sum += u128::from(last) * blocks as u128;
            if left == 0 {
                break;
            }
        }
        sum += u128::from(last) * left as u128;
        // Wide divisions are slow, and hardly ever needed.
        let used = match u64::try_from(sum) {
            Ok(sum) => sum / wanted as u64,
            Err(_) => u64::try_from(sum / wanted as u128).unwrap_or(u64::MAX),
        };
        Evicted { blocks: wanted, used }
    }

    /// Takes from a replica what it has not used since, at most so many blocks (and the rest of the last branch). Returns
    /// how many.
    pub(super) fn expire(&mut self, slot: Slot, since: u64, most: usize) -> usize {
        let mut expired = 0;
        while expired < most {
            let oldest = self.shadow(slot).map_or(NONE, |shadow| shadow.oldest);
            let Some(hold) = self.holds.get(oldest).filter(|hold| hold.used() < since) else {
                break;
            };
            if hold.children > 0 {
                self.unlink(oldest);
                continue;
            }
            expired += hold.held as usize;
            self.cut(oldest, 0);
        }
        expired
    }

    /// Takes from a replica everything behind a place.
    pub(super) fn lose_behind(&mut self, slot: Slot, segment: u32, blocks: u32) {
        let hold = self.hold_of(segment, slot);
        let is_leaf = |at: &u32| self.holds.get(*at).is_some_and(|hold| hold.children == 0);
        match hold.filter(is_leaf) {
            Some(at) => self.cut(at, blocks),
            None => self.lose_branches(slot, segment, blocks),
        }
    }

    fn lose_branches(&mut self, slot: Slot, segment: u32, blocks: u32) {
        let mut behind: HashMap<u32, bool> = HashMap::new();
        behind.insert(segment, true);
        behind.insert(NONE, false);
        let leaves: Vec<u32> = self
            .in_order(slot)
            .filter(|at| self.holds.get(*at).is_some_and(|hold| hold.children == 0))
            .collect();
        for leaf in leaves {
            if !self.is_behind(leaf, &mut behind) {
                continue;
            }
            let mut next = Some(leaf);
            while let Some(hold) = next.and_then(|at| self.holds.get(at)) {
                let (at, id) = (next.unwrap_or(NONE), hold.segment);
                if id == segment || hold.children > 0 {
                    break;
                }
                let parent = self.segments.get(id).map_or(NONE, |segment| segment.parent);
                next = self.hold_of(parent, slot);
                self.cut(at, 0);
            }
        }
        if let Some(at) = self.hold_of(segment, slot) {
            self.cut(at, blocks);
        }
    }

    /// Whether a hold's segment is one of those that are behind, or that one itself. What lies between is found out, too.
    fn is_behind(&self, hold: u32, behind: &mut HashMap<u32, bool>) -> bool {
        let (mut path, mut at) = (Vec::new(), self.holds.get(hold).map_or(NONE, |h| h.segment));
        let answer = loop {
            if let Some(known) = behind.get(&at) {
                break *known;
            }
            path.push(at);
            at = self.segments.get(at).map_or(NONE, |segment| segment.parent);
        };
        behind.extend(path.into_iter().map(|segment| (segment, answer)));
        answer
    }
}
