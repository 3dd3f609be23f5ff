//! A VM's link to the others: its slot, its log, and its picture of the whole Envoy.
//!
//! What a VM knows of the fleet is here: the replica table, the prefix index, and everybody's
//! charges. It asks no replica, chooses none, and reports no number: what there is to count is
//! taken by [`Link::take_counts`].

use super::catch_up::{CatchUp, Knowledge, SnapshotCounts};
use super::log::{Entry, Fate, LogReader, Record};
use super::observed::{self, Standing};
use super::slot::OwnSlot;
use super::store::Store;
use super::table::{self, Marks, Published, Refusal};
use super::vm::{LogHead, VmState, VmTraits};
use super::{MAX_VM_SLOTS, learned, learned_key, slot_key};
use crate::charge::Charges;
use crate::index::{Hearing, PrefixIndex};
use crate::learn::pending::Pending;
use crate::learn::sizing::Evidence;
use crate::learn::{Answered, Learned, Lesson, Lessons, Rates};
use crate::replicas::strikes::{PassiveHealth, Proof, Strikes};
use crate::replicas::{Moment, ReplicaId, ReplicaTable};
use crate::tokens::blocks::BlockHash;
use hashbrown::{HashMap, HashSet};
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

/// Blocks read from the logs of others at one refresh, and the rest of the last segment, which has some 6,000: some
/// milliseconds. Halved, a VM that is far behind takes twice as long to come up; doubled, so does the longest pause of
/// its worker.
const BLOCKS_PER_REFRESH: usize = 16 << 10;

/// Blocks evicted on one tick where a capacity has shrunk: some milliseconds.
const SHRUNK_PER_TICK: usize = 8 << 10;

/// How long what a second policy's caches would hold is kept behind the last of its choices, where the latest configuration
/// has none. Halved, it is sooner lost where another listener has one and little traffic; doubled, so is its memory longer
/// held after an update.
const IMAGINED_FOR: Duration = Duration::from_secs(60);

/// Another VM.
#[derive(Default)]
pub(super) struct Peer {
    pub(super) reader: LogReader,
    /// What was last read of its slot, until that changes: a VM that is idle writes on ticks alone.
    value: Vec<u8>,
    /// Whose it is, if its log is for this configuration.
    owner: Option<u64>,
    /// While it lives.
    state: Option<VmState>,
    /// How far its log goes, whoever wrote it.
    pub(super) head: LogHead,
    learned: Option<PeersLearned>,
}

