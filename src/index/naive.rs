//! The obvious version of the index, against which the real one is compared step by step.

use super::slab::NONE;
use super::tree::NOBODY;
use super::*;
use std::collections::BTreeMap;

/// Every block that a replica holds, by its whole path, with the time of its last use.
#[derive(Default)]
struct Naive {
    capacity: usize,
    held: BTreeMap<Vec<u64>, u64>,
}

impl Naive {
    fn record(&mut self, path: &[u64], now: u64) {
        for end in 1..=path.len().min(self.capacity) {
            self.held.insert(path[..end].to_vec(), now);
        }
        self.evict();
    }

    fn evict(&mut self) {
        while self.held.len() > self.capacity {
            let leaf = |path: &&Vec<u64>| !self.has_children(path);
            let victim =
                self.held.keys().filter(leaf).min_by_key(|path| self.held[*path]).unwrap().clone();
            self.held.remove(&victim);
        }
    }

    fn has_children(&self, path: &[u64]) -> bool {
        // The next in order is a child, if there is one.
        let next = self.held.range(path.to_vec()..).find(|(other, _)| *other != path);
        next.is_some_and(|(other, _)| other.starts_with(path))
    }

    fn forget(&mut self, path: &[u64], from: usize) {
        for end in (from + 1..=path.len()).rev() {
            if self.held.contains_key(&path[..end]) {
                if self.has_children(&path[..end]) {
                    return;
                }
                self.held.remove(&path[..end]);
            }
        }
    }

    fn forget_beyond(&mut self, path: &[u64], held: usize) {
        if let Some(gone) = path.get(..=held) {
            self.held.retain(|other, _| !other.starts_with(gone));
        }
    }

    fn overlap(&self, path: &[u64]) -> usize {
        (1..=path.len()).take_while(|&end| self.held.contains_key(&path[..end])).count()
    }
}

/// A seeded generator (xorshift64*), so that a failure names the seed that shows it.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % bound
    }

    /// Some words of several blocks each, the last one cut off anywhere. Few words, so that paths meet.
    fn path(&mut self) -> Vec<u64> {
        let mut path = Vec::new();
        for _ in 0..self.below(4) {
            let (word, blocks) = (self.below(3), 1 + self.below(14));
            path.extend((0..blocks).map(|block| word * 100 + block));
        }
        path
    }
}

/// A hash that names the whole path, as the real chain does.
fn chain(path: &[u64]) -> Vec<BlockHash> {
    let mut parent = 17;
    path.iter()
        .map(|step| {
            parent = xxhash_rust::xxh3::xxh3_64_with_seed(&step.to_le_bytes(), parent);
            BlockHash(parent)
        })
        .collect()
}

/// A fleet's index, and the same in the obvious way.
struct Both {
    index: PrefixIndex,
    naive: BTreeMap<ReplicaId, Naive>,
    now: u64,
}

impl Both {
    fn new(replicas: u32, random: &mut Random) -> Self {
        let mut both = Self { index: PrefixIndex::new(), naive: BTreeMap::new(), now: 0 };
        for slot in 0..replicas {
            both.come(ReplicaId { slot, incarnation: 1 }, 1 + random.below(60) as usize);
        }
        both
    }

    fn come(&mut self, replica: ReplicaId, capacity: usize) {
        self.naive.insert(replica, Naive { capacity, ..Naive::default() });
    }

    fn replica(&self, random: &mut Random) -> ReplicaId {
        *self.naive.keys().nth(random.below(self.naive.len() as u64) as usize).unwrap()
    }

    fn step(&mut self, random: &mut Random) {
        let (replica, path) = (self.replica(random), random.path());
        let hashes = chain(&path);
        let naive = self.naive.get_mut(&replica).unwrap();
        match random.below(40) {
            0..=15 => {
                self.now += 1;
                naive.record(&path, self.now);
                self.index.record(replica, naive.capacity, &hashes);
            }
            16..=29 => {
                self.now += 1;
                let new = Stretch::of(&hashes, naive.overlap(&path));
                naive.record(&path, self.now);
                let capacity = naive.capacity;
                let recorded = self.index.record_behind(replica, capacity, new.parent, new.blocks);
                assert_eq!(recorded, Recorded::Held);
            }
            30..=32 => {
                let from = random.below(path.len() as u64 + 1) as usize;
                naive.forget(&path, from);
                self.index.forget(replica, Stretch::of(&hashes, from));
            }
            33..=35 => {
                let held = random.below(path.len() as u64 + 1) as usize;
                naive.forget_beyond(&path, held);
                self.index.forget_beyond(replica, &hashes, held);
            }
            36 => {
                naive.capacity = 1 + random.below(60) as usize;
                naive.evict();
                // What was never used has no shadow, and is told its capacity with its first record.
                self.index.set_capacity(replica, naive.capacity);
                self.index.shrink(usize::MAX);
            }
            37 => {
                let capacity = naive.capacity;
                self.naive.remove(&replica);
                self.index.retain(|other| other != replica);
                let incarnation = replica.incarnation + 1;
                self.come(ReplicaId { incarnation, ..replica }, capacity);
            }
            38 => self.index.advance(Moment(random.below(1 << 20) * 1000)),
            _ => self.hand_on(),
        }
    }

