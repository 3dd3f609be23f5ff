//! Blocks to compute plus blocks to decode: NVIDIA Dynamo's cost, by KV events or by prediction.
//!
//! Source: ai-dynamo/dynamo `lib/kv-router/src/scheduling/selector/default.rs`, `config.rs`,
//! `sequences/prompt_registry.rs` and its router guide (October 2026). The lowest cost, equals by chance:
//!
//! ```text
//! cost = max(0, (active_prefill + prompt) / block - overlap) + decode
//! ```
//!
//! `active_prefill` is the uncached tokens sent to a replica whose answer has not begun, `overlap` the blocks of the
//! prompt that it has, and `decode` the different blocks that its requests in flight need, this one's among them; what
//! answers add is not counted. All factors are 1, and what is optional is off: the decay of overlap under load, a weight
//! per request, temperature.
//!
//! By events, the default, a replica's blocks are known from the end of the step that stored them, and evictions as
//! well. By prediction they are what was sent there. Dynamo forgets those after 120 s; its newer option forgets them as
//! a cache of the replica's size would, which is the one taken.
//!
//! What the simulation cannot show of it: its queue in front of replicas that have 16 batches of prompt to compute, and
//! its tiers of cache. Several frontends see each other's blocks by events, but not each other's requests, as here.

use super::super::policy::{Ask, Change, Ended, ReplicaReport, Router, Why};
use super::active::Active;
use super::choice;
use super::flights::Flights;
use super::held::Held;
use super::holders::Holders;
use crate::random::Random;
use std::time::Duration;
use warmpath::mock::scheduler::RequestId;

/// See the module.
pub struct Dynamo {
    knowledge: Knowledge,
    active: Active,
    flights: Flights,
    random: Random,
    replicas: usize,
    predicted: u32,
}

enum Knowledge {
    Events(Holders),
    Prediction(Held),
}

impl Dynamo {
    /// By events.
    pub fn by_events(replicas: usize, random: Random) -> Self {
        Self::new(Knowledge::Events(Holders::default()), replicas, random)
    }

    /// By what was sent to replicas of so many blocks each.
    pub fn by_prediction(replicas: usize, capacity: usize, random: Random) -> Self {
        Self::new(Knowledge::Prediction(Held::new(replicas, capacity)), replicas, random)
    }

    fn new(knowledge: Knowledge, replicas: usize, random: Random) -> Self {
        let (active, flights) = (Active::new(replicas), Flights::new(replicas));
        Self { knowledge, active, flights, random, replicas, predicted: 0 }
    }
}

