//! Asks a live engine for completions of token ids, and times the answers.
//!
//! Token ids and not texts, so that a prompt has exactly the length and shares exactly the blocks that were meant, and
//! so that no tokenizer is timed. It does not retry.

use crate::random::Random;
use crate::sse::Events;
use crate::stats::Sample;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Longer than the longest prompt takes on the slowest engine that anyone would measure.
const PATIENCE: Duration = Duration::from_secs(120);
/// Ids below it are often control tokens, which some engines treat apart.
const FIRST_ID: usize = 1000;
/// Every vocabulary in use has this many.
const IDS: usize = 20_000;

/// A live engine.
#[derive(Clone)]
pub struct Probe {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
    model: String,
}

/// What an engine says of itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Its name and version, as far as it says them.
    pub version: String,
    /// Tokens per KV block.
    pub block_size: usize,
    /// KV blocks.
    pub capacity_blocks: u32,
}

impl Probe {
    /// An engine at `http://host:port`, and the model to ask it for.
    pub fn new(url: &str, model: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Self { client, url: url.trim_end_matches('/').to_owned(), model: model.to_owned() }
    }

    /// Asks for the model that is served, the version, and the cache's size.
    ///
    /// # Errors
    /// When the engine cannot be reached, or is not vLLM.
    pub async fn facts(&mut self) -> Result<Facts, String> {
        if self.model.is_empty() {
            let models = self.get_json("/v1/models").await?;
            let served = models.pointer("/data/0/id").and_then(Value::as_str);
            self.model = served.ok_or("it serves no model")?.to_owned();
        }
        let version = self.get_json("/version").await?;
        let version = version.get("version").and_then(Value::as_str).unwrap_or("?");
        let metrics = self.get("/metrics").await?;
        let label = |name| cache_label(&metrics, name).ok_or(format!("its metrics have no {name}"));
        let number = |text: String| text.parse::<u32>().map_err(|e| format!("{text:?}: {e}"));
        Ok(Facts {
            version: format!("vLLM {version}"),
            block_size: number(label("block_size")?)? as usize,
            capacity_blocks: number(label("num_gpu_blocks")?)?,
        })
    }

    /// Asks, and reads the answer to its end.
    ///
    /// # Errors
    /// When the answer is not whole.
    pub async fn ask(&self, prompt: &[u32], answer_tokens: u32) -> Result<Sample, String> {
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": answer_tokens,
            "min_tokens": answer_tokens, "ignore_eos": true, "temperature": 0, "stream": true,
            "stream_options": { "include_usage": true },
        });
        // Written before the clock starts: a hundred thousand ids take their time.
        let body = Bytes::from(body.to_string());
        let sample = self.exchange(body);
        timeout(PATIENCE, sample).await.map_err(|_| "no end of an answer".to_owned())?
    }

    async fn exchange(&self, body: Bytes) -> Result<Sample, String> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}/v1/completions", self.url))
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        let sent = Instant::now();
        let response = self.client.request(request).await.map_err(|error| error.to_string())?;
        let status = response.status();
        let mut body = response.into_body();
        if !status.is_success() {
            let text = body.collect().await.map_err(|error| error.to_string())?.to_bytes();
            return Err(format!("status {status}: {}", String::from_utf8_lossy(&text)));
        }
        let (mut events, mut reading) = (Events::default(), Reading::default());
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| error.to_string())?;
            let Some(chunk) = frame.data_ref() else { continue };
            let now = sent.elapsed();
            for event in events.push(chunk) {
                reading.event(&event, now)?;
            }
        }
        reading.sample.whole = sent.elapsed();
        if reading.sample.first_token.is_none() || reading.sample.prompt_tokens == 0 {
            return Err("an answer without a token or without usage".to_owned());
        }
        Ok(reading.sample)
    }

    async fn get_json(&self, path: &str) -> Result<Value, String> {
        let text = self.get(path).await?;
        serde_json::from_str(&text).map_err(|error| format!("{path}: {error}"))
    }

    async fn get(&self, path: &str) -> Result<String, String> {
        let url = format!("{}{path}", self.url);
        let uri = url.parse().map_err(|error| format!("{url}: {error}"))?;
        let response = timeout(PATIENCE, self.client.get(uri)).await;
        let response = response.map_err(|_| format!("{url}: no answer"))?;
        let response = response.map_err(|error| format!("{url}: {error}"))?;
        let body = response.into_body().collect().await.map_err(|e| format!("{url}: {e}"))?;
        Ok(String::from_utf8_lossy(&body.to_bytes()).into_owned())
    }
}

/// A label of `vllm:cache_config_info`.
fn cache_label(metrics: &str, name: &str) -> Option<String> {
    let line = metrics.lines().find(|line| line.starts_with("vllm:cache_config_info{"))?;
    let (_, after) = line.split_once(&format!("{name}=\""))?;
    Some(after.split('"').next()?.to_owned())
}

/// What is known of an answer so far.
#[derive(Default)]
struct Reading {
    sample: Sample,
    last: Duration,
}

impl Reading {
    fn event(&mut self, data: &str, now: Duration) -> Result<(), String> {
        if data == "[DONE]" {
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).map_err(|error| format!("event: {error}"))?;
        if let Some(error) = event.get("error") {
            return Err(format!("in the stream: {error}"));
        }
        let text = event.pointer("/choices/0/text").and_then(Value::as_str);
        if text.is_some_and(|text| !text.is_empty()) {
            match self.sample.first_token {
                None => self.sample.first_token = Some(now),
                Some(_) => self.sample.gaps.push(now.saturating_sub(self.last)),
            }
            self.last = now;
        }
        if let Some(prompt) = event.pointer("/usage/prompt_tokens").and_then(Value::as_u64) {
            let cached = event.pointer("/usage/prompt_tokens_details/cached_tokens");
            self.sample.prompt_tokens = prompt;
            self.sample.cached_tokens = cached.and_then(Value::as_u64).unwrap_or_default();
        }
        Ok(())
    }
}

/// Token ids that no other seed gives.
pub fn ids(seed: u64, count: usize) -> Vec<u32> {
    let mut random = Random::new(seed, 21);
    (0..count).map(|_| (FIRST_ID + random.below(IDS)) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_read_from_the_metrics() {
        let metrics = "# HELP x\nvllm:cache_config_info{block_size=\"32\",engine=\"0\",num_gpu_blocks=\"8192\"} 1.0\n";
        assert_eq!(cache_label(metrics, "block_size").as_deref(), Some("32"));
        assert_eq!(cache_label(metrics, "num_gpu_blocks").as_deref(), Some("8192"));
        assert_eq!(cache_label(metrics, "nothing"), None);
    }

    #[test]
    fn a_chunk_with_text_is_a_token() {
        let mut reading = Reading::default();
        let at = Duration::from_millis;
        reading.event(r#"{"choices":[{"text":" a"}]}"#, at(40)).unwrap();
        reading.event(r#"{"choices":[{"text":""}]}"#, at(50)).unwrap();
        reading.event(r#"{"choices":[{"text":" b"}]}"#, at(55)).unwrap();
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":90,"prompt_tokens_details":{"cached_tokens":64}}}"#;
        reading.event(usage, at(56)).unwrap();
        let Sample { first_token, gaps, prompt_tokens, cached_tokens, .. } = reading.sample;
        assert_eq!((first_token, gaps), (Some(at(40)), std::iter::once(at(15)).collect()));
        assert_eq!((prompt_tokens, cached_tokens), (90, 64));
    }
}
