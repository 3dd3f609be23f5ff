//! The documents say what the code does: option and metric tables, and every path they name.

#![expect(clippy::panic, reason = "a test helper fails by panicking")]
use std::collections::BTreeSet;
use std::path::Path;
use warmpath::config::OPTIONS;
use warmpath::metrics::{ALL, Kind};
use warmpath::route::Reason;

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Rows of the table whose header row begins with `| heading |`, as their cells.
fn table(text: &str, heading: &str) -> Vec<Vec<String>> {
    let start = format!("| {heading} |");
    let rows: Vec<Vec<String>> = text
        .lines()
        .skip_while(|line| !line.starts_with(&start))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()
        })
        .collect();
    assert!(!rows.is_empty(), "no table with the heading {heading:?}");
    rows
}

fn code(cell: &str) -> String {
    cell.trim_matches('`').to_owned()
}

#[test]
fn readme_lists_every_option_with_its_default_and_unit() {
    let listed: Vec<[String; 3]> = table(&document("README.md"), "Option")
        .iter()
        .map(|row| [code(&row[0]), code(&row[1]), row[2].clone()])
        .collect();
    let real: Vec<[String; 3]> = OPTIONS
        .iter()
        .map(|(path, default, unit)| {
            let default = match *default {
                "" => "required",
                "-" => "none",
                default => default,
            };
            [(*path).to_owned(), default.to_owned(), (*unit).to_owned()]
        })
        .collect();
    assert_eq!(listed, real);
}

#[test]
fn readme_lists_every_metric_with_its_kind_labels_and_meaning() {
    let listed: Vec<[String; 4]> = table(&document("README.md"), "Metric")
        .iter()
        .map(|row| [code(&row[0]), row[1].clone(), row[2].clone(), row[3].clone()])
        .collect();
    let real: Vec<[String; 4]> = ALL
        .iter()
        .map(|metric| {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram => "histogram",
            };
            [metric.name, kind, &metric.labels.join(", "), metric.help].map(str::to_owned)
        })
        .collect();
    assert_eq!(listed, real);
}

#[test]
fn readme_lists_every_reason() {
    let listed: Vec<String> =
        table(&document("README.md"), "Reason").iter().map(|row| code(&row[0])).collect();
    let real: Vec<&str> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
    assert_eq!(listed, real);
}

#[test]
fn the_shipped_envoy_takes_every_label_out_of_its_name() {
    let envoy = document("envoy/envoy.yaml");
    let labels: BTreeSet<&str> = ALL.iter().flat_map(|metric| metric.labels).copied().collect();
    for label in labels {
        let tag = format!("{{tag_name: {label}, regex: '^wasmcustom\\..*?({label}=([^;]*);)'}}");
        assert!(envoy.contains(&tag), "stats_tags lacks {tag}");
    }
}

#[test]
fn every_path_that_a_document_names_exists() {
    for name in ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"] {
        let text = document(name);
        let quoted = text.split('`').skip(1).step_by(2);
        let roots = ["src/", "tests/", "scripts/", "envoy/", ".ci/", "examples/", "docs/"];
        for path in quoted.filter(|path| roots.iter().any(|root| path.starts_with(root))) {
            let path = path.split_whitespace().next().unwrap_or(path);
            let found = Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists();
            assert!(found, "{name} names {path}, which is not there");
        }
    }
}

#[test]
fn architecture_stays_a_map() {
    let lines = document("ARCHITECTURE.md").lines().count();
    assert!(lines <= 150, "{lines} lines");
}
