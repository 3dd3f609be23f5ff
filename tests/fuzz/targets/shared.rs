//! Values in Envoy's shared data, which any plugin of the same VM may have written.

use super::{Bytes, Target};
use crate::memory::bounded;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use warmpath::charge::Charges;
use warmpath::drift::{DriftConfig, Kind as PromptKind, Outcome, Signal, Verdicts};
use warmpath::index::Sighting;
use warmpath::learn::{Learned, Rates};
use warmpath::replicas::strikes::{Strike, Strikes};
use warmpath::replicas::{Member, Moment, ReplicaId, ReplicaTable};
use warmpath::report::{Change, Position, Tier};
use warmpath::share::births;
use warmpath::share::bytes::Writer;
use warmpath::share::drift;
use warmpath::share::learned;
use warmpath::share::lease::{Claim, Lease};
use warmpath::share::link::{Link, LinkConfig};
use warmpath::share::log::{Entry, Fate, LogReader, LogWriter, Read, Record, SEGMENTS};
use warmpath::share::observed::{Step as Reported, Update};
use warmpath::share::snapshot::{Head, Intake, Step};
use warmpath::share::store::Store;
use warmpath::share::table::{Marks, Published};
use warmpath::share::vm::{self, LogHead, VmState, VmTraits};
use warmpath::share::{Header, Kind};
use warmpath::tokens::blocks::BlockHash;

const FINGERPRINT: u64 = 9;

pub const VALUES: Target = Target {
    name: "values",
    run: values,
    words: &[
        "\u{1}\0\0\0",
        "\0\0\0\0",
        "\u{7f}\u{7f}\u{7f}\u{7f}",
        "\u{b}\0\0\u{0}10.0.0.1:80",
        "WPSD",
    ],
    more_seeds: written,
    cases: 3000,
};

const KINDS: [Kind; 9] = [
    Kind::Vm,
    Kind::Log,
    Kind::Lease,
    Kind::Table,
    Kind::Snapshot,
    Kind::Chunk,
    Kind::Drift,
    Kind::Learned,
    Kind::Births,
];

/// A value of each kind.
fn written() -> Vec<Vec<u8>> {
    let replica = ReplicaId { slot: 1, incarnation: 2 };
    let mut charges = Charges::default();
    charges.start(replica, 1000, Moment(5), Duration::from_secs(1));
    let head = LogHead { segment: 3, length: 700 };
    let mut strikes = Strikes::default();
    strikes.insert(replica, Strike { failures: 2, failed_at: Moment(70), ..Strike::default() });
    let traits = VmTraits { ready: true, ..VmTraits::default() };
    let heartbeat = Moment(77);
    let state = VmState { owner: 7, heartbeat, traits, head, charges, strikes, learned_version: 4 };
    let mut table = ReplicaTable::default();
    let member = |address: &str| Member::healthy(address.to_owned());
    table.set_members("pool", &[member("10.0.0.1:80"), member("[::1]:80"), member("10.0.0.3:80")]);
    table.set_members("pool", &[member("10.0.0.1:80"), member("10.0.0.3:80")]);
    table.set_models(0, ["m", "n"].map(warmpath::replicas::models::Served::named).to_vec());
    let page = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n\
        process_start_time_seconds 1.7e9\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"99\"} 1\n";
    let report = warmpath::replicas::stats::Report::parse(page).expect("a report");
    table.set_report(2, &report, 1, Moment(9));
    let mut log = LogWriter::new(FINGERPRINT, 7, LogHead { segment: 1, length: 0 });
    log.append(&record(replica, &mut Bytes(&[0, 9, 3])).into());
    log.append(&update(replica, &mut Bytes(&[1, 8, 2, 1, 0, 9])).into());
    let log = log.append(&record(replica, &mut Bytes(&[1, 8, 2])).into()).1.to_vec();
    let lease = Lease { holder: 7, epoch: 3, until: Moment(99) };
    let header = |kind| Header { fingerprint: FINGERPRINT, writer: 7, version: 1 }.begin(kind);
    let marks = Marks { epoch: 3, leader: 7, version: 5 };
    let published = Published { marks, table };
    let mut chunk = header(Kind::Chunk);
    for (used, parent) in [(1_u64, None), (2, Some(3_u64))] {
        chunk.u32(1);
        chunk.u32(1);
        chunk.u64(used);
        chunk.option(parent, Writer::u64);
        chunk.list([used, used + 1, used + 2].into_iter(), Writer::u64);
    }
    let mut head = header(Kind::Snapshot);
    head.u64(5);
    head.u32(1);
    head.u8(1);
    head.list([1_u32].into_iter(), |writer, slot| {
        writer.u32(slot);
        writer.u64(3);
        writer.u32(700);
    });
    let mut verdicts = Verdicts::default();
    for model in [1, 2] {
        let (kind, signal) = (PromptKind::Tools, Signal::Prompt);
        let outcome = Outcome { model, kind, signal, differs: true };
        verdicts.take(&DriftConfig::default(), outcome, Moment(7));
    }
    let kinds = [
        state.write(FINGERPRINT),
        log,
        lease.write(FINGERPRINT),
        published.write(FINGERPRINT),
        head.finish(),
        chunk.finish(),
        drift::write(&verdicts, FINGERPRINT, 7),
        learned::write(FINGERPRINT, 7, 4, [(replica, Learned::default())].into_iter()),
        header(Kind::Births).finish(),
    ];
    // In front of each, the byte that says its kind.
    kinds
        .into_iter()
        .zip(0u8..)
        .map(|(value, kind)| [&[kind], value.get(32..).unwrap_or_default()].concat())
        .collect()
}

