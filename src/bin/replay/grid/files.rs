//! The grid as CSV and as JSON: every policy's figures in every cell.

use super::cells::{Column, Result};
use super::figures::Figures;
use super::summary::Summary;
use super::verdict::{Kind, Tail, Verdict};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// A line for each policy in each cell.
pub fn csv(results: &[Result]) -> String {
    let mut text = format!("trace,replicas,cache,load,policy,kind,{}\n", Figures::NAMES.join(","));
    for result in results {
        let cell = &result.cell;
        for played in &result.played {
            let values = played.figures.values().map(|value| value.to_string()).join(",");
            let (trace, policy, kind) = (&result.trace, played.policy, played.kind.name());
            let _ = writeln!(
                text,
                "{trace},{},{},{},{policy},{kind},{values}",
                cell.replicas, cell.cache, cell.load
            );
        }
    }
    text
}

/// What was played, how, and what came of it.
pub fn json(results: &[Result], setting: Value) -> Value {
    let summary = Summary::of(results);
    let promises = summary
        .promises()
        .map(|(promise, kept, count)| json!({ "promise": promise, "kept": kept, "count": count }));
    json!({
        "setting": setting,
        "promises": promises,
        "misses": summary.misses,
        "out_of_reach": summary.out_of_reach,
        "errors": summary.errors,
        "cells": results.iter().map(cell).collect::<Vec<_>>(),
        "columns": Column::all(results).iter().map(column).collect::<Vec<_>>(),
    })
}

fn cell(result: &Result) -> Value {
    let figures = |figures: &Figures| -> Map<String, Value> {
        Figures::NAMES.iter().map(|name| (*name).to_owned()).zip(figures.values()).collect()
    };
    let policies: Map<String, Value> = result
        .played
        .iter()
        .map(|played| (played.policy.to_owned(), Value::Object(figures(&played.figures))))
        .collect();
    json!({
        "trace": result.trace,
        "replicas": result.cell.replicas,
        "cache": result.cell.cache,
        "load": result.cell.load,
        "cache_is_raised": result.is_raised,
        "target_ttft_p99_ms": result.target,
        "hit_rate_of_infinite_cache": rounded(result.ceiling),
        "hit_rate_of_lookahead": result.lookahead.map(rounded),
        "verdict": result.verdict().map(|verdict| verdict_json(&verdict, result.cell.load)),
        "policies": policies,
    })
}

fn verdict_json(verdict: &Verdict, load: f64) -> Value {
    let tail = |tail: Tail| json!({ "best": tail.baseline, "above": rounded(tail.above()) });
    json!({
        "won": verdict.is_won(),
        "lost": verdict.is_lost(),
        "ttft_p99": tail(verdict.first_token),
        "e2e_p99": tail(verdict.whole),
        "points_below_lookahead": verdict.below_bound.map(|below| rounded(below * 100.0)),
        "near_lookahead": verdict.is_near_bound(load),
        "computed_tokens_of_least_baseline": rounded(verdict.computed),
    })
}

fn column(column: &Column<'_>) -> Value {
    let loads = |kind| -> Map<String, Value> {
        column
            .loads(kind)
            .into_iter()
            .map(|(policy, load)| (policy.to_owned(), rounded(load)))
            .collect()
    };
    let first = column.first();
    json!({
        "trace": first.map(|first| first.trace.as_str()),
        "replicas": first.map(|first| first.cell.replicas),
        "cache": first.map(|first| first.cell.cache),
        "highest": column.is_highest(),
        "load_within_target": { "ours": loads(Kind::Ours), "baselines": loads(Kind::Baseline) },
    })
}

fn rounded(value: f64) -> Value {
    json!((value * 1e4).round() / 1e4)
}

impl Kind {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Baseline => "baseline",
            Self::Bound => "bound",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::cells::{Cell, tests::result};

    fn results() -> Vec<Result> {
        vec![result(Cell { trace: 0, replicas: 8, cache: 0.3, load: 0.5 }, [60.0, 70.0, 50.0])]
    }

    #[test]
    fn a_line_of_csv_has_a_value_for_each_name() {
        let text = csv(&results());
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(lines.len(), 4);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()));
        assert_eq!(lines[3][..6], ["t", "8", "0.3", "0.5", "warmpath", "ours"]);
        let tail = lines[0].iter().position(|name| *name == "ttft_p99_ms").unwrap();
        assert_eq!(lines[3][tail], "50.0");
    }

    #[test]
    fn the_json_has_settings_verdicts_and_figures() {
        let value = json(&results(), json!({ "seeds": 3 }));
        assert_eq!(value["setting"]["seeds"], 3);
        assert_eq!(value["cells"][0]["policies"]["a"]["ttft_p99_ms"], 60.0);
        assert_eq!(value["cells"][0]["verdict"]["ttft_p99"]["best"], "a");
        assert_eq!(value["cells"][0]["verdict"]["ttft_p99"]["above"], -0.1667);
        assert_eq!(value["columns"][0]["load_within_target"]["ours"]["warmpath"], 0.5);
    }
}
