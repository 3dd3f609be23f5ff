//! What replicas and Envoy answer to the filter's own questions, however odd.

use crate::client::Ask;
use crate::fleet::file;
use crate::harness::{Plan, Rig, fast_replica, fresh_folder, start_replica, with_envoy};
use crate::prompts::chat;
use crate::shipped::endpoints;
use crate::stats::{Scrape, reasons_between};
use serde_json::json;
use warmpath::mock::control::MetricsMode;

fn polls(scrape: &Scrape, target: &str, result: &str) -> f64 {
    scrape.sum("warmpath_polls_total", &[("target", target), ("result", result)])
}

#[test]
fn metrics_that_tell_nothing_make_a_replica_neither_idle_nor_full() {
    with_envoy(
        "metrics_that_tell_nothing_make_a_replica_neither_idle_nor_full",
        |files| async move {
            let plan = Plan::new(1, 3).plugin(|plugin| {
                plugin["stale_after_ms"] = json!(200);
                plugin["poll_timeout_ms"] = json!(300);
            });
            let rig = Rig::start(&files, plan).await;
            let mut connection = rig.connect().await;
            let odd = &rig.replicas[0];
            let modes = [
                (MetricsMode::Garbage, "unreadable"),
                (MetricsMode::Huge, "too_large"),
                (MetricsMode::Slow, "failed"),
                (MetricsMode::Nan, "incomplete"),
                (MetricsMode::Error, "failed"),
                (MetricsMode::Empty, "unreadable"),
                (MetricsMode::Html, "unreadable"),
                (MetricsMode::Gzip, "unreadable"),
                (MetricsMode::Renamed, "incomplete"),
                (MetricsMode::Twice, "ok"),
                (MetricsMode::Backwards, "ok"),
            ];
            for (round, (mode, result)) in (0..).zip(modes) {
                let before = polls(&rig.scrape().await, "metrics", result);
                odd.replica.set_control(|control| control.metrics = mode);
                rig.eventually(&format!("{mode:?} is {result}"), |scrape| {
                    // Those of an earlier mode may still be under way.
                    polls(scrape, "metrics", result) >= before + 4.0
                })
                .await;
                let (mut answered, mut here) = (0, 0);
                for seed in 1000 * round..1000 * round + 60 {
                    let answer = connection.send(&Ask::chat(&chat(seed, 150, 1))).await;
                    assert_eq!(answer.status, 200, "{mode:?}");
                    answered += 1;
                    here += u32::from(answer.replica() == odd.replica.name());
                }
                // A fair share is 20; what is idle or full would get nearly all or none. What starts
                // anew all the time may get none: nobody knows which models it will serve.
                let least = if mode == MetricsMode::Backwards { 0 } else { 6 };
                assert!((least..=36).contains(&here), "{mode:?}: {here} of {answered}");
            }
            let scrape = rig.scrape().await;
            assert!(scrape.sum("warmpath_replica_restarts_total", &[]) >= 1.0, "backwards");
            odd.replica.set_control(|control| control.metrics = MetricsMode::Normal);
            rig.finish().await;
        },
    );
}

/// Nobody tells anything any more: what was told goes stale, and requests go by what this Envoy sends itself.
#[test]
fn without_any_report_every_request_is_answered_and_all_replicas_get_some() {
    with_envoy(
        "without_any_report_every_request_is_answered_and_all_replicas_get_some",
        |files| async move {
            let plan = Plan::new(1, 4).plugin(|plugin| {
                plugin["stale_after_ms"] = json!(200);
                plugin["poll_timeout_ms"] = json!(300);
            });
            let rig = Rig::start(&files, plan).await;
            let modes =
                [MetricsMode::Error, MetricsMode::Slow, MetricsMode::Empty, MetricsMode::Html];
            for (handle, mode) in rig.replicas.iter().zip(modes) {
                handle.replica.set_control(|control| control.metrics = mode);
            }
            rig.eventually("only old reports", |scrape| {
                let ages = scrape.by("warmpath_replica_report_age_ms", "replica");
                ages.len() == 4 && ages.values().all(|age| *age > 500)
            })
            .await;
            let before = rig.scrape().await;
            let mut connection = rig.connect().await;
            let mut counts = std::collections::BTreeMap::<String, u32>::new();
            for seed in 0..80 {
                let answer = connection.send(&Ask::chat(&chat(seed, 150, 1))).await;
                assert_eq!(answer.status, 200);
                *counts.entry(answer.replica().to_owned()).or_default() += 1;
            }
            // A fair share is 20.
            assert!(counts.len() == 4 && counts.values().all(|count| *count >= 6), "{counts:?}");
            let reasons = reasons_between(&before, &rig.scrape().await);
            assert_eq!(reasons.into_iter().collect::<Vec<_>>(), [("cold".to_owned(), 80)]);
            rig.finish().await;
        },
    );
}

