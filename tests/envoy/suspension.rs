//! Replicas that fail: what the client is spared, who is suspended for it, and how they come back.

use crate::client::{Answer, Ask, Connection};
use crate::harness::{Plan, Rig, until, with_envoy};
use crate::prompts::{chat, streamed};
use crate::stats::Scrape;
use http_body_util::BodyExt;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;
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

/// Sends prompts until nobody is suspended.
async fn restore(rig: &Rig, first: u64) {
    let end = Instant::now() + Duration::from_secs(20);
    let mut seed = first;
    while suspended(&rig.scrape().await) > 0.0 {
        assert!(Instant::now() < end, "never restored");
        send_all(rig, seed..seed + 4).await;
        seed += 4;
    }
}

#[test]
fn a_probe_whose_answer_is_long_keeps_no_later_one_away() {
    with_envoy("a_probe_whose_answer_is_long_keeps_no_later_one_away", |files| async move {
        let rig = Rig::start(&files, plan(2)).await;
        let bad = &rig.replicas[1];
        bad.replica.set_control(failing(500));
        send_all(&rig, 0..20).await;
        rig.eventually("one is suspended", |scrape| suspended(scrape) == 1.0).await;
        bad.replica.set_control(|control| *control = Control::default());
        // Whoever is sent now may be the probe, and none of them ends by itself: nobody reads on.
        let (mut open, mut seed) = (Vec::new(), 1000);
        let end = Instant::now() + Duration::from_secs(20);
        while suspended(&rig.scrape().await) > 0.0 {
            assert!(Instant::now() < end, "no probe");
            let mut connection = rig.connect().await;
            let ask = Ask::chat(&streamed(&chat(seed, 150, 20_000)));
            let answer = connection.begin(&ask).await;
            assert_eq!(answer.status(), 200);
            open.push((connection, answer));
            seed += 1;
        }
        bad.replica.set_control(failing(500));
        send_all(&rig, 2000..2040).await;
        rig.eventually("it is suspended again", |scrape| suspended(scrape) == 1.0).await;
        bad.replica.set_control(|control| *control = Control::default());
        restore(&rig, 3000).await;
        let flying = rig.scrape().await.sum("warmpath_replica_in_flight", &[]);
        assert!(flying >= open.len() as f64, "{flying} of {} are still under way", open.len());
        drop(open);
        nothing_in_flight(&rig).await;
        rig.finish().await;
    });
}

#[test]
fn while_one_replica_of_four_is_well_every_request_is_answered() {
    with_envoy("while_one_replica_of_four_is_well_every_request_is_answered", |files| async move {
        let rig = Rig::start(&files, plan(4)).await;
        for round in 0..12 {
            let well = round % 4;
            for (place, handle) in rig.replicas.iter().enumerate() {
                handle.replica.set_control(|control| *control = Control::default());
                if place != well {
                    handle.replica.set_control(failing(500));
                }
            }
            let first = 1000 * round as u64;
            let counts = send_all(&rig, first..first + 8).await;
            let name = rig.replicas[well].replica.name().to_owned();
            assert_eq!(counts, BTreeMap::from([(name, 8)]), "round {round}");
        }
        assert_eq!(rig.scrape().await.sum("warmpath_failed_responses_total", &[]), 0.0);
        rig.finish().await;
    });
}

#[test]
fn an_engine_that_shuts_down_with_good_health_costs_nobody_a_request() {
    with_envoy(
        "an_engine_that_shuts_down_with_good_health_costs_nobody_a_request",
        |files| async move {
            let rig = Rig::start(&files, plan(3)).await;
            // What it has under way it finishes, and that proves nothing for new requests.
            let mut connection = rig.connect().await;
            let long = streamed(&chat(1, 100, 300));
            rig.replicas.iter().for_each(|handle| {
                handle.replica.set_control(|control| control.slow = Duration::from_millis(400));
            });
            let under_way = tokio::spawn(async move { connection.send(&Ask::chat(&long)).await });
            until("it has arrived", || rig.received().len() == 1).await;
            let bad = rig.received()[0].replica.clone();
            rig.replicas.iter().for_each(|handle| {
                handle.replica.set_control(|control| control.slow = Duration::ZERO);
            });
            rig.replica(&bad).set_control(failing(500));
            let counts = send_all(&rig, 500..600).await;
            assert_eq!(counts.get(&bad), None, "{counts:?}");
            assert_eq!(under_way.await.unwrap().status, 200);
            let failed = rig.scrape().await.sum("warmpath_strikes_total", &[]);
            assert!((1.0..=12.0).contains(&failed), "{failed} requests went to it");
            // Then it is gone.
            rig.replica(&bad).set_control(|control| control.refuse = true);
            let counts = send_all(&rig, 600..660).await;
            assert_eq!(counts.get(&bad), None, "{counts:?}");
            assert_eq!(rig.scrape().await.sum("warmpath_failed_responses_total", &[]), 0.0);
            rig.replica(&bad).set_control(|control| *control = Control::default());
            rig.finish().await;
        },
    );
}

