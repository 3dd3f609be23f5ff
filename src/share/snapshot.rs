//! What a VM knows of all replicas' blocks, handed to one that does not know it.
//!
//! Logs keep the last megabyte of each writer only. So that a VM which is new, or was overtaken,
//! can learn the rest, another writes its index into numbered chunks, with every log's position as
//! it was when it began: who takes the chunks in and then reads the logs from there misses nothing,
//! whatever happened meanwhile. Both do it in bounded steps.
//!
//! One snapshot exists at a time, in keys that are used again. It is written when somebody wants
//! it and not kept up to date; when that is so is `catch_up`'s part.

use super::bytes::{Reader, Writer};
use super::observed::{Standing, room};
use super::store::{Store, get_or_create};
use super::vm::LogHead;
use super::{Header, Kind, SNAPSHOT_KEY, snapshot_chunk_key};
use crate::index::{Cursor, PrefixIndex, Run, Settling};
use crate::replicas::{MAX_SHADOW_BLOCKS, Moment, ReplicaId, ReplicaTable};
use crate::tokens::blocks::BlockHash;
use std::time::Duration;

/// A chunk that has reached this size is written: some 8,000 blocks. Larger chunks make longer
/// steps; smaller ones more keys.
const CHUNK_BYTES: usize = 64 << 10;

/// Most chunks: 64 MB, which is twice what [`MAX_SHADOW_BLOCKS`] come to, since a run has some 30
/// bytes beside its blocks. What is beyond is left out, and counted.
const MAX_CHUNKS: u32 = 1024;

/// Chunks written or read on one tick: some 16,000 blocks, which take a few milliseconds. Halved, a
/// snapshot takes twice as long; doubled, so does the pause of the worker.
const CHUNKS_PER_TICK: usize = 2;

/// Steps of making usable what was read, on one tick: some milliseconds.
const SETTLED_PER_TICK: usize = 4;

/// A writer that does nothing for so long is dead.
const WRITER_PATIENCE: Duration = Duration::from_secs(5);

/// What is said of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// For which configuration, by whom, and which one it is.
    pub header: Header,
    /// When its writer last did something.
    pub at: Moment,
    /// How many chunks there are so far.
    pub chunks: u32,
    /// Whether these are all.
    pub is_complete: bool,
    /// Up to where it goes.
    pub contained: Contained,
}

/// What is in an index.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Contained {
    /// How far each slot's log is.
    pub logs: Vec<(u32, LogHead)>,
    /// How far replicas' reports are.
    pub standings: Vec<(ReplicaId, Standing)>,
}

impl Head {
    fn write(&self) -> Vec<u8> {
        let mut writer = self.header.begin(Kind::Snapshot);
        writer.u64(self.at.0);
        writer.u32(self.chunks);
        writer.u8(self.is_complete.into());
        writer.list(self.contained.logs.iter(), |writer, (slot, head)| {
            writer.u32(*slot);
            writer.u64(head.segment);
            writer.u32(head.length);
        });
        writer.list(self.contained.standings.iter(), |writer, (replica, standing)| {
            writer.u32(replica.slot);
            writer.u32(replica.incarnation);
            standing.write(writer);
        });
        writer.finish()
    }

    fn parse(value: &[u8]) -> Option<Self> {
        let (header, mut reader) = Header::read(value, Kind::Snapshot)?;
        Some(Self {
            header,
            at: Moment(reader.u64()?),
            chunks: reader.u32()?,
            is_complete: reader.u8()? == 1,
            contained: Contained {
                logs: reader.list(|reader| {
                    let slot = reader.u32()?;
                    Some((slot, LogHead { segment: reader.u64()?, length: reader.u32()? }))
                })?,
                standings: reader.list(|reader| {
                    let replica = ReplicaId { slot: reader.u32()?, incarnation: reader.u32()? };
                    Some((replica, Standing::read(reader)?))
                })?,
            },
        })
    }

    /// The snapshot there is, or is going to be.
    pub fn read(store: &impl Store) -> Option<Self> {
        Self::parse(&store.get(SNAPSHOT_KEY).0?)
    }

    /// Whether a snapshot that is being written still is.
    pub fn is_in_work(&self, now: Moment) -> bool {
        !self.is_complete && now.since(self.at) < WRITER_PATIENCE
    }
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// There is more to do.
    Pending,
    /// All is done.
    Done,
    /// All is done that there was room for.
    Cut,
    /// Another snapshot has taken its place.
    Lost,
}

/// A snapshot that this VM writes.
#[derive(Debug)]
pub struct Dump {
    head: Head,
    cursor: Cursor,
}

impl Dump {
    /// Begins one, unless another VM is at it. `contained` is what is in the index.
    pub fn begin(
        store: &impl Store,
        (fingerprint, vm): (u64, u64),
        contained: Contained,
        index: &mut PrefixIndex,
        now: Moment,
    ) -> Option<Self> {
        let (value, mark) = get_or_create(store, SNAPSHOT_KEY);
        let last = value.as_deref().and_then(Head::parse);
        if last.as_ref().is_some_and(|last| last.is_in_work(now)) {
            return None;
        }
        let version = last.map_or(0, |last| last.header.version).saturating_add(1);
        let header = Header { fingerprint, writer: vm, version };
        let head = Head { header, at: now, chunks: 0, is_complete: false, contained };
        let begun = mark.is_some() && store.set(SNAPSHOT_KEY, &head.write(), mark);
        begun.then(|| Self { head, cursor: index.cursor() })
    }

