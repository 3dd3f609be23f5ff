//! Bodies of `/v1/messages`, Anthropic's API, as the chat that vLLM makes of them.
//!
//! Read in the source of vLLM 0.32, and checked against what it renders. In order:
//!
//! 1. `system`, a text or blocks joined without anything between, becomes a system message. A block that starts with
//!    `x-anthropic-billing-header` goes, and so does a message of the role `system` that is no more than that.
//! 2. Of a message's blocks, texts stay parts of its content (one alone becomes a text), `thinking` is joined into
//!    `reasoning`, `tool_use` becomes calls. What a user's message has of `tool_result` becomes messages of a tool, in
//!    front of it; a user's message without anything else goes.
//! 3. `tool_addition` and `tool_removal` change the list of tools, which are wrapped as a chat has them.
//! 4. `output_config.effort` becomes `reasoning_effort`, and so does `thinking` when it is disabled.
//!
//! What depends on the template (where system messages may stand, what disables thinking) is [`crate::template`]'s part.

use super::chat::{as_tool, checked, refuse_what_cannot_be_known, take_list, template_arguments};
use super::{Chat, Input, Origin, Prompt, RequestError, Shared, pick};
use serde_json::{Map, Value, json};

const FIELDS: [&str; 12] = [
    "cache_salt",
    "chat_template_kwargs",
    "kv_transfer_params",
    "max_tokens",
    "messages",
    "model",
    "output_config",
    "stream",
    "system",
    "thinking",
    "tool_choice",
    "tools",
];

/// Claude Code's line that changes with every request.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

const REFUSED: RequestError = RequestError::Field("messages");

pub(super) fn parse(body: &[u8]) -> Result<Prompt, RequestError> {
    let mut fields = pick(&[&FIELDS], body)?;
    refuse_what_cannot_be_known(&fields)?;
    let given = match take_list(&mut fields, "messages") {
        Ok(Some(messages)) if !messages.is_empty() => messages,
        _ => return Err(RequestError::NoPrompt),
    };
    let tools = tools(&mut fields, &given)?;
    let mut messages = Vec::with_capacity(given.len() + 1);
    if let Some(system) = fields.take_out("system") {
        messages.extend(system_message(&system)?);
    }
    for message in given {
        convert(message, &mut messages)?;
    }
    if messages.is_empty() {
        return Err(RequestError::NoPrompt);
    }
    let (messages, media) = checked(messages)?;
    let chat = Chat {
        messages,
        media,
        tools,
        // Which one it is matters to no template here, only whether it is none.
        tool_choice: fields.field("tool_choice").and_then(|choice| choice.get("type")).cloned(),
        reasoning_effort: effort(&fields)?,
        template_arguments: template_arguments(&mut fields)?,
        add_generation_prompt: true,
        origin: Origin::Messages { thinking_is_disabled: thinking_is_disabled(&fields)? },
        ..Chat::default()
    };
    Ok(Prompt {
        model: fields.text("model")?,
        truncation: None,
        cache_salt: fields.cache_salt()?,
        stream: fields.switch("stream", false)?,
        max_answer_tokens: fields.max_answer_tokens(),
        more_prompts: 0,
        is_continued: true,
        usage_is_comparable: true,
        input: Input::Chat(Box::new(chat)),
    })
}

fn text<'a>(value: &'a Value, field: &str) -> Option<&'a str> {
    value.get(field).and_then(Value::as_str)
}

fn effort(fields: &Shared) -> Result<Option<String>, RequestError> {
    let effort = fields.field("output_config").and_then(|config| config.get("effort"));
    match effort {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(effort)) => Ok(Some(effort.clone())),
        Some(_) => Err(RequestError::Field("output_config")),
    }
}

fn thinking_is_disabled(fields: &Shared) -> Result<bool, RequestError> {
    match fields.field("thinking").map(|thinking| text(thinking, "type")) {
        None | Some(Some("enabled" | "adaptive")) => Ok(false),
        Some(Some("disabled")) => Ok(true),
        Some(_) => Err(RequestError::Field("thinking")),
    }
}

