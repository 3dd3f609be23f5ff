//! Bodies of `/v1/responses`, as the chat that vLLM makes of them.
//!
//! Read in the source of vLLM 0.32, and checked against what it renders. In order:
//!
//! 1. `instructions` become a system message, a text as `input` one of the user.
//! 2. Of `input`'s items, messages stay what they are, but of an assistant's content only the first part counts.
//! 3. An assistant's text, its reasoning and its calls are items of their own. They become one message, as long as it
//!    has none of that kind yet; of calls it may have many.
//! 4. Outputs of calls become messages of a tool.
//! 5. A last message or reasoning that is not `completed` is gone on with.
//! 6. The tokenizer adds its special tokens to what the template wrote, so that some prompts have BOS twice.
//! 7. Tools that are functions are wrapped as a chat has them, those of a namespace under its name; all others go.
//!
//! What the engine keeps from earlier responses is not here, so a prompt that goes on from it has no known beginning.

use super::chat::{as_tool, checked, refuse_what_cannot_be_known, take_list, template_arguments};
use super::{Chat, Input, Origin, Prompt, RequestError, Shared, pick};
use serde_json::{Map, Value, json};

const FIELDS: [&str; 18] = [
    "cache_salt",
    "chat_template_kwargs",
    "conversation",
    "input",
    "instructions",
    "kv_transfer_params",
    "max_output_tokens",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "model",
    "previous_input_messages",
    "previous_response_id",
    "prompt",
    "reasoning",
    "background",
    "stream",
    "tool_choice",
    "tools",
];

/// Fields that name what the engine keeps.
const STORED: [&str; 3] = ["conversation", "previous_response_id", "prompt"];

pub(super) fn parse(body: &[u8]) -> Result<Prompt, RequestError> {
    let mut fields = pick(&[&FIELDS], body)?;
    if STORED.iter().any(|name| fields.field(name).is_some()) {
        return Err(RequestError::Stored);
    }
    if fields.field("previous_input_messages").is_some() {
        return Err(RequestError::Unsupported("previous_input_messages"));
    }
    refuse_what_cannot_be_known(&fields)?;
    let tools = take_list(&mut fields, "tools")?.unwrap_or_default();
    // A tool that the engine itself calls makes several prompts of one, and `usage` their sum.
    let is_one_prompt = tools.iter().all(|tool| matches!(kind(tool), "function" | "namespace"));
    let (messages, goes_on) = messages(&mut fields)?;
    let (messages, media) = checked(messages)?;
    let chat = Chat {
        messages,
        media,
        tools: functions(tools)?,
        tool_choice: fields.take_out("tool_choice"),
        reasoning_effort: effort(&fields)?,
        template_arguments: template_arguments(&mut fields)?,
        add_generation_prompt: !goes_on,
        continue_final_message: goes_on,
        // Unlike a chat's: a template that writes BOS itself gives a second one.
        add_special_tokens: true,
        origin: Origin::Responses,
        ..Chat::default()
    };
    Ok(Prompt {
        model: fields.text("model")?,
        // `truncation: auto` cuts only what is longer than the model's context.
        truncation: None,
        cache_salt: fields.cache_salt()?,
        stream: fields.switch("stream", false)?,
        max_answer_tokens: fields.max_answer_tokens(),
        more_prompts: 0,
        is_continued: true,
        usage_is_comparable: is_one_prompt && !fields.switch("background", false)?,
        input: Input::Chat(Box::new(chat)),
    })
}

fn kind(value: &Value) -> &str {
    value.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn effort(fields: &Shared) -> Result<Option<String>, RequestError> {
    match fields.field("reasoning") {
        None => Ok(None),
        Some(Value::Object(reasoning)) => match reasoning.get("effort") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(effort)) => Ok(Some(effort.clone())),
            Some(_) => Err(RequestError::Field("reasoning")),
        },
        Some(_) => Err(RequestError::Field("reasoning")),
    }
}

/// The messages, and whether the last is to be gone on with.
fn messages(fields: &mut Shared) -> Result<(Vec<Value>, bool), RequestError> {
    let mut turns = Turns::default();
    if let Some(instructions) = fields.text("instructions")?.filter(|text| !text.is_empty()) {
        turns.push("system", Value::from(instructions));
    }
    let mut goes_on = false;
    match fields.take_out("input") {
        Some(Value::String(text)) => turns.push("user", Value::from(text)),
        Some(Value::Array(items)) => {
            goes_on = items.last().is_some_and(is_unfinished);
            for item in items {
                let Value::Object(item) = item else { return Err(REFUSED) };
                turns.item(item)?;
            }
        }
        _ => return Err(RequestError::NoPrompt),
    }
    if turns.0.is_empty() {
        return Err(RequestError::NoPrompt);
    }
    Ok((turns.0.into_iter().map(Value::Object).collect(), goes_on))
}

