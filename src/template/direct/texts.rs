//! Filters and methods, mostly of texts.

use super::program::{Filter, Method, Test};
use super::value::{Text, Value};
use super::{Beyond, Here, operators};
use crate::template::methods::strip;
use crate::template::python::Dumps;

/// What a filter makes of a value.
pub(super) fn filter<'a>(
    filter: Filter,
    value: &Value<'a>,
    arguments: &[Value<'a>],
) -> Here<Value<'a>> {
    Ok(match (filter, arguments) {
        (Filter::Length, []) => Value::count(match value {
            Value::Text(text) => text.as_str().chars().count(),
            Value::Object(fields) => fields.len(),
            value => value.items()?.len(),
        }),
        (Filter::Trim, []) => stripped(value, None, true, true)?,
        (Filter::ToJson(indent), []) => {
            Value::made(dumps(indent).write(&value.for_the_library()?).map_err(|_| Beyond)?)
        }
        (Filter::TextToJoin, []) => value.text().map(|_| value.clone())?,
        (Filter::String, []) => match value {
            Value::Text(_) => value.clone(),
            value => Value::made(operators::printed(value)?),
        },
        (Filter::Default, [otherwise]) => {
            if let Value::Undefined = value { otherwise } else { value }.clone()
        }
        (Filter::Default, [otherwise, Value::Bool(true)]) => {
            if value.is_true()? { value } else { otherwise }.clone()
        }
        (Filter::Items, []) => match value {
            Value::Object(_) => items(value)?,
            _ => return Err(Beyond),
        },
        _ => return Err(Beyond),
    })
}

/// `tojson`, where it is told nothing else.
fn dumps(indent: Option<usize>) -> Dumps {
    Dumps {
        ensure_ascii: false,
        item_separator: if indent.is_some() { "," } else { ", " }.to_owned(),
        indent: indent.map(|width| " ".repeat(width)),
        key_separator: ": ".to_owned(),
        sort_keys: false,
    }
}

/// What a method of a value returns.
pub(super) fn method<'a>(
    method: Method,
    value: &Value<'a>,
    arguments: &[Value<'a>],
) -> Here<Value<'a>> {
    Ok(match (method, arguments) {
        (Method::Strip { start, end }, []) => stripped(value, None, start, end)?,
        (Method::Strip { start, end }, [chars]) => {
            stripped(value, Some(chars.text()?), start, end)?
        }
        (Method::StartsWith, [wanted]) => Value::Bool(value.text()?.starts_with(wanted.text()?)),
        (Method::EndsWith, [wanted]) => Value::Bool(value.text()?.ends_with(wanted.text()?)),
        (Method::Split, [separator]) => split(value, separator.text()?)?,
        (Method::Get, [name] | [name, _]) => match value {
            // A field of that name would be called in the method's place.
            Value::Object(fields) if !fields.contains_key("get") => {
                let otherwise = arguments.get(1).cloned().unwrap_or(Value::Null);
                fields.get(name.text()?).map_or(otherwise, Value::of)
            }
            _ => return Err(Beyond),
        },
        (Method::Items, []) => match value {
            Value::Object(fields) if !fields.contains_key("items") => items(value)?,
            _ => return Err(Beyond),
        },
        _ => return Err(Beyond),
    })
}

/// Whether a value is what a test says.
pub(super) fn test(test: Test, value: &Value<'_>, arguments: &[Value<'_>]) -> Here<bool> {
    if let Value::Opaque | Value::Macro(_) | Value::Namespace(_) = value {
        return match test {
            Test::Defined => Ok(true),
            Test::Undefined | Test::Null => Ok(false),
            _ => Err(Beyond),
        };
    }
    Ok(match (test, arguments) {
        (Test::Defined, []) => !matches!(value, Value::Undefined),
        (Test::Undefined, []) => matches!(value, Value::Undefined),
        (Test::Null, []) => matches!(value, Value::Null),
        (Test::String, []) => matches!(value, Value::Text(_)),
        (Test::Mapping, []) => matches!(value, Value::Object(_)),
        (Test::HasItems, []) => !matches!(value, Value::Null | Value::Bool(_) | Value::Number(_)),
        (Test::Number, []) => matches!(value, Value::Number(_) | Value::Bool(_)),
        (Test::Bool, []) => matches!(value, Value::Bool(_)),
        (Test::True, []) => matches!(value, Value::Bool(true)),
        (Test::False, []) => matches!(value, Value::Bool(false)),
        (Test::Equal, [other]) => operators::equal(value, other)?,
        (Test::Unequal, [other]) => !operators::equal(value, other)?,
        (Test::In, [all]) => operators::contains(all, value)?,
        _ => return Err(Beyond),
    })
}

fn stripped<'a>(value: &Value<'a>, chars: Option<&str>, start: bool, end: bool) -> Here<Value<'a>> {
    let Value::Text(text) = value else { return Err(Beyond) };
    let part = text.part(&|text| {
        let ended = strip(text, chars, false, end);
        let both = strip(ended, chars, start, false);
        (ended.len() - both.len(), ended.len())
    });
    Ok(Value::Text(part))
}

fn split<'a>(value: &Value<'a>, separator: &str) -> Here<Value<'a>> {
    let Value::Text(text) = value else { return Err(Beyond) };
    if separator.is_empty() {
        return Err(Beyond);
    }
    let mut parts = Vec::new();
    let mut start = 0;
    for part in text.as_str().split(separator) {
        let end = start + part.len();
        parts.push(Value::Text(text.part(&|_| (start, end))));
        start = end + separator.len();
    }
    Ok(Value::List(parts.into()))
}

/// The pairs of an object.
fn items<'a>(value: &Value<'a>) -> Here<Value<'a>> {
    let Value::Object(fields) = value else { return Err(Beyond) };
    let pair = |(key, json): (&'a String, _)| {
        Value::List([Value::Text(Text::Plain(key)), Value::of(json)].into())
    };
    Ok(Value::List(fields.iter().map(pair).collect()))
}
