//! Prompts go where their prefix is, over all worker threads.

use crate::client::{Answer, Ask, Connection, Usage};
use crate::harness::{ALIAS, MODEL, Plan, Rig, replica_with, with_envoy};
use crate::prompts::{self, chat, cold_choice, next_turn, reusable, streamed, words};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use tokio::task::JoinSet;
use warmpath::mock::engine::EngineConfig;

fn addresses(rig: &Rig) -> Vec<SocketAddr> {
    rig.replicas.iter().map(|handle| handle.address).collect()
}

#[test]
fn what_one_worker_routed_another_finds_without_any_report() {
    with_envoy("what_one_worker_routed_another_finds_without_any_report", |files| async move {
        // Nobody is polled: what the second worker knows can only come from the first.
        let rig = Rig::start_static(&files, Plan::new(2, 4)).await;
        let body = chat(1, 900, 4);
        let choice = cold_choice(&body, &addresses(&rig));
        let mut to_each = rig.connect_to_each(2).await;
        let (mut second, mut first) = (to_each.pop().unwrap(), to_each.pop().unwrap());

        // While the rendezvous winner answers somebody else, ties go past it.
        let decoy = (2..).map(|seed| chat(seed, 30, 20_000));
        let mut decoy = decoy.map(|decoy| streamed(&decoy));
        let decoy = decoy.find(|decoy| cold_choice(decoy, &addresses(&rig)) == choice).unwrap();
        let mut busy = first.pop().unwrap();
        let answering = busy.begin(&Ask::chat(&decoy)).await;
        let cold = first[0].send(&Ask::chat(&body)).await;
        assert_eq!((cold.status, cold.usage().cached_tokens), (200, 0));
        let holder = cold.replica().to_owned();
        let winner = rig.replicas.iter().find(|handle| handle.address == choice).unwrap();
        assert_eq!(answering.headers()["x-mock-replica"], *winner.replica.name());
        assert_ne!(holder, winner.replica.name());
        drop((answering, busy));
        rig.eventually("nothing in flight", |scrape| {
            scrape.sum("warmpath_replica_in_flight", &[]) == 0.0
        })
        .await;

        // The winner is free again, so a worker that knows of no prefix would send it there.
        let warm = second[0].send(&Ask::chat(&body)).await;
        let prompt = warm.usage().prompt_tokens;
        assert_eq!(warm.replica(), holder);
        assert_eq!(warm.usage().cached_tokens, reusable(prompt));
        assert_eq!((first[0].worker, second[0].worker), (Some(0), Some(1)));

        let scrape = rig.scrape().await;
        assert_eq!(scrape.sum("warmpath_polls_total", &[]), 0.0);
        let reasons = scrape.by("warmpath_requests_total", "reason");
        assert_eq!(
            reasons.into_iter().collect::<Vec<_>>(),
            [("cold".into(), 2), ("prefix".into(), 1)]
        );
        let predicted = scrape.sum("warmpath_predicted_cached_tokens_total", &[]);
        assert_eq!(predicted, reusable(prompt) as f64);
        assert_eq!(scrape.sum("warmpath_log_orphaned_total", &[]), 0.0);
        assert!(rig.connections_by_worker().await.iter().all(|count| *count > 0));
        rig.finish().await;
    });
}

#[test]
fn cold_prompts_spread_over_all_replicas() {
    with_envoy("cold_prompts_spread_over_all_replicas", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 4)).await;
        let mut connection = rig.connect().await;
        for seed in 0..60 {
            let answer = connection.send(&Ask::chat(&chat(seed, 300, 1))).await;
            assert_eq!((answer.status, answer.usage().cached_tokens), (200, 0));
        }
        let received = rig.received();
        for handle in &rig.replicas {
            let count =
                received.iter().filter(|seen| seen.replica == handle.replica.name()).count();
            assert!(count >= 6, "{} got {count} of 60", handle.replica.name());
        }
        let scrape = rig.scrape().await;
        assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "cold")]), 60.0);
        assert_eq!(scrape.sum("warmpath_prediction_total", &[("result", "equal")]), 60.0);
        rig.finish().await;
    });
}

