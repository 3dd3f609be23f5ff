//! The requests that are played: the golden ones, and an operator's own.
//!
//! The golden requests are those whose ids a real engine once recorded; here only their bodies matter.

use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use warmpath::request::Api;

/// Recorded from a real vLLM: see tests/data/README.md.
const GOLDEN: [&str; 12] = [
    include_str!("../../../tests/data/vllm/golden_chat_qwen3.jsonl"),
    include_str!("../../../tests/data/vllm/golden_chat_llama3.jsonl"),
    include_str!("../../../tests/data/vllm/golden_completions_qwen3.jsonl"),
    include_str!("../../../tests/data/vllm/golden_completions_llama3.jsonl"),
    include_str!("../../../tests/data/vllm/golden_apis_qwen3.jsonl"),
    include_str!("../../../tests/data/vllm/golden_apis_llama3.jsonl"),
    include_str!("../../../tests/data/vllm/golden_pooling_llama3.jsonl"),
    include_str!("../../../tests/data/vllm/bodies_qwen3.jsonl"),
    include_str!("../../../tests/data/vllm/bodies_llama3.jsonl"),
    include_str!("../../../tests/data/vllm/harmony.jsonl"),
    include_str!("../../../tests/data/vllm/harmony_responses.jsonl"),
    include_str!("../../../tests/data/vllm/deepseek_v4.jsonl"),
];

/// A request to be played.
pub struct Request {
    /// What it is called in the report.
    pub name: String,
    /// Where to.
    pub path: String,
    /// Its body.
    pub body: Map<String, Value>,
}

impl Request {
    /// Asks for this model in place of the one that was recorded, unless it asks for none.
    pub fn play_as(&mut self, model: &str) {
        if let Some(field) = self.body.get_mut("model") {
            *field = Value::from(model);
        }
    }

    /// The API that it goes to.
    pub fn api(&self) -> Option<Api> {
        Api::of_path(&self.path)
    }
}

/// The golden requests, each body once.
pub fn golden() -> Vec<Request> {
    let (mut requests, mut bodies) = (Vec::new(), BTreeSet::new());
    let mut names = BTreeMap::new();
    // One line holds half a surrogate pair, which no JSON reader of Rust's takes.
    let lines = GOLDEN.iter().flat_map(|text| text.lines());
    for mut line in lines.filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let mut take = |name| line.get_mut(name).map(Value::take);
        let (name, path, body) = (take("name"), take("path"), take("request"));
        let Some(Value::Object(mut body)) = body else { continue };
        body.insert("model".to_owned(), Value::from(""));
        let path = path.as_ref().and_then(Value::as_str).unwrap_or_else(|| path_of(&body));
        if !bodies.insert(format!("{path} {}", Value::Object(body.clone()))) {
            continue;
        }
        let api = Api::of_path(path).map_or("other", Api::as_str);
        let name = name.as_ref().and_then(Value::as_str).unwrap_or("plain");
        let name = format!("{api} {name}");
        let times: &mut usize = names.entry(name.clone()).or_default();
        *times += 1;
        let name = if *times == 1 { name } else { format!("{name} {times}") };
        requests.push(Request { name, path: path.to_owned(), body });
    }
    requests
}

/// Requests, one a line.
///
/// # Errors
/// Names the line that is none.
pub fn of_file(text: &str) -> Result<Vec<Request>, String> {
    let mut requests = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let name = format!("line {}", number + 1);
        let line: Value = serde_json::from_str(line).map_err(|error| format!("{name}: {error}"))?;
        requests.push(of_line(line, name)?);
    }
    Ok(requests)
}

fn of_line(line: Value, name: String) -> Result<Request, String> {
    let Value::Object(mut line) = line else { return Err(format!("{name}: not an object")) };
    let name = match line.get("name") {
        Some(Value::String(given)) if line.contains_key("body") => given.clone(),
        _ => name,
    };
    let body = match line.remove("body") {
        Some(Value::Object(body)) => body,
        Some(_) => return Err(format!("{name}: body: not an object")),
        None => return Ok(Request { name, path: path_of(&line).to_owned(), body: line }),
    };
    let path = match line.remove("path") {
        Some(Value::String(path)) => path,
        Some(_) => return Err(format!("{name}: path: not a text")),
        None => path_of(&body).to_owned(),
    };
    match Api::of_path(&path) {
        Some(_) => Ok(Request { name, path, body }),
        None => Err(format!("{name}: path: {path} carries no prompt")),
    }
}

