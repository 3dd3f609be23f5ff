//! Whom a policy puts first, and in what order the others come behind: one order each, over the same candidates.
//!
//! Health, models, suspensions and priorities are over by then: whoever may not get the request is no candidate. A
//! policy charges nothing and knows no earlier request but by what it changed.

use super::{MAX_RANKED, Scales, Weighed, guards};
use crate::tokens::blocks::Chain;
use std::cmp::{Ordering, Reverse};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The head of a prompt that decides among equals. Shorter, and prompts that differ only after a
/// long system prompt would all go to one replica; longer, and the turns of one conversation
/// would not meet on theirs while nothing is known of them.
const RENDEZVOUS_TOKENS: usize = 2048;

/// How a replica is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// The least cost in seconds; near ties by the prompt's head.
    #[default]
    Warmpath,
    /// The fewest requests: own in flight, and what replicas report of others'. Ties by what is still to be computed
    /// there, then by chance.
    LeastLoaded,
    /// The most tokens of the prompt in cache, whatever the load. Ties, and prompts that nobody holds, by the prompt's
    /// head, so that equal prompts meet.
    PrefixOnly,
    /// One after another, each worker by its own count.
    RoundRobin,
}

impl Policy {
    /// All policies, in the order of their declaration.
    pub const ALL: [Self; 4] =
        [Self::Warmpath, Self::LeastLoaded, Self::PrefixOnly, Self::RoundRobin];

    /// Its name in the configuration and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Warmpath => "warmpath",
            Self::LeastLoaded => "least_loaded",
            Self::PrefixOnly => "prefix_only",
            Self::RoundRobin => "round_robin",
        }
    }

    /// The places of its first [`MAX_RANKED`] candidates, best first. They come in the table's order.
    pub(super) fn rank(
        self,
        scales: &Scales<'_>,
        candidates: &[Weighed<'_>],
        chains: &[Chain],
        number: u64,
    ) -> Vec<usize> {
        match self {
            Self::Warmpath => {
                by_cost(candidates, |best| break_tie(scales, candidates, best, chains, number))
            }
            Self::LeastLoaded => first(candidates, |candidate| {
                let requests = Ordered(scales.requests(candidate));
                (requests, Ordered(candidate.seen.unfinished_tokens()), drawn(candidate, number))
            }),
            Self::PrefixOnly => first(candidates, |candidate| {
                let drawn = Reverse(rendezvous(candidate, chains, number));
                (Reverse(candidate.seen.had.tokens), drawn)
            }),
            Self::RoundRobin => {
                let turn = number.checked_rem(candidates.len() as u64).unwrap_or(0);
                let turn = usize::try_from(turn).unwrap_or(0);
                (turn..candidates.len()).chain(0..turn).take(MAX_RANKED).collect()
            }
        }
    }
}

/// The places of the few candidates with the least keys. Most are over these at the first look, so nothing is sorted.
fn first<K: Ord>(candidates: &[Weighed<'_>], key: impl Fn(&Weighed<'_>) -> K) -> Vec<usize> {
    let mut least: Vec<(K, usize)> = Vec::with_capacity(MAX_RANKED + 1);
    for (at, candidate) in candidates.iter().enumerate() {
        let key = key(candidate);
        // Equal ones stay in the table's order.
        let behind = least.iter().rev().take_while(|(other, _)| key < *other).count();
        if behind > 0 || least.len() < MAX_RANKED {
            least.insert(least.len() - behind, (key, at));
            least.truncate(MAX_RANKED);
        }
    }
    least.into_iter().map(|(_, at)| at).collect()
}

/// Numbers that are compared as a whole: none of them is a NaN, and were one, it would come last.
#[derive(PartialEq)]
struct Ordered(f64);

