//! Requests that are not what they should be, and those who ask why.

use crate::client::{Answer, Ask, Connection};
use crate::harness::{ALIAS, Plan, Rig, has_header, with_envoy};
use crate::prompts::{chat, words};
use crate::stats::reasons_between;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use std::io::Write as _;
use warmpath::mock::Handle;

const CHAT: &str = "/v1/chat/completions";

/// Above the filter's limit in these tests, and of no model that a replica has to think about.
fn large_body() -> Vec<u8> {
    json!({"model": "nobody's", "prompt": "x ".repeat(80_000)}).to_string().into_bytes()
}

fn gzip(body: &Value) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(body.to_string().as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// A name, a request, and the reason it must be counted under.
fn odd_requests() -> Vec<(&'static str, Ask, &'static str)> {
    let messages_null = json!({"model": "qwen3", "messages": null}).to_string();
    let unknown = json!({"model": "gpt-9", "messages": [{"role": "user", "content": "hi"}]});
    let mut plain = Ask::post(CHAT, chat(1, 40, 1).to_string());
    plain.headers.clear();
    vec![
        ("no body", Ask::post(CHAT, ""), "no_body"),
        ("an empty body", Ask::post(CHAT, "").chunked(10), "invalid_json"),
        ("no JSON", Ask::post(CHAT, "{\"model\": \"qwen3\", "), "invalid_json"),
        ("bytes", Ask::post(CHAT, [0xff, 0, 0xfe, 7]), "invalid_json"),
        ("an array", Ask::post(CHAT, "[1, 2]"), "invalid_json"),
        ("null messages", Ask::post(CHAT, messages_null), "no_prompt"),
        ("another model", Ask::chat(&unknown), "unknown_model"),
        (
            "gzip",
            Ask::post(CHAT, gzip(&chat(2, 40, 1))).header("content-encoding", "gzip"),
            "content_encoding",
        ),
        ("a GET", Ask::get("/v1/models"), "not_inference"),
        ("a GET of a prompt's path", Ask::get(CHAT), "not_inference"),
        ("another path", Ask::post("/v1/embeddings", "{\"input\": \"hi\"}"), "not_inference"),
        (
            "another type",
            Ask::post(CHAT, "a=b").header("content-type", "text/plain"),
            "not_inference",
        ),
        ("a large body", Ask::post("/v1/completions", large_body()), "body_too_large"),
        (
            "a large body in pieces",
            Ask::post("/v1/completions", large_body()).chunked(8_000),
            "body_too_large",
        ),
        ("no type", plain, "cold"),
        (
            "no UTF-8 in a header",
            Ask::chat(&chat(3, 40, 1)).header("x-name", b"\xe9t\xe9 \xff"),
            "cold",
        ),
        (
            "no UTF-8 in a type",
            Ask::chat(&chat(4, 40, 1)).header("content-type", b"application/json; a=\xff"),
            "cold",
        ),
        ("a query", Ask { path: format!("{CHAT}?a=b"), ..Ask::chat(&chat(5, 40, 1)) }, "cold"),
        ("pieces", Ask::chat(&chat(6, 2_000, 1)).chunked(1_000), "cold"),
    ]
}

/// Sends it through Envoy and straight to the same replica, and compares.
async fn check(rig: &Rig, connection: &mut Connection, (name, ask, reason): (&str, Ask, &str)) {
    let before = rig.scrape().await;
    let seen_before = rig.received().len();
    let answer = connection.send(&ask).await;
    let reasons = reasons_between(&before, &rig.scrape().await);
    assert_eq!(reasons.into_iter().collect::<Vec<_>>(), [(reason.to_owned(), 1)], "{name}");

    let received = rig.received();
    assert_eq!(received.len(), seen_before + 1, "{name}");
    let replica =
        rig.replicas.iter().find(|handle| handle.replica.name() == answer.replica()).unwrap();
    let arrived = |seen: &&warmpath::mock::replica::Seen| {
        seen.replica == answer.replica()
            && seen.body_sha256 == ask.sha256()
            && seen.path == ask.path
    };
    let arrived = received.iter().filter(arrived).count();
    assert!(arrived >= 1, "{name}: the replica got another body, {received:?}");

    let direct = Connection::open(replica.address).await.send(&ask).await;
    check_same(name, &answer, &direct);
}

#[track_caller]
fn check_same(name: &str, answer: &Answer, direct: &Answer) {
    assert_eq!(answer.status, direct.status, "{name}: {answer:?}");
    assert_eq!(answer.header("content-type"), direct.header("content-type"), "{name}");
    if answer.status == 200 {
        // Answers have names and random words; their shape is the same.
        let keys = |answer: &Answer| {
            let documents = answer.documents();
            let keys =
                documents.iter().filter_map(Value::as_object).flat_map(|o| o.keys().cloned());
            keys.collect::<Vec<String>>()
        };
        assert_eq!(keys(answer), keys(direct), "{name}");
    } else {
        assert_eq!(answer.body, direct.body, "{name}");
    }
}

#[test]
fn odd_requests_pass_unchanged_and_are_counted_by_their_reason() {
    with_envoy("odd_requests_pass_unchanged_and_are_counted_by_their_reason", |files| async move {
        let plan = Plan::new(1, 2).plugin(|plugin| plugin["max_body_bytes"] = json!(131_072));
        let rig = Rig::start(&files, plan).await;
        let mut http1 = rig.connect().await;
        for case in odd_requests() {
            check(&rig, &mut http1, case).await;
        }
        let mut http2 = Connection::open_http2(rig.address).await;
        let trailers = Ask::chat(&chat(20, 60, 1)).with_trailers();
        check(&rig, &mut http2, ("trailers", trailers, "cold")).await;
        rig.settle().await;
        let repeated = Ask::chat(&chat(20, 60, 1)).with_trailers();
        check(&rig, &mut http2, ("trailers again", repeated, "prefix")).await;
        check(&rig, &mut http2, ("HTTP/2", Ask::chat(&chat(21, 60, 1)), "cold")).await;
        check(&rig, &mut http2, ("HTTP/2, no body", Ask::post(CHAT, ""), "no_body")).await;
        rig.finish().await;
    });
}

#[test]
fn each_model_goes_to_the_replicas_that_serve_it() {
    with_envoy("each_model_goes_to_the_replicas_that_serve_it", |files| async move {
        let mut plan = Plan::new(1, 4).plugin(|plugin| {
            let mut other = plugin["models"][0].clone();
            other["name"] = json!("other");
            other["aliases"] = json!([]);
            plugin["models"].as_array_mut().unwrap().push(other);
        });
        for replica in &mut plan.replicas[2..] {
            replica.served_names = vec!["other".to_owned()];
        }
        let rig = Rig::start(&files, plan).await;
        rig.eventually("every replica's models are known", |scrape| {
            let asked = [("target", "models"), ("result", "ok")];
            scrape.sum("warmpath_polls_total", &asked) >= 4.0
        })
        .await;
        let mut tokens = 0;
        for seed in 0..12 {
            for (model, replicas) in [(ALIAS, &rig.replicas[..2]), ("other", &rig.replicas[2..])] {
                let mut body = chat(seed, 60, 1);
                body["model"] = json!(model);
                let answer = rig.send(&Ask::chat(&body)).await;
                assert_eq!(answer.status, 200);
                let served = |handle: &Handle| handle.replica.name() == answer.replica();
                assert!(replicas.iter().any(served), "{model} went to {}", answer.replica());
                if model == "other" {
                    tokens += answer.usage().prompt_tokens;
                }
            }
        }
        let scrape = rig.scrape().await;
        // The same words under another model share nothing.
        assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "cold")]), 24.0);
        let counted = scrape.sum("warmpath_prompt_tokens_total", &[("model", "other")]);
        assert_eq!(counted, tokens as f64);
        rig.finish().await;
    });
}

