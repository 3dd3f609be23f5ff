//! Records between this VM's log, the others' logs and the index.
//!
//! Records of one log are applied in their order. Between logs there is none, so a record may be
//! read before what it builds on: it waits.

use super::link::{Link, Peer};
use super::log::{Entry, Fate, Read, Record};
use super::log_key;
use super::store::Store;
use crate::index::Recorded;
use crate::replicas::ReplicaId;
use crate::tokens::blocks::BlockHash;
use hashbrown::HashSet;

/// Records that wait for the table in which their replica is new, or for this VM's slot: the first
/// takes some milliseconds, the second two ticks. What is beyond is dropped.
const MAX_WAITING_RECORDS: usize = 1000;

/// Their blocks: as many as a log keeps.
const MAX_WAITING_BLOCKS: usize = 128 << 10;

/// What a record costs beside its blocks, in blocks.
const RECORD_COST: usize = 8;

impl<S: Store> Link<S> {
    /// Notes that blocks were sent to (or made by) a replica, here and in the log.
    pub fn record(&mut self, record: Record) {
        if record.blocks.is_empty() && record.parent.is_none() {
            return;
        }
        self.note(&record);
        self.apply_record(&record);
        if has_room(&self.unlogged) {
            self.unlogged.extend(record.pieces().into_iter().map(Entry::from));
        } else {
            self.counts.unlogged += 1;
        }
        self.log();
    }

    /// Blocks that are sent somewhere are not there at once.
    fn note(&mut self, record: &Record) {
        if record.replica.is_imagined() {
            self.imagined_at = self.now;
        }
        let first = record.blocks.get(record.known as usize);
        if let Some(first) = first.filter(|_| record.fate == Fate::Held) {
            self.pending.began(record.replica, *first, self.now);
        }
    }

    /// Writes what is to be logged, which waits while this VM has no slot: what others record
    /// later may build on it.
    pub(super) fn log(&mut self) {
        let Some(own) = self.own.as_mut().filter(|own| own.is_confirmed()) else { return };
        for entry in self.unlogged.drain(..) {
            let written = own.append(&self.store, &entry);
            self.counts.refused += u64::from(!written);
            if has_room(&self.unpublished) {
                self.unpublished.push(entry);
            }
        }
    }

