//! The prepared form of a model's tokenizer and chat template: what `warmpath-prepare` writes and the filter loads in steps.
//!
//! A prepared file is loaded by checking it: its tables are used where they lie, so that loading neither builds nor copies
//! anything in proportion to the vocabulary. It is read by the release that wrote it only, and is never repaired.

mod build;
mod charsmap;
mod container;
mod load;
mod lower;
mod others;
pub(super) mod plan;
mod tables;

pub use build::{prepare, prepare_for};
pub use load::{Loader, MAX_FILE_BYTES, Progress, load, too_large};

use super::Tokenizer;
use crate::template::RendererName;
use std::collections::BTreeMap;
use std::fmt;

/// Why a file could not be prepared or loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError(pub String);

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LoadError {}

/// What a prepared file holds, loaded.
pub struct Prepared {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The Jinja source of the chat template; empty when the model has none.
    pub chat_template: String,
    /// What renders chats.
    pub renderer: RendererName,
    /// `bos_token`, `eos_token` and the like.
    pub special_tokens: BTreeMap<String, String>,
    /// What all of this depends on, as one number.
    pub checksum: u64,
}

#[cfg(test)]
mod tests;
