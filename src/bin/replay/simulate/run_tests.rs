//! What happens to a fleet and how it is told, and the guards that depend on the fleet alone.

use super::super::SimulateArgs;
use super::super::fault::Fault;
use super::super::policy::Why;
use super::*;
use crate::random::LogNormal;
use crate::stats::Run;
use crate::trace::Session;
use clap::Parser;
use std::cell::RefCell;
use std::rc::Rc;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: SimulateArgs,
}

fn fleet(line: &str) -> FleetConfig {
    let words = "simulate --block-size 64".split(' ').chain(line.split_whitespace());
    Command::parse_from(words).args.fleet().unwrap()
}

fn fault(text: &str) -> Fault {
    text.parse().unwrap()
}

/// Sessions of agents that share one of six long heads, over so many seconds.
fn agents(sessions: usize, seconds: f64, seed: u64) -> Trace {
    const TURN: LogNormal = LogNormal { median: 6.0, sigma: 0.8, least: 1.0, most: 60.0 };
    const THINK: LogNormal = LogNormal { median: 1.5, sigma: 0.8, least: 0.1, most: 10.0 };
    let mut random = Random::new(seed, 31);
    let session = |number: usize| {
        let head = random.below(6) as u64;
        let mut id = (number as u64 + 1) << 32;
        let mut fresh = |count: usize| -> Vec<u64> {
            id += count as u64;
            (id - count as u64..id).collect()
        };
        let (mut keep, mut turns) = (0, Vec::new());
        for turn in 0..1 + random.geometric(5.0) {
            let mut blocks: Vec<u64> = Vec::new();
            if turn == 0 {
                blocks.extend((0..40).map(|at| head * 1000 + at));
            }
            blocks.extend(fresh(random.lognormal(TURN) as usize));
            let prompt = keep + blocks.len();
            let answer_tokens = 64 + random.below(128) as u32;
            let answer_blocks = fresh(answer_tokens as usize / 64);
            let before = std::mem::replace(&mut keep, prompt + answer_blocks.len());
            turns.push(Turn {
                think: Duration::from_secs_f64(random.lognormal(THINK)),
                keep: before,
                blocks,
                prompt_tokens: prompt as u32 * 64,
                answer_blocks,
                answer_tokens,
                class: "agent",
            });
        }
        let arrival = Duration::from_secs_f64(random.unit() * seconds);
        Session { name: format!("session-{number}"), arrival, turns }
    };
    let sessions = (0..sessions).map(session).collect();
    Trace { name: "agents".to_owned(), block_tokens: 64, sessions }
}

/// What a router heard, as words.
#[derive(Default)]
struct Heard {
    reports: Vec<(usize, Duration, ReplicaReport)>,
    chosen: Vec<(usize, Duration)>,
    ended: Vec<(bool, Option<u32>)>,
    standing: Vec<Vec<Standing>>,
}

/// Takes replicas in turn, whoever serves, and remembers what it hears.
struct Listener(Rc<RefCell<Heard>>);

impl Router for Listener {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let mut heard = self.0.borrow_mut();
        let chosen = heard.chosen.len() % ask.serving.len();
        heard.chosen.push((chosen, ask.now));
        Ok(chosen)
    }

    fn why(&self) -> Why {
        Why { predicted_tokens: Some(7), reason: "turn", ..Why::default() }
    }

    fn ended(&mut self, _: RequestId, ended: &Ended<'_>, _: Duration) {
        self.0.borrow_mut().ended.push((ended.failed, ended.cached_tokens));
    }

    fn standing(&mut self, standing: &[Standing]) {
        self.0.borrow_mut().standing.push(standing.to_vec());
    }

    fn report(&mut self, replica: usize, report: &ReplicaReport, now: Duration) {
        self.0.borrow_mut().reports.push((replica, now, *report));
    }
}

fn listen(fleet: &FleetConfig, trace: &Trace) -> (Vec<Sample>, Heard) {
    let heard = Rc::new(RefCell::new(Heard::default()));
    let routers: Vec<Box<dyn Router>> = vec![Box::new(Listener(Rc::clone(&heard)))];
    let samples = Simulation::new(fleet, trace, Policy::RoundRobin, routers, 1).run().unwrap();
    (samples, Rc::into_inner(heard).unwrap().into_inner())
}

