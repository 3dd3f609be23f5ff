//! The requests that are played: the golden ones, and an operator's own.
//!
//! The golden requests are those whose ids a real engine once recorded; here only their bodies matter.

use serde_json::{Map, Value, json};
use warmpath::request::Api;

/// Recorded from a real vLLM: see tests/data/README.md.
const GOLDEN: [&str; 4] = [
    include_str!("../../../tests/data/vllm/golden_chat_qwen3.jsonl"),
    include_str!("../../../tests/data/vllm/golden_chat_llama3.jsonl"),
    include_str!("../../../tests/data/vllm/golden_completions_qwen3.jsonl"),
    include_str!("../../../tests/data/vllm/golden_completions_llama3.jsonl"),
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
    let mut requests: Vec<Request> = Vec::new();
    for text in GOLDEN {
        // One line holds half a surrogate pair, which no JSON reader of Rust's takes.
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        for mut line in lines {
            let mut take = |name| line.get_mut(name).map(Value::take);
            let (name, body) = (take("name"), take("request"));
            let Some(Value::Object(mut body)) = body else { continue };
            body.insert("model".to_owned(), Value::from(""));
            let path = path_of(&body);
            if requests.iter().all(|known| known.body != body) {
                requests.push(Request {
                    name: name.as_ref().and_then(Value::as_str).unwrap_or("golden").to_owned(),
                    path: path.to_owned(),
                    body,
                });
            }
        }
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
    if body.contains_key("messages") { "/v1/chat/completions" } else { "/v1/completions" }
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
        assert!(requests.len() > 40, "{}", requests.len());
        assert!(requests.iter().all(|request| request.body.contains_key("model")));
        assert!(requests.iter().any(|request| request.path == "/v1/completions"));
    }

    #[test]
    fn a_line_is_a_body_or_says_where_it_goes() {
        let text = "{\"messages\": []}\n\n{\"prompt\": \"a\"}\n\
                    {\"name\": \"mine\", \"path\": \"/v1/messages\", \"body\": {\"messages\": []}}\n";
        let requests = of_file(text).expect("requests");
        let said: Vec<_> =
            requests.iter().map(|request| (request.name.as_str(), request.path.as_str())).collect();
        assert_eq!(
            said,
            [
                ("line 1", "/v1/chat/completions"),
                ("line 3", "/v1/completions"),
                ("mine", "/v1/messages")
            ]
        );
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
        let body = json!({"messages": [], "n": 3, "stream": true, "max_completion_tokens": 9});
        let Value::Object(body) = body else { panic!("an object") };
        let expected = json!({"messages": [], "max_tokens": 1, "return_token_ids": true});
        assert_eq!(Value::Object(asking(Api::Chat, &body)), expected);
    }
}
