//! Plays a script against a gateway over HTTP/1.1 and times what comes back.
//!
//! Times are the client's: from handing the request to the connection until the event is parsed.
//! A connection that must first be opened counts, as it would for any client.

use crate::script::{Ask, Script};
use crate::sse::Events;
use crate::stats::{Predictions, Quantiles, Run, Sample};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Where to, and by which names.
pub struct Gateway {
    /// As `http://host:port`. Where there are several each request may go to any, also those of one session.
    pub urls: Vec<String>,
    /// The model to ask for.
    pub model: String,
    /// Request header with the session's name.
    pub session_header: String,
    /// Request header with the hash of the prompt's head.
    pub head_header: String,
    /// Response header that names the replica.
    pub replica_header: String,
    /// The secret for which the filter says in a response what it expected to be cached.
    pub explain: Option<String>,
    /// A request that has taken this long is given up and counted as an error.
    pub patience: Duration,
    /// Ask for answers that do not end before they are as long as asked for.
    pub ignore_eos: bool,
}

/// In a request with the secret, and in a response with the explanation.
const EXPLAIN_HEADER: &str = "x-warmpath-explain";

type HttpClient = Client<HttpConnector, Full<Bytes>>;

struct Player {
    script: Script,
    gateway: Gateway,
    client: HttpClient,
    start: Instant,
    sent: AtomicUsize,
    done: AtomicUsize,
}

