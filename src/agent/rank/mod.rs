//! One engine's cache, or that of one data-parallel rank, from the frames of its event stream.
//!
//! Frames are numbered, and whoever misses one knows nothing for sure: a block that is gone may be taken for one that is held.
//! So what is missed is asked for again, and when it is not to be had, all is forgotten and a new generation begins. The engine
//! says nothing of its identity: another one is told by numbers that go back, or by a batch that is not the one that had this
//! number before. What was stored before the oldest batch that is still to be had stays unknown: less may be told than is held,
//! never more.
//!
//! Pure: whoever holds the sockets calls it with what came, and asks it [`Rank::wants_replay`] before the next frame.

mod answer;
mod frame;

pub use answer::Answer;
pub use frame::Frame;

use super::cache::{Cache, Names, Outcome, Seen};
use super::events::{self, Batch};
use super::held::Counts;
use super::history::History;
use super::sequence::{Next, Sequence};
use super::tell::Teller;
use crate::report::Position;
use crate::tokens::blocks::{BlockHash, BlockSize};
use std::sync::Arc;

/// Replays from the beginning without an end before what is there is made do with.
const MAX_REPLAYS: u32 = 3;

/// How a rank is followed.
#[derive(Debug, Clone)]
pub struct RankConfig {
    /// Whose blocks they can be.
    pub names: Names,
    /// Tokens per block, until an event says it.
    pub block_tokens: Option<BlockSize>,
    /// Most blocks that are known.
    pub most_blocks: usize,
    /// Most bytes of changes that are kept for readers.
    pub history_bytes: usize,
    /// The rank whose events are taken; `None` for whatever comes.
    pub rank: Option<u32>,
    /// What its generations are made from: another number whenever an agent starts.
    pub seed: u64,
}

/// What a frame did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Its events were applied.
    Applied,
    /// It was known already.
    Known,
    /// Frames before it are missing, or it is another engine's: it is taken up again after the replay.
    Waits,
}

/// How a replay ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The engine said that this was all, or said nothing more.
    Over,
    /// There was no answer at all.
    Failed,
}

/// What happened so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Happened {
    /// Batches applied.
    pub batches: u64,
    /// Batches that could not be read.
    pub junk: u64,
    /// Messages that are no frames.
    pub foreign: u64,
    /// Batches of another rank.
    pub other_rank: u64,
    /// Times that frames were missing.
    pub gaps: u64,
    /// Times that the engine turned out to be another one.
    pub restarts: u64,
    /// Times that the cache was cleared.
    pub clears: u64,
    /// Times that more was said to be held than there is room for.
    pub overflows: u64,
    /// Replays begun.
    pub replays: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// All there is, from the start, and to forget what is known.
    Everything,
    /// What comes behind the last frame.
    More,
    /// The same, though nothing shows that there is anything.
    Check,
}

/// One answer to a replay.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    heard: bool,
    new: bool,
    /// Whether the rest is of no use: it has a hole, or is another engine's.
    is_cut: bool,
    is_other: bool,
    /// Whether all was wished for while it came: what it brought is of another engine, or under other names.
    is_void: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Rank {
    cache: Cache,
    history: History,
    sequence: Sequence,
    rank: Option<u32>,
    is_connected: bool,
    wanted: Option<Wanted>,
    round: Round,
    /// Whether a replay from the start is under way.
    is_catching_up: bool,
    /// Whether nothing is told: what is known may be past, or another engine's.
    is_withheld: bool,
    full_replays: u32,
    waiting: Option<(u64, Vec<u8>)>,
    is_incomplete: bool,
    tried_for_parent: bool,
    /// Blocks that the engine has room for, where that is known.
    capacity: Option<u32>,
    snapshot: Option<(Position, Arc<[u8]>)>,
    happened: Happened,
    last_junk: Option<String>,
}

impl Rank {
    /// Knows nothing yet.
    pub fn new(config: RankConfig) -> Self {
        Self {
            cache: Cache::new(config.names, config.block_tokens, config.most_blocks),
            history: History::new(config.seed, config.history_bytes),
            sequence: Sequence::default(),
            rank: config.rank,
            is_connected: false,
            wanted: None,
            round: Round::default(),
            is_catching_up: false,
            is_withheld: true,
            full_replays: 0,
            waiting: None,
            is_incomplete: true,
            tried_for_parent: false,
            capacity: None,
            snapshot: None,
            happened: Happened::default(),
            last_junk: None,
        }
    }

    /// The stream is there. What was missed meanwhile is asked for, and whether it is the same engine's.
    pub fn connected(&mut self) {
        self.is_connected = true;
        self.tried_for_parent = false;
        self.full_replays = 0;
        self.wanted =
            Some(if self.sequence.last().is_some() { Wanted::More } else { Wanted::Everything });
    }

