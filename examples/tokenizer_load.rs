//! A plugin that fetches a tokenizer from Envoy itself and loads it, logging what each step took.
//!
//! `scripts/bench.sh` runs it. It is an example so that the shipped module holds none of it.
//! The configuration is `form text_path model_path`, the form one of `none`, `json`, `parts` and `prepared`.
#![cfg(target_family = "wasm")]
#![expect(missing_docs, reason = "a plugin has no documented items")]
#![expect(clippy::disallowed_methods, reason = "a stall is measured by the clock of this VM alone")]

use log::warn;
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, RootContext};
use proxy_wasm::types::{BufferType, LogLevel};
use std::time::{Duration, Instant};
use tokenizers::models::bpe::{BpeConfig, PipelineBPE};
use tokenizers::pipeline::{EncodeOptions, PipelineTokenizer};
use warmpath::tokens::Tokenizer;
use warmpath::tokens::prepared::{Loader, Progress};

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Warn);
    proxy_wasm::set_root_context(|_| Box::new(Bench::default()));
}}

#[derive(Default)]
struct Bench {
    form: String,
    text_path: String,
    model_path: String,
    ticks: u32,
    text: String,
    stage: Stage,
    steps: Vec<Duration>,
}

#[derive(Default)]
enum Stage {
    #[default]
    Start,
    Waiting,
    Bytes(Vec<u8>),
    Loading(Box<Loader>),
    Ours(Box<Tokenizer>),
    Theirs(PipelineTokenizer),
    Done,
}

impl Context for Bench {
    fn on_http_call_response(&mut self, _: u32, headers: usize, size: usize, _: usize) {
        let begun = Instant::now();
        let body = hostcalls::get_buffer(BufferType::HttpCallResponseBody, 0, size);
        let body = body.ok().flatten().unwrap_or_default();
        warn!("bench fetched bytes={} headers={headers} ms={}", body.len(), ms(begun.elapsed()));
        if self.text.is_empty() {
            self.text = String::from_utf8_lossy(&body).into_owned();
            self.stage = Stage::Start;
        } else {
            self.steps.push(begun.elapsed());
            self.stage = Stage::Bytes(body);
        }
    }
}

impl RootContext for Bench {
    fn on_configure(&mut self, size: usize) -> bool {
        let text = hostcalls::get_buffer(BufferType::PluginConfiguration, 0, size);
        let text = String::from_utf8(text.ok().flatten().unwrap_or_default()).unwrap_or_default();
        let mut words = text.split_whitespace().map(str::to_owned);
        self.form = words.next().unwrap_or_default();
        self.text_path = words.next().unwrap_or_default();
        self.model_path = words.next().unwrap_or_default();
        hostcalls::set_tick_period(Duration::from_millis(50)).is_ok()
    }

    fn on_tick(&mut self) {
        // The listener that serves the files starts after the plugin.
        self.ticks += 1;
        if self.ticks < 10 || self.form == "none" {
            return;
        }
        let begun = Instant::now();
        let stage = std::mem::replace(&mut self.stage, Stage::Waiting);
        let loading = matches!(stage, Stage::Bytes(_) | Stage::Loading(_));
        self.stage = match stage {
            Stage::Start => self.fetch(),
            Stage::Bytes(bytes) => self.begin(bytes),
            Stage::Loading(loader) => step(loader),
            Stage::Ours(tokenizer) => {
                self.encode(|text| tokenizer.encode(text, false).map_or(0, |ids| ids.len()))
            }
            Stage::Theirs(tokenizer) => self.encode(|text| {
                let mut ids = Vec::new();
                let _ = tokenizer.encode_into(text, &EncodeOptions::no_specials(), &mut ids);
                ids.len()
            }),
            other => other,
        };
        if loading {
            self.steps.push(begun.elapsed());
            warn!("bench step ms={} vm_mb={}", ms(begun.elapsed()), vm_mb());
        }
        if loading && matches!(self.stage, Stage::Ours(_) | Stage::Theirs(_) | Stage::Done) {
            let total: Duration = self.steps.iter().sum();
            let longest = self.steps.iter().max().copied().unwrap_or_default();
            warn!(
                "bench loaded steps={} load_ms={} stall_ms={} vm_mb={}",
                self.steps.len(),
                ms(total),
                ms(longest),
                vm_mb()
            );
        }
    }
}

