//! Jinja's own filters, where the Jinja library's differ from Python's or are missing.
//!
//! `tojson`, which transformers replaces, is in `builtins`.

use super::methods::{Arguments, lines, strip};
use super::python::{List, text};
use minijinja::value::{Rest, Tuple, Value, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind};
use std::cmp::Ordering;

/// What a filter is given besides its value.
type Others = Rest<ValueOrKwargs>;

/// Adds the filters.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.add_filter("string", |value: &Value| match value.is_safe() {
        true => Ok(value.clone()),
        false => text(value).map(Value::from),
    });
    env.add_filter("trim", |value: &Value, others: Others| -> Result<String, Error> {
        let others = others.into_values();
        let args = Arguments::new(&others);
        let chars = args.text(0, "chars")?;
        args.check(1)?;
        Ok(strip(&text(value)?, chars.as_deref(), true, true).to_owned())
    });
    env.add_filter("title", |value: &Value| text(value).map(|text| titled(&text)));
    for name in ["default", "d"] {
        env.add_filter(name, default);
    }
    for name in ["escape", "e"] {
        env.add_filter(name, |value: &Value| match value.is_safe() {
            true => Ok(value.clone()),
            false => escaped(value),
        });
    }
    env.add_filter("forceescape", escaped);
    env.add_filter("indent", indent);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("dictsort", dictsort);
    env.add_filter("sort", sort);
    env.add_filter("wordcount", |value: &Value| text(value).map(|text| words(&text)));
    env.add_filter("center", |value: &Value, width: Option<usize>| {
        let (text, width) = (text(value)?, width.unwrap_or(80).min(1 << 16));
        let missing = width.saturating_sub(text.chars().count());
        let before = missing / 2 + (missing & width & 1);
        Ok::<_, Error>(format!("{}{text}{}", " ".repeat(before), " ".repeat(missing - before)))
    });
    env.add_filter("truncate", truncate);
}

/// Jinja's `title` is not Python's: a word goes on behind an apostrophe.
fn titled(text: &str) -> String {
    let begins = |c: char| c == '-' || c.is_whitespace() || "([{<".contains(c);
    let mut out = String::with_capacity(text.len());
    let mut is_first = true;
    for c in text.chars() {
        match is_first && !begins(c) {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        is_first = begins(c);
    }
    out
}

fn words(text: &str) -> usize {
    let is_word = |c: &char| c.is_alphanumeric() || *c == '_';
    let starts = |(before, c): (char, char)| is_word(&c) && !is_word(&before);
    std::iter::once(' ').chain(text.chars()).zip(text.chars()).filter(|pair| starts(*pair)).count()
}

fn default(value: &Value, others: Others) -> Result<Value, Error> {
    let others = others.into_values();
    let args = Arguments::new(&others);
    let is_absent = value.is_undefined() || args.is_true(1, "boolean") && !value.is_true();
    let given = others.first().filter(|first| !first.is_kwargs()).cloned();
    let otherwise = given.or_else(|| args.get(0, "default_value"));
    args.check(2)?;
    Ok(if is_absent { otherwise.unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

fn escaped(value: &Value) -> Result<Value, Error> {
    let mut out = String::new();
    for c in text(value)?.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    Ok(Value::from_safe_string(out))
}

fn indent(value: &Value, others: Others) -> Result<String, Error> {
    let others = others.into_values();
    let args = Arguments::new(&others);
    let width = args.get(0, "width").unwrap_or_else(|| Value::from(4));
    let indention = match width.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(usize::try_from(width)?.min(1 << 10)),
    };
    let (first, blank) = (args.is_true(1, "first"), args.is_true(2, "blank"));
    args.check(3)?;
    // The added newline keeps what the text ends with.
    let text = text(value)? + "\n";
    let mut out = String::new();
    for (index, line) in lines(&text, false).into_iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(out)
}

fn int(value: &Value, others: Others) -> Result<Value, Error> {
    let others = others.into_values();
    let args = Arguments::new(&others);
    let otherwise = args.get(0, "default").unwrap_or_else(|| Value::from(0));
    let base = args.number(1, "base")?.unwrap_or(10);
    args.check(2)?;
    let number = match value.as_str() {
        Some(text) => integer(text, base).or_else(|| whole(decimal(text)?)),
        None if value.is_integer() => return Ok(value.clone()),
        None => match bool::try_from(value.clone()) {
            Ok(truth) => Some(Value::from(i64::from(truth))),
            Err(_) => f64::try_from(value.clone()).ok().and_then(whole),
        },
    };
    Ok(number.unwrap_or(otherwise))
}

/// The part of a number before its point.
fn whole(number: f64) -> Option<Value> {
    // Beyond this a float has no digits behind the point, and its own are printed otherwise.
    (number.abs() < 1e15).then(|| Value::from(number.trunc() as i64))
}

/// `int(text, base)`.
fn integer(text: &str, base: i64) -> Option<Value> {
    let text = strip(text, None, true, true).replace('_', "").to_ascii_lowercase();
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(&text)),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let digits = digits.strip_prefix(prefix).unwrap_or(digits);
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    let is_plain = digits.starts_with(|c: char| c.is_ascii_alphanumeric());
    let number = is_plain.then(|| i128::from_str_radix(digits, base).ok())??;
    Some(Value::from(sign * number))
}

/// `float(text)`.
fn decimal(text: &str) -> Option<f64> {
    strip(text, None, true, true).replace('_', "").parse().ok()
}

fn float(value: &Value, others: Others) -> Result<Value, Error> {
    let others = others.into_values();
    let args = Arguments::new(&others);
    let otherwise = args.get(0, "default").unwrap_or_else(|| Value::from(0.0));
    args.check(1)?;
    let number = match (value.as_str(), bool::try_from(value.clone())) {
        (Some(text), _) => decimal(text),
        (None, Ok(truth)) => Some(f64::from(u8::from(truth))),
        (None, Err(_)) => f64::try_from(value.clone()).ok(),
    };
    Ok(number.map_or(otherwise, Value::from))
}

/// Compares as Jinja's filters do: texts without regard to case, unless it counts.
fn compared(a: &Value, b: &Value, case_counts: bool) -> Ordering {
    match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) if !case_counts => a.to_lowercase().cmp(&b.to_lowercase()),
        _ => a.cmp(b),
    }
}

