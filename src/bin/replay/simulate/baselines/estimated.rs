//! Weighted scores over prefixes of estimated tokens, with an index for each worker thread: what a wasm filter without
//! a tokenizer and without shared data comes to.
//!
//! Higress `ai-endpoint-picker` (alibaba/higress `plugins/wasm-go/extensions/ai-endpoint-picker`, `scheduling/pipeline.go`
//! and `prefixcache/index.go`, as of pull request 4352). A score is the weighted mean of four signals in `[0, 1]`, and a
//! signal that is missing counts as 0:
//!
//! - reported queue, weight 2, and own requests in flight, weight 1: `(most - x) / (most - least)` over the replicas;
//! - KV usage, weight 2: what is free of it;
//! - prefix, weight 3: `0.75 m / t + 0.25 min(m / 8192, 1)^2`, where `m` of `t` tokens were sent there before.
//!
//! Tokens are bytes over four, in blocks of 1,024, and at most 32 blocks of a prompt are looked at. What was sent where
//! is remembered up to the cache that a replica reports. The highest score gets the request, equals by chance. AIBrix's
//! `prefix_cache` counts bytes the same way, with its index in one process.
//!
//! The simulation takes four bytes for a token exactly, which favours it, and `t` for the tokens that were looked at.
//! What is its own here: every worker thread has its own index and counts only its own requests, so that with several it
//! sees a part of either. Reports come as often as everybody's or every 250 ms, whichever is more often.

use super::super::policy::{Ask, Ended, ReplicaReport, Router, Why};
use super::choice;
use super::held::Held;
use super::span::Span;
use crate::random::Random;
use hashbrown::HashMap;
use std::time::Duration;
use warmpath::mock::scheduler::RequestId;

/// Estimated tokens of a block.
const BLOCK_TOKENS: u32 = 1024;

/// Blocks of a prompt that are looked at.
const MOST_BLOCKS: usize = 32;

/// A match of so many tokens has all of what length alone can earn.
const LONG_TOKENS: f64 = 8192.0;

/// Of the mean of queue, own requests, KV usage and prefix, in this order.
const WEIGHTS: [f64; 4] = [2.0, 1.0, 2.0, 3.0];

/// See the module.
pub struct Estimated {
    held: Held,
    block_tokens: u32,
    reports: Vec<Option<ReplicaReport>>,
    /// This thread's own, which is all it knows.
    in_flight: Vec<usize>,
    under_way: HashMap<RequestId, usize>,
    random: Random,
    predicted: u32,
}

impl Estimated {
    /// A thread's chooser in front of replicas of so many blocks, of so many tokens each.
    pub fn new(replicas: usize, capacity: usize, block_tokens: u32, random: Random) -> Self {
        Self {
            held: Held::new(replicas, capacity * block_tokens as usize / BLOCK_TOKENS as usize),
            block_tokens,
            reports: vec![None; replicas],
            in_flight: vec![0; replicas],
            under_way: HashMap::new(),
            random,
            predicted: 0,
        }
    }

    fn reported(&self, replica: usize) -> Option<&ReplicaReport> {
        self.reports.get(replica)?.as_ref()
    }

    fn own(&self, replica: usize) -> f64 {
        self.in_flight.get(replica).copied().unwrap_or(0) as f64
    }

    fn set_in_flight(&mut self, replica: usize, change: impl Fn(usize) -> usize) {
        if let Some(count) = self.in_flight.get_mut(replica) {
            *count = change(*count);
        }
    }
}

impl Router for Estimated {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let blocks = estimated_blocks(ask);
        let depths = self.held.depths(&blocks);
        let depth = |replica: usize| choice::of(&depths, replica);
        let serving = choice::serving(ask);
        let waiting = |replica| self.reported(replica).map(|report| f64::from(report.waiting));
        let queue = Span::of(serving.clone().filter_map(waiting));
        let own = Span::of(serving.clone().map(|replica| self.own(replica)));
        let score = |replica: usize| {
            let signals = [
                waiting(replica).map_or(0.0, |waiting| queue.lowness(waiting)),
                own.lowness(self.own(replica)),
                self.reported(replica).map_or(0.0, |report| 1.0 - report.kv_usage),
                prefix_score(depth(replica), blocks.len()),
            ];
            WEIGHTS.iter().zip(signals).map(|(weight, signal)| weight * signal).sum::<f64>()
        };
        let scores: Vec<f64> = (0..ask.serving.len()).map(score).collect();
        let cost = |replica: usize| -scores.get(replica).copied().unwrap_or_default();
        let chosen = choice::any_cheapest(serving, &mut self.random, cost)?;
        self.predicted = (depth(chosen) as u32 * BLOCK_TOKENS).min(ask.prompt_tokens);
        self.held.record(chosen, &blocks);
        self.set_in_flight(chosen, |count| count + 1);
        self.under_way.insert(ask.id, chosen);
        Ok(chosen)
    }

    fn why(&self) -> Why {
        Why { predicted_tokens: Some(self.predicted), ..Why::default() }
    }

    fn ended(&mut self, id: RequestId, _ended: &Ended<'_>, _now: Duration) {
        if let Some(replica) = self.under_way.remove(&id) {
            self.set_in_flight(replica, |count| count.saturating_sub(1));
        }
    }

    fn report(&mut self, replica: usize, report: &ReplicaReport, _now: Duration) {
        let tokens = u64::from(report.capacity_blocks) * u64::from(self.block_tokens);
        let capacity_blocks = (tokens / u64::from(BLOCK_TOKENS)) as u32;
        self.held.reported(replica, &ReplicaReport { capacity_blocks, ..*report });
        if let Some(last) = self.reports.get_mut(replica) {
            *last = Some(*report);
        }
    }
}