/// A system message, unless there is nothing in it.
fn system_message(content: &Value) -> Result<Option<Value>, RequestError> {
    let joined = match content {
        Value::Null => return Ok(None),
        Value::String(text) => text.clone(),
        Value::Array(blocks) => {
            let mut joined = String::new();
            for block in blocks {
                let Some(kind) = text(block, "type") else { return Err(REFUSED) };
                let text = text(block, "text").filter(|_| kind == "text").unwrap_or_default();
                if !text.starts_with(BILLING_HEADER) {
                    joined.push_str(text);
                }
            }
            joined
        }
        _ => return Err(REFUSED),
    };
    Ok((!joined.is_empty()).then(|| json!({ "role": "system", "content": joined })))
}

fn convert(mut message: Value, messages: &mut Vec<Value>) -> Result<(), RequestError> {
    let role = text(&message, "role").unwrap_or_default().to_owned();
    let content = message.get_mut("content").map(Value::take).unwrap_or_default();
    let mut turn = Turn { is_user: role == "user", ..Turn::default() };
    match (role.as_str(), content) {
        ("system", Value::String(text)) if text.starts_with(BILLING_HEADER) => return Ok(()),
        ("system", content) => {
            messages.extend(system_message(&content)?);
            return Ok(());
        }
        ("user" | "assistant", Value::String(text)) => {
            messages.push(json!({ "role": role, "content": text }));
            return Ok(());
        }
        ("user" | "assistant", Value::Array(blocks)) => {
            for block in blocks {
                turn.block(block, messages)?;
            }
        }
        _ => return Err(REFUSED),
    }
    messages.extend(turn.into_message(&role));
    Ok(())
}

/// A user's or an assistant's message as it comes about.
#[derive(Default)]
struct Turn {
    is_user: bool,
    parts: Vec<Value>,
    calls: Vec<Value>,
    reasoning: Option<String>,
}

impl Turn {
    fn block(&mut self, mut block: Value, messages: &mut Vec<Value>) -> Result<(), RequestError> {
        let kind = text(&block, "type").unwrap_or_default().to_owned();
        match kind.as_str() {
            "text" => {
                let text = block.get_mut("text").map(Value::take).unwrap_or_default();
                if text.as_str().is_some_and(|text| !text.is_empty()) {
                    self.parts.push(json!({ "type": "text", "text": text }));
                }
            }
            "image" => self.parts.push(image(block.get("source"))),
            "thinking" => {
                if let Some(thought) = text(&block, "thinking") {
                    self.reasoning.get_or_insert_default().push_str(thought);
                }
            }
            "tool_use" => self.calls.push(call(&mut block)?),
            "tool_result" if self.is_user => tool_result(&block, messages)?,
            "tool_result" => {
                let result = match block.get("content") {
                    None | Some(Value::Null) => "",
                    Some(Value::String(text)) => text,
                    // The engine prints Python's form of it.
                    Some(_) => return Err(RequestError::Unsupported("messages")),
                };
                let text = format!("Tool result: {result}");
                self.parts.push(json!({ "type": "text", "text": text }));
            }
            "redacted_thinking" | "tool_reference" => {}
            _ => return Err(REFUSED),
        }
        Ok(())
    }

    fn into_message(mut self, role: &str) -> Option<Value> {
        if self.is_user && self.parts.is_empty() {
            return None;
        }
        let mut message = Map::new();
        message.insert("role".to_owned(), Value::from(role));
        if let Some(reasoning) = self.reasoning {
            message.insert("reasoning".to_owned(), Value::from(reasoning));
        }
        if !self.calls.is_empty() {
            message.insert("tool_calls".to_owned(), Value::Array(self.calls));
        }
        let alone = match self.parts.as_mut_slice() {
            [part] if text(part, "type") == Some("text") => part.get_mut("text").map(Value::take),
            _ => None,
        };
        match alone {
            Some(text) => {
                message.insert("content".to_owned(), text);
            }
            None if self.parts.is_empty() => {}
            None => {
                message.insert("content".to_owned(), Value::Array(self.parts));
            }
        }
        Some(Value::Object(message))
    }
}

