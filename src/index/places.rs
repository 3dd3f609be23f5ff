//! Where blocks are that can be found by their hashes alone.
//!
//! It holds places, not hashes: a place's block says which it is. It is cut into many small tables, since one that grows
//! moves all it has.

use super::Seeded;
use super::slab::Slab;
use super::tree::Segment;
use crate::tokens::blocks::BlockHash;
use hashbrown::HashTable;
use std::hash::BuildHasher;

/// Of a full index, half a million blocks, each has two thousand: some 100 us when it grows.
const TABLES: usize = 256;

/// A segment, and the block's place in its chain.
type Spot = (u32, u32);

#[derive(Debug, Default)]
pub(super) struct Places {
    tables: Vec<HashTable<Spot>>,
    seeded: Seeded,
}

fn block(segments: &Slab<Segment>, (segment, at): Spot) -> Option<BlockHash> {
    let segment = segments.get(segment)?;
    segment.block(at.checked_sub(segment.start)?)
}

impl Places {
    pub(super) fn new(seeded: Seeded) -> Self {
        Self { tables: Vec::new(), seeded }
    }

    /// Which table: by bits that the tables themselves do not use.
    fn table(key: u64) -> usize {
        (key >> 40) as usize % TABLES
    }

    pub(super) fn find(&self, segments: &Slab<Segment>, hash: BlockHash) -> Option<Spot> {
        let key = self.seeded.hash_one(hash);
        let table = self.tables.get(Self::table(key))?;
        table.find(key, |spot| block(segments, *spot) == Some(hash)).copied()
    }

    pub(super) fn insert(&mut self, segments: &Slab<Segment>, hash: BlockHash, spot: Spot) {
        if self.tables.is_empty() {
            self.tables.resize_with(TABLES, HashTable::new);
        }
        let (seeded, key) = (self.seeded, self.seeded.hash_one(hash));
        let Some(table) = self.tables.get_mut(Self::table(key)) else { return };
        if let Some(old) = table.find_mut(key, |spot| block(segments, *spot) == Some(hash)) {
            *old = spot;
            return;
        }
        let rehash = |spot: &Spot| {
            // Each has its block; one that has not could not be found anyway.
            block(segments, *spot).map_or(0, |hash| seeded.hash_one(hash))
        };
        table.insert_unique(key, spot, rehash);
    }

    /// Before the block is gone.
    pub(super) fn remove(&mut self, segments: &Slab<Segment>, hash: BlockHash) {
        let key = self.seeded.hash_one(hash);
        let Some(table) = self.tables.get_mut(Self::table(key)) else { return };
        if let Ok(found) = table.find_entry(key, |spot| block(segments, *spot) == Some(hash)) {
            found.remove();
        }
    }

    /// What it has asked the allocator for.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(HashTable::allocation_size).sum();
        tables + self.tables.capacity() * size_of::<HashTable<Spot>>()
    }
}
