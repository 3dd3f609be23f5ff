//! The words of a text, found a window at a time.
//!
//! The pre-tokenizer of the `tokenizers` crate takes a whole text in one call and needs eight bytes of memory for each
//! of the text's. Its grammars are known, so that a window does as well: up to a place that [`is_apart`] knows, the words of
//! the window are the words of the whole. Where there is no grammar, patterns find words one by one. It does not merge or
//! normalize.

use super::EncodeError;
use super::cutting::{Cutting, Found, Level};
use super::pattern::Classes;
use super::prepared::plan::Words;
use std::ops::Range;
use tokenizers::SplitDelimiterBehavior;
use tokenizers::pipeline::{PipelinePreTokenizer, PreTokenizer as _, PreTokenizerScratch, Span};

/// Bytes of a window: a fraction of a millisecond. Halved, more is looked at twice; doubled, each VM keeps another
/// quarter of a megabyte.
const WINDOW_BYTES: usize = 32 << 10;

/// The longest window, and so the longest run of words that depend on one another: some 10 to 20 ms. Words longer than this
/// are not merged either.
const MAX_WINDOW_BYTES: usize = 1 << 19;

/// The words of a text, in order.
pub(super) struct Windows {
    /// How long a window is at first.
    window: usize,
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
    cutting: Cutting,
}

/// How words are found.
#[derive(Clone, Copy)]
pub(super) struct Finder<'a> {
    /// Grammar or patterns.
    pub words: &'a Words,
    /// The crate's grammar.
    pub grammar: &'a PipelinePreTokenizer,
    /// The characters that patterns speak of.
    pub classes: &'a Classes,
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

impl Default for Windows {
    fn default() -> Self {
        Self {
            window: WINDOW_BYTES,
            rest: 0..0,
            start: 0,
            spans: Vec::new(),
            taken: 0,
            size: 0,
            buffers: PreTokenizerScratch::default(),
            cutting: Cutting::default(),
        }
    }
}

impl Windows {
    /// Begins with another text, of so many bytes.
    pub fn begin(&mut self, words: &Words, length: usize) {
        if let Words::Levels(levels) = words {
            self.cutting.begin(levels, length);
        }
        self.rest = 0..length;
        self.spans.clear();
        self.taken = 0;
        self.size = self.window;
    }

    /// How long a text the next step may cut into words; none while there are words left.
    pub fn next_cut(&self) -> usize {
        if self.taken < self.spans.len() { 0 } else { self.rest.len() }
    }

    /// The next word of `text`, which must be the same until another is begun, or a step on the way there.
    pub fn step(&mut self, finder: Finder<'_>, text: &str) -> Result<Next, EncodeError> {
        if let Words::Levels(levels) = finder.words {
            return Ok(match self.cutting.step(levels, finder.classes, text)? {
                Found::Piece(word) => Next::Word(word),
                Found::Pending => Next::Pending,
                Found::End => Next::End,
            });
        }
        if let Some(span) = self.spans.get(self.taken) {
            self.taken += 1;
            let range = span.range();
            return Ok(Next::Word(self.start + range.start..self.start + range.end));
        }
        if self.rest.is_empty() {
            return Ok(Next::End);
        }
        let rest = text.get(self.rest.clone()).unwrap_or_default();
        let end = rest.floor_char_boundary(self.size);
        let window = rest.get(..end).unwrap_or_default();
        self.spans.clear();
        self.taken = 0;
        self.start = self.rest.start;
        if let Words::GrammarUnless { class, levels } = finder.words
            && finder.classes.occurs(*class, window)
        {
            let found = self.by_patterns(levels, finder.classes, rest, end.min(WINDOW_BYTES))?;
            self.rest.start += found;
            self.size = self.window;
            return Ok(Next::Pending);
        }
        finder
            .grammar
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
                self.size = self.window;
            }
            // One word, or a run of words each of which depends on the next, is longer than the window.
            None => {
                self.spans.clear();
                if end > MAX_WINDOW_BYTES / 2 {
                    return Err(EncodeError(format!("{end} bytes without an end of a word")));
                }
                self.size = self.size.saturating_mul(2);
            }
        }
        Ok(Next::Pending)
    }

    /// The words of a text up to a place, or across it, by patterns. Where the last one ends.
    fn by_patterns(
        &mut self,
        levels: &[Level],
        classes: &Classes,
        text: &str,
        until: usize,
    ) -> Result<usize, EncodeError> {
        let mut at = 0;
        self.cutting.begin(levels, text.len());
        while at < until {
            match self.cutting.step(levels, classes, text)? {
                Found::Piece(word) => {
                    at = word.end;
                    self.spans.push(Span { start: word.start as u32, end: word.end as u32 });
                }
                Found::Pending => {}
                Found::End => return Ok(text.len()),
            }
        }
        Ok(at)
    }

    /// Gives large buffers back.
    pub fn shrink(&mut self) {
        if self.spans.capacity() > 2 * WINDOW_BYTES {
            *self = Self::default();
        }
    }
}

