//! What replicas report of their caches, on its way to every VM.
//!
//! One VM, the leader, hears the reports. It puts each into its own index and tells it in its own log, so that readers,
//! overtaken ones and new ones have it by what they have everything else by. An [`Update`] says from which position it takes
//! its reader to which; every VM remembers where it stands with each replica, and goes on from there when it leads.
//!
//! - An update that continues a VM's position is applied, and so is one that begins further back and ends further on: an
//!   engine's changes, told again from some point on, come out the same.
//! - One that ends no further on is another leader's, who heard the same, and is passed over.
//! - One that begins further on waits a little, since logs are read one after the other. Then this VM has missed something:
//!   it takes the replica for what was routed there, and wants a snapshot.
//! - A report that begins anew is applied unless a later leader has spoken: generations have no order, epochs have.
//!
//! It asks nobody, and does not know when a report is late: that is the leader's part.

use super::bytes::{Reader, Writer};
use super::link::Link;
use super::log::{Entry, PIECE_BLOCKS};
use super::records::has_room;
use super::store::Store;
use crate::index::{Hearing, Recorded, Room, Sighting};
use crate::replicas::{Moment, ReplicaId, ReplicaTable};
use crate::report::{Change, Position, Tier};
use crate::tokens::blocks::BlockHash;
use std::time::Duration;

/// How long an update waits for what it continues: some ticks. Halved, a VM whose neighbour was slow takes a snapshot for
/// nothing; doubled, it takes a replica for what it was for longer.
const PATIENCE: Duration = Duration::from_millis(500);

/// What became of a replica's cache, as its own report has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Update {
    /// Whose.
    pub replica: ReplicaId,
    /// In which epoch its writer led.
    pub epoch: u64,
    /// What.
    pub step: Step,
}

/// See [`Update`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// It has changed.
    Changed {
        /// Since then; `None`: what was known before is to be forgotten.
        from: Option<Position>,
        /// Until then.
        to: Position,
        /// Whether that is the end of a report.
        is_last: bool,
        /// Whether the replica has slower tiers. Which blocks are in more than one, only who hears the reports knows.
        has_tiers: bool,
        /// In this order.
        sightings: Vec<Sighting>,
    },
    /// Nobody says any more.
    Ended,
}

/// Where a VM stands with a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// The latest epoch of which it has taken something in.
    pub epoch: u64,
    /// What it has taken in.
    pub position: Position,
    /// Whether that is the end of a report.
    pub is_whole: bool,
    /// As in [`Step::Changed`].
    pub has_tiers: bool,
}

/// What is to be done with an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Apply,
    /// It is old, or another's.
    Skip,
    /// It continues what is not here.
    Wait,
}

impl Update {
    /// Whether it begins a report that says everything anew.
    pub(super) fn is_anew(&self) -> bool {
        matches!(self.step, Step::Changed { from: None, .. })
    }

    fn judge(&self, standing: Option<&Standing>) -> Verdict {
        let is_superseded = standing.is_some_and(|standing| self.epoch < standing.epoch);
        match (&self.step, standing) {
            (Step::Ended, None) => Verdict::Skip,
            (Step::Ended | Step::Changed { from: None, .. }, _) => {
                if is_superseded {
                    Verdict::Skip
                } else {
                    Verdict::Apply
                }
            }
            (Step::Changed { .. }, None) => Verdict::Wait,
            (Step::Changed { from: Some(from), to, .. }, Some(standing)) => {
                let at = standing.position;
                let is_one = standing.is_whole
                    && at.generation == from.generation
                    && at.generation == to.generation;
                match (is_one, is_superseded) {
                    _ if at == *from => Verdict::Apply,
                    (true, _) if to.seq <= at.seq => Verdict::Skip,
                    (true, _) if from.seq <= at.seq => Verdict::Apply,
                    (_, true) => Verdict::Skip,
                    _ => Verdict::Wait,
                }
            }
        }
    }

    /// Where a reader stands once it has taken this in: `None` while it must wait for something, `Some(None)` where this is
    /// nothing to it, or says that there is nothing any more.
    pub(super) fn goes_to(&self, standing: Option<&Standing>) -> Option<Option<Standing>> {
        match (self.judge(standing), &self.step) {
            (Verdict::Wait, _) => None,
            (Verdict::Skip, _) | (_, Step::Ended) => Some(None),
            (Verdict::Apply, &Step::Changed { to, is_last, has_tiers, .. }) => {
                let epoch = standing.map_or(0, |standing| standing.epoch).max(self.epoch);
                Some(Some(Standing { epoch, position: to, is_whole: is_last, has_tiers }))
            }
        }
    }

