//! Which prefix blocks each replica probably holds, from what was sent there.
//!
//! One tree of blocks for all replicas, kept in segments that nobody branches off within; on each, who holds how much of
//! it. A chain is walked once, segment by segment, whoever holds it: what a look-up costs goes by the branches that it
//! passes and not by its blocks or by the replicas.
//!
//! Each replica's part imitates the engine's own cache: a request refreshes the whole path from the root, and when the
//! engine's capacity is reached the block that was used least recently and has no child goes first (engines free the tail
//! of a sequence first, so a block never outlives its parent's claim). So what a replica holds is closed under "parent of",
//! always: that is why the deepest segment says how far it holds a chain, and why halving finds the first difference.
//!
//! What replicas say of their caches themselves is in the same tree, under identities of its own: see `observed`.
//!
//! It keeps no clock: uses are ordered by the calls, and numbered by the time that [`PrefixIndex::advance`] was told.

mod ends;
mod observed;
mod places;
mod shadow;
mod slab;
mod transfer;
mod tree;

pub use observed::{CONFIRM_WITHIN, Hearing, Room, Sighting};
pub use shadow::Evicted;
pub use transfer::Settling;

#[cfg(test)]
mod naive;

use crate::replicas::{ByReplica, MAX_REPLICAS, Moment, ReplicaId, of_replica};
use crate::tokens::blocks::BlockHash;
use hashbrown::{HashMap, HashSet};
use shadow::Shadow;
use std::hash::{BuildHasher, Hasher};
use tree::{Place, STRIDE, Slot, Tree};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Blocks evicted with one record beyond as many as it brings, where a capacity has shrunk: some milliseconds at most.
const EVICTED_AT_ONCE: usize = 4 << 10;

/// Nothing was used later, in microseconds: a count that says so is wrong, and what is used from now on must come behind
/// it. A hold has room for twice as many.
const LAST_USE: u64 = 1 << 47;

/// What all replicas hold.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    tree: Tree,
    slots: ByReplica<Slot>,
    /// Slots of replicas that were dropped: first those that still hold something.
    leaving: Vec<Slot>,
    vacant: Vec<Slot>,
    arrived: HashMap<ReplicaId, Vec<Run>>,
    /// The last use, in microseconds of the clock where it was not used twice within one.
    used: u64,
    /// Replicas that say themselves what they hold.
    reporting: HashSet<ReplicaId>,
    /// Whether any ever said anything.
    hears_reports: bool,
    /// Reported blocks that were left out.
    cut: u64,
}

/// Blocks of one replica that follow one another and were last used together: how an index is
/// handed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Who holds them.
    pub replica: ReplicaId,
    /// When, in the index's count of uses.
    pub used: u64,
    /// What they follow; `None`: the root.
    pub parent: Option<BlockHash>,
    /// They.
    pub blocks: Vec<BlockHash>,
}

/// How far an index has been handed on.
#[derive(Debug, Clone, Default)]
pub struct Cursor {
    hold: u32,
    /// Blocks from the root on, within that.
    at: u32,
}

/// A part of a chain that an index finds its way to: behind the root, or a block that it knows by its hash alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch<'a> {
    /// That block.
    pub parent: Option<BlockHash>,
    /// What follows.
    pub blocks: &'a [BlockHash],
    /// How many of these are there only because the index knows no block nearer to those that are meant.
    pub known: usize,
}

impl<'a> Stretch<'a> {
    /// What is behind the first `from` blocks of a chain.
    pub fn of(chain: &'a [BlockHash], from: usize) -> Self {
        let from = from.min(chain.len());
        let start = from / STRIDE * STRIDE;
        let (front, blocks) = chain.split_at_checked(start).unwrap_or((&[], chain));
        Self { parent: front.last().copied(), blocks, known: from - start }
    }
}

/// How far each replica holds a chain.
#[derive(Debug, Clone)]
pub struct Overlaps<'a> {
    index: &'a PrefixIndex,
    blocks: Vec<u32>,
}

impl Overlaps<'_> {
    /// What is to be expected of this replica.
    #[inline]
    pub fn outlook(&self, replica: ReplicaId) -> Outlook {
        let index = self.index;
        let routed = of_replica(&index.slots, replica).copied();
        let reported = index.observed_slot(replica);
        let by = |slot: Option<Slot>| slot.map_or(0, |slot| self.by(slot));
        let blocks = by(routed).max(by(reported));
        let at_hand = index.at_hand_slot(replica);
        Outlook {
            blocks,
            at_hand: at_hand.map_or(blocks, |slot| self.by(slot).max(by(routed))),
            observed: index.is_reporting(replica).then(|| by(reported)),
        }
    }

    #[inline]
    fn by(&self, slot: Slot) -> usize {
        self.blocks.get(usize::from(slot)).map_or(0, |blocks| *blocks as usize)
    }
}

