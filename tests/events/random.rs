//! Engines that do anything, over a stream that loses, repeats and swaps: never more is told than they hold, and all of it
//! where nothing was lost for good.

use crate::consumer::Consumer;
use crate::engine::{BLOCK_TOKENS, Chance, Engine};
use crate::held::Held;
use crate::recording::Frame;
use std::collections::BTreeSet;
use warmpath::agent::cache::Names;
use warmpath::identity::seed_of;
use warmpath::tokens::blocks::{BlockHash, BlockSize, Chain};

/// Each takes some tens of milliseconds in a debug build.
const SEEDS: u64 = 40;

fn consumer() -> Consumer {
    Consumer::new(Names { base: "tiny".to_owned(), adapters: Vec::new() }, BLOCK_TOKENS)
}

/// Our names of what a prompt can reach.
fn reachable(held: &Held) -> BTreeSet<BlockHash> {
    let size = BlockSize::new(BLOCK_TOKENS as u32).unwrap();
    let name = |path: &(Option<String>, Option<String>, Vec<u32>)| {
        let seed = seed_of("tiny", path.1.as_deref(), None);
        *Chain::new(seed, size, &path.2).hashes().last().unwrap()
    };
    held.reachable(BLOCK_TOKENS).map(name).collect()
}

/// An engine and who listens to it, for some hundred steps; `harm` says what becomes of a step's frame.
fn run(
    seed: u64,
    keeps: usize,
    mut harm: impl FnMut(&mut Chance, &mut Engine, &mut Consumer, Frame),
) {
    let mut chance = Chance::new(seed);
    let mut engine = Engine::new(4 + chance.below(40), keeps);
    let mut consumer = consumer();
    for _ in 0..200 {
        let frame = engine.step(&mut chance);
        harm(&mut chance, &mut engine, &mut consumer, frame);
    }
}

#[track_caller]
fn check_equal(seed: u64, engine: &Engine, consumer: &mut Consumer) {
    consumer.read_report();
    assert_eq!(consumer.held, reachable(&engine.truth), "seed {seed}, batch {}", engine.seq);
    let told: BTreeSet<BlockHash> = consumer.rank.held().collect();
    assert_eq!(told, consumer.held, "seed {seed}, batch {}", engine.seq);
}

#[test]
fn what_is_told_is_what_prompts_can_reach_after_every_step() {
    for seed in 0..SEEDS {
        run(seed, 1000, |chance, engine, consumer, frame| {
            consumer.hear(&frame, |from| engine.replay(from));
            // Not every reader comes after every step.
            if chance.below(3) > 0 {
                check_equal(seed, engine, consumer);
            }
        });
    }
}

#[test]
fn frames_that_are_lost_are_asked_for_again_and_those_that_come_twice_or_late_do_no_harm() {
    for seed in 0..SEEDS {
        let mut late: Option<Frame> = None;
        run(seed, 1000, |chance, engine, consumer, frame| match chance.below(8) {
            0 => {}
            1 => late = Some(frame),
            2 => {
                consumer.hear(&frame, |from| engine.replay(from));
                consumer.hear(&frame, |from| engine.replay(from));
                check_equal(seed, engine, consumer);
            }
            _ => {
                consumer.hear(&frame, |from| engine.replay(from));
                check_equal(seed, engine, consumer);
                if let Some(frame) = late.take() {
                    consumer.hear(&frame, |from| engine.replay(from));
                    check_equal(seed, engine, consumer);
                }
            }
        });
    }
}

#[test]
fn an_engine_that_starts_again_leaves_nothing_behind() {
    for seed in 0..SEEDS {
        run(seed, 1000, |chance, engine, consumer, frame| {
            consumer.hear(&frame, |from| engine.replay(from));
            check_equal(seed, engine, consumer);
            if chance.one_in(15) {
                // With the process its connection ends; a number alone may happen to be the next.
                consumer.rank.disconnected();
                engine.restart();
                consumer.rank.connected();
                // Its first steps may be missed, too.
                for _ in 0..chance.below(4) {
                    engine.step(chance);
                }
            }
        });
    }
}

#[test]
fn what_is_lost_for_good_makes_it_less_and_never_more() {
    let (mut equal, mut less) = (0, 0);
    for seed in 0..SEEDS {
        let mut lost = 0;
        run(seed, 5, |chance, engine, consumer, frame| {
            if lost > 0 || chance.one_in(25) {
                lost = if lost > 0 { lost - 1 } else { chance.below(12) };
                return;
            }
            consumer.hear(&frame, |from| engine.replay(from));
            consumer.read_report();
            let reachable = reachable(&engine.truth);
            assert!(consumer.held.is_subset(&reachable), "seed {seed}, batch {}", engine.seq);
            if consumer.held == reachable {
                equal += 1;
            } else {
                less += 1;
            }
        });
    }
    // Neither is the test's doing alone: gaps are closed where they can be, and a cache that turns over is known again.
    assert!(equal > less && less > 100, "{equal} equal, {less} less");
}