    /// What it takes to apply, in blocks.
    pub(super) fn blocks(&self) -> usize {
        match &self.step {
            Step::Changed { sightings, .. } => sightings.iter().map(weight).sum(),
            Step::Ended => 0,
        }
    }

    /// The same in updates of bounded size, which together do as much in this order. Between two of them a reader is at a
    /// position that no report has.
    pub(super) fn pieces(self) -> Vec<Self> {
        if self.blocks() <= PIECE_BLOCKS {
            return vec![self];
        }
        let Self { replica, epoch, step } = self;
        let Step::Changed { mut from, to, is_last, has_tiers, sightings } = step else {
            return Vec::new();
        };
        let mut parts: Vec<Vec<Sighting>> = Vec::new();
        let mut room = 0;
        for sighting in sightings {
            let weight = weight(&sighting);
            match parts.last_mut() {
                Some(part) if weight <= room => part.push(sighting),
                _ => {
                    parts.push(vec![sighting]);
                    room = PIECE_BLOCKS;
                }
            }
            room = room.saturating_sub(weight);
        }
        let count = parts.len();
        let update = |(n, sightings): (usize, Vec<Sighting>)| {
            let is_end = n + 1 == count;
            let seq = to.seq.rotate_left(16) ^ n as u64;
            let between = Position { generation: to.generation.rotate_left(32), seq };
            let to = if is_end { to } else { between };
            let (from, is_last) = (from.replace(to), is_last && is_end);
            let step = Step::Changed { from, to, is_last, has_tiers, sightings };
            Self { replica, epoch, step }
        };
        parts.into_iter().enumerate().map(update).collect()
    }

    pub(super) fn write(&self, writer: &mut Writer) {
        writer.u32(self.replica.slot);
        writer.u32(self.replica.incarnation);
        writer.u64(self.epoch);
        let Step::Changed { from, to, is_last, has_tiers, sightings } = &self.step else {
            return writer.u8(0);
        };
        writer.u8(1);
        writer.option(*from, write_position);
        write_position(writer, *to);
        writer.u8(u8::from(*is_last) | u8::from(*has_tiers) << 1);
        writer.list(sightings.iter(), |writer, sighting| {
            writer.u8(u8::from(sighting.is_held) | u8::from(sighting.at_hand) << 1);
            writer.option(sighting.parent, |writer, hash| writer.u64(hash.0));
            writer.list(sighting.blocks.iter(), |writer, hash| writer.u64(hash.0));
            writer.u32(sighting.known);
        });
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let replica = ReplicaId { slot: reader.u32()?, incarnation: reader.u32()? };
        let epoch = reader.u64()?;
        let step = match reader.u8()? {
            0 => Step::Ended,
            1 => {
                let from = reader.option(read_position)?;
                let to = read_position(reader)?;
                let flags = reader.u8()?;
                let sightings = reader.list(read_sighting)?;
                let (is_last, has_tiers) = (flags & 1 != 0, flags & 2 != 0);
                Step::Changed { from, to, is_last, has_tiers, sightings }
            }
            _ => return None,
        };
        Some(Self { replica, epoch, step })
    }
}

/// What a sighting takes to apply, in blocks.
fn weight(sighting: &Sighting) -> usize {
    sighting.blocks.len() + 4
}

fn write_position(writer: &mut Writer, position: Position) {
    writer.u64(position.generation);
    writer.u64(position.seq);
}

fn read_position(reader: &mut Reader<'_>) -> Option<Position> {
    Some(Position { generation: reader.u64()?, seq: reader.u64()? })
}

fn read_sighting(reader: &mut Reader<'_>) -> Option<Sighting> {
    let flags = reader.u8()?;
    Some(Sighting {
        is_held: flags & 1 != 0,
        at_hand: flags & 2 != 0,
        parent: reader.option(|reader| reader.u64().map(BlockHash))?,
        blocks: reader.list(|reader| reader.u64().map(BlockHash))?,
        known: reader.u32()?,
    })
}

impl Standing {
    pub(super) fn write(&self, writer: &mut Writer) {
        writer.u64(self.epoch);
        write_position(writer, self.position);
        writer.u8(u8::from(self.is_whole) | u8::from(self.has_tiers) << 1);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let (epoch, position) = (reader.u64()?, read_position(reader)?);
        let flags = reader.u8()?;
        Some(Self { epoch, position, is_whole: flags & 1 != 0, has_tiers: flags & 2 != 0 })
    }
}

/// What a replica can hold: as much as it says, and no more than its share of what a VM remembers.
pub(super) fn room(table: &ReplicaTable, replica: ReplicaId, default: u32) -> Room {
    let stated = table.by_id(replica).and_then(|replica| replica.capacity_blocks);
    Room { stated: stated.unwrap_or(default) as usize, most: table.most_blocks() }
}

