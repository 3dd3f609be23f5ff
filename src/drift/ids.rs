//! Token ids of the engine's own, where it tells them, against those made here.

use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

/// The ids in an answer of `/tokenize`.
pub fn answered(answer: &[u8]) -> Option<Vec<u32>> {
    let answer: Value = serde_json::from_slice(answer).ok()?;
    let ids = answer.get("tokens")?.as_array()?.iter();
    ids.map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// Where two prompts' ids differ first; none: they are equal.
pub fn first_difference(ours: &[u32], theirs: &[u32]) -> Option<usize> {
    let common = ours.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count();
    (common < ours.len() || common < theirs.len()).then_some(common)
}

/// Ids that a [`Digest`] covers at most, evenly spread. With all of them a prompt of 100,000 tokens would cost half a
/// millisecond at every request, for the few whose client asks for the ids.
const COVERED: usize = 1024;

/// What is kept of a prompt's ids until its response: their number, and up to 1,024 of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest {
    count: usize,
    hash: u64,
}

impl Digest {
    /// Of a prompt.
    pub fn of(ids: &[u32]) -> Self {
        let mut bytes = Vec::with_capacity(4 * COVERED.min(ids.len()));
        let step = ids.len().div_ceil(COVERED).max(1);
        bytes.extend(ids.iter().step_by(step).flat_map(|id| id.to_le_bytes()));
        let mut hasher = Xxh3::new();
        hasher.update(&bytes);
        Self { count: ids.len(), hash: hasher.digest() }
    }
}

/// The ids behind `"prompt_token_ids"` in one JSON document of a response, wherever they stand in it: engines have them at
/// the top or in a choice. A client's text cannot pass for the key, since its quotes come escaped.
pub fn of_response(document: &[u8]) -> Option<Digest> {
    const KEY: &[u8] = b"\"prompt_token_ids\"";
    let mut from = 0;
    loop {
        let rest = document.get(from..)?;
        let at = from + rest.windows(KEY.len()).position(|window| window == KEY)?;
        from = at + KEY.len();
        let escaped = at.checked_sub(1).and_then(|before| document.get(before)) == Some(&b'\\');
        if !escaped && let Some(ids) = list(document.get(from..)?) {
            return Some(Digest::of(&ids));
        }
    }
}

/// A list of numbers behind a colon.
fn list(text: &[u8]) -> Option<Vec<u32>> {
    let text = text.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start().strip_prefix(b"[")?;
    let end = text.iter().position(|byte| *byte == b']')?;
    let text = std::str::from_utf8(text.get(..end)?).ok()?;
    text.split(',').map(|id| id.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_and_compared() {
        let answer =
            br#"{"count": 3, "max_model_len": 9, "tokens": [1, 2, 3], "token_strs": null}"#;
        assert_eq!(answered(answer), Some(vec![1, 2, 3]));
        for wrong in ["", "[]", "{}", r#"{"tokens": 3}"#, r#"{"tokens": [1, -2]}"#] {
            assert_eq!(answered(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(first_difference(&[1, 2], &[1, 2]), None);
        assert_eq!(first_difference(&[1, 2], &[1, 3]), Some(1));
        assert_eq!(first_difference(&[1, 2], &[1]), Some(1));
        assert_eq!(first_difference(&[], &[1]), Some(0));
    }

    #[test]
    fn a_digest_tells_other_ids_and_another_number() {
        let ids: Vec<u32> = (0..1024).collect();
        for changed in [0, 1, 511, 1023] {
            let mut other = ids.clone();
            other[changed] = 77_777;
            assert_ne!(Digest::of(&ids), Digest::of(&other), "{changed}");
        }
        let many: Vec<u32> = (0..100_000).collect();
        assert_ne!(Digest::of(&many), Digest::of(&many[..99_999]));
        let swapped: Vec<u32> = many.iter().map(|id| id ^ 1).collect();
        assert_ne!(Digest::of(&many), Digest::of(&swapped));
    }

    #[track_caller]
    fn check(document: &str, expected: Option<&[u32]>) {
        assert_eq!(of_response(document.as_bytes()), expected.map(Digest::of), "{document}");
    }

    #[test]
    fn the_ids_of_a_response_are_found_where_engines_put_them() {
        check(r#"{"choices": [], "prompt_token_ids": [1, 22, 333]}"#, Some(&[1, 22, 333]));
        check(r#"{"choices":[{"index":0,"text":"","prompt_token_ids":[14990]}]}"#, Some(&[14990]));
        check(r#"{"prompt_token_ids":null,"choices":[{"prompt_token_ids" : [7]}]}"#, Some(&[7]));
        check(r#"{"choices":[{"text":"\"prompt_token_ids\":[1]"}]}"#, None);
        check(r#"{"prompt_token_ids":[1,"x"]}"#, None);
        check(r#"{"prompt_token_ids":[1,"#, None);
        check(r#"{"token_ids":[1]}"#, None);
        check("", None);
    }
}
