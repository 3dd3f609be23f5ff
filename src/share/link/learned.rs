//! How fast and how large replicas are, as all VMs have learned it, and what of their caches turned out otherwise.
//!
//! What follows from an answer is [`crate::learn`]'s part. It is read and merged on ticks alone.

use super::Link;
use crate::learn::sizing::Evidence;
use crate::learn::{Answered, Learned, Lesson, Rates};
use crate::replicas::{Moment, ReplicaId};
use crate::share::log::{Fate, Record};
use crate::share::store::Store;
use crate::share::{learned, learned_key};
use crate::tokens::blocks::BlockHash;
use hashbrown::HashMap;

/// What another VM had learned when it was last read.
pub(super) struct PeersLearned {
    owner: u64,
    version: u64,
    learned: Vec<(ReplicaId, Learned)>,
}

impl<S: Store> Link<S> {
    /// Tells the others what is new here, and takes in what is new there.
    pub(super) fn learn(&mut self, now: Moment) {
        let changed = self.lessons.settle(now, &self.table);
        self.lessons_version += u64::from(changed);
        self.write_learned();
        for (number, peer) in (0u32..).zip(&mut self.peers) {
            let Some(state) = peer.state.as_ref().filter(|state| state.learned_version > 0) else {
                peer.learned = None;
                continue;
            };
            let last = (state.owner, state.learned_version);
            if peer.learned.as_ref().is_some_and(|known| (known.owner, known.version) == last) {
                continue;
            }
            let (value, _) = self.store.get(&learned_key(number));
            let found = value.and_then(|v| learned::read(&v, self.config.fingerprint, state.owner));
            let owner = state.owner;
            peer.learned = found.map(|(version, learned)| PeersLearned { owner, version, learned });
        }
        if self.config.learns_rates {
            self.rates = Rates::merged(self.all_learned(), &self.table, now);
        }
    }

    /// Before the slot that says so.
    fn write_learned(&mut self) {
        let Some(own) = self.own.as_ref().filter(|own| own.is_confirmed()) else { return };
        let version = self.lessons_version;
        if version == 0 || self.written == Some((own.number, version)) {
            return;
        }
        let learned = self.lessons.learned();
        let value = learned::write(self.config.fingerprint, self.vm, version, learned);
        if self.store.set(&learned_key(own.number), &value, None) {
            self.written = Some((own.number, version));
        } else {
            self.counts.refused += 1;
        }
    }

    fn all_learned(&self) -> impl Iterator<Item = (ReplicaId, Learned)> {
        let peers = self.peers.iter().filter_map(|peer| peer.learned.as_ref());
        peers.flat_map(|peer| peer.learned.iter().copied()).chain(self.lessons.learned())
    }

    /// How fast every replica is, as all VMs have learned it by the last tick.
    pub fn rates(&self) -> &Rates {
        &self.rates
    }

    /// How predictions came out, by replica and over all VMs.
    pub fn all_evidence(&self) -> HashMap<ReplicaId, Evidence> {
        let mut all: HashMap<ReplicaId, Evidence> = HashMap::new();
        for (replica, learned) in self.all_learned() {
            all.entry(replica).or_default().add(&learned.evidence);
        }
        all
    }

    /// Takes in what a streamed answer showed.
    pub fn answered(&mut self, replica: ReplicaId, answered: &Answered, now: Moment) -> Lesson {
        self.lessons.take(replica, answered, now)
    }

    /// Whether any of these blocks was being computed on a replica when a request was sent there, as far as is known.
    pub fn was_computing(&self, replica: ReplicaId, blocks: &[BlockHash], sent: Moment) -> bool {
        self.pending.concerns(replica, blocks, sent)
    }

    /// An answer has begun, so that its request's new blocks, of which this is the first, are there.
    pub fn computed(&mut self, replica: ReplicaId, first_new: BlockHash, now: Moment) {
        self.pending.ended(replica, first_new, now);
    }

    /// A replica had no more than the first `held` blocks of a chain, and has computed all of it since: whatever else
    /// follows these is not there any more. Others learn it through the log.
    pub fn correct(&mut self, replica: ReplicaId, chain: &[BlockHash], held: usize) {
        let Some(to_the_missing) = chain.get(..=held) else { return };
        self.record(Record::of(Fate::Lost, replica, to_the_missing, held));
        self.record(Record::of(Fate::Held, replica, chain, held));
        // Those are there.
        if let Some(first) = chain.get(held) {
            self.pending.ended(replica, *first, self.now);
        }
    }

    /// Takes in how a prediction came out.
    pub fn compared(&mut self, replica: ReplicaId, predicted: u32, cached: u32) {
        // How large a cache is that says what it holds need not be found out.
        let is_reporting = self.index.is_reporting(replica);
        if is_reporting || cached < predicted && !self.index.is_well_filled(replica) {
            return;
        }
        self.lessons.compared(replica, predicted, cached);
    }
}
