//! A VM's link to the others: its slot, its log, and its picture of the whole Envoy.
//!
//! What a VM knows of the fleet is here: the replica table, the prefix index, and everybody's
//! charges. It asks no replica, chooses none, and reports no number: what there is to count is
//! taken by [`Link::take_counts`].

mod charges;
#[cfg(test)]
pub(in crate::share) mod envoy;
mod learned;
mod peers;
mod table;
#[cfg(test)]
mod tests;

pub(super) use peers::Peer;

use super::catch_up::{CatchUp, Knowledge, SnapshotCounts};
use super::log::Entry;
use super::observed::Standing;
use super::slot::OwnSlot;
use super::store::Store;
use super::table::Marks;
use super::vm::{LogHead, VmState, VmTraits};
use crate::charge::Charges;
use crate::index::{Hearing, PrefixIndex};
use crate::learn::pending::Pending;
use crate::learn::{Lessons, Rates};
use crate::replicas::strikes::Strikes;
use crate::replicas::{Moment, ReplicaId, ReplicaTable};
use hashbrown::HashMap;
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
    /// Whether replicas are as fast as their answers show, or as configured.
    pub learns_rates: bool,
    /// How work is counted: tokens at which attention costs as much as the rest, and those assumed of others' requests.
    pub work: (f64, f64),
    /// Whether a second policy's choices are imagined beside those that are made.
    pub imagines: bool,
}

/// What happened since it was last asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Segments that were overwritten before they were read.
    pub lapped: u64,
    /// Records whose parent block is not held.
    pub orphaned: u64,
    /// Updates of replicas' reports that were missed.
    pub gaps: u64,
    /// Blocks that replicas reported and that were left out.
    pub cut: u64,
    /// Writes that the store refused.
    pub refused: u64,
    /// Requests of a VM without a slot: no other counts them in flight.
    pub unshared: u64,
    /// Records that reach no other VM, since too much waits for a slot.
    pub unlogged: u64,
    /// What became of snapshots.
    pub snapshots: SnapshotCounts,
}

/// Blocks evicted on one tick where a capacity has shrunk: some milliseconds.
const SHRUNK_PER_TICK: usize = 8 << 10;

/// How long what a second policy's caches would hold is kept behind the last of its choices, where the latest configuration
/// has none. Halved, it is sooner lost where another listener has one and little traffic; doubled, so is its memory longer
/// held after an update.
const IMAGINED_FOR: Duration = Duration::from_secs(60);

/// See the module.
pub struct Link<S> {
    pub(super) store: S,
    pub(super) config: LinkConfig,
    pub(super) vm: u64,
    pub(super) traits: VmTraits,
    pub(super) own: Option<OwnSlot>,
    /// How far this VM's own log is to be read by itself: what the slot's former owners wrote,
    /// and after a snapshot what it wrote since then.
    own_until: LogHead,
    charges: Charges,
    strikes: Strikes,
    lessons: Lessons,
    pub(super) pending: Pending,
    /// When it was last told the time.
    pub(super) now: Moment,
    /// How often what was learned has changed.
    lessons_version: u64,
    /// Which version of it is written, and beside which slot.
    written: Option<(u32, u64)>,
    rates: Rates,
    peers: Vec<Peer>,
    /// Whose log is read first: while there is more to read than at once, all have their turn.
    first_peer: usize,
    /// Entries that continue what may still come, in a log that is read later.
    pub(super) orphans: Vec<Entry>,
    /// Since when there are updates among them.
    pub(super) waits_since: Option<Moment>,
    /// Entries of this VM that are not in its log yet.
    pub(super) unlogged: Vec<Entry>,
    /// Entries in the log, behind the head that was last published.
    pub(super) unpublished: Vec<Entry>,
    /// How far replicas' reports are in the index.
    pub(super) standings: HashMap<ReplicaId, Standing>,
    /// What is known only here, where reports are heard.
    pub(super) hearings: HashMap<ReplicaId, Hearing>,
    /// The epoch in which this VM led last.
    pub(super) led_epoch: u64,
    pub(super) table: ReplicaTable,
    table_marks: Marks,
    /// The last version of a table that this VM wrote.
    table_version: u64,
    pub(super) index: PrefixIndex,
    /// When something was last recorded of an imagined replica.
    pub(super) imagined_at: Moment,
    /// Whether a log was overwritten before it was read.
    pub(super) overtaken: bool,
    pub(super) catch_up: CatchUp,
    pub(super) counts: Counts,
}

