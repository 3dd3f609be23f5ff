//! What the agent answers over HTTP: the report, its own health and metrics, and whether the replica is to be left alone.
//!
//! A reader that is slow, or many, costs a connection each: they are few, each has a time to say what it wants and an end, and
//! what is sent to all of them is one and the same. No TLS: where more than this machine is to be reached, Envoy's does it.

use super::cache::Names;
use super::engine::Known;
use super::exposition;
use super::follow::Followed;
use super::rank::Rank;
use crate::report::{CONTENT_TYPE, PATH, Position, Status, write_head};
use crate::secret;
use axum::Router;
use axum::body::Body;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hyper::body::{Bytes, Frame, SizeHint};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep, timeout};

/// Connections at the same time: each gateway's leader has one.
const MAX_CONNECTIONS: usize = 64;

/// How long a reader may take to ask.
const ASKING: Duration = Duration::from_secs(10);

/// A connection ends after this long, between two requests; one that does not read what it asked for, soon after.
const CONNECTION: Duration = Duration::from_secs(300);
const CONNECTION_END: Duration = Duration::from_secs(10);

/// What all tasks share.
pub struct Shared {
    /// The engine's ranks.
    pub ranks: Vec<Arc<Followed>>,
    /// Told when the models are known.
    pub named: Notify,
    /// Reports that were asked for.
    pub reports: AtomicU64,
    /// Of these, the ones that were snapshots.
    pub snapshots: AtomicU64,
    /// Requests that were refused for want of a token.
    pub refused: AtomicU64,
    known: Mutex<Known>,
    token: Option<String>,
    draining: AtomicBool,
    read_at: Mutex<Option<Instant>>,
}

impl Shared {
    /// Nothing is known yet.
    pub fn new(ranks: Vec<Arc<Followed>>, token: Option<String>) -> Self {
        Self {
            ranks,
            named: Notify::new(),
            reports: AtomicU64::new(0),
            snapshots: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            known: Mutex::default(),
            token,
            draining: AtomicBool::new(false),
            read_at: Mutex::default(),
        }
    }

    /// What is known of the engine. Nothing may be awaited meanwhile.
    pub fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the report was read lately.
    pub fn was_read_within(&self, time: Duration) -> bool {
        let read_at = self.read_at.lock().unwrap_or_else(PoisonError::into_inner);
        read_at.is_some_and(|at| at.elapsed() <= time)
    }

    /// Whether the operator wants no new requests here.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }

    /// Says whose blocks the engine can have.
    pub fn set_names(&self, names: &Names) {
        self.known().names = Some(names.clone());
        for followed in &self.ranks {
            followed.rank().set_names(names.clone());
            followed.wake.notify_one();
        }
        self.named.notify_waiters();
    }

    fn status(&self, rank: &Rank) -> Status {
        let known = self.known();
        let (page, age) = known.load().map_or((None, None), |(page, age)| (Some(page), age));
        let fresh = page.filter(|_| age.is_some());
        let counts = rank.counts();
        let block_tokens = rank.cache().block_tokens().or(page.and_then(|page| page.block_size));
        let age_ms = age.map(|age| u32::try_from(age.as_millis()).unwrap_or(u32::MAX));
        Status {
            model: rank.cache().names().base.clone(),
            block_tokens: block_tokens.map_or(0, |size| size.get()),
            draining: self.is_draining(),
            live: rank.is_live(),
            incomplete: rank.is_incomplete(),
            adapters_unknown: rank.cache().adapters_unknown(),
            capacity_blocks: page.and_then(|page| page.capacity_blocks),
            started_at: page.and_then(|page| page.started_at),
            running: fresh.and_then(|page| page.running),
            waiting: fresh.and_then(|page| page.waiting),
            kv_usage: fresh.and_then(|page| page.kv_usage),
            load_age_ms: age_ms,
            engines: page.map_or(0, |page| u32::try_from(page.engines).unwrap_or(u32::MAX)),
            disaggregated: page.is_some_and(|page| page.disaggregated),
            adapters: fresh.and_then(|page| page.adapters.clone()),
            held_blocks: counts.told,
            offloaded_blocks: counts.offloaded,
            unmatched_blocks: rank.cache().unmatched(),
        }
    }
}

