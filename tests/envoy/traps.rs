//! What a trap costs. The filter is built with the feature `trap` for it, and named by `WARMPATH_TRAP_WASM`.
//!
//! A trap cuts the worker's streams in flight, whatever is configured. All else must go on.

use crate::client::{Ask, Connection};
use crate::harness::{Files, Plan, Rig, from_env, skip, until, validate, with_envoy};
use crate::prompts::{chat, reusable, streamed};
use crate::security::wishes_are_ignored;
use crate::wire::first_frame;
use std::time::Duration;
use tokio::time::{Instant, timeout};

const TRAP: &str = "x-warmpath-trap";

/// The longest that a client may wait for what becomes of its request. Where an answer is cut, Envoy lets the
/// connection open for a second (`delayed_close_timeout`) before the client sees it.
const SOON: Duration = Duration::from_secs(5);

fn with_traps<F: Future<Output = ()>>(name: &str, test: impl FnOnce(Files) -> F) {
    let Some(wasm) = from_env("WARMPATH_TRAP_WASM") else {
        return skip(name, "WARMPATH_TRAP_WASM");
    };
    with_envoy(name, |files| test(Files { wasm, ..files }));
}

/// The status of a request that asks for a trap, or none where the connection was cut.
async fn trap(connection: &mut Connection, ask: &Ask) -> Option<u16> {
    let answer = timeout(SOON, connection.try_send(ask)).await;
    answer.expect("an answer or an error in time")
}

async fn reloads(rig: &Rig) -> f64 {
    rig.plain_stats("vm_reload_success").await.iter().map(|(_, value)| value).sum()
}

/// A prompt's prefix is found again, and where it was.
async fn prefix_is_back(rig: &Rig, ask: &Ask, replica: &str) {
    let mut connections = rig.connect_to_each(1).await;
    for connection in connections.iter_mut().flatten() {
        let before = rig.scrape().await;
        loop {
            let answer = connection.send(ask).await;
            assert_eq!(answer.status, 200);
            let by = [("reason", "prefix")];
            let now = rig.scrape().await.sum("warmpath_requests_total", &by);
            if now > before.sum("warmpath_requests_total", &by) {
                assert_eq!(answer.replica(), replica);
                let usage = answer.usage();
                assert_eq!(usage.cached_tokens, reusable(usage.prompt_tokens));
                break;
            }
        }
    }
}

#[test]
fn a_trap_costs_its_own_worker_for_a_moment() {
    with_traps("a_trap_costs_its_own_worker_for_a_moment", |files| async move {
        let rig = Rig::start(&files, Plan::new(2, 2)).await;
        let prompt = Ask::chat(&chat(1, 600, 1));
        let holder = rig.send(&prompt).await.replica().to_owned();
        let mut to_each = rig.connect_to_each(12).await;
        let (mut hit, mut spared) = (to_each.remove(0), to_each.remove(0));
        let long = Ask::chat(&streamed(&chat(2, 60, 30_000)));
        let mut other = spared[0].begin(&long).await;
        assert!(first_frame(&mut other).await > 0);

        for (number, (place, status, callback)) in [
            ("request_headers", Some(503), "proxy_on_request_headers failed"),
            ("request_body", Some(503), "proxy_on_request_body failed"),
            ("response_headers", Some(503), "proxy_on_response_headers failed"),
            ("response_body", None, "proxy_on_response_body failed"),
            ("log", Some(200), "proxy_on_log failed"),
            ("tick", Some(200), "proxy_on_tick failed"),
        ]
        .into_iter()
        .enumerate()
        {
            // One of the same worker's, which the trap takes along.
            let mut cut = hit.remove(0);
            let mut own = cut.begin(&long).await;
            assert!(first_frame(&mut own).await > 0);
            let ask = Ask::chat(&chat(100 + number as u64, 60, 1)).header(TRAP, place);
            let before = reloads(&rig).await;
            assert_eq!(trap(&mut hit.remove(0), &ask).await, status, "{place}");
            // A tick is nobody's, so it is waited for: what is in flight then is cut.
            until("the trap", || rig.log().contains(callback)).await;
            for seed in 0..100 {
                let answer = rig.send(&Ask::chat(&chat(1_000 + seed, 60, 1))).await;
                assert_eq!(answer.status, 200, "{place}: {answer:?}");
            }
            prefix_is_back(&rig, &prompt, &holder).await;
            assert_eq!(reloads(&rig).await, before + 1.0, "{place}");
            assert!(first_frame(&mut other).await > 0, "{place}: the other worker's stream");
        }
        drop(other);
        drop(spared);
        rig.eventually("nothing in flight, nor of the dead", |scrape| {
            scrape.sum("warmpath_replica_in_flight", &[]) == 0.0
                && scrape.sum("warmpath_replica_unfinished_tokens", &[]) == 0.0
        })
        .await;
        assert_eq!(rig.scrape().await.sum("warmpath_host_errors_total", &[]), 0.0);
    });
}

