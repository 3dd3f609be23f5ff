//! Patterns of a `tokenizer.json` that have no hand-written grammar: run here, compiled by `warmpath-prepare`.
//!
//! A pattern is a short program over classes of characters, whose tables lie in the prepared file; so the filter holds no
//! regex compiler and no tables of Unicode. It is matched as Oniguruma matches, which is what Python's tokenizers use:
//! leftmost, alternatives in their order, greedy. Each attempt has a bound on its work. There are no captures and no
//! back references, and an empty match is none.

pub(super) mod compile;

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Most characters looked at and steps taken in one attempt, some 5 to 10 ms. Halved, runs of white space of half a megabyte
/// would not match; doubled, so would the longest callback.
const MAX_FUEL: usize = 2 << 20;
/// Most places to go back to: two megabytes.
const MAX_OPEN: usize = 1 << 16;
/// Most look-aheads inside one another.
const MAX_DEPTH: usize = 8;
/// Most classes of one tokenizer, the bits of a mask.
pub(super) const MAX_CLASSES: usize = 32;
/// Characters of one page of the class table.
const PAGE: usize = 256;
/// Pages of all of Unicode.
const PAGES: usize = 0x11_0000 / PAGE;

/// One step of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Op {
    /// A character of a class.
    One(u8),
    /// As many characters of a class as there are, then fewer; or, if it `keeps`, never fewer.
    Many {
        /// The class.
        class: u8,
        /// At least so many.
        least: u32,
        /// At most so many.
        most: u32,
        /// Gives none back.
        keeps: bool,
    },
    /// The first way, then the second.
    Either(u32, u32),
    /// Goes on elsewhere.
    Go(u32),
    /// What follows up to an [`Op::End`] must match here, or must not; then goes on at `end`.
    Ahead {
        /// It must not match.
        negated: bool,
        /// Where to go on.
        end: u32,
    },
    /// The character before must be of a class, or must not.
    Behind {
        /// The class.
        class: u8,
        /// It must not be.
        negated: bool,
    },
    /// Matched.
    End,
}

/// A compiled pattern.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Program {
    /// Its steps, from the first on.
    pub ops: Vec<Op>,
    /// The class of the characters that a match can start with, if there is one.
    pub first: Option<u8>,
}

/// Which classes each character belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Classes {
    /// For each 256 characters the page that says so.
    pages: Vec<u16>,
    masks: Vec<u32>,
}

impl Default for Classes {
    fn default() -> Self {
        Self { pages: vec![0; PAGES], masks: vec![0; PAGE] }
    }
}

impl Classes {
    /// Reads what [`Self::write`] wrote.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let (pages, masks) = bytes.split_at_checked(2 * PAGES)?;
        let (masks, rest) = masks.as_chunks();
        let pages: Vec<u16> = pages.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        let held = masks.len() / PAGE;
        let sound = rest.is_empty()
            && masks.len().is_multiple_of(PAGE)
            && pages.iter().all(|&page| usize::from(page) < held);
        let masks = masks.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        sound.then_some(Self { pages, masks })
    }

    /// The table as bytes.
    pub fn write(&self) -> Vec<u8> {
        let pages = self.pages.iter().flat_map(|page| page.to_le_bytes());
        pages.chain(self.masks.iter().flat_map(|mask| mask.to_le_bytes())).collect()
    }

    /// The classes of a character, one bit each.
    #[inline]
    pub fn mask(&self, character: u32) -> u32 {
        let page = self.pages.get(character as usize / PAGE).copied().unwrap_or(0);
        let place = usize::from(page) * PAGE + character as usize % PAGE;
        self.masks.get(place).copied().unwrap_or(0)
    }

    /// Whether a text has a character of a class, which must hold no ASCII.
    pub fn occurs(&self, class: u8, text: &str) -> bool {
        !text.is_ascii()
            && text.chars().any(|c| !c.is_ascii() && self.mask(u32::from(c)) >> class & 1 == 1)
    }
}

/// A pattern that took too much work.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Spent;

/// Where a failed match goes on.
#[derive(Debug)]
struct Open {
    op: u32,
    place: usize,
    /// Down to where `place` steps back, a character each time; none for another alternative.
    floor: Option<usize>,
}

/// Matches programs, and keeps the memory for it.
#[derive(Debug, Default)]
pub(super) struct Matcher {
    open: Vec<Open>,
    fuel: usize,
}

/// What is matched in: nothing outside of the range is seen.
#[derive(Clone, Copy)]
struct Subject<'t> {
    classes: &'t Classes,
    text: &'t str,
    start: usize,
}