#[test]
fn why_is_told_only_to_who_knows_the_secret() {
    with_envoy("why_is_told_only_to_who_knows_the_secret", |files| async move {
        let plan = Plan::new(1, 2).plugin(|plugin| {
            plugin["explain"] = json!({"request_header": "X-Why", "secret": "open sesame"});
        });
        let rig = Rig::start(&files, plan).await;
        let ask = Ask::chat(&chat(1, 200, 1));
        let explained = async |ask: Ask| {
            let answer = rig.send(&ask).await;
            assert_eq!(answer.status, 200);
            answer.header("x-warmpath-explain").map(str::to_owned)
        };
        assert_eq!(explained(ask.clone()).await, None);
        assert_eq!(explained(ask.clone().header("x-why", "open")).await, None);
        assert_eq!(explained(ask.clone().header("x-why", b"\xff")).await, None);
        assert_eq!(explained(ask.clone().header("x-warmpath-explain", "open sesame")).await, None);
        assert_eq!(explained(Ask::get("/v1/models").header("x-why", "open sesame")).await, None);
        let why =
            explained(ask.clone().header("x-why", "open sesame")).await.expect("an explanation");
        rig.settle().await;
        let usage = rig.send(&ask).await.usage();
        assert!(
            why.starts_with(&format!("reason=prefix, prompt_tokens={}; ", usage.prompt_tokens)),
            "{why}"
        );
        assert!(why.contains(&format!("overlap_tokens={}", usage.cached_tokens)), "{why}");
        let received = rig.received();
        assert_eq!(received.len(), 7);
        assert!(received.iter().all(|seen| !has_header(seen, "x-why")), "{received:?}");
        rig.finish().await;
    });
}

#[test]
fn nobody_is_told_why_by_the_shipped_configuration() {
    with_envoy("nobody_is_told_why_by_the_shipped_configuration", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 1)).await;
        let ask = Ask::post(
            "/v1/completions",
            json!({"prompt": words(1, 50), "max_tokens": 1}).to_string(),
        );
        for value in ["", "1", "true"] {
            let answer = rig.send(&ask.clone().header("x-warmpath-explain", value)).await;
            assert_eq!((answer.status, answer.header("x-warmpath-explain")), (200, None));
        }
        rig.finish().await;
    });
}