const REFUSED: RequestError = RequestError::Field("input");

fn is_unfinished(item: &Value) -> bool {
    let status = item.get("status").and_then(Value::as_str);
    let is_turn = match item.get("type") {
        None => true,
        Some(kind) => matches!(kind.as_str(), Some("message" | "reasoning")),
    };
    is_turn && matches!(status, Some("in_progress" | "incomplete"))
}

/// Messages as they come about.
#[derive(Default)]
struct Turns(Vec<Map<String, Value>>);

impl Turns {
    fn push(&mut self, role: &str, content: Value) {
        let mut message = Map::new();
        message.insert("role".to_owned(), Value::from(role));
        message.insert("content".to_owned(), content);
        self.0.push(message);
    }

    /// The message that an assistant's next item may join.
    fn assistant(&mut self) -> Option<&mut Map<String, Value>> {
        self.0.last_mut().filter(|last| last.get("role").is_some_and(|role| role == "assistant"))
    }

    /// What the assistant said or thought, in its message or in a new one where that has some already.
    fn says(&mut self, field: &str, text: String) {
        let is_free = |last: &&mut Map<_, _>| last.get(field).is_none_or(Value::is_null);
        if let Some(last) = self.assistant().filter(is_free) {
            last.insert(field.to_owned(), Value::from(text));
            return;
        }
        let mut message = Map::new();
        message.insert("role".to_owned(), Value::from("assistant"));
        message.insert(field.to_owned(), Value::from(text));
        self.0.push(message);
    }

    fn calls(&mut self, id: Value, name: String, arguments: Value) {
        let function = json!({ "name": name, "arguments": arguments });
        let call = json!({ "id": id, "function": function, "type": "function" });
        if let Some(last) = self.assistant() {
            let calls = last.entry("tool_calls").or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(calls) = calls {
                calls.push(call);
            }
            return;
        }
        let mut message = Map::new();
        message.insert("role".to_owned(), Value::from("assistant"));
        message.insert("tool_calls".to_owned(), Value::Array(vec![call]));
        self.0.push(message);
    }

    fn item(&mut self, mut item: Map<String, Value>) -> Result<(), RequestError> {
        match item.get("type").map(Value::as_str) {
            None | Some(Some("message")) => self.message(item),
            Some(Some("function_call")) => {
                let text = |name: &str| item.get(name).and_then(Value::as_str);
                let (Some(id), Some(name), Some(arguments)) =
                    (text("call_id"), text("name"), text("arguments"))
                else {
                    return Err(REFUSED);
                };
                let name = text("namespace")
                    .filter(|space| !space.is_empty())
                    .map_or_else(|| name.to_owned(), |namespace| in_namespace(namespace, name));
                self.calls(Value::from(id), name, Value::from(arguments));
                Ok(())
            }
            Some(Some("custom_tool_call")) => {
                let text = |name: &str| item.get(name).and_then(Value::as_str);
                let (Some(id), Some(name)) = (text("call_id"), text("name")) else {
                    return Err(REFUSED);
                };
                let arguments = json!({ "input": text("input").unwrap_or_default() });
                self.calls(Value::from(id), name.to_owned(), arguments);
                Ok(())
            }
            Some(Some("reasoning")) => self.reasoning(&item),
            Some(Some("function_call_output" | "custom_tool_call_output")) => {
                self.push("tool", item.remove("output").unwrap_or_default());
                if let (Some(message), Some(id)) = (self.0.last_mut(), item.remove("call_id")) {
                    message.insert("tool_call_id".to_owned(), id);
                }
                Ok(())
            }
            Some(_) => Err(REFUSED),
        }
    }

    fn message(&mut self, mut item: Map<String, Value>) -> Result<(), RequestError> {
        let content = item.remove("content").unwrap_or_default();
        let is_typed = item.get("type").is_some();
        let is_input = |part: &Value| kind(part).starts_with("input_");
        let is_accepted = content.as_array().is_none_or(|parts| parts.iter().all(is_input));
        match item.get("role").and_then(Value::as_str) {
            Some("assistant") if is_accepted || is_typed => {
                let first = match &content {
                    Value::Array(parts) => parts.first().and_then(|part| part.get("text")),
                    text => Some(text),
                };
                let text = first.and_then(Value::as_str).ok_or(REFUSED)?.to_owned();
                self.says("content", text);
                Ok(())
            }
            Some(role @ ("user" | "system" | "developer")) if is_accepted => {
                self.push(role, content);
                Ok(())
            }
            _ => Err(REFUSED),
        }
    }

