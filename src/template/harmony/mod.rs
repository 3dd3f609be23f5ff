//! Harmony, the format of gpt-oss, as vLLM has OpenAI's library write it.
//!
//! Seen in vLLM 0.32 with oss-harmony 0.0.11, whose function that makes ids of a request can be called by itself. In order:
//!
//! 1. A message of the system: identity, knowledge cutoff, date, reasoning effort (`medium` unless asked otherwise), channels.
//! 2. One of the developer, where there is something to say: what the first message says if it is the system's or the
//!    developer's, then the functions, in TypeScript (`schema`).
//! 3. The other messages. Texts of an assistant are `final`, or `commentary` where it calls functions; reasoning is
//!    `analysis`; a call goes `to=functions.NAME` and ends in `<|call|>`; a result comes from the function that its
//!    call named. Content parts are encoded apart. Images and the like leave no trace.
//! 4. Reasoning before the last `final` message is dropped.
//! 5. `/v1/responses` has a way of its own: what an assistant says stands behind its reasoning and is `final` even before
//!    calls, and later instructions that are empty are no message.
//! 6. `<|start|>assistant`, whatever the body says of generation prompts.
//!
//! Where vLLM and the library's own example differ, this does as vLLM does: `json` without `<|constrain|>` behind a call's
//! channel, the recipient before it, and a later system message is the developer's. Nothing a client wrote becomes a
//! special token. It does not know the built-in tools (browser, Python), which chats cannot ask for.

mod schema;

use super::clock::strftime;
use super::{TemplateError, normalise};
use crate::request::{Chat, Origin};
use crate::tokens::{MAX_TEXT_BYTES, Pieces};
use hashbrown::HashMap;
use serde_json::{Map, Value};

const IDENTITY: &str =
    "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06";
const CHANNELS: &str =
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.";
const FUNCTIONS_CHANNEL: &str =
    "\nCalls to these tools must go to the commentary channel: 'functions'.";

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";

/// Renders chats as Harmony conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harmony {
    /// As vLLM does: no message for empty instructions, and none for an assistant that said nothing.
    Vllm,
    /// As OpenAI's library renders a conversation message by message, empty ones included.
    Library,
}

/// One message of a conversation.
struct Message<'a> {
    author: Author<'a>,
    content: Content<'a>,
}

