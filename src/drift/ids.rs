//! Token ids of the engine's own, where it tells them, against those made here.

use crate::tokens::blocks::Chain;
use serde_json::Value;

/// The ids in an answer of `/tokenize`.
pub fn answered(answer: &[u8]) -> Option<Vec<u32>> {
    let answer: Value = serde_json::from_slice(answer).ok()?;
    let ids = answer.get("tokens")?.as_array()?.iter();
    ids.map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// Where a prompt's ids differ first from those made here, to the block; none: they are equal. These are kept as their
/// chain alone: a prompt's ids are not all made anew where the memo knows its beginning, and are megabytes.
pub fn first_difference(ours: &Chain, theirs: &[u32]) -> Option<usize> {
    let theirs = ours.of_same_origin(theirs);
    if theirs == *ours {
        return None;
    }
    let blocks = ours.hashes().iter().zip(theirs.hashes());
    Some(
        blocks.take_while(|(ours, theirs)| ours == theirs).count()
            * ours.block_size().get() as usize,
    )
}

/// The ids behind `"prompt_token_ids"` in one JSON document of a response, wherever they stand in it: engines have them at
/// the top or in a choice. A client's text cannot pass for the key, since its quotes come escaped.
pub fn of_response(document: &[u8]) -> Option<Vec<u32>> {
    const KEY: &[u8] = b"\"prompt_token_ids\"";
    let mut from = 0;
    loop {
        let rest = document.get(from..)?;
        // Few quotes have a `p` behind them, and each comparison of a whole key is a call.
        let may_be = |window: &[u8]| window.starts_with(b"\"p") && window == KEY;
        let at = from + rest.windows(KEY.len()).position(may_be)?;
        from = at + KEY.len();
        let escaped = at.checked_sub(1).and_then(|before| document.get(before)) == Some(&b'\\');
        if !escaped && let Some(ids) = list(document.get(from..)?) {
            return Some(ids);
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
    use crate::tokens::blocks::{BlockSize, ChainSeed};

    #[test]
    fn answers_are_read_and_compared() {
        let answer =
            br#"{"count": 3, "max_model_len": 9, "tokens": [1, 2, 3], "token_strs": null}"#;
        assert_eq!(answered(answer), Some(vec![1, 2, 3]));
        for wrong in ["", "[]", "{}", r#"{"tokens": 3}"#, r#"{"tokens": [1, -2]}"#] {
            assert_eq!(answered(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn a_difference_is_found_to_the_block_and_behind_the_last_one() {
        let size = BlockSize::new(4).unwrap();
        let ours: Vec<u32> = (0..10).collect();
        let chain = Chain::new(ChainSeed::new("m", Some("s")), size, &ours);
        let check = |theirs: &[u32], expected| {
            assert_eq!(first_difference(&chain, theirs), expected, "{theirs:?}");
        };
        check(&ours, None);
        check(&[0, 1, 2, 3, 4, 77, 6, 7, 8, 9], Some(4));
        check(&[7, 1, 2, 3, 4, 5, 6, 7, 8, 9], Some(0));
        check(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 77], Some(8));
        check(&ours[..9], Some(8));
        check(&[], Some(0));
    }

    #[track_caller]
    fn check(document: &str, expected: Option<&[u32]>) {
        assert_eq!(of_response(document.as_bytes()), expected.map(<[u32]>::to_vec), "{document}");
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