fn record(replica: ReplicaId, bytes: &mut Bytes<'_>) -> Record {
    let (fate, known) = (bytes.u8(), u32::from(bytes.u8() & 15));
    let fate = [Fate::Held, Fate::Forgotten, Fate::Lost][usize::from(fate % 3)];
    let parent = Some(bytes.u64()).filter(|parent| *parent != 0).map(BlockHash);
    let blocks = (0..u64::from(bytes.u8())).map(BlockHash).collect();
    Record { fate, replica, parent, blocks, known }
}

fn update(replica: ReplicaId, bytes: &mut Bytes<'_>) -> Update {
    let position = |seq: u8| Position { generation: 1 + u64::from(seq / 100), seq: seq.into() };
    let from = Some(bytes.u8()).filter(|from| *from % 5 > 0).map(position);
    let (to, flags) = (position(bytes.u8()), bytes.u8());
    let sighting = |bytes: &mut Bytes<'_>| {
        let Record { fate, parent, blocks, known, .. } = record(replica, bytes);
        let (is_held, at_hand) = (fate == Fate::Held, known % 3 != 2);
        Sighting { is_held, at_hand, parent, blocks, known }
    };
    let sightings = (0..bytes.u8() % 4).map(|_| sighting(bytes)).collect();
    let (is_last, has_tiers) = (flags % 4 > 0, flags >= 128);
    let step = match flags {
        255 => Reported::Ended,
        _ => Reported::Changed { from, to, is_last, has_tiers, sightings },
    };
    Update { replica, epoch: u64::from(bytes.u8() % 3), step }
}

/// The first byte is the kind, the rest what stands behind a header of ours. What is read can be written, and then
/// reads as the same.
fn values(data: &[u8]) {
    let mut bytes = Bytes(data);
    let kind = KINDS[usize::from(bytes.u8()) % KINDS.len()];
    let header = Header { fingerprint: FINGERPRINT, writer: 7, version: 1 };
    let mut value = header.begin(kind).finish();
    value.extend_from_slice(bytes.0);
    // An index takes its first pages whole, however little comes into them.
    let base = if matches!(kind, Kind::Snapshot | Kind::Chunk) { 160 << 10 } else { 64 << 10 };
    bounded(value.len(), base, 120, || match kind {
        Kind::Vm => vm_value(&value),
        Kind::Log => log_value(&value),
        Kind::Lease => lease_value(&value),
        Kind::Table => table_value(&value),
        Kind::Snapshot => snapshot(value, header.begin(Kind::Chunk).finish()),
        Kind::Chunk => {
            let mut head = header.begin(Kind::Snapshot);
            head.u64(1);
            head.u32(1);
            head.u8(1);
            head.u32(0);
            snapshot(head.finish(), value);
        }
        Kind::Drift => drift_value(&value),
        Kind::Learned => learned_value(&value),
        // Who cannot be counted is not the main thread's.
        Kind::Births => assert!(!births::is_main_threads(&Snapshot(value, Vec::new()))),
    });
    // Without a header of ours it is nobody's.
    assert_eq!(
        VmState::read(data).is_some(),
        Header::read(data, Kind::Vm).is_some() && VmState::read(data).is_some()
    );
    vm::claim(Some(data), Moment(1));
    assert!(
        Published::read(data, FINGERPRINT).is_none() || Header::read(data, Kind::Table).is_some()
    );
}

