//! The agent's own metrics, as Prometheus reads them.

use super::server::Shared;
use std::fmt::Write as _;
use std::sync::atomic::Ordering::Relaxed;

/// A metric: its name behind `warmpath_agent_`, its kind, what it is, and its value for each label.
type Metric = (&'static str, &'static str, &'static str, Vec<(String, u64)>);

/// The page.
pub fn page(shared: &Shared) -> String {
    let mut page = String::new();
    for (name, kind, help, values) in metrics(shared) {
        // Writing into a text cannot fail.
        let _ = writeln!(page, "# HELP warmpath_agent_{name} {help}.");
        let _ = writeln!(page, "# TYPE warmpath_agent_{name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(page, "warmpath_agent_{name}{labels} {value}");
        }
    }
    page
}

fn metrics(shared: &Shared) -> Vec<Metric> {
    let (asked, failed) = {
        let known = shared.known();
        (known.asked, known.failed)
    };
    let mut metrics = of_ranks(shared);
    let one = |value: u64| vec![(String::new(), value)];
    metrics.extend([
        (
            "draining",
            "gauge",
            "Whether the replica is to get no new requests",
            one(shared.is_draining().into()),
        ),
        (
            "engine_requests_total",
            "counter",
            "Requests to the engine for its models and metrics",
            one(asked),
        ),
        (
            "engine_failures_total",
            "counter",
            "Of these, the ones that brought nothing",
            one(failed),
        ),
        ("reports_total", "counter", "Reports that were read", one(shared.reports.load(Relaxed))),
        (
            "snapshots_total",
            "counter",
            "Of these, the ones that were snapshots",
            one(shared.snapshots.load(Relaxed)),
        ),
        (
            "refused_total",
            "counter",
            "Requests without the token",
            one(shared.refused.load(Relaxed)),
        ),
    ]);
    metrics
}

/// The metrics of each rank, in one list for each name.
fn of_ranks(shared: &Shared) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = Vec::new();
    for followed in &shared.ranks {
        let of_rank = of_rank(followed);
        if metrics.is_empty() {
            metrics = of_rank;
        } else {
            for (all, (.., values)) in metrics.iter_mut().zip(of_rank) {
                all.3.extend(values);
            }
        }
    }
    metrics
}

fn of_rank(followed: &super::follow::Followed) -> Vec<Metric> {
    let rank = followed.rank();
    let (happened, seen, counts) = (rank.happened(), rank.seen(), rank.counts());
    let bytes = rank.cache().held().bytes() as u64;
    let label = format!("{{rank=\"{}\"}}", followed.number);
    let one = |value: u64| vec![(label.clone(), value)];
    let reasons = |reasons: &[(&str, u64)]| {
        let labels = |reason: &str| format!("{{rank=\"{}\",reason=\"{reason}\"}}", followed.number);
        reasons.iter().map(|(reason, value)| (labels(reason), *value)).collect()
    };
    let ignored = reasons(&[
        ("junk", happened.junk),
        ("foreign", happened.foreign),
        ("other_rank", happened.other_rank),
        ("unknown_event", seen.unknown_events),
        ("unknown_removal", seen.unknown_removals),
    ]);
    let left_out = reasons(&[
        ("keys", seen.keyed),
        ("adapter", seen.unlisted_adapters),
        ("tokens", seen.without_tokens),
        ("parent", seen.unknown_parents),
        ("limit", seen.over_limit),
    ]);
    vec![
        (
            "live",
            "gauge",
            "Whether the engine's events are heard without a gap",
            one(rank.is_live().into()),
        ),
        (
            "incomplete",
            "gauge",
            "Whether more may be held than is reported",
            one(rank.is_incomplete().into()),
        ),
        ("held_blocks", "gauge", "Blocks that are reported as held", one(counts.told)),
        (
            "offloaded_blocks",
            "gauge",
            "Of these, the ones that only an offloading tier holds",
            one(counts.offloaded),
        ),
        (
            "unreachable_blocks",
            "gauge",
            "Blocks that the engine holds behind one that it does not",
            one(counts.unreachable),
        ),
        (
            "unmatched_blocks",
            "gauge",
            "Blocks that the engine holds and that are left out",
            one(rank.cache().unmatched()),
        ),
        ("memory_bytes", "gauge", "Memory of the blocks that are known", one(bytes)),
        ("batches_total", "counter", "Batches of events that were applied", one(happened.batches)),
        ("stored_blocks_total", "counter", "Blocks that the engine stored", one(seen.stored)),
        ("removed_blocks_total", "counter", "Blocks that the engine removed", one(seen.removed)),
        ("ignored_total", "counter", "What was heard and meant nothing, by reason", ignored),
        ("left_out_blocks_total", "counter", "Blocks that were left out, by reason", left_out),
        ("gaps_total", "counter", "Times that batches were missing", one(happened.gaps)),
        (
            "restarts_total",
            "counter",
            "Times that the engine turned out to be another one",
            one(happened.restarts),
        ),
        (
            "clears_total",
            "counter",
            "Times that the engine cleared its cache",
            one(happened.clears),
        ),
        (
            "overflows_total",
            "counter",
            "Times that more was said to be held than there is room for",
            one(happened.overflows),
        ),
        ("replays_total", "counter", "Replays that were asked for", one(happened.replays)),
        ("generations_total", "counter", "Generations of the report", one(rank.generations())),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::follow::Followed;
    use std::sync::Arc;

    fn shared(ranks: u32) -> Shared {
        let followed = |number| Arc::new(Followed::idle(number));
        Shared::new((0..ranks).map(followed).collect(), None)
    }

    #[test]
    fn the_document_lists_every_metric_of_the_agent_with_its_kind_and_meaning() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/agents.md");
        let document = std::fs::read_to_string(path).unwrap();
        let listed: Vec<&str> =
            document.lines().filter(|line| line.starts_with("| `warmpath_agent_")).collect();
        let real: Vec<String> = metrics(&shared(1))
            .iter()
            .map(|(name, kind, help, _)| format!("| `warmpath_agent_{name}` | {kind} | {help} |"))
            .collect();
        assert_eq!(listed, real);
    }

    #[test]
    fn each_rank_has_its_own_line_under_one_head() {
        let page = page(&shared(2));
        let live: Vec<&str> = page.lines().filter(|line| line.contains("agent_live")).collect();
        assert_eq!(
            live,
            [
                "# HELP warmpath_agent_live Whether the engine's events are heard without a gap.",
                "# TYPE warmpath_agent_live gauge",
                "warmpath_agent_live{rank=\"0\"} 0",
                "warmpath_agent_live{rank=\"1\"} 0",
            ]
        );
        assert!(
            page.contains("\nwarmpath_agent_left_out_blocks_total{rank=\"1\",reason=\"keys\"} 0\n")
        );
    }
}
