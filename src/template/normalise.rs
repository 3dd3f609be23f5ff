//! What the engine does to a chat body before its template sees it.
//!
//! Seen in vLLM 0.32 (request to token ids) and read in its source. In order:
//!
//! 1. `reasoning_content` of a message becomes `reasoning`, unless that is given too.
//! 2. Content becomes parts: null is none, a text is one. Of a `system` message, a first line that starts with
//!    `x-anthropic-billing-header` is dropped from each part.
//! 3. For a template that takes texts, parts are joined by newlines. For one that walks over content, they stay a
//!    list of `{type: text, text}` with the fields that are the client's own (`cache_control`), except in `tool` messages, where only references to tools keep a list.
//! 4. Of an assistant's message, `tool_calls` (unless empty) and `reasoning` stay, the latter under both names; of a
//!    tool's, `tool_call_id`; of any, `name` and `task`. All else is dropped.
//! 5. Arguments of tool calls, a JSON text, become an object; what is no object becomes an empty one. A call's fields are
//!    put in the order `id`, `function` (`arguments`, `name`, others), `type`, others.
//! 6. Tools are written anew: unknown keys go, an absent `description` or `parameters` becomes null.
//! 7. `developer` becomes `system` where the template does not name that role, and then all system messages become
//!    one at the front, joined by blank lines.
//! 8. Template arguments that are null or `"auto"` are dropped; fields of the body win over arguments of the same name.
//!
//! It does not check what [`crate::request`] has checked.

use super::TemplateError;
use super::content::ContentFormat;
use crate::request::{Chat, JsonText, json_text};
use serde_json::{Map, Value};

/// Claude Code's line that changes with every request.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Fields of the engine's own kinds of content part, which it does not carry over.
const PART_FIELDS: [&str; 19] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_embeds",
    "refusal",
    "text",
    "thinking",
    "tool_reference",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// The variables the engine would hand to the template.
pub(super) fn variables(
    chat: &Chat,
    format: ContentFormat,
    template: &str,
) -> Result<Map<String, Value>, TemplateError> {
    let mut messages = Vec::with_capacity(chat.messages.len());
    for message in &chat.messages {
        messages.push(self::message(message, format)?);
    }
    if !template.contains("\"developer\"") && !template.contains("'developer'") {
        messages = without_developer(messages);
    }
    let tools = match &chat.tools {
        Some(tools) => Value::Array(tools.iter().map(tool).collect::<Result<_, _>>()?),
        None => Value::Null,
    };
    let mut variables = Map::new();
    variables.insert("tools".to_owned(), tools);
    variables.insert("documents".to_owned(), Value::Null);
    let is_set = |value: &Value| !value.is_null() && value.as_str() != Some("auto");
    for (name, value) in chat.template_arguments.iter().filter(|(_, value)| is_set(value)) {
        variables.insert(name.clone(), value.clone());
    }
    if let Some(effort) = &chat.reasoning_effort {
        if effort != "auto" {
            variables.insert("reasoning_effort".to_owned(), Value::from(effort.as_str()));
        }
        if !chat.template_arguments.contains_key("enable_thinking") {
            variables.insert("enable_thinking".to_owned(), Value::from(effort != "none"));
        }
    }
    if let Some(documents) = &chat.documents {
        variables.insert("documents".to_owned(), Value::Array(documents.clone()));
    }
    variables.insert("messages".to_owned(), Value::Array(messages));
    variables.insert("add_generation_prompt".to_owned(), chat.add_generation_prompt.into());
    variables.insert("continue_final_message".to_owned(), chat.continue_final_message.into());
    Ok(variables)
}

fn message(message: &Map<String, Value>, format: ContentFormat) -> Result<Value, TemplateError> {
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
    let parts = parts(message.get("content"), role == "system")?;
    let mut normal = Map::new();
    normal.insert("role".to_owned(), Value::from(role));
    normal.insert("content".to_owned(), content(parts, role, format));
    match role {
        "assistant" => assistant(message, &mut normal)?,
        "tool" => copy(message, &mut normal, "tool_call_id"),
        "developer" => {
            let tools = message.get("tools").cloned().unwrap_or_default();
            normal.insert("tools".to_owned(), tools);
        }
        _ => {}
    }
    for name in ["name", "task"] {
        if message.get(name).is_some_and(Value::is_string) {
            copy(message, &mut normal, name);
        }
    }
    Ok(Value::Object(normal))
}