fn dictsort(value: &Value, others: Others) -> Result<Value, Error> {
    let others = others.into_values();
    let args = Arguments::new(&others);
    let case_counts = args.is_true(0, "case_sensitive");
    let place = match args.text(1, "by")?.as_deref() {
        None | Some("key") => 0,
        Some("value") => 1,
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "by must be 'key' or 'value'"));
        }
    };
    let reverse = args.is_true(2, "reverse");
    args.check(3)?;
    let mut pairs = Vec::new();
    for key in value.try_iter()? {
        let of_key = value.get_item(&key)?;
        pairs.push([key, of_key]);
    }
    pairs.sort_by(|a, b| {
        let order = a.get(place).zip(b.get(place)).map(|(a, b)| compared(a, b, case_counts));
        let order = order.unwrap_or(Ordering::Equal);
        if reverse { order.reverse() } else { order }
    });
    let pairs = pairs.into_iter().map(|pair| Value::from(Tuple::from(pair.to_vec())));
    Ok(Value::from_object(List(pairs.collect())))
}

fn sort(value: &Value, others: Others) -> Result<Value, Error> {
    let others = others.into_values();
    let args = Arguments::new(&others);
    let reverse = args.is_true(0, "reverse");
    let case_counts = args.is_true(1, "case_sensitive");
    let attribute = args.get(2, "attribute").map(|attribute| text(&attribute)).transpose()?;
    args.check(3)?;
    let keys = |item: &Value| -> Result<Vec<Value>, Error> {
        match &attribute {
            None => Ok(vec![item.clone()]),
            Some(attribute) => attribute.split(',').map(|path| at_path(item, path)).collect(),
        }
    };
    let mut items = Vec::new();
    for item in value.try_iter()? {
        items.push((keys(&item)?, item));
    }
    items.sort_by(|(a, _), (b, _)| {
        let orders = a.iter().zip(b).map(|(a, b)| compared(a, b, case_counts));
        let order = orders.fold(Ordering::Equal, Ordering::then);
        if reverse { order.reverse() } else { order }
    });
    Ok(Value::from_object(List(items.into_iter().map(|(_, item)| item).collect())))
}

/// What stands at the end of a dotted path, whose numbers are places.
fn at_path(item: &Value, path: &str) -> Result<Value, Error> {
    path.split('.').try_fold(item.clone(), |item, name| match name.parse::<usize>() {
        Ok(place) => item.get_item_by_index(place),
        Err(_) => item.get_attr(name),
    })
}

fn truncate(value: &Value, others: Others) -> Result<String, Error> {
    let others = others.into_values();
    let args = Arguments::new(&others);
    let length = usize::try_from(args.number(0, "length")?.unwrap_or(255)).unwrap_or_default();
    let cuts_words = args.is_true(1, "killwords");
    let end = args.text(2, "end")?.unwrap_or_else(|| "...".to_owned());
    let leeway = usize::try_from(args.number(3, "leeway")?.unwrap_or(5)).unwrap_or_default();
    args.check(4)?;
    let text = text(value)?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept = length.saturating_sub(end.chars().count());
    let kept: String = text.chars().take(kept).collect();
    let kept = match kept.rsplit_once(' ') {
        Some((before, _)) if !cuts_words => before,
        _ => &kept,
    };
    Ok(format!("{kept}{end}"))
}

