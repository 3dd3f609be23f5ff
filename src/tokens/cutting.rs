//! The words of a text by patterns, one after the other.
//!
//! A pre-tokenizer that has no hand-written grammar is a list of levels. Each cuts the pieces of the one before at the
//! matches of its pattern, and sees nothing outside of its piece. Pieces come out one by one, so that no step takes longer
//! for a longer text. It does not change the text.

use super::EncodeError;
use super::pattern::{Classes, Matcher, Program};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Work done in one step, in steps of a program and characters looked at: some hundred microseconds.
const STEP_WORK: usize = 32 << 10;

/// What becomes of a match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Behavior {
    /// It is left out.
    Removed,
    /// It is a piece.
    Isolated,
    /// It is joined to the piece before.
    MergedWithPrevious,
    /// It is joined to the piece behind.
    MergedWithNext,
    /// Matches that touch are one piece.
    Contiguous,
}

/// One level: where to cut, and what becomes of the cuts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Level {
    /// The pattern.
    pub pattern: Program,
    /// What becomes of its matches.
    pub behavior: Behavior,
    /// What lies between matches counts as the match.
    pub invert: bool,
}

/// What one step found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A piece, as its place in the text.
    Piece(Range<usize>),
    /// Nothing yet.
    Pending,
    /// There was no more.
    End,
}

/// Cuts a text by levels.
#[derive(Debug, Default)]
pub(super) struct Cutting {
    states: Vec<State>,
    matcher: Matcher,
    /// The level that is asked next.
    depth: usize,
    /// A text without levels, which is one piece.
    whole: Option<Range<usize>>,
}

/// How far a level is in its piece.
#[derive(Debug, Default, Clone)]
struct State {
    piece: Range<usize>,
    /// What is before has come out.
    done: usize,
    /// Up to here no match starts.
    from: usize,
    /// A match behind what has just come out.
    matched: Option<Range<usize>>,
    /// A piece that may grow, and whether it is a match.
    held: Option<(Range<usize>, bool)>,
}

impl Cutting {
    /// Begins with a text of so many bytes.
    pub fn begin(&mut self, levels: &[Level], length: usize) {
        self.states.clear();
        self.states.resize(levels.len(), State::default());
        self.depth = 0;
        match self.states.first_mut() {
            Some(state) => state.begin(0..length),
            None => self.whole = Some(0..length),
        }
    }

    /// The next piece of the text, which must be the same until another is begun.
    ///
    /// # Errors
    /// When a pattern takes too much work.
    pub fn step(
        &mut self,
        levels: &[Level],
        classes: &Classes,
        text: &str,
    ) -> Result<Found, EncodeError> {
        let mut left = STEP_WORK;
        loop {
            let (Some(level), Some(state)) =
                (levels.get(self.depth), self.states.get_mut(self.depth))
            else {
                return Ok(self.whole.take().map_or(Found::End, Found::Piece));
            };
            match state.next(level, classes, text, &mut self.matcher, &mut left)? {
                Found::Piece(piece) => match self.states.get_mut(self.depth + 1) {
                    Some(inner) => {
                        inner.begin(piece);
                        self.depth += 1;
                    }
                    None => return Ok(Found::Piece(piece)),
                },
                Found::Pending => return Ok(Found::Pending),
                Found::End if self.depth == 0 => return Ok(Found::End),
                Found::End => self.depth -= 1,
            }
        }
    }
}

impl State {
    fn begin(&mut self, piece: Range<usize>) {
        *self = Self { done: piece.start, from: piece.start, piece, matched: None, held: None };
    }

    /// The next piece as the behavior has it.
    fn next(
        &mut self,
        level: &Level,
        classes: &Classes,
        text: &str,
        matcher: &mut Matcher,
        left: &mut usize,
    ) -> Result<Found, EncodeError> {
        loop {
            let Some((piece, is_match)) = self.part(level, classes, text, matcher, left)? else {
                return Ok(Found::Pending);
            };
            if piece.is_empty() {
                return Ok(self.held.take().map_or(Found::End, |(held, _)| Found::Piece(held)));
            }
            let is_match = is_match != level.invert;
            let joins = |held_is_match: bool| match level.behavior {
                Behavior::Removed | Behavior::Isolated => false,
                Behavior::Contiguous => held_is_match == is_match,
                Behavior::MergedWithPrevious => is_match && !held_is_match,
                Behavior::MergedWithNext => held_is_match && !is_match,
            };
            match level.behavior {
                Behavior::Removed if is_match => continue,
                Behavior::Removed | Behavior::Isolated => return Ok(Found::Piece(piece)),
                _ => {}
            }
            match self.held.take() {
                None => self.held = Some((piece, is_match)),
                Some((held, held_is_match)) if joins(held_is_match) => {
                    self.held = Some((held.start..piece.end, is_match));
                }
                Some((held, _)) => {
                    self.held = Some((piece, is_match));
                    return Ok(Found::Piece(held));
                }
            }
        }
    }

    /// The next match or what lies before it; nothing at the end, and `None` when the work is done for now.
    fn part(
        &mut self,
        level: &Level,
        classes: &Classes,
        text: &str,
        matcher: &mut Matcher,
        left: &mut usize,
    ) -> Result<Option<(Range<usize>, bool)>, EncodeError> {
        if let Some(matched) = self.matched.take() {
            return Ok(Some((matched, true)));
        }
        while self.from < self.piece.end {
            if *left == 0 {
                return Ok(None);
            }
            *left = left.saturating_sub(1);
            let next = text.get(self.from..).and_then(|rest| rest.chars().next());
            let length = next.map_or(1, char::len_utf8);
            let first = level.pattern.first;
            let mask = next.map_or(0, |c| classes.mask(u32::from(c)));
            let end = match first.is_none_or(|class| mask >> class & 1 == 1) {
                false => None,
                true => {
                    let end = matcher.end(&level.pattern, classes, text, &self.piece, self.from);
                    *left = left.saturating_sub(matcher.spent());
                    end.map_err(|_| EncodeError("a pattern that takes too long".to_owned()))?
                }
            };
            let Some(end) = end else {
                self.from += length;
                continue;
            };
            let (before, found) = (self.done..self.from, self.from..end);
            (self.done, self.from) = (end, end);
            if before.is_empty() {
                return Ok(Some((found, true)));
            }
            self.matched = Some(found);
            return Ok(Some((before, false)));
        }
        let rest = self.done..self.piece.end;
        self.done = self.piece.end;
        Ok(Some((rest, false)))
    }
}
