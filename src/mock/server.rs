//! The HTTP side of a mock replica: vLLM's routes, and `/mock/*` for tests.

use super::answer::Ticket;
use super::control::{Control, MetricsMode};
use super::driver::{Command, Listener};
use super::engine::{Request, RequestId};
use super::exposition;
use super::prompt::{self, ApiError, Wish};
use super::replica::{Replica, Seen};
use crate::request::Api;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep};

/// Bodies beyond this are refused, so that a test gone wrong cannot fill the machine.
const BODY_LIMIT: usize = 64 << 20;

/// How late `/metrics` is in its slow mode: later than any poller waits.
const SLOW_METRICS: Duration = Duration::from_secs(10);

/// How often a hanging prompt looks whether it may go on.
const HANG_POLL: Duration = Duration::from_millis(20);

/// Bytes in front of the truth in the huge mode: more than a poller should read.
const HUGE_METRICS: usize = 8 << 20;

type Shared = State<Arc<Replica>>;

/// The APIs that it serves. Of a batch that is no completion it serves the first prompt.
const APIS: [Api; 10] = [
    Api::Chat,
    Api::Completions,
    Api::Responses,
    Api::Messages,
    Api::Generate,
    Api::Embeddings,
    Api::Pooling,
    Api::Classify,
    Api::Score,
    Api::Rerank,
];

/// All routes of a replica.
pub fn router(replica: Arc<Replica>) -> Router {
    let observed = middleware::from_fn_with_state(Arc::clone(&replica), observe);
    let mut prompts = Router::new();
    for (api, path) in
        APIS.into_iter().flat_map(|api| api.paths().iter().map(move |path| (api, path)))
    {
        let answer = async move |State(replica): Shared, headers: HeaderMap, body: Bytes| {
            let answer = generate(replica, api, headers, body).await;
            answer.unwrap_or_else(IntoResponse::into_response)
        };
        prompts = prompts.route(path, post(answer));
    }
    prompts
        .route("/v1/models", get(models))
        .route("/tokenize", post(tokenize))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/version", get(async || Json(json!({ "version": "0.32.0" }))))
        .route("/load", get(load))
        .route("/metrics", get(metrics))
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .route("/kv_event_sources", get(kv_event_sources))
        .fallback(async || (StatusCode::NOT_FOUND, Json(json!({ "detail": "Not Found" }))))
        .layer(observed)
        // axum's own limit of 2 MB would answer 413 where an engine reads on.
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .route("/mock/control", get(show_control).post(set_control))
        .route("/mock/requests", get(requests))
        .route("/mock/cached", post(cached))
        .with_state(replica)
}

/// Remembers the request as it came and signs the response.
async fn observe(State(replica): Shared, request: HttpRequest, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(bytes) = axum::body::to_bytes(body, BODY_LIMIT).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    replica.remember(Seen {
        number: 0,
        replica: replica.config.name.clone(),
        method: parts.method.to_string(),
        path: parts.uri.to_string(),
        headers: parts.headers.iter().map(|(name, v)| (name.to_string(), text(v))).collect(),
        body_bytes: bytes.len(),
        body_sha256: format!("{:x}", Sha256::digest(&bytes)),
    });
    while replica.control().freeze {
        sleep(HANG_POLL).await;
    }
    let mut response = next.run(HttpRequest::from_parts(parts, Body::from(bytes))).await;
    if let Ok(name) = HeaderValue::from_str(&replica.config.name) {
        response.headers_mut().insert("x-mock-replica", name);
    }
    response
}

async fn generate(
    replica: Arc<Replica>,
    api: Api,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    misbehave(&replica, &body).await?;
    let kind =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !kind.starts_with("application/json") {
        let message = "Unsupported Media Type: Only 'application/json' is allowed";
        return Err(ApiError::invalid(None, message));
    }
    let wish = prompt::read(&replica, api, &body)?;
    let stream = wish.stream;
    let ticket = submit(replica, wish, &headers, arrived);
    if !stream {
        return Ok(Json(ticket.whole().await?).into_response());
    }
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, kind)], Body::new(ticket.stream())).into_response())
}