/// Answers for ever.
pub async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let router = router(shared);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let router = router.clone();
                tokio::spawn(async move {
                    converse(stream, router).await;
                    drop(place);
                });
            }
            // Most likely out of file descriptors; they come back as connections end.
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    }
}

async fn converse(stream: TcpStream, router: Router) {
    let _ = stream.set_nodelay(true);
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(ASKING);
    builder.http2().max_concurrent_streams(8);
    let service = TowerToHyperService::new(router);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    if timeout(CONNECTION, connection.as_mut()).await.is_err() {
        connection.as_mut().graceful_shutdown();
        let _ = timeout(CONNECTION_END, connection).await;
    }
}

fn router(shared: Arc<Shared>) -> Router {
    let guarded = Router::new()
        .route(PATH, get(cache))
        .route("/metrics", get(metrics))
        .route("/drain", post(drain).delete(undrain))
        .layer(from_fn_with_state(Arc::clone(&shared), authorize));
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .merge(guarded)
        .fallback(async || {
            (
                StatusCode::NOT_FOUND,
                "no such path: there are /v1/cache, /healthz, /metrics and /drain\n",
            )
        })
        .with_state(shared)
}

async fn authorize(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    if shared.token.as_ref().is_none_or(|token| bears(request.headers(), token)) {
        return next.run(request).await;
    }
    shared.refused.fetch_add(1, Relaxed);
    let wanted = [(header::WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, wanted, "a bearer token is required\n").into_response()
}

fn bears(headers: &HeaderMap, token: &str) -> bool {
    let value = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let given = value.and_then(|value| value.split_at_checked(7));
    let Some((scheme, given)) = given else { return false };
    scheme.eq_ignore_ascii_case(b"bearer ") && secret::is_same(given, token.as_bytes())
}

/// What a reader may say.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    since: Option<String>,
    rank: Option<u32>,
}

async fn cache(
    State(shared): State<Arc<Shared>>,
    asked: Result<Query<Asked>, axum::extract::rejection::QueryRejection>,
) -> Response {
    let Ok(Query(asked)) = asked else {
        return (StatusCode::BAD_REQUEST, "expected ?since=GENERATION.SEQ and ?rank=N\n")
            .into_response();
    };
    let since = match asked.since.as_deref().map(str::parse::<Position>).transpose() {
        Ok(since) => since,
        Err(error) => {
            return (StatusCode::BAD_REQUEST, format!("since: {error}\n")).into_response();
        }
    };
    let followed = match asked.rank {
        Some(number) => shared.ranks.iter().find(|followed| followed.number == number),
        None => shared.ranks.first(),
    };
    let Some(followed) = followed else {
        return (StatusCode::NOT_FOUND, "no such rank\n").into_response();
    };
    *shared.read_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    if shared.known().names.is_none() {
        let text = "the engine has not said yet which model it serves\n";
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    }
    report(&shared, followed, since)
}

fn report(shared: &Shared, followed: &Followed, since: Option<Position>) -> Response {
    let mut rank = followed.rank();
    let answer = rank.answer(since);
    let status = shared.status(&rank);
    drop(rank);
    shared.reports.fetch_add(1, Relaxed);
    shared.snapshots.fetch_add(u64::from(answer.since.is_none()), Relaxed);
    let length = answer.pieces.iter().map(|piece| piece.len()).sum();
    let head = write_head(&status, answer.since, answer.position, length);
    let mut pieces = VecDeque::from([Bytes::from(head)]);
    let full = answer.pieces.into_iter().filter(|piece| !piece.is_empty());
    pieces.extend(full.map(Bytes::from_owner));
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], Body::new(Pieces(pieces))).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, exposition::page(&shared)).into_response()
}

async fn drain(State(shared): State<Arc<Shared>>) -> &'static str {
    shared.draining.store(true, Relaxed);
    "draining\n"
}

async fn undrain(State(shared): State<Arc<Shared>>) -> &'static str {
    shared.draining.store(false, Relaxed);
    "not draining\n"
}

/// A body of pieces that are not copied, of a length that is known.
struct Pieces(VecDeque<Bytes>);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.iter().map(|piece| piece.len() as u64).sum())
    }
}