/// What another VM had learned when it was last read.
struct PeersLearned {
    owner: u64,
    version: u64,
    learned: Vec<(ReplicaId, Learned)>,
}

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

    /// Slots are claimed from the lowest number, so the first that was never claimed ends them.
    fn find_peers(&mut self) {
        while let Ok(number) = u32::try_from(self.peers.len()) {
            let exists = self.store.get(&slot_key(number)).1.is_some();
            if number >= MAX_VM_SLOTS || !exists {
                return;
            }
            self.peers.push(Peer::default());
        }
    }

    /// Takes in the table, every VM's charges and every VM's log, as far as they are new.
    pub fn refresh(&mut self, now: Moment) {
        self.now = now;
        self.index.advance(now);
        self.refresh_table();
        // What waited for the table comes before what is read now.
        self.apply_waiting();
        let own = self.slot();
        let mut peers = std::mem::take(&mut self.peers);
        let mut budget = BLOCKS_PER_REFRESH;
        let mut is_behind = false;
        let mut numbered: Vec<(u32, &mut Peer)> = (0u32..).zip(&mut peers).collect();
        let first = self.first_peer.min(numbered.len());
        numbered.rotate_left(first);
        for (number, peer) in numbered {
            if own == Some(number) {
                (peer.state, peer.head) = (None, self.own_until);
                peer.value.clear();
                // All at once: what this VM records next comes behind it.
                let mut whole_log = usize::MAX;
                self.read_log(number, peer, self.vm, &mut whole_log);
            } else if let Some(owner) = self.refresh_peer(number, peer, now) {
                is_behind |= !self.read_log(number, peer, owner, &mut budget);
            }
        }
        self.peers = peers;
        if is_behind {
            self.first_peer = (self.first_peer + 1) % self.peers.len().max(1);
        } else {
            self.apply_orphans();
        }
    }

    /// Reads a slot. Who owns it, if its log is for this configuration.
    fn refresh_peer(&self, number: u32, peer: &mut Peer, now: Moment) -> Option<u64> {
        let (value, _) = self.store.get(&slot_key(number));
        let value = value.unwrap_or_default();
        if value != peer.value || value.is_empty() {
            let read = VmState::read(&value);
            let read = read.filter(|(fingerprint, _)| *fingerprint == self.config.fingerprint);
            peer.state = read.map(|(_, state)| state);
            peer.owner = peer.state.as_ref().map(|state| state.owner);
            peer.head = peer.state.as_ref().map_or(peer.head, |state| state.head);
            peer.value = value;
        }
        peer.state = peer.state.take().filter(|state| state.is_alive(now));
        peer.owner
    }

    /// The other VMs that live, by slot.
    pub(super) fn peer_states(&self) -> impl Iterator<Item = (u32, &VmState)> + Clone {
        let peers = (0u32..).zip(&self.peers);
        peers.filter_map(|(number, peer)| Some((number, peer.state.as_ref()?)))
    }

    /// How far every log goes.
    pub(super) fn heads(&self) -> impl Iterator<Item = (u32, LogHead)> {
        let own = self.own.as_ref().map(|own| (own.number, own.head()));
        (0u32..).zip(&self.peers).map(move |(number, peer)| match own {
            Some((slot, head)) if slot == number => (number, head),
            _ => (number, peer.head),
        })
    }

    /// How far every log is in the index.
    pub(super) fn positions(&self) -> Vec<(u32, LogHead)> {
        let own = self.own.as_ref().map(|own| (own.number, own.head()));
        let position = |(number, peer): (u32, &Peer)| match own {
            Some((slot, head)) if slot == number => (number, head),
            _ => (number, peer.reader.position()),
        };
        (0u32..).zip(&self.peers).map(position).collect()
    }

    /// Puts another VM's index in the place of this one's, which has all of every log up to there.
    pub(super) fn go_on_from(
        &mut self,
        index: PrefixIndex,
        logs: &[(u32, LogHead)],
        standings: HashMap<ReplicaId, Standing>,
    ) {
        self.index = index;
        self.standings = standings;
        self.hearings.clear();
        let whole = self.standings.iter().filter(|(_, standing)| standing.is_whole);
        let whole = whole.map(|(replica, standing)| (*replica, standing.has_tiers));
        self.index.go_on_reporting(whole);
        let gone: Vec<ReplicaId> = self
            .index
            .replicas()
            .filter(|id| self.table.by_id(*id).is_none() && !self.is_unheard_of(*id))
            .collect();
        self.index.retain(|replica| !gone.contains(&replica));
        self.standings.retain(|replica, _| !gone.contains(&replica.observed()));
        self.orphans.clear();
        for (number, peer) in (0u32..).zip(&mut self.peers) {
            let log = logs.iter().find(|(slot, _)| *slot == number);
            peer.reader.go_to(log.map_or(LogHead::default(), |(_, head)| *head));
        }
        self.own_until = self.own.as_ref().map(OwnSlot::head).unwrap_or_default();
    }

    /// Most blocks that are remembered of what was sent to a replica. Of one that reports that is only what it has not
    /// reported yet.
    pub fn capacity(&self, replica: ReplicaId) -> usize {
        let blocks = self.blocks_of(replica);
        if self.index.is_reporting(replica) { blocks / 2 } else { blocks }
    }

    /// KV blocks that a replica has, or seems to have.
    pub fn blocks_of(&self, replica: ReplicaId) -> usize {
        self.table.shadow_blocks(replica, self.config.default_capacity_blocks)
    }

    fn refresh_table(&mut self) {
        let newer = table::read_newer(&self.store, self.config.fingerprint, self.table_marks);
        if let Some(Published { marks, table }) = newer {
            self.table_marks = marks;
            self.take_table(table);
        }
    }

    fn take_table(&mut self, table: ReplicaTable) {
        self.table = table;
        let table = &self.table;
        self.index.retain(|replica| table.by_id(replica).is_some());
        self.standings.retain(|replica, _| table.by_id(*replica).is_some());
        self.hearings.retain(|replica, _| table.by_id(*replica).is_some());
        let default = self.config.default_capacity_blocks;
        for replica in table.iter() {
            let capacity = table.shadow_blocks(replica.id, default);
            for id in [replica.id, replica.id.imagined()] {
                self.index.set_capacity(id, capacity);
            }
            self.index.set_room(replica.id, observed::room(table, replica.id, default));
        }
    }

    /// What a leader does before it acts for the first time.
    pub fn prepare_table(&self) {
        table::prepare(&self.store, self.config.fingerprint);
    }

    /// What a new leader goes on from: the last table, which no earlier leader can change any more.
    ///
    /// # Errors
    /// When this VM leads no longer, or another writes now.
    pub fn adopt_table(&mut self, epoch: u64) -> Result<ReplicaTable, Refusal> {
        let adopted = table::adopt(&self.store, self.config.fingerprint, self.marks(epoch))?;
        self.led_epoch = epoch;
        let Some(Published { marks, table }) = adopted else { return Ok(self.table.clone()) };
        self.table_version = marks.version;
        Ok(table)
    }

    /// Publishes a table, unless a later leader already has.
    ///
    /// # Errors
    /// When it was not written.
    pub fn publish_table(&mut self, epoch: u64, table: &ReplicaTable) -> Result<(), Refusal> {
        let own = self.marks(epoch);
        let marks = table::publish(&self.store, self.config.fingerprint, own, table)?;
        (self.table_version, self.led_epoch) = (marks.version, epoch);
        Ok(())
    }

    fn marks(&self, epoch: u64) -> Marks {
        Marks { epoch, leader: self.vm, version: self.table_version }
    }

    /// Everybody's charges.
    pub fn all_charges(&self, now: Moment) -> Charges {
        let half_life = self.config.recent_half_life;
        let mut sum = Charges::default();
        sum.add(&self.charges, now, half_life);
        for (_, state) in self.peer_states() {
            sum.add(&state.charges, now, half_life);
        }
        sum
    }

    /// Everybody's strikes.
    pub fn all_strikes(&self) -> Strikes {
        let peers = self.peer_states().map(|(_, state)| &state.strikes);
        Strikes::merged(peers.chain([&self.strikes]))
    }

    /// How many VMs live, this one included, and how many of them have every tokenizer. One that
    /// has two slots, while a configuration is replaced, counts once.
    pub fn count_vms(&self) -> (u64, u64) {
        let all = || {
            let others = self.peer_states().map(|(_, state)| state.traits);
            others.chain([self.traits])
        };
        let instances: HashSet<u64> = all().map(|vm| vm.instance).collect();
        let ready: HashSet<u64> = all().filter(|vm| vm.ready).map(|vm| vm.instance).collect();
        (instances.len() as u64, ready.len() as u64)
    }

    /// Charges a request that is being sent.
    pub fn charge(&mut self, replica: ReplicaId, uncached: u64, now: Moment) {
        self.counts.unshared += u64::from(self.own.is_none() && !replica.is_imagined());
        self.charges.start(replica, uncached, now, self.config.recent_half_life);
    }

    /// Releases the tokens of a request whose answer has begun.
    pub fn answer_began(&mut self, replica: ReplicaId, uncached: u64, now: Moment) {
        self.charges.answer_began(replica, uncached, now);
    }

    /// Releases a request that has ended.
    pub fn release(&mut self, replica: ReplicaId) {
        self.charges.end(replica);
    }
}