/// What replicas say of themselves.
impl<S: Store> Link<S> {
    /// What a replica's report is to go on from; `None`: it is to say everything.
    pub fn observed_position(&self, replica: ReplicaId) -> Option<Position> {
        let standing = self.standings.get(&replica)?;
        // Another leader knew what is in which tier, or none did.
        let has_tiers = self.hearings.get(&replica).is_some_and(Hearing::has_tiers);
        Some(standing.position).filter(|_| has_tiers == standing.has_tiers)
    }

    /// Takes in a piece of a replica's report, and tells the others. `from`: what it continues; `None`: nothing, and what
    /// was known before is to be forgotten. `to`: what has been reported with it, to its end if `is_last`; until then it is
    /// a position that only the next piece goes on from. A piece that does not continue the last one is passed over.
    pub fn observe(
        &mut self,
        replica: ReplicaId,
        from: Option<Position>,
        to: Position,
        changes: &[Change],
        is_last: bool,
    ) {
        if from.is_none() {
            // What others routed before goes with what was known, and must be here for that.
            self.refresh(self.now);
        }
        let is_next = from.is_none() || from == self.observed_position(replica);
        if !is_next || self.table.by_id(replica).is_none() {
            return;
        }
        let had_tiers = self.standings.get(&replica).is_some_and(|standing| standing.has_tiers);
        let names_tiers = changes.iter().any(|change| change.tier() == Tier::Offload);
        if from.is_some() && names_tiers && !had_tiers {
            // What is at hand has not been kept apart: it is asked for everything.
            self.hearings.insert(replica, Hearing::new(true));
            return;
        }
        let room = self.room(replica);
        if from.is_none() {
            let heard = self.hearings.get(&replica).is_some_and(Hearing::has_tiers);
            let hearing = Hearing::new(had_tiers || heard || names_tiers);
            self.index.begin_report(replica, hearing.has_tiers());
            self.hearings.insert(replica, hearing);
        }
        let hearing = self.hearings.entry(replica).or_default();
        hearing.begin_piece();
        let mut sightings = Vec::new();
        for change in changes {
            self.index.observe(replica, room, change, hearing, &mut sightings);
        }
        let has_tiers = hearing.has_tiers();
        self.counts.cut += self.index.take_cut();
        let epoch = self.led_epoch;
        let standing = Standing { epoch, position: to, is_whole: is_last, has_tiers };
        self.standings.insert(replica, standing);
        if is_last {
            self.index.complete_report(replica);
        }
        self.tell(replica, Step::Changed { from, to, is_last, has_tiers, sightings });
    }

    /// A replica's agent is gone: what it said last is what its shadow goes on from.
    pub fn unobserve(&mut self, replica: ReplicaId) {
        self.hearings.remove(&replica);
        if self.standings.remove(&replica).is_some() {
            self.index.end_reports(replica);
            self.tell(replica, Step::Ended);
        }
    }

    fn tell(&mut self, replica: ReplicaId, step: Step) {
        let update = Update { replica, epoch: self.led_epoch, step };
        if has_room(&self.unlogged) {
            self.unlogged.extend(update.pieces().into_iter().map(Entry::from));
        }
        self.log();
    }

    /// What a replica can hold.
    pub(super) fn room(&self, replica: ReplicaId) -> Room {
        room(&self.table, replica, self.config.default_capacity_blocks)
    }

    /// Applies what a leader told. False when it may be tried again.
    pub(super) fn apply_update(&mut self, update: &Update) -> bool {
        let replica = update.replica;
        let standing = self.standings.get(&replica);
        let Some(next) = update.goes_to(standing) else { return false };
        let is_ended = update.step == Step::Ended && update.judge(standing) == Verdict::Apply;
        if next.is_some() || is_ended {
            // Another one leads.
            self.hearings.remove(&replica);
        }
        if is_ended {
            self.index.end_reports(replica);
            self.standings.remove(&replica);
        }
        let (Some(next), Step::Changed { from, sightings, .. }) = (next, &update.step) else {
            return true;
        };
        if from.is_none() {
            self.index.begin_report(replica, next.has_tiers);
        }
        let room = self.room(replica);
        for sighting in sightings {
            // What was taken back meanwhile is said again further on.
            let _: Recorded = self.index.sight(replica, room, sighting);
        }
        // The leader counts this.
        self.index.take_cut();
        self.standings.insert(replica, next);
        if next.is_whole {
            self.index.complete_report(replica);
        }
        true
    }

    /// Whether updates that wait have waited for long enough: what they continue is lost.
    pub(super) fn has_missed(&mut self, now: Moment, is_waiting: bool) -> bool {
        if !is_waiting {
            self.waits_since = None;
            return false;
        }
        let since = *self.waits_since.get_or_insert(now);
        let has_missed = now.since(since) >= PATIENCE;
        if has_missed {
            self.waits_since = None;
        }
        has_missed
    }

