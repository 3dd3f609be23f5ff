//! Bodies of `/v1/completions`.
//!
//! A batch is routed by its first prompt: the engine serves all of them on one replica, and they are mostly alike.

use super::given::pick_given;
use super::{Prompt, RequestError, Shared};

const FIELDS: [&str; 6] =
    ["best_of", "echo", "logprobs", "prompt_embeds", "suffix", "use_beam_search"];

pub(super) fn parse(body: &[u8]) -> Result<Prompt, RequestError> {
    let (prompt, fields) = pick_given("prompt", &[&FIELDS, &Shared::FIELDS], body)?;
    for name in ["prompt_embeds", "suffix"] {
        if fields.field(name).is_some() {
            return Err(RequestError::Unsupported(name));
        }
    }
    let given = prompt.ok_or(RequestError::NoPrompt)?;
    let more_prompts = given.more;
    Ok(Prompt {
        model: fields.text("model")?,
        input: given.into_input(fields.switch("add_special_tokens", true)?)?,
        more_prompts,
        truncation: fields.truncation()?,
        cache_salt: fields.cache_salt()?,
        stream: fields.switch("stream", false)?,
        max_answer_tokens: fields.max_answer_tokens(),
        is_continued: !fields.switch("echo", false)?,
        usage_is_comparable: more_prompts == 0 && reads_cache_once(&fields)?,
    })
}

/// Whether the engine looks its cache up exactly once for this body.
fn reads_cache_once(fields: &Shared) -> Result<bool, RequestError> {
    let echoes_logprobs = fields.switch("echo", false)? && fields.field("logprobs").is_some();
    Ok(fields.is_single("n")
        && fields.is_single("best_of")
        && fields.field("prompt_logprobs").is_none()
        && !echoes_logprobs
        && !fields.switch("use_beam_search", false)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::given::MAX_IDS;
    use crate::request::{Api, Input, parse};

    #[track_caller]
    fn check(body: &str, expected: Result<Input, RequestError>) {
        assert_eq!(parse(Api::Completions, body.as_bytes()).map(|prompt| prompt.input), expected);
    }

    fn text(text: &str) -> Result<Input, RequestError> {
        Ok(Input::Text { text: text.to_owned(), add_special_tokens: true })
    }

    #[test]
    fn every_shape_of_prompt_is_read() {
        check(r#"{"prompt": "a"}"#, text("a"));
        check(r#"{"prompt": ["a", "b"]}"#, text("a"));
        check(r#"{"prompt": [1, 2]}"#, Ok(Input::Tokens(vec![1, 2])));
        check(r#"{"prompt": [[1, 2], [3]]}"#, Ok(Input::Tokens(vec![1, 2])));
        check(r#"{"prompt": [4294967295]}"#, Ok(Input::Tokens(vec![u32::MAX])));
        let bare = Input::Text { text: "a".to_owned(), add_special_tokens: false };
        check(r#"{"prompt": "a", "add_special_tokens": false}"#, Ok(bare));
        check(r#"{"prompt": "a", "prompt": "b"}"#, text("b"));
    }

    #[test]
    fn ids_beyond_any_context_are_not_read() {
        let ids = |count: usize| format!("{{\"prompt\": [1{}]}}", ",1".repeat(count - 1));
        check(&ids(MAX_IDS), Ok(Input::Tokens(vec![1; MAX_IDS])));
        check(&ids(MAX_IDS + 1), Err(RequestError::TooManyValues));
    }

    #[test]
    fn what_is_no_prompt_is_refused() {
        for prompt in [
            "null",
            "[]",
            "5",
            "{}",
            "true",
            "[-1]",
            "[1.5]",
            "[4294967296]",
            r#"[1, "a"]"#,
            "[null]",
        ] {
            check(&format!(r#"{{"prompt": {prompt}}}"#), Err(RequestError::NoPrompt));
        }
        check("{}", Err(RequestError::NoPrompt));
        check(r#"{"prompt_embeds": "AA=="}"#, Err(RequestError::Unsupported("prompt_embeds")));
        check(r#"{"prompt": "a", "suffix": "b"}"#, Err(RequestError::Unsupported("suffix")));
    }

    #[test]
    fn usage_is_comparable_only_for_one_prompt_read_once() {
        #[track_caller]
        fn check(fields: &str, expected: bool) {
            let body = format!("{{{fields}}}");
            let prompt = parse(Api::Completions, body.as_bytes()).expect(fields);
            assert_eq!(prompt.usage_is_comparable, expected, "{fields}");
        }
        check(r#""prompt": "a", "logprobs": 1, "n": 1"#, true);
        check(r#""prompt": ["a"], "echo": true"#, true);
        check(r#""prompt": ["a", "b"]"#, false);
        check(r#""prompt": [[1], [2]]"#, false);
        check(r#""prompt": "a", "n": 2"#, false);
        check(r#""prompt": "a", "best_of": 2"#, false);
        check(r#""prompt": "a", "prompt_logprobs": 0"#, false);
        check(r#""prompt": "a", "echo": true, "logprobs": 1"#, false);
    }
}
