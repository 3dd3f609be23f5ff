//! What a choice lost, as its response tells: tokens and seconds against the best of the candidates in hindsight.
//!
//! The chosen replica is taken as it turned out, the others as they were seen when it was chosen: what they would really
//! have done, nobody knows. So a loss of nothing does not prove a choice right, and stale claims of others count as good
//! ones. `docs/watch.md` has the definition for users.

use super::{Candidate, Decision, Policy, RouteConfig, Scales, Weighed};
use crate::score::{self, Signals};
use std::time::Duration;

/// Why something was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The chosen replica did not have what it was believed to have.
    StaleClaim,
    /// The first token came later than predicted.
    Queue,
    /// Another replica had more of the prompt, and cost more.
    Load,
    /// Another replica had more of the prompt, or cost less, by so little that it was a tie.
    Tie,
    /// Another replica had more of the prompt, or cost less, and the configured policy does not go by that.
    Policy,
    /// The replica that had more of the prompt was suspended for its failures.
    Suspended,
    /// Another replica than the chosen one answered.
    Retry,
}

impl Loss {
    /// All of them, in the order of their declaration.
    pub const ALL: [Self; 7] = [
        Self::StaleClaim,
        Self::Queue,
        Self::Load,
        Self::Tie,
        Self::Policy,
        Self::Suspended,
        Self::Retry,
    ];

    /// The value of the metrics' `reason` label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StaleClaim => "stale_claim",
            Self::Queue => "queue",
            Self::Load => "load",
            Self::Tie => "tie",
            Self::Policy => "policy",
            Self::Suspended => "suspended",
            Self::Retry => "retry",
        }
    }
}

/// What the others offered when one was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rivals {
    /// The least that any of them would have cost, and the seconds of that one; none: there was no other.
    pub least: Option<(f64, f64)>,
    /// The most tokens of the prompt that any of them had.
    pub overlap_tokens: u32,
    /// What that one would have cost.
    pub holder_cost: f64,
    /// The most tokens of the prompt that a suspended replica had.
    pub suspended_overlap_tokens: u32,
}

impl Rivals {
    /// All but the one that was chosen.
    pub(super) fn of(
        scales: &Scales<'_>,
        weighed: &[Weighed<'_>],
        chosen: usize,
        suspended_overlap_tokens: u32,
    ) -> Self {
        let rivals = || weighed.iter().enumerate().filter(|(at, _)| *at != chosen).map(|(_, r)| r);
        let least = rivals().min_by(|a, b| a.total.total_cmp(&b.total));
        let overlap_tokens = rivals().map(|rival| rival.seen.had.tokens).max().unwrap_or(0);
        let holders = rivals().filter(|rival| rival.seen.had.tokens == overlap_tokens);
        let cheaper = |least: f64, holder: &Weighed<'_>| match holder.total < least {
            true => least.min(scales.cost(holder).total()),
            false => least,
        };
        Self {
            least: least.map(|least| (least.total, least.cost.seconds())),
            overlap_tokens,
            holder_cost: match overlap_tokens {
                0 => 0.0,
                _ => holders.fold(f64::INFINITY, cheaper),
            },
            suspended_overlap_tokens,
        }
    }
}

/// How a request turned out.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Turnout {
    /// Tokens that came from cache, by the replica's own account of exactly this prompt.
    pub cached_tokens: Option<u32>,
    /// From the decision to the first token, where it could be seen.
    pub first_token: Option<Duration>,
    /// Whether another replica than the chosen one answered.
    pub is_elsewhere: bool,
}

/// What was lost, each part for its reason: what is not here lost nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Regret {
    /// Tokens.
    pub tokens: Vec<(Loss, u32)>,
    /// Seconds.
    pub seconds: Vec<(Loss, f64)>,
}

impl Regret {
    /// The reason of the largest part: of seconds, or where none were lost, of tokens.
    pub fn main(&self) -> Option<Loss> {
        let seconds = self.seconds.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let tokens = self.tokens.iter().max_by_key(|(_, tokens)| *tokens);
        seconds.map(|(loss, _)| *loss).or(tokens.map(|(loss, _)| *loss))
    }
}

