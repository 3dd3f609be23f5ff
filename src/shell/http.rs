//! One request and its response: what each callback holds, releases and counts.
//!
//! It holds no body beyond the configured limit and no response at all. What is read, weighed or
//! learned is the core's part.

use super::reading::Turn;
use super::root::{Shared, State};
use super::routed::Routed;
use super::{EXPLAIN_HEADER, host, meters, noted};
use crate::config::ExplainConfig;
use crate::feedback::Feedback;
use crate::headers::Headers;
use crate::metrics;
use crate::request::{self, Api};
use crate::route::{ROUTING_HEADER, Reason};
use crate::secret;
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;
use std::cell::RefCell;
use std::rc::Rc;

/// Room that Envoy needs beside what is held of a body in chunks.
///
/// Envoy adds what has just arrived to what is held before it asks, and answers 413 when the sum is
/// beyond its own limit. What arrives at once is what the socket had, by default up to 1 MiB and one
/// read more. With half of it, one in seven bodies of 4 MB was refused under Envoy's default limits.
const ARRIVES_AT_ONCE: usize = (1 << 20) + (16 << 10);

/// The first Envoy, as major and minor version, where a virtual host's `request_body_buffer_limit` raises what a filter may hold.
const HAS_LIMIT_OF_ITS_OWN: (u64, u64) = (1, 37);

/// How much of a body in chunks may be held, of `limit`, before the rest of it can be refused.
///
/// Before [`HAS_LIMIT_OF_ITS_OWN`] the limit of what is held is the limit of what arrives at once, so that any piece held may be
/// one too much: what did not arrive at once goes on.
fn room_for_chunks(limit: usize) -> usize {
    match host::envoy_version() {
        Some(version) if version >= HAS_LIMIT_OF_ITS_OWN => limit.saturating_sub(ARRIVES_AT_ONCE),
        _ => 0,
    }
}

enum Phase {
    /// Nothing known yet, or not ours.
    Idle,
    /// The body is being held, while there is room.
    Holding { api: Api, cluster: String, held: usize, room: usize },
    /// The body is complete, and still held while the prompt is read: in a callback of this request or on ticks.
    Reading { api: Api, turn: Rc<RefCell<Turn>> },
    /// The request was answered here, and goes nowhere.
    Refused,
    /// The request has gone on.
    Sent { api: Api, routed: Box<Routed> },
}

/// See the module.
pub struct Stream {
    context_id: u32,
    state: Option<State>,
    phase: Phase,
    explain: Option<String>,
    wants_explain: bool,
    status: Option<u16>,
    feedback: Option<Feedback>,
    /// What there is to log once the request's headers can be read again.
    notice: Option<String>,
}

impl Stream {
    pub fn new(context_id: u32, state: Option<State>) -> Self {
        Self {
            context_id,
            state,
            phase: Phase::Idle,
            explain: None,
            wants_explain: false,
            status: None,
            feedback: None,
            notice: None,
        }
    }

