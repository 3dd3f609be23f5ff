//! The longest prefix, whatever is waiting there.
//!
//! vllm-project/router `kv_aware` (docs/kv_aware.md): the replica with the most of the prompt in its cache, with no term
//! for load. The vLLM production stack's `prefixaware` is the same with a tree of what was sent.
//!
//! Here it goes by what each replica was sent, up to the cache it has, and is told of restarts: with one gateway that is
//! as good as events, and better in a burst, which events are late for. Equals, as all are for a cold prompt, go by
//! requests in flight and then by chance: as strong as the rule can be made without leaving it.

use super::super::policy::{Ask, ReplicaReport, Router, Why};
use super::choice;
use super::held::Held;
use crate::random::Random;
use std::time::Duration;

/// See the module.
pub struct PrefixOnly {
    held: Held,
    random: Random,
    predicted: u32,
}

impl PrefixOnly {
    /// A chooser in front of replicas of so many blocks each.
    pub fn new(replicas: usize, capacity: usize, random: Random) -> Self {
        Self { held: Held::new(replicas, capacity), random, predicted: 0 }
    }
}

impl Router for PrefixOnly {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let depths = self.held.depths(ask.blocks);
        let depth = |replica: usize| choice::of(&depths, replica);
        let missing = |replica| ask.blocks.len() - depth(replica);
        let cost = |replica| (missing(replica), choice::in_flight(ask, replica));
        let chosen = choice::any_cheapest(choice::serving(ask), &mut self.random, cost)?;
        self.predicted = depth(chosen) as u32 * ask.block_tokens;
        self.held.record(chosen, ask.blocks);
        Ok(chosen)
    }

    fn why(&self) -> Why {
        Why { predicted_tokens: Some(self.predicted), ..Why::default() }
    }

    fn report(&mut self, replica: usize, report: &ReplicaReport, _now: Duration) {
        self.held.reported(replica, report);
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk::Desk;
    use super::*;

    fn router() -> PrefixOnly {
        PrefixOnly::new(3, 100, Random::new(1, 0))
    }

    #[test]
    fn a_longer_prefix_wins_over_any_load() {
        let (mut desk, mut router) = (Desk::new(3), router());
        desk.in_flight = vec![0, 9, 9];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3]), 0);
        desk.in_flight = vec![500, 9, 0];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3, 4]), 0);
        assert_eq!(router.why().predicted_tokens, Some(48));
        assert_eq!(desk.ask(&mut router, &[7]), 2, "a cold prompt goes where least is in flight");
    }
}
