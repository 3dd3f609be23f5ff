//! What a run is judged by, and what it prints.

use super::faults::Log;
use super::fleet::name;
use super::gateway::Gateway;
use super::load::{self, Tally};
use crate::stats::Scrape;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::PoisonError;
use std::time::Duration;
use tokio::time::Instant;

/// What the last third of a run may use more than the middle third, each by its median: a share, and bytes on top of it
/// for a run that is small. Only moments with as many VMs are compared: while an old build drains, Envoy holds those of two,
/// half as much again, and how often that is so is chance.
const GROWTH_SHARE: f64 = 0.10;
const GROWTH_BYTES: f64 = (24 << 20) as f64;

/// So many moments a third must have of a number of VMs to be judged by them.
const ENOUGH: usize = 5;

/// Envoy's memory at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    pub at: Duration,
    /// Resident bytes of the process, where the system tells.
    pub resident: Option<f64>,
    /// Of these, what Envoy's allocator has handed out; V8's own are not among them.
    pub allocated: f64,
    /// Linear memory of the largest VM.
    pub largest_vm: f64,
    /// VMs that there are.
    pub vms: u64,
}

impl Memory {
    pub async fn look(gateway: &Gateway, start: Instant) -> Self {
        let scrape = gateway.rig.scrape().await;
        let by_vm = scrape.by("warmpath_vm_memory_bytes", "vm");
        Self {
            at: start.elapsed(),
            resident: resident(gateway.rig.pid()),
            allocated: scrape.sum("envoy_server_memory_allocated", &[]),
            largest_vm: by_vm.values().max().copied().unwrap_or(0) as f64,
            vms: gateway.vms().await as u64,
        }
    }
}

fn resident(pid: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: f64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024.0)
}

/// Where there are enough.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().filter(|_| values.len() >= ENOUGH)
}

/// What is wrong with the memory of a run that took this long.
pub fn growth(samples: &[Memory], length: Duration) -> Vec<String> {
    let third = |from: u32, vms: u64, value: &dyn Fn(&Memory) -> Option<f64>| {
        let within = |s: &&Memory| {
            s.vms == vms && s.at >= length * from / 3 && s.at < length * (from + 1) / 3
        };
        median(samples.iter().filter(within).filter_map(value).collect())
    };
    let numbers: BTreeSet<u64> = samples.iter().map(|sample| sample.vms).collect();
    let mut wrong = Vec::new();
    let mut is_judged = false;
    for (what, value) in [
        ("resident memory", &(|s: &Memory| s.resident) as &dyn Fn(&Memory) -> Option<f64>),
        ("the largest VM", &|s: &Memory| Some(s.largest_vm)),
    ] {
        for vms in numbers.iter().copied() {
            let (Some(middle), Some(last)) = (third(1, vms, value), third(2, vms, value)) else {
                continue;
            };
            is_judged = true;
            if last > middle * (1.0 + GROWTH_SHARE) + GROWTH_BYTES {
                let (middle, last) = (mib(middle), mib(last));
                wrong.push(format!("{what} grew from {middle} to {last} with {vms} VMs"));
            }
        }
    }
    if !is_judged {
        wrong.push("memory: no number of VMs was there for long enough twice".to_owned());
    }
    wrong
}

fn mib(bytes: f64) -> String {
    format!("{:.0} MiB", bytes / f64::from(1 << 20))
}

/// The client errors that nothing excuses, each with what is known of it.
pub fn client_errors(tally: &Tally, log: &Log, gateway: &Gateway, start: Instant) -> Vec<String> {
    let troubles = tally.troubles.lock().unwrap_or_else(PoisonError::into_inner);
    let unexcused = troubles.iter().filter(|trouble| load::excuse(trouble, log).is_none());
    unexcused
        .map(|trouble| {
            let seconds = |at: Instant| (at - start).as_secs_f64();
            let head = match trouble.head {
                Some((at, Some(place))) => format!("head at {:.2} of {}", seconds(at), name(place)),
                Some((at, None)) => format!("head at {:.2}, not a replica's", seconds(at)),
                None => "no head".to_owned(),
            };
            format!(
                "{:?} {} by {}: {:?}; began {:.2}, {head}, ended {:.2}; at its beginning: {}; at its end: {}; Envoy: {}",
                trouble.kind,
                trouble.number,
                trouble.connection,
                trouble.end,
                seconds(trouble.began),
                seconds(trouble.ended),
                log.at(trouble.began),
                log.at(trouble.ended),
                gateway.access_log_line(trouble.number)
            )
        })
        .collect()
}

/// Whether Envoy's own count of requests is the filter's.
pub fn miscounted(scrape: &Scrape) -> Option<String> {
    let reasons = scrape.by("warmpath_requests_total", "reason");
    let counted: u64 = reasons.values().sum();
    let inference = [("envoy_http_conn_manager_prefix", "inference")];
    let came = scrape.sum("envoy_http_downstream_rq_total", &inference) as u64;
    (counted != came)
        .then(|| format!("{came} requests reached Envoy, {counted} have a reason: {reasons:?}"))
}

