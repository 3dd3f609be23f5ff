//! Against the obvious version, and by hand where it matters.

use super::naive::{Naive, Reader};
use super::*;
use crate::mock::chance::Chance;
use crate::report::{Change, Changes, Position, Report, Status, write_head};

fn named(number: u64) -> Named {
    Named { engine: EngineHash(number), block: Some(BlockHash(number + 1_000_000)) }
}

/// Changes as a reader gets them.
pub fn read(changes: Changes) -> Vec<Change> {
    let bytes = changes.finish();
    let head = write_head(&Status::default(), None, Position::default(), bytes.len());
    let mut report = Report::read([head, bytes].concat()).unwrap();
    report.step(usize::MAX).unwrap().unwrap_or_default()
}

struct Both {
    held: Held,
    naive: Naive,
    reader: Reader,
}

impl Both {
    fn new() -> Self {
        Self { held: Held::new(10_000), naive: Naive::default(), reader: Reader::default() }
    }

    fn store(&mut self, behind: Behind, blocks: &[Named], tier: Tier) {
        let mut teller = Teller::default();
        let stored = self.held.store(behind, blocks.iter().copied(), tier, &mut teller);
        assert_eq!(stored.is_ok(), self.naive.store(behind, blocks, tier));
        self.compare(teller);
    }

    fn remove(&mut self, engine: u64, tier: Tier) {
        let mut teller = Teller::default();
        let removed = self.held.remove(EngineHash(engine), tier, &mut teller);
        assert_eq!(removed, self.naive.remove(EngineHash(engine), tier));
        self.compare(teller);
    }

    fn compare(&mut self, teller: Teller) {
        read(teller.finish()).iter().for_each(|change| self.reader.take(change));
        assert_eq!(self.reader.held, self.naive.told());
        let counts = self.held.counts();
        assert_eq!((counts.told, counts.left_out, counts.unreachable), self.naive.counts());
        let away = self.reader.held.iter().filter(|(block, tier)| {
            *tier == Tier::Offload && !self.reader.held.contains(&(*block, Tier::Gpu))
        });
        assert_eq!(counts.offloaded, away.count() as u64);
    }

    /// A reader that comes now is told the same.
    fn snapshot(&self) {
        let mut teller = Teller::default();
        self.held.tell_all(&mut teller);
        let mut reader = Reader::default();
        read(teller.finish()).iter().for_each(|change| reader.take(change));
        assert_eq!(reader.held, self.reader.held);
        let told: Vec<BlockHash> = self.held.told().collect();
        assert_eq!(told.len() as u64, self.held.counts().told);
    }
}

#[test]
fn it_agrees_with_the_obvious_version() {
    for seed in 0..16 {
        println!("seed {seed}");
        let mut chance = Chance::new(seed);
        let mut both = Both::new();
        for step in 0..150 {
            let tier = if chance.below(4) == 0 { Tier::Offload } else { Tier::Gpu };
            // A tree in which a block's number says what it stands behind: of 3n+1 to 3n+3 it is n.
            let number = chance.below(60);
            let parent = number.checked_sub(1).map(|below| below / 3);
            if chance.below(5) < 3 {
                let behind =
                    parent.map_or(Behind::Root, |parent| Behind::Block(EngineHash(parent)));
                let mut run = vec![number];
                while chance.below(2) == 0 {
                    run.push(3 * run[run.len() - 1] + 1 + chance.below(3));
                }
                let nameless = |number: u64| number % 17 == 16;
                let run: Vec<Named> = run
                    .into_iter()
                    .map(|number| match named(number) {
                        named if nameless(number) => Named { block: None, ..named },
                        named => named,
                    })
                    .collect();
                both.store(behind, &run, tier);
            } else {
                both.remove(number, tier);
            }
            if step % 20 == 0 {
                both.snapshot();
            }
        }
        for number in 0..2000 {
            for tier in [Tier::Gpu, Tier::Offload] {
                while both.held.known(EngineHash(number)).is_some()
                    && both.naive.is_known(EngineHash(number))
                {
                    let before = both.held.counts();
                    both.remove(number, tier);
                    if both.held.counts() == before {
                        break;
                    }
                }
            }
        }
    }
}

#[test]
fn each_copy_ends_by_itself() {
    let mut both = Both::new();
    both.store(Behind::Root, &[named(1), named(2)], Tier::Gpu);
    both.store(Behind::Block(EngineHash(1)), &[named(2)], Tier::Gpu);
    both.remove(2, Tier::Gpu);
    assert_eq!(both.held.counts().told, 2);
    both.remove(2, Tier::Gpu);
    assert_eq!(both.held.counts().told, 1);
    both.remove(2, Tier::Gpu);
    assert_eq!(both.held.counts().told, 1);
}

#[test]
fn what_is_behind_a_gap_is_told_again_when_the_gap_closes() {
    let mut both = Both::new();
    both.store(Behind::Root, &[named(1), named(2), named(3)], Tier::Gpu);
    both.remove(2, Tier::Gpu);
    assert_eq!(both.reader.held.len(), 1);
    assert_eq!(both.held.counts().unreachable, 1);
    both.store(Behind::Block(EngineHash(1)), &[named(2)], Tier::Offload);
    assert_eq!(both.reader.held.len(), 3);
    both.snapshot();
}

#[test]
fn what_nobody_holds_takes_no_memory() {
    let mut held = Held::new(100);
    let mut teller = Teller::default();
    for round in 0..50 {
        let blocks = (0..100).map(|block| named(round * 1000 + block));
        assert_eq!(held.store(Behind::Root, blocks, Tier::Gpu, &mut teller), Ok(()));
        let more = held.store(Behind::Root, [named(9_999_999)], Tier::Gpu, &mut teller);
        assert_eq!(more, Err(Misplaced::Full));
        for block in 0..100 {
            assert!(held.remove(EngineHash(round * 1000 + block), Tier::Gpu, &mut teller));
        }
        assert_eq!((held.counts(), held.by_engine.len()), (Counts::default(), 0));
    }
    assert!(held.nodes.len() <= 100);
}

#[test]
fn a_block_takes_no_more_than_is_stated() {
    // What docs/agents.md states for a million: 110 MB at most.
    const MOST: usize = 110;
    for blocks in [100_000_u64, 140_000] {
        let mut held = Held::new(1 << 20);
        let mut teller = Teller::default();
        let chains =
            (0..blocks / 1000).map(|chain| (0..1000).map(move |block| named(chain * 1000 + block)));
        for chain in chains {
            assert_eq!(held.store(Behind::Root, chain, Tier::Gpu, &mut teller), Ok(()));
        }
        let each = held.bytes() / blocks as usize;
        assert!(each <= MOST, "{each} bytes a block");
        println!("{each} bytes a block of {blocks}");
    }
}

#[test]
fn a_turnover_is_told_in_few_changes() {
    let mut held = Held::new(1000);
    let mut teller = Teller::default();
    let stored = held.store(Behind::Root, (0..100).map(named), Tier::Gpu, &mut teller);
    assert_eq!(stored, Ok(()));
    for block in (0..100).rev() {
        held.remove(EngineHash(block), Tier::Gpu, &mut teller);
    }
    assert_eq!(read(teller.finish()).len(), 2);
}
