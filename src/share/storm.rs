//! Whole VMs at once, each on a thread of its own of which one runs at a time: at every call to
//! shared data a seeded choice says whose turn it is. So a run is the same for the same seed, and
//! a failure names it.
//!
//! VMs are stalled, killed between any two calls, and started again under another number; leaders
//! change; replicas come and go by the thousand, and two say what they hold.

use super::lease::SharedLease;
use super::link::{Counts, Link, LinkConfig};
use super::log::{Entry, Fate, LogReader, Read, Record};
use super::slot::OwnSlot;
use super::store::Store;
use super::table::Refusal;
use super::vm::{VmState, VmTraits};
use super::{log_key, slot_key};
use crate::charge::Charges;
use crate::replicas::strikes::Strikes;
use crate::replicas::{Member, Moment, ReplicaId, ReplicaTable};
use crate::report::{Change, Position, Tier};
use crate::seeded::Random;
use crate::tokens::blocks::BlockHash;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(100);

/// The machine under all VMs.
struct Machine {
    random: Random,
    clock: Moment,
    values: BTreeMap<String, (Vec<u8>, u32)>,
    mark: u32,
    /// Whose turn it is, and until when each is away; `None`: it has ended.
    turn: usize,
    /// How many VMs have done their work.
    resting: usize,
    away: Vec<Option<Moment>>,
}

struct Shared {
    machine: Mutex<Machine>,
    turns: Vec<Condvar>,
}

/// One VM's hold on the machine.
#[derive(Clone)]
struct Hand {
    shared: Arc<Shared>,
    number: usize,
    /// Calls until it dies.
    life: Arc<Mutex<Option<u64>>>,
}

struct Death;

impl Machine {
    /// Gives the turn to somebody who is not away, letting time pass.
    fn choose(&mut self) {
        self.clock = self.clock.plus(Duration::from_micros(1 + self.random.below(40)));
        let first = self.away.iter().flatten().min().copied();
        self.clock = self.clock.max(first.unwrap_or_default());
        let here: Vec<usize> = (0..self.away.len())
            .filter(|number| self.away[*number].is_some_and(|until| until <= self.clock))
            .collect();
        if !here.is_empty() {
            self.turn = here[self.random.below(here.len() as u64) as usize];
        }
    }
}

impl Hand {
    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.shared.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets others run, for as long as chance will have it.
    fn wait_for_turn(&self) -> MutexGuard<'_, Machine> {
        let mut machine = self.lock();
        machine.choose();
        let turn = machine.turn;
        self.shared.turns[turn].notify_one();
        self.await_turn(machine)
    }

    fn await_turn<'a>(&'a self, mut machine: MutexGuard<'a, Machine>) -> MutexGuard<'a, Machine> {
        while machine.turn != self.number {
            machine = self.shared.turns[self.number]
                .wait(machine)
                .unwrap_or_else(PoisonError::into_inner);
        }
        machine
    }

    fn turn(&self) -> MutexGuard<'_, Machine> {
        let machine = self.wait_for_turn();
        let mut life = self.life.lock().unwrap();
        if let Some(calls) = &mut *life {
            *calls = calls.saturating_sub(1);
            if *calls == 0 {
                *life = None;
                drop((machine, life));
                resume_unwind(Box::new(Death));
            }
        }
        machine
    }

    fn now(&self) -> Moment {
        self.turn().clock
    }

    fn sleep(&self, time: Duration) {
        let mut machine = self.turn();
        let until = machine.clock.plus(time);
        machine.away[self.number] = Some(until);
        drop(machine);
        drop(self.wait_for_turn());
    }

    fn below(&self, bound: u64) -> u64 {
        self.lock().random.below(bound)
    }

    fn die_within(&self, calls: u64) {
        let calls = 1 + self.below(calls);
        *self.life.lock().unwrap() = Some(calls);
    }

    fn end(&self) {
        let mut machine = self.lock();
        machine.away[self.number] = None;
        machine.choose();
        let turn = machine.turn;
        self.shared.turns[turn].notify_one();
    }
}

