//! A [`crate::request::Chat`], rendered to the text the engine would render.

use crate::request::Chat;
use std::collections::BTreeMap;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {}

/// Why a chat could not be rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateError(pub String);

impl ChatTemplate {
    /// Compiles a template; `special_tokens` maps `bos_token`, `eos_token` and the like to their text.
    ///
    /// # Errors
    /// When the source is not valid Jinja.
    pub fn compile(
        source: &str,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Self, TemplateError> {
        let _ = (source, special_tokens);
        Ok(Self {})
    }

    /// Renders a chat as the engine does. `now` is seconds since the Unix epoch in the engine's time zone.
    ///
    /// # Errors
    /// When the template raises or a limit is passed.
    pub fn render(&self, chat: &Chat, now: u64) -> Result<String, TemplateError> {
        let _ = (chat, now);
        Err(TemplateError("not built".to_owned()))
    }
}
