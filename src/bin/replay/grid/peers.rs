//! Every policy by the rule that Warmpath is judged by: its tails beside the best of the baselines that it is not itself.
//!
//! The best of fifteen is another one from cell to cell, and the least of fifteen figures that chance has a part in: nobody
//! has all of it. What one policy can have, this shows. It promises nothing.

use super::cells::Result;
use super::summary::Count;
use super::verdict::{Kind, MARGIN, MOST_ABOVE, Played, Tail};

/// One policy's.
#[derive(Debug, Clone, PartialEq)]
pub struct Standing {
    /// Its name.
    pub policy: &'static str,
    /// Cells in which both tails are won.
    pub won: Count,
    /// Cells in which one of them is lost altogether.
    pub lost: usize,
    /// How much the worse of both is above the best, as a part of it, in the mean of the cells.
    pub above: f64,
}

/// All, those first that won most.
pub fn standings(results: &[Result]) -> Vec<Standing> {
    let played = results.first().map_or(&[][..], |first| &first.played);
    let policies = played.iter().filter(|played| played.kind != Kind::Bound);
    let mut all: Vec<Standing> = policies.map(|played| standing(results, played.policy)).collect();
    all.sort_by(|a, b| b.won.n.cmp(&a.won.n).then(a.above.total_cmp(&b.above)));
    all
}

fn standing(results: &[Result], policy: &'static str) -> Standing {
    let worse = results.iter().filter_map(|result| worse(result.of(policy)?, &result.played));
    let worse: Vec<f64> = worse.collect();
    let count = |is: fn(&f64) -> bool| worse.iter().copied().filter(is).count();
    Standing {
        policy,
        won: Count { of: worse.len(), n: count(|above| *above <= MARGIN) },
        lost: count(|above| *above > MOST_ABOVE),
        above: worse.iter().sum::<f64>() / worse.len().max(1) as f64,
    }
}

/// How much the worse of both tails is above the best.
fn worse(ours: &Played, played: &[Played]) -> Option<f64> {
    let first_token = Tail::of_policy(ours, played, |figures| figures.first_token.p99)?;
    let whole = Tail::of_policy(ours, played, |figures| figures.whole.p99)?;
    Some(first_token.above().max(whole.above()))
}

#[cfg(test)]
mod tests {
    use super::super::cells::Cell;
    use super::super::figures::Figures;
    use super::*;
    use crate::stats::Quantiles;

    fn played(policy: &'static str, kind: Kind, first_token: f64, whole: f64) -> Played {
        let at = |p99| Quantiles { p99, ..Quantiles::default() };
        let (first_token, whole) = (at(first_token), at(whole));
        Played { policy, kind, figures: Figures { first_token, whole, ..Figures::default() } }
    }

    #[test]
    fn each_is_measured_by_the_best_of_the_others_and_the_first_has_most() {
        let cell = |ours: f64| Result {
            cell: Cell { trace: 0, replicas: 2, cache: 1.0, load: 0.5 },
            trace: "t".to_owned(),
            played: vec![
                played("a", Kind::Baseline, 100.0, 130.0),
                played("b", Kind::Baseline, 120.0, 100.0),
                played("bound", Kind::Bound, 1.0, 1.0),
                played("warmpath", Kind::Ours, ours, 100.0),
            ],
            target: 1.0,
            ceiling: 1.0,
            lookahead: None,
            is_raised: false,
        };
        let standings = standings(&[cell(101.0), cell(105.0)]);
        let rows: Vec<(&str, usize, usize)> =
            standings.iter().map(|s| (s.policy, s.won.n, s.lost)).collect();
        assert_eq!(rows, [("warmpath", 1, 0), ("b", 0, 2), ("a", 0, 2)]);
        assert!((standings[0].above - 0.03).abs() < 1e-9, "{standings:?}");
        assert!((standings[2].above - 0.3).abs() < 1e-9, "{standings:?}");
    }
}