impl Decision {
    /// What it lost. `None` where that cannot be told: the prompt was not known, the choice was Envoy's, or nothing was
    /// heard of how it went.
    pub fn regret(&self, config: &RouteConfig, turnout: &Turnout) -> Option<Regret> {
        let chosen = self.chosen().filter(|_| self.is_matched)?;
        let Turnout { cached_tokens, first_token, is_elsewhere } = *turnout;
        if cached_tokens.is_none() && (first_token.is_none() || is_elsewhere) {
            return None;
        }
        let mut regret = Regret::default();
        if let Some(cached) = cached_tokens {
            regret.tokens = self.lost_tokens(config, chosen, cached, is_elsewhere);
        }
        if !is_elsewhere {
            regret.seconds = self.lost_seconds(config, chosen, cached_tokens, first_token);
        }
        Some(regret)
    }

    fn lost_tokens(
        &self,
        config: &RouteConfig,
        chosen: &Candidate,
        cached: u32,
        is_elsewhere: bool,
    ) -> Vec<(Loss, u32)> {
        let Rivals { overlap_tokens: others, suspended_overlap_tokens: suspended, .. } =
            self.rivals;
        let had = chosen.overlap_tokens;
        if is_elsewhere {
            let lost = had.max(others).max(suspended).saturating_sub(cached);
            return Parts::new(lost).rest(Loss::Retry);
        }
        let mut parts = Parts::new(others.max(suspended).saturating_sub(cached));
        parts.take(Loss::StaleClaim, had.saturating_sub(cached));
        parts.take(Loss::Suspended, suspended.saturating_sub(others.max(had)));
        let rival = self.rivals.least.map_or(f64::INFINITY, |(least, _)| least);
        let least = rival.min(chosen.cost.total());
        parts.rest(match config.policy {
            Policy::Warmpath if self.rivals.holder_cost > least + config.epsilon(least) => {
                Loss::Load
            }
            Policy::Warmpath => Loss::Tie,
            _ => Loss::Policy,
        })
    }

    fn lost_seconds(
        &self,
        config: &RouteConfig,
        chosen: &Candidate,
        cached: Option<u32>,
        first_token: Option<Duration>,
    ) -> Vec<(Loss, f64)> {
        let Some((rival_cost, rival)) = self.rivals.least else { return Vec::new() };
        let predicted = chosen.cost.seconds();
        let cached_tokens = cached.map_or(chosen.signals.cached_tokens, f64::from);
        let signals = Signals { cached_tokens, ..chosen.signals };
        let turned_out = score::cost(&config.cost, &signals);
        let (known, stale) = (predicted - rival, turned_out.seconds() - predicted);
        // Seconds that were given so that a first token is less late are no loss.
        let known = known.min((chosen.cost.total() - rival_cost).max(0.0));
        let late = first_token.map_or(0.0, |took| took.as_secs_f64() - turned_out.first_token());
        // As near as a tie is as predicted.
        let noise = config.noise(turned_out.first_token());
        let late = if late.abs() <= noise { 0.0 } else { late };
        let mut parts = Parts::new((known + stale + late).max(0.0));
        // This policy takes the least but for ties.
        let is_tie = config.policy == Policy::Warmpath;
        parts.take(if is_tie { Loss::Tie } else { Loss::Policy }, known.max(0.0));
        parts.take(Loss::StaleClaim, stale.max(0.0));
        parts.rest(Loss::Queue)
    }
}

/// An amount that is given out to reasons until there is none left.
struct Parts<N> {
    left: N,
    taken: Vec<(Loss, N)>,
}

impl<N: Copy + PartialOrd + Default + std::ops::Sub<Output = N>> Parts<N> {
    fn new(amount: N) -> Self {
        Self { left: amount, taken: Vec::new() }
    }

    fn take(&mut self, loss: Loss, most: N) {
        let part = if most < self.left { most } else { self.left };
        if part > N::default() {
            self.taken.push((loss, part));
            self.left = self.left - part;
        }
    }

    fn rest(mut self, loss: Loss) -> Vec<(Loss, N)> {
        let left = self.left;
        self.take(loss, left);
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Fleet, fleet, prompt};
    use super::super::{PromptKnowledge, Reason};
    use super::*;
    use crate::replicas::strikes::{PassiveHealth, Proof, Strikes};
    use crate::replicas::{Load, ReplicaId};
    use crate::tokens::blocks::{BlockSize, Chain, ChainSeed};

    const TOKENS: u32 = 8001;

