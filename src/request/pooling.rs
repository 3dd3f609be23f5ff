//! Bodies of the APIs that give numbers for a prompt, not an answer: embeddings, pooling, classifying, scoring, reranking.
//!
//! Read in the source of vLLM 0.32. It keeps the prompts of such models in its cache when their attention is causal and
//! they pool the last token; with others nothing is ever cached, and routing by prefix only keeps like with like.
//!
//! A scoring model reads the query alone, or the query and a document behind it, so the query is the beginning of its
//! first prompt. Where a reranker has a template of its own, which no body shows, the query is only what requests have
//! in common.

use super::chat::{checked, refuse_what_cannot_be_known, take_list, template_arguments};
use super::given::pick_given;
use super::{Chat, Input, Prompt, RequestError, Shared, Truncation, pick};
use serde_json::Value;

const FIELDS: [&str; 14] = [
    "add_generation_prompt",
    "add_special_tokens",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "data",
    "media_io_kwargs",
    "messages",
    "mm_processor_kwargs",
    "model",
    "padding",
    "truncate_prompt_tokens",
    "truncation_side",
];

/// Fields that change the prompt in ways only the engine knows.
const UNKNOWN: [&str; 2] = ["data", "padding"];

/// `/v1/embeddings`, `/pooling` and `/classify`: a text, ids or messages in `input`, or messages as a chat has them.
pub(super) fn parse(body: &[u8]) -> Result<Prompt, RequestError> {
    let (input, mut fields) = pick_given("input", &[&FIELDS], body)?;
    refuse_what_cannot_be_known(&fields)?;
    if let Some(name) = UNKNOWN.into_iter().find(|name| fields.field(name).is_some()) {
        return Err(RequestError::Unsupported(name));
    }
    if let Some(messages) = take_list(&mut fields, "messages")? {
        let (first, more) = match messages.first() {
            Some(Value::Array(_)) => {
                let mut conversations = messages.into_iter();
                match conversations.next() {
                    Some(Value::Array(first)) => (first, conversations.len()),
                    _ => return Err(RequestError::NoPrompt),
                }
            }
            _ => (messages, 0),
        };
        return conversation(fields, first, more);
    }
    let given = input.ok_or(RequestError::NoPrompt)?;
    let more = given.more;
    match given.into_messages() {
        Ok(messages) => conversation(fields, messages, more),
        Err(given) => {
            let input = given.into_input(fields.switch("add_special_tokens", true)?)?;
            let truncation = truncation(&fields)?;
            prompt(&fields, input, truncation, more)
        }
    }
}

fn conversation(
    mut fields: Shared,
    messages: Vec<Value>,
    more: usize,
) -> Result<Prompt, RequestError> {
    if messages.is_empty() {
        return Err(RequestError::NoPrompt);
    }
    let (messages, media) = checked(messages)?;
    let chat = Chat {
        messages,
        media,
        template_arguments: template_arguments(&mut fields)?,
        // Nothing is to be answered, so no answer is begun.
        add_generation_prompt: fields.switch("add_generation_prompt", false)?,
        continue_final_message: fields.switch("continue_final_message", false)?,
        add_special_tokens: fields.switch("add_special_tokens", false)?,
        ..Chat::default()
    };
    if chat.continue_final_message && chat.add_generation_prompt {
        return Err(RequestError::Field("continue_final_message"));
    }
    let truncation = truncation(&fields)?;
    prompt(&fields, Input::Chat(Box::new(chat)), truncation, more)
}

/// Unlike a chat, of which the engine keeps the end, it keeps the beginning where no side is given.
fn truncation(fields: &Shared) -> Result<Option<Truncation>, RequestError> {
    let count = fields.field("truncate_prompt_tokens").and_then(Value::as_i64);
    match count {
        // What is longer than the model's context, which nothing else could be done with.
        Some(-1) => Ok(None),
        _ => Ok(match fields.truncation()? {
            Some(Truncation::LastWithSpecialTokens(count)) => Some(Truncation::First(count)),
            truncation => truncation,
        }),
    }
}