#[test]
fn a_prompt_that_breaks_every_engine_suspends_nobody_for_long() {
    with_envoy("a_prompt_that_breaks_every_engine_suspends_nobody_for_long", |files| async move {
        let rig = Rig::start(&files, plan(4)).await;
        for handle in &rig.replicas {
            handle.replica.set_control(|control| control.poison = Some("Case 66:".to_owned()));
        }
        let poison = Ask::chat(&chat(66, 150, 2));
        let mut connection = rig.connect().await;
        for round in 0..30 {
            let answer = connection.send(&poison).await;
            assert_eq!(answer.status, 500, "the engine's own answer, after four tries");
            assert!(String::from_utf8_lossy(&answer.body).contains("poisoned"));
            for seed in 0..8 {
                let good = Ask::chat(&chat(100 + 8 * round + seed, 150, 2));
                assert_eq!(connection.send(&good).await.status, 200);
            }
        }
        let scrape = rig.scrape().await;
        assert!(scrape.sum("warmpath_strikes_total", &[("kind", "error")]) >= 90.0);
        assert_eq!(scrape.sum("warmpath_strikes_total", &[("kind", "spared")]), 0.0);
        // Five in a row without one good answer between, by chance: rare, and short.
        assert!(scrape.sum("warmpath_suspensions_total", &[]) <= 3.0);
        rig.finish().await;
    });
}

#[test]
fn what_an_engine_refuses_is_the_clients_to_see_and_nobodys_failure() {
    with_envoy(
        "what_an_engine_refuses_is_the_clients_to_see_and_nobodys_failure",
        |files| async move {
            let rig = Rig::start(&files, plan(2)).await;
            let mut connection = rig.connect().await;
            for status in [400, 404, 429] {
                rig.replicas.iter().for_each(|h| h.replica.set_control(failing(status)));
                for seed in 0..8 {
                    // A client that asks for retries of its own does not get them.
                    let ask = Ask::chat(&chat(seed, 150, 2))
                        .header("x-envoy-retry-on", "retriable-4xx,retriable-status-codes,5xx")
                        .header("x-envoy-retriable-status-codes", "400,404,429")
                        .header("x-envoy-upstream-rq-per-try-timeout-ms", "1")
                        .header("x-forwarded-for", "10.0.0.1");
                    assert_eq!(connection.send(&ask).await.status, status);
                }
            }
            assert_eq!(rig.received().len(), 24, "each was sent once");
            let scrape = rig.scrape().await;
            assert_eq!(scrape.sum("warmpath_strikes_total", &[]), 0.0);
            assert_eq!(scrape.sum("warmpath_failed_responses_total", &[("class", "4xx")]), 24.0);
            rig.finish().await;
        },
    );
}