    /// A fleet of which some hold so many blocks of the prompt and have so many tokens to compute.
    fn holders(held: &[(usize, u64)]) -> Fleet {
        let mut fleet = fleet(held.len());
        let tokens = prompt(1, TOKENS);
        let chain = Chain::new(ChainSeed::new("m", None), BlockSize::new(16).unwrap(), &tokens);
        for (slot, (blocks, unfinished)) in (0..).zip(held) {
            let id = id(&fleet, slot);
            fleet.index.record(id, 10_000, &chain.hashes()[..*blocks]);
            if *unfinished > 0 {
                fleet.charges.start(id, *unfinished, fleet.now, Duration::from_secs(5));
            }
        }
        fleet
    }

    fn id(fleet: &Fleet, slot: u32) -> ReplicaId {
        fleet.table.at(slot).unwrap().id
    }

    fn turnout(cached: u32) -> Turnout {
        Turnout { cached_tokens: Some(cached), ..Turnout::default() }
    }

    #[track_caller]
    fn check(fleet: &Fleet, turnout: Turnout, tokens: &[(Loss, u32)], seconds: &[(Loss, f64)]) {
        let decision = fleet.ask(&prompt(1, TOKENS));
        let regret = decision.regret(&fleet.config, &turnout).unwrap();
        assert_eq!(regret.tokens, tokens, "{}", decision.explain());
        assert_eq!(regret.seconds.len(), seconds.len(), "{:?}", regret.seconds);
        for (found, expected) in regret.seconds.iter().zip(seconds) {
            assert_eq!(found.0, expected.0);
            assert!((found.1 - expected.1).abs() < 0.005, "{found:?}, expected {expected:?}");
        }
    }

    #[test]
    fn a_choice_that_turns_out_as_predicted_lost_nothing() {
        check(&holders(&[(500, 0), (100, 0)]), turnout(8000), &[], &[]);
        check(&holders(&[(0, 0), (0, 0)]), turnout(0), &[], &[]);
    }

    #[test]
    fn a_stale_claim_lost_what_the_next_best_had() {
        // One second a prompt of 8,000 tokens, with attention 1.04; half of it 0.53.
        let fleet = holders(&[(500, 0), (250, 0)]);
        check(&fleet, turnout(0), &[(Loss::StaleClaim, 4000)], &[(Loss::StaleClaim, 0.51)]);
        // Nobody else had any of it, so no other choice would have been better.
        check(&holders(&[(500, 0), (0, 0)]), turnout(0), &[], &[]);
        check(&holders(&[(500, 0)]), turnout(0), &[], &[]);
    }

    #[test]
    fn what_was_left_for_its_queue_is_no_loss_of_time() {
        let fleet = holders(&[(500, 80_000), (0, 0)]);
        check(&fleet, turnout(0), &[(Loss::Load, 8000)], &[]);
        // More than the holder's queue would have taken.
        let late = Turnout { first_token: Some(Duration::from_secs(15)), ..turnout(0) };
        check(&fleet, late, &[(Loss::Load, 8000)], &[(Loss::Queue, 5.517)]);
    }

    #[test]
    fn seconds_given_for_a_first_token_that_is_less_late_are_no_loss() {
        let fleet = holders(&[(500, 11_200), (0, 0)]);
        let decision = fleet.ask(&prompt(1, TOKENS));
        let (chosen, rival) = (decision.chosen().unwrap(), decision.rivals.least.unwrap());
        assert!(chosen.cost.total() < rival.0, "{}", decision.explain());
        assert!(chosen.cost.seconds() > rival.1 + 0.1, "{}", decision.explain());
        check(&fleet, turnout(0), &[(Loss::Load, 8000)], &[]);
    }

    #[test]
    fn nor_are_they_where_a_tie_was_decided() {
        let mut fleet = holders(&[(500, 0), (0, 0)]);
        fleet.config.cost.pressure_s = 1.6 / 49.0;
        let load = Load { running: 0, waiting: 0, kv_usage: Some(0.98), own: 0, at: fleet.now };
        fleet.slot(0, |replica| replica.load = Some(load));
        let decision = fleet.ask(&prompt(1, TOKENS));
        let (chosen, rival) = (decision.chosen().unwrap(), decision.rivals.least.unwrap());
        let over = chosen.cost.total() - rival.0;
        assert!((0.01..0.1).contains(&over), "{}", decision.explain());
        assert!(chosen.cost.seconds() > rival.1 + 0.5, "{}", decision.explain());
        check(&fleet, turnout(8000), &[], &[(Loss::Tie, over)]);
    }