    /// Calls `act` with the shared state. A state that is in use cannot be: callbacks do not
    /// nest. Should they ever, the call is skipped rather than trapping.
    fn with<T>(&self, act: impl FnOnce(&mut Shared<'_>) -> T) -> Option<T> {
        match self.state.as_ref()?.borrow() {
            Some(mut shared) => Some(act(&mut shared)),
            None => {
                meters::add(&metrics::HOST_ERRORS, &[], 1);
                None
            }
        }
    }

    fn take_explain_header(&mut self, headers: &Headers) {
        let Some(Some(explain)) = self.with(|shared| shared.config.explain.clone()) else { return };
        let ExplainConfig { request_header, secret: configured } = explain;
        if let Some(value) = headers.get(&request_header) {
            self.wants_explain = secret::is_same(value, configured.as_bytes());
            host::remove_request_header(&request_header);
        }
    }

    /// What the headers say: a body to hold, or why not.
    fn read_headers(
        &self,
        headers: &Headers,
        end_of_stream: bool,
    ) -> Result<(Api, String), (Option<Api>, Reason)> {
        let api = headers.get(":path").and_then(Api::of_path);
        let json = Api::is_json(headers.get("content-type"));
        let post = headers.text(":method") == Some("POST");
        // What follows is the upgraded protocol's, not a body: it would be held for ever.
        let upgrade = headers.get("upgrade").is_some();
        if !post || !json || upgrade {
            return Err((None, Reason::NotInference));
        }
        let Some(api) = api else {
            meters::add(&metrics::PROMPTS, &["other", "unknown", "unknown"], 1);
            return Err((None, Reason::NotInference));
        };
        if !api.computes_prompt() {
            meters::add(&metrics::PROMPTS, &[api.as_str(), "none", "none"], 1);
            return Err((None, Reason::NoPrefill));
        }
        let cluster = host::property(&["xds", "cluster_name"]);
        let known = self.with(|shared| {
            cluster.filter(|cluster| shared.config.cluster_named(cluster).is_some())
        });
        let Some(Some(cluster)) = known else { return Err((None, Reason::UnknownCluster)) };
        if end_of_stream {
            return Err((Some(api), Reason::NoBody));
        }
        if !Api::is_plain(headers.get("content-encoding")) {
            return Err((Some(api), Reason::ContentEncoding));
        }
        Ok((api, cluster))
    }

    fn unrouted(&mut self, reason: Reason) {
        meters::add(&metrics::REQUESTS, &[reason.as_str()], 1);
        noted::reason(reason);
        self.phase = Phase::Idle;
    }

    /// Turns a held body into one that is read.
    fn turn(&mut self, body_bytes: usize) -> Option<Rc<RefCell<Turn>>> {
        let Phase::Holding { api, cluster, .. } = std::mem::replace(&mut self.phase, Phase::Idle)
        else {
            return None;
        };
        let turn = Rc::new(RefCell::new(Turn::new(self.context_id, api, cluster, body_bytes)));
        self.phase = Phase::Reading { api, turn: Rc::clone(&turn) };
        Some(turn)
    }

    /// Decides without a prompt.
    fn give_up(&mut self, reason: Reason, body_bytes: usize) -> Action {
        if let Some(turn) = self.turn(body_bytes) {
            self.with(|shared| turn.try_borrow_mut().map(|mut turn| turn.give_up(shared, reason)));
        }
        self.go()
    }

    /// Reads the prompt as far as this callback may. Ticks do the rest, and let the request go.
    fn read(&mut self, body_bytes: usize) -> Action {
        if body_bytes == 0 {
            return self.give_up(Reason::NoBody, 0);
        }
        let Some(turn) = self.turn(body_bytes) else { return Action::Continue };
        let is_decided = self.with(|shared| shared.read(&turn)).unwrap_or(true);
        if is_decided { self.go() } else { Action::Pause }
    }

    /// Leaves the prompt to ticks, in a callback that has already looked through all of the body.
    fn read_later(&mut self, body_bytes: usize) -> Action {
        let Some(turn) = self.turn(body_bytes) else { return Action::Continue };
        match self.with(|shared| shared.read_later(&turn)) {
            Some(()) => Action::Pause,
            None => self.go(),
        }
    }

    /// Lets the request go, decided.
    fn go(&mut self) -> Action {
        self.settle();
        match self.phase {
            Phase::Reading { .. } => self.unrouted(Reason::HostError),
            Phase::Refused => return Action::Pause,
            _ => {}
        }
        Action::Continue
    }

    /// Takes over what was decided, here or on a tick.
    fn settle(&mut self) {
        let Phase::Reading { api, turn } = &self.phase else { return };
        let api = *api;
        let Ok(mut turn) = turn.try_borrow_mut() else { return };
        let Some(outcome) = turn.take_outcome() else { return };
        let is_answered = turn.is_answered();
        drop(turn);
        self.phase = match outcome {
            Err(_) if is_answered => Phase::Refused,
            Err(_) => Phase::Idle,
            Ok(routed) => {
                if self.wants_explain {
                    self.explain = Some(routed.decision().explain());
                }
                Phase::Sent { api, routed: Box::new(routed) }
            }
        };
    }

    fn request_headers(&mut self, end_of_stream: bool) -> Action {
        let headers = host::request_headers();
        if !headers.lacks(ROUTING_HEADER) {
            host::remove_request_header(ROUTING_HEADER);
        }
        self.take_explain_header(&headers);
        match self.read_headers(&headers, end_of_stream) {
            Ok((api, cluster)) => {
                let limit = self.max_body_bytes();
                let length =
                    headers.text("content-length").and_then(|length| length.parse::<usize>().ok());
                // Envoy takes transfer-encoding away before this.
                let is_chunked = length.is_none()
                    && host::property(&["request", "protocol"])
                        .is_none_or(|protocol| protocol.starts_with("HTTP/1"));
                let room = if is_chunked { room_for_chunks(limit) } else { limit };
                self.phase = Phase::Holding { api, cluster, held: 0, room };
                match length.filter(|length| *length > limit) {
                    Some(length) => self.give_up(Reason::BodyTooLarge, length),
                    None => Action::Pause,
                }
            }
            Err((Some(api), reason)) => {
                let cluster = host::property(&["xds", "cluster_name"]).unwrap_or_default();
                self.phase = Phase::Holding { api, cluster, held: 0, room: 0 };
                self.give_up(reason, 0)
            }
            Err((None, reason)) => {
                self.unrouted(reason);
                Action::Continue
            }
        }
    }

    fn request_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
        let Phase::Holding { held, room, .. } = &mut self.phase else { return self.while_read() };
        *held = body_size;
        let room = *room;
        if body_size > self.max_body_bytes() {
            self.give_up(Reason::BodyTooLarge, body_size)
        } else if end_of_stream {
            self.read(body_size)
        } else if body_size > room && is_complete(body_size) {
            self.read_later(body_size)
        } else if body_size > room {
            self.give_up(Reason::BodyTooLarge, body_size)
        } else {
            Action::Pause
        }
    }

