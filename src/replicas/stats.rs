//! A replica's `/metrics` text to a [`Report`], for vLLM and SGLang, under old and new names.
//!
//! This reads the few series that routing needs and skips everything else unparsed: an engine's
//! page is some 50 kB. It does not judge: a number that makes no sense (negative, NaN, infinite)
//! is as absent as one that is not there.

use super::models::hash;
use crate::tokens::blocks::BlockSize;
use hashbrown::HashMap;

/// What one page said. Every field is optional, since engines rename and drop series.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// Requests in the batch, summed over the page's engines.
    pub running: Option<u32>,
    /// Requests queued, summed.
    pub waiting: Option<u32>,
    /// Share of KV blocks held by running requests, 0 to 1, of the fullest engine.
    pub kv_usage: Option<f64>,
    /// Tokens per KV block.
    pub block_size: Option<BlockSize>,
    /// KV blocks of one engine.
    pub capacity_blocks: Option<u32>,
    /// When the engine's process started, in seconds since the epoch: the later of
    /// `process_start_time_seconds` and of the creation time of vLLM's own counters (the former
    /// is printed with so few digits that a quick restart need not change it).
    pub started_at: Option<f64>,
    /// Engines behind the address, each with a cache of its own.
    pub engines: usize,
    /// Whether it takes part in computing prompts in one pool and answers in another.
    pub disaggregated: bool,
    /// The LoRA adapters in use, where it says which.
    pub adapters: Option<Adapters>,
}

/// The adapters of running and waiting requests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Adapters {
    /// What their names hash to.
    pub in_use: Vec<u64>,
    /// How many may be loaded at once.
    pub places: usize,
}

/// Most places for adapters that are believed; engines have a handful.
pub const MAX_ADAPTERS: usize = 64;

/// A page longer than this is not read: an engine's is 50 kB, so this is twenty of them behind one
/// address. A page of nothing but our series takes some 30 ms in the VM, any other 4 ms; twice as
/// much would hold the thread for longer than requests should wait.
pub const MAX_PAGE_BYTES: usize = 1 << 20;

/// Most engines of one page: beyond them their numbers are not told apart, and none is believed.
const MAX_ENGINES: usize = 256;

impl Report {
    /// Reads a page. `None` when nothing in it is a series that any known engine exports.
    pub fn parse(page: &str) -> Option<Self> {
        if page.len() > MAX_PAGE_BYTES {
            return None;
        }
        let mut report = Self::default();
        let mut counts = Counts::default();
        let mut sglang = Sglang::default();
        let mut adapters = LatestAdapters::default();
        for line in page.lines() {
            if let Some(series) = Series::parse(line) {
                report.take(&series);
                counts.take(&series);
                sglang.take(&series);
                adapters.take(&series);
            }
        }
        counts.finish(&mut report);
        sglang.finish(&mut report);
        report.adapters = adapters.0.map(|(_, adapters)| adapters);
        (report != Self::default()).then_some(report)
    }

    /// Whether it says all that routing goes by.
    pub fn is_complete(&self) -> bool {
        self.running.is_some() && self.waiting.is_some() && self.kv_usage.is_some()
    }

    fn take(&mut self, series: &Series<'_>) {
        match series.name {
            "vllm:cache_config_info" => {
                // Where both are there, the effective size is the one blocks are hashed at.
                let size = series
                    .label("effective_attention_block_size")
                    .and_then(|text| text.parse().ok())
                    .or_else(|| series.label("block_size").and_then(|text| text.parse().ok()));
                self.block_size = size.or(self.block_size);
                let blocks = series.label("num_gpu_blocks").and_then(|text| text.parse().ok());
                self.capacity_blocks = blocks.filter(|&n| n > 0).or(self.capacity_blocks);
            }
            "process_start_time_seconds" | "vllm:prefix_cache_queries_created" => {
                let value = series.value.filter(|value| *value > 0.0);
                self.started_at = match (self.started_at, value) {
                    (Some(known), Some(value)) => Some(known.max(value)),
                    (known, value) => known.or(value),
                };
            }
            // vLLM's connector between the pools.
            name if name.starts_with("vllm:nixl_") => self.disaggregated = true,
            _ => {}
        }
    }
}

/// One engine's counts. A series that is there twice counts once, the last.
#[derive(Default)]
struct Counts<'a> {
    engines: HashMap<&'a str, Engine>,
    disaggregated: bool,
    too_many: bool,
}

