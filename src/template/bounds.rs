//! What a template's source may be before it is compiled: so long, and nothing nested or chained so deep.
//!
//! The Jinja library walks a syntax tree by recursion, to compile it and to drop it, and bounds only how deep brackets
//! and blocks nest: `a + a + a ...` and `{% elif %}` make trees as deep as they are long, and a VM's stack is 1 MB. This
//! counts tokens and does not judge them: what is no Jinja is refused by the library.

/// Longest source, in bytes. The longest public templates have 30 KB.
const MAX_BYTES: usize = 256 << 10;

/// Most operators that one expression may chain or nest, where a name counts as half of one. Public templates have under
/// 50. Every level takes up to some kilobytes of the stack in a build without optimizations, which tests use.
const MAX_OPERATORS: usize = 100;

/// Most `elif`s of the blocks that are open at one place, each of which is one level of the syntax tree. Public templates
/// have under 31; of 200 the unoptimized parser overflows the stack.
const MAX_ELIFS: usize = 40;

/// Deepest nesting of blocks, which are levels of the same tree. Public templates have under 12.
const MAX_NESTING: usize = 24;

/// Checks a source. The error says what is too much.
pub(super) fn check(source: &str) -> Result<(), String> {
    if source.len() > MAX_BYTES {
        return Err(format!("{} bytes, at most {MAX_BYTES} are compiled", source.len()));
    }
    // How many elifs each open block has so far.
    let mut open: Vec<usize> = Vec::new();
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let from = rest.get(at..).unwrap_or_default();
        let inside = from.get(2..).unwrap_or_default();
        rest = if from.starts_with("{#") {
            inside.split_once("#}").map_or("", |(_, after)| after)
        } else if from.starts_with("{%") && is_tag(inside, "raw") {
            after_raw(inside)
        } else if from.starts_with("{%") || from.starts_with("{{") {
            if from.starts_with("{%") {
                match first_word(inside) {
                    "elif" => open.iter_mut().rev().take(1).for_each(|elifs| *elifs += 1),
                    word if word.starts_with("end") => drop(open.pop()),
                    _ if opens(inside) => open.push(0),
                    _ => {}
                }
            }
            if open.len() > MAX_NESTING {
                return Err(format!("blocks nested deeper than {MAX_NESTING}"));
            }
            let elifs: usize = open.iter().sum();
            if elifs > MAX_ELIFS {
                return Err(format!("{elifs} elifs, at most {MAX_ELIFS} are compiled"));
            }
            after_block(inside)?
        } else {
            from.get(1..).unwrap_or_default()
        };
    }
    Ok(())
}

/// Whether a statement begins a block that another one ends.
fn opens(statement: &str) -> bool {
    match first_word(statement) {
        "set" => !statement.split_once("%}").map_or(statement, |(set, _)| set).contains('='),
        word => {
            ["if", "for", "macro", "call", "filter", "with", "autoescape", "block", "generation"]
                .contains(&word)
        }
    }
}

fn first_word(block: &str) -> &str {
    let block = block.trim_start_matches(['-', '+']).trim_start();
    let end = block.find(|c: char| !c.is_alphanumeric() && c != '_');
    block.get(..end.unwrap_or(block.len())).unwrap_or_default()
}

/// Whether a block is this word and nothing else. Only such a one ends a raw block: taking another for its end would hide
/// what follows the real one.
pub(super) fn is_tag(block: &str, word: &str) -> bool {
    let space = |c: char| c.is_ascii_whitespace();
    let block = block.strip_prefix(['-', '+']).unwrap_or(block).trim_start_matches(space);
    let Some(end) = block.strip_prefix(word) else { return false };
    let end = end.trim_start_matches(space);
    end.strip_prefix(['-', '+']).unwrap_or(end).starts_with("%}")
}

/// What follows a raw block, in which nothing counts.
pub(super) fn after_raw(block: &str) -> &str {
    let mut rest = block;
    while let Some((_, inside)) = rest.split_once("{%") {
        if is_tag(inside, "endraw") {
            return inside;
        }
        rest = inside;
    }
    ""
}