#[test]
fn a_burst_of_one_cold_prompt_is_computed_twice_at_most() {
    with_envoy("a_burst_of_one_cold_prompt_is_computed_twice_at_most", |files| async move {
        let mut plan = Plan::new(4, 4);
        // The speed that the shipped cost model assumes, so that waiting and computing weigh as they should.
        plan.replicas = (0..4)
            .map(|n| replica_with(&format!("replica-{n}"), EngineConfig::default()))
            .collect();
        let rig = Rig::start(&files, plan).await;
        let ask = Ask::chat(&chat(1, 8_000, 8));
        let mut tasks = JoinSet::new();
        for mut connection in rig.connect_to_each(8).await.into_iter().flatten() {
            let ask = ask.clone();
            tasks.spawn(async move { connection.send(&ask).await });
        }
        let answers: Vec<Answer> = tasks.join_all().await;
        assert_eq!(answers.len(), 32);
        let prompt = answers[0].usage().prompt_tokens;
        assert!(prompt > 7_000, "{prompt} tokens");
        assert!(answers.iter().all(|answer| answer.status == 200));
        let computed: u64 =
            answers.iter().map(Answer::usage).map(|u| u.prompt_tokens - u.cached_tokens).sum();
        // Each of the others computes its last, partial block.
        assert!(
            computed <= 2 * prompt + 32 * prompts::BLOCK,
            "{computed} computed, {prompt} a prompt"
        );
        let engines: u64 = rig
            .replicas
            .iter()
            .map(|handle| handle.replica.published().totals.prefill_tokens)
            .sum();
        assert_eq!(engines, computed, "the engines' own sum");
        let received = rig.received();
        assert!(received.iter().all(|seen| seen.body_sha256 == ask.sha256()));
        assert_eq!(received.len(), 32);
        rig.finish().await;
    });
}

/// One conversation of the workload: each turn needs the answer to the one before.
struct Session {
    body: Value,
    turns: u64,
}

/// 40 conversations of 5 turns in 5 groups that share a system prompt.
fn workload() -> Vec<Session> {
    let session = |number: u64| {
        let body = json!({
            "model": ALIAS, "max_tokens": 8,
            "messages": [
                {"role": "system", "content": words(900 + number % 5, 500)},
                {"role": "user", "content": words(number, 150)},
            ],
        });
        Session { body, turns: 5 }
    };
    (0..40).map(session).collect()
}

/// Runs the workload, eight conversations at a time, each request over the next worker's connection.
async fn hit_rate(rig: &Rig) -> (f64, Vec<usize>) {
    let lanes = 8;
    let mut connections = rig.connect_to_each(lanes).await;
    let mut lanes: Vec<Vec<Connection>> =
        (0..lanes).map(|_| connections.iter_mut().map(|of| of.pop().unwrap()).collect()).collect();
    let mut queues: Vec<Vec<Session>> = lanes.iter().map(|_| Vec::new()).collect();
    for (number, session) in workload().into_iter().enumerate() {
        let count = queues.len();
        queues[number % count].push(session);
    }
    let mut tasks = JoinSet::new();
    for (number, (mut lane, queue)) in lanes.drain(..).zip(queues).enumerate() {
        tasks.spawn(async move {
            let mut usages: Vec<(usize, Usage)> = Vec::new();
            let mut next = number;
            for mut session in queue {
                for turn in 0..session.turns {
                    next += 1;
                    let count = lane.len();
                    let connection = &mut lane[next % count];
                    let answer = connection.send(&Ask::chat(&streamed(&session.body))).await;
                    assert_eq!(answer.status, 200);
                    usages.push((connection.worker.unwrap(), answer.usage()));
                    let question = words(turn + 77, 60);
                    session.body = next_turn(&session.body, &answer.text(), &question);
                }
            }
            usages
        });
    }
    let usages: Vec<(usize, Usage)> = tasks.join_all().await.into_iter().flatten().collect();
    let mut by_worker = vec![0; rig.workers];
    usages.iter().for_each(|(worker, _)| by_worker[*worker] += 1);
    let sum = |of: fn(&Usage) -> u64| usages.iter().map(|(_, usage)| of(usage)).sum::<u64>() as f64;
    (sum(|usage| usage.cached_tokens) / sum(|usage| usage.prompt_tokens), by_worker)
}

