//! A chat with images, sounds or videos on its way to its ids: up to where they can be known, and behind.
//!
//! How many tokens an item has is code of the model's own. Where it is configured, one placeholder's id becomes so many
//! ids made of the item's hash, so different items never share a block, and the prompt goes on. Where it is not, the
//! chat is rendered twice, with the item and with a text in its place: up to where the two differ, the template has
//! seen no more than what comes before. It fetches and measures nothing.

use crate::request::{Chat, MediaKind};
use crate::rules::MediaRules;
use crate::tokens::ids::{Cause, Ids, Unread};
use crate::tokens::{EncodeError, Tokenizer};
use std::mem::replace;

/// Stands for an item in the second rendering. Templates have no reason to write or to trim it.
const STAND_IN: &str = "\u{fffc}\u{fffc}";

/// Tokens that an item of unknown length counts for.
const ESTIMATED_TOKENS: u32 = 1000;

/// Bytes per token of the text behind it.
const BYTES_PER_TOKEN: usize = 4;

/// Ids that what follows may still change, at most, where no added token ends the known text: the parts of one word. A
/// longer word costs the last block; double would cost one always.
const LOOSE_IDS: usize = 16;

/// Most ids of a prompt: as many as a body may give.
const MAX_IDS: usize = 1 << 20;

/// Above every id of a vocabulary.
const HASHED: u32 = 1 << 31;

/// See the module.
pub struct MediaReading {
    rules: MediaRules,
    /// In the order of the messages.
    items: Vec<(MediaKind, u64)>,
    passes: Passes,
}

enum Passes {
    /// Every item's tokens are configured: one rendering is the whole prompt.
    One,
    /// The chat of the second rendering.
    First(Box<Chat>),
    /// The first rendering.
    Second(String),
    /// What is known ends where the renderings differ, with so many tokens behind.
    Done(u32),
}

/// What is to be done with a rendering.
pub enum Next {
    /// Render this, too.
    Render(Box<Chat>),
    /// Encode this.
    Encode(String),
}

impl MediaReading {
    /// Begins. `None` for a chat without media.
    pub fn new(chat: &Chat) -> Option<Self> {
        if chat.media.is_empty() {
            return None;
        }
        let rules = chat.rules.media.clone();
        let items = chat.media.iter().map(|item| (item.kind, item.identity)).collect();
        let unknown = chat.media.iter().position(|item| rules.of(item.kind).is_none());
        let passes = match unknown {
            None => Passes::One,
            Some(unknown) => {
                let mut second = Box::new(chat.clone());
                for item in second.media.iter_mut().skip(unknown) {
                    item.stand_in = Some(STAND_IN.to_owned());
                }
                Passes::First(second)
            }
        };
        Some(Self { rules, items, passes })
    }

    /// Takes a rendering.
    pub fn rendered(&mut self, text: String) -> Next {
        match replace(&mut self.passes, Passes::One) {
            Passes::First(chat) => {
                self.passes = Passes::Second(text);
                Next::Render(chat)
            }
            Passes::Second(mut first) => {
                let end = common_prefix(&first, &text);
                let behind = first.len().saturating_sub(end) / BYTES_PER_TOKEN;
                let unknown = self.items.iter().filter(|(kind, _)| self.rules.of(*kind).is_none());
                let items = u32::try_from(unknown.count()).unwrap_or(u32::MAX);
                let behind = u32::try_from(behind).unwrap_or(u32::MAX);
                self.passes =
                    Passes::Done(behind.saturating_add(items.saturating_mul(ESTIMATED_TOKENS)));
                first.truncate(end);
                Next::Encode(first)
            }
            passes => {
                self.passes = passes;
                Next::Encode(text)
            }
        }
    }

    /// Takes the ids of the last text that was to be encoded.
    ///
    /// # Errors
    /// When the tokenizer refuses a placeholder.
    pub fn ids(self, tokenizer: &Tokenizer, mut ids: Vec<u32>) -> Result<Ids, EncodeError> {
        let mut placeholders = self.placeholders(tokenizer)?;
        let behind = match self.passes {
            Passes::Done(behind) => Some(behind),
            _ => None,
        };
        if behind.is_some() {
            ids.truncate(certain(&ids, tokenizer));
        }
        let Expanded { mut known, first_item, fits } = expanded(ids, &mut placeholders);
        let left: usize = placeholders.iter().map(|placeholder| placeholder.items.len()).sum();
        let estimated_tokens = match behind {
            Some(behind) if fits => behind,
            None if fits && left == 0 && self.rules.covers(&self.items) => return Ok(known.into()),
            behind => {
                // Which item stands where is not certain.
                let taken = known.split_off(first_item.unwrap_or(0)).len();
                behind.unwrap_or(0).saturating_add(u32::try_from(taken).unwrap_or(u32::MAX))
            }
        };
        Ok(Ids { known, unread: Some(Unread { cause: Cause::Media, estimated_tokens }) })
    }

