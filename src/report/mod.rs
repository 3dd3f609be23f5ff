//! The cache report: what an agent beside an engine says of its KV cache and load, as bytes. `docs/cache-report.md` has them
//! one by one.
//!
//! A report is a [`Status`] and [`Change`]s of what is held, since a [`Position`] that the reader has named, or since nothing:
//! a snapshot. Its blocks are this crate's own [`BlockHash`]es, and what is held is always a tree of prefixes: a block is only
//! reported while all in front of it are held.
//!
//! This deliberately knows no engine, no connection and no index: `agent` writes reports, the filter's poller reads them.

mod pieces;
mod read;
mod waiting;
mod write;

pub use pieces::{Piece, Pieces};
pub use read::{Report, ReportError};
pub use waiting::Waiting;
pub use write::{Changes, write, write_head};

use crate::replicas::stats;
use crate::tokens::blocks::{BlockHash, BlockSize};
use std::fmt;
use std::str::FromStr;

/// Where an agent answers with a report.
pub const PATH: &str = "/v1/cache";

/// The content type of a report.
pub const CONTENT_TYPE: &str = "application/x-warmpath-cache-report";

/// What each report begins with.
const MAGIC: u32 = u32::from_le_bytes(*b"WPCR");

/// The version of these bytes: another one is not read.
const VERSION: u16 = 1;

/// A longer report is not read: two million blocks. Halved, an engine with SGLang's pages of one token might not fit; doubled,
/// so is what a hostile agent can fill a VM with.
pub const MAX_REPORT_BYTES: usize = 16 << 20;

/// A longer status is not read: a model's name and 64 adapters are a kilobyte.
pub const MAX_STATUS_BYTES: usize = 4 << 10;

/// A point in what an agent has reported. As text, `generation.seq`, both decimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Position {
    /// Chosen at random whenever what was held before says nothing about what is held now: the agent or its engine was
    /// restarted, the cache was cleared, or events were missed.
    pub generation: u64,
    /// Changes so far within it.
    pub seq: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.generation, self.seq)
    }
}

/// A text that is no position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PositionError;

impl fmt::Display for PositionError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("expected generation.seq, two numbers")
    }
}

impl FromStr for Position {
    type Err = PositionError;

    fn from_str(text: &str) -> Result<Self, PositionError> {
        let (generation, seq) = text.split_once('.').ok_or(PositionError)?;
        let number = |text: &str| text.parse().map_err(|_| PositionError);
        Ok(Self { generation: number(generation)?, seq: number(seq)? })
    }
}

/// Everything of a report but the blocks.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Status {
    /// The name that the chains of the engine's base model start from.
    pub model: String,
    /// Tokens per block; 0 before the engine has said it.
    pub block_tokens: u32,
    /// Whether the operator wants no new requests here.
    pub draining: bool,
    /// Whether the engine's events are being heard.
    pub live: bool,
    /// Whether more may be held than is reported, since the engine's first events were not to be had any more.
    pub incomplete: bool,
    /// Whether the events do not say which adapter a block belongs to (SGLang): only requests for the base model are matched,
    /// and an adapter's blocks are reported as the base model's.
    pub adapters_unknown: bool,
    /// KV blocks of one engine.
    pub capacity_blocks: Option<u32>,
    /// When the engine's process started, in seconds since the epoch.
    pub started_at: Option<f64>,
    /// Requests in the batch.
    pub running: Option<u32>,
    /// Requests queued.
    pub waiting: Option<u32>,
    /// Share of KV blocks held by running requests, 0 to 1.
    pub kv_usage: Option<f64>,
    /// How old the figures of load are, in milliseconds; `None` when there are none.
    pub load_age_ms: Option<u32>,
    /// Engines behind the address that the load is of.
    pub engines: u32,
    /// Whether it takes part in computing prompts in one pool and answers in another.
    pub disaggregated: bool,
    /// The LoRA adapters in use, where the engine says which.
    pub adapters: Option<stats::Adapters>,
    /// Blocks that are reported as held.
    pub held_blocks: u64,
    /// Of these, the ones that only an offloading tier holds.
    pub offloaded_blocks: u64,
    /// Blocks that the engine holds and that are left out: media and prompt embeddings and all behind them, and groups of
    /// layers with a window or a state of their own.
    pub unmatched_blocks: u64,
}

impl Status {
    /// The figures of load as the engine's own page would have said them; `None` when it has not been read.
    pub fn load(&self) -> Option<stats::Report> {
        self.load_age_ms?;
        Some(stats::Report {
            running: self.running,
            waiting: self.waiting,
            kv_usage: self.kv_usage,
            block_size: BlockSize::new(self.block_tokens),
            capacity_blocks: self.capacity_blocks,
            started_at: self.started_at,
            engines: self.engines as usize,
            disaggregated: self.disaggregated,
            adapters: self.adapters.clone(),
        })
    }
}

/// Where an engine keeps a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Where it computes.
    Gpu,
    /// Anywhere else: it must be fetched before it can be used.
    Offload,
}

/// What became of some blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// These blocks, each behind the one before it and the first behind the parent, are now held in this tier.
    Stored {
        /// Held too; `None` for the root of a chain.
        parent: Option<BlockHash>,
        /// Never empty.
        blocks: Vec<BlockHash>,
        /// Where.
        tier: Tier,
    },
    /// These blocks are no longer held in this tier; each comes before the one that it stands behind.
    Removed {
        /// Never empty.
        blocks: Vec<BlockHash>,
        /// From where.
        tier: Tier,
    },
}

impl Change {
    /// The blocks that it is about.
    pub fn blocks(&self) -> &[BlockHash] {
        let (Self::Stored { blocks, .. } | Self::Removed { blocks, .. }) = self;
        blocks
    }

    /// Where.
    pub fn tier(&self) -> Tier {
        let (Self::Stored { tier, .. } | Self::Removed { tier, .. }) = self;
        *tier
    }
}

#[cfg(test)]
mod tests;
