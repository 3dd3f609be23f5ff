//! Bodies of `/v1/chat/completions`.
//!
//! Checks what a template can see and keeps it as the client wrote it; what the engine makes of it before
//! rendering is [`crate::template`]'s part.

use super::json::field;
use super::media::{self, Media};
use super::{Chat, Input, Prompt, RequestError, Shared, pick};
use serde_json::{Map, Value};

const FIELDS: [&str; 14] = [
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "kv_transfer_params",
    "media_io_kwargs",
    "messages",
    "mm_processor_kwargs",
    "reasoning_effort",
    "tool_choice",
    "tools",
    "use_beam_search",
];

pub(super) fn parse(body: &[u8]) -> Result<Prompt, RequestError> {
    prompt(pick(&[&FIELDS, &Shared::FIELDS], body)?)
}

/// Several conversations, of which the first is the prompt.
pub(super) fn parse_batch(body: &[u8]) -> Result<Prompt, RequestError> {
    let mut fields = pick(&[&FIELDS, &Shared::FIELDS], body)?;
    let conversations = take_list(&mut fields, "messages")?.unwrap_or_default();
    let mut conversations = conversations.into_iter();
    let first = conversations.next().ok_or(RequestError::NoPrompt)?;
    fields.0.insert("messages".to_owned(), first);
    let more_prompts = conversations.len();
    let prompt = prompt(fields)?;
    let usage_is_comparable = prompt.usage_is_comparable && more_prompts == 0;
    Ok(Prompt { more_prompts, usage_is_comparable, ..prompt })
}

fn prompt(mut fields: Shared) -> Result<Prompt, RequestError> {
    refuse_what_cannot_be_known(&fields)?;
    let (messages, media) = messages(&mut fields)?;
    let chat = Chat {
        messages,
        media,
        tools: tools(&mut fields)?,
        tool_choice: fields.take_out("tool_choice").filter(|choice| !choice.is_null()),
        documents: documents(&mut fields)?,
        reasoning_effort: fields.text("reasoning_effort")?,
        template_arguments: template_arguments(&mut fields)?,
        add_generation_prompt: fields.switch("add_generation_prompt", true)?,
        continue_final_message: fields.switch("continue_final_message", false)?,
        add_special_tokens: fields.switch("add_special_tokens", false)?,
        ..Chat::default()
    };
    Ok(Prompt {
        model: fields.text("model")?,
        truncation: fields.truncation()?,
        cache_salt: fields.cache_salt()?,
        stream: fields.switch("stream", false)?,
        max_answer_tokens: fields.max_answer_tokens(),
        more_prompts: 0,
        is_continued: !fields.switch("echo", false)?,
        usage_is_comparable: fields.is_single("n")
            && fields.field("prompt_logprobs").is_none()
            && !fields.switch("use_beam_search", false)?,
        input: Input::Chat(Box::new(chat)),
    })
}

/// Fields that change the tokens in ways only the engine knows.
pub(super) fn refuse_what_cannot_be_known(fields: &Shared) -> Result<(), RequestError> {
    for name in ["chat_template", "media_io_kwargs", "mm_processor_kwargs"] {
        if fields.field(name).is_some() {
            return Err(RequestError::Unsupported(name));
        }
    }
    // A decoding replica is handed the ids of the prefilling one, and renders nothing.
    match fields.field("kv_transfer_params").and_then(|params| params.get("prompt_token_ids")) {
        None | Some(Value::Null) => Ok(()),
        Some(_) => Err(RequestError::Unsupported("kv_transfer_params")),
    }
}

pub(super) fn take_list(
    fields: &mut Shared,
    name: &'static str,
) -> Result<Option<Vec<Value>>, RequestError> {
    match fields.take_out(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(items)) => Ok(Some(items)),
        Some(_) => Err(RequestError::Field(name)),
    }
}

fn messages(fields: &mut Shared) -> Result<(Messages, Vec<Media>), RequestError> {
    match take_list(fields, "messages") {
        Ok(Some(messages)) if !messages.is_empty() => checked(messages),
        _ => Err(RequestError::NoPrompt),
    }
}

type Messages = Vec<Map<String, Value>>;

