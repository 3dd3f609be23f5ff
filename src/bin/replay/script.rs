//! What a gateway is asked: a workload's chats or a trace's prompts, session by session and turn by turn.
//!
//! A workload has texts of its own, and what a replica answered goes into the next prompt as it came. A trace has ids of
//! blocks: equal ids become equal tokens or equal words, so that replicas find of each other's prompts what the trace
//! says, and nothing else. A trace's prompts also hold what its own answers were; what the replica says is forgotten, and
//! not found again. It does not send anything and knows no time but pauses.

use crate::random::Random;
use crate::trace::{Trace, Turn};
use crate::workload::{Exchange, Plan, WORDS};
use serde_json::{Value, json};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of the prompt's head that are hashed for the baseline that routes by them. It covers most of a system prompt, so
/// that apps are told apart, and no user's text.
const HEAD_BYTES: usize = 2000;
/// The same of a trace's prompt, in tokens.
const HEAD_TOKENS: u32 = 512;
/// Token ids that prompts are made of: those of words in every vocabulary of today, above control tokens and bytes.
const TOKEN_IDS: std::ops::Range<u32> = 1000..21_000;

/// A session's beginning.
pub struct Opening<'a> {
    /// Unlike any other's.
    pub name: &'a str,
    /// When its first request is sent, from the start.
    pub arrival: Duration,
    /// How many it has.
    pub turns: usize,
}

/// A request to be sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// Of the API.
    pub path: &'static str,
    /// As JSON.
    pub body: Value,
    /// A hash of how the prompt begins, or of all of it where it is short.
    pub head: u64,
    /// What kind of request it is.
    pub class: &'static str,
}

/// See the module.
pub enum Script {
    /// Chats that grow by what is answered.
    Plan(Plan),
    /// Prompts as a trace has them.
    Trace(Trace, Form),
}

/// What a trace's prompts are written as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    /// Token ids, to `/v1/completions`: as many as the trace says.
    Ids,
    /// Words, to `/v1/completions`: each a token in the vocabularies of today.
    Text,
    /// Words in a user's message, to `/v1/chat/completions`: the chat template comes on top.
    Chat,
}

impl Script {
    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        match self {
            Self::Plan(plan) => plan.sessions.len(),
            Self::Trace(trace, _) => trace.sessions.len(),
        }
    }

    /// How many requests.
    pub fn requests(&self) -> usize {
        match self {
            Self::Plan(plan) => plan.requests(),
            Self::Trace(trace, _) => trace.requests(),
        }
    }

    /// A session.
    pub fn opening(&self, session: usize) -> Option<Opening<'_>> {
        Some(match self {
            Self::Plan(plan) => {
                let session = plan.sessions.get(session)?;
                let (name, turns) = (session.name.as_str(), session.turns.len());
                Opening { name, arrival: session.arrival, turns }
            }
            Self::Trace(trace, _) => {
                let session = trace.sessions.get(session)?;
                let (name, turns) = (session.name.as_str(), session.turns.len());
                Opening { name, arrival: session.arrival, turns }
            }
        })
    }

    /// The pause before a turn, from the end of the answer before it.
    pub fn pause(&self, session: usize, turn: usize) -> Duration {
        match self {
            Self::Plan(plan) => {
                let turns = plan.sessions.get(session).map(|session| &session.turns);
                turns.and_then(|turns| turns.get(turn)).map_or(Duration::ZERO, |turn| turn.think)
            }
            Self::Trace(trace, _) => {
                trace.turn(session, turn).map_or(Duration::ZERO, |turn| turn.think)
            }
        }
    }

    /// A turn's request, given the answers to those before it.
    pub fn ask(&self, session: usize, turn: usize, answers: &[String], model: &str) -> Option<Ask> {
        match self {
            Self::Plan(plan) => {
                let session = plan.sessions.get(session)?;
                let said = session.turns.iter().zip(answers);
                let history: Vec<Exchange> = said
                    .map(|(turn, answer)| Exchange {
                        text: turn.text.clone(),
                        answer: answer.clone(),
                    })
                    .collect();
                let head = plan.head(session).as_bytes();
                Some(Ask {
                    path: "/v1/chat/completions",
                    body: plan.body(session, session.turns.get(turn)?, &history, model),
                    head: xxh3_64(head.get(..HEAD_BYTES).unwrap_or(head)),
                    class: plan.class(session),
                })
            }
            Self::Trace(trace, form) => {
                let said = trace.turn(session, turn)?;
                let mut blocks = Vec::new();
                trace.prompt(session, turn, &mut blocks);
                let name = &trace.sessions.get(session)?.name;
                let tail = xxh3_64(format!("{name} {turn}").as_bytes());
                let head = (HEAD_TOKENS / trace.block_tokens.max(1)).max(1) as usize;
                Some(Ask {
                    path: form.path(),
                    body: form.body(&blocks, trace.block_tokens, tail, said, model),
                    head: blocks.get(..head).unwrap_or(&blocks).last().copied().unwrap_or(tail),
                    class: said.class,
                })
            }
        }
    }
}

impl Form {
    fn path(self) -> &'static str {
        match self {
            Self::Ids | Self::Text => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }

    /// The prompt is the blocks' tokens, and behind them the tail's own.
    fn body(self, blocks: &[u64], block_tokens: u32, tail: u64, turn: &Turn, model: &str) -> Value {
        let full = blocks.len() as u32 * block_tokens;
        let parts = blocks.iter().map(|block| (*block, block_tokens));
        let parts = parts.chain([(tail, turn.prompt_tokens.saturating_sub(full))]);
        let mut body = json!({
            "model": model,
            "max_tokens": turn.answer_tokens,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        let (key, prompt) = match self {
            Self::Ids => ("prompt", parts.flat_map(|(id, tokens)| ids(id, tokens)).collect()),
            Self::Text => ("prompt", Value::String(parts.map(words).collect())),
            Self::Chat => {
                let content: String = parts.map(words).collect();
                ("messages", json!([{ "role": "user", "content": content }]))
            }
        };
        if let Some(fields) = body.as_object_mut() {
            fields.insert(key.to_owned(), prompt);
        }
        body
    }
}

/// The tokens that a block stands for.
fn ids(block: u64, tokens: u32) -> impl Iterator<Item = Value> {
    let mut random = Random::new(block, 0);
    (0..tokens).map(move |_| {
        let id = TOKEN_IDS.start + random.below(TOKEN_IDS.len()) as u32;
        Value::from(id)
    })
}

/// The words that a block stands for, each behind a space.
fn words((block, tokens): (u64, u32)) -> String {
    let mut random = Random::new(block, 0);
    let mut text = String::new();
    for _ in 0..tokens {
        text.push(' ');
        text.push_str(WORDS.get(random.below(WORDS.len())).copied().unwrap_or("word"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Session;

    /// A session of two turns in blocks of eight tokens, and one that begins alike.
    fn script(form: Form) -> Script {
        let turn = |keep, blocks: &[u64], prompt_tokens, answer: &[u64]| Turn {
            think: Duration::from_secs(2),
            keep,
            blocks: blocks.to_vec(),
            prompt_tokens,
            answer_blocks: answer.to_vec(),
            answer_tokens: 9,
            class: "agent",
        };
        let session = |name: &str, turns| Session {
            name: name.to_owned(),
            arrival: Duration::from_secs(1),
            turns,
        };
        let sessions = vec![
            session("a", vec![turn(0, &[1, 2], 19, &[3]), turn(3, &[4], 32, &[])]),
            session("b", vec![turn(0, &[1], 12, &[])]),
        ];
        Script::Trace(Trace { name: "t".to_owned(), block_tokens: 8, sessions }, form)
    }

    fn ask(form: Form, session: usize, turn: usize) -> Ask {
        script(form).ask(session, turn, &[], "m").unwrap()
    }

    #[test]
    fn equal_blocks_are_equal_tokens_and_prompts_have_the_length_they_should() {
        let prompt = |session, turn| {
            let ask = ask(Form::Ids, session, turn);
            assert_eq!(ask.path, "/v1/completions");
            ask.body["prompt"].as_array().unwrap().clone()
        };
        let (first, second, other) = (prompt(0, 0), prompt(0, 1), prompt(1, 0));
        assert_eq!([first.len(), second.len(), other.len()], [19, 32, 12]);
        assert_eq!(first[..16], second[..16]);
        assert_eq!(first[..8], other[..8]);
        assert_ne!(first[8..12], other[8..12]);
        assert_ne!(first[16..], second[16..19], "what is behind the last block is nobody else's");
        let in_range = |id: &Value| TOKEN_IDS.contains(&(id.as_u64().unwrap() as u32));
        assert!(first.iter().all(in_range));
    }

    #[test]
    fn words_are_as_many_as_the_tokens_they_stand_for() {
        let text = |form, pointer: &str| {
            let body = ask(form, 0, 1).body;
            body.pointer(pointer).and_then(Value::as_str).unwrap().to_owned()
        };
        let prompt = text(Form::Text, "/prompt");
        assert_eq!(prompt.split(' ').count(), 1 + 32);
        assert_eq!(text(Form::Chat, "/messages/0/content"), prompt);
        let first = ask(Form::Text, 0, 0).body["prompt"].as_str().unwrap().to_owned();
        let common = prompt.bytes().zip(first.bytes()).take_while(|(a, b)| a == b).count();
        assert_eq!(prompt[..common].split_inclusive(' ').count(), 1 + 16);
    }

    #[test]
    fn a_request_asks_for_a_stream_of_the_traces_length() {
        let ask = ask(Form::Chat, 0, 0);
        assert_eq!((ask.path, ask.class), ("/v1/chat/completions", "agent"));
        assert_eq!((&ask.body["max_tokens"], &ask.body["model"]), (&json!(9), &json!("m")));
        assert_eq!(ask.body["stream_options"], json!({ "include_usage": true }));
        assert_eq!(ask.head, 2, "the last block of a prompt that is shorter than the head");
        let script = script(Form::Ids);
        assert_eq!((script.sessions(), script.requests()), (2, 3));
        assert_eq!(script.pause(0, 1), Duration::from_secs(2));
        let opening = script.opening(0).unwrap();
        assert_eq!((opening.name, opening.turns, opening.arrival.as_secs()), ("a", 2, 1));
    }
}
