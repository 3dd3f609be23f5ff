//! A VM's link to the others: its slot, its log, and its picture of the whole Envoy.
//!
//! What a VM knows of the fleet is here: the replica table, the prefix index, and everybody's
//! charges. It asks no replica, chooses none, and reports no number: what there is to count is
//! taken by [`Link::take_counts`].

use super::log::{Fate, LogReader, Read, Record, SEGMENTS};
use super::slot::OwnSlot;
use super::store::Store;
use super::table::{self, Published};
use super::vm::{LogHead, VmState};
use super::{MAX_VM_SLOTS, log_key, slot_key};
use crate::charge::Charges;
use crate::index::{PrefixIndex, Recorded};
use crate::replicas::strikes::{PassiveHealth, Proof, Strikes};
use crate::replicas::{Moment, ReplicaId, ReplicaTable};
use std::time::Duration;

/// What a link takes from the configuration.
#[derive(Debug, Clone, Copy)]
pub struct LinkConfig {
    /// Tells apart configurations that may not read each other's values.
    pub fingerprint: u64,
    /// How long until tokens that were sent lately count half.
    pub recent_half_life: Duration,
    /// Blocks assumed of a replica that has not said its capacity.
    pub default_capacity_blocks: u32,
}

/// What happened since it was last asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Segments that were overwritten before they were read.
    pub lapped: u64,
    /// Records whose parent block is not held.
    pub orphaned: u64,
    /// Writes that the store refused.
    pub refused: u64,
}

/// Another VM.
struct Peer {
    reader: LogReader,
    state: Option<VmState>,
}

/// See the module.
pub struct Link<S> {
    store: S,
    config: LinkConfig,
    vm: u64,
    own: Option<OwnSlot>,
    charges: Charges,
    strikes: Strikes,
    peers: Vec<Peer>,
    table: ReplicaTable,
    table_marks: (u64, u64),
    index: PrefixIndex,
    ready: bool,
    counts: Counts,
}

impl<S: Store> Link<S> {
    /// The link of a VM that no other has the number of.
    pub fn new(store: S, config: LinkConfig, vm: u64) -> Self {
        Self {
            store,
            config,
            vm,
            own: None,
            charges: Charges::default(),
            strikes: Strikes::default(),
            peers: Vec::new(),
            table: ReplicaTable::default(),
            table_marks: (0, 0),
            index: PrefixIndex::new(),
            ready: false,
            counts: Counts::default(),
        }
    }

    /// Goes on by another configuration of the same fingerprint.
    pub fn reconfigure(&mut self, config: LinkConfig) {
        self.config = config;
    }

    /// This VM's number.
    pub fn vm(&self) -> u64 {
        self.vm
    }

    /// This VM's slot.
    pub fn slot(&self) -> Option<u32> {
        self.own.as_ref().map(|own| own.number)
    }

    /// The replicas.
    pub fn table(&self) -> &ReplicaTable {
        &self.table
    }

    /// What they hold.
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    /// Says whether this VM has every tokenizer.
    pub fn set_ready(&mut self, ready: bool) {
        self.ready = ready;
    }

    /// What there is to count since the last call.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Keeps the slot, looks for VMs that came and went, and takes in what is new.
    pub fn tick(&mut self, now: Moment) {
        self.keep_slot(now);
        self.find_peers();
        self.refresh(now);
        self.charges.forget_idle(now, self.config.recent_half_life);
        let (all, table) = (self.all_strikes(), &self.table);
        self.strikes.forget(&all, now, |replica| table.by_id(replica).is_some());
        self.publish(now);
    }

    fn keep_slot(&mut self, now: Moment) {
        let kept = self.own.as_mut().is_some_and(|own| own.keep(&self.store, self.vm));
        if !kept {
            let fingerprint = self.config.fingerprint;
            self.own = OwnSlot::claim(&self.store, fingerprint, now, |head| self.state(head, now));
        }
    }