    /// The stream is gone, and most likely the engine: nothing is told until it is found to be the same one.
    pub fn disconnected(&mut self) {
        self.is_connected = false;
        self.wanted = None;
        self.waiting = None;
        self.withhold();
    }

    fn withhold(&mut self) {
        if !self.is_withheld {
            self.is_withheld = true;
            self.begin_generation();
        }
    }

    /// The engine is known to be another one than before.
    pub fn restarted(&mut self) {
        self.happened.restarts += 1;
        self.start_over();
        if self.is_connected {
            self.want_everything();
        }
    }

    /// Asks for all anew. A replay that is under way cannot give it, since a part of it has been heard already.
    fn want_everything(&mut self) {
        self.wanted = Some(Wanted::Everything);
        self.round.is_void = true;
    }

    /// Whose blocks they can be from now on.
    pub fn set_names(&mut self, names: Names) {
        if self.cache.set_names(names) && self.is_connected {
            self.full_replays = 0;
            self.want_everything();
        }
    }

    /// Says how many blocks the engine has room for.
    pub fn set_capacity(&mut self, blocks: Option<u32>) {
        self.capacity = blocks;
    }

    /// Whether the stream is heard, without a gap.
    pub fn is_live(&self) -> bool {
        let is_behind = matches!(self.wanted, Some(Wanted::Everything | Wanted::More));
        self.is_connected && !is_behind && !self.is_withheld
    }

    /// Whether more may be held than is told.
    pub fn is_incomplete(&self) -> bool {
        self.is_incomplete
    }

    /// The number from which on frames are to be asked for again; `None` when the next live one is to be taken.
    pub fn wants_replay(&self) -> Option<u64> {
        match self.wanted? {
            Wanted::Everything => Some(0),
            Wanted::More | Wanted::Check => Some(self.sequence.last().unwrap_or(0)),
        }
    }

    /// A frame of the live stream.
    pub fn take(&mut self, frame: Frame<'_>) -> Effect {
        match self.sequence.next(frame.seq, frame.payload) {
            Next::New => {
                if self.sequence.last().is_none() {
                    self.is_incomplete = frame.seq > 0;
                }
                self.apply(frame);
                return Effect::Applied;
            }
            Next::Known => return Effect::Known,
            Next::Gap => {
                self.happened.gaps += 1;
                self.wanted = Some(Wanted::More);
            }
            Next::Other => {
                self.happened.restarts += 1;
                self.full_replays = 0;
                self.want_everything();
            }
        }
        self.waiting = Some((frame.seq, frame.payload.to_vec()));
        Effect::Waits
    }

    /// Nothing has come for a while. What was lost last shows by nothing but the frame after it, so it is asked for.
    pub fn check(&mut self) {
        if self.is_live() && self.wanted.is_none() {
            self.wanted = Some(Wanted::Check);
        }
    }

    /// A message that is no frame.
    pub fn take_foreign(&mut self) {
        self.happened.foreign += 1;
    }

    /// A replay is asked for. From which number on.
    pub fn begin_replay(&mut self) -> u64 {
        let from = self.wants_replay().unwrap_or(0);
        self.happened.replays += 1;
        self.round = Round::default();
        if self.wanted == Some(Wanted::Everything) {
            self.full_replays += 1;
            self.start_over();
            self.withhold();
            self.is_catching_up = true;
        }
        from
    }

    /// A frame of the replay.
    pub fn take_replayed(&mut self, frame: Frame<'_>) {
        let is_first = !self.round.heard;
        self.round.heard = true;
        if self.round.is_cut || self.round.is_void {
            return;
        }
        match self.sequence.next(frame.seq, frame.payload) {
            Next::New => {
                if self.sequence.last().is_none() {
                    self.is_incomplete = frame.seq > 0;
                }
                // What is behind the last one can only be the same engine's when that one is there, too.
                if is_first && self.sequence.last().is_some() {
                    self.round.is_other = true;
                    self.round.is_cut = true;
                    return;
                }
                self.round.new = true;
                self.apply(frame);
            }
            Next::Known => {}
            Next::Gap => {
                self.round.is_cut = true;
                self.round.is_other = is_first;
            }
            Next::Other => {
                self.round.is_cut = true;
                self.round.is_other = true;
            }
        }
    }

