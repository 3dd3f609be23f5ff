//! KV events: what an engine tells of its cache, in the bytes that vLLM 0.32 tells it in.
//!
//! A batch is `[time, [event, ...], rank]` in MessagePack, an event a map with its type; keys that have their default
//! are left out, in vLLM's order. Recordings of an engine, read and written again, are the same bytes.
//!
//! It has no sockets, no sequence numbers and no faults: those are [`super::publisher`]'s. Of what an engine can tell
//! it has one cache group of full attention in GPU memory: no offloading, no sliding windows, no media, no sessions.

use super::digest::Digest;
use serde::Serialize;

/// What became of blocks in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    /// A run of one sequence's blocks became known.
    Stored(Stored),
    /// One copy of a block was given up.
    Removed(Digest),
    /// Nothing is cached any more.
    Cleared,
}

/// A run of blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The blocks, in the order of the sequence.
    pub digests: Vec<Digest>,
    /// The block before the first of them.
    pub parent: Option<Digest>,
    /// Their tokens.
    pub tokens: Vec<u32>,
    /// The adapter's name.
    pub lora: Option<String>,
    /// `cache_salt`, where the sequence's first block is among them.
    pub salt: Option<String>,
}

/// What all events of an engine have in common.
#[derive(Debug, Clone, Default)]
pub struct Encoder {
    /// Tokens per block.
    pub block_size: usize,
    /// Adapters by name; an engine numbers them from 1.
    pub loras: Vec<String>,
}

/// Where an engine's blocks are; vLLM says so on a CPU, too.
const MEDIUM: &str = "GPU";

/// vLLM's rank without data parallelism.
const RANK: u32 = 0;

#[derive(Serialize)]
#[serde(tag = "type")]
enum Wire<'a> {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: &'a [u32],
        block_size: usize,
        lora_id: Option<usize>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        extra_keys: Vec<Option<Vec<&'a str>>>,
        group_idx: u32,
        kv_cache_spec_kind: &'static str,
    },
    BlockRemoved {
        block_hashes: [u64; 1],
        medium: &'static str,
        group_idx: u32,
    },
    AllBlocksCleared {},
}

impl Encoder {
    /// A batch, as of `time` in seconds since the Unix epoch.
    pub fn batch(&self, time: f64, events: &[KvEvent]) -> Vec<u8> {
        let wires: Vec<Wire<'_>> = events.iter().map(|event| self.wire(event)).collect();
        // Writing to memory does not fail, and every value has a form in MessagePack.
        rmp_serde::to_vec_named(&(time, wires, RANK)).unwrap_or_default()
    }

    fn wire<'a>(&self, event: &'a KvEvent) -> Wire<'a> {
        let stored = match event {
            KvEvent::Stored(stored) => stored,
            KvEvent::Removed(digest) => {
                let block_hashes = [published(digest)];
                return Wire::BlockRemoved { block_hashes, medium: MEDIUM, group_idx: 0 };
            }
            KvEvent::Cleared => return Wire::AllBlocksCleared {},
        };
        let lora = stored.lora.as_deref();
        let number = |name: &str| Some(self.loras.iter().position(|lora| lora == name)? + 1);
        let extra_keys = (0..stored.digests.len()).map(|at| {
            let salt = stored.salt.as_deref().filter(|_| at == 0);
            let keys: Vec<&str> = lora.into_iter().chain(salt).collect();
            (!keys.is_empty()).then_some(keys)
        });
        Wire::BlockStored {
            block_hashes: stored.digests.iter().map(published).collect(),
            parent_block_hash: stored.parent.as_ref().map(published),
            token_ids: &stored.tokens,
            block_size: self.block_size,
            lora_id: lora.and_then(number),
            medium: MEDIUM,
            lora_name: lora,
            extra_keys: extra_keys.collect(),
            group_idx: 0,
            kv_cache_spec_kind: "full_attention",
        }
    }
}

/// What an engine publishes of a digest: its last eight bytes.
pub fn published(digest: &Digest) -> u64 {
    let [.., a, b, c, d, e, f, g, h] = digest.0;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