fn served(samples: &[Sample], replica: &str, times: std::ops::Range<u64>) -> usize {
    let within = |sample: &&Sample| times.contains(&sample.arrival.as_secs());
    let by = samples.iter().filter(within).filter(|s| s.replica.as_deref() == Some(replica));
    by.count()
}

#[test]
fn a_restart_fails_what_is_in_flight_and_the_client_tries_again() {
    let mut fleet = fleet("--replicas 2");
    let trace = agents(60, 10.0, 1);
    let (calm, _) = listen(&fleet, &trace);
    assert!(calm.iter().all(|sample| sample.failures == 0));
    fleet.faults.push(fault("5:restart:2:3"));
    let (samples, heard) = listen(&fleet, &trace);
    assert_eq!(samples.len(), trace.requests());
    let failures: u32 = samples.iter().map(|sample| sample.failures).sum();
    assert!(failures > 0);
    assert_eq!(heard.ended.iter().filter(|(failed, _)| *failed).count(), failures as usize);
    let waited = samples.iter().filter(|sample| sample.failures > 0);
    assert!(waited.clone().all(|sample| sample.first_token >= Some(RETRY)));
    assert!(samples.iter().all(|sample| sample.whole > Duration::ZERO));
    assert_eq!(served(&samples, "replica 02", 6..8), 0);
    assert!(served(&samples, "replica 02", 9..15) > 10);
    let started: Vec<f64> =
        heard.reports.iter().filter(|(n, ..)| *n == 1).map(|(.., r)| r.started_at).collect();
    assert_eq!((started.first(), started.last()), (Some(&1.0), Some(&6.0)));
}

#[test]
fn a_restarted_replica_has_nothing_cached() {
    let mut fleet = fleet("--replicas 1");
    let trace = agents(30, 6.0, 1);
    fleet.faults.push(fault("5:restart:1:1"));
    let (samples, heard) = listen(&fleet, &trace);
    let after = Duration::from_secs(6);
    let first = samples.iter().filter(|s| s.arrival > after).min_by_key(|s| s.arrival).unwrap();
    assert_eq!(first.predicted_tokens, Some(7));
    let (_, at, _) = heard.reports.iter().find(|(.., report)| report.started_at > 1.0).unwrap();
    assert!(*at >= after && *at <= after + fleet.report_interval);
    let (calm, _) = listen(&FleetConfig { faults: Vec::new(), ..fleet }, &trace);
    let cached = |all: &[Sample]| all.iter().map(|s| s.cached_tokens).sum::<u64>();
    assert!(cached(&samples) < cached(&calm), "{} {}", cached(&samples), cached(&calm));
}

#[test]
fn a_replica_serves_from_when_it_joins_until_it_drains() {
    let mut fleet = fleet("--replicas 3");
    fleet.faults = vec![fault("4:join:2"), fault("8:drain:3")];
    let trace = agents(60, 12.0, 1);
    let (samples, heard) = listen(&fleet, &trace);
    assert_eq!(served(&samples, "replica 02", 0..4), 0);
    assert!(served(&samples, "replica 02", 5..12) > 10);
    assert!(served(&samples, "replica 03", 0..8) > 10);
    assert_eq!(served(&samples, "replica 03", 8..99), 0);
    assert!(samples.iter().all(|sample| sample.failures == 0));
    use Standing::{Absent, Draining, Serving};
    let expected =
        [[Serving, Absent, Serving], [Serving, Serving, Serving], [Serving, Serving, Draining]];
    assert_eq!(heard.standing, expected);
}

#[test]
fn reports_come_at_their_interval_late_and_not_in_a_silence() {
    let mut fleet = fleet("--replicas 2 --report-ms 500 --report-delay-ms 200");
    fleet.faults.push(fault("2:silence:3"));
    let (_, heard) = listen(&fleet, &agents(20, 8.0, 1));
    let times: Vec<u128> = heard.reports.iter().map(|(_, at, _)| at.as_millis()).collect();
    assert_eq!(
        times.get(..10),
        Some(&[200, 200, 700, 700, 1200, 1200, 1700, 1700, 5200, 5200][..])
    );
    assert!(heard.reports.iter().any(|(.., report)| report.running > 0));
}

