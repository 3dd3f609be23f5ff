//! How evenly requests fall over a fleet, in traffic of the shapes that routers are known to have fallen over.
//!
//! Each is a complaint from the field. What a fleet must withstand besides, faults above all, is not here.

use super::guards::{args, session, trace};
use super::policy::Policy;
use crate::stats::Sample;
use crate::trace::{Session, Trace};
use crate::workload::Plan;
use std::time::Duration;

/// A request of 60 blocks, the first `shared` of them everybody's and the others its own.
fn request(number: u64, arrival: f64, shared: u64) -> Session {
    session(number, arrival, 1, 60, shared)
}

/// One request after another, so many seconds apart.
fn every(seconds: f64, count: u64, shared: u64) -> Vec<Session> {
    (0..count).map(|number| request(number, number as f64 * seconds, shared)).collect()
}

/// In caches with room for all, so that nobody is spared for being full.
fn play(line: &str, sessions: Vec<Session>, policy: Policy) -> Vec<Sample> {
    let line = format!("{line} --capacity-blocks 100000");
    args(&line).fleet().unwrap().play(&trace(sessions), policy, 1).unwrap()
}

/// Requests of each of so many replicas.
fn counts<'a>(samples: impl IntoIterator<Item = &'a Sample>, replicas: usize) -> Vec<usize> {
    let mut counts = vec![0; replicas];
    for sample in samples {
        let name = sample.replica.as_deref().unwrap();
        counts[name.strip_prefix("replica ").unwrap().parse::<usize>().unwrap() - 1] += 1;
    }
    counts
}

/// No replica got less or more of the requests than these shares of all.
#[track_caller]
fn assert_shares(counts: &[usize], least: f64, most: f64) {
    let all: usize = counts.iter().sum();
    let bounds = least * all as f64..=most * all as f64;
    assert!(counts.iter().all(|count| bounds.contains(&(*count as f64))), "{counts:?}");
}

#[test]
fn different_prompts_under_light_load_go_to_all_alike() {
    let samples = play("--replicas 4", every(0.05, 400, 0), Policy::Warmpath);
    assert_shares(&counts(&samples, 4), 0.2, 0.3);
}

#[test]
fn requests_one_after_another_are_halved_between_two_replicas() {
    let samples = play("--replicas 2", every(0.5, 448, 0), Policy::Warmpath);
    assert!(samples.iter().all(|sample| sample.whole < Duration::from_millis(500)), "one by one");
    assert_shares(&counts(&samples, 2), 0.45, 0.55);
}

#[test]
fn one_request_a_second_goes_to_all_replicas() {
    let samples = play("--replicas 3", every(1.0, 300, 0), Policy::Warmpath);
    assert_shares(&counts(&samples, 3), 0.2, 1.0);
}

#[test]
fn requests_between_two_reports_do_not_follow_one_another() {
    for gateways in [1, 4] {
        let line = format!("--replicas 4 --report-ms 5000 --gateways {gateways}");
        let samples = play(&line, every(0.005, 200, 0), Policy::Warmpath);
        assert_shares(&counts(&samples, 4), 0.0, 1.3 / 4.0);
    }
}

#[test]
fn a_shared_system_prompt_pins_nobody_to_its_replica() {
    let mut sessions = vec![request(0, 0.0, 8)];
    sessions.extend((1..=64).map(|number| request(number, 5.0, 8)));
    let under = |policy| counts(&play("--replicas 4", sessions.clone(), policy)[1..], 4);
    assert_shares(&under(Policy::Warmpath), 0.0, 1.5 / 4.0);
    assert!(under(Policy::PrefixOnly).contains(&64), "where the longest prefix wins");
}

#[test]
fn a_replica_that_joins_gets_its_share_of_warm_traffic() {
    let args = args("--replicas 5 --requests 1500 --duration 20 --fault 6:join:5");
    let plan = Plan::new(args.workload, args.requests, Duration::from_secs_f64(args.duration), 1);
    let trace = Trace::of_plan("conversations", &plan, args.block_size);
    let share = |policy| {
        let samples = args.fleet().unwrap().play(&trace, policy, 1).unwrap();
        let later = samples.iter().filter(|sample| sample.arrival.as_secs() >= 6);
        let counts = counts(later, 5);
        counts[4] as f64 / counts.iter().sum::<usize>() as f64
    };
    let (here, longest) = (share(Policy::Warmpath), share(Policy::PrefixOnly));
    assert!(here >= 0.1 && longest < 0.1, "{here}, and {longest} where the longest prefix wins");
}