    fn max_body_bytes(&self) -> usize {
        self.with(|shared| shared.config.max_body_bytes).unwrap_or(0)
    }

    /// What to answer where a body is not being collected: it goes by, unless its prompt is being read.
    fn while_read(&mut self) -> Action {
        self.settle();
        match &self.phase {
            Phase::Reading { .. } | Phase::Refused => Action::Pause,
            _ => Action::Continue,
        }
    }

    fn response_headers(&mut self, end_of_stream: bool) {
        self.settle();
        let headers = host::response_headers();
        self.status = headers.text(":status").and_then(|status| status.parse().ok());
        self.response_began(&headers);
        match self.explain.take() {
            Some(explain) => host::set_response_header(EXPLAIN_HEADER, &explain),
            None if headers.lacks(EXPLAIN_HEADER) => {}
            // Nobody else's may pass for ours.
            None => host::remove_response_header(EXPLAIN_HEADER),
        }
        if end_of_stream {
            self.end();
        }
    }

    fn response_body(&mut self, body_size: usize, end_of_stream: bool) {
        if let Some(feedback) = self.feedback.as_mut().filter(|feedback| feedback.is_readable()) {
            let chunk = host::response_body(body_size).unwrap_or_default();
            feedback.push(&chunk);
            if end_of_stream {
                feedback.finish();
            }
            if feedback.answer_began() {
                self.answer_began();
            }
        }
        if end_of_stream {
            self.end();
        }
    }

    fn response_began(&mut self, headers: &Headers) {
        let (Some(state), Phase::Sent { api, routed }) = (&self.state, &mut self.phase) else {
            return;
        };
        let Some(mut shared) = state.borrow() else { return };
        let is_replicas = routed.responded(&mut shared, self.status.unwrap_or(0), headers);
        if is_replicas && self.status == Some(200) {
            let (kind, encoding) = (headers.get("content-type"), headers.get("content-encoding"));
            let feedback = Feedback::new(*api, kind, encoding);
            if !feedback.is_stream() {
                // The answer is complete, or its beginning cannot be seen.
                routed.answer_began(&mut shared, false);
            }
            self.feedback = Some(feedback);
        }
    }

    fn answer_began(&mut self) {
        let (Some(state), Phase::Sent { routed, .. }) = (&self.state, &mut self.phase) else {
            return;
        };
        if let Some(mut shared) = state.borrow() {
            routed.answer_began(&mut shared, true);
        }
    }

    /// Accounts for the request once, at its end.
    fn end(&mut self) {
        // Envoy's own answer (too large, too slow) ends a response while the body is still held.
        if matches!(self.phase, Phase::Holding { .. } | Phase::Reading { .. }) {
            return;
        }
        let Phase::Sent { routed, .. } = std::mem::replace(&mut self.phase, Phase::Idle) else {
            return;
        };
        let (status, feedback) = (self.status, self.feedback.take());
        let notice = self.with(|shared| routed.end(shared, status, feedback.as_ref()));
        self.notice = notice.flatten();
    }

    /// Tells what was found, with the id by which others know the request.
    fn tell(&mut self) {
        if let Some(notice) = self.notice.take() {
            let id = host::request_header("x-request-id").unwrap_or_default();
            log::warn!("{notice}; x-request-id={}", harmless(&id));
        }
    }
}

/// Longer ids are cut in the log.
const MAX_ID_CHARS: usize = 64;

/// A client's text as far as it can be in a log: without what might end a line, or look like another one.
fn harmless(id: &[u8]) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    id.iter().copied().filter(is_plain).take(MAX_ID_CHARS).map(char::from).collect()
}

/// Whether a body that cannot be waited for is all there: of chunks, the end comes in a callback of
/// its own.
fn is_complete(body_bytes: usize) -> bool {
    host::request_body(body_bytes).is_some_and(|body| request::is_complete(&body))
}

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, _num_headers: usize, end_of_stream: bool) -> Action {
        meters::time("request_headers", || self.request_headers(end_of_stream))
    }

    fn on_http_request_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
        meters::time("request_body", || self.request_body(body_size, end_of_stream))
    }

    fn on_http_request_trailers(&mut self, _num_trailers: usize) -> Action {
        let Phase::Holding { held, .. } = self.phase else { return self.while_read() };
        meters::time("request_body", || self.read(held))
    }

    fn on_http_response_headers(&mut self, _num_headers: usize, end_of_stream: bool) -> Action {
        meters::time("response_headers", || self.response_headers(end_of_stream));
        Action::Continue
    }

    fn on_http_response_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
        meters::time("response_body", || self.response_body(body_size, end_of_stream));
        Action::Continue
    }

    fn on_log(&mut self) {
        meters::time("log", || {
            self.settle();
            if matches!(self.phase, Phase::Holding { .. } | Phase::Reading { .. }) {
                // The client left, or Envoy answered, before the request could go on.
                self.unrouted(Reason::ClientLeft);
            }
            self.end();
            self.tell();
        });
    }
}
