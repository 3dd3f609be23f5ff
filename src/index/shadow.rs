//! One replica's shadow cache: a bounded tree of blocks, least recently used leaf out first.
//!
//! A use touches only the deepest block, in constant time, however long the prefix: a parent
//! inherits its youngest child's time when that child is evicted, which is the only moment at
//! which the parent's own time can matter.

use super::{Recorded, Seeded};
use crate::tokens::blocks::BlockHash;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Blocks evicted with one record beyond as many as it brings, where a capacity has shrunk: some milliseconds at most.
const EVICTED_AT_ONCE: usize = 4 << 10;

/// A position in [`Shadow::nodes`].
pub(super) type NodeIndex = u32;

/// What a place in [`Shadow::nodes`] is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tenant {
    /// Nothing.
    Nobody,
    /// A block that is held.
    Block,
    /// A block that others were said to follow, before it came itself.
    Named,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    pub(super) hash: BlockHash,
    pub(super) tenant: Tenant,
    pub(super) parent: Option<NodeIndex>,
    pub(super) children: u32,
    /// The [`Shadow::uses`] count at the last use that ended here or in an evicted descendant.
    pub(super) used: u64,
}

#[derive(Debug)]
pub(super) struct Shadow {
    capacity: usize,
    pub(super) by_hash: HashMap<BlockHash, NodeIndex, Seeded>,
    pub(super) nodes: Vec<Node>,
    free: Vec<NodeIndex>,
    /// Leaves by time of use. An entry is stale when its node is gone, has children, or has been
    /// used since; stale entries are dropped when they surface.
    leaves: BinaryHeap<Reverse<(u64, NodeIndex)>>,
    pub(super) uses: u64,
    /// Blocks that were ever inserted by records.
    pub(super) recorded: u64,
}

