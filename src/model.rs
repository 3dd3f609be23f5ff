//! A model as the filter knows it: its tokenizer and its chat template, together.
//!
//! It does not fetch its bytes, does not know its own name, and has no clock.

use crate::request::{Input, Prompt};
use crate::template::{ChatTemplate, TemplateError};
use crate::tokens::prepared::{LoadError, Loader, Prepared, Progress};
use crate::tokens::{EncodeError, Tokenizer};

/// A loaded model.
pub struct Model {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

/// Why a prompt has no token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptError {
    /// The chat template raised, or the model has none.
    Template(TemplateError),
    /// The tokenizer refused the text.
    Tokenizer(EncodeError),
    /// `truncate_prompt_tokens` cuts where the tokenizer's own special tokens stand.
    Truncation,
}

impl Model {
    /// Takes a prepared file that has been loaded.
    ///
    /// # Errors
    /// When the chat template does not compile.
    pub fn new(prepared: Prepared) -> Result<Self, TemplateError> {
        let Prepared { tokenizer, chat_template, special_tokens } = prepared;
        let template = if chat_template.is_empty() {
            None
        } else {
            Some(ChatTemplate::compile(&chat_template, &special_tokens)?)
        };
        Ok(Self { tokenizer, template })
    }

    /// Loads prepared bytes in one go: for native commands and tests.
    ///
    /// # Errors
    /// When the bytes are damaged or the template does not compile.
    pub fn load(bytes: Vec<u8>) -> Result<Self, LoadError> {
        let mut loader = Loader::new(bytes)?;
        loop {
            if let Progress::Ready(prepared) = loader.step()? {
                return Self::new(*prepared).map_err(|error| LoadError(error.to_string()));
            }
        }
    }

    /// The token ids the engine would compute for this prompt.
    ///
    /// # Errors
    /// When the template or the tokenizer refuses it.
    pub fn token_ids(&self, prompt: &Prompt, now: u64) -> Result<Vec<u32>, PromptError> {
        let (ids, adds_special_tokens) = match &prompt.input {
            Input::Tokens(ids) => (ids.clone(), false),
            Input::Text { text, add_special_tokens } => {
                (self.encode(text, *add_special_tokens)?, *add_special_tokens)
            }
            Input::Chat(chat) => {
                let template =
                    self.template.as_ref().ok_or(PromptError::Template(TemplateError::Absent))?;
                let text = template.render(chat, now).map_err(PromptError::Template)?;
                (self.encode(&text, chat.add_special_tokens)?, chat.add_special_tokens)
            }
        };
        let Some(truncation) = prompt.truncation else { return Ok(ids) };
        let special_tokens = if adds_special_tokens { self.encode("", true)?.len() } else { 0 };
        truncation.apply(ids, special_tokens).ok_or(PromptError::Truncation)
    }

    /// The token ids of an answer's text, as the engine most likely sampled them.
    ///
    /// # Errors
    /// When the tokenizer refuses it.
    pub fn answer_ids(&self, answer: &str) -> Result<Vec<u32>, PromptError> {
        self.encode(answer, false)
    }

    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, PromptError> {
        self.tokenizer.encode(text, add_special_tokens).map_err(PromptError::Tokenizer)
    }
}
