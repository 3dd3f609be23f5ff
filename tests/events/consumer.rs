//! The agent's core and the filter's index behind it: events go in, cached tokens are predicted.
//!
//! Between the two are the bytes of the cache report, and as much of the poller as follows a position. Two indices hear of it:
//! that of whoever polls, and one that is told by it, as other VMs are.

use crate::recording::Frame;
use std::collections::BTreeSet;
use warmpath::agent::cache::Names;
use warmpath::agent::rank::{self, Ended, Rank, RankConfig};
use warmpath::index::{Hearing, PrefixIndex, Room};
use warmpath::replicas::ReplicaId;
use warmpath::report::{Change, Position, Report, Status, Tier, write_head};
use warmpath::tokens::blocks::{BlockHash, BlockSize, Chain, ChainSeed};

const REPLICA: ReplicaId = ReplicaId { slot: 3, incarnation: 1 };
const ROOM: Room = Room { stated: 1000, most: 1 << 16 };

pub struct Consumer {
    pub rank: Rank,
    block_tokens: BlockSize,
    position: Option<Position>,
    /// What the reports say is held.
    pub held: BTreeSet<BlockHash>,
    index: PrefixIndex,
    hearing: Hearing,
    told: PrefixIndex,
}

impl Consumer {
    pub fn new(names: Names, block_tokens: usize) -> Self {
        let mut rank = Rank::new(RankConfig {
            names,
            block_tokens: None,
            most_blocks: 1 << 16,
            history_bytes: 64 << 10,
            rank: None,
            seed: 7,
        });
        rank.connected();
        Self {
            rank,
            block_tokens: BlockSize::new(block_tokens as u32).unwrap(),
            position: None,
            held: BTreeSet::new(),
            index: PrefixIndex::new(),
            hearing: Hearing::default(),
            told: PrefixIndex::new(),
        }
    }

    /// A frame of the stream, and before and after it what the agent asks the engine for.
    pub fn hear(&mut self, frame: &Frame, replay: impl Fn(u64) -> Vec<Frame>) {
        self.ask(&replay);
        self.rank.take(rank::Frame { seq: frame.seq, payload: &frame.payload });
        self.ask(&replay);
    }

    fn ask(&mut self, replay: &impl Fn(u64) -> Vec<Frame>) {
        for _ in 0..100 {
            if self.rank.wants_replay().is_none() {
                return;
            }
            let from = self.rank.begin_replay();
            for frame in replay(from) {
                self.rank.take_replayed(rank::Frame { seq: frame.seq, payload: &frame.payload });
            }
            self.rank.end_replay(Ended::Over);
        }
        panic!("the agent does not stop asking");
    }

    /// Reads what is new, as the filter does.
    pub fn read_report(&mut self) {
        let answer = self.rank.answer(self.position);
        let changes = answer.pieces.concat();
        let mut body = write_head(&Status::default(), answer.since, answer.position, changes.len());
        body.extend(changes);
        let mut report = Report::read(body).unwrap();
        if report.since.is_none() {
            self.held.clear();
            self.hearing = Hearing::default();
            self.index.begin_report(REPLICA, false);
            self.told.begin_report(REPLICA, false);
        } else {
            assert_eq!(report.since, self.position);
        }
        while let Some(changes) = report.step(8).unwrap() {
            self.hearing.begin_piece();
            changes.iter().for_each(|change| self.apply(change));
        }
        self.index.complete_report(REPLICA);
        self.told.complete_report(REPLICA);
        self.position = Some(report.position);
        let blocks = (self.index.observed_blocks(REPLICA), self.told.observed_blocks(REPLICA));
        assert_eq!(blocks, (self.held.len(), self.held.len()));
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Stored { parent, blocks, tier } => {
                assert_eq!(*tier, Tier::Gpu);
                let is_behind = parent.is_none_or(|parent| self.held.contains(&parent));
                assert!(is_behind, "behind nothing: {change:?}");
                for block in blocks {
                    assert!(self.held.insert(*block), "stored twice: {change:?}");
                }
            }
            Change::Removed { blocks, .. } => {
                for block in blocks {
                    assert!(self.held.remove(block), "removed though not held: {change:?}");
                }
            }
        }
        let mut sightings = Vec::new();
        self.index.observe(REPLICA, ROOM, change, &mut self.hearing, &mut sightings);
        for sighting in sightings {
            self.told.sight(REPLICA, ROOM, &sighting);
        }
    }

    /// What the filter would predict for these tokens.
    pub fn cached_tokens(&self, seed: ChainSeed, prompt: &[u32]) -> usize {
        let chain = Chain::new(seed, self.block_tokens, prompt);
        let usable = &chain.hashes()[..chain.reusable_blocks()];
        let blocks = usable.iter().take_while(|block| self.held.contains(block)).count();
        for index in [&self.index, &self.told] {
            assert_eq!(index.overlap_blocks(REPLICA, usable), blocks);
        }
        blocks * self.block_tokens.get() as usize
    }
}
