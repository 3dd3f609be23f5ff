//! Text to tokens: by a prepared tokenizer where there is one, else four bytes make a token.
//!
//! English text and code have some four bytes per token under today's vocabularies. With four bytes each, equal texts
//! are equal tokens and lengths are about right; where a real tokenizer would put a boundary, it does not know.

use std::path::Path;
use warmpath::tokens::Tokenizer;
use warmpath::tokens::prepared;

/// Bytes that make a token where no tokenizer is given.
const TOKEN_BYTES: usize = 4;

/// See the module.
pub enum Measure {
    /// Four bytes each.
    Bytes,
    /// A model's own tokenizer.
    Prepared(Box<Tokenizer>),
}

impl Measure {
    /// By the tokenizer of a file that `warmpath-prepare` wrote, if one is named.
    ///
    /// # Errors
    /// When it cannot be loaded.
    pub fn open(prepared: Option<&Path>) -> Result<Self, String> {
        let Some(path) = prepared else { return Ok(Self::Bytes) };
        let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let loaded = prepared::load(bytes);
        let loaded = loaded.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self::Prepared(Box::new(loaded.tokenizer)))
    }

    /// The text's tokens.
    ///
    /// # Errors
    /// When the tokenizer cannot encode it.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>, String> {
        match self {
            Self::Bytes => Ok(text.as_bytes().chunks(TOKEN_BYTES).map(token).collect()),
            Self::Prepared(tokenizer) => tokenizer.encode(text, false).map_err(|e| e.to_string()),
        }
    }
}

fn token(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |token, byte| token << 8 | u32::from(*byte))
}
