//! Python's methods of strings, lists and dicts, as chat templates call them.
//!
//! Those that `minijinja-contrib` has in the same way are left to it. Nothing here changes a value: the sandbox that
//! templates run in refuses `append` and the like.

use super::python::List;
use minijinja::value::{Kwargs, Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// What a call was given, by position or by name.
pub(super) struct Arguments<'a> {
    positional: &'a [Value],
    named: Option<Kwargs>,
}

impl<'a> Arguments<'a> {
    pub(super) fn new(values: &'a [Value]) -> Self {
        let named = values.last().filter(|last| last.is_kwargs());
        let named = named.and_then(|last| Kwargs::try_from(last.clone()).ok());
        let count = values.len() - usize::from(named.is_some());
        Self { positional: values.get(..count).unwrap_or_default(), named }
    }

    /// The argument at this place, or of this name; none where it is `none`.
    pub(super) fn get(&self, place: usize, name: &str) -> Option<Value> {
        let named = || self.named.as_ref().and_then(|named| named.get::<Value>(name).ok());
        let value = self.positional.get(place).cloned().or_else(named)?;
        (!value.is_none() && !value.is_undefined()).then_some(value)
    }

    pub(super) fn text(&self, place: usize, name: &str) -> Result<Option<String>, Error> {
        self.get(place, name)
            .map(|value| value.as_str().map(str::to_owned).ok_or_else(wrong))
            .transpose()
    }

    pub(super) fn number(&self, place: usize, name: &str) -> Result<Option<i64>, Error> {
        self.get(place, name).map(i64::try_from).transpose()
    }

    pub(super) fn is_true(&self, place: usize, name: &str) -> bool {
        self.get(place, name).is_some_and(|value| value.is_true())
    }

    /// Refuses arguments beyond so many, and names nobody asked for.
    pub(super) fn check(&self, most: usize) -> Result<(), Error> {
        if self.positional.len() > most {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        self.named.as_ref().map_or(Ok(()), Kwargs::assert_all_used)
    }
}

fn wrong() -> Error {
    Error::new(ErrorKind::InvalidOperation, "an argument is not of its type")
}

/// White space as Python's `str.isspace` has it.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// A list of texts.
fn list<'a>(texts: impl IntoIterator<Item = &'a str>) -> Value {
    Value::from_object(List(texts.into_iter().map(Value::from).collect()))
}

