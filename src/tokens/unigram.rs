//! The kinds of model that merge nothing: Unigram, WordPiece, WordLevel. They read the same tables as byte pair encoding.
//!
//! Unigram finds the path of the best score through a text, a step at a time; its tokens lie as a trie in the table of
//! merges: node and byte to token and node. Scores are added in the order in which Python adds them, so that paths that are
//! equal but for rounding are chosen as there. It samples nothing.

use super::EncodeError;
use super::bpe::{MergeScratch, NONE, Tables, Word};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How words become tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    /// By merging.
    #[default]
    Bpe,
    /// By the best path.
    Unigram,
    /// By the longest token, then the longest that goes on.
    WordPiece,
    /// A word is a token.
    WordLevel,
}

/// What such a model has beside its tables.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Other {
    /// Its kind.
    pub kind: Kind,
    /// Written before tokens that go on with a word.
    pub prefix: String,
    /// A longer word, in characters, is unknown.
    pub most_characters: usize,
    /// The longest token, in bytes.
    pub longest: usize,
}

/// Bytes of a text looked at in one step: a fraction of a millisecond where tokens are short.
const STEP_BYTES: usize = 2 << 10;
/// Less a token's lowest score, this is what an unknown character costs.
pub(super) const UNKNOWN_PENALTY: f64 = 10.0;

/// The best ways to each place of a text.
#[derive(Default)]
pub(super) struct Lattice {
    nodes: Vec<Node>,
    /// Where the first node lies in the text; what is before has been encoded.
    start: usize,
    /// How far it has come, from there.
    at: usize,
}

/// The best way to one place.
#[derive(Clone, Copy)]
struct Node {
    score: f64,
    id: u32,
    /// Where its last token starts; [`NONE`] where no way leads.
    from: u32,
}

const UNREACHED: Node = Node { score: 0.0, id: NONE, from: NONE };

impl Lattice {
    /// Begins with a text.
    pub fn begin(&mut self) {
        self.restart(0, 0.0);
    }

    fn restart(&mut self, start: usize, score: f64) {
        self.nodes.clear();
        self.nodes.push(Node { score, ..UNREACHED });
        (self.start, self.at) = (start, 0);
    }

    /// Whether it has grown large.
    pub fn is_large(&self) -> bool {
        self.nodes.capacity() > 4 * STEP_BYTES
    }

    fn reach(&mut self, place: usize, node: Node) {
        if self.nodes.len() <= place {
            self.nodes.resize(place + 1, UNREACHED);
        }
        if let Some(known) = self.nodes.get_mut(place)
            && (known.from == NONE || node.score > known.score)
        {
            *known = node;
        }
    }
}