#[derive(Default)]
struct Engine {
    running: Option<u32>,
    waiting: Option<u32>,
    kv_usage: Option<f64>,
    old_kv_usage: Option<f64>,
}

impl<'a> Counts<'a> {
    fn take(&mut self, series: &Series<'a>) {
        let set: fn(&mut Engine, &Series<'_>) = match series.name {
            "vllm:num_requests_running" | "sglang:num_running_reqs" => {
                |engine, series| engine.running = series.count()
            }
            "vllm:num_requests_waiting" | "sglang:num_queue_reqs" => {
                |engine, series| engine.waiting = series.count()
            }
            "vllm:kv_cache_usage_perc" | "sglang:token_usage" => {
                |engine, series| engine.kv_usage = series.share()
            }
            // The name before vLLM 0.10.
            "vllm:gpu_cache_usage_perc" => |engine, series| engine.old_kv_usage = series.share(),
            _ => return,
        };
        // The ranks that share one engine's work would each count its requests.
        let is_first = |name| series.label(name).is_none_or(|rank| rank == "0");
        if !is_first("tp_rank") || !is_first("pp_rank") {
            return;
        }
        let role = series.label("engine_type");
        self.disaggregated |= matches!(role, Some("prefill" | "decode"));
        let rank = series.label("engine").or_else(|| series.label("dp_rank")).unwrap_or("");
        if self.engines.len() >= MAX_ENGINES && !self.engines.contains_key(rank) {
            self.too_many = true;
            return;
        }
        set(self.engines.entry(rank).or_default(), series);
    }

    fn finish(self, report: &mut Report) {
        report.engines = self.engines.len();
        report.disaggregated |= self.disaggregated;
        if self.too_many {
            return;
        }
        // One engine whose number makes no sense makes the sum unknown.
        let sum = |of: fn(&Engine) -> Option<u32>| {
            let counts = self.engines.values().map(of);
            counts.reduce(|sum, count| Some(sum?.saturating_add(count?))).flatten()
        };
        report.running = sum(|engine| engine.running);
        report.waiting = sum(|engine| engine.waiting);
        let usages = self.engines.values().filter_map(|e| e.kv_usage.or(e.old_kv_usage));
        report.kv_usage = usages.reduce(f64::max);
    }
}

/// SGLang says its capacity in tokens and its page size in another series.
#[derive(Default)]
struct Sglang {
    capacity_tokens: Option<f64>,
    page_size: Option<BlockSize>,
}

impl Sglang {
    fn take(&mut self, series: &Series<'_>) {
        match series.name {
            "sglang:max_total_num_tokens" => self.capacity_tokens = series.value,
            "sglang:cache_config_info" => {
                self.page_size = series.label("page_size").and_then(|text| text.parse().ok());
                let pages = series.label("num_pages").and_then(|text| text.parse::<f64>().ok());
                if let (Some(size), Some(pages)) = (self.page_size, pages) {
                    self.capacity_tokens = Some(pages * f64::from(size.get()));
                }
            }
            _ => {}
        }
    }

    fn finish(self, report: &mut Report) {
        report.block_size = report.block_size.or(self.page_size);
        if let (None, Some(tokens), Some(size)) =
            (report.capacity_blocks, self.capacity_tokens, report.block_size)
        {
            let blocks = tokens / f64::from(size.get());
            if blocks.is_finite() && (1.0..=f64::from(u32::MAX)).contains(&blocks) {
                report.capacity_blocks = Some(blocks as u32);
            }
        }
    }
}

/// vLLM tells adapters in labels, and each combination that ever was stays on the page: its value is when it was true.
#[derive(Default)]
struct LatestAdapters(Option<(f64, Adapters)>);

impl LatestAdapters {
    fn take(&mut self, series: &Series<'_>) {
        if series.name != "vllm:lora_requests_info" {
            return;
        }
        let Some(at) = series.value else { return };
        if self.0.as_ref().is_some_and(|(latest, _)| *latest > at) {
            return;
        }
        let places = series.label("max_lora").and_then(|text| text.parse().ok());
        let Some(places) = places.filter(|places| *places > 0) else { return };
        let of = |label| series.label(label).unwrap_or_default().split(',');
        let names = of("running_lora_adapters").chain(of("waiting_lora_adapters"));
        let names = names.map(str::trim).filter(|name| !name.is_empty());
        let in_use = names.take(MAX_ADAPTERS).map(hash).collect();
        self.0 = Some((at, Adapters { in_use, places: MAX_ADAPTERS.min(places) }));
    }
}