/// Messages, each an object with a role, without their media, and those.
pub(super) fn checked(messages: Vec<Value>) -> Result<(Messages, Vec<Media>), RequestError> {
    let mut media = Vec::new();
    let mut read = Vec::with_capacity(messages.len());
    for message in messages {
        let Value::Object(mut message) = message else {
            return Err(RequestError::Field("messages"));
        };
        media::take_from(&mut message, &mut media)?;
        if !field(&message, "role").is_some_and(Value::is_string) {
            return Err(RequestError::Field("messages"));
        }
        read.push(message);
    }
    Ok((read, media))
}

fn tools(fields: &mut Shared) -> Result<Option<Vec<Map<String, Value>>>, RequestError> {
    let Some(tools) = take_list(fields, "tools")? else { return Ok(None) };
    if tools.is_empty() {
        return Err(RequestError::Field("tools"));
    }
    let tool = |tool| match tool {
        Value::Object(tool) => Ok(tool),
        _ => Err(RequestError::Field("tools")),
    };
    tools.into_iter().map(tool).collect::<Result<_, _>>().map(Some)
}

fn documents(fields: &mut Shared) -> Result<Option<Vec<Value>>, RequestError> {
    let documents = take_list(fields, "documents")?;
    match &documents {
        Some(documents) if !documents.iter().all(Value::is_object) => {
            Err(RequestError::Field("documents"))
        }
        _ => Ok(documents),
    }
}

/// Arguments with these names would reach the code around the template, not the template.
const RESERVED_ARGUMENTS: [&str; 14] = [
    "chat_template",
    "conversation",
    "conversations",
    "max_length",
    "messages",
    "padding",
    "processor_kwargs",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "self",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
];

/// A function as a chat's list of tools has it.
pub(super) fn as_tool(function: Map<String, Value>) -> Map<String, Value> {
    let mut tool = Map::new();
    tool.insert("type".to_owned(), Value::from("function"));
    tool.insert("function".to_owned(), Value::Object(function));
    tool
}

