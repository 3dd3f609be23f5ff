//! Values as Python writes them: `str`, `repr` and `json.dumps`.
//!
//! A chat template's author saw Python's output, and the model was trained on it: one space after a colon, `True` for
//! `true`, `100000.0` for `1e5`. It does not parse anything.

use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::{self, Write as _};
use std::sync::Arc;

/// How deep a value may nest. JSON bodies end at 127; templates build little on top. Each level takes some hundred
/// bytes of a 1 MB stack.
const MAX_DEPTH: usize = 200;

/// A list, which prints as Python's.
#[derive(Debug)]
pub(super) struct List(pub(super) Vec<Value>);

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_str(f, &Value::from_dyn_object(Arc::clone(self)))
    }
}

/// A dict in the client's order, which prints as Python's.
#[derive(Debug)]
pub(super) struct Dict {
    entries: Vec<(Value, Value)>,
    /// Indices into `entries`, sorted by key: a client may send an object of any size, and a template may look up
    /// each of its keys.
    by_key: Vec<usize>,
}

impl Dict {
    pub(super) fn new(entries: Vec<(String, Value)>) -> Self {
        let mut by_key: Vec<usize> = (0..entries.len()).collect();
        by_key.sort_by_key(|&index| entries.get(index).map(|(key, _)| key.as_str()));
        let entries = entries.into_iter().map(|(key, value)| (Value::from(key), value)).collect();
        Self { entries, by_key }
    }

    fn entry(&self, index: usize) -> Option<(&str, &Value)> {
        let (key, value) = self.entries.get(index)?;
        Some((key.as_str()?, value))
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        let place = |&index: &usize| self.entry(index).map_or("", |(key, _)| key).cmp(key);
        let found = self.by_key.binary_search_by(place).ok()?;
        self.entry(*self.by_key.get(found)?).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.entries.iter().map(|(key, _)| key.clone()).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_str(f, &Value::from_dyn_object(Arc::clone(self)))
    }
}

/// `str(value)`, as a text of its own.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_str(&mut text, value)
        .map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot be printed"))?;
    Ok(text)
}

/// Whether a value is a namespace, which the library has as a map.
pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// A float that Python writes with an exponent. The library would write out its digits where texts are joined. No
/// template calculates with such a number of a client's.
#[derive(Debug)]
pub(super) struct Exponential(pub(super) f64);

impl Object for Exponential {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&float(self.0))
    }
}

/// `str(value)`.
pub(super) fn write_str(out: &mut dyn fmt::Write, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None if value.is_undefined() => Ok(()),
        None => write_repr(out, value, 0),
    }
}

/// `repr(value)`.
fn write_repr(out: &mut dyn fmt::Write, value: &Value, depth: usize) -> fmt::Result {
    if depth > MAX_DEPTH {
        return Err(fmt::Error);
    }
    match value.kind() {
        ValueKind::String => quote(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.write_char(open)?;
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                if count > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &item, depth + 1)?;
                count += 1;
            }
            if count == 1 && value.is_tuple() {
                out.write_char(',')?;
            }
            out.write_char(close)
        }
        ValueKind::Map if value.downcast_object_ref::<Dict>().is_some() || is_plain_map(value) => {
            out.write_char('{')?;
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &key, depth + 1)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            out.write_char('}')
        }
        ValueKind::Undefined => out.write_str("Undefined"),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.write_str(&float(number)),
            Err(_) => write!(out, "{value}"),
        },
        _ => write!(out, "{value}"),
    }
}

/// Whether a map is data, and not an object like `loop` or a namespace that only looks like one.
fn is_plain_map(value: &Value) -> bool {
    value.len().is_some() && value.try_iter().is_ok()
}

/// `repr` of a text. Which code points Python escapes depends on its Unicode tables; here it is the controls and
/// the separators, which covers what clients send.
fn quote(out: &mut dyn fmt::Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if !is_printable(c) => match u32::from(c) {
                code @ 0..=0xff => write!(out, "\\x{code:02x}")?,
                code @ 0x100..=0xffff => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)
}

fn is_printable(c: char) -> bool {
    let is_format = matches!(u32::from(c),
        0xad | 0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x180e | 0x200b..=0x200f | 0x202a..=0x202e
        | 0x2060..=0x206f | 0xfeff | 0xfff9..=0xfffb | 0xe0001 | 0xe0020..=0xe007f
        | 0xe000..=0xf8ff | 0xf0000..=0x10_ffff | 0xfffe | 0xffff);
    c == ' ' || !(c.is_control() || c.is_whitespace() || is_format)
}

/// `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf".to_owned() } else { "-inf".to_owned() };
    }
    let magnitude = number.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}

/// The arguments of `json.dumps`.
pub(super) struct Dumps {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) sort_keys: bool,
}

impl Dumps {
    /// `json.dumps(value)`.
    pub(super) fn write(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.value(&mut out, value, 0)?;
        Ok(out)
    }

