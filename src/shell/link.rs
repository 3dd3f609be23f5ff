//! This VM's link to the others: its slot, its log, and its picture of the whole Envoy.
//!
//! Everything is read and written through [`crate::share`]'s formats. What a VM knows of the
//! fleet is here: the replica table, the prefix index, and everybody's charges. It asks no replica
//! and chooses none.

use super::{host, meters};
use crate::charge::Charges;
use crate::config::Config;
use crate::index::{PrefixIndex, Recorded};
use crate::metrics;
use crate::replicas::strikes::{Proof, Strikes};
use crate::replicas::{Moment, ReplicaId, ReplicaTable};
use crate::route::{Decision, View};
use crate::share::log::{Fate, LogReader, LogWriter, Read, Record, SEGMENTS};
use crate::share::table::Published;
use crate::share::vm::{self, LogHead, VmState};
use crate::share::{MAX_VM_SLOTS, lease};
use std::rc::Rc;
use std::time::Duration;

/// A slot that this VM claimed.
struct OwnSlot {
    number: u32,
    log: LogWriter,
    /// Whether a later tick still found the claim. While a slot's key is being created by several
    /// VMs at once a claim can be overwritten, so nothing is written under it before that.
    confirmed: bool,
}

/// Another VM.
struct Peer {
    reader: LogReader,
    state: Option<VmState>,
}

/// See the module.
pub struct Link {
    config: Rc<Config>,
    vm: u64,
    own: Option<OwnSlot>,
    charges: Charges,
    strikes: Strikes,
    peers: Vec<Peer>,
    table: ReplicaTable,
    table_marks: (u64, u64),
    index: PrefixIndex,
    ready: bool,
}

fn slot_key(number: u32) -> String {
    format!("warmpath/vm/{number}")
}

fn log_key(number: u32, place: u64) -> String {
    format!("warmpath/log/{number}/{place}")
}

impl Link {
    pub fn new(config: Rc<Config>) -> Self {
        Self {
            config,
            vm: host::unique_number(),
            own: None,
            charges: Charges::default(),
            strikes: Strikes::default(),
            peers: Vec::new(),
            table: ReplicaTable::default(),
            table_marks: (0, 0),
            index: PrefixIndex::new(),
            ready: false,
        }
    }

    pub fn vm(&self) -> u64 {
        self.vm
    }

    pub fn slot(&self) -> Option<u32> {
        self.own.as_ref().map(|own| own.number)
    }

    pub fn table(&self) -> &ReplicaTable {
        &self.table
    }

    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    pub fn set_ready(&mut self, ready: bool) {
        self.ready = ready;
    }

    /// Keeps the slot, looks for VMs that came and went, and takes in what is new.
    pub fn tick(&mut self, now: Moment) {
        self.keep_slot(now);
        self.find_peers();
        self.refresh(now);
        self.charges.forget_idle(now, self.half_life());
        let (all, table) = (self.all_strikes(), &self.table);
        self.strikes.forget(&all, now, |replica| table.by_id(replica).is_some());
        self.publish(now);
    }

    fn half_life(&self) -> Duration {
        self.config.route.cost.recent_half_life
    }

    fn keep_slot(&mut self, now: Moment) {
        if let Some(own) = &mut self.own {
            let (value, _) = host::shared(&slot_key(own.number));
            let owner = value.as_deref().and_then(VmState::read).map(|(_, state)| state.owner);
            if owner == Some(self.vm) {
                own.confirmed = true;
                return;
            }
            // Overwritten while it was created, or stalled for so long that another VM took it.
            self.own = None;
        }
        for number in 0..MAX_VM_SLOTS {
            if let Some(own) = self.claim(number, now) {
                self.own = Some(own);
                return;
            }
        }
    }

