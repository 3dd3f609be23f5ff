//! `/metrics` in the names of vLLM or SGLang, of which only those that a router may read.

use super::engine::{Load, Totals};
use std::fmt::Write as _;

/// Whose names to use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MetricNames {
    /// `vllm:num_requests_running` and so on.
    #[default]
    Vllm,
    /// `sglang:num_running_reqs` and so on.
    Sglang,
}

/// What an engine shows from outside: as of the end of its latest step.
#[derive(Debug, Clone)]
pub struct Published {
    /// How busy it is.
    pub load: Load,
    /// Sums since the start.
    pub totals: Totals,
    /// Arrival to first token, seconds.
    pub time_to_first_token: Histogram,
    /// Between tokens of a request, seconds.
    pub inter_token_latency: Histogram,
    /// Arrival to last token, seconds.
    pub end_to_end: Histogram,
}

impl Default for Published {
    fn default() -> Self {
        Self {
            load: Load::default(),
            totals: Totals::default(),
            time_to_first_token: Histogram::new(TTFT_BOUNDS),
            inter_token_latency: Histogram::new(ITL_BOUNDS),
            end_to_end: Histogram::new(E2E_BOUNDS),
        }
    }
}

/// A Prometheus histogram.
#[derive(Debug, Clone)]
pub struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

/// vLLM's own bucket bounds, seconds.
const TTFT_BOUNDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const ITL_BOUNDS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const E2E_BOUNDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len()], sum: 0.0, count: 0 }
    }

    /// Counts one value.
    pub fn observe(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
        let at = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get_mut(at) {
            *count += 1;
        }
    }
}

/// What stays the same about an engine.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The first served name.
    pub model_name: String,
    /// Tokens per block.
    pub block_size: usize,
    /// When the process started, seconds since the Unix epoch.
    pub started: f64,
}

/// The text of `/metrics`.
pub fn render(names: MetricNames, identity: &Identity, published: &Published) -> String {
    let model = escape(&identity.model_name);
    let labels = match names {
        MetricNames::Vllm => format!("engine=\"0\",model_name=\"{model}\""),
        MetricNames::Sglang => {
            format!("engine_type=\"unified\",model_name=\"{model}\",pp_rank=\"0\",tp_rank=\"0\"")
        }
    };
    let mut page = Page { text: String::with_capacity(16_384), labels };
    page.header("process_start_time_seconds", "gauge");
    let _ = writeln!(page.text, "process_start_time_seconds {}", identity.started);
    match names {
        MetricNames::Vllm => vllm(&mut page, identity, published),
        MetricNames::Sglang => sglang(&mut page, identity, published),
    }
    page.text
}

fn vllm(page: &mut Page, identity: &Identity, published: &Published) {
    let Published { load, totals, .. } = published;
    page.gauge("vllm:num_requests_running", load.running as f64);
    page.gauge("vllm:num_requests_waiting", load.waiting as f64);
    page.gauge("vllm:kv_cache_usage_perc", usage(load));
    page.counter("vllm:prefix_cache_queries_total", totals.queried_tokens);
    page.counter("vllm:prefix_cache_hits_total", totals.hit_tokens);
    page.counter("vllm:num_preemptions_total", totals.preemptions);
    page.counter("vllm:prompt_tokens_total", totals.prompt_tokens);
    page.counter("vllm:prompt_tokens_cached_total", totals.hit_tokens);
    page.counter("vllm:generation_tokens_total", totals.generated_tokens);
    page.header("vllm:request_success_total", "counter");
    for (reason, count) in [("length", totals.finished), ("abort", totals.aborted)] {
        page.line(
            "vllm:request_success_total",
            &format!(",finished_reason=\"{reason}\""),
            count as f64,
        );
    }
    page.header("vllm:cache_config_info", "gauge");
    let (block_size, blocks) = (identity.block_size, load.capacity_blocks);
    let config = format!(
        ",block_size=\"{block_size}\",cache_dtype=\"auto\",effective_attention_block_size=\"{block_size}\",\
         enable_prefix_caching=\"True\",kv_cache_size_tokens=\"{}\",num_gpu_blocks=\"{blocks}\",\
         prefix_caching_hash_algo=\"sha256_cbor\"",
        blocks * block_size
    );
    page.line("vllm:cache_config_info", &config, 1.0);
    page.histogram("vllm:time_to_first_token_seconds", &published.time_to_first_token);
    page.histogram("vllm:inter_token_latency_seconds", &published.inter_token_latency);
    page.histogram("vllm:e2e_request_latency_seconds", &published.end_to_end);
}

