//! The metrics' names, kinds, labels and meanings; nothing that counts.
//!
//! Envoy's wasm metrics have a name only, so labels are written into it (`reason=cold;`) and
//! taken out again by the bootstrap's `stats_tags`. The README's table is checked against
//! [`ALL`].

/// What kind of number a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// The value now.
    Gauge,
    /// A distribution.
    Histogram,
}

/// One metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Name as Prometheus shows it.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
    /// Label names, in order.
    pub labels: &'static [&'static str],
    /// Meaning, with the unit.
    pub help: &'static str,
    /// The name's hash.
    pub(crate) key: u64,
}

impl Metric {
    const fn new(
        name: &'static str,
        kind: Kind,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self { name, kind, labels, help, key: key(name.as_bytes()) }
    }

    const fn counter(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self::new(name, Kind::Counter, labels, help)
    }

    const fn gauge(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self::new(name, Kind::Gauge, labels, help)
    }

    const fn histogram(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Histogram, &[], help)
    }

    /// The name Envoy is given: the labels' values in front, in the order of their declaration.
    ///
    /// A value's characters that would end it, or that Envoy's stat names cannot carry, become
    /// `_`; a value too long is cut. A missing value is empty.
    pub fn envoy_name(&self, values: &[&str]) -> String {
        let mut name = String::new();
        for (index, label) in self.labels.iter().enumerate() {
            let value = values.get(index).copied().unwrap_or_default();
            name.push_str(label);
            name.push('=');
            name.extend(value.chars().take(MAX_LABEL_CHARS).map(|c| {
                let plain = c.is_ascii_alphanumeric() || "-_./:[]@".contains(c);
                if plain { c } else { '_' }
            }));
            name.push(';');
        }
        name.push_str(self.name);
        name
    }
}

/// FNV-1a, which the compiler works out.
const fn key(mut name: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    while let [byte, rest @ ..] = name {
        hash = (hash ^ *byte as u64).wrapping_mul(0x0100_0000_01b3);
        name = rest;
    }
    hash
}

/// A label's value is cut here: names come from configurations and addresses, both shorter.
pub(crate) const MAX_LABEL_CHARS: usize = 128;

