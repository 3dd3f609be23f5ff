//! What Hugging Face's Jinja environment has and minijinja has not, or has otherwise.

use super::python::{Dumps, List, write_str};
use super::{NOW, Raised, clock};
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

/// Adds filters, tests and functions.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.set_unknown_method_callback(method);
    env.set_formatter(|out, _, value| {
        write_str(out, value).map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot be printed"))
    });
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| text(value));
    env.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
        ) || value.is_undefined()
    });
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
}

fn text(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_str(&mut text, value)
        .map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot be printed"))?;
    Ok(text)
}

/// Python's string methods that `pycompat` lacks, then `pycompat`.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match (value.as_str(), name) {
        (Some(text), "rsplit") => rsplit(text, args),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit): (Option<&str>, Option<i64>) = minijinja::value::from_args(args)?;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    let mut rest = match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(_) => text,
        None => text.trim_end(),
    };
    while parts.len() < limit {
        let cut = match separator {
            Some(separator) => rest.rsplit_once(separator),
            None => rest.char_indices().rev().find(|(_, c)| c.is_whitespace()).map(|(at, c)| {
                let (head, tail) = rest.split_at_checked(at).unwrap_or((rest, ""));
                (head.trim_end(), tail.get(c.len_utf8()..).unwrap_or_default())
            }),
        };
        let Some((head, tail)) = cut else { break };
        if separator.is_none() && head.is_empty() {
            break;
        }
        parts.push(tail);
        rest = head;
    }
    if separator.is_some() || !rest.is_empty() {
        parts.push(if separator.is_none() { rest.trim_start() } else { rest });
    }
    parts.reverse();
    Ok(Value::from_object(List(parts.into_iter().map(Value::from).collect())))
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let ensure_ascii = ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = self::indent(indent.or(kwargs.get("indent")?))?;
    let separators = separators.or(kwargs.get("separators")?).filter(|value| !value.is_none());
    kwargs.assert_all_used()?;
    let (item_separator, key_separator) = match separators {
        Some(pair) => (part(&pair, 0)?, part(&pair, 1)?),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    Dumps { ensure_ascii, indent, item_separator, key_separator, sort_keys }.write(value)
}

fn part(separators: &Value, index: usize) -> Result<String, Error> {
    match separators.get_item_by_index(index)?.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(Error::new(ErrorKind::InvalidOperation, "separators must be two strings")),
    }
}

fn indent(indent: Option<Value>) -> Result<Option<String>, Error> {
    let Some(indent) = indent.filter(|value| !value.is_none()) else { return Ok(None) };
    if let Some(text) = indent.as_str() {
        return Ok(Some(text.to_owned()));
    }
    let width = i64::try_from(indent)?;
    Ok(Some(" ".repeat(usize::try_from(width.clamp(0, 16)).unwrap_or_default())))
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = text(message)?;
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(state: &mut State, format: &str) -> Result<String, Error> {
    let now = state.lookup(NOW).and_then(|now| u64::try_from(now).ok()).unwrap_or_default();
    clock::strftime(format, now)
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "strftime_now: unknown directive"))
}
