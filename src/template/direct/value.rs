//! A value while a template is evaluated: the client's, by reference, or what came of it.

use super::{Beyond, Here};
use crate::template::python::List;
use crate::template::values;
use minijinja::value::Value as LibraryValue;
use serde_json::{Map, Value as Json};
use std::rc::Rc;

/// A text: the client's, the template's, or one that was made.
#[derive(Clone)]
pub(super) enum Text<'a> {
    Plain(&'a str),
    Made(Rc<str>),
}

#[derive(Clone)]
pub(super) enum Value<'a> {
    Undefined,
    Null,
    Bool(bool),
    Number(i64),
    Text(Text<'a>),
    Object(&'a Map<String, Json>),
    Items(&'a [Json]),
    List(Rc<[Value<'a>]>),
    /// By its place.
    Namespace(usize),
    Macro(usize),
    /// What nothing is done with here: floats, functions.
    Opaque,
}

impl Text<'_> {
    pub(super) fn as_str(&self) -> &str {
        match self {
            Self::Plain(text) => text,
            Self::Made(text) => text,
        }
    }
}

impl<'a> Text<'a> {
    /// A part of it, which needs no copy where it is borrowed itself.
    pub(super) fn part(&self, of: &dyn Fn(&str) -> (usize, usize)) -> Self {
        match self {
            Self::Plain(text) => {
                let (start, end) = of(text);
                Self::Plain(text.get(start..end).unwrap_or_default())
            }
            Self::Made(text) => {
                let (start, end) = of(text);
                Self::Made(Rc::from(text.get(start..end).unwrap_or_default()))
            }
        }
    }
}

impl<'a> Value<'a> {
    pub(super) fn of(json: &'a Json) -> Self {
        match json {
            Json::Null => Self::Null,
            Json::Bool(value) => Self::Bool(*value),
            Json::Number(number) => number.as_i64().map_or(Self::Opaque, Self::Number),
            Json::String(text) => Self::Text(Text::Plain(text)),
            Json::Array(items) => Self::Items(items),
            Json::Object(fields) => Self::Object(fields),
        }
    }

    pub(super) fn of_option(json: Option<&'a Json>) -> Self {
        json.map_or(Self::Undefined, Self::of)
    }

    pub(super) fn made(text: String) -> Self {
        Self::Text(Text::Made(text.into()))
    }

    pub(super) fn count(count: usize) -> Self {
        i64::try_from(count).map_or(Self::Opaque, Self::Number)
    }

    pub(super) fn is_true(&self) -> Here<bool> {
        Ok(match self {
            Self::Undefined | Self::Null => false,
            Self::Bool(value) => *value,
            Self::Number(number) => *number != 0,
            Self::Text(text) => !text.as_str().is_empty(),
            Self::Object(fields) => !fields.is_empty(),
            Self::Items(items) => !items.is_empty(),
            Self::List(items) => !items.is_empty(),
            Self::Namespace(_) | Self::Macro(_) | Self::Opaque => return Err(Beyond),
        })
    }

    pub(super) fn text(&self) -> Here<&str> {
        match self {
            Self::Text(text) => Ok(text.as_str()),
            _ => Err(Beyond),
        }
    }

    pub(super) fn number(&self) -> Here<i64> {
        match self {
            Self::Number(number) => Ok(*number),
            _ => Err(Beyond),
        }
    }

    /// Its items, one at a time by their place.
    pub(super) fn items(&self) -> Here<Items<'a>> {
        Ok(match self {
            Self::Undefined => Items::Json(&[]),
            Self::Items(items) => Items::Json(items),
            Self::List(items) => Items::List(Rc::clone(items)),
            Self::Object(fields) => {
                let keys = fields.keys().map(|key| Value::Text(Text::Plain(key)));
                Items::List(keys.collect())
            }
            _ => return Err(Beyond),
        })
    }

    /// What it is in the library.
    pub(super) fn for_the_library(&self) -> Here<LibraryValue> {
        Ok(match self {
            Self::Null => LibraryValue::from(()),
            Self::Bool(value) => LibraryValue::from(*value),
            Self::Number(number) => LibraryValue::from(*number),
            Self::Text(text) => LibraryValue::from(text.as_str()),
            Self::Object(fields) => values::dict((*fields).clone()).map_err(|_| Beyond)?,
            Self::Items(items) => {
                let items = items.iter().cloned().map(values::value).collect::<Result<_, _>>();
                LibraryValue::from_object(List(items.map_err(|_| Beyond)?))
            }
            _ => return Err(Beyond),
        })
    }
}

/// What a loop goes over.
#[derive(Clone)]
pub(super) enum Items<'a> {
    Json(&'a [Json]),
    List(Rc<[Value<'a>]>),
}

impl<'a> Items<'a> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Json(items) => items.len(),
            Self::List(items) => items.len(),
        }
    }

    pub(super) fn get(&self, place: usize) -> Value<'a> {
        match self {
            Self::Json(items) => Value::of_option(items.get(place)),
            Self::List(items) => items.get(place).cloned().unwrap_or(Value::Undefined),
        }
    }
}
