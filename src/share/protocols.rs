//! The small protocols in every order of their calls: slots, logs, leases, tables.
//!
//! No links: theirs are too many calls for every order, and [`super::storm`] draws some.

use super::births;
use super::explore::{Data, Probe, Program, World, explore};
use super::lease::SharedLease;
use super::log::{Entry, Fate, LogReader, LogWriter, Read, Record};
use super::observed::{Standing, Step, Update};
use super::slot::OwnSlot;
use super::store::Store;
use super::table::{self, Marks, Refusal};
use super::vm::{DEAD_AFTER, LogHead, VmState, VmTraits};
use super::{log_key, slot_key, table_key, table_marks_key};
use crate::charge::Charges;
use crate::index::Sighting;
use crate::replicas::strikes::Strikes;
use crate::replicas::{Moment, ReplicaId, ReplicaTable};
use crate::report::Position;
use crate::tokens::blocks::BlockHash;
use std::collections::BTreeSet;
use std::time::Duration;

const FLEET: u64 = 9;
const TICK: Duration = Duration::from_millis(100);
const TERM: Duration = Duration::from_secs(1);

fn state(vm: u64, heartbeat: Moment, head: LogHead) -> VmState {
    VmState {
        owner: vm,
        heartbeat,
        traits: VmTraits::default(),
        head,
        charges: Charges::default(),
        strikes: Strikes::default(),
        learned_version: 0,
    }
}

/// What a VM does with its slot on each tick.
fn keep_slot(probe: &Probe, vm: u64, ticks: usize) {
    let mut own: Option<OwnSlot> = None;
    for _ in 0..ticks {
        let now = probe.now();
        if !own.as_mut().is_some_and(|own| own.keep(&probe, vm)) {
            own = OwnSlot::claim(&probe, FLEET, now, |head| state(vm, now, head));
        }
        let Some(slot) = own.as_ref().filter(|own| own.is_confirmed()) else { continue };
        if slot.publish(&probe, FLEET, &state(vm, now, slot.head())) {
            probe.note("published", slot.number.into());
        } else {
            own = None;
        }
    }
}

fn owner(data: &Data, slot: u32) -> Option<VmState> {
    VmState::read(data.value(&slot_key(slot))).map(|(_, state)| state)
}

/// Nobody writes over a claim of a VM that lives. Creating a key may wipe one out; then its owner
/// must find out before it writes again.
fn check_slots(before: &World, vm: usize, after: &World) -> Result<(), String> {
    for slot in 0..4 {
        let (Some(old), Some(new)) = (owner(&before.data, slot), owner(&after.data, slot)) else {
            continue;
        };
        let died = !old.is_alive(after.data.clock());
        if old.owner != new.owner && !died {
            return Err(format!("VM {vm} wrote over {}'s slot {slot}", old.owner));
        }
    }
    let keys = after.data.keys().filter(|key| !key.starts_with("warmpath/vm/")).count();
    if keys > 0 { Err(format!("{keys} keys that are none")) } else { Ok(()) }
}

#[test]
fn a_claim_is_never_written_over_however_two_vms_create_the_slots() {
    let (a, b): (Program<'_>, Program<'_>) = (&|p| keep_slot(p, 1, 3), &|p| keep_slot(p, 2, 3));
    let steps = explore(Data::default(), &[a, b], |before, vm, after| {
        check_slots(before, vm, after)?;
        if !after.is_at_rest() {
            return Ok(());
        }
        let published =
            |vm: usize| after.vms[vm].notes.iter().any(|(what, _)| *what == "published");
        // Two of three ticks suffice for whoever is not robbed of its claim.
        (published(0) || published(1)).then_some(()).ok_or("nobody got a slot".to_owned())
    });
    assert!(steps > 1000, "{steps}");
}

#[test]
fn a_claim_is_never_written_over_by_one_of_three_vms() {
    let program = |vm: u64| move |probe: &Probe| keep_slot(probe, vm, 2);
    let (a, b, c) = (program(1), program(2), program(3));
    let data = Data::default().with(&slot_key(0), b"").with(&slot_key(1), b"");
    let steps = explore(data, &[&a, &b, &c], check_slots);
    assert!(steps > 1000, "{steps}");
}

