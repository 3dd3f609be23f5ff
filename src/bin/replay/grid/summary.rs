//! The whole grid in numbers: how many cells are won, and which are not.

use super::cells::{Cell, Column, Result};
use super::verdict::{BOUND_LOAD, Kind, MARGIN, MOST_ABOVE, MOST_BELOW_BOUND};

/// So many of so many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Of these.
    pub of: usize,
    /// So many.
    pub n: usize,
}

/// See the module.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Summary {
    /// Cells whose p99 times to first token and to the end are both won.
    pub won: Count,
    /// Cells in which one of them is lost altogether.
    pub lost: Count,
    /// Columns of cells in which ours keeps to the target at the highest load.
    pub highest: Count,
    /// Columns in which nobody keeps to it at any load that was played.
    pub out_of_reach: usize,
    /// Cells of little load whose hit rate is near the lookahead bound.
    pub near_bound: Count,
    /// Requests without a whole answer, in ours.
    pub errors: u64,
    /// What is not as it should be, a line each.
    pub misses: Vec<String>,
}

impl Count {
    fn add(&mut self, is: bool) {
        self.of += 1;
        self.n += usize::from(is);
    }

    /// As a part; all of nothing, which [`std::fmt::Display`] says.
    pub fn share(self) -> f64 {
        if self.of == 0 { 1.0 } else { self.n as f64 / self.of as f64 }
    }
}

impl std::fmt::Display for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.of == 0 {
            return f.write_str("not played");
        }
        write!(f, "{} of {} ({:.1} %)", self.n, self.of, self.share() * 100.0)
    }
}

impl Summary {
    /// Of the grid, or of a part of it.
    pub fn of(results: &[Result]) -> Self {
        let mut summary = Self::default();
        for result in results {
            summary.add_cell(result);
        }
        for column in Column::all(results) {
            summary.add_column(&column);
        }
        summary
    }

    /// Each line that is promised of the grid: what it says, whether it is so, and the count behind it.
    pub fn promises(&self) -> [(String, bool, String); 4] {
        let tails = format!(
            "p99 TTFT and p99 end to end within {:.0} % of the best baseline or below, in 95 % of cells",
            MARGIN * 100.0
        );
        let above = format!("none above it by more than {:.0} %", MOST_ABOVE * 100.0);
        let highest = "throughput at the latency target highest, in 90 % of columns".to_owned();
        let bound = format!(
            "hit rate within {:.0} points of the lookahead bound at loads below {:.0} %",
            MOST_BELOW_BOUND * 100.0,
            BOUND_LOAD * 100.0
        );
        [
            (tails, self.won.share() >= 0.95, self.won.to_string()),
            (above, self.lost.n == 0, format!("{} are", self.lost.n)),
            (highest, self.highest.share() >= 0.9, self.highest.to_string()),
            (bound, self.near_bound.share() >= 1.0, self.near_bound.to_string()),
        ]
    }

    fn add_cell(&mut self, result: &Result) {
        let Some(verdict) = result.verdict() else { return };
        let ours = result.played.iter().find(|played| played.kind == Kind::Ours);
        self.errors += ours.map_or(0, |ours| ours.figures.errors);
        self.won.add(verdict.is_won());
        self.lost.add(verdict.is_lost());
        for (name, tail) in [("TTFT", verdict.first_token), ("end to end", verdict.whole)] {
            if tail.above() > MARGIN {
                self.misses.push(format!(
                    "{}: p99 {name} {:.0} ms, {:+.1} % against {} with {:.0} ms",
                    result.name(),
                    tail.ours,
                    tail.above() * 100.0,
                    tail.baseline,
                    tail.best
                ));
            }
        }
        if let Some(is_near) = verdict.is_near_bound(result.cell.load) {
            self.near_bound.add(is_near);
            if !is_near {
                let below = verdict.below_bound.unwrap_or_default() * 100.0;
                self.misses
                    .push(format!("{}: hit rate {below:.1} points below the bound", result.name()));
            }
        }
    }

    fn add_column(&mut self, column: &Column<'_>) {
        let Some(is_highest) = column.is_highest() else {
            self.out_of_reach +=
                usize::from(column.first().is_some_and(|first| first.verdict().is_some()));
            return;
        };
        self.highest.add(is_highest);
        let loads = column.loads(Kind::Baseline);
        let best = loads.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        if let (false, Some((policy, load)), Some(first)) = (is_highest, best, column.first()) {
            let ours = column.loads(Kind::Ours).first().map_or(0.0, |(_, load)| *load);
            self.misses.push(format!(
                "{}: within the target up to {:.0} % load, {policy} up to {:.0} %",
                first.column_name(),
                ours * 100.0,
                load * 100.0
            ));
        }
    }
}

impl Result {
    /// Which cell, for a reader.
    pub fn name(&self) -> String {
        self.cell.name(&self.trace)
    }

    /// Which cell but for its load.
    pub fn column_name(&self) -> String {
        self.cell.column_name(&self.trace)
    }
}

impl Cell {
    /// Which cell of a trace, for a reader.
    pub fn name(&self, trace: &str) -> String {
        format!("{}, load {:.0} %", self.column_name(trace), self.load * 100.0)
    }

    fn column_name(&self, trace: &str) -> String {
        format!("{trace}, {} replicas, cache {}", self.replicas, self.cache)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::cells::{self, tests::result};

    #[test]
    fn cells_and_columns_are_counted_and_misses_named() {
        let tails = [[60.0, 70.0, 61.0], [80.0, 90.0, 95.0], [150.0, 120.0, 125.0]];
        let cells = cells::all(1, &[8], &[0.3], &[0.3, 0.5, 0.7]);
        let results: Vec<Result> =
            cells.into_iter().zip(tails).map(|(cell, tails)| result(cell, tails)).collect();
        let summary = Summary::of(&results);
        assert_eq!(summary.won, Count { of: 3, n: 1 });
        assert_eq!(summary.lost, Count { of: 3, n: 1 });
        assert_eq!(summary.highest, Count { of: 1, n: 0 });
        assert_eq!(summary.misses.len(), 5);
        assert_eq!(
            summary.misses[0],
            "t, 8 replicas, cache 0.3, load 50 %: p99 TTFT 95 ms, +18.8 % against a with 80 ms"
        );
        assert_eq!(
            summary.misses[4],
            "t, 8 replicas, cache 0.3: within the target up to 53 % load, b up to 57 %"
        );
        let kept = summary.promises().map(|(_, kept, _)| kept);
        assert_eq!(kept, [false, false, false, true]);
    }

    #[test]
    fn where_nobody_keeps_to_the_target_nobody_is_highest() {
        let cell = cells::Cell { trace: 0, replicas: 8, cache: 0.3, load: 0.3 };
        let summary = Summary::of(&[result(cell, [200.0, 200.0, 200.0])]);
        assert_eq!((summary.highest.of, summary.out_of_reach), (0, 1));
        assert!(summary.misses.is_empty());
    }
}