/// What is to be expected of one replica for a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outlook {
    /// Blocks of the chain, counted from the root without a gap, that it holds.
    pub blocks: usize,
    /// What of these it need not fetch from a slower tier, as far as it says.
    pub at_hand: usize,
    /// What of these it has reported itself; `None` where it does not report.
    pub observed: Option<usize>,
}

/// Hashes block hashes by a seed.
///
/// A block's hash is a public function of a client's tokens. Were the map's a public function of
/// that, a client could search for prompts whose blocks all fall into one bucket, and each look
/// at the map would walk through them.
#[derive(Debug, Clone, Copy, Default)]
struct Seeded(u64);

impl BuildHasher for Seeded {
    type Hasher = SeededHasher;

    fn build_hasher(&self) -> SeededHasher {
        SeededHasher(self.0)
    }
}

struct SeededHasher(u64);

impl Hasher for SeededHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// What [`PrefixIndex::record_behind`] did with the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// The replica now holds them.
    Held,
    /// What they follow is not held there (any more), so they cannot be reached: ignored.
    Orphaned,
}

impl PrefixIndex {
    /// An index that knows nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// An index that knows nothing, with a seed that no client can know.
    pub fn with_seed(seed: u64) -> Self {
        Self { tree: Tree::new(Seeded(seed)), ..Self::default() }
    }

    /// Tells the time, so that what is used from now on is known to be used now.
    pub fn advance(&mut self, now: Moment) {
        self.used = self.used.max((now.0 / 1000).min(LAST_USE));
    }

