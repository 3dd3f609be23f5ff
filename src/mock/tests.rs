//! Replicas over HTTP, without a tokenizer: prompts are token ids.

use super::control::Control;
use super::digest::Lora;
use super::engine::EngineConfig;
use super::publisher::EventsConfig;
use super::*;
use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Incoming};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout};

struct Rig {
    handle: Handle,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Rig {
    async fn start() -> Self {
        Self::with(ReplicaConfig::default()).await
    }

    /// A replica whose steps take no time worth waiting for.
    async fn with(config: ReplicaConfig) -> Self {
        let engine = EngineConfig {
            step_base: Duration::from_millis(1),
            prefill_rate: 10_000_000.0,
            decode_per_sequence: Duration::ZERO,
            ..config.engine
        };
        Self::exact(ReplicaConfig { engine, ..config }).await
    }

    async fn exact(config: ReplicaConfig) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let handle = serve(config, listener).unwrap();
        Self { handle, client: Client::builder(TokioExecutor::new()).build_http() }
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        body: &str,
    ) -> hyper::Result<Response<Incoming>> {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.handle.address))
            .header("content-type", "application/json")
            .header("x-trace", "abc")
            .body(Full::from(body.to_owned()))
            .unwrap();
        let sent = timeout(Duration::from_secs(20), self.client.request(request)).await.unwrap();
        Ok(sent.unwrap())
    }

    async fn text(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let response = self.send(method, path, body).await.unwrap();
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8_lossy(&bytes).into_owned())
    }

    async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.text("POST", path, &body.to_string()).await;
        (status, serde_json::from_str(&text).unwrap_or(Value::Null))
    }

    async fn complete(&self, prompt: &[u32], more: &Value) -> (u16, Value) {
        let mut body = json!({ "prompt": prompt, "max_tokens": 4 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.post("/v1/completions", &body).await
    }

    async fn events(&self, path: &str, body: &Value) -> Vec<String> {
        let (status, text) = self.text("POST", path, &body.to_string()).await;
        assert_eq!(status, 200, "{text}");
        text.split_terminator("\n\n")
            .map(|event| event.strip_prefix("data: ").unwrap().to_owned())
            .collect()
    }

    async fn until(&self, what: &str, holds: impl Fn(&Replica) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !holds(&self.handle.replica) {
            assert!(Instant::now() < end, "not in time: {what}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn a_repeated_prompt_and_its_continuation_are_cached() {
    let rig = Rig::start().await;
    let mut history: Vec<u32> = (0..100).collect();
    let (_, cold) =
        rig.complete(&history, &json!({ "max_tokens": 60, "return_token_ids": true })).await;
    assert_eq!((cached(&cold), &cold["usage"]["prompt_tokens"]), (0, &json!(100)));
    let (_, warm) = rig.complete(&history, &json!({})).await;
    assert_eq!(cached(&warm), 96);
    let answer = cold["choices"][0]["token_ids"].as_array().unwrap();
    history.extend(answer.iter().map(|id| id.as_u64().unwrap() as u32));
    assert_eq!(history.len(), 160);
    history.push(5);
    let (_, next) = rig.complete(&history, &json!({})).await;
    assert_eq!(cached(&next), 144, "the last token has no KV, so its block is not full");
    let totals = rig.handle.replica.published().totals;
    assert_eq!((totals.queried_tokens, totals.hit_tokens), (361, 240));
}

#[tokio::test]
async fn an_answer_in_words_is_the_same_tokens_when_it_comes_back() {
    let rig = Rig::start().await;
    let user = json!({ "role": "user", "content": "what is it ".repeat(20) });
    let body = json!({ "messages": [user], "max_tokens": 70 });
    let (_, first) = rig.post("/v1/chat/completions", &body).await;
    let message = &first["choices"][0]["message"];
    let next = json!({ "role": "user", "content": "and then" });
    let body = json!({ "messages": [user, message, next], "max_tokens": 3 });
    let (_, second) = rig.post("/v1/chat/completions", &body).await;
    let computed = first["usage"]["total_tokens"].as_u64().unwrap() - 1;
    assert_eq!(cached(&second), computed / 16 * 16);
}

#[tokio::test]
async fn salts_separate_tenants() {
    let rig = Rig::start().await;
    let prompt: Vec<u32> = (0..100).collect();
    rig.complete(&prompt, &json!({})).await;
    let (_, other) = rig.complete(&prompt, &json!({ "cache_salt": "b" })).await;
    assert_eq!(cached(&other), 0);
    let (status, _) = rig.complete(&prompt, &json!({ "cache_salt": "" })).await;
    assert_eq!(status, 400);
}

#[tokio::test]
async fn adapters_are_models_with_a_cache_of_their_own() {
    let lora = Lora { name: "one".to_owned(), path: "adapters/one".to_owned() };
    let rig = Rig::with(ReplicaConfig { loras: vec![lora], ..ReplicaConfig::default() }).await;
    let prompt: Vec<u32> = (0..100).collect();
    rig.complete(&prompt, &json!({})).await;
    let (_, other) = rig.complete(&prompt, &json!({ "model": "one" })).await;
    assert_eq!((cached(&other), &other["model"]), (0, &json!("one")));
    let (_, models) = rig.post("/v1/models", &json!({})).await;
    assert_eq!(models, Value::Null, "POST is not allowed");
    let (_, text) = rig.text("GET", "/v1/models", "").await;
    let models: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(models["data"][1]["parent"], json!("mock"));
}

fn without_names(event: &str) -> Value {
    let mut value: Value = serde_json::from_str(event).unwrap();
    let object = value.as_object_mut().unwrap();
    assert!(object.remove("id").unwrap().as_str().unwrap().contains("cmpl-"));
    assert!(object.remove("created").unwrap().as_u64().unwrap() > 1_700_000_000);
    value
}

#[tokio::test]
async fn a_chat_stream_has_the_engines_shape() {
    let rig = Rig::start().await;
    let body = json!({
        "messages": [{ "role": "user", "content": "a b c" }], "max_tokens": 2, "stream": true,
        "stream_options": { "include_usage": true },
    });
    let events = rig.events("/v1/chat/completions", &body).await;
    assert_eq!(events.len(), 5);
    assert_eq!(
        without_names(&events[0]),
        json!({
            "object": "chat.completion.chunk", "model": "mock", "prompt_token_ids": null, "prompt_text": null,
            "choices": [{
                "index": 0, "delta": { "role": "assistant", "content": "" }, "logprobs": null, "finish_reason": null,
            }],
        })
    );
    let last = without_names(&events[2]);
    let word = last["choices"][0]["delta"]["content"].clone();
    assert_eq!(
        last,
        json!({
            "object": "chat.completion.chunk", "model": "mock",
            "choices": [{
                "index": 0, "delta": { "content": word }, "logprobs": null, "finish_reason": "length",
                "stop_reason": null, "token_ids": null,
            }],
        })
    );
    assert_eq!(
        without_names(&events[3]),
        json!({
            "object": "chat.completion.chunk", "model": "mock", "choices": [],
            "usage": {
                "prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2,
                "prompt_tokens_details": { "cached_tokens": 0, "created_cache_tokens": 0 },
            },
            "system_fingerprint": "vllm-0.32.0-mock",
        })
    );
    assert_eq!(events[4], "[DONE]");
}

#[tokio::test]
async fn a_completion_stream_has_the_engines_shape() {
    let rig = Rig::start().await;
    let body = json!({
        "prompt": [1, 2, 3], "max_tokens": 3, "stream": true, "return_token_ids": true,
        "stream_options": { "include_usage": true, "continuous_usage_stats": true },
    });
    let events = rig.events("/v1/completions", &body).await;
    assert_eq!(events.len(), 5);
    let first = without_names(&events[0]);
    let choice = &first["choices"][0];
    assert_eq!(choice["prompt_token_ids"], json!([1, 2, 3]));
    assert_eq!(choice["text"], json!(format!(" w{}", choice["token_ids"][0])));
    assert_eq!(first["usage"]["completion_tokens"], json!(1));
    assert_eq!(
        without_names(&events[3])["usage"]["prompt_tokens_details"],
        json!({ "cached_tokens": 0 })
    );
    let mut plain = body;
    plain["stream_options"] = Value::Null;
    let events = rig.events("/v1/completions", &plain).await;
    assert_eq!(events.len(), 4);
    assert_eq!(without_names(&events[2])["system_fingerprint"], json!("vllm-0.32.0-mock"));
}

#[tokio::test]
async fn batches_and_several_answers_are_counted_as_the_engine_does() {
    let rig = Rig::start().await;
    let body = json!({ "prompt": [[1, 2, 3, 4], [5, 6]], "max_tokens": 4 });
    let (_, batch) = rig.post("/v1/completions", &body).await;
    assert_eq!(batch["choices"].as_array().unwrap().len(), 2);
    assert_eq!(batch["usage"]["prompt_tokens"], json!(6));
    assert_eq!(batch["usage"]["completion_tokens"], json!(8));
    let (_, several) = rig.complete(&[1, 2, 3], &json!({ "n": 3 })).await;
    assert_eq!(several["usage"]["prompt_tokens"], json!(3));
    assert_eq!(several["usage"]["completion_tokens"], json!(12));
}

#[tokio::test]
async fn errors_have_the_engines_shape() {
    let rig = Rig::start().await;
    let (status, text) = rig.text("POST", "/v1/completions", "{").await;
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &error["error"]["type"]), (400, &json!("Bad Request")));
    let (status, error) = rig.complete(&[1], &json!({ "model": "nope" })).await;
    let message = "The model `nope` does not exist. Valid aliases: mock.";
    let expected = json!({ "error": {
        "message": message, "type": "NotFoundError", "param": "model", "code": 404,
    }});
    assert_eq!((status, error), (404, expected));
    let (status, error) = rig.complete(&[1], &json!({ "max_tokens": 99_999 })).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("max_tokens")));
    let (status, error) = rig.complete(&vec![1; 40_000], &json!({})).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("input_tokens")));
}

