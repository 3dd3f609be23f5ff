//! What a VM routed, for the others to read: a ring of segments with a single writer.
//!
//! The writer appends a record to its current segment, writes that segment whole, and only then
//! publishes the new head in its [`super::vm::VmState`]. A reader that sees a head reads the
//! segments it has not seen up to it. A segment that has been overwritten meanwhile shows by its
//! number: the reader counts that it was lapped and goes on with what is there. It loses only
//! predictions, which the next turns of those conversations bring back.

use super::observed::Update;
use super::vm::LogHead;
use super::{Header, Kind};
use crate::index::Stretch;
use crate::replicas::ReplicaId;
use crate::share::bytes::Writer;
use crate::tokens::blocks::BlockHash;

/// Segments per ring. With [`SEGMENT_BYTES`] this keeps the last 1 MB, some 130,000 blocks, of
/// each VM: what a VM that starts (or was stalled) can still learn.
pub const SEGMENTS: u64 = 32;

/// A segment that has reached this size is left for the next one. It is written whole at every
/// record (32 KB: some 2 us), so larger costs every request and smaller shortens the ring.
pub const SEGMENT_BYTES: usize = 32 << 10;

/// What a reader that is about to read a whole ring leaves for the writer to write meanwhile.
const SPARE_SEGMENTS: u64 = 4;

/// Blocks of one record in the log: 16 KB, so that what a reader must take in at once stays of a bounded size.
pub(super) const PIECE_BLOCKS: usize = 2 << 10;

/// What became of a record's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// They are now on the replica.
    Held,
    /// They were recorded as held, but the replica did not compute them after all.
    Forgotten,
    /// The last of them proved not to be there, and so nothing that follows it is.
    Lost,
}

/// One request's trace: these blocks, behind that parent, on that replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// What became of them.
    pub fate: Fate,
    /// Where it went.
    pub replica: ReplicaId,
    /// The block that they follow, one that an index finds by its hash; `None` for the root.
    pub parent: Option<BlockHash>,
    /// The blocks behind it.
    pub blocks: Vec<BlockHash>,
    /// How many of these only lead to those that are meant.
    pub known: u32,
}

impl Record {
    /// Says this of what is behind the first `from` blocks of a chain.
    pub fn of(fate: Fate, replica: ReplicaId, chain: &[BlockHash], from: usize) -> Self {
        let Stretch { parent, blocks, known } = Stretch::of(chain, from);
        let known = u32::try_from(known).unwrap_or(u32::MAX);
        Self { fate, replica, parent, blocks: blocks.to_vec(), known }
    }

    /// What an index takes.
    pub fn stretch(&self) -> Stretch<'_> {
        Stretch { parent: self.parent, blocks: &self.blocks, known: self.known as usize }
    }

    /// The same in records of bounded size, which together do as much in this order.
    pub fn pieces(self) -> Vec<Self> {
        if self.blocks.len() <= PIECE_BLOCKS {
            return vec![self];
        }
        let Self { fate, replica, mut parent, blocks, mut known } = self;
        // Such a piece ends at a block that an index finds, as its parent is one.
        let piece = |blocks: &[BlockHash]| {
            let behind = std::mem::replace(&mut parent, blocks.last().copied());
            let known = std::mem::take(&mut known);
            Self { fate, replica, parent: behind, blocks: blocks.to_vec(), known }
        };
        let mut pieces: Vec<Self> = blocks.chunks(PIECE_BLOCKS).map(piece).collect();
        if fate == Fate::Forgotten {
            // A block goes only after those behind it.
            pieces.reverse();
        }
        pieces
    }
}

/// What a log holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// Of a request, by whoever routed it.
    Routed(Record),
    /// Of a replica's report, by whoever leads.
    Observed(Update),
}

impl From<Record> for Entry {
    fn from(record: Record) -> Self {
        Self::Routed(record)
    }
}

impl From<Update> for Entry {
    fn from(update: Update) -> Self {
        Self::Observed(update)
    }
}