impl Store for Hand {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        match self.turn().values.get(key) {
            Some((value, mark)) => ((!value.is_empty()).then(|| value.clone()), Some(*mark)),
            None => (None, None),
        }
    }

    fn set(&self, key: &str, value: &[u8], mark: Option<u32>) -> bool {
        let mut machine = self.turn();
        let last = machine.values.get(key).map(|(_, mark)| *mark);
        if last.is_some() && mark.is_some() && mark != last {
            return false;
        }
        machine.mark += 1;
        let mark = machine.mark;
        machine.values.insert(key.to_owned(), (value.to_vec(), mark));
        true
    }
}

type Program<T> = Box<dyn FnOnce(&Hand) -> T + Send>;

/// Runs these programs together; what each returned, and what is in shared data at the end.
fn run<T: Send + 'static>(seed: u64, programs: Vec<Program<T>>) -> (Vec<T>, Vec<String>) {
    let start = Moment::default().plus(Duration::from_secs(100));
    let machine = Machine {
        random: Random(seed),
        clock: start,
        values: BTreeMap::new(),
        mark: 0,
        turn: 0,
        resting: 0,
        away: programs.iter().map(|_| Some(start)).collect(),
    };
    let turns = programs.iter().map(|_| Condvar::new()).collect();
    let shared = Arc::new(Shared { machine: Mutex::new(machine), turns });
    let threads: Vec<_> = programs
        .into_iter()
        .enumerate()
        .map(|(number, program)| {
            let life = Arc::new(Mutex::new(None));
            let hand = Hand { shared: Arc::clone(&shared), number, life };
            std::thread::spawn(move || {
                drop(hand.await_turn(hand.lock()));
                let result = catch_unwind(AssertUnwindSafe(|| program(&hand)));
                hand.end();
                result
            })
        })
        .collect();
    let results: Vec<T> = threads
        .into_iter()
        .map(|thread| match thread.join().expect("it catches its panics") {
            Ok(result) => result,
            Err(_) => panic!("seed {seed}: a VM failed, see above"),
        })
        .collect();
    let machine = shared.machine.lock().unwrap_or_else(PoisonError::into_inner);
    (results, machine.values.keys().cloned().collect())
}

/// Runs something until it has died or ended. True when it died.
fn dies(act: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(()) => false,
        Err(cause) if cause.is::<Death>() => true,
        Err(cause) => resume_unwind(cause),
    }
}

#[track_caller]
fn check_keys(seed: u64, keys: &[String], slots: u32) {
    for key in keys {
        let parts: Vec<&str> = key.split('/').skip(1).collect();
        let number = |text: &str| text.parse::<u32>().unwrap_or(u32::MAX);
        let known = match parts[..] {
            ["vm", slot] => number(slot) < slots,
            ["log", slot, place] => number(slot) < slots && number(place) < 32,
            ["table" | "table-marks" | "lease", _] | ["snapshot"] => true,
            ["snapshot", chunk] => number(chunk) < 1024,
            _ => false,
        };
        assert!(known, "seed {seed}: {key}");
    }
}

/// The record with this number: nobody else's has its content.
fn numbered(number: u64) -> Entry {
    let blocks = number % 7 * 400 + 1;
    let record = Record {
        fate: Fate::Held,
        replica: ReplicaId { slot: number as u32, incarnation: 1 },
        parent: None,
        blocks: (0..blocks).map(|n| BlockHash(number * 10_000 + n)).collect(),
        known: 0,
    };
    record.into()
}

fn state(vm: u64, heartbeat: Moment, own: &OwnSlot) -> VmState {
    VmState {
        owner: vm,
        heartbeat,
        traits: VmTraits::default(),
        head: own.head(),
        charges: Charges::default(),
        strikes: Strikes::default(),
        learned_version: 0,
    }
}