    /// Updates of this replica were missed.
    pub(super) fn missed(&mut self, replica: ReplicaId) {
        if self.standings.remove(&replica).is_some() {
            self.index.end_reports(replica);
        }
        self.counts.gaps += 1;
        self.overtaken = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const R: ReplicaId = ReplicaId { slot: 3, incarnation: 2 };

    fn at(generation: u64, seq: u64) -> Position {
        Position { generation, seq }
    }

    fn update(epoch: u64, from: Option<Position>, to: Position) -> Update {
        let (is_last, has_tiers, sightings) = (true, false, Vec::new());
        let step = Step::Changed { from, to, is_last, has_tiers, sightings };
        Update { replica: R, epoch, step }
    }

    fn sighting(blocks: usize) -> Sighting {
        let is_held = blocks.is_multiple_of(2);
        let blocks = (0..blocks as u64).map(BlockHash).collect();
        Sighting { is_held, at_hand: is_held, parent: None, blocks, known: 0 }
    }

    #[test]
    fn an_update_is_applied_where_it_continues_and_waits_where_something_is_missing() {
        let standing = Standing { epoch: 5, position: at(7, 30), is_whole: true, has_tiers: false };
        #[track_caller]
        fn check(update: &Update, standing: Option<Standing>, expected: Verdict) {
            assert_eq!(update.judge(standing.as_ref()), expected, "{update:?}");
        }
        let from = |epoch, from, to| update(epoch, Some(at(7, from)), at(7, to));
        check(&from(5, 30, 40), Some(standing), Verdict::Apply);
        check(&from(5, 20, 40), Some(standing), Verdict::Apply);
        check(&from(5, 20, 30), Some(standing), Verdict::Skip);
        check(&from(5, 31, 40), Some(standing), Verdict::Wait);
        check(&from(4, 31, 40), Some(standing), Verdict::Skip);
        check(&from(5, 31, 40), None, Verdict::Wait);
        // Half a report is continued by its other half alone.
        let half = Standing { is_whole: false, ..standing };
        check(&from(5, 30, 40), Some(half), Verdict::Apply);
        check(&from(5, 20, 40), Some(half), Verdict::Wait);
        // Another generation.
        check(&update(5, Some(at(8, 20)), at(8, 40)), Some(standing), Verdict::Wait);
        check(&update(5, None, at(8, 3)), Some(standing), Verdict::Apply);
        check(&update(4, None, at(8, 3)), Some(standing), Verdict::Skip);
        check(&update(1, None, at(8, 3)), None, Verdict::Apply);
        let ended = |epoch| Update { replica: R, epoch, step: Step::Ended };
        check(&ended(5), Some(standing), Verdict::Apply);
        check(&ended(4), Some(standing), Verdict::Skip);
        check(&ended(5), None, Verdict::Skip);
    }

    #[test]
    fn an_update_round_trips_and_a_cut_one_is_none() {
        let mut update = update(9, Some(at(7, 3)), at(7, 4));
        if let Step::Changed { sightings, has_tiers, .. } = &mut update.step {
            *sightings = vec![sighting(3), sighting(0), sighting(4)];
            *has_tiers = true;
        }
        for update in [update, Update { replica: R, epoch: 1, step: Step::Ended }] {
            let mut writer = Writer::default();
            update.write(&mut writer);
            let bytes = writer.finish();
            assert_eq!(Update::read(&mut Reader::new(&bytes)).as_ref(), Some(&update));
            for end in 0..bytes.len() {
                assert_eq!(Update::read(&mut Reader::new(&bytes[..end])), None, "cut at {end}");
            }
        }
    }

    #[test]
    fn a_large_update_is_told_in_pieces_that_continue_each_other() {
        let mut update = update(9, Some(at(7, 3)), at(7, 4));
        if let Step::Changed { sightings, .. } = &mut update.step {
            *sightings = (0..100).map(|n| sighting(n * 3)).collect();
        }
        let (whole, mut sighted, mut next) = (update.clone(), Vec::new(), Some(at(7, 3)));
        let pieces = update.pieces();
        let count = pieces.len();
        for (n, piece) in pieces.into_iter().enumerate() {
            assert!(piece.blocks() <= PIECE_BLOCKS, "{}", piece.blocks());
            let Step::Changed { from, to, is_last, sightings, .. } = piece.step else { panic!() };
            assert_eq!((from, is_last, to == at(7, 4)), (next, n + 1 == count, n + 1 == count));
            next = Some(to);
            sighted.extend(sightings);
        }
        let Step::Changed { sightings, .. } = whole.step else { panic!() };
        assert_eq!(sighted, sightings);
        assert!(count >= 8, "{count}");
    }
}
