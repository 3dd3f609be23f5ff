//! Whether a cell is won: Warmpath's figures against the best of the baselines', and against the bounds.
//!
//! The best baseline is another one in each cell and for each figure: it is what an operator would have who knew
//! beforehand which policy suits. The bounds are no baselines: nobody can route like them.

use super::figures::Figures;

/// At most so much above the best baseline, a tail counts as won: two runs that differ by nothing but chance differ by as
/// much.
pub const MARGIN: f64 = 0.02;
/// More than so much above it, a cell counts as lost altogether.
pub const MOST_ABOVE: f64 = 0.10;
/// Points of hit rate that may be missing to the lookahead bound ...
pub const MOST_BELOW_BOUND: f64 = 0.03;
/// ... at loads below this.
pub const BOUND_LOAD: f64 = 0.70;

/// One policy's figures in a cell.
#[derive(Debug, Clone, PartialEq)]
pub struct Played {
    /// The policy's name.
    pub policy: &'static str,
    /// What it is.
    pub kind: Kind,
    /// What it showed.
    pub figures: Figures,
}

/// What a policy is in a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The one that is judged.
    Ours,
    /// One of those that it is compared with.
    Baseline,
    /// What nobody can reach.
    Bound,
}

/// A tail beside the best baseline's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tail {
    /// Milliseconds.
    pub ours: f64,
    /// The best baseline's.
    pub best: f64,
    /// Whose that is.
    pub baseline: &'static str,
}

/// Of one cell.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// Time to first token, p99.
    pub first_token: Tail,
    /// Time to the end, p99.
    pub whole: Tail,
    /// Our hit rate less the lookahead bound's, where that was played.
    pub below_bound: Option<f64>,
    /// Computed tokens as a multiple of the least baseline's.
    pub computed: f64,
}

impl Tail {
    fn of(played: &[Played], part: fn(&Figures) -> f64) -> Option<Self> {
        let ours = played.iter().find(|played| played.kind == Kind::Ours)?;
        Self::of_policy(ours, played, part)
    }

    /// Of any policy, beside the best of the baselines that it is not itself.
    pub fn of_policy(ours: &Played, played: &[Played], part: fn(&Figures) -> f64) -> Option<Self> {
        let is_other = |played: &&Played| played.policy != ours.policy;
        let baselines = played.iter().filter(|played| played.kind == Kind::Baseline);
        let baselines = baselines.filter(is_other);
        // A baseline that fails requests is not good for answering the rest of them quickly.
        let whole = baselines.filter(|played| played.figures.errors <= ours.figures.errors);
        let best = whole.min_by(|a, b| part(&a.figures).total_cmp(&part(&b.figures)))?;
        let (ours, baseline) = (part(&ours.figures), best.policy);
        Some(Self { ours, best: part(&best.figures), baseline })
    }

    /// How much above the best, as a part of it; negative below.
    pub fn above(self) -> f64 {
        if self.best > 0.0 { self.ours / self.best - 1.0 } else { 0.0 }
    }
}

impl Verdict {
    /// Of what was played, and the hit rate of the lookahead bound. None without both, ours and a baseline.
    pub fn of(played: &[Played], lookahead: Option<f64>) -> Option<Self> {
        let ours = &played.iter().find(|played| played.kind == Kind::Ours)?.figures;
        let baselines = played.iter().filter(|played| played.kind == Kind::Baseline);
        let least = baselines.map(|played| played.figures.computed_tokens).min()?;
        Some(Self {
            first_token: Tail::of(played, |figures| figures.first_token.p99)?,
            whole: Tail::of(played, |figures| figures.whole.p99)?,
            below_bound: lookahead.map(|bound| bound - ours.hit_rate()),
            computed: ours.computed_tokens as f64 / least.max(1) as f64,
        })
    }

    /// How much above the best baseline the worse of both tails is.
    pub fn above(&self) -> f64 {
        self.first_token.above().max(self.whole.above())
    }

    /// Whether both tails are within the margin.
    pub fn is_won(&self) -> bool {
        self.above() <= MARGIN
    }

