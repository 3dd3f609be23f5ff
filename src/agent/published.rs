//! Batches as engines write them, for tests.

use crate::agent::rank::{Ended, Frame, Rank};
use serde_json::{Value, json};

/// A batch of events at a time.
pub fn batch(at: f64, events: &[Value]) -> Vec<u8> {
    rmp_serde::to_vec(&(at, events, 0)).unwrap()
}

/// Blocks of four tokens, as vLLM writes them.
pub fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Value {
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 4, "lora_id": null, "medium": "GPU", "lora_name": null, "group_idx": 0,
        "kv_cache_spec_kind": "full_attention"})
}

/// The same with other fields, too.
pub fn with(mut event: Value, fields: Value) -> Value {
    let (Value::Object(event_fields), Value::Object(fields)) = (&mut event, fields) else {
        panic!()
    };
    event_fields.extend(fields);
    event
}

/// A block that is gone.
pub fn removed(hash: u64) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [hash], "medium": "GPU", "group_idx": 0})
}

/// An engine's stream: what it has published, and what of it can be had again.
#[derive(Default)]
pub struct Publisher {
    batches: Vec<Vec<u8>>,
    started_at: f64,
    /// The first that can be had again.
    pub oldest: usize,
}

impl Publisher {
    /// That of an engine that was started at another time.
    pub fn started(started_at: f64) -> Self {
        Self { started_at, ..Self::default() }
    }

    /// Publishes a batch.
    pub fn publish(&mut self, events: &[Value]) -> Frame<'_> {
        self.publish_bytes(batch(self.started_at + self.batches.len() as f64, events))
    }

    /// Publishes what may be none.
    pub fn publish_bytes(&mut self, payload: Vec<u8>) -> Frame<'_> {
        self.batches.push(payload);
        self.frame(self.batches.len() - 1)
    }

    pub fn len(&self) -> usize {
        self.batches.len()
    }

    pub fn frame(&self, at: usize) -> Frame<'_> {
        Frame { seq: at as u64, payload: &self.batches[at] }
    }

    /// Answers as many replays as are wanted; of each only so many frames arrive.
    pub fn catch_up(&self, rank: &mut Rank, mut arriving: impl FnMut() -> usize) {
        for round in 0.. {
            assert!(round < 10_000, "no end of replays");
            if rank.wants_replay().is_none() {
                return;
            }
            let from = rank.begin_replay() as usize;
            let first = from.max(self.oldest);
            for at in (first..self.batches.len()).take(arriving()) {
                rank.take_replayed(self.frame(at));
            }
            rank.end_replay(Ended::Over);
        }
    }
}
