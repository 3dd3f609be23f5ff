//! One request and its response: what each callback holds, releases and counts.
//!
//! It holds no body beyond the configured limit and no response at all. What is read, weighed or
//! learned is the core's part.

use super::root::Shared;
use super::routed::{Held, Routed};
use super::{EXPLAIN_HEADER, ROUTING_HEADER, host, meters};
use crate::config::ExplainConfig;
use crate::feedback::Feedback;
use crate::metrics;
use crate::request::{self, Api};
use crate::route::Reason;
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

enum Phase {
    /// Nothing known yet, or not ours.
    Idle,
    /// The body is being held, while there is room.
    Holding { api: Api, cluster: String, held: usize, room: usize },
    /// The request has gone on.
    Sent { api: Api, routed: Box<Routed> },
}

/// See the module.
pub struct Stream {
    shared: Option<Rc<RefCell<Shared>>>,
    phase: Phase,
    explain: Option<String>,
    wants_explain: bool,
    status: Option<u16>,
    feedback: Option<Feedback>,
}

impl Stream {
    pub fn new(shared: Option<Rc<RefCell<Shared>>>) -> Self {
        Self {
            shared,
            phase: Phase::Idle,
            explain: None,
            wants_explain: false,
            status: None,
            feedback: None,
        }
    }

    /// Calls `act` with the shared state. A state that is in use cannot be: callbacks do not
    /// nest. Should they ever, the call is skipped rather than trapping.
    fn with<T>(&self, act: impl FnOnce(&mut Shared) -> T) -> Option<T> {
        let shared = self.shared.as_ref()?;
        match shared.try_borrow_mut() {
            Ok(mut shared) => Some(act(&mut shared)),
            Err(_) => {
                meters::add(&metrics::HOST_ERRORS, &[], 1);
                None
            }
        }
    }

    fn take_explain_header(&mut self) {
        let Some(Some(explain)) = self.with(|shared| shared.config.explain.clone()) else { return };
        let ExplainConfig { request_header, secret } = explain;
        if let Some(value) = host::request_header(&request_header) {
            self.wants_explain = value == secret.as_bytes();
            host::remove_request_header(&request_header);
        }
    }

    /// What the headers say: a body to hold, or why not.
    fn read_headers(&self, end_of_stream: bool) -> Result<(Api, String), (Option<Api>, Reason)> {
        let text =
            |name| host::request_header(name).and_then(|value| String::from_utf8(value).ok());
        let api = text(":path").as_deref().and_then(Api::of_path);
        let json = text("content-type").is_none_or(|kind| {
            kind.trim_start().to_ascii_lowercase().starts_with("application/json")
        });
        let post = text(":method").as_deref() == Some("POST");
        // What follows is the upgraded protocol's, not a body: it would be held for ever.
        let upgrade = host::request_header("upgrade").is_some();
        let Some(api) = api.filter(|_| post && json && !upgrade) else {
            return Err((None, Reason::NotInference));
        };
        let cluster = host::property(&["xds", "cluster_name"]);
        let known = self.with(|shared| {
            cluster.filter(|cluster| shared.config.cluster_named(cluster).is_some())
        });
        let Some(Some(cluster)) = known else { return Err((None, Reason::UnknownCluster)) };
        if end_of_stream {
            return Err((Some(api), Reason::NoBody));
        }
        let encoding = text("content-encoding").unwrap_or_default();
        if !matches!(encoding.as_str(), "" | "identity") {
            return Err((Some(api), Reason::ContentEncoding));
        }
        Ok((api, cluster))
    }

    fn unrouted(&mut self, reason: Reason) {
        meters::add(&metrics::REQUESTS, &[reason.as_str()], 1);
        self.phase = Phase::Idle;
    }

    /// Ends the hold with the whole body, or with what stands in its way.
    fn decide(&mut self, body: Result<&[u8], Reason>, body_bytes: usize) {
        let Phase::Holding { api, cluster, .. } = std::mem::replace(&mut self.phase, Phase::Idle)
        else {
            return;
        };
        let began = host::now();
        let held = Held { api, cluster: &cluster, body, body_bytes, began };
        let routed = self.with(|shared| Routed::new(shared, held));
        let took = host::now().since(began).as_micros();
        meters::record(&metrics::DECISION, &[], u64::try_from(took).unwrap_or(u64::MAX));
        match routed.unwrap_or(Err(Reason::HostError)) {
            Err(reason) => self.unrouted(reason),
            Ok(routed) => {
                meters::add(&metrics::REQUESTS, &[routed.decision().reason.as_str()], 1);
                if self.wants_explain {
                    self.explain = Some(routed.decision().explain());
                }
                self.phase = Phase::Sent { api, routed: Box::new(routed) };
            }
        }
    }

    /// The held body, read once: its size so far is what the last callback said.
    fn decide_with_body(&mut self, size: usize) {
        let body = host::request_body(size);
        self.decide(body.as_deref().ok_or(Reason::HostError), size);
    }

