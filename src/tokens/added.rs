//! Added tokens: the strings, special or not, that are cut out of a text before the model sees it.
//!
//! Leftmost first, then longest, compared byte for byte. The `tokenizers` crate compares 32 bits of a hash with fixed seeds,
//! so that a chosen text can match where no token stands, inside a character even; hence this matcher.

use hashbrown::HashMap;
use tokenizers::pre_tokenizers::whitespace::is_word_char;

/// Most added tokens a file may declare. Gemma 3 has 6,415; more than this is a damaged file.
pub(super) const MAX_ADDED_TOKENS: usize = 1 << 16;
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
pub(super) struct Piece<'t> {
    /// The token before the text; none at the start.
    pub token: Option<u32>,
    /// Plain text, may be empty.
    pub text: &'t str,
    /// Where the text starts in the whole.
    pub offset: usize,
}

impl AddedTokens {
    /// Sorts tokens into the two matchers. Of two with the same content the later one counts.
    pub fn new(tokens: Vec<AddedToken>) -> Self {
        let (normalized, raw) = tokens.into_iter().partition(|token| token.normalized);
        Self { raw: Matcher::new(raw), normalized: Matcher::new(normalized) }
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

    /// How many tokens it knows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Cuts `text` at the tokens found in it.
    pub fn split<'m, 't>(&'m self, text: &'t str) -> Pieces<'m, 't> {
        Pieces { matcher: self, text, at: 0, token: None, done: false }
    }

    /// The first token that starts at or after `from`, with its bounds.
    fn find(&self, text: &str, from: usize) -> Option<(usize, usize, &AddedToken)> {
        if self.tokens.is_empty() {
            return None;
        }
        let mut start = from;
        loop {
            let rest = text.as_bytes().get(start..)?;
            let starts = |&byte: &u8| self.starts.get(usize::from(byte)) == Some(&true);
            start += rest.iter().position(starts)?;
            let first = usize::from(*text.as_bytes().get(start)?);
            for &length in self.lengths.get(first)? {
                let end = start + usize::from(length);
                if let Some(token) = text.get(start..end).and_then(|found| self.tokens.get(found)) {
                    return Some((start, end, token));
                }
            }
            start += 1;
        }
    }
}

/// The pieces of a text, in order.
pub(super) struct Pieces<'m, 't> {
    matcher: &'m Matcher,
    text: &'t str,
    at: usize,
    token: Option<u32>,
    done: bool,
}

impl<'t> Iterator for Pieces<'_, 't> {
    type Item = Piece<'t>;

    fn next(&mut self) -> Option<Piece<'t>> {
        if self.done {
            return None;
        }
        let offset = self.at;
        let mut from = self.at;
        while let Some((start, end, token)) = self.matcher.find(self.text, from) {
            from = end;
            let before = self.text.get(offset..start).unwrap_or_default();
            let after = self.text.get(end..).unwrap_or_default();
            // The character before a match counts even when an earlier token took it.
            let whole_before = self.text.get(..start).unwrap_or_default();
            if token.single_word && !stands_alone(whole_before, after) {
                continue;
            }
            let text = if token.lstrip { before.trim_end() } else { before };
            let taken = if token.rstrip { after.len() - after.trim_start().len() } else { 0 };
            self.at = end + taken;
            let piece = Piece { token: self.token, text, offset };
            self.token = Some(token.id);
            return Some(piece);
        }
        self.done = true;
        let text = self.text.get(offset..).unwrap_or_default();
        Some(Piece { token: self.token, text, offset })
    }
}

fn stands_alone(before: &str, after: &str) -> bool {
    !before.chars().next_back().is_some_and(is_word_char)
        && !after.chars().next().is_some_and(is_word_char)
}
