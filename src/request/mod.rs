//! A request body, read into a [`Prompt`].
//!
//! Reading is strict about what decides the prompt's tokens and blind to all else. What the engine would accept but
//! whose tokens cannot be known exactly (images, embeddings, a template of the client's own) is a [`RequestError`]
//! that says so: such a request is still forwarded untouched, only not routed by prefix. It does not render,
//! tokenize or answer: what the engine would refuse, the engine refuses.

mod api;
mod chat;
mod completions;
mod generate;
mod given;
mod json;
mod media;
mod messages;
mod pooling;
mod responses;

use crate::rules::Rules;
pub use api::Api;
pub use json::is_complete;
use json::{Budget, Counted, Fields, read, skip};
pub(crate) use json::{JsonText, MAX_VALUES, field, json_text};
pub use media::{Media, MediaKind};
use serde::de::MapAccess;
use serde_json::{Map, Value};
use std::fmt;
use std::sync::Arc;

/// What a body asks the model to read, as far as routing needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// The `model` field, when present.
    pub model: Option<String>,
    /// Messages, text or token ids. Of a batch, its first prompt.
    pub input: Input,
    /// How many more prompts the batch has, by which it is not routed.
    pub more_prompts: usize,
    /// What the engine cuts off before it reads the prompt.
    pub truncation: Option<Truncation>,
    /// `cache_salt`, part of every key in the engine's cache.
    pub cache_salt: Option<String>,
    /// Whether the response is a stream of events.
    pub stream: bool,
    /// Most tokens the answer may have, when the body says so.
    pub max_answer_tokens: Option<u32>,
    /// False where the engine's `usage` does not speak of exactly this prompt
    /// (`n` or `best_of` > 1, batches, `prompt_logprobs`, `echo` with `logprobs`).
    pub usage_is_comparable: bool,
    /// Whether the answer goes on where this prompt ends (not with `echo`, and not where nothing is generated).
    pub is_continued: bool,
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

/// A chat body, checked but not yet normalised.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chat {
    /// `messages`, each an object with a `role`.
    pub messages: Vec<Map<String, Value>>,
    /// The images, sounds and videos in them, in their order. In its message's content each is its place here, as a number.
    pub media: Vec<Media>,
    /// `tools`, each an object with a `function` that has a `name`.
    pub tools: Option<Vec<Map<String, Value>>>,
    /// `tool_choice`, as far as it leaves out tools.
    pub tool_choice: Option<Value>,
    /// `documents`, for templates that know them.
    pub documents: Option<Vec<Value>>,
    /// `reasoning_effort`, which also sets `enable_thinking` unless the arguments do.
    pub reasoning_effort: Option<String>,
    /// `chat_template_kwargs`: variables for the template, of the client's choice.
    pub template_arguments: Map<String, Value>,
    /// `add_generation_prompt`, true unless the body says otherwise.
    pub add_generation_prompt: bool,
    /// `continue_final_message`, false unless the body says otherwise.
    pub continue_final_message: bool,
    /// `add_special_tokens`, false unless the body says otherwise: the template writes BOS itself.
    pub add_special_tokens: bool,
    /// How the engine reads it, as far as that is configured.
    pub rules: Arc<Rules>,
    /// The API it came by.
    pub origin: Origin,
}

/// The API that a chat came by, where that matters to what renders it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Origin {
    /// One where chats are sent as such.
    #[default]
    Chat,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages {
        /// Thinking is disabled: the template says by which `reasoning_effort`.
        thinking_is_disabled: bool,
    },
}

/// `truncate_prompt_tokens` with `truncation_side`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truncation {
    /// No side given: the tokenizer keeps its special tokens and the last of the others, so many in all.
    LastWithSpecialTokens(usize),
    /// The last so many ids.
    Last(usize),
    /// The first so many ids.
    First(usize),
}

impl Truncation {
    /// Cuts `ids`. `special_tokens` says how many of them the tokenizer added by itself.
    /// `None` when what is left is not certain: where those stand is the tokenizer's affair.
    pub fn apply(self, mut ids: Vec<u32>, special_tokens: usize) -> Option<Vec<u32>> {
        match self {
            Self::LastWithSpecialTokens(count) if ids.len() > count => {
                (special_tokens == 0).then(|| ids.split_off(ids.len().saturating_sub(count)))
            }
            Self::Last(count) => Some(ids.split_off(ids.len().saturating_sub(count))),
            Self::First(count) => {
                ids.truncate(count);
                Some(ids)
            }
            Self::LastWithSpecialTokens(_) => Some(ids),
        }
    }
}