#[test]
fn a_stalled_owner_finds_its_slot_taken_before_it_writes() {
    let old = state(1, Moment::default(), LogHead { segment: 1, length: 0 });
    let data = Data::default().with(&slot_key(0), &old.write(FLEET)).with(&slot_key(1), b"");
    let stalled = |probe: &Probe| {
        // It claimed the slot itself some time ago.
        let now = probe.now();
        let own = OwnSlot::confirmed(0, FLEET, 1, LogHead { segment: 1, length: 0 });
        if own.publish(&probe, FLEET, &state(1, now, own.head())) {
            probe.note("published", 0);
        }
    };
    let time = |probe: &Probe| probe.wait(DEAD_AFTER);
    let steps = explore(data, &[&stalled, &|p| keep_slot(p, 2, 3), &time], check_slots);
    assert!(steps > 100, "{steps}");
}

/// A leader's ticks: hold, and once that has lasted, adopt and publish.
fn lead(probe: &Probe, vm: u64, ticks: usize) {
    let lease = SharedLease::new(probe, "lease", FLEET, vm, TERM);
    let (mut held, mut led, mut taken, mut version) = (None, None, 0, 0);
    for _ in 0..ticks {
        let now = probe.now();
        let epoch = lease.hold(now, Duration::ZERO, taken);
        let confirmed = epoch.filter(|_| epoch == held);
        held = epoch;
        let was = led;
        led = None;
        let Some(epoch) = confirmed else { continue };
        let own = Marks { epoch, leader: vm, version };
        let written = if was == Some(epoch) {
            let published = table::publish(&probe, FLEET, own, &ReplicaTable::default());
            if published.is_ok() {
                probe.note("published", epoch);
            }
            published.map(|marks| marks.version)
        } else {
            table::adopt(&probe, FLEET, own).map(|m| m.map_or(version, |m| m.marks.version))
        };
        match written {
            Ok(new) => (version, led) = (new, Some(epoch)),
            Err(Refusal::Superseded(epoch)) => taken = epoch,
            Err(Refusal::Raced) => {}
        }
    }
}

fn marks(data: &Data, key: &str) -> Option<Marks> {
    Marks::read(data.value(key), FLEET).map(|(marks, _)| marks)
}

fn check_tables(before: &World, vm: usize, after: &World) -> Result<(), String> {
    for key in [table_key(FLEET), table_marks_key(FLEET)] {
        let (old, new) = (marks(&before.data, &key), marks(&after.data, &key));
        if old.is_some() && new < old {
            return Err(format!("VM {vm} put {new:?} in the place of {old:?}"));
        }
        if let (Some(old), Some(new)) = (old, new)
            && old.epoch == new.epoch
            && old.leader != new.leader
        {
            return Err(format!("two leaders in epoch {}", old.epoch));
        }
    }
    let (table, marks) =
        (marks(&after.data, &table_key(FLEET)), marks(&after.data, &table_marks_key(FLEET)));
    if marks > table {
        return Err("marks of a table that is not there".to_owned());
    }
    Ok(())
}

fn led_data() -> Data {
    let first = Marks { epoch: 1, leader: 77, version: 4 };
    let published = table::Published { marks: first, table: ReplicaTable::default() };
    let lease = super::lease::Lease { holder: 77, epoch: 1, until: Moment::default() };
    Data::default()
        .with(&super::lease_key("lease", FLEET), &lease.write(FLEET))
        .with(&table_key(FLEET), &published.write(FLEET))
        .with(&table_marks_key(FLEET), &published.write(FLEET))
}

#[test]
fn an_older_leaders_table_never_follows_a_newer_ones() {
    let time = |probe: &Probe| {
        probe.wait(TICK);
        probe.wait(TERM);
    };
    let (a, b) = (|p: &Probe| lead(p, 1, 3), |p: &Probe| lead(p, 2, 3));
    let mut leaders = 0;
    let steps = explore(led_data(), &[&a, &b, &time], |before, vm, after| {
        let led = |vm: usize| !after.vms[vm].notes.is_empty();
        leaders = leaders.max(usize::from(led(0)) + usize::from(led(1)));
        check_tables(before, vm, after)
    });
    assert!(steps > 1000, "{steps}");
    assert_eq!(leaders, 2, "a leader that stalls is followed by another");
}

#[test]
fn three_vms_hold_a_lease_in_turn() {
    let lease = |vm: u64| {
        move |probe: &Probe| {
            let lease = SharedLease::new(probe, "lease", FLEET, vm, TERM);
            for _ in 0..if vm == 3 { 1 } else { 2 } {
                if let Some(epoch) = lease.hold(probe.now(), Duration::ZERO, 0) {
                    probe.note("held", epoch);
                }
            }
            if vm == 1 {
                lease.give_up(probe.now());
            }
        }
    };
    let (a, b, c) = (lease(1), lease(2), lease(3));
    let time = |probe: &Probe| probe.wait(TERM);
    let steps = explore(led_data(), &[&a, &b, &c, &time], |_, _, after| {
        let epochs = |vm: usize| after.vms[vm].notes.iter().map(|(_, epoch)| *epoch);
        let shared = epochs(0).find(|epoch| {
            epochs(1).any(|other| other == *epoch) || epochs(2).any(|other| other == *epoch)
        });
        shared.map_or(Ok(()), |epoch| Err(format!("epoch {epoch} was held by two")))
    });
    assert!(steps > 1000, "{steps}");
}

