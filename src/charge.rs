//! What this Envoy has in flight on each replica, and what it sent there lately.
//!
//! Each VM owns one [`Charges`] and publishes it whole; a decision sums those of all VMs. A
//! request is charged when it is routed, its uncached tokens are released when its answer
//! begins, and the rest when it ends. Engines take prompts in the order in which they come, so that the first of those that
//! have not begun to answer is the one that is computed: by its time and the replica's speed a decision knows how much of it
//! is left. Nothing here times out: a VM that dies takes its charges
//! along, because readers ignore a VM whose heartbeat has stopped.

use crate::replicas::{ByReplica, Moment, ReplicaId, of_replica};
use hashbrown::HashMap;
use std::collections::VecDeque;
use std::time::Duration;

/// One replica's share.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Charge {
    /// Requests in flight.
    pub requests: u32,
    /// Work, in tokens, of those whose answer has not begun: what is not cached, attention counted in.
    pub unfinished_tokens: u64,
    /// Such work sent lately, decayed to `recent_at`.
    pub recent_tokens: f64,
    /// When `recent_tokens` was true.
    pub recent_at: Moment,
    /// Of those whose answer has not begun, the one that was sent first.
    pub head: Head,
    /// When an answer began last.
    pub began_at: Moment,
    /// Requests whose answer is on its way.
    pub answering: u32,
    /// When those answers began, in milliseconds, added up.
    pub answering_since_ms: u64,
}

/// The request that a replica computes now, as engines take prompts in the order in which they come.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Head {
    /// When it was sent.
    pub sent: Moment,
    /// Its work; 0 where none is on its way.
    pub tokens: u64,
}

impl Head {
    /// The one that was sent first.
    fn first(self, other: Self) -> Self {
        if other.tokens == 0 || (self.tokens > 0 && self.sent <= other.sent) { self } else { other }
    }
}

impl Charge {
    /// How long the first of those whose answer has not begun is being computed, and its uncached tokens.
    #[inline]
    pub fn computing(&self, now: Moment) -> (Duration, u64) {
        (now.since(self.head.sent.max(self.began_at)), self.head.tokens)
    }

    /// For how long the answers have been on their way, in seconds, added up.
    pub fn answering_s(&self, now: Moment) -> f64 {
        // Exact up to ten thousand answers and thirty years; what saturates takes a wasm VM as long as a hash.
        let all = f64::from(self.answering) * milliseconds(now) as f64;
        (all - self.answering_since_ms as f64).max(0.0) / 1000.0
    }

    /// For how long its requests have been there, in seconds, added up: answers since they began, and the others, which were sent
    /// between the first of them and now, half as long as that one.
    pub fn lasted_s(&self, now: Moment) -> f64 {
        let unbegun = f64::from(self.requests.saturating_sub(self.answering));
        let first = if self.head.tokens > 0 { now.since(self.head.sent) } else { Duration::ZERO };
        self.answering_s(now) + unbegun * first.as_secs_f64() / 2.0
    }

    /// The recent tokens, decayed to `now`.
    #[inline]
    pub fn recent(&self, now: Moment, half_life: Duration) -> f64 {
        // Those of all VMs together are of this very moment.
        if now <= self.recent_at {
            return self.recent_tokens;
        }
        let halvings = now.since(self.recent_at).as_secs_f64() / half_life.as_secs_f64();
        self.recent_tokens * (-halvings).exp2()
    }
}

fn milliseconds(moment: Moment) -> u64 {
    moment.0 / 1_000_000
}

/// Below this many recent tokens a charge with nothing in flight is dropped: it no longer moves
/// a cost by a microsecond, and keeping it would make the map grow with every replica ever used.
const FORGOTTEN_TOKENS: f64 = 1.0;

/// More tokens than any replica can be sent within a half-life.
const MOST_RECENT_TOKENS: f64 = 1e12;

/// Charges by replica.
#[derive(Debug, Clone, Default)]
pub struct Charges {
    by_replica: ByReplica<Charge>,
    /// Own requests whose answer has not begun, in the order in which they were sent. Nobody else needs them.
    queues: HashMap<ReplicaId, VecDeque<Head>>,
}

impl PartialEq for Charges {
    fn eq(&self, other: &Self) -> bool {
        self.by_replica == other.by_replica
    }
}