#[test]
fn four_workers_hit_as_often_as_one() {
    with_envoy("four_workers_hit_as_often_as_one", |files| async move {
        let mut rates = Vec::new();
        for workers in [1, 4] {
            let rig = Rig::start(&files, Plan::new(workers, 4)).await;
            let (rate, by_worker) = hit_rate(&rig).await;
            assert_eq!(by_worker.iter().sum::<usize>(), 200);
            assert!(by_worker.iter().all(|count| *count >= 30), "{by_worker:?}");
            let scrape = rig.scrape().await;
            assert_eq!(scrape.sum("warmpath_requests_total", &[]), 200.0);
            let reported = scrape.sum("warmpath_reported_cached_tokens_total", &[])
                / scrape.sum("warmpath_reported_prompt_tokens_total", &[]);
            assert!((reported - rate).abs() < 1e-9, "the filter saw {reported}, the client {rate}");
            let servers: BTreeSet<String> =
                rig.received().into_iter().map(|seen| seen.replica).collect();
            assert_eq!(servers.len(), 4);
            rates.push(rate);
            rig.finish().await;
        }
        assert!(rates[0] > 0.6, "{rates:?}");
        assert!((rates[0] - rates[1]).abs() <= 0.02, "{rates:?}");
    });
}

/// Both turns, and what the second took from the cache.
async fn two_turns(rig: &Rig, first: &Ask, second: impl FnOnce(&Answer) -> Ask) -> (Usage, Usage) {
    let mut connections = rig.connect_to_each(1).await;
    let one = connections[0][0].send(first).await;
    rig.settle().await;
    let asked = second(&one);
    let two = connections[1][0].send(&asked).await;
    assert_eq!((one.status, two.status), (200, 200), "{one:?} {two:?}");
    assert_eq!(one.replica(), two.replica());
    let server = rig.replica(one.replica()).seen();
    for ask in [first, &asked] {
        assert!(server.iter().any(|seen| seen.body_sha256 == ask.sha256()), "another body arrived");
    }
    (one.usage(), two.usage())
}

/// The second turn's prefix is the first prompt and its answer, but for the answer's last token.
#[track_caller]
fn check_second_turn((one, two): (Usage, Usage)) {
    assert_eq!(one.cached_tokens, 0);
    let cached = (one.prompt_tokens + one.completion_tokens - 1) / prompts::BLOCK * prompts::BLOCK;
    assert_eq!(two.cached_tokens, cached, "{one:?} {two:?}");
    assert!(cached > reusable(one.prompt_tokens), "the answer has blocks of its own");
}

#[test]
fn a_second_turn_is_predicted_to_the_token() {
    with_envoy("a_second_turn_is_predicted_to_the_token", |files| async move {
        let rig = Rig::start(&files, Plan::new(2, 4)).await;
        let mut predicted = 0;
        let mut check = |turns: (Usage, Usage)| {
            check_second_turn(turns);
            predicted += turns.1.cached_tokens;
        };
        let whole: fn(&Value) -> Value = Value::clone;
        for (seed, shape) in [(1, whole), (2, streamed as fn(&Value) -> Value)] {
            let body = shape(&chat(seed, 250, 70));
            let second =
                |answer: &Answer| Ask::chat(&next_turn(&body, &answer.text(), "And then?"));
            check(two_turns(&rig, &Ask::chat(&body), second).await);

            let text = words(seed + 10, 250);
            let of =
                |prompt: Value| shape(&json!({"model": MODEL, "max_tokens": 70, "prompt": prompt}));
            let first = Ask::completion(&of(json!(text)));
            let second = |answer: &Answer| {
                Ask::completion(&of(json!(format!("{text}{} What else?", answer.text()))))
            };
            check(two_turns(&rig, &first, second).await);

            let ids: Vec<u64> = (0..250).map(|n| 1_000 + 7 * n + seed).collect();
            let of = |ids: &[u64]| {
                let mut body = of(json!(ids));
                body["return_token_ids"] = json!(true);
                Ask::completion(&body)
            };
            let second =
                |answer: &Answer| of(&[&ids[..], &answer.token_ids()[..], &[5, 6, 7]].concat());
            check(two_turns(&rig, &of(&ids), second).await);
        }
        let scrape = rig.scrape().await;
        let predictions = scrape.by("warmpath_prediction_total", "result");
        assert_eq!(predictions.into_iter().collect::<Vec<_>>(), [("equal".to_owned(), 12)]);
        let counts = scrape.by("warmpath_prompt_count_total", "result");
        assert_eq!(counts.into_iter().collect::<Vec<_>>(), [("equal".to_owned(), 12)]);
        let sum = scrape.sum("warmpath_predicted_cached_tokens_total", &[]);
        assert_eq!(sum, predicted as f64);
        assert_eq!(scrape.sum("warmpath_responses_total", &[("usage", "cached")]), 12.0);
        assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "prefix")]), 6.0);
        rig.finish().await;
    });
}