    fn claim(&self, number: u32, now: Moment) -> Option<OwnSlot> {
        let key = slot_key(number);
        let (mut value, mut mark) = host::shared(&key);
        if mark.is_none() {
            // A compare-and-swap against a missing key always succeeds, so two VMs could both
            // have the slot: it must exist before it can be claimed. An empty value is no claim.
            host::set_shared(&key, &[], None);
            (value, mark) = host::shared(&key);
        }
        let head = vm::claim(value.as_deref(), now)?;
        let state = self.state(head, now);
        let claimed = host::set_shared(&key, &state.write(self.config.fingerprint()), mark);
        // The host gives mark 0 for none, and 0 swaps unconditionally: not a claim.
        (claimed && mark.is_some()).then(|| OwnSlot {
            number,
            log: LogWriter::new(self.config.fingerprint(), self.vm, head),
            confirmed: false,
        })
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
        let Some(own) = self.own.as_ref().filter(|own| own.confirmed) else { return };
        let state = self.state(own.log.head(), now);
        let written =
            host::set_shared(&slot_key(own.number), &state.write(self.config.fingerprint()), None);
        if !written {
            meters::add(&metrics::HOST_ERRORS, &[], 1);
        }
    }

    /// Slots are claimed from the lowest number, so the first that was never claimed ends them.
    fn find_peers(&mut self) {
        while let Ok(number) = u32::try_from(self.peers.len()) {
            let exists = host::shared(&slot_key(number)).1.is_some();
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
        meters::add(&metrics::LOG_ORPHANED, &[], orphans.len() as u64);
    }

    fn refresh_peer(
        &mut self,
        number: u32,
        peer: &mut Peer,
        now: Moment,
        orphans: &mut Vec<Record>,
    ) {
        let (value, _) = host::shared(&slot_key(number));
        let fingerprint = self.config.fingerprint();
        let read = value.as_deref().and_then(VmState::read);
        peer.state = read.filter(|(of, _)| *of == fingerprint).map(|(_, state)| state);
        let Some(head) = peer.state.as_ref().map(|state| state.head) else { return };
        let lapped_before = peer.reader.lapped;
        // Each step moves the reader on, and a ring has so many places.
        for _ in 0..=SEGMENTS {
            let Some(place) = peer.reader.place(head) else { break };
            let (segment, _) = host::shared(&log_key(number, place));
            if let Read::Records(records) = peer.reader.take(segment.as_deref(), fingerprint, head)
            {
                orphans.extend(records.into_iter().filter(|record| !self.apply(record)));
            }
        }
        meters::add(&metrics::LOG_LAPPED, &[], peer.reader.lapped - lapped_before);
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

    pub fn capacity(&self, replica: ReplicaId) -> usize {
        self.table.shadow_blocks(replica, self.config.default_capacity_blocks)
    }

    fn table_key(&self) -> String {
        format!("warmpath/table/{:016x}", self.config.fingerprint())
    }

    fn marks_key(&self) -> String {
        format!("warmpath/table-marks/{:016x}", self.config.fingerprint())
    }

    fn refresh_table(&mut self) {
        let (marks, _) = host::shared(&self.marks_key());
        let marks = marks.and_then(|value| Published::marks(&value, self.config.fingerprint()));
        if marks.is_none_or(|marks| marks <= self.table_marks) {
            return;
        }
        let (value, _) = host::shared(&self.table_key());
        let read = value.and_then(|value| Published::read(&value, self.config.fingerprint()));
        if let Some(published) = read {
            self.table_marks = (published.epoch, published.version);
            self.take_table(published.table);
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
        let fingerprint = self.config.fingerprint();
        let (current, mark) = host::shared(&self.table_key());
        let marks = current.and_then(|value| Published::marks(&value, fingerprint));
        let (known_epoch, version) = marks.unwrap_or((0, 0));
        if known_epoch > epoch {
            return false;
        }
        let published = Published { epoch, version: version + 1, table: table.clone() };
        let value = published.write(fingerprint);
        if !host::set_shared(&self.table_key(), &value, mark) {
            return false;
        }
        let empty = Published { table: ReplicaTable::default(), ..published };
        host::set_shared(&self.marks_key(), &empty.write(fingerprint), None)
    }

    /// Everybody's charges.
    pub fn all_charges(&self, now: Moment) -> Charges {
        let mut sum = Charges::default();
        sum.add(&self.charges, now, self.half_life());
        for state in self.peers.iter().filter_map(|peer| peer.state.as_ref()) {
            sum.add(&state.charges, now, self.half_life());
        }
        sum
    }

    /// Everybody's strikes.
    pub fn all_strikes(&self) -> Strikes {
        let peers = self.peers.iter().filter_map(|peer| peer.state.as_ref());
        Strikes::merged(peers.map(|state| &state.strikes).chain([&self.strikes]))
    }

    /// Calls `decide` with the present picture.
    pub fn decide(&self, now: Moment, decide: impl FnOnce(&View<'_>) -> Decision) -> Decision {
        let charges = self.all_charges(now);
        let strikes = self.all_strikes();
        let (table, index) = (&self.table, &self.index);
        decide(&View { table, index, charges: &charges, strikes: &strikes, now })
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
        if let Some(own) = self.own.as_mut().filter(|own| own.confirmed) {
            let number = own.number;
            let (place, value) = own.log.append(record);
            if !host::set_shared(&log_key(number, place), value, None) {
                meters::add(&metrics::HOST_ERRORS, &[], 1);
            }
        }
    }

    pub fn charge(&mut self, replica: ReplicaId, uncached: u64, now: Moment) {
        let half_life = self.half_life();
        self.charges.start(replica, uncached, now, half_life);
    }

    pub fn answer_began(&mut self, replica: ReplicaId, uncached: u64) {
        self.charges.answer_began(replica, uncached);
    }

    pub fn release(&mut self, replica: ReplicaId) {
        self.charges.end(replica);
    }
}

/// What was seen of replicas in passing.
impl Link {
    /// Notes that a replica failed a request sent at `sent`. Whether that suspends it.
    pub fn failed(&mut self, replica: ReplicaId, proof: Proof, sent: Moment, now: Moment) -> bool {
        if self.table.by_id(replica).is_none() {
            return false;
        }
        let all = self.all_strikes();
        self.strikes.failed(&self.config.passive_health, &all, replica, proof, sent, now)
    }

    /// Notes that a replica answered a request sent at `sent` as it should.
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

/// A lease in shared data.
pub struct SharedLease {
    key: String,
    fingerprint: u64,
    vm: u64,
    term: Duration,
}

impl SharedLease {
    pub fn new(name: &str, config: &Config, vm: u64, term: Duration) -> Self {
        let fingerprint = config.fingerprint();
        Self { key: format!("warmpath/{name}/{fingerprint:016x}"), fingerprint, vm, term }
    }

    /// Claims or renews it. The epoch, when it is held.
    pub fn hold(&self, now: Moment, grace: Duration) -> Option<u64> {
        let (mut value, mut mark) = host::shared(&self.key);
        if mark.is_none() {
            host::set_shared(&self.key, &[], None);
            (value, mark) = host::shared(&self.key);
        }
        let current = value.and_then(|value| lease::Lease::read(&value, self.fingerprint));
        let claimed = lease::claim(current, self.vm, now, self.term, grace)?;
        let written = host::set_shared(&self.key, &claimed.write(self.fingerprint), mark);
        (written && mark.is_some()).then_some(claimed.epoch)
    }

    /// Gives it up, so that the next one need not wait for its end.
    pub fn give_up(&self, now: Moment) {
        let (value, mark) = host::shared(&self.key);
        let current = value.and_then(|value| lease::Lease::read(&value, self.fingerprint));
        if let Some(lease) = current.filter(|lease| lease.holder == self.vm) {
            let ended = lease::Lease { until: now, ..lease };
            host::set_shared(&self.key, &ended.write(self.fingerprint), mark);
        }
    }
}
