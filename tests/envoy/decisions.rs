//! What a decision is counted as, and the one that is the filter's own answer.

use crate::client::{Ask, Connection};
use crate::harness::{Plan, Rig, with_envoy};
use crate::prompts::{chat, next_turn, streamed};
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn counts(found: &BTreeMap<String, u64>) -> Vec<(&str, u64)> {
    found.iter().map(|(name, count)| (name.as_str(), *count)).collect()
}

/// A fleet of two where a token of prompt costs a second, and half a second is too much.
fn dear() -> Plan {
    Plan::new(1, 2).patient().plugin(|plugin| {
        plugin["max_cost_s"] = json!(0.5);
        plugin["cost"] = json!({"prefill_tokens_per_s": 1});
        plugin["class_header"] = json!("x-class");
        plugin["class_names"] = json!(["rag"]);
        plugin["shadow"] = json!("round_robin");
    })
}

#[test]
fn all_replicas_overloaded_are_a_429_for_those_whose_cost_is_known() {
    let name = "all_replicas_overloaded_are_a_429_for_those_whose_cost_is_known";
    with_envoy(name, |files| async move {
        let rig = Rig::start(&files, dear()).await;
        let mut connection = rig.connect().await;

        // However dear, on an idle replica it is computed.
        let first = chat(1, 200, 20);
        let answer = connection.send(&Ask::chat(&first).header("x-class", "rag")).await;
        assert_eq!(answer.status, 200);
        let second = next_turn(&first, &answer.text(), "What follows from that?");
        let ask = Ask::chat(&streamed(&second)).header("x-class", "nobody's");
        assert_eq!(connection.send(&ask).await.usage().cached_tokens % 16, 0);

        let mut busy = Vec::new();
        for seed in [2, 3] {
            let mut holder = Connection::open(rig.address).await;
            let response = holder.begin(&Ask::chat(&streamed(&chat(seed, 200, 20_000)))).await;
            assert_eq!(response.status(), 200);
            busy.push((holder, response));
        }
        let both = |scrape: &crate::stats::Scrape| {
            scrape.by("warmpath_replica_in_flight", "replica").values().all(|count| *count == 1)
                && scrape.sum("warmpath_replica_in_flight", &[]) == 2.0
        };
        rig.eventually("one on each replica", both).await;
        let received = rig.received().len();

        // Read in its own callback, and, as one of megabytes is, on ticks.
        for words in [200, 200_000] {
            let refused = connection.send(&Ask::chat(&chat(9, words, 20))).await;
            assert_eq!(refused.status, 429, "{words} words: {refused:?}");
            let seconds: u64 = refused.header("retry-after").unwrap().parse().unwrap();
            assert!((100..=600).contains(&seconds), "{seconds} s");
            assert_eq!(refused.header("content-type"), Some("application/json"));
            let body: Value = serde_json::from_slice(&refused.body).unwrap();
            assert_eq!((&body["error"]["code"], body["type"].is_null()), (&json!(429), true));
        }
        let ask = Ask::post("/v1/messages", chat(9, 200, 20).to_string());
        let refused = connection.send(&ask).await;
        let body: Value = serde_json::from_slice(&refused.body).unwrap();
        assert_eq!((refused.status, &body["type"]), (429, &json!("error")));
        assert_eq!(rig.received().len(), received, "nothing of it reached a replica");

        // What it would cost is a guess: not refused.
        let unknown = json!({"model": crate::harness::ALIAS, "prompt": {"no": "prompt"}});
        let ask = Ask::post("/v1/completions", unknown.to_string());
        assert_eq!(connection.send(&ask).await.status, 400, "the replica's own answer");

        drop(busy);
        rig.eventually("nothing in flight", |scrape| {
            scrape.sum("warmpath_replica_in_flight", &[]) == 0.0
        })
        .await;
        assert_eq!(connection.send(&Ask::chat(&chat(9, 200, 20))).await.status, 200);

        let scrape = rig.scrape().await;
        let reasons = scrape.by("warmpath_requests_total", "reason");
        let expected = [("cold", 4), ("no_prompt", 1), ("overloaded", 3), ("prefix", 1)];
        assert_eq!(counts(&reasons), expected);
        let classes = scrape.by("warmpath_prompts_total", "class");
        let expected = [("chat", 5), ("document", 1), ("other", 1), ("rag", 1), ("unknown", 1)];
        let shaped: u64 = classes.values().sum();
        assert_eq!((counts(&classes), shaped), (expected.to_vec(), 9), "{classes:?}");
        let cached = scrape.sum("warmpath_reported_cached_tokens_total", &[("class", "other")]);
        assert!(cached > 150.0, "{cached} tokens of the second turn");
        // Five answers to prompts that were known, one to another, two that were cut.
        let regret = scrape.by("warmpath_regret_requests_total", "reason");
        assert_eq!(regret.values().sum::<u64>(), 5, "{regret:?}");
        let agree = scrape.by("warmpath_shadow_decisions_total", "result");
        assert_eq!(agree.values().sum::<u64>(), 6, "{agree:?}");
        rig.finish().await;
    });
}
