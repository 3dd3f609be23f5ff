//! Where the branches of replicas that report end, by the last block that each holds.
//!
//! A report names blocks by their hashes alone. What an engine evicts are ends, and what it computes follows one as a rule,
//! so these are found at once. It holds numbers of holds, not hashes: the segment says which block is the last.

use super::Seeded;
use super::slab::Slab;
use super::tree::{Hold, Segment, Slot};
use crate::tokens::blocks::BlockHash;
use hashbrown::HashTable;
use std::hash::BuildHasher;

/// As many tables as for places, for the same reason: one that grows moves all it has.
const TABLES: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Ends {
    tables: Vec<HashTable<u32>>,
    seeded: Seeded,
}

fn end(segments: &Slab<Segment>, holds: &Slab<Hold>, at: u32) -> Option<(Slot, BlockHash)> {
    let hold = holds.get(at)?;
    let last = segments.get(hold.segment)?.block(hold.held.checked_sub(1)?)?;
    Some((hold.slot, last))
}

impl Ends {
    pub(super) fn new(seeded: Seeded) -> Self {
        Self { tables: Vec::new(), seeded }
    }

    fn table(key: u64) -> usize {
        (key >> 40) as usize % TABLES
    }

    /// The hold of this replica that ends with this block.
    pub(super) fn find(
        &self,
        segments: &Slab<Segment>,
        holds: &Slab<Hold>,
        wanted: (Slot, BlockHash),
    ) -> Option<u32> {
        let key = self.seeded.hash_one(wanted);
        let table = self.tables.get(Self::table(key))?;
        table.find(key, |at| end(segments, holds, *at) == Some(wanted)).copied()
    }

    /// Takes in a hold as it is now.
    pub(super) fn insert(&mut self, segments: &Slab<Segment>, holds: &Slab<Hold>, at: u32) {
        if self.tables.is_empty() {
            self.tables.resize_with(TABLES, HashTable::new);
        }
        let seeded = self.seeded;
        let key_of = |at: u32| end(segments, holds, at).map_or(0, |end| seeded.hash_one(end));
        let key = key_of(at);
        if let Some(table) = self.tables.get_mut(Self::table(key)) {
            table.insert_unique(key, at, |at| key_of(*at));
        }
    }

    /// Before a hold is changed.
    pub(super) fn remove(&mut self, segments: &Slab<Segment>, holds: &Slab<Hold>, at: u32) {
        let Some(end) = end(segments, holds, at) else { return };
        let key = self.seeded.hash_one(end);
        let Some(table) = self.tables.get_mut(Self::table(key)) else { return };
        if let Ok(found) = table.find_entry(key, |other| *other == at) {
            found.remove();
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.tables.iter().map(HashTable::len).sum()
    }

    /// What it has asked the allocator for.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(HashTable::allocation_size).sum();
        tables + self.tables.capacity() * size_of::<HashTable<u32>>()
    }
}