#[test]
fn what_routing_does_not_understand_of_a_fleet_is_shown_and_said_once() {
    with_envoy(
        "what_routing_does_not_understand_of_a_fleet_is_shown_and_said_once",
        |files| async move {
            let rig = Rig::start(&files, Plan::new(1, 3)).await;
            let kind = |scrape: &Scrape, kind| {
                scrape.sum("warmpath_unsupported_topology", &[("kind", kind)])
            };
            assert_eq!(rig.scrape().await.sum("warmpath_unsupported_topology", &[]), 0.0);
            for (place, mode) in [MetricsMode::Ranks, MetricsMode::Ranks, MetricsMode::Prefill]
                .into_iter()
                .enumerate()
            {
                rig.replicas[place].replica.set_control(|control| control.metrics = mode);
            }
            rig.eventually("two kinds are shown", |scrape| {
                kind(scrape, "data_parallel") == 2.0 && kind(scrape, "disaggregated") == 1.0
            })
            .await;
            rig.settle().await;
            let log = rig.log();
            assert_eq!(log.matches("several engines behind one address").count(), 1, "{log}");
            assert_eq!(log.matches("compute prompts for others").count(), 1, "{log}");
            rig.replicas.iter().for_each(|handle| {
                handle.replica.set_control(|control| control.metrics = MetricsMode::Normal);
            });
            rig.eventually("and no longer", |scrape| {
                scrape.sum("warmpath_unsupported_topology", &[]) == 0.0
            })
            .await;
            rig.finish().await;
        },
    );
}

#[test]
fn replicas_are_asked_on_another_port_under_another_name_with_a_key() {
    with_envoy(
        "replicas_are_asked_on_another_port_under_another_name_with_a_key",
        |files| async move {
            let (served, asked) = (
                start_replica(fast_replica("served")).await,
                start_replica(fast_replica("asked")).await,
            );
            let folder = fresh_folder();
            let mut config = Plan::new(1, 0)
                .plugin(|plugin| {
                    let cluster = &mut plugin["clusters"][0];
                    cluster["poll_port"] = json!(asked.address.port());
                    cluster["poll_authority"] = json!("metrics.example");
                    cluster["poll_api_key"] = json!("canary-key");
                })
                .config;
            for (cluster, replica) in [("replicas_poll", &asked), ("replicas", &served)] {
                let file = file(&folder, cluster);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(&file, endpoints(cluster, &[replica.address])).unwrap();
                config.set_eds(cluster, &file);
            }
            let rig = Rig::start_with(&files, 1, vec![served], config, folder, false).await;
            let address = rig.replicas[0].address.to_string();
            rig.eventually("a report under the address that is served", |scrape| {
                scrape.count("warmpath_replica_report_age_ms", &[("replica", &address)]) == 1
            })
            .await;
            let seen = asked.replica.seen();
            for path in ["/metrics", "/v1/models"] {
                let question = seen.iter().find(|seen| seen.path == path).expect("a question");
                let has = |name: &str, value: &str| {
                    question.headers.iter().any(|(n, v)| n == name && v == value)
                };
                assert!(has("host", "metrics.example"), "{question:?}");
                assert!(has("authorization", "Bearer canary-key"), "{question:?}");
            }
            let questions = |seen: &warmpath::mock::replica::Seen| seen.path == "/metrics";
            assert!(!rig.replicas[0].replica.seen().iter().any(questions));
            assert_eq!(rig.send(&Ask::chat(&chat(1, 100, 1))).await.status, 200);
            assert!(!rig.log().contains("canary-key"));
            rig.finish().await;
        },
    );
}

#[test]
fn a_cluster_that_is_not_there_is_said_once_and_others_are_polled() {
    with_envoy(
        "a_cluster_that_is_not_there_is_said_once_and_others_are_polled",
        |files| async move {
            let plan = Plan::new(1, 2).plugin(|plugin| {
                let more = [
                    json!({"name": "lost", "replicas": ["10.1.2.3:80"], "poll_cluster": "nowhere"}),
                    json!({"name": "unseen", "admin_cluster": "admin"}),
                    json!({"name": "blind", "admin_cluster": "no_admin"}),
                ];
                plugin["clusters"].as_array_mut().unwrap().extend(more);
            });
            let rig = Rig::start(&files, Plan { early: true, ..plan }).await;
            let reports = |scrape: &Scrape| polls(scrape, "metrics", "ok");
            rig.eventually("reports of those that are there", |scrape| reports(scrape) >= 10.0)
                .await;
            rig.eventually("questions that could not be asked", |scrape| {
                polls(scrape, "metrics", "failed") >= 5.0 && polls(scrape, "admin", "failed") >= 5.0
            })
            .await;
            let log = rig.log();
            let said = |text: &str| log.lines().filter(|line| line.contains(text)).count();
            for text in ["cluster \"nowhere\"", "cluster \"unseen\"", "cluster \"no_admin\""] {
                assert_eq!(said(text), 1, "{text}\n{log}");
            }
            assert_eq!(rig.send(&Ask::chat(&chat(1, 100, 1))).await.status, 200);
            rig.finish().await;
        },
    );
}