#[test]
fn a_replica_that_hangs_in_good_health_gets_a_bounded_share() {
    with_envoy("a_replica_that_hangs_in_good_health_gets_a_bounded_share", |files| async move {
        let rig = Rig::start(&files, plan(4)).await;
        let bad = &rig.replicas[2];
        bad.replica.set_control(|control| control.hang = true);
        let mut tasks = Vec::new();
        for seed in 0..200 {
            let address = rig.address;
            tasks.push(tokio::spawn(async move {
                Connection::open(address).await.send(&Ask::chat(&chat(seed, 300, 2))).await.status
            }));
            // The others are done before the next comes, so that hanging is what makes it dear.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let there = rig.received().iter().filter(|s| s.replica == bad.replica.name()).count();
        assert!((1..=20).contains(&there), "{there} of 200 wait for it");
        bad.replica.set_control(|control| control.hang = false);
        for task in tasks {
            assert_eq!(task.await.unwrap(), 200);
        }
        rig.finish().await;
    });
}

/// Requests to three replicas of which one says nothing, not even to health checks.
async fn send_to_frozen(rig: &Rig, first: u64) -> Vec<JoinHandle<Answer>> {
    rig.replicas[0].replica.set_control(|control| control.freeze = true);
    let mut tasks = Vec::new();
    for seed in first..first + 40 {
        let address = rig.address;
        tasks.push(tokio::spawn(async move {
            Connection::open(address).await.send(&Ask::chat(&chat(seed, 150, 2))).await
        }));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let name = rig.replicas[0].replica.name();
    assert!(rig.received().iter().any(|seen| seen.replica == name), "some were sent there");
    tasks
}

#[test]
fn what_a_stopped_or_slow_replica_has_waits_for_it_and_nothing_else_does() {
    with_envoy(
        "what_a_stopped_or_slow_replica_has_waits_for_it_and_nothing_else_does",
        |files| async move {
            let rig = Rig::start(&files, plan(3)).await;
            let tasks = send_to_frozen(&rig, 0).await;
            rig.eventually("it is unhealthy", |scrape| {
                scrape.sum("warmpath_replicas", &[("health", "unhealthy")]) == 1.0
            })
            .await;
            send_all(&rig, 100..140).await;
            assert!(tasks.iter().any(|task| !task.is_finished()), "what waits is not cut");
            rig.replicas[0].replica.set_control(|control| control.freeze = false);
            for task in tasks {
                assert_eq!(task.await.unwrap().status, 200);
            }
            assert_silence_is_waited_for(&rig).await;
            assert_eq!(rig.scrape().await.sum("warmpath_strikes_total", &[]), 0.0);
            rig.finish().await;
        },
    );
}

/// Longer than the 15 s that Envoy allows a whole answer unless its route says otherwise.
const SILENCE: Duration = Duration::from_secs(16);

/// Answers that say nothing for long come whole, streamed or not, and others meanwhile.
async fn assert_silence_is_waited_for(rig: &Rig) {
    let all = |slow| {
        rig.replicas.iter().for_each(|handle| {
            handle.replica.set_control(|control| control.slow = slow);
        });
    };
    let before = rig.received().len();
    all(SILENCE);
    let silent = [chat(8_000_001, 60, 20), streamed(&chat(8_000_002, 60, 20))].map(|body| {
        let address = rig.address;
        tokio::spawn(async move {
            let began = Instant::now();
            let answer = Connection::open(address).await.send(&Ask::chat(&body)).await;
            (answer, began.elapsed())
        })
    });
    until("both are under way", || rig.received().len() == before + 2).await;
    all(Duration::ZERO);
    send_all(rig, 200..220).await;
    for task in silent {
        let (answer, took) = task.await.unwrap();
        assert!(took >= SILENCE, "{took:?}");
        assert_eq!((answer.status, answer.usage().completion_tokens), (200, 20), "{answer:?}");
    }
}

#[test]
fn with_a_limit_on_silence_what_a_stopped_replica_has_is_answered_elsewhere() {
    with_envoy(
        "with_a_limit_on_silence_what_a_stopped_replica_has_is_answered_elsewhere",
        |files| async move {
            let mut plan = plan(3);
            plan.config.replace("# per_try_idle_timeout: 300s", "per_try_idle_timeout: 1s");
            let rig = Rig::start(&files, plan).await;
            for task in send_to_frozen(&rig, 0).await {
                let answer = task.await.unwrap();
                assert_eq!(answer.status, 200);
                assert_ne!(answer.replica(), rig.replicas[0].replica.name());
            }
            assert!(rig.scrape().await.sum("warmpath_strikes_total", &[("kind", "spared")]) >= 1.0);
            rig.replicas[0].replica.set_control(|control| control.freeze = false);
            rig.finish().await;
        },
    );
}

#[test]
fn an_answer_that_breaks_off_ends_and_the_next_request_is_answered() {
    with_envoy(
        "an_answer_that_breaks_off_ends_and_the_next_request_is_answered",
        |files| async move {
            let rig = Rig::start(&files, plan(2)).await;
            rig.replicas.iter().for_each(|handle| {
                handle.replica.set_control(|control| control.cut_after = Some(3));
            });
            for seed in 0..6 {
                let mut connection = Connection::open(rig.address).await;
                let mut response =
                    connection.begin(&Ask::chat(&streamed(&chat(seed, 150, 50)))).await;
                assert_eq!(response.status(), 200);
                let broken = loop {
                    match response.body_mut().frame().await {
                        Some(Ok(_)) => {}
                        Some(Err(_)) => break true,
                        None => break false,
                    }
                };
                assert!(broken, "the client can tell");
            }
            rig.replicas.iter().for_each(|h| h.replica.set_control(|c| c.cut_after = None));
            send_all(&rig, 100..110).await;
            let scrape = rig.scrape().await;
            assert_eq!(scrape.sum("warmpath_strikes_total", &[]), 0.0, "an answer had begun");
            assert_eq!(scrape.sum("warmpath_responses_total", &[("usage", "cut")]), 6.0);
            rig.finish().await;
        },
    );
}
