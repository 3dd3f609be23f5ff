//! Values in Envoy's shared data, which any plugin of the same VM may have written.

use super::{Bytes, Target};
use crate::memory::bounded;
use std::collections::BTreeMap;
use std::time::Duration;
use warmpath::charge::Charges;
use warmpath::replicas::strikes::{Strike, Strikes};
use warmpath::replicas::{Member, Moment, ReplicaId, ReplicaTable};
use warmpath::share::lease::{self, Lease};
use warmpath::share::log::{Fate, LogReader, LogWriter, Read, Record, SEGMENTS};
use warmpath::share::table::Published;
use warmpath::share::vm::{self, LogHead, VmState};
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

/// A value of each kind.
fn written() -> Vec<Vec<u8>> {
    let replica = ReplicaId { slot: 1, incarnation: 2 };
    let mut charges = Charges::default();
    charges.start(replica, 1000, Moment(5), Duration::from_secs(1));
    let head = LogHead { segment: 3, length: 700 };
    let mut strikes = Strikes::default();
    strikes.insert(replica, Strike { failures: 2, failed_at: Moment(70), ..Strike::default() });
    let state = VmState { owner: 7, heartbeat: Moment(77), ready: true, head, charges, strikes };
    let mut table = ReplicaTable::default();
    let member = |address: &str| Member::healthy(address.to_owned());
    table.set_members("pool", &[member("10.0.0.1:80"), member("[::1]:80"), member("10.0.0.3:80")]);
    table.set_members("pool", &[member("10.0.0.1:80"), member("10.0.0.3:80")]);
    table.set_models(0, vec!["m".to_owned(), "n".to_owned()]);
    let page = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n\
        process_start_time_seconds 1.7e9\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"99\"} 1\n";
    let report = warmpath::replicas::stats::Report::parse(page).expect("a report");
    table.set_report(2, &report, 1, Moment(9));
    let mut log = LogWriter::new(FINGERPRINT, 7, LogHead { segment: 1, length: 0 });
    log.append(&record(replica, &mut Bytes(&[0, 9, 3])));
    let log = log.append(&record(replica, &mut Bytes(&[1, 8, 2]))).1.to_vec();
    let lease = Lease { holder: 7, epoch: 3, until: Moment(99) };
    let published = Published { epoch: 3, version: 5, table };
    let kinds =
        [state.write(FINGERPRINT), log, lease.write(FINGERPRINT), published.write(FINGERPRINT)];
    // In front of each, the byte that says its kind.
    kinds
        .into_iter()
        .zip(0u8..)
        .map(|(value, kind)| [&[kind], value.get(32..).unwrap_or_default()].concat())
        .collect()
}

fn record(replica: ReplicaId, bytes: &mut Bytes<'_>) -> Record {
    let fate = if bytes.u8() & 1 == 0 { Fate::Held } else { Fate::Forgotten };
    let parent = Some(bytes.u64()).filter(|parent| *parent != 0).map(BlockHash);
    let blocks = (0..u64::from(bytes.u8())).map(BlockHash).collect();
    Record { fate, replica, parent, blocks }
}

/// The first byte is the kind, the rest what stands behind a header of ours. What is read can be written, and then
/// reads as the same.
fn values(data: &[u8]) {
    let mut bytes = Bytes(data);
    let kind = [Kind::Vm, Kind::Log, Kind::Lease, Kind::Table][usize::from(bytes.u8() % 4)];
    let header = Header { fingerprint: FINGERPRINT, writer: 7, version: 1 };
    let mut value = header.begin(kind).finish();
    value.extend_from_slice(bytes.0);
    bounded(value.len(), 64 << 10, 120, || match kind {
        Kind::Vm => vm_value(&value),
        Kind::Log => log_value(&value),
        Kind::Lease => lease_value(&value),
        Kind::Table => table_value(&value),
    });
    // Without a header of ours it is nobody's.
    assert_eq!(
        VmState::read(data).is_some(),
        Header::read(data, Kind::Vm).is_some() && VmState::read(data).is_some()
    );
    vm::claim(Some(data), Moment(1));
    assert!(
        Published::marks(data, FINGERPRINT).is_none() || Header::read(data, Kind::Table).is_some()
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

fn log_value(value: &[u8]) {
    let mut reader = LogReader::default();
    let head = LogHead { segment: 1, length: u32::MAX };
    reader.place(head);
    reader.take(Some(value), FINGERPRINT, head);
    if let Some(place) = reader.place(head) {
        assert!(place < SEGMENTS);
    }
}

fn lease_value(value: &[u8]) {
    let Some(lease) = Lease::read(value, FINGERPRINT) else { return };
    assert_eq!(Lease::read(&lease.write(FINGERPRINT), FINGERPRINT), Some(lease));
    for now in [Moment(0), lease.until, Moment(u64::MAX)] {
        let claimed =
            lease::claim(Some(lease), 8, now, Duration::from_secs(1), Duration::from_secs(1));
        assert!(
            claimed.is_none_or(|new| new.holder == 8 && new.epoch > lease.epoch),
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
                let record = record(ReplicaId { slot: bytes.u32(), incarnation: 1 }, &mut bytes);
                let (place, value) = writer.append(&record);
                ring.insert(place, value.to_vec());
                expected.push(record);
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

fn catch_up(reader: &mut LogReader, ring: &BTreeMap<u64, Vec<u8>>, head: LogHead) -> Vec<Record> {
    let mut records = Vec::new();
    for _ in 0..=SEGMENTS {
        let Some(place) = reader.place(head) else { break };
        let value = ring.get(&place).map(Vec::as_slice);
        if let Read::Records(read) = reader.take(value, FINGERPRINT, head) {
            records.extend(read);
        }
    }
    records
}