impl Router for Dynamo {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let overlaps = match &self.knowledge {
            Knowledge::Events(holders) => holders.depths(ask.blocks, self.replicas),
            Knowledge::Prediction(held) => held.depths(ask.blocks),
        };
        let in_use = self.active.depths(ask.blocks);
        let blocks = f64::from(ask.prompt_tokens) / f64::from(ask.block_tokens.max(1));
        let cost = |replica| {
            let active =
                self.flights.uncomputed(replica) as f64 / f64::from(ask.block_tokens.max(1));
            let prefill = (active + blocks - choice::of(&overlaps, replica) as f64).max(0.0);
            let added = blocks.ceil() - choice::of(&in_use, replica) as f64;
            prefill + self.active.count(replica) as f64 + added
        };
        let chosen = choice::any_cheapest(choice::serving(ask), &mut self.random, cost)?;
        self.predicted = ask.tokens_of(choice::of(&overlaps, chosen));
        self.flights.sent(ask.id, chosen, u64::from(ask.prompt_tokens - self.predicted));
        self.active.sent(ask.id, chosen, ask.blocks);
        if let Knowledge::Prediction(held) = &mut self.knowledge {
            held.record(chosen, ask.blocks);
        }
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
        self.active.ended(id);
    }

    fn report(&mut self, replica: usize, report: &ReplicaReport, _now: Duration) {
        if let Knowledge::Prediction(held) = &mut self.knowledge {
            held.reported(replica, report);
        }
    }

    fn cached(&mut self, replica: usize, changes: &[Change], _now: Duration) {
        if let Knowledge::Events(holders) = &mut self.knowledge {
            changes.iter().for_each(|change| holders.apply(replica, *change));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk::{self, Desk};
    use super::*;

    fn by_events() -> (Desk, Dynamo) {
        (Desk::new(2), Dynamo::by_events(2, Random::new(1, 0)))
    }

    fn store(router: &mut Dynamo, replica: usize, blocks: std::ops::Range<u64>) {
        let changes: Vec<Change> = blocks.map(Change::Stored).collect();
        router.cached(replica, &changes, Duration::ZERO);
    }

    #[test]
    fn a_cached_block_outweighs_less_than_one_block_of_work() {
        let prompt: Vec<u64> = (0..20).collect();
        // Ten blocks are cached on the first. Work of some blocks there, all computed, costs as much each.
        for (decoding, stays) in [(9, true), (11, false)] {
            let (mut desk, mut router) = by_events();
            store(&mut router, 0, 0..10);
            desk.serving[1] = false;
            let busy: Vec<u64> = (100..100 + decoding).collect();
            desk.ask(&mut router, &busy);
            router.answer_began(RequestId(0), Duration::ZERO);
            desk.serving[1] = true;
            assert_eq!(desk.ask(&mut router, &prompt) == 0, stays, "{decoding} blocks decode");
        }
    }

    #[test]
    fn a_prompt_under_way_counts_twice_until_its_answer_begins_and_not_after_its_end() {
        let prompt: Vec<u64> = (0..20).collect();
        let chosen = |until: fn(&mut Dynamo)| {
            let (mut desk, mut router) = by_events();
            store(&mut router, 0, 0..10);
            desk.serving[1] = false;
            // Six blocks to compute and to decode: 12 against the 10 that are cached.
            desk.ask(&mut router, &[90, 91, 92, 93, 94, 95]);
            until(&mut router);
            desk.serving[1] = true;
            desk.ask(&mut router, &prompt)
        };
        assert_eq!(chosen(|_| {}), 1);
        assert_eq!(chosen(|router| router.answer_began(RequestId(0), Duration::ZERO)), 0);
        assert_eq!(
            chosen(|router| router.ended(RequestId(0), &desk::answered(), Duration::ZERO)),
            0
        );
    }

    #[test]
    fn blocks_in_use_there_already_are_not_decoded_twice() {
        let (mut desk, mut router) = by_events();
        desk.serving[1] = false;
        desk.ask(&mut router, &[1, 2, 3, 4]);
        router.answer_began(RequestId(0), Duration::ZERO);
        desk.serving = vec![false, true];
        desk.ask(&mut router, &[5, 6]);
        router.answer_began(RequestId(1), Duration::ZERO);
        desk.serving = vec![true; 2];
        // Nothing is cached: first 4 + 6 - 4 = 6 blocks of decoding, second 2 + 6 = 8.
        assert_eq!(desk.ask(&mut router, &[1, 2, 3, 4, 9, 10]), 0);
    }

    #[test]
    fn by_events_a_choice_teaches_nothing_and_by_prediction_it_does() {
        let prompt: Vec<u64> = (0..20).collect();
        let mut predicted = Vec::new();
        let prediction = Dynamo::by_prediction(2, 100, Random::new(1, 0));
        for mut router in [by_events().1, prediction] {
            let mut desk = Desk::new(2);
            desk.ask(&mut router, &prompt);
            router.ended(RequestId(0), &desk::answered(), Duration::ZERO);
            desk.ask(&mut router, &prompt);
            predicted.push(router.why().predicted_tokens);
        }
        assert_eq!(predicted, [Some(0), Some(320)]);
    }

    #[test]
    fn what_is_evicted_or_restarted_is_forgotten() {
        let (mut desk, mut router) = by_events();
        store(&mut router, 0, 0..10);
        let prompt: Vec<u64> = (0..10).collect();
        router.cached(0, &[Change::Evicted(9)], Duration::ZERO);
        assert_eq!(desk.ask(&mut router, &prompt), 0);
        assert_eq!(router.why().predicted_tokens, Some(144));
        router.ended(RequestId(0), &desk::answered(), Duration::ZERO);
        router.cached(0, &[Change::Cleared], Duration::ZERO);
        desk.ask(&mut router, &prompt);
        assert_eq!(router.why().predicted_tokens, Some(0));
    }
}
