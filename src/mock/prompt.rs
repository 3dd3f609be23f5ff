//! A body, read into what the mock engine needs: prompts as token ids, and how to answer.
//!
//! Text becomes tokens by the crate's own tokenizer and template, which are checked against real
//! engines elsewhere; [`super::replica::Skew`] is for tests that need them to be wrong.

use super::replica::{Replica, unix_time};
use super::speech::{encode, numbered_tokens};
use crate::request::{self, Api};
use serde_json::{Map, Value, json};

/// A request, understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Wish {
    /// Which API.
    pub api: Api,
    /// The name it asked for, or the first served one.
    pub model: String,
    /// One or more prompts.
    pub prompts: Vec<Vec<u32>>,
    /// Answers to each prompt.
    pub answers: usize,
    /// Tokens of each answer.
    pub max_tokens: usize,
    /// Whether to stream.
    pub stream: bool,
    /// `stream_options.include_usage`
    pub include_usage: bool,
    /// `stream_options.continuous_usage_stats`
    pub continuous_usage: bool,
    /// `return_token_ids`
    pub return_token_ids: bool,
    /// `cache_salt`
    pub salt: Option<String>,
    /// False for `prompt_logprobs` and for `echo` with `logprobs`.
    pub reads_cache: bool,
}

/// An error in the engine's shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status, also in the body.
    pub status: u16,
    /// Such as `BadRequestError`.
    pub kind: &'static str,
    /// For people.
    pub message: String,
    /// The field at fault.
    pub param: Option<&'static str>,
}

impl ApiError {
    /// Status 400 for a field.
    pub fn bad_request(param: &'static str, message: impl Into<String>) -> Self {
        Self { status: 400, kind: "BadRequestError", message: message.into(), param: Some(param) }
    }

    /// A body that fails before the engine looks at its fields.
    pub fn invalid(param: Option<&'static str>, message: impl std::fmt::Display) -> Self {
        let message = format!("1 validation error:\n  {message}");
        Self { status: 400, kind: "Bad Request", message, param }
    }

    /// An error of the server's own.
    pub fn internal(status: u16, message: &str) -> Self {
        Self { status, kind: "InternalServerError", message: message.to_owned(), param: None }
    }

    /// The body of the response.
    pub fn json(&self) -> Value {
        let Self { status, kind, message, param } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": status } })
    }
}

/// Reads a body as an object.
///
/// # Errors
/// When it is none.
pub fn object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(body)) => Ok(body),
        Ok(_) => Err(ApiError::invalid(None, "Input should be a valid dictionary")),
        Err(error) => {
            Err(ApiError::invalid(Some("body"), format_args!("JSON decode error: {error}")))
        }
    }
}

/// Reads a prompt's body.
///
/// # Errors
/// As the engine would answer.
pub fn read(replica: &Replica, api: Api, bytes: &[u8]) -> Result<Wish, ApiError> {
    let body = object(bytes)?;
    let model = served_name(replica, &body)?;
    let salt = salt(&body)?;
    let mut prompts = prompts(replica, api, &body, bytes)?;
    if let Some(skew) = replica.skew() {
        prompts = prompts.into_iter().map(|prompt| skew.apply(prompt)).collect();
    }
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let max_tokens = max_tokens(replica, api, &body, longest)?;
    let flag = |value: Option<&Value>| value.and_then(Value::as_bool).unwrap_or(false);
    let present = |key: &str| body.get(key).is_some_and(|value| !value.is_null());
    let option = |key: &str| flag(body.get("stream_options").and_then(|options| options.get(key)));
    let echoes_logprobs = flag(body.get("echo")) && present("logprobs");
    Ok(Wish {
        api,
        model,
        prompts,
        answers: number(&body, "n").unwrap_or(1).clamp(1, 64),
        max_tokens,
        stream: flag(body.get("stream")),
        include_usage: option("include_usage"),
        continuous_usage: option("continuous_usage_stats"),
        return_token_ids: flag(body.get("return_token_ids")),
        salt,
        reads_cache: !(present("prompt_logprobs") || echoes_logprobs),
    })
}

/// The token ids of `/tokenize`, which takes the bodies of both APIs.
///
/// # Errors
/// As the engine would answer.
pub fn tokenize(replica: &Replica, bytes: &[u8]) -> Result<Vec<u32>, ApiError> {
    let body = object(bytes)?;
    let api = if body.contains_key("messages") { Api::Chat } else { Api::Completions };
    let prompt = prompts(replica, api, &body, bytes)?.into_iter().next().unwrap_or_default();
    Ok(replica.skew().map_or(prompt.clone(), |skew| skew.apply(prompt)))
}

fn served_name(replica: &Replica, body: &Map<String, Value>) -> Result<String, ApiError> {
    let config = &replica.config;
    let Some(wanted) = body.get("model").and_then(Value::as_str) else {
        return Ok(replica.identity.model_name.clone());
    };
    let adapters = config.loras.iter().map(|lora| &lora.name);
    if config.served_names.iter().chain(adapters).any(|name| name == wanted) {
        return Ok(wanted.to_owned());
    }
    Err(ApiError {
        status: 404,
        kind: "NotFoundError",
        message: format!(
            "The model `{wanted}` does not exist. Valid aliases: {}.",
            config.served_names.join(", ")
        ),
        param: Some("model"),
    })
}