    /// The placeholders that are one token each.
    fn placeholders(&self, tokenizer: &Tokenizer) -> Result<Vec<Placeholder>, EncodeError> {
        let mut placeholders = Vec::new();
        for kind in [MediaKind::Image, MediaKind::Audio, MediaKind::Video] {
            let Some(rule) = self.rules.of(kind) else { continue };
            if let [id] = tokenizer.encode(&rule.placeholder, false)?.as_slice() {
                let items = self.items.iter().filter(|(of, _)| *of == kind);
                let items: Vec<u64> = items.map(|(_, identity)| *identity).collect();
                let (id, tokens, items) = (*id, rule.tokens, items.into_iter());
                placeholders.push(Placeholder { id, tokens, items });
            }
        }
        Ok(placeholders)
    }
}

/// What the template writes for the items of one kind.
struct Placeholder {
    id: u32,
    tokens: u32,
    items: std::vec::IntoIter<u64>,
}

struct Expanded {
    known: Vec<u32>,
    /// Where the first placeholder stood.
    first_item: Option<usize>,
    /// Whether there was an item, and room, for every placeholder.
    fits: bool,
}

/// Puts the items' tokens in their placeholders' places.
fn expanded(ids: Vec<u32>, placeholders: &mut [Placeholder]) -> Expanded {
    let mut done = Expanded { known: Vec::with_capacity(ids.len()), first_item: None, fits: true };
    for id in ids {
        let Some(placeholder) = placeholders.iter_mut().find(|placeholder| placeholder.id == id)
        else {
            done.known.push(id);
            continue;
        };
        done.first_item.get_or_insert(done.known.len());
        let tokens = placeholder.tokens;
        let room = MAX_IDS.saturating_sub(done.known.len());
        match placeholder.items.next().filter(|_| tokens as usize <= room) {
            Some(identity) => done.known.extend((0..tokens).map(|at| hashed(identity, at))),
            None => {
                done.fits = false;
                break;
            }
        }
    }
    done
}

/// How many of these ids no text behind them can change.
fn certain(ids: &[u32], tokenizer: &Tokenizer) -> usize {
    let tail = ids.len().saturating_sub(LOOSE_IDS);
    let added = ids.iter().skip(tail).rposition(|id| tokenizer.is_added(*id));
    tail + added.map_or(0, |at| at + 1)
}

/// A number that stands for a token of an item: either half of its hash in turn.
fn hashed(identity: u64, at: u32) -> u32 {
    let half = if at.is_multiple_of(2) { identity as u32 } else { (identity >> 32) as u32 };
    HASHED | half
}