async fn misbehave(replica: &Replica, body: &[u8]) -> Result<(), ApiError> {
    let (failure, control) = replica.set_control(|control| (control.failure(), control.clone()));
    if let Some(status) = failure {
        return Err(ApiError::internal(status, "failed on demand"));
    }
    let has = |text: &String| body.windows(text.len().max(1)).any(|part| part == text.as_bytes());
    if control.poison.as_ref().is_some_and(has) {
        return Err(ApiError::internal(500, "poisoned"));
    }
    while replica.control().hang {
        sleep(HANG_POLL).await;
    }
    if !control.slow.is_zero() {
        sleep(control.slow).await;
    }
    Ok(())
}

fn submit(replica: Arc<Replica>, wish: Wish, headers: &HeaderMap, arrived: Instant) -> Ticket {
    let (sender, events) = mpsc::unbounded_channel();
    let lora = replica.config.loras.iter().find(|lora| lora.name == wish.model);
    let mut ids = Vec::new();
    for (prompt, _) in
        wish.prompts.iter().flat_map(|prompt| (0..wish.answers).map(move |i| (prompt, i)))
    {
        let request = Request {
            id: RequestId(replica.next_number()),
            prompt: prompt.clone(),
            max_tokens: wish.max_tokens,
            salt: wish.salt.clone(),
            lora: lora.cloned(),
            reads_cache: wish.reads_cache,
        };
        let choice = ids.len();
        ids.push(request.id);
        let listener = Listener { events: sender.clone(), choice, arrived };
        // If the engine is gone, the listener is dropped, and the answer says so.
        let _ = replica.commands.send(Command::Submit(request, listener));
    }
    let prefix = match wish.api {
        Api::Completions => "cmpl",
        Api::Responses => "resp",
        _ => "chatcmpl",
    };
    let given = headers.get("x-request-id").and_then(|value| value.to_str().ok());
    let name = given.map_or_else(|| replica.answer_name(ids.first()), str::to_owned);
    let name = format!("{prefix}-{name}");
    Ticket::new(replica, wish, name, ids, events)
}

async fn tokenize(State(replica): Shared, body: Bytes) -> Response {
    match prompt::tokenize(&replica, &body) {
        Ok(tokens) => Json(json!({
            "count": tokens.len(),
            "max_model_len": replica.config.max_model_len,
            "tokens": tokens,
            "token_strs": null,
        }))
        .into_response(),
        Err(error) => error.into_response(),
    }
}

async fn models(State(replica): Shared) -> Json<Value> {
    let created = replica.identity.started as u64;
    let base = &replica.identity.model_name;
    let card = |name: &str, root: &str, parent: Option<&str>, length: Option<usize>| {
        json!({
            "id": name, "object": "model", "created": created, "owned_by": "vllm", "root": root,
            "parent": parent, "max_model_len": length, "permission": [],
        })
    };
    let length = Some(replica.config.max_model_len);
    let names = replica.config.served_names.iter().map(|name| card(name, base, None, length));
    let adapters =
        replica.config.loras.iter().map(|lora| card(&lora.name, &lora.path, Some(base), None));
    Json(json!({ "object": "list", "data": names.chain(adapters).collect::<Vec<Value>>() }))
}