fn sglang(page: &mut Page, identity: &Identity, published: &Published) {
    let Published { load, totals, .. } = published;
    let hit_rate = totals.hit_tokens as f64 / (totals.queried_tokens as f64).max(1.0);
    page.gauge("sglang:num_running_reqs", load.running as f64);
    page.gauge("sglang:num_queue_reqs", load.waiting as f64);
    page.gauge("sglang:token_usage", usage(load));
    page.gauge("sglang:num_used_tokens", (load.held_blocks * identity.block_size) as f64);
    page.gauge("sglang:max_total_num_tokens", (load.capacity_blocks * identity.block_size) as f64);
    page.gauge("sglang:cache_hit_rate", hit_rate);
    page.counter("sglang:prompt_tokens_total", totals.prompt_tokens);
    page.counter("sglang:cached_tokens_total", totals.hit_tokens);
    page.counter("sglang:generation_tokens_total", totals.generated_tokens);
    page.header("sglang:cache_config_info", "gauge");
    let config =
        format!(",page_size=\"{}\",num_pages=\"{}\"", identity.block_size, load.capacity_blocks);
    page.line("sglang:cache_config_info", &config, 1.0);
    page.histogram("sglang:time_to_first_token_seconds", &published.time_to_first_token);
    page.histogram("sglang:e2e_request_latency_seconds", &published.end_to_end);
}

/// Only blocks of running requests count, as in the engines: a full prefix cache alone is 0.
fn usage(load: &Load) -> f64 {
    load.held_blocks as f64 / (load.capacity_blocks as f64).max(1.0)
}

struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn gauge(&mut self, name: &str, value: f64) {
        self.header(name, "gauge");
        self.line(name, "", value);
    }

    fn counter(&mut self, name: &str, value: u64) {
        self.header(name, "counter");
        self.line(name, "", value as f64);
    }

    fn histogram(&mut self, name: &str, histogram: &Histogram) {
        self.header(name, "histogram");
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (bound, count) in histogram.bounds.iter().zip(&histogram.counts) {
            below += count;
            self.line(&bucket, &format!(",le=\"{bound:?}\""), below as f64);
        }
        self.line(&bucket, ",le=\"+Inf\"", histogram.count as f64);
        self.line(&format!("{name}_count"), "", histogram.count as f64);
        self.line(&format!("{name}_sum"), "", histogram.sum);
    }

    fn header(&mut self, name: &str, kind: &str) {
        let _ = writeln!(self.text, "# HELP {name} As the engine's own.\n# TYPE {name} {kind}");
    }

    /// Values are floats with a point, as Python's client writes them.
    fn line(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.text, "{name}{{{}{labels}}} {value:?}", self.labels);
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(names: MetricNames, line: &str) {
        let identity =
            Identity { model_name: "a\"b".to_owned(), block_size: 16, started: 1_795_957_300.5 };
        let mut published = Published::default();
        published.load.running = 3;
        published.load.held_blocks = 25;
        published.load.capacity_blocks = 100;
        published.totals.hit_tokens = 7;
        published.time_to_first_token.observe(0.02);
        published.time_to_first_token.observe(0.021);
        let text = render(names, &identity, &published);
        assert!(text.lines().any(|found| found == line), "{line}\nis not in\n{text}");
    }

    #[test]
    fn lines_have_the_engines_shape() {
        let vllm = |line: &str| check(MetricNames::Vllm, line);
        vllm("process_start_time_seconds 1795957300.5");
        vllm("# TYPE vllm:num_requests_running gauge");
        vllm("vllm:num_requests_running{engine=\"0\",model_name=\"a\\\"b\"} 3.0");
        vllm("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"a\\\"b\"} 0.25");
        vllm("vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"a\\\"b\"} 7.0");
        let bucket =
            "vllm:time_to_first_token_seconds_bucket{engine=\"0\",model_name=\"a\\\"b\",le=";
        vllm(&format!("{bucket}\"0.01\"}} 0.0"));
        vllm(&format!("{bucket}\"0.02\"}} 1.0"));
        vllm(&format!("{bucket}\"0.04\"}} 2.0"));
        vllm(&format!("{bucket}\"+Inf\"}} 2.0"));
        check(
            MetricNames::Sglang,
            "sglang:num_running_reqs{engine_type=\"unified\",model_name=\"a\\\"b\",pp_rank=\"0\",tp_rank=\"0\"} 3.0",
        );
    }
}
