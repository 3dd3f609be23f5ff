//! What a prepared file says beside the crate's pipeline and the tables: which steps are ours.
//!
//! It is written as JSON and read at once: its programs are as long as the patterns they come from.

use crate::tokens::cutting::Level;
use crate::tokens::normalize::{Apart, Step};
use crate::tokens::pattern::Op;
use crate::tokens::rewrite::Rewrite;
use crate::tokens::unigram::Other;
use serde::{Deserialize, Serialize};

/// Most steps of all programs together.
const MAX_OPS: usize = 1 << 16;
/// Most levels or normalizers.
const MAX_STEPS: usize = 64;

/// The steps that are ours.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(in crate::tokens) struct Plan {
    /// Normalizers, those of the crate by their place.
    pub steps: Vec<Step>,
    /// Where a text may be cut before it is normalized.
    pub apart: Apart,
    /// What is written into a text before it is cut into words.
    pub rewrite: Option<Rewrite>,
    /// How it is cut.
    pub words: Words,
    /// A model that is not byte pair encoding.
    pub other: Other,
    /// The bits of what an unknown character costs it: JSON would round it.
    pub unknown_score: u64,
}

/// How words are found.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(in crate::tokens) enum Words {
    /// By the crate's hand-written grammar.
    #[default]
    Grammar,
    /// By patterns.
    Levels(Vec<Level>),
    /// By the crate's grammar where a text has no character of a class, which is no ASCII; by patterns elsewhere. The
    /// class has what a later Unicode than Oniguruma's gave a meaning, and what else the grammar takes differently.
    GrammarUnless {
        /// The class.
        class: u8,
        /// The patterns, which match everywhere.
        levels: Vec<Level>,
    },
}

impl Plan {
    /// Whether it is small enough to be worked with.
    pub fn is_bounded(&self) -> bool {
        let replaced = self.steps.iter().filter_map(|step| match step {
            Step::Replace(program, _) => Some(program),
            Step::Crate(_) => None,
        });
        let levels = match &self.words {
            Words::Grammar => &[][..],
            Words::Levels(levels) | Words::GrammarUnless { levels, .. } => levels,
        };
        let programs = replaced.chain(levels.iter().map(|level| &level.pattern));
        let ops: usize = programs.clone().map(|program| program.ops.len()).sum();
        let classes = programs.flat_map(|program| {
            let of_ops = program.ops.iter().map(|op| match *op {
                Op::One(class) | Op::Many { class, .. } | Op::Behind { class, .. } => class,
                _ => 0,
            });
            of_ops.chain(program.first)
        });
        let classes_fit = classes.max().unwrap_or(0) < 32;
        let own_fits = !matches!(&self.words, Words::GrammarUnless { class, .. } if *class >= 32);
        ops <= MAX_OPS
            && classes_fit
            && own_fits
            && self.steps.len() <= MAX_STEPS
            && levels.len() <= MAX_STEPS
            && self.other.prefix.len() <= MAX_STEPS
            && self.other.most_characters <= MAX_CHARACTERS
    }
}

/// Longest word of WordPiece, in characters: each is tried against every length of a token.
pub(super) const MAX_CHARACTERS: usize = 1_000;