impl Entry {
    /// Whom it is about.
    pub fn replica(&self) -> ReplicaId {
        match self {
            Self::Routed(record) => record.replica,
            Self::Observed(update) => update.replica,
        }
    }

    /// Blocks that it names.
    pub(super) fn blocks(&self) -> usize {
        match self {
            Self::Routed(record) => record.blocks.len(),
            Self::Observed(update) => update.blocks(),
        }
    }

    fn write(&self, writer: &mut Writer) {
        let record = match self {
            Self::Routed(record) => record,
            Self::Observed(update) => {
                writer.u8(OBSERVED);
                return update.write(writer);
            }
        };
        writer.u8(match record.fate {
            Fate::Held => 0,
            Fate::Forgotten => 1,
            Fate::Lost => 2,
        });
        writer.u32(record.replica.slot);
        writer.u32(record.replica.incarnation);
        writer.option(record.parent, |writer, hash| writer.u64(hash.0));
        writer.list(record.blocks.iter(), |writer, hash| writer.u64(hash.0));
        writer.u32(record.known);
    }
}

/// What an update begins with, in the place of a fate.
const OBSERVED: u8 = 3;

/// The writer's end.
#[derive(Debug)]
pub struct LogWriter {
    header: Header,
    head: LogHead,
    segment: Writer,
}

impl LogWriter {
    /// A writer that goes on at `head`, as [`super::vm::claim`] gave it.
    pub fn new(fingerprint: u64, writer: u64, head: LogHead) -> Self {
        let header = Header { fingerprint, writer, version: head.segment };
        Self { header, head, segment: header.begin(Kind::Log) }
    }

    /// How far the log goes.
    pub fn head(&self) -> LogHead {
        self.head
    }

    /// Appends an entry. Returns the ring place to write and the bytes to write there.
    pub fn append(&mut self, entry: &Entry) -> (u64, &[u8]) {
        if self.segment.len() >= SEGMENT_BYTES {
            self.header.version = self.header.version.saturating_add(1);
            self.segment = self.header.begin(Kind::Log);
        }
        entry.write(&mut self.segment);
        let writer = &self.segment;
        let length = u32::try_from(writer.len()).unwrap_or(u32::MAX);
        self.head = LogHead { segment: self.header.version, length };
        (self.head.segment % SEGMENTS, self.segment.as_slice())
    }
}

/// A reader's place in one VM's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogReader {
    /// All in front of this has been read.
    next: LogHead,
    /// How often segments were gone before they were read.
    pub lapped: u64,
}

/// What a segment gave.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// These entries, in order.
    Entries(Vec<Entry>),
    /// The segment is gone, or not for this configuration.
    Gone,
    /// Not what its owner wrote there last: to be read again later.
    Foreign,
}

impl LogReader {
    /// How far it has read.
    pub fn position(&self) -> LogHead {
        self.next
    }

    /// Goes on from there, forward or back.
    pub fn go_to(&mut self, position: LogHead) {
        self.next = position;
    }

    /// The ring place to read next to get to `head`, or `None` when there is nothing new.
    pub fn place(&mut self, head: LogHead) -> Option<u64> {
        if head <= self.next {
            return None;
        }
        let oldest = head.segment.saturating_sub(SEGMENTS - 1);
        if self.next.segment < oldest {
            // A new reader starts at the oldest segment; that is no loss.
            self.lapped += u64::from(self.next.segment > 0);
            self.next = LogHead { segment: oldest, length: 0 };
        }
        Some(self.next.segment % SEGMENTS)
    }

