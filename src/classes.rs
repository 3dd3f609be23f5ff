//! What kind of work a request is, so that hit rates can be told apart: by its body's shape, or by a name that a
//! header gives it.
//!
//! Classes only name what is counted. No choice depends on one, and no label on a client's whim: names are cut to
//! plain characters, and there are never more of them than the configuration allows.

use crate::request::{Api, Chat, Input, Prompt, field};
use serde_json::Value;
use std::rc::Rc;

/// Text of one user's message, in bytes, from which a chat is about a document: some 2,000 tokens. Halved, long
/// questions count as documents; doubled, pages of them as chats.
const DOCUMENT_BYTES: usize = 8 << 10;

/// Longer names are [`OTHER`].
const MAX_NAME_BYTES: usize = 64;

/// What is counted as this has a name, and there is no room for it.
const OTHER: &str = "other";

/// A class by the body's shape. A conversation stays in its class from turn to turn, but for one that is given a
/// document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A chat with tools, or with calls of some.
    Agent,
    /// A chat with a document: `documents`, or a long text in one of the user's messages.
    Document,
    /// Any other chat.
    Chat,
    /// A text or ids to be continued.
    Completion,
    /// Several prompts in one body.
    Batch,
    /// Embedding, scoring, ranking.
    Pooling,
    /// The body could not be read.
    Unknown,
}

impl Class {
    /// All classes, in the order of their declaration.
    pub const ALL: [Self; 7] = [
        Self::Agent,
        Self::Document,
        Self::Chat,
        Self::Completion,
        Self::Batch,
        Self::Pooling,
        Self::Unknown,
    ];

    /// The class of a prompt that still has its input.
    pub fn of(api: Api, prompt: &Prompt) -> Self {
        match api {
            Api::Embeddings
            | Api::Embed
            | Api::Pooling
            | Api::Classify
            | Api::Score
            | Api::Rerank => return Self::Pooling,
            _ => {}
        }
        match &prompt.input {
            _ if prompt.more_prompts > 0 => Self::Batch,
            Input::Chat(chat) if has_tools(chat) => Self::Agent,
            Input::Chat(chat) if has_document(chat) => Self::Document,
            Input::Chat(_) => Self::Chat,
            Input::Text { .. } | Input::Tokens(_) => Self::Completion,
        }
    }

    /// The value of the metrics' `class` label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Document => "document",
            Self::Chat => "chat",
            Self::Completion => "completion",
            Self::Batch => "batch",
            Self::Pooling => "pooling",
            Self::Unknown => "unknown",
        }
    }
}

fn has_tools(chat: &Chat) -> bool {
    let offered = chat.tools.is_some();
    offered || chat.messages.iter().any(|message| field(message, "tool_calls").is_some())
}

fn has_document(chat: &Chat) -> bool {
    let is_users = |role: Option<&Value>| role.and_then(Value::as_str) == Some("user");
    let mut users = chat.messages.iter().filter(|message| is_users(field(message, "role")));
    let given = chat.documents.as_ref().is_some_and(|documents| !documents.is_empty());
    given || users.any(|message| text_bytes(field(message, "content")) >= DOCUMENT_BYTES)
}

/// Text of a message's content, which may be in parts.
fn text_bytes(content: Option<&Value>) -> usize {
    match content {
        Some(Value::String(text)) => text.len(),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| part.get("text").and_then(Value::as_str).map_or(0, str::len);
            parts.iter().map(text).sum()
        }
        _ => 0,
    }
}

/// Where names of classes come from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClassConfig {
    /// The request header that names a request's class.
    pub header: Option<String>,
    /// The only names that are told apart; empty: the first that come.
    pub names: Vec<String>,
    /// How many of those that come.
    pub max_names: usize,
}

/// A class as it is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Label {
    /// By its shape.
    Shape(Class),
    /// By the header.
    Named(Rc<str>),
    /// By the header, and not told apart.
    Other,
}

impl Label {
    /// The value of the metrics' `class` label.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Shape(class) => class.as_str(),
            Self::Named(name) => name,
            Self::Other => OTHER,
        }
    }
}

/// The names that a VM tells apart: Envoy keeps a series for good, so a name that is in stays in.
#[derive(Debug, Default)]
pub struct Names(Vec<Rc<str>>);

impl Names {
    /// The label of a request with this header value. An empty one names nothing.
    pub fn label(&mut self, config: &ClassConfig, value: Option<&[u8]>, class: Class) -> Label {
        let Some(value) = value.map(<[u8]>::trim_ascii).filter(|value| !value.is_empty()) else {
            return Label::Shape(class);
        };
        let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
        let is_name = value.len() <= MAX_NAME_BYTES && value.iter().all(is_plain);
        let name = std::str::from_utf8(value).ok().filter(|_| is_name);
        name.and_then(|name| self.known(config, name)).map_or(Label::Other, Label::Named)
    }

