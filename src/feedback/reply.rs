//! One JSON document of a response, read in passing.
//!
//! A tree of a response's values can cost a hundred times its bytes, in time and in memory, and all but a few are of no
//! use: here they are looked for in place, and the rest is skipped. What is not where an engine puts it is as good as
//! absent, not an error.

use super::Usage;
use super::place::{Place, is_text};
use crate::request::Api;
use serde::Deserializer as _;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// What a document proves.
#[derive(Debug, Default)]
pub(super) struct Reply {
    pub usage: Option<Usage>,
    /// Tokens of the answer, where nothing is said of the prompt's.
    pub completion_tokens: Option<u32>,
    /// Whether it has a part of an answer.
    pub began: bool,
    /// The answer's text, unless something says that it is not what was generated.
    pub text: String,
    pub is_inexact: bool,
    /// The ids of what was generated, whatever it is.
    pub token_ids: Vec<u32>,
    /// Whether it has a part of another answer than the first.
    pub is_of_several: bool,
}

/// Reads an object. Anything else proves nothing.
pub(super) fn read(api: Api, json: &[u8]) -> Option<Reply> {
    if json.trim_ascii_start().first() != Some(&b'{') {
        return None;
    }
    let mut found = Found::default();
    let mut reader = serde_json::Deserializer::from_slice(json);
    reader.deserialize_any(At { place: Place::Document, api, found: &mut found }).ok()?;
    reader.end().ok()?;
    Some(found.into_reply(api))
}

#[derive(Default)]
struct Found {
    reply: Reply,
    usage: Counts,
    /// What the event's name gives a meaning to.
    delta: String,
    is_event_of_text: bool,
}

#[derive(Default)]
struct Counts {
    prompt_tokens: Option<u32>,
    cached_tokens: Option<u32>,
    uncounted_tokens: Option<u32>,
    completion_tokens: Option<u32>,
}

impl Found {
    fn into_reply(self, api: Api) -> Reply {
        let Self { mut reply, usage, delta, is_event_of_text } = self;
        let Counts { prompt_tokens, cached_tokens, uncounted_tokens, completion_tokens } = usage;
        // Here the prompt's tokens are those that are in no cache, before and after.
        let others = match api {
            Api::Messages => {
                cached_tokens.unwrap_or(0).saturating_add(uncounted_tokens.unwrap_or(0))
            }
            _ => 0,
        };
        reply.usage = prompt_tokens.map(|prompt_tokens| {
            let prompt_tokens = prompt_tokens.saturating_add(others);
            // More than there are is no count of them: one such number would be all that its counter shows.
            let cached_tokens = cached_tokens.filter(|cached| *cached <= prompt_tokens);
            Usage { prompt_tokens, cached_tokens, completion_tokens }
        });
        reply.completion_tokens = completion_tokens;
        if !delta.is_empty() {
            reply.began = true;
            match is_event_of_text {
                true => reply.text.push_str(&delta),
                false => reply.is_inexact = true,
            }
        }
        reply.began |= !reply.token_ids.is_empty();
        reply
    }
}

/// Reads the value at a place.
struct At<'a> {
    place: Place,
    api: Api,
    found: &'a mut Found,
}

impl<'de> DeserializeSeed<'de> for At<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        match self.place {
            Place::Elsewhere => json.deserialize_ignored_any(IgnoredAny).map(|_| ()),
            _ => json.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for At<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { place, api, found } = self;
        while let Some(place) = map.next_key_seed(Key { place, api })? {
            map.next_value_seed(At { place, api, found: &mut *found })?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Self { place, api, found } = self;
        let is_calls = place == Place::Calls;
        let element = place.element();
        while seq.next_element_seed(At { place: element, api, found: &mut *found })?.is_some() {
            found.reply.began |= is_calls;
            found.reply.is_inexact |= is_calls;
        }
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        let reply = &mut self.found.reply;
        match self.place {
            Place::Content => reply.text.push_str(text),
            Place::Reasoning => reply.is_inexact |= !text.is_empty(),
            Place::Kind if is_text(text) => return Ok(()),
            Place::Kind => reply.is_inexact = true,
            Place::Delta => {
                self.found.delta.push_str(text);
                return Ok(());
            }
            Place::Event => {
                self.found.is_event_of_text = is_text(text);
                return Ok(());
            }
            _ => return Ok(()),
        }
        reply.began |= !text.is_empty();
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        let Found { reply, usage, .. } = self.found;
        let count = u32::try_from(number).ok();
        match self.place {
            Place::PromptTokens => usage.prompt_tokens = count,
            Place::CachedTokens => usage.cached_tokens = count,
            Place::CompletionTokens => usage.completion_tokens = count,
            Place::UncountedTokens => usage.uncounted_tokens = count,
            Place::Index => {
                reply.is_inexact |= number != 0;
                reply.is_of_several |= number != 0;
            }
            Place::TokenId => reply.token_ids.extend(count),
            _ => {}
        }
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// Reads a key without keeping it.
struct Key {
    place: Place,
    api: Api,
}

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Place;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Place, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Key {
    type Value = Place;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Place, E> {
        Ok(self.place.of(self.api, key))
    }
}
