//! A tokenizer or a template that is not the engine's: it is found, its prompts are not matched, and all else still is.

use crate::client::Ask;
use crate::harness::{Files, Plan, QWEN3, Rig, fresh_folder, with_envoy};
use crate::prompts::{chat, next_turn, words};
use crate::shipped::Part;
use crate::stats::Scrape;
use serde_json::{Value, json};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use warmpath::mock::engine::EngineConfig;
use warmpath::mock::{Handle, Skew};

/// A file of the Qwen3 model that the tests come with.
fn model_file(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/qwen3").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Qwen3, prepared with one thing wrong.
fn prepared(change: impl FnOnce(&mut Value, &mut String)) -> PathBuf {
    let mut text = String::new();
    let packed = model_file("tokenizer.json.gz");
    flate2::read::GzDecoder::new(&packed[..]).read_to_string(&mut text).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let config = String::from_utf8(model_file("tokenizer_config.json")).unwrap();
    let config_json: Value = serde_json::from_str(&config).unwrap();
    let mut template = config_json["chat_template"].as_str().expect("a template").to_owned();
    change(&mut tokenizer, &mut template);
    let bytes =
        warmpath::tokens::prepared::prepare(&tokenizer.to_string(), &config, Some(&template));
    let path = fresh_folder().join("wrong.warmpath");
    std::fs::write(&path, bytes.unwrap_or_else(|error| panic!("{}", error.0))).unwrap();
    path
}

/// Two workers with this file in the place of the right one, which is at `/right.warmpath`.
async fn start(files: &Files, wrong: PathBuf, plugin: impl FnOnce(&mut Value)) -> Rig {
    let mut plan = Plan::new(2, 2).plugin(plugin);
    plan.config.serve_file_as("/right.warmpath", &files.prepared);
    plan.config.watch(Part::Filter);
    Rig::start(&Files { prepared: wrong, ..files.clone() }, plan).await
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

#[test]
fn a_wrong_template_trips_the_alarm_within_twenty_responses() {
    with_envoy("a_wrong_template_trips_the_alarm_within_twenty_responses", |files| async move {
        let wrong = prepared(|_, template| template.insert_str(0, "{{- 'Today.' }}"));
        // Responses alone must do.
        let no_canary = |plugin: &mut Value| {
            plugin["drift"] = json!({"canary_ms": 0, "hold_ms": 0});
        };
        let mut rig = start(&files, wrong, no_canary).await;
        let ask =
            |seed| Ask::chat(&chat(seed, 100, 1)).header("x-request-id", format!("id-{seed}"));
        send(&rig, (0..20).map(ask)).await;
        let scrape = rig.eventually("the verdict", |scrape| trusted(scrape, "chat") == 0.0).await;
        let text = |kind| trusted(&scrape, kind);
        assert_eq!((text("text"), text("tools")), (1.0, 1.0));
        assert!(by_reason(&scrape, "prompt_distrusted") > 0.0);
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

        // The right file, under a path of its own.
        let mut config = rig.config.clone();
        config.change_plugin(|plugin| {
            plugin["models"][0]["prepared"]["path"] = json!("/right.warmpath");
        });
        assert!(rig.push(Part::Filter, &config).await);
        rig.eventually("trust in the new file", |scrape| trusted(scrape, "chat") == 1.0).await;
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
        rig.finish_after_updates().await;
    });
}

#[test]
fn other_ids_in_the_same_number_trip_the_alarm() {
    with_envoy("other_ids_in_the_same_number_trip_the_alarm", |files| async move {
        // Two words of the canary's and of the prompts'.
        let wrong = prepared(|tokenizer, _| {
            let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
            let ids = ["\u{120}the", "\u{120}with"].map(|word| vocabulary[word].clone());
            vocabulary["\u{120}the"] = ids[1].clone();
            vocabulary["\u{120}with"] = ids[0].clone();
        });
        let rig = start(&files, wrong, |_| {}).await;
        let scrape = rig
            .eventually("the verdict", |scrape| {
                trusted(scrape, "chat") + trusted(scrape, "text") == 0.0
            })
            .await;
        let differs = [("oracle", "canary"), ("result", "differs")];
        assert!(scrape.sum("warmpath_oracle_total", &differs) >= 4.0);
        assert_eq!(scrape.sum("warmpath_prompt_count_total", &[("result", "differs")]), 0.0);
        send(&rig, (0..3).map(|seed| Ask::chat(&chat(seed, 100, 1)))).await;
        assert_eq!(by_reason(&rig.scrape().await, "prompt_distrusted"), 3.0);
        rig.finish().await;
    });
}

#[test]
fn ids_that_no_canary_has_are_found_in_clients_prompts() {
    with_envoy("ids_that_no_canary_has_are_found_in_clients_prompts", |files| async move {
        let wrong = prepared(|tokenizer, _| {
            let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
            let ids = ["\u{120}river", "\u{120}castle"].map(|word| vocabulary[word].clone());
            vocabulary["\u{120}river"] = ids[1].clone();
            vocabulary["\u{120}castle"] = ids[0].clone();
        });
        let rig = start(&files, wrong, |plugin| {
            plugin["drift"] = json!({"canary_ms": 1000});
        })
        .await;
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
        assert!(scrape.sum("warmpath_oracle_total", &equal) >= 6.0);
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
