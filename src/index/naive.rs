//! The obvious version of the index, against which the real one is compared step by step.

use super::slab::NONE;
use super::tree::NOBODY;
use super::*;
use crate::report::{Change, Tier};
use crate::seeded::Random;
use std::collections::{BTreeMap, BTreeSet};

/// Every block that a replica holds, by its whole path, with the time of its last use.
#[derive(Default)]
struct Naive {
    capacity: usize,
    held: BTreeMap<Vec<u64>, u64>,
    /// What it reported, and whether all of a report has come.
    observed: Option<BTreeSet<Vec<u64>>>,
    is_reporting: bool,
}

/// Room for all that is reported here.
const ROOM: Room = Room { stated: 10_000, most: 10_000 };

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
        let routed = (1..=path.len()).take_while(|&end| self.held.contains_key(&path[..end]));
        routed.count().max(self.observed_overlap(path))
    }

    fn observed_overlap(&self, path: &[u64]) -> usize {
        let Some(observed) = &self.observed else { return 0 };
        (1..=path.len()).take_while(|&end| observed.contains(&path[..end])).count()
    }

    fn observed(&mut self) -> &mut BTreeSet<Vec<u64>> {
        self.observed.get_or_insert_default()
    }

    fn expire(&mut self, now: u64) {
        let since = now.saturating_sub(CONFIRM_WITHIN.as_micros() as u64);
        if self.is_reporting {
            self.held.retain(|_, used| *used >= since);
        }
    }
}

impl Random {
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

/// A fleet's index, another that is told what the first hears, and the same in the obvious way.
struct Both {
    indices: [PrefixIndex; 2],
    naive: BTreeMap<ReplicaId, Naive>,
    now: u64,
}

impl Both {
    fn new(replicas: u32, random: &mut Random) -> Self {
        let indices = [PrefixIndex::new(), PrefixIndex::with_seed(9)];
        let mut both = Self { indices, naive: BTreeMap::new(), now: 0 };
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
        match random.below(60) {
            0..40 => self.route(replica, &path, random),
            40..57 => self.report(replica, &path, random),
            57 => {
                let naive = self.naive.get_mut(&replica).unwrap();
                naive.is_reporting = false;
                naive.observed = None;
                naive.held = BTreeMap::new();
                let capacity = naive.capacity;
                self.naive.remove(&replica);
                for index in &mut self.indices {
                    index.retain(|other| other.real() != replica);
                }
                let incarnation = replica.incarnation + 1;
                self.come(ReplicaId { incarnation, ..replica }, capacity);
            }
            58 => {
                self.now += random.below(3_000_000);
                for index in &mut self.indices {
                    index.advance(Moment(self.now * 1000));
                }
            }
            _ => self.hand_on(),
        }
        for index in &mut self.indices {
            index.shrink(usize::MAX);
        }
        self.naive.values_mut().for_each(|naive| naive.expire(self.now));
    }

    fn route(&mut self, replica: ReplicaId, path: &[u64], random: &mut Random) {
        let hashes = chain(path);
        let naive = self.naive.get_mut(&replica).unwrap();
        let capacity = naive.capacity;
        match random.below(37) {
            0..=15 => {
                self.now += 1;
                naive.record(path, self.now);
                for index in &mut self.indices {
                    index.record(replica, capacity, &hashes);
                }
            }
            16..=29 => {
                self.now += 1;
                let new = Stretch::of(&hashes, naive.overlap(path));
                naive.record(path, self.now);
                for index in &mut self.indices {
                    let recorded = index.record_behind(replica, capacity, new.parent, new.blocks);
                    assert_eq!(recorded, Recorded::Held);
                }
            }
            30..=32 => {
                let from = random.below(path.len() as u64 + 1) as usize;
                naive.forget(path, from);
                for index in &mut self.indices {
                    // The longest way, since the nearest block may be held by reports alone.
                    let stretch = Stretch { parent: None, blocks: &hashes, known: from };
                    index.forget(replica, stretch);
                }
            }
            33..=35 => {
                let held = random.below(path.len() as u64 + 1) as usize;
                naive.forget_beyond(path, held);
                if let Some(blocks) = hashes.get(..=held) {
                    let stretch = Stretch { parent: None, blocks, known: held };
                    self.indices.iter_mut().for_each(|index| index.lose(replica, stretch));
                }
            }
            _ => {
                naive.capacity = 1 + random.below(60) as usize;
                naive.evict();
                for index in &mut self.indices {
                    // What was never used has no shadow, and is told its capacity with its first record.
                    index.set_capacity(replica, naive.capacity);
                }
            }
        }
    }