/// Every request, once.
pub const REQUESTS: Metric = Metric::counter(
    "warmpath_requests_total",
    &["reason"],
    "Requests by the reason for their route",
);
/// Blind share per API.
pub const PROMPTS: Metric = Metric::counter(
    "warmpath_prompts_total",
    &["api", "prompt", "class"],
    "Requests by API, by class, and by whether their prompt's tokens were known",
);
/// Prompts of batches.
pub const MORE_PROMPTS: Metric = Metric::counter(
    "warmpath_more_prompts_total",
    &["api"],
    "Prompts of batches beyond the first, by which alone a batch is routed",
);
/// Own count of prompt tokens.
pub const PROMPT_TOKENS: Metric = Metric::counter(
    "warmpath_prompt_tokens_total",
    &["model", "class"],
    "Tokens of prompts that were tokenized here",
);
/// Predicted hits.
pub const PREDICTED_CACHED_TOKENS: Metric = Metric::counter(
    "warmpath_predicted_cached_tokens_total",
    &["model", "class"],
    "Of those, tokens predicted to come from the chosen replica's cache",
);
/// Prompts that end early for us.
pub const PARTIAL_PROMPTS: Metric = Metric::counter(
    "warmpath_partial_prompts_total",
    &["kind"],
    "Prompts routed by their head because the ids behind it cannot be known",
);
/// Answers by what could be read of them.
pub const RESPONSES: Metric = Metric::counter(
    "warmpath_responses_total",
    &["usage"],
    "Successful responses to routed prompts, by what their usage carried",
);
/// Failed answers.
pub const FAILED_RESPONSES: Metric = Metric::counter(
    "warmpath_failed_responses_total",
    &["class"],
    "Responses other than 200 to routed requests, by status class",
);
/// The engine's count of prompt tokens.
pub const REPORTED_PROMPT_TOKENS: Metric = Metric::counter(
    "warmpath_reported_prompt_tokens_total",
    &["model", "class"],
    "Prompt tokens by the replicas' own account, where the response also told cached tokens",
);
/// The engine's count of hits.
pub const REPORTED_CACHED_TOKENS: Metric = Metric::counter(
    "warmpath_reported_cached_tokens_total",
    &["model", "class"],
    "Cached tokens by the replicas' own account",
);
/// Drift of the tokenizer or template.
pub const PROMPT_COUNT: Metric = Metric::counter(
    "warmpath_prompt_count_total",
    &["model", "result"],
    "Responses whose prompt_tokens is equal to the count made here, or differs",
);
/// The verdict on a model's prompts.
pub const MODEL_TRUSTED: Metric = Metric::gauge(
    "warmpath_model_trusted",
    &["model", "kind"],
    "1 while prompts of this kind are matched, 0 while they seem to differ from the engine's",
);
/// Comparisons of ids.
pub const ORACLE: Metric = Metric::counter(
    "warmpath_oracle_total",
    &["model", "oracle", "result"],
    "Token ids compared with a replica's, by where they come from and what came out",
);
/// Quality of predictions.
pub const PREDICTION: Metric = Metric::counter(
    "warmpath_prediction_total",
    &["model", "result"],
    "Responses whose cached_tokens is equal to the prediction, over it, or under it",
);
/// Size of over-predictions.
pub const OVERPREDICTED_TOKENS: Metric = Metric::counter(
    "warmpath_overpredicted_tokens_total",
    &["model"],
    "Tokens predicted to be cached that were not",
);
/// Size of under-predictions.
pub const UNDERPREDICTED_TOKENS: Metric = Metric::counter(
    "warmpath_underpredicted_tokens_total",
    &["model"],
    "Tokens cached that were not predicted",
);
/// How far another policy would have gone elsewhere.
pub const SHADOW_DECISIONS: Metric = Metric::counter(
    "warmpath_shadow_decisions_total",
    &["result"],
    "Decisions in which shadow's policy would have chosen the same replica, or another",
);
/// What each would have found.
pub const SHADOW_CACHED_TOKENS: Metric = Metric::counter(
    "warmpath_shadow_cached_tokens_total",
    &["policy"],
    "Of those decisions' prompts, tokens predicted to be cached where each of the two policies chose",
);
/// What each would have cost.
pub const SHADOW_COST_US: Metric = Metric::counter(
    "warmpath_shadow_cost_us_total",
    &["policy"],
    "What those choices cost by the formula, in microseconds",
);
/// Choices that proved worse than another.
pub const REGRET_REQUESTS: Metric = Metric::counter(
    "warmpath_regret_requests_total",
    &["reason"],
    "Successful responses to routed requests, by why most was lost against the best candidate in hindsight",
);
/// Tokens lost by them.
pub const REGRET_TOKENS: Metric = Metric::counter(
    "warmpath_regret_tokens_total",
    &["reason"],
    "Tokens that the best candidate in hindsight had cached and the chosen replica had not, each by its reason",
);
/// Time lost by them.
pub const REGRET_US: Metric = Metric::counter(
    "warmpath_regret_us_total",
    &["reason"],
    "Microseconds lost against the best candidate in hindsight, each by its reason",
);
/// Chosen is not always served.
pub const SERVED_ELSEWHERE: Metric = Metric::counter(
    "warmpath_served_elsewhere_total",
    &[],
    "Responses that came from another replica than the chosen one (a retry, or Envoy's own policy)",
);
/// Failures by what they prove.
pub const STRIKES: Metric = Metric::counter(
    "warmpath_strikes_total",
    &["kind"],
    "Failures held against a replica, by what they prove",
);
/// Suspensions.
pub const SUSPENSIONS: Metric = Metric::counter(
    "warmpath_suspensions_total",
    &[],
    "Suspensions of a replica for its failures, a failed probe's included",
);
/// Time to first token.
pub const TTFT: Metric = Metric::new(
    "warmpath_time_to_first_token_ms",
    Kind::Histogram,
    &["class"],
    "Milliseconds from the complete body to the first content event of a streamed answer",
);
/// Pace of an answer.
pub const TOKEN_TIME: Metric = Metric::new(
    "warmpath_inter_token_us",
    Kind::Histogram,
    &["class"],
    "Microseconds from one token of a streamed answer to the next, on average over the answer",
);
/// Cost of a decision.
pub const DECISION: Metric = Metric::histogram(
    "warmpath_decision_us",
    "Microseconds from the complete body to the routing header",
);
/// How long Envoy's worker was held.
pub const CALLBACK: Metric = Metric::new(
    "warmpath_callback_us",
    Kind::Histogram,
    &["callback"],
    "Microseconds that one callback held its worker",
);
/// Poll health.
pub const POLLS: Metric = Metric::counter(
    "warmpath_polls_total",
    &["target", "result"],
    "Calls of the poller, by what was asked for and what came",
);
/// Cache reports by what came of them.
pub const REPORTS: Metric = Metric::counter(
    "warmpath_cache_reports_total",
    &["result"],
    "Answers of agents, by what they were",
);
/// Size of reports.
pub const REPORT_BYTES: Metric = Metric::counter(
    "warmpath_cache_report_bytes_total",
    &[],
    "Bytes of agents' answers that were read",
);
/// Agents that are not believed any more.
pub const REPORT_FALLBACKS: Metric = Metric::counter(
    "warmpath_cache_report_fallbacks_total",
    &["reason"],
    "Times that a replica's agent could not be believed any more, by why",
);
/// Agents by what they are to their replicas.
pub const AGENTS: Metric =
    Metric::gauge("warmpath_agents", &["cluster", "state"], "Replicas by what their agents tell");
