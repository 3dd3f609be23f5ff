//! A [`crate::request::Chat`], rendered to the text the engine would render.
//!
//! Two steps, each documented where it is: what the engine does to a body before it renders (`normalise`), and
//! Jinja as Hugging Face sets it up (`builtins`, `python`, `clock`), of which what most chats need is done without the
//! Jinja library (`direct`). It does not tokenize, it has no clock, and it renders only the model's own template, never
//! one that a client sent.

mod anthropic;
mod bounds;
mod builtins;
mod clock;
mod content;
mod deepseek;
mod direct;
mod engines;
mod filters;
mod final_message;
mod harmony;
mod joined;
mod methods;
pub mod named;
mod normalise;
mod parts;
mod python;
mod renderer;
mod transformers;
mod values;

use crate::request::Chat;
use crate::tokens::Pieces;
use direct::Direct;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::{fmt, io};

pub use content::ContentFormat;
pub use deepseek::DeepSeekV4;
pub use harmony::Harmony;
pub use renderer::{Renderer, RendererName};

/// The one template's name in its environment.
const NAME: &str = "chat";

/// The variable through which `strftime_now` learns the time.
const NOW: &str = " now";

/// Work one rendering may do: about an instruction, or 64 bytes of text, a unit. It cannot be interrupted. 2,000 messages
/// of 4 MB in all take some 400,000 and 10 to 20 ms; four fifths would refuse those. Of short messages each unit takes
/// longer, up to 80 ns: double would let a template hold a worker for more than 50 ms.
const FUEL: u64 = 500_000;

/// Messages of a chat that is rendered. However short, each takes a template some 30 units of fuel that last longer than
/// most: 16,000 of one word took 46 ms natively and twice that in Envoy. Halved, agents of a thousand steps are near it.
const MAX_MESSAGES: usize = 5_000;

/// Bytes of text in a chat's tools. Templates write them as JSON: 4 MB take up to 33 ms natively, where each
/// character is escaped.
const MAX_TOOL_BYTES: usize = 1 << 20;

/// Bytes one rendering may write: four times the largest body that Envoy is configured to hold for us.
const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// How deep a template may nest calls of its own macros (ten a call). The VM's stack is 1 MB.
const MAX_RECURSION: usize = 150;

/// A compiled chat template.
pub struct ChatTemplate {
    env: Environment<'static>,
    /// The same, for what is done without the library.
    direct: Direct,
    source: String,
    format: ContentFormat,
    special_tokens: BTreeMap<String, String>,
    /// The template for chats with tools, where that is another.
    tool_use: Option<Box<Self>>,
}

/// Why a chat could not be rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateError {
    /// The model has no chat template.
    Absent,
    /// The source is not valid Jinja.
    Syntax(String),
    /// The template called `raise_exception` with this text: the engine refuses the request.
    Raised(String),
    /// The template failed otherwise, as it would in Python.
    Failed(String),
    /// The template worked too long, too deep, or wrote too much.
    Limit,
    /// A message, tool call or tool that the engine refuses.
    Refused(&'static str),
    /// A number that Python would print with digits the JSON reader no longer knows.
    Number,
    /// Tool call arguments that Python can read and the JSON reader cannot.
    Arguments,
    /// `continue_final_message` with a message that cannot be found in what was rendered.
    FinalMessage,
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("the model has no chat template"),
            Self::Syntax(detail) => write!(f, "the chat template does not compile: {detail}"),
            Self::Raised(message) => write!(f, "the chat template raised: {message}"),
            Self::Failed(detail) => write!(f, "the chat template failed: {detail}"),
            Self::Limit => f.write_str("the chat template passed a limit"),
            Self::Refused(what) => write!(f, "{what}: not what the engine accepts"),
            Self::Number => f.write_str("a number of more than 64 bits, or a negative zero"),
            Self::Arguments => f.write_str("tool call arguments that only Python can read"),
            Self::FinalMessage => f.write_str("the final message to continue was not rendered"),
        }
    }
}

impl std::error::Error for TemplateError {}