    fn report(&mut self, replica: ReplicaId, path: &[u64], random: &mut Random) {
        let naive = self.naive.get_mut(&replica).unwrap();
        match random.below(30) {
            0..=14 => {
                // Behind something that is there, and perhaps again; or behind what is not.
                let from = random.below(naive.observed_overlap(path) as u64 + 2) as usize;
                let from = from.min(path.len());
                let is_held = from == 0 || naive.observed().contains(&path[..from]);
                if is_held {
                    self.now += 1;
                    let ends = from + 1..=path.len();
                    naive.observed().extend(ends.map(|end| path[..end].to_vec()));
                }
                let hashes = chain(path);
                let parent = from.checked_sub(1).map(|last| hashes[last]);
                let (blocks, tier) = (hashes[from..].to_vec(), Tier::Gpu);
                self.tell(replica, Change::Stored { parent, blocks, tier });
            }
            15..=25 => {
                let held: Vec<Vec<u64>> = naive.observed().iter().cloned().collect();
                let all = 1 + random.below(4);
                let mut gone: Vec<Vec<u64>> = Vec::new();
                for _ in 0..if held.is_empty() { 0 } else { all } {
                    gone.push(held[random.below(held.len() as u64) as usize].clone());
                }
                naive.observed().retain(|held| !gone.iter().any(|gone| held.starts_with(gone)));
                naive.held.retain(|held, _| !gone.iter().any(|gone| held.starts_with(gone)));
                if random.below(2) == 0 {
                    // All that goes, in any order.
                    gone =
                        held.into_iter().filter(|path| !naive.observed().contains(path)).collect();
                    for at in 0..gone.len() {
                        let other = random.below(gone.len() as u64) as usize;
                        gone.swap(at, other);
                    }
                } else {
                    gone.sort_unstable_by_key(|path| std::cmp::Reverse(path.len()));
                }
                let mut blocks: Vec<BlockHash> =
                    gone.iter().map(|path| *chain(path).last().unwrap()).collect();
                blocks.push(BlockHash(random.below(99)));
                self.tell(replica, Change::Removed { blocks, tier: Tier::Gpu });
            }
            26 => {
                naive.observed = None;
                if std::mem::take(&mut naive.is_reporting) {
                    naive.held.clear();
                }
                self.indices.iter_mut().for_each(|index| index.begin_report(replica, false));
            }
            27 | 28 => {
                naive.observed();
                if !std::mem::replace(&mut naive.is_reporting, true) {
                    naive.held.clear();
                }
                self.indices.iter_mut().for_each(|index| index.complete_report(replica));
            }
            _ => {
                // What was reported is the shadow now; its order of use is not the naive one's business.
                naive.observed = None;
                naive.is_reporting = false;
                naive.held.clear();
                for index in &mut self.indices {
                    index.end_reports(replica);
                    index.leave(replica);
                }
            }
        }
    }

    fn tell(&mut self, replica: ReplicaId, change: Change) {
        let mut told = Vec::new();
        let [hears, is_told] = &mut self.indices;
        hears.observe(replica, ROOM, &change, &mut Hearing::default(), &mut told);
        for sighting in told {
            assert_eq!(is_told.sight(replica, ROOM, &sighting), Recorded::Held);
        }
    }

