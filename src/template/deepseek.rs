//! DeepSeek V4's chats, which have no Jinja template: engines have the model's own encoder in code.
//!
//! Seen in vLLM 0.32, whose encoder can be called by itself. After the engine's normalisation (content as parts, the
//! developer's role kept):
//!
//! 1. Tools of the request go to the first system message, which is made where there is none.
//! 2. Messages of users and results of tools that follow each other are one message, their texts two lines apart, results
//!    in the order of their calls.
//! 3. A model thinks unless `thinking` and `enable_thinking` are both false, or the effort is `none`. If no message has
//!    tools and `drop_thinking` is not false, reasoning before the last user's message is dropped, and the developer's
//!    messages there with it.
//! 4. A prompt ends in `<｜Assistant｜>` and an opened or closed `<think>` behind a user's, a developer's or a last system
//!    message, in a task's token where it has one, and in nothing behind an assistant's.
//!
//! Texts are encoded as any template's are, special tokens and all. Generation prompts and `continue_final_message` are
//! not asked for; a response format does not reach the prompt. It does not render images.

use super::content::ContentFormat;
use super::python::Dumps;
use super::{Rendering, TemplateError, normalise, values};
use crate::request::Origin;
use crate::tokens::MAX_TEXT_BYTES;
use hashbrown::HashMap;
use serde_json::{Map, Value};
use std::sync::Arc;

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";
const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const REMINDER: &str = "<｜latest_reminder｜>";
const THINK: &str = "<think>";
const END_THINK: &str = "</think>";

/// What asks for the token of a task, and the token.
const TASKS: [(&str, &str); 6] = [
    ("action", "<｜action｜>"),
    ("query", "<｜query｜>"),
    ("authority", "<｜authority｜>"),
    ("domain", "<｜domain｜>"),
    ("title", "<｜title｜>"),
    ("read_url", "<｜read_url｜>"),
];

/// The model's own words, of DeepSeek's encoder: what a prompt that thinks begins with.
const HIGH_EFFORT: &str = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n\
    You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n\
    Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";
const MAX_EFFORT: &str = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n\
    You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n\
    Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n";

/// The model's own words around the schemas of tools.
const TOOLS: &str = "## Tools\n\n\
    You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \"<｜DSML｜tool_calls>\" block like the following:\n\n\
    <｜DSML｜tool_calls>\n\
    <｜DSML｜invoke name=\"$TOOL_NAME\">\n\
    <｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n\
    ...\n\
    </｜DSML｜invoke>\n\
    <｜DSML｜invoke name=\"$TOOL_NAME2\">\n\
    ...\n\
    </｜DSML｜invoke>\n\
    </｜DSML｜tool_calls>\n\n\
    String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string=\"false\"`.\n\n\
    If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.\n\n\
    Otherwise, output directly after </think> with tool calls or final response.\n\n\
    ### Available Tool Schemas\n\n";
const AFTER_TOOLS: &str = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";

/// Renders chats as DeepSeek V4's encoder does.
#[derive(Debug)]
pub struct DeepSeekV4;

impl DeepSeekV4 {
    /// One step of rendering: the engine's normalisation, then the encoder.
    pub(super) fn step(&self, rendering: Rendering) -> Result<Rendering, TemplateError> {
        match rendering {
            Rendering::Chat(chat) if !chat.media.is_empty() => {
                Err(TemplateError::Refused("content"))
            }
            Rendering::Chat(mut chat) => {
                // The encoder takes parts, whatever is configured for a template.
                if chat.rules.content_format.is_some() {
                    Arc::make_mut(&mut chat.rules).content_format = None;
                }
                if chat.origin == (Origin::Messages { thinking_is_disabled: true }) {
                    chat.reasoning_effort = Some("none".to_owned());
                }
                // A template that names this role is one for which the role is kept.
                let format = ContentFormat::Parts;
                normalise::variables(*chat, format, "'developer'").map(Rendering::Variables)
            }
            Rendering::Variables(variables) => render(&variables).map(Rendering::Text),
            done => Ok(done),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Reminder,
}

/// A message, or several that were made one.
struct Turn<'a> {
    role: Role,
    blocks: Vec<Block<'a>>,
    tools: &'a [Value],
    calls: &'a [Value],
    reasoning: &'a str,
    task: Option<&'a str>,
}

/// One text of a turn.
#[derive(Default)]
struct Block<'a> {
    text: String,
    /// The call whose result it is.
    result_of: Option<&'a str>,
}

/// How the request wants it.
struct Mode {
    thinks: bool,
    effort: &'static str,
    drops_thinking: bool,
}

