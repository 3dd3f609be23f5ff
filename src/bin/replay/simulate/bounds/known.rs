//! Small traces for tests: blocks of 16 tokens, pauses of ten seconds, answers of a hundred tokens.

use crate::trace::{Session, Trace, Turn};
use std::time::Duration;

/// A turn whose prompt ends one token behind its last block.
pub fn turn(keep: usize, blocks: &[u64]) -> Turn {
    Turn {
        think: Duration::from_secs(10),
        keep,
        blocks: blocks.to_vec(),
        prompt_tokens: (keep + blocks.len()) as u32 * 16 + 1,
        answer_blocks: Vec::new(),
        answer_tokens: 100,
        class: "chat",
    }
}

/// Sessions that arrive at the start, as far as pauses let them.
pub fn trace(sessions: Vec<Vec<Turn>>) -> Trace {
    let session = |turns| Session { name: String::new(), arrival: Duration::ZERO, turns };
    let sessions = sessions.into_iter().map(session).collect();
    Trace { name: String::new(), block_tokens: 16, sessions }
}