/// Blocks by the agent's account.
pub const REPLICA_OBSERVED: Metric = Metric::gauge(
    "warmpath_replica_observed_blocks",
    &["cluster", "replica"],
    "KV blocks that the replica holds by its agent's account; 0 without one",
);
/// Age of the cache report.
pub const REPLICA_CACHE_REPORT_AGE: Metric = Metric::gauge(
    "warmpath_replica_cache_report_age_ms",
    &["cluster", "replica"],
    "Milliseconds since the last report of the replica's agent; absent before the first",
);
/// Members that found no place.
pub const UNPLACED_REPLICAS: Metric = Metric::gauge(
    "warmpath_unplaced_replicas",
    &["cluster"],
    "Cluster members beyond the 1,024 that a replica table holds",
);
/// Restarts seen.
pub const RESTARTS: Metric = Metric::counter(
    "warmpath_replica_restarts_total",
    &[],
    "Restarts of replicas, seen by a changed process start time",
);
/// Replicas by health.
pub const REPLICAS: Metric = Metric::gauge(
    "warmpath_replicas",
    &["cluster", "health"],
    "Replicas in the table: healthy, unhealthy, draining",
);
/// Load: running.
pub const REPLICA_RUNNING: Metric = Metric::gauge(
    "warmpath_replica_running",
    &["cluster", "replica"],
    "Requests in the replica's batch, as it last reported",
);
/// Load: waiting.
pub const REPLICA_WAITING: Metric = Metric::gauge(
    "warmpath_replica_waiting",
    &["cluster", "replica"],
    "Requests queued in the replica, as it last reported",
);
/// Load: KV.
pub const REPLICA_KV_USAGE: Metric = Metric::gauge(
    "warmpath_replica_kv_usage_percent",
    &["cluster", "replica"],
    "KV blocks held by running requests, percent, as the replica last reported",
);
/// Age of the report.
pub const REPLICA_REPORT_AGE: Metric = Metric::gauge(
    "warmpath_replica_report_age_ms",
    &["cluster", "replica"],
    "Milliseconds since the replica's last report; absent before the first",
);
/// Own in flight.
pub const REPLICA_IN_FLIGHT: Metric = Metric::gauge(
    "warmpath_replica_in_flight",
    &["cluster", "replica"],
    "Requests that this Envoy has in flight there",
);
/// Suspended.
pub const REPLICA_SUSPENDED: Metric = Metric::gauge(
    "warmpath_replica_suspended",
    &["cluster", "replica"],
    "1 while the replica is suspended for its failures, until a probe has succeeded; else 0",
);
/// Learned: prefill.
pub const REPLICA_PREFILL_RATE: Metric = Metric::gauge(
    "warmpath_replica_prefill_tokens_per_s",
    &["cluster", "replica"],
    "Prompt tokens that the replica computes per second, as its streamed answers show",
);
/// Learned: decode.
pub const REPLICA_DECODE_TIME: Metric = Metric::gauge(
    "warmpath_replica_decode_us_per_token",
    &["cluster", "replica"],
    "Microseconds that one more request in flight adds to each token of an answer, likewise",
);
/// Learned: how well it fits.
pub const REPLICA_WAIT_ERROR: Metric = Metric::gauge(
    "warmpath_replica_wait_error_ms",
    &["cluster", "replica"],
    "How many milliseconds first tokens came before or after they were expected, in the median of the last answers",
);
/// Learned: from how many.
pub const REPLICA_SAMPLES: Metric = Metric::gauge(
    "warmpath_replica_rate_samples",
    &["cluster", "replica"],
    "Answers that the three lines above come from; 0: not measured",
);
/// Corrections.
pub const CORRECTIONS: Metric = Metric::counter(
    "warmpath_corrections_total",
    &["result"],
    "Answers with fewer cached tokens than predicted, by what is made of them",
);
/// What was seen of speed.
pub const RATE_SAMPLES: Metric = Metric::counter(
    "warmpath_rate_samples_total",
    &["result"],
    "Answers by what they teach of a replica's speed",
);
/// Own unfinished.
pub const REPLICA_UNFINISHED: Metric = Metric::gauge(
    "warmpath_replica_unfinished_tokens",
    &["cluster", "replica"],
    "Work, in tokens, of prompts that this Envoy sent there and whose answer has not begun",
);
/// Shadow occupancy.
pub const REPLICA_SHADOW: Metric = Metric::gauge(
    "warmpath_replica_shadow_blocks",
    &["cluster", "replica"],
    "KV blocks that the replica is believed to hold; of one with an agent only those that it has not reported",
);
/// Shadow bound.
pub const REPLICA_CAPACITY: Metric = Metric::gauge(
    "warmpath_replica_capacity_blocks",
    &["cluster", "replica"],
    "KV blocks that the replica has, or seems to have where predictions show fewer",
);
/// Block size.
pub const REPLICA_BLOCK_SIZE: Metric = Metric::gauge(
    "warmpath_replica_block_size",
    &["cluster", "replica"],
    "Tokens per KV block, as the replica says; absent where it does not",
);
/// Hits by replica.
pub const REPLICA_CACHED_TOKENS: Metric = Metric::counter(
    "warmpath_replica_cached_tokens_total",
    &["cluster", "replica"],
    "Tokens of prompts predicted to come from this replica's cache, of those that were sent there",
);
/// Whom to drain.
pub const REPLICA_DRAIN_RANK: Metric = Metric::gauge(
    "warmpath_replica_drain_rank",
    &["cluster", "replica"],
    "Only with scaling: 1 where a drain would cost least, then 2, 3...; 0 for those that get no requests",
);
/// Promises kept.
pub const FIRST_TOKENS: Metric = Metric::counter(
    "warmpath_first_tokens_total",
    &["cluster", "result"],
    "Only with scaling.first_token_ms: streamed answers by whether they began within that time, or late",
);
/// How many replicas.
pub const RECOMMENDED_REPLICAS: Metric = Metric::gauge(
    "warmpath_recommended_replicas",
    &["cluster"],
    "Only with scaling: replicas that the load asks for, with hysteresis and bounds",
);
/// How many of them are guessed.
pub const SCALING_UNHEARD: Metric = Metric::gauge(
    "warmpath_scaling_unheard_replicas",
    &["cluster"],
    "Only with scaling: replicas that get requests and whose load is not known",
);
/// By what.
pub const SCALING_PRESSURE: Metric = Metric::gauge(
    "warmpath_scaling_pressure_percent",
    &["cluster", "kind"],
    "Only with scaling: what replicas have on average beside what each is to have, which is 100",
);
/// Work that waits.
pub const SCALING_BACKLOG: Metric = Metric::gauge(
    "warmpath_scaling_backlog_ms",
    &["cluster"],
    "Only with scaling: milliseconds of prompts that wait to be computed, on average",
);
/// Live VMs.
pub const VMS: Metric = Metric::gauge(
    "warmpath_vms",
    &["state"],
    "VMs of this Envoy that share their view, and of these the ones with every tokenizer loaded",
);
/// Memory per VM.
pub const VM_MEMORY: Metric =
    Metric::gauge("warmpath_vm_memory_bytes", &["vm"], "Linear memory of a VM; it never shrinks");
