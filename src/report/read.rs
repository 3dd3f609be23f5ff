//! Bytes to a report, of which nothing is trusted.
//!
//! What stands in front of the changes is read at once, the changes in steps of as many blocks as the caller has time for. What
//! is wrong far behind is only found there, so whoever meets an error must take back what the report's earlier steps said.

use super::write::{
    ADAPTERS_UNKNOWN, DISAGGREGATED, DRAINING, INCOMPLETE, LIVE, REMOVED, STORED_AT_ROOT,
    STORED_BEHIND, tier_byte,
};
use super::{Change, MAGIC, MAX_REPORT_BYTES, MAX_STATUS_BYTES, Position, Status, Tier, VERSION};
use crate::replicas::stats::{Adapters, MAX_ADAPTERS};
use crate::share::bytes::Reader;
use crate::tokens::blocks::BlockHash;
use std::fmt;

/// Why bytes are no report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportError {
    /// More bytes than any report has.
    TooLong,
    /// Not a cache report at all.
    Foreign,
    /// A report in another version.
    Version(u16),
    /// What stands in front of the changes is cut off or makes no sense.
    Head,
    /// The changes are cut off or make no sense.
    Changes,
}

impl fmt::Display for ReportError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong => write!(formatter, "longer than {MAX_REPORT_BYTES} bytes"),
            Self::Foreign => formatter.write_str("not a cache report"),
            Self::Version(version) => write!(formatter, "version {version}, expected {VERSION}"),
            Self::Head => formatter.write_str("its head is cut off or makes no sense"),
            Self::Changes => formatter.write_str("its changes are cut off or make no sense"),
        }
    }
}

/// A report on its way from bytes.
#[derive(Debug, Clone)]
pub struct Report {
    /// Everything but the blocks.
    pub status: Status,
    /// What the changes continue; `None` for a snapshot, before which everything is to be forgotten.
    pub since: Option<Position>,
    /// What has been reported with the last change.
    pub position: Position,
    body: Vec<u8>,
    /// Where the next change, or the rest of the present one, begins.
    at: usize,
    present: Option<Present>,
}

/// A change of which blocks are still to come.
#[derive(Debug, Clone, Copy)]
struct Present {
    kind: Kind,
    tier: Tier,
    blocks: usize,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Stored(Option<BlockHash>),
    Removed,
}

impl Report {
    /// Reads all but the changes.
    ///
    /// # Errors
    /// When the bytes are no report of this version.
    pub fn read(body: Vec<u8>) -> Result<Self, ReportError> {
        if body.len() > MAX_REPORT_BYTES {
            return Err(ReportError::TooLong);
        }
        let mut reader = Reader::new(&body);
        if reader.u32() != Some(MAGIC) {
            return Err(ReportError::Foreign);
        }
        let version = reader.u16().ok_or(ReportError::Head)?;
        if version != VERSION {
            return Err(ReportError::Version(version));
        }
        let (status, since, position) = head(&mut reader).ok_or(ReportError::Head)?;
        let length = reader.u32().ok_or(ReportError::Head)? as usize;
        if length != reader.remaining() {
            return Err(ReportError::Changes);
        }
        let at = body.len() - length;
        Ok(Self { status, since, position, body, at, present: None })
    }

    /// The bytes of it.
    pub fn bytes(&self) -> usize {
        self.body.len()
    }

    /// How many blocks what has not been read yet is about, at most.
    pub fn most_blocks_left(&self) -> usize {
        self.body.len().saturating_sub(self.at) / size_of::<BlockHash>()
    }

    /// Whether all changes have been read.
    pub fn is_done(&self) -> bool {
        self.present.is_none() && self.at >= self.body.len()
    }

    /// The next changes, of so many blocks together at most. A change of more comes in pieces, each of which is one. `None`
    /// when there are no more.
    ///
    /// # Errors
    /// When the next bytes are no change; what came before them is not to be believed either.
    pub fn step(&mut self, most_blocks: usize) -> Result<Option<Vec<Change>>, ReportError> {
        if self.is_done() {
            return Ok(None);
        }
        let mut room = most_blocks.max(1);
        let mut changes = Vec::new();
        while room > 0 && !self.is_done() {
            let change = self.next(room).ok_or(ReportError::Changes)?;
            room = room.saturating_sub(change.blocks().len());
            changes.push(change);
        }
        Ok(Some(changes))
    }