/// What follows a block whose operators have been counted.
pub(super) fn after_block(block: &str) -> Result<&str, String> {
    let mut operators = 0;
    // How many there were where each open bracket stands.
    let mut open: Vec<usize> = Vec::new();
    let mut rest = block;
    while let Some(c) = rest.chars().next() {
        if open.is_empty() && (rest.starts_with("%}") || rest.starts_with("}}")) {
            return Ok(rest.get(2..).unwrap_or_default());
        }
        let after = rest.get(c.len_utf8()..).unwrap_or_default();
        rest = after;
        match c {
            '\'' | '"' => rest = after_text(after, c),
            '(' | '[' | '{' => {
                operators += 1;
                open.push(operators);
            }
            ')' | ']' | '}' => operators = open.pop().unwrap_or(operators),
            // What stands beside each other does not nest.
            ',' => operators = open.last().copied().unwrap_or(0),
            c if c.is_alphanumeric() || c == '_' => {
                let end = after.find(|c: char| !c.is_alphanumeric() && c != '_');
                rest = after.get(end.unwrap_or(after.len())..).unwrap_or_default();
                operators += 1;
            }
            c => operators += usize::from(!c.is_whitespace()),
        }
        // A name counts as much as the sign before it.
        if operators > 2 * MAX_OPERATORS {
            return Err(format!("an expression of more than {MAX_OPERATORS} operators"));
        }
    }
    Ok("")
}

/// What follows a text whose opening quote has been read; nothing where it does not end.
pub(super) fn after_text(text: &str, quote: char) -> &str {
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == quote => return text.get(at + 1..).unwrap_or_default(),
            _ => {}
        }
    }
    ""
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::{ChatTemplate, TemplateError};
    use std::collections::BTreeMap;

    #[track_caller]
    fn check_refused(source: &str) {
        let refused = ChatTemplate::compile(source, &BTreeMap::new());
        let head: String = source.chars().take(60).collect();
        assert!(matches!(refused, Err(TemplateError::Syntax(_))), "{head}: {refused:?}");
    }

    /// Chains of every kind, one link of which is repeated.
    const CHAINS: [(&str, &str, &str); 12] = [
        ("{{ a", " + a", " }}"),
        ("{{ a", ".a", " }}"),
        ("{{ a", "[0]", " }}"),
        ("{{ a", "()", " }}"),
        ("{{ a", "|trim", " }}"),
        ("{{ a", " is defined", " }}"),
        ("{{ a", " and a", " }}"),
        ("{{ a", " if a else a", " }}"),
        ("{{ ", "not ", "a }}"),
        ("{{ ", "-", "a }}"),
        ("{{ '", "' ~ '", "' }}"),
        ("{% if a %}", "{% elif a %}", "{% endif %}"),
    ];

    #[test]
    fn long_chains_are_refused_before_they_are_compiled() {
        for (before, link, after) in CHAINS {
            check_refused(&format!("{before}{}{after}", link.repeat(20_000)));
            check_refused(&format!(
                "{{% raw %}}{{{{ '{{% endraw %}}{before}{}{after}",
                link.repeat(20_000)
            ));
        }
        let hidden = "-".repeat(20_000) + "a";
        for not_the_end in ["{% endraw x %}", "{% endraws %}", "{% endraw", "{%- - endraw %}"] {
            check_refused(&format!(
                "{{% raw %}}{not_the_end}{{#{{% endraw %}}{{{{ {hidden} }}}}#}}"
            ));
        }
        for (open, close) in [("(", ")"), ("[", "]"), ("{0:", "}")] {
            check_refused(&format!("{{{{ {}1{} }}}}", open.repeat(20_000), close.repeat(20_000)));
        }
        check_refused(&"{% if a %}".repeat(20_000));
        check_refused(&"{% set a %}".repeat(20_000));
        check_refused(&"{% if a %}{% set a = b %}".repeat(20_000));
        check_refused(&format!("{{{{ '{}' }}}}", "x".repeat(MAX_BYTES)));
    }

    #[test]
    fn what_is_just_allowed_compiles_on_the_stack_there_is() {
        for (before, link, after) in CHAINS {
            let most = (1..=MAX_OPERATORS)
                .rev()
                .map(|count| format!("{before}{}{after}", link.repeat(count)));
            let source = most.into_iter().find(|source| check(source).is_ok()).expect(before);
            // Nested in as many blocks as the library allows, which may refuse it but must not trap.
            for depth in [0, 10, 22] {
                let nested = format!(
                    "{}{source}{}",
                    "{% if a %}".repeat(depth),
                    "{% endif %}".repeat(depth)
                );
                let _ = ChatTemplate::compile(&nested, &BTreeMap::new());
            }
            let compiled = ChatTemplate::compile(&source, &BTreeMap::new());
            assert!(compiled.is_ok(), "{before}: {compiled:?}");
        }
    }

    #[test]
    fn what_stands_side_by_side_is_not_deep() {
        let list = "'a': [1, 2], ".repeat(2_000);
        assert_eq!(check(&format!("{{% set x = {{ {list} }} %}}")), Ok(()));
        assert_eq!(check(&"{{ a.b ~ 'x' }}\n".repeat(2_000)), Ok(()));
        assert_eq!(check(&"{% if a %}{% elif b %}{% endif %}".repeat(2_000)), Ok(()));
    }
}
