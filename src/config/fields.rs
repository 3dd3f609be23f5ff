//! Typed reading of one JSON object, so that every refusal names the field and no key is overlooked.
//!
//! It knows types, bounds and paths. It does not know which options there are, nor their defaults.

use super::{ConfigError, error};
use crate::tokens::blocks::BlockSize;
use serde_json::{Map, Value};
use std::time::Duration;

/// How much of a wrong value a refusal repeats, in bytes: it goes into a line of a log.
const SHOWN_BYTES: usize = 100;

/// A value as a refusal shows it.
pub(super) fn shown(value: &Value) -> String {
    shortened(&value.to_string())
}

fn shortened(text: &str) -> String {
    let end = text.floor_char_boundary(SHOWN_BYTES);
    let dots = if end < text.len() { "..." } else { "" };
    format!("{}{dots}", text.get(..end).unwrap_or_default())
}

/// One JSON object, whose keys must all be taken.
pub(super) struct Fields<'a> {
    pub(super) path: String,
    object: &'a Map<String, Value>,
    taken: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(path: &str, value: &'a Value) -> Result<Self, ConfigError> {
        match value {
            Value::Object(object) => Ok(Self { path: path.to_owned(), object, taken: Vec::new() }),
            other => Err(error(path, format!("expected an object, found {}", shown(other)))),
        }
    }

    pub(super) fn path_of(&self, key: &str) -> String {
        if self.path == "configuration" { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(super) fn take(&mut self, key: &'static str) -> Option<&'a Value> {
        self.taken.push(key);
        self.object.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn require(&mut self, key: &'static str) -> Result<&'a Value, ConfigError> {
        self.take(key).ok_or_else(|| error(&self.path_of(key), "missing".to_owned()))
    }

    pub(super) fn finish(&self) -> Result<(), ConfigError> {
        let unknown = self.object.keys().find(|key| !self.taken.contains(&key.as_str()));
        match unknown {
            Some(key) => Err(error(&self.path_of(&shortened(key)), "unknown option".to_owned())),
            None => Ok(()),
        }
    }

    pub(super) fn wrong<T>(
        &self,
        key: &str,
        expected: &str,
        found: &Value,
    ) -> Result<T, ConfigError> {
        Err(error(&self.path_of(key), format!("expected {expected}, found {}", shown(found))))
    }

    /// A text that a refusal must not repeat: refusals are logged.
    pub(super) fn secret(&mut self, key: &'static str) -> Result<String, ConfigError> {
        match self.require(key)?.as_str() {
            Some(text) if !text.is_empty() => Ok(text.to_owned()),
            _ => Err(error(&self.path_of(key), "expected a text".to_owned())),
        }
    }

    /// A secret that goes into a header.
    pub(super) fn optional_secret(
        &mut self,
        key: &'static str,
    ) -> Result<Option<String>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let is_visible = |text: &&str| {
            !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
        };
        match value.as_str().filter(is_visible) {
            Some(text) => Ok(Some(text.to_owned())),
            None => {
                let problem = "expected a text of visible characters".to_owned();
                Err(error(&self.path_of(key), problem))
            }
        }
    }

    pub(super) fn text(&mut self, key: &'static str) -> Result<String, ConfigError> {
        let value = self.require(key)?;
        match value.as_str() {
            Some(text) if !text.is_empty() => Ok(text.to_owned()),
            _ => self.wrong(key, "a text", value),
        }
    }

    pub(super) fn optional_text(
        &mut self,
        key: &'static str,
    ) -> Result<Option<String>, ConfigError> {
        if self.take(key).is_none() { Ok(None) } else { self.text(key).map(Some) }
    }

    /// A header's name, in lower case as Envoy has them.
    pub(super) fn header(&mut self, key: &'static str) -> Result<String, ConfigError> {
        let name = self.text(key)?.to_ascii_lowercase();
        let token = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if name.bytes().all(token) {
            return Ok(name);
        }
        self.wrong(key, "a header name", &name.into())
    }

    pub(super) fn optional_header(
        &mut self,
        key: &'static str,
    ) -> Result<Option<String>, ConfigError> {
        if self.take(key).is_none() { Ok(None) } else { self.header(key).map(Some) }
    }

    /// One of these words, the first unless it is said.
    pub(super) fn one_of<T: Copy>(
        &mut self,
        key: &'static str,
        words: &[(&str, T)],
    ) -> Result<T, ConfigError> {
        let value = self.take(key);
        let word = match value {
            None => words.first(),
            Some(value) => words.iter().find(|(word, _)| value.as_str() == Some(word)),
        };
        if let Some((_, meaning)) = word {
            return Ok(*meaning);
        }
        let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        self.wrong(key, &format!("one of {}", words.join(", ")), value.unwrap_or(&Value::Null))
    }

    /// A switch that is off unless it is said.
    pub(super) fn switch(&mut self, key: &'static str) -> Result<bool, ConfigError> {
        self.switch_or(key, false)
    }

    pub(super) fn switch_or(
        &mut self,
        key: &'static str,
        default: bool,
    ) -> Result<bool, ConfigError> {
        match self.take(key) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(found) => self.wrong(key, "true or false", found),
        }
    }

    pub(super) fn texts(&mut self, key: &'static str) -> Result<Option<Vec<String>>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let texts = value.as_array().map(|items| {
            let text = |item: &Value| item.as_str().filter(|t| !t.is_empty()).map(str::to_owned);
            items.iter().map(text).collect::<Option<Vec<_>>>()
        });
        match texts.flatten() {
            Some(texts) => Ok(Some(texts)),
            None => self.wrong(key, "a list of texts", value),
        }
    }

    pub(super) fn list<T>(
        &mut self,
        key: &'static str,
        read: fn(&mut Fields<'_>) -> Result<T, ConfigError>,
    ) -> Result<Vec<T>, ConfigError> {
        let value = self.require(key)?;
        let Some(items) = value.as_array().filter(|items| !items.is_empty()) else {
            return self.wrong(key, "a list with at least one item", value);
        };
        let path = self.path_of(key);
        let read_item = |(index, item): (usize, &Value)| {
            let mut fields = Fields::new(&format!("{path}[{index}]"), item)?;
            let item = read(&mut fields)?;
            fields.finish()?;
            Ok(item)
        };
        items.iter().enumerate().map(read_item).collect()
    }

    pub(super) fn number(
        &mut self,
        key: &'static str,
        default: f64,
        least: f64,
        most: f64,
    ) -> Result<f64, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(default) };
        match value.as_f64() {
            Some(number) if (least..=most).contains(&number) => Ok(number),
            _ => self.wrong(key, &format!("a number from {least} to {most}"), value),
        }
    }

    pub(super) fn optional_number(
        &mut self,
        key: &'static str,
        least: f64,
        most: f64,
    ) -> Result<Option<f64>, ConfigError> {
        if self.take(key).is_none() {
            Ok(None)
        } else {
            self.number(key, least, least, most).map(Some)
        }
    }

    pub(super) fn signed(
        &mut self,
        key: &'static str,
        default: i64,
        least: i64,
        most: i64,
    ) -> Result<i64, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(default) };
        match value.as_i64() {
            Some(number) if (least..=most).contains(&number) => Ok(number),
            _ => self.wrong(key, &format!("a whole number from {least} to {most}"), value),
        }
    }

    pub(super) fn integer(
        &mut self,
        key: &'static str,
        default: u32,
        least: u32,
        most: u32,
    ) -> Result<u64, ConfigError> {
        let number = self.signed(key, default.into(), least.into(), most.into())?;
        Ok(number.unsigned_abs())
    }

    pub(super) fn millis(
        &mut self,
        key: &'static str,
        default: u32,
        least: u32,
        most: u32,
    ) -> Result<Duration, ConfigError> {
        self.integer(key, default, least, most).map(Duration::from_millis)
    }

    pub(super) fn block_size(
        &mut self,
        key: &'static str,
        default: u32,
    ) -> Result<BlockSize, ConfigError> {
        let size = self.integer(key, default, 1, 1 << 16)?;
        let size = u32::try_from(size).ok().and_then(BlockSize::new);
        size.ok_or_else(|| error(&self.path_of(key), "expected a positive number".to_owned()))
    }
}