/// Calls a method.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let found = match (value.as_str(), value.kind()) {
        (Some(text), _) => of_text(text, name, args)?,
        (None, ValueKind::Seq) => of_list(value, name, args)?,
        (None, ValueKind::Map) if name == "copy" && args.is_empty() => Some(value.clone()),
        _ => None,
    };
    match found {
        Some(found) => Ok(found),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn of_list(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match (name, args) {
        ("copy", []) => Ok(Some(value.clone())),
        ("index", [wanted]) => {
            let at = value.try_iter()?.position(|item| item == *wanted);
            at.map(|at| Some(Value::from(at))).ok_or_else(not_found)
        }
        _ => Ok(None),
    }
}

fn not_found() -> Error {
    Error::new(ErrorKind::InvalidOperation, "not found")
}

fn of_text(text: &str, name: &str, values: &[Value]) -> Result<Option<Value>, Error> {
    let args = Arguments::new(values);
    let found = match name {
        "split" => split(text, &args)?,
        "rsplit" => rsplit(text, &args)?,
        "splitlines" => list(lines(text, args.is_true(0, "keepends"))),
        "strip" => Value::from(strip(text, args.text(0, "chars")?.as_deref(), true, true)),
        "lstrip" => Value::from(strip(text, args.text(0, "chars")?.as_deref(), true, false)),
        "rstrip" => Value::from(strip(text, args.text(0, "chars")?.as_deref(), false, true)),
        "startswith" | "endswith" => starts_or_ends(text, name == "startswith", &args)?,
        "find" | "index" => find(text, &args, name == "index", |text, wanted| text.find(wanted))?,
        "rfind" | "rindex" => {
            find(text, &args, name == "rindex", |text, wanted| text.rfind(wanted))?
        }
        "partition" => partition(text, &args, text.split_once(&*separator(&args)?), false),
        "rpartition" => partition(text, &args, text.rsplit_once(&*separator(&args)?), true),
        "removeprefix" => {
            let prefix = args.text(0, "")?.ok_or_else(wrong)?;
            Value::from(text.strip_prefix(&*prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let suffix = args.text(0, "")?.ok_or_else(wrong)?;
            Value::from(text.strip_suffix(&*suffix).unwrap_or(text))
        }
        "title" => Value::from(title(text)),
        "swapcase" => Value::from(swapped(text)),
        "casefold" => Value::from(text.to_lowercase().replace('ß', "ss")),
        "ljust" | "rjust" | "center" => padded(text, name, &args)?,
        "zfill" => zfill(text, &args)?,
        "expandtabs" => expanded(text, &args)?,
        "isdecimal" => Value::from(!text.is_empty() && text.chars().all(|c| c.is_ascii_digit())),
        "istitle" => Value::from(title(text) == text && text.chars().any(is_cased)),
        "isidentifier" => Value::from(is_identifier(text)),
        _ => return Ok(None),
    };
    args.check(3)?;
    Ok(Some(found))
}

fn separator(args: &Arguments<'_>) -> Result<String, Error> {
    args.text(0, "sep")?.filter(|separator| !separator.is_empty()).ok_or_else(wrong)
}

/// How often to split at most.
fn limit(args: &Arguments<'_>) -> Result<usize, Error> {
    let limit = args.number(1, "maxsplit")?.unwrap_or(-1);
    Ok(usize::try_from(limit).unwrap_or(usize::MAX - 1))
}

fn split(text: &str, args: &Arguments<'_>) -> Result<Value, Error> {
    let limit = limit(args)?;
    if args.get(0, "sep").is_some() {
        return Ok(list(text.splitn(limit.saturating_add(1), &*separator(args)?)));
    }
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() && parts.len() < limit {
        let end = rest.find(is_space).unwrap_or(rest.len());
        let (part, after) = rest.split_at_checked(end).unwrap_or((rest, ""));
        parts.push(part);
        rest = after.trim_start_matches(is_space);
    }
    // What is left when the limit is reached keeps the white space it ends with.
    if !rest.is_empty() {
        parts.push(rest);
    }
    Ok(list(parts))
}

fn rsplit(text: &str, args: &Arguments<'_>) -> Result<Value, Error> {
    let limit = limit(args)?;
    let mut parts: Vec<&str> = Vec::new();
    if args.get(0, "sep").is_some() {
        let separator = separator(args)?;
        parts.extend(text.rsplitn(limit.saturating_add(1), &*separator));
    } else {
        let mut rest = text.trim_end_matches(is_space);
        while !rest.is_empty() && parts.len() < limit {
            let start = rest.char_indices().rev().find(|(_, c)| is_space(*c));
            let start = start.map_or(0, |(at, c)| at + c.len_utf8());
            let (before, part) = rest.split_at_checked(start).unwrap_or(("", rest));
            parts.push(part);
            rest = before.trim_end_matches(is_space);
        }
        // What is left keeps the white space it starts with.
        if !rest.is_empty() {
            parts.push(rest);
        }
    }
    parts.reverse();
    Ok(list(parts))
}

/// The lines of a text, ended by all that Python ends them with.
pub(super) fn lines(text: &str, keeps_ends: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest.find(is_end).unwrap_or(rest.len());
        let (line, end) = rest.split_at_checked(at).unwrap_or((rest, ""));
        let width = match end.starts_with("\r\n") {
            true => 2,
            false => end.chars().next().map_or(0, char::len_utf8),
        };
        let kept = if keeps_ends { at + width } else { line.len() };
        lines.extend(rest.get(..kept));
        rest = rest.get(at + width..).unwrap_or_default();
    }
    lines
}

/// `strip`, `lstrip` and `rstrip`.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let goes = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(goes) } else { text };
    if end { text.trim_end_matches(goes) } else { text }
}

/// The part of a text between two places, which count from the end where they are negative, and where it starts.
fn part<'a>(text: &'a str, args: &Arguments<'_>) -> Result<Option<(&'a str, usize)>, Error> {
    let (Some(from), to) = (args.number(1, "")?, args.number(2, "")?) else {
        return Ok(Some((text, 0)));
    };
    let count = i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
    let place = |place: i64| if place < 0 { (place + count).max(0) } else { place.min(count) };
    let (start, end) = (place(from), to.map_or(count, place));
    if from > count || start > end {
        return Ok(None);
    }
    let byte = |place: i64| {
        let place = usize::try_from(place).unwrap_or_default();
        text.char_indices().nth(place).map_or(text.len(), |(at, _)| at)
    };
    let part = text.get(byte(start)..byte(end)).unwrap_or_default();
    Ok(Some((part, usize::try_from(start).unwrap_or_default())))
}