/// Plays the whole script and returns a sample for each request sent.
///
/// # Errors
/// When a session's task was lost, which would be a defect here.
pub async fn play(script: Script, gateway: Gateway, label: &str) -> Result<Vec<Sample>, String> {
    let sessions = script.sessions();
    let requests = script.requests();
    let (sent, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // The start lies a little ahead, so that setting up hundreds of tasks delays none of them.
    let start = Instant::now() + Duration::from_millis(200);
    let player = Arc::new(Player { script, gateway, client: client(), start, sent, done });
    let bar = tokio::spawn(show_progress(Arc::clone(&player), requests, label.to_owned()));
    let tasks: Vec<_> = (0..sessions)
        .map(|index| {
            let player = Arc::clone(&player);
            tokio::spawn(async move { player.session(index).await })
        })
        .collect();
    let mut samples = Vec::with_capacity(requests);
    for task in tasks {
        samples.extend(task.await.map_err(|error| error.to_string())?);
    }
    bar.abort();
    clear_progress();
    Ok(samples)
}

impl Player {
    /// Plays one session; a failed turn ends it, since the next would lack its answer.
    async fn session(&self, index: usize) -> Vec<Sample> {
        let mut samples = Vec::new();
        let Some(opening) = self.script.opening(index) else { return samples };
        let mut answers: Vec<String> = Vec::new();
        // A time that no clock reaches ends the session.
        let Some(mut planned) = self.start.checked_add(opening.arrival) else { return samples };
        for turn in 0..opening.turns {
            let Some(next) = planned.checked_add(self.script.pause(index, turn)) else { break };
            planned = next;
            // Written before the time has come, since writing it takes time too.
            let Some(ask) = self.script.ask(index, turn, &answers, &self.gateway.model) else {
                break;
            };
            let url = self.url(index, turn);
            let (sample, answer) = self.turn(url, opening.name, ask, planned).await;
            planned = Instant::now();
            self.done.fetch_add(1, Ordering::Relaxed);
            let failed = sample.error.is_some();
            samples.push(sample);
            if failed {
                break;
            }
            answers.push(answer);
        }
        samples
    }

    /// The gateway that a turn goes to: neither the same for a session nor in turns, and in each run the same.
    fn url(&self, index: usize, turn: usize) -> &str {
        let mixed = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (turn as u64) << 7;
        let mixed = mixed.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 33;
        let urls = &self.gateway.urls;
        urls.get(mixed as usize % urls.len().max(1)).map_or("", String::as_str)
    }

    async fn turn(&self, url: &str, session: &str, ask: Ask, planned: Instant) -> (Sample, String) {
        let mut reading = Reading::default();
        reading.sample.class = ask.class;
        reading.sample.arrival = planned.saturating_duration_since(self.start);
        let request = match self.request(url, session, ask) {
            Ok(request) => request,
            Err(error) => {
                return (Sample { error: Some(error), ..reading.sample }, String::new());
            }
        };
        sleep_until(planned).await;
        let sent = Instant::now();
        self.sent.fetch_add(1, Ordering::Relaxed);
        reading.sample.lag = sent - planned;
        let exchange = self.exchange(request, sent, &mut reading);
        let patience = self.gateway.patience;
        let outcome = timeout(patience, exchange)
            .await
            .unwrap_or_else(|_| Err(format!("no end within {} s", patience.as_secs())));
        reading.sample.whole = sent.elapsed();
        reading.sample.error = outcome.and_then(|()| reading.missing()).err();
        (reading.sample, reading.answer)
    }

    fn request(
        &self,
        url: &str,
        session: &str,
        mut ask: Ask,
    ) -> Result<Request<Full<Bytes>>, String> {
        if let Some(fields) = ask.body.as_object_mut().filter(|_| self.gateway.ignore_eos) {
            fields.insert("ignore_eos".to_owned(), Value::Bool(true));
        }
        let mut request = Request::builder();
        if let Some(secret) = &self.gateway.explain {
            request = request.header(EXPLAIN_HEADER, secret);
        }
        request
            .method(Method::POST)
            .uri(format!("{url}{}", ask.path))
            .header("content-type", "application/json")
            .header(&self.gateway.session_header, session)
            .header(&self.gateway.head_header, format!("{:016x}", ask.head))
            .body(Full::new(Bytes::from(ask.body.to_string())))
            .map_err(|error| error.to_string())
    }

    async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
        sent: Instant,
        reading: &mut Reading,
    ) -> Result<(), String> {
        let response = self.client.request(request).await.map_err(|error| chain(&error))?;
        reading.sample.replica = header(&response, &self.gateway.replica_header);
        reading.sample.predicted_tokens =
            header(&response, EXPLAIN_HEADER).as_deref().and_then(predicted);
        if !response.status().is_success() {
            let status = response.status();
            let body = response.into_body().collect().await.map_err(|error| chain(&error))?;
            let text: String =
                String::from_utf8_lossy(&body.to_bytes()).chars().take(200).collect();
            return Err(format!("{}: {}", status.as_u16(), text.trim()));
        }
        let mut body = response.into_body();
        let mut events = Events::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| chain(&error))?;
            let Some(chunk) = frame.data_ref() else { continue };
            let now = sent.elapsed();
            for event in events.push(chunk) {
                reading.event(&event, now)?;
            }
        }
        Ok(())
    }
}

/// What is known of an answer so far.
#[derive(Default)]
struct Reading {
    sample: Sample,
    answer: String,
    last_token: Duration,
    usage: bool,
    done: bool,
}

impl Reading {
    fn event(&mut self, data: &str, now: Duration) -> Result<(), String> {
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).map_err(|error| format!("event: {error}"))?;
        if let Some(error) = event.get("error") {
            return Err(format!("in the stream: {error}"));
        }
        // Of a chat, or of a completion.
        let content = ["/choices/0/delta/content", "/choices/0/text"];
        let content = content.iter().find_map(|place| event.pointer(place)?.as_str());
        if let Some(content) = content.filter(|content| !content.is_empty()) {
            self.answer.push_str(content);
            match self.sample.first_token {
                None => self.sample.first_token = Some(now),
                Some(_) => self.sample.gaps.push(now.saturating_sub(self.last_token)),
            }
            self.last_token = now;
        }
        if let Some(prompt) = event.pointer("/usage/prompt_tokens").and_then(Value::as_u64) {
            let cached = event.pointer("/usage/prompt_tokens_details/cached_tokens");
            self.usage = true;
            self.sample.prompt_tokens = prompt;
            self.sample.cached_tokens = cached.and_then(Value::as_u64).unwrap_or_default();
        }
        Ok(())
    }

    /// An answer that ended well has an end, a token and its usage.
    fn missing(&self) -> Result<(), String> {
        let parts = [
            (self.done, "the stream was cut short"),
            (self.sample.first_token.is_some(), "the stream had no content"),
            (self.usage, "the stream had no usage"),
        ];
        let missing = parts.iter().find(|(present, _)| !present);
        missing.map_or(Ok(()), |(_, what)| Err((*what).to_owned()))
    }
}

