//! What is configured of how an engine reads prompts.
//!
//! It renders nothing: [`crate::template`] and [`crate::model`] go by it.

use crate::request::MediaKind;

/// How a model's engine reads prompts.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rules {
    /// How media enter the prompt.
    pub media: MediaRules,
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
