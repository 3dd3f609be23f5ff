//! Prompts to send: seeded, of about a wanted length, and different from one another where it matters.

use crate::harness::{ALIAS, MODEL, QWEN3};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use warmpath::charge::Charges;
use warmpath::index::PrefixIndex;
use warmpath::learn::Rates;
use warmpath::replicas::strikes::Strikes;
use warmpath::replicas::{Member, Moment, ReplicaTable};
use warmpath::request::{self, Api};
use warmpath::route::{self, Policy, PromptKnowledge, Question, RouteConfig, View};
use warmpath::score::CostConfig;
use warmpath::tokens::blocks::{BlockSize, ChainSeed};

/// Tokens per block of replicas that say nothing else.
pub const BLOCK: u64 = 16;

const WORDS: [&str; 16] = [
    "river", "stone", "garden", "window", "letter", "market", "forest", "engine", "castle",
    "silver", "winter", "bridge", "candle", "harbor", "meadow", "thunder",
];

/// Some `count` tokens of text that no other seed gives: each word is one token, more or less.
pub fn words(seed: u64, count: usize) -> String {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D;
    let mut text = format!("Case {seed}:");
    for _ in 0..count {
        // xorshift64: any generator will do that is the same everywhere.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        text.push(' ');
        text.push_str(WORDS[(state >> 32) as usize % WORDS.len()]);
    }
    text
}

/// A chat of one message, under the model's alias.
pub fn chat(seed: u64, count: usize, max_tokens: u64) -> Value {
    json!({
        "model": ALIAS, "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": words(seed, count)}],
    })
}

/// The chat after an answer, with the next question.
pub fn next_turn(chat: &Value, answer: &str, question: &str) -> Value {
    let mut next = chat.clone();
    let messages = next["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": answer}));
    messages.push(json!({"role": "user", "content": question}));
    next
}

/// The body with `stream` and the usage that only streams must ask for.
pub fn streamed(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// Where a chat goes that nobody has anything of, while nobody has anything to do: the core's own choice.
pub fn cold_choice(chat: &Value, replicas: &[SocketAddr]) -> SocketAddr {
    let prompt = request::parse(Api::Chat, chat.to_string().as_bytes()).unwrap();
    let tokens = QWEN3.token_ids(&prompt, 0).unwrap();
    let mut table = ReplicaTable::default();
    let member = |address: &SocketAddr| Member::healthy(address.to_string());
    table.set_members("replicas", &replicas.iter().map(member).collect::<Vec<Member>>());
    let (index, charges) = (PrefixIndex::new(), Charges::default());
    let (table, index, charges, strikes) = (&table, &index, &charges, &Strikes::default());
    let view = View { table, index, charges, strikes, rates: &Rates::default(), now: Moment(1) };
    let config = RouteConfig {
        policy: Policy::default(),
        max_cost_s: None,
        cost: CostConfig::default(),
        tie_s: 0.005,
        tie_share: 0.05,
        stale_after: Duration::from_secs(3),
        default_block_size: BlockSize::new(BLOCK as u32).unwrap(),
    };
    let question = Question {
        cluster: "replicas",
        model_names: &[MODEL.to_owned()],
        prompt: PromptKnowledge::Tokens { tokens: &tokens, seed: ChainSeed::new(MODEL, None) },
        adapter: None,
        answer_limit: None,
        session: None,
        tie_seed: 0,
    };
    let decision = route::decide(&config, &view, &question);
    decision.chosen().expect("a choice").address.parse().unwrap()
}

/// Tokens of a prompt that can come from a cache that has all its blocks.
pub fn reusable(prompt_tokens: u64) -> u64 {
    (prompt_tokens - 1) / BLOCK * BLOCK
}
