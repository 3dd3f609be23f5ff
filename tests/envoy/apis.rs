//! Every API's prompts go by their prefix, and its answers are read.

use crate::client::Ask;
use crate::harness::{ALIAS, Plan, Rig, with_envoy};
use crate::prompts::{BLOCK, words};
use serde_json::{Value, json};

/// What a conversation's next request is made of: the one before, and what was answered.
type Next = fn(Value, &str, &[u64]) -> Value;

/// A path, a first request, and the next one.
type Conversation = (&'static str, Value, Next);

/// Adds to a list in a body.
fn push(mut body: Value, list: &str, items: Value) -> Value {
    let more = items.as_array().unwrap().clone();
    body[list].as_array_mut().unwrap().extend(more);
    body
}

fn conversations() -> Vec<Conversation> {
    let user = |seed| json!({"role": "user", "content": words(seed, 300)});
    let ids: Vec<u64> = (0..300).map(|id| 1_000 + 7 * id).collect();
    vec![
        (
            "/v1/responses",
            json!({"model": ALIAS, "max_output_tokens": 40, "instructions": "Be brief.", "input": [user(1)]}),
            |body, text, _| {
                let part = json!({"type": "output_text", "text": text});
                let answer = json!({"type": "message", "role": "assistant", "content": [part]});
                push(body, "input", json!([answer, {"role": "user", "content": "And then?"}]))
            },
        ),
        (
            "/v1/messages",
            json!({
                "model": ALIAS, "max_tokens": 40, "messages": [user(2)],
                "system": [
                    {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                    {"type": "text", "text": "Be brief."},
                ],
            }),
            |mut body, text, _| {
                // It changes with every request, and the engine leaves it out.
                body["system"][0]["text"] = json!("x-anthropic-billing-header: cch=2;");
                let answer =
                    json!({"role": "assistant", "content": [{"type": "text", "text": text}]});
                push(body, "messages", json!([answer, {"role": "user", "content": "And then?"}]))
            },
        ),
        (
            "/inference/v1/generate",
            json!({"model": ALIAS, "token_ids": ids, "sampling_params": {"max_tokens": 40}}),
            |body, _, ids| push(push(body, "token_ids", json!(ids)), "token_ids", json!([11, 12])),
        ),
    ]
}

/// The answer's text and ids, whichever it has, out of a stream of any of these APIs.
fn answered(documents: &[Value]) -> (String, Vec<u64>) {
    let text = |document: &Value| {
        let delta = &document["delta"];
        delta.as_str().or_else(|| delta["text"].as_str()).unwrap_or_default().to_owned()
    };
    let ids =
        documents.iter().filter_map(|document| document["choices"][0]["token_ids"].as_array());
    let ids = ids.flatten().filter_map(Value::as_u64).collect();
    (documents.iter().map(text).collect(), ids)
}

#[test]
fn every_apis_second_turn_goes_by_its_prefix_and_is_predicted() {
    with_envoy("every_apis_second_turn_goes_by_its_prefix_and_is_predicted", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 3)).await;
        let mut connection = rig.connect().await;
        let asks: Vec<Conversation> = conversations();
        let count = asks.len() as f64;
        for (path, first, next) in asks {
            let mut streamed = first.clone();
            streamed["stream"] = json!(true);
            streamed["stream_options"] = json!({"include_usage": true});
            let cold = connection.send(&Ask::post(path, streamed.to_string())).await;
            assert_eq!(cold.status, 200, "{path}: {cold:?}");
            let (text, ids) = answered(&cold.documents());
            assert!(!text.is_empty() || ids.len() == 40, "{path}: {cold:?}");
            let second = next(first, &text, &ids).to_string();
            let warm = connection.send(&Ask::post(path, second)).await;
            assert_eq!((warm.status, warm.replica()), (200, cold.replica()), "{path}");
        }
        // What has no answer: the same prompt again, and one of a query with other documents.
        let (text, query) = (words(4, 300), words(5, 300));
        for (path, body) in [
            ("/v1/embeddings", json!({"model": ALIAS, "input": [text, "a"]})),
            ("/v1/embeddings", json!({"model": ALIAS, "input": text})),
            ("/rerank", json!({"model": ALIAS, "query": query, "documents": ["a", "b"]})),
            ("/score", json!({"model": ALIAS, "text_1": query, "text_2": "c"})),
        ] {
            let answer = connection.send(&Ask::post(path, body.to_string())).await;
            assert_eq!(answer.status, 200, "{path}: {answer:?}");
        }
        let stored = json!({"model": ALIAS, "input": "x", "previous_response_id": "resp_1"});
        connection.send(&Ask::post("/v1/responses", stored.to_string())).await;
        connection.send(&Ask::post("/v1/nothing", "{}")).await;

        let scrape = rig.scrape().await;
        let by = |label: &str, name: &str| scrape.by(name, label);
        let reasons: Vec<(String, u64)> =
            by("reason", "warmpath_requests_total").into_iter().collect();
        let expected = [("cold", 5), ("not_inference", 1), ("prefix", 5), ("stored_prompt", 1)];
        assert_eq!(reasons, expected.map(|(reason, n)| (reason.to_owned(), n)));
        let prompts = |api: &str, prompt: &str| {
            scrape.sum("warmpath_prompts_total", &[("api", api), ("prompt", prompt)])
        };
        for (api, known, unknown) in [
            ("responses", 2.0, 1.0),
            ("messages", 2.0, 0.0),
            ("generate", 2.0, 0.0),
            ("embeddings", 2.0, 0.0),
            ("rerank", 1.0, 0.0),
            ("score", 1.0, 0.0),
            ("other", 0.0, 1.0),
        ] {
            assert_eq!((prompts(api, "known"), prompts(api, "unknown")), (known, unknown), "{api}");
        }
        let more = by("api", "warmpath_more_prompts_total");
        let more: Vec<(String, u64)> = more.into_iter().collect();
        assert_eq!(
            more,
            [("embeddings", 1), ("rerank", 2), ("score", 1)].map(|(api, n)| (api.to_owned(), n))
        );
        // Each turn of each conversation, the answers' blocks among what was predicted; one text alone tells its count.
        let equal = [("result", "equal")];
        assert_eq!(scrape.sum("warmpath_prediction_total", &equal), 2.0 * count);
        assert_eq!(scrape.sum("warmpath_prediction_total", &[]), 2.0 * count);
        assert_eq!(scrape.sum("warmpath_prompt_count_total", &equal), 2.0 * count + 1.0);
        assert_eq!(scrape.sum("warmpath_prompt_count_total", &[]), 2.0 * count + 1.0);
        let cached = scrape.sum("warmpath_reported_cached_tokens_total", &[]);
        assert!(cached >= count * (300 + 40 - 2 * BLOCK) as f64, "{cached} tokens");
        // Envoy's histograms are seconds late.
        rig.eventually("streams whose first content was seen", |scrape| {
            scrape.sum("warmpath_time_to_first_token_ms_count", &[]) == count
        })
        .await;
        rig.finish().await;
    });
}