    fn state(&self, head: LogHead, now: Moment) -> VmState {
        VmState {
            owner: self.vm,
            heartbeat: now,
            ready: self.ready,
            head,
            charges: self.charges.clone(),
            strikes: self.strikes.clone(),
        }
    }

    /// Writes charges, heartbeat and log head for the others to see.
    pub fn publish(&mut self, now: Moment) {
        let Some(own) = self.own.as_ref().filter(|own| own.is_confirmed()) else { return };
        let state = self.state(own.head(), now);
        let written = own.publish(&self.store, self.config.fingerprint, &state);
        self.counts.refused += u64::from(!written);
    }

    /// Slots are claimed from the lowest number, so the first that was never claimed ends them.
    fn find_peers(&mut self) {
        while let Ok(number) = u32::try_from(self.peers.len()) {
            let exists = self.store.get(&slot_key(number)).1.is_some();
            if number >= MAX_VM_SLOTS || !exists {
                return;
            }
            self.peers.push(Peer { reader: LogReader::default(), state: None });
        }
    }

    /// Takes in the table, every VM's charges and every VM's log, as far as they are new.
    pub fn refresh(&mut self, now: Moment) {
        self.refresh_table();
        let own = self.slot();
        let mut peers = std::mem::take(&mut self.peers);
        let mut orphans = Vec::new();
        for (number, peer) in (0u32..).zip(&mut peers) {
            if own != Some(number) {
                self.refresh_peer(number, peer, now, &mut orphans);
            }
        }
        self.peers = peers;
        self.apply_orphans(orphans);
    }

    /// A record may build on one in a log that was read after its own, so what found no parent is
    /// tried again, for as long as that helps.
    fn apply_orphans(&mut self, mut orphans: Vec<Record>) {
        loop {
            let before = orphans.len();
            orphans.retain(|record| !self.apply(record));
            if orphans.is_empty() || orphans.len() == before {
                break;
            }
        }
        self.counts.orphaned += orphans.len() as u64;
    }

    fn refresh_peer(
        &mut self,
        number: u32,
        peer: &mut Peer,
        now: Moment,
        orphans: &mut Vec<Record>,
    ) {
        let (value, _) = self.store.get(&slot_key(number));
        let fingerprint = self.config.fingerprint;
        let read = value.as_deref().and_then(VmState::read);
        peer.state = read.filter(|(of, _)| *of == fingerprint).map(|(_, state)| state);
        let Some(head) = peer.state.as_ref().map(|state| state.head) else { return };
        let lapped_before = peer.reader.lapped;
        // Each step moves the reader on, and a ring has so many places.
        for _ in 0..=SEGMENTS {
            let Some(place) = peer.reader.place(head) else { break };
            let (segment, _) = self.store.get(&log_key(number, place));
            if let Read::Records(records) = peer.reader.take(segment.as_deref(), fingerprint, head)
            {
                orphans.extend(records.into_iter().filter(|record| !self.apply(record)));
            }
        }
        self.counts.lapped += peer.reader.lapped - lapped_before;
        if peer.state.as_ref().is_some_and(|state| !state.is_alive(now)) {
            peer.state = None;
        }
    }

    /// Applies a record. False when its parent is not held: then it may be tried again.
    fn apply(&mut self, record: &Record) -> bool {
        // A record of an incarnation that is not in the table is of a cache that is gone, or of
        // one this VM has not heard of yet; the latter is rare and only costs a prediction.
        if self.table.by_id(record.replica).is_none() {
            return true;
        }
        if record.fate == Fate::Forgotten {
            self.index.forget(record.replica, &record.blocks);
            return true;
        }
        let capacity = self.capacity(record.replica);
        let recorded = self.index.record(record.replica, capacity, record.parent, &record.blocks);
        recorded == Recorded::Held
    }

    /// Most blocks that are remembered of a replica.
    pub fn capacity(&self, replica: ReplicaId) -> usize {
        self.table.shadow_blocks(replica, self.config.default_capacity_blocks)
    }

