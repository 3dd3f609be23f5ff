//! Chaos: everything goes wrong, by a seed, for as long as the environment says, and no client must notice more than
//! cannot be spared it.
//!
//! Six replicas and an agent beside each, all processes; an Envoy of four workers by the shipped configuration; ten clients. On the replicas'
//! side see [`faults`], on Envoy's [`gateway`], on the clients' [`load`]. `WARMPATH_CHAOS_SEED` is the seed, `WARMPATH_CHAOS_SECONDS`
//! the length. Without a length it is the short form of the ordinary tests, with faults a third as long;
//! `scripts/chaos.sh` runs ten minutes.
//!
//! The rules:
//!
//! 1. Every request gets the answer that is right for it: 200 and all of it for what can be answered, the replica's own
//!    4xx for what cannot. The client tries nothing a second time, and a fault of at most two replicas of six spares it
//!    nothing: the other four could have answered.
//! 2. Two things are no errors. The client itself left. Or the head of a good response had come, it names its replica,
//!    and the log of faults has one that cuts, of that replica, between the head and the cut. Which faults cut is said
//!    in [`faults`]: an end of the process, a closed port, a cut stream; and where Envoy's health checks failed, since
//!    it then closes that replica's connections, which spares the requests whose answers have not begun.
//! 3. A replica that hangs while its health is good is not told from one that computes for long; no time limit could.
//!    Its hang ends within the run, and the request must then be answered like any other, within a minute.
//! 4. In the end, all replicas well and no request under way: nothing is in flight by the filter's count, all are healthy
//!    to it, none is suspended and every agent is believed, a second turn goes where the first one went and finds its cache, no VM was lost, no
//!    call to the host failed, and there are as many reasons counted as requests that reached Envoy.
//! 5. With `WARMPATH_CHAOS_TRAPS=1` and a filter built with the feature `trap`, VMs trap too. What was under way within a
//!    few seconds of that may fail in any way, requests that a VM took with it have no reason, and VMs are reloaded; the
//!    other rules hold.
//! 6. Envoy's memory does not grow while it has as many VMs: [`report`] has the tolerance. VMs of old builds go. Runs too short for every fault to have come are not
//!    judged by it.

mod asks;
mod faults;
mod fleet;
mod gateway;
mod load;
mod report;

use crate::client::Ask;
use crate::harness::{Files, with_envoy};
use crate::prompts::{chat, next_turn};
use faults::Log;
use gateway::Gateway;
use load::{Client, Tally};
use report::Memory;
use std::io::Write as _;
use std::sync::Mutex;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use warmpath::mock::chance::Chance;

const REPLICAS: usize = 6;
const WORKERS: usize = 4;

/// VMs of one build: the workers', the main thread's, and the one that all are copied from.
const VMS: f64 = WORKERS as f64 + 2.0;
const CLIENTS: u64 = 10;

/// Requests of a run, however long it is.
const MOST_REQUESTS: u64 = 100_000;

/// The short form's length without the settling, and how much shorter its faults are.
const SHORT: Duration = Duration::from_secs(14);
const SHORT_SCALE: f64 = 0.35;

/// The seed where none is given. Of the first few hundred it is one whose short form has most of what cuts, fails or hangs,
/// and another build of the filter early on.
const SEED: u64 = 235;

/// From here on a run is judged by its memory: all faults have come once before its last third begins.
const LONG_ENOUGH: Duration = Duration::from_secs(300);

/// How long connections to an old listener may go on. Envoy counts it from before it compiles a new build, which takes
/// seconds on a busy machine: a time not far above that would cut what is under way.
const DRAIN: Duration = Duration::from_secs(60);

/// Until all is well again after the last fault, and old listeners are gone.
const SETTLING: Duration = Duration::from_secs(120);

/// Looks, five a second, that must find all well: what a leader leaves behind is gone sooner.
const LOOKS_IN_A_ROW: u32 = 12;

/// What a run is to be.
struct Wish {
    seed: u64,
    length: Duration,
    scale: f64,
    is_long: bool,
    /// Whether the filter traps on demand.
    traps: bool,
}

