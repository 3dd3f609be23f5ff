//! Which replicas hold a block: from a block's id to a set of replicas.
//!
//! It is told what is held and what no longer is, by events or by [`super::held::Held`]; it never evicts. It takes a
//! replica's blocks to be whole prefixes, as an engine's are whose tails go first: then a block that is held says that
//! all before it are, and a few probes find how deep a prompt reaches on every replica at once.

use super::super::policy::Change;
use hashbrown::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Replicas at most. A set of them is one number; twice as many would need two.
pub const MOST_REPLICAS: usize = u128::BITS as usize;

/// Maps from block ids. The ids of some traces are small numbers, so they are stirred, but they are nobody's attack.
pub type ByBlock<V> = HashMap<u64, V, BuildHasherDefault<Stirred>>;

/// A hasher of one number.
#[derive(Default)]
pub struct Stirred(u64);

impl Hasher for Stirred {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let stirred = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = stirred ^ (stirred >> 32);
    }
}

/// See the module.
#[derive(Default)]
pub struct Holders {
    of: ByBlock<u128>,
}

impl Holders {
    /// A replica holds a block.
    pub fn add(&mut self, replica: usize, block: u64) {
        *self.of.entry(block).or_default() |= bit(replica);
    }

    /// A replica no longer holds a block.
    pub fn remove(&mut self, replica: usize, block: u64) {
        if let Some(set) = self.of.get_mut(&block) {
            *set &= !bit(replica);
            if *set == 0 {
                self.of.remove(&block);
            }
        }
    }

    /// A replica holds nothing.
    pub fn clear(&mut self, replica: usize) {
        self.of.retain(|_, set| {
            *set &= !bit(replica);
            *set != 0
        });
    }

    /// A replica says what became of its blocks.
    pub fn apply(&mut self, replica: usize, change: Change) {
        match change {
            Change::Stored(block) => self.add(replica, block),
            Change::Evicted(block) => self.remove(replica, block),
            Change::Cleared => self.clear(replica),
        }
    }

    /// How many replicas hold a block.
    pub fn holders_of(&self, block: u64) -> u32 {
        self.of.get(&block).map_or(0, |set| set.count_ones())
    }

    /// How many blocks each of so many replicas holds.
    #[cfg(test)]
    pub fn counts(&self, replicas: usize) -> Vec<usize> {
        let count = |replica| self.of.values().filter(|set| **set & bit(replica) != 0).count();
        (0..replicas).map(count).collect()
    }

    /// How many blocks from the first each replica holds of a prompt.
    pub fn depths(&self, blocks: &[u64], replicas: usize) -> Vec<usize> {
        let mut depths = vec![0; replicas];
        let everybody = if replicas >= MOST_REPLICAS { u128::MAX } else { bit(replicas) - 1 };
        let mut open = vec![(0, blocks.len(), everybody)];
        // Everybody in `set` holds the first `least` blocks and nobody more than `most`.
        while let Some((least, most, set)) = open.pop() {
            if set == 0 {
                continue;
            }
            if least == most {
                members(set).for_each(|replica| {
                    if let Some(depth) = depths.get_mut(replica) {
                        *depth = least;
                    }
                });
                continue;
            }
            let middle = least + (most - least).div_ceil(2);
            let block = blocks.get(middle - 1);
            let deeper = block.and_then(|block| self.of.get(block)).map_or(0, |of| of & set);
            open.push((middle, most, deeper));
            open.push((least, middle - 1, set & !deeper));
        }
        depths
    }
}

fn bit(replica: usize) -> u128 {
    u32::try_from(replica).ok().and_then(|replica| 1u128.checked_shl(replica)).unwrap_or(0)
}

fn members(mut set: u128) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (set != 0).then(|| {
            let replica = set.trailing_zeros() as usize;
            set &= set - 1;
            replica
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn depths_are_those_of_a_walk_from_the_front() {
        let mut random = Random::new(3, 0);
        for round in 0..200 {
            let replicas = 1 + random.below(MOST_REPLICAS);
            let blocks: Vec<u64> = (0..random.below(40) as u64).collect();
            let expected: Vec<usize> =
                (0..replicas).map(|_| random.below(blocks.len() + 1)).collect();
            let mut holders = Holders::default();
            for (replica, depth) in expected.iter().enumerate() {
                blocks[..*depth].iter().for_each(|block| holders.add(replica, *block));
            }
            assert_eq!(holders.depths(&blocks, replicas), expected, "round {round}");
        }
    }

    #[test]
    fn what_is_removed_is_not_held_and_the_others_still_hold_it() {
        let mut holders = Holders::default();
        for replica in 0..3 {
            [10, 11, 12].iter().for_each(|block| holders.add(replica, *block));
        }
        holders.remove(1, 12);
        holders.clear(2);
        assert_eq!(holders.depths(&[10, 11, 12, 13], 3), [3, 2, 0]);
        assert_eq!(holders.counts(3), [3, 2, 0]);
        holders.remove(0, 99);
    }
}
