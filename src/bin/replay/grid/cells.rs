//! The grid's cells, and what was found in them.

use super::verdict::{Kind, Played, Verdict, load_within};

/// One cell: everything but the policy and the seed.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// The trace, by its number.
    pub trace: usize,
    /// Replicas of the fleet.
    pub replicas: usize,
    /// All replicas' caches together, as a part of the trace's working set.
    pub cache: f64,
    /// Asked for, as a part of what the fleet can do.
    pub load: f64,
}

/// A cell that was played.
#[derive(Debug, Clone, PartialEq)]
pub struct Result {
    /// Which.
    pub cell: Cell,
    /// The trace's name.
    pub trace: String,
    /// Every policy, in the order in which they were asked for.
    pub played: Vec<Played>,
    /// The p99 time to first token that is asked of this trace, in milliseconds.
    pub target: f64,
    /// The hit rate of one infinite cache for the fleet.
    pub ceiling: f64,
    /// The hit rate of the lookahead bound, where there is one.
    pub lookahead: Option<f64>,
    /// Whether the cache is larger than asked for, so that the longest request fits.
    pub is_raised: bool,
}

/// Cells that differ in nothing but their load, in ascending order of it.
pub struct Column<'a> {
    /// Them.
    pub cells: Vec<&'a Result>,
}

/// All combinations, loads running fastest.
pub fn all(traces: usize, replicas: &[usize], caches: &[f64], loads: &[f64]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for trace in 0..traces {
        for &replicas in replicas {
            for &cache in caches {
                cells.extend(loads.iter().map(|&load| Cell { trace, replicas, cache, load }));
            }
        }
    }
    cells
}

impl Result {
    /// Who won.
    pub fn verdict(&self) -> Option<Verdict> {
        Verdict::of(&self.played, self.lookahead)
    }

    /// One policy's figures.
    pub fn of(&self, policy: &str) -> Option<&Played> {
        self.played.iter().find(|played| played.policy == policy)
    }
}

impl<'a> Column<'a> {
    /// The columns of a grid, in its order.
    pub fn all(results: &'a [Result]) -> Vec<Self> {
        let mut columns: Vec<Self> = Vec::new();
        for result in results {
            let same =
                |column: &&mut Self| column.first().is_some_and(|first| is_beside(first, result));
            match columns.iter_mut().find(same) {
                Some(column) => column.cells.push(result),
                None => columns.push(Self { cells: vec![result] }),
            }
        }
        for column in &mut columns {
            column.cells.sort_by(|a, b| a.cell.load.total_cmp(&b.cell.load));
        }
        columns
    }

    /// The cell of the lowest load.
    pub fn first(&self) -> Option<&'a Result> {
        self.cells.first().copied()
    }

    /// The largest load at which a policy's p99 time to first token stays within the trace's target.
    pub fn load_within_target(&self, policy: &str) -> f64 {
        let target = self.first().map_or(0.0, |first| first.target);
        let tail =
            |result: &&Result| Some((result.cell.load, result.of(policy)?.figures.first_token.p99));
        load_within(target, &self.cells.iter().filter_map(tail).collect::<Vec<_>>())
    }

    /// Each policy of a kind with that load, in the order in which they were played.
    pub fn loads(&self, kind: Kind) -> Vec<(&'static str, f64)> {
        let played = self.first().map_or(&[][..], |first| &first.played);
        let of_kind = played.iter().filter(|played| played.kind == kind);
        of_kind.map(|played| (played.policy, self.load_within_target(played.policy))).collect()
    }

    /// Whether no baseline keeps to the target at a higher load than ours. None when nobody does at any.
    pub fn is_highest(&self) -> Option<bool> {
        let most = |kind| self.loads(kind).into_iter().map(|(_, load)| load).fold(0.0, f64::max);
        let (ours, best) = (most(Kind::Ours), most(Kind::Baseline));
        (ours.max(best) > 0.0).then_some(ours >= best)
    }
}

fn is_beside(a: &Result, b: &Result) -> bool {
    let (a, b) = (&a.cell, &b.cell);
    (a.trace, a.replicas) == (b.trace, b.replicas) && a.cache == b.cache
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::grid::figures::Figures;
    use crate::stats::Quantiles;

    /// A result in which three policies have these tails.
    pub fn result(cell: Cell, tails: [f64; 3]) -> Result {
        let policies = [("a", Kind::Baseline), ("b", Kind::Baseline), ("warmpath", Kind::Ours)];
        let played = policies.into_iter().zip(tails).map(|((policy, kind), tail)| {
            let quantiles = Quantiles { p99: tail, ..Quantiles::default() };
            let figures = Figures {
                requests: 10,
                first_token: quantiles,
                whole: quantiles,
                prompt_tokens: 1000,
                computed_tokens: 400,
                ..Figures::default()
            };
            Played { policy, kind, figures }
        });
        Result {
            cell,
            trace: "t".to_owned(),
            played: played.collect(),
            target: 100.0,
            ceiling: 0.7,
            lookahead: Some(0.62),
            is_raised: false,
        }
    }

    fn column(tails: &[[f64; 3]]) -> Vec<Result> {
        let cells = all(1, &[8], &[0.3], &[0.3, 0.5, 0.7]);
        cells.into_iter().zip(tails).map(|(cell, tails)| result(cell, *tails)).collect()
    }

    #[track_caller]
    fn check(tails: [[f64; 3]; 3], loads: [f64; 3], highest: Option<bool>) {
        let results = column(&tails);
        let columns = Column::all(&results);
        assert_eq!(columns.len(), 1);
        for (policy, expected) in ["a", "b", "warmpath"].iter().zip(loads) {
            let load = columns[0].load_within_target(policy);
            assert!((load - expected).abs() < 1e-12, "{policy}: {load}");
        }
        assert_eq!(columns[0].is_highest(), highest);
    }

    #[test]
    fn whoever_keeps_to_the_target_longest_is_highest() {
        let even = [60.0, 80.0, 60.0];
        check(
            [even, [140.0, 90.0, 70.0], [200.0, 120.0, 110.0]],
            [0.4, 0.5 + 0.2 / 3.0, 0.65],
            Some(true),
        );
        check([even, [140.0, 90.0, 140.0], [200.0, 90.0, 160.0]], [0.4, 0.7, 0.4], Some(false));
        check([even, even, even], [0.7; 3], Some(true));
        check([[101.0; 3]; 3], [0.0; 3], None);
    }

    #[test]
    fn every_combination_is_a_cell_and_loads_make_a_column() {
        let cells = all(2, &[8, 64], &[0.1, 1.0], &[0.3, 0.5, 0.95]);
        assert_eq!(cells.len(), 24);
        let results: Vec<Result> =
            cells.into_iter().map(|cell| result(cell, [1.0, 2.0, 3.0])).collect();
        let columns = Column::all(&results);
        assert_eq!(columns.len(), 8);
        assert!(columns.iter().all(|column| column.cells.len() == 3));
    }
}
