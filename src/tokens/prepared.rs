//! The prepared form of a model's tokenizer and chat template: what `warmpath-prepare` writes and the filter loads in steps.

use super::Tokenizer;
use std::collections::BTreeMap;

/// Why a file could not be prepared or loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError(pub String);

/// What a prepared file holds, loaded.
pub struct Prepared {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The Jinja source of the chat template; empty when the model has none.
    pub chat_template: String,
    /// `bos_token`, `eos_token` and the like.
    pub special_tokens: BTreeMap<String, String>,
}

/// Builds the prepared bytes from a Hugging Face model's files.
///
/// # Errors
/// When a file is not what it should be; the text names the field.
pub fn prepare(
    tokenizer_json: &str,
    tokenizer_config: &str,
    chat_template: Option<&str>,
) -> Result<Vec<u8>, LoadError> {
    let _ = (tokenizer_json, tokenizer_config, chat_template);
    Err(LoadError("not built".to_owned()))
}

/// Loads prepared bytes in bounded steps.
pub struct Loader {}

/// How far a [`Loader`] is.
pub enum Progress {
    /// More steps are needed.
    Pending,
    /// Loaded.
    Ready(Box<Prepared>),
}

impl Loader {
    /// Checks the header and takes the bytes.
    ///
    /// # Errors
    /// When the bytes are not a prepared file of this version.
    pub fn new(bytes: Vec<u8>) -> Result<Self, LoadError> {
        let _ = bytes;
        Err(LoadError("not built".to_owned()))
    }

    /// One bounded piece of work.
    ///
    /// # Errors
    /// When the bytes turn out to be damaged.
    pub fn step(&mut self) -> Result<Progress, LoadError> {
        Ok(Progress::Pending)
    }
}
