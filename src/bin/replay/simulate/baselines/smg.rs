//! SMG's two: the most of a prompt by KV events with a switch to the shortest queue, and the least work.
//!
//! Source: lightseekorg/smg `model_gateway/src/policies/cache_aware.rs` and `least_load.rs` (September 2026), thresholds
//! by its documented flags.
//!
//! `cache_aware` with events, its best form: where requests in flight differ by more than 64 and the most is over 1.5
//! times the least, the request goes where least is in flight. Else to the replica with the most of the prompt in its
//! cache, of equals the one with less in flight, then the one with fewer blocks; where nobody has any, to where least is
//! in flight. It learns of a block when the step ends that computed it. Without events it is vllm-project/router's rule.
//!
//! `least_load` knows no caches: the lowest `work / rate + 0.15 k / (1 - k)`, where `work` is the prompt tokens sent
//! there since the last report, `rate` 2,000 tokens a second, and `k` the reported KV usage, at most 0.999. A replica
//! that has not reported while others have counts its requests in flight at 1,024 tokens each; where nobody has, least
//! in flight wins. SMG adds the tokens an engine says are waiting, and divides by the rate of generation that it says;
//! vLLM says neither. SMG polls every 10 s, here as often as everybody.

use super::super::policy::{Ask, Change, ReplicaReport, Router, Why};
use super::choice;
use super::holders::Holders;
use super::vllm_router::is_imbalanced;
use std::time::Duration;

/// Tokens a second, where an engine does not say.
const RATE: f64 = 2000.0;

/// Seconds of pressure at half-full KV cache.
const PRESSURE_S: f64 = 0.15;

/// Tokens of a prompt whose length is not known.
const MEAN_TOKENS: f64 = 1024.0;

/// The replica with the most of the prompt.
pub struct SmgCacheAware {
    holders: Holders,
    counts: Vec<usize>,
    predicted: u32,
}

impl SmgCacheAware {
    /// In front of so many replicas, all empty.
    pub fn new(replicas: usize) -> Self {
        Self { holders: Holders::default(), counts: vec![0; replicas], predicted: 0 }
    }
}

impl Router for SmgCacheAware {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let depths = self.holders.depths(ask.blocks, self.counts.len());
        let depth = |replica: usize| choice::of(&depths, replica);
        let load = |replica| choice::in_flight(ask, replica);
        let chosen = if is_imbalanced(ask) {
            choice::first_cheapest(choice::serving(ask), load)
        } else {
            let missing = |replica| ask.blocks.len() - depth(replica);
            let cost = |replica| (missing(replica), load(replica), self.counts.get(replica));
            choice::first_cheapest(choice::serving(ask), cost)
        }?;
        self.predicted = depth(chosen) as u32 * ask.block_tokens;
        Ok(chosen)
    }

    fn why(&self) -> Why {
        Why { predicted_tokens: Some(self.predicted), ..Why::default() }
    }

    fn cached(&mut self, replica: usize, changes: &[Change], _now: Duration) {
        let Some(count) = self.counts.get_mut(replica) else { return };
        for change in changes {
            self.holders.apply(replica, *change);
            *count = match change {
                Change::Stored(_) => *count + 1,
                Change::Evicted(_) => count.saturating_sub(1),
                Change::Cleared => 0,
            };
        }
    }
}

/// The replica with the least work.
pub struct SmgLeastLoad {
    usage: Vec<Option<f64>>,
    /// Prompt tokens sent since the last report.
    sent: Vec<f64>,
}

impl SmgLeastLoad {
    /// In front of so many replicas.
    pub fn new(replicas: usize) -> Self {
        Self { usage: vec![None; replicas], sent: vec![0.0; replicas] }
    }
}