    fn next(&mut self, room: usize) -> Option<Change> {
        let mut reader = Reader::new(self.body.get(self.at..)?);
        let mut present = match self.present {
            Some(present) => present,
            None => begin(&mut reader)?,
        };
        let take = present.blocks.min(room);
        let mut blocks = Vec::with_capacity(take);
        for _ in 0..take {
            blocks.push(BlockHash(reader.u64()?));
        }
        self.at = self.body.len() - reader.remaining();
        present.blocks -= take;
        let (kind, tier) = (present.kind, present.tier);
        if let Kind::Stored(parent) = &mut present.kind {
            *parent = blocks.last().copied();
        }
        self.present = Some(present).filter(|present| present.blocks > 0);
        Some(match kind {
            Kind::Stored(parent) => Change::Stored { parent, blocks, tier },
            Kind::Removed => Change::Removed { blocks, tier },
        })
    }
}

/// A change up to its blocks, all of which are there.
fn begin(reader: &mut Reader<'_>) -> Option<Present> {
    let kind = reader.u8()?;
    let tier = reader.u8()?;
    let tier = [Tier::Gpu, Tier::Offload].into_iter().find(|known| tier_byte(*known) == tier)?;
    let kind = match kind {
        STORED_AT_ROOT => Kind::Stored(None),
        STORED_BEHIND => Kind::Stored(Some(BlockHash(reader.u64()?))),
        REMOVED => Kind::Removed,
        _ => return None,
    };
    let blocks = reader.u32()? as usize;
    (blocks > 0 && blocks <= reader.remaining() / size_of::<u64>()).then_some(Present {
        kind,
        tier,
        blocks,
    })
}

fn head(reader: &mut Reader<'_>) -> Option<(Status, Option<Position>, Position)> {
    let since = reader.option(position)?;
    let position = position(reader)?;
    // Changes cannot be of two generations: they would have been forgotten in between.
    if since
        .is_some_and(|since| since.generation != position.generation || since.seq > position.seq)
    {
        return None;
    }
    let length = reader.u32()? as usize;
    if length > MAX_STATUS_BYTES {
        return None;
    }
    let mut status = reader.clone();
    for _ in 0..length {
        reader.u8()?;
    }
    let after = reader.remaining();
    let read = read_status(&mut status)?;
    // What a later writer appends to a status is passed over; what is missing is not.
    (status.remaining() >= after).then_some((read, since, position))
}

fn position(reader: &mut Reader<'_>) -> Option<Position> {
    Some(Position { generation: reader.u64()?, seq: reader.u64()? })
}

/// A number that makes no sense is as absent as one that is not there.
fn read_status(reader: &mut Reader<'_>) -> Option<Status> {
    let model = reader.text()?.to_owned();
    let block_tokens = reader.u32()?;
    let flags = reader.u8()?;
    let is_set = |bit: u8| flags & bit != 0;
    let capacity_blocks = reader.option(Reader::u32)?.filter(|blocks| *blocks > 0);
    let started_at = reader.option(Reader::f64)?.filter(|at| *at > 0.0);
    let running = reader.option(Reader::u32)?;
    let waiting = reader.option(Reader::u32)?;
    let kv_usage = reader.option(Reader::f64)?.filter(|share| (0.0..=1.0).contains(share));
    let load_age_ms = reader.option(Reader::u32)?;
    let engines = reader.u32()?;
    let adapters = reader.option(|reader| {
        let places = reader.u32()? as usize;
        let in_use = reader.list(Reader::u64)?;
        Some(Adapters { in_use, places })
    })?;
    let adapters = adapters.filter(|adapters| {
        (1..=MAX_ADAPTERS).contains(&adapters.places) && adapters.in_use.len() <= MAX_ADAPTERS
    });
    Some(Status {
        model,
        block_tokens,
        draining: is_set(DRAINING),
        live: is_set(LIVE),
        incomplete: is_set(INCOMPLETE),
        adapters_unknown: is_set(ADAPTERS_UNKNOWN),
        disaggregated: is_set(DISAGGREGATED),
        capacity_blocks,
        started_at,
        running,
        waiting,
        kv_usage,
        load_age_ms,
        engines,
        adapters,
        held_blocks: reader.u64()?,
        offloaded_blocks: reader.u64()?,
        unmatched_blocks: reader.u64()?,
    })
}
