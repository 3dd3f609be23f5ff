//! How much of its stated capacity a replica seems to have, from how predictions come out.
//!
//! A shadow that is larger than the cache it stands for predicts hits that do not come: because
//! the engine was given less memory than it says, others use it too, or it does not cache at all.
//! Which blocks those are nobody tells; that some share of predicted tokens is missing says by
//! how much the shadow is too large. So the leader lowers that replica's share of its stated
//! capacity by what was missing, and raises it again, slowly, while all predictions come true.
//! It compares no request and bounds no shadow: the former is the shell's, the latter the table's.

use crate::replicas::ReplicaId;
use hashbrown::HashMap;

/// How predictions of cached tokens came out, in sums that only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evidence {
    /// Answers that told.
    pub compared: u32,
    /// Tokens predicted to be cached.
    pub predicted: u64,
    /// Of those, tokens that were not.
    pub over: u64,
    /// Tokens that were cached beyond what was predicted.
    pub under: u64,
}

impl Evidence {
    /// Takes in one answer.
    pub fn take(&mut self, predicted: u32, cached: u32) {
        self.compared = self.compared.saturating_add(1);
        self.predicted = self.predicted.saturating_add(predicted.into());
        self.over = self.over.saturating_add(predicted.saturating_sub(cached).into());
        self.under = self.under.saturating_add(cached.saturating_sub(predicted).into());
    }

    /// Adds another VM's.
    pub fn add(&mut self, other: &Self) {
        self.compared = self.compared.saturating_add(other.compared);
        self.predicted = self.predicted.saturating_add(other.predicted);
        self.over = self.over.saturating_add(other.over);
        self.under = self.under.saturating_add(other.under);
    }

    /// What has come since `earlier`. `None` where that was more: a VM has gone, and its sums with it.
    fn since(&self, earlier: &Self) -> Option<Self> {
        Some(Self {
            compared: self.compared.checked_sub(earlier.compared)?,
            predicted: self.predicted.checked_sub(earlier.predicted)?,
            over: self.over.checked_sub(earlier.over)?,
            under: self.under.checked_sub(earlier.under)?,
        })
    }
}

/// Answers that are judged together. Halved, a single odd one moves the share by a fifth; doubled, a cache that shrank
/// to a tenth takes twice as many answers to be found out.
const ROUND: u32 = 6;

/// Missing up to this share is the difference between two orders of eviction, not of size.
const TOLERATED: f64 = 0.02;

/// The most and the least that one round takes away: tokens are missed only where a prompt comes back, so what is seen
/// missing is less than what the shadow is too large by.
const MOST_TAKEN: f64 = 0.5;
const LEAST_TAKEN: f64 = 0.05;

/// What one round without a miss gives back.
const GIVEN: f64 = 0.02;

/// No less is believed: something must be predicted for anything to be compared.
pub const MIN_SHARE: f64 = 1.0 / 64.0;

/// The leader's book. What it has decided is kept in the table, from where the next leader has it.
#[derive(Debug, Default)]
pub struct Sizing {
    judged: HashMap<ReplicaId, Evidence>,
}

impl Sizing {
    /// A replica's share after this evidence, if it changes.
    pub fn judge(&mut self, replica: ReplicaId, evidence: &Evidence, share: f64) -> Option<f64> {
        let judged = self.judged.entry(replica).or_insert(*evidence);
        let Some(new) = evidence.since(judged) else {
            *judged = *evidence;
            return None;
        };
        if new.compared < ROUND {
            return None;
        }
        *judged = *evidence;
        let next = self::share(share, &new);
        (next.to_bits() != share.to_bits()).then_some(next)
    }

    /// Forgets replicas that are no more.
    pub fn retain(&mut self, lives: impl Fn(ReplicaId) -> bool) {
        self.judged.retain(|replica, _| lives(*replica));
    }
}

/// A share after one round.
fn share(share: f64, round: &Evidence) -> f64 {
    let missing = round.over as f64 / (round.predicted as f64).max(1.0);
    let found = round.under as f64 / (round.predicted as f64 + round.under as f64).max(1.0);
    let next = if missing > TOLERATED {
        share * (1.0 - missing.clamp(LEAST_TAKEN, MOST_TAKEN))
    } else {
        share * (1.0 + GIVEN + found)
    };
    next.clamp(MIN_SHARE, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const R: ReplicaId = ReplicaId { slot: 0, incarnation: 1 };

    /// The shares after rounds of predictions of 1,000 tokens of which so many are cached.
    fn shares(rounds: &[u32]) -> Vec<f64> {
        let (mut sizing, mut evidence, mut share) = (Sizing::default(), Evidence::default(), 1.0);
        sizing.judge(R, &evidence, share);
        let mut shares = Vec::new();
        for cached in rounds {
            for _ in 0..ROUND {
                evidence.take(1000, *cached);
                share = sizing.judge(R, &evidence, share).unwrap_or(share);
            }
            shares.push(share);
        }
        shares
    }

    #[test]
    fn what_is_missing_is_taken_away_at_most_half_at_once() {
        assert_eq!(shares(&[700, 0, 1000]), [0.7, 0.35, 0.357]);
    }

    #[test]
    fn it_never_goes_under_its_floor_nor_over_the_stated_capacity() {
        assert_eq!(shares(&[0; 20]).last(), Some(&MIN_SHARE));
        assert_eq!(shares(&[1000; 20]).last(), Some(&1.0));
    }

    #[test]
    fn it_comes_back_faster_where_more_is_cached_than_was_predicted() {
        let after = |cached| *shares(&[&[0; 3][..], &[cached; 5]].concat()).last().unwrap();
        assert!(after(1500) > 2.0 * after(1000), "{} against {}", after(1500), after(1000));
    }

    #[test]
    fn a_few_missing_blocks_are_no_reason() {
        assert_eq!(shares(&[985]), [1.0]);
    }

    #[test]
    fn a_vm_that_goes_takes_its_sums_along_and_nothing_is_judged_by_that() {
        let mut sizing = Sizing::default();
        let mut many = Evidence::default();
        (0..100).for_each(|_| many.take(1000, 0));
        assert_eq!(sizing.judge(R, &many, 1.0), None, "from before this leader");
        let mut few = Evidence::default();
        (0..50).for_each(|_| few.take(1000, 0));
        assert_eq!(sizing.judge(R, &few, 1.0), None);
        (0..ROUND).for_each(|_| few.take(1000, 0));
        assert_eq!(sizing.judge(R, &few, 1.0), Some(0.5));
    }
}
