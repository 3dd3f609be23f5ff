//! What renders a model's chats: its Jinja template, or the format that engines have in code.
//!
//! It chooses; each renderer is a module of its own.

use super::{ChatTemplate, DeepSeekV4, Harmony, Rendering, TemplateError};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Which renderer a model takes, as its prepared file names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RendererName {
    /// The model's own Jinja template.
    Jinja,
    /// OpenAI's Harmony, for gpt-oss.
    Harmony,
    /// DeepSeek V4's encoder.
    DeepSeekV4,
}

/// Every renderer, and the `model_type` in `config.json` of the models that engines render with it.
const NAMES: [(RendererName, &str, &[&str]); 3] = [
    (RendererName::Jinja, "jinja", &[]),
    (RendererName::Harmony, "harmony", &["gpt_oss"]),
    (RendererName::DeepSeekV4, "deepseek_v4", &["deepseek_v4"]),
];

/// The special tokens that only a Harmony vocabulary has all of.
const HARMONY_TOKENS: [&str; 5] =
    ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"];

impl RendererName {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        NAMES.iter().find(|(name, ..)| *name == self).map_or("", |(_, text, _)| text)
    }

    /// The renderer that engines take for a `model_type` of `config.json`.
    pub fn of_model_type(model_type: &str) -> Self {
        let found = NAMES.iter().find(|(.., types)| types.contains(&model_type));
        found.map_or(Self::Jinja, |(name, ..)| *name)
    }

    /// The renderer of a vocabulary that has these special tokens, where nothing else is known of the model.
    pub fn of_special_tokens(has: impl Fn(&str) -> bool) -> Self {
        if HARMONY_TOKENS.iter().all(|token| has(token)) { Self::Harmony } else { Self::Jinja }
    }
}

impl fmt::Display for RendererName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for RendererName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|(_, name, _)| *name == text);
        found.map(|(name, ..)| *name).ok_or_else(|| {
            let names: Vec<_> = NAMES.iter().map(|(_, name, _)| *name).collect();
            format!("expected one of {}, found \"{text}\"", names.join(", "))
        })
    }
}

/// What renders a model's chats.
#[derive(Debug)]
pub enum Renderer {
    /// A compiled template.
    Jinja(Box<ChatTemplate>),
    /// Harmony.
    Harmony(Harmony),
    /// DeepSeek V4's encoder.
    DeepSeekV4(DeepSeekV4),
}

impl Renderer {
    /// The renderer of this name, or `None` for a model that should have a template and has none.
    ///
    /// # Errors
    /// When the template does not compile.
    pub fn new(
        name: RendererName,
        chat_template: &str,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Option<Self>, TemplateError> {
        Ok(match name {
            RendererName::Jinja if chat_template.is_empty() => None,
            RendererName::Jinja => {
                let template = ChatTemplate::compile(chat_template, special_tokens)?;
                Some(Self::Jinja(Box::new(template)))
            }
            RendererName::Harmony => Some(Self::Harmony(Harmony::Vllm)),
            RendererName::DeepSeekV4 => Some(Self::DeepSeekV4(DeepSeekV4)),
        })
    }

    /// One step of rendering a chat. `now` is seconds since the Unix epoch in the engine's time zone.
    ///
    /// # Errors
    /// When the engine would refuse the chat, a template raises or a limit is passed.
    pub fn step(&self, rendering: Rendering, now: u64) -> Result<Rendering, TemplateError> {
        match (self, rendering) {
            (Self::Jinja(template), rendering) => template.step(rendering, now),
            (Self::Harmony(harmony), Rendering::Chat(chat)) => {
                harmony.render(&chat, now).map(Rendering::Pieces)
            }
            (Self::Harmony(_), rendering) => Ok(rendering),
            (Self::DeepSeekV4(deepseek), rendering) => deepseek.step(rendering),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for (name, text, _) in NAMES {
            assert_eq!(text.parse(), Ok(name));
            assert_eq!(name.to_string(), text);
        }
        assert_eq!(
            "Jinja".parse::<RendererName>(),
            Err("expected one of jinja, harmony, deepseek_v4, found \"Jinja\"".to_owned())
        );
    }

    #[test]
    fn models_are_told_by_their_type_or_their_special_tokens() {
        assert_eq!(RendererName::of_model_type("gpt_oss"), RendererName::Harmony);
        assert_eq!(RendererName::of_model_type("deepseek_v4"), RendererName::DeepSeekV4);
        assert_eq!(RendererName::of_model_type("qwen3"), RendererName::Jinja);
        let all = |token: &str| HARMONY_TOKENS.contains(&token);
        assert_eq!(RendererName::of_special_tokens(all), RendererName::Harmony);
        let some = |token: &str| token != "<|call|>";
        assert_eq!(RendererName::of_special_tokens(some), RendererName::Jinja);
    }
}