fn render(variables: &Map<String, Value>) -> Result<String, TemplateError> {
    let mut turns = turns(variables)?;
    let mut mode = mode(variables);
    mode.drops_thinking &= turns.iter().all(|turn| turn.tools.is_empty());
    order_results(&mut turns);
    if mode.thinks && mode.drops_thinking {
        turns = without_thinking(turns);
    }
    let last_user = last_user(&turns);
    let mut writer = Writer(BOS.to_owned());
    if mode.thinks && !turns.is_empty() {
        writer.push(&[mode.effort])?;
    }
    for (at, turn) in turns.iter().enumerate() {
        let before = at.checked_sub(1).and_then(|before| turns.get(before));
        let is_current = last_user.is_none_or(|last| at > last);
        let reasons = mode.thinks
            && before.is_none_or(|before| before.task.is_none())
            && (!mode.drops_thinking || is_current);
        writer.turn(turn, reasons)?;
        let after = turns.get(at + 1).map(|turn| turn.role);
        if !matches!(after, None | Some(Role::Assistant | Role::Reminder)) {
            continue;
        }
        let opens = is_current || last_user == Some(at);
        writer.transition(turn, after, &mode, opens)?;
    }
    Ok(writer.0)
}

fn mode(variables: &Map<String, Value>) -> Mode {
    let (thinking, enabled) = (variables.get("thinking"), variables.get("enable_thinking"));
    let mut thinks = match (thinking, enabled) {
        (None, None) => true,
        (thinking, enabled) => thinking.is_some_and(is_true) || enabled.is_some_and(is_true),
    };
    let effort = match variables.get("reasoning_effort").and_then(Value::as_str) {
        Some("none") => {
            thinks = false;
            ""
        }
        Some("max") => MAX_EFFORT,
        Some("low" | "minimal" | "medium") => "",
        _ => HIGH_EFFORT,
    };
    let drops_thinking = variables.get("drop_thinking").is_none_or(is_true);
    Mode { thinks, effort, drops_thinking }
}

/// Whether Python takes a value for true.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

fn list<'a>(
    fields: &'a Map<String, Value>,
    name: &'static str,
) -> Result<&'a [Value], TemplateError> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(_) => Err(TemplateError::Refused(name)),
    }
}

fn turns(variables: &Map<String, Value>) -> Result<Vec<Turn<'_>>, TemplateError> {
    let mut turns: Vec<Turn<'_>> = Vec::new();
    for message in list(variables, "messages")? {
        let Value::Object(message) = message else {
            return Err(TemplateError::Refused("messages"));
        };
        let text = text(message)?;
        let role = match message.get("role").and_then(Value::as_str).unwrap_or_default() {
            "tool" => {
                let id = message.get("tool_call_id").and_then(Value::as_str).unwrap_or_default();
                let block = Block { text, result_of: Some(id) };
                match turns.last_mut().filter(|turn| turn.role == Role::User) {
                    Some(turn) => turn.blocks.push(block),
                    None => turns.push(Turn::new(Role::User, block)),
                }
                continue;
            }
            "user" => Role::User,
            "system" => Role::System,
            "developer" => Role::Developer,
            "assistant" => Role::Assistant,
            "latest_reminder" => Role::Reminder,
            _ => return Err(TemplateError::Refused("role")),
        };
        let block = Block { text, result_of: None };
        let last = turns.last_mut();
        match last.filter(|last| [role, last.role] == [Role::User; 2] && last.task.is_none()) {
            Some(turn) => turn.blocks.push(block),
            None => turns.push(Turn::of_message(role, message, block)?),
        }
    }
    let tools = list(variables, "tools")?;
    if !tools.is_empty() {
        let system = turns.iter().position(|turn| turn.role == Role::System);
        if system.is_none() {
            turns.insert(0, Turn::new(Role::System, Block::default()));
        }
        if let Some(turn) = turns.get_mut(system.unwrap_or_default()) {
            turn.tools = tools;
        }
    }
    Ok(turns)
}

/// The content of a message as one text.
fn text(message: &Map<String, Value>) -> Result<String, TemplateError> {
    let refused = TemplateError::Refused("content");
    match message.get("content") {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let is_result = message.get("role").and_then(Value::as_str) == Some("tool");
            let mut texts = Vec::with_capacity(parts.len());
            for part in parts {
                let field = |name| part.get(name).and_then(Value::as_str);
                texts.push(match field("type") {
                    Some("text") => field("text").unwrap_or_default().to_owned(),
                    Some(kind) if is_result => format!("[Unsupported {kind}]"),
                    _ => return Err(refused),
                });
            }
            Ok(texts.join("\n\n"))
        }
        Some(_) => Err(refused),
    }
}

impl<'a> Turn<'a> {
    fn new(role: Role, block: Block<'a>) -> Self {
        Self { role, blocks: vec![block], tools: &[], calls: &[], reasoning: "", task: None }
    }

