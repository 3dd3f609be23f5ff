//! The words of a text, found a window at a time.
//!
//! The pre-tokenizer of the `tokenizers` crate takes a whole text in one call and needs eight bytes of memory for each
//! of the text's. Where its grammar is known, a window does as well: up to a place that [`is_apart`] knows, the words of
//! the window are the words of the whole. It does not merge or normalize.

use super::EncodeError;
use std::ops::Range;
use tokenizers::SplitDelimiterBehavior;
use tokenizers::pipeline::{PipelinePreTokenizer, PreTokenizer as _, PreTokenizerScratch, Span};

/// Bytes of a window: a fraction of a millisecond. Halved, more is looked at twice; doubled, each VM keeps another
/// quarter of a megabyte.
const WINDOW_BYTES: usize = 32 << 10;

/// The words of a text, in order.
#[derive(Default)]
pub(super) struct Windows {
    /// What has not been cut into words yet.
    rest: Range<usize>,
    /// Where the window lies whose words are in `spans`.
    start: usize,
    spans: Vec<Span>,
    /// How many of them have been taken.
    taken: usize,
    /// How long the next window is to be.
    size: usize,
    buffers: PreTokenizerScratch,
}

/// What one step found.
pub(super) enum Next {
    /// A word, as its place in the text.
    Word(Range<usize>),
    /// Nothing yet.
    Pending,
    /// There was no more.
    End,
}

impl Windows {
    /// Begins with another text, of so many bytes.
    pub fn begin(&mut self, length: usize) {
        self.rest = 0..length;
        self.spans.clear();
        self.taken = 0;
        self.size = WINDOW_BYTES;
    }

    /// The next word of `text`, which must be the same until another is begun, or a step on the way there. `cuts` is
    /// what [`cuts_apart`] says of the grammar.
    pub fn step(
        &mut self,
        grammar: &PipelinePreTokenizer,
        cuts: bool,
        text: &str,
    ) -> Result<Next, EncodeError> {
        if let Some(span) = self.spans.get(self.taken) {
            self.taken += 1;
            let range = span.range();
            return Ok(Next::Word(self.start + range.start..self.start + range.end));
        }
        if self.rest.is_empty() {
            return Ok(Next::End);
        }
        let rest = text.get(self.rest.clone()).unwrap_or_default();
        let end = if cuts { rest.floor_char_boundary(self.size) } else { rest.len() };
        let window = rest.get(..end).unwrap_or_default();
        self.spans.clear();
        self.taken = 0;
        self.start = self.rest.start;
        grammar
            .pre_tokenize(window, &mut self.buffers, &mut self.spans)
            .map_err(|error| EncodeError(error.to_string()))?;
        if end == rest.len() {
            self.rest = 0..0;
            return Ok(Next::Pending);
        }
        let last = self.spans.iter().rposition(|span| is_apart(window, span.range().start));
        match last.and_then(|last| Some((last, self.spans.get(last)?.range().start))) {
            Some((last, start)) => {
                self.spans.truncate(last);
                self.rest.start += start;
                self.size = WINDOW_BYTES;
            }
            // One word, or a run of words each of which depends on the next, is longer than the window.
            None => {
                self.spans.clear();
                self.size = self.size.saturating_mul(2);
            }
        }
        Ok(Next::Pending)
    }

    /// Gives large buffers back.
    pub fn shrink(&mut self) {
        if self.spans.capacity() > 2 * WINDOW_BYTES {
            *self = Self::default();
        }
    }
}

/// Whether a grammar is one of those that [`is_apart`] speaks of: the crate's own hand-written ones, each cut out as
/// it stands. Of all others the words are found in one call.
pub(super) fn cuts_apart(grammar: &PipelinePreTokenizer) -> bool {
    match grammar {
        PipelinePreTokenizer::Split(split) => {
            split.grammar().is_some()
                && split.behavior == SplitDelimiterBehavior::Isolated
                && !split.invert
        }
        PipelinePreTokenizer::Sequence(sequence) => {
            let is_none = |child: &&PipelinePreTokenizer| **child == PipelinePreTokenizer::None;
            let mut children = sequence.pre_tokenizers().iter().filter(|child| !is_none(child));
            sequence.is_deepseek()
                || children.next().is_some_and(cuts_apart) && children.next().is_none()
        }
        _ => false,
    }
}

/// Whether the words before `at`, where a word starts, are the same whatever follows the character there, and the words
/// from there on the same whatever stands before.
///
/// The grammars (GPT-2, cl100k, o200k, tekken, DeepSeek, Kimi and their variants) match from left to right without
/// looking back, so that a word's start is all that the words behind it depend on. Before it, a match has read on: over a
/// run of letters and marks, of digits, of signs, or of white space, and up to three characters of a contraction
/// behind letters. A run that ended at `at` was ended by the character there:
/// - white space after anything else ends every run but its own;
/// - a digit after anything else does too, except behind white space, whose own run it ends as any character would, but
///   which may have been given up for the word behind;
/// - after a digit, any character does: digits are matched in ones or threes, or up to one that is none;
/// - a sign other than an apostrophe ends a run of letters.
fn is_apart(window: &str, at: usize) -> bool {
    let before = window.get(..at).and_then(|text| text.chars().next_back());
    let after = window.get(at..).and_then(|text| text.chars().next());
    let (Some(before), Some(after)) = (before, after) else { return false };
    if before.is_whitespace() {
        return false;
    }
    let is_sign = matches!(
        after,
        ',' | '.'
            | ';'
            | ':'
            | '!'
            | '?'
            | '('
            | ')'
            | '<'
            | '>'
            | '"'
            | '='
            | '-'
            | '，'
            | '。'
            | '、'
    );
    after.is_whitespace()
        || after.is_numeric()
        || before.is_numeric()
        || is_sign && before.is_alphabetic()
}