    /// Whether one of them is above by more than is allowed anywhere.
    pub fn is_lost(&self) -> bool {
        self.above() > MOST_ABOVE
    }

    /// Whether the hit rate is near enough to the bound, where that is asked.
    pub fn is_near_bound(&self, load: f64) -> Option<bool> {
        let below = self.below_bound.filter(|_| load < BOUND_LOAD)?;
        Some(below <= MOST_BELOW_BOUND)
    }
}

/// The largest load at which a tail stays within its target: on the line between the last load at which it does and the
/// first at which it does not. Loads are in ascending order. Beyond the last it is that one, and zero if the first is too much.
pub fn load_within(target: f64, tails: &[(f64, f64)]) -> f64 {
    let mut within = 0.0;
    let mut before: Option<(f64, f64)> = None;
    for &(load, tail) in tails {
        if tail > target {
            return before.map_or(0.0, |(load_before, tail_before)| {
                load_before + (load - load_before) * (target - tail_before) / (tail - tail_before)
            });
        }
        within = load;
        before = Some((load, tail));
    }
    within
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Quantiles;

    fn played(policy: &'static str, kind: Kind, tail: f64, computed_tokens: u64) -> Played {
        let quantiles = Quantiles { p99: tail, ..Quantiles::default() };
        let figures = Figures {
            first_token: quantiles,
            whole: quantiles,
            prompt_tokens: 1000,
            computed_tokens,
            ..Figures::default()
        };
        Played { policy, kind, figures }
    }

    fn verdict(ours: f64) -> Verdict {
        let played = [
            played("a", Kind::Baseline, 120.0, 400),
            played("b", Kind::Baseline, 100.0, 500),
            played("lookahead", Kind::Bound, 10.0, 280),
            played("warmpath", Kind::Ours, ours, 300),
        ];
        Verdict::of(&played, Some(0.72)).unwrap()
    }

    #[track_caller]
    fn check(ours: f64, won: bool, lost: bool) {
        let verdict = verdict(ours);
        assert_eq!((verdict.is_won(), verdict.is_lost()), (won, lost));
    }

    #[test]
    fn a_cell_is_won_within_two_per_cent_and_lost_above_ten() {
        check(60.0, true, false);
        check(101.9, true, false);
        check(102.1, false, false);
        check(109.9, false, false);
        check(110.1, false, true);
    }

    #[test]
    fn the_best_baseline_counts_and_the_bound_is_none() {
        let verdict = verdict(90.0);
        assert_eq!((verdict.first_token.best, verdict.first_token.baseline), (100.0, "b"));
        assert!((verdict.computed - 0.75).abs() < 1e-12);
        assert!((verdict.below_bound.unwrap() - 0.02).abs() < 1e-12);
        assert_eq!(verdict.is_near_bound(0.5), Some(true));
        assert_eq!(verdict.is_near_bound(0.7), None);
    }

    #[test]
    fn a_baseline_that_fails_more_requests_is_not_the_best() {
        let mut failing = played("a", Kind::Baseline, 10.0, 400);
        failing.figures.errors = 5;
        let ours = played("warmpath", Kind::Ours, 90.0, 300);
        let other = played("b", Kind::Baseline, 100.0, 1);
        let verdict = Verdict::of(&[failing.clone(), other, ours], None);
        assert_eq!(verdict.unwrap().first_token.baseline, "b");
        assert_eq!(Verdict::of(&[failing], None), None);
    }

    #[track_caller]
    fn check_load(tails: &[(f64, f64)], expected: f64) {
        let load = load_within(100.0, tails);
        assert!((load - expected).abs() < 1e-12, "{load}");
    }

    #[test]
    fn the_load_within_a_target_lies_between_two_loads() {
        check_load(&[(0.3, 50.0), (0.5, 80.0), (0.7, 120.0)], 0.6);
        check_load(&[(0.3, 50.0), (0.5, 100.0)], 0.5);
        check_load(&[(0.3, 101.0), (0.5, 90.0)], 0.0);
        check_load(&[(0.3, 50.0), (0.5, 150.0), (0.7, 90.0)], 0.4);
        check_load(&[], 0.0);
    }
}
