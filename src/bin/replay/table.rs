//! The table a reader compares policies by, and the file of records behind it.

use crate::stats::{Quantiles, Run};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;

/// Policies in the order of the table, with what each is.
const POLICIES: [(&str, &str, &str); 20] = [
    ("random", "random", "Envoy's RANDOM"),
    ("round_robin", "round robin", "Envoy's ROUND_ROBIN"),
    (
        "least_request",
        "least request",
        "Envoy's LEAST_REQUEST, of two random replicas the less busy",
    ),
    ("least_request_scan", "least request, scan", "Envoy's LEAST_REQUEST with FULL_SCAN"),
    (
        "ring_hash_session",
        "ring hash, session",
        "Envoy's RING_HASH on a session header that the client must set",
    ),
    (
        "ring_hash_prefix",
        "ring hash, prompt head",
        "Envoy's RING_HASH on a hash of the prompt's first 2,000 bytes, in a header that the client must set",
    ),
    ("prefix_only", "prefix only", "the longest prefix, whatever waits there"),
    (
        "estimated",
        "estimated tokens",
        "Higress's ai-endpoint-picker: weighted scores, bytes for tokens, an index for each thread",
    ),
    ("vllm_router", "vllm-router", "vllm-project/router's cache_aware, by a tree of texts"),
    ("smg_cache_aware", "SMG, cache aware", "SMG's cache_aware, by KV events"),
    ("smg_least_load", "SMG, least load", "SMG's least_load, which knows no caches"),
    ("dynamo", "Dynamo", "NVIDIA Dynamo's cost, by KV events"),
    ("dynamo_predicted", "Dynamo, predicted", "NVIDIA Dynamo's cost, by what was sent where"),
    ("llm_d_weighted", "llm-d, weighted", "llm-d's default scorers: queue 2, KV usage 2, prefix 3"),
    ("llm_d_sticky", "llm-d, sticky", "llm-d's affinity filter before its token load scorer"),
    (
        "lookahead",
        "(lookahead)",
        "an assignment that knows the future, by which hit rates are measured",
    ),
    ("warmpath", "Warmpath", "this filter; no help from the client"),
    ("warmpath_agents", "Warmpath, agents", "this filter, told by agents what replicas hold"),
    (
        "warmpath_gateways",
        "Warmpath, gateways",
        "several gateways, each with this filter; any request may come to any",
    ),
    (
        "warmpath_gateways_agents",
        "Warmpath, gateways, agents",
        "the same, told by agents what replicas hold",
    ),
];

/// Reads a list of records.
///
/// # Errors
/// When the file cannot be read or is not such a list.
pub fn read(path: &Path) -> Result<Vec<Run>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let list: Value =
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    let records = list.as_array().ok_or_else(|| format!("{}: not a list", path.display()))?;
    let run = |(index, record)| {
        Run::from_json(record).ok_or_else(|| format!("{}: [{index}]: not a run", path.display()))
    };
    records.iter().enumerate().map(run).collect()
}

/// Writes a list of records.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: &Path, runs: &[Run]) -> Result<(), String> {
    let list = Value::Array(runs.iter().map(Run::to_json).collect());
    std::fs::write(path, format!("{list:#}\n")).map_err(|e| format!("{}: {e}", path.display()))
}

/// A table for each workload, and below them what each policy is.
pub fn render(runs: &[Run]) -> String {
    let mut text = String::new();
    let mut workloads: Vec<&str> = Vec::new();
    for run in runs {
        if !workloads.contains(&run.workload.as_str()) {
            workloads.push(&run.workload);
        }
    }
    for workload in workloads {
        let runs: Vec<&Run> = runs.iter().filter(|run| run.workload == workload).collect();
        let requests = runs.iter().map(|run| run.requests).max().unwrap_or_default();
        let _ = writeln!(text, "\n{workload}, {requests} requests per policy, times in ms\n");
        text.push_str(&align(&rows(&runs)));
    }
    text.push('\n');
    for (policy, title, what) in POLICIES {
        if runs.iter().any(|run| run.policy == policy) {
            let _ = writeln!(text, "{title}: {what}.");
        }
    }
    text
}