#[test]
fn a_trap_of_whoever_polls_leaves_it_to_another() {
    with_traps("a_trap_of_whoever_polls_leaves_it_to_another", |files| async move {
        // Workers ask replicas to tokenize, and it is not their calls that are to trap.
        let plan = Plan::new(2, 2).plugin(|plugin| plugin["drift"]["canary_ms"] = 0.into());
        let rig = Rig::start(&files, plan).await;
        let prompt = Ask::chat(&chat(1, 600, 1));
        let holder = rig.send(&prompt).await.replica().to_owned();
        let call = rig.send(&prompt.clone().header(TRAP, "call")).await;
        assert_eq!(call.status, 200);
        rig.eventually("a VM is gone", |scrape| {
            scrape.sum("warmpath_vms", &[("state", "all")]) == 2.0
        })
        .await;
        for seed in 0..100 {
            assert_eq!(rig.send(&Ask::chat(&chat(1_000 + seed, 60, 1))).await.status, 200);
        }
        rig.settle().await;
        prefix_is_back(&rig, &prompt, &holder).await;
        assert_eq!(reloads(&rig).await, 0.0, "the main thread has no requests that would");
    });
}

/// What is documented of each policy: what the filter's own failure costs. All else is the same whatever the policy.
const POLICIES: [(&str, u16); 4] = [
    ("failure_policy: FAIL_CLOSED", 503),
    ("failure_policy: FAIL_OPEN", 200),
    ("failure_policy: FAIL_RELOAD", 200),
    // Deprecated, and the only one that spares the streams of the worker that trapped.
    ("fail_open: true", 200),
];

fn with_policy(plan: &mut Plan, policy: &str) {
    if !policy.ends_with("RELOAD") {
        let backoff = "                reload_config: {backoff: {base_interval: 0.1s}}\n";
        plan.config.replace(backoff, "");
        plan.config.replace("failure_policy: FAIL_RELOAD", policy);
    }
}

#[test]
fn a_failed_filter_does_as_it_was_told() {
    with_traps("a_failed_filter_does_as_it_was_told", |files| async move {
        for (policy, status) in POLICIES {
            // A wrong configuration is refused, also where the filter may fail.
            let mut plan = Plan::new(1, 4);
            with_policy(&mut plan, policy);
            let mut wrong = plan.config.clone();
            wrong.set_files(&files.wasm, &files.prepared);
            wrong.change_plugin(|plugin| plugin["max_bodybytes"] = 1.into());
            let refusal = validate(&files, &wrong).expect_err(policy);
            assert!(refusal.contains("max_bodybytes"), "{policy}: {refusal}");

            // While nothing is known of the replicas, requests are Envoy's own to place.
            let plan = Plan { early: true, ..plan }.plugin(|plugin| {
                plugin["clusters"][0]["admin_cluster"] = "nowhere".into();
            });
            let rig = Rig::start(&files, plan).await;
            for seed in 0..10 {
                let answer = rig.send(&Ask::chat(&chat(seed, 60, 1))).await;
                assert_eq!(answer.status, 200, "{policy}");
            }
            let unknown = [("reason", "no_replicas")];
            assert_eq!(rig.scrape().await.sum("warmpath_requests_total", &unknown), 10.0);

            let ask = Ask::chat(&chat(1, 60, 1)).header(TRAP, "request_headers");
            let of_the_trap = if policy == "fail_open: true" { 200 } else { 503 };
            assert_eq!(rig.send(&ask).await.status, of_the_trap, "{policy}");
            if policy.ends_with("RELOAD") {
                // A VM that is younger than 0.1 to 0.15 s is not replaced yet.
                let end = Instant::now() + SOON;
                while rig.send(&Ask::chat(&chat(1, 60, 1))).await.status == 503 {
                    assert!(Instant::now() < end, "no fresh VM");
                }
            }
            for seed in 0..10 {
                let answer = rig.send(&Ask::chat(&chat(seed, 60, 1))).await;
                assert_eq!(answer.status, status, "{policy}");
            }
            if status == 200 {
                // Nothing but Envoy's own removal stands between a client and the load balancer.
                wishes_are_ignored(&rig).await;
            }
            // And with nobody to serve it, a request is answered by Envoy, soon.
            for handle in &rig.replicas {
                handle.replica.set_control(|control| control.refuse = true);
            }
            assert_eq!(rig.send(&Ask::chat(&chat(1, 60, 1))).await.status, 503, "{policy}");
        }
    });
}
