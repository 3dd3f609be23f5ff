//! Added tokens: the strings, special or not, that are cut out of a text before the model sees it.
//!
//! Leftmost first, then longest, compared byte for byte. The `tokenizers` crate compares 32 bits of a hash with fixed seeds,
//! so that a chosen text can match where no token stands, inside a character even; hence this matcher.

use hashbrown::HashMap;
use std::ops::Range;
use tokenizers::pre_tokenizers::whitespace::is_word_char;

/// Most added tokens a file may declare. Gemma 3 has 6,415; more than this is a damaged file.
pub(super) const MAX_ADDED_TOKENS: usize = 1 << 15;
/// Longest added token, in bytes.
pub(super) const MAX_ADDED_BYTES: usize = 1 << 10;

/// One added token, as the model's files declare it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AddedToken {
    /// Its token id.
    pub id: u32,
    /// Matches only where no word character touches it.
    pub single_word: bool,
    /// Takes the white space before it.
    pub lstrip: bool,
    /// Takes the white space after it.
    pub rstrip: bool,
    /// Matched after normalization, and `content` is normalized too.
    pub normalized: bool,
    /// What is matched.
    pub content: String,
}

/// The added tokens of a model.
pub(super) struct AddedTokens {
    /// Those matched in the text as it came.
    pub raw: Matcher,
    /// Those matched in the normalized text.
    pub normalized: Matcher,
}

/// Finds added tokens in a text.
pub(super) struct Matcher {
    tokens: HashMap<Box<str>, AddedToken>,
    /// Bytes that tokens start with.
    starts: Box<[bool; 256]>,
    /// Lengths of the tokens that start with a byte, longest first.
    lengths: Box<[Vec<u16>; 256]>,
}

/// A stretch of plain text and the added token before it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The token before the text; none at the start.
    pub token: Option<u32>,
    /// Where the plain text lies in the whole; it may be empty.
    pub text: Range<usize>,
}

impl AddedTokens {
    /// Sorts tokens into the two matchers. Of two with the same content the later one counts.
    pub fn new(tokens: Vec<AddedToken>) -> Self {
        let (normalized, raw) = tokens.into_iter().partition(|token| token.normalized);
        Self { raw: Matcher::new(raw), normalized: Matcher::new(normalized) }
    }

    /// The id of the token with this very content.
    pub fn id(&self, content: &str) -> Option<u32> {
        let found = self.raw.tokens.get(content).or_else(|| self.normalized.tokens.get(content));
        found.map(|token| token.id)
    }
}

impl Matcher {
    fn new(tokens: Vec<AddedToken>) -> Self {
        let mut lengths: Box<[Vec<u16>; 256]> = Box::new(std::array::from_fn(|_| Vec::new()));
        for token in &tokens {
            let first = token.content.bytes().next().map(usize::from);
            let length = u16::try_from(token.content.len());
            if let (Some(list), Ok(length)) = (first.and_then(|b| lengths.get_mut(b)), length) {
                list.push(length);
            }
        }
        for list in lengths.iter_mut() {
            list.sort_unstable_by(|a, b| b.cmp(a));
            list.dedup();
        }
        let mut starts = Box::new([false; 256]);
        for (starts, list) in starts.iter_mut().zip(lengths.iter()) {
            *starts = !list.is_empty();
        }
        let tokens = tokens.into_iter().map(|t| (t.content.clone().into_boxed_str(), t)).collect();
        Self { tokens, starts, lengths }
    }

    /// How many bytes behind a found token's end (and the white space it takes) can matter to what is found up to there: a
    /// longer token might begin where it does or before, and the character behind decides about `single_word` and `rstrip`.
    pub fn look_ahead(&self) -> usize {
        let longest = self.lengths.iter().filter_map(|list| list.first()).max();
        let shortest = self.lengths.iter().filter_map(|list| list.last()).min();
        let length = |length: Option<&u16>| usize::from(length.copied().unwrap_or_default());
        length(longest) - length(shortest) + char::MAX.len_utf8()
    }

    /// Whether one of its tokens has this id.
    pub fn has(&self, id: u32) -> bool {
        self.tokens.values().any(|token| token.id == id)
    }