fn header(response: &Response<Incoming>, name: &str) -> Option<String> {
    Some(response.headers().get(name)?.to_str().ok()?.to_owned())
}

/// What an explanation expects of the replica that it names first.
fn predicted(explanation: &str) -> Option<u64> {
    let figure = explanation.split_once("overlap_tokens=")?.1;
    figure.split_once(',').map_or(figure, |(figure, _)| figure).parse().ok()
}

fn client() -> HttpClient {
    let mut connector = HttpConnector::new();
    // Requests of some kilobytes would otherwise wait for acknowledgements of their first part.
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).build(connector)
}

/// An error with its causes: the outermost alone says only "client error".
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Empties the prefix cache of each replica.
///
/// # Errors
/// When one cannot be reached or refuses.
pub async fn reset(replicas: &[String]) -> Result<(), String> {
    let client = client();
    for replica in replicas {
        let url = format!("{replica}/reset_prefix_cache");
        let status = send(&client, Method::POST, &url).await.map_err(|e| format!("{url}: {e}"))?.0;
        if status != 200 {
            return Err(format!("{url}: status {status}"));
        }
    }
    Ok(())
}

/// Waits until every URL answers 200 with the given text.
///
/// # Errors
/// When `within` has passed; it names the URL and its last answer.
pub async fn ready(
    urls: &[String],
    within: Duration,
    containing: Option<&str>,
) -> Result<(), String> {
    let (client, deadline) = (client(), Instant::now() + within);
    for url in urls {
        loop {
            let last = match send(&client, Method::GET, url).await {
                Ok((200, body)) if containing.is_none_or(|text| body.contains(text)) => break,
                Ok((200, _)) => format!("no {:?} in the answer", containing.unwrap_or_default()),
                Ok((status, _)) => format!("status {status}"),
                Err(error) => error,
            };
            if Instant::now() > deadline {
                return Err(format!("{url} is not ready after {} s: {last}", within.as_secs_f64()));
            }
            sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(())
}

async fn send(client: &HttpClient, method: Method, url: &str) -> Result<(u16, String), String> {
    let request = Request::builder().method(method).uri(url).body(Full::new(Bytes::new()));
    let request = request.map_err(|error| error.to_string())?;
    let response = timeout(Duration::from_secs(5), client.request(request));
    let response = response.await.map_err(|_| "no answer".to_owned())?.map_err(|e| chain(&e))?;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.map_err(|error| chain(&error))?;
    Ok((status, String::from_utf8_lossy(&body.to_bytes()).into_owned()))
}

/// The distinct errors of a run, commonest first, each with its count.
pub fn errors(samples: &[Sample]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for error in samples.iter().filter_map(|sample| sample.error.as_deref()) {
        *counts.entry(error).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let shown = counts.iter().take(5).map(|(error, count)| format!("{count} x {error}"));
    shown.collect::<Vec<_>>().join("; ")
}

/// One line on a run that has ended.
pub fn summary(run: &Run, lag: Quantiles) -> String {
    let mut line = format!(
        "{:<18} {} requests, hit rate {:.1} %, TTFT p99 {:.0} ms, generator lag p99 {:.1} ms",
        run.policy,
        run.requests,
        run.hit_rate() * 100.0,
        run.first_token.p99,
        lag.p99
    );
    if let Some(predictions) = &run.predictions {
        let Predictions { over, under, over_tokens, under_tokens, .. } = predictions;
        line.push_str(&format!(
            "\n  {:<18} cached tokens as predicted in {:.1} % of requests, fewer in {over} by {over_tokens} in all, more in \
             {under} by {under_tokens}",
            "",
            predictions.share() * 100.0
        ));
    }
    line
}

const BAR_CELLS: usize = 30;

async fn show_progress(player: Arc<Player>, requests: usize, label: String) {
    if !std::io::stderr().is_terminal() {
        return;
    }
    loop {
        let done = player.done.load(Ordering::Relaxed);
        let in_flight = player.sent.load(Ordering::Relaxed).saturating_sub(done);
        let bar = "#".repeat(done * BAR_CELLS / requests.max(1));
        eprint!("\r  {label:<18} [{bar:<BAR_CELLS$}] {done}/{requests}, {in_flight} in flight   ");
        let _ = std::io::stderr().flush();
        sleep(Duration::from_millis(250)).await;
    }
}

fn clear_progress() {
    if std::io::stderr().is_terminal() {
        eprint!("\r{:78}\r", "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gaps::Gaps;
    use crate::script::Form;
    use crate::trace::{Session, Trace, Turn};
    use warmpath::mock::engine::EngineConfig;
    use warmpath::mock::{ReplicaConfig, serve};

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn content(text: &str) -> String {
        serde_json::json!({ "choices": [{ "delta": { "content": text } }] }).to_string()
    }

    #[test]
    fn the_first_content_event_is_the_first_token() {
        let mut reading = Reading::default();
        reading
            .event(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#, at(5))
            .unwrap();
        assert_eq!(reading.sample.first_token, None);
        reading.event(&content(" a"), at(40)).unwrap();
        reading.event(&content(" b"), at(55)).unwrap();
        assert_eq!(reading.sample.first_token, Some(at(40)));
        assert_eq!(Gaps::quantiles([&reading.sample.gaps].into_iter(), [1.0]), [at(15)]);
        assert_eq!(reading.answer, " a b");
    }

    #[test]
    fn a_completions_text_is_content_too() {
        let mut reading = Reading::default();
        reading.event(r#"{"choices":[{"text":" a"}]}"#, at(40)).unwrap();
        assert_eq!((reading.sample.first_token, reading.answer.as_str()), (Some(at(40)), " a"));
    }

    #[test]
    fn usage_comes_from_the_chunk_without_choices() {
        let mut reading = Reading::default();
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":90,"prompt_tokens_details":{"cached_tokens":64}}}"#;
        reading.event(usage, at(1)).unwrap();
        assert_eq!((reading.sample.prompt_tokens, reading.sample.cached_tokens), (90, 64));
        let mut reading = Reading::default();
        reading.event(r#"{"choices":[],"usage":null}"#, at(1)).unwrap();
        assert!(!reading.usage);
    }

    #[track_caller]
    fn check_missing(events: &[&str], expected: Result<(), &str>) {
        let mut reading = Reading::default();
        for event in events {
            reading.event(event, at(1)).unwrap();
        }
        assert_eq!(reading.missing(), expected.map_err(str::to_owned));
    }

    #[test]
    fn an_answer_without_an_end_or_a_token_or_usage_is_an_error() {
        let (token, usage) = (content("a"), r#"{"choices":[],"usage":{"prompt_tokens":9}}"#);
        check_missing(&[&token, usage, "[DONE]"], Ok(()));
        check_missing(&[&token, usage], Err("the stream was cut short"));
        check_missing(&[usage, "[DONE]"], Err("the stream had no content"));
        check_missing(&[&token, "[DONE]"], Err("the stream had no usage"));
    }

    #[test]
    fn an_error_event_ends_the_reading() {
        let outcome = Reading::default().event(r#"{"error":{"code":500}}"#, at(1));
        assert_eq!(outcome, Err(r#"in the stream: {"code":500}"#.to_owned()));
    }

    /// A replica whose steps take no time worth waiting for, and what a trace of two sessions shows of it: one goes on with
    /// its own prompt, the other begins like it.
    async fn played(form: Form) -> Vec<Sample> {
        let engine = EngineConfig {
            step_base: Duration::from_millis(1),
            prefill_rate: 1e7,
            decode_per_sequence: Duration::ZERO,
            ..EngineConfig::default()
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let replica =
            serve(ReplicaConfig { engine, ..ReplicaConfig::default() }, listener).unwrap();
        let turn = |keep, blocks: &[u64], prompt_tokens| Turn {
            think: Duration::from_millis(5),
            keep,
            blocks: blocks.to_vec(),
            prompt_tokens,
            answer_blocks: Vec::new(),
            answer_tokens: 20,
            class: "agent",
        };
        let session = |name: &str, arrival, turns| Session {
            name: name.to_owned(),
            arrival: at(arrival),
            turns,
        };
        let sessions = vec![
            session("a", 0, vec![turn(0, &[1, 2, 3], 55), turn(2, &[4, 5, 6], 90)]),
            session("b", 500, vec![turn(0, &[1, 2, 8], 50)]),
        ];
        let trace = Trace { name: "t".to_owned(), block_tokens: 16, sessions };
        let gateway = Gateway {
            urls: vec![format!("http://{}", replica.address)],
            model: "mock".to_owned(),
            session_header: "x-session-id".to_owned(),
            head_header: "x-prompt-head".to_owned(),
            replica_header: "x-mock-replica".to_owned(),
            explain: None,
            patience: Duration::from_secs(20),
            ignore_eos: true,
        };
        play(Script::Trace(trace, form), gateway, "direct").await.unwrap()
    }

    #[tokio::test]
    async fn a_replica_finds_of_a_traces_prompts_what_the_trace_says() {
        let samples = played(Form::Ids).await;
        assert_eq!(errors(&samples), "");
        let tokens: Vec<(u64, u64)> =
            samples.iter().map(|sample| (sample.prompt_tokens, sample.cached_tokens)).collect();
        assert_eq!(tokens, [(55, 0), (90, 32), (50, 32)]);
        assert!(samples.iter().all(|sample| sample.class == "agent" && sample.replica.is_some()));
        assert_eq!(samples[2].arrival, at(505));
    }

    /// The mock without a model takes a word for a token; a chat adds its roles, behind which blocks begin elsewhere.
    #[tokio::test]
    async fn words_are_found_as_ids_are() {
        for form in [Form::Text, Form::Chat] {
            let samples = played(form).await;
            assert_eq!(errors(&samples), "");
            let cached: Vec<u64> = samples.iter().map(|sample| sample.cached_tokens).collect();
            assert_eq!(cached, [0, 32, 32], "{form:?}");
        }
    }

    #[track_caller]
    fn check_predicted(explanation: &str, expected: Option<u64>) {
        assert_eq!(predicted(explanation), expected);
    }

    #[test]
    fn the_chosen_replicas_overlap_is_what_was_expected() {
        let two = "reason=prefix, prompt_tokens=90; replica=a:1, overlap_tokens=64, cost_s=0.0001; \
                   replica=b:1, overlap_tokens=0, cost_s=0.1";
        check_predicted(two, Some(64));
        check_predicted("reason=prompt, prompt_tokens=0", None);
    }

    #[test]
    fn errors_are_listed_by_how_common_they_are() {
        let failed = |error: &str| Sample { error: Some(error.to_owned()), ..Sample::default() };
        let samples = [failed("a"), failed("b"), Sample::default(), failed("b")];
        assert_eq!(errors(&samples), "2 x b; 1 x a");
    }
}
