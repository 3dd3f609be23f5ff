//! A report to bytes.

use super::{Change, MAGIC, Position, Status, Tier, VERSION};
use crate::share::bytes::Writer;
use crate::tokens::blocks::BlockHash;

/// The first byte of a change: what it is.
pub(super) const STORED_AT_ROOT: u8 = 1;
pub(super) const STORED_BEHIND: u8 = 2;
pub(super) const REMOVED: u8 = 3;

/// The bits of a status's flags.
pub(super) const DRAINING: u8 = 1;
pub(super) const LIVE: u8 = 2;
pub(super) const INCOMPLETE: u8 = 4;
pub(super) const ADAPTERS_UNKNOWN: u8 = 8;
pub(super) const DISAGGREGATED: u8 = 16;

pub(super) fn tier_byte(tier: Tier) -> u8 {
    match tier {
        Tier::Gpu => 0,
        Tier::Offload => 1,
    }
}

/// Changes as they stand in a report, to be kept and sent more than once.
#[derive(Debug, Default)]
pub struct Changes {
    bytes: Writer,
    count: u64,
}

impl Changes {
    /// Appends one. One of no blocks is none.
    pub fn push(&mut self, change: &Change) {
        match change {
            Change::Stored { parent, blocks, tier } => self.stored(*parent, blocks, *tier),
            Change::Removed { blocks, tier } => self.removed(blocks, *tier),
        }
    }

    /// Appends that these blocks are held.
    pub fn stored(&mut self, parent: Option<BlockHash>, blocks: &[BlockHash], tier: Tier) {
        let kind = if parent.is_some() { STORED_BEHIND } else { STORED_AT_ROOT };
        self.change(kind, parent, blocks, tier);
    }

    /// Appends that these blocks are not.
    pub fn removed(&mut self, blocks: &[BlockHash], tier: Tier) {
        self.change(REMOVED, None, blocks, tier);
    }

    fn change(&mut self, kind: u8, parent: Option<BlockHash>, blocks: &[BlockHash], tier: Tier) {
        if blocks.is_empty() {
            return;
        }
        self.count += 1;
        self.bytes.u8(kind);
        self.bytes.u8(tier_byte(tier));
        if let Some(parent) = parent {
            self.bytes.u64(parent.0);
        }
        self.bytes.list(blocks.iter(), |bytes, block| bytes.u64(block.0));
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    /// Their bytes.
    pub fn finish(self) -> Vec<u8> {
        self.bytes.finish()
    }
}

/// A report of these changes. Without `since` they are a snapshot: all that is held, from nothing.
pub fn write(
    status: &Status,
    since: Option<Position>,
    position: Position,
    changes: impl IntoIterator<Item = Change>,
) -> Vec<u8> {
    let mut encoded = Changes::default();
    for change in changes {
        encoded.push(&change);
    }
    let changes = encoded.as_slice();
    [&write_head(status, since, position, changes.len()), changes].concat()
}

/// What stands in front of so many bytes of changes.
pub fn write_head(
    status: &Status,
    since: Option<Position>,
    position: Position,
    changes_bytes: usize,
) -> Vec<u8> {
    let mut bytes = Writer::default();
    bytes.u32(MAGIC);
    bytes.u16(VERSION);
    bytes.option(since, write_position);
    write_position(&mut bytes, position);
    let status = status_bytes(status);
    bytes.list(status.iter(), |bytes, byte| bytes.u8(*byte));
    bytes.u32(u32::try_from(changes_bytes).unwrap_or(u32::MAX));
    bytes.finish()
}

fn write_position(bytes: &mut Writer, position: Position) {
    bytes.u64(position.generation);
    bytes.u64(position.seq);
}

fn status_bytes(status: &Status) -> Vec<u8> {
    let mut bytes = Writer::default();
    let finite = |value: Option<f64>| value.filter(|value| value.is_finite());
    bytes.text(&status.model);
    bytes.u32(status.block_tokens);
    let flag = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
    bytes.u8(flag(status.draining, DRAINING)
        | flag(status.live, LIVE)
        | flag(status.incomplete, INCOMPLETE)
        | flag(status.adapters_unknown, ADAPTERS_UNKNOWN)
        | flag(status.disaggregated, DISAGGREGATED));
    bytes.option(status.capacity_blocks, Writer::u32);
    bytes.option(finite(status.started_at), Writer::f64);
    bytes.option(status.running, Writer::u32);
    bytes.option(status.waiting, Writer::u32);
    bytes.option(finite(status.kv_usage), Writer::f64);
    bytes.option(status.load_age_ms, Writer::u32);
    bytes.u32(status.engines);
    bytes.option(status.adapters.as_ref(), |bytes, adapters| {
        bytes.u32(u32::try_from(adapters.places).unwrap_or(u32::MAX));
        bytes.list(adapters.in_use.iter(), |bytes, name| bytes.u64(*name));
    });
    bytes.u64(status.held_blocks);
    bytes.u64(status.offloaded_blocks);
    bytes.u64(status.unmatched_blocks);
    bytes.finish()
}
