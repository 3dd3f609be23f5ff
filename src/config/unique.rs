//! JSON of which every key of an object is there once: of two values for one option, one would be ignored in silence.
//!
//! It knows no option, and nothing of what a value may be.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::fmt;

/// A value as it was read.
pub(super) struct Unique(pub(super) Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut read = Vec::new();
        while let Some(Unique(item)) = items.next_element()? {
            read.push(item);
        }
        Ok(Value::Array(read))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut read = Map::new();
        while let Some(key) = fields.next_key::<String>()? {
            if read.contains_key(&key) {
                let key = super::fields::shown(&key.into());
                return Err(A::Error::custom(format_args!("{key} is there twice")));
            }
            let Unique(value) = fields.next_value()?;
            read.insert(key, value);
        }
        Ok(Value::Object(read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_has_no_key_twice_is_read_as_ever() {
        for json in [
            "null",
            "[true, false, -1, 18446744073709551615, 0.1, 1e300, \"é\\n\", [], {}]",
            r#"{"b": {"a": [{"a": 1}, {"a": 2}]}, "a": null}"#,
            "[[[]",
            "{\"a\": 1e999}",
            "[1] 2",
        ] {
            let read = serde_json::from_str::<Unique>(json).map(|Unique(value)| value.to_string());
            let expected = serde_json::from_str::<Value>(json).map(|value| value.to_string());
            let said = |error: serde_json::Error| error.to_string();
            assert_eq!(read.map_err(said), expected.map_err(said), "{json}");
        }
    }

    #[test]
    fn a_key_that_is_there_twice_is_named() {
        for json in [r#"{"a": 1, "a": 1}"#, r#"[{"b": {"a": null, "\u0061": 1}}]"#] {
            let error = serde_json::from_str::<Unique>(json).map(|_| ()).unwrap_err();
            assert!(error.to_string().starts_with("\"a\" is there twice at line 1"), "{error}");
        }
    }
}
