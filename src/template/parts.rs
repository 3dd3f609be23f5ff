//! The parts of a message's content, as the engine gives them to a template.
//!
//! Which parts are read, and what they are joined to, is [`super::normalise`]'s part.

use super::engines::Table;
use crate::request::Media;
use serde_json::{Map, Value};

/// Fields of the engine's own kinds of content part, which it does not carry over.
const PART_FIELDS: [&str; 19] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_embeds",
    "refusal",
    "text",
    "thinking",
    "tool_reference",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// One part of a message's content.
pub(super) enum Part<'a> {
    Text {
        text: String,
        /// Fields that no kind of part has.
        others: Map<String, Value>,
    },
    /// The name of a tool that is loaded later.
    ToolReference(String),
    /// An image, sound or video.
    Media(&'a Media),
}

impl Part<'_> {
    /// What it is in a text. Media stand in front of it.
    pub(super) fn into_text(self) -> Option<String> {
        match self {
            Self::Text { text, .. } | Self::ToolReference(text) => Some(text),
            Self::Media(_) => None,
        }
    }

    /// What it is in a list.
    pub(super) fn into_value(self, table: &Table) -> Value {
        let mut fields = Map::new();
        let mut set = |name: &str, text: String| fields.insert(name.to_owned(), Value::from(text));
        let others = match self {
            Self::Text { text, others } => {
                set("type", "text".to_owned());
                set("text", text);
                others
            }
            Self::ToolReference(name) => {
                set("type", "tool_reference".to_owned());
                set("name", name);
                Map::new()
            }
            Self::Media(Media { stand_in: Some(text), .. }) => {
                set("type", "text".to_owned());
                set("text", text.clone());
                Map::new()
            }
            Self::Media(item) => {
                set("type", item.kind.as_str().to_owned());
                if table.keeps_part_fields { own_fields(&item.fields) } else { Map::new() }
            }
        };
        fields.extend(others);
        Value::Object(fields)
    }
}

/// The fields of a part that are in none of the engine's kinds of part.
pub(super) fn own_fields(part: &Map<String, Value>) -> Map<String, Value> {
    let own = part.iter().filter(|(name, _)| !PART_FIELDS.contains(&name.as_str()));
    own.map(|(name, value)| (name.clone(), value.clone())).collect()
}
