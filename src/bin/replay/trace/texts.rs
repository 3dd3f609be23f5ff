//! A plan of texts as a trace: a word stands for a token, and answers are drawn.
//!
//! Real tokenizers make more tokens of the same texts; for who shares what with whom that is no matter.

use super::{Session, Trace, Turn};
use crate::random::Random;
use crate::workload::{Plan, Session as Planned};
use xxhash_rust::xxh3::xxh3_64;

/// The stream of chance that answers are drawn from.
const ANSWERS: u64 = 12;

impl Trace {
    /// The trace of a plan.
    pub fn of_plan(name: &str, plan: &Plan, block_tokens: u32) -> Self {
        let sessions = plan.sessions.iter().enumerate();
        let sessions =
            sessions.map(|(number, planned)| session(plan, planned, number, block_tokens));
        Self { name: name.to_owned(), block_tokens, sessions: sessions.collect() }
    }
}

fn session(plan: &Plan, planned: &Planned, number: usize, block_tokens: u32) -> Session {
    let mut answers = Random::new(number as u64, ANSWERS);
    let mut text = Growing { tokens: opening(plan, planned), blocks: Vec::new(), block_tokens };
    let mut keep = 0;
    let mut turns = Vec::new();
    for said in &planned.turns {
        words(&said.text, &mut text.tokens);
        let blocks = text.fill();
        let prompt_tokens = text.tokens.len() as u32;
        text.tokens.extend((0..said.answer_tokens).map(|_| answers.word() as u32));
        let answer_blocks = text.fill();
        turns.push(Turn {
            think: said.think,
            keep,
            blocks,
            prompt_tokens,
            answer_blocks,
            answer_tokens: said.answer_tokens,
            class: plan.class(planned),
        });
        keep = text.blocks.len();
    }
    Session { name: planned.name.clone(), arrival: planned.arrival, turns }
}

/// A session's tokens so far, and the ids of their full blocks.
struct Growing {
    tokens: Vec<u32>,
    blocks: Vec<u64>,
    block_tokens: u32,
}

impl Growing {
    /// Names the blocks that were filled since.
    fn fill(&mut self) -> Vec<u64> {
        let size = self.block_tokens.max(1) as usize;
        let named = self.blocks.len();
        for full in self.tokens.get(named * size..).unwrap_or_default().chunks_exact(size) {
            let parent = self.blocks.last().copied().unwrap_or_default();
            let bytes: Vec<u8> = parent
                .to_le_bytes()
                .into_iter()
                .chain(full.iter().flat_map(|token| token.to_le_bytes()))
                .collect();
            self.blocks.push(xxh3_64(&bytes));
        }
        self.blocks.get(named..).unwrap_or_default().to_vec()
    }
}

/// What a session's prompts all begin with: its app's tools and system prompt.
fn opening(plan: &Plan, session: &Planned) -> Vec<u32> {
    let mut prompt = Vec::new();
    if let Some(turn) = session.turns.first() {
        let body = plan.body(session, turn, &[], "m");
        if let Some(tools) = body.get("tools") {
            words(&tools.to_string(), &mut prompt);
        }
        if session.app.is_some() {
            words(plan.head(session), &mut prompt);
        }
    }
    prompt
}

/// A token for each word, with a mark of its own where a text ends.
fn words(text: &str, prompt: &mut Vec<u32>) {
    let words = text.split([' ', '"', '\n']).filter(|word| !word.is_empty());
    prompt.extend(words.map(|word| xxh3_64(word.as_bytes()) as u32));
    prompt.push(u32::MAX);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Workload;
    use std::time::Duration;

    #[test]
    fn turns_build_on_each_other_and_apps_are_shared() {
        let plan = Plan::new(Workload::Conversations, 200, Duration::from_secs(5), 1);
        let trace = Trace::of_plan("conversations", &plan, 16);
        assert_eq!(trace.requests(), 200);
        let (mut before, mut prompt) = (Vec::new(), Vec::new());
        for (number, session) in trace.sessions.iter().enumerate() {
            for (turn, said) in session.turns.iter().enumerate() {
                trace.prompt(number, turn, &mut prompt);
                assert_eq!(prompt.len() as u32, said.prompt_tokens / 16);
                if turn > 0 {
                    assert!(prompt.starts_with(&before), "session {number} turn {turn}");
                }
                before.clone_from(&prompt);
            }
        }
        let mut first: Vec<u64> = trace
            .sessions
            .iter()
            .filter_map(|s| s.turns.first()?.blocks.first().copied())
            .collect();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 8, "one first block per app");
    }
}
