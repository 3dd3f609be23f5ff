//! The engine's KV block pool: who holds which block, what is cached, what is evicted next.
//!
//! As in vLLM: a full block gets its key and can be hit at once; a block that nobody holds
//! keeps its contents and waits in a queue, oldest first, until the room is needed; a sequence
//! gives its blocks back tail first, so that tails are evicted before heads. The same key may
//! be stored in several blocks.
//!
//! It knows nothing of requests, steps or time.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use std::hash::Hash;

/// A physical block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u32);

/// What became of a key, as an engine's KV events tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<K> {
    /// It can be hit.
    Stored(K),
    /// It no longer can: its last copy was given up.
    Evicted(K),
    /// Nothing can.
    Cleared,
}

/// Stands for no block in a list: a pool has fewer.
const NONE: u32 = u32::MAX;

/// The pool.
#[derive(Debug, Clone)]
pub struct BlockCache<K> {
    slots: Vec<Slot<K>>,
    /// The block that is taken next, and the one that was given back last.
    oldest: u32,
    newest: u32,
    idle: usize,
    /// Blocks out of use since the pool shrank, and how many of those in use are to follow.
    retired: Vec<BlockId>,
    retiring: usize,
    /// By key, the first block that has it.
    stored: HashMap<K, u32>,
    cached: usize,
    evicted: u64,
    stores: u64,
    /// What nobody has been told yet; none while nobody listens.
    changes: Option<Vec<Change<K>>>,
    /// Of each block whose contents were given up, the key; none while nobody keeps a journal.
    lost: Option<Vec<K>>,
}

#[derive(Debug, Clone)]
struct Slot<K> {
    key: Option<K>,
    holders: u32,
    /// Neighbours in the list of blocks that nobody holds.
    older: u32,
    newer: u32,
    /// The next block with the same key.
    twin: u32,
}

impl<K> Slot<K> {
    const EMPTY: Self = Self { key: None, holders: 0, older: NONE, newer: NONE, twin: NONE };
}

impl<K: Copy + Eq + Hash> BlockCache<K> {
    /// A pool of `capacity` empty blocks.
    pub fn new(capacity: u32) -> Self {
        let mut cache = Self {
            slots: Vec::with_capacity(capacity as usize),
            oldest: NONE,
            newest: NONE,
            idle: 0,
            retired: Vec::new(),
            retiring: 0,
            stored: HashMap::new(),
            cached: 0,
            evicted: 0,
            stores: 0,
            changes: None,
            lost: None,
        };
        cache.resize(capacity as usize);
        cache
    }

    /// Makes it a pool of so many blocks. Those that are too many go as soon as nobody holds them, the longest unused
    /// first.
    pub fn resize(&mut self, capacity: usize) {
        while self.capacity() < capacity {
            if self.retiring > 0 {
                self.retiring -= 1;
            } else if let Some(id) = self.retired.pop() {
                self.give_back(id);
            } else {
                let id = BlockId(u32::try_from(self.slots.len()).unwrap_or(NONE));
                self.slots.push(Slot::EMPTY);
                self.give_back(id);
            }
        }
        while self.capacity() > capacity {
            match self.oldest() {
                Some(id) => {
                    self.unlink(id);
                    self.forget(id);
                    self.retired.push(id);
                }
                None => self.retiring += 1,
            }
        }
    }

    /// Blocks in all.
    pub fn capacity(&self) -> usize {
        self.slots.len() - self.retired.len() - self.retiring
    }

    /// Blocks that somebody holds.
    pub fn held(&self) -> usize {
        self.slots.len() - self.retired.len() - self.idle
    }

    /// Blocks that can be taken, cached contents or not.
    pub fn idle(&self) -> usize {
        self.idle
    }

    /// Blocks whose contents can be hit, held or not.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Cached blocks given up for room so far.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// How often a block's contents became known or were given up for room so far.
    pub fn churn(&self) -> u64 {
        self.stores + self.evicted
    }

    /// Changes are kept from now on. The first says that there is nothing yet, so that who listens forgets whatever an
    /// engine before this one had.
    pub fn listen(&mut self) {
        self.changes = Some(vec![Change::Cleared]);
    }

    /// The changes since the last call.
    pub fn changes(&mut self) -> Vec<Change<K>> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// What each block loses is kept from now on.
    pub fn keep_lost(&mut self) {
        self.lost = Some(Vec::new());
    }

    /// The keys of the blocks whose contents were given up since the last call, each copy's, in that order.
    pub fn lost(&mut self) -> impl Iterator<Item = K> {
        self.lost.iter_mut().flat_map(|lost| lost.drain(..))
    }