#[test]
fn a_lease_that_two_create_at_once_has_one_leader_an_epoch() {
    let (a, b) = (|p: &Probe| lead(p, 1, 4), |p: &Probe| lead(p, 2, 4));
    let data = Data::default().with(&table_key(FLEET), b"").with(&table_marks_key(FLEET), b"");
    let steps = explore(data, &[&a, &b], |before, vm, after| {
        check_tables(before, vm, after)?;
        let epochs = |vm: usize| after.vms[vm].notes.iter().map(|(_, epoch)| *epoch);
        let both = epochs(0).find(|epoch| epochs(1).any(|other| other == *epoch));
        both.map_or(Ok(()), |epoch| Err(format!("two published in epoch {epoch}")))
    });
    assert!(steps > 100, "{steps}");
}

fn record(number: u64) -> Entry {
    let record = Record {
        fate: Fate::Held,
        replica: ReplicaId { slot: 0, incarnation: 1 },
        parent: None,
        blocks: vec![BlockHash(number), BlockHash(number + 1000)],
        known: 0,
    };
    record.into()
}

/// What a reader does with a slot on each refresh.
fn read_log(probe: &Probe, refreshes: usize) {
    let mut reader = LogReader::default();
    for _ in 0..refreshes {
        let (value, _) = (&probe).get(&slot_key(0));
        let Some((_, VmState { owner, head, .. })) = value.as_deref().and_then(VmState::read)
        else {
            continue;
        };
        while let Some(place) = reader.place(head) {
            let (segment, _) = (&probe).get(&log_key(0, place));
            let records = match reader.take(segment.as_deref(), FLEET, owner, head) {
                Read::Entries(entries) => entries,
                Read::Gone => continue,
                Read::Foreign => break,
            };
            for found in records {
                let Entry::Routed(routed) = &found else { panic!("{found:?}") };
                let number = routed.blocks.first().map_or(0, |hash| hash.0);
                assert_eq!(found, record(number), "a record that was never written");
                probe.note("read", number);
            }
        }
    }
}

fn write_log(probe: &Probe, own: &mut OwnSlot, vm: u64, now: Moment, numbers: &[u64]) {
    for number in numbers {
        own.append(&probe, &record(*number));
        if own.publish(&probe, FLEET, &state(vm, now, own.head())) {
            probe.note("published", *number);
        }
    }
}

fn read_numbers(world: &World, vm: usize) -> Vec<u64> {
    world.vms[vm].notes.iter().map(|(_, number)| *number).collect()
}

#[test]
fn a_reader_gets_each_record_once_and_in_order_whenever_it_looks() {
    let head = LogHead { segment: 1, length: 0 };
    let data = Data::default().with(&slot_key(0), &state(1, Moment::default(), head).write(FLEET));
    let writer = |probe: &Probe| {
        let mut own = OwnSlot::confirmed(0, FLEET, 1, head);
        write_log(probe, &mut own, 1, Moment::default(), &[1, 2, 3]);
        probe.note("done", 0);
    };
    let mut all = 0;
    let steps = explore(data, &[&writer, &|p| read_log(p, 4)], |_, _, after| {
        let read = read_numbers(after, 1);
        if read != (1..=read.len() as u64).collect::<Vec<u64>>() {
            return Err(format!("read {read:?}"));
        }
        all += usize::from(read.len() == 3);
        Ok(())
    });
    assert!(steps > 100 && all > 0, "{steps} {all}");
}

