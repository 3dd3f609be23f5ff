//! What the decision must withstand, as runs of whole fleets: caches that shrink, replicas that are slow, restart, join
//! or leave, bursts, and traffic that gives no load to go by.

use super::SimulateArgs;
use super::policy::Policy;
use crate::stats::Sample;
use crate::trace::{Session, Trace, Turn};
use crate::workload::Plan;
use clap::Parser;
use std::time::Duration;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: SimulateArgs,
}

pub(super) fn args(line: &str) -> SimulateArgs {
    Command::parse_from(std::iter::once("simulate").chain(line.split_whitespace())).args
}

/// Warmpath's samples of a workload.
fn play(line: &str, seed: u64) -> Vec<Sample> {
    let args = args(line);
    let plan =
        Plan::new(args.workload, args.requests, Duration::from_secs_f64(args.duration), seed);
    play_trace(line, &Trace::of_plan(args.workload.name(), &plan, args.block_size))
}

fn play_trace(line: &str, trace: &Trace) -> Vec<Sample> {
    let samples = args(line).fleet().unwrap().play(trace, Policy::Warmpath, 1).unwrap();
    assert!(samples.iter().all(|sample| sample.error.is_none()));
    samples
}

/// Requests of each of four replicas, among these samples.
fn spread<'a>(samples: impl Iterator<Item = &'a Sample> + Clone) -> [usize; 4] {
    [1, 2, 3, 4].map(|n| {
        let name = format!("replica {n:02}");
        samples.clone().filter(|s| s.replica.as_deref() == Some(&name)).count()
    })
}

/// Tokens of prediction and truth that differ, by prompt tokens, in percent.
fn error(samples: &[Sample]) -> f64 {
    let off = |s: &Sample| s.predicted_tokens.unwrap_or(0).abs_diff(s.cached_tokens);
    let all: u64 = samples.iter().map(|sample| sample.prompt_tokens).sum();
    100.0 * samples.iter().map(off).sum::<u64>() as f64 / all as f64
}

const BLOCK: u32 = 16;

/// A session of so many turns that each add so many blocks, the first `shared` of them everybody's.
pub(super) fn session(
    number: u64,
    arrival: f64,
    turns: usize,
    blocks: u64,
    shared: u64,
) -> Session {
    let id = |n: u64| if n < shared { 1 + n } else { (number + 2) * 1_000_000 + n };
    let turn = |turn: usize| {
        let from = turn as u64 * blocks;
        Turn {
            think: Duration::from_millis(100),
            keep: from as usize,
            blocks: (from..from + blocks).map(id).collect(),
            prompt_tokens: (from + blocks) as u32 * BLOCK + 5,
            answer_blocks: Vec::new(),
            answer_tokens: 20,
            class: "chat",
        }
    };
    Session {
        name: format!("session {number}"),
        arrival: Duration::from_secs_f64(arrival),
        turns: (0..turns).map(turn).collect(),
    }
}

pub(super) fn trace(sessions: Vec<Session>) -> Trace {
    Trace { name: "guard".to_owned(), block_tokens: BLOCK, sessions }
}

#[test]
fn correction_follows_caches_that_shrink() {
    let line = "--requests 2400 --duration 32 --fault 6:cache:1:1500 --fault 6:cache:2:1500 \
        --fault 6:cache:3:1500 --fault 6:cache:4:1500";
    let errors = |line: &str| {
        let samples = play(line, 1);
        let shrunk = samples.iter().position(|s| s.arrival.as_secs_f64() > 6.0).unwrap();
        let after = &samples[shrunk..];
        [
            error(&samples[..shrunk]),
            error(&after[..500]),
            error(&after[500..1000]),
            error(&after[500..]),
        ]
    };
    let (with, without) = (errors(line), errors(&format!("{line} --no-correction")));
    assert!(with[0] < 1.0 && without[0] < 1.0);
    assert!(with[2] < 5.0 && with[3] < 5.0, "{with:?} against {without:?}");
    assert!(without[3] > 10.0, "{with:?} against {without:?}");
}

/// As when an engine sleeps, or is told to forget: the process is the same, and says nothing of it.
#[test]
fn a_cache_that_is_reset_misleads_no_more_than_the_next_requests() {
    let line = "--requests 1200 --duration 16 --fault 6:cache:2:1 --fault 6.000001:cache:2:7000";
    let mut there = play(line, 1);
    there.retain(|s| s.replica.as_deref() == Some("replica 02") && s.failures == 0);
    let missing = |samples: &[Sample]| {
        let tokens = |s: &Sample| s.predicted_tokens.unwrap_or(0).saturating_sub(s.cached_tokens);
        let all: u64 = samples.iter().map(|sample| sample.prompt_tokens).sum();
        100.0 * samples.iter().map(tokens).sum::<u64>() as f64 / all as f64
    };
    let (before, after) =
        there.split_at(there.iter().position(|s| s.arrival.as_secs_f64() > 6.0).unwrap());
    let (first, rest) = after.split_at(30);
    let missing = [before, first, rest].map(missing);
    println!("{missing:?} percent");
    assert!(rest.len() > 100 && missing[0] < 0.5 && missing[1] > 5.0, "{missing:?}");
    assert!(missing[2] < 0.5, "{missing:?}");
}

#[test]
fn a_replica_half_as_fast_gets_about_half_the_work() {
    let line = "--workload no-reuse --requests 500 --duration 20 --speeds 0.5,1,1,1";
    let share = |line: &str| {
        let samples = play(line, 1);
        let [slow, others @ ..] = spread(samples.iter());
        3.0 * slow as f64 / others.iter().sum::<usize>() as f64
    };
    let (learned, told) = (share(line), share(&format!("{line} --no-learning")));
    assert!((0.35..0.65).contains(&learned), "{learned}");
    assert!(told > learned + 0.1, "{told}");
}

