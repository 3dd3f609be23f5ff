//! What is configured of how an engine reads prompts.
//!
//! It renders nothing: [`crate::template`] and [`crate::model`] go by it.

use crate::request::MediaKind;
use crate::template::ContentFormat;
use serde_json::{Map, Value};

/// How a model's engine reads prompts.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rules {
    /// Which engine it is.
    pub engine: Engine,
    /// How the template takes content, where the engine was told so.
    pub content_format: Option<ContentFormat>,
    /// Whether the engine was told to leave out tools where `tool_choice` is `none`.
    pub exclude_tools_when_tool_choice_none: bool,
    /// Arguments for the template that the engine was started with.
    pub template_arguments: Map<String, Value>,
    /// How media enter the prompt.
    pub media: MediaRules,
}

/// Whose rules a body goes through before the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    /// vLLM.
    #[default]
    Vllm,
    /// SGLang.
    Sglang,
}

/// How media enter a model's prompts, one for each kind; none where the number of tokens differs from item to item.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MediaRules {
    /// Images.
    pub image: Option<MediaRule>,
    /// Sounds.
    pub audio: Option<MediaRule>,
    /// Videos.
    pub video: Option<MediaRule>,
}

/// How media of one kind enter a model's prompts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaRule {
    /// What the template writes for an item, or the engine in front of a message's text: one token.
    pub placeholder: String,
    /// So many tokens come in that one's place.
    pub tokens: u32,
}

impl MediaRules {
    /// Whether there is a rule for each of these items.
    pub fn covers(&self, items: &[(MediaKind, u64)]) -> bool {
        items.iter().all(|(kind, _)| self.of(*kind).is_some())
    }

    /// The rule for a kind.
    pub fn of(&self, kind: MediaKind) -> Option<&MediaRule> {
        match kind {
            MediaKind::Image => self.image.as_ref(),
            MediaKind::Audio => self.audio.as_ref(),
            MediaKind::Video => self.video.as_ref(),
        }
    }
}
