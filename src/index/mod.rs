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

#[cfg(test)]
mod naive;

use crate::replicas::ReplicaId;
use crate::tokens::blocks::BlockHash;
use hashbrown::HashMap;
use shadow::Shadow;

/// The shadows of all replicas.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    shadows: HashMap<ReplicaId, Shadow>,
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
        let shadow = self.shadows.entry(replica).or_default();
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

    /// Bounds a replica's shadow by the engine's real capacity, evicting at once what is over it.
    pub fn set_capacity(&mut self, replica: ReplicaId, capacity_blocks: usize) {
        if let Some(shadow) = self.shadows.get_mut(&replica) {
            shadow.set_capacity(capacity_blocks);
        }
    }

    /// Drops every shadow for which `keep` is false, for instance after a restart.
    pub fn retain(&mut self, mut keep: impl FnMut(ReplicaId) -> bool) {
        self.shadows.retain(|replica, _| keep(*replica));
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
    fn a_smaller_capacity_takes_effect_at_once() {
        let mut index = PrefixIndex::new();
        index.record(REPLICA, 10, None, &hashes(&[1, 2, 3, 4]));
        index.set_capacity(REPLICA, 2);
        check_overlap(&index, &[1, 2, 3, 4], 2);
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