/// A VM that only writes its log, dies now and then between two calls, and is followed by another
/// of either configuration. Writer and number of a record make its own number.
fn write_logs(hand: &Hand, first_vm: u64) {
    for life in 0..6 {
        let vm = first_vm + life;
        let fingerprint = 1 + (vm / 3) % 2;
        hand.die_within(600);
        dies(|| {
            let mut number = 0;
            let claim = || {
                let now = hand.now();
                let claimed = |head| VmState {
                    owner: vm,
                    heartbeat: now,
                    traits: VmTraits::default(),
                    head,
                    charges: Charges::default(),
                    strikes: Strikes::default(),
                    learned_version: 0,
                };
                OwnSlot::claim(hand, fingerprint, now, claimed)
            };
            let mut own = claim();
            loop {
                hand.sleep(TICK);
                let Some(slot) = own.as_mut() else {
                    own = claim();
                    continue;
                };
                if !slot.keep(hand, vm) {
                    own = None;
                    continue;
                }
                for _ in 0..hand.below(4) {
                    number += 1;
                    slot.append(hand, &numbered(vm * 1000 + number));
                    slot.publish(hand, fingerprint, &state(vm, hand.now(), slot));
                }
            }
        });
        hand.sleep(Duration::from_secs(hand.below(8)));
    }
}

/// Reads all logs of a configuration, stalling at times, and insists on what a reader is owed.
fn read_logs(hand: &Hand, fingerprint: u64, seed: u64) -> (u64, u64) {
    let mut readers = [LogReader::default(); 8];
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    let mut read = 0;
    for round in 0..600 {
        hand.sleep(if round % 50 == 49 { Duration::from_secs(3) } else { TICK });
        for (slot, reader) in (0..).zip(&mut readers) {
            let (value, _) = hand.get(&slot_key(slot));
            let Some((of, state)) = value.as_deref().and_then(VmState::read) else { continue };
            if of != fingerprint {
                continue;
            }
            while let Some(place) = reader.place(state.head) {
                let (segment, _) = hand.get(&log_key(slot, place));
                let records =
                    match reader.take(segment.as_deref(), fingerprint, state.owner, state.head) {
                        Read::Entries(entries) => entries,
                        Read::Gone => continue,
                        Read::Foreign => break,
                    };
                for record in records {
                    let number = u64::from(record.replica().slot);
                    assert_eq!(record, numbered(number), "seed {seed}: a record is not whole");
                    let vm = number / 1000;
                    assert_eq!(1 + (vm / 3) % 2, fingerprint, "seed {seed}: another's record");
                    let before = last.insert(vm, number).unwrap_or(0);
                    assert!(before < number, "seed {seed}: {number} after {before}");
                    read += 1;
                }
            }
        }
    }
    (read, readers.iter().map(|reader| reader.lapped).sum())
}

#[test]
fn readers_get_each_record_once_in_order_and_whole_while_writers_die_and_follow() {
    for seed in 1..=6 {
        let mut programs: Vec<Program<(u64, u64)>> = Vec::new();
        for writer in 0..4 {
            programs.push(Box::new(move |hand| {
                write_logs(hand, 1 + writer * 10);
                (0, 0)
            }));
        }
        for fingerprint in [1, 2] {
            programs.push(Box::new(move |hand| read_logs(hand, fingerprint, seed)));
        }
        let (results, keys) = run(seed, programs);
        let read: u64 = results.iter().map(|(read, _)| read).sum();
        assert!(read > 500, "seed {seed}: {read} read");
        check_keys(seed, &keys, 8);
    }
}

/// A VM as the shell runs it: a link, and a poller that knows the fleet without asking.
struct Vm {
    link: Link<Hand>,
    lease: SharedLease<Hand>,
    held: Option<u64>,
    led: Option<u64>,
    taken: u64,
    table: ReplicaTable,
    in_flight: Vec<(ReplicaId, u64)>,
    refused: u64,
    counts: Counts,
}

const CONFIG: LinkConfig = LinkConfig {
    fingerprint: 7,
    recent_half_life: Duration::from_secs(5),
    default_capacity_blocks: 1 << 20,
    learns_rates: true,
    work: (100_000.0, 512.0),
    imagines: true,
};

