//! A prompt's shape: what may be said of it where nothing that it says may be.
//!
//! Numbers, roles and names of fields; no text of a client's, not even a role that is not one of the known.

use super::Kind;
use crate::request::{Api, Chat, Input, Prompt, field};
use serde_json::{Map, Value};
use std::fmt;

/// Roles that are told; of longer chats, the first so many.
const MAX_ROLES: usize = 16;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Which verdict it falls under; none: its ids were given.
    pub kind: Option<Kind>,
    messages: usize,
    /// One letter each.
    roles: [u8; MAX_ROLES],
    tools: usize,
    fields: [bool; FIELDS.len()],
}

/// What is told of a prompt's fields when they are there.
const FIELDS: [&str; 13] = [
    "parts",
    "media",
    "tool_calls",
    "reasoning",
    "documents",
    "reasoning_effort",
    "chat_template_kwargs",
    "no_generation_prompt",
    "continue_final_message",
    "chat_special_tokens",
    "truncation",
    "cache_salt",
    "no_special_tokens",
];

/// Of [`FIELDS`], those that `/tokenize` does not know, or treats in another way than the API itself.
const UNKNOWN_TO_TOKENIZE: [&str; 5] =
    ["media", "reasoning", "documents", "reasoning_effort", "truncation"];

impl Shape {
    /// The shape of a prompt that still has its input.
    pub fn of(api: Api, prompt: &Prompt) -> Self {
        let mut shape = Self {
            kind: Kind::of(api, &prompt.input),
            messages: 0,
            roles: [b' '; MAX_ROLES],
            tools: 0,
            fields: [false; FIELDS.len()],
        };
        shape.mark("truncation", prompt.truncation.is_some());
        shape.mark("cache_salt", prompt.cache_salt.is_some());
        match &prompt.input {
            Input::Chat(chat) => shape.mark_chat(chat),
            Input::Text { add_special_tokens, .. } => {
                shape.mark("no_special_tokens", !add_special_tokens);
            }
            Input::Tokens(_) => {}
        }
        shape
    }

    /// Whether a replica's `/tokenize` makes the same of its body as the API itself.
    pub fn is_known_to_tokenize(&self) -> bool {
        let marked = || FIELDS.iter().zip(self.fields).filter(|(_, is_there)| *is_there);
        self.kind.is_some_and(Kind::is_tokenized)
            && !marked().any(|(field, _)| UNKNOWN_TO_TOKENIZE.contains(field))
    }

    /// Whether it has images, sounds or videos.
    pub fn has_media(&self) -> bool {
        FIELDS.iter().zip(self.fields).any(|(field, is_there)| is_there && *field == "media")
    }

    fn mark(&mut self, field: &str, is_there: bool) {
        let marks = FIELDS.iter().zip(&mut self.fields);
        for (_, mark) in marks.filter(|(name, _)| **name == field) {
            *mark |= is_there;
        }
    }

    fn mark_chat(&mut self, chat: &Chat) {
        self.messages = chat.messages.len();
        self.tools = chat.tools.as_ref().map_or(0, Vec::len);
        for (letter, message) in self.roles.iter_mut().zip(&chat.messages) {
            *letter = role(message);
        }
        for (name, value) in chat.messages.iter().flatten() {
            match name.as_str() {
                "content" if value.is_array() => self.mark("parts", true),
                "tool_calls" => self.mark("tool_calls", true),
                "reasoning" | "reasoning_content" => self.mark("reasoning", true),
                _ => {}
            }
        }
        self.mark("media", !chat.media.is_empty());
        self.mark("documents", chat.documents.is_some());
        self.mark("reasoning_effort", chat.reasoning_effort.is_some());
        self.mark("chat_template_kwargs", !chat.template_arguments.is_empty());
        self.mark("no_generation_prompt", !chat.add_generation_prompt);
        self.mark("continue_final_message", chat.continue_final_message);
        self.mark("chat_special_tokens", chat.add_special_tokens);
    }
}

fn role(message: &Map<String, Value>) -> u8 {
    match field(message, "role").and_then(Value::as_str) {
        Some("system") => b's',
        Some("developer") => b'd',
        Some("user") => b'u',
        Some("assistant") => b'a',
        Some("tool") => b't',
        _ => b'?',
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kind={}", self.kind.map_or("ids", Kind::as_str))?;
        if self.messages > 0 {
            let roles = self.roles.iter().map(|letter| char::from(*letter)).collect::<String>();
            write!(f, ", messages={}, roles={}", self.messages, roles.trim_end())?;
        }
        if self.tools > 0 {
            write!(f, ", tools={}", self.tools)?;
        }
        for (field, _) in FIELDS.iter().zip(self.fields).filter(|(_, is_there)| *is_there) {
            write!(f, ", {field}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::parse;

    #[track_caller]
    fn check(api: Api, body: &str, expected: &str, known: bool) {
        let shape = Shape::of(api, &parse(api, body.as_bytes()).expect(body));
        assert_eq!(shape.to_string(), expected);
        assert_eq!(shape.is_known_to_tokenize(), known, "{expected}");
    }

    #[test]
    fn a_shape_tells_numbers_roles_and_fields_and_no_text() {
        check(
            Api::Chat,
            r#"{"messages": [{"role": "system", "content": "secret"}, {"role": "user", "content":
               [{"type": "text", "text": "secret"}]}, {"role": "secret", "content": "secret"}],
               "tools": [{"type": "function", "function": {"name": "secret"}}]}"#,
            "kind=tools, messages=3, roles=su?, tools=1, parts",
            true,
        );
        check(
            Api::Chat,
            r#"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y",
               "reasoning_content": "z"}], "cache_salt": "secret"}"#,
            "kind=chat, messages=2, roles=ua, reasoning, cache_salt",
            false,
        );
        check(
            Api::Completions,
            r#"{"prompt": "secret", "add_special_tokens": false}"#,
            "kind=text, no_special_tokens",
            true,
        );
        check(Api::Completions, r#"{"prompt": [1, 2]}"#, "kind=ids", false);
        check(
            Api::Chat,
            r#"{"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": 5}"#,
            "kind=chat, messages=1, roles=u, truncation",
            false,
        );
    }

    #[test]
    fn a_long_chat_has_a_short_shape() {
        let messages = vec![r#"{"role": "user", "content": "x"}"#; 900].join(",");
        let expected = "kind=chat, messages=900, roles=uuuuuuuuuuuuuuuu";
        check(Api::Chat, &format!(r#"{{"messages": [{messages}]}}"#), expected, true);
    }
}