/// An image as a chat has it.
fn image(source: Option<&Value>) -> Value {
    let source = source.unwrap_or(&Value::Null);
    let url = if text(source, "type") == Some("url") {
        text(source, "url").unwrap_or_default().to_owned()
    } else {
        let kind = text(source, "media_type").unwrap_or("image/jpeg");
        format!("data:{kind};base64,{}", text(source, "data").unwrap_or_default())
    };
    json!({ "type": "image_url", "image_url": { "url": url } })
}

fn call(block: &mut Value) -> Result<Value, RequestError> {
    // Without one the engine writes the time.
    let id = text(block, "id").filter(|id| !id.is_empty());
    let id = id.ok_or(RequestError::Unsupported("messages"))?.to_owned();
    let name = text(block, "name").unwrap_or_default().to_owned();
    let arguments = match block.get_mut("input").map(Value::take) {
        None | Some(Value::Null) => json!({}),
        Some(Value::Object(input)) => Value::Object(input),
        Some(_) => return Err(REFUSED),
    };
    let function = json!({ "name": name, "arguments": arguments });
    Ok(json!({ "id": id, "type": "function", "function": function }))
}

/// A tool's messages: its text, then its images, then the tools it points at.
fn tool_result(block: &Value, messages: &mut Vec<Value>) -> Result<(), RequestError> {
    let id = text(block, "tool_use_id").unwrap_or_default();
    let (mut texts, mut images, mut references) = (Vec::new(), Vec::new(), Vec::new());
    match block.get("content") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) => texts.push(text.as_str()),
        Some(Value::Array(items)) => {
            for item in items {
                match text(item, "type") {
                    Some("text") => texts.push(text(item, "text").unwrap_or_default()),
                    Some("image") => images.push(image(item.get("source"))),
                    Some("tool_reference") => {
                        let name = text(item, "tool_name").or_else(|| text(item, "name"));
                        references.extend(
                            name.map(|name| json!({ "type": "tool_reference", "name": name })),
                        );
                    }
                    _ => {}
                }
            }
        }
        Some(_) => return Err(REFUSED),
    }
    messages.push(json!({ "role": "tool", "tool_call_id": id, "content": texts.join("\n") }));
    if !images.is_empty() {
        messages.push(json!({ "role": "user", "content": images }));
    }
    if !references.is_empty() {
        messages.push(json!({ "role": "tool", "tool_call_id": id, "content": references }));
    }
    Ok(())
}

const REFUSED_TOOLS: RequestError = RequestError::Field("tools");

/// The tools that are in effect at the end of the conversation, as a chat has them.
fn tools(
    fields: &mut Shared,
    messages: &[Value],
) -> Result<Option<Vec<Map<String, Value>>>, RequestError> {
    let given = take_list(fields, "tools")?;
    let blocks = messages.iter().filter_map(|message| message.get("content")?.as_array()).flatten();
    let mut changes = blocks
        .filter(|block| matches!(text(block, "type"), Some("tool_addition" | "tool_removal")))
        .peekable();
    let tools = match given {
        None if changes.peek().is_none() => return Ok(None),
        tools => changed(tools.unwrap_or_default(), changes)?,
    };
    tools.iter().map(function).collect::<Result<_, _>>().map(Some)
}

/// The tools by their names, after what messages added and took away.
fn changed<'a>(
    tools: Vec<Value>,
    changes: impl Iterator<Item = &'a Value>,
) -> Result<Vec<Value>, RequestError> {
    let mut changes = changes.peekable();
    if changes.peek().is_none() {
        return Ok(tools);
    }
    let mut named = Map::new();
    for tool in tools {
        named.insert(text(&tool, "name").ok_or(REFUSED_TOOLS)?.to_owned(), tool);
    }
    let mut removed: Vec<String> = Vec::new();
    for block in changes {
        let change = block.get("tool").ok_or(REFUSED)?;
        let is_removal = text(block, "type") == Some("tool_removal");
        let name = match change.get("definition").filter(|_| !is_removal) {
            Some(tool) => {
                let name = text(tool, "name").ok_or(REFUSED)?;
                named.insert(name.to_owned(), tool.clone());
                name
            }
            None => {
                let name = text(change, "name").ok_or(REFUSED)?;
                let tool = named.get_mut(name).and_then(Value::as_object_mut).ok_or(REFUSED)?;
                if !is_removal {
                    tool.shift_remove("defer_loading");
                }
                name
            }
        };
        removed.retain(|other| other != name);
        if is_removal {
            removed.push(name.to_owned());
        }
    }
    Ok(named
        .into_iter()
        .filter(|(name, _)| !removed.contains(name))
        .map(|(_, tool)| tool)
        .collect())
}