#[test]
fn a_former_owner_that_wakes_up_hides_nothing_of_the_new_ones() {
    let head = LogHead { segment: 1, length: 0 };
    let mut log = LogWriter::new(FLEET, 1, head);
    let first = log.append(&record(1)).1.to_vec();
    // The old owner wrote a record and its head, and is about to write the next.
    let old = state(1, Moment::default(), log.head());
    let data = Data::default().with(&slot_key(0), &old.write(FLEET)).with(&log_key(0, 1), &first);
    let stalled = |probe: &Probe| {
        let mut own = OwnSlot::confirmed(0, FLEET, 1, LogHead { segment: 1, length: 0 });
        own.append(&probe, &record(1));
        own.append(&probe, &record(2));
        // A record that does not fit goes into the segment which is the new owner's first.
        let mut own = OwnSlot::confirmed(0, FLEET, 1, LogHead { segment: 2, length: 0 });
        own.append(&probe, &record(3));
        let published = own.publish(&probe, FLEET, &state(1, Moment::default(), own.head()));
        assert!(!published, "a dead VM's slot was given away");
    };
    let new = |probe: &Probe| {
        let now = Moment::default().plus(DEAD_AFTER);
        let own = OwnSlot::claim(&probe, FLEET, now, |head| state(11, now, head));
        let mut own = own.expect("the slot of a dead VM");
        assert!(own.keep(&probe, 11));
        write_log(probe, &mut own, 11, now, &[11, 12]);
    };
    // The claim comes first: before it, the old owner is not dead and writes as it may.
    let claimed = {
        let now = Moment::default().plus(DEAD_AFTER);
        data.with(&slot_key(0), &state(10, Moment::default(), old.head).write(FLEET))
            .with(&slot_key(1), &state(12, now, head).write(FLEET))
    };
    let steps = explore(claimed, &[&stalled, &new, &|p| read_log(p, 2)], |_, _, after| {
        let read = read_numbers(after, 2);
        let mut sorted = read.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != read.len() {
            return Err(format!("read {read:?}"));
        }
        let own: Vec<u64> = read.iter().copied().filter(|number| *number > 10).collect();
        if own == [12] { Err("a record of the new owner was skipped".to_owned()) } else { Ok(()) }
    });
    assert!(steps > 1000, "{steps}");
}

/// Everything a replica holds after so many changes is its first so many blocks.
fn told(epoch: u64, from: Option<Position>, to: Position, is_last: bool) -> Entry {
    let first = from.filter(|from| from.generation == to.generation).map_or(0, |from| from.seq);
    let blocks: Vec<BlockHash> = (first + 1..=to.seq).map(BlockHash).collect();
    let sighting = Sighting { is_held: true, at_hand: true, parent: None, blocks, known: 0 };
    let (has_tiers, sightings) = (false, vec![sighting]);
    let step = Step::Changed { from, to, is_last, has_tiers, sightings };
    Update { replica: ReplicaId { slot: 0, incarnation: 1 }, epoch, step }.into()
}

/// What a reader makes of updates: where it stands, and the blocks that it has.
#[derive(Default)]
struct Heard {
    logs: [LogReader; 2],
    standing: Option<Standing>,
    held: BTreeSet<u64>,
    waiting: Vec<Entry>,
}

impl Heard {
    fn refresh(&mut self, probe: &Probe) {
        for slot in 0..2 {
            let (value, _) = probe.get(&slot_key(slot));
            let Some((_, VmState { owner, head, .. })) = value.as_deref().and_then(VmState::read)
            else {
                continue;
            };
            while let Some(place) = self.logs[slot as usize].place(head) {
                let (segment, _) = probe.get(&log_key(slot, place));
                match self.logs[slot as usize].take(segment.as_deref(), FLEET, owner, head) {
                    Read::Entries(entries) => self.waiting.extend(entries),
                    Read::Gone => {}
                    Read::Foreign => break,
                }
            }
        }
        for _ in 0..4 {
            let waiting = std::mem::take(&mut self.waiting);
            self.waiting = waiting.into_iter().filter(|entry| !self.apply(entry)).collect();
        }
    }

    fn apply(&mut self, entry: &Entry) -> bool {
        let Entry::Observed(update) = entry else { panic!("{entry:?}") };
        let Some(next) = update.goes_to(self.standing.as_ref()) else { return false };
        let Some(next) = next else { return true };
        let Step::Changed { from, sightings, .. } = &update.step else { return true };
        if from.is_none() {
            self.held.clear();
        }
        let blocks = sightings.iter().flat_map(|sighting| &sighting.blocks);
        self.held.extend(blocks.map(|block| block.0));
        self.standing = Some(next);
        true
    }

    /// A whole report is never taken in by half, nor one of a cache that is no more behind one of the next.
    fn check(&self, probe: &Probe, latest: &mut u64) {
        let Some(standing) = self.standing else { return };
        let Position { generation, seq } = standing.position;
        assert!(generation >= *latest || !standing.is_whole, "{generation} behind {latest}");
        if standing.is_whole {
            *latest = generation;
            assert!(self.held.iter().copied().eq(1..=seq), "{:?} at {seq}", self.held);
            probe.note("whole", generation * 100 + seq);
        }
    }
}