/// Where a body belongs that does not say it.
fn path_of(body: &Map<String, Value>) -> &'static str {
    let paths = [
        ("messages", "/v1/chat/completions"),
        ("input", "/v1/responses"),
        ("token_ids", "/inference/v1/generate"),
    ];
    let path = paths.into_iter().find(|(field, _)| body.contains_key(*field));
    path.map_or("/v1/completions", |(_, path)| path)
}

/// The body as it is sent to an API that says what it made of the prompt: one token is asked for, and the ids.
pub fn asking(api: Api, body: &Map<String, Value>) -> Map<String, Value> {
    let mut body = body.clone();
    let limits = ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"];
    for name in limits.iter().chain(&["stream", "stream_options", "n", "best_of"]) {
        body.remove(*name);
    }
    match api {
        Api::Chat | Api::Completions => {
            body.insert("max_tokens".to_owned(), json!(1));
            body.insert("return_token_ids".to_owned(), json!(true));
        }
        // Some engines refuse fewer than 16.
        Api::Responses => drop(body.insert("max_output_tokens".to_owned(), json!(16))),
        Api::Messages => drop(body.insert("max_tokens".to_owned(), json!(1))),
        Api::Generate => {
            body.insert("sampling_params".to_owned(), json!({"max_tokens": 1}));
            body.insert("return_token_ids".to_owned(), json!(true));
        }
        _ => (),
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_requests_are_played_once_each() {
        let requests = golden();
        assert!(requests.len() > 500, "{}", requests.len());
        assert!(requests.iter().all(|request| request.body.contains_key("model")));
        let names: BTreeSet<_> = requests.iter().map(|request| &request.name).collect();
        assert_eq!(names.len(), requests.len(), "two have one name");
        let paths: BTreeSet<_> = requests.iter().map(|request| request.path.as_str()).collect();
        for path in [
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/embeddings",
        ] {
            assert!(paths.contains(path), "{path}");
        }
    }

    #[test]
    fn a_line_is_a_body_or_says_where_it_goes() {
        #[track_caller]
        fn check(line: &str, name: &str, path: &str) {
            let requests = of_file(&format!("\n{line}\n")).expect("requests");
            let said: Vec<_> =
                requests.iter().map(|r| (r.name.as_str(), r.path.as_str())).collect();
            assert_eq!(said, [(name, path)]);
        }
        check(r#"{"messages": []}"#, "line 2", "/v1/chat/completions");
        check(r#"{"prompt": "a"}"#, "line 2", "/v1/completions");
        check(r#"{"input": "a"}"#, "line 2", "/v1/responses");
        check(r#"{"token_ids": [1]}"#, "line 2", "/inference/v1/generate");
        check(r#"{"name": "mine", "path": "/v1/messages", "body": {}}"#, "mine", "/v1/messages");
    }

    #[test]
    fn a_wrong_line_is_named() {
        #[track_caller]
        fn check(text: &str, expected: &str) {
            assert_eq!(of_file(text).err().as_deref(), Some(expected));
        }
        check("{}\n[]", "line 2: not an object");
        check(r#"{"body": 1}"#, "line 1: body: not an object");
        check(r#"{"path": "/health", "body": {}}"#, "line 1: path: /health carries no prompt");
    }

    #[test]
    fn one_token_is_asked_for() {
        #[track_caller]
        fn check(api: Api, body: Value, expected: Value) {
            let Value::Object(body) = body else { panic!("an object") };
            assert_eq!(Value::Object(asking(api, &body)), expected);
        }
        check(
            Api::Chat,
            json!({"messages": [], "n": 3, "stream": true, "max_completion_tokens": 9}),
            json!({"messages": [], "max_tokens": 1, "return_token_ids": true}),
        );
        check(
            Api::Responses,
            json!({"input": "", "stream": true}),
            json!({"input": "", "max_output_tokens": 16}),
        );
        check(
            Api::Generate,
            json!({"token_ids": [1], "sampling_params": {"n": 2}}),
            json!({"token_ids": [1], "sampling_params": {"max_tokens": 1}, "return_token_ids": true}),
        );
        check(Api::Embeddings, json!({"input": ""}), json!({"input": ""}));
    }
}
