//! Records between this VM's log, the others' logs and the index.
//!
//! Records of one log are applied in their order. Between logs there is none, so a record may be
//! read before what it builds on: it waits.

use super::link::{Link, Peer};
use super::log::{Fate, Read, Record};
use super::log_key;
use super::store::Store;
use crate::index::Recorded;
use crate::replicas::ReplicaId;

/// Records that wait for the table in which their replica is new, or for this VM's slot: the first
/// takes some milliseconds, the second two ticks. What is beyond is dropped.
const MAX_WAITING_RECORDS: usize = 1000;

impl<S: Store> Link<S> {
    /// Notes that blocks were sent to (or made by) a replica, here and in the log.
    pub fn record(&mut self, record: &Record) {
        if record.blocks.is_empty() && record.parent.is_none() {
            return;
        }
        self.apply(record);
        if self.unlogged.len() < MAX_WAITING_RECORDS {
            self.unlogged.push(record.clone());
        }
        self.log();
    }

    /// Writes what is to be logged, which waits while this VM has no slot: what others record
    /// later may build on it.
    pub(super) fn log(&mut self) {
        let Some(own) = self.own.as_mut().filter(|own| own.is_confirmed()) else { return };
        for record in self.unlogged.drain(..) {
            let written = own.append(&self.store, &record);
            self.counts.refused += u64::from(!written);
            if self.unpublished.len() < MAX_WAITING_RECORDS {
                self.unpublished.push(record);
            }
        }
    }

    /// Reads a log up to its head, as far as the budget goes. Whether it got there.
    pub(super) fn read_log(
        &mut self,
        number: u32,
        peer: &mut Peer,
        owner: u64,
        budget: &mut u32,
    ) -> bool {
        let (fingerprint, head) = (self.config.fingerprint, peer.head);
        let lapped_before = peer.reader.lapped;
        let mut is_first = true;
        let arrived = loop {
            let Some(place) = peer.reader.place(head) else { break true };
            if !std::mem::take(&mut is_first) {
                let Some(rest) = budget.checked_sub(1) else { break false };
                *budget = rest;
            }
            let (segment, _) = self.store.get(&log_key(number, place));
            match peer.reader.take(segment.as_deref(), fingerprint, owner, head) {
                Read::Records(records) => {
                    self.apply_or_wait(records);
                }
                Read::Gone => {}
                Read::Foreign => break true,
            }
        };
        let lapped = peer.reader.lapped - lapped_before;
        self.counts.lapped += lapped;
        self.overtaken |= lapped > 0;
        arrived
    }

    pub(super) fn apply_orphans(&mut self) {
        self.apply_waiting();
        let mut orphans = std::mem::take(&mut self.orphans);
        let all = orphans.len();
        orphans.retain(|record| self.is_unheard_of(record.replica));
        orphans.truncate(MAX_WAITING_RECORDS);
        self.counts.orphaned += (all - orphans.len()) as u64;
        self.orphans = orphans;
    }

    /// A record may build on one in a log that was read after its own, or be read before the
    /// table that has its replica, so what could not be applied is tried again.
    pub(super) fn apply_waiting(&mut self) {
        // For as long as that helps.
        loop {
            let waiting = std::mem::take(&mut self.orphans);
            let before = waiting.len();
            self.apply_or_wait(waiting);
            if self.orphans.is_empty() || self.orphans.len() == before {
                break;
            }
        }
    }

    fn apply_or_wait(&mut self, records: Vec<Record>) {
        for record in records {
            if !self.apply(&record) {
                self.orphans.push(record);
            }
        }
    }

    /// Whether a replica is not in the table yet: a record of it can be read before the table in
    /// which its writer found it.
    pub(super) fn is_unheard_of(&self, replica: ReplicaId) -> bool {
        let place = self.table.places().nth(replica.slot as usize);
        // Incarnations wrap.
        place.is_none_or(|(known, _)| replica.incarnation.wrapping_sub(known).cast_signed() > 0)
    }

    /// Applies a record. False when its parent is not held, or its replica not known yet: then it
    /// may be tried again.
    fn apply(&mut self, record: &Record) -> bool {
        // A record of an incarnation that is in the table no longer is of a cache that is gone.
        if self.table.by_id(record.replica).is_none() {
            return !self.is_unheard_of(record.replica);
        }
        if record.fate == Fate::Forgotten {
            self.forget_waiting(record);
            self.index.forget(record.replica, &record.blocks);
            return true;
        }
        let capacity = self.capacity(record.replica);
        let recorded = self.index.record(record.replica, capacity, record.parent, &record.blocks);
        recorded == Recorded::Held
    }

    /// A record that waits comes before one that takes its blocks back.
    fn forget_waiting(&mut self, forgotten: &Record) {
        for waiting in &mut self.orphans {
            let ours = waiting.replica == forgotten.replica && waiting.fate == Fate::Held;
            let cut =
                waiting.blocks.iter().position(|block| ours && forgotten.blocks.contains(block));
            waiting.blocks.truncate(cut.unwrap_or(waiting.blocks.len()));
        }
    }
}