    fn reasoning(&mut self, item: &Map<String, Value>) -> Result<(), RequestError> {
        let is_encrypted = item.get("encrypted_content").and_then(Value::as_str);
        if is_encrypted.is_some_and(|text| !text.is_empty()) {
            return Err(REFUSED);
        }
        if !item.get("summary").is_some_and(Value::is_array) {
            return Err(REFUSED);
        }
        let list = |name: &str| item.get(name).and_then(Value::as_array).and_then(|l| l.first());
        let text = match list("content").or_else(|| list("summary")) {
            None => "",
            Some(part) => part.get("text").and_then(Value::as_str).ok_or(REFUSED)?,
        };
        self.says("reasoning", text.to_owned());
        Ok(())
    }
}

fn in_namespace(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// The tools that the template is shown. `None` when the body has no tools at all.
fn functions(tools: Vec<Value>) -> Result<Option<Vec<Map<String, Value>>>, RequestError> {
    if tools.is_empty() {
        return Ok(None);
    }
    let mut functions = Vec::with_capacity(tools.len());
    for tool in tools {
        match kind(&tool) {
            "function" => functions.push(function(tool, None)?),
            "namespace" => {
                let name = tool.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
                let own = tool.get("tools").and_then(Value::as_array).cloned().unwrap_or_default();
                for tool in own.into_iter().filter(|tool| kind(tool) == "function") {
                    functions.push(function(tool, Some(&name))?);
                }
            }
            // The engine shows it under a schema of its own words.
            "custom" => return Err(RequestError::Unsupported("tools")),
            "" => return Err(RequestError::Field("tools")),
            _ => {}
        }
    }
    Ok(Some(functions))
}

fn function(tool: Value, namespace: Option<&str>) -> Result<Map<String, Value>, RequestError> {
    let Value::Object(mut tool) = tool else { return Err(RequestError::Field("tools")) };
    let mut function = Map::new();
    for name in ["name", "description", "parameters", "strict", "defer_loading"] {
        if let Some(value) = tool.remove(name) {
            function.insert(name.to_owned(), value);
        }
    }
    let name = function.get("name").and_then(Value::as_str);
    let name = name.ok_or(RequestError::Field("tools"))?;
    if let Some(namespace) = namespace {
        let name = in_namespace(namespace, name);
        function.insert("name".to_owned(), Value::from(name));
    }
    Ok(as_tool(function))
}

#[cfg(test)]
mod tests {
    use crate::request::{Api, RequestError, parse};

    #[track_caller]
    fn check(fields: &str, expected: Result<(), RequestError>) {
        let body = format!("{{{fields}}}");
        assert_eq!(parse(Api::Responses, body.as_bytes()).map(|_| ()), expected, "{body}");
    }

    #[test]
    fn what_the_engine_keeps_is_told_apart_from_what_is_no_prompt() {
        for field in [
            r#""previous_response_id": "resp_1""#,
            r#""conversation": {"id": "conv_1"}"#,
            r#""prompt": {"id": "pmpt_1"}"#,
        ] {
            check(&format!(r#""input": "x", {field}"#), Err(RequestError::Stored));
        }
        check(r#""input": "x", "previous_response_id": null"#, Ok(()));
        check("", Err(RequestError::NoPrompt));
        check(r#""input": []"#, Err(RequestError::NoPrompt));
        check(r#""input": 5"#, Err(RequestError::NoPrompt));
    }

    #[test]
    fn items_that_are_not_known_are_not_passed_over() {
        let refused = || Err(RequestError::Field("input"));
        for item in [
            "5",
            r#"{"type": "item_reference", "id": "x"}"#,
            r#"{"type": "function_call", "name": "a"}"#,
            r#"{"type": "reasoning", "summary": [], "encrypted_content": "x"}"#,
            r#"{"role": "tool", "content": "x"}"#,
            r#"{"role": "user", "content": [{"type": "text", "text": "x"}]}"#,
            r#"{"type": 5}"#,
        ] {
            check(&format!(r#""input": [{item}]"#), refused());
        }
        let file = r#"{"role": "user", "content": [{"type": "input_file"}]}"#;
        check(&format!(r#""input": [{file}]"#), Err(RequestError::Media));
    }

    #[test]
    fn usage_of_a_response_in_the_background_or_with_the_engines_own_tools_is_not_one_prompts() {
        #[track_caller]
        fn check(fields: &str, expected: bool) {
            let body = format!(r#"{{"input": "x", {fields}}}"#);
            let prompt = parse(Api::Responses, body.as_bytes()).expect(fields);
            assert_eq!(prompt.usage_is_comparable, expected, "{fields}");
        }
        check(r#""tools": [{"type": "function", "name": "a"}]"#, true);
        check(r#""tools": [{"type": "web_search"}]"#, false);
        check(r#""background": true"#, false);
        check(r#""max_output_tokens": 5"#, true);
    }
}