fn rows(runs: &[&Run]) -> Vec<Vec<String>> {
    let heading = [
        "policy",
        "hit rate",
        "computed",
        "TTFT p50/p90/p99",
        "inter-token p50/p90/p99",
        "e2e p99",
        "requests per replica",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(runs.iter().map(|run| row(run)));
    if runs.iter().any(|run| run.predictions.is_some()) {
        let shares = runs.iter().map(|run| {
            let share = run.predictions.map(|predictions| predictions.share() * 100.0);
            share.map_or_else(String::new, |share| format!("{share:.1} %"))
        });
        let cells = std::iter::once("cached as predicted".to_owned()).chain(shares);
        for (row, cell) in rows.iter_mut().zip(cells) {
            row.insert(2, cell);
        }
    }
    rows
}

fn row(run: &Run) -> Vec<String> {
    let title = POLICIES.iter().find(|(policy, _, _)| *policy == run.policy);
    let replicas: Vec<String> = run.requests_per_replica.values().map(u64::to_string).collect();
    let mut cells = vec![
        title.map_or(run.policy.clone(), |(_, title, _)| (*title).to_owned()),
        format!("{:.1} %", run.hit_rate() * 100.0),
        thousands(run.computed_tokens),
        three(run.first_token, 0),
        three(run.gap, 1),
        format!("{:.0}", run.whole.p99),
        replicas.join(" "),
    ];
    if run.errors > 0 {
        cells.push(format!("{} ERRORS", run.errors));
    }
    cells
}

/// Three quantiles, with so many digits behind the point.
pub fn three(quantiles: Quantiles, digits: usize) -> String {
    let Quantiles { p50, p90, p99 } = quantiles;
    format!("{p50:.digits$} / {p90:.digits$} / {p99:.digits$}")
}

/// A number with commas.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Rows in columns: the first to the left, as text is, the others to the right, as numbers are.
pub fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(String::len).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (index, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = if index == 0 {
                write!(text, "{cell:<width$}")
            } else {
                write!(text, "   {cell:>width$}")
            };
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{Predictions, Sample};
    use std::time::Duration;

    fn run(policy: &str, workload: &str) -> Run {
        let sample = Sample {
            replica: Some("replica-1".to_owned()),
            first_token: Some(Duration::from_millis(40)),
            gaps: [Duration::from_micros(10_540)].into_iter().collect(),
            whole: Duration::from_millis(1620),
            prompt_tokens: 2_000_000,
            cached_tokens: 500_000,
            ..Sample::default()
        };
        Run::of(policy, workload, &[sample])
    }

    #[test]
    fn a_row_shows_each_figure_once() {
        let text = render(&[run("round_robin", "conversations")]);
        let row = text.lines().find(|line| line.starts_with("round robin ")).unwrap();
        let cells: Vec<&str> = row.split("   ").map(str::trim).filter(|c| !c.is_empty()).collect();
        let expected = [
            "round robin",
            "25.0 %",
            "1,500,000",
            "40 / 40 / 40",
            "10.5 / 10.5 / 10.5",
            "1620",
            "1",
        ];
        assert_eq!(cells, expected);
    }

    #[test]
    fn workloads_have_a_table_each_and_only_played_policies_a_footnote() {
        let text = render(&[run("warmpath", "conversations"), run("warmpath", "no_reuse")]);
        assert_eq!(text.matches("requests per policy").count(), 2);
        assert_eq!(text.matches("this filter").count(), 1);
        assert!(!text.contains("ROUND_ROBIN"));
    }

    #[test]
    fn predictions_have_a_column_where_there_are_any() {
        let plain = run("round_robin", "w");
        let predictions = Predictions { equal: 97, over: 3, ..Predictions::default() };
        let told = Run { predictions: Some(predictions), ..run("warmpath_agents", "w") };
        assert!(!render(std::slice::from_ref(&plain)).contains("as predicted"));
        let text = render(&[plain, told]);
        assert!(text.contains("cached as predicted") && text.contains("97.0 %"), "{text}");
    }

    #[test]
    fn errors_show_in_the_row() {
        let failed = Sample { error: Some("503".to_owned()), ..Sample::default() };
        let text = render(&[Run::of("warmpath", "no_reuse", &[failed])]);
        assert!(text.contains("1 ERRORS"));
    }

    #[track_caller]
    fn check_thousands(number: u64, expected: &str) {
        assert_eq!(thousands(number), expected);
    }

    #[test]
    fn thousands_are_parted_by_commas() {
        check_thousands(0, "0");
        check_thousands(999, "999");
        check_thousands(1000, "1,000");
        check_thousands(1234567, "1,234,567");
    }
}
