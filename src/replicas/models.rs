//! An engine's answer to `/v1/models` as the models that it serves, adapters among them.
//!
//! What a model is made from is kept as a hash: it is only compared, and there may be a million of them in a table. The
//! answer says when it was made, not when an adapter was loaded, so one that is loaded anew from the same path is not
//! seen; the engine's cache does not tell the two apart either. The names go into the table that every VM reads, so an answer beyond what any fleet has is not
//! taken in part: it is no answer, and the replica is not ruled out by it.

use serde::Deserialize;
use std::borrow::Cow;
use xxhash_rust::xxh3::xxh3_64;

/// A longer answer is not read: an engine writes some 500 bytes a model, and adapters are models.
pub const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Most names of one replica.
const MAX_NAMES: usize = 1024;

/// Longest name, in bytes.
const MAX_NAME_BYTES: usize = 512;

/// One model as a replica lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// The name under which it is asked for.
    pub name: String,
    /// What its files' path hashes to; 0 where it is not told.
    pub root: u64,
    /// Of an adapter, what the name of its base model hashes to; 0 for a base model.
    pub parent: u64,
}

impl Served {
    /// A base model of which nothing but its name is known.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), root: 0, parent: 0 }
    }

    /// Whether it is an adapter on top of a base model.
    pub fn is_adapter(&self) -> bool {
        self.parent != 0
    }
}

/// What a name or a path hashes to. Never 0, which stands for none.
pub fn hash(text: &str) -> u64 {
    xxh3_64(text.as_bytes()).max(1)
}

/// No tree of values: of a megabyte of small objects one takes more than a callback's time.
#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    data: Vec<Model<'a>>,
}

#[derive(Deserialize)]
struct Model<'a> {
    #[serde(borrow)]
    id: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    root: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    parent: Option<Cow<'a, str>>,
}

impl Model<'_> {
    fn served(self) -> Option<Served> {
        let of = |text: Option<Cow<'_, str>>| text.map_or(0, |text| hash(&text));
        let name = self.id?.into_owned();
        Some(Served { name, root: of(self.root), parent: of(self.parent) })
    }
}

/// Reads the models. `None` when the answer is not what an engine sends.
pub fn served(answer: &[u8]) -> Option<Vec<Served>> {
    if answer.len() > MAX_ANSWER_BYTES {
        return None;
    }
    let Answer { data } = serde_json::from_slice(answer).ok()?;
    if data.len() > MAX_NAMES {
        return None;
    }
    let models: Vec<Served> = data.into_iter().filter_map(Model::served).collect();
    models.iter().all(|model| model.name.len() <= MAX_NAME_BYTES).then_some(models)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn names(answer: &[u8]) -> Option<Vec<String>> {
        Some(served(answer)?.into_iter().map(|model| model.name).collect())
    }

    #[test]
    fn adapters_are_told_from_base_models() {
        let answer = br#"{"data": [{"id": "base", "root": "/models/base", "parent": null},
            {"id": "lora", "root": "/adapters/1", "parent": "base"}, {"id": "bare"}]}"#;
        let models = served(answer).unwrap();
        assert_eq!(models.iter().map(Served::is_adapter).collect::<Vec<_>>(), [false, true, false]);
        assert_eq!((models[1].root, models[1].parent), (hash("/adapters/1"), hash("base")));
        assert_eq!(models[2], Served::named("bare"));
    }

    fn answer(names: &[&str]) -> Vec<u8> {
        let data: Vec<Value> =
            names.iter().map(|name| serde_json::json!({"id": name, "object": "model"})).collect();
        serde_json::json!({"object": "list", "data": data}).to_string().into_bytes()
    }

    #[test]
    fn names_are_read() {
        assert_eq!(names(&answer(&["a", "b/c"])), Some(vec!["a".to_owned(), "b/c".to_owned()]));
        assert_eq!(names(&answer(&[])), Some(Vec::new()));
    }

    #[test]
    fn more_than_any_engine_has_is_no_answer() {
        assert_eq!(names(&answer(&["a"; MAX_NAMES])).map(|names| names.len()), Some(MAX_NAMES));
        assert_eq!(names(&answer(&["a"; MAX_NAMES + 1])), None);
        assert_eq!(names(&answer(&[&"a".repeat(MAX_NAME_BYTES + 1)])), None);
        let padded = [answer(&["a"]), vec![b' '; MAX_ANSWER_BYTES]].concat();
        assert_eq!(names(&padded), None);
    }

    #[test]
    fn garbage_is_no_answer() {
        for bytes in [&b""[..], b"[]", b"{}", br#"{"data":7}"#, b"\xff"] {
            assert_eq!(names(bytes), None);
        }
    }
}