    /// How many tokens it knows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The added token that starts at or after `from`, with its bounds, or how far there is none: one call compares
    /// some [`STEP_BYTES`] of tokens at most.
    fn find(&self, text: &str, from: usize) -> Found<'_> {
        if self.tokens.is_empty() {
            return Found::NoMore;
        }
        let bytes = text.as_bytes();
        let mut left = STEP_BYTES;
        let mut start = from;
        while start < bytes.len() && left > 0 {
            let rest = bytes.get(start..bytes.len().min(start + left)).unwrap_or_default();
            let starts = |&byte: &u8| self.starts.get(usize::from(byte)) == Some(&true);
            let skipped = rest.iter().position(starts).unwrap_or(rest.len());
            (start, left) = (start + skipped, left - skipped);
            if skipped == rest.len() {
                continue;
            }
            let first = bytes.get(start).copied().map(usize::from);
            for &length in first.and_then(|first| self.lengths.get(first)).into_iter().flatten() {
                let end = start + usize::from(length);
                left = left.saturating_sub(usize::from(length));
                if let Some(token) = text.get(start..end).and_then(|found| self.tokens.get(found)) {
                    return Found::Token { start, end, token };
                }
            }
            (start, left) = (start + 1, left.saturating_sub(1));
        }
        if start < bytes.len() { Found::NoneUpTo(start) } else { Found::NoMore }
    }
}

/// Bytes looked at in one step: some tens of microseconds.
const STEP_BYTES: usize = 16 << 10;

enum Found<'m> {
    Token { start: usize, end: usize, token: &'m AddedToken },
    NoneUpTo(usize),
    NoMore,
}

/// Cuts a text at its added tokens, in steps.
#[derive(Debug, Default)]
pub(super) struct Cutter {
    /// Where the plain text starts.
    at: usize,
    /// Up to where no token starts that counts.
    from: usize,
    token: Option<u32>,
    done: bool,
    /// Finds no token at all.
    blind: bool,
}

/// What one step of a [`Cutter`] found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Nothing yet.
    Pending,
    /// The next piece.
    Piece(Piece),
    /// There was no more.
    End,
}

impl Cutter {
    /// One that leaves the text in one piece.
    pub fn blind() -> Self {
        Self { blind: true, ..Self::default() }
    }

    /// Where it stands, if that is right behind a token, and the token, which is not handed out yet.
    pub fn behind_token(&self) -> Option<(usize, u32)> {
        self.token.filter(|_| self.from == self.at && !self.done).map(|token| (self.at, token))
    }

    /// One that stands where [`Self::behind_token`] said of another.
    pub fn from_behind(at: usize, token: u32) -> Self {
        Self { at, from: at, token: Some(token), ..Self::default() }
    }

    /// One bounded step through `text`, which must be the same each time.
    pub fn step(&mut self, matcher: &Matcher, text: &str) -> Cut {
        if self.done {
            return Cut::End;
        }
        let found = if self.blind { Found::NoMore } else { matcher.find(text, self.from) };
        let (start, end, token) = match found {
            Found::NoneUpTo(from) => {
                self.from = from;
                return Cut::Pending;
            }
            Found::NoMore => {
                self.done = true;
                return Cut::Piece(Piece { token: self.token, text: self.at..text.len() });
            }
            Found::Token { start, end, token } => (start, end, token),
        };
        self.from = end;
        let before = text.get(self.at..start).unwrap_or_default();
        let after = text.get(end..).unwrap_or_default();
        // The character before a match counts even when an earlier token took it.
        let whole_before = text.get(..start).unwrap_or_default();
        if token.single_word && !stands_alone(whole_before, after) {
            return Cut::Pending;
        }
        let plain = if token.lstrip { before.trim_end() } else { before };
        let taken = if token.rstrip { after.len() - after.trim_start().len() } else { 0 };
        let piece = Piece { token: self.token, text: self.at..self.at + plain.len() };
        self.at = end + taken;
        self.from = self.at;
        self.token = Some(token.id);
        Cut::Piece(piece)
    }
}

fn stands_alone(before: &str, after: &str) -> bool {
    !before.chars().next_back().is_some_and(is_word_char)
        && !after.chars().next().is_some_and(is_word_char)
}