impl Vm {
    fn new(hand: &Hand, vm: u64) -> Self {
        let fingerprint = CONFIG.fingerprint;
        let term = Duration::from_secs(1);
        Self {
            link: Link::new(hand.clone(), CONFIG, vm, vm),
            lease: SharedLease::new(hand.clone(), "lease", fingerprint, vm, term),
            held: None,
            led: None,
            taken: 0,
            table: ReplicaTable::default(),
            in_flight: Vec::new(),
            refused: 0,
            counts: Counts::default(),
        }
    }

    fn tick(&mut self, hand: &Hand, generation: u64) {
        let now = hand.now();
        self.link.tick(now);
        self.lead(hand, generation);
        let counts = self.link.take_counts();
        self.counts.lapped += counts.lapped;
        self.counts.orphaned += counts.orphaned;
        self.counts.gaps += counts.gaps;
        self.counts.snapshots.taken += counts.snapshots.taken;
        self.counts.snapshots.written += counts.snapshots.written;
        self.counts.snapshots.torn += counts.snapshots.torn;
    }

    fn lead(&mut self, hand: &Hand, generation: u64) {
        let epoch = self.lease.hold(hand.now(), Duration::ZERO, self.taken);
        if epoch.is_some() && epoch != self.held {
            self.link.prepare_table();
        }
        let confirmed = epoch.filter(|_| epoch == self.held);
        self.held = epoch;
        let led = self.led.take();
        let Some(epoch) = confirmed else { return };
        let mut lead = || -> Result<(), Refusal> {
            if led != Some(epoch) {
                self.table = self.link.adopt_table(epoch)?;
            }
            self.table.set_members("c", &members(generation));
            self.link.publish_table(epoch, &self.table)
        };
        match lead() {
            Ok(()) => {
                self.led = Some(epoch);
                self.hear(hand);
            }
            Err(Refusal::Superseded(epoch)) => self.taken = epoch,
            Err(Refusal::Raced) => {}
        }
    }

    /// Asks the agents of the two replicas that stay what has changed.
    fn hear(&mut self, hand: &Hand) {
        let replicas: Vec<ReplicaId> = self.link.table().iter().map(|r| r.id).take(2).collect();
        for replica in replicas {
            let since = self.link.observed_position(replica);
            let (from, position, changes) = agent(since, hand.now());
            if from == Some(position) {
                continue;
            }
            // By pieces, between which it may die.
            let size = 1 + hand.below(8) as usize;
            let count = changes.len().div_ceil(size).max(1);
            let mut from = from;
            for n in 0..count {
                let is_last = n + 1 == count;
                let between = Position { generation: !position.generation, seq: n as u64 };
                let to = if is_last { position } else { between };
                let piece = changes.iter().skip(n * size).take(size).cloned();
                self.link.observe(replica, from, to, &piece.collect::<Vec<Change>>(), is_last);
                from = Some(to);
                if hand.below(10) == 0 {
                    self.link.publish(hand.now());
                }
            }
        }
    }

    /// Routes a request over a path of the trunk that all share and a branch of its own.
    fn request(&mut self, hand: &Hand, branch: u64) {
        let now = hand.now();
        self.link.refresh(now);
        let replicas: Vec<ReplicaId> = self.link.table().iter().map(|r| r.id).collect();
        if replicas.is_empty() {
            return;
        }
        let replica = replicas[hand.below(replicas.len() as u64) as usize];
        // What is taken back is never asked for again: of logs that are read one after the other
        // nobody could say which came first.
        let is_refused = hand.below(4) == 0;
        self.refused += u64::from(is_refused);
        let branch =
            if is_refused { BRANCHES + self.link.vm() * 1000 + self.refused } else { branch };
        let path = path(branch);
        let overlap = self.link.index().overlap_blocks(replica, &path);
        self.link.record(Record::of(Fate::Held, replica, &path, overlap));
        self.link.charge(replica, 100, now);
        self.link.publish(hand.now());
        if is_refused {
            let own = overlap.max(TRUNK);
            self.link.record(Record::of(Fate::Forgotten, replica, &path, own));
        }
        self.in_flight.push((replica, 100));
    }

