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
use crate::request::{Chat, JsonText, Media, json_text};
use serde_json::{Map, Value};

/// Claude Code's line that changes with every request.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// For media of a model whose placeholder is not configured: what is rendered from there on is not used.
const UNKNOWN_PLACEHOLDER: &str = "\u{fffb}";

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
        messages.push(self::message(chat, message, format)?);
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

fn message(
    chat: &Chat,
    message: &Map<String, Value>,
    format: ContentFormat,
) -> Result<Value, TemplateError> {
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
    let parts = parts(chat, message.get("content"), role == "system")?;
    let mut normal = Map::new();
    normal.insert("role".to_owned(), Value::from(role));
    normal.insert("content".to_owned(), content(chat, parts, role, format)?);
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
enum Part<'a> {
    Text {
        text: String,
        /// Fields that no kind of part has.
        others: Map<String, Value>,
    },
    /// The name of a tool that is loaded later.
    ToolReference(String),
    /// An image, sound or video.
    Media(&'a Media),
}

impl Part<'_> {
    /// What it is in a text. Media stand in front of it.
    fn into_text(self) -> Option<String> {
        match self {
            Self::Text { text, .. } | Self::ToolReference(text) => Some(text),
            Self::Media(_) => None,
        }
    }

    fn into_value(self) -> Value {
        let mut fields = Map::new();
        let mut set = |name: &str, text: String| fields.insert(name.to_owned(), Value::from(text));
        let others = match self {
            Self::Text { text, others } => {
                set("type", "text".to_owned());
                set("text", text);
                others
            }
            Self::ToolReference(name) => {
                set("type", "tool_reference".to_owned());
                set("name", name);
                Map::new()
            }
            Self::Media(Media { stand_in: Some(text), .. }) => {
                set("type", "text".to_owned());
                set("text", text.clone());
                Map::new()
            }
            Self::Media(item) => {
                set("type", item.kind.as_str().to_owned());
                own_fields(&item.fields)
            }
        };
        fields.extend(others);
        Value::Object(fields)
    }
}

fn parts<'a>(
    chat: &'a Chat,
    content: Option<&Value>,
    is_system: bool,
) -> Result<Vec<Part<'a>>, TemplateError> {
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
        if let Some(item) = part.as_u64().and_then(|place| usize::try_from(place).ok()) {
            let item = chat.media.get(item).ok_or(TemplateError::Refused("content"))?;
            read.push(Part::Media(item));
            continue;
        }
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

fn part<'a>(part: &Value, kind: Option<&str>) -> Result<Option<Part<'a>>, TemplateError> {
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
            let others = part.as_object().map(own_fields).unwrap_or_default();
            Ok(Some(Part::Text { text: text.clone(), others }))
        }
        None | Some(Value::Null) if matches!(kind, Some("text" | "refusal")) => Ok(None),
        _ => Err(TemplateError::Refused("content")),
    }
}

