//! A replica's `/metrics` text to a [`Report`], for vLLM and SGLang, under old and new names.
//!
//! This reads the few series that routing needs and skips everything else unparsed: an engine's
//! page is some 50 kB. It does not judge: a number that makes no sense (negative, NaN, infinite)
//! is as absent as one that is not there.

use crate::tokens::blocks::BlockSize;

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
}

/// A page longer than this is not read to its end: an engine's is 50 kB, so 4 MB is a mistake or
/// an attack, and reading it would hold a worker for milliseconds.
const MAX_PAGE_BYTES: usize = 4 << 20;

impl Report {
    /// Reads a page. `None` when nothing in it is a series that any known engine exports.
    pub fn parse(page: &str) -> Option<Self> {
        let mut report = Self::default();
        let mut sglang = Sglang::default();
        let end = page.floor_char_boundary(MAX_PAGE_BYTES);
        for line in page.get(..end).unwrap_or_default().lines() {
            if let Some(series) = Series::parse(line) {
                report.take(&series);
                sglang.take(&series);
            }
        }
        sglang.finish(&mut report);
        (report != Self::default()).then_some(report)
    }

    fn take(&mut self, series: &Series<'_>) {
        match series.name {
            "vllm:num_requests_running" | "sglang:num_running_reqs" => {
                add(&mut self.running, series.count());
            }
            "vllm:num_requests_waiting" | "sglang:num_queue_reqs" => {
                add(&mut self.waiting, series.count());
            }
            // `gpu_cache_usage_perc` is the name before vLLM 0.10.
            "vllm:kv_cache_usage_perc" | "vllm:gpu_cache_usage_perc" | "sglang:token_usage" => {
                if let Some(value) = series.share() {
                    self.kv_usage = Some(self.kv_usage.unwrap_or(0.0).max(value));
                }
            }
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
            _ => {}
        }
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

fn add(sum: &mut Option<u32>, value: Option<u32>) {
    if let Some(value) = value {
        *sum = Some(sum.unwrap_or(0).saturating_add(value));
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
            }),
        );
    }

    #[test]
    fn the_older_name_of_kv_usage_is_read() {
        let page = "vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.5";
        check(page, Some(Report { kv_usage: Some(0.5), ..Report::default() }));
    }

    #[test]
    fn engines_of_one_page_are_summed() {
        let page =
            "vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"1\"} 3";
        check(page, Some(Report { running: Some(5), ..Report::default() }));
    }

    #[test]
    fn absurd_numbers_are_absent() {
        for value in ["NaN", "-1", "+Inf", "1e300", "many", ""] {
            check(&format!("vllm:num_requests_running{{}} {value}"), None);
            check(&format!("vllm:kv_cache_usage_perc {value}"), None);
        }
        check("vllm:cache_config_info{block_size=\"0\",num_gpu_blocks=\"0\"} 1", None);
    }

    #[test]
    fn a_brace_or_quote_inside_a_label_does_not_end_it() {
        let page = r#"vllm:num_requests_running{a="}\"",b="{"} 4"#;
        check(page, Some(Report { running: Some(4), ..Report::default() }));
    }

    #[test]
    fn garbage_is_no_report() {
        for page in ["", "<html>", "vllm:", "vllm:num_requests_running{", "\u{0}\u{1}", "{}}{"] {
            check(page, None);
        }
    }
}