/// Marks an error as raised by the template itself.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("format", &self.format).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template, or two that [`named`] has joined; `special_tokens` maps `bos_token`, `eos_token` and the like to
    /// their text.
    ///
    /// # Errors
    /// When a source is not valid Jinja.
    pub fn compile(
        sources: &str,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Self, TemplateError> {
        let (default, tool_use) = named::split(sources);
        let mut template = Self::compile_one(default, special_tokens)?;
        if let Some(tool_use) = tool_use {
            template.tool_use = Some(Box::new(Self::compile_one(tool_use, special_tokens)?));
        }
        Ok(template)
    }

    fn compile_one(
        source: &str,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Self, TemplateError> {
        bounds::check(source).map_err(TemplateError::Syntax)?;
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(|error| TemplateError::Syntax(error.to_string()))?;
        let mut env = Environment::new();
        env.set_syntax(syntax.clone());
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_fuel(Some(FUEL));
        env.set_recursion_limit(MAX_RECURSION);
        builtins::add_to(&mut env);
        joined::add_to(&mut env);
        let read = joined::apart(&as_the_library_reads_it(source));
        let direct = Direct::compile(&read, syntax)?;
        env.add_template_owned(NAME, read)
            .map_err(|error| TemplateError::Syntax(error.to_string()))?;
        Ok(Self {
            env,
            direct,
            source: source.to_owned(),
            format: ContentFormat::of_template(source),
            special_tokens: special_tokens.clone(),
            tool_use: None,
        })
    }

    /// Renders a chat as the engine does, in one go. `now` is seconds since the Unix epoch in the engine's time zone.
    ///
    /// # Errors
    /// When the engine would refuse the chat, the template raises or a limit is passed.
    pub fn render(&self, chat: &Chat, now: u64) -> Result<String, TemplateError> {
        self.finish(Rendering::Chat(Box::new(chat.clone())), now)
    }

    /// One step of rendering a chat: the engine's normalisation, then values for the template, then the template, which
    /// its fuel bounds.
    ///
    /// # Errors
    /// When the engine would refuse the chat, the template raises or a limit is passed.
    pub fn step(&self, rendering: Rendering, now: u64) -> Result<Rendering, TemplateError> {
        Ok(match rendering {
            Rendering::Chat(chat) if !is_bounded(&chat) => return Err(TemplateError::Limit),
            Rendering::Chat(mut chat) => {
                let chosen = self.chosen(chat.tools.is_some());
                anthropic::adapt(chosen, &mut chat, now);
                Rendering::Variables(normalise::variables(*chat, chosen.format, &chosen.source)?)
            }
            Rendering::Variables(mut variables) => {
                let has_tools = variables.get("tools").is_some_and(|tools| !tools.is_null());
                let chosen = self.chosen(has_tools);
                let last = chosen.mark_final_message(&mut variables)?;
                if let Some(text) = chosen.direct.render(&self.special_tokens, &variables, now) {
                    return cut(text, last).map(Rendering::Text);
                }
                Rendering::Values(Values {
                    context: self.context(variables, now)?,
                    last,
                    has_tools,
                })
            }
            Rendering::Values(Values { context, last, has_tools }) => {
                cut(self.chosen(has_tools).run(context)?, last).map(Rendering::Text)?
            }
            done @ (Rendering::Text(_) | Rendering::Pieces(_)) => done,
        })
    }

    /// Renders what transformers' `apply_chat_template` is given, as it does, `continue_final_message` included: without
    /// the engine's normalisation, and with transformers' own.
    ///
    /// # Errors
    /// When it would refuse the messages, the template raises or a limit is passed.
    pub fn render_variables(
        &self,
        mut variables: Map<String, Json>,
        now: u64,
    ) -> Result<String, TemplateError> {
        transformers::normalise(&mut variables)?;
        self.finish(Rendering::Variables(variables), now)
    }

    /// The template that renders chats with tools, or without.
    fn chosen(&self, has_tools: bool) -> &Self {
        self.tool_use.as_deref().filter(|_| has_tools).unwrap_or(self)
    }

    fn finish(&self, mut rendering: Rendering, now: u64) -> Result<String, TemplateError> {
        loop {
            rendering = match self.step(rendering, now)? {
                Rendering::Text(text) => return Ok(text),
                Rendering::Pieces(pieces) => return Ok(pieces.text().to_owned()),
                rendering => rendering,
            };
        }
    }

    fn mark_final_message(
        &self,
        variables: &mut Map<String, Json>,
    ) -> Result<Option<String>, TemplateError> {
        match variables.shift_remove("continue_final_message") {
            Some(Json::Bool(true)) => final_message::mark(variables, &self.source).map(Some),
            _ => Ok(None),
        }
    }

    fn context(&self, variables: Map<String, Json>, now: u64) -> Result<Value, TemplateError> {
        let mut context: BTreeMap<String, Value> = BTreeMap::new();
        for (name, text) in &self.special_tokens {
            context.insert(name.clone(), Value::from(text.as_str()));
        }
        for (name, json) in variables {
            context.insert(name, values::value(json)?);
        }
        context.insert(NOW.to_owned(), Value::from(now));
        Ok(Value::from_pairs(context))
    }

    fn run(&self, context: Value) -> Result<String, TemplateError> {
        let template = self.env.get_template(NAME).map_err(failed)?;
        let mut out = Bounded(Vec::new());
        template.render_captured_to(context, &mut out).map_err(failed)?;
        String::from_utf8(out.0).map_err(|error| TemplateError::Failed(error.to_string()))
    }
}

/// What was rendered, up to the end of the final message where that is to be continued.
fn cut(text: String, last: Option<String>) -> Result<String, TemplateError> {
    match last {
        Some(last) => final_message::cut_after(text, &last),
        None => Ok(text),
    }
}

/// Whether a chat can be rendered in one go.
fn is_bounded(chat: &Chat) -> bool {
    let mut tools = chat.tools.iter().flatten().flat_map(|tool| tool.values());
    let mut left = MAX_TOOL_BYTES;
    chat.messages.len() <= MAX_MESSAGES && tools.all(|value| take_text(value, &mut left))
}

/// Takes a value's texts from what is `left`, if there is enough.
fn take_text(value: &Json, left: &mut usize) -> bool {
    match value {
        Json::String(text) => left.checked_sub(text.len()).map(|rest| *left = rest).is_some(),
        Json::Array(values) => values.iter().all(|value| take_text(value, left)),
        Json::Object(fields) => fields.values().all(|value| take_text(value, left)),
        _ => true,
    }
}

/// A chat on its way to its text.
pub enum Rendering {
    /// As the client wrote it.
    Chat(Box<Chat>),
    /// As the engine gives it to the template.
    Variables(Map<String, Json>),
    /// As the template takes it.
    Values(Values),
    /// Rendered: a text in which added tokens are found where they stand.
    Text(String),
    /// Rendered: pieces that say themselves which of them are added tokens.
    Pieces(Pieces),
}

/// What a template is given.
pub struct Values {
    context: Value,
    /// The final message, where it is to be continued.
    last: Option<String>,
    has_tools: bool,
}

/// The source, with what the Jinja library reads otherwise or not at all written as it reads it.
///
/// `{% generation %}` only marks the assistant's tokens for training; the block renders as it stands, with names of its
/// own. `{% raw %}` keeps the newline behind it, unlike other tags.
fn as_the_library_reads_it(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, from_tag)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        rest = from_tag;
        let Some((tag, after)) = rest.split_once("%}") else { break };
        let replaced = match tag.trim_matches(['-', '+']).trim() {
            "generation" => Some("with"),
            "endgeneration" => Some("endwith"),
            "raw" if !tag.ends_with('-') && after.starts_with('\n') => {
                out.push_str(tag);
                out.push_str("%}\n");
                rest = after;
                continue;
            }
            _ => None,
        };
        if let Some(replaced) = replaced {
            out.push_str(if tag.starts_with('-') { "- " } else { " " });
            out.push_str(replaced);
            out.push_str(if tag.ends_with('-') { " -%}" } else { " %}" });
            rest = after;
        }
    }
    out.push_str(rest);
    out
}