fn function(tool: &Value) -> Result<Map<String, Value>, RequestError> {
    let name = text(tool, "name").ok_or(REFUSED_TOOLS)?;
    let Some(Value::Object(schema)) = tool.get("input_schema") else { return Err(REFUSED_TOOLS) };
    let mut schema = schema.clone();
    schema.entry("type").or_insert_with(|| Value::from("object"));
    let mut function = Map::new();
    function.insert("name".to_owned(), Value::from(name));
    function.insert("parameters".to_owned(), Value::Object(schema));
    for name in ["description", "strict", "defer_loading"] {
        if let Some(value) = tool.get(name) {
            function.insert(name.to_owned(), value.clone());
        }
    }
    Ok(as_tool(function))
}

#[cfg(test)]
mod tests {
    use crate::request::{Api, Input, Origin, Prompt, RequestError, parse};

    #[track_caller]
    fn check(fields: &str, expected: Result<(), RequestError>) {
        let body = format!("{{{fields}}}");
        assert_eq!(parse(Api::Messages, body.as_bytes()).map(|_| ()), expected, "{body}");
    }

    #[track_caller]
    fn check_content(content: &str, expected: Result<(), RequestError>) {
        check(&format!(r#""messages": [{{"role": "user", "content": {content}}}]"#), expected);
    }

    #[test]
    fn what_the_engine_refuses_is_no_prompt() {
        let refused = || Err(RequestError::Field("messages"));
        check("", Err(RequestError::NoPrompt));
        check(r#""messages": []"#, Err(RequestError::NoPrompt));
        check(r#""messages": [{"role": "tool", "content": "x"}]"#, refused());
        check(r#""messages": [5]"#, refused());
        check_content("null", refused());
        check_content("[5]", refused());
        check_content(r#"[{"type": "document"}]"#, refused());
        check_content("[]", Err(RequestError::NoPrompt));
        let tools = r#""messages": [{"role": "user", "content": "x"}], "tools": [{"name": "a"}]"#;
        check(tools, Err(RequestError::Field("tools")));
    }

    #[test]
    fn images_are_media_wherever_they_stand() {
        #[track_caller]
        fn check(content: &str) {
            let body = format!(r#"{{"messages": [{{"role": "user", "content": [{content}]}}]}}"#);
            let Ok(Prompt { input: Input::Chat(chat), .. }) = parse(Api::Messages, body.as_bytes())
            else {
                panic!("not a chat: {body}")
            };
            let chat_body = br#"{"messages": [{"role": "user", "content": [{"type": "image_url",
                "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}"#;
            let Ok(Prompt { input: Input::Chat(same), .. }) = parse(Api::Chat, chat_body) else {
                panic!("not a chat")
            };
            assert_eq!(chat.media, same.media, "{body}");
        }
        let image = r#"{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}"#;
        check(image);
        check(&format!(r#"{{"type": "tool_result", "tool_use_id": "1", "content": [{image}]}}"#));
    }

    #[test]
    fn fields_beside_the_messages_are_read() {
        let body = br#"{"model": "m", "max_tokens": 7, "stream": true, "cache_salt": "s",
            "thinking": {"type": "disabled"}, "output_config": {"effort": "low"},
            "messages": [{"role": "user", "content": "x"}]}"#;
        let prompt = parse(Api::Messages, body).expect("a prompt");
        assert_eq!(prompt.model.as_deref(), Some("m"));
        assert_eq!((prompt.max_answer_tokens, prompt.stream), (Some(7), true));
        assert_eq!(prompt.cache_salt.as_deref(), Some("s"));
        let Input::Chat(chat) = prompt.input else { panic!("not a chat") };
        assert_eq!(chat.origin, Origin::Messages { thinking_is_disabled: true });
        assert_eq!(chat.reasoning_effort.as_deref(), Some("low"));
    }
}