    /// Takes in the value found at that place, and moves on. `owner` wrote the head.
    ///
    /// A former owner that was stalled while it wrote may leave a segment in the new one's place,
    /// of another length. At the head that is left alone, since the new owner writes its segment
    /// again with the next record; further back it is as true as what it overwrote.
    pub fn take(
        &mut self,
        value: Option<&[u8]>,
        fingerprint: u64,
        owner: u64,
        head: LogHead,
    ) -> Read {
        let wanted = self.next.segment;
        let found = value
            .and_then(|value| Some((value.len(), Header::read(value, Kind::Log)?)))
            .filter(|(_, (header, _))| header.version == wanted);
        let Some((length, (header, mut reader))) = found else {
            self.lapped += u64::from(value.is_some() && wanted > 0);
            self.next = if wanted < head.segment { begin_of(wanted + 1) } else { head };
            return Read::Gone;
        };
        if wanted == head.segment && header.writer != owner {
            return Read::Foreign;
        }
        let header_bytes = length - reader.remaining();
        let from = (self.next.length as usize).saturating_sub(header_bytes);
        // What is behind the head is not published yet, and may never be: its writer may be dead.
        let to = if wanted < head.segment { length } else { head.length as usize };
        self.next = if wanted < head.segment { begin_of(wanted + 1) } else { head };
        if header.fingerprint != fingerprint {
            return Read::Gone;
        }
        Read::Entries(entries(&mut reader, from, to.saturating_sub(header_bytes)))
    }
}

/// Whether a log that has come to `head` still has all behind `position`, and some time to spare.
pub fn still_has(head: LogHead, position: LogHead) -> bool {
    head.segment.saturating_sub(position.segment) < SEGMENTS - SPARE_SEGMENTS
}

fn begin_of(segment: u64) -> LogHead {
    LogHead { segment, length: 0 }
}

/// The entries that begin within these bytes.
fn entries(reader: &mut super::bytes::Reader<'_>, from: usize, to: usize) -> Vec<Entry> {
    let all = reader.remaining();
    let mut entries = Vec::new();
    while all - reader.remaining() < to.min(all) {
        let begin = all - reader.remaining();
        let Some(entry) = entry(reader) else { break };
        if begin >= from {
            entries.push(entry);
        }
    }
    entries
}