    fn end_one(&mut self, hand: &Hand) {
        if let Some((replica, tokens)) = self.in_flight.pop() {
            self.link.answer_began(replica, tokens, hand.now());
            self.link.release(replica, hand.now());
            self.link.publish(hand.now());
        }
    }
}

const TRUNK: usize = 3;

const BRANCHES: u64 = 500;

fn path(branch: u64) -> Vec<BlockHash> {
    let trunk = (1..=TRUNK as u64).map(BlockHash);
    trunk.chain((0..4).map(|n| BlockHash(1_000 + branch * 10 + n))).collect()
}

/// Ticks of an agent's clock: it says the same from the last one on.
const SAID: u64 = 230;

/// Texts that an agent's engine holds at once, of which the oldest goes when another one comes.
const HELD: u64 = 12;

/// How much an agent remembers.
const REMEMBERED: u64 = 40;

/// Changes of an engine with this number, within a generation of a hundred.
fn changes(generation: u64, seq: u64) -> Vec<Change> {
    let text = |seq: u64| path(10_000 + generation * 100 + seq);
    let mut changes = vec![Change::Stored { parent: None, blocks: text(seq), tier: Tier::Gpu }];
    if let Some(old) = seq.checked_sub(HELD) {
        let mut blocks = text(old).split_off(TRUNK);
        blocks.reverse();
        changes.push(Change::Removed { blocks, tier: Tier::Gpu });
    }
    changes
}

fn said_at(now: Moment) -> Position {
    let ticks =
        (now.since(Moment::default()).as_millis() as u64 / 100).saturating_sub(1000).min(SAID);
    Position { generation: ticks / 100, seq: ticks % 100 }
}

/// What an agent answers to this question: since when, until when, and what.
fn agent(since: Option<Position>, now: Moment) -> (Option<Position>, Position, Vec<Change>) {
    let at = said_at(now);
    let known = since.filter(|since| {
        since.generation == at.generation && at.seq.saturating_sub(since.seq) < REMEMBERED
    });
    let said = match known {
        Some(since) => {
            (since.seq + 1..=at.seq).flat_map(|seq| changes(at.generation, seq)).collect()
        }
        None => {
            let held = (at.seq + 1).saturating_sub(HELD)..=at.seq;
            held.flat_map(|seq| changes(at.generation, seq).into_iter().take(1)).collect()
        }
    };
    (known, at, said)
}

/// The fleet of a generation: two that stay, and some that come and go.
fn members(generation: u64) -> Vec<Member> {
    let member = |n: u64| Member::healthy(format!("10.0.0.{n}:1"));
    (0..2).chain((0..4).map(|n| 100 + generation * 4 + n)).map(member).collect()
}

/// What a VM knows at rest.
#[derive(Debug, PartialEq)]
struct Picture {
    replicas: Vec<ReplicaId>,
    /// By replica and branch.
    overlaps: Vec<usize>,
    in_flight: u32,
    unfinished: u64,
    /// Of the two that report: how far, and what is held of the last texts.
    observed: Vec<(Option<Position>, Vec<usize>)>,
}

fn picture(vm: &Vm, now: Moment, branches: u64) -> Picture {
    let replicas: Vec<ReplicaId> = vm.link.table().iter().map(|replica| replica.id).collect();
    let overlap = |(replica, branch): (ReplicaId, u64)| {
        vm.link.index().overlap_blocks(replica, &path(branch))
    };
    let pairs = replicas.iter().flat_map(|r| (0..branches).map(|branch| (*r, branch)));
    let charges = vm.link.all_charges(now);
    let in_flight = charges.iter().map(|(_, charge)| charge.requests).sum();
    let unfinished = charges.iter().map(|(_, charge)| charge.unfinished_tokens).sum();
    let last = (SAID / 100 * 100..=SAID).map(|text| (text, 10_000 + text));
    let observed = replicas.iter().take(2).map(|replica| {
        let held = last.clone().map(|(_, text)| overlap((*replica, text))).collect();
        (vm.link.observed_position(*replica), held)
    });
    let observed = observed.collect();
    Picture { overlaps: pairs.map(overlap).collect(), replicas, in_flight, unfinished, observed }
}

