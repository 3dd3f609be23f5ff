//! One prompt, however it is written and however large its body: it goes where its blocks are.
//!
//! That the tokens are the engine's is not this file's part: the replicas here read prompts with the same model as the
//! filter does. It is that of the golden vectors.

use crate::client::{Ask, Connection};
use crate::deployments::{assert_chosen_serves, why};
use crate::harness::{Plan, QWEN3, Rig, with_envoy};
use crate::prompts::{reusable, words};
use serde_json::{Value, json};
use warmpath::request::{self, Api};

fn completion(prompt: impl Into<Value>) -> Value {
    json!({"model": "qwen3", "max_tokens": 1, "prompt": prompt.into()})
}

fn conversation(messages: Value) -> Value {
    json!({"model": "qwen3", "max_tokens": 1, "messages": messages})
}

fn ids(body: &Value) -> Vec<u32> {
    let prompt = request::parse(Api::Completions, body.to_string().as_bytes()).unwrap();
    QWEN3.token_ids(&prompt, 0).unwrap()
}

/// Four turns with a tool; what the assistant says beside its call is written in one of several ways.
fn with_tool(beside: fn(&mut Value)) -> Value {
    let call = json!([{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}}]);
    let mut assistant = json!({"role": "assistant", "tool_calls": call});
    beside(&mut assistant);
    conversation(json!([
        {"role": "user", "content": words(3, 200)}, assistant,
        {"role": "tool", "tool_call_id": "1", "content": words(4, 100)},
        {"role": "user", "content": "And tomorrow?"},
    ]))
}

/// The same prompt several times: after the first all of it is found, and where it was. There.
async fn are_one(rig: &Rig, bodies: &[Value]) -> String {
    let send = async |body: &Value| {
        let path = if body["prompt"].is_null() { "chat/completions" } else { "completions" };
        rig.send(&Ask::post(&format!("/v1/{path}"), body.to_string())).await
    };
    let cold = send(&bodies[0]).await;
    let usage = cold.usage();
    assert_eq!(usage.cached_tokens, 0, "{}", bodies[0]);
    for body in bodies {
        let again = send(body).await;
        assert_eq!(again.replica(), cold.replica(), "{body}");
        assert_eq!(again.usage().prompt_tokens, usage.prompt_tokens, "{body}");
        assert_eq!(again.usage().cached_tokens, reusable(usage.prompt_tokens), "{body}");
    }
    cold.replica().to_owned()
}

#[test]
fn one_prompt_is_one_prompt_in_every_shape() {
    with_envoy("one_prompt_is_one_prompt_in_every_shape", |files| async move {
        let rig = Rig::start_static(&files, Plan::new(1, 4)).await;
        let text = completion(words(1, 400));
        let tokens = json!(ids(&text));
        let holder = are_one(
            &rig,
            &[
                text.clone(),
                completion(json!([text["prompt"]])),
                completion(tokens.clone()),
                completion(json!([tokens])),
            ],
        )
        .await;

        // The template takes texts, and to those the engine makes lines of the parts.
        let (first, second) = (words(10, 200), words(11, 200));
        let part = |text: &str| json!({"type": "text", "text": text});
        are_one(
            &rig,
            &[
                conversation(json!([{"role": "user", "content": format!("{first}\n{second}")}])),
                conversation(json!([{"role": "user", "content": [part(&first), part(&second)]}])),
                conversation(
                    json!([{"role": "user", "content": [part(&format!("{first}\n{second}"))]}]),
                ),
            ],
        )
        .await;

        are_one(
            &rig,
            &[
                with_tool(|assistant| assistant["content"] = Value::Null),
                with_tool(|_| {}),
                with_tool(|assistant| assistant["content"] = json!("")),
                with_tool(|assistant| assistant["content"] = json!([])),
            ],
        )
        .await;

        // A batch goes by its first prompt.
        let batch = completion(json!([text["prompt"], words(2, 100)]));
        assert_eq!(rig.send(&Ask::completion(&batch)).await.replica(), holder);
        let scrape = rig.scrape().await;
        let reasons = scrape.by("warmpath_requests_total", "reason");
        let expected = [("cold".to_owned(), 3), ("prefix".to_owned(), 12)];
        assert_eq!(reasons.into_iter().collect::<Vec<_>>(), expected);
        for (metric, result) in
            [("warmpath_prompt_count_total", "differs"), ("warmpath_prediction_total", "over")]
        {
            assert_eq!(scrape.sum(metric, &[("result", result)]), 0.0, "{metric}");
        }
        rig.finish().await;
    });
}

/// A prompt of some hundred tokens at the head of a body of this size; engines skip what they do not know.
fn sized(seed: u64, bytes: usize) -> Ask {
    let mut body = completion(words(seed, 100));
    let missing = bytes - body.to_string().len() - ",\"metadata\":\"\"".len();
    body["metadata"] = json!("x".repeat(missing));
    why(Ask::completion(&body))
}

/// The replica is chosen from the body, whatever its size: by the prompt alone, and the one that is chosen serves.
#[test]
fn the_body_decides_at_every_size() {
    with_envoy("the_body_decides_at_every_size", |files| async move {
        let plan = Plan::new(1, 4).plugin(|plugin| {
            plugin["explain"] = json!({"request_header": "x-why", "secret": "open"});
        });
        let rig = Rig::start_static(&files, plan).await;
        // Until each replica has a prompt of its own.
        let mut holders: Vec<(u64, String)> = Vec::new();
        for seed in 0..200 {
            if holders.len() == 4 {
                break;
            }
            let answer = rig.send(&sized(seed, 1_000)).await;
            if holders.iter().all(|(_, holder)| holder != answer.replica()) {
                holders.push((seed, answer.replica().to_owned()));
            }
        }
        assert_eq!(holders.len(), 4, "{holders:?}");
        let mut connections =
            [Connection::open(rig.address).await, Connection::open_http2(rig.address).await];
        for (bytes, rounds) in [(1_000, 25), (1_000_000, 25)] {
            for round in 0..rounds {
                for (seed, holder) in &holders {
                    let ask = sized(*seed, bytes);
                    assert_eq!(ask.body.len(), bytes);
                    let answer = connections[round % 2].send(&ask).await;
                    assert_eq!(answer.replica(), holder, "{bytes} bytes, round {round}");
                    assert_chosen_serves(&rig, &answer);
                }
            }
        }
        let scrape = rig.scrape().await;
        assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "prefix")]), 200.0);
        assert_eq!(scrape.sum("warmpath_served_elsewhere_total", &[]), 0.0);
        rig.finish().await;
    });
}