fn vm_value(value: &[u8]) {
    let now = Moment(u64::MAX / 2);
    let Some((fingerprint, state)) = VmState::read(value) else { return };
    assert_eq!(VmState::read(&state.write(fingerprint)), Some((fingerprint, state.clone())));
    let head = vm::claim(Some(value), now).expect("its owner is long dead");
    assert!(
        head > state.head || state.head.segment == u64::MAX,
        "{head:?} behind {:?}",
        state.head
    );
    let mut sum = Charges::default();
    for _ in 0..3 {
        sum.add(&state.charges, now, Duration::from_secs(5));
    }
    sum.forget_idle(now, Duration::from_millis(1));
}

fn learned_value(value: &[u8]) {
    let Some((version, learned)) = learned::read(value, FINGERPRINT, 7) else { return };
    let again = learned::write(FINGERPRINT, 7, version, learned.iter().copied());
    assert_eq!(learned::read(&again, FINGERPRINT, 7).as_ref(), Some(&(version, learned.clone())));
    let mut table = ReplicaTable::default();
    table.set_members("pool", &[Member::healthy("10.0.0.1:80".to_owned())]);
    let replica = table.at(0).expect("a replica").id;
    let all = learned.into_iter().map(|(_, learned)| (replica, learned));
    let speed = Rates::merged(all, &table, Moment(u64::MAX / 2)).of(replica);
    let rate = speed.prefill_tokens_per_s.unwrap_or(1.0);
    assert!(rate > 0.0 && rate.is_finite() && speed.base_s.is_finite(), "{speed:?}");
    assert!(speed.decode_s_per_token.unwrap_or(0.0).is_finite(), "{speed:?}");
}

fn drift_value(value: &[u8]) {
    let Some(mut verdicts) = drift::read(value, FINGERPRINT) else { return };
    let again = drift::write(&verdicts, FINGERPRINT, 7);
    assert_eq!(drift::read(&again, FINGERPRINT).as_ref(), Some(&verdicts));
    let (config, now) = (DriftConfig::default(), Moment(u64::MAX / 2));
    for signal in Signal::ALL {
        for (model, differs) in [(1, true), (2, false)] {
            let outcome = Outcome { model, kind: PromptKind::Chat, signal, differs };
            verdicts.take(&config, outcome, now);
        }
    }
}

fn log_value(value: &[u8]) {
    let mut reader = LogReader::default();
    let head = LogHead { segment: 1, length: u32::MAX };
    reader.place(head);
    reader.take(Some(value), FINGERPRINT, 7, head);
    if let Some(place) = reader.place(head) {
        assert!(place < SEGMENTS);
    }
}

/// A snapshot's head and its one chunk, in a store that has nothing else.
struct Snapshot(Vec<u8>, Vec<u8>);

impl Store for Snapshot {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        let is_chunk = key.ends_with(|last: char| last.is_ascii_digit());
        (Some(if is_chunk { &self.1 } else { &self.0 }.clone()), Some(1))
    }

    fn set(&self, _: &str, _: &[u8], _: Option<u32>) -> bool {
        false
    }
}

/// What a snapshot gives can be handed on again, and is within the bounds.
fn snapshot(head: Vec<u8>, chunk: Vec<u8>) {
    let store = Snapshot(head, chunk);
    let Some(head) = Head::read(&store) else { return };
    let mut intake = Intake::new(head, 5);
    let table = ReplicaTable::default();
    // Each chunk is the same, so that many are no more than one.
    for _ in 0..50 {
        match intake.step(&store, &table, 100) {
            Step::Pending => {}
            Step::Done | Step::Cut => {
                let (mut index, _) = intake.finish();
                let replicas: Vec<ReplicaId> = index.replicas().collect();
                for replica in replicas {
                    assert!(index.held_blocks(replica) <= 100);
                    let blocks: Vec<BlockHash> = (0..9).map(BlockHash).collect();
                    index.record(replica, 100, &blocks);
                }
                let mut cursor = index.cursor();
                let mut runs = 0;
                while index.export(&mut cursor).is_some() {
                    runs += 1;
                    assert!(runs < 1_000_000, "no end in sight");
                }
                return;
            }
            Step::Lost => return,
        }
    }
}

fn lease_value(value: &[u8]) {
    let Some(lease) = Lease::read(value, FINGERPRINT) else { return };
    assert_eq!(Lease::read(&lease.write(FINGERPRINT), FINGERPRINT), Some(lease));
    for now in [Moment(0), lease.until, Moment(u64::MAX)] {
        let second = Duration::from_secs(1);
        let claimed = Claim { vm: 8, term: second, grace: second, taken: 0 }.over(Some(lease), now);
        assert!(
            claimed.is_none_or(|new| new.holder == 8
                && (new.epoch > lease.epoch || lease.holder == 8 || lease.epoch == u64::MAX)),
            "{claimed:?} over {lease:?}"
        );
    }
}