    /// What there is of a body that cannot be waited for. It may be all: of chunks, the end comes
    /// in a callback of its own.
    fn decide_with_beginning(&mut self, size: usize) {
        let body = host::request_body(size).filter(|body| request::is_complete(body));
        self.decide(body.as_deref().ok_or(Reason::BodyTooLarge), size);
    }

    fn response_began(&mut self) {
        let (Some(shared), Phase::Sent { api, routed }) = (&self.shared, &mut self.phase) else {
            return;
        };
        let Ok(mut shared) = shared.try_borrow_mut() else { return };
        if let Some(address) = host::property(&["upstream", "address"]) {
            routed.served_by(&mut shared, &address);
        }
        if self.status == Some(200) {
            let header =
                |name| host::response_header(name).and_then(|value| String::from_utf8(value).ok());
            let (kind, encoding) = (header("content-type"), header("content-encoding"));
            let feedback = Feedback::new(*api, kind.as_deref(), encoding.as_deref());
            if !feedback.is_stream() {
                // The answer is complete, or its beginning cannot be seen.
                routed.answer_began(&mut shared, false);
            }
            self.feedback = Some(feedback);
        }
    }

    fn answer_began(&mut self) {
        let (Some(shared), Phase::Sent { routed, .. }) = (&self.shared, &mut self.phase) else {
            return;
        };
        if let Ok(mut shared) = shared.try_borrow_mut() {
            routed.answer_began(&mut shared, true);
        }
    }

    /// Accounts for the request once, at its end.
    fn end(&mut self) {
        // Envoy's own answer (too large, too slow) ends a response while the body is still held.
        if matches!(self.phase, Phase::Holding { .. }) {
            return;
        }
        let Phase::Sent { routed, .. } = std::mem::replace(&mut self.phase, Phase::Idle) else {
            return;
        };
        let (status, feedback) = (self.status, self.feedback.take());
        self.with(|shared| routed.end(shared, status, feedback.as_ref()));
    }
}

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, _num_headers: usize, end_of_stream: bool) -> Action {
        host::remove_request_header(ROUTING_HEADER);
        self.take_explain_header();
        match self.read_headers(end_of_stream) {
            Ok((api, cluster)) => {
                let limit = self.with(|shared| shared.config.max_body_bytes).unwrap_or(0);
                let length = host::request_header("content-length")
                    .and_then(|value| String::from_utf8(value).ok()?.parse::<usize>().ok());
                // Envoy takes transfer-encoding away before this.
                let chunked = length.is_none()
                    && host::property(&["request", "protocol"])
                        .is_none_or(|protocol| protocol.starts_with("HTTP/1"));
                let room = if chunked { limit.saturating_sub(ARRIVES_AT_ONCE) } else { limit };
                self.phase = Phase::Holding { api, cluster, held: 0, room };
                if let Some(length) = length.filter(|length| *length > limit) {
                    self.decide(Err(Reason::BodyTooLarge), length);
                    return Action::Continue;
                }
                Action::Pause
            }
            Err((Some(api), reason)) => {
                let cluster = host::property(&["xds", "cluster_name"]).unwrap_or_default();
                self.phase = Phase::Holding { api, cluster, held: 0, room: 0 };
                self.decide(Err(reason), 0);
                Action::Continue
            }
            Err((None, reason)) => {
                self.unrouted(reason);
                Action::Continue
            }
        }
    }

    fn on_http_request_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
        let Phase::Holding { held, room, .. } = &mut self.phase else { return Action::Continue };
        *held = body_size;
        if body_size <= *room && !end_of_stream {
            return Action::Pause;
        }
        let limit = self.with(|shared| shared.config.max_body_bytes).unwrap_or(0);
        if body_size > limit {
            self.decide(Err(Reason::BodyTooLarge), body_size);
        } else if end_of_stream {
            self.decide_with_body(body_size);
        } else {
            self.decide_with_beginning(body_size);
        }
        Action::Continue
    }

    fn on_http_request_trailers(&mut self, _num_trailers: usize) -> Action {
        if let Phase::Holding { held, .. } = &self.phase {
            self.decide_with_body(*held);
        }
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _num_headers: usize, end_of_stream: bool) -> Action {
        self.status = host::response_header(":status")
            .and_then(|value| String::from_utf8(value).ok()?.parse().ok());
        self.response_began();
        match self.explain.take() {
            Some(explain) => host::set_response_header(EXPLAIN_HEADER, &explain),
            // Nobody else's may pass for ours.
            None => host::remove_response_header(EXPLAIN_HEADER),
        }
        if end_of_stream {
            self.end();
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
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
        Action::Continue
    }

    fn on_log(&mut self) {
        if matches!(self.phase, Phase::Holding { .. }) {
            // The client left, or Envoy answered, before the body was complete.
            self.unrouted(Reason::ClientLeft);
        }
        self.end();
    }
}
