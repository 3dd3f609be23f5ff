//! Models with several chat templates by name: `tool_use` renders chats with tools, `default` all others.
//!
//! The two travel as one text, with a NUL between them, which no template has. Other names are asked for by callers in
//! Python only, so they are left out.

/// What stands between the two.
const BETWEEN: char = '\0';

/// The templates that an engine chooses between, as one text.
///
/// # Errors
/// When none is named `default`, or one is no template.
pub fn join<'a>(named: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<String, String> {
    let (mut default, mut tool_use) = (None, None);
    for (name, source) in named {
        match name {
            "default" => default = Some(source),
            "tool_use" => tool_use = Some(source),
            _ => {}
        }
    }
    let default = default.ok_or("chat templates without one named \"default\"")?;
    if [Some(default), tool_use].into_iter().flatten().any(|source| source.contains(BETWEEN)) {
        return Err("a chat template with a NUL in it".to_owned());
    }
    Ok(match tool_use {
        Some(tool_use) if tool_use != default => format!("{default}{BETWEEN}{tool_use}"),
        _ => default.to_owned(),
    })
}

/// The default template, and the one for chats with tools.
pub(super) fn split(templates: &str) -> (&str, Option<&str>) {
    match templates.split_once(BETWEEN) {
        Some((default, tool_use)) => (default, Some(tool_use)),
        None => (templates, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(named: &[(&str, &str)], expected: Result<(&str, Option<&str>), &str>) {
        let joined = join(named.iter().copied());
        assert_eq!(joined.as_deref().map(split).map_err(String::as_str), expected);
    }

    #[test]
    fn default_and_tool_use_are_kept() {
        check(&[("default", "a")], Ok(("a", None)));
        check(&[("rag", "c"), ("tool_use", "b"), ("default", "a")], Ok(("a", Some("b"))));
        check(&[("tool_use", "a"), ("default", "a")], Ok(("a", None)));
        check(&[("tool_use", "b")], Err("chat templates without one named \"default\""));
        check(&[("default", "a\0b")], Err("a chat template with a NUL in it"));
    }
}