    /// Reads a log up to its head, as far as the budget goes. Whether it got there.
    pub(super) fn read_log(
        &mut self,
        number: u32,
        peer: &mut Peer,
        owner: u64,
        budget: &mut usize,
    ) -> bool {
        let (fingerprint, head) = (self.config.fingerprint, peer.head);
        let lapped_before = peer.reader.lapped;
        let arrived = loop {
            let Some(place) = peer.reader.place(head) else { break true };
            if *budget == 0 {
                break false;
            }
            let (segment, _) = self.store.get(&log_key(number, place));
            match peer.reader.take(segment.as_deref(), fingerprint, owner, head) {
                Read::Entries(entries) => {
                    let cost: usize = entries.iter().map(cost).sum();
                    *budget = budget.saturating_sub(cost);
                    for entry in &entries {
                        if let Entry::Routed(record) = entry {
                            self.note(record);
                        }
                    }
                    self.apply_read(entries);
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

    /// Gives up what cannot be applied although all logs have been read, but what is said of replicas that are not in the
    /// table yet, and, for some time, what replicas report.
    pub(super) fn apply_orphans(&mut self) {
        self.apply_waiting();
        let mut orphans = std::mem::take(&mut self.orphans);
        let is_update = |entry: &Entry| matches!(entry, Entry::Observed(_));
        let is_waiting = orphans.iter().any(|e| is_update(e) && !self.is_unheard_of(e.replica()));
        let has_missed = self.has_missed(self.now, is_waiting);
        let all = orphans.len();
        let mut missed = Vec::new();
        orphans.retain(|entry| {
            let stays = self.is_unheard_of(entry.replica()) || is_update(entry) && !has_missed;
            if !stays && is_update(entry) && !missed.contains(&entry.replica()) {
                missed.push(entry.replica());
            }
            stays
        });
        orphans.truncate(MAX_WAITING_RECORDS);
        self.counts.orphaned += (all - orphans.len()) as u64;
        self.orphans = orphans;
        missed.into_iter().for_each(|replica| self.missed(replica));
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

    /// A report that says everything anew takes with it what was routed before. That may stand in a log that is read behind
    /// the leader's, so such a report waits until all are read, and with it what continues it.
    fn apply_read(&mut self, entries: Vec<Entry>) {
        for entry in entries {
            let waits = match &entry {
                Entry::Observed(update) => update.is_anew() || self.has_waiting(update.replica),
                Entry::Routed(_) => false,
            };
            if waits || !self.apply(&entry) {
                self.orphans.push(entry);
            }
        }
    }

    /// Whether something waits that this replica reports.
    fn has_waiting(&self, replica: ReplicaId) -> bool {
        let mut waiting = self.orphans.iter();
        waiting.any(|entry| matches!(entry, Entry::Observed(update) if update.replica == replica))
    }

    fn apply_or_wait(&mut self, entries: Vec<Entry>) {
        for entry in entries {
            if !self.apply(&entry) {
                self.orphans.push(entry);
            }
        }
    }

    /// Whether a replica is not in the table yet: a record of it can be read before the table in
    /// which its writer found it.
    pub(super) fn is_unheard_of(&self, replica: ReplicaId) -> bool {
        let replica = replica.real();
        let place = self.table.places().nth(replica.slot as usize);
        // Incarnations wrap.
        place.is_none_or(|(known, _)| replica.incarnation.wrapping_sub(known).cast_signed() > 0)
    }

    /// Applies an entry. False when what it continues is not here, or its replica not known yet: then it may be tried
    /// again.
    fn apply(&mut self, entry: &Entry) -> bool {
        match entry {
            // An entry of an incarnation that is in the table no longer is of a cache that is gone.
            entry if self.table.by_id(entry.replica()).is_none() => {
                !self.is_unheard_of(entry.replica())
            }
            Entry::Routed(record) => self.apply_record(record),
            Entry::Observed(update) => self.apply_update(update),
        }
    }

    fn apply_record(&mut self, record: &Record) -> bool {
        if self.table.by_id(record.replica).is_none() {
            return !self.is_unheard_of(record.replica);
        }
        let Record { replica, parent, .. } = *record;
        match record.fate {
            Fate::Forgotten => {
                self.forget_waiting(record);
                self.index.forget(replica, record.stretch());
            }
            Fate::Lost => self.index.lose(replica, record.stretch()),
            Fate::Held => {
                let capacity = self.capacity(replica);
                let recorded = self.index.record_behind(replica, capacity, parent, &record.blocks);
                return recorded == Recorded::Held;
            }
        }
        true
    }

    /// A record that waits comes before one that takes its blocks back.
    fn forget_waiting(&mut self, forgotten: &Record) {
        if self.orphans.is_empty() {
            return;
        }
        let meant = forgotten.blocks.iter().skip(forgotten.known as usize);
        let blocks: HashSet<BlockHash> = meant.copied().collect();
        for waiting in &mut self.orphans {
            let Entry::Routed(waiting) = waiting else { continue };
            let ours = waiting.replica == forgotten.replica && waiting.fate == Fate::Held;
            let cut = waiting.blocks.iter().position(|block| ours && blocks.contains(block));
            waiting.blocks.truncate(cut.unwrap_or(waiting.blocks.len()));
        }
    }
}

pub(super) fn has_room(waiting: &[Entry]) -> bool {
    let blocks = || waiting.iter().map(Entry::blocks).sum::<usize>();
    waiting.len() < MAX_WAITING_RECORDS && blocks() < MAX_WAITING_BLOCKS
}

/// What an entry takes to apply, in blocks.
fn cost(entry: &Entry) -> usize {
    entry.blocks() + RECORD_COST
}
