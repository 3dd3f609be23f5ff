//! What `Metaspace` and `ByteLevel` write into a text before it is cut into words: marks for its spaces, one before it.
//!
//! It is done a part at a time, behind normalizers and added tokens, where the pre-tokenizer does it.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Bytes rewritten in one step.
const STEP_BYTES: usize = 16 << 10;

/// How a text is rewritten.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rewrite {
    /// Written for each space.
    pub space: Option<char>,
    /// Written before a text that does not start with it.
    pub prefix: Option<char>,
    /// Only before the text's very beginning.
    pub first_only: bool,
    /// White space goes; each word gets the prefix.
    pub drops_white_space: bool,
}

/// A text on its way to its rewritten form.
#[derive(Debug, Default)]
pub(super) struct Rewriting {
    text: String,
    rest: Range<usize>,
    in_word: bool,
}

impl Rewriting {
    /// Begins with the stretch of a text that `piece` says; `opens` where nothing stood before it.
    pub fn begin(&mut self, rewrite: &Rewrite, text: &str, piece: Range<usize>, opens: bool) {
        self.text.clear();
        self.in_word = false;
        let first = text.get(piece.clone()).and_then(|text| text.chars().next());
        let written = match rewrite.space {
            Some(space) if first == Some(' ') => Some(space),
            _ => first,
        };
        let prefixes = !rewrite.drops_white_space && (opens || !rewrite.first_only);
        if prefixes && written.is_some() && written != rewrite.prefix {
            self.text.extend(rewrite.prefix);
        }
        self.rest = piece;
    }

    /// One step. Whether there is more to do.
    pub fn step(&mut self, rewrite: &Rewrite, text: &str) -> bool {
        let rest = text.get(self.rest.clone()).unwrap_or_default();
        let end = rest.floor_char_boundary(STEP_BYTES);
        for character in rest.get(..end).unwrap_or_default().chars() {
            if rewrite.drops_white_space {
                if character.is_whitespace() {
                    self.in_word = false;
                    continue;
                }
                if !std::mem::replace(&mut self.in_word, true) && rewrite.prefix != Some(character)
                {
                    self.text.extend(rewrite.prefix);
                }
            }
            match rewrite.space {
                Some(space) if character == ' ' => self.text.push(space),
                _ => self.text.push(character),
            }
        }
        self.rest.start += end;
        !self.rest.is_empty()
    }

    /// What has been written.
    pub fn text(&self) -> &str {
        &self.text
    }
}
