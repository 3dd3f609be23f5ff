//! Text to token ids, as the model's own tokenizer does it.

pub mod blocks;
pub mod prepared;

/// A loaded tokenizer.
pub struct Tokenizer {}

/// Why text could not be tokenized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodeError(pub String);

impl Tokenizer {
    /// Token ids of `text`. `add_special_tokens` runs the tokenizer's post-processor (BOS and the like).
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let _ = (text, add_special_tokens);
        Err(EncodeError("not built".to_owned()))
    }
}