impl<S: Store> Link<S> {
    /// The link of a VM. Nobody else has the number `vm`, and no client can know it; `instance`
    /// is the same for all links of one VM.
    pub fn new(store: S, config: LinkConfig, vm: u64, instance: u64) -> Self {
        Self {
            store,
            config,
            vm,
            traits: VmTraits { instance, ..VmTraits::default() },
            own: None,
            own_until: LogHead::default(),
            charges: Charges::default(),
            strikes: Strikes::default(),
            lessons: Lessons::default(),
            pending: Pending::default(),
            now: Moment::default(),
            lessons_version: 0,
            written: None,
            rates: Rates::default(),
            peers: Vec::new(),
            first_peer: 0,
            orphans: Vec::new(),
            waits_since: None,
            unlogged: Vec::new(),
            unpublished: Vec::new(),
            standings: HashMap::new(),
            hearings: HashMap::new(),
            led_epoch: 0,
            table: ReplicaTable::default(),
            table_marks: Marks::default(),
            table_version: 0,
            index: PrefixIndex::with_seed(vm),
            imagined_at: Moment::default(),
            overtaken: false,
            catch_up: CatchUp::default(),
            counts: Counts::default(),
        }
    }

    /// Goes on by another configuration of the same fingerprint. What was learned stays, unless work is counted in
    /// another way from now on.
    pub fn reconfigure(&mut self, config: LinkConfig) {
        let before = std::mem::replace(&mut self.config, config);
        if before.work != config.work {
            self.lessons.forget_speeds();
        }
        if !config.learns_rates {
            self.rates = Rates::default();
        }
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

    /// Says whether this VM has every tokenizer, and whether it has served a request.
    pub fn set_traits(&mut self, ready: bool, has_traffic: bool) {
        self.traits.ready = ready;
        self.traits.has_traffic = has_traffic;
    }

    /// What there is to count since the last call.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Keeps the slot, looks for VMs that came and went, and takes in what is new.
    pub fn tick(&mut self, now: Moment) {
        self.keep_slot(now);
        self.log();
        self.find_peers();
        self.refresh(now);
        self.catch_up(now);
        self.learn(now);
        self.forget_imagined(now);
        self.index.shrink(SHRUNK_PER_TICK);
        self.charges.forget_idle(now, self.config.recent_half_life);
        let (all, table) = (self.all_strikes(), &self.table);
        self.strikes.forget(&all, now, |replica| table.by_id(replica).is_some());
        self.publish(now);
    }

    /// Gives up what nobody imagines any more.
    fn forget_imagined(&mut self, now: Moment) {
        let is_over = !self.config.imagines && now.since(self.imagined_at) >= IMAGINED_FOR;
        if is_over && self.index.replicas().any(ReplicaId::is_imagined) {
            self.index.retain(|replica| !replica.is_imagined());
        }
    }

    fn keep_slot(&mut self, now: Moment) {
        let kept = self.own.as_mut().is_some_and(|own| own.keep(&self.store, self.vm));
        if !kept {
            self.lose_slot();
            let fingerprint = self.config.fingerprint;
            self.own = OwnSlot::claim(&self.store, fingerprint, now, |head| self.state(head, now));
        }
    }

    fn state(&self, head: LogHead, now: Moment) -> VmState<&Charges, &Strikes> {
        let wants_snapshot = self.catch_up.knowledge != Knowledge::Full;
        VmState {
            owner: self.vm,
            heartbeat: now,
            traits: VmTraits { wants_snapshot, ..self.traits },
            head,
            charges: &self.charges,
            strikes: &self.strikes,
            learned_version: self
                .written
                .filter(|(slot, _)| Some(*slot) == self.slot())
                .map_or(0, |w| w.1),
        }
    }

    /// Writes charges, heartbeat and log head for the others to see.
    pub fn publish(&mut self, now: Moment) {
        let Some(own) = self.own.as_ref().filter(|own| own.is_confirmed()) else { return };
        let state = self.state(own.head(), now);
        if !own.publish(&self.store, self.config.fingerprint, &state) {
            // Another VM has it: the next tick claims another one.
            self.lose_slot();
            return;
        }
        self.unpublished.clear();
    }

    /// Ends this VM's part: its charges are over and its slot is free. Should it write once more,
    /// for a request that outlives its configuration, it has the slot again until it is taken.
    pub fn leave(&mut self) {
        let Some(own) = self.own.as_ref().filter(|own| own.is_confirmed()) else { return };
        let state = self.state(own.head(), Moment::default());
        own.publish(&self.store, self.config.fingerprint, &state);
    }

    /// What was written under the slot and not published goes into the next one's log; what was
    /// published is not read back, or it would follow what comes after it.
    fn lose_slot(&mut self) {
        let Some(own) = self.own.take() else { return };
        if let Some(peer) = self.peers.get_mut(own.number as usize) {
            peer.reader.go_to(own.head());
        }
        self.unpublished.append(&mut self.unlogged);
        self.unlogged = std::mem::take(&mut self.unpublished);
    }
}