fn starts_or_ends(text: &str, at_start: bool, args: &Arguments<'_>) -> Result<Value, Error> {
    let wanted = args.get(0, "").ok_or_else(wrong)?;
    let wanted: Vec<Value> = match wanted.kind() {
        ValueKind::String => vec![wanted],
        ValueKind::Seq if wanted.is_tuple() => wanted.try_iter()?.collect(),
        _ => return Err(wrong()),
    };
    let part = part(text, args)?;
    let mut found = false;
    for wanted in wanted {
        let wanted = wanted.as_str().ok_or_else(wrong)?;
        found |= part.is_some_and(|(part, _)| match at_start {
            true => part.starts_with(wanted),
            false => part.ends_with(wanted),
        });
    }
    Ok(Value::from(found))
}

fn find(
    text: &str,
    args: &Arguments<'_>,
    must: bool,
    search: impl Fn(&str, &str) -> Option<usize>,
) -> Result<Value, Error> {
    let wanted = args.text(0, "")?.ok_or_else(wrong)?;
    let found = part(text, args)?.and_then(|(part, start)| {
        let before = part.get(..search(part, &wanted)?)?;
        i64::try_from(start + before.chars().count()).ok()
    });
    match found {
        None if must => Err(not_found()),
        found => Ok(Value::from(found.unwrap_or(-1))),
    }
}

fn partition(
    text: &str,
    args: &Arguments<'_>,
    parts: Option<(&str, &str)>,
    from_end: bool,
) -> Value {
    let separator = args.get(0, "sep").unwrap_or_default();
    let (before, separator, after) = match parts {
        Some((before, after)) => (before, separator, after),
        None if from_end => ("", Value::from(""), text),
        None => (text, Value::from(""), ""),
    };
    Value::from(Tuple::from(vec![Value::from(before), separator, Value::from(after)]))
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase()
}

/// Every letter that follows none in upper case, the others in lower.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut within = false;
    for c in text.chars() {
        if within {
            out.extend(c.to_lowercase());
        } else {
            // What becomes several letters, as a ligature does, has one capital.
            let mut capital = c.to_uppercase();
            out.extend(capital.next());
            out.extend(capital.flat_map(char::to_lowercase));
        }
        within = is_cased(c);
    }
    out
}

fn swapped(text: &str) -> String {
    let swap = |c: char| -> String {
        if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
    };
    text.chars().map(swap).collect()
}

/// How wide a text may be made.
const MAX_WIDTH: usize = 1 << 16;

fn width(args: &Arguments<'_>) -> Result<usize, Error> {
    let width = args.number(0, "width")?.ok_or_else(wrong)?;
    let width = usize::try_from(width).unwrap_or_default();
    if width > MAX_WIDTH { Err(wrong()) } else { Ok(width) }
}

fn padded(text: &str, name: &str, args: &Arguments<'_>) -> Result<Value, Error> {
    let wide = width(args)?;
    let fill = args.text(1, "fillchar")?.unwrap_or_else(|| " ".to_owned());
    let missing = wide.saturating_sub(text.chars().count());
    let before = match name {
        "ljust" => 0,
        "rjust" => missing,
        // The odd one goes to the left of texts of odd width.
        _ => missing / 2 + (missing & wide & 1),
    };
    Ok(Value::from(format!("{}{text}{}", fill.repeat(before), fill.repeat(missing - before))))
}

fn zfill(text: &str, args: &Arguments<'_>) -> Result<Value, Error> {
    let zeros = "0".repeat(width(args)?.saturating_sub(text.chars().count()));
    Ok(Value::from(match text.strip_prefix(['+', '-']) {
        Some(digits) => {
            let sign = text.strip_suffix(digits).unwrap_or_default();
            format!("{sign}{zeros}{digits}")
        }
        None => format!("{zeros}{text}"),
    }))
}

fn expanded(text: &str, args: &Arguments<'_>) -> Result<Value, Error> {
    let width = usize::try_from(args.number(0, "tabsize")?.unwrap_or(8)).unwrap_or_default();
    if width > MAX_WIDTH {
        return Err(wrong());
    }
    let (mut out, mut column) = (String::new(), 0_usize);
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = width.saturating_sub(column.checked_rem(width).unwrap_or(width));
                out.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(Value::from(out))
}

