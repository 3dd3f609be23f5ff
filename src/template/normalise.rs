//! What the engine does to a chat body before its template sees it.
//!
//! In order, where the engine's table ([`super::engines`]) says so:
//!
//! 1. `reasoning_content` of a message becomes `reasoning`, unless that is given too.
//! 2. Content becomes parts: null is none, a text is one. Of a `system` message, a first line that starts with
//!    `x-anthropic-billing-header` is dropped from each part.
//! 3. For a template that takes texts, parts that are not empty are joined, behind a placeholder for each of the media. For one that walks
//!    over content, they stay a list, except in `tool` messages, where only what is no text keeps one.
//! 4. Of the fields of a message those stay that the engine knows for its role.
//! 5. Arguments of tool calls, a JSON text, become an object; what is no object becomes an empty one, or is refused. A
//!    call's fields are put in order.
//! 6. Tools are written anew: unknown keys go, an absent `description` or `parameters` becomes null.
//! 7. `developer` becomes `system` where the template does not name that role, and then all system messages become
//!    one at the front, joined by blank lines.
//! 8. Arguments for the template come from the configuration, the body's `chat_template_kwargs` and its own fields.
//!
//! It does not check what [`crate::request`] has checked.

use super::TemplateError;
use super::content::ContentFormat;
use super::engines::Table;
use super::parts::{Part, own_fields};
use crate::request::{Chat, JsonText, MAX_VALUES, Media, field, json_text};
use serde_json::{Map, Value};
use std::cell::Cell;

/// Claude Code's line that changes with every request.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// For media of a model whose placeholder is not configured: what is rendered from there on is not used.
const UNKNOWN_PLACEHOLDER: &str = "\u{fffb}";

/// The variables the engine would hand to the template. `detected` is how the template takes content by its source.
pub(super) fn variables(
    mut chat: Chat,
    detected: ContentFormat,
    template: &str,
) -> Result<Map<String, Value>, TemplateError> {
    let table = Table::of(chat.rules.engine);
    let format = chat.rules.content_format.unwrap_or_else(|| (table.format)(template, detected));
    let given = std::mem::take(&mut chat.messages);
    let normaliser = Normaliser { chat: &chat, table, format, values_left: Cell::new(MAX_VALUES) };
    let mut messages = Vec::with_capacity(given.len());
    for message in given {
        messages.push(match normaliser.is_normal(&message) {
            true => Value::Object(message),
            false => normaliser.message(&message)?,
        });
    }
    let names_developer = || template.contains("\"developer\"") || template.contains("'developer'");
    if table.converts_developer
        && messages.iter().any(|message| has_role(message, "developer"))
        && !names_developer()
    {
        messages = without_developer(messages);
    }
    let mut variables = Map::new();
    variables.insert("tools".to_owned(), normaliser.tools()?);
    variables.insert("documents".to_owned(), Value::Null);
    normaliser.arguments(&mut variables);
    normaliser.prompt_fields(&mut messages, &mut variables)?;
    variables.insert("messages".to_owned(), Value::Array(messages));
    Ok(variables)
}

/// The tools that the engine would render, as it writes them, or null.
pub(super) fn tools(chat: &Chat) -> Result<Value, TemplateError> {
    let table = Table::of(chat.rules.engine);
    let values_left = Cell::new(MAX_VALUES);
    Normaliser { chat, table, format: ContentFormat::Text, values_left }.tools()
}

/// One chat, and how its engine reads it.
struct Normaliser<'a> {
    chat: &'a Chat,
    table: &'static Table,
    format: ContentFormat,
    /// JSON values that calls' arguments may still have, of all messages together.
    values_left: Cell<usize>,
}

impl<'a> Normaliser<'a> {
    fn tools(&self) -> Result<Value, TemplateError> {
        let choice = self.chat.tool_choice.as_ref();
        let is_none = choice.and_then(Value::as_str) == Some("none");
        let leaves_out =
            self.table.heeds_tool_choice || self.chat.rules.exclude_tools_when_tool_choice_none;
        let Some(tools) = self.chat.tools.as_ref().filter(|_| !(is_none && leaves_out)) else {
            return Ok(Value::Null);
        };
        let named = choice.and_then(|choice| choice.get("function")?.get("name"));
        let is_chosen = |tool: &&Map<String, Value>| match named {
            Some(_) if self.table.heeds_tool_choice => {
                tool.get("function").and_then(|function| function.get("name")) == named
            }
            _ => true,
        };
        let tools: Vec<Value> =
            tools.iter().filter(is_chosen).map(|tool| self.tool(tool)).collect::<Result<_, _>>()?;
        let is_none = tools.is_empty() && self.table.heeds_tool_choice;
        Ok(if is_none { Value::Null } else { Value::Array(tools) })
    }

