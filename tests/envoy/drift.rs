//! A tokenizer or a template that is not the engine's: it is found, its prompts are not matched, and all else still is.

use crate::client::Ask;
use crate::harness::{ALIAS, Files, MODEL, Plan, QWEN3, Rig, fresh_folder, with_envoy};
use crate::prompts::{chat, next_turn, words};
use crate::shipped::Part;
use crate::stats::Scrape;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use warmpath::mock::engine::EngineConfig;
use warmpath::mock::{Handle, Skew};
use warmpath::request::{self, Api};

/// Where the checksum of a prepared file stands, and where what it covers begins.
const CHECKSUM: usize = 24;
const CHECKED_FROM: usize = 32;

/// The prepared file with another template, which is as long: its turns begin with no special token, but its text.
fn with_a_wrong_template(files: &Files) -> PathBuf {
    const RIGHT: &[u8] = b"'<|im_start|>' + message.role + '\\n' + content + '";
    const WRONG: &[u8] = b"'<|im_STARt|>' + message.role + '\\n' + content + '";
    let mut bytes = std::fs::read(&files.prepared).unwrap();
    let at = bytes.windows(RIGHT.len()).position(|part| part == RIGHT).expect("the template");
    bytes[at..at + WRONG.len()].copy_from_slice(WRONG);
    let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[CHECKED_FROM..]);
    bytes[CHECKSUM..CHECKED_FROM].copy_from_slice(&checksum.to_le_bytes());
    let path = fresh_folder().join("wrong.warmpath");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Two replicas that have the ids of two words mixed up.
fn with_swapped_ids(words: [&str; 2]) -> Plan {
    let id = |word: &str| {
        let body = json!({"prompt": word}).to_string();
        let prompt = request::parse(Api::Completions, body.as_bytes()).unwrap();
        let ids = QWEN3.token_ids(&prompt, 0).unwrap();
        assert_eq!(ids.len(), 1, "{word}");
        ids[0]
    };
    let mut plan = Plan::new(2, 2);
    let skew = Skew::Swapped(id(words[0]), id(words[1]));
    plan.replicas.iter_mut().for_each(|replica| replica.skew = Some(skew));
    plan
}

fn trusted(scrape: &Scrape, kind: &str) -> f64 {
    scrape.sum("warmpath_model_trusted", &[("kind", kind)])
}

fn by_reason(scrape: &Scrape, reason: &str) -> f64 {
    scrape.sum("warmpath_requests_total", &[("reason", reason)])
}

/// Sends this many requests, one after another over both workers.
async fn send(rig: &Rig, asks: impl Iterator<Item = Ask>) {
    let mut connections: Vec<_> =
        rig.connect_to_each(1).await.into_iter().map(|mut of| of.remove(0)).collect();
    for (turn, ask) in asks.enumerate() {
        let workers = connections.len();
        assert_eq!(connections[turn % workers].send(&ask).await.status, 200);
    }
}

/// Waits until every worker goes by the verdict: one of them tells it, and the others hear of it with their next tick.
async fn heard_by_all(rig: &Rig, ask: impl Fn(u32) -> Ask) -> Scrape {
    for round in 0..200 {
        let before = by_reason(&rig.scrape().await, "prompt_distrusted");
        send(rig, (0..2).map(|turn| ask(10_000 + 2 * round + turn))).await;
        let scrape = rig.scrape().await;
        if by_reason(&scrape, "prompt_distrusted") - before == 2.0 {
            return scrape;
        }
    }
    panic!("a worker has not heard of it");
}

