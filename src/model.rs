//! A model as the filter knows it: its tokenizer and its chat template, together.

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
                return Self::new(*prepared).map_err(|error| LoadError(error.0));
            }
        }
    }

    /// The token ids the engine would compute for this prompt.
    ///
    /// # Errors
    /// When the template or the tokenizer refuses it.
    pub fn token_ids(&self, prompt: &Prompt, now: u64) -> Result<Vec<u32>, PromptError> {
        match &prompt.input {
            Input::Tokens(ids) => Ok(ids.clone()),
            Input::Text { text, add_special_tokens } => {
                self.tokenizer.encode(text, *add_special_tokens).map_err(PromptError::Tokenizer)
            }
            Input::Chat(chat) => {
                let template = self.template.as_ref().ok_or_else(|| {
                    PromptError::Template(TemplateError(
                        "the model has no chat template".to_owned(),
                    ))
                })?;
                let text = template.render(chat, now).map_err(PromptError::Template)?;
                self.tokenizer
                    .encode(&text, chat.adds_special_tokens())
                    .map_err(PromptError::Tokenizer)
            }
        }
    }
}
