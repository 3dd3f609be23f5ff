//! An engine's batch of KV events, from msgpack.
//!
//! vLLM writes each event as a map with its `type`, before version 0.24 as an array that begins with it; SGLang has gone the same
//! way. Both are read, by the same names. Keys, trailing places and types of events that are not known are passed over, since
//! engines add some with every release; what is known and has another form than it should is an error of the whole batch, since
//! a removal that is not read would leave a block that is gone.
//!
//! What the blocks mean is not known here.

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use xxhash_rust::xxh3::xxh3_64;

/// How deep values may be nested: keys of blocks are three deep in a batch's list of events.
const MAX_DEPTH: usize = 16;

/// What an engine calls a block: a number, signed or not, or what its digest's bytes hash to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(pub u64);

/// What one step of an engine did to its cache.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Batch {
    /// In the order in which they happened.
    pub events: Vec<Event>,
    /// The data-parallel rank that it is of, where it is said.
    pub rank: Option<u32>,
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Blocks are in the cache.
    Stored(Stored),
    /// Blocks are not any more.
    Removed(Removed),
    /// None is.
    Cleared,
    /// Something that is not known here.
    Unknown,
}

/// Consecutive blocks that were stored.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Stored {
    /// Their names, first block first.
    pub hashes: Vec<EngineHash>,
    /// What the first stands behind.
    pub parent: Option<EngineHash>,
    /// The tokens of all of them; `None` where they are something else, such as EAGLE's pairs.
    pub tokens: Option<Vec<u32>>,
    /// Tokens in each.
    pub block_tokens: u32,
    /// Whose they are.
    pub adapter: Adapter,
    /// What sets each of them apart beside tokens and adapter; empty where nothing does.
    pub keys: Vec<Keys>,
    /// Where they are.
    pub place: Place,
    /// How the layers of their group use them, if it is not as plain attention does.
    pub is_partial: bool,
}

/// Blocks that were removed, in any order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Removed {
    /// Their names.
    pub hashes: Vec<EngineHash>,
    /// From where.
    pub place: Place,
}

/// Where blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// The number of their group of layers.
    pub group: u32,
    /// Whether they are in a tier from which they must be fetched.
    pub is_offloaded: bool,
}

/// Whose blocks are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Adapter {
    /// The base model's.
    #[default]
    Base,
    /// A LoRA adapter's.
    Named(String),
    /// An adapter's of which only a number is known.
    Numbered,
    /// The event has no place for it.
    NotSaid,
}

/// What sets a block apart beside its tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Keys {
    /// Texts, in order: the adapter's name and the cache salt.
    pub texts: Vec<String>,
    /// Whether there is more: media, prompt embeddings, what is not known.
    pub has_more: bool,
}

/// Reads a batch.
///
/// # Errors
/// When the bytes are none, and what is wrong with them.
pub fn decode(payload: &[u8]) -> Result<Batch, String> {
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(payload);
    deserializer.set_max_depth(MAX_DEPTH);
    Batch::deserialize(&mut deserializer).map_err(|error| error.to_string())
}

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Array;
        impl<'de> Visitor<'de> for Array {
            type Value = Batch;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an array of a time, events and a rank")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Batch, A::Error> {
                let _: Option<IgnoredAny> = array.next_element()?;
                let events =
                    array.next_element()?.ok_or_else(|| de::Error::missing_field("events"))?;
                let rank = array.next_element::<Option<u32>>()?.flatten();
                while array.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Batch { events, rank })
            }
        }
        deserializer.deserialize_any(Array)
    }
}

/// The fields of all events, by their names; the order is that of the arrays.
const STORED: [&str; 12] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
];
const REMOVED: [&str; 4] = ["block_hashes", "medium", "group_idx", "locality"];

/// What an event said, before it is known what it must say.
#[derive(Default)]
struct Fields {
    hashes: Option<Vec<EngineHash>>,
    parent: Option<EngineHash>,
    tokens: Option<Tokens>,
    block_size: Option<u32>,
    lora_id: Option<i64>,
    lora_name: Option<Option<String>>,
    medium: Option<String>,
    locality: Option<String>,
    keys: Option<Vec<Option<Keys>>>,
    salt: Option<String>,
    group: Option<u32>,
    kind: Option<String>,
}