/// How fast replicas are.
impl<S: Store> Link<S> {
    /// Tells the others what is new here, and takes in what is new there.
    fn learn(&mut self, now: Moment) {
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

    /// This Envoy's requests in flight on a replica.
    pub fn in_flight(&self, replica: ReplicaId) -> u32 {
        let peers = self.peer_states().map(|(_, state)| &state.charges);
        let all = peers.chain([&self.charges]).map(|charges| charges.of(replica).requests);
        all.fold(0, u32::saturating_add)
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
    pub fn probe_began(&mut self, replica: ReplicaId, now: Moment) -> bool {
        let suspended = self.all_strikes().of(replica).is_suspended();
        if suspended {
            self.strikes.probe_began(replica, now);
        }
        suspended
    }

    /// And that its answer has begun, or never will.
    pub fn probe_ended(&mut self, replica: ReplicaId) {
        self.strikes.probe_ended(replica);
    }
}

#[cfg(test)]
pub(in crate::share) mod tests {
    use super::super::log::{SEGMENT_BYTES, SEGMENTS};
    use super::*;
    use crate::replicas::Member;
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::rc::Rc;

    pub(in crate::share) const TICK: Duration = Duration::from_millis(100);
    pub(in crate::share) const CONFIG: LinkConfig = LinkConfig {
        fingerprint: 7,
        recent_half_life: Duration::from_secs(5),
        default_capacity_blocks: 1 << 19,
        learns_rates: true,
        work: (100_000.0, 512.0),
        imagines: true,
    };

    type Values = BTreeMap<String, (Vec<u8>, u32)>;

    /// Shared data in the memory of one thread, and what was read of it: keys and sizes.
    #[derive(Clone, Default)]
    pub(in crate::share) struct Data(Rc<RefCell<Values>>, Rc<RefCell<Vec<(String, usize)>>>);

    impl Store for Data {
        fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
            let bytes = self.0.borrow().get(key).map_or(0, |(value, _)| value.len());
            self.1.borrow_mut().push((key.to_owned(), bytes));
            match self.0.borrow().get(key) {
                Some((value, mark)) => ((!value.is_empty()).then(|| value.clone()), Some(*mark)),
                None => (None, None),
            }
        }

        fn set(&self, key: &str, value: &[u8], mark: Option<u32>) -> bool {
            let last = self.0.borrow().get(key).map_or(0, |(_, mark)| *mark);
            let matches = last == 0 || mark.is_none_or(|mark| mark == last);
            if matches {
                self.0.borrow_mut().insert(key.to_owned(), (value.to_vec(), last + 1));
            }
            matches
        }
    }

    /// Some VMs, the first of which publishes the table.
    pub(in crate::share) struct Envoy {
        pub(in crate::share) data: Data,
        pub(in crate::share) now: Moment,
        pub(in crate::share) table: ReplicaTable,
        pub(in crate::share) links: Vec<Link<Data>>,
        pub(in crate::share) counts: Vec<Counts>,
    }

    impl Envoy {
        pub(in crate::share) fn new(vms: usize) -> Self {
            let now = Moment::default().plus(Duration::from_secs(50));
            let data = Data::default();
            let mut envoy =
                Self { data, now, table: ReplicaTable::default(), links: vec![], counts: vec![] };
            (0..vms).for_each(|_| envoy.start());
            envoy.links[0].prepare_table();
            envoy.set_members(&["10.0.0.1:1", "10.0.0.2:1"]);
            (0..3).for_each(|_| envoy.tick());
            envoy
        }

        pub(in crate::share) fn start(&mut self) {
            let vm = self.links.len() as u64 + 1;
            self.links.push(Link::new(self.data.clone(), CONFIG, vm, vm));
            self.counts.push(Counts::default());
        }

        pub(in crate::share) fn set_members(&mut self, addresses: &[&str]) {
            let member = |address: &&str| Member::healthy((*address).to_owned());
            self.table.set_members("c", &addresses.iter().map(member).collect::<Vec<Member>>());
            self.links[0].publish_table(1, &self.table).unwrap();
        }

        pub(in crate::share) fn tick(&mut self) {
            self.now = self.now.plus(TICK);
            for (link, counts) in self.links.iter_mut().zip(&mut self.counts) {
                link.tick(self.now);
                let new = link.take_counts();
                counts.lapped += new.lapped;
                counts.orphaned += new.orphaned;
                counts.gaps += new.gaps;
                counts.cut += new.cut;
                counts.snapshots.taken += new.snapshots.taken;
                counts.snapshots.torn += new.snapshots.torn;
                counts.snapshots.written += new.snapshots.written;
            }
        }

        pub(in crate::share) fn replica(&self, place: u32) -> ReplicaId {
            self.table.at(place).unwrap().id
        }

        /// One VM routes a prompt of its own.
        pub(in crate::share) fn route(&mut self, vm: usize, place: u32, prompt: u64) {
            let (replica, now) = (self.replica(place), self.now);
            let link = &mut self.links[vm];
            link.refresh(now);
            let blocks = prompt_blocks(prompt);
            link.record(Record::of(Fate::Held, replica, &blocks, 0));
            link.publish(now);
        }

        #[track_caller]
        fn check_all_see(&self, place: u32, prompt: u64, blocks: usize) {
            let replica = self.replica(place);
            for (number, link) in self.links.iter().enumerate() {
                let seen = link.index().overlap_blocks(replica, &prompt_blocks(prompt));
                assert_eq!(seen, blocks, "VM {number}, prompt {prompt}");
            }
        }

        /// All tick until the last VM has a snapshot, with something else done between.
        pub(in crate::share) fn until_taken(&mut self, mut between: impl FnMut(&mut Self, u64)) {
            for round in 0..400 {
                self.tick();
                if self.counts.last().unwrap().snapshots.taken > 0 {
                    self.tick();
                    return;
                }
                between(self, round);
            }
            panic!("no snapshot: {:?}", self.counts);
        }
    }

    const PROMPT_BLOCKS: u64 = 400;

    fn prompt_blocks(prompt: u64) -> Vec<BlockHash> {
        (0..PROMPT_BLOCKS).map(|n| BlockHash(prompt * 1_000_000 + n)).collect()
    }

    /// More than the log of one writer keeps.
    fn long_history(envoy: &mut Envoy) -> u64 {
        let prompts = SEGMENTS * SEGMENT_BYTES as u64 / 8 / PROMPT_BLOCKS + 100;
        for prompt in 1..=prompts {
            envoy.route(1, (prompt % 2) as u32, prompt);
            if prompt % 20 == 0 {
                envoy.tick();
            }
        }
        prompts
    }

    #[test]
    fn a_new_vm_learns_what_the_logs_no_longer_have() {
        let mut envoy = Envoy::new(3);
        let last = long_history(&mut envoy);
        envoy.start();
        envoy.until_taken(|_, _| {});
        for prompt in [1, 2, 3, last - 1, last] {
            envoy.check_all_see((prompt % 2) as u32, prompt, PROMPT_BLOCKS as usize);
        }
        assert!(envoy.counts.iter().all(|counts| counts.lapped + counts.orphaned == 0));
        assert_eq!(envoy.counts[0].snapshots.written, 1, "{:?}", envoy.counts);
        let keys = envoy.data.0.borrow().len();
        (0..50).for_each(|_| envoy.tick());
        assert_eq!(envoy.data.0.borrow().len(), keys);
    }

    #[test]
    fn what_happens_while_a_snapshot_is_written_and_read_is_in_it_or_behind_it() {
        let mut envoy = Envoy::new(3);
        let first = long_history(&mut envoy) + 1;
        envoy.start();
        let mut last = first;
        envoy.until_taken(|envoy, round| {
            // Told by the old and by the new VM, refused, and of a replica that came.
            for vm in [1, 2, 3] {
                envoy.route(vm, 0, last);
                last += 1;
            }
            let (replica, blocks) = (envoy.replica(0), prompt_blocks(last - 1));
            let refused = Record::of(Fate::Forgotten, replica, &blocks, 0);
            envoy.links[3].record(refused.clone());
            envoy.links[3].publish(envoy.now);
            match round {
                2 => envoy.set_members(&["10.0.0.1:1", "10.0.0.3:1"]),
                3.. => envoy.route(1, 1, 77),
                _ => {}
            }
        });
        assert!(last - first > 6, "it took {} rounds", (last - first) / 3);
        for prompt in first..last {
            let held = if (prompt - first) % 3 == 2 { 0 } else { PROMPT_BLOCKS as usize };
            envoy.check_all_see(0, prompt, held);
        }
        envoy.check_all_see(1, 1, 0);
        envoy.check_all_see(1, 77, PROMPT_BLOCKS as usize);
        envoy.check_all_see(0, 2, PROMPT_BLOCKS as usize);
    }

    #[test]
    fn a_snapshot_that_another_overwrites_is_given_up_and_the_next_one_taken() {
        let mut envoy = Envoy::new(2);
        let last = long_history(&mut envoy);
        envoy.start();
        let mut torn = false;
        envoy.until_taken(|envoy, _| {
            let head = super::super::snapshot::Head::read(&envoy.data);
            if let Some(head) = head.filter(|head| head.is_complete && head.chunks > 8 && !torn) {
                torn = true;
                let last = super::super::snapshot_chunk_key(head.chunks - 1);
                envoy.data.set(&last, b"another's", None);
            }
        });
        assert_eq!(envoy.counts[2].snapshots.torn, 1, "{:?}", envoy.counts);
        envoy.check_all_see(1, 1, PROMPT_BLOCKS as usize);
        envoy.check_all_see((last % 2) as u32, last, PROMPT_BLOCKS as usize);
    }

    #[test]
    fn a_vm_that_was_overtaken_catches_up_by_a_snapshot() {
        let mut envoy = Envoy::new(2);
        envoy.start();
        envoy.tick();
        envoy.tick();
        let mut stalled = envoy.links.pop().unwrap();
        envoy.route(1, 0, 900_000);
        stalled.refresh(envoy.now);
        long_history(&mut envoy);
        envoy.links.push(stalled);
        envoy.counts[2] = Counts::default();
        envoy.until_taken(|_, _| {});
        assert!(envoy.counts[2].lapped > 0);
        envoy.check_all_see(1, 1, PROMPT_BLOCKS as usize);
    }

    #[test]
    fn what_is_recorded_without_a_slot_is_told_once_there_is_one() {
        let mut envoy = Envoy::new(2);
        envoy.start();
        // It has not ticked, so it has claimed nothing.
        envoy.links[2].refresh(envoy.now);
        envoy.route(2, 0, 5);
        (0..3).for_each(|_| envoy.tick());
        envoy.check_all_see(0, 5, PROMPT_BLOCKS as usize);
    }

    #[test]
    fn what_a_replica_would_hold_is_told_and_handed_on_and_is_not_what_it_holds() {
        let mut envoy = Envoy::new(2);
        let (replica, blocks) = (envoy.replica(0), prompt_blocks(7));
        let imagined = replica.imagined();
        envoy.links[1].record(Record::of(Fate::Held, imagined, &blocks, 0));
        envoy.links[1].charge(imagined, 100, envoy.now);
        envoy.tick();
        envoy.start();
        envoy.until_taken(|_, _| {});
        for link in &envoy.links {
            let held = |id| link.index().overlap_blocks(id, &blocks);
            assert_eq!((held(replica), held(imagined)), (0, blocks.len()));
            let charges = link.all_charges(envoy.now);
            assert_eq!((charges.of(replica).requests, charges.of(imagined).requests), (0, 1));
        }
        assert!(envoy.counts.iter().all(|counts| counts.orphaned == 0));
        // Of a replica that is no more, nothing is imagined either.
        let table = ReplicaTable::default();
        envoy.links[0].take_table(table);
        assert_eq!(envoy.links[0].index().overlap_blocks(imagined, &blocks), 0);
    }

    #[test]
    fn what_nobody_imagines_any_more_is_given_up() {
        let mut envoy = Envoy::new(2);
        let (replica, blocks) = (envoy.replica(0), prompt_blocks(7));
        let imagined = replica.imagined();
        envoy.route(1, 0, 7);
        envoy.links[1].record(Record::of(Fate::Held, imagined, &blocks, 0));
        envoy.tick();
        let held = |envoy: &Envoy, id| {
            [0, 1].map(|vm: usize| envoy.links[vm].index().overlap_blocks(id, &blocks))
        };
        let pass = |envoy: &mut Envoy, seconds| {
            envoy.now = envoy.now.plus(Duration::from_secs(seconds));
            envoy.tick();
        };
        // While it is configured it stays, whatever the pause.
        pass(&mut envoy, 3600);
        assert_eq!(held(&envoy, imagined), [blocks.len(); 2]);
        // And while some other listener's requests are still imagined.
        for link in &mut envoy.links {
            link.reconfigure(LinkConfig { imagines: false, ..CONFIG });
        }
        for _ in 0..10 {
            envoy.links[1].record(Record::of(Fate::Held, imagined, &blocks, 0));
            envoy.links[1].publish(envoy.now);
            pass(&mut envoy, 20);
            assert_eq!(held(&envoy, imagined), [blocks.len(); 2]);
        }
        pass(&mut envoy, 60);
        assert_eq!(held(&envoy, imagined), [0; 2]);
        assert_eq!(held(&envoy, replica), [blocks.len(); 2]);
        assert!(envoy.links.iter().all(|link| !link.index().replicas().any(|id| id.is_imagined())));
    }

    #[test]
    fn a_vm_that_leaves_takes_its_charges_along_at_once() {
        let mut envoy = Envoy::new(2);
        let replica = envoy.replica(0);
        envoy.links[1].charge(replica, 100, envoy.now);
        envoy.tick();
        envoy.tick();
        assert_eq!(envoy.links[0].all_charges(envoy.now).of(replica).requests, 1);
        envoy.links[1].leave();
        envoy.links[0].refresh(envoy.now);
        assert_eq!(envoy.links[0].all_charges(envoy.now).of(replica).requests, 0);
    }

    #[test]
    fn thousands_of_replicas_leave_no_key_and_no_shadow_behind() {
        let mut envoy = Envoy::new(2);
        let mut keys = Vec::new();
        for generation in 0..300 {
            let addresses: Vec<String> =
                (0..10).map(|n| format!("10.1.{generation}.{n}:1")).collect();
            envoy.set_members(&addresses.iter().map(String::as_str).collect::<Vec<&str>>());
            envoy.tick();
            envoy.route(1, generation % 10, generation.into());
            keys.push(envoy.data.0.borrow().len());
        }
        envoy.set_members(&["10.0.0.1:1"]);
        // The writer's log has gone on through the places of its ring.
        assert!(keys[299] <= keys[0] + SEGMENTS as usize, "{keys:?}");
        (0..3).for_each(|_| envoy.tick());
        for link in &envoy.links {
            assert!(link.index().replicas().count() <= 1);
            assert_eq!(link.table().places().count(), 10);
        }
    }

    #[test]
    fn what_a_decision_reads_does_not_grow_with_what_is_known() {
        let mut envoy = Envoy::new(3);
        let reads_of = |envoy: &mut Envoy| {
            envoy.links[2].refresh(envoy.now);
            envoy.data.1.borrow_mut().clear();
            envoy.links[2].refresh(envoy.now);
            std::mem::take(&mut *envoy.data.1.borrow_mut())
        };
        let (few, bytes_before) = sum(&reads_of(&mut envoy));
        let table: Vec<String> =
            (0..1000).map(|n| format!("10.9.{}.{}:1", n / 250, n % 250)).collect();
        let addresses: Vec<&str> = table.iter().map(String::as_str).collect();
        envoy.set_members(&addresses);
        let held = long_history(&mut envoy) * PROMPT_BLOCKS;
        assert!(held > 100_000);
        let reads = reads_of(&mut envoy);
        let (many, bytes) = sum(&reads);
        assert_eq!(few, many, "{reads:?}");
        assert!(bytes <= bytes_before + 100, "{bytes_before} bytes, then {bytes}: {reads:?}");
        assert!(many <= 2 + 2 * envoy.links.len(), "{reads:?}");

        // A new version of the table is read once by each VM, whoever asks how often.
        envoy.set_members(&addresses[1..]);
        envoy.data.1.borrow_mut().clear();
        (0..50).for_each(|_| envoy.links[2].refresh(envoy.now));
        let reads = envoy.data.1.borrow();
        let large: Vec<_> = reads.iter().filter(|(_, bytes)| *bytes > 10_000).collect();
        assert_eq!(large.len(), 1, "{large:?}");
    }

    /// How many reads, and of how many bytes together.
    fn sum(reads: &[(String, usize)]) -> (usize, usize) {
        (reads.len(), reads.iter().map(|(_, bytes)| bytes).sum())
    }

    #[test]
    fn an_update_keeps_what_was_learned_unless_work_is_counted_otherwise() {
        let mut envoy = Envoy::new(2);
        let replica = envoy.replica(0);
        for n in 0..20u32 {
            let work = f64::from(1000 + 500 * n);
            let answered = Answered {
                first_token: Duration::from_secs_f64(work / 5000.0),
                work,
                ..Answered::default()
            };
            envoy.links[1].answered(replica, &answered, envoy.now);
        }
        envoy.links[1].compared(replica, 4000, 4000);
        let evidence = |envoy: &Envoy| envoy.links[0].all_evidence().get(&replica).copied();
        let samples = |envoy: &mut Envoy, config: LinkConfig| {
            envoy.links.iter_mut().for_each(|link| link.reconfigure(config));
            (0..3).for_each(|_| envoy.tick());
            [0, 1].map(|vm: usize| envoy.links[vm].rates().of(replica).samples)
        };
        assert_eq!(samples(&mut envoy, CONFIG), [20, 20]);
        let compared = evidence(&envoy);
        assert!(compared.is_some());
        let other = LinkConfig { recent_half_life: Duration::from_secs(9), ..CONFIG };
        assert_eq!(samples(&mut envoy, other), [20, 20]);
        // As configured, and as learned once more.
        assert_eq!(samples(&mut envoy, LinkConfig { learns_rates: false, ..CONFIG }), [0, 0]);
        assert_eq!(samples(&mut envoy, CONFIG), [20, 20]);
        let other = LinkConfig { work: (50_000.0, 512.0), ..CONFIG };
        assert_eq!(samples(&mut envoy, other), [0, 0]);
        assert_eq!(evidence(&envoy), compared);
    }

    #[test]
    fn a_vm_that_finds_no_slot_routes_and_counts_what_it_does_not_share() {
        let mut envoy = Envoy::new(2);
        (2..=MAX_VM_SLOTS).for_each(|_| envoy.start());
        (0..2).for_each(|_| envoy.tick());
        let replica = envoy.replica(0);
        let (last, now) = (MAX_VM_SLOTS as usize, envoy.now);
        assert!(envoy.links[last - 1].slot().is_some() && envoy.links[last].slot().is_none());
        for vm in [0, last] {
            let link = &mut envoy.links[vm];
            // From their first tick on, that is.
            link.take_counts();
            link.charge(replica, 100, now);
            link.charge(replica.imagined(), 100, now);
            for prompt in 0..1010 {
                link.record(Record::of(Fate::Held, replica, &[BlockHash(prompt)], 0));
            }
        }
        let counts = [0, last].map(|vm| {
            let Counts { unshared, unlogged, .. } = envoy.links[vm].take_counts();
            (unshared, unlogged)
        });
        assert_eq!(counts, [(0, 0), (1, 10)]);
        assert_eq!(envoy.links[last].all_charges(now).of(replica).requests, 1);
    }

    #[test]
    fn two_configurations_in_one_vm_count_once() {
        let mut envoy = Envoy::new(2);
        let twin = Link::new(envoy.data.clone(), CONFIG, 99, 2);
        envoy.links.push(twin);
        envoy.counts.push(Counts::default());
        (0..3).for_each(|_| envoy.tick());
        assert_eq!(envoy.links[0].count_vms(), (2, 0));
    }
}