fn prompt(
    fields: &Shared,
    input: Input,
    truncation: Option<Truncation>,
    more_prompts: usize,
) -> Result<Prompt, RequestError> {
    Ok(Prompt {
        model: fields.text("model")?,
        input,
        more_prompts,
        truncation,
        cache_salt: fields.cache_salt()?,
        stream: false,
        // Nothing is generated: the engine's work ends with the prompt.
        max_answer_tokens: Some(1),
        is_continued: false,
        usage_is_comparable: more_prompts == 0,
    })
}

/// What is read of a body with texts.
const EMBEDDED: [&str; 7] =
    ["images", "input_type", "inputs", "max_tokens", "model", "texts", "truncate"];

/// `/v2/embed`: texts.
pub(super) fn parse_cohere(body: &[u8]) -> Result<Prompt, RequestError> {
    let mut fields = pick(&[&EMBEDDED], body)?;
    for name in ["images", "inputs"] {
        if fields.field(name).is_some() {
            return Err(RequestError::Media);
        }
    }
    // The engine puts a text of the model's own in front; and its own limit is not known here.
    for name in ["input_type", "max_tokens"] {
        if fields.field(name).is_some() {
            return Err(RequestError::Unsupported(name));
        }
    }
    let texts = take_list(&mut fields, "texts")?.unwrap_or_default();
    let more = texts.len().saturating_sub(1);
    let Some(Value::String(text)) = texts.into_iter().next() else {
        return Err(RequestError::NoPrompt);
    };
    prompt(&fields, Input::Text { text, add_special_tokens: true }, None, more)
}