impl Shadow {
    pub(super) fn new(seeded: Seeded) -> Self {
        Self {
            capacity: 0,
            by_hash: HashMap::with_hasher(seeded),
            nodes: Vec::new(),
            free: Vec::new(),
            leaves: BinaryHeap::new(),
            uses: 0,
            recorded: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_hash.len()
    }

    pub(super) fn room(&self) -> usize {
        self.capacity.saturating_sub(self.by_hash.len())
    }

    pub(super) fn set_capacity(&mut self, capacity: usize) {
        self.capacity = capacity;
    }

    pub(super) fn overlap_blocks(&self, chain: &[BlockHash]) -> usize {
        chain.partition_point(|hash| self.by_hash.contains_key(hash))
    }

    pub(super) fn record(&mut self, parent: Option<BlockHash>, blocks: &[BlockHash]) -> Recorded {
        let mut last = None;
        if let Some(parent) = parent {
            match self.by_hash.get(&parent) {
                Some(index) => last = Some(*index),
                None => return Recorded::Orphaned,
            }
        }
        self.uses += 1;
        // Beyond the capacity nothing of this chain can stay, whatever else is evicted.
        for hash in blocks.iter().take(self.capacity) {
            last = Some(self.hold(*hash, last));
        }
        if let Some(index) = last {
            self.touch(index);
        }
        self.evict(blocks.len() + EVICTED_AT_ONCE);
        Recorded::Held
    }

    /// The block's node, which is new if the block is: with one look at the map, since a long prompt has thousands.
    fn hold(&mut self, hash: BlockHash, parent: Option<NodeIndex>) -> NodeIndex {
        let vacant = match self.by_hash.entry(hash) {
            Entry::Occupied(held) => return *held.get(),
            Entry::Vacant(vacant) => vacant,
        };
        if let Some(parent) = parent.and_then(|index| self.nodes.get_mut(index as usize)) {
            parent.children += 1;
        }
        self.recorded += 1;
        let node = Node { hash, tenant: Tenant::Block, parent, children: 0, used: self.uses };
        let index = place(&mut self.nodes, &mut self.free, node);
        vacant.insert(index);
        index
    }

    pub(super) fn put(&mut self, node: Node) -> NodeIndex {
        let index = place(&mut self.nodes, &mut self.free, node);
        self.by_hash.insert(node.hash, index);
        index
    }

    /// Notes a leaf that was not among them.
    pub(super) fn add_leaf(&mut self, index: NodeIndex, used: u64) {
        self.leaves.push(Reverse((used, index)));
    }

    fn touch(&mut self, index: NodeIndex) {
        let used = self.uses;
        if let Some(node) = self.node_mut(index) {
            node.used = used;
            if node.children == 0 {
                self.leaves.push(Reverse((used, index)));
            }
        }
        // Repeated use of one leaf leaves stale entries behind; rebuilding when they are the
        // majority keeps the heap within a constant factor of the tree at amortised O(1).
        if self.leaves.len() > 2 * self.by_hash.len() + 16 {
            self.rebuild_leaves();
        }
    }

    fn rebuild_leaves(&mut self) {
        self.leaves = self
            .by_hash
            .values()
            .filter_map(|&index| {
                let node = self.nodes.get(index as usize)?;
                (node.children == 0).then_some(Reverse((node.used, index)))
            })
            .collect();
    }

    /// Evicts what is over the capacity, at most so much. Returns how much that was.
    pub(super) fn evict(&mut self, most: usize) -> usize {
        let mut evicted = 0;
        while evicted < most && self.by_hash.len() > self.capacity {
            let Some(Reverse((used, index))) = self.leaves.pop() else { break };
            let Some(node) = self.nodes.get(index as usize).copied() else { continue };
            let is_gone = node.tenant == Tenant::Nobody;
            let is_stale = is_gone || node.children > 0 || node.used != used;
            if !is_stale {
                self.remove_leaf(index, node);
                evicted += 1;
            }
        }
        evicted
    }

    pub(super) fn forget(&mut self, blocks: &[BlockHash]) {
        for hash in blocks.iter().rev() {
            let Some(&index) = self.by_hash.get(hash) else { continue };
            match self.nodes.get(index as usize).copied() {
                Some(node) if node.children == 0 => self.remove_leaf(index, node),
                _ => return,
            }
        }
    }

    fn remove_leaf(&mut self, index: NodeIndex, node: Node) {
        self.vacate(index, node.hash);
        let Some(parent_index) = node.parent else { return };
        let Some(parent) = self.node_mut(parent_index) else { return };
        parent.children = parent.children.saturating_sub(1);
        parent.used = parent.used.max(node.used);
        if parent.children == 0 {
            let entry = Reverse((parent.used, parent_index));
            self.leaves.push(entry);
        }
    }

    pub(super) fn vacate(&mut self, index: NodeIndex, hash: BlockHash) {
        self.by_hash.remove(&hash);
        self.free.push(index);
        if let Some(node) = self.node_mut(index) {
            node.tenant = Tenant::Nobody;
        }
    }

    pub(super) fn node_mut(&mut self, index: NodeIndex) -> Option<&mut Node> {
        self.nodes.get_mut(index as usize)
    }
}

/// Puts a node into a free place, or a new one.
fn place(nodes: &mut Vec<Node>, free: &mut Vec<NodeIndex>, node: Node) -> NodeIndex {
    if let Some(index) = free.pop() {
        if let Some(slot) = nodes.get_mut(index as usize) {
            *slot = node;
        }
        return index;
    }
    nodes.push(node);
    // The capacity, and so the number of nodes, is far below 2^32.
    u32::try_from(nodes.len() - 1).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that the shadow has asked the allocator for, as the host's own words are sized: no
    /// fewer than in a VM.
    fn bytes(shadow: &Shadow) -> usize {
        // hashbrown keeps a byte for each bucket, and fills seven of eight.
        let buckets = shadow.by_hash.capacity().div_ceil(7) * 8;
        buckets * (size_of::<(BlockHash, NodeIndex)>() + 1)
            + shadow.nodes.capacity() * size_of::<Node>()
            + shadow.free.capacity() * size_of::<NodeIndex>()
            + shadow.leaves.capacity() * size_of::<Reverse<(u64, NodeIndex)>>()
    }

    /// Prompts that share nothing, some used twice, of a few blocks each.
    fn use_prompts(shadow: &mut Shadow, from: u64, count: u64) {
        for prompt in from..from + count {
            let blocks: Vec<BlockHash> =
                (0..1 + prompt % 4).map(|n| BlockHash((prompt << 3) + n)).collect();
            shadow.record(None, &blocks);
            if prompt % 3 == 0 {
                shadow.record(None, &blocks);
            }
            if prompt % 50 == 0 {
                shadow.forget(&blocks);
            }
        }
    }

    #[test]
    fn millions_of_prompts_take_no_more_memory_than_the_first_that_fill_it() {
        const CAPACITY: usize = 10_000;
        // Fifty times what fits, or as many as somebody cares to wait for.
        let prompts = std::env::var("WARMPATH_PROMPTS").ok();
        let prompts = prompts.map_or(200_000, |count| count.parse().expect("a number of prompts"));
        let mut shadow = Shadow::new(Seeded(7));
        shadow.set_capacity(CAPACITY);
        use_prompts(&mut shadow, 0, 20_000);
        let early = bytes(&shadow);
        use_prompts(&mut shadow, 20_000, prompts);
        // And one that is in use without a pause, so that nothing else is evicted.
        for _ in 0..100_000 {
            shadow.record(None, &[BlockHash(7)]);
        }
        assert_eq!(shadow.len(), CAPACITY);
        // One prompt goes in before others go out.
        assert!(shadow.nodes.len() <= CAPACITY + 4, "{}", shadow.nodes.len());
        assert!(shadow.leaves.len() <= 2 * CAPACITY + 17, "{}", shadow.leaves.len());
        assert!(bytes(&shadow) <= 2 * early, "{early} bytes, then {}", bytes(&shadow));
    }

    #[test]
    fn a_full_shadow_takes_the_bytes_a_block_that_its_bound_counts_on() {
        // Just beyond a power of two, where tables have just doubled.
        for capacity in [66_000, 131_000] {
            let mut shadow = Shadow::new(Seeded(7));
            shadow.set_capacity(capacity);
            use_prompts(&mut shadow, 0, capacity as u64);
            assert_eq!(shadow.len(), capacity);
            let each = bytes(&shadow) / capacity;
            assert!(each <= 120, "{each} bytes a block");
        }
    }
}
