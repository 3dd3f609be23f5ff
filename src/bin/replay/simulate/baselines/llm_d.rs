//! llm-d's two: weighted scores, and sticky until saturated.
//!
//! Source: llm-d/llm-d-router `pkg/epp/config/loader/defaults.go`, `…/scheduling/filter/prefixcacheaffinity/README.md`,
//! `…/scheduling/scorer/tokenload/README.md`, and llm-d's guide `optimized-baseline` (October 2026). Both know a
//! replica's cache by what it was sent, up to the blocks it reports, and look at 131,072 tokens of a prompt at most; the
//! highest score gets the request, equals by chance.
//!
//! Weighted, what it does unconfigured: `2 queue + 2 (1 - kv_usage) + 3 matched / total`, `queue` being
//! `(most - waiting) / (most - least)` by the last reports.
//!
//! Sticky, what its guide ships: only replicas with at least 0.8 of the prompt, if there are any. But where the least
//! wait among them is more than 18 s above the least among the others, all are candidates again. The wait is uncached
//! prompt tokens under way over the rate of a prefill, which the guide has operators measure: so it is the engine's own
//! here. Of the candidates the one with the fewest uncached tokens under way, this prompt's among them, gets it.
//!
//! Reports come every 50 ms, as its scraper asks, or as often as everybody's if that is more often. Tokens are not
//! estimated here, which favours it. What the simulation cannot show of it: its queues, its flow control, and what
//! `predicted latency` learns.

use super::super::policy::{Ask, Ended, ReplicaReport, Router, Why};
use super::choice;
use super::flights::Flights;
use super::held::Held;
use super::span::Span;
use crate::random::Random;
use std::time::Duration;
use warmpath::mock::scheduler::RequestId;

/// Tokens of a prompt that are looked at.
const MOST_TOKENS: u32 = 131_072;

/// The share of a prompt that makes a replica sticky.
const STICKY: f64 = 0.8;

/// Seconds that a sticky replica may be behind others.
const PATIENCE_S: f64 = 18.0;

/// How it chooses.
#[derive(Clone, Copy)]
pub enum Rule {
    /// By weighted scores.
    Weighted,
    /// Sticky until saturated, replicas computing so many tokens a second.
    Sticky {
        /// Of a prefill.
        tokens_per_s: f64,
    },
}

/// See the module.
pub struct LlmD {
    rule: Rule,
    held: Held,
    flights: Flights,
    reports: Vec<Option<ReplicaReport>>,
    random: Random,
    predicted: u32,
}

impl LlmD {
    /// In front of replicas of so many blocks each.
    pub fn new(rule: Rule, replicas: usize, capacity: usize, random: Random) -> Self {
        let (held, flights) = (Held::new(replicas, capacity), Flights::new(replicas));
        Self { rule, held, flights, reports: vec![None; replicas], random, predicted: 0 }
    }

    fn weighted(&mut self, ask: &Ask<'_>, matched: impl Fn(usize) -> f64) -> Result<usize, String> {
        let reported = |replica: usize| self.reports.get(replica).copied().flatten();
        let waiting = |replica| reported(replica).map_or(0.0, |report| f64::from(report.waiting));
        let queue = Span::of(choice::serving(ask).map(waiting));
        let cost = |replica| {
            let free = 1.0 - reported(replica).map_or(0.0, |report| report.kv_usage);
            -(2.0 * queue.lowness(waiting(replica)) + 2.0 * free + 3.0 * matched(replica))
        };
        choice::any_cheapest(choice::serving(ask), &mut self.random, cost)
    }

    fn sticky(
        &mut self,
        ask: &Ask<'_>,
        tokens_per_s: f64,
        matched: impl Fn(usize) -> f64,
    ) -> Result<usize, String> {
        let wait_s = |replica| self.flights.uncomputed(replica) as f64 / tokens_per_s;
        let least = |sticky: bool| {
            let those =
                choice::serving(ask).filter(|replica| (matched(*replica) >= STICKY) == sticky);
            those.map(wait_s).reduce(f64::min)
        };
        let narrow = match (least(true), least(false)) {
            (Some(sticky), Some(other)) => sticky - other <= PATIENCE_S,
            _ => false,
        };
        let candidates =
            choice::serving(ask).filter(|replica| !narrow || matched(*replica) >= STICKY);
        let prompt = f64::from(ask.prompt_tokens);
        let cost =
            |replica| self.flights.uncomputed(replica) as f64 + prompt * (1.0 - matched(replica));
        choice::any_cheapest(candidates, &mut self.random, cost)
    }
}