/// The blocks that a prompt is known by: of each so many of its own the last, whose id stands for all before it.
fn estimated_blocks(ask: &Ask<'_>) -> Vec<u64> {
    let step = (BLOCK_TOKENS / ask.block_tokens.max(1)).max(1) as usize;
    ask.blocks.iter().skip(step - 1).step_by(step).take(MOST_BLOCKS).copied().collect()
}

fn prefix_score(matched: usize, blocks: usize) -> f64 {
    let tokens = (matched as u32 * BLOCK_TOKENS).into();
    let share = matched as f64 / blocks.max(1) as f64;
    0.75 * share + 0.25 * (f64::min(tokens, LONG_TOKENS) / LONG_TOKENS).powi(2)
}

#[cfg(test)]
mod tests {
    use super::super::desk::{self, Desk};
    use super::*;

    fn router() -> Estimated {
        Estimated::new(2, 100_000, 16, Random::new(1, 0))
    }

    fn reports(router: &mut Estimated, waiting: [u32; 2], kv_usage: [f64; 2]) {
        for replica in 0..2 {
            let (waiting, kv_usage) = (waiting[replica], kv_usage[replica]);
            let report = ReplicaReport { waiting, kv_usage, ..desk::report(1.0) };
            router.report(replica, &report, Duration::ZERO);
        }
    }

    fn end(router: &mut Estimated, desk: &Desk) {
        router.ended(RequestId(desk.next - 1), &desk::answered(), Duration::ZERO);
    }

    #[test]
    fn half_of_a_long_prompt_is_worth_this_much() {
        // Four of eight blocks: 0.75 * 0.5 + 0.25 * 0.5 ^ 2.
        assert_eq!(prefix_score(4, 8), 0.4375);
        assert_eq!(prefix_score(32, 32), 1.0);
        assert_eq!(prefix_score(0, 0), 0.0);
    }

    #[test]
    fn blocks_are_of_1024_tokens_and_the_33rd_is_not_looked_at() {
        let mut desk = Desk::new(2);
        let mut router = router();
        let long: Vec<u64> = (0..64 * 40).collect();
        let home = desk.ask(&mut router, &long);
        end(&mut router, &desk);
        let cut =
            |blocks: u64| (0..64 * blocks).chain(900_000..900_000 + 64 * 8).collect::<Vec<u64>>();
        desk.ask(&mut router, &cut(32));
        assert_eq!(router.why().predicted_tokens, Some(32 * 1024));
        let short = desk.ask(&mut router, &long[..63]);
        assert_eq!(router.why().predicted_tokens, Some(0), "too short to be known");
        assert_ne!(short, home, "then what is in flight decides");
    }

    #[test]
    fn a_queue_of_one_counts_as_one_of_a_hundred() {
        // 1 - 0 is all of the span: weight 2 against 3 * (0.75 * 0.5 + 0.25 * 4^2 / 64) = 1.3125.
        let prompt: Vec<u64> = (0..64 * 4).collect();
        let half: Vec<u64> = (0..128).chain(900_000..900_128).collect();
        for (waiting, leaves) in [(1, true), (100, true), (0, false)] {
            let (mut desk, mut router) = (Desk::new(2), router());
            let home = desk.ask(&mut router, &prompt);
            end(&mut router, &desk);
            let mut queue = [0; 2];
            queue[home] = waiting;
            reports(&mut router, queue, [0.0; 2]);
            assert_eq!(desk.ask(&mut router, &half) != home, leaves, "{waiting} waiting");
        }
    }

    #[test]
    fn usage_of_the_cache_counts_twice_what_is_free() {
        let (mut desk, mut router) = (Desk::new(2), router());
        reports(&mut router, [0; 2], [0.4, 0.3]);
        for _ in 0..20 {
            assert_eq!(desk.ask(&mut router, &[]), 1);
            end(&mut router, &desk);
        }
        // One of its own in flight: weight 1 against twice a tenth.
        assert_eq!(desk.ask(&mut router, &[]), 1);
        assert_eq!(desk.ask(&mut router, &[]), 0);
    }
}