fn common_prefix(a: &str, b: &str) -> usize {
    let equal = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    (0..=equal).rev().find(|&end| a.is_char_boundary(end)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use crate::model::tests::of_bytes;
    use crate::request::{Api, Input, Prompt, parse};
    use crate::rules::{MediaRule, Rules};
    use std::sync::Arc;

    /// Writes an item as `<image>`, a system message only where there is none, and counts items.
    const PARTS: &str = "{% for m in messages %}<start>{{ m.role }} {% for part in m.content %}\
        {% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}<end>{% endfor %}";
    const TEXTS: &str =
        "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}";

    fn model(template: &str) -> Model {
        of_bytes(Some(template))
    }

    fn prompt(image: &str, before: &str, behind: &str, tokens: Option<u32>) -> Prompt {
        let body = serde_json::json!({"messages": [
            {"role": "system", "content": before},
            {"role": "user", "content": [
                {"type": "text", "text": "look at this:"},
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "text", "text": behind},
            ]}
        ]});
        let mut prompt = parse(Api::Chat, body.to_string().as_bytes()).unwrap();
        let rule = |tokens| MediaRule { placeholder: "<image>".to_owned(), tokens };
        let media = MediaRules { image: tokens.map(rule), ..MediaRules::default() };
        if let Input::Chat(chat) = &mut prompt.input {
            chat.rules = Arc::new(Rules { media, ..Rules::default() });
        }
        prompt
    }

    fn ids(model: &Model, prompt: &Prompt) -> Ids {
        model.ids(prompt, 0).unwrap()
    }

    fn text(known: &[u32]) -> String {
        let added = ["<start>", "<end>", "<image>", "<sound>"];
        let of = |id: &u32| match *id {
            id if id >= HASHED => "#".to_owned(),
            id if id >= 256 => added[id as usize - 256].to_owned(),
            byte => char::from_u32(byte).unwrap().to_string(),
        };
        known.iter().map(of).collect()
    }

    #[track_caller]
    fn check_known(template: &str, tokens: Option<u32>, expected: &str) {
        let ids = ids(&model(template), &prompt("a", "you see", "what is it", tokens));
        assert_eq!(text(&ids.known), expected);
    }

    #[test]
    fn what_stands_before_an_item_of_unknown_length_is_known() {
        // Sixteen ids in front of it, here bytes, may belong to one word with what follows.
        check_known(PARTS, None, "<start>system you see<end><start>us");
        check_known(TEXTS, None, "<start>system you see<end><start>");
        let ids = ids(&model(PARTS), &prompt("a", "you see", &"x".repeat(400), None));
        let unread = ids.unread.unwrap();
        assert_eq!(unread.cause, Cause::Media);
        assert!((1100..1120).contains(&unread.estimated_tokens), "{unread:?}");
    }

    #[test]
    fn a_prompt_goes_on_behind_an_item_of_known_length() {
        check_known(
            PARTS,
            Some(3),
            "<start>system you see<end><start>user look at this:###what is it<end>",
        );
        check_known(
            TEXTS,
            Some(2),
            "<start>system you see<end><start>user ##\nlook at this:\nwhat is it<end>",
        );
        let ids = ids(&model(PARTS), &prompt("a", "", "", Some(3)));
        assert_eq!(ids.unread, None);
    }

    #[test]
    fn different_images_share_only_what_stands_before_them() {
        let model = model(PARTS);
        let known =
            |image, behind, tokens| ids(&model, &prompt(image, "you see", behind, tokens)).known;
        let [one, same, other] = ["a", "a", "b"].map(|image| known(image, "what is it", Some(4)));
        assert_eq!(one, same);
        let equal = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
        assert_eq!(text(&one[..equal]), "<start>system you see<end><start>user look at this:");
        assert_eq!(known("a", "x", None), known("b", "y", None));
        assert_eq!(known("data:,a", "x", Some(4)).len(), known("data:,b", "x", Some(4)).len());
    }

    #[test]
    fn a_text_that_names_the_placeholder_ends_what_is_known() {
        let model = model(PARTS);
        let ids = ids(&model, &prompt("a", "a <image>?", "x", Some(4)));
        assert_eq!(text(&ids.known), "<start>system a ");
        assert!(ids.unread.is_some());
    }

    #[test]
    fn a_template_that_drops_the_item_leaves_nothing_known() {
        let dropping = PARTS.replace("<image>", "");
        let ids = ids(&model(&dropping), &prompt("a", "you see", "x", Some(4)));
        assert_eq!(
            (ids.known.len(), ids.unread.map(|unread| unread.cause)),
            (0, Some(Cause::Media))
        );
    }

    #[test]
    fn a_template_that_changes_its_head_for_media_is_heeded() {
        // As that of Llama 3.2 does: no system message where there is an image.
        let source = format!(
            "{{% set ns = namespace(seen=false) %}}{{% for m in messages %}}{{% for part in m.content %}}\
             {{% if part.type == 'image' %}}{{% set ns.seen = true %}}{{% endif %}}{{% endfor %}}{{% endfor %}}\
             <start>{{% if ns.seen %}}pictures{{% endif %}} {PARTS}"
        );
        let ids = ids(&model(&source), &prompt("a", "you see", "x", None));
        assert_eq!(text(&ids.known), "<start>");
    }

    #[test]
    fn no_number_of_items_makes_a_prompt_without_end() {
        let part = serde_json::json!({"type": "image_url", "image_url": "u"});
        let parts = serde_json::Value::from(vec![part; 1000]);
        let body = serde_json::json!({"messages": [{"role": "user", "content": parts}]});
        let mut prompt = parse(Api::Chat, body.to_string().as_bytes()).unwrap();
        let image = Some(MediaRule { placeholder: "<image>".to_owned(), tokens: 65_536 });
        if let Input::Chat(chat) = &mut prompt.input {
            let media = MediaRules { image, ..MediaRules::default() };
            chat.rules = Arc::new(Rules { media, ..Rules::default() });
        }
        let ids = ids(&model(PARTS), &prompt);
        assert!(ids.known.len() <= MAX_IDS && ids.unread.is_some());
    }
}