#[tokio::test]
async fn a_long_body_is_read_to_its_end() {
    let rig = Rig::start().await;
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 1, "user": "x".repeat(4 << 20) });
    assert_eq!(rig.post("/v1/completions", &body).await.0, 200);
}

#[tokio::test]
async fn requests_are_remembered_byte_for_byte() {
    let rig = Rig::start().await;
    let body = "{ \"prompt\" : [1,2 ],\n\"max_tokens\":1}";
    let response = rig.send("POST", "/v1/completions?x=1", body).await.unwrap();
    assert_eq!(response.headers()["x-mock-replica"], "mock");
    let (_, text) = rig.text("GET", "/mock/requests", "").await;
    let seen: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(seen.as_array().unwrap().len(), 1);
    assert_eq!(seen[0]["path"], json!("/v1/completions?x=1"));
    assert_eq!(seen[0]["body_sha256"], json!(format!("{:x}", Sha256::digest(body))));
    assert!(seen[0]["headers"].as_array().unwrap().contains(&json!(["x-trace", "abc"])));
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_request_out_of_the_engine() {
    let rig = Rig::start().await;
    let prompt: Vec<u32> = (0..100).collect();
    let body = json!({ "prompt": prompt, "max_tokens": 20_000, "stream": true }).to_string();
    let mut response = rig.send("POST", "/v1/completions", &body).await.unwrap();
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(rig.handle.replica.in_flight(), 1);
    drop(response);
    rig.until("aborted", |replica| replica.published().totals.aborted == 1).await;
    assert_eq!(rig.handle.replica.in_flight(), 0);
    let (_, answer) = rig.complete(&prompt, &json!({})).await;
    assert_eq!(cached(&answer), 96);
}

#[tokio::test]
async fn metrics_follow_the_engine() {
    let rig = Rig::start().await;
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 20_000, "stream": true }).to_string();
    let mut response = rig.send("POST", "/v1/completions", &body).await.unwrap();
    response.body_mut().frame().await.unwrap().unwrap();
    let (_, text) = rig.text("GET", "/metrics", "").await;
    let has = |line: &str| assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    has("vllm:num_requests_running{engine=\"0\",model_name=\"mock\"} 1.0");
    has("vllm:num_requests_waiting{engine=\"0\",model_name=\"mock\"} 0.0");
    has("vllm:prompt_tokens_total{engine=\"0\",model_name=\"mock\"} 3.0");
    assert!(text.contains("block_size=\"16\"") && text.contains("num_gpu_blocks=\"4096\""));
    drop(response);
    rig.until("idle", |replica| replica.published().load.running == 0).await;
    assert_eq!(rig.handle.replica.published().load.held_blocks, 0);
}

