//! Replicas that fail: what the client is spared, who is suspended for it, and how they come back.

use crate::client::{Answer, Ask};
use crate::harness::{Plan, Rig, with_envoy};
use crate::prompts::{chat, streamed};
use crate::stats::Scrape;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use warmpath::mock::control::{Control, Fail};

/// Counts the faults, for prompts of their own.
static NUMBER: AtomicU64 = AtomicU64::new(1);

/// A plan whose suspensions are short enough to be waited for.
fn plan(replicas: usize) -> Plan {
    Plan::new(2, replicas).plugin(|plugin| plugin["passive_health"] = json!({"base_ms": 300}))
}

fn failing(status: u16) -> impl Fn(&mut Control) {
    move |control| control.fail = Some(Fail { status, count: None })
}

fn suspended(scrape: &Scrape) -> f64 {
    scrape.sum("warmpath_replica_suspended", &[])
}

/// Sends cold prompts over connections of both workers. Every one must be answered 200. Who answered how many.
async fn send_all(rig: &Rig, seeds: std::ops::Range<u64>) -> BTreeMap<String, u32> {
    let mut connections: Vec<_> = rig.connect_to_each(1).await.into_iter().flatten().collect();
    let mut counts = BTreeMap::new();
    for seed in seeds {
        let mut body = chat(seed, 150, 2);
        if seed % 2 == 0 {
            body = streamed(&body);
        }
        let place = seed as usize / 2 % connections.len();
        let answer: Answer = connections[place].send(&Ask::chat(&body)).await;
        assert_eq!(answer.status, 200, "prompt {seed}: {answer:?}");
        *counts.entry(answer.replica().to_owned()).or_default() += 1;
    }
    counts
}

async fn nothing_in_flight(rig: &Rig) {
    rig.eventually("nothing in flight", |scrape| {
        scrape.sum("warmpath_replica_in_flight", &[]) == 0.0
            && scrape.sum("warmpath_replica_unfinished_tokens", &[]) == 0.0
    })
    .await;
}

/// One of four replicas has a fault: no client sees it, the replica is suspended, and once it is well again it is back
/// at work.
async fn check(rig: &Rig, fault: &str, kind: &str, set: impl Fn(&mut Control)) {
    // Prompts that nobody has seen, so that the faulty one gets its share of them.
    let first = 1_000_000 * NUMBER.fetch_add(1, Ordering::Relaxed);
    let before = rig.scrape().await;
    let strikes = |scrape: &Scrape| scrape.sum("warmpath_strikes_total", &[("kind", kind)]);
    let bad = &rig.replicas[1];
    bad.replica.set_control(|control| set(control));
    let counts = send_all(rig, first..first + 60).await;
    assert_eq!(counts.get(bad.replica.name()), None, "{fault}: {counts:?}");
    let after = rig.scrape().await;
    let struck = strikes(&after) - strikes(&before);
    // The one that told, and a probe every now and then.
    assert!((1.0..=10.0).contains(&struck), "{fault}: {struck} strikes of kind {kind}");
    let address = bad.address.to_string();
    rig.eventually(&format!("{fault}: one is suspended"), |scrape| {
        scrape.sum("warmpath_replica_suspended", &[("replica", &address)]) == 1.0
            && suspended(scrape) == 1.0
    })
    .await;
    nothing_in_flight(rig).await;

    bad.replica.set_control(|control| *control = Control::default());
    rig.eventually(&format!("{fault}: all healthy again"), |scrape| {
        scrape.sum("warmpath_replicas", &[("health", "healthy")]) == 4.0
    })
    .await;
    let end = Instant::now() + Duration::from_secs(20);
    let mut round = first;
    while suspended(&rig.scrape().await) > 0.0 {
        assert!(Instant::now() < end, "{fault}: never restored");
        round += 100;
        send_all(rig, round..round + 10).await;
    }
    let counts = send_all(rig, round + 100..round + 160).await;
    assert!(counts.get(bad.replica.name()) > Some(&3), "{fault}: {counts:?}");
    nothing_in_flight(rig).await;
}

#[test]
fn a_replica_that_fails_is_spared_the_client_suspended_and_restored() {
    with_envoy(
        "a_replica_that_fails_is_spared_the_client_suspended_and_restored",
        |files| async move {
            let rig = Rig::start(&files, plan(4)).await;
            for status in [500, 502, 503, 504] {
                check(&rig, &format!("status {status}"), "spared", failing(status)).await;
            }
            check(&rig, "refuses connections", "spared", |control| control.refuse = true).await;
            let scrape = rig.scrape().await;
            assert_eq!(scrape.sum("warmpath_failed_responses_total", &[]), 0.0);
            assert!(scrape.sum("warmpath_suspensions_total", &[]) >= 5.0);
            rig.finish().await;
        },
    );
}