    #[test]
    fn a_first_token_later_than_predicted_is_a_queue_that_was_not_seen() {
        let fleet = holders(&[(500, 0), (500, 0)]);
        let took = |seconds| Turnout {
            first_token: Some(Duration::from_secs_f64(seconds)),
            ..turnout(8000)
        };
        check(&fleet, took(2.0), &[], &[(Loss::Queue, 2.0)]);
        check(&fleet, took(0.004), &[], &[]);
        // Where usage is silent, too.
        check(&fleet, Turnout { cached_tokens: None, ..took(2.0) }, &[], &[(Loss::Queue, 2.0)]);
    }

    #[test]
    fn a_policy_that_does_not_go_by_cost_is_named() {
        let mut fleet = holders(&[(500, 0), (0, 0)]);
        fleet.config.policy = Policy::LeastLoaded;
        let busy = id(&fleet, 0);
        fleet.charges.start(busy, 0, fleet.now, Duration::from_secs(5));
        check(&fleet, turnout(0), &[(Loss::Policy, 8000)], &[(Loss::Policy, 1.558)]);
    }

    #[test]
    fn what_a_suspended_replica_had_is_lost_to_its_suspension() {
        let mut fleet = holders(&[(500, 0), (100, 0), (0, 0)]);
        let (id, config) = (id(&fleet, 0), PassiveHealth::default());
        let none = Strikes::default();
        fleet.strikes.failed(&config, &none, id, Proof::Proven, fleet.now, fleet.now);
        check(&fleet, turnout(1600), &[(Loss::Suspended, 6400)], &[]);
        let stale = &[(Loss::StaleClaim, 1600), (Loss::Suspended, 6400)];
        check(&fleet, turnout(0), stale, &[]);
    }

    #[test]
    fn where_all_are_suspended_nothing_is_lost_to_it() {
        let mut fleet = holders(&[(500, 0), (100, 0)]);
        let (config, none) = (PassiveHealth::default(), Strikes::default());
        for slot in 0..2 {
            let id = id(&fleet, slot);
            fleet.strikes.failed(&config, &none, id, Proof::Proven, fleet.now, fleet.now);
        }
        let decision = fleet.ask(&prompt(1, TOKENS));
        assert_eq!((decision.suspended, decision.ranked.len()), (0, 2), "{}", decision.explain());
        check(&fleet, turnout(8000), &[], &[]);
        // It is the chosen one's own claim that was stale, and the other's that was passed over.
        check(&fleet, turnout(0), &[(Loss::StaleClaim, 1600)], &[(Loss::StaleClaim, 0.2)]);
    }

    #[test]
    fn an_answer_from_elsewhere_lost_what_was_chosen_for() {
        let fleet = holders(&[(500, 0), (0, 0)]);
        let elsewhere = Turnout { is_elsewhere: true, ..turnout(0) };
        check(&fleet, elsewhere, &[(Loss::Retry, 8000)], &[]);
        let silent = Turnout { is_elsewhere: true, ..Turnout::default() };
        assert_eq!(fleet.ask(&prompt(1, TOKENS)).regret(&fleet.config, &silent), None);
    }

    #[test]
    fn nothing_is_said_of_what_is_not_known() {
        let fleet = holders(&[(500, 0), (0, 0)]);
        let known = fleet.ask(&prompt(1, TOKENS));
        assert_eq!(known.regret(&fleet.config, &Turnout::default()), None);
        // Of a prompt whose blocks there was no room for all the same is known that counts here.
        let dropped = Decision { chain: None, ..known.clone() };
        assert!(known.chain.is_some());
        assert_eq!(
            dropped.regret(&fleet.config, &turnout(10)),
            known.regret(&fleet.config, &turnout(10))
        );
        assert_eq!(dropped.explain(), known.explain());
        let unknown = PromptKnowledge::Unknown { reason: Reason::NoPrompt, estimated_tokens: 9 };
        let unknown = fleet.decide(unknown, 0);
        assert_eq!(unknown.regret(&fleet.config, &turnout(0)), None);
    }

    #[test]
    fn the_main_reason_is_the_one_that_took_longest() {
        let mut regret = Regret::default();
        assert_eq!(regret.main(), None);
        regret.tokens = vec![(Loss::StaleClaim, 9), (Loss::Suspended, 90)];
        assert_eq!(regret.main(), Some(Loss::Suspended));
        regret.seconds = vec![(Loss::Tie, 0.1), (Loss::Queue, 0.2)];
        assert_eq!(regret.main(), Some(Loss::Queue));
    }

    #[test]
    fn every_loss_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<&str> =
            Loss::ALL.iter().map(|loss| loss.as_str()).collect();
        assert_eq!(names.len(), Loss::ALL.len());
    }
}
