//! A prompt as text, token ids or messages, or a batch of such.
//!
//! A batch is routed by its first prompt: the engine serves all of them on one replica, and they are mostly alike. The
//! others are counted and skipped.

use super::json::{Budget, Counted, Fields, read};
use super::{Input, Names, Picked, RequestError, Shared};
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// Most token ids of one prompt, which is the longest context of today's models. They take some 20 ms; doubled, twice that.
pub(super) const MAX_IDS: usize = 1 << 20;

/// The first (mostly the only) prompt, and how many more there are.
pub(super) struct Given {
    first: First,
    pub(super) more: usize,
}

enum First {
    Text(String),
    Tokens(Vec<u32>),
    Messages(Vec<Value>),
}

impl Given {
    /// The first prompt, unless it is a conversation.
    pub(super) fn into_input(self, add_special_tokens: bool) -> Result<Input, RequestError> {
        match self.first {
            First::Text(text) => Ok(Input::Text { text, add_special_tokens }),
            // What is not text has no special tokens to add.
            First::Tokens(ids) => Ok(Input::Tokens(ids)),
            First::Messages(_) => Err(RequestError::NoPrompt),
        }
    }

    /// The messages of the first prompt, or it as it was.
    pub(super) fn into_messages(self) -> Result<Vec<Value>, Self> {
        match self.first {
            First::Messages(messages) => Ok(messages),
            _ => Err(self),
        }
    }
}

/// Reads the prompt of the field `name` and the fields of the other names, and skips all others.
pub(super) fn pick_given(
    name: &'static str,
    others: Names,
    body: &[u8],
) -> Result<(Option<Given>, Shared), RequestError> {
    let others = Picked { names: others, fields: Shared::default() };
    let mut picked = WithGiven { name, given: None, others };
    read(body, &mut picked)?;
    Ok((picked.given, picked.others.fields))
}

struct WithGiven {
    name: &'static str,
    given: Option<Given>,
    others: Picked,
}

impl Fields for WithGiven {
    fn take<'de, A: MapAccess<'de>>(
        &mut self,
        key: &str,
        map: &mut A,
        budget: &Budget,
    ) -> Result<(), A::Error> {
        if key != self.name {
            return self.others.take(key, map, budget);
        }
        self.given = map.next_value_seed(GivenSeed(budget))?;
        Ok(())
    }
}

/// Reads it straight into ids: a tree of JSON values would take eight times the memory.
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
        f.write_str("a text, token ids, messages, or an array of such")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(Given { first: First::Text(text.to_owned()), more: 0 }))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let (first, more) = match seq.next_element_seed(ElementSeed(self.0))? {
            None => return Ok(None),
            Some(Element::Token(id)) => (First::Tokens(ids(id, &mut seq, self.0)?), 0),
            Some(Element::Message(first)) => {
                (First::Messages(messages(first, &mut seq, self.0)?), 0)
            }
            Some(Element::Text(text)) => (First::Text(text), skip_rest(&mut seq)?),
            Some(Element::Tokens(ids)) => (First::Tokens(ids), skip_rest(&mut seq)?),
            Some(Element::Messages(messages)) => (First::Messages(messages), skip_rest(&mut seq)?),
        };
        Ok(Some(Given { first, more }))
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

/// The rest of a conversation.
fn messages<'de, A: SeqAccess<'de>>(
    first: Value,
    seq: &mut A,
    budget: &Budget,
) -> Result<Vec<Value>, A::Error> {
    let mut messages = vec![first];
    while let Some(message) = seq.next_element_seed(Counted(budget))? {
        messages.push(message);
    }
    Ok(messages)
}

/// How many followed.
fn skip_rest<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<usize, A::Error> {
    let mut skipped = 0;
    while seq.next_element::<IgnoredAny>()?.is_some() {
        skipped += 1;
    }
    Ok(skipped)
}

/// The first element of an array, which says what the array is.
enum Element {
    Token(u32),
    Text(String),
    Tokens(Vec<u32>),
    Message(Value),
    Messages(Vec<Value>),
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
        f.write_str("a text, a token id, a message, or an array of ids or messages")
    }

    fn visit_str<E>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Text(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<Element, E> {
        u32::try_from(id).map(Element::Token).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Element, A::Error> {
        Counted(self.0).visit_map(map).map(Element::Message)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
        match seq.next_element_seed(InnerSeed(self.0))? {
            None => Ok(Element::Tokens(Vec::new())),
            Some(Inner::Token(first)) => ids(first, &mut seq, self.0).map(Element::Tokens),
            Some(Inner::Message(first)) => messages(first, &mut seq, self.0).map(Element::Messages),
        }
    }
}

/// The first element of an array in an array.
enum Inner {
    Token(u32),
    Message(Value),
}

struct InnerSeed<'a>(&'a Budget);

impl<'de> DeserializeSeed<'de> for InnerSeed<'_> {
    type Value = Inner;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Inner, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for InnerSeed<'_> {
    type Value = Inner;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token id or a message")
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<Inner, E> {
        u32::try_from(id).map(Inner::Token).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Inner, A::Error> {
        Counted(self.0).visit_map(map).map(Inner::Message)
    }
}
