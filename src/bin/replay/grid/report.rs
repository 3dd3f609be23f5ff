//! The grid for readers: a table for each cell on the terminal, and the Markdown that `docs/simulation.md` holds.

use super::cells::{Column, Result};
use super::peers;
use super::summary::Summary;
use super::verdict::{Kind, Played, Tail};
use crate::table::{align, thousands, three};
use std::fmt::Write as _;

/// One cell: every policy's figures, and the verdict.
pub fn cell(result: &Result) -> String {
    let heading = [
        "policy",
        "hit rate",
        "computed",
        "TTFT p50/p90/p99",
        "inter-token p50/p90/p99",
        "e2e p50/p90/p99",
        "spread",
        "answers/s",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(result.played.iter().map(row));
    let mut text = format!("\n{}, times in ms\n\n{}", result.name(), align(&rows));
    if let Some(verdict) = result.verdict() {
        let tail = |tail: Tail| format!("{:+.1} % against {}", tail.above() * 100.0, tail.baseline);
        let word = match (verdict.is_won(), verdict.is_lost()) {
            (true, _) => "won",
            (_, true) => "LOST",
            _ => "missed",
        };
        let (first, whole) = (tail(verdict.first_token), tail(verdict.whole));
        let _ = write!(text, "{word}: p99 TTFT {first}, p99 end to end {whole}");
        if let Some(below) = verdict.below_bound {
            let _ =
                write!(text, ", hit rate {:.1} points below the lookahead bound", below * 100.0);
        }
        text.push('\n');
    }
    text
}

fn row(played: &Played) -> Vec<String> {
    let figures = &played.figures;
    let mut cells = vec![
        played.policy.to_owned(),
        format!("{:.1} %", figures.hit_rate() * 100.0),
        thousands(figures.computed_tokens),
        three(figures.first_token, 0),
        three(figures.gap, 1),
        three(figures.whole, 0),
        format!("{:.2}", figures.spread),
        format!("{:.1}", figures.throughput),
    ];
    if figures.errors > 0 {
        cells.push(format!("{} ERRORS", figures.errors));
    }
    cells
}

/// The cells that were not played.
pub fn unplayed(cells: &[String]) -> String {
    if cells.is_empty() {
        return String::new();
    }
    let mut text =
        String::from("\nNot played, as the trace cannot offer the load with as many requests:\n\n");
    cells.iter().for_each(|cell| text.push_str(&format!("- {cell}\n")));
    text
}

/// The promises, and whether they are kept.
pub fn summary(results: &[Result]) -> String {
    let summary = Summary::of(results);
    let mut text = String::from("\n");
    for (promise, kept, count) in summary.promises() {
        let _ = writeln!(text, "{} {promise}: {count}", if kept { "KEPT  " } else { "MISSED" });
    }
    if summary.out_of_reach > 0 {
        let _ = writeln!(
            text,
            "In {} columns nobody keeps to the target at any load.",
            summary.out_of_reach
        );
    }
    if !summary.misses.is_empty() {
        let _ = writeln!(text, "\nMisses:\n  {}", summary.misses.join("\n  "));
    }
    text
}

/// The Markdown: promises, tails by cell, loads within the target, hit rates, misses. `tuned_on` is the trace that
/// Warmpath's defaults were tuned on.
pub fn markdown(results: &[Result], tuned_on: &str) -> String {
    let mut text = String::new();
    let mut table = |heading: &[&str], rows: Vec<Vec<String>>| {
        let _ = writeln!(text, "| {} |\n|{}", heading.join(" | "), " --- |".repeat(heading.len()));
        for row in rows {
            let _ = writeln!(text, "| {} |", row.join(" | "));
        }
        text.push('\n');
    };
    let (summary, columns) = (Summary::of(results), Column::all(results));
    let kept = |kept| if kept { "yes" } else { "no" }.to_owned();
    let promises = summary.promises().map(|(promise, is, count)| vec![promise, kept(is), count]);
    table(&["promise", "kept", "count"], promises.to_vec());
    table(
        &["trace", "cells won", "cells lost", "highest throughput at the target", "near the bound"],
        by_trace(results, tuned_on),
    );
    let loads: Vec<String> = columns
        .iter()
        .map(|column| column.cells.as_slice())
        .max_by_key(|cells| cells.len())
        .unwrap_or_default()
        .iter()
        .map(|result| format!("load {:.0} %", result.cell.load * 100.0))
        .collect();
    let head = ["trace", "replicas", "cache"];
    let heading: Vec<&str> = head.into_iter().chain(loads.iter().map(String::as_str)).collect();
    table(&heading, columns.iter().map(|column| tails(column, tuned_on)).collect());
    let heading =
        ["trace", "replicas", "cache", "target", "Warmpath up to", "best baseline up to", "which"];
    table(&heading, columns.iter().map(|column| within(column, tuned_on)).collect());
    let heading = [
        "trace",
        "replicas",
        "cache",
        "Warmpath",
        "lookahead bound",
        "infinite cache",
        "best baseline",
        "which",
    ];
    table(&heading, columns.iter().filter_map(|column| hits(column, tuned_on)).collect());
    table(
        &["policy, beside the best of the others", "cells won", "cells lost", "above, in the mean"],
        peers::standings(results).iter().map(standing).collect(),
    );
    for miss in &summary.misses {
        let _ = writeln!(text, "- {miss}");
    }
    text
}

fn standing(standing: &peers::Standing) -> Vec<String> {
    let peers::Standing { policy, won, lost, above } = standing;
    vec![
        (*policy).to_owned(),
        won.to_string(),
        lost.to_string(),
        format!("{:+.0} %", above * 100.0),
    ]
}

/// The trace's name, marked if it was tuned on.
fn marked(trace: &str, tuned_on: &str) -> String {
    if trace == tuned_on { format!("{trace} (tuned on)") } else { trace.to_owned() }
}

fn by_trace(results: &[Result], tuned_on: &str) -> Vec<Vec<String>> {
    let mut names: Vec<&str> = Vec::new();
    for result in results {
        if !names.contains(&result.trace.as_str()) {
            names.push(&result.trace);
        }
    }
    let row = |name: &&str| {
        let of: Vec<Result> =
            results.iter().filter(|result| result.trace == *name).cloned().collect();
        let summary = Summary::of(&of);
        vec![
            marked(name, tuned_on),
            summary.won.to_string(),
            summary.lost.n.to_string(),
            summary.highest.to_string(),
            summary.near_bound.to_string(),
        ]
    };
    names.iter().map(row).collect()
}

fn place(column: &Column<'_>, tuned_on: &str) -> Vec<String> {
    let Some(first) = column.first() else { return Vec::new() };
    let cell = &first.cell;
    vec![marked(&first.trace, tuned_on), cell.replicas.to_string(), cell.cache.to_string()]
}

/// Both tails against the best baselines', a cell each; what misses is bold.
fn tails(column: &Column<'_>, tuned_on: &str) -> Vec<String> {
    let mut row = place(column, tuned_on);
    row.extend(column.cells.iter().map(|result| {
        let Some(verdict) = result.verdict() else { return String::new() };
        let percent = |tail: Tail| format!("{:+.0} %", tail.above() * 100.0);
        let text = format!("{}, {}", percent(verdict.first_token), percent(verdict.whole));
        if verdict.is_won() { text } else { format!("**{text}**") }
    }));
    row
}

fn within(column: &Column<'_>, tuned_on: &str) -> Vec<String> {
    let mut row = place(column, tuned_on);
    let target = column.first().map_or(0.0, |first| first.target);
    let best = |kind| column.loads(kind).into_iter().rev().max_by(|a, b| a.1.total_cmp(&b.1));
    let load = |best: Option<(&str, f64)>| {
        best.map_or(String::new(), |(_, load)| format!("{:.0} %", load * 100.0))
    };
    let baseline = best(Kind::Baseline);
    row.push(format!("{target:.0} ms"));
    row.push(load(best(Kind::Ours)));
    row.push(load(baseline));
    row.push(baseline.map_or("", |(policy, _)| policy).to_owned());
    row
}

/// Hit rates at the lowest load.
fn hits(column: &Column<'_>, tuned_on: &str) -> Option<Vec<String>> {
    let first = column.first()?;
    let best = |kind| {
        let of_kind = first.played.iter().filter(|played| played.kind == kind);
        of_kind.max_by(|a, b| a.figures.hit_rate().total_cmp(&b.figures.hit_rate()))
    };
    let rate = |kind| {
        best(kind)
            .map_or(String::new(), |played| format!("{:.1} %", played.figures.hit_rate() * 100.0))
    };
    let mut row = place(column, tuned_on);
    let percent = |rate: f64| format!("{:.1} %", rate * 100.0);
    row.push(rate(Kind::Ours));
    row.push(first.lookahead.map_or(String::new(), percent));
    row.extend([percent(first.ceiling), rate(Kind::Baseline)]);
    row.push(best(Kind::Baseline).map_or("", |played| played.policy).to_owned());
    Some(row)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::cells::{self, tests::result};

    fn results() -> Vec<Result> {
        let cells = cells::all(1, &[8, 64], &[0.3], &[0.3, 0.5]);
        let tails =
            [[60.0, 70.0, 61.0], [80.0, 90.0, 95.0], [150.0, 120.0, 125.0], [1.0, 1.0, 1.0]];
        cells.into_iter().zip(tails).map(|(cell, tails)| result(cell, tails)).collect()
    }

    #[test]
    fn a_cells_table_ends_with_its_verdict() {
        let texts: Vec<String> = results().iter().map(cell).collect();
        let won = "\nwon: p99 TTFT +1.7 % against a, p99 end to end +1.7 % against a, hit rate 2.0 points";
        assert!(texts[0].contains(won), "{}", texts[0]);
        assert!(texts[1].contains("\nLOST: p99 TTFT +18.8 % against a"));
        assert!(texts[2].contains("\nmissed: p99 TTFT +4.2 % against b"));
    }

    #[test]
    fn a_row_of_markdown_has_as_many_cells_as_its_heading() {
        let text = markdown(&results(), "t");
        let bars = |line: &str| line.matches('|').count();
        for table in text.split("\n\n").filter(|table| table.contains('|')) {
            let width = table.lines().next().map(bars).unwrap();
            for line in table.lines().filter(|line| line.starts_with('|')) {
                assert_eq!(bars(line), width, "{line}");
            }
        }
        assert!(
            text.contains("| t (tuned on) | 8 | 0.3 | +2 %, +2 % | **+19 %, +19 %** |"),
            "{text}"
        );
        assert!(text.contains("\n- t, 8 replicas, cache 0.3, load 50 %: p99 TTFT 95 ms"));
    }

    #[test]
    fn the_summary_says_what_is_kept() {
        let text = summary(&results());
        assert!(text.contains("MISSED p99 TTFT and p99 end to end within 2 %"));
        assert!(text.contains("KEPT   hit rate within 3 points"));
    }
}
