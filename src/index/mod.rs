//! Which prefix blocks each replica probably holds, from what was sent there.
//!
//! One shadow per replica imitates the engine's own cache: blocks form a tree, a request
//! refreshes the whole path from the root, and when the engine's capacity is reached the block
//! that was used least recently and has no child goes first (engines free the tail of a sequence
//! first, so a block never outlives its parent's claim). Because a shadow is closed under
//! "parent of", the longest held prefix is found by binary search.
//!
//! It does not know what an engine reports or what other gateways send, and keeps no clock: uses
//! are ordered by the calls themselves.

mod shadow;
mod transfer;

pub use transfer::Settling;

#[cfg(test)]
mod naive;

use crate::replicas::ReplicaId;
use crate::tokens::blocks::BlockHash;
use hashbrown::HashMap;
use shadow::Shadow;
use std::hash::{BuildHasher, Hasher};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The shadows of all replicas.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    shadows: HashMap<ReplicaId, Shadow>,
    seeded: Seeded,
}

/// Blocks of one replica that follow one another and were last used together: how an index is
/// handed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Who holds them.
    pub replica: ReplicaId,
    /// When, in that replica's count of uses.
    pub used: u64,
    /// What they follow; `None`: the root.
    pub parent: Option<BlockHash>,
    /// They.
    pub blocks: Vec<BlockHash>,
}

/// How far an index has been handed on.
#[derive(Debug, Clone)]
pub struct Cursor {
    replicas: Vec<ReplicaId>,
    node: usize,
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

/// What [`PrefixIndex::record`] did with the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// The replica now holds them.
    Held,
    /// Their parent is not held there (any more), so they cannot be reached: ignored.
    Orphaned,
}

impl PrefixIndex {
    /// An index that knows nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// An index that knows nothing, with a seed that no client can know.
    pub fn with_seed(seed: u64) -> Self {
        Self { seeded: Seeded(seed), ..Self::default() }
    }

    /// How many blocks of this chain, counted from the root without a gap, the replica holds.
    pub fn overlap_blocks(&self, replica: ReplicaId, chain: &[BlockHash]) -> usize {
        self.shadows.get(&replica).map_or(0, |shadow| shadow.overlap_blocks(chain))
    }

    /// Notes that the replica has computed `blocks`, which follow `parent` (`None`: the root),
    /// and that it has used everything from the root to there.
    pub fn record(
        &mut self,
        replica: ReplicaId,
        capacity_blocks: usize,
        parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) -> Recorded {
        let shadow = self.shadow(replica);
        shadow.set_capacity(capacity_blocks);
        shadow.record(parent, blocks)
    }

    /// Takes back what was recorded of a request that the replica did not compute after all. A
    /// block that others have built on since stays, with everything in front of it.
    pub fn forget(&mut self, replica: ReplicaId, blocks: &[BlockHash]) {
        if let Some(shadow) = self.shadows.get_mut(&replica) {
            shadow.forget(blocks);
        }
    }

    /// Bounds a replica's shadow by the engine's real capacity. What is over it goes with the next records and
    /// [`Self::shrink`].
    pub fn set_capacity(&mut self, replica: ReplicaId, capacity_blocks: usize) {
        if let Some(shadow) = self.shadows.get_mut(&replica) {
            shadow.set_capacity(capacity_blocks);
        }
    }

    /// Evicts what is over capacities that have shrunk, at most so many blocks.
    pub fn shrink(&mut self, mut most: usize) {
        for shadow in self.shadows.values_mut() {
            if most == 0 {
                return;
            }
            most -= shadow.evict(most);
        }
    }

    /// Drops every shadow for which `keep` is false, for instance after a restart.
    pub fn retain(&mut self, mut keep: impl FnMut(ReplicaId) -> bool) {
        self.shadows.retain(|replica, _| keep(*replica));
    }

    fn shadow(&mut self, replica: ReplicaId) -> &mut Shadow {
        self.shadows.entry(replica).or_insert_with(|| Shadow::new(self.seeded))
    }

    /// Where handing on this index begins.
    pub fn cursor(&self) -> Cursor {
        let mut replicas: Vec<ReplicaId> = self.replicas().collect();
        replicas.sort_unstable();
        Cursor { replicas, node: 0 }
    }

    /// The next run. The index may change meanwhile: a block that is there from the first call to
    /// the last comes once, others may be missed or come without what they follow.
    pub fn export(&self, cursor: &mut Cursor) -> Option<Run> {
        while let Some(replica) = cursor.replicas.last().copied() {
            let shadow = self.shadows.get(&replica);
            if let Some(run) = shadow.and_then(|shadow| shadow.export(replica, &mut cursor.node)) {
                return Some(run);
            }
            cursor.replicas.pop();
            cursor.node = 0;
        }
        None
    }