enum Author<'a> {
    Developer,
    User,
    Assistant(&'static str),
    /// An assistant that calls this function.
    Caller(&'a str),
    /// The function itself.
    Function(&'a str),
}

enum Content<'a> {
    Text(&'a str),
    /// Texts that are encoded apart.
    Parts(&'a [Value]),
    /// Texts that are encoded together.
    Joined(String),
}

/// Messages of a body.
type Messages = [Map<String, Value>];

/// Names of functions by the ids of their calls.
type Called<'a> = HashMap<&'a str, &'a str>;

impl Harmony {
    /// Renders a chat. `now` is seconds since the Unix epoch in the engine's time zone.
    ///
    /// # Errors
    /// When the engine would refuse the chat, or the text is longer than what is encoded.
    pub fn render(self, chat: &Chat, now: u64) -> Result<Pieces, TemplateError> {
        let (instructions, rest) = instructions(&chat.messages)?;
        let tools = normalise::tools(chat)?;
        let tools = tools.as_array().map(Vec::as_slice);
        let mut writer = Writer(Pieces::default());
        writer.message("system", &system(chat, tools.is_some(), now)?)?;
        if tools.is_some() || instructions.as_deref().is_some_and(|text| self.has(text)) {
            writer.message("developer", &developer(instructions.as_deref(), tools)?)?;
        }
        let called = called(rest)?;
        let mut messages = Vec::with_capacity(rest.len());
        for message in rest {
            self.add(message, &called, chat.origin, &mut messages)?;
        }
        let is_final = |message: &Message<'_>| matches!(message.author, Author::Assistant("final"));
        let last_final = messages.iter().rposition(is_final).unwrap_or_default();
        for (at, message) in messages.iter().enumerate() {
            if at >= last_final || !matches!(message.author, Author::Assistant("analysis")) {
                writer.render(message)?;
            }
        }
        writer.token(START);
        writer.text("assistant")?;
        Ok(writer.0)
    }

    /// Whether a text makes a message of its own.
    fn has(self, text: &str) -> bool {
        self == Self::Library || !text.is_empty()
    }
    /// Adds what becomes of one message of the body.
    fn add<'a>(
        self,
        message: &'a Map<String, Value>,
        called: &Called<'a>,
        origin: Origin,
        to: &mut Vec<Message<'a>>,
    ) -> Result<(), TemplateError> {
        match role(message) {
            "assistant" => self.assistant(message, origin, to)?,
            "tool" => {
                let id = message.get("tool_call_id").and_then(Value::as_str).unwrap_or_default();
                let name = match called.get(id) {
                    None if origin == Origin::Responses => {
                        return Err(TemplateError::Refused("call_id"));
                    }
                    name => name.copied().unwrap_or_default(),
                };
                let content = Content::Joined(joined(message)?.unwrap_or_default());
                to.push(Message { author: Author::Function(name), content });
            }
            "system" | "developer" => {
                let is_message = |text: &String| origin != Origin::Responses || !text.is_empty();
                let text = joined(message)?.filter(is_message);
                to.extend(text.map(|text| Message {
                    author: Author::Developer,
                    content: Content::Joined(format!("# Instructions\n\n{text}")),
                }));
            }
            "user" => to.push(Message { author: Author::User, content: content(message)? }),
            _ => return Err(TemplateError::Refused("role")),
        }
        Ok(())
    }
    fn assistant<'a>(
        self,
        message: &'a Map<String, Value>,
        origin: Origin,
        to: &mut Vec<Message<'a>>,
    ) -> Result<(), TemplateError> {
        let given = |name| message.get(name).filter(|value: &&Value| !value.is_null());
        let reasoning = match given("reasoning").or_else(|| given("reasoning_content")) {
            None => None,
            Some(Value::String(text)) if text.is_empty() => None,
            Some(Value::String(text)) => Some(Message {
                author: Author::Assistant("analysis"),
                content: Content::Text(text),
            }),
            Some(_) => return Err(TemplateError::Refused("reasoning")),
        };
        let calls = calls(message)?;
        if calls.is_empty() || origin == Origin::Responses {
            to.extend(reasoning);
            let content = content(message)?;
            if self.has(content.first_text()) {
                to.push(Message { author: Author::Assistant("final"), content });
            }
        } else {
            if let Some(text) = joined(message)?.filter(|text| !text.is_empty()) {
                let content = Content::Joined(text);
                to.push(Message { author: Author::Assistant("commentary"), content });
            }
            to.extend(reasoning);
        }
        for call in calls {
            let (name, arguments) = function(call)?.unwrap_or_default();
            to.push(Message { author: Author::Caller(name), content: Content::Text(arguments) });
        }
        Ok(())
    }
}

fn system(chat: &Chat, has_tools: bool, now: u64) -> Result<String, TemplateError> {
    let effort = match chat.reasoning_effort.as_deref() {
        // The lowest that there is: Harmony has no way not to think.
        _ if chat.origin == (Origin::Messages { thinking_is_disabled: true }) => "low",
        None => "medium",
        Some(effort @ ("low" | "medium" | "high")) => effort,
        Some(_) => return Err(TemplateError::Refused("reasoning_effort")),
    };
    let date = strftime("%Y-%m-%d", now).unwrap_or_default();
    let functions = if has_tools { FUNCTIONS_CHANNEL } else { "" };
    Ok(format!("{IDENTITY}\nCurrent date: {date}\n\nReasoning: {effort}\n\n{CHANNELS}{functions}"))
}

/// What the first message says, if it is the system's or the developer's, and the messages after it.
fn instructions(
    messages: &[Map<String, Value>],
) -> Result<(Option<String>, &Messages), TemplateError> {
    match messages.split_first() {
        Some((first, rest)) if matches!(role(first), "system" | "developer") => {
            Ok((joined(first)?, rest))
        }
        _ => Ok((None, messages)),
    }
}

fn developer(instructions: Option<&str>, tools: Option<&[Value]>) -> Result<String, TemplateError> {
    let mut out = String::new();
    if let Some(instructions) = instructions {
        out.push_str("# Instructions\n\n");
        out.push_str(instructions);
    }
    if let Some(tools) = tools {
        if instructions.is_some() {
            out.push_str("\n\n");
        }
        functions(tools, &mut out)?;
    }
    Ok(out)
}

fn functions(tools: &[Value], out: &mut String) -> Result<(), TemplateError> {
    out.push_str("# Tools\n\n## functions\n\nnamespace functions {\n\n");
    for tool in tools {
        let field = |name| tool.get("function").and_then(|function| function.get(name));
        let name = field("name").and_then(Value::as_str).unwrap_or_default();
        for line in field("description").and_then(Value::as_str).unwrap_or_default().lines() {
            out.extend(["// ", line, "\n"]);
        }
        out.extend(["type ", name, " = ("]);
        if let Some(parameters @ Value::Object(_)) = field("parameters") {
            out.push_str("_: ");
            schema::write(parameters, out)?;
        }
        out.push_str(") => any;\n\n");
    }
    out.push_str("} // namespace functions");
    Ok(())
}

fn role(message: &Map<String, Value>) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or_default()
}

