//! Harmony, the format of gpt-oss, as vLLM drives OpenAI's library for it.
//!
//! It does not tokenize.

use super::TemplateError;
use crate::request::Chat;
use crate::tokens::Pieces;

/// Renders chats as Harmony conversations.
#[derive(Debug)]
pub struct Harmony;

impl Harmony {
    pub(super) fn render(&self, _chat: &Chat, _now: u64) -> Result<Pieces, TemplateError> {
        Err(TemplateError::Refused("messages"))
    }
}