impl Charges {
    /// Charges a request that is being sent.
    pub fn start(&mut self, replica: ReplicaId, uncached: u64, now: Moment, half_life: Duration) {
        let charge = self.by_replica.entry(replica).or_default();
        charge.requests = charge.requests.saturating_add(1);
        charge.unfinished_tokens = charge.unfinished_tokens.saturating_add(uncached);
        charge.recent_tokens = charge.recent(now, half_life) + uncached as f64;
        charge.recent_at = now;
        if uncached > 0 {
            let queue = self.queues.entry(replica).or_default();
            queue.push_back(Head { sent: now, tokens: uncached });
            charge.head = queue.front().copied().unwrap_or_default();
        }
    }

    /// Releases the tokens of a request whose answer has begun.
    pub fn answer_began(&mut self, replica: ReplicaId, uncached: u64, now: Moment) {
        let Some(charge) = self.by_replica.get_mut(&replica) else { return };
        charge.unfinished_tokens = charge.unfinished_tokens.saturating_sub(uncached);
        charge.answering = charge.answering.saturating_add(1);
        charge.answering_since_ms = charge.answering_since_ms.saturating_add(milliseconds(now));
        let Some(queue) = self.queues.get_mut(&replica) else { return };
        let at = queue.iter().position(|head| head.tokens == uncached);
        if let Some(at) = at {
            queue.remove(at);
        }
        // One that is taken from the middle was given up: what is computed goes on.
        if at == Some(0) {
            charge.began_at = charge.began_at.max(now);
        }
        charge.head = queue.front().copied().unwrap_or_default();
        if queue.is_empty() {
            self.queues.remove(&replica);
        }
    }

    /// Releases a request that has ended, and whose answer was said to have begun at this moment.
    pub fn end(&mut self, replica: ReplicaId, began: Moment) {
        if let Some(charge) = self.by_replica.get_mut(&replica) {
            charge.requests = charge.requests.saturating_sub(1);
            charge.answering = charge.answering.saturating_sub(1);
            let since = charge.answering_since_ms.saturating_sub(milliseconds(began));
            // What was told wrong outlasts none of the answers that it was told of.
            charge.answering_since_ms = if charge.answering == 0 { 0 } else { since };
        }
    }

    /// Drops what no longer matters.
    pub fn forget_idle(&mut self, now: Moment, half_life: Duration) {
        self.by_replica.retain(|_, charge| {
            charge.requests > 0 || charge.recent(now, half_life) >= FORGOTTEN_TOKENS
        });
        let by_replica = &self.by_replica;
        self.queues.retain(|replica, _| by_replica.contains_key(replica));
    }

    /// Adds another VM's charges, with recent tokens decayed to `now`.
    pub fn add(&mut self, other: &Self, now: Moment, half_life: Duration) {
        for (replica, charge) in &other.by_replica {
            let sum = self.by_replica.entry(*replica).or_default();
            sum.requests = sum.requests.saturating_add(charge.requests);
            sum.unfinished_tokens = sum.unfinished_tokens.saturating_add(charge.unfinished_tokens);
            sum.recent_tokens = sum.recent(now, half_life) + charge.recent(now, half_life);
            sum.recent_at = now;
            sum.head = sum.head.first(charge.head);
            sum.began_at = sum.began_at.max(charge.began_at);
            sum.answering = sum.answering.saturating_add(charge.answering);
            sum.answering_since_ms =
                sum.answering_since_ms.saturating_add(charge.answering_since_ms);
        }
    }

    /// Puts a charge as read from another VM's value. Numbers that no VM writes are cut: below zero
    /// they would draw all requests to one replica, and infinite ones make costs that do not compare.
    pub fn insert(&mut self, replica: ReplicaId, charge: Charge) {
        let recent_tokens = charge.recent_tokens.clamp(0.0, MOST_RECENT_TOKENS);
        self.by_replica.insert(replica, Charge { recent_tokens, ..charge });
    }

    /// One replica's charge; nothing when it has none.
    pub fn of(&self, replica: ReplicaId) -> Charge {
        self.find(replica).copied().unwrap_or_default()
    }

    /// One replica's charge, where it has one.
    #[inline]
    pub fn find(&self, replica: ReplicaId) -> Option<&Charge> {
        of_replica(&self.by_replica, replica)
    }

    /// All charges.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (ReplicaId, Charge)> {
        self.by_replica.iter().map(|(replica, charge)| (*replica, *charge))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF_LIFE: Duration = Duration::from_secs(2);
    const R: ReplicaId = ReplicaId { slot: 1, incarnation: 1 };

    fn at(seconds: u64) -> Moment {
        Moment::default().plus(Duration::from_secs(seconds))
    }