/// The memo's use.
pub const MEMO_PROMPTS: Metric = Metric::counter(
    "warmpath_memo_prompts_total",
    &["result"],
    "Prompts that were read, by whether the memo knew their beginning",
);
/// What it saved.
pub const MEMO_TOKENS: Metric = Metric::counter(
    "warmpath_memo_tokens_total",
    &[],
    "Tokens of prompts that were neither tokenized nor hashed anew, because the memo knew them",
);
/// What it costs.
pub const MEMO_BYTES: Metric = Metric::gauge(
    "warmpath_memo_bytes",
    &["vm"],
    "Bytes of a VM's memo, at most memo_bytes; part of its linear memory",
);
/// Tokenizer loads.
pub const TOKENIZER_LOADS: Metric = Metric::counter(
    "warmpath_tokenizer_loads_total",
    &["model", "result"],
    "Loads of a prepared file into a VM: ok, fetch_failed or damaged",
);
/// Longest step of a load.
pub const TOKENIZER_STEP: Metric = Metric::histogram(
    "warmpath_tokenizer_step_ms",
    "Milliseconds that one step of loading a tokenizer held its worker",
);
/// Lapped readers.
pub const LOG_LAPPED: Metric = Metric::counter(
    "warmpath_log_lapped_total",
    &[],
    "Segments of another VM's routed-block log that were overwritten before they were read",
);
/// Orphans.
pub const LOG_ORPHANED: Metric = Metric::counter(
    "warmpath_log_orphaned_total",
    &[],
    "Log records whose parent block is not held here (any more)",
);
/// Missed reports.
pub const OBSERVED_GAPS: Metric = Metric::counter(
    "warmpath_observed_gaps_total",
    &[],
    "Updates of replicas' cache reports that a VM missed",
);
/// Reported blocks left out.
pub const OBSERVED_CUT: Metric = Metric::counter(
    "warmpath_observed_cut_blocks_total",
    &[],
    "Blocks that replicas reported and that were left out",
);
/// Predictions by how they came about.
pub const PREDICTION_SOURCE: Metric = Metric::counter(
    "warmpath_prediction_source_total",
    &["source", "result"],
    "The same responses by how the prediction was known",
);
/// Contradicted reports.
pub const OBSERVED_CONTRADICTED: Metric = Metric::counter(
    "warmpath_observed_contradicted_total",
    &[],
    "Answers that found less cached than the replica had reported",
);
/// Unsupported topology.
pub const UNSUPPORTED_TOPOLOGY: Metric = Metric::gauge(
    "warmpath_unsupported_topology",
    &["cluster", "kind"],
    "Replicas whose arrangement routing does not understand",
);
/// Series beyond the bound.
pub const DROPPED_SAMPLES: Metric = Metric::counter(
    "warmpath_dropped_samples_total",
    &[],
    "Numbers that were lost because a VM has as many series as it may have",
);
/// Bounds that were reached.
pub const NO_ROOM: Metric = Metric::counter(
    "warmpath_no_room_total",
    &["kind"],
    "What is not shared or remembered for want of room, by its kind: routing goes on without it",
);
/// Snapshots.
pub const SNAPSHOTS: Metric = Metric::counter(
    "warmpath_snapshots_total",
    &["result"],
    "What one VM knows of the replicas' blocks, handed to another, by how that went",
);
/// Host errors.
pub const HOST_ERRORS: Metric = Metric::counter(
    "warmpath_host_errors_total",
    &[],
    "Calls to Envoy that failed; what they were for is skipped",
);