fn salt(body: &Map<String, Value>) -> Result<Option<String>, ApiError> {
    match body.get("cache_salt") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(salt))
            if !salt.is_empty()
                && salt.chars().count() <= 128
                && !salt.contains(['@', '/', '\\', '\0']) =>
        {
            Ok(Some(salt.clone()))
        }
        Some(_) => Err(ApiError::invalid(
            Some("cache_salt"),
            "Parameter 'cache_salt' must be a non-empty string of at most 128 plain characters",
        )),
    }
}

fn max_tokens(
    replica: &Replica,
    api: Api,
    body: &Map<String, Value>,
    prompt: usize,
) -> Result<usize, ApiError> {
    let limit = replica.config.max_model_len;
    // Completions default to 16 in the engine, too.
    let default = if api == Api::Chat { replica.config.default_max_tokens } else { 16 };
    let default = if answers(api) { default } else { 1 };
    let names = ["max_completion_tokens", "max_output_tokens", "max_tokens"];
    let sampling = body.get("sampling_params").and_then(Value::as_object);
    let wanted = names.into_iter().find_map(|name| number(sampling.unwrap_or(body), name));
    if let Some(wanted) = wanted.filter(|wanted| *wanted > limit) {
        return Err(ApiError::bad_request(
            "max_tokens",
            format!(
                "max_tokens={wanted} cannot be greater than max_model_len={limit}. \
                 Please request fewer output tokens. (parameter=max_tokens, value={wanted})"
            ),
        ));
    }
    let output = wanted.unwrap_or(default.min(limit.saturating_sub(prompt))).max(1);
    if prompt == 0 {
        return Err(ApiError::bad_request("prompt", "The prompt has no tokens."));
    }
    if prompt + output > limit {
        return Err(ApiError::bad_request(
            "input_tokens",
            format!(
                "This model's maximum context length is {limit} tokens. However, you requested \
                 {output} output tokens and your prompt contains {prompt} input tokens. \
                 (parameter=input_tokens, value={prompt})"
            ),
        ));
    }
    Ok(output)
}

/// Whether the API answers a prompt at all.
fn answers(api: Api) -> bool {
    use Api::{Chat, ChatBatch, Completions, Generate, Messages, Responses};
    matches!(api, Chat | ChatBatch | Completions | Generate | Messages | Responses)
}

fn number(body: &Map<String, Value>, key: &str) -> Option<usize> {
    body.get(key).and_then(Value::as_u64).and_then(|value| usize::try_from(value).ok())
}

fn prompts(
    replica: &Replica,
    api: Api,
    body: &Map<String, Value>,
    bytes: &[u8],
) -> Result<Vec<Vec<u32>>, ApiError> {
    match api {
        Api::Chat => return chat(replica, body, bytes).map(|prompt| vec![prompt]),
        Api::Completions => {}
        _ => return first(replica, api, bytes).map(|prompt| vec![prompt]),
    }
    let missing =
        || ApiError::bad_request("prompt", "prompt: expected text, token ids or a list of either");
    let adds_special_tokens =
        body.get("add_special_tokens").and_then(Value::as_bool).unwrap_or(true);
    let one = |prompt: &Value| match prompt {
        Value::String(text) => text_tokens(replica, text, adds_special_tokens),
        Value::Array(ids) => token_ids(ids).ok_or_else(missing),
        _ => Err(missing()),
    };
    match body.get("prompt") {
        Some(Value::Array(list)) if !list.first().is_none_or(Value::is_number) => {
            list.iter().map(one).collect()
        }
        Some(prompt) => one(prompt).map(|prompt| vec![prompt]),
        None => Err(missing()),
    }
}

/// The first prompt of any API, which only a mock with a model can read.
fn first(replica: &Replica, api: Api, bytes: &[u8]) -> Result<Vec<u32>, ApiError> {
    let refuse = |error: String| ApiError::bad_request("input", error);
    let model = replica.config.model.as_ref().ok_or_else(|| refuse("no model".to_owned()))?;
    let prompt = request::parse(api, bytes).map_err(|error| refuse(error.to_string()))?;
    model.token_ids(&prompt, unix_time() as u64).map_err(|error| refuse(format!("{error:?}")))
}

fn token_ids(ids: &[Value]) -> Option<Vec<u32>> {
    ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

fn text_tokens(
    replica: &Replica,
    text: &str,
    add_special_tokens: bool,
) -> Result<Vec<u32>, ApiError> {
    match &replica.config.model {
        None => Ok(numbered_tokens(text)),
        Some(model) => encode(model, text, add_special_tokens)
            .map_err(|error| ApiError::bad_request("prompt", error)),
    }
}

fn chat(replica: &Replica, body: &Map<String, Value>, bytes: &[u8]) -> Result<Vec<u32>, ApiError> {
    let refuse = |error: String| ApiError::bad_request("messages", error);
    if let Some(model) = &replica.config.model {
        let prompt = request::parse(Api::Chat, bytes).map_err(|error| refuse(error.to_string()))?;
        let now = unix_time() as u64;
        return model.token_ids(&prompt, now).map_err(|error| refuse(format!("{error:?}")));
    }
    let messages = body.get("messages").and_then(Value::as_array);
    let messages = messages.ok_or_else(|| refuse("messages: field required".to_owned()))?;
    let mut text = String::new();
    for message in messages {
        for key in ["role", "content"] {
            text.push_str(message.get(key).and_then(Value::as_str).unwrap_or_default());
            text.push(' ');
        }
    }
    text.push_str("assistant");
    Ok(numbered_tokens(&text))
}
