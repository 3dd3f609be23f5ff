//! A text in pieces that are encoded each by itself: added tokens named as such, and plain text, in which nothing is one.
//!
//! Some engines put a prompt together from token ids, not from one text: what a client wrote can then never become a
//! special token, and no word reaches from one piece into the next. It says what the pieces are, not how they are encoded.

use std::ops::Range;

/// A text and where its pieces end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pieces {
    text: String,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    end: usize,
    is_token: bool,
}

impl Pieces {
    /// Adds an added token.
    pub fn push_token(&mut self, token: &str) {
        self.push(token, true);
    }

    /// Adds text that holds no token, whatever it looks like.
    pub fn push_text(&mut self, text: &str) {
        self.push(text, false);
    }

    fn push(&mut self, text: &str, is_token: bool) {
        if !text.is_empty() {
            self.text.push_str(text);
            self.pieces.push(Piece { end: self.text.len(), is_token });
        }
    }

    /// The whole text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    pub(super) fn into_parts(self) -> (String, Cursor) {
        (self.text, Cursor { pieces: self.pieces, next: 0, start: 0 })
    }
}

/// A way through the pieces of a text.
#[derive(Debug)]
pub(super) struct Cursor {
    pieces: Vec<Piece>,
    next: usize,
    start: usize,
}

impl Cursor {
    /// Where the next piece lies, and whether it is an added token.
    pub fn next(&mut self) -> Option<(Range<usize>, bool)> {
        let piece = *self.pieces.get(self.next)?;
        let range = self.start..piece.end;
        self.next += 1;
        self.start = piece.end;
        Some((range, piece.is_token))
    }

    /// Where the next piece starts.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Goes on with the piece that starts there.
    pub fn skip_to(&mut self, start: usize) {
        self.next = self.pieces.partition_point(|piece| piece.end <= start);
        self.start = start;
    }

    /// Where the pieces end that end behind `range`'s start and not behind its end, and which of them are tokens.
    pub fn ends(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, bool)> {
        let first = self.pieces.partition_point(|piece| piece.end <= range.start);
        let end = range.end;
        let ends = self.pieces.iter().skip(first).take_while(move |piece| piece.end <= end);
        ends.map(|piece| (piece.end, piece.is_token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::{EncodeError, Tokenizer};

    const TOKENIZER: &str = r#"{
        "added_tokens": [
            {"id": 6, "content": "<s>", "special": true},
            {"id": 7, "content": "ba", "normalized": true}
        ],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<": 3, "s": 4, ">": 5}, "merges": [["a", "b"]]}
    }"#;

    #[track_caller]
    fn check(pieces: &[(&str, bool)], expected: Result<&[u32], &str>) {
        let mut whole = Pieces::default();
        for (text, is_token) in pieces {
            whole.push(text, *is_token);
        }
        let tokenizer = Tokenizer::from_json(TOKENIZER).expect("a tokenizer");
        let mut encoding = tokenizer.begin_pieces(whole).expect("an encoding");
        let ids = loop {
            match encoding.go_on(&tokenizer, &mut || false) {
                Ok(None) => {}
                Ok(Some(ids)) => break Ok(ids),
                Err(EncodeError(error)) => break Err(error),
            }
        };
        let expected = expected.map(<[u32]>::to_vec).map_err(str::to_owned);
        assert_eq!(ids, expected, "{pieces:?}");
    }

    #[test]
    fn tokens_are_tokens_and_text_is_text() {
        check(&[("<s>", true), ("ab", false)], Ok(&[6, 2]));
        check(&[("<s>", false), ("ba", false)], Ok(&[3, 4, 5, 1, 0]));
        check(&[("ba", true)], Ok(&[7]));
        check(&[], Ok(&[]));
    }

    #[test]
    fn no_word_reaches_over_the_end_of_a_piece() {
        check(&[("a", false), ("", false), ("b", false)], Ok(&[0, 1]));
        check(&[("a", false), ("", true), ("ab", false)], Ok(&[0, 2]));
    }

    #[test]
    fn what_is_no_added_token_is_refused() {
        check(&[("a", true)], Err("no added token a"));
    }
}
