//! Whether a template wants a message's content as a text or as a list of parts.
//!
//! vLLM decides by the template's syntax tree: is there a `for` loop over the content of a message? This finds the
//! same loops in the template's tokens, because the syntax tree of the Jinja library is not part of its stable API.
//! It follows vLLM's reading, blind spots included (loops are matched by the names of variables, wherever they
//! stand), since what counts is to decide as it does. It does not check the template.

/// The form in which a template takes content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentFormat {
    /// One text.
    Text,
    /// A list of parts.
    Parts,
}

impl ContentFormat {
    /// The form that the engine would choose for a template.
    pub fn of_template(source: &str) -> Self {
        let blocks = blocks(source);
        match loops_over_content(&blocks) {
            Ok(true) => Self::Parts,
            // vLLM falls back to text where its own search trips over a target that is not a plain name.
            Ok(false) | Err(NotAName) => Self::Text,
        }
    }
}

/// Whether a loop goes over the content of a message with one of these names.
pub(super) fn loops_over_content_of(source: &str, messages: &[&str]) -> bool {
    blocks(source).iter().filter_map(for_loop).any(|(_, iterated)| {
        messages.iter().any(|name| is_elements(iterated, name, Some("content")))
    })
}

/// A loop or assignment target that is not one plain name.
struct NotAName;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Token<'a> {
    Name(&'a str),
    Text(&'a str),
    Sign(char),
}

/// The tokens between one `{%` or `{{` and its end.
struct Block<'a> {
    is_statement: bool,
    tokens: Vec<Token<'a>>,
}

impl<'a> Block<'a> {
    /// The tokens after a statement's keyword.
    fn statement(&self, keyword: &str) -> Option<&[Token<'a>]> {
        match self.tokens.split_first() {
            Some((Token::Name(name), rest)) if self.is_statement && *name == keyword => Some(rest),
            _ => None,
        }
    }
}

fn blocks(source: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut rest = source;
    while let Some(at) = rest.find("{") {
        let from = rest.get(at..).unwrap_or_default();
        let Some(body) = from.get(2..) else { break };
        if from.starts_with("{#") {
            rest = body.split_once("#}").map_or("", |(_, after)| after);
        } else if from.starts_with("{%") || from.starts_with("{{") {
            let (tokens, after) = tokens(body);
            blocks.push(Block { is_statement: from.starts_with("{%"), tokens });
            rest = after;
        } else {
            rest = from.get(1..).unwrap_or_default();
        }
    }
    blocks
}

/// The tokens up to the end of a block, and what follows it.
fn tokens(body: &str) -> (Vec<Token<'_>>, &str) {
    let mut tokens = Vec::new();
    let mut braces = 0_usize;
    let mut rest = body;
    while let Some(c) = rest.chars().next() {
        let after = rest.get(c.len_utf8()..).unwrap_or_default();
        if braces == 0 && (rest.starts_with("%}") || rest.starts_with("}}")) {
            return (tokens, rest.get(2..).unwrap_or_default());
        }
        match c {
            '\'' | '"' => {
                let length = text_length(after, c);
                tokens.push(Token::Text(after.get(..length).unwrap_or(after)));
                rest = after.get(length + 1..).unwrap_or_default();
                continue;
            }
            c if c.is_alphanumeric() || c == '_' => {
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                let (name, after) =
                    rest.split_at_checked(end.unwrap_or(rest.len())).unwrap_or((rest, ""));
                tokens.push(Token::Name(name));
                rest = after;
                continue;
            }
            '{' => braces += 1,
            '}' => braces = braces.saturating_sub(1),
            _ => {}
        }
        // A `-` or `+` at either end of a block strips white space and is no part of the expression.
        let strips = matches!(c, '-' | '+')
            && (tokens.is_empty() || after.starts_with("%}") || after.starts_with("}}"));
        if !c.is_whitespace() && !strips {
            tokens.push(Token::Sign(c));
        }
        rest = after;
    }
    (tokens, "")
}

fn text_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at,
            _ => {}
        }
    }
    text.len()
}