    fn known(&mut self, config: &ClassConfig, name: &str) -> Option<Rc<str>> {
        if !config.names.is_empty() && !config.names.iter().any(|known| known == name) {
            return None;
        }
        if let Some(known) = self.0.iter().find(|known| &***known == name) {
            return Some(Rc::clone(known));
        }
        let most = if config.names.is_empty() { config.max_names } else { usize::MAX };
        if self.0.len() >= most {
            return None;
        }
        let name: Rc<str> = name.into();
        self.0.push(Rc::clone(&name));
        Some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request;

    #[track_caller]
    fn check(path: &str, body: &str, expected: Class) {
        let api = Api::of_path(path).unwrap();
        let prompt = request::parse(api, body.as_bytes()).unwrap();
        assert_eq!(Class::of(api, &prompt), expected, "{body}");
    }

    const CHAT: &str = "/v1/chat/completions";
    const TOOL: &str = r#"[{"type":"function","function":{"name":"f","parameters":{}}}]"#;

    #[test]
    fn a_class_is_read_off_the_bodys_shape() {
        let hello = r#""messages":[{"role":"user","content":"hello"}]"#;
        check(CHAT, &format!("{{{hello}}}"), Class::Chat);
        check(CHAT, &format!(r#"{{{hello},"tools":{TOOL}}}"#), Class::Agent);
        check(CHAT, &format!(r#"{{{hello},"documents":[{{"text":"a"}}]}}"#), Class::Document);
        check("/v1/completions", r#"{"prompt":"hello"}"#, Class::Completion);
        check("/v1/completions", r#"{"prompt":["a","b"]}"#, Class::Batch);
        check(
            "/inference/v1/generate",
            r#"{"token_ids":[1,2],"sampling_params":{}}"#,
            Class::Completion,
        );
        check("/v1/embeddings", r#"{"input":["a","b"]}"#, Class::Pooling);
        check("/v1/messages", &format!(r#"{{{hello},"max_tokens":1}}"#), Class::Chat);
        check("/v1/responses", r#"{"input":"hello"}"#, Class::Chat);
    }

    #[test]
    fn a_long_text_of_the_users_is_a_document_and_a_system_prompt_is_none() {
        let long = "a".repeat(DOCUMENT_BYTES);
        let by = |role: &str, text: &str| {
            let asked = r#"{"role":"user","content":"and?"}"#;
            format!(r#"{{"messages":[{{"role":"{role}","content":"{text}"}},{asked}]}}"#)
        };
        check(CHAT, &by("user", &long), Class::Document);
        check(CHAT, &by("user", &long[1..]), Class::Chat);
        check(CHAT, &by("system", &long), Class::Chat);
        let parts =
            format!(r#"[{{"type":"text","text":"a"}},{{"type":"text","text":"{}"}}]"#, &long[1..]);
        let body = format!(r#"{{"messages":[{{"role":"user","content":{parts}}}]}}"#);
        check(CHAT, &body, Class::Document);
    }

    #[test]
    fn every_class_has_a_label_of_its_own() {
        let labels: std::collections::BTreeSet<&str> =
            Class::ALL.iter().map(|class| class.as_str()).collect();
        assert_eq!(labels.len(), Class::ALL.len());
        assert!(!labels.contains(OTHER));
    }

    #[track_caller]
    fn check_label(names: &mut Names, config: &ClassConfig, value: &[u8], expected: &str) {
        let label = names.label(config, Some(value), Class::Chat);
        assert_eq!(label.as_str(), expected, "{}", value.escape_ascii());
    }

    #[test]
    fn names_are_capped_and_the_rest_is_other() {
        let mut names = Names::default();
        let config = ClassConfig { max_names: 2, ..ClassConfig::default() };
        for (value, label) in [("rag", "rag"), ("ci", "ci"), ("x", OTHER), (" rag ", "rag")] {
            check_label(&mut names, &config, value.as_bytes(), label);
        }
        for n in 0..10_000 {
            check_label(&mut names, &config, format!("n{n}").as_bytes(), OTHER);
        }
        assert_eq!(names.0.len(), 2);
        check_label(&mut names, &config, b"", "chat");
        assert_eq!(names.label(&config, None, Class::Agent).as_str(), "agent");
    }

    #[test]
    fn a_name_is_no_more_than_plain_text() {
        let mut names = Names::default();
        let config = ClassConfig { max_names: 9, ..ClassConfig::default() };
        let long = [b'a'; MAX_NAME_BYTES + 1];
        for odd in [&b"a;reason=b"[..], b"\xff", "é".as_bytes(), b"a b", &long] {
            check_label(&mut names, &config, odd, OTHER);
        }
        assert!(names.0.is_empty());
        check_label(&mut names, &config, &long[1..], &"a".repeat(MAX_NAME_BYTES));
    }

    #[test]
    fn where_names_are_listed_no_client_can_fill_the_room() {
        let mut names = Names::default();
        let config =
            ClassConfig { names: vec!["rag".into(), "ci".into()], ..ClassConfig::default() };
        for (value, label) in [("x", OTHER), ("ci", "ci"), ("y", OTHER), ("rag", "rag")] {
            check_label(&mut names, &config, value.as_bytes(), label);
        }
    }
}
