//! A JSON schema as the TypeScript that Harmony shows a model.
//!
//! It follows the library's reading, odd as it is in places: comments of several lines are marked on the first only, `anyOf`
//! and all it does not know are `any`. It writes, and does not check schemas.

use super::super::python::float as float_text;
use crate::template::TemplateError;
use crate::tokens::MAX_TEXT_BYTES;
use hashbrown::HashSet;
use serde_json::{Map, Value};

/// Spaces before the properties of an object in an object, and before the choices in one.
const IN_OBJECT: usize = 4;
const IN_CHOICE: usize = 3;

/// Writes the type that a schema describes.
pub(super) fn write(schema: &Value, out: &mut String) -> Result<(), TemplateError> {
    let mut writer = Writer { scanned: out.len(), last_null: None, out };
    writer.schema(schema, 0)
}

struct Writer<'o> {
    out: &'o mut String,
    /// Up to where `null` has been looked for, and where it stood last.
    scanned: usize,
    last_null: Option<usize>,
}

impl Writer<'_> {
    fn push(&mut self, texts: &[&str]) -> Result<(), TemplateError> {
        let length: usize = texts.iter().map(|text| text.len()).sum();
        if self.out.len().saturating_add(length) > MAX_TEXT_BYTES {
            return Err(TemplateError::Limit);
        }
        self.out.extend(texts.iter().copied());
        Ok(())
    }

    /// Spaces, then texts.
    fn line(&mut self, indent: usize, texts: &[&str]) -> Result<(), TemplateError> {
        if self.out.len().saturating_add(indent) > MAX_TEXT_BYTES {
            return Err(TemplateError::Limit);
        }
        self.out.extend(std::iter::repeat_n(' ', indent));
        self.push(texts)
    }

    fn schema(&mut self, schema: &Value, indent: usize) -> Result<(), TemplateError> {
        if let Some(choices) = schema.get("oneOf").and_then(Value::as_array) {
            return self.choices(choices, indent);
        }
        match schema.get("type") {
            Some(Value::Array(types)) if types.iter().any(Value::is_string) => {
                let types = types.iter().filter_map(Value::as_str);
                let types = types.map(|name| if name == "integer" { "number" } else { name });
                self.joined(types, "")
            }
            Some(Value::String(name)) => self.named(name, schema, indent),
            _ => self.push(&["any"]),
        }
    }

    fn named(&mut self, name: &str, schema: &Value, indent: usize) -> Result<(), TemplateError> {
        match name {
            "object" => self.object(schema, indent),
            "string" => {
                let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
                let mut values = values.filter_map(Value::as_str).peekable();
                match values.peek() {
                    Some(_) => self.joined(values, "\""),
                    None => self.push(&["string"]),
                }
            }
            "number" | "integer" => self.push(&["number"]),
            "boolean" => self.push(&["boolean"]),
            "array" => match schema.get("items") {
                Some(items) => {
                    self.schema(items, indent)?;
                    self.push(&["[]"])
                }
                None => self.push(&["Array<any>"]),
            },
            _ => self.push(&["any"]),
        }
    }

    fn joined<'v>(
        &mut self,
        values: impl Iterator<Item = &'v str>,
        quote: &str,
    ) -> Result<(), TemplateError> {
        for (at, value) in values.enumerate() {
            self.push(&[if at == 0 { "" } else { " | " }, quote, value, quote])?;
        }
        Ok(())
    }

    /// The type of a property or choice, with `null` where it may be that.
    fn nullable(&mut self, schema: &Value, indent: usize) -> Result<(), TemplateError> {
        let from = self.out.len();
        self.schema(schema, indent)?;
        let is_nullable = schema.get("nullable").and_then(Value::as_bool) == Some(true);
        if is_nullable && !self.has_null_since(from) {
            self.push(&[" | null"])?;
        }
        Ok(())
    }

    /// Whether the word stands somewhere in what was written from there on, names and comments included. No byte is looked
    /// at twice, however deep it lies.
    fn has_null_since(&mut self, from: usize) -> bool {
        const WORD: &str = "null";
        let unseen = self.scanned.saturating_sub(WORD.len() - 1);
        let unseen = self.out.floor_char_boundary(unseen);
        let found = self.out.get(unseen..).and_then(|unseen| unseen.rfind(WORD));
        self.last_null = found.map(|at| unseen + at).or(self.last_null);
        self.scanned = self.out.len();
        self.last_null.is_some_and(|at| at >= from)
    }

    /// `oneOf` where no property's name stands before it.
    fn choices(&mut self, choices: &[Value], indent: usize) -> Result<(), TemplateError> {
        for choice in choices {
            self.push(&["\n"])?;
            self.line(indent, &[" | "])?;
            self.nullable(choice, indent + IN_CHOICE)?;
            self.comment(text(choice, "description"), choice, Quotes::Always)?;
        }
        Ok(())
    }

    fn object(&mut self, schema: &Value, indent: usize) -> Result<(), TemplateError> {
        if let Some(description) = text(schema, "description") {
            self.line(indent, &["// ", description, "\n"])?;
        }
        self.push(&["{\n"])?;
        let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        let required: HashSet<&str> = required.filter_map(Value::as_str).collect();
        if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
            self.properties(properties, &required, indent)?;
        }
        self.line(indent, &["}"])
    }

    fn properties(
        &mut self,
        properties: &Map<String, Value>,
        required: &HashSet<&str>,
        indent: usize,
    ) -> Result<(), TemplateError> {
        for (name, schema) in properties {
            self.head(schema, indent)?;
            let mark = if required.contains(name.as_str()) { "" } else { "?" };
            if let Some(choices) = schema.get("oneOf").and_then(Value::as_array) {
                let is_above = self.above_choices(schema, choices, indent)?;
                self.line(indent, &[name, mark, ":\n"])?;
                self.property_choices(schema, choices, is_above, indent)?;
                continue;
            }
            self.line(indent, &[name, mark, ": "])?;
            self.nullable(schema, indent + IN_OBJECT)?;
            self.push(&[","])?;
            if schema.get("oneOf").is_none()
                && let Some(default) = schema.get("default")
            {
                self.push(&[" // "])?;
                self.default(default, schema, Quotes::UnlessEnum)?;
            }
            self.push(&["\n"])?;
        }
        Ok(())
    }

    /// The comments that any property has above it.
    fn head(&mut self, schema: &Value, indent: usize) -> Result<(), TemplateError> {
        if let Some(title) = text(schema, "title") {
            self.line(indent, &["// ", title, "\n"])?;
            self.line(indent, &["//\n"])?;
        }
        if let Some(description) = text(schema, "description")
            && schema.get("oneOf").is_none()
        {
            self.line(indent, &["// ", description, "\n"])?;
        }
        match schema.get("examples").and_then(Value::as_array) {
            Some(examples) if !examples.is_empty() => {
                self.line(indent, &["// Examples:\n"])?;
                for example in examples.iter().filter_map(Value::as_str) {
                    self.line(indent, &["// - \"", example, "\"\n"])?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The comments above a property of several choices; says whether its description is among them.
    fn above_choices(
        &mut self,
        schema: &Value,
        choices: &[Value],
        indent: usize,
    ) -> Result<bool, TemplateError> {
        let of_first = choices.first().and_then(|first| text(first, "description"));
        let description = text(schema, "description").filter(|own| of_first != Some(*own));
        if let Some(description) = description {
            self.line(indent, &["// ", description, "\n"])?;
        }
        if let Some(default) = schema.get("default") {
            self.line(indent, &["// "])?;
            self.default(default, schema, Quotes::UnlessEnum)?;
            self.push(&["\n"])?;
        }
        Ok(description.is_some())
    }

    fn property_choices(
        &mut self,
        schema: &Value,
        choices: &[Value],
        is_described: bool,
        indent: usize,
    ) -> Result<(), TemplateError> {
        for (at, choice) in choices.iter().enumerate() {
            self.line(indent, &[" | "])?;
            self.nullable(choice, indent + IN_CHOICE)?;
            let description = text(choice, "description").filter(|own| {
                !(at == 0 && is_described) && text(schema, "description") != Some(own)
            });
            self.comment(description, choice, Quotes::UnlessEnum)?;
            self.push(&["\n"])?;
        }
        self.line(indent, &[",\n"])
    }

    /// A choice's own comment, behind it.
    fn comment(
        &mut self,
        description: Option<&str>,
        schema: &Value,
        quotes: Quotes,
    ) -> Result<(), TemplateError> {
        let default = schema.get("default");
        if description.is_none() && default.is_none() {
            return Ok(());
        }
        self.push(&[" // ", description.unwrap_or_default()])?;
        if let Some(default) = default {
            self.push(&[if description.is_some() { " " } else { "" }])?;
            self.default(default, schema, quotes)?;
        }
        Ok(())
    }

    fn default(
        &mut self,
        default: &Value,
        schema: &Value,
        quotes: Quotes,
    ) -> Result<(), TemplateError> {
        let is_enum = schema.get("enum").and_then(Value::as_array).is_some_and(|e| !e.is_empty());
        match default.as_str() {
            Some(text) if !is_enum => self.push(&["default: \"", text, "\""]),
            Some(text) if quotes == Quotes::UnlessEnum => self.push(&["default: ", text]),
            _ => self.push(&["default: ", &as_the_library_reads(default)?.to_string()]),
        }
    }
}

/// Whether the default of an enum has quotes: it depends on where the schema stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quotes {
    Always,
    UnlessEnum,
}

fn text<'v>(schema: &'v Value, name: &str) -> Option<&'v str> {
    schema.get(name)?.as_str()
}