    /// The longest run of `keys`, from the first, that is cached. Changes nothing.
    pub fn find(&self, keys: &[K]) -> Vec<BlockId> {
        keys.iter().map_while(|key| self.stored.get(key).copied().map(BlockId)).collect()
    }

    /// How many of `blocks` nobody holds: claiming them shrinks [`Self::idle`] by as many.
    pub fn idle_among(&self, blocks: &[BlockId]) -> usize {
        let is_idle =
            |id: &&BlockId| self.slots.get(id.0 as usize).is_some_and(|slot| slot.holders == 0);
        blocks.iter().filter(is_idle).count()
    }

    /// Holds blocks that were found.
    pub fn claim(&mut self, blocks: &[BlockId]) {
        for id in blocks {
            let Some(slot) = self.slots.get_mut(id.0 as usize) else { continue };
            slot.holders += 1;
            if slot.holders == 1 {
                self.unlink(*id);
            }
        }
    }

    /// Takes `count` blocks, evicting what they cached, and puts them behind `blocks`. Or none, when there are too few:
    /// whether it did.
    pub fn take(&mut self, count: usize, blocks: &mut Vec<BlockId>) -> bool {
        if count > self.idle {
            return false;
        }
        for _ in 0..count {
            let Some(id) = self.oldest() else { break };
            self.unlink(id);
            if self.forget(id) {
                self.evicted += 1;
            }
            if let Some(slot) = self.slots.get_mut(id.0 as usize) {
                slot.holders = 1;
            }
            blocks.push(id);
        }
        true
    }

    /// Makes a held block's contents known under `key`.
    pub fn store(&mut self, id: BlockId, key: K) {
        let Some(slot) = self.slots.get_mut(id.0 as usize) else { return };
        if slot.key.is_some() {
            return;
        }
        slot.key = Some(key);
        self.cached += 1;
        self.stores += 1;
        let mut last = match self.stored.entry(key) {
            Entry::Occupied(first) => *first.get(),
            Entry::Vacant(entry) => {
                entry.insert(id.0);
                self.tell(Change::Stored(key));
                return;
            }
        };
        while let Some(slot) = self.slots.get_mut(last as usize) {
            if slot.twin == NONE {
                slot.twin = id.0;
                break;
            }
            last = slot.twin;
        }
    }