/// The fields of a part that are in none of the engine's kinds of part.
fn own_fields(part: &Map<String, Value>) -> Map<String, Value> {
    let own = part.iter().filter(|(name, _)| !PART_FIELDS.contains(&name.as_str()));
    own.map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn without_billing_header(text: String) -> Option<String> {
    if !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    let (_, rest) = text.split_once('\n')?;
    (!rest.is_empty()).then(|| rest.to_owned())
}

fn content(
    chat: &Chat,
    parts: Vec<Part<'_>>,
    role: &str,
    format: ContentFormat,
) -> Result<Value, TemplateError> {
    let is_all_text = parts.iter().all(|part| matches!(part, Part::Text { .. }));
    let is_text = format == ContentFormat::Text || role == "tool" && is_all_text;
    if !is_text {
        return Ok(Value::Array(parts.into_iter().map(Part::into_value).collect()));
    }
    let media: Vec<&Media> = parts
        .iter()
        .filter_map(|part| if let Part::Media(item) = part { Some(*item) } else { None })
        .collect();
    let mut texts = parts.into_iter().filter_map(Part::into_text);
    // One part is the common case, and it can be megabytes: it is moved, not joined.
    let mut text = texts.next().unwrap_or_default();
    for more in texts {
        text.push('\n');
        text.push_str(&more);
    }
    if !media.is_empty() {
        text = behind_placeholders(chat, &media, text)?;
    }
    Ok(Value::from(text))
}

/// A message's text behind a line for each of its media, kind by kind, but for those that the text names itself.
fn behind_placeholders(
    chat: &Chat,
    media: &[&Media],
    text: String,
) -> Result<String, TemplateError> {
    let written = |item: &Media| -> String {
        let rule = chat.rules.media.of(item.kind).map(|rule| rule.placeholder.as_str());
        item.stand_in.as_deref().or(rule).unwrap_or(UNKNOWN_PLACEHOLDER).to_owned()
    };
    let mut placeholders: Vec<(String, usize)> = Vec::new();
    for item in media {
        let placeholder = written(item);
        match placeholders.iter_mut().find(|(known, _)| *known == placeholder) {
            Some((_, count)) => *count += 1,
            None => placeholders.push((placeholder, 1)),
        }
    }
    let mut lines = Vec::new();
    for (placeholder, count) in placeholders {
        let named = text.matches(placeholder.as_str()).count();
        let missing = count.checked_sub(named).ok_or(TemplateError::Refused("content"))?;
        lines.extend(std::iter::repeat_n(placeholder, missing));
    }
    if !text.is_empty() {
        lines.push(text);
    }
    Ok(lines.join("\n"))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Api, Input, parse};

    fn chat(body: &str) -> Chat {
        match parse(Api::Chat, body.as_bytes()).expect(body).input {
            Input::Chat(chat) => *chat,
            input => panic!("{body}: {input:?}"),
        }
    }

    fn normal(messages: &str, format: ContentFormat) -> Result<String, TemplateError> {
        let chat = chat(&format!(r#"{{"messages": {messages}}}"#));
        variables(&chat, format, "")
            .map(|mut variables| variables.remove("messages").unwrap_or_default().to_string())
    }

    /// Expected messages are what vLLM 0.32's own functions made of the same ones.
    #[track_caller]
    fn check(messages: &str, expected: &str) {
        assert_eq!(normal(messages, ContentFormat::Text).as_deref(), Ok(expected), "{messages}");
    }

    #[track_caller]
    fn check_parts(messages: &str, expected: &str) {
        assert_eq!(normal(messages, ContentFormat::Parts).as_deref(), Ok(expected), "{messages}");
    }

    #[track_caller]
    fn check_refused(messages: &str, expected: TemplateError) {
        assert_eq!(normal(messages, ContentFormat::Text), Err(expected), "{messages}");
    }

    /// An assistant's message with one call, of these fields of `function`.
    fn call(function: &str) -> String {
        format!(
            r#"[{{"role":"assistant","tool_calls":[{{"type":"function","id":"1","function":{{{function}}}}}]}}]"#
        )
    }

    #[test]
    fn parts_are_joined_for_templates_that_take_texts() {
        let messages = r#"[{"role":"user","content":[{"type":"text","text":"a","cache_control":{}},"b",
            {"type":"input_text","text":"c"},{"type":"refusal","refusal":"d"},{"type":"thinking","thinking":"e"}]}]"#;
        check(messages, r#"[{"role":"user","content":"a\nb\nc\nd\ne"}]"#);
        check_parts(
            messages,
            r#"[{"role":"user","content":[{"type":"text","text":"a","cache_control":{}},{"type":"text","text":"b"},{"type":"text","text":"c"},{"type":"text","text":"d"},{"type":"text","text":"e"}]}]"#,
        );
    }

    #[test]
    fn absent_content_is_empty() {
        check(r#"[{"role":"assistant"}]"#, r#"[{"role":"assistant","content":""}]"#);
        check(r#"[{"role":"assistant","content":null}]"#, r#"[{"role":"assistant","content":""}]"#);
        check(r#"[{"role":"user","content":[]}]"#, r#"[{"role":"user","content":""}]"#);
        check_parts(r#"[{"role":"assistant"}]"#, r#"[{"role":"assistant","content":[]}]"#);
        check_parts(
            r#"[{"role":"user","content":"a"}]"#,
            r#"[{"role":"user","content":[{"type":"text","text":"a"}]}]"#,
        );
    }

    #[test]
    fn content_of_unknown_kind_is_refused() {
        let refused = TemplateError::Refused("content");
        check_refused(r#"[{"role":"user","content":5}]"#, refused.clone());
        check_refused(r#"[{"role":"user","content":[{"text":"a"}]}]"#, refused.clone());
        check_refused(
            r#"[{"role":"user","content":[{"type":"nope","text":"a"}]}]"#,
            refused.clone(),
        );
        check_refused(r#"[{"role":"user","content":[5]}]"#, refused);
    }

    #[test]
    fn tool_results_are_texts_unless_they_refer_to_tools() {
        let result = r#"[{"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#;
        let expected = r#"[{"role":"tool","content":"a\nb","tool_call_id":"1"}]"#;
        check(result, expected);
        check_parts(result, expected);
        let reference = r#"[{"role":"tool","content":[{"type":"tool_reference","name":"t"},{"type":"text","text":"b"}]}]"#;
        check(reference, r#"[{"role":"tool","content":"t\nb"}]"#);
        check_parts(
            reference,
            r#"[{"role":"tool","content":[{"type":"tool_reference","name":"t"},{"type":"text","text":"b"}]}]"#,
        );
    }

    #[test]
    fn unknown_fields_of_messages_are_dropped() {
        check(
            r#"[{"x":1,"content":"a","role":"user","name":"bob","task":"t","metadata":{}}]"#,
            r#"[{"role":"user","content":"a","name":"bob","task":"t"}]"#,
        );
        check(
            r#"[{"role":"user","content":"a","tool_calls":[5],"reasoning":"r","name":5}]"#,
            r#"[{"role":"user","content":"a"}]"#,
        );
    }

    #[test]
    fn arguments_become_objects() {
        #[track_caller]
        fn check_arguments(given: &str, expected: &str) {
            let expected = format!(
                r#"[{{"role":"assistant","content":"","tool_calls":[{{"id":"1","function":{{"arguments":{expected},"name":"f"}},"type":"function"}}]}}]"#
            );
            check(&call(&format!(r#""name":"f","arguments":{given}"#)), &expected);
        }
        check_arguments(r#""{\"b\": 1, \"a\": [2]}""#, r#"{"b":1,"a":[2]}"#);
        check_arguments(r#""{not json""#, "{}");
        check_arguments(r#""[1]""#, "{}");
        check_arguments(r#""42""#, "{}");
        check_arguments(r#""""#, "{}");
        check_arguments("null", "{}");
        check_arguments(r#"{"a": 1}"#, r#"{"a":1}"#);
        let python_only = call(r#""name":"f","arguments":"{\"a\": NaN}""#);
        check_refused(&python_only, TemplateError::Arguments);
    }

    #[test]
    fn fields_of_calls_are_put_in_order() {
        check(
            &call(r#""extra":2,"name":"f","arguments":"{}""#),
            r#"[{"role":"assistant","content":"","tool_calls":[{"id":"1","function":{"arguments":{},"name":"f","extra":2},"type":"function"}]}]"#,
        );
    }

    #[test]
    fn calls_of_other_kinds_are_refused_and_none_are_dropped() {
        let refused = TemplateError::Refused("tool_calls");
        check_refused(r#"[{"role":"assistant","tool_calls":[5]}]"#, refused.clone());
        check_refused(r#"[{"role":"assistant","tool_calls":{"a":1}}]"#, refused.clone());
        check_refused(
            r#"[{"role":"assistant","tool_calls":[{"type":"custom","custom":{}}]}]"#,
            refused,
        );
        let none = r#"[{"role":"assistant","content":"a"}]"#;
        check(r#"[{"role":"assistant","content":"a","tool_calls":[]}]"#, none);
        check(r#"[{"role":"assistant","content":"a","tool_calls":null}]"#, none);
    }

    #[test]
    fn reasoning_goes_by_both_names() {
        let both =
            r#"[{"role":"assistant","content":"a","reasoning":"r","reasoning_content":"r"}]"#;
        check(r#"[{"role":"assistant","content":"a","reasoning":"r"}]"#, both);
        check(r#"[{"role":"assistant","content":"a","reasoning_content":"r"}]"#, both);
        check(
            r#"[{"role":"assistant","content":"a","reasoning":"r","reasoning_content":"x"}]"#,
            both,
        );
        check(
            r#"[{"role":"assistant","content":"a","reasoning":null,"reasoning_content":"r"}]"#,
            both,
        );
    }

    #[test]
    fn billing_header_is_dropped_from_system_messages_only() {
        let with = |role: &str| {
            format!(r#"[{{"role":"{role}","content":"x-anthropic-billing-header: a\nb\nc"}}]"#)
        };
        check(&with("system"), r#"[{"role":"system","content":"b\nc"}]"#);
        check(
            &with("user"),
            r#"[{"role":"user","content":"x-anthropic-billing-header: a\nb\nc"}]"#,
        );
        check(
            r#"[{"role":"system","content":"x-anthropic-billing-header: a"}]"#,
            r#"[{"role":"system","content":""}]"#,
        );
        check(
            r#"[{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: a\n"},
                {"type":"input_text","text":"x-anthropic-billing-header: b"},"x-anthropic-billing-header: c\nd"]}]"#,
            r#"[{"role":"system","content":"x-anthropic-billing-header: b\nd"}]"#,
        );
    }

    #[test]
    fn developer_becomes_system_and_systems_become_one() {
        check(
            r#"[{"role":"developer","content":"D","tools":[1]},{"role":"user","content":"x"}]"#,
            r#"[{"role":"system","content":"D"},{"role":"user","content":"x"}]"#,
        );
        check(
            r#"[{"role":"developer","content":"D"},{"role":"user","content":"x"},{"role":"system","content":""},
                {"role":"system","content":[{"type":"text","text":"p"},{"type":"text","text":"q"}]}]"#,
            r#"[{"role":"system","content":"D\n\np\nq"},{"role":"user","content":"x"}]"#,
        );
        // Without a developer message, system messages stay where they are.
        let systems = r#"[{"role":"system","content":"a"},{"role":"system","content":"b"}]"#;
        check(systems, systems);
    }

    #[test]
    fn developer_stays_where_the_template_knows_it() {
        let chat = chat(r#"{"messages": [{"role": "developer", "content": "D"}]}"#);
        let variables = variables(&chat, ContentFormat::Text, "{{ 'developer' }}").expect("normal");
        let expected = r#"[{"role":"developer","content":"D","tools":null}]"#;
        assert_eq!(variables["messages"].to_string(), expected);
    }

    #[track_caller]
    fn check_variable(fields: &str, name: &str, expected: Option<&str>) {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], {fields}}}"#);
        let variables = variables(&chat(&body), ContentFormat::Text, "").expect("normal");
        let value = variables.get(name).map(Value::to_string);
        assert_eq!(value.as_deref(), expected, "{name} of {fields}");
    }

    #[test]
    fn tools_are_written_anew() {
        check_variable(
            r#""tools": [{"x": 1, "function": {"parameters": {"z": 1, "a": {}}, "y": 2, "name": "f", "strict": false}}]"#,
            "tools",
            Some(
                r#"[{"type":"function","function":{"name":"f","description":null,"parameters":{"z":1,"a":{}},"strict":false}}]"#,
            ),
        );
        check_variable(
            r#""tools": [{"type": "function", "function": {"name": "f"}, "defer_loading": true}], "tool_choice": "none""#,
            "tools",
            Some(
                r#"[{"type":"function","function":{"name":"f","description":null,"parameters":null,"defer_loading":true},"defer_loading":true}]"#,
            ),
        );
        check_variable(r#""tools": null"#, "tools", Some("null"));
    }

    #[test]
    fn tools_without_a_function_are_refused() {
        for tool in [
            r#"{"type": "function"}"#,
            r#"{"type": "x", "function": {"name": "f"}}"#,
            r#"{"function": {}}"#,
        ] {
            let body = format!(
                r#"{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}"#
            );
            let refused = variables(&chat(&body), ContentFormat::Text, "");
            assert_eq!(refused, Err(TemplateError::Refused("tools")), "{tool}");
        }
    }

    #[test]
    fn arguments_for_the_template_are_passed_unless_unset() {
        let fields = r#""chat_template_kwargs": {"a": false, "b": null, "c": "auto", "add_generation_prompt": false}"#;
        check_variable(fields, "a", Some("false"));
        check_variable(fields, "b", None);
        check_variable(fields, "c", None);
        check_variable(fields, "add_generation_prompt", Some("true"));
        check_variable(r#""documents": [{"title": "t"}]"#, "documents", Some(r#"[{"title":"t"}]"#));
        check_variable(r#""documents": null"#, "documents", Some("null"));
    }

    #[test]
    fn effort_sets_thinking_unless_the_arguments_do() {
        check_variable(r#""reasoning_effort": "low""#, "enable_thinking", Some("true"));
        check_variable(r#""reasoning_effort": "none""#, "enable_thinking", Some("false"));
        check_variable(r#""stream": true"#, "enable_thinking", None);
        let fields = r#""reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false, "reasoning_effort": "x"}"#;
        check_variable(fields, "enable_thinking", Some("false"));
        check_variable(fields, "reasoning_effort", Some("\"low\""));
    }
}