#[test]
fn a_wrong_template_trips_the_alarm_within_twenty_responses() {
    with_envoy("a_wrong_template_trips_the_alarm_within_twenty_responses", |files| async move {
        // Responses alone must do.
        let mut plan = Plan::new(2, 2).plugin(|plugin| {
            plugin["drift"] = json!({"canary_ms": 0, "hold_ms": 0});
        });
        plan.config.serve_file_as("/right.warmpath", &files.prepared);
        plan.config.watch(Part::Filter);
        let wrong = Files { prepared: with_a_wrong_template(&files), ..files.clone() };
        let mut rig = Rig::start(&wrong, plan).await;
        let ask =
            |seed| Ask::chat(&chat(seed, 100, 1)).header("x-request-id", format!("id-{seed}"));
        send(&rig, (0..20).map(ask)).await;
        let scrape = rig.eventually("the verdict", |scrape| trusted(scrape, "chat") == 0.0).await;
        let text = |kind| trusted(&scrape, kind);
        assert_eq!((text("text"), text("tools")), (1.0, 1.0));
        let scrape = heard_by_all(&rig, |seed| ask(seed as _)).await;
        let log = rig.log();
        let told = log.lines().filter(|line| line.contains("a response differs")).count();
        assert_eq!(told, 1, "{log}");
        assert!(log.contains("kind=chat, messages=1, roles=u; x-request-id="), "{log}");
        assert_eq!(log.matches("chat prompts are not matched any more").count(), 1, "{log}");
        assert!(!log.contains("river"), "{log}");

        // Twenty more go by load, whatever they share; completions are matched as before.
        send(&rig, (0..10).map(|_| ask(1))).await;
        let completion = json!({"model": "qwen3", "max_tokens": 1, "prompt": words(5, 200)});
        send(&rig, (0..4).map(|_| Ask::completion(&completion))).await;
        let after = rig.scrape().await;
        let more = |reason| by_reason(&after, reason) - by_reason(&scrape, reason);
        assert_eq!((more("prompt_distrusted"), more("prefix"), more("cold")), (10.0, 3.0, 1.0));

        // The right file, under a path of its own, and for a model that is shown by another name.
        let mut config = rig.config.clone();
        config.change_plugin(|plugin| {
            let model = &mut plugin["models"][0];
            model["prepared"]["path"] = json!("/right.warmpath");
            model["name"] = json!("another");
            model["aliases"] = json!([ALIAS, MODEL]);
        });
        assert!(rig.push(Part::Filter, &config).await);
        // The name that is not shown any more is not distrusted any more either.
        rig.eventually("trust in the new file", |scrape| trusted(scrape, "chat") == 2.0).await;
        rig.eventually("the new file in all workers", |scrape| {
            scrape.sum("warmpath_vms", &[("state", "ready")]) == 2.0
                && scrape.sum("warmpath_tokenizer_loads_total", &[("result", "ok")]) == 4.0
        })
        .await;
        let before = rig.scrape().await;
        send(&rig, (0..6).map(|_| ask(77))).await;
        let after = rig.scrape().await;
        let more = |reason| by_reason(&after, reason) - by_reason(&before, reason);
        assert_eq!((more("prompt_distrusted"), more("cold"), more("prefix")), (0.0, 1.0, 5.0));
        // The main thread's VM loads neither file.
        assert_eq!(after.sum("warmpath_tokenizer_loads_total", &[("result", "ok")]), 4.0);
        rig.finish_after_updates().await;
    });
}

#[test]
fn other_ids_in_the_same_number_trip_the_alarm() {
    with_envoy("other_ids_in_the_same_number_trip_the_alarm", |files| async move {
        // Two words of the canary's.
        let rig = Rig::start(&files, with_swapped_ids([" the", " with"])).await;
        let scrape = rig
            .eventually("the verdict", |scrape| {
                trusted(scrape, "chat") + trusted(scrape, "text") == 0.0
            })
            .await;
        let differs = [("oracle", "canary"), ("result", "differs")];
        assert!(scrape.sum("warmpath_oracle_total", &differs) >= 4.0);
        assert_eq!(scrape.sum("warmpath_prompt_count_total", &[("result", "differs")]), 0.0);
        heard_by_all(&rig, |seed| Ask::chat(&chat(seed as _, 100, 1))).await;
        rig.finish().await;
    });
}

