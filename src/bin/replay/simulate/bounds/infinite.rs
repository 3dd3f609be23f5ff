//! The most that any fleet can find cached of a trace: one cache for all replicas, without an end.
//!
//! It is no policy and plays nothing. Whatever is sent where, and in whatever order answers let turns come: a block that
//! is asked for is computed at least once, unless an answer has made it, and of a prompt at least one token is computed.
//! Hits beyond that are hits.
//!
//! ```text
//! hits <= sum over requests of floor((prompt - 1) / block) - different blocks among those that no answer makes
//! ```
//!
//! A block that some request asks for as its very last token's is left out of the latter: that request computes it in
//! any case.

use super::super::baselines::holders::ByBlock;
use crate::trace::Trace;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ceiling {
    /// Tokens that are asked for.
    pub prompt_tokens: u64,
    /// Those that can be hit.
    pub hit_tokens: u64,
}

impl Ceiling {
    /// Of a trace.
    pub fn of(trace: &Trace) -> Self {
        let block_tokens = trace.block_tokens.max(1);
        let (mut prompt_tokens, mut hit_blocks) = (0, 0);
        let mut must_be_computed: ByBlock<bool> = ByBlock::default();
        let mut chain = Vec::new();
        for (number, session) in trace.sessions.iter().enumerate() {
            chain.clear();
            for (turn, asked) in session.turns.iter().enumerate() {
                trace.advance(number, turn, &mut chain);
                let most = (asked.prompt_tokens.saturating_sub(1) / block_tokens) as usize;
                let most = most.min(chain.len());
                prompt_tokens += u64::from(asked.prompt_tokens);
                hit_blocks += most as u64;
                // Those before were the previous turn's, and have been counted.
                let (hittable, last) = chain.split_at(most);
                let new = hittable.get(asked.keep.min(most)..).unwrap_or_default();
                for block in new {
                    must_be_computed.entry(*block).or_insert(true);
                }
                for block in last.iter().chain(&asked.answer_blocks) {
                    must_be_computed.insert(*block, false);
                }
            }
        }
        let computed = must_be_computed.values().filter(|must| **must).count() as u64;
        let hit_tokens = (hit_blocks - computed) * u64::from(block_tokens);
        Self { prompt_tokens, hit_tokens }
    }

    /// The part of tokens that can be hit.
    pub fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Session, Turn};
    use std::time::Duration;

    fn turn(keep: usize, blocks: &[u64], prompt_tokens: u32, answer_blocks: &[u64]) -> Turn {
        Turn {
            think: Duration::ZERO,
            keep,
            blocks: blocks.to_vec(),
            prompt_tokens,
            answer_blocks: answer_blocks.to_vec(),
            answer_tokens: 1,
            class: "chat",
        }
    }

    #[track_caller]
    fn check(sessions: Vec<Vec<Turn>>, hit_blocks: u64) {
        let session = |turns| Session { name: String::new(), arrival: Duration::ZERO, turns };
        let sessions: Vec<Session> = sessions.into_iter().map(session).collect();
        let turns = sessions.iter().flat_map(|session| &session.turns);
        let prompt_tokens = turns.map(|turn| u64::from(turn.prompt_tokens)).sum();
        let trace = Trace { name: String::new(), block_tokens: 10, sessions };
        let expected = Ceiling { prompt_tokens, hit_tokens: hit_blocks * 10 };
        assert_eq!(Ceiling::of(&trace), expected);
    }

    #[test]
    fn every_block_is_computed_once_whoever_asks() {
        let prompt = || vec![turn(0, &[1, 2, 3], 35, &[])];
        check(vec![prompt()], 0);
        check(vec![prompt(), prompt(), prompt()], 6);
        check(vec![prompt(), vec![turn(0, &[1, 2, 4], 35, &[])]], 2);
    }

    #[test]
    fn a_turn_hits_what_the_turn_before_asked_and_was_answered() {
        check(vec![vec![turn(0, &[1, 2], 25, &[3]), turn(3, &[4], 45, &[])]], 3);
        check(vec![vec![turn(0, &[1, 2], 25, &[]), turn(2, &[3, 4], 45, &[])]], 2);
        check(vec![vec![turn(0, &[1, 2], 25, &[]), turn(1, &[5], 25, &[])]], 1);
    }

    #[test]
    fn the_last_token_is_computed_even_if_all_is_cached() {
        let full = || vec![turn(0, &[1, 2], 20, &[])];
        // Each computes the second block; the first is computed once.
        check(vec![full(), full()], 1);
        check(vec![full(), vec![turn(0, &[1, 2], 21, &[])]], 2);
    }
}
