//! A live engine, asked what it makes of a prompt.
//!
//! It does not compare: it says what the engine said.

use crate::requests::{Request, asking};
use serde_json::{Map, Value};
use std::time::Duration;
use ureq::Agent;
use warmpath::request::Api;

/// A prompt that has not been read after this long is not worth waiting for: engines on a CPU take seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// What an engine said of a prompt.
pub enum Truth {
    /// All ids, and how they were learned.
    Ids(Vec<u32>, &'static str),
    /// Only how many there are.
    Count(u32),
    /// It took no part in it.
    Refused(String),
}

/// See the module.
pub struct Engine {
    agent: Agent,
    url: String,
    headers: Vec<(String, String)>,
}

impl Engine {
    /// An engine behind a URL, which is not asked yet.
    ///
    /// # Errors
    /// When the URL or a header is none.
    pub fn new(url: &str, headers: &[String]) -> Result<Self, String> {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(format!("{url}: expected http://host:port or https://host:port"));
        }
        let header = |header: &String| match header.split_once(':') {
            Some((name, value)) => Ok((name.trim().to_owned(), value.trim().to_owned())),
            None => Err(format!("--header {header}: expected NAME: VALUE")),
        };
        let headers = headers.iter().map(header).collect::<Result<_, _>>()?;
        let config = Agent::config_builder();
        let config = config.timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
        let url = url.trim_end_matches('/').to_owned();
        Ok(Self { agent: config.into(), url, headers })
    }

    /// Whether it is there at all, so that fifty requests do not each find out.
    ///
    /// # Errors
    /// When nothing answers.
    pub fn check(&self) -> Result<(), String> {
        let url = format!("{}/v1/models", self.url);
        let mut request = self.agent.get(&url);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let response = request.call().map_err(|error| format!("{url}: {error}"))?;
        match response.status().as_u16() {
            200 => Ok(()),
            status => Err(format!("{url}: answered {status}")),
        }
    }

    /// Asks for the prompt's ids: the API itself where it says them, `/tokenize` where it refuses.
    pub fn truth(&self, api: Api, request: &Request) -> Truth {
        let refusal = match self.post(&request.path, &asking(api, &request.body)) {
            Ok(answer) => match of_answer(&answer) {
                Some(truth) => return truth,
                None => "the answer says neither ids nor a count".to_owned(),
            },
            Err(refusal) => refusal,
        };
        if !matches!(api, Api::Chat | Api::Completions) {
            return Truth::Refused(refusal);
        }
        match self.post("/tokenize", &request.body) {
            Ok(answer) => match ids(answer.get("tokens")) {
                Some(ids) => Truth::Ids(ids, "/tokenize"),
                None => Truth::Refused(refusal),
            },
            Err(_) => Truth::Refused(refusal),
        }
    }

    fn post(&self, path: &str, body: &Map<String, Value>) -> Result<Value, String> {
        let body = Value::Object(body.clone()).to_string();
        let mut request = self.agent.post(format!("{}{path}", self.url));
        request = request.header("content-type", "application/json");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let mut response = request.send(body.as_bytes()).map_err(|error| error.to_string())?;
        let status = response.status().as_u16();
        let text = response.body_mut().read_to_string().map_err(|error| error.to_string())?;
        if status == 200 {
            return serde_json::from_str(&text).map_err(|error| error.to_string());
        }
        let line: String =
            text.chars().take(160).map(|c| if c == '\n' { ' ' } else { c }).collect();
        Err(format!("{status}: {line}"))
    }
}

/// What an answer says of its prompt.
fn of_answer(answer: &Value) -> Option<Truth> {
    let places = ["/prompt_token_ids", "/choices/0/prompt_token_ids"];
    if let Some(ids) = places.iter().find_map(|place| ids(answer.pointer(place))) {
        return Some(Truth::Ids(ids, "return_token_ids"));
    }
    let count = |name| answer.pointer(name).and_then(Value::as_u64);
    let cached = |name| count(name).unwrap_or_default();
    let tokens = match count("/usage/prompt_tokens") {
        Some(tokens) => tokens,
        // What was read from the cache or written to it is not in there, where the answer is Anthropic's.
        None => count("/usage/input_tokens")?
            .saturating_add(cached("/usage/cache_read_input_tokens"))
            .saturating_add(cached("/usage/cache_creation_input_tokens")),
    };
    u32::try_from(tokens).ok().map(Truth::Count)
}

fn ids(value: Option<&Value>) -> Option<Vec<u32>> {
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    value?.as_array()?.iter().map(id).collect()
}
