//! What a replica or Envoy answers: streams, documents, metrics, health, models.

use super::{Bytes, Target, no_more_seeds};
use crate::memory::bounded;
use std::fs;
use warmpath::feedback::{ExactAnswer, Feedback, cached_answer_tokens};
use warmpath::replicas::attempts::{Attempts, Seen};
use warmpath::replicas::stats::Report;
use warmpath::replicas::{MAX_REPLICAS, Member, Moment, ReplicaTable, clusters, models};
use warmpath::request::Api;

pub const RESPONSES: Target = Target {
    name: "responses",
    run: responses,
    words: &[
        "data:",
        "data: ",
        "\n\n",
        "\r\n",
        ": keep-alive\n",
        "event: error\n",
        "[DONE]",
        "\"choices\"",
        "\"index\"",
        "\"delta\"",
        "\"message\"",
        "\"content\"",
        "\"text\"",
        "\"tool_calls\":[{}]",
        "\"reasoning\"",
        "\"reasoning_content\"",
        "\"usage\"",
        "\"prompt_tokens\"",
        "\"completion_tokens\"",
        "\"prompt_tokens_details\"",
        "\"cached_tokens\"",
        "\"finish_reason\"",
        "\"error\"",
        "\"token_ids\":[7]",
        "\"type\"",
        "\"response\"",
        "\"output\"",
        "\"response.output_text.delta\"",
        "\"output_text\"",
        "\"item\"",
        "\"input_tokens\"",
        "\"output_tokens\"",
        "\"input_tokens_details\"",
        "\"content_block\"",
        "\"text_delta\"",
        "\"thinking_delta\"",
        "\"cache_read_input_tokens\"",
        "\"cache_creation_input_tokens\"",
        "\"meta\"",
        "\"billed_units\"",
    ],
    more_seeds: samples,
    cases: 1500,
};

/// APIs whose responses differ.
const APIS: [Api; 8] = [
    Api::Chat,
    Api::Completions,
    Api::Responses,
    Api::Messages,
    Api::Generate,
    Api::Embed,
    Api::Embeddings,
    Api::Rerank,
];

/// Real streams and documents, each as its own API.
fn samples() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (control, name) in [
        (0, "chat_stream_include_usage.txt"),
        (4, "chat_stream_plain.txt"),
        (0, "chat_stream_token_ids.txt"),
        (1, "completions_stream_include_usage.txt"),
        (0x40, "responses_stream.txt"),
        (0x42, "responses.json"),
        (0x41, "messages_stream.txt"),
        (0x43, "messages.json"),
        (0x84, "generate_stream.txt"),
        (0x86, "generate.json"),
    ] {
        let sample = fs::read(format!("tests/data/vllm/{name}")).expect("a sample");
        let lines = sample.split_inclusive(|byte| *byte == b'\n').take(12);
        seeds.push(std::iter::once(control).chain(lines.flatten().copied()).collect());
    }
    seeds
}

/// The first byte says which API, what kind of body and how it is cut. However it is cut, the same is read.
fn responses(data: &[u8]) {
    let mut bytes = Bytes(data);
    let control = bytes.u8();
    let body = bytes.0;
    let api = APIS[usize::from(control & 1 | control >> 5 & 6)];
    let kind =
        if control & 2 == 0 { "text/event-stream; charset=utf-8" } else { "application/json" };
    let read = |size: usize| {
        let mut feedback = Feedback::new(api, Some(kind.as_bytes()), None);
        body.chunks(size).for_each(|chunk| feedback.push(chunk));
        feedback.finish();
        feedback
    };
    let whole = bounded(body.len(), 64 << 10, 250, || read(usize::MAX));
    let pieces = read(1 + usize::from(control >> 2 & 15));
    assert_eq!(format!("{whole:?}"), format!("{pieces:?}"));
    assert!(whole.was_read() || !whole.is_readable());
    if let Some(answer) = whole.exact_answer() {
        let length = match answer {
            ExactAnswer::Text(text) => text.len(),
            ExactAnswer::Tokens(ids) => ids.len(),
        };
        assert!(whole.answer_began() && (1..=body.len()).contains(&length));
        assert!(cached_answer_tokens(length, whole.usage()) <= length);
    }
}

pub const METRICS: Target = Target {
    name: "metrics",
    run: metrics,
    words: &[
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:cache_config_info",
        "effective_attention_block_size=\"",
        "block_size=\"",
        "num_gpu_blocks=\"",
        "process_start_time_seconds",
        "vllm:prefix_cache_queries_created",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:max_total_num_tokens",
        "sglang:cache_config_info",
        "page_size=\"",
        "num_pages=\"",
        "{",
        "} ",
        "=\"",
        "\\\"",
        "# HELP ",
        "# EOF\n",
        "engine=\"0\"",
        "} 1.0\n",
    ],
    more_seeds: pages,
    cases: 1500,
};

fn pages() -> Vec<Vec<u8>> {
    let page = fs::read_to_string("tests/data/metrics_vllm_0.32.txt").expect("a page");
    let ours = |line: &&str| line.contains("vllm:") || line.starts_with("process_start");
    vec![
        page.lines()
            .filter(ours)
            .take(40)
            .map(|line| format!("{line}\n"))
            .collect::<String>()
            .into_bytes(),
    ]
}

