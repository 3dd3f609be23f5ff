//! When a request costs too much wherever it goes: the one case in which the filter answers itself.
//!
//! It only says so, and for how long. What the answer looks like is [`crate::refusal`]'s part.

use super::{PromptKnowledge, Scales, Weighed};
use crate::tokens::blocks::Chain;

/// Longest time after which a client is told to come back, in seconds. A cost is a guess at what is ahead, and an hour
/// of it is no better a guess than ten minutes.
const MAX_RETRY_AFTER_S: f64 = 600.0;

/// How many whole seconds a client should wait, where even the least cost is over `max_cost_s`: as many as it is over,
/// rounded up.
///
/// Nobody is refused while any replica has nothing to do, since waiting would not make it cheaper; nor where the cost
/// rests on a guess, since then it says nothing.
pub(super) fn retry_after(
    scales: &Scales<'_>,
    candidates: &[Weighed<'_>],
    prompt: &PromptKnowledge<'_>,
    chains: &[Chain],
) -> Option<u64> {
    let max_cost_s = scales.config.max_cost_s?;
    let is_known = !matches!(prompt, PromptKnowledge::Unknown { .. });
    if !is_known || chains.iter().any(Chain::is_open) {
        return None;
    }
    if candidates.iter().any(|candidate| scales.requests(candidate) == 0.0) {
        return None;
    }
    let least = candidates.iter().map(|candidate| scales.cost(candidate).seconds());
    let over = least.fold(f64::INFINITY, f64::min) - max_cost_s;
    // A cost that is no number refuses nobody.
    (over > 0.0).then(|| over.ceil().clamp(1.0, MAX_RETRY_AFTER_S) as u64)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Fleet, fleet, prompt};
    use super::super::{Decision, Reason};
    use super::*;
    use std::time::Duration;

    /// Some replicas, each with so much to do.
    fn busy(unfinished: &[u64], max_cost_s: f64) -> Fleet {
        let mut fleet = fleet(unfinished.len());
        fleet.config.max_cost_s = Some(max_cost_s);
        for (slot, tokens) in (0..).zip(unfinished) {
            let id = fleet.table.at(slot).unwrap().id;
            fleet.charges.start(id, *tokens, fleet.now, Duration::from_secs(5));
        }
        fleet
    }

    #[track_caller]
    fn check(decision: &Decision, retry_after_s: Option<u64>) {
        assert_eq!(decision.retry_after_s, retry_after_s, "{}", decision.explain());
        assert_eq!(decision.reason == Reason::Overloaded, retry_after_s.is_some());
        assert_eq!(decision.ranked.is_empty(), retry_after_s.is_some());
    }

    #[test]
    fn a_request_is_refused_only_when_the_best_replica_costs_too_much() {
        // 8,000 tokens a second: ten and twenty seconds of them.
        check(&busy(&[80_000, 160_000], 2.5).ask(&prompt(1, 100)), Some(8));
        check(&busy(&[80_000, 160_000], 9.99).ask(&prompt(1, 100)), Some(1));
        check(&busy(&[80_000, 160_000], 11.0).ask(&prompt(1, 100)), None);
        check(&busy(&[80_000, 800], 2.5).ask(&prompt(1, 100)), None);
        check(&busy(&[80_000_000, 80_000_000], 1.0).ask(&prompt(1, 100)), Some(600));
        let mut fleet = busy(&[80_000, 80_000], 1.0);
        fleet.config.max_cost_s = None;
        check(&fleet.ask(&prompt(1, 100)), None);
    }

    #[test]
    fn a_prompt_that_costs_too_much_on_an_idle_replica_is_computed() {
        let mut fleet = busy(&[8000], 0.5);
        check(&fleet.ask(&prompt(1, 50_000)), Some(17));
        fleet.charges = Default::default();
        check(&fleet.ask(&prompt(1, 50_000)), None);
    }

    #[test]
    fn a_request_whose_cost_is_a_guess_is_never_refused() {
        let fleet = busy(&[80_000, 80_000], 1.0);
        let unknown =
            PromptKnowledge::Unknown { reason: Reason::TokenizerLoading, estimated_tokens: 9 };
        check(&fleet.decide(unknown, 0), None);
        check(&fleet.ask_open(&prompt(1, 992), 500), None);
    }
}
