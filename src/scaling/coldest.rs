//! Whose drain would cost least: the replica whose cache spares the fewest tokens.
//!
//! It knows what each replica's cache has spared lately, nothing of what it will. What a drained replica holds beside
//! others is computed once more by them, so of equal ones the one that holds less goes first.

use crate::replicas::{Moment, ReplicaId};
use hashbrown::HashMap;
use std::time::Duration;

/// Hits count half after so long. Halved, a replica is cold for a pause between two conversations; doubled, it is warm for
/// what has moved elsewhere.
const HALF_LIFE: Duration = Duration::from_secs(60);

/// A replica that might be drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drainable {
    /// Who.
    pub id: ReplicaId,
    /// All tokens that its cache was predicted to spare, a count that only grows.
    pub cached_tokens: u64,
    /// Blocks that it is believed to hold.
    pub held_blocks: u64,
    /// Requests in flight there.
    pub in_flight: u32,
}

#[derive(Debug, Clone, Copy)]
struct Warmth {
    cached_tokens: u64,
    at: Moment,
    tokens_per_s: f64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Coldest {
    warmth: HashMap<ReplicaId, Warmth>,
}

impl Coldest {
    /// The replicas as their drain costs more and more.
    pub fn order(&mut self, replicas: &[Drainable], now: Moment) -> Vec<ReplicaId> {
        self.warmth.retain(|id, _| replicas.iter().any(|replica| replica.id == *id));
        let mut order: Vec<(u64, u64, u32, ReplicaId)> = replicas
            .iter()
            .map(|replica| {
                let spared = self.warm(replica, now);
                (spared, replica.held_blocks, replica.in_flight, replica.id)
            })
            .collect();
        order.sort_unstable();
        order.into_iter().map(|(_, _, _, id)| id).collect()
    }

    /// Tokens that a replica's cache spares in a second, as of late.
    fn warm(&mut self, replica: &Drainable, now: Moment) -> u64 {
        let new = Warmth { cached_tokens: replica.cached_tokens, at: now, tokens_per_s: 0.0 };
        let warmth = self.warmth.entry(replica.id).or_insert(new);
        let elapsed = now.since(warmth.at).as_secs_f64();
        if elapsed > 0.0 {
            let spared = replica.cached_tokens.saturating_sub(warmth.cached_tokens) as f64;
            let faded = (-elapsed / HALF_LIFE.as_secs_f64()).exp2();
            let tokens_per_s = warmth.tokens_per_s * faded + spared / elapsed * (1.0 - faded);
            *warmth = Warmth { tokens_per_s, ..new };
        }
        warmth.tokens_per_s as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica(slot: u32, cached_tokens: u64, held_blocks: u64, in_flight: u32) -> Drainable {
        Drainable { id: ReplicaId { slot, incarnation: 1 }, cached_tokens, held_blocks, in_flight }
    }

    /// Replicas by what they have spared after a minute, what they hold and what they have in flight: this is the order.
    #[track_caller]
    fn check(replicas: &[(u64, u64, u32)], expected: &[u32]) {
        let mut coldest = Coldest::default();
        let all = |minutes: u64| -> Vec<Drainable> {
            let each = replicas.iter().enumerate();
            each.map(|(slot, (spared, held, flight))| {
                replica(slot as u32, spared * minutes, *held, *flight)
            })
            .collect()
        };
        coldest.order(&all(0), Moment::default());
        let order = coldest.order(&all(1), Moment::default().plus(Duration::from_secs(60)));
        assert_eq!(order.iter().map(|id| id.slot).collect::<Vec<u32>>(), expected);
    }

    #[test]
    fn the_one_that_spares_least_goes_first_then_the_one_that_holds_less() {
        check(&[(90_000, 1, 0), (30_000, 9, 9), (60_000, 5, 5)], &[1, 2, 0]);
        check(&[(0, 500, 0), (0, 100, 7), (0, 300, 0)], &[1, 2, 0]);
        check(&[(0, 100, 7), (0, 100, 2)], &[1, 0]);
        check(&[(0, 100, 0), (0, 100, 0)], &[0, 1]);
        check(&[], &[]);
    }

    #[test]
    fn what_was_spared_long_ago_fades_and_who_is_gone_is_forgotten() {
        let mut coldest = Coldest::default();
        let at = |seconds| Moment::default().plus(Duration::from_secs(seconds));
        let order = |coldest: &mut Coldest, spared: [u64; 2], seconds| {
            let all = [replica(0, spared[0], 1, 0), replica(1, spared[1], 2, 0)];
            coldest.order(&all, at(seconds)).first().map(|id| id.slot)
        };
        order(&mut coldest, [0, 0], 0);
        assert_eq!(order(&mut coldest, [600_000, 1_000], 60), Some(1));
        assert_eq!(order(&mut coldest, [600_000, 61_000], 660), Some(0));
        assert_eq!(coldest.order(&[replica(1, 61_000, 2, 0)], at(661)).len(), 1);
        assert_eq!(coldest.warmth.len(), 1);
    }
}