/// Why a body is no prompt, or none whose tokens can be known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestError {
    /// Not JSON: broken, not UTF-8, nested deeper than 127, or with half a surrogate pair.
    Json,
    /// JSON, but not an object.
    NotAnObject,
    /// The field that a prompt is read from is absent, empty or of another type.
    NoPrompt,
    /// A field that decides the prompt's tokens holds what the engine would refuse.
    Field(&'static str),
    /// A field that the engine may honour in a way that cannot be known from here.
    Unsupported(&'static str),
    /// What goes before is known to the engine only: a prompt or a conversation that it keeps.
    Stored,
    /// Content that is neither text nor an image, sound or video: files, embeddings.
    Media,
    /// More JSON values than a prompt has any use for.
    TooManyValues,
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json => f.write_str("the body is not valid JSON"),
            Self::NotAnObject => f.write_str("the body is not a JSON object"),
            Self::NoPrompt => f.write_str("the body holds no prompt"),
            Self::Field(field) => write!(f, "{field}: not what the engine accepts"),
            Self::Unsupported(field) => write!(f, "{field}: its tokens cannot be known here"),
            Self::Stored => f.write_str("the prompt goes on from one that the engine keeps"),
            Self::Media => f.write_str("messages: content of a kind that is not read here"),
            Self::TooManyValues => f.write_str("the body holds too many values"),
        }
    }
}

impl std::error::Error for RequestError {}

/// Reads a body.
///
/// # Errors
/// When the body holds no prompt, or one whose tokens cannot be known.
pub fn parse(api: Api, body: &[u8]) -> Result<Prompt, RequestError> {
    match api {
        Api::Chat => chat::parse(body),
        Api::Completions => completions::parse(body),
        Api::Responses => responses::parse(body),
        Api::Messages => messages::parse(body),
        Api::ChatBatch => chat::parse_batch(body),
        Api::Generate => generate::parse(body),
        Api::Embeddings | Api::Pooling | Api::Classify => pooling::parse(body),
        Api::Embed => pooling::parse_cohere(body),
        Api::Score | Api::Rerank => pooling::parse_scoring(body),
        Api::Tokenize => Err(RequestError::NoPrompt),
    }
}

/// The name that a body gives its session (`prompt_cache_key`), whether or not it holds a prompt that can be read.
pub fn session(body: &[u8]) -> Option<String> {
    let fields = pick(&[&["prompt_cache_key"]], body).ok()?;
    fields.text("prompt_cache_key").ok()?.filter(|name| !name.is_empty())
}