impl Eq for Ordered {}

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The places of the few candidates with the least costs.
pub(super) fn cheapest(candidates: &[Weighed<'_>]) -> Vec<usize> {
    first(candidates, |candidate| Ordered(candidate.total))
}

/// The candidates with the least costs, behind the winner: whose place is told from the least cost.
pub(super) fn by_cost(
    candidates: &[Weighed<'_>],
    winner: impl FnOnce(f64) -> Option<usize>,
) -> Vec<usize> {
    let mut ranked = cheapest(candidates);
    let best = ranked.first().and_then(|at| candidates.get(*at)).map(|best| best.total);
    if let Some(winner) = best.and_then(winner) {
        ranked.retain(|at| *at != winner);
        ranked.insert(0, winner);
        ranked.truncate(MAX_RANKED);
    }
    ranked
}

/// The place of the winner.
///
/// Among those within epsilon of the least cost, the ones that must compute and fetch least stay (waiting
/// for a prefix that is being computed beats computing it a second time at the same price), and
/// of these the one with the highest hash of (replica, head of the prompt) wins, so that every VM
/// and every gateway picks the same one. A replica that already has far more than its share of
/// requests may not win. One that has most of the prompt wins of those that may: on a fast engine
/// a whole conversation is computed within epsilon, but not for nothing. Less than that is a head
/// that many share, and would hold all of them on one replica.
fn break_tie(
    scales: &Scales<'_>,
    candidates: &[Weighed<'_>],
    best: f64,
    chains: &[Chain],
    number: u64,
) -> Option<usize> {
    let epsilon = scales.config.epsilon(best);
    let tied = || candidates.iter().enumerate().filter(|(_, c)| c.total <= best + epsilon);
    let least = tied().map(|(_, c)| c.cost.to_do()).fold(f64::INFINITY, f64::min);
    let bound = guards::bound(scales, candidates.len());
    let rank = |(_, c): &(usize, &Weighed<'_>)| {
        let has_most = f64::from(c.seen.had.tokens) > f64::from(scales.prompt_tokens) / 2.0;
        (c.seen.in_flight() < bound, has_most, rendezvous(c, chains, number))
    };
    let tied = tied().filter(|(_, c)| c.cost.to_do() <= least + epsilon);
    tied.max_by_key(rank).map(|(at, _)| at)
}

/// The hash of (replica, head of the prompt): the same in every VM and every gateway.
fn rendezvous(candidate: &Weighed<'_>, chains: &[Chain], number: u64) -> u64 {
    let chain = chains.iter().find(|chain| chain.block_size() == candidate.seen.had.block_size);
    let head = chain.and_then(|chain| chain.block_at(RENDEZVOUS_TOKENS));
    drawn(candidate, head.map_or(number, |head| head.0))
}

/// The hash of (replica, key).
pub(super) fn drawn(candidate: &Weighed<'_>, key: u64) -> u64 {
    xxh3_64_with_seed(candidate.seen.replica.address.as_bytes(), key)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Fleet, chosen, fleet, prompt};
    use super::super::{PromptKnowledge, Reason};
    use super::*;
    use crate::replicas::strikes::{PassiveHealth, Proof, Strikes};
    use crate::replicas::{Health, Load};
    use crate::tokens::blocks::ChainSeed;
    use std::time::Duration;

    fn by(policy: Policy, replicas: usize) -> Fleet {
        let mut fleet = fleet(replicas);
        fleet.config.policy = policy;
        fleet
    }

    /// Has this prompt computed by one replica, and leaves so many requests there.
    fn warm(fleet: &mut Fleet, slot: u32, tokens: &[u32], in_flight: usize) {
        let id = fleet.table.at(slot).unwrap().id;
        for other in (0..4).filter(|other| *other != slot) {
            fleet.slot(other, |replica| replica.health = Health::Draining);
        }
        let decision = fleet.ask(tokens);
        fleet.apply(&decision);
        fleet.finish(&decision);
        (0..4).for_each(|other| fleet.slot(other, |replica| replica.health = Health::Healthy));
        for _ in 0..in_flight {
            fleet.charges.start(id, 0, fleet.now, Duration::from_secs(5));
        }
    }

    /// Whom each policy takes of four, when the second has all of a prompt and so many requests.
    fn choices(in_flight: usize) -> [(u32, Reason); 4] {
        Policy::ALL.map(|policy| {
            let mut fleet = by(policy, 4);
            let tokens = prompt(1, 4000);
            warm(&mut fleet, 1, &tokens, in_flight);
            for slot in [0, 3] {
                let id = fleet.table.at(slot).unwrap().id;
                fleet.charges.start(id, 0, fleet.now, Duration::from_secs(5));
            }
            let decision = fleet.decide(known(&tokens), 3);
            assert_eq!(decision.ranked.len(), 3, "{policy:?}");
            (chosen(&decision), decision.reason)
        })
    }

    fn known(tokens: &[u32]) -> PromptKnowledge<'_> {
        PromptKnowledge::Tokens { tokens, seed: ChainSeed::new("m", None) }
    }

    #[test]
    fn of_equal_costs_the_one_that_has_most_of_the_prompt_wins() {
        for salt in 0..20 {
            let mut fleet = by(Policy::Warmpath, 4);
            fleet.config.cost.prefill_tokens_per_s = 1e6;
            fleet.config.cost.recent_weight = 0.0;
            let tokens = prompt(salt, 1000);
            warm(&mut fleet, 1, &tokens, 0);
            assert_eq!(chosen(&fleet.decide(known(&tokens), 3)), 1);
        }
    }

    #[test]
    fn each_policy_goes_by_what_it_says() {
        let [warmpath, least_loaded, prefix_only, round_robin] = choices(2);
        assert_eq!(warmpath, (1, Reason::Prefix));
        assert_eq!(least_loaded, (2, Reason::PrefixBusy));
        assert_eq!(prefix_only, (1, Reason::Prefix));
        assert_eq!(round_robin, (3, Reason::PrefixBusy));
        let [warmpath, least_loaded, prefix_only, _] = choices(500);
        assert_ne!(warmpath.0, 1, "it waits no longer than computing takes");
        assert_eq!((least_loaded.0, prefix_only.0), (2, 1));
    }

    #[test]
    fn round_robin_takes_all_in_turn_and_those_behind_for_retries() {
        let fleet = by(Policy::RoundRobin, 3);
        let tokens = prompt(1, 100);
        let ranked = |number| -> Vec<u32> {
            let decision = fleet.decide(known(&tokens), number);
            decision.ranked.iter().map(|candidate| candidate.id.slot).collect()
        };
        assert_eq!([7, 8, 9].map(ranked), [vec![1, 2, 0], vec![2, 0, 1], vec![0, 1, 2]]);
        assert_eq!(ranked(u64::MAX).len(), 3);
    }

    #[test]
    fn least_loaded_counts_the_requests_of_others_and_spreads_ties() {
        let mut fleet = by(Policy::LeastLoaded, 3);
        let at = fleet.now;
        let load = |running| Some(Load { running, waiting: 1, kv_usage: None, own: 0, at });
        fleet.slot(0, |replica| replica.load = load(4));
        fleet.slot(1, |replica| replica.load = load(4));
        fleet.slot(2, |replica| replica.load = load(2));
        let tokens = prompt(1, 100);
        assert_eq!(chosen(&fleet.decide(known(&tokens), 1)), 2);
        fleet.slot(2, |replica| replica.load = load(4));
        let mut taken = [0; 3];
        for number in 0..90 {
            taken[chosen(&fleet.decide(known(&tokens), number)) as usize] += 1;
        }
        assert!(taken.iter().all(|count| *count > 15), "{taken:?}");
        let unfinished = fleet.table.at(0).unwrap().id;
        for id in [0, 1, 2].map(|slot| fleet.table.at(slot).unwrap().id) {
            let tokens = if id == unfinished { 9 } else { 10 };
            fleet.charges.start(id, tokens, at, Duration::from_secs(5));
        }
        assert!((0..20).all(|number| chosen(&fleet.decide(known(&tokens), number)) == 0));
    }

    #[test]
    fn prefix_only_sends_equal_cold_prompts_to_one_replica_and_others_elsewhere() {
        let fleet = by(Policy::PrefixOnly, 4);
        let mut taken = [0; 4];
        for kind in 0..80 {
            let tokens = prompt(kind, 600);
            let first = chosen(&fleet.decide(known(&tokens), 1));
            assert_eq!(chosen(&fleet.decide(known(&tokens), 2)), first);
            taken[first as usize] += 1;
        }
        assert!(taken.iter().all(|count| *count > 8), "{taken:?}");
    }

    #[test]
    fn health_suspensions_and_priority_hold_under_every_policy() {
        for policy in Policy::ALL {
            let mut fleet = by(policy, 4);
            let tokens = prompt(1, 1000);
            warm(&mut fleet, 0, &tokens, 0);
            fleet.slot(0, |replica| replica.health = Health::Unhealthy);
            fleet.slot(1, |replica| replica.priority = 1);
            let (id, none) = (fleet.table.at(2).unwrap().id, Strikes::default());
            let config = PassiveHealth::default();
            fleet.strikes.failed(&config, &none, id, Proof::Proven, fleet.now, fleet.now);
            for number in 0..8 {
                let decision = fleet.decide(known(&tokens), number);
                assert_eq!((chosen(&decision), decision.ranked.len()), (3, 1), "{policy:?}");
            }
        }
    }

    #[test]
    fn an_unknown_prompt_goes_somewhere_under_every_policy() {
        let unknown = PromptKnowledge::Unknown { reason: Reason::NoPrompt, estimated_tokens: 9 };
        for policy in Policy::ALL {
            let fleet = by(policy, 4);
            let taken: std::collections::BTreeSet<u32> =
                (0..40).map(|number| chosen(&fleet.decide(unknown, number))).collect();
            assert_eq!(taken.len(), 4, "{policy:?}");
        }
    }

    #[test]
    fn every_policy_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<&str> =
            Policy::ALL.iter().map(|policy| policy.as_str()).collect();
        assert_eq!(names.len(), Policy::ALL.len());
    }
}