    fn hand_on(&mut self) {
        for index in &mut self.indices {
            let (mut copy, mut cursor) = (PrefixIndex::with_seed(self.now), index.cursor());
            while let Some(run) = index.export(&mut cursor) {
                copy.import(run);
            }
            let replicas: Vec<ReplicaId> = copy.replicas().collect();
            for id in replicas {
                let mut settling = Settling::default();
                while !copy.settle(id, &mut settling) {}
                match self.naive.get(&id) {
                    Some(naive) => copy.set_capacity(id, naive.capacity),
                    None => copy.set_room(id.real(), ROOM),
                }
            }
            let reporting = self.naive.iter().filter(|(_, naive)| naive.is_reporting);
            copy.go_on_reporting(reporting.map(|(id, _)| (*id, false)));
            copy.advance(Moment(self.now * 1000));
            *index = copy;
        }
    }

    #[track_caller]
    fn check(&self, path: &[u64], new_blocks: usize, at: &str) {
        self.indices.iter().for_each(|index| self.check_index(index, path, new_blocks, at));
    }

    #[track_caller]
    fn check_index(&self, index: &PrefixIndex, path: &[u64], new_blocks: usize, at: &str) {
        check_tree(&index.tree);
        let hashes = chain(path);
        let overlaps = index.overlaps(&hashes);
        let walked = index.tree.path_by(&hashes, usize::MAX);
        for steps in 0..=2 {
            assert_eq!(index.tree.path_by(&hashes, steps), walked, "{at}, {steps} steps, {path:?}");
        }
        for (replica, naive) in &self.naive {
            let expected = naive.overlap(path);
            let Outlook { blocks, at_hand, observed: reported } = overlaps.outlook(*replica);
            assert_eq!((blocks, at_hand), (expected, expected), "{at}, {replica:?}, {path:?}");
            assert_eq!(index.overlap_blocks(*replica, &hashes), expected, "{at}");
            let observed = naive.is_reporting.then(|| naive.observed_overlap(path));
            assert_eq!(reported, observed, "{at}");
            assert_eq!(index.held_blocks(*replica), naive.held.len(), "{at}, {replica:?}");
            let observed = naive.observed.as_ref().map_or(0, BTreeSet::len);
            assert_eq!(index.observed_blocks(*replica), observed, "{at}, {replica:?}");
            let (held, room) = match naive.is_reporting {
                true => (observed, ROOM.stated),
                false => (naive.held.len(), naive.capacity),
            };
            let over = (held + new_blocks).saturating_sub(room);
            let evicted = index.would_evict(*replica, new_blocks).blocks;
            assert_eq!(evicted, over.min(held), "{at}, {replica:?}");
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
    check_ends(tree);
    for (slot, shadow) in (0..).zip(&tree.shadows) {
        assert_eq!(shadow.held, held.get(&slot).copied().unwrap_or(0));
        assert_eq!(shadow.holds, holds.get(&slot).copied().unwrap_or(0));
        let uses: Vec<u64> =
            tree.in_order(slot).map(|at| tree.holds.get(at).unwrap().used()).collect();
        assert!(uses.is_sorted(), "{uses:?}");
        assert_eq!(tree.in_order(slot).last().unwrap_or(NONE), shadow.newest);
    }
}

/// Where a branch of a replica that reports ends is found, whoever else passes there.
#[track_caller]
fn check_ends(tree: &Tree) {
    let mut ends = 0;
    for at in 0..tree.holds.len() as u32 {
        let hold = *tree.holds.get(at).unwrap();
        if tree.shadow(hold.slot).is_some_and(|shadow| shadow.has_ends) {
            let last = tree.segments.get(hold.segment).unwrap().block(hold.held - 1).unwrap();
            let found = tree.ends.find(&tree.segments, &tree.holds, (hold.slot, last));
            assert_eq!(found, Some(at));
            ends += 1;
        }
    }
    assert_eq!(tree.ends.len(), ends);
}

#[test]
fn the_index_agrees_with_the_naive_one_under_random_use() {
    // Pointers are smaller as wasm, and all is slower; what orders do is found out natively.
    let usual = if cfg!(target_family = "wasm") { 30 } else { 150 };
    let seeds = std::env::var("WARMPATH_SEEDS").ok().map_or(usual, |seeds| seeds.parse().unwrap());
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