    fn refresh_table(&mut self) {
        let newer = table::read_newer(&self.store, self.config.fingerprint, self.table_marks);
        if let Some(Published { epoch, version, table }) = newer {
            self.table_marks = (epoch, version);
            self.take_table(table);
        }
    }

    fn take_table(&mut self, table: ReplicaTable) {
        self.table = table;
        let table = &self.table;
        self.index.retain(|replica| table.by_id(replica).is_some());
        let default = self.config.default_capacity_blocks;
        for replica in table.iter() {
            self.index.set_capacity(replica.id, table.shadow_blocks(replica.id, default));
        }
    }

    /// Publishes a table, unless a later leader already has. Returns whether it was written.
    pub fn publish_table(&mut self, epoch: u64, table: &ReplicaTable) -> bool {
        table::publish(&self.store, self.config.fingerprint, epoch, table)
    }

    /// Everybody's charges.
    pub fn all_charges(&self, now: Moment) -> Charges {
        let half_life = self.config.recent_half_life;
        let mut sum = Charges::default();
        sum.add(&self.charges, now, half_life);
        for state in self.peers.iter().filter_map(|peer| peer.state.as_ref()) {
            sum.add(&state.charges, now, half_life);
        }
        sum
    }

    /// Everybody's strikes.
    pub fn all_strikes(&self) -> Strikes {
        let peers = self.peers.iter().filter_map(|peer| peer.state.as_ref());
        Strikes::merged(peers.map(|state| &state.strikes).chain([&self.strikes]))
    }

    /// How many VMs live, this one included, and how many of them have every tokenizer.
    pub fn count_vms(&self) -> (u64, u64) {
        let states = || self.peers.iter().filter_map(|peer| peer.state.as_ref());
        let ready = states().filter(|state| state.ready).count() as u64;
        (states().count() as u64 + 1, ready + u64::from(self.ready))
    }

    /// Notes that blocks were sent to (or made by) a replica, here and in the log.
    pub fn record(&mut self, record: &Record) {
        if record.blocks.is_empty() && record.parent.is_none() {
            return;
        }
        self.apply(record);
        if let Some(own) = self.own.as_mut().filter(|own| own.is_confirmed()) {
            let written = own.append(&self.store, record);
            self.counts.refused += u64::from(!written);
        }
    }

    /// Charges a request that is being sent.
    pub fn charge(&mut self, replica: ReplicaId, uncached: u64, now: Moment) {
        self.charges.start(replica, uncached, now, self.config.recent_half_life);
    }

    /// Releases the tokens of a request whose answer has begun.
    pub fn answer_began(&mut self, replica: ReplicaId, uncached: u64) {
        self.charges.answer_began(replica, uncached);
    }

    /// Releases a request that has ended.
    pub fn release(&mut self, replica: ReplicaId) {
        self.charges.end(replica);
    }
}

/// What was seen of replicas in passing.
impl<S: Store> Link<S> {
    /// Notes that a replica failed a request sent at `sent`. Whether that suspends it.
    pub fn failed(
        &mut self,
        config: &PassiveHealth,
        replica: ReplicaId,
        proof: Proof,
        sent: Moment,
        now: Moment,
    ) -> bool {
        if self.table.by_id(replica).is_none() {
            return false;
        }
        let all = self.all_strikes();
        self.strikes.failed(config, &all, replica, proof, sent, now)
    }

    /// Notes that a replica answered a request sent at `sent` as it should. Whether that takes
    /// anything back.
    pub fn succeeded(&mut self, replica: ReplicaId, sent: Moment, now: Moment) -> bool {
        let all = self.all_strikes();
        self.strikes.succeeded(&all, replica, sent, now)
    }

    /// Counts a request among those that try out a suspended replica, if it is one. Whether it is.
    pub fn probe_began(&mut self, replica: ReplicaId) -> bool {
        let suspended = self.all_strikes().of(replica).is_suspended();
        if suspended {
            self.strikes.probe_began(replica);
        }
        suspended
    }

    /// And its end.
    pub fn probe_ended(&mut self, replica: ReplicaId) {
        self.strikes.probe_ended(replica);
    }
}