fn loops_over_content(blocks: &[Block<'_>]) -> Result<bool, NotAName> {
    let messages = message_names(blocks)?;
    // One entry for each macro that is open at this point: the parameters that some call gives content to.
    let mut open_macros: Vec<Vec<&str>> = Vec::new();
    for block in blocks {
        if let Some(signature) = block.statement("macro") {
            open_macros.push(content_parameters(signature, blocks, &messages));
        } else if block.statement("endmacro").is_some() {
            open_macros.pop();
        }
        let Some((target, iterated)) = for_loop(block) else { continue };
        let is_content = match iterated {
            [Token::Name(name)] if open_macros.is_empty() => *name == "content",
            [Token::Name(name)] => open_macros.iter().flatten().any(|parameter| parameter == name),
            _ => false,
        };
        if is_content || messages.iter().any(|name| is_elements(iterated, name, Some("content"))) {
            return plain_name(target).map(|_| true);
        }
    }
    Ok(false)
}

/// Names that some loop gives to a message.
fn message_names<'a>(blocks: &'a [Block<'a>]) -> Result<Vec<&'a str>, NotAName> {
    let mut lists = vec!["messages"];
    let mut next = 0;
    while let Some(list) = lists.get(next).copied() {
        for statement in blocks.iter().filter_map(|block| block.statement("set")) {
            let Some(at) = statement.iter().position(|token| *token == Token::Sign('=')) else {
                continue;
            };
            let (target, value) = statement.split_at_checked(at).unwrap_or_default();
            if is_elements(value.get(1..).unwrap_or_default(), list, None) {
                let name = plain_name(target)?;
                if !lists.contains(&name) {
                    lists.push(name);
                }
            }
        }
        next += 1;
    }
    let mut names = Vec::new();
    for (target, iterated) in blocks.iter().filter_map(for_loop) {
        if lists.iter().any(|list| is_elements(iterated, list, None)) {
            names.push(plain_name(target)?);
        }
    }
    Ok(names)
}

fn plain_name<'a>(target: &[Token<'a>]) -> Result<&'a str, NotAName> {
    match target {
        [Token::Name(name)] => Ok(name),
        _ => Err(NotAName),
    }
}

/// Target and iterated expression of `for target in iterated [if ...] [recursive]`.
fn for_loop<'b, 'a>(block: &'b Block<'a>) -> Option<(&'b [Token<'a>], &'b [Token<'a>])> {
    let rest = block.statement("for")?;
    let (target, from_in) = rest.split_at_checked(at_depth_zero(rest, Token::Name("in"))?)?;
    let iterated = from_in.get(1..)?;
    let end = [Token::Name("if"), Token::Name("recursive")]
        .into_iter()
        .filter_map(|word| at_depth_zero(iterated, word))
        .min();
    Some((target, iterated.get(..end.unwrap_or(iterated.len()))?))
}

/// Where `wanted` first stands outside all brackets.
fn at_depth_zero(tokens: &[Token<'_>], wanted: Token<'_>) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate() {
        if depth == 0 && *token == wanted {
            return Some(at);
        }
        match token {
            Token::Sign('(' | '[' | '{') => depth += 1,
            Token::Sign(')' | ']' | '}') => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

/// Splits off what stands in the brackets that open `tokens`.
fn bracketed<'b, 'a>(tokens: &'b [Token<'a>]) -> Option<(&'b [Token<'a>], &'b [Token<'a>])> {
    let close = match tokens.first()? {
        Token::Sign('(') => ')',
        Token::Sign('[') => ']',
        _ => return None,
    };
    let inside = tokens.get(1..)?;
    let end = at_depth_zero(inside, Token::Sign(close))?;
    Some((inside.get(..end)?, inside.get(end + 1..)?))
}

/// Whether an expression is the variable `name` (or its attribute `key`), or all or some of its elements: it may be
/// sliced, filtered and tested.
fn is_elements(expression: &[Token<'_>], name: &str, key: Option<&str>) -> bool {
    let mut rest = match expression {
        [Token::Sign('('), ..] => match bracketed(expression) {
            Some((inside, rest)) if is_elements(inside, name, key) => rest,
            _ => return false,
        },
        [Token::Name(first), rest @ ..] if *first == name => match (key, rest) {
            (None, rest) => rest,
            (Some(key), [Token::Sign('.'), Token::Name(attribute), rest @ ..])
                if *attribute == key =>
            {
                rest
            }
            (Some(key), [Token::Sign('['), Token::Text(item), Token::Sign(']'), rest @ ..])
                if *item == key =>
            {
                rest
            }
            _ => return false,
        },
        _ => return false,
    };
    while !rest.is_empty() {
        let Some(after) = after_postfix(rest) else { return false };
        rest = after;
    }
    true
}

/// What follows one filter, test or slice.
fn after_postfix<'b, 'a>(tokens: &'b [Token<'a>]) -> Option<&'b [Token<'a>]> {
    let after = match tokens {
        [Token::Sign('['), ..] => {
            let (inside, rest) = bracketed(tokens)?;
            at_depth_zero(inside, Token::Sign(':'))?;
            return Some(rest);
        }
        [Token::Sign('|'), Token::Name(_), rest @ ..] => rest,
        [Token::Name("is"), Token::Name(test), rest @ ..] if *test != "not" => rest,
        _ => return None,
    };
    match after {
        [Token::Sign('('), ..] => bracketed(after).map(|(_, rest)| rest),
        _ => Some(after),
    }
}