/// Every metric.
pub const ALL: &[Metric] = &[
    REQUESTS,
    PROMPTS,
    MORE_PROMPTS,
    PROMPT_TOKENS,
    PREDICTED_CACHED_TOKENS,
    PARTIAL_PROMPTS,
    RESPONSES,
    FAILED_RESPONSES,
    REPORTED_PROMPT_TOKENS,
    REPORTED_CACHED_TOKENS,
    PROMPT_COUNT,
    MODEL_TRUSTED,
    ORACLE,
    PREDICTION,
    PREDICTION_SOURCE,
    OVERPREDICTED_TOKENS,
    UNDERPREDICTED_TOKENS,
    SHADOW_DECISIONS,
    SHADOW_CACHED_TOKENS,
    SHADOW_COST_US,
    REGRET_REQUESTS,
    REGRET_TOKENS,
    REGRET_US,
    SERVED_ELSEWHERE,
    STRIKES,
    SUSPENSIONS,
    TTFT,
    TOKEN_TIME,
    DECISION,
    CALLBACK,
    POLLS,
    REPORTS,
    REPORT_BYTES,
    REPORT_FALLBACKS,
    AGENTS,
    REPLICA_OBSERVED,
    REPLICA_CACHE_REPORT_AGE,
    UNPLACED_REPLICAS,
    RESTARTS,
    REPLICAS,
    REPLICA_RUNNING,
    REPLICA_WAITING,
    REPLICA_KV_USAGE,
    REPLICA_REPORT_AGE,
    REPLICA_IN_FLIGHT,
    REPLICA_SUSPENDED,
    REPLICA_PREFILL_RATE,
    REPLICA_DECODE_TIME,
    REPLICA_WAIT_ERROR,
    REPLICA_SAMPLES,
    RATE_SAMPLES,
    CORRECTIONS,
    REPLICA_UNFINISHED,
    REPLICA_SHADOW,
    REPLICA_CAPACITY,
    REPLICA_BLOCK_SIZE,
    REPLICA_CACHED_TOKENS,
    REPLICA_DRAIN_RANK,
    FIRST_TOKENS,
    RECOMMENDED_REPLICAS,
    SCALING_UNHEARD,
    SCALING_PRESSURE,
    SCALING_BACKLOG,
    VMS,
    VM_MEMORY,
    MEMO_PROMPTS,
    MEMO_TOKENS,
    MEMO_BYTES,
    TOKENIZER_LOADS,
    TOKENIZER_STEP,
    LOG_LAPPED,
    LOG_ORPHANED,
    OBSERVED_GAPS,
    OBSERVED_CUT,
    OBSERVED_CONTRADICTED,
    SNAPSHOTS,
    UNSUPPORTED_TOPOLOGY,
    NO_ROOM,
    DROPPED_SAMPLES,
    HOST_ERRORS,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_go_in_front_of_the_name() {
        assert_eq!(
            PREDICTION.envoy_name(&["m", "over"]),
            "model=m;result=over;warmpath_prediction_total"
        );
        assert_eq!(LOG_LAPPED.envoy_name(&[]), "warmpath_log_lapped_total");
    }

    #[test]
    fn a_value_cannot_end_its_label_or_grow_without_bound() {
        let name = REQUESTS.envoy_name(&["a;reason=b c\u{fc}"]);
        assert_eq!(name, "reason=a_reason_b_c_;warmpath_requests_total");
        assert!(REQUESTS.envoy_name(&[&"x".repeat(10_000)]).len() < 200);
    }

    #[test]
    fn names_follow_prometheus_conventions_and_are_unique() {
        let mut names: Vec<&str> = ALL.iter().map(|metric| metric.name).collect();
        for metric in ALL {
            assert!(metric.name.starts_with("warmpath_"), "{}", metric.name);
            let total = metric.name.ends_with("_total");
            assert_eq!(total, metric.kind == Kind::Counter, "{}", metric.name);
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
    }
}