    /// Arguments of the configuration, then of the body, then what the body's effort sets.
    fn arguments(&self, variables: &mut Map<String, Value>) {
        let Self { chat, table, .. } = self;
        let is_set = |value: &Value| {
            !table.drops_unset_arguments || !value.is_null() && value.as_str() != Some("auto")
        };
        variables.extend(chat.rules.template_arguments.clone());
        let own = chat.template_arguments.iter().filter(|(_, value)| is_set(value));
        variables.extend(own.map(|(name, value)| (name.clone(), value.clone())));
        let Some(effort) = &chat.reasoning_effort else { return };
        let has_own = |name: &str| chat.template_arguments.contains_key(name);
        let value = Value::from(effort.as_str());
        if is_set(&value) && (table.effort_wins || !has_own("reasoning_effort")) {
            variables.insert("reasoning_effort".to_owned(), value);
        }
        for name in table.effort_switches.iter().filter(|name| !has_own(name)) {
            variables.insert((*name).to_owned(), Value::from(effort != "none"));
        }
    }

    /// How the prompt begins and ends.
    fn prompt_fields(
        &self,
        messages: &mut [Value],
        variables: &mut Map<String, Value>,
    ) -> Result<(), TemplateError> {
        let Self { chat, table, .. } = self;
        let mut generates = true;
        if table.has_prompt_fields {
            generates = chat.add_generation_prompt;
            if generates && chat.continue_final_message {
                return Err(TemplateError::Refused("continue_final_message"));
            }
            if let Some(documents) = &chat.documents {
                variables.insert("documents".to_owned(), Value::Array(documents.clone()));
            }
            variables
                .insert("continue_final_message".to_owned(), chat.continue_final_message.into());
        } else if let Some(last) = messages.last_mut().filter(|last| has_role(last, "assistant"))
            && let Some(content) =
                last.get("content").filter(|content| content.is_string()).cloned()
        {
            // The engine encodes a message that is to be continued apart from what was rendered.
            if chat.continue_final_message {
                return Err(TemplateError::FinalMessage);
            }
            let fields = [("role", Value::from("user")), ("content", content)];
            *last = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        }
        variables.insert("add_generation_prompt".to_owned(), generates.into());
        Ok(())
    }

    /// Whether a message is what would be made of it. Most are, a role and a text, which then need not be copied.
    fn is_normal(&self, message: &Map<String, Value>) -> bool {
        let mut fields = message.iter().map(|(name, value)| (name.as_str(), value));
        let (role, content, end) = (fields.next(), fields.next(), fields.next());
        let (Some(("role", Value::String(role))), Some(("content", Value::String(text))), None) =
            (role, content, end)
        else {
            return false;
        };
        let is_changed = match role.as_str() {
            "developer" => true,
            "system" => text.starts_with(BILLING_HEADER),
            _ => false,
        };
        !is_changed && (self.format == ContentFormat::Text || !self.table.wraps_texts)
    }

