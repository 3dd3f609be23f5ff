//! Bodies of vLLM's `/inference/v1/generate`, which hold token ids.

use super::given::pick_given;
use super::{Input, Prompt, RequestError, Shared};
use serde_json::Value;

const FIELDS: [&str; 6] =
    ["cache_salt", "content_parts", "features", "model", "sampling_params", "stream"];

pub(super) fn parse(body: &[u8]) -> Result<Prompt, RequestError> {
    let (token_ids, mut fields) = pick_given("token_ids", &[&FIELDS], body)?;
    if ["content_parts", "features"].iter().any(|name| fields.field(name).is_some()) {
        return Err(RequestError::Media);
    }
    let given = token_ids.filter(|given| given.more == 0).ok_or(RequestError::NoPrompt)?;
    let input = match given.into_input(false)? {
        input @ Input::Tokens(_) => input,
        _ => return Err(RequestError::NoPrompt),
    };
    let sampling = match fields.take_out("sampling_params") {
        Some(Value::Object(sampling)) => Shared(sampling),
        _ => Shared::default(),
    };
    Ok(Prompt {
        model: fields.text("model")?,
        input,
        more_prompts: 0,
        truncation: None,
        cache_salt: fields.cache_salt()?,
        stream: fields.switch("stream", false)?,
        max_answer_tokens: sampling.max_answer_tokens(),
        is_continued: true,
        usage_is_comparable: sampling.is_single("n") && sampling.field("prompt_logprobs").is_none(),
    })
}

#[cfg(test)]
mod tests {
    use crate::request::{Api, Input, RequestError, parse};

    #[track_caller]
    fn check(body: &str, expected: Result<&[u32], RequestError>) {
        let input = parse(Api::Generate, body.as_bytes()).map(|prompt| prompt.input);
        assert_eq!(input, expected.map(|ids| Input::Tokens(ids.to_vec())), "{body}");
    }

    #[test]
    fn ids_are_the_prompt() {
        check(r#"{"token_ids": [1, 2], "sampling_params": {}}"#, Ok(&[1, 2]));
        check(r#"{"token_ids": []}"#, Err(RequestError::NoPrompt));
        check(r#"{"token_ids": [[1], [2]]}"#, Err(RequestError::NoPrompt));
        check(r#"{"token_ids": "a"}"#, Err(RequestError::NoPrompt));
        check(r#"{"token_ids": [-1]}"#, Err(RequestError::NoPrompt));
        check(r#"{"prompt": [1]}"#, Err(RequestError::NoPrompt));
        check(r#"{"token_ids": [1], "features": null}"#, Ok(&[1]));
        check(r#"{"token_ids": [1], "features": {"mm_hashes": {}}}"#, Err(RequestError::Media));
    }

    #[test]
    fn the_answer_is_described_by_the_sampling_parameters() {
        let body = br#"{"token_ids": [1], "max_tokens": 1, "cache_salt": "s",
            "sampling_params": {"max_tokens": 9, "n": 2}}"#;
        let prompt = parse(Api::Generate, body).expect("a prompt");
        assert_eq!(prompt.max_answer_tokens, Some(9));
        assert_eq!(prompt.cache_salt.as_deref(), Some("s"));
        assert!(!prompt.usage_is_comparable);
    }
}