#[tokio::test]
async fn a_reset_empties_the_cache() {
    let rig = Rig::start().await;
    let prompt: Vec<u32> = (0..100).collect();
    rig.complete(&prompt, &json!({})).await;
    let (_, answer) = rig.post("/reset_prefix_cache", &json!({})).await;
    assert_eq!(answer, json!({ "success": true }));
    let (_, answer) = rig.complete(&prompt, &json!({})).await;
    assert_eq!(cached(&answer), 0);
}

#[tokio::test]
async fn what_is_cached_can_be_looked_up_without_a_request() {
    let rig = Rig::start().await;
    let prompt: Vec<u32> = (0..100).collect();
    let look = async |more: Value| {
        let mut body = json!({ "prompt": prompt });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        rig.post("/mock/cached", &body).await
    };
    assert_eq!(look(json!({})).await, (200, json!({ "cached_tokens": 0 })));
    rig.complete(&prompt, &json!({})).await;
    assert_eq!(look(json!({})).await, (200, json!({ "cached_tokens": 96 })));
    assert_eq!(look(json!({ "cache_salt": "b" })).await, (200, json!({ "cached_tokens": 0 })));
    assert_eq!(look(json!({ "model": "other" })).await.0, 404);
    assert_eq!(rig.handle.replica.published().totals.queried_tokens, 100);
}