    /// Takes in a run. Nothing else may be done with its replica before [`Self::settle`].
    pub fn import(&mut self, run: &Run) {
        self.shadow(run.replica).import(run);
    }

    /// Goes on making what was taken in of a replica usable, without what cannot be reached. Whether all of it is.
    pub fn settle(&mut self, replica: ReplicaId, settling: &mut Settling) -> bool {
        self.shadows.get_mut(&replica).is_none_or(|shadow| shadow.settle(settling))
    }

    /// Whose blocks are known.
    pub fn replicas(&self) -> impl Iterator<Item = ReplicaId> {
        self.shadows.keys().copied()
    }

    /// Blocks that were ever recorded for the replica here, evicted ones included.
    pub fn recorded_blocks(&self, replica: ReplicaId) -> u64 {
        self.shadows.get(&replica).map_or(0, |shadow| shadow.recorded)
    }

    /// Blocks for which the replica has room beside those it is believed to hold; `None` while nothing was recorded of it.
    pub fn free_blocks(&self, replica: ReplicaId) -> Option<usize> {
        self.shadows.get(&replica).map(Shadow::room)
    }

    /// Blocks that the replica is believed to hold.
    pub fn held_blocks(&self, replica: ReplicaId) -> usize {
        self.shadows.get(&replica).map_or(0, Shadow::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPLICA: ReplicaId = ReplicaId { slot: 0, incarnation: 1 };

    fn hashes(values: &[u64]) -> Vec<BlockHash> {
        values.iter().copied().map(BlockHash).collect()
    }

    #[track_caller]
    fn check_overlap(index: &PrefixIndex, chain: &[u64], expected: usize) {
        assert_eq!(index.overlap_blocks(REPLICA, &hashes(chain)), expected, "{chain:?}");
    }

    #[test]
    fn overlap_counts_from_the_root_to_the_first_block_not_held() {
        let mut index = PrefixIndex::new();
        index.record(REPLICA, 10, None, &hashes(&[1, 2, 3]));
        check_overlap(&index, &[1, 2, 3, 4], 3);
        check_overlap(&index, &[1, 2, 9, 3], 2);
        check_overlap(&index, &[9, 8], 0);
        check_overlap(&index, &[], 0);
    }

    #[test]
    fn blocks_without_a_held_parent_are_not_reachable_and_not_kept() {
        let mut index = PrefixIndex::new();
        let recorded = index.record(REPLICA, 10, Some(BlockHash(7)), &hashes(&[8]));
        assert_eq!(recorded, Recorded::Orphaned);
        assert_eq!(index.held_blocks(REPLICA), 0);
    }

    #[test]
    fn the_tail_of_the_least_recently_used_sequence_goes_first() {
        let mut index = PrefixIndex::new();
        index.record(REPLICA, 5, None, &hashes(&[1, 2, 3]));
        index.record(REPLICA, 5, Some(BlockHash(1)), &hashes(&[4, 5]));
        index.record(REPLICA, 5, Some(BlockHash(5)), &hashes(&[6]));
        check_overlap(&index, &[1, 2, 3], 2);
        check_overlap(&index, &[1, 4, 5, 6], 4);
    }

    #[test]
    fn what_was_not_computed_is_taken_back_up_to_what_others_built_on() {
        let mut index = PrefixIndex::new();
        index.record(REPLICA, 10, None, &hashes(&[1, 2, 3, 4]));
        index.record(REPLICA, 10, Some(BlockHash(2)), &hashes(&[5]));
        index.forget(REPLICA, &hashes(&[1, 2, 3, 4]));
        check_overlap(&index, &[1, 2, 3, 4], 2);
        check_overlap(&index, &[1, 2, 5], 3);
        index.forget(REPLICA, &hashes(&[9]));
        assert_eq!(index.held_blocks(REPLICA), 3);
    }

    #[test]
    fn a_smaller_capacity_takes_effect_in_steps() {
        let mut index = PrefixIndex::new();
        let other = ReplicaId { slot: 9, ..REPLICA };
        for replica in [REPLICA, other] {
            index.record(replica, 10, None, &hashes(&[1, 2, 3, 4]));
            index.set_capacity(replica, 2);
        }
        for left in [8, 5, 4, 4] {
            assert_eq!(index.held_blocks(REPLICA) + index.held_blocks(other), left);
            index.shrink(3);
        }
        check_overlap(&index, &[1, 2, 3, 4], 2);
    }

    fn settle(index: &mut PrefixIndex) {
        let mut settling = Settling::default();
        while !index.settle(REPLICA, &mut settling) {}
    }

    /// Hands an index on, with `between` done to it after each run.
    fn handed_on(
        index: &mut PrefixIndex,
        mut between: impl FnMut(&mut PrefixIndex),
    ) -> PrefixIndex {
        let (mut copy, mut cursor) = (PrefixIndex::with_seed(5), index.cursor());
        while let Some(run) = index.export(&mut cursor) {
            copy.import(&run);
            between(index);
        }
        settle(&mut copy);
        copy
    }

    #[test]
    fn an_index_is_handed_on_with_its_order_of_use() {
        let mut index = PrefixIndex::new();
        index.record(REPLICA, 5, None, &hashes(&[1, 2, 3]));
        index.record(REPLICA, 5, Some(BlockHash(1)), &hashes(&[4, 5]));
        let mut copy = handed_on(&mut index, |_| {});
        for index in [&mut index, &mut copy] {
            assert_eq!(index.held_blocks(REPLICA), 5);
            index.record(REPLICA, 5, Some(BlockHash(5)), &hashes(&[6]));
            check_overlap(index, &[1, 2, 3], 2);
            check_overlap(index, &[1, 4, 5, 6], 4);
        }
    }

    #[test]
    fn what_lost_its_parent_on_the_way_is_dropped() {
        let mut index = PrefixIndex::new();
        index.record(REPLICA, 5, None, &hashes(&[1]));
        index.record(REPLICA, 5, None, &hashes(&[2, 3]));
        let mut copy = PrefixIndex::new();
        let run = |used, parent, blocks: &[u64]| Run {
            replica: REPLICA,
            used,
            parent,
            blocks: hashes(blocks),
        };
        copy.import(&run(4, Some(BlockHash(8)), &[9, 10]));
        copy.import(&run(2, Some(BlockHash(1)), &[2, 3]));
        copy.import(&run(1, None, &[1]));
        // Nobody writes this: a circle must end all the same.
        copy.import(&run(1, Some(BlockHash(21)), &[20, 21]));
        settle(&mut copy);
        assert_eq!(copy.held_blocks(REPLICA), 3);
        check_overlap(&copy, &[1, 2, 3], 3);
        check_overlap(&copy, &[9, 10], 0);
        copy.record(REPLICA, 3, Some(BlockHash(1)), &hashes(&[7]));
        check_overlap(&copy, &[1, 7], 2);
        check_overlap(&copy, &[1, 2, 3], 2);
    }

    #[test]
    fn a_count_of_uses_beyond_reason_does_not_begin_again() {
        let mut index = PrefixIndex::new();
        let run = Run { replica: REPLICA, used: u64::MAX, parent: None, blocks: hashes(&[1]) };
        index.import(&run);
        settle(&mut index);
        index.record(REPLICA, 2, None, &hashes(&[2]));
        index.record(REPLICA, 2, None, &hashes(&[3]));
        check_overlap(&index, &[1], 0);
        check_overlap(&index, &[3], 1);
    }

    #[test]
    fn what_stays_while_an_index_is_handed_on_arrives() {
        let mut index = PrefixIndex::new();
        index.record(REPLICA, 5, None, &hashes(&[1, 2]));
        index.record(REPLICA, 5, Some(BlockHash(1)), &hashes(&[3]));
        let mut fresh = 100;
        let copy = handed_on(&mut index, |index| {
            fresh += 1;
            index.record(REPLICA, 5, Some(BlockHash(2)), &hashes(&[fresh]));
            index.forget(REPLICA, &hashes(&[fresh]));
        });
        check_overlap(&copy, &[1, 2], 2);
        check_overlap(&copy, &[1, 3], 2);
    }

    /// Block hashes that all fall into the first of 65,536 buckets, as far as a client that does
    /// not know the seed can tell.
    #[test]
    fn a_client_that_knows_the_hash_but_not_the_seed_cannot_fill_one_bucket() {
        let bucket = |seeded: Seeded, hash: u64| seeded.hash_one(BlockHash(hash)) % 65_536;
        let chosen = (0..).filter(|hash| bucket(Seeded(0), *hash) == 0);
        let chosen: Vec<u64> = chosen.take(64).collect();
        let mut hit: Vec<u64> = chosen.iter().map(|hash| bucket(Seeded(77), *hash)).collect();
        hit.sort_unstable();
        hit.dedup();
        assert!(hit.len() >= 60, "{} buckets", hit.len());
    }

    #[test]
    fn a_new_incarnation_starts_empty_and_the_old_one_can_be_dropped() {
        let mut index = PrefixIndex::new();
        let restarted = ReplicaId { slot: 0, incarnation: 2 };
        index.record(REPLICA, 10, None, &hashes(&[1]));
        assert_eq!(index.overlap_blocks(restarted, &hashes(&[1])), 0);
        index.retain(|replica| replica == restarted);
        check_overlap(&index, &[1], 0);
    }
}