impl Wish {
    fn from_env() -> Self {
        let number = |name| {
            let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
            Some(text.parse::<u64>().unwrap_or_else(|error| panic!("{name}={text}: {error}")))
        };
        let seed = number("WARMPATH_CHAOS_SEED").unwrap_or(SEED);
        let length = number("WARMPATH_CHAOS_SECONDS").map(Duration::from_secs);
        let is_long = length.is_some();
        Self {
            seed,
            length: length.unwrap_or(SHORT),
            scale: if is_long { 1.0 } else { SHORT_SCALE },
            is_long,
            traps: std::env::var_os("WARMPATH_CHAOS_TRAPS").is_some_and(|value| value == "1"),
        }
    }
}

#[test]
fn chaos_costs_no_client_an_answer_that_another_replica_could_give() {
    let name = "chaos_costs_no_client_an_answer_that_another_replica_could_give";
    with_envoy(name, |files| async move { run(&files, &Wish::from_env()).await });
}

async fn run(files: &Files, wish: &Wish) {
    let fleet = fleet::start(files, REPLICAS).await;
    let agents = fleet::start_agents(&fleet);
    let gateway = Gateway::start(files, WORKERS, &fleet, DRAIN).await;
    wait_until_well(&gateway).await;
    let (log, tally, samples) = (Log::default(), Tally::default(), Mutex::default());
    let start = Instant::now();
    let end = start + wish.length;
    let chance = |lane| Chance::of_tokens(wish.seed, &[lane]);
    let (first, second): (Vec<_>, Vec<_>) =
        fleet.into_iter().partition(|member| member.place % 2 == 0);
    let clients = (0..CLIENTS).map(|n| Client::new(n, wish.seed, gateway.rig.address, &tally));
    let clients = all(clients.map(|client| client.run(end, MOST_REQUESTS)));
    let (first, second, agents, (), (), ()) = tokio::join!(
        faults::lane(first, chance(1), &log, wish.scale, end),
        faults::lane(second, chance(2), &log, wish.scale, end),
        faults::agents_lane(agents, chance(4), &log, wish.scale, end),
        gateway.lane(chance(3), &log, wish, end),
        clients,
        watch(&gateway, &samples, &tally, &log, start, end, wish.is_long),
    );
    let samples = samples.into_inner().unwrap();
    let mut wrong = report::client_errors(&tally, &log, &gateway, start);
    wrong.extend(settle(&gateway, wish.is_long).await.err());
    wrong.extend(prefixes_are_found(&gateway).await.err());
    wrong.extend(settle(&gateway, wish.is_long).await.err());
    wrong.extend(verdict(&gateway, wish.traps).await);
    if wish.length >= LONG_ENOUGH {
        wrong.extend(report::growth(&samples, wish.length));
    }
    if wish.is_long || !wrong.is_empty() {
        say(&report::text(wish.seed, &tally, &log, &gateway, &samples, start).await);
    }
    assert!(wrong.is_empty(), "seed {}:\n{}", wish.seed, wrong.join("\n"));
    drop((first, second, agents));
}

/// Past the test harness, which swallows what tests print.
fn say(text: &str) {
    std::io::stderr().write_all(text.as_bytes()).expect("standard error");
}