    /// How far each replica holds this chain.
    pub fn overlaps(&self, chain: &[BlockHash]) -> Overlaps<'_> {
        let mut blocks = vec![0; self.tree.shadows.len()];
        let mut found = 0;
        // A replica's deepest hold says all.
        for place in self.tree.path(chain).iter().rev() {
            let Some(segment) = self.tree.segments.get(place.segment) else { continue };
            // Whoever was found deeper is among those who hold this.
            let mut new = segment.holders.saturating_sub(found);
            found += new;
            let mut holds = self.tree.holds_of(place.segment);
            while new > 0
                && let Some((_, hold)) = holds.next()
            {
                if let Some(blocks @ 0) = blocks.get_mut(usize::from(hold.slot)) {
                    *blocks = segment.start + hold.held.min(place.blocks);
                    new -= 1;
                }
            }
        }
        Overlaps { index: self, blocks }
    }

    /// How many blocks of this chain, counted from the root without a gap, the replica holds.
    pub fn overlap_blocks(&self, replica: ReplicaId, chain: &[BlockHash]) -> usize {
        self.slots_of(replica).map(|slot| self.reached(slot, chain).0).max().unwrap_or(0)
    }

    /// How far a replica holds a chain, and the deepest place of that.
    fn reached(&self, slot: Slot, chain: &[BlockHash]) -> (usize, Place) {
        for place in self.tree.path(chain).iter().rev() {
            let hold = self.tree.hold_of(place.segment, slot);
            if let Some(hold) = hold.and_then(|hold| self.tree.holds.get(hold)) {
                let blocks = hold.held.min(place.blocks);
                let start = self.tree.segments.get(place.segment).map_or(0, |s| s.start);
                return ((start + blocks) as usize, Place { blocks, ..*place });
            }
        }
        (0, Place::ROOT)
    }

    /// Notes that the replica has computed, or used, all of this chain.
    pub fn record(&mut self, replica: ReplicaId, capacity_blocks: usize, chain: &[BlockHash]) {
        let stretch = Stretch::of(chain, 0);
        self.record_behind(replica, capacity_blocks, stretch.parent, stretch.blocks);
    }

    /// Notes that the replica has computed, or used, `blocks` and everything from the root to there. They follow a
    /// [`Stretch`]'s `parent`.
    pub fn record_behind(
        &mut self,
        replica: ReplicaId,
        capacity_blocks: usize,
        parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) -> Recorded {
        let slot = self.slot(replica);
        if let Some(shadow) = self.tree.shadow_mut(slot) {
            shadow.capacity = capacity_blocks;
        }
        let laid = |index: &mut Self| index.lay_to(replica, slot, parent?);
        let Some(place) = self.held_place(slot, parent).or_else(|| laid(self)) else {
            return Recorded::Orphaned;
        };
        let in_front = self.depth(place);
        // Beyond the capacity nothing of this chain can stay, whatever else is evicted.
        let room = capacity_blocks.saturating_sub(in_front).min(blocks.len());
        self.used += 1;
        let end = self.tree.insert(slot, place, blocks.get(..room).unwrap_or(blocks), self.used);
        self.tree.used_to(slot, end, self.used);
        self.tree.evict(slot, blocks.len() + EVICTED_AT_ONCE);
        self.clear_away(EVICTED_AT_ONCE);
        Recorded::Held
    }

    fn held_place(&self, slot: Slot, parent: Option<BlockHash>) -> Option<Place> {
        let Some(parent) = parent else { return Some(Place::ROOT) };
        let place = self.tree.place_of(parent)?;
        let hold = self.tree.hold_of(place.segment, slot)?;
        self.tree.holds.get(hold).filter(|hold| hold.held >= place.blocks).map(|_| place)
    }

    fn depth(&self, place: Place) -> usize {
        let start = self.tree.segments.get(place.segment).map_or(0, |segment| segment.start);
        (start + place.blocks) as usize
    }

    /// Takes back what was recorded of a request that the replica did not compute after all: a stretch's blocks but for
    /// the known ones. A block that others have built on since stays, with everything in front of it.
    pub fn forget(&mut self, replica: ReplicaId, stretch: Stretch<'_>) {
        let Some((slot, mut place)) = self.follow(replica, stretch) else { return };
        let known = stretch.parent.and_then(|parent| self.tree.place_of(parent));
        let kept = known.map_or(0, |known| self.depth(known)) + stretch.known;
        while self.depth(place) > kept {
            let Some(at) = self.tree.hold_of(place.segment, slot) else { return };
            let Some(segment) = self.tree.segments.get(place.segment) else { return };
            let (start, parent) = (segment.start as usize, segment.parent);
            let hold = self.tree.holds.get(at);
            if hold.is_none_or(|hold| hold.children > 0 || hold.held > place.blocks) {
                return;
            }
            let blocks = self.tree.segments.get(parent).map_or(0, tree::Segment::len);
            self.tree.cut(at, u32::try_from(kept.saturating_sub(start)).unwrap_or(u32::MAX));
            if kept > start {
                return;
            }
            place = Place { segment: parent, blocks };
        }
    }

    /// Forgets a stretch's last block, which the replica has proved not to hold, with everything behind it, whichever
    /// chain it is of.
    pub fn lose(&mut self, replica: ReplicaId, stretch: Stretch<'_>) {
        let Some((slot, place)) = self.follow(replica, stretch) else { return };
        let parent = stretch.parent.and_then(|parent| self.tree.place_of(parent));
        let whole = parent.map_or(0, |parent| self.depth(parent)) + stretch.blocks.len();
        if self.depth(place) == whole && !stretch.blocks.is_empty() {
            self.tree.lose_behind(slot, place.segment, place.blocks - 1);
        }
    }

    /// Forgets of a chain what is behind the first `held_blocks`, with everything else behind the next block.
    pub fn forget_beyond(&mut self, replica: ReplicaId, chain: &[BlockHash], held_blocks: usize) {
        if let Some(chain) = chain.get(..=held_blocks) {
            self.lose(replica, Stretch::of(chain, held_blocks));
        }
    }

    /// How far the replica holds a stretch.
    fn follow(&self, replica: ReplicaId, stretch: Stretch<'_>) -> Option<(Slot, Place)> {
        let slot = *self.slots.get(&replica)?;
        let place = self.held_place(slot, stretch.parent)?;
        Some((slot, self.tree.follow(slot, place, stretch.blocks)))
    }

    /// What the replica would evict for so many new blocks: an estimate that looks at a few branches only.
    pub fn would_evict(&self, replica: ReplicaId, new_blocks: usize) -> Evicted {
        let slot = self.room_slot(replica);
        slot.map_or(Evicted::default(), |slot| self.tree.would_evict(slot, new_blocks))
    }

    /// Bounds a replica's shadow by the engine's real capacity. What is over it goes with the next records and
    /// [`Self::shrink`].
    ///
    /// Of what a replica reports this is no bound: see [`Self::set_room`].
    pub fn set_capacity(&mut self, replica: ReplicaId, capacity_blocks: usize) {
        let slot = self.slots.get(&replica).copied();
        if let Some(shadow) = slot.and_then(|slot| self.tree.shadow_mut(slot)) {
            shadow.capacity = capacity_blocks;
        }
    }

    /// Evicts what is over capacities that have shrunk, and what dropped replicas held, at most so many blocks (and the
    /// rest of a branch).
    pub fn shrink(&mut self, most: usize) {
        let mut left = self.expire(most);
        for (id, slot) in &self.slots {
            if left == 0 {
                return;
            }
            let gone = self.tree.evict(*slot, left);
            left = left.saturating_sub(gone);
            let is_counted = id.is_observed() && !id.is_at_hand();
            self.cut += if is_counted { gone as u64 } else { 0 };
        }
        self.clear_away(left);
    }

    fn clear_away(&mut self, most: usize) {
        let mut left = most;
        while left > 0
            && let Some(slot) = self.leaving.last().copied()
        {
            left = left.saturating_sub(self.tree.evict(slot, left));
            if self.tree.shadow(slot).is_none_or(|shadow| shadow.held == 0) {
                self.leaving.pop();
                self.vacant.push(slot);
            }
        }
    }

    /// Drops every shadow for which `keep` is false, for instance after a restart: nothing is held there from now on,
    /// while its memory is given back with the next records and [`Self::shrink`].
    pub fn retain(&mut self, mut keep: impl FnMut(ReplicaId) -> bool) {
        let gone: Vec<ReplicaId> =
            self.slots.keys().copied().filter(|replica| !keep(*replica)).collect();
        for replica in gone {
            self.leave(replica);
        }
        self.reporting.retain(|replica| keep(*replica));
        self.arrived.retain(|replica, _| self.slots.contains_key(replica));
    }

    fn slot(&mut self, replica: ReplicaId) -> Slot {
        if let Some(slot) = self.slots.get(&replica) {
            return *slot;
        }
        let new = Shadow::new(replica);
        self.hears_reports |= new.is_observed;
        let vacant = self.vacant.pop();
        let slot = match vacant.and_then(|slot| Some((slot, self.tree.shadow_mut(slot)?))) {
            Some((slot, shadow)) => {
                *shadow = new;
                slot
            }
            None => {
                self.tree.shadows.push(new);
                // Far more than a table has replicas; the last one is nobody's.
                Slot::try_from(self.tree.shadows.len() - 1).unwrap_or(Slot::MAX)
            }
        };
        self.slots.insert(replica, slot);
        slot
    }

    /// Where handing on this index begins.
    pub fn cursor(&mut self) -> Cursor {
        self.tree.late = Some(Vec::new());
        Cursor::default()
    }

    /// Handing it on is over, whether it came to its end or not: what changes from now on need not be remembered for it.
    pub fn end_export(&mut self) {
        self.tree.late = None;
    }

    /// The next run. The index may change meanwhile: a block that is there from the first call to
    /// the last comes, others may be missed or come without what they follow.
    pub fn export(&mut self, cursor: &mut Cursor) -> Option<Run> {
        loop {
            let run = self.tree.export(cursor)?;
            if self.slots.contains_key(&run.replica) {
                return Some(run);
            }
        }
    }

    /// Takes in a run. Nothing else may be done with its replica before [`Self::settle`].
    pub fn import(&mut self, run: Run) {
        // More replicas than any table has, each under four identities, are nobody's.
        if self.slots.len() >= 4 * MAX_REPLICAS && !self.slots.contains_key(&run.replica) {
            return;
        }
        self.slot(run.replica);
        self.arrived.entry(run.replica).or_default().push(run);
    }

    /// Goes on making what was taken in of a replica usable, without what cannot be reached. Whether all of it is.
    pub fn settle(&mut self, replica: ReplicaId, settling: &mut Settling) -> bool {
        let Some(slot) = self.slots.get(&replica) else { return true };
        let mut nothing = Vec::new();
        let arrived = self.arrived.get_mut(&replica).unwrap_or(&mut nothing);
        let is_done = settling.go_on(&mut self.tree, *slot, arrived);
        if is_done {
            self.arrived.remove(&replica);
            self.used = self.used.max(settling.last_use());
        }
        is_done
    }

    /// Whose blocks are known.
    pub fn replicas(&self) -> impl Iterator<Item = ReplicaId> {
        self.slots.keys().copied()
    }

    fn shadow(&self, replica: ReplicaId) -> Option<&Shadow> {
        self.tree.shadow(*self.slots.get(&replica)?)
    }

    /// Blocks that were ever recorded for the replica here, evicted ones included.
    pub fn recorded_blocks(&self, replica: ReplicaId) -> u64 {
        self.shadow(replica).map_or(0, |shadow| shadow.recorded)
    }

    /// Whether the replica is believed to hold a quarter of what it can at least. Where it holds less, its cache would have
    /// to be four times smaller than it says for anything to be missing: what is missing then, is so for another reason.
    pub fn is_well_filled(&self, replica: ReplicaId) -> bool {
        self.shadow(replica).is_some_and(|shadow| shadow.held >= shadow.capacity / 4)
    }

    /// Blocks that the replica is believed to hold.
    pub fn held_blocks(&self, replica: ReplicaId) -> usize {
        self.shadow(replica).map_or(0, |shadow| shadow.held)
    }
}

#[cfg(test)]
pub(crate) mod observed_tests;
#[cfg(test)]
mod tests;