    fn value(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "the value nests too deep"));
        }
        match value.kind() {
            ValueKind::String => self.text(out, value.as_str().unwrap_or_default()),
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::Seq | ValueKind::Iterable => return self.list(out, value, depth),
            ValueKind::Map => return self.dict(out, value, depth),
            kind => {
                if let Some(Exponential(number)) = value.downcast_object_ref() {
                    out.push_str(&float(*number));
                    return Ok(());
                }
                let detail = format!("{kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::BadSerialization, detail));
            }
        }
        Ok(())
    }

    fn list(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        out.push('[');
        let mut is_empty = true;
        for item in value.try_iter()? {
            if !is_empty {
                out.push_str(&self.item_separator);
            }
            self.line(out, depth + 1);
            self.value(out, &item, depth + 1)?;
            is_empty = false;
        }
        if !is_empty {
            self.line(out, depth);
        }
        out.push(']');
        Ok(())
    }

    fn dict(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        out.push('{');
        for (index, key) in keys.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.line(out, depth + 1);
            self.key(out, key)?;
            out.push_str(&self.key_separator);
            self.value(out, &value.get_item(key)?, depth + 1)?;
        }
        if !keys.is_empty() {
            self.line(out, depth);
        }
        out.push('}');
        Ok(())
    }

    fn key(&self, out: &mut String, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.text(out, key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                let mut text = String::new();
                self.value(&mut text, key, 0)?;
                self.text(out, &text);
            }
            kind => {
                let detail = format!("keys must be str, not {kind}");
                return Err(Error::new(ErrorKind::BadSerialization, detail));
            }
        }
        Ok(())
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn text(&self, out: &mut String, text: &str) {
        out.push('"');
        let mut rest = text;
        // What stands for itself is written at a stretch: a client's text of megabytes is written in one go.
        while let Some((plain, behind)) = rest
            .bytes()
            .position(|byte| self.escapes(byte))
            .and_then(|at| rest.split_at_checked(at))
        {
            out.push_str(plain);
            let mut chars = behind.chars();
            let Some(c) = chars.next() else { break };
            rest = chars.as_str();
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => escape(out, u16::try_from(u32::from(c)).unwrap_or_default()),
                c => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        escape(out, *unit);
                    }
                }
            }
        }
        out.push_str(rest);
        out.push('"');
    }

    /// Whether a character that begins with this byte is written as an escape.
    fn escapes(&self, byte: u8) -> bool {
        matches!(byte, b'"' | b'\\' | ..0x20) || self.ensure_ascii && byte > b'~'
    }
}

fn escape(out: &mut String, unit: u16) {
    // Writing to a String cannot fail.
    let _ = write!(out, "\\u{unit:04x}");
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(number) if number.is_nan() => "NaN".to_owned(),
        Ok(number) if number.is_infinite() => {
            if number > 0.0 {
                "Infinity".to_owned()
            } else {
                "-Infinity".to_owned()
            }
        }
        Ok(number) => float(number),
        Err(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_have_pythons_digits() {
        #[track_caller]
        fn check(number: f64, expected: &str) {
            assert_eq!(float(number), expected);
        }
        check(1e5, "100000.0");
        check(0.1, "0.1");
        check(-1.5, "-1.5");
        check(0.0001, "0.0001");
        check(0.00001, "1e-05");
        check(1.5e-7, "1.5e-07");
        check(9_999_999_999_999_998.0, "9999999999999998.0");
        check(1e16, "1e+16");
        check(1.25e100, "1.25e+100");
        check(5e-324, "5e-324");
        check(0.1 + 0.2, "0.30000000000000004");
        check(f64::NAN, "nan");
        check(f64::NEG_INFINITY, "-inf");
    }

    #[test]
    fn texts_are_quoted_as_repr_quotes_them() {
        #[track_caller]
        fn check(text: &str, expected: &str) {
            let mut out = String::new();
            quote(&mut out, text).expect("a String takes all");
            assert_eq!(out, expected);
        }
        check("a", "'a'");
        check("it's", "\"it's\"");
        check("it's \"so\"", "'it\\'s \"so\"'");
        check("\\ \n \r \t \0 \x7f", r"'\\ \n \r \t \x00 \x7f'");
        check("é東😀\u{a0}\u{200b}\u{e000}", r"'é東😀\xa0\u200b\ue000'");
    }

    /// As `json.dumps` does it, character by character.
    fn dumped(text: &str, ensure_ascii: bool) -> String {
        let mut out = String::new();
        for c in text.chars() {
            match c {
                '"' | '\\' => out.extend(['\\', c]),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || ensure_ascii && c > '~' => {
                    c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| escape(&mut out, *unit));
                }
                c => out.push(c),
            }
        }
        format!("\"{out}\"")
    }

    #[test]
    fn texts_at_a_stretch_are_those_written_by_characters() {
        let alphabet: Vec<char> =
            "ab \"\\\n\r\t\u{8}\u{c}\0\u{1f}~\u{7f}é東😀\u{2028}".chars().collect();
        let mut seed = 7u64;
        for round in 0..2000 {
            let text: String = (0..round % 40)
                .map(|_| {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    alphabet[(seed >> 33) as usize % alphabet.len()]
                })
                .collect();
            for ensure_ascii in [false, true] {
                let dumps = Dumps {
                    ensure_ascii,
                    indent: None,
                    item_separator: ", ".to_owned(),
                    key_separator: ": ".to_owned(),
                    sort_keys: false,
                };
                let written = dumps.write(&Value::from(text.as_str())).expect("a text");
                assert_eq!(written, dumped(&text, ensure_ascii), "{text:?}");
            }
        }
    }

    #[test]
    fn dicts_find_each_key_and_keep_their_order() {
        let names = ["b", "a", "", "zz", "c"];
        let entries = names.iter().map(|name| ((*name).to_owned(), Value::from(*name))).collect();
        let dict = Value::from_object(Dict::new(entries));
        for name in names {
            assert_eq!(dict.get_attr(name).ok(), Some(Value::from(name)), "{name}");
        }
        assert!(dict.get_attr("d").is_ok_and(|value| value.is_undefined()));
        assert_eq!(dict.to_string(), "{'b': 'b', 'a': 'a', '': '', 'zz': 'zz', 'c': 'c'}");
    }
}
