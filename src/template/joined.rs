//! Texts that an output joins by `+`, written one behind the other.
//!
//! `{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}` copies the content twice at each `+` from
//! there on, and a conversation is mostly content. As `{{ '<|im_start|>' }}{{ message.role|text_to_join }}...` it is
//! written once. Both write the same: where one of the first two operands is a literal text, Python and the library add
//! texts or fail, at the first operand that is none. [`FILTER`] fails there, too, and what an error leaves half written
//! is thrown away.
//!
//! It rewrites what it has read to the end: literals, and names with their attributes, items, calls and filters. An output
//! with anything else in it, whatever it is, stays as it is, and so do statements.

use super::bounds::{after_block, after_raw, after_text, is_tag};
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};

/// Lets texts through, and nothing else.
const FILTER: &str = "text_to_join";

/// Adds the filter.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.add_filter(FILTER, |value: Value| match value.as_str() {
        Some(_) => Ok(value),
        None => Err(Error::new(ErrorKind::InvalidOperation, "only texts can be joined to texts")),
    });
}

/// The source, with outputs of one text each where they joined several.
pub(super) fn apart(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let inside = from.get(2..).unwrap_or_default();
        let after = if from.starts_with("{#") {
            inside.split_once("#}").map_or("", |(_, after)| after)
        } else if from.starts_with("{%") && is_tag(inside, "raw") {
            after_raw(inside)
        } else if from.starts_with("{%") || from.starts_with("{{") {
            after_block(inside).unwrap_or_default()
        } else {
            from.get(1..).unwrap_or_default()
        };
        let block = from.get(..from.len() - after.len()).unwrap_or(from);
        let output = block.strip_prefix("{{").and_then(|output| output.strip_suffix("}}"));
        match output.and_then(outputs) {
            Some(outputs) => out.push_str(&outputs),
            None => out.push_str(block),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// What stands between `{{` and `}}`, as outputs of their own; none where it does not join texts.
fn outputs(joined: &str) -> Option<String> {
    let (begin, joined) = joined.strip_prefix('-').map_or(("{{ ", joined), |rest| ("{{- ", rest));
    let (end, joined) = joined.strip_suffix('-').map_or((" }}", joined), |rest| (" -}}", rest));
    let mut operands = Vec::new();
    let mut rest = joined;
    loop {
        let (operand, after) = operand(rest.trim_start())?;
        operands.push(operand);
        rest = match after.trim_start() {
            "" => break,
            after => after.strip_prefix('+')?,
        };
    }
    let joins_texts = operands.iter().take(2).any(|operand| is_literal(operand));
    if operands.len() < 2 || !joins_texts {
        return None;
    }
    let last = operands.len() - 1;
    let mut out = String::new();
    for (index, operand) in operands.into_iter().enumerate() {
        out.push_str(if index == 0 { begin } else { "{{ " });
        out.push_str(operand);
        if !is_literal(operand) {
            out.push('|');
            out.push_str(FILTER);
        }
        out.push_str(if index == last { end } else { " }}" });
    }
    Some(out)
}

fn is_literal(operand: &str) -> bool {
    operand.starts_with(['\'', '"'])
}

/// The operand that a text begins with, and what follows it.
fn operand(text: &str) -> Option<(&str, &str)> {
    let after = match text.chars().next()? {
        quote @ ('\'' | '"') => after_text(text.get(1..)?, quote),
        _ => after_path(after_name(text)?)?,
    };
    Some((text.get(..text.len() - after.len())?, after))
}

fn after_name(text: &str) -> Option<&str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let begins = text.starts_with(|c: char| is_part(c) && !c.is_ascii_digit());
    begins.then(|| text.trim_start_matches(is_part))
}

/// What follows the attributes, items, calls and filters behind a name.
fn after_path(text: &str) -> Option<&str> {
    let mut rest = text;
    loop {
        let spaced = rest.trim_start();
        rest = if let Some(name) = rest.strip_prefix('.') {
            after_name(name)?
        } else if let Some(filter) = spaced.strip_prefix('|') {
            after_name(filter.trim_start())?
        } else if rest.starts_with(['(', '[']) {
            after_brackets(rest)?
        } else {
            return Some(rest);
        };
    }
}

/// What follows brackets, in which there may be anything but braces.
fn after_brackets(text: &str) -> Option<&str> {
    let mut open = 0usize;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        rest = rest.get(c.len_utf8()..)?;
        match c {
            '\'' | '"' => rest = after_text(rest, c),
            '(' | '[' => open += 1,
            ')' | ']' => open = open.checked_sub(1)?,
            '{' | '}' => return None,
            _ => {}
        }
        if open == 0 {
            return Some(rest);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::python;

    #[track_caller]
    fn check(source: &str, expected: &str) {
        assert_eq!(apart(source), expected);
    }

    #[track_caller]
    fn check_kept(source: &str) {
        check(source, source);
    }

    #[test]
    fn joined_texts_become_outputs() {
        check("{{ 'a' + b }}", "{{ 'a' }}{{ b|text_to_join }}");
        check(
            "x {{- a.b['c'](d, '}}') | trim + \"\\\"}}\" + e -}} y",
            "x {{- a.b['c'](d, '}}') | trim|text_to_join }}{{ \"\\\"}}\" }}{{ e|text_to_join -}} y",
        );
        check(
            "{% if a %}{{a+'b'}}{% endif %}{{c}}",
            "{% if a %}{{ a|text_to_join }}{{ 'b' }}{% endif %}{{c}}",
        );
    }

    #[test]
    fn what_may_be_no_text_stays() {
        check_kept("{{ a + b }}{{ a }}{{ 'a' }}{{ 1 + 2 }}{{ a + b + 'c' }}");
        check_kept("{{ 'a' + b if c else d }}{{ 'a' + b == c }}{{ 'a' + (b) }}{{ 'a' + b * 2 }}");
        check_kept("{{ 'a' ~ b }}{{ 'a' + b ~ c }}{{ 'a' 'b' + c }}{{ 'a'|f + b }}{{ 'a' + -b }}");
        check_kept("{{ 'a' + not b }}{{ 'a' + b is string }}{{ 'a' + 2 }}{{ 'a' + [b] }}");
        check_kept("{{ 'a' + f({'b': 1}) }}{{ 'a' + b.0 }}{{ 'a' + b, c }}{{ 'a' + }}");
        check_kept("{% set a = 'b' + c %}{# {{ 'a' + b }} #}");
        check_kept("{% raw %}{{ 'a' + b }}{% endraw %}{{");
        check_kept("{{ 'a' + b");
        check_kept("{é{ 'a' + b }}");
    }

    /// What both forms of a source render, which must be the same.
    fn rendered(source: &str) -> Option<String> {
        let mut env = Environment::new();
        env.set_formatter(|out, _, value| {
            let failed = |_| Error::new(ErrorKind::WriteFailure, "cannot be printed");
            python::write_str(out, value).map_err(failed)
        });
        add_to(&mut env);
        let list: Vec<Value> = ["x", "y"].into_iter().map(Value::from).collect();
        let values = [
            ("t", Value::from("text")),
            ("long", Value::from("a text of more bytes than are kept in place")),
            ("n", Value::from(7)),
            ("none", Value::from(())),
            ("list", Value::from(list)),
        ];
        let context = Value::from_pairs(values);
        let [one, other] = [source.to_owned(), apart(source)].map(|source| {
            let template = env.template_from_str(&source).expect(&source);
            template.render(context.clone()).ok()
        });
        assert_eq!(one, other, "{source}");
        one
    }

    #[test]
    fn both_forms_render_alike() {
        let operands = [
            "'a'", "\"b\\n\"", "t", "long", "n", "none", "no", "list", "list[0]", "t|upper",
            "t[1:]",
        ];
        let mut count = 0;
        for a in operands {
            for b in operands {
                for c in operands {
                    let source = format!(" {{{{- {a} + {b}+{c} }}}} {{{{ {b} + {c} -}}}} .");
                    count += usize::from(rendered(&source).is_some());
                }
            }
        }
        assert!(count > 100, "{count}");
        let source =
            "{% macro m(x) %}<{{ '[' + x + ']' }}>{% endmacro %}{{ 'a' + m('b') + m(x='c') }}";
        assert_eq!(rendered(source).as_deref(), Some("a<[b]><[c]>"));
        let source =
            "{% set c %}{{ t + '!' }}{% endset %}{% for i in list %}{{ '-' + i + c }}{% endfor %}";
        assert_eq!(rendered(source).as_deref(), Some("-xtext!-ytext!"));
    }
}
