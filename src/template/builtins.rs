//! What Hugging Face's Jinja environment has and minijinja has not, or has otherwise.
//!
//! Nothing here knows the time: `strftime_now` formats the one that the rendering was given.

use super::python::{Dumps, is_namespace, text, write_str};
use super::{NOW, Raised, clock, filters, methods};
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

/// Adds filters, tests and functions.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _, value| {
        write_str(out, value).map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot be printed"))
    });
    env.add_filter("tojson", tojson);
    filters::add_to(env);
    env.add_test("iterable", |value: &Value| {
        has_items(value) || value.kind() == ValueKind::Iterable && !is_namespace(value)
    });
    env.add_test("sequence", has_items);
    env.add_test("mapping", |value: &Value| value.kind() == ValueKind::Map && !is_namespace(value));
    env.add_test("callable", |value: &Value| {
        value.is_undefined() || value.kind() == ValueKind::Plain
    });
    env.add_function("namespace", namespace);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
}

/// Whether Python finds `len` and items, by whatever key.
fn has_items(value: &Value) -> bool {
    match value.kind() {
        ValueKind::String | ValueKind::Seq | ValueKind::Undefined => true,
        ValueKind::Map => !is_namespace(value),
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
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

/// The library's takes a dict or names, Python's both.
fn namespace(fields: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let fields = minijinja::functions::dict(fields, named)?;
    minijinja::functions::namespace(Some(fields.into()))
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
        check("{{ '\\x7f' | tojson(ensure_ascii=true) }}", "\"\\u007f\"");
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
        check(
            "{{ x is sequence }} {{ 'a' is sequence }} {{ range(3) is sequence }}",
            "True True True",
        );
        check("{{ none is sequence }} {{ namespace(a=1) is mapping }}", "False False");
        check("{{ range is callable }} {{ 'a' is callable }}", "True False");
    }

    #[test]
    fn python_methods_work() {
        check("{{ x.items() | list | length }} {{ x.get('a') }} {{ x.get('z', 5) }}", "5 1 5");
        check("{{ ' a '.strip() }}{{ 'ab'.startswith('a') }}{{ 'a b'.split(' ')[-1] }}", "aTrueb");
    }

    #[test]
    fn namespaces_take_dicts_and_names() {
        check(
            "{% set n = namespace({'a': 1}, b=2) %}{% set n.c = 3 %}{{ n.a }}{{ n.b }}{{ n.c }}",
            "123",
        );
        check("{% set n = namespace() %}{{ n.a is defined }}", "False");
    }

    #[test]
    fn now_is_the_callers() {
        check("{{ strftime_now('%d %b %Y') }}", "15 Jan 2026");
    }
}