impl Bench {
    fn fetch(&self) -> Stage {
        let path = if self.text.is_empty() { &self.text_path } else { &self.model_path };
        let headers = vec![(":method", "GET"), (":path", path.as_str()), (":authority", "files")];
        let sent =
            hostcalls::dispatch_http_call("files", headers, None, vec![], Duration::from_secs(60));
        match sent {
            Ok(_) => Stage::Waiting,
            Err(_) => Stage::Start,
        }
    }

    fn begin(&self, bytes: Vec<u8>) -> Stage {
        match self.form.as_str() {
            "json" => {
                let canonical = tokenizers::canonicalize_str(&String::from_utf8_lossy(&bytes));
                match canonical.map(|canonical| tokenizers::from_json(&canonical)) {
                    Ok(Ok(tokenizer)) => Stage::Theirs(tokenizer),
                    _ => failed("json"),
                }
            }
            "parts" => from_parts(&bytes),
            _ => match Loader::new(bytes) {
                Ok(loader) => Stage::Loading(Box::new(loader)),
                Err(error) => failed(&error.0),
            },
        }
    }

    fn encode(&self, mut encode: impl FnMut(&str) -> usize) -> Stage {
        let begun = Instant::now();
        let tokens = encode(&self.text);
        let first = begun.elapsed();
        let begun = Instant::now();
        for _ in 0..10 {
            encode(&self.text);
        }
        let warm = begun.elapsed() / 10;
        let rate = |time: Duration| self.text.len() as f64 / time.as_secs_f64() / 1e6;
        warn!(
            "bench encoded tokens={tokens} first_mbs={:.1} warm_mbs={:.1} vm_mb={}",
            rate(first),
            rate(warm),
            vm_mb()
        );
        Stage::Done
    }
}

fn step(mut loader: Box<Loader>) -> Stage {
    match loader.step() {
        Ok(Progress::Pending) => Stage::Loading(loader),
        Ok(Progress::Ready(prepared)) => Stage::Ours(Box::new(prepared.tokenizer)),
        Err(error) => failed(&error.0),
    }
}

/// The least a prepared form could cost that still fed the crate's own tables: maps and strings are made beforehand,
/// and only the call that cannot be split is timed.
fn from_parts(bytes: &[u8]) -> Stage {
    let Ok(mut json) = serde_json::from_slice::<serde_json::Value>(bytes) else {
        return failed("json");
    };
    let _ = tokenizers::canonicalize_value(&mut json);
    let model = json.get_mut("model").map(serde_json::Value::take).unwrap_or_default();
    let vocab = model.get("vocab").and_then(|v| v.as_object()).into_iter().flatten();
    let merges = model.get("merges").and_then(|v| v.as_array()).into_iter().flatten();
    let side = |pair: &serde_json::Value, index: usize| {
        pair.get(index).and_then(|token| token.as_str()).unwrap_or_default().to_owned()
    };
    let flag = |name: &str| model.get(name).and_then(|v| v.as_bool()).unwrap_or(false);
    let config = BpeConfig {
        vocab: vocab.map(|(token, id)| (token.clone(), id.as_u64().unwrap_or(0) as u32)).collect(),
        merges: merges.map(|pair| (side(pair, 0), side(pair, 1))).collect(),
        byte_level: flag("byte_level"),
        byte_fallback: flag("byte_fallback"),
        ignore_merges: flag("ignore_merges"),
        fuse_unk: flag("fuse_unk"),
        ..BpeConfig::default()
    };
    drop(json);
    let begun = Instant::now();
    let built = PipelineBPE::from_config(config).is_ok();
    warn!("bench from_config built={built} ms={} vm_mb={}", ms(begun.elapsed()), vm_mb());
    Stage::Done
}

fn failed(why: &str) -> Stage {
    warn!("bench failed: {why}");
    Stage::Done
}

fn ms(time: Duration) -> String {
    format!("{:.2}", time.as_secs_f64() * 1e3)
}

fn vm_mb() -> usize {
    core::arch::wasm32::memory_size(0) / 16
}