impl Tables<'_> {
    /// Appends the ids of a word that is not merged. Of a long one it only begins.
    pub fn encode_other(&self, word: &str, scratch: &mut MergeScratch, ids: &mut Vec<u32>) -> Word {
        match self.other.kind {
            Kind::Unigram => {
                scratch.lattice.begin();
                return self.path_step(word, scratch, ids);
            }
            Kind::WordPiece => self.pieces(word, ids),
            Kind::WordLevel | Kind::Bpe => {
                ids.push(self.word(word.as_bytes()).unwrap_or(self.settings.unk));
            }
        }
        Word::Done
    }

    /// One bounded piece of finding the best path.
    pub fn path_step(&self, word: &str, scratch: &mut MergeScratch, ids: &mut Vec<u32>) -> Word {
        let lattice = &mut scratch.lattice;
        let rest = word.get(lattice.start..).unwrap_or_default();
        let from = lattice.at;
        while lattice.at < rest.len() {
            let here = rest.get(lattice.at..).unwrap_or_default();
            if lattice.at - from >= STEP_BYTES {
                let cuts = self.settings.cut_before;
                if cuts.is_some_and(|mark| here.starts_with(mark)) {
                    self.take_path(rest, lattice.at, lattice, ids);
                    let score = lattice.nodes.get(lattice.at).map_or(0.0, |node| node.score);
                    lattice.restart(lattice.start + lattice.at, score);
                    return Word::Long;
                }
                if lattice.at - from >= 2 * STEP_BYTES {
                    return Word::Long;
                }
            }
            self.extend_path(here, lattice);
        }
        let end = rest.len();
        self.take_path(rest, end, lattice, ids);
        Word::Done
    }

    /// All tokens that start where the lattice is.
    fn extend_path(&self, here: &str, lattice: &mut Lattice) {
        let at = lattice.at;
        let score = lattice.nodes.get(at).map_or(0.0, |node| node.score);
        let length = here.chars().next().map_or(1, char::len_utf8);
        let mut node = 0;
        let mut is_known = false;
        for (before, &byte) in here.as_bytes().iter().enumerate() {
            let found = self.merge(node, u32::from(byte));
            let id = (found >> 32) as u32;
            node = found as u32;
            if id != NONE {
                let score = self.score(id) + score;
                lattice.reach(at + before + 1, Node { score, id, from: at as u32 });
                is_known |= before + 1 == length;
            }
            if node == NONE {
                break;
            }
        }
        if !is_known {
            let (id, score) = (self.settings.unk, self.unknown_score + score);
            lattice.reach(at + length, Node { score, id, from: at as u32 });
        }
        lattice.at += length;
    }

    /// Appends the ids of the best way to `end`.
    fn take_path(&self, text: &str, end: usize, lattice: &Lattice, ids: &mut Vec<u32>) {
        let mut path: Vec<(Range<usize>, u32)> = Vec::new();
        let mut at = end;
        while at > 0 {
            let Some(node) = lattice.nodes.get(at).filter(|node| (node.from as usize) < at) else {
                break;
            };
            let from = node.from as usize;
            // A run of what is unknown is one unknown piece.
            match path.last_mut() {
                Some((range, id)) if *id == self.settings.unk && node.id == *id => {
                    range.start = from
                }
                _ => path.push((from..at, node.id)),
            }
            at = from;
        }
        for (range, id) in path.into_iter().rev() {
            if id == self.settings.unk {
                self.unknown(text.get(range).unwrap_or_default(), ids);
            } else {
                ids.push(id);
            }
        }
    }

    fn unknown(&self, piece: &str, ids: &mut Vec<u32>) {
        if let Some(id) = self.word(piece.as_bytes()) {
            ids.push(id);
        } else if piece.bytes().all(|byte| self.atom(byte) != NONE) {
            ids.extend(piece.bytes().map(|byte| self.atom(byte)));
        } else {
            ids.push(self.settings.unk);
        }
    }

    fn score(&self, id: u32) -> f64 {
        self.scores.get(id as usize).map_or(0.0, |bytes| f64::from_le_bytes(*bytes))
    }

    fn pieces(&self, word: &str, ids: &mut Vec<u32>) {
        let begun = ids.len();
        let most = self.other.most_characters;
        if word.chars().nth(most).is_some() || self.add_pieces(word, ids).is_none() {
            ids.truncate(begun);
            ids.push(self.settings.unk);
        }
    }

    fn add_pieces(&self, word: &str, ids: &mut Vec<u32>) -> Option<()> {
        let mut candidate = String::new();
        let mut at = 0;
        while at < word.len() {
            let rest = word.get(at..)?;
            candidate.clear();
            if at > 0 {
                candidate.push_str(&self.other.prefix);
            }
            let prefix = candidate.len();
            candidate.push_str(rest.get(..rest.floor_char_boundary(self.other.longest))?);
            let id = loop {
                if candidate.len() == prefix {
                    return None;
                }
                if let Some(id) = self.word(candidate.as_bytes()) {
                    break id;
                }
                candidate.pop();
            };
            ids.push(id);
            at += candidate.len() - prefix;
        }
        Some(())
    }
}

/// What is said of a word that is too long.
pub(super) fn too_long(length: usize, most: usize) -> EncodeError {
    EncodeError(format!("a word of {length} bytes, at most {most} are merged"))
}