/// The parameters of a macro that receive a message's content in some call.
fn content_parameters<'a>(
    signature: &[Token<'a>],
    blocks: &[Block<'_>],
    messages: &[&str],
) -> Vec<&'a str> {
    let Some((Token::Name(name), rest)) = signature.split_first() else { return Vec::new() };
    let Some((parameters, _)) = bracketed(rest) else { return Vec::new() };
    let parameters: Vec<&str> = split_commas(parameters)
        .into_iter()
        .filter_map(|parameter| match parameter.first() {
            Some(Token::Name(name)) => Some(*name),
            _ => None,
        })
        .collect();
    let is_content = |value: &[Token<'_>]| {
        messages.iter().any(|message| is_elements(value, message, Some("content")))
    };
    let mut found = Vec::new();
    for arguments in blocks.iter().flat_map(|block| calls(block, name)) {
        for (index, argument) in split_commas(arguments).into_iter().enumerate() {
            let parameter = match argument {
                [Token::Name(keyword), Token::Sign('='), value @ ..] if is_content(value) => {
                    parameters.iter().find(|parameter| *parameter == keyword)
                }
                value if is_content(value) => parameters.get(index),
                _ => None,
            };
            found.extend(parameter.copied());
        }
    }
    found
}

/// The arguments of each call of `name` in a block.
fn calls<'b, 'a>(block: &'b Block<'a>, name: &str) -> Vec<&'b [Token<'a>]> {
    let is_definition = block.statement("macro").is_some();
    let mut calls = Vec::new();
    for at in 0..block.tokens.len() {
        let is_attribute = at.checked_sub(1).and_then(|before| block.tokens.get(before))
            == Some(&Token::Sign('.'));
        if block.tokens.get(at) != Some(&Token::Name(name)) || is_attribute || is_definition {
            continue;
        }
        if let Some([Token::Sign('('), ..]) = block.tokens.get(at + 1..)
            && let Some((arguments, _)) = block.tokens.get(at + 1..).and_then(bracketed)
        {
            calls.push(arguments);
        }
    }
    calls
}

fn split_commas<'b, 'a>(mut tokens: &'b [Token<'a>]) -> Vec<&'b [Token<'a>]> {
    let mut parts = Vec::new();
    while !tokens.is_empty() {
        let end = at_depth_zero(tokens, Token::Sign(',')).unwrap_or(tokens.len());
        parts.extend(tokens.get(..end));
        tokens = tokens.get(end + 1..).unwrap_or_default();
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, expected: ContentFormat) {
        assert_eq!(ContentFormat::of_template(source), expected, "{source}");
    }

    #[test]
    fn loops_over_content_are_found() {
        let each = |message: &str, content: &str| {
            format!(
                "{{% for {message} in messages %}}{{%- for part in {content} -%}}{{% endfor %}}{{% endfor %}}"
            )
        };
        check(&each("message", "message['content']"), ContentFormat::Parts);
        check(
            &each("m", "m.content | selectattr('type', 'equalto', 'text')"),
            ContentFormat::Parts,
        );
        check(&each("m", "m.content[1:]"), ContentFormat::Parts);
        check(&each("m", "(m.content) if part.x"), ContentFormat::Parts);
        check(&each("m", "content"), ContentFormat::Parts);
        check(&each("m", "m.content[0]"), ContentFormat::Text);
        check(&each("m", "other.content"), ContentFormat::Text);
        check(&each("m", "m.tool_calls"), ContentFormat::Text);
    }

    #[test]
    fn messages_may_go_by_another_name() {
        let source = "{% set rest = messages[1:] %}{% set all = rest | list %}\
            {% for m in all %}{% for part in m.content %}{% endfor %}{% endfor %}";
        check(source, ContentFormat::Parts);
    }

    #[test]
    fn macros_count_when_they_are_given_content() {
        let source = |argument: &str| {
            format!(
                "{{% macro show(x, c=none) %}}{{% for part in c %}}{{% endfor %}}{{% endmacro %}}\
                 {{% for m in messages %}}{{{{ show(1, {argument}) }}}}{{% endfor %}}"
            )
        };
        check(&source("m.content"), ContentFormat::Parts);
        check(&source("c=m['content']"), ContentFormat::Parts);
        check(&source("m.role"), ContentFormat::Text);
        check(
            "{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}",
            ContentFormat::Text,
        );
    }

    #[test]
    fn words_in_texts_and_comments_are_not_code() {
        check("{# {% for part in content %} #}", ContentFormat::Text);
        check("{{ '{% for part in content %}' }}", ContentFormat::Text);
        check("{{ {'a': {'b': '}}'}} }}{% for part in content %}", ContentFormat::Parts);
        check("{ {% for part in content %}", ContentFormat::Parts);
        check("{%", ContentFormat::Text);
        check("é{", ContentFormat::Text);
    }

    #[test]
    fn targets_of_several_names_end_the_search() {
        let source = "{% for i, m in messages %}{% endfor %}{% for p in content %}{% endfor %}";
        check(source, ContentFormat::Text);
    }
}
