//! Prompts, as a format tells them, to a session's turns: what is kept of the prompt before, and what is new.
//!
//! It does not read files and does not choose names or times.

use super::{Session, Turn};
use std::time::Duration;
use warmpath::tokens::blocks::{BlockHash, BlockSize, Chain, ChainSeed};

/// What the traces without durations are taken to have answered at: tokens per second are some fifty where people watch.
/// Their timestamps say when a request came, so that the pause before it is the time since the request before, less
/// the answer's. Doubled or halved, pauses of a few seconds are half a dozen seconds off.
const ANSWER_TOKEN: Duration = Duration::from_millis(20);

/// The pause before a request that came `since` after the one before it, which was answered with so many tokens.
pub fn pause(since: Duration, answer_tokens: u32) -> Duration {
    since.saturating_sub(ANSWER_TOKEN.saturating_mul(answer_tokens))
}

/// A request, with its prompt in full.
pub struct Asked<'a> {
    /// Ids of all full blocks.
    pub prompt: &'a [u64],
    /// Tokens of the whole prompt.
    pub prompt_tokens: u32,
    /// Ids of the blocks that the answer fills, if they are known.
    pub answer_blocks: Vec<u64>,
    /// Tokens of the answer.
    pub answer_tokens: u32,
    /// See [`Turn::think`].
    pub think: Duration,
    /// See [`Turn::class`].
    pub class: &'static str,
}

/// A session on its way.
pub struct Writing {
    session: Session,
    /// The blocks of the last prompt and of its answer.
    before: Vec<u64>,
}

impl Writing {
    /// A session without turns.
    pub fn new(name: String, arrival: Duration) -> Self {
        let session = Session { name, arrival, turns: Vec::new() };
        Self { session, before: Vec::new() }
    }

    /// Adds a turn.
    pub fn ask(&mut self, asked: Asked<'_>) {
        let same = self.before.iter().zip(asked.prompt).take_while(|(old, new)| old == new);
        let keep = same.count();
        self.before.truncate(keep);
        self.before.extend(asked.prompt.iter().skip(keep));
        self.before.extend(&asked.answer_blocks);
        self.session.turns.push(Turn {
            think: asked.think,
            keep,
            blocks: asked.prompt.get(keep..).unwrap_or_default().to_vec(),
            prompt_tokens: asked.prompt_tokens,
            answer_blocks: asked.answer_blocks,
            answer_tokens: asked.answer_tokens,
            class: asked.class,
        });
    }

    /// Whether nothing was asked yet.
    pub fn is_empty(&self) -> bool {
        self.session.turns.is_empty()
    }

    /// The session, as it stands.
    pub fn session(self) -> Session {
        self.session
    }
}

/// A text that grows, and the ids of its full blocks.
pub struct Growing(Chain);

impl Growing {
    /// An empty text. A block size of 0 is taken for 1.
    pub fn new(block_tokens: u32) -> Self {
        let size = BlockSize::new(block_tokens).unwrap_or(BlockSize::MIN);
        Self(Chain::new(ChainSeed::new("trace", None), size, &[]))
    }

    /// Puts these behind it.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.0.extend(tokens);
    }

    /// Its length.
    pub fn tokens(&self) -> u32 {
        u32::try_from(self.0.token_count()).unwrap_or(u32::MAX)
    }

    /// The ids of its full blocks.
    pub fn blocks(&self) -> Vec<u64> {
        self.0.hashes().iter().map(|BlockHash(id)| *id).collect()
    }

    /// Puts an answer behind it, and returns the blocks that an engine has filled by then: the last token of an answer
    /// is never put through the model.
    pub fn answer(&mut self, tokens: &[u32]) -> Vec<u64> {
        let before = self.0.hashes().len();
        self.0.extend(tokens);
        let computed = self.0.token_count().saturating_sub(1);
        let filled = computed / self.0.block_size().get() as usize;
        let filled = self.0.hashes().get(before..filled.max(before)).unwrap_or_default();
        filled.iter().map(|BlockHash(id)| *id).collect()
    }
}
