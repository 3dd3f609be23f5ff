//! What Hugging Face's Jinja environment has and minijinja has not, or has otherwise.
//!
//! Nothing here knows the time: `strftime_now` formats the one that the rendering was given.

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
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) => text.rsplitn(limit.saturating_add(1), separator).collect(),
        None => rsplit_at_white_space(text, limit),
    };
    parts.reverse();
    Ok(Value::from_object(List(parts.into_iter().map(Value::from).collect())))
}

/// Last part first. What is left when the limit is reached keeps the white space it starts with, as in Python.
fn rsplit_at_white_space(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end();
    while !rest.trim_start().is_empty() && parts.len() < limit {
        let start = rest.rfind(char::is_whitespace);
        let tail = match start {
            Some(start) => rest.get(start..).unwrap_or_default().trim_start(),
            None => rest,
        };
        parts.push(tail);
        rest = rest.strip_suffix(tail).unwrap_or_default().trim_end();
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    parts
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

#[cfg(test)]
mod tests {
    use crate::template::ChatTemplate;
    use std::collections::BTreeMap;

    /// Expected texts were printed by jinja2 3.1.6 with transformers' settings.
    #[track_caller]
    fn check(source: &str, expected: &str) {
        let x = r#"{"a": 1, "b": [true, null, "it's"], "f": 1e5, "g": 0.1, "u": "é<&>\u2028"}"#;
        let variables = serde_json::from_str(&format!(r#"{{"x": {x}}}"#)).expect("JSON");
        let template = ChatTemplate::compile(source, &BTreeMap::new()).expect(source);
        let rendered = template.render_variables(variables, 1_768_480_205);
        assert_eq!(rendered.as_deref(), Ok(expected), "{source}");
    }

    #[test]
    fn tojson_writes_as_json_dumps() {
        let all = "{\"a\": 1, \"b\": [true, null, \"it's\"], \"f\": 100000.0, \"g\": 0.1, \"u\": \"é<&>\u{2028}\"}";
        check("{{ x | tojson }}", all);
        check("{{ x.b | tojson(separators=(',', ':')) }}", "[true,null,\"it's\"]");
        check("{{ x.u | tojson(ensure_ascii=true) }}", "\"\\u00e9<&>\\u2028\"");
        check("{{ '😀' | tojson(true) }}", "\"\\ud83d\\ude00\"");
        check("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", "{\"a\": 2, \"b\": 1}");
        check(
            "{{ {'b': [1, []], 'a': {}} | tojson(indent=2) }}",
            "{\n  \"b\": [\n    1,\n    []\n  ],\n  \"a\": {}\n}",
        );
        check("{{ {1: 2, true: none} | tojson }}", "{\"1\": null}");
    }

    #[test]
    fn values_print_as_python_prints_them() {
        let all =
            "{'a': 1, 'b': [True, None, \"it's\"], 'f': 100000.0, 'g': 0.1, 'u': 'é<&>\\u2028'}";
        check("{{ x }}", all);
        check("{{ '' ~ x }}", all);
        check("{{ x | string }}", all);
        check("{{ x.b[0] }} {{ x.b[1] }} {{ x.b[2] }} {{ x.no }}", "True None it's ");
        check("{{ true ~ none ~ x.f }}", "TrueNone100000.0");
        check("{{ ['a', 'b\\n'] }}", r"['a', 'b\n']");
        check("{{ (1,) }} {{ (1, 2) }}", "(1,) (1, 2)");
    }

    #[test]
    fn none_is_not_iterable() {
        check("{{ x.b is iterable }} {{ x is iterable }} {{ 'a' is iterable }}", "True True True");
        check("{{ none is iterable }} {{ 1 is iterable }}", "False False");
        check("{{ x is mapping }} {{ x.b is mapping }} {{ x.b is sequence }}", "True False True");
    }

    #[test]
    fn rsplit_splits_from_the_right() {
        check("{{ 'a,b,c'.rsplit(',', 1) }}", "['a,b', 'c']");
        check("{{ 'a,b,c'.rsplit(',') }}", "['a', 'b', 'c']");
        check("{{ ' a  b c '.rsplit() }}", "['a', 'b', 'c']");
        check("{{ ' a  b c '.rsplit(none, 1) }}", "[' a  b', 'c']");
        check("{{ ''.rsplit() }} {{ ''.rsplit(',') }}", "[] ['']");
    }

    #[test]
    fn python_methods_work() {
        check("{{ x.items() | list | length }} {{ x.get('a') }} {{ x.get('z', 5) }}", "5 1 5");
        check("{{ ' a '.strip() }}{{ 'ab'.startswith('a') }}{{ 'a b'.split(' ')[-1] }}", "aTrueb");
    }

    #[test]
    fn now_is_the_callers() {
        check("{{ strftime_now('%d %b %Y') }}", "15 Jan 2026");
    }
}