/// Whatever the page, what is read of it makes sense; ends of lines and comments change nothing; a table takes it in.
fn metrics(data: &[u8]) {
    let page = String::from_utf8_lossy(data);
    let report = bounded(page.len(), 4 << 10, 0, || Report::parse(&page));
    let commented = format!("# HELP a b\r\n\r\n{}\r\n# EOF\r\n", page.replace('\n', "\r\n"));
    assert_eq!(Report::parse(&commented), report);
    let Some(report) = report else { return };
    assert!(report.kv_usage.is_none_or(|share| (0.0..=1.0).contains(&share)));
    assert!(report.started_at.is_none_or(|at| at.is_finite() && at > 0.0));
    assert!(report.capacity_blocks.is_none_or(|blocks| blocks > 0));
    let mut table = ReplicaTable::default();
    let member = Member::healthy("10.0.0.1:80".to_owned());
    table.set_members("c", &[member]);
    assert!(!table.set_report(0, &report, 0, Moment(1)), "the first report is no restart");
    assert!(!table.set_report(0, &report, 0, Moment(2)), "the same report is no restart");
    assert_eq!(table.at(0).map(|replica| replica.started_at), Some(report.started_at));
}

pub const ADMIN: Target = Target {
    name: "admin",
    run: admin,
    words: &[
        "\"cluster_statuses\"",
        "\"name\"",
        "\"pool\"",
        "\"host_statuses\"",
        "\"address\"",
        "\"socket_address\"",
        "\"port_value\"",
        "\"health_status\"",
        "\"eds_health_status\"",
        "\"DRAINING\"",
        "\"UNHEALTHY\"",
        "\"TIMEOUT\"",
        "\"failed_active_health_check\"",
        "\"failed_outlier_check\"",
        "\"pending_dynamic_removal\"",
        "\"pipe\"",
        "\"10.0.0.1\"",
        "\"::1\"",
        "true",
        "8000",
    ],
    more_seeds: no_more_seeds,
    cases: 1500,
};

/// Whatever Envoy's admin is made to say, a table takes it in, within its bound, and a second time without change.
fn admin(data: &[u8]) {
    let names = ["pool", "other"];
    let Some(found) = bounded(data.len(), 64 << 10, 250, || clusters::members(data, &names)) else {
        return;
    };
    let mut table = ReplicaTable::default();
    for clusters::Found { cluster, members, .. } in &found {
        assert!(names.contains(&cluster.as_str()));
        table.set_members(cluster, members);
        let before = table.clone();
        table.set_members(cluster, members);
        assert_eq!(table, before, "the same members again");
        let placed = table.in_cluster(cluster).count();
        assert!(placed <= members.len() && table.iter().count() <= MAX_REPLICAS);
        for replica in table.in_cluster(cluster) {
            assert!(
                table
                    .by_address(cluster, &replica.address)
                    .is_some_and(|same| same.id == replica.id)
            );
            // Addresses go into a header, by commas.
            assert!(
                replica.address.parse::<std::net::SocketAddr>().is_ok(),
                "{:?}",
                replica.address
            );
        }
    }
}

pub const MODELS: Target = Target {
    name: "models",
    run: names,
    words: &[
        "\"object\":\"list\"",
        "\"data\"",
        "\"id\"",
        "\"root\"",
        "\"parent\"",
        "null",
        "{\"id\":\"a\"}",
    ],
    more_seeds: no_more_seeds,
    cases: 1500,
};

/// Names or nothing, never part of them.
fn names(data: &[u8]) {
    let read = bounded(data.len(), 64 << 10, 250, || models::served(data));
    let Some(models) = read else { return };
    assert!(models.len() <= 1024 && models.iter().all(|model| model.name.len() <= 512));
}

pub const ATTEMPTS: Target = Target {
    name: "attempts",
    run: attempts,
    words: &[
        "via_upstream",
        "upstream_reset_before_response_started{",
        "connection_failure",
        "remote_reset",
        "|",
        "}",
        "a:1",
        "\0",
    ],
    more_seeds: || {
        let details = ["via_upstream", "upstream_reset_before_response_started{remote_reset|x}"];
        let seed = |details: &str| format!("\u{2}\u{7f}a:1\0{details}").into_bytes();
        details.into_iter().map(seed).collect()
    },
    cases: 1500,
};

/// Whatever Envoy tells of a response, only those are blamed who had it, and never who answered it well.
fn attempts(data: &[u8]) {
    const LIST: [&str; 3] = ["a:1", "b:1", "c:1"];
    let mut bytes = Bytes(data);
    let (attempts, status) = (bytes.u64(), 4 * u16::from(bytes.u8()));
    let text = String::from_utf8_lossy(bytes.0);
    let (address, details) = text.split_once('\0').unwrap_or((&text, "via_upstream"));
    let found = Attempts::read(&LIST, &Seen { status, details, attempts, address });
    for failure in &found.failed {
        assert!(failure.address == address || LIST.contains(&failure.address));
        assert!(!found.is_success || found.answered != Some(failure.address));
    }
    assert!(found.failed.len() <= LIST.len() + 1);
}