#[cfg(test)]
mod tests {
    use crate::template::ChatTemplate;
    use std::collections::BTreeMap;

    /// Expected texts were printed by jinja2 3.1.6 with transformers' settings; `None` where it raises.
    #[track_caller]
    fn check(expression: &str, expected: Option<&str>) {
        let source = format!("{{{{ {expression} }}}}");
        let template = ChatTemplate::compile(&source, &BTreeMap::new()).expect(expression);
        let variables = r#"{"s": "Hello World foo", "l": [{"n": "b", "v": 2}, {"n": "A", "v": 1}, {"n": "c", "v": 2}]}"#;
        let variables = serde_json::from_str(variables).expect("JSON");
        let rendered = template.render_variables(variables, 0);
        assert_eq!(rendered.ok().as_deref(), expected, "{expression}");
    }

    #[test]
    fn texts_are_changed_as_jinja2_does() {
        check("' a '|trim ~ 'xxaxx'|trim('x') ~ none|trim", Some("aaNone"));
        check("\"it's a dog-day (x) O'Neil\"|title", Some("It's A Dog-Day (X) O'neil"));
        check(
            "'<a href=\"x\">&\\'</a>'|escape",
            Some("&lt;a href=&#34;x&#34;&gt;&amp;&#39;&lt;/a&gt;"),
        );
        check("'<'|e|e ~ '<'|safe|forceescape", Some("&lt;&lt;"));
        check("'a b_c d-e'|wordcount", Some("4"));
        check("s|truncate(8) ~ s|truncate(8, true, '..')", Some("Hello...Hello .."));
        check("s|truncate(12)", Some("Hello World foo"));
        check("s|center(18) ~ '|'", Some(" Hello World foo  |"));
    }

    #[test]
    fn lines_are_indented_as_jinja2_does() {
        check("'a\\nb\\n\\nc'|indent", Some("a\n    b\n\n    c"));
        check("'a\\nb'|indent(2, true)", Some("  a\n  b"));
        check("'a\\n\\nb'|indent(2, blank=true)", Some("a\n  \n  b"));
        check("'a\\nb'|indent('>>')", Some("a\n>>b"));
        check("'a\\nb\\n'|indent(2)", Some("a\n  b\n"));
    }

    #[test]
    fn defaults_are_for_what_is_absent() {
        check("undef|default('d') ~ none|default('d') ~ ''|d('x', true)", Some("dNonex"));
        check("''|d('x', boolean=true) ~ undef|default", Some("x"));
        check("undef|default(none)", Some("None"));
    }

    #[test]
    fn numbers_are_read_as_python_reads_them() {
        check(
            "'12'|int ~ ' 5 '|int ~ '1_000'|int ~ '12.7'|int ~ 3.9|int ~ -3.9|int",
            Some("1251000123-3"),
        );
        check("'x'|int ~ 'x'|int(5) ~ none|int ~ true|int ~ '--5'|int", Some("05010"));
        check("'0x1f'|int(base=16) ~ ' ' ~ 'ff'|int(0, 16)", Some("31 255"));
        check(
            "'1.5'|float ~ 'x'|float ~ 3|float ~ 'x'|float(2.5) ~ '1e3'|float",
            Some("1.50.03.02.51000.0"),
        );
    }

    #[test]
    fn what_is_sorted_stays_in_its_order_where_it_is_equal() {
        check("{'b': 1, 'A': 2, 'a': 0}|dictsort", Some("[('A', 2), ('a', 0), ('b', 1)]"));
        check("{'b': 1, 'A': 2}|dictsort(true)", Some("[('A', 2), ('b', 1)]"));
        check("{'b': 1, 'A': 2}|dictsort(by='value', reverse=true)", Some("[('A', 2), ('b', 1)]"));
        check("{'b': 1}|dictsort(by='x')", None);
        check("['b', 'A', 'c', 'a']|sort|join", Some("Aabc"));
        check("['b', 'A', 'c', 'a']|sort(true, true)|join", Some("cbaA"));
        check("l|sort(attribute='v')|map(attribute='n')|join", Some("Abc"));
        check("l|sort(attribute='v', reverse=true)|map(attribute='n')|join", Some("bcA"));
        check("l|sort(attribute='v,n')|map(attribute='n')|join", Some("Abc"));
        check("[('b', 1), ('a', 2)]|sort(attribute=0)", Some("[('a', 2), ('b', 1)]"));
    }
}
