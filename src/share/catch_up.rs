//! Who wants a snapshot, who writes it, and who takes it in.
//!
//! A VM that is new, or was overtaken in a log, says in its slot that it wants one, as long as any
//! other VM knows more. Of those that know all, the one without traffic and with the lowest slot
//! writes: as a rule the main thread's. While nobody wants one, nothing is written.

use super::link::Link;
use super::log::still_has;
use super::snapshot::{Contained, Dump, Head, Intake, Step};
use super::store::Store;
use super::vm::{LogHead, VmState};
use crate::replicas::Moment;
use std::time::Duration;

/// How long a complete snapshot is left alone for readers, and as long again for each chunk's
/// share of [`READ_TIME_PER_CHUNK`]. Shorter, and of several new VMs each costs one of its own.
const LEFT_ALONE: Duration = Duration::from_secs(2);

/// Twice what a reader needs.
const READ_TIME_PER_CHUNK: Duration = Duration::from_millis(100);

/// How much of what the others know this VM knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Knowledge {
    /// It has not looked yet.
    #[default]
    New,
    /// Less.
    Partial,
    /// As much.
    Full,
}

/// This VM's part in handing snapshots on.
#[derive(Default)]
pub(super) struct CatchUp {
    pub(super) knowledge: Knowledge,
    dump: Option<Dump>,
    intake: Option<Intake>,
    /// A snapshot that could not be read to its end.
    spoilt: Option<u64>,
}

/// What became of snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotCounts {
    /// Written by this VM.
    pub written: u64,
    /// Written without what there was no room for.
    pub cut: u64,
    /// Begun and given up, since another took its place.
    pub abandoned: u64,
    /// Taken in by this VM.
    pub taken: u64,
    /// Begun to be taken in and given up, since another took its place.
    pub torn: u64,
}

impl<S: Store> Link<S> {
    /// Goes on writing or taking in a snapshot, if there is reason to.
    pub(super) fn catch_up(&mut self, now: Moment) {
        self.judge_knowledge();
        if self.catch_up.knowledge == Knowledge::Full {
            self.catch_up.intake = None;
            self.write_snapshot(now);
        } else {
            if self.catch_up.dump.take().is_some() {
                self.index.end_export();
            }
            self.take_snapshot(now);
        }
    }

    fn judge_knowledge(&mut self) {
        let overtaken = std::mem::take(&mut self.overtaken);
        let somebody_knows = self.peer_states().any(|(_, state)| !state.traits.wants_snapshot);
        let knowledge = &mut self.catch_up.knowledge;
        if !somebody_knows {
            // Then what this VM knows is all there is to know.
            *knowledge = Knowledge::Full;
        } else if *knowledge == Knowledge::New || overtaken {
            *knowledge = Knowledge::Partial;
        }
    }

    fn write_snapshot(&mut self, now: Moment) {
        let mut catch_up = std::mem::take(&mut self.catch_up);
        if catch_up.dump.is_none() && self.is_to_write(now) {
            let standings = self.standings.iter().map(|(id, standing)| (*id, *standing));
            let contained = Contained { logs: self.positions(), standings: standings.collect() };
            let id = (self.config.fingerprint, self.vm);
            catch_up.dump = Dump::begin(&self.store, id, contained, &mut self.index, now);
        }
        if let Some(dump) = &mut catch_up.dump {
            let step = dump.step(&self.store, &mut self.index, now);
            let counts = &mut self.counts.snapshots;
            match step {
                Step::Pending => {}
                Step::Done => counts.written += 1,
                Step::Cut => counts.cut += 1,
                Step::Lost => counts.abandoned += 1,
            }
            if step != Step::Pending {
                catch_up.dump = None;
                self.index.end_export();
            }
        }
        self.catch_up = catch_up;
    }

    fn is_to_write(&self, now: Moment) -> bool {
        // What waits for its parent is behind the logs' positions and not in the index.
        let Some(own) = self.slot().filter(|_| self.orphans.is_empty()) else { return false };
        let rank = |slot: u32, state: &VmState| (state.traits.has_traffic, slot);
        let own_rank = (self.traits.has_traffic, own);
        let mut is_wanted = false;
        for (slot, state) in self.peer_states() {
            is_wanted |= state.traits.wants_snapshot;
            if !state.traits.wants_snapshot && rank(slot, state) < own_rank {
                return false;
            }
        }
        is_wanted
            && Head::read(&self.store).is_none_or(|last| {
                let left_alone = LEFT_ALONE + READ_TIME_PER_CHUNK * last.chunks;
                !last.is_in_work(now) && (!last.is_complete || now.since(last.at) >= left_alone)
            })
    }

    fn take_snapshot(&mut self, now: Moment) {
        let mut catch_up = std::mem::take(&mut self.catch_up);
        if catch_up.intake.is_none() {
            let found = Head::read(&self.store);
            let head = found.filter(|head| self.is_of_use(head, catch_up.spoilt));
            catch_up.intake = head.map(|head| Intake::new(head, self.vm));
        }
        let default = self.config.default_capacity_blocks;
        let step =
            catch_up.intake.as_mut().map(|intake| intake.step(&self.store, &self.table, default));
        match step {
            None | Some(Step::Pending) => {}
            Some(Step::Lost) => {
                self.counts.snapshots.torn += 1;
                catch_up.spoilt = catch_up.intake.take().map(|intake| intake.version());
            }
            Some(Step::Done | Step::Cut) => {
                if let Some(intake) = catch_up.intake.take() {
                    self.counts.snapshots.taken += 1;
                    let (index, contained) = intake.finish();
                    let standings = contained.standings.into_iter().collect();
                    self.go_on_from(index, &contained.logs, standings);
                    catch_up.knowledge = Knowledge::Full;
                }
            }
        }
        self.catch_up = catch_up;
        if step == Some(Step::Done) {
            self.refresh(now);
        }
    }

    /// Whether a snapshot can be read now and the logs hold what came after it.
    fn is_of_use(&self, head: &Head, spoilt: Option<u64>) -> bool {
        let at = |slot: u32| {
            head.contained
                .logs
                .iter()
                .find(|(other, _)| *other == slot)
                .map_or(LogHead::default(), |l| l.1)
        };
        head.is_complete
            && head.header.fingerprint == self.config.fingerprint
            && spoilt != Some(head.header.version)
            && self.heads().all(|(slot, log)| still_has(log, at(slot)))
    }
}