#[tokio::test]
async fn where_events_are_published_is_told_by_rank() {
    let rig = Rig::start().await;
    assert_eq!(rig.text("GET", "/kv_event_sources", "").await, (200, "{}".to_owned()));
    let endpoint = "tcp://[::ffff:127.0.0.1]:0".to_owned();
    let events = Some(EventsConfig { endpoint, ..EventsConfig::default() });
    let rig = Rig::with(ReplicaConfig { events, ..ReplicaConfig::default() }).await;
    let (_, text) = rig.text("GET", "/kv_event_sources", "").await;
    let sources: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(sources["0"]["endpoint"], "tcp://[::ffff:127.0.0.1]:0");
    assert_eq!(
        (&sources["0"]["replay_endpoint"], &sources["0"]["topic"]),
        (&Value::Null, &json!(""))
    );
}

#[tokio::test]
async fn skews_change_counts_or_ids() {
    for (skew, tokens) in [(Skew::Extra, json!([1, 7, 8])), (Skew::Ids, json!([8, 9]))] {
        let rig = Rig::with(ReplicaConfig { skew: Some(skew), ..ReplicaConfig::default() }).await;
        let (_, answer) = rig.complete(&[7, 8], &json!({ "return_token_ids": true })).await;
        assert_eq!(answer["choices"][0]["prompt_token_ids"], tokens);
        let (_, answer) = rig.post("/tokenize", &json!({ "prompt": [7, 8] })).await;
        assert_eq!(answer["tokens"], tokens);
    }
}

#[tokio::test]
async fn failures_come_as_often_as_asked() {
    let rig = Rig::start().await;
    let (status, _) =
        rig.post("/mock/control", &json!({ "fail": { "status": 503, "count": 2 } })).await;
    assert_eq!(status, 200);
    let mut statuses = Vec::new();
    for _ in 0..3 {
        statuses.push(rig.complete(&[1], &json!({})).await.0);
    }
    assert_eq!(statuses, [503, 503, 200]);
    let (status, error) = rig.post("/mock/control", &json!({ "fial": 1 })).await;
    assert_eq!(
        (status, &error["error"]["message"]),
        (400, &json!("fial: unknown, or not of this type"))
    );
}

