//! Chats of a given length with their next turn, and what an engine would tell of each.

use crate::replica::ANSWER;
use crate::text::Random;
use serde_json::{Value, json};
use warmpath::model::Model;
use warmpath::request::{self, Api};

/// Tokens per block, as the replicas say.
const BLOCK: usize = 16;

/// What to write.
pub struct Order {
    pub tokens: usize,
    pub count: usize,
    pub seed: u64,
    pub is_stream: bool,
}

/// A request, and what an engine would tell of it that computed the turn before.
pub struct Request {
    pub body: Vec<u8>,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub answer_tokens: usize,
}

/// Chats, each with its first turn and the one after it.
#[derive(Default)]
pub struct Chats(Vec<[Request; 2]>);

impl Chats {
    /// Writes chats whose prompts have about so many tokens.
    pub fn write(model: &Model, name: &str, order: &Order) -> Result<Self, String> {
        let mut random = Random::new(order.seed);
        let sample = random.text(40_000);
        let ids = answer_ids(model, &sample)?;
        let bytes_per_token = sample.len() as f64 / ids.len().max(1) as f64;
        // The template's own tokens and the question are some forty.
        let bytes = (order.tokens.saturating_sub(40) as f64 * bytes_per_token) as usize;
        let chats = (0..order.count).map(|_| {
            let messages = random.messages(bytes);
            two_turns(model, name, messages, order.is_stream, &mut random)
        });
        chats.collect::<Result<_, String>>().map(Self)
    }

    /// The requests of one turn.
    pub fn turn(&self, turn: usize) -> Vec<&Request> {
        self.0.iter().filter_map(|turns| turns.get(turn)).collect()
    }

    pub fn mean_tokens(&self) -> f64 {
        self.mean(|request| request.prompt_tokens)
    }

    pub fn mean_bytes(&self) -> f64 {
        self.mean(|request| request.body.len())
    }

    fn mean(&self, of: impl Fn(&Request) -> usize) -> f64 {
        let first: Vec<usize> = self.turn(0).into_iter().map(of).collect();
        first.iter().sum::<usize>() as f64 / first.len().max(1) as f64
    }
}

fn two_turns(
    model: &Model,
    name: &str,
    mut messages: Vec<Value>,
    is_stream: bool,
    random: &mut Random,
) -> Result<[Request; 2], String> {
    let body = |messages: &[Value]| {
        let usage = json!({"include_usage": true});
        let mut body = json!({"model": name, "max_tokens": 64, "messages": messages});
        if is_stream && let Some(body) = body.as_object_mut() {
            body.insert("stream".to_owned(), true.into());
            body.insert("stream_options".to_owned(), usage);
        }
        body.to_string().into_bytes()
    };
    let first = body(&messages);
    messages.push(json!({"role": "assistant", "content": ANSWER}));
    messages.push(json!({"role": "user", "content": random.text(160)}));
    let next = body(&messages);
    let mut held = prompt_ids(model, &first)?;
    let prompt_tokens = held.len();
    let answer = answer_ids(model, ANSWER)?;
    held.extend_from_slice(&answer);
    let ids = prompt_ids(model, &next)?;
    let shared = held.iter().zip(&ids).take_while(|(held, id)| held == id).count();
    let answer_tokens = answer.len() + 1;
    Ok([
        Request { body: first, prompt_tokens, cached_tokens: 0, answer_tokens },
        Request {
            body: next,
            prompt_tokens: ids.len(),
            cached_tokens: shared / BLOCK * BLOCK,
            answer_tokens,
        },
    ])
}

fn prompt_ids(model: &Model, body: &[u8]) -> Result<Vec<u32>, String> {
    let prompt = request::parse(Api::Chat, body).map_err(|error| format!("{error:?}"))?;
    model.token_ids(&prompt, 0).map_err(|error| format!("{error:?}"))
}

fn answer_ids(model: &Model, text: &str) -> Result<Vec<u32>, String> {
    let ids = model.answer_ids(text, &mut || true).map_err(|error| format!("{error:?}"))?;
    Ok(ids.unwrap_or_default())
}
