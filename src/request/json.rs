//! JSON, read within a budget.
//!
//! A body is a client's. Reading all of it into a tree can cost thirty times its size (`[1,1,1,...`), so only
//! the fields that matter become values, the rest is skipped without being stored, and the values that are
//! stored are counted. It does not judge what the fields hold.

use super::RequestError;
use serde::Deserializer as _;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::cell::Cell;
use std::fmt;

/// How many JSON values one body may make us store. A value costs some 200 ns here and a microsecond until it is
/// rendered, none of which can be interrupted; a long agent session with a hundred tools has under 20,000. Half would
/// still pass those; double would hold a worker for more than 50 ms.
pub(crate) const MAX_VALUES: usize = 50_000;

/// Python's `json.loads` drops one from bytes, and so does the engine.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Counts down the values that may still be stored.
pub(super) struct Budget {
    left: Cell<usize>,
}

impl Budget {
    fn spend<E: Error>(&self) -> Result<(), E> {
        match self.left.get().checked_sub(1) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => Err(E::custom("too many values")),
        }
    }

    /// Refuses what has more of something than may be stored.
    pub(super) fn refuse<E: Error>(&self) -> E {
        self.left.set(0);
        E::custom("too many values")
    }

    fn is_spent(&self) -> bool {
        self.left.get() == 0
    }
}

/// What one API takes from a body's top level.
pub(super) trait Fields {
    /// Reads the value of `key` from `map`, or skips it.
    fn take<'de, A: MapAccess<'de>>(
        &mut self,
        key: &str,
        map: &mut A,
        budget: &Budget,
    ) -> Result<(), A::Error>;
}

/// Reads the top level of `body` into `fields`.
pub(super) fn read<F: Fields>(body: &[u8], fields: &mut F) -> Result<(), RequestError> {
    let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    let budget = Budget { left: Cell::new(MAX_VALUES) };
    let entered = Cell::new(false);
    let mut json = serde_json::Deserializer::from_slice(body);
    let result = json
        .deserialize_any(TopLevel { fields, budget: &budget, entered: &entered })
        .and_then(|()| json.end());
    result.map_err(|error| match error.classify() {
        _ if budget.is_spent() => RequestError::TooManyValues,
        serde_json::error::Category::Data if !entered.get() => RequestError::NotAnObject,
        serde_json::error::Category::Data => RequestError::NoPrompt,
        _ => RequestError::Json,
    })
}

/// Whether nothing is missing at the end of a body.
pub fn is_complete(body: &[u8]) -> bool {
    let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    serde_json::from_slice::<IgnoredAny>(body).is_ok()
}

struct TopLevel<'a, F> {
    fields: &'a mut F,
    budget: &'a Budget,
    entered: &'a Cell<bool>,
}

impl<'de, F: Fields> Visitor<'de> for TopLevel<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.entered.set(true);
        while let Some(key) = map.next_key::<String>()? {
            // Each costs as much as a value, kept or not.
            self.budget.spend()?;
            self.fields.take(&key, &mut map, self.budget)?;
        }
        Ok(())
    }
}

/// Skips the value of a field that nobody asked for.
pub(super) fn skip<'de, A: MapAccess<'de>>(map: &mut A) -> Result<(), A::Error> {
    map.next_value::<IgnoredAny>().map(|_| ())
}

/// A field of an object. Messages have few: to compare their names is quicker than to hash one.
pub(crate) fn field<'a>(fields: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    match fields.len() {
        0..=8 => fields.iter().find(|(known, _)| *known == name).map(|(_, value)| value),
        _ => fields.get(name),
    }
}

/// Reads a [`Value`], counting.
pub(super) struct Counted<'a>(pub(super) &'a Budget);

impl<'de> DeserializeSeed<'de> for Counted<'_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        self.0.spend()?;
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Counted<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(Counted(self.0))? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        // A repeated key keeps its first place and its last value, as in a Python dict.
        let mut fields = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(Counted(self.0))?;
            fields.insert(key, value);
        }
        Ok(Value::Object(fields))
    }
}

/// A JSON text inside a body, as Python's reader would take it.
#[derive(Debug)]
pub(crate) enum JsonText {
    /// Both readers agree.
    Value(Value),
    /// Neither can read it.
    Invalid,
    /// Only Python's reader can: `NaN`, half a surrogate pair, a number or a nesting beyond our own limits.
    OnlyPython,
    /// It has more values than were left.
    TooMany,
}

/// Reads a JSON text. All texts of a body together may have as many values as the body itself: those that are `left`.
pub(crate) fn json_text(text: &str, left: &Cell<usize>) -> JsonText {
    let budget = Budget { left: Cell::new(left.get()) };
    let mut json = serde_json::Deserializer::from_str(text);
    let result = Counted(&budget).deserialize(&mut json).and_then(|value| {
        json.end()?;
        Ok(value)
    });
    left.set(budget.left.get());
    match result {
        Ok(value) => JsonText::Value(value),
        Err(_) if budget.is_spent() => JsonText::TooMany,
        Err(_) if may_be_python(text) => JsonText::OnlyPython,
        Err(error) => {
            // The reader does not tell its limits from syntax errors but by these words.
            let error = error.to_string();
            let is_limit =
                ["recursion limit", "out of range"].iter().any(|words| error.contains(words));
            if is_limit { JsonText::OnlyPython } else { JsonText::Invalid }
        }
    }
}