    #[test]
    fn a_request_is_charged_released_at_its_answer_and_ended() {
        let mut charges = Charges::default();
        charges.start(R, 100, at(0), HALF_LIFE);
        charges.start(R, 50, at(0), HALF_LIFE);
        assert_eq!((charges.of(R).requests, charges.of(R).unfinished_tokens), (2, 150));
        charges.answer_began(R, 100, at(0));
        charges.end(R, at(0));
        assert_eq!((charges.of(R).requests, charges.of(R).unfinished_tokens), (1, 50));
    }

    #[test]
    fn the_first_that_has_not_begun_to_answer_is_what_is_computed() {
        let mut charges = Charges::default();
        let computing = |charges: &Charges, now| {
            let (since, tokens) = charges.of(R).computing(at(now));
            (since.as_secs(), tokens)
        };
        charges.start(R, 100, at(1), HALF_LIFE);
        charges.start(R, 50, at(2), HALF_LIFE);
        charges.start(R, 70, at(3), HALF_LIFE);
        assert_eq!(computing(&charges, 4), (3, 100));
        charges.answer_began(R, 100, at(5));
        assert_eq!(computing(&charges, 7), (2, 50), "since the one before it was done");
        charges.answer_began(R, 70, at(8));
        assert_eq!(computing(&charges, 9), (4, 50), "one that was given up changes nothing");
        charges.answer_began(R, 50, at(10));
        assert_eq!(computing(&charges, 11).1, 0);
        assert_eq!(charges.of(R).answering, 3);
        assert_eq!(charges.of(R).answering_s(at(11)), 6.0 + 3.0 + 1.0);
        charges.end(R, at(5));
        assert_eq!((charges.of(R).answering, charges.of(R).answering_s(at(12))), (2, 4.0 + 2.0));
    }

    #[test]
    fn of_all_vms_the_first_request_is_computed_since_any_answer_began() {
        let (mut a, mut b, mut sum) = (Charges::default(), Charges::default(), Charges::default());
        a.start(R, 100, at(1), HALF_LIFE);
        b.start(R, 50, at(2), HALF_LIFE);
        b.start(R, 70, at(3), HALF_LIFE);
        a.answer_began(R, 100, at(5));
        for vm in [&a, &b] {
            sum.add(vm, at(6), HALF_LIFE);
        }
        assert_eq!(sum.of(R).computing(at(6)), (Duration::from_secs(1), 50));
        assert_eq!((sum.of(R).answering, sum.of(R).answering_s(at(6))), (1, 1.0));
    }

    #[test]
    fn requests_without_an_answer_have_lasted_half_as_long_as_the_first_of_them() {
        let mut charges = Charges::default();
        assert_eq!(charges.of(R).lasted_s(at(1)), 0.0);
        for sent in [1, 3, 4] {
            charges.start(R, 100 * sent, at(sent), HALF_LIFE);
        }
        assert_eq!(charges.of(R).lasted_s(at(5)), 3.0 * 4.0 / 2.0);
        charges.answer_began(R, 100, at(6));
        assert_eq!(charges.of(R).lasted_s(at(7)), 1.0 + 2.0 * 4.0 / 2.0);
        charges.answer_began(R, 300, at(7));
        charges.answer_began(R, 400, at(8));
        assert_eq!(charges.of(R).lasted_s(at(9)), 3.0 + 2.0 + 1.0);
        charges.end(R, at(6));
        assert_eq!(charges.of(R).lasted_s(at(9)), 2.0 + 1.0);
        // All of it is cached there: it has no work, and nobody knows when it was sent.
        charges.start(R, 0, at(9), HALF_LIFE);
        assert_eq!(charges.of(R).lasted_s(at(10)), 3.0 + 2.0);
    }

    #[test]
    fn releasing_twice_never_goes_below_zero() {
        let mut charges = Charges::default();
        charges.start(R, 10, at(0), HALF_LIFE);
        charges.answer_began(R, 10, at(0));
        charges.answer_began(R, 10, at(0));
        charges.end(R, at(0));
        charges.end(R, at(0));
        assert_eq!((charges.of(R).requests, charges.of(R).unfinished_tokens), (0, 0));
    }

    #[test]
    fn an_answer_of_which_the_wrong_beginning_is_told_is_over_with_its_end() {
        for told in [3, 8] {
            let mut charges = Charges::default();
            for began in [5, 9] {
                charges.start(R, 100, at(1), HALF_LIFE);
                charges.answer_began(R, 100, at(began));
                assert_eq!(charges.of(R).answering_s(at(10)), 10.0 - began as f64);
                charges.end(R, at(told));
                assert_eq!(charges.of(R).answering_s(at(10)), 0.0);
            }
        }
    }