#[tokio::test]
async fn a_stream_can_be_cut() {
    let rig = Rig::start().await;
    rig.handle.replica.set_control(|control| control.cut_after = Some(3));
    let body = json!({ "prompt": [1], "max_tokens": 50, "stream": true }).to_string();
    let mut response = rig.send("POST", "/v1/completions", &body).await.unwrap().into_body();
    let mut text = String::new();
    let mut failed = false;
    while let Some(frame) = response.frame().await {
        match frame {
            Ok(frame) => text.push_str(&String::from_utf8_lossy(frame.data_ref().unwrap())),
            Err(_) => failed = true,
        }
    }
    assert!(failed);
    assert_eq!(text.matches("data: ").count(), 3);
}

#[tokio::test]
async fn an_early_role_chunk_comes_before_the_first_token() {
    let rig = Rig::exact(ReplicaConfig {
        engine: EngineConfig { step_base: Duration::from_secs(3600), ..EngineConfig::default() },
        ..ReplicaConfig::default()
    })
    .await;
    rig.handle.replica.set_control(|control| control.early_role = true);
    let body =
        json!({ "messages": [{ "role": "user", "content": "a" }], "stream": true }).to_string();
    let mut response = rig.send("POST", "/v1/chat/completions", &body).await.unwrap().into_body();
    let frame = response.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(String::from_utf8_lossy(&frame).contains("\"role\":\"assistant\""));
}