    fn of_message(
        role: Role,
        message: &'a Map<String, Value>,
        block: Block<'a>,
    ) -> Result<Self, TemplateError> {
        let mut turn = Self::new(role, block);
        turn.tools = list(message, "tools")?;
        turn.calls = list(message, "tool_calls")?;
        turn.reasoning = match message.get("reasoning") {
            None | Some(Value::Null) => "",
            Some(Value::String(text)) => text,
            Some(_) => return Err(TemplateError::Refused("reasoning")),
        };
        turn.task = message.get("task").and_then(Value::as_str);
        Ok(turn)
    }

    fn is_users(&self) -> bool {
        matches!(self.role, Role::User | Role::Developer)
    }
}

fn last_user(turns: &[Turn<'_>]) -> Option<usize> {
    turns.iter().rposition(Turn::is_users)
}

/// Puts the results in each turn into the order of the calls before it, at the places where there are results.
fn order_results(turns: &mut [Turn<'_>]) {
    let mut order: HashMap<&str, usize> = HashMap::new();
    for turn in turns {
        if !turn.calls.is_empty() {
            order.clear();
            for (at, call) in turn.calls.iter().enumerate() {
                let own = call.get("id").and_then(Value::as_str).filter(|id| !id.is_empty());
                let of_function = || call.get("function")?.get("id")?.as_str();
                if let Some(id) = own.or_else(of_function).filter(|id| !id.is_empty()) {
                    order.insert(id, at);
                }
            }
        }
        let place = |block: &Block<'_>| {
            block.result_of.map(|id| order.get(id).copied().unwrap_or_default())
        };
        let blocks = std::mem::take(&mut turn.blocks);
        let are_results: Vec<bool> = blocks.iter().map(|block| block.result_of.is_some()).collect();
        let (mut results, texts): (Vec<_>, Vec<_>) =
            blocks.into_iter().partition(|block| block.result_of.is_some());
        results.sort_by_key(place);
        let (mut results, mut texts) = (results.into_iter(), texts.into_iter());
        let next = |is_result| if is_result { results.next() } else { texts.next() };
        turn.blocks = are_results.into_iter().filter_map(next).collect();
    }
}

/// Drops what a model that thinks is not shown again.
fn without_thinking(mut turns: Vec<Turn<'_>>) -> Vec<Turn<'_>> {
    let last_user = last_user(&turns).unwrap_or_default();
    for turn in turns.iter_mut().take(last_user) {
        turn.reasoning = "";
    }
    let mut at = 0;
    turns.retain(|turn| {
        at += 1;
        at > last_user || turn.role != Role::Developer
    });
    turns
}

/// Writes a prompt, up to as many bytes as are encoded.
struct Writer(String);

impl Writer {
    fn push(&mut self, texts: &[&str]) -> Result<(), TemplateError> {
        let length: usize = texts.iter().map(|text| text.len()).sum();
        if self.0.len().saturating_add(length) > MAX_TEXT_BYTES {
            return Err(TemplateError::Limit);
        }
        self.0.extend(texts.iter().copied());
        Ok(())
    }

    fn turn(&mut self, turn: &Turn<'_>, reasons: bool) -> Result<(), TemplateError> {
        match turn.role {
            // One that was dropped before may say nothing.
            Role::Developer if turn.blocks.iter().all(|block| block.text.is_empty()) => {
                return Err(TemplateError::Refused("content"));
            }
            Role::User | Role::Developer => self.push(&[USER])?,
            Role::Reminder => self.push(&[REMINDER])?,
            Role::Assistant if reasons => self.push(&[turn.reasoning, END_THINK])?,
            Role::Assistant | Role::System => {}
        }
        for (at, block) in turn.blocks.iter().enumerate() {
            self.push(&[if at == 0 { "" } else { "\n\n" }])?;
            match block.result_of {
                Some(_) => self.push(&["<tool_result>", &block.text, "</tool_result>"])?,
                None => self.push(&[&block.text])?,
            }
        }
        if matches!(turn.role, Role::System | Role::Developer) && !turn.tools.is_empty() {
            self.tools(turn.tools)?;
        }
        if turn.role == Role::Assistant {
            self.calls(turn.calls)?;
            self.push(&[EOS])?;
        }
        Ok(())
    }

    fn tools(&mut self, tools: &[Value]) -> Result<(), TemplateError> {
        self.push(&["\n\n", TOOLS])?;
        for (at, tool) in tools.iter().enumerate() {
            let function = tool.get("function").ok_or(TemplateError::Refused("tools"))?;
            self.push(&[if at == 0 { "" } else { "\n" }, &dumps(function)?])?;
        }
        self.push(&[AFTER_TOOLS])
    }

    fn calls(&mut self, calls: &[Value]) -> Result<(), TemplateError> {
        if calls.is_empty() {
            return Ok(());
        }
        self.push(&["\n\n<｜DSML｜tool_calls>\n"])?;
        for (at, call) in calls.iter().enumerate() {
            let field = |name| call.get("function").and_then(|function| function.get(name));
            let refused = TemplateError::Refused("tool_calls");
            let name = field("name").and_then(Value::as_str).ok_or(refused)?;
            self.push(&[
                if at == 0 { "" } else { "\n" },
                "<｜DSML｜invoke name=\"",
                name,
                "\">\n",
            ])?;
            let arguments = field("arguments").and_then(Value::as_object).into_iter().flatten();
            for (at, (key, value)) in arguments.enumerate() {
                self.push(&[if at == 0 { "" } else { "\n" }, "<｜DSML｜parameter name=\"", key])?;
                match value.as_str() {
                    Some(text) => self.push(&["\" string=\"true\">", text])?,
                    None => self.push(&["\" string=\"false\">", &dumps(value)?])?,
                }
                self.push(&["</｜DSML｜parameter>"])?;
            }
            self.push(&["\n</｜DSML｜invoke>"])?;
        }
        self.push(&["\n</｜DSML｜tool_calls>"])
    }

    /// What stands between a turn and the assistant's next, or the answer.
    fn transition(
        &mut self,
        turn: &Turn<'_>,
        after: Option<Role>,
        mode: &Mode,
        opens: bool,
    ) -> Result<(), TemplateError> {
        if let Some(task) = turn.task {
            let known = TASKS.iter().find(|(name, _)| *name == task);
            let (_, token) = known.ok_or(TemplateError::Refused("task"))?;
            if task == "action" {
                self.push(&[ASSISTANT, if mode.thinks { THINK } else { END_THINK }])?;
            }
            return self.push(&[token]);
        }
        let is_last_system = turn.role == Role::System && after != Some(Role::Reminder);
        if turn.is_users() || is_last_system {
            let thinks = mode.thinks && (!mode.drops_thinking || opens);
            self.push(&[ASSISTANT, if thinks { THINK } else { END_THINK }])?;
        }
        Ok(())
    }
}

/// `json.dumps(value, ensure_ascii=False)`.
fn dumps(value: &Value) -> Result<String, TemplateError> {
    let dumps = Dumps {
        ensure_ascii: false,
        indent: None,
        item_separator: ", ".to_owned(),
        key_separator: ": ".to_owned(),
        sort_keys: false,
    };
    let text = dumps.write(&values::value(value.clone())?);
    text.map_err(|error| TemplateError::Failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Api, Input, parse};

    const VLLM: &str = include_str!("../../tests/data/vllm/deepseek_v4.jsonl");

    /// Reasoning that is no text, of which the engine prints what Python would, and a number that Python may print with
    /// other digits: they go by load.
    const REFUSED_HERE: [&str; 2] = ["reasoning_not_text", "number_huge"];

    fn rendered(body: &Value) -> Result<String, String> {
        let prompt = parse(Api::Chat, body.to_string().as_bytes()).map_err(|e| e.to_string())?;
        let Input::Chat(chat) = prompt.input else { panic!("a chat") };
        let mut rendering = Rendering::Chat(chat);
        loop {
            rendering = match DeepSeekV4.step(rendering).map_err(|error| error.to_string())? {
                Rendering::Text(text) => return Ok(text),
                rendering => rendering,
            };
        }
    }

    #[test]
    fn requests_become_what_vllm_makes_of_them() {
        let mut cases = 0;
        for line in VLLM.lines() {
            let case: Value = serde_json::from_str(line).unwrap();
            let rendered = rendered(&case["request"]);
            match case["text"].as_str() {
                Some(_) if REFUSED_HERE.iter().any(|name| case["name"] == *name) => {
                    assert!(rendered.is_err(), "{}: {rendered:?}", case["name"]);
                }
                Some(text) => assert_eq!(rendered.as_deref(), Ok(text), "{}", case["name"]),
                None => assert!(rendered.is_err(), "{}: {rendered:?}", case["name"]),
            }
            cases += 1;
        }
        assert_eq!(cases, 159);
    }

    #[test]
    fn output_has_a_bound() {
        let calls = vec![serde_json::json!({"function": {"name": "", "arguments": {}}}); 500_000];
        let message = serde_json::json!({"role": "assistant", "content": "", "tool_calls": calls});
        let variables = Map::from_iter([("messages".to_owned(), Value::Array(vec![message]))]);
        assert_eq!(render(&variables), Err(TemplateError::Limit));
    }
}