#[test]
fn ids_that_no_canary_has_are_found_in_clients_prompts() {
    with_envoy("ids_that_no_canary_has_are_found_in_clients_prompts", |files| async move {
        let plan = with_swapped_ids([" river", " castle"]).plugin(|plugin| {
            plugin["drift"] = json!({"canary_ms": 1000});
        });
        let rig = Rig::start(&files, plan).await;
        let equal = [("oracle", "canary"), ("result", "equal")];
        rig.eventually("canaries", |scrape| scrape.sum("warmpath_oracle_total", &equal) >= 6.0)
            .await;
        // Two samples, a second apart.
        for seed in 0.. {
            send(&rig, [Ask::chat(&chat(seed, 100, 1))].into_iter()).await;
            let scrape = rig.scrape().await;
            if trusted(&scrape, "chat") == 0.0 {
                assert_eq!(trusted(&scrape, "text"), 1.0);
                break;
            }
            assert!(seed < 300, "no verdict");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        // Clients that ask for the ids find it out by themselves.
        let mut completion = json!({"model": "qwen3", "max_tokens": 1, "return_token_ids": true});
        completion["prompt"] = json!("the river, the castle and the");
        send(&rig, (0..5).map(|_| Ask::completion(&completion))).await;
        rig.eventually("the verdict", |scrape| trusted(scrape, "text") == 0.0).await;
        let response = [("oracle", "response"), ("result", "differs")];
        assert_eq!(rig.scrape().await.sum("warmpath_oracle_total", &response), 5.0);
        rig.finish().await;
    });
}

/// A cache that is far too small, and one that forgets, predict wrongly and prove nothing.
#[test]
fn eviction_and_lost_caches_raise_no_alarm() {
    with_envoy("eviction_and_lost_caches_raise_no_alarm", |files| async move {
        let mut plan = Plan::new(2, 2);
        for replica in &mut plan.replicas {
            replica.engine = EngineConfig { capacity_blocks: 120, ..replica.engine.clone() };
            replica.model = Some(Arc::clone(&QWEN3));
        }
        let rig = Rig::start(&files, plan).await;
        let mut chats: Vec<Value> = (0..6).map(|seed| chat(seed, 300, 8)).collect();
        for turn in 0..8 {
            for chat in &mut chats {
                let answer = rig.send(&Ask::chat(chat)).await;
                assert_eq!(answer.status, 200);
                *chat = next_turn(chat, &answer.text(), "And then?");
            }
            if turn % 3 == 2 {
                for handle in &rig.replicas {
                    let reset = Ask::post("/reset_prefix_cache", "{}");
                    let mut direct = crate::client::Connection::open(handle.address).await;
                    assert_eq!(direct.send(&reset).await.status, 200);
                }
            }
        }
        let scrape = rig.scrape().await;
        let over = scrape.sum("warmpath_prediction_total", &[("result", "over")]);
        assert!(over > 0.0, "nothing was mispredicted");
        assert_eq!(by_reason(&scrape, "prompt_distrusted"), 0.0);
        let trusted = scrape.sum("warmpath_model_trusted", &[]);
        assert_eq!(trusted, 6.0);
        let equal = [("oracle", "canary"), ("result", "equal")];
        rig.eventually("canaries of both", |scrape| {
            scrape.sum("warmpath_oracle_total", &equal) >= 6.0
        })
        .await;
        rig.finish().await;
    });
}

/// One more token in front of everything, as an engine that adds a BOS: what was right turns wrong, and right again.
#[test]
fn an_engine_that_changes_is_distrusted_and_trusted_again() {
    with_envoy("an_engine_that_changes_is_distrusted_and_trusted_again", |files| async move {
        let plan = Plan::new(1, 2).plugin(|plugin| {
            plugin["drift"] = json!({"hold_ms": 200, "canary_ms": 0});
        });
        let rig = Rig::start(&files, plan).await;
        let ask = |seed| Ask::chat(&chat(seed, 60, 1));
        send(&rig, (0..30).map(ask)).await;
        let skew = |skew| {
            let set = |handle: &Handle| handle.replica.set_control(|control| control.skew = skew);
            rig.replicas.iter().for_each(set);
        };
        skew(Some(Skew::Extra));
        send(&rig, (30..36).map(ask)).await;
        let scrape = rig.eventually("distrust", |scrape| trusted(scrape, "chat") == 0.0).await;
        assert_eq!(by_reason(&scrape, "prompt_distrusted"), 1.0);
        skew(None);
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        send(&rig, (40..61).map(ask)).await;
        rig.eventually("trust", |scrape| trusted(scrape, "chat") == 1.0).await;
        assert_eq!(rig.log().matches("chat prompts are not matched any more").count(), 1);
        rig.finish().await;
    });
}
