//! Images, sounds and videos in a chat: each told from every other by a hash of what it is.
//!
//! An item is hashed where it lies and taken out of its message at once: a picture in a `data:` URL is megabytes of
//! text. Nothing is fetched and nothing decoded, so a URL stands for whatever is behind it, and one picture under two
//! URLs is two.

use super::{RequestError, field};
use serde_json::{Map, Value};
use std::mem::take;
use xxhash_rust::xxh3::Xxh3;

/// What kind of thing an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaKind {
    /// `image_url`, `input_image`, `image_embeds`
    Image,
    /// `audio_url`, `input_audio`, `audio_embeds`
    Audio,
    /// `video_url`, `video_embeds`
    Video,
}

impl MediaKind {
    /// Its name, as templates know it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Audio => "audio",
            Self::Video => "video",
        }
    }
}

/// One item. Where it stood, its message has its place in [`super::Chat::media`] as a number.
#[derive(Debug, Clone, PartialEq)]
pub struct Media {
    /// What kind of thing it is.
    pub kind: MediaKind,
    /// A hash of its `uuid`, or else of its URL or data.
    pub identity: u64,
    /// The part's other fields.
    pub fields: Map<String, Value>,
    /// A text to render in its place; without one the item is rendered as the template has it.
    pub stand_in: Option<String>,
}

/// Keys that make a part one of media, whatever its `type`, in the engine's order.
const KEYS: [(&str, Option<MediaKind>); 12] = [
    ("image_url", Some(MediaKind::Image)),
    ("input_image", Some(MediaKind::Image)),
    ("image_pil", None),
    ("image_embeds", Some(MediaKind::Image)),
    ("audio_embeds", Some(MediaKind::Audio)),
    ("video_embeds", Some(MediaKind::Video)),
    ("prompt_embeds", None),
    ("audio_url", Some(MediaKind::Audio)),
    ("input_audio", Some(MediaKind::Audio)),
    ("video_url", Some(MediaKind::Video)),
    ("file", None),
    ("input_file", None),
];

/// Takes the media out of a message's content and puts numbers in their place.
///
/// # Errors
/// When there is one that the engine may honour in a way that cannot be known from here.
pub(super) fn take_from(
    message: &mut Map<String, Value>,
    media: &mut Vec<Media>,
) -> Result<(), RequestError> {
    if !field(message, "content").is_some_and(Value::is_array) {
        return Ok(());
    }
    let Some(Value::Array(parts)) = message.get_mut("content") else { return Ok(()) };
    for part in parts {
        let Value::Object(fields) = part else { continue };
        let kind = fields.get("type").and_then(Value::as_str);
        let of_type = KEYS.iter().find(|(key, _)| kind == Some(*key));
        let Some((key, kind)) =
            of_type.or_else(|| KEYS.iter().find(|(key, _)| fields.contains_key(*key)))
        else {
            continue;
        };
        let kind = kind.ok_or(RequestError::Media)?;
        media.push(item(take(fields), key, kind));
        *part = Value::from(media.len() - 1);
    }
    Ok(())
}

fn item(mut fields: Map<String, Value>, key: &str, kind: MediaKind) -> Media {
    // An image of the responses API has its URL under the chat API's key.
    let content = fields.remove(key).or_else(|| fields.remove("image_url")).unwrap_or_default();
    let mut hasher = Xxh3::new();
    match fields.remove("uuid") {
        None | Some(Value::Null) => {
            hasher.update(key.as_bytes());
            let url = content.get("url").unwrap_or(&content);
            hash(url, &mut hasher);
        }
        Some(uuid) => {
            hasher.update(b"uuid");
            hash(&uuid, &mut hasher);
        }
    }
    fields.remove("type");
    Media { kind, identity: hasher.digest(), fields, stand_in: None }
}

/// Feeds a value without writing it out. Its depth is bounded by the reader of JSON.
fn hash(value: &Value, hasher: &mut Xxh3) {
    let mut part = |kind: u8, bytes: &[u8]| {
        hasher.update(&[kind]);
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    match value {
        Value::String(text) => part(b's', text.as_bytes()),
        Value::Array(items) => {
            part(b'a', &(items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| hash(item, hasher));
        }
        Value::Object(fields) => {
            part(b'o', &(fields.len() as u64).to_le_bytes());
            for (name, value) in fields {
                hasher.update(&(name.len() as u64).to_le_bytes());
                hasher.update(name.as_bytes());
                hash(value, hasher);
            }
        }
        other => part(b'v', other.to_string().as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn taken(parts: Value) -> Result<(Value, Vec<Media>), RequestError> {
        let message = json!({"role": "user", "content": parts});
        let Value::Object(mut message) = message else { panic!("not an object") };
        let mut media = Vec::new();
        take_from(&mut message, &mut media)?;
        Ok((message.remove("content").unwrap(), media))
    }

    fn one(part: Value) -> Media {
        taken(json!([part])).unwrap().1.remove(0)
    }

    #[test]
    fn media_leave_a_number_in_their_place() {
        let (content, media) = taken(json!([
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "data:,x"}, "cache_control": {}},
            "b",
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
        ]))
        .unwrap();
        assert_eq!(content, json!([{"type": "text", "text": "a"}, 0, "b", 1]));
        assert_eq!(
            media.iter().map(|item| item.kind.as_str()).collect::<Vec<_>>(),
            ["image", "audio"]
        );
        assert_eq!(Value::from(media[0].fields.clone()), json!({"cache_control": {}}));
    }

    #[test]
    fn every_way_to_give_an_image_is_seen() {
        for part in [
            json!({"type": "image_url", "image_url": {"url": "u"}}),
            json!({"type": "image_url", "image_url": "u"}),
            json!({"image_url": "u"}),
            json!({"type": "input_image", "image_url": "u"}),
            json!({"type": "image_embeds", "image_embeds": {"a": "b"}}),
        ] {
            assert_eq!(one(part.clone()).kind, MediaKind::Image, "{part}");
        }
    }

    #[test]
    fn what_an_item_is_decides_its_identity() {
        let url = |url: &str| one(json!({"type": "image_url", "image_url": {"url": url}})).identity;
        assert_eq!(url("u"), url("u"));
        assert_ne!(url("u"), url("v"));
        assert_eq!(url("u"), one(json!({"type": "image_url", "image_url": "u"})).identity);
        let audio = one(json!({"type": "audio_url", "audio_url": {"url": "u"}})).identity;
        assert_ne!(url("u"), audio);
        let embeds = |x: Value| one(json!({"type": "image_embeds", "image_embeds": x})).identity;
        assert_ne!(embeds(json!({"a": ["b", "c"]})), embeds(json!({"a": ["bc"]})));
        assert_ne!(embeds(json!({"a": 1})), embeds(json!({"a": 2})));
    }

    #[test]
    fn a_uuid_stands_for_the_content() {
        let with = |uuid: &str, url: &str| {
            one(json!({"type": "image_url", "image_url": {"url": url}, "uuid": uuid})).identity
        };
        assert_eq!(with("1", "u"), with("1", "v"));
        assert_ne!(with("1", "u"), with("2", "u"));
        let absent = one(json!({"type": "image_url", "image_url": null, "uuid": "1"})).identity;
        assert_eq!(with("1", "u"), absent);
    }

    #[test]
    fn what_is_no_media_known_here_is_refused() {
        for part in [json!({"type": "file", "file": {}}), json!({"prompt_embeds": "x"})] {
            assert_eq!(taken(json!([part])).map(|_| ()), Err(RequestError::Media));
        }
    }
}
