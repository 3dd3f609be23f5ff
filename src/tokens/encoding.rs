//! A text on its way to token ids, in steps of bounded work.
//!
//! A stage for each thing that is done to a text: added tokens are cut out, what lies between is normalized, cut again,
//! cut into words, and words are merged. Every stage can stop after any step and go on later; none of them cuts a text
//! where that could change its ids. It has no clock: the caller says whether there is time for another step.
//!
//! Between two added tokens nothing depends on what stands elsewhere. So a text can be gone on with from a [`Mark`] that
//! another text left, if both are the same so far: see [`crate::memo`].

use super::added::{Cut, Cutter};
use super::bpe::{MergeScratch, Word};
use super::normalize::Part;
use super::pieces::{Cursor, Pieces};
use super::rewrite::Rewriting;
use super::window::{Finder, Next, Windows};
use super::{EncodeError, Tokenizer};
use std::ops::Range;

/// Bytes of words encoded in one step: some hundred microseconds where every word is new.
const STEP_BYTES: usize = 2 << 10;

/// Bytes that steps may look at, all together, before it is asked whether there is time for another. To ask is a call to the
/// host, some microseconds, as long as many a step between the short messages of a chat takes. Halved, it is asked twice
/// as often; doubled, a callback may end most of a millisecond late.
const ASKED_BYTES: usize = 8 << 10;

/// What the shortest step counts for.
const LEAST_BYTES: usize = 128;

/// Says whether there is time for another step.
pub type More<'a> = &'a mut dyn FnMut() -> bool;

/// A place in a text, behind an added token or a piece, where its ids can be cut: those before it depend on what stands
/// before it, and those behind it on what stands behind it and on where that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// The place.
    pub at: usize,
    /// The token before it, if its id is still to come.
    pub token: Option<u32>,
    /// How many ids there were.
    pub ids: usize,
}

/// Remembers of each stretch of so many bytes, and of the rest, the last mark that depends on nothing behind it.
struct Marks {
    stretch: usize,
    look_ahead: usize,
    /// Where the text ends.
    end: usize,
    marks: Vec<(usize, Mark)>,
}

impl Marks {
    fn note(&mut self, mark: Mark) {
        if mark.at + self.look_ahead > self.end {
            return;
        }
        let stretch = (mark.at + self.look_ahead).saturating_sub(1) / self.stretch;
        match self.marks.last_mut() {
            Some((last, old)) if *last == stretch => *old = mark,
            _ => self.marks.push((stretch, mark)),
        }
    }
}

/// A text on its way to token ids.
pub struct Encoding {
    text: String,
    ids: Vec<u32>,
    adds_special_tokens: bool,
    stage: Stage,
    raw: Cutter,
    /// Cuts in place of `raw`, where the text came in pieces.
    pieces: Option<Cursor>,
    /// The stretch between two added tokens of `text`.
    plain: Range<usize>,
    /// What has been normalized of it.
    normal: String,
    /// How far that is.
    normalized: usize,
    /// The next two are about what the stretch became.
    cutter: Cutter,
    piece: Range<usize>,
    /// What is written of the piece, if anything is, before it is cut into words.
    rewriting: Rewriting,
    /// The next two are about this piece of it: what is left of a word, and the part of it that is being merged.
    word: Range<usize>,
    part: Range<usize>,
    scratch: Box<Scratch>,
    marks: Option<Marks>,
    /// Bytes that steps looked at since it was last asked whether there is time.
    unasked: usize,
}

/// Buffers that texts take over from one another.
#[derive(Default)]
pub(super) struct Scratch {
    windows: Windows,
    merge: MergeScratch,
}

impl Scratch {
    /// Whether the next step of words may be longer than most: a window is to be cut, or a long word to be merged.
    fn has_long_step(&self) -> bool {
        self.merge.is_merging() || self.windows.next_cut() > ASKED_BYTES
    }
}

#[derive(Clone, Copy)]
enum Stage {
    /// Looking for the next added token in the text as it came.
    CutRaw,
    Normalize,
    /// Looking for the next added token in what was normalized.
    CutNormal,
    Rewrite,
    Words,
    Done,
}

