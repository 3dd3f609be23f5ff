//! Steps at once against steps one by one; the rest is tested on the engine.

use super::super::chance::Chance;
use super::*;

impl<K: Copy + Eq + Hash + std::fmt::Debug> Scheduler<K> {
    /// No block is lost or held by nobody, and each running request has as many as it needs.
    #[track_caller]
    pub(in crate::mock) fn check_blocks(&self, at: &str) {
        let mut used: Vec<BlockId> = self.running.iter().flat_map(|s| s.blocks.clone()).collect();
        used.sort();
        used.dedup();
        assert_eq!(self.cache.held(), used.len(), "{at}");
        for sequence in &self.running {
            let capacity = sequence.blocks.len() * self.config.block_size;
            assert!(sequence.computed <= capacity, "{at}");
            assert!(capacity < sequence.computed + self.config.block_size, "{at}");
        }
    }

    /// All that later steps depend on, but for the memo of who is blocked.
    fn state(&self) -> String {
        format!("{:?} {:?} {:?} {:?}", self.running, self.waiting, self.totals(), self.cache)
    }
}

fn work(id: u64, chance: &mut Chance, block_size: usize) -> Work<u64> {
    let (family, prompt_tokens) = (chance.below(4), 1 + chance.below(60) as usize);
    let max_tokens = 1 + chance.below(40) as usize;
    let blocks = (prompt_tokens + max_tokens) / block_size;
    let named = chance.below(blocks as u64 + 1) as usize;
    let own = chance.below(blocks as u64 + 1);
    let key = |at| if at < own { family * 1000 + at } else { (id + 1) * 10_000 + at };
    let keys = (0..named.max(prompt_tokens / block_size) as u64).map(key).collect();
    Work { id: RequestId(id), keys, prompt_tokens, max_tokens, reads_cache: chance.below(5) > 0 }
}

#[test]
fn steps_at_once_do_what_steps_one_by_one_do() {
    let mut coalesced = 0;
    for seed in 0..200 {
        let mut chance = Chance::new(seed);
        let config = EngineConfig::small(&mut chance);
        let mut quick = Scheduler::<u64>::new(config.clone());
        let mut plain = quick.clone();
        let mut now = Duration::ZERO;
        for id in 0..150 {
            if chance.below(3) == 0 {
                let work = work(id, &mut chance, config.block_size);
                assert_eq!(quick.submit(work.clone()), plain.submit(work), "seed {seed}");
            }
            let steps = quick.decode_steps().min(1 + chance.below(30) as usize);
            if steps == 0 {
                let report = quick.step(now);
                assert_eq!(report, plain.step(now), "seed {seed}, request {id}");
                now = report.ended;
                continue;
            }
            coalesced += steps;
            let (each, batch) = (quick.decode_time(), quick.running.len());
            quick.decode(steps);
            for _ in 0..steps {
                let report = plain.step(now);
                assert_eq!(report.duration, each, "seed {seed}, request {id}");
                assert_eq!(report.produced.len(), batch, "seed {seed}, request {id}");
                let quiet = report.finished.is_empty() && report.admitted.is_empty();
                assert!(quiet && report.preempted.is_empty(), "seed {seed}, request {id}");
                now = report.ended;
            }
            assert_eq!(quick.state(), plain.state(), "seed {seed}, request {id}");
        }
    }
    assert!(coalesced > 10_000, "{coalesced} steps");
}

/// The memo of who is blocked must never keep out a request that fits.
#[test]
fn nobody_waits_longer_for_being_remembered_as_blocked() {
    for seed in 0..200 {
        let mut chance = Chance::new(seed);
        let config = EngineConfig {
            block_size: 1 + chance.below(4) as usize,
            capacity_blocks: 12 + chance.below(40) as u32,
            max_num_batched_tokens: 20,
            ..EngineConfig::default()
        };
        let mut quick = Scheduler::<u64>::new(config.clone());
        let mut plain = quick.clone();
        for id in 0..300 {
            if chance.below(3) == 0 {
                let work = work(id, &mut chance, config.block_size);
                assert_eq!(quick.submit(work.clone()), plain.submit(work), "seed {seed}");
            }
            if chance.below(20) == 0 {
                let id = RequestId(chance.below(id + 1));
                assert_eq!(quick.abort(id), plain.abort(id), "seed {seed}");
            }
            plain.blocked = None;
            let now = Duration::ZERO;
            assert_eq!(quick.step(now), plain.step(now), "seed {seed}, request {id}");
        }
    }
}