    fn message(&self, message: &Map<String, Value>) -> Result<Value, TemplateError> {
        let table = self.table;
        let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
        let mut normal = Map::new();
        normal.insert("role".to_owned(), Value::from(role));
        normal.insert("content".to_owned(), self.content(message.get("content"), role)?);
        if role == "assistant" && !table.fields_of(role).contains(&"tool_calls") {
            self.calls(message, &mut normal)?;
        }
        let given = |name: &str| message.get(name).filter(|value| !value.is_null());
        if role == "assistant"
            && let Some(reasoning) = table.reasoning_from.iter().find_map(|name| given(name))
        {
            for name in table.reasoning_to {
                normal.insert((*name).to_owned(), reasoning.clone());
            }
        }
        for name in table.fields_of(role) {
            match *name {
                "tool_calls" => self.calls(message, &mut normal)?,
                "tools" => {
                    if let Some(Value::Array(tools)) = given(name) {
                        let refused = || TemplateError::Refused("tools");
                        let tool = |tool: &Value| self.tool(tool.as_object().ok_or_else(refused)?);
                        let tools = tools.iter().map(tool).collect::<Result<_, _>>()?;
                        normal.insert((*name).to_owned(), Value::Array(tools));
                    }
                }
                "name" | "task" if !given(name).is_some_and(Value::is_string) => {}
                _ => {
                    if let Some(value) = given(name) {
                        normal.insert((*name).to_owned(), value.clone());
                    }
                }
            }
        }
        if role == "developer" && table.converts_developer {
            let tools = message.get("tools").cloned().unwrap_or_default();
            normal.insert("tools".to_owned(), tools);
        }
        Ok(Value::Object(normal))
    }

    fn content(&self, content: Option<&Value>, role: &str) -> Result<Value, TemplateError> {
        if let (Some(Value::String(text)), false) = (content, self.table.wraps_texts) {
            return Ok(Value::from(text.as_str()));
        }
        if matches!(content, None | Some(Value::Null)) && !self.table.wraps_texts {
            return Ok(Value::from(""));
        }
        let parts = self.parts(content, role == "system")?;
        let is_all_text = parts.iter().all(|part| matches!(part, Part::Text { .. }));
        let is_tools_text = role == "tool" && is_all_text;
        if self.format == ContentFormat::Parts && !is_tools_text {
            return Ok(Value::Array(
                parts.into_iter().map(|part| part.into_value(self.table)).collect(),
            ));
        }
        let separator = match self.format {
            ContentFormat::Parts => self.table.tool_separator,
            ContentFormat::Text => self.table.separator,
        };
        let media: Vec<&Media> = parts
            .iter()
            .filter_map(|part| if let Part::Media(item) = part { Some(*item) } else { None })
            .collect();
        let keeps_empty = self.format == ContentFormat::Parts || !self.table.drops_empty_texts;
        let texts = parts.into_iter().filter_map(Part::into_text);
        let mut texts = texts.filter(|text| keeps_empty || !text.is_empty());
        // One part is the common case, and it can be megabytes: it is moved, not joined.
        let mut text = texts.next().unwrap_or_default();
        for more in texts {
            text.push_str(separator);
            text.push_str(&more);
        }
        if !media.is_empty() && self.table.writes_placeholders {
            text = self.behind_placeholders(&media, text)?;
        }
        Ok(Value::from(text))
    }