fn calls(message: &Map<String, Value>) -> Result<&[Value], TemplateError> {
    match message.get("tool_calls") {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(calls)) => Ok(calls),
        Some(_) => Err(TemplateError::Refused("tool_calls")),
    }
}

fn called(messages: &[Map<String, Value>]) -> Result<Called<'_>, TemplateError> {
    let mut called = Called::new();
    for message in messages {
        for call in calls(message)? {
            if let Some(id) = call.get("id").and_then(Value::as_str) {
                // Python's text of the name that a call of no function has.
                called.insert(id, function(call)?.map_or("None", |(name, _)| name));
            }
        }
    }
    Ok(called)
}

/// Name and arguments of the function that is called, if it is one.
fn function(call: &Value) -> Result<Option<(&str, &str)>, TemplateError> {
    let text = |name| call.get("function")?.get(name)?.as_str();
    match call.get("type").and_then(Value::as_str) {
        Some("custom") => Ok(None),
        Some("function") => match (text("name"), text("arguments")) {
            (Some(name), Some(arguments)) => Ok(Some((name, arguments))),
            _ => Err(TemplateError::Refused("tool_calls")),
        },
        _ => Err(TemplateError::Refused("tool_calls")),
    }
}

fn content(message: &Map<String, Value>) -> Result<Content<'_>, TemplateError> {
    match message.get("content") {
        None | Some(Value::Null) => Ok(Content::Text("")),
        Some(Value::String(text)) => Ok(Content::Text(text)),
        Some(Value::Array(parts)) if parts.iter().all(Value::is_object) => {
            Ok(Content::Parts(parts))
        }
        Some(_) => Err(TemplateError::Refused("content")),
    }
}

/// The texts of a message as one, if it has any.
fn joined(message: &Map<String, Value>) -> Result<Option<String>, TemplateError> {
    Ok(match content(message)? {
        Content::Parts(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(part_text).collect();
            (!texts.is_empty()).then(|| texts.concat())
        }
        Content::Text(text) if message.get("content").is_some_and(Value::is_string) => {
            Some(text.to_owned())
        }
        _ => None,
    })
}

fn part_text(part: &Value) -> Option<&str> {
    part.get("text")?.as_str()
}

impl Content<'_> {
    /// A first part without text hides those after it.
    fn first_text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => parts.first().and_then(part_text).unwrap_or_default(),
            Self::Joined(text) => text,
        }
    }
}

/// Writes pieces, up to as many bytes as are encoded.
struct Writer(Pieces);

impl Writer {
    fn token(&mut self, token: &str) {
        self.0.push_token(token);
    }

    fn text(&mut self, text: &str) -> Result<(), TemplateError> {
        if self.0.len().saturating_add(text.len()) > MAX_TEXT_BYTES {
            return Err(TemplateError::Limit);
        }
        self.0.push_text(text);
        Ok(())
    }

    /// A message without a channel.
    fn message(&mut self, author: &str, text: &str) -> Result<(), TemplateError> {
        self.header(author, None)?;
        self.text(text)?;
        self.token(END);
        Ok(())
    }

    fn header(&mut self, author: &str, channel: Option<&str>) -> Result<(), TemplateError> {
        self.token(START);
        self.text(author)?;
        if let Some(channel) = channel {
            self.token(CHANNEL);
            self.text(channel)?;
        }
        self.token(MESSAGE);
        Ok(())
    }

    fn render(&mut self, message: &Message<'_>) -> Result<(), TemplateError> {
        match message.author {
            Author::Developer => self.header("developer", None),
            Author::User => self.header("user", None),
            Author::Assistant(channel) => self.header("assistant", Some(channel)),
            Author::Caller(name) => {
                self.header(&format!("assistant to=functions.{name}"), Some("commentary json"))
            }
            Author::Function(name) => {
                self.header(&format!("functions.{name}"), Some("commentary to=assistant"))
            }
        }?;
        match &message.content {
            Content::Text(text) => self.text(text)?,
            Content::Joined(text) => self.text(text)?,
            Content::Parts(parts) => {
                for part in *parts {
                    self.text(part_text(part).unwrap_or_default())?;
                }
            }
        }
        self.token(if matches!(message.author, Author::Caller(_)) { CALL } else { END });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