#[test]
fn a_restarted_replica_loses_its_claims_with_its_first_report() {
    let samples = play("--requests 1200 --duration 16 --fault 6:restart:2:1", 1);
    let (before, after): (Vec<Sample>, Vec<Sample>) = samples
        .into_iter()
        .filter(|s| s.replica.as_deref() == Some("replica 02") && s.failures == 0)
        .filter(|s| s.arrival.as_secs_f64() < 6.0 || s.arrival.as_secs_f64() > 7.5)
        .partition(|s| s.arrival.as_secs_f64() < 6.0);
    assert!(before.len() > 50 && after.len() > 50);
    assert!(error(&after) < 1.0, "{}", error(&after));
}

#[test]
fn sessions_one_after_the_other_do_not_all_go_to_one_replica() {
    let sessions = (0..60).map(|n| session(n, n as f64 * 3.0, 4, 40, 0)).collect();
    let samples = play_trace("", &trace(sessions));
    let spread = spread(samples.iter());
    assert!(spread.iter().all(|n| (20..120).contains(n)), "{spread:?}");
    assert!(
        samples.iter().filter(|s| s.cached_tokens > 0).count() >= 170,
        "turns go after their session"
    );
}

#[test]
fn a_burst_of_one_cold_prompt_is_computed_twice_at_most() {
    let burst = (0..64).map(|n| session(n, 1.0, 1, 250, 250)).collect();
    let samples = play_trace("", &trace(burst));
    let cold = samples.iter().filter(|s| s.cached_tokens == 0).count();
    assert!((1..=2).contains(&cold), "{cold}");
}

/// Ten times what one replica can answer, all with one prefix: it is computed where it is needed, and nobody has more of the
/// requests than his share.
#[test]
fn a_prefix_that_is_too_much_for_one_replica_is_held_by_all() {
    const REPLICAS: usize = 16;
    let requests = 3200;
    let over = |seconds: f64| {
        let at = |n: u64| n as f64 * seconds / requests as f64;
        let mut sessions: Vec<Session> =
            (0..requests).map(|n| session(n, at(n), 1, 513, 512)).collect();
        sessions.iter_mut().for_each(|session| session.turns[0].answer_tokens = 100);
        play_trace(&format!("--replicas {REPLICAS} --max-num-seqs 16"), &trace(sessions))
    };
    let hits = |samples: &[Sample]| {
        let sum = |of: fn(&Sample) -> u64| samples.iter().map(of).sum::<u64>() as f64;
        sum(|s| s.cached_tokens) / sum(|s| s.prompt_tokens)
    };
    let (loaded, unloaded) = (over(15.0), over(300.0));
    assert!(hits(&loaded) > 0.9 * hits(&unloaded), "{} {}", hits(&loaded), hits(&unloaded));
    // Each replica that begins to hold it computes it first.
    let settled = &loaded[loaded.len() / 2..];
    let of = |n: usize| {
        let name = format!("replica {n:02}");
        settled.iter().filter(|s| s.replica.as_deref() == Some(&name)).count()
    };
    let busiest = (1..=REPLICAS).map(of).max().unwrap() * REPLICAS;
    let busiest = busiest as f64 / settled.len() as f64;
    assert!(busiest < 1.25, "{busiest} times the mean");
}

#[test]
fn where_all_have_everything_decoding_decides() {
    let mut sessions: Vec<Session> = Vec::new();
    // A burst so large that everybody computes the prefix, then a steady stream of long answers.
    sessions.extend((0..400).map(|n| session(n, 0.0, 1, 60, 50)));
    sessions.extend((0..400).map(|n| session(1000 + n, 5.0 + n as f64 * 0.02, 1, 51, 50)));
    sessions[400..].iter_mut().for_each(|s| s.turns[0].answer_tokens = 200);
    let samples = play_trace("", &trace(sessions));
    let spread = spread(samples[400..].iter());
    // Whoever had none of it computes it once.
    assert!(samples[400..].iter().filter(|s| s.cached_tokens < 50 * 16).count() <= 4);
    assert!(spread.iter().all(|n| (75..125).contains(n)), "{spread:?}");
}

#[test]
fn a_replica_that_joins_gets_its_share_of_cold_prompts_and_no_more() {
    let samples = play("--workload no-reuse --requests 800 --duration 20 --fault 5:join:4", 1);
    let between = |from: f64, to: f64| {
        spread(samples.iter().filter(|s| (from..to).contains(&s.arrival.as_secs_f64())))
    };
    let (first, later) = (between(5.0, 7.0), between(7.0, 20.0));
    let mean = |spread: [usize; 4]| spread.iter().sum::<usize>() as f64 / 4.0;
    assert!((first[3] as f64) < 2.0 * mean(first), "{first:?}");
    assert!((0.7..1.3).contains(&(later[3] as f64 / mean(later))), "{later:?}");
}

#[test]
fn a_replica_that_drains_gets_nothing_new_and_finishes_what_it_has() {
    let samples = play("--requests 600 --duration 8 --fault 4:drain:3", 1);
    let late = spread(samples.iter().filter(|s| s.arrival.as_secs_f64() > 4.0));
    assert_eq!(late[2], 0);
    assert!(samples.iter().all(|s| s.first_token.is_some() && s.failures == 0));
}