/// A leader's part: it goes on from what it has heard itself, or from the beginning, up to so many changes.
fn tell(probe: &Probe, number: u32, epoch: u64, generation: u64, heard: &Heard, to: u64) {
    let head = LogHead { segment: 1, length: 0 };
    let mut own = OwnSlot::confirmed(number, FLEET, u64::from(number) + 1, head);
    let mut from = heard.standing.map(|standing| standing.position);
    from = from.filter(|from| from.generation == generation);
    let first = from.map_or(2, |from| from.seq + 1);
    for seq in first..=to {
        let at = Position { generation, seq };
        // The first report comes in two halves.
        if from.is_none() {
            let half = Position { generation: !generation, seq: 1 };
            own.append(&probe, &told(epoch, None, half, false));
            from = Some(half);
        }
        own.append(&probe, &told(epoch, from, at, true));
        own.publish(&probe, FLEET, &state(u64::from(number) + 1, Moment::default(), own.head()));
        from = Some(at);
    }
}

fn leaders_follow(second_generation: u64) {
    let head = LogHead { segment: 1, length: 0 };
    let data = Data::default()
        .with(&slot_key(0), &state(1, Moment::default(), head).write(FLEET))
        .with(&slot_key(1), &state(2, Moment::default(), head).write(FLEET));
    let first = |probe: &Probe| tell(probe, 0, 1, 7, &Heard::default(), 3);
    let second = |probe: &Probe| {
        let mut heard = Heard::default();
        heard.refresh(probe);
        heard.check(probe, &mut 0);
        tell(probe, 1, 2, second_generation, &heard, 4);
    };
    let reader = |probe: &Probe| {
        let (mut heard, mut latest) = (Heard::default(), 0);
        for _ in 0..2 {
            heard.refresh(probe);
            heard.check(probe, &mut latest);
        }
    };
    let mut latest = 0;
    let steps = explore(data, &[&first, &second, &reader], |_, _, after| {
        let whole = after.vms[2].notes.iter().map(|(_, position)| *position);
        latest = latest.max(whole.max().unwrap_or(0));
        Ok(())
    });
    assert!(steps > 1000, "{steps}");
    assert_eq!(latest, second_generation * 100 + 4, "somebody has heard all");
}

#[test]
fn a_leader_that_dies_or_stalls_between_any_two_calls_spoils_no_report() {
    leaders_follow(7);
}

#[test]
fn a_leader_that_stalls_does_not_follow_the_next_one_with_an_older_cache() {
    leaders_follow(8);
}

/// As Envoy starts: one VM tries the configuration, then comes the main thread's, then all workers' at once.
#[test]
fn the_main_threads_vm_is_the_second_to_start_and_no_workers_is() {
    let start = |probe: &Probe| {
        for what in ["tried", "main"] {
            probe.note(what, births::is_main_threads(&probe).into());
        }
    };
    let mut data = Data::default();
    explore(data.clone(), &[&start], |_, _, after| {
        data = after.data.clone();
        let expected = [("tried", 0), ("main", 1)];
        let said = &after.vms[0].notes;
        expected.starts_with(said).then_some(()).ok_or(format!("{said:?}"))
    });
    let worker = |probe: &Probe| probe.note("worker", births::is_main_threads(&probe).into());
    let steps = explore(data, &[&worker, &worker, &worker], |_, vm, after| {
        let passes = after.vms[vm].notes.contains(&("worker", 1));
        (!passes).then_some(()).ok_or(format!("worker {vm} passes for the main thread"))
    });
    assert!(steps > 5, "{steps}");
}

/// As where a filter is new to an Envoy that runs: behind the one that tries it all start at once.
#[test]
fn of_vms_that_start_at_once_one_passes_for_the_main_threads() {
    let tries = |probe: &Probe| probe.note("tried", births::is_main_threads(&probe).into());
    let mut data = Data::default();
    explore(data.clone(), &[&tries], |_, _, after| {
        data = after.data.clone();
        Ok(())
    });
    let start = |probe: &Probe| probe.note("main", births::is_main_threads(&probe).into());
    let steps = explore(data, &[&start, &start, &start], |_, _, after| {
        let passing = after.vms.iter().filter(|vm| vm.notes.contains(&("main", 1))).count();
        let is_one = passing == 1 || (passing == 0 && !after.is_at_rest());
        is_one.then_some(()).ok_or(format!("{passing} pass for the main thread's"))
    });
    assert!(steps > 50, "{steps}");
}