impl Subject<'_> {
    /// The classes and length of the character at a place.
    #[inline]
    fn at(&self, place: usize) -> Option<(u32, usize)> {
        let byte = *self.text.as_bytes().get(place)?;
        if byte.is_ascii() {
            return Some((self.classes.mask(u32::from(byte)), 1));
        }
        let character = self.text.get(place..)?.chars().next()?;
        Some((self.classes.mask(u32::from(character)), character.len_utf8()))
    }

    fn before(&self, place: usize) -> Option<(u32, usize)> {
        let character = self.text.get(self.start..place)?.chars().next_back()?;
        Some((self.classes.mask(u32::from(character)), character.len_utf8()))
    }
}

impl Matcher {
    /// Where a match that starts at `at` ends, if one does. Of the text only `range` is seen. `spent` counts the work.
    ///
    /// # Errors
    /// When it takes too much work.
    pub fn end(
        &mut self,
        program: &Program,
        classes: &Classes,
        text: &str,
        range: &Range<usize>,
        at: usize,
    ) -> Result<Option<usize>, Spent> {
        let text = text.get(..range.end).unwrap_or_default();
        let subject = Subject { classes, text, start: range.start };
        self.fuel = MAX_FUEL;
        self.open.clear();
        let end = self.run(program, subject, 0, at, 0)?;
        Ok(end.filter(|&end| end > at))
    }

    /// How much work the last attempt was.
    pub fn spent(&self) -> usize {
        MAX_FUEL - self.fuel
    }

    fn run(
        &mut self,
        program: &Program,
        subject: Subject<'_>,
        from: u32,
        at: usize,
        depth: usize,
    ) -> Result<Option<usize>, Spent> {
        let base = self.open.len();
        let (mut op, mut place) = (from, at);
        loop {
            self.fuel = self.fuel.checked_sub(1).ok_or(Spent)?;
            if self.open.len() > MAX_OPEN {
                return Err(Spent);
            }
            let goes_on = match program.ops.get(op as usize).copied() {
                None => false,
                Some(Op::End) => {
                    self.open.truncate(base);
                    return Ok(Some(place));
                }
                Some(Op::One(class)) => match subject.at(place) {
                    Some((mask, length)) if mask >> class & 1 == 1 => {
                        (op, place) = (op + 1, place + length);
                        true
                    }
                    _ => false,
                },
                Some(Op::Many { class, least, most, keeps }) => {
                    let run = self.many(subject, place, class, least, most)?;
                    if let Some((floor, end)) = run {
                        if end > floor && !keeps {
                            self.open.push(Open { op: op + 1, place: end, floor: Some(floor) });
                        }
                        (op, place) = (op + 1, end);
                    }
                    run.is_some()
                }
                Some(Op::Either(first, second)) => {
                    self.open.push(Open { op: second, place, floor: None });
                    op = first;
                    true
                }
                Some(Op::Go(to)) => {
                    op = to;
                    true
                }
                Some(Op::Ahead { negated, end }) => {
                    if depth > MAX_DEPTH {
                        return Err(Spent);
                    }
                    let found = self.run(program, subject, op + 1, place, depth + 1)?.is_some();
                    op = end;
                    found != negated
                }
                Some(Op::Behind { class, negated }) => {
                    let found =
                        subject.before(place).is_some_and(|(mask, _)| mask >> class & 1 == 1);
                    op += 1;
                    found != negated
                }
            };
            if !goes_on {
                match self.back(subject, base) {
                    Some(next) => (op, place) = next,
                    None => return Ok(None),
                }
            }
        }
    }

    /// A run of characters of a class: where the least of it ends, and where all of it does.
    #[inline]
    fn many(
        &mut self,
        subject: Subject<'_>,
        at: usize,
        class: u8,
        least: u32,
        most: u32,
    ) -> Result<Option<(usize, usize)>, Spent> {
        let (mut place, mut floor, mut count) = (at, at, 0);
        while count < most {
            match subject.at(place) {
                Some((mask, length)) if mask >> class & 1 == 1 => place += length,
                _ => break,
            }
            count += 1;
            if count == least {
                floor = place;
            }
        }
        self.fuel = self.fuel.checked_sub(count as usize).ok_or(Spent)?;
        Ok((count >= least).then_some((floor, place)))
    }

    /// The latest place to go back to.
    fn back(&mut self, subject: Subject<'_>, base: usize) -> Option<(u32, usize)> {
        if self.open.len() <= base {
            return None;
        }
        let open = self.open.last_mut()?;
        if let Some(floor) = open.floor {
            open.place -= subject.before(open.place).map_or(open.place, |(_, length)| length);
            let next = (open.op, open.place);
            if open.place <= floor {
                self.open.pop();
            }
            return Some(next);
        }
        self.open.pop().map(|open| (open.op, open.place))
    }
}

#[cfg(test)]
mod tests;