/// Names of the queries and of what they are compared with, as the engine tries them.
const PAIRS: [(&str, &str); 5] = [
    ("query", "documents"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
];

/// What is read of a body with queries.
const SCORED: [&str; 12] = [
    "cache_salt",
    "data_1",
    "data_2",
    "documents",
    "items",
    "max_tokens_per_query",
    "model",
    "queries",
    "query",
    "text_1",
    "text_2",
    "truncate_prompt_tokens",
];

/// `/score` and `/rerank`: the first query, which is the beginning of the first prompt.
pub(super) fn parse_scoring(body: &[u8]) -> Result<Prompt, RequestError> {
    let mut fields = pick(&[&SCORED], body)?;
    for name in ["max_tokens_per_query", "truncate_prompt_tokens"] {
        if fields.field(name).is_some_and(|count| count.as_u64() != Some(0)) {
            return Err(RequestError::Unsupported(name));
        }
    }
    let is_given = |name: &str| fields.field(name).is_some();
    let pair = PAIRS.into_iter().find(|(query, others)| is_given(query) && is_given(others));
    let (query, others) = pair.ok_or(RequestError::NoPrompt)?;
    let count = |value: Option<Value>| match value {
        Some(Value::Array(list)) => list.len(),
        _ => 1,
    };
    let others = count(fields.take_out(others));
    let first = match fields.take_out(query) {
        Some(Value::Array(list)) => list.into_iter().next(),
        query => query,
    };
    match first {
        // The query is a prompt of its own, or the beginning of each.
        Some(Value::String(text)) => {
            let input = Input::Text { text, add_special_tokens: true };
            let prompt = prompt(&fields, input, None, others)?;
            Ok(Prompt { usage_is_comparable: false, ..prompt })
        }
        Some(Value::Object(_)) => Err(RequestError::Media),
        _ => Err(RequestError::NoPrompt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Api, parse};

    fn text(text: &str) -> Input {
        Input::Text { text: text.to_owned(), add_special_tokens: true }
    }

    #[track_caller]
    fn check(api: Api, body: &str, expected: Result<(Input, usize), RequestError>) {
        let read = parse(api, body.as_bytes()).map(|prompt| (prompt.input, prompt.more_prompts));
        assert_eq!(read, expected, "{body}");
    }

    #[test]
    fn every_shape_of_input_is_read() {
        let check = |body: &str, expected: Result<(Input, usize), RequestError>| {
            for api in [Api::Embeddings, Api::Pooling, Api::Classify] {
                check(api, body, expected.clone());
            }
        };
        check(r#"{"input": "a"}"#, Ok((text("a"), 0)));
        check(r#"{"input": ["a", "b", "c"]}"#, Ok((text("a"), 2)));
        check(r#"{"input": [1, 2]}"#, Ok((Input::Tokens(vec![1, 2]), 0)));
        check(r#"{"input": [[1, 2], [3]]}"#, Ok((Input::Tokens(vec![1, 2]), 1)));
        let none = Err(RequestError::NoPrompt);
        for body in [r#"{"input": []}"#, r#"{"input": null}"#, r#"{"input": {}}"#, "{}"] {
            check(body, none.clone());
        }
        check(r#"{"data": {"x": 1}}"#, Err(RequestError::Unsupported("data")));
        let padded = r#"{"input": "a", "padding": "max_length"}"#;
        check(padded, Err(RequestError::Unsupported("padding")));
    }

    #[test]
    fn messages_are_a_chat_that_is_not_answered() {
        let one = r#"[{"role": "user", "content": "x"}]"#;
        for body in [
            format!(r#"{{"messages": {one}}}"#),
            format!(r#"{{"input": {one}}}"#),
            format!(r#"{{"messages": [{one}, {one}]}}"#),
            format!(r#"{{"input": [{one}, {one}]}}"#),
        ] {
            let prompt = parse(Api::Embeddings, body.as_bytes()).expect(&body);
            let Input::Chat(chat) = prompt.input else { panic!("not a chat: {body}") };
            assert_eq!(chat.messages.len(), 1, "{body}");
            assert!(!chat.add_generation_prompt && !chat.add_special_tokens, "{body}");
            assert_eq!(prompt.more_prompts, usize::from(body.contains("[[")), "{body}");
        }
        let text = r#"{"input": [{"role": "user", "content": "x"}, "y"]}"#;
        check(Api::Embeddings, text, Err(RequestError::Field("messages")));
    }

    #[test]
    fn what_is_cut_is_the_end_unless_the_body_says_otherwise() {
        #[track_caller]
        fn check(fields: &str, expected: Option<Truncation>) {
            let body = format!(r#"{{"input": "a", {fields}}}"#);
            let prompt = parse(Api::Embeddings, body.as_bytes()).expect(fields);
            assert_eq!(prompt.truncation, expected, "{fields}");
        }
        check(r#""truncate_prompt_tokens": 5"#, Some(Truncation::First(5)));
        let left = r#""truncate_prompt_tokens": 5, "truncation_side": "left""#;
        check(left, Some(Truncation::Last(5)));
        check(r#""truncate_prompt_tokens": -1"#, None);
        check(r#""truncate_prompt_tokens": null"#, None);
    }

    #[test]
    fn what_has_a_query_is_routed_by_it() {
        let score = |body: &str, expected| check(Api::Score, body, expected);
        score(r#"{"text_1": "q", "text_2": ["a", "b"]}"#, Ok((text("q"), 2)));
        score(r#"{"queries": ["q", "r"], "documents": ["a", "b"]}"#, Ok((text("q"), 2)));
        score(r#"{"data_1": "q", "data_2": "a"}"#, Ok((text("q"), 1)));
        score(r#"{"queries": "q", "items": "a"}"#, Ok((text("q"), 1)));
        score(r#"{"text_1": "q"}"#, Err(RequestError::NoPrompt));
        let rerank = |body: &str, expected| check(Api::Rerank, body, expected);
        rerank(r#"{"query": "q", "documents": ["a"], "top_n": 1}"#, Ok((text("q"), 1)));
        rerank(r#"{"query": {"content": []}, "documents": []}"#, Err(RequestError::Media));
        let cut = r#"{"query": "q", "documents": ["a"], "max_tokens_per_query": 5}"#;
        rerank(cut, Err(RequestError::Unsupported("max_tokens_per_query")));
    }

    #[test]
    fn texts_are_read_and_what_models_put_before_them_is_not_guessed() {
        let embed = |body: &str, expected| check(Api::Embed, body, expected);
        embed(r#"{"texts": ["a", "b"], "truncate": "END"}"#, Ok((text("a"), 1)));
        embed(r#"{"texts": []}"#, Err(RequestError::NoPrompt));
        embed(r#"{"images": ["data:"]}"#, Err(RequestError::Media));
        let typed = r#"{"texts": ["a"], "input_type": "query"}"#;
        embed(typed, Err(RequestError::Unsupported("input_type")));
    }
}
