//! Which replica a model's requests go to, and who is told why.

use crate::client::Ask;
use crate::harness::{ALIAS, Plan, Rig, has_header, with_envoy};
use crate::prompts::{chat, words};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use warmpath::mock::Handle;

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
fn tenants_share_nothing_sessions_stay_and_text_before_an_image_is_found() {
    with_envoy(
        "tenants_share_nothing_sessions_stay_and_text_before_an_image_is_found",
        |files| async move {
            let plan = Plan::new(1, 2).plugin(|plugin| {
                plugin["explain"] = json!({"request_header": "x-why", "secret": "open"});
                plugin["tenant_header"] = json!("X-Tenant");
                plugin["session_header"] = json!("X-Session");
            });
            let rig = Rig::start(&files, plan).await;
            let mut body = chat(1, 20, 1);
            // A template that takes texts has placeholders in front of a message's text: what counts stands before it.
            let question = body["messages"][0].take();
            body["messages"] = json!([{"role": "system", "content": words(2, 200)}, question]);
            let why = async |body: &Value, tenant: Option<&str>| {
                let ask = Ask::chat(body).header("x-why", "open");
                let ask =
                    tenant.into_iter().fold(ask, |ask, tenant| ask.header("x-tenant", tenant));
                let answer = rig.send(&ask).await;
                rig.settle().await;
                answer.header("x-warmpath-explain").map(str::to_owned).expect("an explanation")
            };
            for tenant in [Some("a"), Some("b"), None] {
                assert!(why(&body, tenant).await.starts_with("reason=cold, "), "{tenant:?}");
                assert!(why(&body, tenant).await.starts_with("reason=prefix, "), "{tenant:?}");
            }
            let mut image = body.clone();
            let last =
                image["messages"].as_array_mut().and_then(|list| list.last_mut()).expect("one");
            last["content"] = json!([
                {"type": "text", "text": last["content"]},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            ]);
            let told = why(&image, Some("a")).await;
            assert!(
                told.starts_with("reason=prefix, ") && told.contains(", known_tokens="),
                "{told}"
            );
            let scrape = rig.scrape().await;
            let partial = scrape.sum("warmpath_partial_prompts_total", &[("kind", "media")]);
            assert_eq!(partial, 1.0);
            assert_sessions_stay(&rig).await;
            rig.finish().await;
        },
    );
}

/// Who answers so many requests whose prompts only the engine has.
async fn answering(rig: &Rig, count: usize, ask: impl Fn() -> Ask) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for _ in 0..count {
        let answer = rig.send(&ask().header("x-why", "open")).await;
        assert!(answer.header("x-warmpath-explain").is_some(), "{answer:?}");
        names.insert(answer.replica().to_owned());
    }
    names
}

/// Prompts that cannot be matched go by the name of their session, if there is one.
async fn assert_sessions_stay(rig: &Rig) {
    let stored = |more: Value| {
        let mut body = json!({"model": "qwen3", "input": "x", "previous_response_id": "resp_1"});
        body["prompt_cache_key"] = more;
        Ask::post("/v1/responses", body.to_string())
    };
    let mut homes = BTreeSet::new();
    for session in 0..8 {
        let by_body = answering(rig, 10, || stored(json!(format!("body {session}")))).await;
        let name = format!("header {session}");
        let by_header =
            answering(rig, 10, || stored(json!("another")).header("x-session", name.clone())).await;
        assert_eq!((by_body.len(), by_header.len()), (1, 1));
        homes.extend(by_body.into_iter().chain(by_header));
    }
    assert_eq!(homes.len(), 2);
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