fn copy(from: &Map<String, Value>, to: &mut Map<String, Value>, name: &str) {
    if let Some(value) = from.get(name) {
        to.insert(name.to_owned(), value.clone());
    }
}

/// One part of a message's content.
enum Part {
    Text {
        text: String,
        /// Fields that no kind of part has.
        others: Map<String, Value>,
    },
    /// The name of a tool that is loaded later.
    ToolReference(String),
}

impl Part {
    fn into_text(self) -> String {
        match self {
            Self::Text { text, .. } | Self::ToolReference(text) => text,
        }
    }

    fn into_value(self) -> Value {
        let (kind, field, text, others) = match self {
            Self::Text { text, others } => ("text", "text", text, others),
            Self::ToolReference(name) => ("tool_reference", "name", name, Map::new()),
        };
        let mut fields = Map::new();
        fields.insert("type".to_owned(), Value::from(kind));
        fields.insert(field.to_owned(), Value::from(text));
        fields.extend(others);
        Value::Object(fields)
    }
}

fn parts(content: Option<&Value>, is_system: bool) -> Result<Vec<Part>, TemplateError> {
    let one = content.filter(|content| content.is_string());
    let parts = match content {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(parts)) => parts.as_slice(),
        Some(_) => one.map(std::slice::from_ref).ok_or(TemplateError::Refused("content"))?,
    };
    let mut read = Vec::with_capacity(parts.len());
    for part in parts {
        let kind = part.get("type").and_then(Value::as_str);
        let is_plain_text = part.is_string() || kind == Some("text");
        match self::part(part, kind)? {
            Some(Part::Text { text, others }) if is_system && is_plain_text => {
                let text = without_billing_header(text);
                read.extend(text.map(|text| Part::Text { text, others }));
            }
            part => read.extend(part),
        }
    }
    Ok(read)
}

fn part(part: &Value, kind: Option<&str>) -> Result<Option<Part>, TemplateError> {
    if let Some(text) = part.as_str() {
        return Ok(Some(Part::Text { text: text.to_owned(), others: Map::new() }));
    }
    let field = match kind {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        Some("tool_reference") => "name",
        _ => return Err(TemplateError::Refused("content")),
    };
    match part.get(field) {
        Some(Value::String(name)) if field == "name" => Ok(Some(Part::ToolReference(name.clone()))),
        Some(Value::String(text)) => {
            Ok(Some(Part::Text { text: text.clone(), others: own_fields(part) }))
        }
        None | Some(Value::Null) if matches!(kind, Some("text" | "refusal")) => Ok(None),
        _ => Err(TemplateError::Refused("content")),
    }
}