fn entry(reader: &mut super::bytes::Reader<'_>) -> Option<Entry> {
    let fate = match reader.u8()? {
        0 => Fate::Held,
        1 => Fate::Forgotten,
        2 => Fate::Lost,
        OBSERVED => return Update::read(reader).map(Entry::Observed),
        _ => return None,
    };
    let record = Record {
        fate,
        replica: ReplicaId { slot: reader.u32()?, incarnation: reader.u32()? },
        parent: reader.option(|reader| reader.u64().map(BlockHash))?,
        blocks: reader.list(|reader| reader.u64().map(BlockHash))?,
        known: reader.u32()?,
    };
    Some(record.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const FINGERPRINT: u64 = 9;

    fn record(number: u64, blocks: usize) -> Entry {
        let record = Record {
            fate: if number.is_multiple_of(3) { Fate::Forgotten } else { Fate::Held },
            replica: ReplicaId { slot: 1, incarnation: 1 },
            parent: number.is_multiple_of(2).then_some(BlockHash(number)),
            blocks: (0..blocks as u64).map(|n| BlockHash(number * 1000 + n)).collect(),
            known: number as u32 % 16,
        };
        record.into()
    }

    /// A ring as shared data would hold it.
    #[derive(Default)]
    struct Ring(BTreeMap<u64, Vec<u8>>);

    impl Ring {
        fn append(&mut self, writer: &mut LogWriter, record: &Entry) {
            let (place, bytes) = writer.append(record);
            self.0.insert(place, bytes.to_vec());
        }

        fn read(&self, reader: &mut LogReader, head: LogHead) -> Vec<Entry> {
            let mut all = Vec::new();
            for _ in 0..=SEGMENTS {
                let Some(place) = reader.place(head) else { return all };
                let value = self.0.get(&place).map(Vec::as_slice);
                if let Read::Entries(records) = reader.take(value, FINGERPRINT, 1, head) {
                    all.extend(records);
                }
            }
            panic!("the reader does not arrive at {head:?}");
        }
    }

    fn writer() -> LogWriter {
        LogWriter::new(FINGERPRINT, 1, LogHead { segment: 1, length: 0 })
    }

    #[test]
    fn a_reader_sees_each_record_once_in_order() {
        let (mut ring, mut writer, mut reader) = (Ring::default(), writer(), LogReader::default());
        let mut seen = Vec::new();
        for number in 0..2000 {
            ring.append(&mut writer, &record(number, 40));
            if number % 7 == 0 {
                seen.extend(ring.read(&mut reader, writer.head()));
            }
        }
        seen.extend(ring.read(&mut reader, writer.head()));
        let expected: Vec<Entry> = (0..2000).map(|number| record(number, 40)).collect();
        assert!(writer.head().segment > 10);
        assert_eq!(seen, expected);
        assert_eq!(reader.lapped, 0);
    }

    #[test]
    fn a_late_reader_gets_what_the_ring_still_has() {
        let (mut ring, mut writer, mut reader) = (Ring::default(), writer(), LogReader::default());
        for number in 0..10_000 {
            ring.append(&mut writer, &record(number, 40));
        }
        let seen = ring.read(&mut reader, writer.head());
        assert!(seen.len() > 2000, "{}", seen.len());
        assert_eq!(seen.last(), Some(&record(9999, 40)));
        assert_eq!(reader.lapped, 0, "a new reader has lost nothing");
    }

    #[test]
    fn a_reader_that_was_stalled_counts_it_and_goes_on() {
        let (mut ring, mut writer, mut reader) = (Ring::default(), writer(), LogReader::default());
        ring.append(&mut writer, &record(0, 1));
        ring.read(&mut reader, writer.head());
        for number in 1..10_000 {
            ring.append(&mut writer, &record(number, 40));
        }
        let seen = ring.read(&mut reader, writer.head());
        assert_eq!(reader.lapped, 1);
        assert_eq!(seen.last(), Some(&record(9999, 40)));
    }

    #[test]
    fn a_record_behind_the_head_is_left_for_the_next_time() {
        let (mut ring, mut writer, mut reader) = (Ring::default(), writer(), LogReader::default());
        ring.append(&mut writer, &record(0, 1));
        let early = writer.head();
        ring.append(&mut writer, &record(1, 1));
        assert_eq!(ring.read(&mut reader, early), [record(0, 1)]);
        assert_eq!(ring.read(&mut reader, writer.head()), [record(1, 1)]);
        assert_eq!(ring.read(&mut reader, writer.head()), []);
    }

    #[test]
    fn a_record_larger_than_a_segment_is_kept_whole() {
        let (mut ring, mut writer, mut reader) = (Ring::default(), writer(), LogReader::default());
        let large = record(1, SEGMENT_BYTES);
        ring.append(&mut writer, &large);
        ring.append(&mut writer, &record(2, 1));
        assert_eq!(ring.read(&mut reader, writer.head()), [large, record(2, 1)]);
    }

    #[test]
    fn another_configurations_log_is_passed_over() {
        let (mut ring, mut reader) = (Ring::default(), LogReader::default());
        let mut other = LogWriter::new(FINGERPRINT + 1, 1, LogHead { segment: 1, length: 0 });
        ring.append(&mut other, &record(0, 1));
        assert_eq!(ring.read(&mut reader, other.head()), []);
    }

    #[test]
    fn damaged_segments_end_at_the_damage() {
        let mut writer = writer();
        let (_, bytes) = writer.append(&record(1, 5));
        let bytes = bytes.to_vec();
        for end in 0..bytes.len() {
            let mut reader = LogReader::default();
            let head = writer.head();
            while reader.place(head).is_some() {
                if let Read::Entries(records) =
                    reader.take(Some(&bytes[..end]), FINGERPRINT, 1, head)
                {
                    assert_eq!(records, []);
                    break;
                }
            }
        }
    }

    #[test]
    fn segment_numbers_end_without_overflow() {
        let last = LogHead { segment: u64::MAX, length: 0 };
        let mut writer = LogWriter::new(FINGERPRINT, 1, last);
        writer.append(&record(0, SEGMENT_BYTES));
        writer.append(&record(1, 1));
        let (head, mut reader) = (writer.head(), LogReader::default());
        let mut steps = 0;
        while reader.place(head).is_some() && steps < 2 * SEGMENTS {
            reader.take(None, FINGERPRINT, 1, head);
            steps += 1;
        }
        assert!(steps <= SEGMENTS, "{steps} steps");
    }
}
