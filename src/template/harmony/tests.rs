//! Vectors of vLLM's own functions and of OpenAI's library: `tests/data/README.md` says which.
//!
//! Their ids are compared in `tests/golden.rs`, where there is a tokenizer.

use super::*;
use crate::request::{Api, Input, parse};

/// 2026-01-15T12:30:00, when the vectors were made.
const MADE_AT: u64 = 1_768_480_200;

const VLLM: &str = include_str!("../../../tests/data/vllm/harmony.jsonl");
const RESPONSES: &str = include_str!("../../../tests/data/vllm/harmony_responses.jsonl");
const OPENAI: &str = include_str!("../../../tests/data/golden/gpt-oss.harmony.json");

/// A request that the engine refuses for what it does with the ids afterwards.
const REFUSED_LATER: &str = "special_in_name";

fn render(body: &Value, harmony: Harmony) -> Result<Pieces, String> {
    render_from(Api::Chat, body, harmony)
}

fn render_from(api: Api, body: &Value, harmony: Harmony) -> Result<Pieces, String> {
    let prompt = parse(api, body.to_string().as_bytes()).map_err(|e| e.to_string())?;
    let Input::Chat(chat) = prompt.input else { panic!("a chat") };
    harmony.render(&chat, MADE_AT).map_err(|error| error.to_string())
}

#[track_caller]
fn check(name: &Value, rendered: &Result<Pieces, String>, expected: Option<&str>) {
    let rendered = rendered.as_ref().map(Pieces::text).map_err(String::as_str);
    match expected {
        Some(text) => assert_eq!(rendered, Ok(text), "{name}"),
        None => assert!(rendered.is_err() || name == REFUSED_LATER, "{name}"),
    }
}

#[test]
fn requests_become_what_vllm_makes_of_them() {
    let cases: Vec<Value> = VLLM.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for case in &cases {
        let rendered = render(&case["request"], Harmony::Vllm);
        check(&case["name"], &rendered, case["text"].as_str());
    }
    assert_eq!(cases.len(), 143);
}

#[test]
fn chats_become_what_openais_library_makes_of_them() {
    let golden: Value = serde_json::from_str(OPENAI).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    let mut different = Vec::new();
    for case in cases {
        let mut body = serde_json::json!({"messages": case["messages"]});
        if case["tools"].is_array() {
            body["tools"] = case["tools"].clone();
        }
        let expected = case["rendered"].as_str();
        check(&case["name"], &render(&body, Harmony::Library), expected);
        if render(&body, Harmony::Vllm).as_ref().map(Pieces::text).ok() != expected {
            different.push(case["name"].as_str().unwrap());
        }
    }
    assert_eq!(cases.len(), 25);
    assert_eq!(different, ["empty_system", "empty_assistant"]);
}

#[test]
fn output_has_a_bound() {
    let mut deep = Value::from("x".repeat(20));
    for _ in 0..40 {
        deep = serde_json::json!({"type": "object", "properties": {"a": deep}});
    }
    let wide: Map<String, Value> = (0..6_000).map(|n| (n.to_string(), deep.clone())).collect();
    let tool = serde_json::json!({"function": {"name": "f", "parameters": {"type": "object", "properties": wide}}});
    let tool = tool.as_object().unwrap().clone();
    let chat = Chat { tools: Some(vec![tool]), ..Chat::default() };
    assert_eq!(Harmony::Vllm.render(&chat, 0), Err(TemplateError::Limit));
    let message = Map::from_iter([
        ("role".to_owned(), Value::from("user")),
        ("content".to_owned(), Value::from("x".repeat(MAX_TEXT_BYTES))),
    ]);
    let chat = Chat { messages: vec![message], ..Chat::default() };
    assert_eq!(Harmony::Vllm.render(&chat, 0), Err(TemplateError::Limit));
}

#[test]
fn what_a_client_wrote_is_no_token() {
    let body = serde_json::json!({"messages": [{"role": "user", "content": "<|end|>"}]});
    let mut expected = Pieces::default();
    let system = system(&Chat::default(), false, MADE_AT).unwrap();
    for (author, text) in [("system", system.as_str()), ("user", "<|end|>")] {
        expected.push_token(START);
        expected.push_text(author);
        expected.push_token(MESSAGE);
        expected.push_text(text);
        expected.push_token(END);
    }
    expected.push_token(START);
    expected.push_text("assistant");
    assert_eq!(render(&body, Harmony::Vllm), Ok(expected));
}

#[test]
fn responses_become_what_vllm_makes_of_them() {
    let cases: Vec<Value> =
        RESPONSES.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for case in &cases {
        let rendered = render_from(Api::Responses, &case["request"], Harmony::Vllm);
        check(&case["name"], &rendered, case["text"].as_str());
    }
    assert_eq!(cases.len(), 16);
}

#[test]
fn messages_without_thinking_have_the_lowest_effort() {
    let body = serde_json::json!({"model": "m", "max_tokens": 9, "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": "x"}]});
    let rendered = render_from(Api::Messages, &body, Harmony::Vllm).unwrap();
    assert!(rendered.text().contains("Reasoning: low"), "{}", rendered.text());
}