#[tokio::test]
async fn a_refusing_replica_closes_its_port_and_comes_back() {
    let rig = Rig::start().await;
    rig.complete(&[1], &json!({})).await;
    let refuse = |refuse: bool| {
        rig.handle.replica.set_control(|control: &mut Control| control.refuse = refuse);
    };
    refuse(true);
    let end = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(rig.handle.address).await.is_ok() {
        assert!(Instant::now() < end, "the port stays open");
        sleep(Duration::from_millis(5)).await;
    }
    refuse(false);
    while TcpStream::connect(rig.handle.address).await.is_err() {
        assert!(Instant::now() < end, "the port stays closed");
        sleep(Duration::from_millis(5)).await;
    }
    let (status, _) = rig.complete(&[1], &json!({})).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn a_hanging_replica_stays_healthy() {
    let rig = Rig::start().await;
    rig.handle.replica.set_control(|control| control.hang = true);
    let hung = timeout(Duration::from_millis(200), rig.complete(&[1], &json!({}))).await;
    assert!(hung.is_err());
    let nothing = json!({});
    let (hung, ()) = tokio::join!(rig.complete(&[1], &nothing), async {
        rig.until("arrived", |replica| replica.seen().len() == 2).await;
        rig.handle.replica.set_control(|control| control.hang = false);
    });
    assert_eq!(hung.0, 200);
    rig.handle.replica.set_control(|control| control.hang = true);
    assert_eq!(rig.text("GET", "/health", "").await, (200, String::new()));
    rig.handle.replica.set_control(|control| control.health = Some(503));
    assert_eq!(rig.text("GET", "/health", "").await.0, 503);
}

#[track_caller]
fn check_broken(text: &str, expected: &str) {
    assert!(text.contains(expected), "{expected} is not in {text}");
}

#[tokio::test]
async fn metrics_break_as_asked() {
    let rig = Rig::start().await;
    let mode = async |mode: &str| {
        rig.post("/mock/control", &json!({ "metrics": mode })).await;
        rig.text("GET", "/metrics", "").await
    };
    assert_eq!(mode("error").await.0, 500);
    assert!(mode("huge").await.1.len() > 8_000_000);
    check_broken(&mode("nan").await.1, "} NaN\n");
    assert!(!mode("garbage").await.1.contains("vllm:"));
    check_broken(&mode("normal").await.1, "vllm:num_requests_running{");
}

/// The engine's pace is its steps' durations, however late a busy machine wakes the driver.
#[tokio::test(start_paused = true)]
async fn tokens_come_at_the_engines_pace() {
    let (commands, received) = mpsc::unbounded_channel();
    let config = ReplicaConfig::default();
    let engine = Engine::new(config.engine.clone());
    let replica = Arc::new(Replica::new(config, Arc::new(Speech::numbered()), commands.clone()));
    let driver =
        tokio::spawn(driver::drive(engine, received, mpsc::unbounded_channel().0, replica));
    let (sender, mut events) = mpsc::unbounded_channel();
    let request = engine::Request {
        id: engine::RequestId(1),
        prompt: (0..1000).collect(),
        max_tokens: 11,
        salt: None,
        lora: None,
        reads_cache: true,
    };
    let start = Instant::now();
    let listener = driver::Listener { events: sender, choice: 0, arrived: start };
    commands.send(driver::Command::Submit(request, listener)).unwrap();
    let mut times = Vec::new();
    while let Some(event) = events.recv().await {
        times.push(start.elapsed());
        if event.last {
            break;
        }
    }
    driver.abort();
    // 8 ms and 1,000 tokens at 10 per ms and 1,000 * 500 pairs at 200,000 per ms; then 8.3 ms each.
    let expected = [Duration::from_micros(110_500), Duration::from_micros(110_500 + 83_000)];
    for (time, expected) in [times[0], times[10]].into_iter().zip(expected) {
        assert!(
            time >= expected && time < expected + Duration::from_millis(2),
            "{time:?}, {expected:?}"
        );
    }
}

mod with_a_tokenizer {
    //! Qwen3's own tokenizer and template.

    use super::*;
    use crate::model::Model;
    use crate::tokens::prepared::prepare;
    use std::io::Read as _;
    use std::path::Path;
    use std::sync::LazyLock;

    static QWEN3: LazyLock<Arc<Model>> = LazyLock::new(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/qwen3");
        let packed = std::fs::read(folder.join("tokenizer.json.gz")).unwrap();
        let mut tokenizer = String::new();
        flate2::read::GzDecoder::new(&packed[..]).read_to_string(&mut tokenizer).unwrap();
        let text = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        let template = text("chat_template.jinja");
        let prepared =
            prepare(&tokenizer, &text("tokenizer_config.json"), Some(&template)).unwrap();
        Arc::new(Model::load(prepared).unwrap())
    });

    async fn rig() -> Rig {
        let served_names = vec!["tiny-qwen3".to_owned(), "alias-two".to_owned()];
        let model = Some(Arc::clone(&*QWEN3));
        Rig::with(ReplicaConfig { served_names, model, ..ReplicaConfig::default() }).await
    }

    #[tokio::test]
    async fn prompts_have_the_ids_that_vllm_recorded() {
        let rig = rig().await;
        let body =
            json!({ "prompt": "The quick brown fox", "return_token_ids": true, "max_tokens": 1 });
        let (_, answer) = rig.post("/v1/completions", &body).await;
        assert_eq!(answer["choices"][0]["prompt_token_ids"], json!([785, 3974, 13876, 38835]));
        let batch = json!({ "prompt": ["The quick", "The"], "max_tokens": 1 });
        let (_, answer) = rig.post("/v1/completions", &batch).await;
        assert_eq!(answer["usage"]["prompt_tokens"], json!(3));
        let body = json!({ "messages": [{ "role": "user", "content": "The quick" }] });
        let (_, answer) = rig.post("/tokenize", &body).await;
        let expected = [151644, 872, 198, 785, 3974, 151645, 198, 151644, 77091, 198];
        assert_eq!(answer["tokens"], json!(expected));
    }

    #[tokio::test]
    async fn a_conversation_hits_all_that_was_computed() {
        let rig = rig().await;
        let mut messages = vec![json!({ "role": "system", "content": "Be brief. ".repeat(50) })];
        let mut computed = 0;
        for turn in 0..4 {
            messages
                .push(json!({ "role": "user", "content": format!("Question {turn}, please.") }));
            let body = json!({ "model": "alias-two", "messages": messages, "max_tokens": 83 });
            let (status, answer) = rig.post("/v1/chat/completions", &body).await;
            assert_eq!(status, 200, "{answer}");
            assert_eq!(cached(&answer), computed / 16 * 16, "turn {turn}");
            // The last token's KV is computed only in the next turn.
            computed = answer["usage"]["total_tokens"].as_u64().unwrap() - 1;
            messages.push(answer["choices"][0]["message"].clone());
        }
    }

    #[tokio::test]
    async fn a_chat_that_cannot_be_rendered_is_refused() {
        let (status, error) =
            rig().await.post("/v1/chat/completions", &json!({ "messages": 3 })).await;
        assert_eq!((status, &error["error"]["type"]), (400, &json!("BadRequestError")));
    }
}