impl Router for SmgLeastLoad {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let anybody_reported = self.usage.iter().any(Option::is_some);
        let score = |replica: usize| {
            let load = choice::in_flight(ask, replica) as f64;
            let sent = self.sent.get(replica).copied().unwrap_or(0.0);
            match self.usage.get(replica).copied().flatten() {
                Some(usage) => sent / RATE + PRESSURE_S * usage / (1.0 - usage),
                None if anybody_reported => load * MEAN_TOKENS / RATE,
                None => load,
            }
        };
        let chosen = choice::first_cheapest(choice::serving(ask), score)?;
        if let Some(sent) = self.sent.get_mut(chosen) {
            *sent += f64::from(ask.prompt_tokens);
        }
        Ok(chosen)
    }

    fn report(&mut self, replica: usize, report: &ReplicaReport, _now: Duration) {
        if let (Some(usage), Some(sent)) = (self.usage.get_mut(replica), self.sent.get_mut(replica))
        {
            *usage = Some(report.kv_usage.clamp(0.0, 0.999));
            *sent = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk::{self, Desk};
    use super::*;

    fn stored(router: &mut SmgCacheAware, replica: usize, blocks: &[u64]) {
        let changes: Vec<Change> = blocks.iter().copied().map(Change::Stored).collect();
        router.cached(replica, &changes, Duration::ZERO);
    }

    #[test]
    fn the_most_cached_wins_then_less_in_flight_then_fewer_blocks() {
        let (mut desk, mut router) = (Desk::new(3), SmgCacheAware::new(3));
        stored(&mut router, 0, &[1, 2]);
        stored(&mut router, 1, &[1, 2, 3]);
        desk.in_flight = vec![0, 60, 0];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3, 4]), 1);
        stored(&mut router, 2, &[1, 2, 3, 77, 78]);
        assert_eq!(desk.ask(&mut router, &[1, 2, 3, 4]), 2);
        desk.in_flight = vec![9, 60, 60];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3, 4]), 1);
        assert_eq!(router.why().predicted_tokens, Some(48));
        assert_eq!(desk.ask(&mut router, &[99]), 0, "a cold prompt goes where least is in flight");
    }

    #[test]
    fn what_was_evicted_or_is_far_behind_in_its_queue_does_not_win() {
        let (mut desk, mut router) = (Desk::new(2), SmgCacheAware::new(2));
        stored(&mut router, 1, &[1, 2, 3]);
        desk.in_flight = vec![0, 65];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3]), 0, "65 are more than 64");
        desk.in_flight = vec![0, 64];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3]), 1);
        router.cached(1, &[Change::Evicted(3), Change::Evicted(2)], Duration::ZERO);
        assert_eq!(desk.ask(&mut router, &[1, 2, 3]), 1);
        router.cached(1, &[Change::Cleared], Duration::ZERO);
        assert_eq!(desk.ask(&mut router, &[1, 2, 3]), 0);
    }

    #[test]
    fn nothing_is_learned_from_what_was_sent() {
        let (mut desk, mut router) = (Desk::new(2), SmgCacheAware::new(2));
        assert_eq!(desk.ask(&mut router, &[1, 2, 3]), 0);
        desk.in_flight = vec![1, 0];
        assert_eq!(desk.ask(&mut router, &[1, 2, 3]), 1);
    }

    #[test]
    fn work_since_the_report_and_pressure_are_seconds() {
        let (mut desk, mut router) = (Desk::new(2), SmgLeastLoad::new(2));
        let report = |router: &mut SmgLeastLoad, replica, kv_usage| {
            let report = ReplicaReport { kv_usage, ..desk::report(1.0) };
            router.report(replica, &report, Duration::ZERO);
        };
        // 0.15 * 0.5 / 0.5 = 0.15 s, which is 300 tokens: the first gets prompts until it has more.
        report(&mut router, 0, 0.0);
        report(&mut router, 1, 0.5);
        let blocks = [1, 2, 3, 4, 5, 6, 7];
        let chosen: Vec<usize> = (0..5).map(|_| desk.ask(&mut router, &blocks)).collect();
        assert_eq!(chosen, [0, 0, 0, 1, 0], "113 tokens each");
        report(&mut router, 0, 0.0);
        assert_eq!(desk.ask(&mut router, &blocks), 0, "the report has seen what was sent");
    }

    #[test]
    fn who_has_not_reported_is_judged_by_what_is_in_flight() {
        let (mut desk, mut router) = (Desk::new(3), SmgLeastLoad::new(3));
        desk.in_flight = vec![3, 2, 4];
        assert_eq!(desk.ask(&mut router, &[]), 1);
        let full = ReplicaReport { kv_usage: 0.8, ..desk::report(1.0) };
        router.report(2, &full, Duration::ZERO);
        // 0.15 * 0.8 / 0.2 = 0.6 s, against 1,024 tokens at 2,000 a second for each in flight.
        assert_eq!(desk.ask(&mut router, &[]), 2);
        desk.in_flight = vec![3, 1, 4];
        assert_eq!(desk.ask(&mut router, &[]), 1);
    }
}
