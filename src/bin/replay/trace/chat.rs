//! Chats as JSON lines: recorded ones with `messages` (tau-bench), and benchmarks' with `question` (BFCL) or `turns`
//! (MT-bench), whose answers are not known.
//!
//! Every assistant message of a recorded chat is a request, answered with that message. Of a benchmark, every thing that
//! the user says is one, and its answer is made up: as long as answers of that kind are, and like no other. Prompts are
//! written in ChatML whatever the model, tools first, since what matters here is who has which beginning in common.
//! Files of this kind hold no times: pauses are drawn as they are in the packed agent traces.

use super::lines::Lines;
use super::open::Reading;
use super::writing::{Asked, Growing, Writing};
use crate::random::{LogNormal, Random};
use hashbrown::HashMap;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// Seconds between an answer and the next request: the packed agent traces' own.
const PAUSE_SECONDS: LogNormal = LogNormal { median: 17.0, sigma: 1.57, least: 0.1, most: 3600.0 };
/// Tokens of an answer that calls a tool: what the recorded tau-bench chats have.
const CALL_TOKENS: LogNormal = LogNormal { median: 58.0, sigma: 0.53, least: 5.0, most: 1000.0 };
/// Tokens of an answer that is read: what Mooncake's conversations have.
const PROSE_TOKENS: LogNormal = LogNormal { median: 350.0, sigma: 0.42, least: 5.0, most: 2000.0 };
/// The lane of chance for these.
const DRAWS: u64 = 22;

/// Which file of BFCL's function descriptions belongs to which of its classes.
const BFCL_FILES: [(&str, &str); 8] = [
    ("GorillaFileSystem", "gorilla_file_system.json"),
    ("MathAPI", "math_api.json"),
    ("MessageAPI", "message_api.json"),
    ("TwitterAPI", "posting_api.json"),
    ("TicketAPI", "ticket_api.json"),
    ("TradingBot", "trading_bot.json"),
    ("TravelAPI", "travel_booking.json"),
    ("VehicleControlAPI", "vehicle_control.json"),
];

/// Any of the three; what only one has is optional.
#[derive(Deserialize)]
struct Line {
    messages: Option<Vec<Message>>,
    question: Option<Vec<Vec<Message>>>,
    turns: Option<Vec<String>>,
    #[serde(default)]
    function: Option<Value>,
    #[serde(default)]
    involved_classes: Vec<String>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Value>,
}

/// Tool descriptions, as a whole or by file.
#[derive(Default)]
struct Tools {
    all: String,
    by_file: HashMap<String, String>,
}

/// Reads all chats.
pub fn read(reading: &mut Reading, lines: &mut Lines) -> Result<u32, String> {
    let tools = reading.tools.as_deref().map(Tools::open).transpose()?.unwrap_or_default();
    let mut draws = Random::new(reading.seed, DRAWS);
    let mut number = 0;
    while let Some(line) = lines.next_json::<Line>()? {
        number += 1;
        let mut chat = Chat {
            text: Growing::new(reading.block_tokens),
            writing: Writing::new(format!("chat-{number}"), reading.next_arrival()),
            draws: &mut draws,
            reading,
            blocks: 0,
        };
        let written = chat.write(&line, &tools);
        let (blocks, session) = (chat.blocks, chat.writing.session());
        written.map_err(|what| lines.error(what))?;
        reading.count(blocks, lines)?;
        reading.add(session);
    }
    Ok(reading.block_tokens)
}

impl Tools {
    fn open(path: &Path) -> Result<Self, String> {
        let mut lines = Lines::open(path)?;
        let mut tools = Self::default();
        while let Some(line) = lines.next_line()? {
            let by_file = serde_json::from_str::<Value>(line).ok().and_then(|line| {
                Some((line.get("file")?.as_str()?.to_owned(), line.get("functions")?.to_string()))
            });
            match by_file {
                Some((file, functions)) => drop(tools.by_file.insert(file, functions)),
                None => {
                    tools.all.push_str(line);
                    tools.all.push('\n');
                }
            }
        }
        Ok(tools)
    }

    /// The tools that a chat's prompts begin with.
    fn of(&self, line: &Line) -> Result<String, String> {
        let mut text = self.all.clone();
        for class in &line.involved_classes {
            let file = BFCL_FILES.iter().find(|(name, _)| name == class).map(|(_, file)| *file);
            let file = file.ok_or_else(|| format!("involved_classes: {class}: unknown"))?;
            text.push_str(self.by_file.get(file).map_or("", String::as_str));
        }
        if let Some(functions) = &line.function {
            text.push_str(&functions.to_string());
        }
        Ok(text)
    }
}

/// A chat on its way.
struct Chat<'a> {
    text: Growing,
    writing: Writing,
    draws: &'a mut Random,
    reading: &'a Reading,
    blocks: usize,
}