/// One sample line of the Prometheus text format.
struct Series<'a> {
    name: &'a str,
    labels: &'a str,
    value: Option<f64>,
}

impl<'a> Series<'a> {
    /// Cheap for the lines that are not ours: decided on the first bytes.
    fn parse(line: &'a str) -> Option<Self> {
        let line = line.trim();
        if !["vllm:", "sglang:", "process_start"].iter().any(|prefix| line.starts_with(prefix)) {
            return None;
        }
        let (name, labels, rest) = match line.split_once('{') {
            Some((name, rest)) => {
                let end = end_of_labels(rest)?;
                (name, rest.get(..end)?, rest.get(end + 1..)?)
            }
            None => {
                let (name, rest) = line.split_once(char::is_whitespace)?;
                (name, "", rest)
            }
        };
        let value = rest.split_whitespace().next()?.parse::<f64>().ok();
        Some(Self { name, labels, value: value.filter(|value| value.is_finite()) })
    }

    fn count(&self) -> Option<u32> {
        self.value.filter(|value| (0.0..=1e9).contains(value)).map(|value| value as u32)
    }

    fn share(&self) -> Option<f64> {
        self.value.filter(|value| (0.0..=1.0).contains(value))
    }

    /// A label's value, as long as it has no escapes: none that we read has.
    fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (key, after) = rest.split_once("=\"")?;
            let end = end_of_value(after)?;
            if key.trim_matches(|c: char| c == ',' || c.is_whitespace()) == name {
                return after.get(..end);
            }
            rest = after.get(end + 1..)?;
        }
    }
}