/// Whether a grammar is one of those that [`is_apart`] speaks of: the crate's own hand-written ones, each cut out as
/// it stands.
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use tokenizers::pipeline::PipelineTokenizer;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    fn split(pattern: &str) -> Value {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    }

    /// The grammars of public models, by name.
    fn grammars() -> Vec<(&'static str, PipelineTokenizer)> {
        let cl100k = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let upper = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+";
        let lower = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*";
        let suffix = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
        let rest = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let o200k = format!(r"{upper}{suffix}|{lower}{suffix}|\p{{N}}{{1,3}}|{rest}");
        let tekken = format!(r"{upper}|{lower}|\p{{N}}|{rest}");
        let deepseek = [
            split(r"\p{N}{1,3}"),
            split("[一-龥\u{3040}-ゟ゠-ヿ]+"),
            split(
                "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
            ),
        ];
        let sequence = |first: Value| {
            let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
            json!({"type": "Sequence", "pretokenizers": [first, bytes]})
        };
        let gpt2 = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let all = [
            ("GPT-2", gpt2),
            ("cl100k", sequence(split(cl100k))),
            ("Qwen", sequence(split(&cl100k.replace("{1,3}", "")))),
            ("o200k", sequence(split(&o200k))),
            ("tekken", sequence(split(&tekken))),
            ("DeepSeek", json!({"type": "Sequence", "pretokenizers": deepseek})),
        ];
        all.into_iter().map(|(name, grammar)| (name, pipeline(&grammar))).collect()
    }

    fn pipeline(grammar: &Value) -> PipelineTokenizer {
        let vocab: serde_json::Map<String, Value> = ByteLevel::alphabet()
            .iter()
            .zip(0..)
            .map(|(c, id)| (c.to_string(), json!(id)))
            .collect();
        let model = json!({"type": "BPE", "byte_level": true, "vocab": vocab, "merges": []});
        let json =
            json!({"version": "1.0", "added_tokens": [], "pre_tokenizer": grammar, "model": model});
        let mut json = json;
        tokenizers::canonicalize_value(&mut json).expect("canonical");
        tokenizers::from_json(&json.to_string()).expect("a pipeline")
    }

    /// The words of a text, by windows of so many bytes at first.
    fn words(pipeline: &PipelineTokenizer, text: &str, size: usize) -> Vec<Range<usize>> {
        let mut windows = Windows { window: size, ..Windows::default() };
        windows.begin(&Words::Grammar, text.len());
        let grammar = pipeline.get_pre_tokenizer();
        let classes = Classes::default();
        let finder = Finder { words: &Words::Grammar, grammar, classes: &classes };
        let mut words = Vec::new();
        loop {
            match windows.step(finder, text).expect("words") {
                Next::Word(word) => words.push(word),
                Next::Pending => {}
                Next::End => return words,
            }
        }
    }

    /// Texts of characters that are as awkward as can be beside one another.
    fn texts(seed: u64) -> String {
        const PIECES: [&str; 48] = [
            "a", "b", "A", "B", "aB", "s", "S", "'s", "'", "'ll", "re", "é", "ß", "漢", "字", "か",
            "ー", "ℵ", "ǅ", "ʰ", "\u{301}", "\u{903}", "Ⅷ", "1", "23", "٣", "½", " ", "  ", "\n",
            "\r\n", "\t", "\u{a0}", "\u{3000}", ",", ".", "!", "/", "-", "\"", "(", "，", "。",
            "$", "😀", "\u{200d}", "\u{1}", "Ⓐ",
        ];
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as usize % below
        };
        // Few kinds of piece in one text, so that there are long runs.
        let kinds: Vec<&str> = (0..2 + next(6)).map(|_| PIECES[next(PIECES.len())]).collect();
        (0..20 + next(300)).map(|_| kinds[next(kinds.len())]).collect()
    }

    #[test]
    fn words_found_by_windows_are_the_words_of_the_whole() {
        for (name, pipeline) in grammars() {
            assert!(cuts_apart(pipeline.get_pre_tokenizer()), "{name}");
            for seed in 0..1_500 {
                let text = texts(seed);
                let whole = words(&pipeline, &text, usize::MAX);
                assert_eq!(whole.last().map(|word| word.end), Some(text.len()), "{name} {text:?}");
                for size in [1, 5, 16, 50, 200] {
                    assert_eq!(
                        words(&pipeline, &text, size),
                        whole,
                        "{name}, seed {seed}, {size}: {text:?}"
                    );
                }
            }
        }
    }
}