/// Runs futures together to their ends, in this task.
async fn all<F: Future<Output = ()>>(futures: impl Iterator<Item = F>) {
    let mut futures: Vec<_> = futures.map(|future| (Box::pin(future), false)).collect();
    std::future::poll_fn(|context| {
        for (future, is_over) in futures.iter_mut().filter(|(_, is_over)| !is_over) {
            *is_over = future.as_mut().poll(context).is_ready();
        }
        let over = futures.iter().all(|(_, is_over)| *is_over);
        if over { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// Looks at Envoy's memory every two seconds, and says every half minute how far a long run is.
async fn watch(
    gateway: &Gateway,
    samples: &Mutex<Vec<Memory>>,
    tally: &Tally,
    log: &Log,
    start: Instant,
    end: Instant,
    is_long: bool,
) {
    for number in 1.. {
        sleep(Duration::from_secs(2)).await;
        if Instant::now() >= end {
            return;
        }
        let sample = Memory::look(gateway, start).await;
        samples.lock().unwrap().push(sample);
        if is_long && number % 15 == 0 {
            let errors = report::client_errors(tally, log, gateway, start).len();
            say(&format!(
                "{:>4} s: {} requests, {} faults of replicas, {} of Envoy, {errors} client errors\n",
                start.elapsed().as_secs(),
                tally.sent(),
                log.entries().len(),
                gateway.counts().values().sum::<u64>()
            ));
        }
    }
}

async fn wait_until_well(gateway: &Gateway) {
    gateway
        .rig
        .eventually("tokenizers in all workers, and reports of all replicas", |scrape| {
            scrape.sum("warmpath_vms", &[("state", "ready")]) >= WORKERS as f64
                && scrape.sum("warmpath_replicas", &[("health", "healthy")]) == REPLICAS as f64
                && scrape.count("warmpath_replica_report_age_ms", &[]) == REPLICAS
        })
        .await;
}

/// Waits until nothing is under way, all replicas are well, and old listeners are gone: for some time, since a gauge
/// tells what its last leader saw. The short form does not wait for old listeners to go. A suspended replica is tried with requests only, so there must be some.
async fn settle(gateway: &Gateway, is_long: bool) -> Result<(), String> {
    let end = Instant::now() + SETTLING;
    let (mut well, mut probes) = (0, 0);
    while well < LOOKS_IN_A_ROW {
        let scrape = gateway.rig.scrape().await;
        let draining = gateway.stat("listener_manager.total_filter_chains_draining").await
            + gateway.stat("listener_manager.total_listeners_draining").await;
        let vms = gateway.vms().await;
        let in_flight = scrape.sum("warmpath_replica_in_flight", &[]);
        let unfinished = scrape.sum("warmpath_replica_unfinished_tokens", &[]);
        let healthy = scrape.sum("warmpath_replicas", &[("health", "healthy")]);
        let ready = scrape.sum("warmpath_vms", &[("state", "ready")]);
        let suspended = scrape.sum("warmpath_replica_suspended", &[]);
        let reporting = scrape.sum("warmpath_agents", &[("state", "reporting")]);
        let is_well = [in_flight, unfinished, suspended] == [0.0; 3]
            && (draining == 0.0 && vms <= VMS || !is_long)
            && [healthy, reporting] == [REPLICAS as f64; 2]
            && ready >= WORKERS as f64;
        well = if is_well { well + 1 } else { 0 };
        if !is_well && Instant::now() >= end {
            return Err(format!(
                "not settled: {draining} draining, {vms} VMs, {in_flight} in flight with {unfinished} tokens, {healthy} \
                 replicas healthy, {suspended} suspended, {reporting} agents reporting, {ready} VMs ready"
            ));
        }
        if suspended > 0.0 {
            probes += 1;
            gateway.rig.send(&Ask::chat(&chat(1_000 + probes, 40, 1))).await;
        }
        sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

/// What is wrong after all is over.
async fn verdict(gateway: &Gateway, traps: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, value) in gateway.rig.plain_stats("vm_reload").await {
        let is_fault = !traps || name.ends_with("vm_reload_failure");
        if value != 0.0 && is_fault {
            wrong.push(format!("{name} is {value}"));
        }
    }
    let scrape = gateway.rig.scrape().await;
    if !traps {
        wrong.extend(report::miscounted(&scrape));
    }
    let host_errors = scrape.sum("warmpath_host_errors_total", &[]);
    if host_errors != 0.0 {
        wrong.push(format!("{host_errors} calls to the host failed"));
    }
    wrong
}

/// Waits until second turns find the first ones: a build that has just taken over has its tokenizers to load.
async fn prefixes_are_found(gateway: &Gateway) -> Result<(), String> {
    let end = Instant::now() + SETTLING;
    for round in 0.. {
        let wrong = second_turns(gateway, round).await;
        if wrong.is_empty() {
            break;
        }
        if Instant::now() >= end {
            return Err(wrong.join("\n"));
        }
        sleep(Duration::from_millis(500)).await;
    }
    Ok(())
}

/// New conversations, whose second turns must go where the first ones went and find them cached.
async fn second_turns(gateway: &Gateway, round: u64) -> Vec<String> {
    let mut wrong = Vec::new();
    for seed in 0..12 {
        let first = chat(100 * round + seed, 300, 8);
        let answer = gateway.rig.send(&Ask::chat(&first)).await;
        let second = next_turn(&first, &answer.text(), "And then?");
        let again = gateway.rig.send(&Ask::chat(&second)).await;
        let cached = again.usage().cached_tokens;
        if answer.replica() != again.replica() || cached < 256 {
            let (before, after) = (answer.replica(), again.replica());
            wrong.push(format!("turns went to {before} and {after}, with {cached} tokens cached"));
        }
    }
    wrong
}