/// Where the unescaped quote is that ends a label's value.
fn end_of_value(text: &str) -> Option<usize> {
    let mut escaped = false;
    for (index, byte) in text.bytes().enumerate() {
        match byte {
            b'"' if !escaped => return Some(index),
            b'\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    None
}

/// Where the brace is that ends the labels; one inside a quoted value does not.
fn end_of_labels(text: &str) -> Option<usize> {
    let mut from = 0;
    loop {
        let rest = text.get(from..)?;
        let brace = rest.find('}')?;
        match rest.find('"') {
            Some(quote) if quote < brace => {
                from += quote + 1;
                from += end_of_value(text.get(from..)?)? + 1;
            }
            _ => return Some(from + brace),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(page: &str, expected: Option<Report>) {
        assert_eq!(Report::parse(page), expected);
    }

    #[test]
    fn a_page_of_vllm_0_32_is_read() {
        let report = Report::parse(include_str!("../../tests/data/metrics_vllm_0.32.txt"));
        assert_eq!(
            report,
            Some(Report {
                running: Some(0),
                waiting: Some(0),
                kv_usage: Some(0.0),
                block_size: BlockSize::new(32),
                capacity_blocks: Some(2048),
                started_at: report.as_ref().and_then(|report| report.started_at),
                engines: 1,
                disaggregated: false,
                adapters: None,
            })
        );
        assert!(report.is_some_and(|report| report.started_at > Some(1.7e9)));
    }

    #[test]
    fn sglang_names_and_capacity_in_tokens_are_read() {
        check(
            "sglang:num_running_reqs{model_name=\"m\"} 3.0\n\
             sglang:num_queue_reqs{model_name=\"m\"} 2.0\n\
             sglang:token_usage{model_name=\"m\"} 0.25\n\
             sglang:cache_config_info{page_size=\"16\",num_pages=\"100\"} 1.0\n",
            Some(Report {
                running: Some(3),
                waiting: Some(2),
                kv_usage: Some(0.25),
                block_size: BlockSize::new(16),
                capacity_blocks: Some(100),
                started_at: None,
                engines: 1,
                disaggregated: false,
                adapters: None,
            }),
        );
    }

    #[test]
    fn either_name_of_kv_usage_is_read_and_the_newer_wins() {
        let old = "vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.5\n";
        let new = "vllm:kv_cache_usage_perc{model_name=\"m\"} 0.25\n";
        let with = |usage| Some(Report { kv_usage: Some(usage), engines: 1, ..Report::default() });
        check(old, with(0.5));
        check(new, with(0.25));
        check(&format!("{new}{old}"), with(0.25));
        check(&format!("{old}{new}"), with(0.25));
        assert!(!Report::parse(new).unwrap().is_complete(), "and what is not there is unknown");
    }

    #[test]
    fn engines_of_one_page_are_summed() {
        let page =
            "vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"1\"} 3";
        check(page, Some(Report { running: Some(5), engines: 2, ..Report::default() }));
        let unknown = format!("{page}\nvllm:num_requests_running{{engine=\"2\"}} NaN");
        check(&unknown, Some(Report { engines: 3, ..Report::default() }));
        let many: String =
            (0..300).map(|n| format!("vllm:num_requests_running{{engine=\"{n}\"}} 1\n")).collect();
        check(&many, Some(Report { engines: MAX_ENGINES, ..Report::default() }));
    }

    #[test]
    fn a_series_that_is_there_twice_counts_once() {
        let page =
            "vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"0\"} 3";
        check(page, Some(Report { running: Some(3), engines: 1, ..Report::default() }));
    }

    #[test]
    fn ranks_that_share_an_engines_work_count_it_once() {
        let page: String = (0..4)
            .map(|rank| format!("sglang:num_running_reqs{{dp_rank=\"0\",tp_rank=\"{rank}\"}} 3\n"))
            .collect();
        check(&page, Some(Report { running: Some(3), engines: 1, ..Report::default() }));
    }

    #[test]
    fn pools_for_prompts_and_answers_are_seen() {
        let pool =
            Some(Report { running: Some(1), engines: 1, disaggregated: true, ..Report::default() });
        check("sglang:num_running_reqs{engine_type=\"decode\"} 1", pool.clone());
        check("vllm:num_requests_running 1\nvllm:nixl_bytes_transferred_sum 9", pool);
        let one = Some(Report { running: Some(1), engines: 1, ..Report::default() });
        check("sglang:num_running_reqs{engine_type=\"unified\"} 1", one);
    }

    #[test]
    fn a_page_beyond_any_engines_is_not_read() {
        let page = "vllm:num_requests_running 1\n";
        assert_eq!(Report::parse(&format!("{page}{}", "#".repeat(MAX_PAGE_BYTES))), None);
    }

    #[test]
    fn absurd_numbers_are_absent() {
        for value in ["NaN", "-1", "+Inf", "1e300", "many", ""] {
            for name in ["vllm:num_requests_running", "vllm:kv_cache_usage_perc"] {
                let report = Report::parse(&format!("{name}{{}} {value}")).unwrap_or_default();
                assert_eq!((report.running, report.kv_usage), (None, None), "{name} {value}");
            }
        }
        for value in ["0", "-1", "16.5", "4294967296", "1e9", "sixteen", ""] {
            for (series, size, blocks) in [
                ("vllm:cache_config_info", "block_size", "num_gpu_blocks"),
                ("vllm:cache_config_info", "effective_attention_block_size", "num_gpu_blocks"),
                ("sglang:cache_config_info", "page_size", "num_pages"),
            ] {
                let page = format!("{series}{{{size}=\"{value}\",{blocks}=\"{value}\"}} 1");
                check(&page, None);
            }
        }
        let one = "sglang:cache_config_info{page_size=\"1\"} 1";
        check(one, Some(Report { block_size: BlockSize::new(1), ..Report::default() }));
    }

    #[test]
    fn a_brace_or_quote_inside_a_label_does_not_end_it() {
        let page = r#"vllm:num_requests_running{a="}\"",b="{"} 4"#;
        check(page, Some(Report { running: Some(4), engines: 1, ..Report::default() }));
    }

    #[test]
    fn garbage_is_no_report() {
        for page in ["", "<html>", "vllm:", "vllm:num_requests_running{", "\u{0}\u{1}", "{}}{"] {
            check(page, None);
        }
    }

    #[test]
    fn the_latest_of_the_adapters_series_counts() {
        let page = "vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"b, c\",waiting_lora_adapters=\"d\"} 1.7e9\n\
            vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"a\",waiting_lora_adapters=\"\"} 1.6e9\n\
            vllm:lora_requests_info{max_lora=\"no\",running_lora_adapters=\"x\",waiting_lora_adapters=\"\"} 1.8e9\n";
        let in_use = ["b", "c", "d"].map(hash).to_vec();
        let adapters = Some(Adapters { in_use, places: 2 });
        check(page, Some(Report { adapters, ..Report::default() }));
    }
}