    #[test]
    fn recent_tokens_halve_with_time() {
        let mut charges = Charges::default();
        charges.start(R, 100, at(0), HALF_LIFE);
        assert!((charges.of(R).recent(at(4), HALF_LIFE) - 25.0).abs() < 1e-9);
    }

    #[test]
    fn vms_are_summed_at_one_moment() {
        let mut a = Charges::default();
        let mut b = Charges::default();
        a.start(R, 100, at(0), HALF_LIFE);
        b.start(R, 100, at(2), HALF_LIFE);
        let mut sum = Charges::default();
        sum.add(&a, at(2), HALF_LIFE);
        sum.add(&b, at(2), HALF_LIFE);
        assert_eq!(sum.of(R).requests, 2);
        assert!((sum.of(R).recent_tokens - 150.0).abs() < 1e-9);
    }

    #[test]
    fn recent_tokens_that_nobody_writes_are_cut() {
        let mut charges = Charges::default();
        for (written, read) in [(-1e300, 0.0), (f64::MAX, 1e12), (7.0, 7.0)] {
            charges.insert(R, Charge { recent_tokens: written, ..Charge::default() });
            assert_eq!(charges.of(R).recent_tokens.to_bits(), f64::to_bits(read), "{written}");
        }
    }

    #[test]
    fn idle_charges_are_forgotten_and_those_in_flight_are_not() {
        let other = ReplicaId { slot: 2, incarnation: 1 };
        let mut charges = Charges::default();
        charges.start(R, 100, at(0), HALF_LIFE);
        charges.start(other, 100, at(0), HALF_LIFE);
        charges.end(other, at(0));
        charges.forget_idle(at(60), HALF_LIFE);
        assert_eq!(charges.iter().map(|(replica, _)| replica).collect::<Vec<_>>(), [R]);
    }

    #[test]
    fn any_order_of_ends_leaves_nothing_in_flight_and_is_never_below_nothing() {
        let half_life = Duration::from_secs(5);
        let mut charges = Charges::default();
        let mut under_way: Vec<(ReplicaId, u64, Option<Moment>)> = Vec::new();
        let mut state = 1_u64;
        let mut now = Moment::default();
        for _ in 0..200_000 {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            let chance = (state >> 33) as usize;
            now = now.plus(Duration::from_millis(1));
            // Thousands of replicas, one after the other.
            let replica =
                ReplicaId { slot: (chance % 8) as u32, incarnation: (now.0 >> 33) as u32 };
            match chance >> 8 & 3 {
                0 | 1 if under_way.len() < 100 => {
                    let uncached = (chance >> 10 & 1023) as u64;
                    charges.start(replica, uncached, now, half_life);
                    under_way.push((replica, uncached, None));
                }
                2 if !under_way.is_empty() => {
                    let place = chance % under_way.len();
                    let (replica, uncached, began) = &mut under_way[place];
                    if began.is_none() {
                        charges.answer_began(*replica, *uncached, now);
                        *began = Some(now);
                    }
                }
                _ if !under_way.is_empty() => {
                    let (replica, uncached, began) =
                        under_way.swap_remove(chance % under_way.len());
                    if began.is_none() {
                        charges.answer_began(replica, uncached, now);
                    }
                    charges.end(replica, began.unwrap_or(now));
                    charges.forget_idle(now, half_life);
                }
                _ => {}
            }
            let of: Vec<_> = under_way.iter().filter(|(other, ..)| *other == replica).collect();
            let waiting: u64 =
                of.iter().filter(|(.., began)| began.is_none()).map(|(_, n, _)| n).sum();
            let charge = charges.of(replica);
            let lasted = of.iter().filter_map(|(.., began)| began.map(|at| now.since(at)));
            let lasted: Duration = lasted.sum();
            assert_eq!((charge.answering_s(now) * 1000.0).round() as u128, lasted.as_millis());
            assert_eq!((charge.requests as usize, charge.unfinished_tokens), (of.len(), waiting));
        }
        for (replica, uncached, began) in under_way {
            if began.is_none() {
                charges.answer_began(replica, uncached, now);
            }
            charges.end(replica, began.unwrap_or(now));
        }
        charges.forget_idle(now.plus(Duration::from_secs(3600)), half_life);
        assert_eq!(charges, Charges::default(), "one of each replica that ever was");
    }
}