/// One VM's life, or lives: work until its time is over, then rest until all do.
fn live(hand: &Hand, number: u64, rounds: u64) -> (Picture, Counts) {
    let mut life = 0;
    let mut vm = Vm::new(hand, number + 1);
    let mut round = 0;
    // The first is the main thread's, which serves nothing.
    let serves = number > 0;
    while round < rounds {
        if hand.below(120) == 0 {
            hand.die_within(30);
        }
        let died = dies(|| {
            vm.tick(hand, round / 100);
            for _ in 0..if serves { hand.below(4) } else { 0 } {
                let branch = number * 100 + hand.below(100);
                vm.request(hand, branch);
                if hand.below(2) == 0 {
                    vm.end_one(hand);
                }
            }
            let stall =
                [1, 1, 1, 30, 60][if hand.below(60) == 0 { hand.below(5) as usize } else { 0 }];
            hand.sleep(TICK * stall);
        });
        if died {
            life += 1;
            vm = Vm::new(hand, number + 1 + life * 1000);
            hand.sleep(TICK * 3);
        }
        round += 1;
    }
    while !vm.in_flight.is_empty() {
        vm.end_one(hand);
    }
    *hand.life.lock().unwrap() = None;
    hand.lock().resting += 1;
    // The dead are known to be, and a snapshot has come to whoever wants one.
    let mut quiet = 0;
    while quiet < 120 {
        vm.tick(hand, rounds / 100);
        hand.sleep(TICK);
        let machine = hand.lock();
        quiet += usize::from(machine.resting == machine.away.len());
    }
    let now = hand.now();
    vm.link.refresh(now);
    (picture(&vm, now, BRANCHES), vm.counts)
}

#[test]
fn at_rest_all_vms_have_one_picture_whatever_happened_before() {
    let mut taken = 0;
    for seed in 1..=6 {
        let programs = (0..5u64)
            .map(|number| -> Program<(Picture, Counts)> {
                Box::new(move |hand| live(hand, number, 250))
            })
            .collect();
        let (results, keys) = run(seed, programs);
        for (number, (picture, counts)) in results.iter().enumerate() {
            assert_eq!((picture.in_flight, picture.unfinished), (0, 0), "seed {seed}, VM {number}");
            assert_eq!(picture.replicas.len(), 6, "seed {seed}, VM {number}");
            let other = &results[0].0;
            assert_eq!(picture.replicas, other.replicas, "seed {seed}, VM {number}");
            let position = Position { generation: SAID / 100, seq: SAID % 100 };
            let held = |seq: u64| if seq + HELD > SAID % 100 { TRUNK + 4 } else { TRUNK };
            let texts: Vec<usize> = (0..=SAID % 100).map(held).collect();
            for (at, seen) in &picture.observed {
                assert_eq!(*at, Some(position), "seed {seed}, VM {number}");
                assert_eq!(*seen, texts, "seed {seed}, VM {number}");
            }
            let differ: Vec<_> = (0..picture.overlaps.len())
                .filter(|place| picture.overlaps[*place] != other.overlaps[*place])
                .map(|place| {
                    let all: Vec<usize> = results.iter().map(|(p, _)| p.overlaps[place]).collect();
                    (place as u64 / BRANCHES, place as u64 % BRANCHES, all)
                })
                .collect();
            assert!(differ.is_empty(), "seed {seed}: (place, branch, overlaps by VM) {differ:?}");
            taken += counts.snapshots.taken;
        }
        let overlaps: usize = results[0].0.overlaps.iter().sum();
        assert!(overlaps > 1000, "seed {seed}: {overlaps}");
        check_keys(seed, &keys, 16);
    }
    assert!(taken > 0, "a VM that starts again takes a snapshot");
}