/// The next value of a map or an array.
trait Values<'de> {
    type Error: de::Error;
    fn value<T: Deserialize<'de>>(&mut self) -> Result<T, Self::Error>;
}

struct OfMap<A>(A);

impl<'de, A: MapAccess<'de>> Values<'de> for OfMap<A> {
    type Error = A::Error;
    fn value<T: Deserialize<'de>>(&mut self) -> Result<T, A::Error> {
        self.0.next_value()
    }
}

/// One value, which is known to be there.
struct OfArray<'a, A>(&'a mut A);

impl<'de, A: SeqAccess<'de>> Values<'de> for OfArray<'_, A> {
    type Error = A::Error;
    fn value<T: Deserialize<'de>>(&mut self) -> Result<T, A::Error> {
        self.0.next_element()?.ok_or_else(|| de::Error::custom("cut off"))
    }
}

impl Fields {
    fn take<'de, V: Values<'de>>(&mut self, name: &str, values: &mut V) -> Result<(), V::Error> {
        match name {
            "block_hashes" => self.hashes = Some(values.value()?),
            "parent_block_hash" => self.parent = values.value()?,
            "token_ids" => self.tokens = Some(values.value()?),
            "block_size" => self.block_size = Some(values.value()?),
            "lora_id" => self.lora_id = values.value()?,
            "lora_name" => self.lora_name = Some(values.value()?),
            "medium" => self.medium = values.value()?,
            "locality" => self.locality = values.value()?,
            "extra_keys" => self.keys = values.value()?,
            "cache_salt" => self.salt = values.value()?,
            "group_idx" => self.group = values.value()?,
            "kv_cache_spec_kind" => self.kind = values.value()?,
            _ => {
                let _: IgnoredAny = values.value()?;
            }
        }
        Ok(())
    }

    fn event<E: de::Error>(self, kind: &str) -> Result<Event, E> {
        let is_here = self.medium.as_ref().is_none_or(|medium| medium.eq_ignore_ascii_case("gpu"))
            && self.locality.as_ref().is_none_or(|place| !place.eq_ignore_ascii_case("remote"));
        let place = Place { group: self.group.unwrap_or(0), is_offloaded: !is_here };
        match kind {
            "BlockStored" => self.stored(place).map(Event::Stored),
            "BlockRemoved" => {
                let hashes = self.hashes.ok_or_else(|| E::missing_field("block_hashes"))?;
                Ok(Event::Removed(Removed { hashes, place }))
            }
            "AllBlocksCleared" => Ok(Event::Cleared),
            _ => Ok(Event::Unknown),
        }
    }

    fn stored<E: de::Error>(self, place: Place) -> Result<Stored, E> {
        let missing = E::missing_field;
        let plain = ["full_attention", "mla_attention", "sink_full_attention"];
        let is_partial = self.kind.is_some_and(|kind| !plain.contains(&kind.as_str()));
        let adapter = match self.lora_name {
            Some(Some(name)) => Adapter::Named(name),
            _ if self.lora_id.is_some() => Adapter::Numbered,
            Some(None) => Adapter::Base,
            None => Adapter::NotSaid,
        };
        let mut keys: Vec<Keys> =
            self.keys.unwrap_or_default().into_iter().map(Option::unwrap_or_default).collect();
        if let Some(salt) = self.salt {
            if keys.is_empty() {
                keys.push(Keys::default());
            }
            keys.iter_mut().take(1).for_each(|keys| keys.texts.push(salt.clone()));
        }
        let tokens = match self.tokens.ok_or_else(|| missing("token_ids"))? {
            Tokens::Ids(ids) => Some(ids),
            Tokens::Other => None,
        };
        Ok(Stored {
            hashes: self.hashes.ok_or_else(|| missing("block_hashes"))?,
            parent: self.parent,
            tokens,
            block_tokens: self.block_size.ok_or_else(|| missing("block_size"))?,
            adapter,
            keys,
            place,
            is_partial,
        })
    }
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapOrArray;
        impl<'de> Visitor<'de> for MapOrArray {
            type Value = Event;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an event")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Event, A::Error> {
                let (mut map, mut fields, mut kind) = (OfMap(map), Fields::default(), None);
                while let Some(key) = map.0.next_key::<String>()? {
                    match key.as_str() {
                        "type" => kind = Some(map.value::<String>()?),
                        key => fields.take(key, &mut map)?,
                    }
                }
                let kind = kind.ok_or_else(|| de::Error::missing_field("type"))?;
                fields.event(&kind)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Event, A::Error> {
                let kind: Option<String> = array.next_element()?;
                let kind = kind.ok_or_else(|| de::Error::missing_field("type"))?;
                let names: &[&str] = match kind.as_str() {
                    "BlockStored" => &STORED,
                    "BlockRemoved" => &REMOVED,
                    _ => &[],
                };
                let mut fields = Fields::default();
                let places = array.size_hint().unwrap_or(0);
                for name in names.iter().take(places) {
                    fields.take(name, &mut OfArray(&mut array))?;
                }
                while array.next_element::<IgnoredAny>()?.is_some() {}
                fields.event(&kind)
            }
        }
        deserializer.deserialize_any(MapOrArray)
    }
}