async fn health(State(replica): Shared) -> StatusCode {
    let status = replica.control().health.unwrap_or(200);
    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

async fn load(State(replica): Shared) -> Json<Value> {
    Json(json!({ "server_load": replica.in_flight() }))
}

async fn metrics(State(replica): Shared) -> Response {
    let mode = replica.control().metrics;
    if mode == MetricsMode::Slow {
        sleep(SLOW_METRICS).await;
    }
    let published = replica.published().clone();
    let mut text = exposition::render(replica.config.metric_names, &replica.identity, &published);
    match mode {
        MetricsMode::Garbage => {
            let bytes: Vec<u8> = (0..4096_u32).map(|i| ((i * 193) >> 3) as u8).collect();
            return bytes.into_response();
        }
        MetricsMode::Empty => text.clear(),
        MetricsMode::Html => {
            text = "<html><body>vllm:num_requests_running 0</body></html>".to_owned()
        }
        MetricsMode::Gzip => {
            let bytes = [b"\x1f\x8b\x08\0".as_slice(), &[0xfe; 400]].concat();
            return ([(header::CONTENT_ENCODING, "gzip")], bytes).into_response();
        }
        MetricsMode::Renamed => text = text.replace("vllm:", "engine:"),
        MetricsMode::Backwards => {
            let started = 1e9 - replica.next_number() as f64;
            text = text.replace(
                &format!("process_start_time_seconds {}", replica.identity.started),
                &format!("process_start_time_seconds {started}"),
            );
        }
        MetricsMode::Twice => text = text.replace("} 0.0\n", "} 900.0\n") + &text,
        MetricsMode::Ranks => text = text.replace("engine=\"0\"", "engine=\"1\"") + &text,
        MetricsMode::Prefill => text.push_str("vllm:nixl_bytes_transferred_sum 1.0\n"),
        MetricsMode::Error => return StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        MetricsMode::Huge => {
            let other = "other_metric{a=\"b\"} 1.0\n";
            text = other.repeat(HUGE_METRICS / other.len()) + &text;
        }
        MetricsMode::Nan => text = text.lines().map(broken).collect(),
        MetricsMode::Normal | MetricsMode::Slow => (),
    }
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// A sample line with a value that no engine should send, a different one from name to name.
fn broken(line: &str) -> String {
    match line.rsplit_once(' ') {
        Some((series, _)) if !line.starts_with('#') => {
            let value = match series.len() % 3 {
                0 => "NaN",
                1 => "+Inf",
                _ => "-1.0",
            };
            format!("{series} {value}\n")
        }
        _ => format!("{line}\n"),
    }
}

async fn reset_prefix_cache(State(replica): Shared) -> Json<Value> {
    let (sender, answer) = oneshot::channel();
    let _ = replica.commands.send(Command::ResetPrefixCache(sender));
    Json(json!({ "success": answer.await.unwrap_or(false) }))
}

/// The publisher's configuration by rank, as an engine shows it.
async fn kv_event_sources(State(replica): Shared) -> Json<Value> {
    Json(match &replica.config.events {
        None => json!({}),
        Some(events) => json!({ "0": {
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": events.endpoint,
            "replay_endpoint": events.replay, "buffer_steps": events.buffer_batches,
            "hwm": 100_000, "max_queue_size": 100_000, "topic": events.topic,
        }}),
    })
}

async fn show_control(State(replica): Shared) -> String {
    format!("{:?}\n", replica.control())
}

async fn set_control(State(replica): Shared, body: Bytes) -> Result<StatusCode, ApiError> {
    let wish = Value::Object(prompt::object(&body)?);
    let refuse_ms = wish.get("refuse_ms").and_then(Value::as_u64);
    replica
        .set_control(|control: &mut Control| control.apply(&wish))
        .map_err(|error| ApiError::bad_request("control", error))?;
    if let Some(ms) = refuse_ms {
        // The answer goes out before the connections are cut.
        tokio::spawn(async move {
            sleep(Duration::from_millis(20)).await;
            replica.set_control(|control| control.refuse = true);
            sleep(Duration::from_millis(ms)).await;
            replica.set_control(|control| control.refuse = false);
        });
    }
    Ok(StatusCode::OK)
}

/// What the cache has of a prompt, given as the body of a chat or a completion, now.
async fn cached(State(replica): Shared, body: Bytes) -> Result<Json<Value>, ApiError> {
    let is_chat = prompt::object(&body)?.contains_key("messages");
    let wish = prompt::read(&replica, if is_chat { Api::Chat } else { Api::Completions }, &body)?;
    let request = Request {
        id: RequestId(0),
        prompt: wish.prompts.first().cloned().unwrap_or_default(),
        max_tokens: 1,
        lora: replica.config.loras.iter().find(|lora| lora.name == wish.model).cloned(),
        salt: wish.salt,
        reads_cache: true,
    };
    let (sender, answer) = oneshot::channel();
    let _ = replica.commands.send(Command::Look(request, sender));
    Ok(Json(json!({ "cached_tokens": answer.await.unwrap_or(0) })))
}

async fn requests(State(replica): Shared) -> Json<Value> {
    let list: Vec<Value> = replica
        .seen()
        .into_iter()
        .map(|seen| {
            json!({
                "number": seen.number, "replica": seen.replica, "method": seen.method,
                "path": seen.path, "headers": seen.headers, "body_bytes": seen.body_bytes,
                "body_sha256": seen.body_sha256,
            })
        })
        .collect();
    Json(Value::Array(list))
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(self.json())).into_response()
    }
}