fn table_value(value: &[u8]) {
    let Some(published) = Published::read(value, FINGERPRINT) else { return };
    assert_eq!(
        Published::read(&published.write(FINGERPRINT), FINGERPRINT).as_ref(),
        Some(&published)
    );
    let mut table = published.table;
    for replica in table.iter() {
        assert!(table.shadow_blocks(replica.id, 8192) <= 2 << 20);
    }
    table.set_members("pool", &[Member::healthy("10.0.0.9:80".to_owned())]);
    assert!(table.in_cluster("pool").count() <= 1);
}

pub const LOGS: Target = Target {
    name: "logs",
    run: logs,
    words: &["\u{1}", "\u{2}", "\u{3}", "\u{4}", "\u{7f}"],
    more_seeds: || {
        vec![vec![0, 1, 9, 3, 1, 0, 2, 200, 1, 0, 3, 1, 4, 7, 1, 0, 1, 250, 1, 5], vec![0; 600]]
    },
    cases: 300,
};

/// A writer, its ring and two readers, driven by the bytes: one reads all along and loses nothing while it is not lapped,
/// one comes now and then. Values may be lost or replaced by garbage; the readers always come to the head.
fn logs(data: &[u8]) {
    let mut bytes = Bytes(data);
    let start = LogHead { segment: 1 + bytes.u64() / 2, length: 0 };
    let mut writer = LogWriter::new(FINGERPRINT, 7, start);
    let mut ring: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let (mut prompt, mut lazy) = (LogReader::default(), LogReader::default());
    let mut expected = Vec::new();
    let (mut is_whole, mut seen) = (true, start.segment);
    // Each step copies a segment.
    let mut steps = 0..2000;
    while !bytes.is_empty() && steps.next().is_some() {
        match bytes.u8() % 8 {
            0..=4 => {
                let replica = ReplicaId { slot: bytes.u32(), incarnation: 1 };
                let entry = match bytes.u8() % 3 {
                    0 => Entry::from(update(replica, &mut bytes)),
                    _ => Entry::from(record(replica, &mut bytes)),
                };
                let (place, value) = writer.append(&entry);
                ring.insert(place, value.to_vec());
                expected.push(entry);
            }
            5 => {
                let read = catch_up(&mut prompt, &ring, writer.head());
                if is_whole {
                    assert!(
                        expected.ends_with(&read),
                        "{} records are not the last of {}",
                        read.len(),
                        expected.len()
                    );
                    let is_lapped = writer.head().segment - seen >= SEGMENTS;
                    assert!(
                        is_lapped || read.len() == expected.len(),
                        "{} records of {}",
                        read.len(),
                        expected.len()
                    );
                }
                seen = writer.head().segment;
                expected.clear();
            }
            6 => drop(catch_up(&mut lazy, &ring, writer.head())),
            _ => {
                let place = bytes.u64() % SEGMENTS;
                let value = ring.entry(place).or_default();
                value.truncate(bytes.u8().into());
                value.push(bytes.u8());
                is_whole = false;
            }
        }
    }
}

fn catch_up(reader: &mut LogReader, ring: &BTreeMap<u64, Vec<u8>>, head: LogHead) -> Vec<Entry> {
    let mut records = Vec::new();
    for _ in 0..=SEGMENTS {
        let Some(place) = reader.place(head) else { break };
        let value = ring.get(&place).map(Vec::as_slice);
        if let Read::Entries(read) = reader.take(value, FINGERPRINT, 7, head) {
            records.extend(read);
        }
    }
    records
}

pub const LINKS: Target = Target {
    name: "links",
    run: links,
    words: &["\u{1}", "\u{2}\u{7f}", "\u{6}", "\u{7}\u{9}\u{1}\u{1}", "\u{5}\u{5}\u{5}"],
    more_seeds: || {
        let mut long = Vec::new();
        for round in 0..40_u8 {
            long.extend([
                1,
                round % 3,
                round,
                2,
                30,
                0,
                round % 3,
                9,
                0,
                (round + 1) % 3,
                9,
                2,
                round % 3,
                5,
            ]);
        }
        vec![long, vec![4, 0, 0, 0, 9, 0, 1, 9, 1, 0, 5, 0, 50, 0, 2, 9, 6, 1, 7, 3, 3, 9, 9]]
    },
    cases: 150,
};

/// Values and their marks, by key.
type Values = BTreeMap<String, (Vec<u8>, u32)>;