    /// Writes some chunks.
    pub fn step(&mut self, store: &impl Store, index: &mut PrefixIndex, now: Moment) -> Step {
        let (value, mark) = store.get(SNAPSHOT_KEY);
        let is_own = |head: &Head| head.header == self.head.header;
        if mark.is_none() || !value.as_deref().and_then(Head::parse).is_some_and(|h| is_own(&h)) {
            return Step::Lost;
        }
        let mut step = Step::Pending;
        for _ in 0..CHUNKS_PER_TICK {
            let Some(chunk) = self.next_chunk(index) else {
                step = Step::Done;
                break;
            };
            if self.head.chunks >= MAX_CHUNKS {
                step = Step::Cut;
                break;
            }
            if !store.set(&snapshot_chunk_key(self.head.chunks), &chunk, None) {
                return Step::Lost;
            }
            self.head.chunks += 1;
        }
        self.head.at = now;
        self.head.is_complete = step != Step::Pending;
        if store.set(SNAPSHOT_KEY, &self.head.write(), mark) { step } else { Step::Lost }
    }

    fn next_chunk(&mut self, index: &mut PrefixIndex) -> Option<Vec<u8>> {
        let first = index.export(&mut self.cursor)?;
        let mut writer = self.head.header.begin(Kind::Chunk);
        write_run(&mut writer, &first);
        while writer.len() < CHUNK_BYTES
            && let Some(run) = index.export(&mut self.cursor)
        {
            write_run(&mut writer, &run);
        }
        Some(writer.finish())
    }
}

fn write_run(writer: &mut Writer, run: &Run) {
    writer.u32(run.replica.slot);
    writer.u32(run.replica.incarnation);
    writer.u64(run.used);
    writer.option(run.parent, |writer, hash| writer.u64(hash.0));
    writer.list(run.blocks.iter(), |writer, hash| writer.u64(hash.0));
}

fn read_run(reader: &mut Reader<'_>) -> Option<Run> {
    Some(Run {
        replica: ReplicaId { slot: reader.u32()?, incarnation: reader.u32()? },
        used: reader.u64()?,
        parent: reader.option(|reader| reader.u64().map(BlockHash))?,
        blocks: reader.list(|reader| reader.u64().map(BlockHash))?,
    })
}

/// A snapshot that this VM takes in.
pub struct Intake {
    head: Head,
    index: PrefixIndex,
    next: u32,
    blocks: usize,
    /// Replicas whose blocks are not usable yet; none before all chunks are read.
    unsettled: Option<Vec<ReplicaId>>,
    settling: Settling,
}

impl Intake {
    /// Begins to take in a complete snapshot.
    pub fn new(head: Head, seed: u64) -> Self {
        let index = PrefixIndex::with_seed(seed);
        let settling = Settling::default();
        Self { head, index, next: 0, blocks: 0, unsettled: None, settling }
    }

    /// Reads some chunks, or makes some of what was read usable.
    pub fn step(&mut self, store: &impl Store, table: &ReplicaTable, default: u32) -> Step {
        match &mut self.unsettled {
            None => self.read_chunks(store),
            Some(unsettled) => {
                for _ in 0..SETTLED_PER_TICK {
                    let Some(&replica) = unsettled.last() else { break };
                    if self.index.settle(replica, &mut self.settling) {
                        self.index.set_capacity(replica, table.shadow_blocks(replica, default));
                        self.index.set_room(replica.real(), room(table, replica.real(), default));
                        self.settling = Settling::default();
                        unsettled.pop();
                    }
                }
                if unsettled.is_empty() { Step::Done } else { Step::Pending }
            }
        }
    }

    fn read_chunks(&mut self, store: &impl Store) -> Step {
        for _ in 0..CHUNKS_PER_TICK {
            if self.next >= self.head.chunks {
                self.unsettled = Some(self.index.replicas().collect());
                break;
            }
            let (value, _) = store.get(&snapshot_chunk_key(self.next));
            if value.and_then(|chunk| self.read_chunk(&chunk)).is_none() {
                return Step::Lost;
            }
            self.next += 1;
        }
        // What was read is only worth its head's word for it.
        if Head::read(store).as_ref() == Some(&self.head) { Step::Pending } else { Step::Lost }
    }

    fn read_chunk(&mut self, chunk: &[u8]) -> Option<()> {
        let (header, mut reader) = Header::read(chunk, Kind::Chunk)?;
        if header != self.head.header {
            return None;
        }
        while reader.remaining() > 0 {
            let run = read_run(&mut reader)?;
            self.blocks += run.blocks.len();
            // Routed, imagined and reported ones.
            if self.blocks > 3 * MAX_SHADOW_BLOCKS {
                return None;
            }
            // Also of a replica that is not in this VM's table: its writer may know a newer one.
            self.index.import(run);
        }
        Some(())
    }

    /// The snapshot's number.
    pub fn version(&self) -> u64 {
        self.head.header.version
    }

    /// What it held, and up to where that goes.
    pub fn finish(self) -> (PrefixIndex, Contained) {
        (self.index, self.head.contained)
    }
}
