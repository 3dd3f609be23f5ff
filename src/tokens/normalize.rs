//! A text through the normalizers of its tokenizer, a part at a time.
//!
//! Most normalizers are the crate's; a pattern that is replaced is ours, since the filter has no regex engine. Where a
//! text may be cut before it is normalized was decided when the file was prepared.

use super::EncodeError;
use super::pattern::{Classes, Matcher, Program};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use tokenizers::pipeline::{Normalizer as _, PipelineNormalizer};

/// Bytes normalized in one step, at least. Halved, nothing is gained; doubled, combining marks take a millisecond.
const NORMALIZED_BYTES: usize = 16 << 10;
/// The longest run of text that can only be normalized together: of people's texts none has one of a kilobyte.
const MAX_TOGETHER_BYTES: usize = 256 << 10;

/// One normalizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Step {
    /// The crate's, by its place among those.
    Crate(usize),
    /// Each match of a pattern becomes a text.
    Replace(Program, String),
}

/// Where a text may be cut before it is normalized.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Apart {
    /// Nowhere.
    #[default]
    Nowhere,
    /// Between any two characters: each is normalized by itself.
    Anywhere,
    /// Before a character that no normal form combines with, or moves before, what precedes it.
    BeforeStarters,
    /// Between two letters that no normal form combines: see [`is_letter`].
    BetweenLetters,
}

/// The normalizers of a tokenizer.
#[derive(Default)]
pub(super) struct Normalizers {
    /// In their order.
    pub steps: Vec<Step>,
    /// Where a text may be cut.
    pub apart: Apart,
}

/// Which part of a stretch is normalized: some normalizers do something at its ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// Where it starts in the whole text.
    pub offset: usize,
    /// It begins the stretch.
    pub begins: bool,
    /// It ends it.
    pub ends: bool,
}

impl Normalizers {
    /// How much of what is `rest` of a stretch is normalized next.
    ///
    /// # Errors
    /// When too much of it only goes together.
    pub fn next(&self, rest: &str) -> Result<usize, EncodeError> {
        let end = match self.apart {
            Apart::Nowhere => return Ok(rest.len()),
            Apart::Anywhere => return Ok(rest.ceil_char_boundary(NORMALIZED_BYTES)),
            Apart::BeforeStarters => before_starter(rest, NORMALIZED_BYTES),
            Apart::BetweenLetters => between_letters(rest, NORMALIZED_BYTES),
        };
        if end > MAX_TOGETHER_BYTES {
            return Err(EncodeError(format!("{end} bytes that are only normalized together")));
        }
        Ok(end)
    }

    /// Normalizes a part.
    ///
    /// # Errors
    /// When a pattern takes too much work.
    pub fn normalize<'t>(
        &self,
        crates: &[PipelineNormalizer],
        classes: &Classes,
        text: &'t str,
        part: Part,
    ) -> Result<Cow<'t, str>, EncodeError> {
        let mut text = Cow::Borrowed(text);
        for step in &self.steps {
            let next = match step {
                Step::Replace(program, content) => replace(program, content, classes, &text)?,
                Step::Crate(at) => match crates.get(*at) {
                    None => None,
                    Some(PipelineNormalizer::Prepend(_)) if !part.begins => None,
                    Some(PipelineNormalizer::Strip(strip)) => {
                        let left = strip.strip_left && part.begins;
                        let start = if left { text.trim_start() } else { &text };
                        let right = strip.strip_right && part.ends;
                        Some(if right { start.trim_end() } else { start }.to_owned())
                    }
                    Some(normalizer) => {
                        let done = normalizer.normalize(&text, part.offset);
                        match done.map_err(|error| EncodeError(error.to_string()))? {
                            Cow::Borrowed(same) if same.len() == text.len() => None,
                            other => Some(other.into_owned()),
                        }
                    }
                },
            };
            text = next.map_or(text, Cow::Owned);
        }
        Ok(text)
    }
}

