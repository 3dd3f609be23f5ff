//! Text to token ids, as the model's own tokenizer does it.

pub mod prepared;

use std::fmt;
use tokenizers::pipeline::{EncodeOptions, PipelineToken, PipelineTokenizer};

/// The longest text one call encodes, in bytes. Scratch memory is about eighteen times the text; twice this would let one
/// prompt take a third of the gigabyte Envoy allows a VM, half would refuse prompts of a million tokens.
pub const MAX_TEXT_BYTES: usize = 8 << 20;

/// A loaded tokenizer.
pub struct Tokenizer {
    pipeline: PipelineTokenizer,
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
        let canonical = tokenizers::canonicalize_str(tokenizer_json)
            .map_err(|error| prepared::LoadError(format!("tokenizer.json: {error}")))?;
        Self::from_canonical(&canonical)
    }

    fn from_canonical(canonical: &str) -> Result<Self, prepared::LoadError> {
        let pipeline = tokenizers::from_json(canonical)
            .map_err(|error| prepared::LoadError(format!("tokenizer.json: {error}")))?;
        Ok(Self { pipeline })
    }

    /// Token ids of `text`. `add_special_tokens` runs the tokenizer's post-processor (BOS and the like).
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(EncodeError(format!(
                "text of {} bytes, at most {MAX_TEXT_BYTES} are tokenized",
                text.len()
            )));
        }
        let options = EncodeOptions { add_special_tokens, ..EncodeOptions::default() };
        let mut tokens = Vec::with_capacity(text.len() / 4);
        self.pipeline
            .encode_into(text, &options, &mut tokens)
            .map_err(|error| EncodeError(error.to_string()))?;
        Ok(PipelineToken::cast_slice(&tokens).to_vec())
    }
}