    /// Gives back a sequence's blocks, in the order of its tokens.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for id in blocks.iter().rev() {
            let Some(slot) = self.slots.get_mut(id.0 as usize) else { continue };
            slot.holders = slot.holders.saturating_sub(1);
            if slot.holders > 0 {
                continue;
            }
            if self.retiring > 0 {
                self.retiring -= 1;
                self.forget(*id);
                self.retired.push(*id);
            } else {
                self.give_back(*id);
            }
        }
    }

    /// Forgets all contents; refused while a block is held.
    pub fn clear(&mut self) -> bool {
        if self.held() > 0 {
            return false;
        }
        self.stored.clear();
        self.cached = 0;
        for slot in &mut self.slots {
            slot.key = None;
            slot.twin = NONE;
        }
        self.tell(Change::Cleared);
        true
    }

    fn tell(&mut self, change: Change<K>) {
        if let Some(changes) = &mut self.changes {
            changes.push(change);
        }
    }

    fn oldest(&self) -> Option<BlockId> {
        (self.oldest != NONE).then_some(BlockId(self.oldest))
    }

    /// Puts a block at the end of the list of those that nobody holds.
    fn give_back(&mut self, id: BlockId) {
        let last = std::mem::replace(&mut self.newest, id.0);
        match self.slots.get_mut(last as usize) {
            Some(slot) => slot.newer = id.0,
            None => self.oldest = id.0,
        }
        if let Some(slot) = self.slots.get_mut(id.0 as usize) {
            slot.older = last;
            slot.newer = NONE;
        }
        self.idle += 1;
    }

    /// Takes a block out of that list.
    fn unlink(&mut self, id: BlockId) {
        let Some(slot) = self.slots.get(id.0 as usize) else { return };
        let (older, newer) = (slot.older, slot.newer);
        match self.slots.get_mut(older as usize) {
            Some(slot) => slot.newer = newer,
            None => self.oldest = newer,
        }
        match self.slots.get_mut(newer as usize) {
            Some(slot) => slot.older = older,
            None => self.newest = older,
        }
        self.idle -= 1;
    }

    /// Forgets a block's contents. False when it had none.
    fn forget(&mut self, id: BlockId) -> bool {
        let Some(slot) = self.slots.get_mut(id.0 as usize) else { return false };
        let (key, twin) = (slot.key.take(), std::mem::replace(&mut slot.twin, NONE));
        let Some(key) = key else { return false };
        self.cached -= 1;
        if let Some(lost) = &mut self.lost {
            lost.push(key);
        }
        let Entry::Occupied(mut first) = self.stored.entry(key) else { return true };
        if *first.get() == id.0 {
            if twin == NONE {
                first.remove();
                self.tell(Change::Evicted(key));
            } else {
                first.insert(twin);
            }
            return true;
        }
        let mut at = *first.get();
        while let Some(slot) = self.slots.get_mut(at as usize) {
            if slot.twin == id.0 {
                slot.twin = twin;
                break;
            }
            at = slot.twin;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::chance::Chance;
    use super::super::digest::Digest;
    use super::*;

    fn digest(n: u64) -> Digest {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        Digest(bytes)
    }

    fn take(cache: &mut BlockCache<Digest>, count: usize) -> Option<Vec<BlockId>> {
        let mut blocks = Vec::new();
        cache.take(count, &mut blocks).then_some(blocks)
    }

    fn fill(cache: &mut BlockCache<Digest>, digests: std::ops::Range<u64>) -> Vec<BlockId> {
        let blocks = take(cache, digests.clone().count()).unwrap();
        for (id, n) in blocks.iter().zip(digests) {
            cache.store(*id, digest(n));
        }
        blocks
    }

    #[test]
    fn tails_are_evicted_before_heads_and_older_sequences_first() {
        let mut cache = BlockCache::new(6);
        let first = fill(&mut cache, 0..3);
        let second = fill(&mut cache, 10..13);
        cache.release(&first);
        cache.release(&second);
        let taken = take(&mut cache, 2).unwrap();
        assert_eq!(cache.find(&[digest(0), digest(1), digest(2)]), first[..1]);
        assert_eq!(cache.find(&[digest(10), digest(11), digest(12)]), second);
        cache.release(&taken);
    }

    #[test]
    fn a_hit_saves_a_block_from_eviction() {
        let mut cache = BlockCache::new(3);
        let old = fill(&mut cache, 0..1);
        cache.release(&old);
        let other = fill(&mut cache, 1..3);
        cache.release(&other);
        cache.claim(&old);
        cache.release(&old);
        take(&mut cache, 2).unwrap();
        assert_eq!(cache.find(&[digest(0)]), old);
    }

    #[test]
    fn held_blocks_are_never_taken() {
        let mut cache = BlockCache::new(4);
        let held = fill(&mut cache, 0..3);
        assert_eq!(take(&mut cache, 2), None);
        assert_eq!(take(&mut cache, 1).map(|blocks| blocks.len()), Some(1));
        assert_eq!(cache.find(&[digest(0), digest(1), digest(2)]), held);
    }

    #[test]
    fn the_second_copy_of_a_digest_survives_the_first() {
        let mut cache = BlockCache::new(3);
        let first = fill(&mut cache, 7..8);
        let second = fill(&mut cache, 7..8);
        cache.release(&first);
        assert_eq!(cache.find(&[digest(7)]), first);
        take(&mut cache, 2).unwrap();
        assert_eq!(cache.find(&[digest(7)]), second);
    }

    #[test]
    fn clearing_waits_for_running_sequences() {
        let mut cache = BlockCache::new(2);
        let held = fill(&mut cache, 0..1);
        cache.listen();
        assert!(!cache.clear());
        cache.release(&held);
        assert!(cache.clear());
        assert_eq!((cache.find(&[digest(0)]).len(), cache.cached(), cache.idle()), (0, 0, 2));
    }

    /// The blocks that nobody holds, the one that is taken next first.
    fn idle(cache: &BlockCache<Digest>) -> Vec<u32> {
        let next = |id: &u32| Some(cache.slots[*id as usize].newer).filter(|id| *id != NONE);
        std::iter::successors(Some(cache.oldest).filter(|id| *id != NONE), next).collect()
    }

    #[test]
    fn a_pool_that_shrinks_gives_up_idle_blocks_at_once_and_held_ones_when_they_are_released() {
        let mut cache = BlockCache::new(6);
        let held = fill(&mut cache, 0..4);
        let old = fill(&mut cache, 10..12);
        cache.release(&old);
        cache.resize(3);
        assert_eq!((cache.capacity(), cache.idle(), cache.held()), (3, 0, 4));
        assert_eq!(cache.find(&[digest(10)]), []);
        cache.release(&held);
        assert_eq!((cache.capacity(), cache.idle(), cache.cached()), (3, 3, 3));
        assert_eq!(cache.find(&[digest(0), digest(1), digest(2), digest(3)]), held[..3]);
        cache.resize(7);
        assert_eq!((cache.capacity(), cache.idle(), cache.cached()), (7, 7, 3));
        assert_eq!(take(&mut cache, 7).map(|blocks| blocks.len()), Some(7));
        assert_eq!(cache.evicted(), 3);
    }

    /// The obvious pool: one list of idle blocks, searched from end to end.
    struct Naive {
        digests: Vec<Option<Digest>>,
        holders: Vec<u32>,
        idle: Vec<u32>,
        stored_order: Vec<u32>,
    }

    impl Naive {
        fn new(capacity: u32) -> Self {
            Self {
                digests: vec![None; capacity as usize],
                holders: vec![0; capacity as usize],
                idle: (0..capacity).collect(),
                stored_order: Vec::new(),
            }
        }

        fn find(&self, digests: &[Digest]) -> Vec<BlockId> {
            let mut found = Vec::new();
            for digest in digests {
                let holder = self
                    .stored_order
                    .iter()
                    .find(|id| self.digests[**id as usize] == Some(*digest));
                match holder {
                    Some(id) => found.push(BlockId(*id)),
                    None => break,
                }
            }
            found
        }

        fn claim(&mut self, blocks: &[BlockId]) {
            for BlockId(id) in blocks {
                self.idle.retain(|idle| idle != id);
                self.holders[*id as usize] += 1;
            }
        }

        fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
            if count > self.idle.len() {
                return None;
            }
            let taken: Vec<u32> = self.idle.drain(..count).collect();
            for id in &taken {
                self.digests[*id as usize] = None;
                self.stored_order.retain(|stored| stored != id);
                self.holders[*id as usize] = 1;
            }
            Some(taken.into_iter().map(BlockId).collect())
        }

        fn store(&mut self, BlockId(id): BlockId, digest: Digest) {
            if self.digests[id as usize].is_none() {
                self.digests[id as usize] = Some(digest);
                self.stored_order.push(id);
            }
        }

        fn release(&mut self, blocks: &[BlockId]) {
            for BlockId(id) in blocks.iter().rev() {
                self.holders[*id as usize] -= 1;
                if self.holders[*id as usize] == 0 {
                    self.idle.push(*id);
                }
            }
        }
    }

    #[test]
    fn any_sequence_of_operations_gives_what_the_naive_pool_gives() {
        for seed in 0..40 {
            let mut chance = Chance::new(seed);
            let capacity = 4 + chance.below(28) as u32;
            let (mut cache, mut naive) = (BlockCache::new(capacity), Naive::new(capacity));
            cache.listen();
            let mut told: Vec<Digest> = Vec::new();
            let mut sequences: Vec<Vec<BlockId>> = Vec::new();
            for step in 0..600 {
                let prefix: Vec<Digest> =
                    (0..chance.below(6)).map(|i| digest(chance.below(3) * 100 + i)).collect();
                match chance.below(3) {
                    0 if !sequences.is_empty() => {
                        let blocks =
                            sequences.swap_remove(chance.below(sequences.len() as u64) as usize);
                        cache.release(&blocks);
                        naive.release(&blocks);
                    }
                    _ => {
                        let found = cache.find(&prefix);
                        assert_eq!(found, naive.find(&prefix), "seed {seed} step {step}");
                        cache.claim(&found);
                        naive.claim(&found);
                        let taken = take(&mut cache, prefix.len() - found.len());
                        assert_eq!(
                            taken,
                            naive.take(prefix.len() - found.len()),
                            "seed {seed} step {step}"
                        );
                        let mut blocks = found;
                        for id in taken.unwrap_or_default() {
                            let digest = prefix[blocks.len()];
                            cache.store(id, digest);
                            naive.store(id, digest);
                            blocks.push(id);
                        }
                        sequences.push(blocks);
                    }
                }
                for change in cache.changes() {
                    match change {
                        Change::Stored(digest) => told.push(digest),
                        Change::Evicted(digest) => told.retain(|one| *one != digest),
                        Change::Cleared => told.clear(),
                    }
                }
                let stored = naive.stored_order.iter().map(|id| naive.digests[*id as usize]);
                let mut stored: Vec<Digest> = stored.flatten().collect();
                stored.sort_unstable();
                stored.dedup();
                told.sort_unstable();
                assert_eq!(told, stored, "seed {seed} step {step}");
                let idle = idle(&cache);
                assert_eq!(idle, naive.idle, "seed {seed} step {step}");
                assert_eq!(cache.cached(), naive.stored_order.len(), "seed {seed} step {step}");
            }
        }
    }
}