    fn parts(
        &self,
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
            if let Some(item) = part.as_u64().and_then(|place| usize::try_from(place).ok()) {
                let item = self.chat.media.get(item).ok_or(TemplateError::Refused("content"))?;
                read.push(Part::Media(item));
                continue;
            }
            let kind = part.get("type").and_then(Value::as_str);
            let is_plain_text = part.is_string() || kind == Some("text");
            match self.part(part, kind)? {
                Some(Part::Text { text, others })
                    if is_system && is_plain_text && self.table.drops_billing_header =>
                {
                    let text = without_billing_header(text);
                    read.extend(text.map(|text| Part::Text { text, others }));
                }
                part => read.extend(part),
            }
        }
        Ok(read)
    }

    fn part(&self, part: &Value, kind: Option<&str>) -> Result<Option<Part<'a>>, TemplateError> {
        let refused = TemplateError::Refused("content");
        // A text without a kind is vLLM's alone.
        if let Some(text) = part.as_str().filter(|_| self.table.wraps_texts) {
            return Ok(Some(Part::Text { text: text.to_owned(), others: Map::new() }));
        }
        let kind = kind.ok_or_else(|| refused.clone())?;
        if self.table.dropped_parts.contains(&kind) {
            return Ok(None);
        }
        if kind == "tool_reference" {
            let name = part.get("name").and_then(Value::as_str).ok_or(refused)?;
            return Ok(Some(Part::ToolReference(name.to_owned())));
        }
        let known = self.table.text_parts.iter().find(|(of, ..)| *of == kind);
        let (_, field, may_lack) = known.ok_or_else(|| refused.clone())?;
        match part.get(*field) {
            Some(Value::String(text)) => {
                let own = part.as_object().filter(|_| self.table.keeps_part_fields);
                let others = own.map(own_fields).unwrap_or_default();
                Ok(Some(Part::Text { text: text.clone(), others }))
            }
            None | Some(Value::Null) if *may_lack => Ok(None),
            _ => Err(refused),
        }
    }

    /// A message's text behind a line for each of its media, kind by kind, but for those that the text names itself.
    fn behind_placeholders(&self, media: &[&Media], text: String) -> Result<String, TemplateError> {
        let written = |item: &Media| -> String {
            let rule = self.chat.rules.media.of(item.kind).map(|rule| rule.placeholder.as_str());
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

    fn calls(
        &self,
        message: &Map<String, Value>,
        normal: &mut Map<String, Value>,
    ) -> Result<(), TemplateError> {
        match message.get("tool_calls") {
            None | Some(Value::Null) => {}
            Some(Value::Array(calls)) if calls.is_empty() && self.table.drops_empty_calls => {}
            Some(Value::Array(calls)) => {
                let calls = calls.iter().map(|call| self.call(call)).collect::<Result<_, _>>()?;
                normal.insert("tool_calls".to_owned(), Value::Array(calls));
            }
            Some(_) => return Err(TemplateError::Refused("tool_calls")),
        }
        Ok(())
    }

    fn call(&self, call: &Value) -> Result<Value, TemplateError> {
        let refused = TemplateError::Refused("tool_calls");
        let Value::Object(call) = call else { return Err(refused) };
        let is_function = call.get("type").is_none_or(|kind| kind.as_str() == Some("function"));
        let Some(Value::Object(function)) = call.get("function").filter(|_| is_function) else {
            return Err(refused);
        };
        let mut called = function.clone();
        called.insert("arguments".to_owned(), self.call_arguments(function.get("arguments"))?);
        let mut normal = call.clone();
        if !self.table.keeps_call_fields {
            normal.insert("type".to_owned(), Value::from("function"));
        }
        normal.insert("function".to_owned(), self.ordered(called, self.table.called));
        Ok(self.ordered(normal, self.table.call))
    }

    fn call_arguments(&self, arguments: Option<&Value>) -> Result<Value, TemplateError> {
        let empty = || match self.table.empties_bad_arguments {
            true => Ok(Value::Object(Map::new())),
            false => Err(TemplateError::Refused("tool_calls")),
        };
        match arguments {
            Some(Value::Object(arguments)) => Ok(Value::Object(arguments.clone())),
            Some(Value::String(text)) if !text.is_empty() => {
                match json_text(text, &self.values_left) {
                    JsonText::Value(Value::Object(arguments)) => Ok(Value::Object(arguments)),
                    JsonText::TooMany => Err(TemplateError::Limit),
                    JsonText::OnlyPython if self.table.empties_bad_arguments => {
                        Err(TemplateError::Arguments)
                    }
                    _ => empty(),
                }
            }
            None | Some(Value::Null) if !self.table.empties_bad_arguments => Ok(Value::Null),
            _ => empty(),
        }
    }

    /// These fields first, and then the client's own or none; null for what is absent where the engine says so.
    fn ordered(&self, mut fields: Map<String, Value>, order: &[&str]) -> Value {
        let mut normal = Map::new();
        for name in order {
            match fields.shift_remove(*name) {
                Some(value) => {
                    normal.insert((*name).to_owned(), value);
                }
                None if !self.table.keeps_call_fields => {
                    normal.insert((*name).to_owned(), Value::Null);
                }
                None => {}
            }
        }
        if self.table.keeps_call_fields {
            normal.extend(fields);
        }
        Value::Object(normal)
    }

    fn tool(&self, tool: &Map<String, Value>) -> Result<Value, TemplateError> {
        let refused = TemplateError::Refused("tools");
        let is_function = tool.get("type").is_none_or(|kind| kind.as_str() == Some("function"));
        let Some(Value::Object(function)) = tool.get("function").filter(|_| is_function) else {
            return Err(refused);
        };
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(refused);
        }
        let deferred = checked(tool, "defer_loading")?;
        let mut normal = Map::new();
        for name in self.function_fields(function) {
            let value = match checked(function, name)? {
                Value::Null if name == "defer_loading" => deferred.clone(),
                value => value,
            };
            if !value.is_null() || self.table.function_nulls.contains(&name) {
                normal.insert(name.to_owned(), value);
            }
        }
        let mut tool = Map::new();
        tool.insert("type".to_owned(), Value::from("function"));
        tool.insert("function".to_owned(), Value::Object(normal));
        if !deferred.is_null() || self.table.tool_has_null {
            tool.insert("defer_loading".to_owned(), deferred);
        }
        Ok(Value::Object(tool))
    }

    /// The fields of a function that the engine knows, in the order in which it writes them.
    fn function_fields(&self, function: &Map<String, Value>) -> Vec<&'static str> {
        let known = self.table.function;
        if !self.table.keeps_tool_order {
            return known.to_vec();
        }
        let given = function.keys().filter_map(|key| known.iter().find(|name| *name == key));
        let mut fields: Vec<&str> = given.copied().collect();
        fields.extend(known.iter().filter(|name| !function.contains_key(**name)));
        fields
    }
}

