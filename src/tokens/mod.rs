//! Text to token ids, as the model's own tokenizer does it.
//!
//! Normalizers, pre-tokenizers and post-processors come from the `tokenizers` crate. The vocabulary, the merges and the added
//! tokens are tables of the [`prepared`] file, read in place: building the crate's own tables takes a second or more per
//! VM in one uninterruptible call, and several times the memory.
//!
//! It does not decode, truncate or pad, and knows byte pair encoding only.

mod added;
mod bpe;
pub mod prepared;

use added::AddedTokens;
use bpe::{Bpe, MergeScratch};
use std::fmt;
use std::sync::Mutex;
use tokenizers::pipeline::{
    Normalizer, NormalizerChain, PipelineTokenizer, PreTokenizer, PreTokenizerScratch, Span,
};

/// The longest text one call encodes, in bytes. Scratch memory is about twenty times the text; twice this would let one
/// prompt take a third of the gigabyte Envoy allows a VM, half would refuse prompts of a million tokens.
pub const MAX_TEXT_BYTES: usize = 8 << 20;

/// Scratch buffers kept for the next call belong to texts up to this size, in bytes; larger ones are freed, so that one
/// huge prompt does not fix a VM's memory. Halved, long prompts pay for allocation each time.
const KEPT_TEXT_BYTES: usize = 1 << 20;

/// A loaded tokenizer.
pub struct Tokenizer {
    /// Normalizers, pre-tokenizer and post-processor. Its model is a stand-in that is never run.
    pipeline: PipelineTokenizer,
    added: AddedTokens,
    bpe: Bpe,
    scratch: Mutex<Scratch>,
}

#[derive(Default)]
struct Scratch {
    pre_tokenizer: PreTokenizerScratch,
    spans: Vec<Span>,
    merge: MergeScratch,
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
    /// Reads a Hugging Face `tokenizer.json` of any version.
    ///
    /// # Errors
    /// When the text is not a tokenizer this build supports.
    pub fn from_json(tokenizer_json: &str) -> Result<Self, prepared::LoadError> {
        let bytes = prepared::prepare(tokenizer_json, "{}", None)?;
        Ok(prepared::load(bytes)?.tokenizer)
    }

    /// Token ids of `text`. `add_special_tokens` runs the tokenizer's post-processor (BOS and the like).
    ///
    /// # Errors
    /// When the text is longer than [`MAX_TEXT_BYTES`], or one word of it is too long to merge.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(EncodeError(format!(
                "text of {} bytes, at most {MAX_TEXT_BYTES} are tokenized",
                text.len()
            )));
        }
        // Another thread of a native command may hold the scratch: a fresh one costs an allocation, waiting costs more.
        let mut fresh = Scratch::default();
        let mut kept = self.scratch.try_lock().ok();
        let scratch = kept.as_deref_mut().unwrap_or(&mut fresh);
        let template = &self.pipeline.get_post_processor().single;
        let mut ids = Vec::with_capacity(text.len() / 3);
        if add_special_tokens {
            ids.extend(template.prefix.iter().map(|&(token, _)| token.id()));
        }
        self.encode_raw(text, scratch, &mut ids)?;
        if add_special_tokens {
            ids.extend(template.suffix.iter().map(|&(token, _)| token.id()));
        }
        if text.len() > KEPT_TEXT_BYTES {
            *scratch = Scratch::default();
        }
        Ok(ids)
    }

    /// How much it holds.
    pub fn counts(&self) -> Counts {
        let (tokens, merges) = self.bpe.tables().counts();
        Counts { tokens, merges, added_tokens: self.added.raw.len() + self.added.normalized.len() }
    }

    fn encode_raw(
        &self,
        text: &str,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        let normalizers = NormalizerChain(self.pipeline.get_normalizers());
        for piece in self.added.raw.split(text) {
            ids.extend(piece.token);
            if piece.text.is_empty() {
                continue;
            }
            let normalized = normalizers
                .normalize(piece.text, piece.offset)
                .map_err(|error| EncodeError(error.to_string()))?;
            for piece in self.added.normalized.split(&normalized) {
                ids.extend(piece.token);
                self.encode_words(piece.text, scratch, ids)?;
            }
        }
        Ok(())
    }

    fn encode_words(
        &self,
        text: &str,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        if text.is_empty() {
            return Ok(());
        }
        scratch.spans.clear();
        self.pipeline
            .get_pre_tokenizer()
            .pre_tokenize(text, &mut scratch.pre_tokenizer, &mut scratch.spans)
            .map_err(|error| EncodeError(error.to_string()))?;
        let tables = self.bpe.tables();
        for span in &scratch.spans {
            let word = text.get(span.range()).ok_or_else(|| {
                EncodeError("the pre-tokenizer cut inside a character".to_owned())
            })?;
            tables.encode_word(word, &mut scratch.merge, ids)?;
        }
        Ok(())
    }
}
