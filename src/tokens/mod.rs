//! Text to token ids, as the model's own tokenizer does it.
//!
//! Most normalizers, the pre-tokenizers with a hand-written grammar and the post-processors come from the `tokenizers`
//! crate; patterns are ours. The vocabulary, the merges and the added
//! tokens are tables of the [`prepared`] file, read in place: building the crate's own tables takes a second or more per
//! VM in one uninterruptible call, and several times the memory.
//!
//! It does not decode, truncate or pad.

mod added;
pub mod blocks;
mod bpe;
mod cutting;
mod encoding;
pub mod ids;
mod normalize;
mod pattern;
mod pieces;
pub mod prepared;
mod rewrite;
mod unigram;
mod window;

#[cfg(test)]
mod kinds;

use added::AddedTokens;
use bpe::Bpe;
use encoding::Scratch;
pub use encoding::{Encoding, Mark, More};
use normalize::Normalizers;
use pattern::Classes;
pub use pieces::Pieces;
use prepared::plan::{Plan, Words};
use rewrite::Rewrite;
use std::fmt;
use std::sync::Mutex;
use tokenizers::pipeline::PipelineTokenizer;

/// The longest text that is encoded, in bytes: twice the longest body that the shipped configuration reads. Doubled, one
/// prompt of single letters would take a hundred megabytes for its ids.
pub const MAX_TEXT_BYTES: usize = 8 << 20;

/// A loaded tokenizer.
pub struct Tokenizer {
    /// Normalizers, pre-tokenizer and post-processor. Its model is a stand-in that is never run.
    pipeline: PipelineTokenizer,
    added: AddedTokens,
    bpe: Bpe,
    normalizers: Normalizers,
    /// What is written into a text before it is cut into words.
    rewrite: Option<Rewrite>,
    /// How words are found.
    words: Words,
    /// The characters that patterns speak of.
    classes: Classes,
    /// The buffers of the text that was encoded last.
    kept: Mutex<Option<Box<Scratch>>>,
}

/// How much a tokenizer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// One more than the highest id of the vocabulary.
    pub tokens: usize,
    /// Merges.
    pub merges: usize,
    /// Added tokens.
    pub added_tokens: usize,
}

/// Why text could not be tokenized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodeError(pub String);

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for EncodeError {}

impl Tokenizer {
    fn new(
        pipeline: PipelineTokenizer,
        added: AddedTokens,
        bpe: Bpe,
        plan: Plan,
        classes: Classes,
    ) -> Self {
        Self {
            normalizers: Normalizers { steps: plan.steps, apart: plan.apart },
            rewrite: plan.rewrite,
            words: plan.words,
            classes,
            pipeline,
            added,
            bpe,
            kept: Mutex::default(),
        }
    }

    /// Reads a Hugging Face `tokenizer.json` of any version.
    ///
    /// # Errors
    /// When the text is not a tokenizer this build supports.
    pub fn from_json(tokenizer_json: &str) -> Result<Self, prepared::LoadError> {
        let bytes = prepared::prepare(tokenizer_json, "{}", None)?;
        Ok(prepared::load(bytes)?.tokenizer)
    }

    /// Token ids of `text`, in one go. `add_special_tokens` runs the tokenizer's post-processor (BOS and the like).
    ///
    /// # Errors
    /// When the text is longer than [`MAX_TEXT_BYTES`], or a part of it too long to be encoded.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let mut encoding = self.begin(text.to_owned(), add_special_tokens)?;
        loop {
            if let Some(ids) = encoding.go_on(self, &mut || true)? {
                return Ok(ids);
            }
        }
    }

    /// Begins to encode a text.
    ///
    /// # Errors
    /// When the text is longer than [`MAX_TEXT_BYTES`].
    pub fn begin(&self, text: String, add_special_tokens: bool) -> Result<Encoding, EncodeError> {
        check_length(text.len())?;
        Ok(Encoding::new(self, text, add_special_tokens, self.scratch()))
    }

    /// Begins to encode a text whose pieces are encoded apart. Nothing is added to it.
    ///
    /// # Errors
    /// When the text is longer than [`MAX_TEXT_BYTES`].
    pub fn begin_pieces(&self, pieces: Pieces) -> Result<Encoding, EncodeError> {
        check_length(pieces.len())?;
        Ok(Encoding::of_pieces(self, pieces, self.scratch()))
    }

    /// Another text may have the buffers: fresh ones cost an allocation, waiting costs more.
    fn scratch(&self) -> Box<Scratch> {
        self.kept.try_lock().ok().and_then(|mut kept| kept.take()).unwrap_or_default()
    }

    fn keep(&self, scratch: Box<Scratch>) {
        if let Ok(mut kept) = self.kept.try_lock() {
            *kept = Some(scratch);
        }
    }

    /// Whether an id is an added token's. What stands before one is certain whatever follows.
    pub fn is_added(&self, id: u32) -> bool {
        self.added.raw.has(id) || self.added.normalized.has(id)
    }

    /// How much it holds.
    pub fn counts(&self) -> Counts {
        let (tokens, merges) = self.bpe.tables().counts();
        Counts { tokens, merges, added_tokens: self.added.raw.len() + self.added.normalized.len() }
    }
}

fn check_length(bytes: usize) -> Result<(), EncodeError> {
    if bytes > MAX_TEXT_BYTES {
        return Err(EncodeError(format!(
            "text of {bytes} bytes, at most {MAX_TEXT_BYTES} are tokenized"
        )));
    }
    Ok(())
}