/// A field of a tool or its function, if it is of the type that the engine takes.
fn checked(from: &Map<String, Value>, name: &str) -> Result<Value, TemplateError> {
    let value = from.get(name).cloned().unwrap_or_default();
    let fits = match name {
        "strict" | "defer_loading" => value.is_boolean(),
        "parameters" => value.is_object(),
        _ => value.is_string(),
    };
    if value.is_null() || fits { Ok(value) } else { Err(TemplateError::Refused("tools")) }
}

fn without_billing_header(text: String) -> Option<String> {
    if !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    let (_, rest) = text.split_once('\n')?;
    (!rest.is_empty()).then(|| rest.to_owned())
}

fn has_role(message: &Value, role: &str) -> bool {
    let message = message.as_object();
    message.and_then(|message| field(message, "role")).and_then(Value::as_str) == Some(role)
}

fn without_developer(mut messages: Vec<Value>) -> Vec<Value> {
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
    use crate::rules::{Engine, Rules};
    use serde_json::json;
    use std::sync::Arc;

    fn chat(body: &str) -> Chat {
        match parse(Api::Chat, body.as_bytes()).expect(body).input {
            Input::Chat(chat) => *chat,
            input => panic!("{body}: {input:?}"),
        }
    }

    fn normal(messages: &str, format: ContentFormat) -> Result<String, TemplateError> {
        let chat = chat(&format!(r#"{{"messages": {messages}}}"#));
        variables(chat, format, "")
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
    fn empty_texts_are_left_out_where_texts_are_joined() {
        #[track_caller]
        fn of(texts: &[&str], expected: &str) {
            let parts: Vec<Value> =
                texts.iter().map(|t| json!({"type": "text", "text": t})).collect();
            let given = json!([{"role": "user", "content": parts}]).to_string();
            check(&given, &json!([{"role": "user", "content": expected}]).to_string());
            check_parts(&given, &given);
        }
        of(&["", "b"], "b");
        of(&["a", "", "b", ""], "a\nb");
        of(&["", ""], "");
        of(&["a", " "], "a\n ");
        of(&["", "\n", "b"], "\n\nb");
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

    /// They are texts within the body, so that its own reader counts each as one value.
    #[test]
    fn arguments_of_all_calls_share_a_bound_of_values() {
        let arguments = format!(r#"{{\"a\": [{}1]}}"#, "1,".repeat(20_000));
        let call = format!(r#"{{"function":{{"name":"f","arguments":"{arguments}"}}}}"#);
        let with = |calls: usize| {
            let calls = vec![call.as_str(); calls].join(",");
            let message = format!(r#"{{"role":"assistant","tool_calls":[{calls}]}}"#);
            let message = serde_json::from_str(&message).expect("JSON");
            let chat = Chat { messages: vec![message], ..Chat::default() };
            variables(chat, ContentFormat::Text, "").map(|_| ())
        };
        assert_eq!([2, 3].map(with), [Ok(()), Err(TemplateError::Limit)]);
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
        let variables = variables(chat, ContentFormat::Text, "{{ 'developer' }}").expect("normal");
        let expected = r#"[{"role":"developer","content":"D","tools":null}]"#;
        assert_eq!(variables["messages"].to_string(), expected);
    }

    #[track_caller]
    fn check_variable(fields: &str, name: &str, expected: Option<&str>) {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], {fields}}}"#);
        let variables = variables(chat(&body), ContentFormat::Text, "").expect("normal");
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
            let refused = variables(chat(&body), ContentFormat::Text, "");
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

    /// What is rendered with these rules: the value of one variable, or why not.
    fn with_rules(body: &str, rules: Rules, name: &str) -> Result<String, TemplateError> {
        let mut chat = chat(body);
        chat.rules = Arc::new(rules);
        let variables = variables(chat.clone(), ContentFormat::Text, "")?;
        Ok(variables.get(name).map(Value::to_string).unwrap_or_default())
    }

    #[track_caller]
    fn check_sglang(fields: &str, name: &str, expected: Result<&str, TemplateError>) {
        let messages = match fields.contains("\"messages\"") {
            true => String::new(),
            false => r#""messages": [{"role": "user", "content": "x"}], "#.to_owned(),
        };
        let rules = Rules { engine: Engine::Sglang, ..Rules::default() };
        let value = with_rules(&format!("{{{messages}{fields}}}"), rules, name);
        assert_eq!(value.as_deref(), expected.as_ref().map(|text| *text), "{fields}");
    }

    #[test]
    fn sglang_joins_texts_by_spaces_and_keeps_its_own_fields() {
        check_sglang(
            r#""messages": [{"role": "developer", "content": "d", "tools": null},
                {"role": "user", "name": "bob", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": null, "reasoning": "no", "reasoning_content": "r", "tool_calls": [
                    {"id": "1", "type": "function", "extra": 1, "function": {"arguments": "{\"a\": 1}", "name": "f"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "x-anthropic-billing-header: a\nb"}]"#,
            "messages",
            Ok(
                r#"[{"role":"developer","content":"d"},{"role":"user","content":"a b"},{"role":"assistant","content":"","reasoning_content":"r","tool_calls":[{"id":"1","index":null,"type":"function","function":{"name":"f","arguments":{"a":1}}}]},{"role":"tool","content":"x-anthropic-billing-header: a\nb","tool_call_id":"1"}]"#,
            ),
        );
    }

    #[test]
    fn sglang_refuses_arguments_that_are_no_object() {
        for arguments in [r#""{not json""#, r#""[1]""#, r#""""#] {
            let call =
                format!(r#"{{"id": "1", "function": {{"name": "f", "arguments": {arguments}}}}}"#);
            let messages = format!(
                r#""messages": [{{"role": "assistant", "tool_calls": [{call}]}}, {{"role": "user", "content": "x"}}]"#
            );
            check_sglang(&messages, "messages", Err(TemplateError::Refused("tool_calls")));
        }
    }

    #[test]
    fn sglang_writes_tools_in_the_clients_order_and_heeds_the_choice() {
        let tools = r#""tools": [{"type": "function", "function": {"parameters": {"z": 1}, "name": "f", "x": 1}}, {"function": {"name": "g", "description": "d"}}]"#;
        let f = r#"{"type":"function","function":{"parameters":{"z":1},"name":"f","description":null},"defer_loading":null}"#;
        let g = r#"{"type":"function","function":{"name":"g","description":"d","parameters":null},"defer_loading":null}"#;
        check_sglang(tools, "tools", Ok(&format!("[{f},{g}]")));
        check_sglang(&format!(r#"{tools}, "tool_choice": "none""#), "tools", Ok("null"));
        let choice = r#""tool_choice": {"type": "function", "function": {"name": "g"}}"#;
        check_sglang(&format!("{tools}, {choice}"), "tools", Ok(&format!("[{g}]")));
    }

    #[test]
    fn sglang_sets_both_switches_by_effort_and_lets_arguments_win() {
        check_sglang(r#""reasoning_effort": "low""#, "thinking", Ok("true"));
        check_sglang(r#""reasoning_effort": "none""#, "enable_thinking", Ok("false"));
        let both = r#""reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high", "x": null}"#;
        check_sglang(both, "reasoning_effort", Ok("\"high\""));
        check_sglang(both, "x", Ok("null"));
        check_sglang(
            r#""documents": [{}], "add_generation_prompt": false"#,
            "documents",
            Ok("null"),
        );
        check_sglang(r#""add_generation_prompt": false"#, "add_generation_prompt", Ok("true"));
    }

    #[test]
    fn sglang_makes_a_last_message_of_the_assistant_the_users() {
        let last = r#""messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "name": "n"}]"#;
        let expected = r#"[{"role":"user","content":"x"},{"role":"user","content":"y"}]"#;
        check_sglang(last, "messages", Ok(expected));
        let continued = format!(r#"{last}, "continue_final_message": true"#);
        check_sglang(&continued, "messages", Err(TemplateError::FinalMessage));
    }

    #[test]
    fn sglang_takes_parts_where_a_template_speaks_of_media() {
        let parts = |template: &str| {
            let table = Table::of(Engine::Sglang);
            (table.format)(template, ContentFormat::Text) == ContentFormat::Parts
        };
        assert!(parts("{# no image #}"));
        assert!(parts("{% for part in message['content'] %}{% endfor %}"));
        assert!(!parts("{% for part in turn['content'] %}{% endfor %}{{ message.content }}"));
        let rules = Rules {
            engine: Engine::Sglang,
            content_format: Some(ContentFormat::Parts),
            ..Rules::default()
        };
        let body = r#"{"messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "b", "cache_control": {}}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}, "cache_control": {}}]}]}"#;
        let expected = r#"[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"text","text":"b"}]},{"role":"user","content":[{"type":"image"}]}]"#;
        assert_eq!(with_rules(body, rules, "messages").as_deref(), Ok(expected));
    }

    #[test]
    fn the_format_of_content_can_be_said() {
        let body = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
        for (format, expected) in [
            (ContentFormat::Text, r#"[{"role":"user","content":"a"}]"#),
            (ContentFormat::Parts, r#"[{"role":"user","content":[{"type":"text","text":"a"}]}]"#),
        ] {
            let rules = Rules { content_format: Some(format), ..Rules::default() };
            assert_eq!(with_rules(body, rules, "messages").as_deref(), Ok(expected));
        }
    }

    #[test]
    fn tools_stay_when_none_is_chosen_unless_the_engine_was_told_otherwise() {
        let body = r#"{"messages": [{"role": "user", "content": "a"}], "tool_choice": "none", "tools": [{"function": {"name": "f"}}]}"#;
        let with = |exclude| {
            let rules = Rules { exclude_tools_when_tool_choice_none: exclude, ..Rules::default() };
            with_rules(body, rules, "tools")
        };
        assert!(with(false).is_ok_and(|tools| tools.contains("\"f\"")));
        assert_eq!(with(true).as_deref(), Ok("null"));
    }

    #[test]
    fn the_engines_own_arguments_give_way_to_the_bodys() {
        let own = || {
            let arguments = json!({"enable_thinking": false, "x": 1});
            let template_arguments = arguments.as_object().cloned().unwrap_or_default();
            Rules { template_arguments, ..Rules::default() }
        };
        let value = |fields: &str, name: &str| {
            let body = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}]{fields}}}"#);
            with_rules(&body, own(), name)
        };
        assert_eq!(value("", "enable_thinking").as_deref(), Ok("false"));
        let given = r#", "chat_template_kwargs": {"enable_thinking": true, "x": null}"#;
        assert_eq!(value(given, "enable_thinking").as_deref(), Ok("true"));
        assert_eq!(value(given, "x").as_deref(), Ok("1"));
        let effort = r#", "reasoning_effort": "low""#;
        assert_eq!(value(effort, "enable_thinking").as_deref(), Ok("true"));
    }

    #[test]
    fn continuing_and_a_generation_prompt_exclude_each_other() {
        let body = |fields: &str| {
            format!(r#"{{"messages": [{{"role": "assistant", "content": "x"}}]{fields}}}"#)
        };
        let result =
            |fields: &str| with_rules(&body(fields), Rules::default(), "add_generation_prompt");
        let conflict = Err(TemplateError::Refused("continue_final_message"));
        assert_eq!(result(r#", "continue_final_message": true"#), conflict);
        let both = r#", "continue_final_message": true, "add_generation_prompt": true"#;
        assert_eq!(result(both), conflict);
        let one = r#", "continue_final_message": true, "add_generation_prompt": false"#;
        assert_eq!(result(one).as_deref(), Ok("false"));
    }
}
