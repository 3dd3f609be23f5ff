//! Bodies of `/v1/completions`.
//!
//! A batch is routed by its first prompt: the engine serves all of them on one replica, and they are mostly alike.

use super::json::{Budget, Counted, Fields, read, skip};
use super::{Input, Prompt, RequestError, Shared};
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

const FIELDS: [&str; 6] =
    ["best_of", "echo", "logprobs", "prompt_embeds", "suffix", "use_beam_search"];

/// Most token ids of one prompt, which is the longest context of today's models. They take some 20 ms; doubled, twice that.
const MAX_IDS: usize = 1 << 20;

/// What is taken from a body.
#[derive(Default)]
struct Body {
    fields: Shared,
    prompt: Option<Given>,
}

impl Fields for Body {
    fn take<'de, A: MapAccess<'de>>(
        &mut self,
        key: &str,
        map: &mut A,
        budget: &Budget,
    ) -> Result<(), A::Error> {
        if key == "prompt" {
            self.prompt = map.next_value_seed(GivenSeed(budget))?;
            Ok(())
        } else if FIELDS.contains(&key) || Shared::FIELDS.contains(&key) {
            let value = map.next_value_seed(Counted(budget))?;
            self.fields.0.insert(key.to_owned(), value);
            Ok(())
        } else {
            skip(map)
        }
    }
}

pub(super) fn parse(body: &[u8]) -> Result<Prompt, RequestError> {
    let mut read_body = Body::default();
    read(body, &mut read_body)?;
    let Body { fields, prompt } = read_body;
    for name in ["prompt_embeds", "suffix"] {
        if fields.field(name).is_some() {
            return Err(RequestError::Unsupported(name));
        }
    }
    let given = prompt.ok_or(RequestError::NoPrompt)?;
    // The engine refuses an empty prompt, and an array of ids that are not text has no special tokens to add.
    let input = match given.first {
        First::Text(text) => {
            let add_special_tokens = fields.switch("add_special_tokens", true)?;
            Input::Text { text, add_special_tokens }
        }
        First::Tokens(ids) => Input::Tokens(ids),
    };
    Ok(Prompt {
        model: fields.text("model")?,
        input,
        truncation: fields.truncation()?,
        cache_salt: fields.cache_salt()?,
        stream: fields.switch("stream", false)?,
        max_answer_tokens: fields.max_answer_tokens(),
        usage_is_comparable: !given.is_batch && reads_cache_once(&fields)?,
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

/// `prompt`: its first (mostly its only) prompt, and whether there are more.
struct Given {
    first: First,
    is_batch: bool,
}

enum First {
    Text(String),
    Tokens(Vec<u32>),
}

/// Reads `prompt` straight into ids: a tree of JSON values would take eight times the memory.
struct GivenSeed<'a>(&'a Budget);

impl<'de> DeserializeSeed<'de> for GivenSeed<'_> {
    type Value = Option<Given>;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for GivenSeed<'_> {
    type Value = Option<Given>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, token ids, or an array of either")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(Given { first: First::Text(text.to_owned()), is_batch: false }))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let (first, is_batch) = match seq.next_element_seed(ElementSeed(self.0))? {
            None => return Ok(None),
            Some(Element::Token(id)) => (First::Tokens(ids(id, &mut seq, self.0)?), false),
            Some(Element::Text(text)) => (First::Text(text), skip_rest(&mut seq)?),
            Some(Element::Tokens(ids)) => (First::Tokens(ids), skip_rest(&mut seq)?),
        };
        Ok(Some(Given { first, is_batch }))
    }
}

/// The rest of an array of ids.
fn ids<'de, A: SeqAccess<'de>>(
    first: u32,
    seq: &mut A,
    budget: &Budget,
) -> Result<Vec<u32>, A::Error> {
    let mut ids = vec![first];
    while let Some(id) = seq.next_element::<u32>()? {
        if ids.len() >= MAX_IDS {
            return Err(budget.refuse());
        }
        ids.push(id);
    }
    Ok(ids)
}

/// Whether anything followed.
fn skip_rest<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<bool, A::Error> {
    let mut skipped = false;
    while seq.next_element::<IgnoredAny>()?.is_some() {
        skipped = true;
    }
    Ok(skipped)
}

/// The first element of an array, which says what the array is.
enum Element {
    Token(u32),
    Text(String),
    Tokens(Vec<u32>),
}

struct ElementSeed<'a>(&'a Budget);

impl<'de> DeserializeSeed<'de> for ElementSeed<'_> {
    type Value = Element;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Element, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ElementSeed<'_> {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a token id, or an array of ids")
    }

    fn visit_str<E>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Text(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<Element, E> {
        u32::try_from(id).map(Element::Token).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
        match seq.next_element::<u32>()? {
            None => Ok(Element::Tokens(Vec::new())),
            Some(first) => ids(first, &mut seq, self.0).map(Element::Tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Api, parse};

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