fn is_identifier(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|c| c == '_' || c.is_alphabetic())
        && chars.all(|c| c == '_' || c.is_alphanumeric())
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
        let variables = r#"{"s": "Hello World foo", "l": [3, 1, 2]}"#;
        let variables = serde_json::from_str(variables).expect("JSON");
        assert_eq!(
            template.render_variables(variables, 0).ok().as_deref(),
            expected,
            "{expression}"
        );
    }

    #[test]
    fn texts_split_as_pythons_do() {
        check("s.split()", Some("['Hello', 'World', 'foo']"));
        check("'a,b,,c'.split(',')", Some("['a', 'b', '', 'c']"));
        check("'a,b,c'.split(',', 1)", Some("['a', 'b,c']"));
        check("'  a b c '.split(maxsplit=1)", Some("['a', 'b c ']"));
        check("'a b'.split(sep=' ')", Some("['a', 'b']"));
        check("''.split()", Some("[]"));
        check("''.split(',')", Some("['']"));
        check("'abc'.split('')", None);
        check("'a,b,c'.rsplit(',', 1)", Some("['a,b', 'c']"));
        check("'a,b,c'.rsplit(',')", Some("['a', 'b', 'c']"));
        check("' a  b c '.rsplit()", Some("['a', 'b', 'c']"));
        check("' a  b c '.rsplit(none, 1)", Some("[' a  b', 'c']"));
        check("'a b c'.rsplit(maxsplit=1)", Some("['a b', 'c']"));
        check("''.rsplit(',')", Some("['']"));
        check(
            "'a\\x0bb\\x0cc\\x1cd\\u2028e\\x85f\\r\\ng'.splitlines()",
            Some("['a', 'b', 'c', 'd', 'e', 'f', 'g']"),
        );
        check("'a\\n\\nb\\n'.splitlines(true)", Some("['a\\n', '\\n', 'b\\n']"));
        check("'a=b=c'.partition('=')", Some("('a', '=', 'b=c')"));
        check("'a=b=c'.rpartition('=')", Some("('a=b', '=', 'c')"));
        check("'a'.partition('=')", Some("('a', '', '')"));
        check("'a'.rpartition('=')", Some("('', '', 'a')"));
    }

    #[test]
    fn texts_are_stripped_and_searched_as_pythons_are() {
        check("'\\x1fa\\x1c'.strip()", Some("a"));
        check("'xyaxy'.lstrip('xy')", Some("axy"));
        check("'xyaxy'.rstrip('yx')", Some("xya"));
        check("'a\\u200b'.strip() | length", Some("2"));
        check("'prefix-x'.removeprefix('prefix-')", Some("x"));
        check("'x.txt'.removesuffix('.txt')", Some("x"));
        check("s.startswith(('x', 'He'))", Some("True"));
        check("s.startswith('W', 6)", Some("True"));
        check("s.endswith('o', 0, 5)", Some("True"));
        check("s.startswith('')", Some("True"));
        check("s.find('o', 5)", Some("7"));
        check("s.find('o', 5, 7)", Some("-1"));
        check("s.find('o', -3)", Some("13"));
        check("s.index('W')", Some("6"));
        check("s.index('zz')", None);
        check("s.rindex('o')", Some("14"));
        check("'é東a'.find('a')", Some("2"));
    }

    #[test]
    fn texts_change_case_and_width_as_pythons_do() {
        check("\"they're bill's 3rd\".title()", Some("They'Re Bill'S 3Rd"));
        check("'straße ÀÉ ﬁ'.title()", Some("Straße Àé Fi"));
        check("s.swapcase()", Some("hELLO wORLD FOO"));
        check("'straße'.casefold()", Some("strasse"));
        check("'-5'.zfill(4) ~ '5'.zfill(3)", Some("-005005"));
        check("'a'.ljust(3, '.') ~ 'a'.rjust(3, '.')", Some("a....a"));
        check("'ab'.center(5, '*') ~ 'a'.center(4, '*')", Some("**ab**a**"));
        check("'a\\tb'.expandtabs(4)", Some("a   b"));
        check("'Ab C'.istitle() ~ 'AB'.istitle()", Some("TrueFalse"));
        check("'a_1'.isidentifier() ~ '1a'.isidentifier()", Some("TrueFalse"));
        check("'1'.isdecimal() ~ ''.isdecimal()", Some("TrueFalse"));
    }

    #[test]
    fn lists_and_dicts_are_read_and_never_changed() {
        check("l.index(2)", Some("2"));
        check("l.index(9)", None);
        check("l.copy()", Some("[3, 1, 2]"));
        check("{'a': 1}.copy()", Some("{'a': 1}"));
        check("l.append(4)", None);
        check("{'a': 1}.update({'b': 2})", None);
        check("s.nope()", None);
    }
}