impl<'de> Deserialize<'de> for EngineHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrBytes;
        impl Visitor<'_> for NumberOrBytes {
            type Value = EngineHash;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a block's hash")
            }

            fn visit_u64<E>(self, number: u64) -> Result<EngineHash, E> {
                Ok(EngineHash(number))
            }

            fn visit_i64<E>(self, number: i64) -> Result<EngineHash, E> {
                Ok(EngineHash(number.cast_unsigned()))
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<EngineHash, E> {
                Ok(EngineHash(xxh3_64(bytes)))
            }
        }
        deserializer.deserialize_any(NumberOrBytes)
    }
}

/// The tokens of blocks.
enum Tokens {
    Ids(Vec<u32>),
    Other,
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Array;
        impl<'de> Visitor<'de> for Array {
            type Value = Tokens;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("token ids")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Tokens, A::Error> {
                // Every token is a byte at least, so the payload's length bounds this.
                let mut ids = Vec::with_capacity(array.size_hint().unwrap_or(0).min(1 << 16));
                let mut are_ids = true;
                while let Some(Token(id)) = array.next_element()? {
                    are_ids &= id.is_some();
                    ids.extend(id.filter(|_| are_ids));
                }
                Ok(if are_ids { Tokens::Ids(ids) } else { Tokens::Other })
            }

            fn visit_unit<E>(self) -> Result<Tokens, E> {
                Ok(Tokens::Ids(Vec::new()))
            }
        }
        deserializer.deserialize_any(Array)
    }
}

/// One token's id; `None` when it is something else.
struct Token(Option<u32>);

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Token;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a token")
            }

            fn visit_u64<E>(self, number: u64) -> Result<Token, E> {
                Ok(Token(u32::try_from(number).ok()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Token, E> {
                Ok(Token(u32::try_from(number).ok()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Token, A::Error> {
                while array.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Token(None))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Array;
        impl<'de> Visitor<'de> for Array {
            type Value = Keys;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a block's keys")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Keys, A::Error> {
                let mut keys = Keys::default();
                while let Some(key) = array.next_element()? {
                    match key {
                        Key::Text(text) => keys.texts.push(text),
                        Key::Other => keys.has_more = true,
                    }
                }
                Ok(keys)
            }
        }
        deserializer.deserialize_any(Array)
    }
}

/// One key of a block.
enum Key {
    Text(String),
    Other,
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Key;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a key")
            }

            fn visit_str<E>(self, text: &str) -> Result<Key, E> {
                Ok(Key::Text(text.to_owned()))
            }

            /// Media, as an identifier and an offset.
            fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Key, A::Error> {
                while array.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Key::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Key, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Key::Other)
            }

            /// The digest of a prompt's embeddings.
            fn visit_bytes<E>(self, _: &[u8]) -> Result<Key, E> {
                Ok(Key::Other)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Key, E> {
                Ok(Key::Other)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Key, E> {
                Ok(Key::Other)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Key, E> {
                Ok(Key::Other)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Key, E> {
                Ok(Key::Other)
            }

            fn visit_unit<E>(self) -> Result<Key, E> {
                Ok(Key::Other)
            }
        }
        deserializer.deserialize_any(Any)
    }
}