/// Shared data as Envoy keeps it.
#[derive(Clone, Default)]
struct Memory(Rc<RefCell<Values>>);

impl Store for Memory {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        match self.0.borrow().get(key) {
            None => (None, None),
            Some((value, mark)) => {
                (Some(value.clone()).filter(|value| !value.is_empty()), Some(*mark))
            }
        }
    }

    fn set(&self, key: &str, value: &[u8], mark: Option<u32>) -> bool {
        let mut all = self.0.borrow_mut();
        let entry = all.entry(key.to_owned()).or_insert_with(|| (Vec::new(), mark.unwrap_or(1)));
        if mark.is_some_and(|mark| mark != entry.1) {
            return false;
        }
        *entry = (value.to_vec(), entry.1.wrapping_add(1));
        true
    }
}

impl Memory {
    /// Changes one of the values there are.
    fn damage(&self, bytes: &mut Bytes<'_>) {
        let mut all = self.0.borrow_mut();
        let place = usize::from(bytes.u8()) % all.len().max(1);
        let Some((value, mark)) = all.values_mut().nth(place) else { return };
        *mark += 1;
        let at = usize::from(bytes.u8()) * (1 + usize::from(bytes.u8() % 4)) % value.len().max(1);
        match bytes.u8() % 4 {
            0 => value.truncate(at),
            1 => value.extend(std::iter::repeat_n(bytes.u8(), at)),
            _ => value.iter_mut().skip(at).take(8).for_each(|byte| *byte = bytes.u8()),
        }
    }
}

/// VMs that share what they know, on data that others spoil, come and go; none of them remembers more than it may.
fn links(data: &[u8]) {
    let mut bytes = Bytes(data);
    let store = Memory::default();
    let config = LinkConfig {
        fingerprint: FINGERPRINT,
        recent_half_life: Duration::from_secs(5),
        default_capacity_blocks: 600,
        learns_rates: true,
        work: (100_000.0, 512.0),
        imagines: false,
    };
    let mut table = ReplicaTable::default();
    let members = ["10.0.0.1:80", "10.0.0.2:80", "[::1]:80"]
        .map(|address| Member::healthy(address.to_owned()));
    table.set_members("pool", &members);
    let mut vms = 0;
    let mut link = || {
        vms += 1;
        Link::new(store.clone(), config, vms, vms)
    };
    let mut links = [link(), link(), link()];
    links[0].prepare_table();
    let _ = links[0].publish_table(1, &table);
    let mut now = Moment(1);
    let mut steps = 0..400;
    while !bytes.is_empty() && steps.next().is_some() {
        let (step, which) = (bytes.u8() % 10, usize::from(bytes.u8() % 3));
        let replica = table.at(which as u32).expect("three replicas").id;
        match step {
            0 | 1 => {
                now = now.plus(Duration::from_millis(50 * u64::from(bytes.u8())));
                bounded(0, 64 << 20, 0, || links[which].tick(now));
            }
            2 | 3 => {
                let record = record(replica, &mut bytes);
                links[which].record(record);
                links[which].publish(now);
            }
            4 => links[which].charge(replica, bytes.u64(), now),
            5 => links[which].refresh(now),
            6 => store.damage(&mut bytes),
            7 => observe(&mut links[which], replica, &mut bytes),
            8 => links[which].unobserve(replica),
            _ => links[which] = link(),
        }
        for replica in links[which].table().iter() {
            assert!(
                links[which].index().held_blocks(replica.id) <= 600
                    && links[which].index().observed_blocks(replica.id) <= 1 << 19
            );
        }
    }
}

/// A piece of a report that makes no sense, or does.
fn observe(link: &mut Link<Memory>, replica: ReplicaId, bytes: &mut Bytes<'_>) {
    let tier = if bytes.u8().is_multiple_of(4) { Tier::Offload } else { Tier::Gpu };
    let change = |bytes: &mut Bytes<'_>| {
        let Record { fate, parent, blocks, .. } = record(replica, bytes);
        match fate {
            Fate::Held => Change::Stored { parent, blocks, tier },
            _ => Change::Removed { blocks, tier },
        }
    };
    let changes: Vec<Change> = (0..bytes.u8() % 4).map(|_| change(bytes)).collect();
    let from = link.observed_position(replica).filter(|_| !bytes.u8().is_multiple_of(4));
    let to = Position { generation: 1 + u64::from(bytes.u8() % 2), seq: bytes.u8().into() };
    link.observe(replica, from, to, &changes, !bytes.u8().is_multiple_of(4));
}
