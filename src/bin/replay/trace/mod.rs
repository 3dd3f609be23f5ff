//! Traces: sessions of requests whose prompts are lists of block ids. All that a run needs, and nothing of the fleet.
//!
//! Ids are chained: equal ids mean equal whole prefixes, so a set of ids is an index of prefixes, and no part of a
//! simulation hashes a token. What a text was is not known here.

mod azure;
mod chat;
mod describe;
mod lines;
mod lmcache;
pub mod load;
mod measure;
mod mooncake;
pub mod open;
mod packed;
pub mod shape;
mod texts;
pub mod work;
mod writing;

pub use describe::{TraceArgs, run};
use std::time::Duration;

/// See the module.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// What tables call it.
    pub name: String,
    /// Tokens per block id.
    pub block_tokens: u32,
    /// In order of arrival.
    pub sessions: Vec<Session>,
}

/// Requests of which each waits for the answer to the one before.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    /// Unlike any other's in the trace.
    pub name: String,
    /// When its first request is sent, from the trace's start, at the trace's own pace.
    pub arrival: Duration,
    /// Its requests.
    pub turns: Vec<Turn>,
}

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// From the end of the answer before (or the session's arrival) until it is asked.
    pub think: Duration,
    /// So many blocks of the previous prompt and its answer come first.
    pub keep: usize,
    /// The full blocks behind those.
    pub blocks: Vec<u64>,
    /// Tokens of the whole prompt, those after its last full block included.
    pub prompt_tokens: u32,
    /// The blocks that the answer fills, where the trace knows them.
    pub answer_blocks: Vec<u64>,
    /// Tokens of the answer.
    pub answer_tokens: u32,
    /// What kind of request it is.
    pub class: &'static str,
}

/// The id of a block whose prompt so far is `parent`, by what it is called and by whom.
fn chained(parent: u64, owner: u64, name: u64) -> u64 {
    let mut bytes = [0; 24];
    for (slot, word) in bytes.as_chunks_mut().0.iter_mut().zip([parent, owner, name]) {
        *slot = word.to_le_bytes();
    }
    xxhash_rust::xxh3::xxh3_64(&bytes)
}

impl Trace {
    /// Requests in all.
    pub fn requests(&self) -> usize {
        self.sessions.iter().map(|session| session.turns.len()).sum()
    }

    /// A turn.
    pub fn turn(&self, session: usize, turn: usize) -> Option<&Turn> {
        self.sessions.get(session)?.turns.get(turn)
    }

    /// Turns `chain`, the blocks of the session's prompt before, into those of this turn's. Before the first turn it is
    /// empty.
    pub fn advance(&self, session: usize, turn: usize, chain: &mut Vec<u64>) {
        let before = turn.checked_sub(1).and_then(|before| self.turn(session, before));
        chain.extend(before.iter().flat_map(|before| &before.answer_blocks));
        if let Some(turn) = self.turn(session, turn) {
            chain.truncate(turn.keep);
            chain.extend(&turn.blocks);
        }
    }

    /// The blocks of a turn's whole prompt.
    pub fn prompt(&self, session: usize, turn: usize, into: &mut Vec<u64>) {
        into.clear();
        for turn in 0..=turn {
            self.advance(session, turn, into);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(keep: usize, blocks: &[u64], answer: &[u64]) -> Turn {
        Turn {
            think: Duration::ZERO,
            keep,
            blocks: blocks.to_vec(),
            prompt_tokens: 0,
            answer_blocks: answer.to_vec(),
            answer_tokens: 1,
            class: "chat",
        }
    }

    #[test]
    fn a_prompt_is_what_is_kept_of_the_one_before_and_what_follows() {
        let turns = vec![
            turn(0, &[1, 2], &[3]),
            turn(3, &[4], &[5]),
            turn(1, &[6], &[]),
            turn(2, &[], &[]),
        ];
        let session = Session { name: "s".to_owned(), arrival: Duration::ZERO, turns };
        let trace = Trace { name: "t".to_owned(), block_tokens: 16, sessions: vec![session] };
        let mut prompt = vec![9];
        for (turn, expected) in [&[1, 2][..], &[1, 2, 3, 4], &[1, 6], &[1, 6]].iter().enumerate() {
            trace.prompt(0, turn, &mut prompt);
            assert_eq!(prompt, *expected, "turn {turn}");
        }
    }
}