fn may_be_python(text: &str) -> bool {
    ["NaN", "Infinity", "\\ud", "\\uD"].iter().any(|word| text.contains(word))
}

#[cfg(test)]
mod tests {
    use super::super::{Api, Input, parse};
    use super::*;

    #[track_caller]
    fn check(body: &[u8], expected: Result<(), RequestError>) {
        assert_eq!(parse(Api::Chat, body).map(|_| ()), expected);
    }

    fn chat(before: &str, content: &str) -> Vec<u8> {
        format!(r#"{before}{{"messages": [{{"role": "user", "content": {content}}}]}}"#)
            .into_bytes()
    }

    #[test]
    fn broken_bodies_are_errors() {
        check(b"", Err(RequestError::Json));
        check(b"{\"messages\":[", Err(RequestError::Json));
        check(b"[]", Err(RequestError::NotAnObject));
        check(b"5", Err(RequestError::NotAnObject));
        check(&chat("", "\"\\ud83d b\""), Err(RequestError::Json));
        check(
            b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\"}]}",
            Err(RequestError::Json),
        );
        let mut trailing = chat("", "\"x\"");
        trailing.extend(b" x");
        check(&trailing, Err(RequestError::Json));
    }

    #[test]
    fn a_beginning_is_not_taken_for_all() {
        let body = chat("\u{feff} ", "\"x\"");
        assert!(is_complete(&body));
        for end in 0..body.len() {
            assert!(!is_complete(&body[..end]), "{end}");
        }
    }

    #[test]
    fn byte_order_mark_and_white_space_are_dropped() {
        check(&chat("\u{feff}", "\"x\""), Ok(()));
        check(&chat(" \r\n\t", "\"x\""), Ok(()));
    }

    #[test]
    fn nesting_without_end_is_an_error_where_it_matters_and_skipped_where_not() {
        let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        check(&chat("", &deep), Err(RequestError::Json));
        let body = format!(r#"{{"x": {deep}, "messages": [{{"role": "user", "content": "x"}}]}}"#);
        check(body.as_bytes(), Ok(()));
    }

    #[test]
    fn values_are_counted_but_only_those_kept() {
        let many = format!("[{}1]", "1,".repeat(MAX_VALUES));
        check(&chat("", &many), Err(RequestError::TooManyValues));
        let body = format!(r#"{{"x": {many}, "messages": [{{"role": "user", "content": "x"}}]}}"#);
        check(body.as_bytes(), Ok(()));
    }

    #[test]
    fn keys_without_end_are_refused() {
        let many = "\"x\": 1, ".repeat(MAX_VALUES);
        let body = format!(r#"{{{many}"messages": [{{"role": "user", "content": "x"}}]}}"#);
        check(body.as_bytes(), Err(RequestError::TooManyValues));
    }

    #[test]
    fn twenty_megabytes_of_text_are_one_value() {
        let text = "a b\\n".repeat(4 << 20);
        check(&chat("", &format!("\"{text}\"")), Ok(()));
    }

    #[test]
    fn last_of_repeated_keys_wins_in_the_first_ones_place() {
        let body = br#"{"messages": [], "messages": [{"role": "a", "content": "x", "role": "b"}]}"#;
        let Ok(prompt) = parse(Api::Chat, body) else { panic!("no prompt") };
        let Input::Chat(chat) = prompt.input else { panic!("not a chat") };
        let message = serde_json::to_string(&chat.messages).expect("JSON");
        assert_eq!(message, r#"[{"role":"b","content":"x"}]"#);
    }

    #[test]
    fn texts_only_python_reads_are_told_apart() {
        #[track_caller]
        fn check(text: &str, expected: &str) {
            let read = match json_text(text, &Cell::new(MAX_VALUES)) {
                JsonText::Value(value) => value.to_string(),
                JsonText::Invalid => "invalid".to_owned(),
                JsonText::OnlyPython => "only Python".to_owned(),
                JsonText::TooMany => "too many".to_owned(),
            };
            assert_eq!(read, expected, "{text}");
        }
        check(r#" {"a": 1} "#, r#"{"a":1}"#);
        check("{not json", "invalid");
        check("{} {}", "invalid");
        check(r#"{"a": NaN}"#, "only Python");
        check(r#"{"a": 1e999}"#, "only Python");
        check(r#"{"a": "\ud83d"}"#, "only Python");
        check(&"[".repeat(200), "only Python");
        check(&format!("[{}1]", "1,".repeat(MAX_VALUES)), "too many");
    }

    #[test]
    fn texts_of_one_body_share_their_values() {
        let (text, left) = (format!("[{}1]", "1,".repeat(998)), Cell::new(2500));
        let read = || json_text(&text, &left);
        assert!(matches!(read(), JsonText::Value(_)) && matches!(read(), JsonText::Value(_)));
        assert_eq!(left.get(), 500);
        assert!(matches!(read(), JsonText::TooMany) && matches!(read(), JsonText::TooMany));
        assert!(matches!(json_text("", &left), JsonText::TooMany), "nothing is left");
    }
}