pub(super) fn template_arguments(fields: &mut Shared) -> Result<Map<String, Value>, RequestError> {
    match fields.take_out("chat_template_kwargs") {
        None | Some(Value::Null) => Ok(Map::new()),
        Some(Value::Object(arguments)) => {
            if RESERVED_ARGUMENTS.iter().any(|name| arguments.contains_key(*name)) {
                return Err(RequestError::Unsupported("chat_template_kwargs"));
            }
            Ok(arguments)
        }
        Some(_) => Err(RequestError::Field("chat_template_kwargs")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Api, Truncation, parse};

    #[track_caller]
    fn check(fields: &str, expected: Result<(), RequestError>) {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}]{fields}}}"#);
        assert_eq!(parse(Api::Chat, body.as_bytes()).map(|_| ()), expected, "{body}");
    }

    #[track_caller]
    fn prompt(fields: &str) -> Prompt {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}]{fields}}}"#);
        parse(Api::Chat, body.as_bytes()).expect(fields)
    }

    #[track_caller]
    fn check_messages(messages: &str, expected: Result<(), RequestError>) {
        let body = format!(r#"{{"messages": {messages}}}"#);
        assert_eq!(parse(Api::Chat, body.as_bytes()).map(|_| ()), expected, "{body}");
    }

    #[test]
    fn defaults_are_the_engines() {
        let prompt = prompt("");
        assert_eq!((prompt.model, prompt.cache_salt, prompt.truncation), (None, None, None));
        assert!(!prompt.stream && prompt.usage_is_comparable);
        let Input::Chat(chat) = prompt.input else { panic!("not a chat") };
        assert!(chat.add_generation_prompt && !chat.continue_final_message);
        assert!(!chat.add_special_tokens);
    }

    #[test]
    fn messages_must_be_objects_with_a_role() {
        check_messages("[]", Err(RequestError::NoPrompt));
        check_messages("{}", Err(RequestError::NoPrompt));
        check_messages("null", Err(RequestError::NoPrompt));
        check_messages("[5]", Err(RequestError::Field("messages")));
        check_messages(r#"[{"content": "x"}]"#, Err(RequestError::Field("messages")));
        check_messages(r#"[{"role": 5, "content": "x"}]"#, Err(RequestError::Field("messages")));
        check_messages(r#"[{"role": "critic", "content": null, "x": {"y": []}}]"#, Ok(()));
    }

    #[test]
    fn media_are_read_and_files_have_an_error_of_their_own() {
        let part = |part: &str| format!(r#"[{{"role": "user", "content": [{part}]}}]"#);
        check_messages(&part(r#"{"type": "image_url", "image_url": {"url": "data:,"}}"#), Ok(()));
        check_messages(&part(r#"{"image_url": "data:,"}"#), Ok(()));
        check_messages(&part(r#"{"type": "input_audio"}"#), Ok(()));
        check_messages(&part(r#"{"type": "file"}"#), Err(RequestError::Media));
        check_messages(&part(r#"{"type": "text", "text": "image_url"}"#), Ok(()));
    }

    #[test]
    fn what_only_the_engine_can_know_is_unsupported() {
        check(r#", "chat_template": "x""#, Err(RequestError::Unsupported("chat_template")));
        check(r#", "chat_template": null"#, Ok(()));
        let arguments = r#", "chat_template_kwargs": {"chat_template": "x"}"#;
        check(arguments, Err(RequestError::Unsupported("chat_template_kwargs")));
        check(r#", "chat_template_kwargs": {"enable_thinking": false}"#, Ok(()));
        let ids = r#", "kv_transfer_params": {"prompt_token_ids": [1]}"#;
        check(ids, Err(RequestError::Unsupported("kv_transfer_params")));
        check(r#", "kv_transfer_params": {"do_remote_decode": true}"#, Ok(()));
        let limit = r#", "truncate_prompt_tokens": -1"#;
        check(limit, Err(RequestError::Unsupported("truncate_prompt_tokens")));
    }

    #[test]
    fn fields_of_another_type_are_the_engines_to_refuse() {
        check(r#", "model": 5"#, Err(RequestError::Field("model")));
        check(r#", "stream": {}"#, Err(RequestError::Field("stream")));
        check(r#", "stream": "true""#, Ok(()));
        check(r#", "tools": []"#, Err(RequestError::Field("tools")));
        check(r#", "tools": [1]"#, Err(RequestError::Field("tools")));
        check(r#", "documents": [1]"#, Err(RequestError::Field("documents")));
        check(r#", "chat_template_kwargs": []"#, Err(RequestError::Field("chat_template_kwargs")));
    }

    #[test]
    fn cache_salt_follows_the_engines_rule() {
        check(r#", "cache_salt": "tenant-a""#, Ok(()));
        for salt in ["", "a@b", "a/b", r"a\\b", r"a\u0000"] {
            let field = format!(r#", "cache_salt": "{salt}""#);
            check(&field, Err(RequestError::Field("cache_salt")));
        }
        let field = format!(r#", "cache_salt": "{}""#, "é".repeat(128));
        check(&field, Ok(()));
        let field = format!(r#", "cache_salt": "{}""#, "a".repeat(129));
        check(&field, Err(RequestError::Field("cache_salt")));
    }

    #[test]
    fn usage_of_several_answers_is_not_comparable() {
        for field in [
            r#", "n": 2"#,
            r#", "n": "2""#,
            r#", "prompt_logprobs": 1"#,
            r#", "use_beam_search": true"#,
        ] {
            assert!(!prompt(field).usage_is_comparable, "{field}");
        }
        assert!(prompt(r#", "n": 1, "logprobs": true"#).usage_is_comparable);
    }

    #[test]
    fn truncation_has_a_side() {
        #[track_caller]
        fn check(fields: &str, expected: Truncation) {
            assert_eq!(prompt(fields).truncation, Some(expected));
        }
        check(r#", "truncate_prompt_tokens": 7"#, Truncation::LastWithSpecialTokens(7));
        check(r#", "truncate_prompt_tokens": 7, "truncation_side": "left""#, Truncation::Last(7));
        check(r#", "truncate_prompt_tokens": 7, "truncation_side": "right""#, Truncation::First(7));
    }
}
