//! Bodies of `/v1/chat/completions`.
//!
//! Checks what a template can see and keeps it as the client wrote it; what the engine makes of it before
//! rendering is [`crate::template`]'s part.

use super::json::{Budget, Counted, Fields, read, skip};
use super::{Chat, Input, Prompt, RequestError, Shared};
use serde::de::MapAccess;
use serde_json::{Map, Value};

const FIELDS: [&str; 13] = [
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
    "tools",
    "use_beam_search",
];

impl Fields for Shared {
    fn take<'de, A: MapAccess<'de>>(
        &mut self,
        key: &str,
        map: &mut A,
        budget: &Budget,
    ) -> Result<(), A::Error> {
        if FIELDS.contains(&key) || Self::FIELDS.contains(&key) {
            let value = map.next_value_seed(Counted(budget))?;
            self.0.insert(key.to_owned(), value);
            Ok(())
        } else {
            skip(map)
        }
    }
}

pub(super) fn parse(body: &[u8]) -> Result<Prompt, RequestError> {
    let mut fields = Shared::default();
    read(body, &mut fields)?;
    refuse_what_cannot_be_known(&fields)?;
    let chat = Chat {
        messages: messages(&mut fields)?,
        tools: tools(&mut fields)?,
        documents: documents(&mut fields)?,
        reasoning_effort: fields.text("reasoning_effort")?,
        template_arguments: template_arguments(&mut fields)?,
        add_generation_prompt: fields.switch("add_generation_prompt", true)?,
        continue_final_message: fields.switch("continue_final_message", false)?,
        add_special_tokens: fields.switch("add_special_tokens", false)?,
    };
    if chat.continue_final_message && chat.add_generation_prompt {
        return Err(RequestError::Field("continue_final_message"));
    }
    Ok(Prompt {
        model: fields.text("model")?,
        truncation: fields.truncation()?,
        cache_salt: fields.cache_salt()?,
        stream: fields.switch("stream", false)?,
        usage_is_comparable: fields.is_single("n")
            && fields.field("prompt_logprobs").is_none()
            && !fields.switch("use_beam_search", false)?,
        input: Input::Chat(Box::new(chat)),
    })
}

/// Fields that change the tokens in ways only the engine knows.
fn refuse_what_cannot_be_known(fields: &Shared) -> Result<(), RequestError> {
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

fn take_list(fields: &mut Shared, name: &'static str) -> Result<Option<Vec<Value>>, RequestError> {
    match fields.0.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(items)) => Ok(Some(items)),
        Some(_) => Err(RequestError::Field(name)),
    }
}

fn messages(fields: &mut Shared) -> Result<Vec<Map<String, Value>>, RequestError> {
    let messages = match take_list(fields, "messages") {
        Ok(Some(messages)) if !messages.is_empty() => messages,
        _ => return Err(RequestError::NoPrompt),
    };
    let message = |message| match message {
        Value::Object(message) if message.get("role").is_some_and(Value::is_string) => Ok(message),
        _ => Err(RequestError::Field("messages")),
    };
    messages.into_iter().map(message).collect()
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

fn template_arguments(fields: &mut Shared) -> Result<Map<String, Value>, RequestError> {
    match fields.0.remove("chat_template_kwargs") {
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