impl Encoding {
    pub(super) fn new(
        tokenizer: &Tokenizer,
        text: String,
        adds_special_tokens: bool,
        scratch: Box<Scratch>,
    ) -> Self {
        let mut ids = Vec::with_capacity(text.len() / 4);
        if adds_special_tokens {
            let prefix = &tokenizer.pipeline.get_post_processor().single.prefix;
            ids.extend(prefix.iter().map(|&(token, _)| token.id()));
        }
        Self {
            text,
            ids,
            adds_special_tokens,
            stage: Stage::CutRaw,
            raw: Cutter::default(),
            pieces: None,
            plain: 0..0,
            normal: String::new(),
            normalized: 0,
            cutter: Cutter::default(),
            piece: 0..0,
            rewriting: Rewriting::default(),
            word: 0..0,
            part: 0..0,
            scratch,
            marks: None,
            unasked: 0,
        }
    }

    pub(super) fn of_pieces(tokenizer: &Tokenizer, pieces: Pieces, scratch: Box<Scratch>) -> Self {
        let (text, cursor) = pieces.into_parts();
        let encoding = Self::new(tokenizer, text, false, scratch);
        Self { pieces: Some(cursor), ..encoding }
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Where pieces end that end in a stretch of the text or with it, and which of them are tokens. Of a text that came
    /// whole there are none.
    pub fn piece_ends(&self, stretch: &Range<usize>) -> impl Iterator<Item = (usize, bool)> {
        self.pieces.iter().flat_map(|cursor| cursor.ends(stretch))
    }

    /// Whether the text came in pieces.
    pub fn is_in_pieces(&self) -> bool {
        self.pieces.is_some()
    }

    /// Has it note marks, which [`Self::take_marks`] gives: the last that depends on nothing behind it, for each stretch of
    /// `stretch` bytes, and for what is left of the text behind the last of them.
    pub fn note_marks(&mut self, tokenizer: &Tokenizer, stretch: usize) {
        let look_ahead = match self.is_in_pieces() {
            true => 0,
            false => tokenizer.added.raw.look_ahead(),
        };
        let (stretch, end, marks) = (stretch.max(1), self.text.len(), Vec::new());
        self.marks = Some(Marks { stretch, look_ahead, end, marks });
    }

    /// Marks with the number of their stretch, in the text's order. Their ids are counted from where it began or went on.
    pub fn take_marks(&mut self) -> Vec<(usize, Mark)> {
        self.marks.take().map(|marks| marks.marks).unwrap_or_default()
    }

    /// Goes on from a mark of a text that was the same up to the end of the mark's stretch. It gives the ids behind it.
    pub fn go_on_from(&mut self, mark: &Mark) {
        self.ids.clear();
        match &mut self.pieces {
            Some(cursor) => cursor.skip_to(mark.at),
            None => {
                if let Some(token) = mark.token {
                    self.raw = Cutter::from_behind(mark.at, token);
                }
            }
        }
    }

    /// How many bytes there are to encode.
    pub fn bytes_left(&self) -> usize {
        let at = match &self.pieces {
            Some(cursor) => cursor.start(),
            None => self.raw.behind_token().map_or(0, |(at, _)| at),
        };
        self.text.len().saturating_sub(at)
    }

    fn note_mark(&mut self) {
        let Some(marks) = &mut self.marks else { return };
        let behind = match &self.pieces {
            Some(cursor) => Some((cursor.start(), None)).filter(|(at, _)| *at > 0),
            None => self.raw.behind_token().map(|(at, token)| (at, Some(token))),
        };
        if let Some((at, token)) = behind {
            marks.note(Mark { at, token, ids: self.ids.len() });
        }
    }

    /// Goes on while there is `more` time, and for some steps at least. The ids come with the last. It must be given the
    /// tokenizer that began it.
    ///
    /// # Errors
    /// When the tokenizer cannot encode the text.
    pub fn go_on(
        &mut self,
        tokenizer: &Tokenizer,
        more: More<'_>,
    ) -> Result<Option<Vec<u32>>, EncodeError> {
        loop {
            if matches!(self.stage, Stage::CutRaw) {
                self.note_mark();
            }
            self.stage = match self.stage {
                Stage::CutRaw => match self.pieces.as_mut().map(Cursor::next) {
                    None => self.cut_raw(tokenizer),
                    Some(None) => Stage::Done,
                    Some(Some((piece, true))) => self.push_token(tokenizer, piece)?,
                    Some(Some((piece, false))) => {
                        self.begin_plain(tokenizer, piece, Cutter::blind())
                    }
                },
                Stage::Normalize => self.normalize(tokenizer)?,
                Stage::CutNormal => self.cut_normal(tokenizer),
                Stage::Rewrite => self.rewrite(tokenizer),
                Stage::Words => self.encode_words(tokenizer)?,
                Stage::Done => return Ok(Some(self.finish(tokenizer))),
            };
            if self.is_to_ask() && !more() {
                return Ok(None);
            }
        }
    }

    /// Whether it has done so much, or is about to do so much, that the time is to be looked at.
    fn is_to_ask(&mut self) -> bool {
        let looks_at = match self.stage {
            Stage::CutRaw => LEAST_BYTES,
            Stage::Normalize | Stage::Rewrite | Stage::CutNormal => {
                self.plain.len().max(LEAST_BYTES)
            }
            Stage::Words if self.scratch.has_long_step() => ASKED_BYTES,
            Stage::Words => self.piece.len().clamp(LEAST_BYTES, STEP_BYTES),
            Stage::Done => return false,
        };
        self.unasked += looks_at;
        let is_to_ask = self.unasked >= ASKED_BYTES;
        if is_to_ask {
            self.unasked = 0;
        }
        is_to_ask
    }

    fn cut_raw(&mut self, tokenizer: &Tokenizer) -> Stage {
        match self.raw.step(&tokenizer.added.raw, &self.text) {
            Cut::Pending => Stage::CutRaw,
            Cut::End => Stage::Done,
            Cut::Piece(piece) => {
                self.ids.extend(piece.token);
                if piece.text.is_empty() {
                    return Stage::CutRaw;
                }
                self.begin_plain(tokenizer, piece.text, Cutter::default())
            }
        }
    }

    fn begin_plain(&mut self, tokenizer: &Tokenizer, plain: Range<usize>, cutter: Cutter) -> Stage {
        self.normalized = plain.start;
        self.plain = plain;
        self.normal.clear();
        self.cutter = cutter;
        match tokenizer.normalizers.steps.is_empty() {
            true => Stage::CutNormal,
            false => Stage::Normalize,
        }
    }

    fn push_token(
        &mut self,
        tokenizer: &Tokenizer,
        piece: Range<usize>,
    ) -> Result<Stage, EncodeError> {
        let token = self.text.get(piece).unwrap_or_default();
        let id = tokenizer.added.id(token);
        self.ids.push(id.ok_or_else(|| EncodeError(format!("no added token {token}")))?);
        Ok(Stage::CutRaw)
    }

    fn normalize(&mut self, tokenizer: &Tokenizer) -> Result<Stage, EncodeError> {
        let rest = self.text.get(self.normalized..self.plain.end).unwrap_or_default();
        let normalizers = &tokenizer.normalizers;
        let end = normalizers.next(rest)?;
        let begins = self.normalized == self.plain.start;
        let part = Part { offset: self.normalized, begins, ends: end == rest.len() };
        let text = rest.get(..end).unwrap_or_default();
        let crates = tokenizer.pipeline.get_normalizers();
        let normal = normalizers.normalize(crates, &tokenizer.classes, text, part)?;
        self.normal.push_str(&normal);
        self.normalized += end;
        Ok(if end == rest.len() { Stage::CutNormal } else { Stage::Normalize })
    }

    fn cut_normal(&mut self, tokenizer: &Tokenizer) -> Stage {
        let text = subject(tokenizer, &self.text, &self.plain, &self.normal);
        match self.cutter.step(&tokenizer.added.normalized, text) {
            Cut::Pending => Stage::CutNormal,
            Cut::End => Stage::CutRaw,
            Cut::Piece(piece) => {
                self.ids.extend(piece.token);
                if let Some(rewrite) = &tokenizer.rewrite {
                    let opens = self.plain.start == 0 && piece.text.start == 0;
                    self.rewriting.begin(rewrite, text, piece.text.clone(), opens);
                    self.piece = piece.text;
                    return Stage::Rewrite;
                }
                self.begin_words(tokenizer, piece.text)
            }
        }
    }

    fn rewrite(&mut self, tokenizer: &Tokenizer) -> Stage {
        let text = subject(tokenizer, &self.text, &self.plain, &self.normal);
        if tokenizer.rewrite.as_ref().is_some_and(|rewrite| self.rewriting.step(rewrite, text)) {
            return Stage::Rewrite;
        }
        self.begin_words(tokenizer, 0..self.rewriting.text().len())
    }

    fn begin_words(&mut self, tokenizer: &Tokenizer, piece: Range<usize>) -> Stage {
        self.scratch.windows.begin(&tokenizer.words, piece.len());
        self.piece = piece;
        self.word = 0..0;
        Stage::Words
    }

    fn encode_words(&mut self, tokenizer: &Tokenizer) -> Result<Stage, EncodeError> {
        let text = match tokenizer.rewrite {
            Some(_) => self.rewriting.text(),
            None => subject(tokenizer, &self.text, &self.plain, &self.normal),
        };
        let text = text.get(self.piece.clone()).unwrap_or_default();
        let tables = tokenizer.bpe.tables();
        let Scratch { windows, merge } = &mut *self.scratch;
        if merge.is_merging() {
            let part = text.get(self.part.clone()).unwrap_or_default();
            tables.merge_step(part, merge, &mut self.ids);
            return Ok(Stage::Words);
        }
        let finder = Finder {
            words: &tokenizer.words,
            grammar: tokenizer.pipeline.get_pre_tokenizer(),
            classes: &tokenizer.classes,
        };
        let mut left = STEP_BYTES;
        while left > 0 {
            if self.word.is_empty() {
                match windows.step(finder, text)? {
                    Next::Word(word) => self.word = word,
                    Next::Pending => return Ok(Stage::Words),
                    Next::End => return Ok(Stage::CutNormal),
                }
            }
            let word = text.get(self.word.clone()).ok_or_else(|| {
                EncodeError("the pre-tokenizer cut inside a character".to_owned())
            })?;
            let part = word.get(..tables.first_cut(word)).unwrap_or_default();
            self.part = self.word.start..self.word.start + part.len();
            self.word.start = self.part.end;
            if tables.encode_word(part, merge, &mut self.ids)? == Word::Long {
                break;
            }
            left = left.saturating_sub(part.len().max(1));
        }
        Ok(Stage::Words)
    }

    fn finish(&mut self, tokenizer: &Tokenizer) -> Vec<u32> {
        if std::mem::take(&mut self.adds_special_tokens) {
            let suffix = &tokenizer.pipeline.get_post_processor().single.suffix;
            self.ids.extend(suffix.iter().map(|&(token, _)| token.id()));
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.windows.shrink();
        scratch.merge.shrink();
        tokenizer.keep(scratch);
        std::mem::take(&mut self.ids)
    }
}

/// What a stretch of `text` became.
fn subject<'a>(
    tokenizer: &Tokenizer,
    text: &'a str,
    plain: &Range<usize>,
    normal: &'a str,
) -> &'a str {
    if !tokenizer.normalizers.steps.is_empty() {
        normal
    } else {
        text.get(plain.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_asked(text: &str, expected: Range<usize>) {
        let model = crate::model::tests::of_bytes(None);
        let mut encoding = model.tokenizer().begin(text.to_owned(), false).unwrap();
        let mut asked = 0;
        let mut more = || {
            asked += 1;
            true
        };
        encoding.go_on(model.tokenizer(), &mut more).unwrap().expect("ids");
        assert!(expected.contains(&asked), "{asked} times for {} bytes", text.len());
    }

    #[test]
    fn the_time_is_looked_at_by_the_work_and_not_by_the_message() {
        let message = format!("<start>user\n{}<end>\n", "some words ".repeat(50));
        check_asked(&message.repeat(100), 20..120);
        check_asked(&"<start>".repeat(10_000), 100..1_000);
        check_asked(&"words ".repeat(20_000), 10..40);
    }
}