fn failed(error: Error) -> TemplateError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = source {
        if let Some(Raised(message)) = current.downcast_ref::<Raised>() {
            return TemplateError::Raised(message.clone());
        }
        if let Some(inner) = current.downcast_ref::<Error>()
            && (inner.kind() == ErrorKind::OutOfFuel || inner.kind() == ErrorKind::WriteFailure)
        {
            return TemplateError::Limit;
        }
        source = current.source();
    }
    TemplateError::Failed(error.to_string())
}

/// Bytes that a text being rendered grows by.
const LEAST_ROOM: usize = 16 << 10;
const MOST_ROOM: usize = 1 << 20;

/// What has been rendered, up to [`MAX_OUTPUT_BYTES`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len().saturating_add(bytes.len()) > MAX_OUTPUT_BYTES {
            return Err(io::Error::other("too much output"));
        }
        if self.0.capacity() - self.0.len() < bytes.len() {
            // By more than a vector grows by itself: each time all that is there is copied.
            self.0.reserve(bytes.len() + (3 * self.0.len()).clamp(LEAST_ROOM, MOST_ROOM));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{self, Api, Input};

    fn json(text: &str) -> Map<String, Json> {
        serde_json::from_str(text).expect(text)
    }

    #[track_caller]
    fn check(source: &str, variables: &str, expected: &str) {
        let template = ChatTemplate::compile(source, &BTreeMap::new()).expect(source);
        let rendered = template.render_variables(json(variables), 0);
        assert_eq!(rendered.as_deref(), Ok(expected), "{source}");
    }

    #[track_caller]
    fn check_error(source: &str, expected: fn(&TemplateError) -> bool) {
        let rendered = match ChatTemplate::compile(source, &BTreeMap::new()) {
            Ok(template) => template.render_variables(Map::new(), 0),
            Err(error) => Err(error),
        };
        assert!(rendered.as_ref().is_err_and(expected), "{source}: {rendered:?}");
    }

    #[test]
    fn white_space_around_blocks_is_hugging_faces() {
        check("{% if true %}\na\n  {% endif %}\nb\n", "{}", "a\nb");
        check("  {%- set x = 1 %}\n{{ x }}", "{}", "1");
    }

    #[test]
    fn loops_can_break_and_continue() {
        let source = "{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% endif %}\
            {% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}";
        check(source, "{}", "13");
    }

    #[test]
    fn generation_tags_leave_their_content() {
        check("a{% generation %}b{% endgeneration %}c", "{}", "abc");
        check("a {%- generation -%} b {%- endgeneration -%} c", "{}", "abc");
        check("{{ '{% generation' }}", "{}", "{% generation");
        check("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", "{}", "1");
    }

    #[test]
    fn raw_blocks_keep_the_newline_they_begin_with() {
        check("{% raw %}\na{{ b }}\n{% endraw %}\nc", "{}", "\na{{ b }}\nc");
        check("{% raw -%}\na{% endraw %}", "{}", "a");
    }

    #[test]
    fn raised_exceptions_keep_their_text() {
        let source = "{{ raise_exception('no ' ~ 'way') }}";
        check_error(source, |error| *error == TemplateError::Raised("no way".to_owned()));
    }

    #[test]
    fn failures_are_told_from_syntax_and_limits() {
        check_error("{% if %}", |error| matches!(error, TemplateError::Syntax(_)));
        check_error("{{ a.b.c }}", |error| matches!(error, TemplateError::Failed(_)));
        check_error("{{ 'a' + [] }}", |error| matches!(error, TemplateError::Failed(_)));
    }

    #[test]
    fn endless_work_ends() {
        let endless =
            "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
        check_error(endless, |error| *error == TemplateError::Limit);
        let doubling = "{% set ns = namespace(x='ab') %}{% for a in range(40) %}\
            {% set ns.x = ns.x ~ ns.x %}{% endfor %}";
        check_error(doubling, |error| *error == TemplateError::Limit);
    }

    #[test]
    fn what_takes_too_long_to_render_is_not_begun() {
        let template = ChatTemplate::compile("{{ messages | length }}", &BTreeMap::new());
        let template = template.expect("a template");
        let check = |messages: usize, tool: usize, expected: &Result<&str, TemplateError>| {
            let message = json(r#"{"role": "user", "content": "a"}"#);
            let function = serde_json::json!({"name": "f", "description": "d".repeat(tool)});
            let tool = serde_json::json!({"type": "function", "function": function});
            let tools = vec![tool.as_object().expect("an object").clone()];
            let chat =
                Chat { messages: vec![message; messages], tools: Some(tools), ..Chat::default() };
            assert_eq!(&template.render(&chat, 0).as_deref().map_err(Clone::clone), expected);
        };
        check(MAX_MESSAGES, 1, &Ok("5000"));
        check(MAX_MESSAGES + 1, 1, &Err(TemplateError::Limit));
        check(1, MAX_TOOL_BYTES - 100, &Ok("1"));
        check(1, MAX_TOOL_BYTES, &Err(TemplateError::Limit));
    }

    #[test]
    fn endless_output_ends() {
        let source = "{% set x = 'x' * 1000000 %}{% for a in range(100) %}{{ x }}{% endfor %}";
        check_error(source, |error| *error == TemplateError::Limit);
    }

    #[test]
    fn endless_recursion_ends() {
        let source = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
        check_error(source, |error| matches!(error, TemplateError::Failed(_)));
    }

    #[test]
    fn chats_with_tools_have_the_template_named_tool_use() {
        let default = "{% for m in messages %}{{ m.content }}{% endfor %}";
        let tool_use = "{{ tools | length }}{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}";
        let sources = named::join([("tool_use", tool_use), ("default", default)]).expect("two");
        let template = ChatTemplate::compile(&sources, &BTreeMap::new()).expect("compile");
        let tool = r#"[{"type": "function", "function": {"name": "f"}}]"#;
        for (tools, expected) in [("null", "a"), (tool, "1<a>")] {
            let body = format!(
                r#"{{"messages": [{{"role": "user", "content": "a"}}], "tools": {tools}}}"#
            );
            let prompt = request::parse(Api::Chat, body.as_bytes()).expect("a prompt");
            let Input::Chat(chat) = &prompt.input else { panic!("a chat") };
            assert_eq!(template.render(chat, 0).as_deref(), Ok(expected), "{tools}");
        }
    }

    /// As Llama 3.x's templates take the date.
    #[test]
    fn date_is_the_engines_day_unless_the_request_names_one() {
        let source = "{% if not date_string is defined %}{% if strftime_now is defined %}\
            {% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}\
            {{ date_string }}";
        let template = ChatTemplate::compile(source, &BTreeMap::new()).expect("compile");
        let midnight = 1_768_521_600;
        let hours = 3600;
        for (now, arguments, expected) in [
            (midnight - 1, "{}", "15 Jan 2026"),
            (midnight + 1, "{}", "16 Jan 2026"),
            (midnight + 1 - 8 * hours, "{}", "15 Jan 2026"),
            (midnight + 1, r#"{"date_string": "26 Jul 2024"}"#, "26 Jul 2024"),
        ] {
            let body = format!(
                r#"{{"messages": [{{"role": "user", "content": "a"}}], "chat_template_kwargs": {arguments}}}"#
            );
            let prompt = request::parse(Api::Chat, body.as_bytes()).expect("a prompt");
            let Input::Chat(chat) = &prompt.input else { panic!("a chat") };
            assert_eq!(template.render(chat, now).as_deref(), Ok(expected), "{now} {arguments}");
        }
    }

    #[test]
    fn special_tokens_are_variables_that_arguments_can_override() {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        let template = ChatTemplate::compile("{{ bos_token }}{{ eos_token }}", &tokens);
        let template = template.expect("compile");
        assert_eq!(template.render_variables(Map::new(), 0).as_deref(), Ok("<s>"));
        let own = json(r#"{"bos_token": "b"}"#);
        assert_eq!(template.render_variables(own, 0).as_deref(), Ok("b"));
    }

    #[test]
    fn numbers_whose_digits_are_lost_are_refused() {
        let template = ChatTemplate::compile("{{ x }}", &BTreeMap::new()).expect("compile");
        for number in ["18446744073709551616", "-9223372036854775809", "1e20", "-0"] {
            let variables = json(&format!(r#"{{"x": {number}}}"#));
            assert_eq!(
                template.render_variables(variables, 0),
                Err(TemplateError::Number),
                "{number}"
            );
        }
        check("{{ x }}", r#"{"x": 18446744073709551615}"#, "18446744073709551615");
        check("{{ x }}", r#"{"x": -9223372036854775808}"#, "-9223372036854775808");
    }

    #[test]
    fn deepest_json_prints_within_the_stack() {
        let deep = format!("{}1{}", r#"[{"a": "#.repeat(60), "}]".repeat(60));
        let variables = format!(r#"{{"x": {deep}}}"#);
        check("{{ x | tojson }}", &variables, &deep);
        check("{{ x }}", &variables, &deep.replace('"', "'"));
    }

    #[test]
    fn texts_and_parts_are_rendered_as_each_kind_of_template_takes_them() {
        let of_text = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
        let of_parts = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}";
        let (text, one) = (r#""a""#, r#"[{"type": "text", "text": "a"}]"#);
        let two = r#"[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]"#;
        for (source, content, expected) in [
            (of_text, text, "<a>"),
            (of_text, one, "<a>"),
            (of_text, two, "<a\nb>"),
            (of_parts, text, "<a>"),
            (of_parts, one, "<a>"),
            (of_parts, two, "<a><b>"),
        ] {
            let body = format!(r#"{{"messages": [{{"role": "user", "content": {content}}}]}}"#);
            let prompt = request::parse(Api::Chat, body.as_bytes()).expect("a prompt");
            let Input::Chat(chat) = &prompt.input else { panic!("a chat") };
            let template = ChatTemplate::compile(source, &BTreeMap::new()).expect("compile");
            assert_eq!(template.render(chat, 0).as_deref(), Ok(expected), "{source} {content}");
        }
    }

    #[test]
    fn one_template_renders_many_chats_of_megabytes() {
        let source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}";
        let template = ChatTemplate::compile(source, &BTreeMap::new()).expect("compile");
        let message = format!(r#"{{"role": "user", "content": "{}"}}"#, "word ".repeat(800));
        let messages = vec![message; 1000].join(",");
        let variables = json(&format!(r#"{{"messages": [{messages}]}}"#));
        for _ in 0..2 {
            let text = template.render_variables(variables.clone(), 0).expect("render");
            assert_eq!(text.len(), 1000 * ("user: \n".len() + 800 * 5 - 1));
        }
    }
}