/// A value as the engine's library reads it from the JSON that Python writes: its reader puts a float together from digits
/// and a power of ten, which is off in the last place for some. `-0` is an integer in Python, which keeps no sign, and a
/// float in our reader.
fn as_the_library_reads(value: &Value) -> Result<Value, TemplateError> {
    Ok(match value {
        Value::Number(number) if number.is_f64() => match number.as_f64() {
            Some(float) if float == 0.0 && float.is_sign_negative() => {
                return Err(TemplateError::Number);
            }
            float => Value::from(float.and_then(put_together)),
        },
        Value::Array(values) => {
            Value::Array(values.iter().map(as_the_library_reads).collect::<Result<_, _>>()?)
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| {
                as_the_library_reads(value).map(|value| (name.clone(), value))
            };
            Value::Object(fields.iter().map(field).collect::<Result<_, _>>()?)
        }
        value => value.clone(),
    })
}

/// A float from its digits, times or by a power of ten.
fn put_together(float: f64) -> Option<f64> {
    let text = float_text(float.abs());
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits: u64 = format!("{whole}{fraction}").parse().ok()?;
    let exponent =
        exponent.parse::<i32>().ok()?.checked_sub(i32::try_from(fraction.len()).ok()?)?;
    let power = |exponent: u32| format!("1e{exponent}").parse::<f64>().ok();
    let (mut read, mut left) = (digits as f64, exponent);
    while left < -308 {
        read /= power(308)?;
        left += 308;
    }
    read = if left < 0 {
        read / power(left.unsigned_abs())?
    } else {
        read * power(left.unsigned_abs())?
    };
    Some(if float.is_sign_negative() { -read } else { read })
}
