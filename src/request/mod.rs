//! A request body, read into a [`Prompt`].

use serde_json::{Map, Value};

/// An API whose bodies carry a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Api {
    /// The API behind a request path (query string allowed), or `None` when it is not ours.
    pub fn of_path(path: &str) -> Option<Self> {
        let _ = path;
        None
    }
}

/// What a body asks the model to read, as far as routing needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// The `model` field, when present.
    pub model: Option<String>,
    /// Messages, text or token ids.
    pub input: Input,
    /// `cache_salt`, part of every key in the engine's cache.
    pub cache_salt: Option<String>,
    /// Whether the response is a stream of events.
    pub stream: bool,
    /// False where the engine's `usage` does not speak of exactly this prompt
    /// (`n` > 1, batches, `prompt_logprobs`, `echo` with `logprobs`).
    pub usage_is_comparable: bool,
}

/// The three shapes of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// Messages that the chat template renders.
    Chat(Box<Chat>),
    /// Plain text, with or without the tokenizer's own special tokens.
    Text {
        /// The text.
        text: String,
        /// Whether the tokenizer adds BOS and the like.
        add_special_tokens: bool,
    },
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
}

/// A chat body, not yet normalised.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chat {
    /// The whole body's fields that a template can see, in the client's order.
    pub fields: Map<String, Value>,
}

impl Chat {
    /// `add_special_tokens`, false unless the body says otherwise: the template writes BOS itself.
    pub fn adds_special_tokens(&self) -> bool {
        self.fields.get("add_special_tokens").and_then(Value::as_bool).unwrap_or(false)
    }
}

/// Why a body is no prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestError {
    /// Not JSON, or not UTF-8.
    Json,
    /// JSON, but not an object.
    NotAnObject,
    /// The field that a prompt is read from is absent or of another type.
    NoPrompt,
}

/// Reads a body.
///
/// # Errors
/// When the body holds no prompt.
pub fn parse(api: Api, body: &[u8]) -> Result<Prompt, RequestError> {
    let _ = (api, body);
    Err(RequestError::Json)
}
