//! An engine's answer to `/v1/models` as the names that it serves.
//!
//! The names go into the table that every VM reads, so an answer beyond what any fleet has is not
//! taken in part: it is no answer, and the replica is not ruled out by it.

use serde::Deserialize;
use std::borrow::Cow;

/// A longer answer is not read: an engine writes some 500 bytes a model, and adapters are models.
pub const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Most names of one replica.
const MAX_NAMES: usize = 1024;

/// Longest name, in bytes.
const MAX_NAME_BYTES: usize = 512;

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
}

/// Reads the names. `None` when the answer is not what an engine sends.
pub fn names(answer: &[u8]) -> Option<Vec<String>> {
    if answer.len() > MAX_ANSWER_BYTES {
        return None;
    }
    let Answer { data } = serde_json::from_slice(answer).ok()?;
    if data.len() > MAX_NAMES {
        return None;
    }
    let names: Vec<String> =
        data.into_iter().filter_map(|model| model.id).map(Cow::into_owned).collect();
    names.iter().all(|name| name.len() <= MAX_NAME_BYTES).then_some(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

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