#[test]
fn a_cache_that_shrinks_hits_less_and_says_nothing_of_it() {
    let mut fleet = fleet("--replicas 1 --capacity-blocks 20000");
    let trace = agents(40, 8.0, 1);
    let (calm, _) = listen(&fleet, &trace);
    fleet.faults.push(fault("3:cache:1:400"));
    let (samples, heard) = listen(&fleet, &trace);
    let cached = |all: &[Sample]| all.iter().map(|s| s.cached_tokens).sum::<u64>();
    assert!(cached(&samples) * 10 < cached(&calm) * 9, "{} {}", cached(&samples), cached(&calm));
    assert!(heard.reports.iter().all(|(.., report)| report.capacity_blocks == 20_000));
}

#[test]
fn usage_is_told_or_not() {
    let trace = agents(10, 5.0, 1);
    let (_, heard) = listen(&fleet("--replicas 1"), &trace);
    assert!(heard.ended.iter().any(|(_, cached)| cached.is_some_and(|cached| cached > 0)));
    let (_, heard) = listen(&fleet("--replicas 1 --no-usage"), &trace);
    assert!(heard.ended.iter().all(|(_, cached)| cached.is_none()));
}

#[test]
fn a_fault_of_nobody_is_refused() {
    let mut fleet = fleet("--replicas 2");
    fleet.faults.push(fault("1:drain:3"));
    let error = fleet.play(&agents(1, 1.0, 1), Policy::RoundRobin, 1).unwrap_err();
    assert!(error.starts_with("there is no such replica: "), "{error}");
}

#[test]
fn whatever_happens_the_same_seed_gives_the_same_samples() {
    let mut fleet =
        fleet("--replicas 4 --gateways 2 --threads 3 --reconnects --capacity-blocks 3000");
    fleet.faults = ["1:restart:1:2", "2:cache:2:900", "2:speed:3:0.5", "3:silence:2", "4:drain:4"]
        .map(fault)
        .to_vec();
    let trace = agents(60, 8.0, 1);
    for policy in [Policy::RoundRobin, Policy::Warmpath] {
        let play = |seed| format!("{:?}", fleet.play(&trace, policy, seed).unwrap());
        // Not by assert_eq, which would print megabytes.
        assert!(play(1) == play(1), "{policy:?}: one seed, two runs");
        assert!(play(1) != play(2), "{policy:?}: two seeds, one run");
    }
}

/// Of the same sessions on several seeds: hit rate, and p99 of the first token, each as a mean.
fn figures(fleet: &FleetConfig) -> (f64, f64) {
    // With three the ratio of two p99s moves by a tenth.
    const SEEDS: u64 = 10;
    let runs = (1..=SEEDS).map(|seed| {
        let trace = agents(300, 30.0, seed);
        let samples = fleet.play(&trace, Policy::Warmpath, seed).unwrap();
        Run::of("warmpath", "agents", &samples)
    });
    let sum = runs
        .fold((0.0, 0.0), |(hits, p99), run| (hits + run.hit_rate(), p99 + run.first_token.p99));
    (sum.0 / SEEDS as f64, sum.1 / SEEDS as f64)
}

/// Some two thirds of what the fleet can do.
const GUARDED: &str = "--replicas 8 --capacity-blocks 4000 --prefill-rate 8000";

/// Four gateways, since the only gateway of a fleet knows all that is in flight without reports.
#[test]
fn an_outage_of_all_reports_changes_little() {
    let mut fleet = fleet(&format!("{GUARDED} --gateways 4"));
    let (hits, p99) = figures(&fleet);
    fleet.faults.push(fault("5:silence:1000"));
    let (silent_hits, silent_p99) = figures(&fleet);
    println!("hits {hits:.3} {silent_hits:.3}, p99 {p99:.0} {silent_p99:.0} ms");
    // Either way: better without reports would mean that they mislead.
    assert!(silent_p99 < 1.2 * p99 && p99 < 1.2 * silent_p99, "{silent_p99} ms, {p99} ms");
    assert!(silent_hits > hits - 0.02, "{silent_hits} against {hits}");
}

#[test]
fn threads_and_gateways_do_as_well_as_one() {
    let (hits, p99) = figures(&fleet(GUARDED));
    for topology in ["--threads 4", "--gateways 4"] {
        let (others, others_p99) = figures(&fleet(&format!("{GUARDED} {topology}")));
        println!("{topology}: hits {hits:.3} {others:.3}, p99 {p99:.0} {others_p99:.0} ms");
        assert!((others - hits).abs() < 0.02, "{topology}: {others} against {hits}");
        assert!(others_p99 < 1.1 * p99, "{topology}: {others_p99} ms against {p99} ms");
    }
}