/// Lists of fields' names.
type Names = &'static [&'static [&'static str]];

/// Reads the fields of these names, and skips all others.
fn pick(names: Names, body: &[u8]) -> Result<Shared, RequestError> {
    let mut picked = Picked { names, fields: Shared::default() };
    read(body, &mut picked)?;
    Ok(picked.fields)
}

struct Picked {
    names: Names,
    fields: Shared,
}

impl Fields for Picked {
    fn take<'de, A: MapAccess<'de>>(
        &mut self,
        key: &str,
        map: &mut A,
        budget: &Budget,
    ) -> Result<(), A::Error> {
        if !self.names.iter().any(|names| names.contains(&key)) {
            return skip(map);
        }
        let value = map.next_value_seed(Counted(budget))?;
        self.fields.0.insert(key.to_owned(), value);
        Ok(())
    }
}

/// Fields that several APIs read alike.
#[derive(Default)]
struct Shared(Map<String, Value>);

impl Shared {
    const FIELDS: [&'static str; 10] = [
        "add_special_tokens",
        "cache_salt",
        "max_completion_tokens",
        "max_tokens",
        "model",
        "n",
        "prompt_logprobs",
        "stream",
        "truncate_prompt_tokens",
        "truncation_side",
    ];

    #[inline(never)]
    fn field(&self, name: &str) -> Option<&Value> {
        field(&self.0, name).filter(|value| !value.is_null())
    }

    /// Takes a field out. Most bodies lack most of them.
    #[inline(never)]
    fn take_out(&mut self, name: &str) -> Option<Value> {
        field(&self.0, name)?;
        self.0.remove(name)
    }

    fn text(&self, name: &'static str) -> Result<Option<String>, RequestError> {
        match self.field(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(RequestError::Field(name)),
        }
    }

    /// A switch, in any form that pydantic takes for one.
    fn switch(&self, name: &'static str, default: bool) -> Result<bool, RequestError> {
        let Some(value) = self.field(name) else { return Ok(default) };
        let word = match value {
            Value::Bool(value) => return Ok(*value),
            Value::String(word) => word.to_ascii_lowercase(),
            value => value.to_string(),
        };
        match word.as_str() {
            "1" | "true" | "t" | "yes" | "y" | "on" => Ok(true),
            "0" | "false" | "f" | "no" | "n" | "off" => Ok(false),
            _ => Err(RequestError::Field(name)),
        }
    }

    /// The answer's limit; one that makes no sense is the engine's to refuse.
    fn max_answer_tokens(&self) -> Option<u32> {
        let names = ["max_completion_tokens", "max_output_tokens", "max_tokens"];
        let limit = names.iter().find_map(|name| self.field(name))?;
        u32::try_from(limit.as_u64()?).ok()
    }

    fn cache_salt(&self) -> Result<Option<String>, RequestError> {
        let salt = self.text("cache_salt")?;
        let is_accepted = |salt: &String| {
            !salt.is_empty()
                && salt.chars().count() <= 128
                && !salt.contains(['@', '/', '\\', '\0'])
        };
        match salt {
            Some(salt) if !is_accepted(&salt) => Err(RequestError::Field("cache_salt")),
            salt => Ok(salt),
        }
    }

    fn truncation(&self) -> Result<Option<Truncation>, RequestError> {
        let Some(count) = self.field("truncate_prompt_tokens") else { return Ok(None) };
        let count = match (count.as_u64(), count.as_i64()) {
            // -1 stands for the model's own limit, which the filter does not know.
            (None, Some(-1)) => return Err(RequestError::Unsupported("truncate_prompt_tokens")),
            (Some(count), _) if count > 0 => usize::try_from(count).unwrap_or(usize::MAX),
            _ => return Err(RequestError::Field("truncate_prompt_tokens")),
        };
        match self.text("truncation_side")?.as_deref() {
            None => Ok(Some(Truncation::LastWithSpecialTokens(count))),
            Some("left") => Ok(Some(Truncation::Last(count))),
            Some("right") => Ok(Some(Truncation::First(count))),
            Some(_) => Err(RequestError::Field("truncation_side")),
        }
    }

    /// Whether a count field asks for at most one.
    fn is_single(&self, name: &str) -> bool {
        self.field(name).is_none_or(|count| count.as_u64().is_some_and(|count| count <= 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_named_whatever_else_a_body_says() {
        #[track_caller]
        fn check(body: &str, expected: Option<&str>) {
            assert_eq!(session(body.as_bytes()).as_deref(), expected);
        }
        check(r#"{"previous_response_id": "r", "prompt_cache_key": "k"}"#, Some("k"));
        check(r#"{"prompt_cache_key": ""}"#, None);
        check(r#"{"prompt_cache_key": 1}"#, None);
        check(r#"{"messages": []}"#, None);
        check(r#"{"prompt_cache_key": "k""#, None);
    }

    #[test]
    fn truncation_keeps_what_the_engine_keeps() {
        #[track_caller]
        fn check(truncation: Truncation, special_tokens: usize, expected: Option<&[u32]>) {
            assert_eq!(truncation.apply(vec![1, 2, 3], special_tokens).as_deref(), expected);
        }
        check(Truncation::Last(2), 1, Some(&[2, 3]));
        check(Truncation::First(2), 1, Some(&[1, 2]));
        check(Truncation::LastWithSpecialTokens(2), 0, Some(&[2, 3]));
        check(Truncation::LastWithSpecialTokens(2), 1, None);
        check(Truncation::LastWithSpecialTokens(3), 1, Some(&[1, 2, 3]));
        check(Truncation::Last(9), 0, Some(&[1, 2, 3]));
    }
}