/// Every match replaced, or `None` when there was none.
fn replace(
    program: &Program,
    content: &str,
    classes: &Classes,
    text: &str,
) -> Result<Option<String>, EncodeError> {
    let mut matcher = Matcher::default();
    let mut replaced = None;
    let (mut done, mut from) = (0, 0);
    while let Some(next) = text.get(from..).and_then(|rest| rest.chars().next()) {
        let mask = classes.mask(u32::from(next));
        if program.first.is_some_and(|class| mask >> class & 1 == 0) {
            from += next.len_utf8();
            continue;
        }
        let end = matcher.end(program, classes, text, &(0..text.len()), from);
        let Some(end) = end.map_err(|_| EncodeError("a pattern that takes too long".to_owned()))?
        else {
            from += next.len_utf8();
            continue;
        };
        let replaced = replaced.get_or_insert_with(|| String::with_capacity(text.len()));
        replaced.push_str(text.get(done..from).unwrap_or_default());
        replaced.push_str(content);
        (done, from) = (end, end);
    }
    Ok(replaced.map(|mut replaced| {
        replaced.push_str(text.get(done..).unwrap_or_default());
        replaced
    }))
}

/// The first place from `from` on, or the end, before a character that stands apart.
fn before_starter(text: &str, from: usize) -> usize {
    let stands_apart = |c: char| {
        matches!(c, '\0'..='\u{7f}' | '\u{a0}'..='\u{2ff}' | '\u{400}'..='\u{482}') || is_letter(c)
    };
    let start = text.ceil_char_boundary(from);
    let rest = text.get(start..).unwrap_or_default();
    rest.char_indices().find(|&(_, c)| stands_apart(c)).map_or(text.len(), |(at, _)| start + at)
}

/// The first place from `from` on, or the end, between two letters of [`is_letter`].
fn between_letters(text: &str, from: usize) -> usize {
    let start = text.ceil_char_boundary(from);
    let mut before = false;
    for (at, character) in text.get(start..).unwrap_or_default().char_indices() {
        let after = is_letter(character);
        if before && after {
            return start + at;
        }
        before = after;
    }
    text.len()
}

/// Letters between which a text may be cut, unless a pattern reads them: no normal form combines two of them, each is a
/// grapheme of its own, and all of them stay letters, whatever their case.
pub(super) fn is_letter(c: char) -> bool {
    matches!(c, 'a'..='z' | 'A'..='Z' | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}'
        | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::normalizers::{NFC, NFD, NFKC, NFKD};

    fn random(state: &mut u64, below: usize) -> usize {
        *state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (*state >> 33) as usize % below
    }

    /// Characters that combine, decompose, or take part in neither.
    fn text(state: &mut u64) -> String {
        const CHARACTERS: &str = "ae AÅé\u{301}\u{323}\u{30a}\u{345}\u{e33}\u{1100}\u{1161}\u{11a8}가각ｶﾞか\u{3099}が漢\u{212b}ﬁ½①\u{f900}\u{9be}\u{9c7}\u{9d7}\u{1d15e}й\u{306}и";
        let all: Vec<char> = CHARACTERS.chars().collect();
        (0..1 + random(state, 40)).map(|_| all[random(state, all.len())]).collect()
    }

    #[test]
    fn normal_forms_of_parts_are_the_parts_of_the_normal_form() {
        let forms = [
            PipelineNormalizer::NFC(NFC),
            PipelineNormalizer::NFD(NFD),
            PipelineNormalizer::NFKC(NFKC),
            PipelineNormalizer::NFKD(NFKD),
        ];
        let mut state = 7;
        for round in 0..20_000 {
            let text = text(&mut state);
            let cut = before_starter(&text, random(&mut state, text.len() + 1));
            for form in &forms {
                let form = |text| form.normalize(text, 0).expect("a normal form").into_owned();
                let (before, after) = text.split_at(cut);
                assert_eq!(
                    form(before) + &form(after),
                    form(&text),
                    "{round}: {before:?} {after:?}"
                );
            }
        }
    }

    #[test]
    fn what_only_normalizes_together_has_a_bound() {
        assert_eq!(before_starter(&"\u{301}".repeat(1_000), 500), 2_000);
        assert_eq!(before_starter("ab\u{301}c", 2), 4);
        assert_eq!(before_starter("ab", 9), 2);
    }
}