impl Router for LlmD {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let most = (MOST_TOKENS / ask.block_tokens.max(1)) as usize;
        let blocks = ask.blocks.get(..most).unwrap_or(ask.blocks);
        let depths = self.held.depths(blocks);
        let depth = |replica: usize| choice::of(&depths, replica);
        let matched = |replica| depth(replica) as f64 / blocks.len().max(1) as f64;
        let chosen = match self.rule {
            Rule::Weighted => self.weighted(ask, matched)?,
            Rule::Sticky { tokens_per_s } => self.sticky(ask, tokens_per_s, matched)?,
        };
        self.predicted = ask.tokens_of(depth(chosen));
        self.flights.sent(ask.id, chosen, u64::from(ask.prompt_tokens - self.predicted));
        self.held.record(chosen, blocks);
        Ok(chosen)
    }

    fn why(&self) -> Why {
        Why { predicted_tokens: Some(self.predicted), ..Why::default() }
    }

    fn answer_began(&mut self, id: RequestId, _now: Duration) {
        self.flights.computed(id);
    }

    fn ended(&mut self, id: RequestId, _ended: &Ended<'_>, _now: Duration) {
        self.flights.computed(id);
    }

    fn report(&mut self, replica: usize, report: &ReplicaReport, _now: Duration) {
        self.held.reported(replica, report);
        if let Some(last) = self.reports.get_mut(replica) {
            *last = Some(*report);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk::{self, Desk};
    use super::*;

    fn of(rule: Rule) -> (Desk, LlmD) {
        (Desk::new(2), LlmD::new(rule, 2, 10_000, Random::new(1, 0)))
    }

    fn report(router: &mut LlmD, replica: usize, waiting: u32, kv_usage: f64) {
        let report = ReplicaReport { waiting, kv_usage, ..desk::report(1.0) };
        router.report(replica, &report, Duration::ZERO);
    }

    /// A prompt of ten blocks on one of two, and another of which this many match.
    fn matching(router: &mut LlmD, desk: &mut Desk, matched: usize) -> (usize, Vec<u64>) {
        let prompt: Vec<u64> = (0..10).collect();
        let home = desk.ask(router, &prompt);
        router.answer_began(RequestId(0), Duration::ZERO);
        (home, (0..matched as u64).chain(90..100 - matched as u64).collect())
    }

    #[test]
    fn seven_tenths_of_a_prompt_outweigh_the_longer_queue_and_six_do_not() {
        // The prefix weighs 3: 2.1 and 1.8 against the 2 of the shorter queue.
        for (matched, stays) in [(7, true), (6, false)] {
            let (mut desk, mut router) = of(Rule::Weighted);
            let (home, prompt) = matching(&mut router, &mut desk, matched);
            report(&mut router, home, 1, 0.0);
            report(&mut router, 1 - home, 0, 0.0);
            assert_eq!(desk.ask(&mut router, &prompt) == home, stays, "{matched} of ten");
        }
    }

    #[test]
    fn a_full_cache_costs_twice_its_usage() {
        for (kv_usage, stays) in [(0.44, true), (0.46, false)] {
            let (mut desk, mut router) = of(Rule::Weighted);
            let (home, prompt) = matching(&mut router, &mut desk, 3);
            report(&mut router, home, 0, kv_usage);
            report(&mut router, 1 - home, 0, 0.0);
            assert_eq!(desk.ask(&mut router, &prompt) == home, stays, "{kv_usage} used");
        }
    }

    /// Sends tokens to a replica that stay under way, in prompts of 100 blocks.
    fn load(router: &mut LlmD, desk: &mut Desk, replica: usize, prompts: u64) {
        desk.serving = (0..2).map(|other| other == replica).collect();
        for prompt in 1..=prompts {
            let blocks: Vec<u64> = (prompt * 1000..prompt * 1000 + 100).collect();
            desk.ask(router, &blocks);
        }
        desk.serving = vec![true; 2];
    }

    #[test]
    fn eight_tenths_stick_until_18_seconds_behind() {
        // A prompt is 1,601 tokens and takes 16 s at 100 a second.
        let rule = Rule::Sticky { tokens_per_s: 100.0 };
        for (matched, prompts, stays) in [(8, 1, true), (8, 2, false), (7, 1, false)] {
            let (mut desk, mut router) = of(rule);
            let (home, prompt) = matching(&mut router, &mut desk, matched);
            load(&mut router, &mut desk, home, prompts);
            let case = format!("{matched} of ten, {prompts} prompts");
            assert_eq!(desk.ask(&mut router, &prompt) == home, stays, "{case}");
        }
    }

    #[test]
    fn what_is_not_sticky_goes_where_fewest_tokens_would_be_under_way() {
        let (mut desk, mut router) = of(Rule::Sticky { tokens_per_s: 1e6 });
        let (home, prompt) = matching(&mut router, &mut desk, 7);
        // 112 of the prompt's 161 tokens are cached there: it wins by less work, until as much is under way.
        assert_eq!(desk.ask(&mut router, &prompt), home);
        load(&mut router, &mut desk, home, 1);
        let other: Vec<u64> = (0..7).chain(80..83).collect();
        assert_eq!(desk.ask(&mut router, &other), 1 - home);
    }
}