/// Everything that is worth knowing of a run.
pub async fn text(
    seed: u64,
    tally: &Tally,
    log: &Log,
    gateway: &Gateway,
    samples: &[Memory],
    start: Instant,
) -> String {
    let mut text = format!("chaos, seed {seed}, {:.0} s\n", start.elapsed().as_secs_f64());
    let ends = tally.ends.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut by_kind: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for ((kind, end), count) in ends {
        by_kind.entry(kind).or_default().push(format!("{count} {end}"));
    }
    let _ = writeln!(text, "requests: {}, the slowest {:.1} s", tally.sent(), {
        tally.slowest.lock().unwrap_or_else(PoisonError::into_inner).as_secs_f64()
    });
    for (kind, ends) in by_kind {
        let _ = writeln!(text, "  {:<7} {}", format!("{kind:?}").to_lowercase(), ends.join(", "));
    }
    let mut faults: BTreeMap<String, u64> = BTreeMap::new();
    for entry in log.entries() {
        *faults.entry(entry.fault.label()).or_default() += 1;
    }
    let _ = writeln!(text, "faults of replicas: {}", listed(&faults));
    let _ = writeln!(text, "faults of Envoy: {}", listed(&gateway.counts()));
    let mut cut: BTreeMap<String, u64> = BTreeMap::new();
    let troubles = tally.troubles.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for fault in troubles.iter().filter_map(|trouble| load::excuse(trouble, log)) {
        *cut.entry(fault).or_default() += 1;
    }
    let _ = writeln!(text, "responses cut where they had begun, by fault: {}", listed(&cut));
    let errors = client_errors(tally, log, gateway, start);
    let _ = writeln!(text, "client errors: {}", errors.len());
    for error in errors.iter().take(40) {
        let _ = writeln!(text, "  {error}");
    }
    let scrape = gateway.rig.scrape().await;
    let ends = gateway.ends();
    let _ = writeln!(
        text,
        "in the access log: {}, of which {}",
        ends.values().sum::<u64>(),
        listed(&ends)
    );
    text.push_str(&counters(&scrape));
    for (name, value) in gateway.rig.plain_stats("vm_reload|v8.active|v8.created").await {
        let _ = writeln!(text, "{name}: {value}");
    }
    text.push_str(&memory(samples));
    text
}

fn counters(scrape: &Scrape) -> String {
    let mut text = String::new();
    for (name, label) in [
        ("warmpath_requests_total", "reason"),
        ("warmpath_failed_responses_total", "class"),
        ("warmpath_responses_total", "usage"),
        ("warmpath_prediction_total", "result"),
        ("warmpath_polls_total", "result"),
        ("warmpath_strikes_total", "kind"),
        ("warmpath_replicas", "health"),
    ] {
        let _ = writeln!(text, "{name}: {}", listed(&scrape.by(name, label)));
    }
    for name in [
        "warmpath_replica_restarts_total",
        "warmpath_suspensions_total",
        "warmpath_served_elsewhere_total",
        "warmpath_replica_in_flight",
        "warmpath_replica_unfinished_tokens",
        "warmpath_log_lapped_total",
        "warmpath_log_orphaned_total",
        "warmpath_host_errors_total",
        "envoy_cluster_upstream_rq_retry",
        "envoy_cluster_upstream_rq_retry_limit_exceeded",
    ] {
        let _ = writeln!(text, "{name}: {}", scrape.sum(name, &[]));
    }
    text
}

fn listed(counts: &BTreeMap<String, u64>) -> String {
    let words: Vec<String> = counts.iter().map(|(what, count)| format!("{what} {count}")).collect();
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

fn memory(samples: &[Memory]) -> String {
    let mut text = "memory: at s, resident, allocated, largest VM, VMs\n".to_owned();
    for sample in samples.iter().step_by((samples.len() / 12).max(1)) {
        let resident = sample.resident.map_or_else(|| "unknown".to_owned(), mib);
        let (allocated, largest) = (mib(sample.allocated), mib(sample.largest_vm));
        let _ = writeln!(
            text,
            "  {:>4} {resident:>9} {allocated:>9} {largest:>9} {:>3}",
            sample.at.as_secs(),
            sample.vms
        );
    }
    text
}

#[test]
fn growth_is_of_the_last_third_against_the_middle_one() {
    let with = |at, mib: u32, vms| Memory {
        at: Duration::from_secs(at),
        resident: Some(f64::from(mib) * f64::from(1 << 20)),
        allocated: 0.0,
        largest_vm: 0.0,
        vms,
    };
    let sample = |at, mib| with(at, mib, 6);
    let flat: Vec<Memory> = (0..30).map(|at| sample(at, 200 + u32::from(at > 9) * 100)).collect();
    assert_eq!(growth(&flat, Duration::from_secs(30)), Vec::<String>::new());
    let rising: Vec<Memory> = (0..30).map(|at| sample(at, 200 + 10 * at as u32)).collect();
    assert_eq!(
        growth(&rising, Duration::from_secs(30)),
        ["resident memory grew from 350 MiB to 450 MiB with 6 VMs"]
    );
    // A second build's VMs, rarely in the middle and mostly at the end.
    let two = |at: u64| (25..30).contains(&at) || at >= 45;
    let run = |slope: u32| -> Vec<Memory> {
        let of_builds = |at| if two(at) { (500, 12) } else { (360, 6) };
        let at = |at| (at, of_builds(at));
        (0..60).map(at).map(|(at, (mib, vms))| with(at, mib + slope * at as u32, vms)).collect()
    };
    assert_eq!(growth(&run(0), Duration::from_secs(60)), Vec::<String>::new());
    assert_eq!(
        growth(&run(10), Duration::from_secs(60)),
        [
            "resident memory grew from 680 MiB to 780 MiB with 6 VMs",
            "resident memory grew from 770 MiB to 1020 MiB with 12 VMs"
        ]
    );
}