    fn hand_on(&mut self) {
        let (mut copy, mut cursor) = (PrefixIndex::with_seed(self.now), self.index.cursor());
        while let Some(run) = self.index.export(&mut cursor) {
            copy.import(run);
        }
        let replicas: Vec<ReplicaId> = copy.replicas().collect();
        for replica in replicas {
            let mut settling = Settling::default();
            while !copy.settle(replica, &mut settling) {}
            copy.set_capacity(replica, self.naive[&replica].capacity);
        }
        self.index = copy;
    }

    #[track_caller]
    fn check(&self, path: &[u64], new_blocks: usize, at: &str) {
        check_tree(&self.index.tree);
        let hashes = chain(path);
        let overlaps = self.index.overlaps(&hashes);
        for (replica, naive) in &self.naive {
            let expected = naive.overlap(path);
            assert_eq!(overlaps.of(*replica), expected, "{at}, {replica:?}, {path:?}");
            assert_eq!(self.index.overlap_blocks(*replica, &hashes), expected, "{at}");
            assert_eq!(self.index.held_blocks(*replica), naive.held.len(), "{at}, {replica:?}");
            let over = (naive.held.len() + new_blocks).saturating_sub(naive.capacity);
            let evicted = self.index.would_evict(*replica, new_blocks).blocks;
            assert_eq!(evicted, over.min(naive.held.len()), "{at}, {replica:?}");
        }
    }
}

/// What is always true of a tree.
#[track_caller]
fn check_tree(tree: &Tree) {
    let (mut children, mut held_children) = (BTreeMap::new(), BTreeMap::new());
    let (mut held, mut holds) = (BTreeMap::new(), BTreeMap::new());
    let segments =
        || (0..tree.segments.len() as u32).map(|id| (id, tree.segments.get(id).unwrap()));
    for (id, segment) in segments().filter(|(_, segment)| segment.holds != NONE) {
        let longest = tree.holds_of(id).map(|(_, hold)| hold.held).max();
        assert_eq!(longest, Some(segment.len()), "what nobody holds is not kept");
        assert_eq!(tree.place_of(segment.head), Some(Place { segment: id, blocks: 1 }));
        let parent = tree.segments.get(segment.parent);
        assert_eq!(segment.start, parent.map_or(0, |parent| parent.start + parent.len()));
        *children.entry(segment.parent).or_insert(0) += 1;
        for (_, hold) in tree.holds_of(id) {
            assert_eq!(hold.segment, id);
            assert!(hold.held > 0);
            *held.entry(hold.slot).or_insert(0) += hold.held as usize;
            *holds.entry(hold.slot).or_insert(0) += 1;
            if let Some(parent) = parent {
                let front = tree.hold_of(segment.parent, hold.slot).expect("what is in front");
                assert_eq!(tree.holds.get(front).unwrap().held, parent.len());
                *held_children.entry((segment.parent, hold.slot)).or_insert(0) += 1;
            }
        }
    }
    for (id, segment) in segments().filter(|(_, segment)| segment.holds != NONE) {
        assert_eq!(segment.children, children.get(&id).copied().unwrap_or(0));
    }
    let mut places = 0;
    for at in 0..tree.holds.len() as u32 {
        let hold = tree.holds.get(at).unwrap();
        if hold.slot != NOBODY {
            places += 1;
            let children = held_children.get(&(hold.segment, hold.slot)).copied().unwrap_or(0);
            assert_eq!(hold.children, children);
            assert!(hold.children > 0 || hold.older != shadow::UNLINKED, "a leaf has its place");
        }
    }
    assert_eq!(places, holds.values().sum::<usize>());
    for (slot, shadow) in (0..).zip(&tree.shadows) {
        assert_eq!(shadow.held, held.get(&slot).copied().unwrap_or(0));
        assert_eq!(shadow.holds, holds.get(&slot).copied().unwrap_or(0));
        let uses: Vec<u64> =
            tree.in_order(slot).map(|at| tree.holds.get(at).unwrap().used()).collect();
        assert!(uses.is_sorted(), "{uses:?}");
        assert_eq!(tree.in_order(slot).last().unwrap_or(NONE), shadow.newest);
    }
}

#[test]
fn the_index_agrees_with_the_naive_one_under_random_use() {
    let seeds = std::env::var("WARMPATH_SEEDS").ok().map_or(150, |seeds| seeds.parse().unwrap());
    for seed in 1..=seeds {
        let mut random = Random(seed);
        let replicas = 1 + random.below(4) as u32;
        let mut both = Both::new(replicas, &mut random);
        for step in 0..150 {
            let before = Random(random.0);
            both.step(&mut random);
            let path = random.path();
            let new_blocks = random.below(30) as usize;
            both.check(&path, new_blocks, &format!("seed {seed}, step {step}, {:x}", before.0));
        }
    }
}
