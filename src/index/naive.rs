//! The obvious version of the index, against which the real one is compared step by step.

use super::*;
use std::collections::BTreeMap;

/// Every held block with its whole path and the time of its last use.
#[derive(Default)]
struct Naive {
    capacity: usize,
    uses: u64,
    held: BTreeMap<Vec<u64>, u64>,
}

impl Naive {
    fn record(&mut self, path: &[u64]) {
        self.uses += 1;
        for end in 1..=path.len().min(self.capacity) {
            self.held.insert(path[..end].to_vec(), self.uses);
        }
        while self.held.len() > self.capacity {
            let leaf = |path: &&Vec<u64>| {
                !self.held.keys().any(|other| other.len() > path.len() && other.starts_with(path))
            };
            let victim =
                self.held.keys().filter(leaf).min_by_key(|path| self.held[*path]).unwrap().clone();
            self.held.remove(&victim);
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

#[test]
fn the_index_agrees_with_the_naive_one_under_random_use() {
    let replica = ReplicaId { slot: 3, incarnation: 1 };
    for seed in 1..=200 {
        let mut random = Random(seed);
        let capacity = 1 + random.below(12) as usize;
        let mut naive = Naive { capacity, ..Naive::default() };
        let mut index = PrefixIndex::new();
        for step in 0..200 {
            let path: Vec<u64> = (0..random.below(7)).map(|_| random.below(3)).collect();
            let hashes = chain(&path);
            let held = index.overlap_blocks(replica, &hashes);
            assert_eq!(held, naive.overlap(&path), "seed {seed}, step {step}, path {path:?}");
            if path.is_empty() {
                continue;
            }
            let parent = held.checked_sub(1).map(|last| hashes[last]);
            let recorded = index.record(replica, capacity, parent, &hashes[held..]);
            assert_eq!(recorded, Recorded::Held, "seed {seed}, step {step}");
            naive.record(&path);
            assert_eq!(index.held_blocks(replica), naive.held.len(), "seed {seed}, step {step}");
        }
    }
}