    /// The replay is over. It may have to be asked for once more.
    pub fn end_replay(&mut self, ended: Ended) {
        let Some(wanted) = self.wanted else { return };
        let round = std::mem::take(&mut self.round);
        if round.is_void {
            return;
        }
        let is_new = self.sequence.last().is_none();
        let is_lost = round.is_other || wanted != Wanted::Everything && !round.heard && !is_new;
        if ended == Ended::Failed && !round.heard {
            if wanted == Wanted::Check {
                self.wanted = None;
                return;
            }
            // Nobody can say what was missed, but for what may have been said since the last answer: that shows by its number.
            if is_new || !self.is_catching_up {
                self.start_over();
                self.is_incomplete = true;
            }
            return self.caught_up();
        }
        if is_lost {
            if self.full_replays < MAX_REPLAYS {
                self.happened.restarts += u64::from(!self.is_catching_up);
                self.wanted = Some(Wanted::Everything);
                return;
            }
            self.start_over();
            self.is_incomplete = true;
            return self.caught_up();
        }
        if round.new {
            // An engine's socket drops what does not fit into its queue, and says nothing of it.
            self.wanted = Some(Wanted::More);
            return;
        }
        if is_new {
            // The engine has done nothing yet.
            self.is_incomplete = false;
        }
        self.caught_up();
    }

    fn caught_up(&mut self) {
        self.wanted = None;
        self.full_replays = 0;
        self.is_catching_up = false;
        if self.is_withheld {
            self.is_withheld = false;
            self.begin_generation();
        }
        let Some((seq, payload)) = self.waiting.take() else { return };
        let frame = Frame { seq, payload: &payload };
        match self.sequence.next(seq, &payload) {
            Next::Known => {}
            Next::New => {
                self.take(frame);
            }
            Next::Gap | Next::Other => {
                // It is not to be had what came before this one.
                self.start_over();
                self.is_incomplete = seq > 0;
                self.apply(frame);
            }
        }
    }

    fn start_over(&mut self) {
        self.sequence = Sequence::default();
        self.cache.clear();
        self.begin_generation();
    }

    fn begin_generation(&mut self) {
        self.history.begin();
        self.snapshot = None;
    }

    /// Applies a frame's events, which are the next.
    fn apply(&mut self, frame: Frame<'_>) {
        self.sequence.note(frame.seq, frame.payload);
        let batch = match events::decode(frame.payload) {
            Ok(batch) => batch,
            Err(error) => {
                // A removal may have been in it.
                self.happened.junk += 1;
                self.last_junk = Some(error);
                self.cache.clear();
                self.begin_generation();
                self.is_incomplete = true;
                return;
            }
        };
        self.happened.batches += 1;
        if batch.rank.zip(self.rank).is_some_and(|(of, rank)| of != rank) {
            self.happened.other_rank += 1;
            return;
        }
        self.apply_batch(&batch);
    }

    fn apply_batch(&mut self, batch: &Batch) {
        let mut teller = Teller::default();
        for event in &batch.events {
            let mut outcome = self.cache.apply(event, &mut teller);
            if matches!(outcome, Outcome::Cleared | Outcome::OtherSize) {
                self.happened.clears += u64::from(outcome == Outcome::Cleared);
                self.is_incomplete = outcome == Outcome::OtherSize;
                self.cache.clear();
                self.begin_generation();
                teller = Teller::default();
                if outcome == Outcome::OtherSize {
                    outcome = self.cache.apply(event, &mut teller);
                }
            }
            if outcome == Outcome::UnknownParent {
                self.miss_parent();
            }
        }
        if self.capacity.is_some_and(|most| self.cache.counts().copies > most.into()) {
            // vLLM tells a request that asks for it what it reuses as if it were stored: such copies are never removed.
            self.happened.overflows += 1;
            self.cache.clear();
            self.begin_generation();
            self.is_incomplete = true;
            return;
        }
        if !self.is_withheld {
            self.history.append(teller.finish());
        }
    }

    /// Blocks came behind one that was never seen. If all should have been seen, it may help to hear it once more.
    fn miss_parent(&mut self) {
        let is_limit = self.cache.seen().over_limit > 0;
        if !self.is_incomplete && !self.tried_for_parent && !is_limit && !self.is_catching_up {
            self.tried_for_parent = true;
            self.want_everything();
        }
        self.is_incomplete = true;
    }

    /// How many blocks are told of, and of which kind.
    pub fn counts(&self) -> Counts {
        let counts = self.cache.counts();
        let (told, offloaded) =
            if self.is_withheld { (0, 0) } else { (counts.told, counts.offloaded) };
        Counts { told, offloaded, ..counts }
    }

    /// The cache behind it.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The blocks that are told to be held, parents first.
    pub fn held(&self) -> impl Iterator<Item = BlockHash> + '_ {
        self.cache.held().told().filter(|_| !self.is_withheld)
    }

    /// What happened so far.
    pub fn happened(&self) -> Happened {
        self.happened
    }

    /// What was seen so far.
    pub fn seen(&self) -> Seen {
        self.cache.seen()
    }

    /// How many generations there have been.
    pub fn generations(&self) -> u64 {
        self.history.begun()
    }

    /// What was wrong with the last batch that could not be read, once.
    pub fn take_junk(&mut self) -> Option<String> {
        self.last_junk.take()
    }
}

#[cfg(test)]
#[cfg(feature = "demo")]
mod tests;