/// The fields of a part that are in none of the engine's kinds of part.
fn own_fields(part: &Value) -> Map<String, Value> {
    let fields = part.as_object().into_iter().flatten();
    let own = fields.filter(|(name, _)| !PART_FIELDS.contains(&name.as_str()));
    own.map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn without_billing_header(text: String) -> Option<String> {
    if !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    let (_, rest) = text.split_once('\n')?;
    (!rest.is_empty()).then(|| rest.to_owned())
}

fn content(parts: Vec<Part>, role: &str, format: ContentFormat) -> Value {
    let is_all_text = parts.iter().all(|part| matches!(part, Part::Text { .. }));
    let is_text = format == ContentFormat::Text || role == "tool" && is_all_text;
    if is_text {
        let mut texts = parts.into_iter().map(Part::into_text);
        // One part is the common case, and it can be megabytes: it is moved, not joined.
        let mut text = texts.next().unwrap_or_default();
        for more in texts {
            text.push('\n');
            text.push_str(&more);
        }
        return Value::from(text);
    }
    Value::Array(parts.into_iter().map(Part::into_value).collect())
}

fn assistant(
    message: &Map<String, Value>,
    normal: &mut Map<String, Value>,
) -> Result<(), TemplateError> {
    match message.get("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) if calls.is_empty() => {}
        Some(Value::Array(calls)) => {
            let calls = calls.iter().map(tool_call).collect::<Result<_, _>>()?;
            normal.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        Some(_) => return Err(TemplateError::Refused("tool_calls")),
    }
    let given = |name| message.get(name).filter(|value: &&Value| !value.is_null());
    if let Some(reasoning) = given("reasoning").or_else(|| given("reasoning_content")) {
        for name in ["reasoning", "reasoning_content"] {
            normal.insert(name.to_owned(), reasoning.clone());
        }
    }
    Ok(())
}

fn tool_call(call: &Value) -> Result<Value, TemplateError> {
    let refused = TemplateError::Refused("tool_calls");
    let Value::Object(call) = call else { return Err(refused) };
    let is_function = call.get("type").is_none_or(|kind| kind.as_str() == Some("function"));
    let Some(Value::Object(function)) = call.get("function").filter(|_| is_function) else {
        return Err(refused);
    };
    let arguments = match function.get("arguments") {
        Some(Value::Object(arguments)) => Value::Object(arguments.clone()),
        Some(Value::String(text)) if !text.is_empty() => match json_text(text) {
            JsonText::Value(Value::Object(arguments)) => Value::Object(arguments),
            JsonText::Value(_) | JsonText::Invalid => Value::Object(Map::new()),
            JsonText::OnlyPython => return Err(TemplateError::Arguments),
        },
        _ => Value::Object(Map::new()),
    };
    let mut normal = Map::new();
    normal.insert("arguments".to_owned(), arguments);
    extend(&mut normal, function, &["name"]);
    let mut normal_call = Map::new();
    copy(call, &mut normal_call, "id");
    normal_call.insert("function".to_owned(), Value::Object(normal));
    extend(&mut normal_call, call, &["type"]);
    Ok(Value::Object(normal_call))
}

/// Adds the fields of `from` that are not there yet: those in `first`, then the others in the client's order.
fn extend(to: &mut Map<String, Value>, from: &Map<String, Value>, first: &[&str]) {
    let known = first.iter().filter_map(|name| from.get_key_value(*name));
    for (name, value) in known.chain(from) {
        if !to.contains_key(name) {
            to.insert(name.clone(), value.clone());
        }
    }
}

fn tool(tool: &Map<String, Value>) -> Result<Value, TemplateError> {
    let refused = TemplateError::Refused("tools");
    let is_function = tool.get("type").is_none_or(|kind| kind.as_str() == Some("function"));
    let Some(Value::Object(function)) = tool.get("function").filter(|_| is_function) else {
        return Err(refused);
    };
    let given = |from: &Map<String, Value>, name: &str, fits: fn(&Value) -> bool| {
        let value = from.get(name).cloned().unwrap_or_default();
        if value.is_null() || fits(&value) { Ok(value) } else { Err(refused.clone()) }
    };
    let name = given(function, "name", Value::is_string)?;
    if name.is_null() {
        return Err(refused);
    }
    let mut normal = Map::new();
    normal.insert("name".to_owned(), name);
    normal.insert("description".to_owned(), given(function, "description", Value::is_string)?);
    normal.insert("parameters".to_owned(), given(function, "parameters", Value::is_object)?);
    let deferred = given(tool, "defer_loading", Value::is_boolean)?;
    let strict = given(function, "strict", Value::is_boolean)?;
    let function_deferred = match given(function, "defer_loading", Value::is_boolean)? {
        Value::Null => deferred.clone(),
        own => own,
    };
    for (name, value) in [("strict", strict), ("defer_loading", function_deferred)] {
        if !value.is_null() {
            normal.insert(name.to_owned(), value);
        }
    }
    let mut tool = Map::new();
    tool.insert("type".to_owned(), Value::from("function"));
    tool.insert("function".to_owned(), Value::Object(normal));
    if !deferred.is_null() {
        tool.insert("defer_loading".to_owned(), deferred);
    }
    Ok(Value::Object(tool))
}

fn has_role(message: &Value, role: &str) -> bool {
    message.get("role").and_then(Value::as_str) == Some(role)
}

fn without_developer(mut messages: Vec<Value>) -> Vec<Value> {
    if !messages.iter().any(|message| has_role(message, "developer")) {
        return messages;
    }
    for message in messages.iter_mut().filter(|message| has_role(message, "developer")) {
        if let Value::Object(message) = message {
            message.insert("role".to_owned(), Value::from("system"));
            message.shift_remove("tools");
        }
    }
    let last_system = messages.iter().rposition(|message| has_role(message, "system"));
    if last_system.is_none_or(|last| last == 0) {
        return messages;
    }
    let (system, mut others): (Vec<Value>, Vec<Value>) =
        messages.into_iter().partition(|message| has_role(message, "system"));
    let texts: Vec<String> =
        system.iter().map(system_text).filter(|text| !text.is_empty()).collect();
    let fields = [("role", Value::from("system")), ("content", Value::from(texts.join("\n\n")))];
    others.insert(0, fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect());
    others
}

fn system_text(message: &Value) -> String {
    match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts: Vec<&str> =
                parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)).collect();
            texts.join("\n")
        }
        _ => String::new(),
    }
}