impl Chat<'_> {
    fn write(&mut self, line: &Line, tools: &Tools) -> Result<(), String> {
        let tools = tools.of(line)?;
        if !tools.is_empty() {
            self.say("system", &tools)?;
        }
        if let Some(messages) = &line.messages {
            return messages.iter().try_for_each(|message| self.message(message));
        }
        if let Some(turns) = &line.turns {
            let mut turns = turns.iter();
            return turns.try_for_each(|said| self.turn(said, PROSE_TOKENS, "chat"));
        }
        let question = line.question.as_ref().ok_or("no messages, question or turns")?;
        let class = if line.function.is_some() { "batch" } else { "agent" };
        for said in question.iter().flatten() {
            let content = said.content.as_deref().unwrap_or_default();
            match said.role.as_str() {
                "user" => self.turn(content, CALL_TOKENS, class)?,
                role => self.say(role, content)?,
            }
        }
        Ok(())
    }

    /// A recorded message: what assistants said is what they were asked for.
    fn message(&mut self, message: &Message) -> Result<(), String> {
        let mut content = message.content.clone().unwrap_or_default();
        if let Some(calls) = &message.tool_calls {
            content.push_str(&calls.to_string());
        }
        if message.role != "assistant" {
            return self.say(&message.role, &content);
        }
        let answer = self.reading.measure.tokens(&format!("{content}<|im_end|>\n"))?;
        self.ask(&answer, "agent")
    }

    /// What a user says, answered with something made up.
    fn turn(&mut self, said: &str, answer: LogNormal, class: &'static str) -> Result<(), String> {
        self.say("user", said)?;
        let length = self.draws.lognormal(answer) as usize;
        let answer: Vec<u32> = (0..length).map(|_| self.draws.word() as u32).collect();
        self.ask(&answer, class)
    }

    fn say(&mut self, role: &str, content: &str) -> Result<(), String> {
        let text = format!("<|im_start|>{role}\n{content}<|im_end|>\n");
        self.text.extend(&self.reading.measure.tokens(&text)?);
        Ok(())
    }

    fn ask(&mut self, answer: &[u32], class: &'static str) -> Result<(), String> {
        self.text.extend(&self.reading.measure.tokens("<|im_start|>assistant\n")?);
        let (prompt, prompt_tokens) = (self.text.blocks(), self.text.tokens());
        let answer_blocks = self.text.answer(answer);
        let pause = Duration::try_from_secs_f64(self.draws.lognormal(PAUSE_SECONDS));
        let pause =
            if self.writing.is_empty() { Duration::ZERO } else { pause.unwrap_or_default() };
        self.writing.ask(Asked {
            prompt: &prompt,
            prompt_tokens,
            answer_tokens: u32::try_from(answer.len()).unwrap_or(u32::MAX),
            answer_blocks,
            think: self.reading.think(pause),
            class,
        });
        self.blocks = self.text.blocks().len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::open::{Format, Options, open};
    use super::super::shape::Shape;
    use super::*;

    fn shape(name: &str, block_tokens: u32) -> Shape {
        Shape::of(&open(name, &Options { block_tokens, ..Options::default() }, 1).unwrap())
    }

    #[test]
    fn every_answer_of_a_recorded_chat_is_a_request_that_builds_on_the_one_before() {
        let text = "word ".repeat(100);
        let line = serde_json::json!({ "messages": [
            { "role": "system", "content": text },
            { "role": "user", "content": "hi" },
            { "role": "assistant", "content": null, "tool_calls": [{ "name": "f" }] },
            { "role": "tool", "content": text },
            { "role": "assistant", "content": text },
        ] });
        let trace = Reading::text(&line.to_string(), Format::Chat).unwrap();
        let [first, second] = &trace.sessions[0].turns[..] else { panic!("two turns") };
        assert_eq!(second.keep, first.blocks.len() + first.answer_blocks.len());
        assert!(second.prompt_tokens > first.prompt_tokens + first.answer_tokens + 125);
        assert_eq!((first.think, first.class), (Duration::ZERO, "agent"));
        assert!(second.think > Duration::ZERO);
    }

    #[test]
    fn the_recorded_chats_are_near_the_published_figures() {
        let shape = shape("tau_airline", 16);
        assert_eq!((shape.requests, shape.sessions), (2454, 200));
        // By Qwen3's tokenizer 6,279.
        assert_eq!(shape.prompt_tokens[0], 5289);
        assert!((shape.hit_tokens - 0.9624).abs() < 0.01, "{}", shape.hit_tokens);
    }

    #[test]
    fn benchmarks_chats_are_read_with_their_tools() {
        let shapes = ["bfcl_multi_turn", "bfcl_parallel", "mt_bench"].map(|name| shape(name, 16));
        let counts = shapes.each_ref().map(|shape| (shape.requests, shape.sessions));
        assert_eq!(counts, [(734, 200), (200, 200), (160, 80)]);
        let [multi_turn, parallel, mt_bench] = shapes.map(|shape| shape.prompt_tokens[0]);
        assert!(multi_turn > 3000 && parallel > 200 && mt_bench > 60);
        assert!(multi_turn > 4 * parallel, "{multi_turn} {parallel} {mt_bench}");
    }

    #[test]
    fn what_cannot_be_is_an_error_with_its_line() {
        let error = |line: &str| Reading::text(line, Format::Chat).unwrap_err();
        assert_eq!(error("{}"), "f:1: no messages, question or turns");
        let class = r#"{"question":[],"involved_classes":["Nobody"]}"#;
        assert_eq!(error(class), "f:1: involved_classes: Nobody: unknown");
        assert_eq!(error(r#"{"turns":[]}"#), "f: no requests");
    }
}
