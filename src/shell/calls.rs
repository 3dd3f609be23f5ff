//! The poller's calls: what is asked through Envoy, and the bytes of its answers.
//!
//! When to ask whom is [`crate::replicas::schedule`]'s part, and what an answer says the poller's.

use super::host;
use crate::config::{AgentConfig, PollConfig};
use crate::replicas::schedule::Question;
use crate::replicas::{ReplicaId, clusters, models, stats};
use crate::report::{CONTENT_TYPE, MAX_REPORT_BYTES, PATH, Position};
use crate::route::ROUTING_HEADER;
use hashbrown::HashMap;
use std::time::Duration;

/// The result of a call whose answer is not what was asked for.
pub const UNREADABLE: &str = "unreadable";

/// One call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    Admin(String),
    /// With our own requests in flight there when it was asked.
    Metrics(ReplicaId, u32),
    Models(ReplicaId),
    /// Of a replica's agent, likewise.
    Report(ReplicaId, u32),
}

impl Call {
    /// The value of the metric's `target` label.
    pub fn target(&self) -> &'static str {
        match self {
            Self::Admin(_) => "admin",
            Self::Metrics(..) => "metrics",
            Self::Models(_) => "models",
            Self::Report(..) => "report",
        }
    }

    /// A longer answer is not read.
    fn max_bytes(&self) -> usize {
        match self {
            Self::Admin(_) => clusters::MAX_ANSWER_BYTES,
            Self::Metrics(..) => stats::MAX_PAGE_BYTES,
            Self::Models(_) => models::MAX_ANSWER_BYTES,
            Self::Report(..) => MAX_REPORT_BYTES,
        }
    }

    /// What it asks a replica.
    pub fn question(&self) -> Option<(ReplicaId, Question)> {
        match self {
            Self::Admin(_) => None,
            Self::Metrics(id, _) => Some((*id, Question::Metrics)),
            Self::Models(id) => Some((*id, Question::Models)),
            Self::Report(id, _) => Some((*id, Question::Report)),
        }
    }
}

/// Calls under way, by Envoy's number.
#[derive(Default)]
pub struct Calls(HashMap<u32, Call>);

impl Calls {
    /// Asks an admin for a page. False when Envoy does not.
    pub fn ask_admin(&mut self, admin: &str, path: &str, timeout: Duration) -> bool {
        let token = host::call(admin, "envoy-admin", path, &[], timeout);
        self.begin(token, Call::Admin(admin.to_owned()))
    }

    /// Asks a replica. False when Envoy does not.
    pub fn ask_replica(
        &mut self,
        call: &Call,
        poll: &PollConfig,
        address: &str,
        timeout: Duration,
    ) -> bool {
        let path = if matches!(call, Call::Metrics(..)) { "/metrics" } else { "/v1/models" };
        self.begin(ask(poll, address, path, None, timeout), call.clone())
    }

    /// Asks a replica's agent for what is new since a position. False when Envoy does not.
    pub fn ask_agent(
        &mut self,
        call: &Call,
        agent: &AgentConfig,
        address: &str,
        since: Option<Position>,
        timeout: Duration,
    ) -> bool {
        let path = since.map(|since| format!("{PATH}?since={since}"));
        let path = path.as_deref().unwrap_or(PATH);
        let token = agent.token.as_ref().map(|token| format!("Bearer {}", token.reveal()));
        let mut headers = vec![(ROUTING_HEADER, address)];
        headers.extend(token.as_deref().map(|token| ("authorization", token)));
        self.begin(host::call(&agent.cluster, address, path, &headers, timeout), call.clone())
    }

    fn begin(&mut self, token: Option<u32>, call: Call) -> bool {
        token.map(|token| self.0.insert(token, call)).is_some()
    }

    /// The call that is answered, with the answer or the result that stands for it. `None` when it
    /// is not one of these.
    pub fn take(
        &mut self,
        token: u32,
        num_headers: usize,
        body_size: usize,
    ) -> Option<(Call, Result<Vec<u8>, &'static str>)> {
        let call = self.0.remove(&token)?;
        let problem = match &call {
            Call::Report(..) => no_report(num_headers),
            _ => (status(num_headers).as_deref() != Some(b"200")).then_some("failed"),
        };
        let answer = match problem {
            Some(problem) => Err(problem),
            None if body_size > call.max_bytes() => Err("too_large"),
            None => host::call_body(body_size).ok_or(UNREADABLE),
        };
        Some((call, answer))
    }

    /// Takes it that none of them will be answered.
    pub fn forget(&mut self) {
        self.0.clear();
    }
}

/// The status of an answer. Without headers the call was reset, and asking for one would be an error.
fn status(num_headers: usize) -> Option<Vec<u8>> {
    (num_headers > 0).then(|| host::call_header(":status")).flatten()
}

/// Why an answer cannot be a report, as far as its head says.
fn no_report(num_headers: usize) -> Option<&'static str> {
    match status(num_headers).as_deref() {
        Some(b"200") => {
            let content_type = host::call_header("content-type");
            (content_type.as_deref() != Some(CONTENT_TYPE.as_bytes())).then_some("foreign")
        }
        Some(b"401" | b"403") => Some("refused"),
        Some(b"504") => Some("timed_out"),
        // Its end did not come in time, or not within what Envoy collects of an answer.
        None => Some("cut"),
        Some(_) => Some("failed"),
    }
}

/// Asks one replica, with a body or without. The call's number; `None` when Envoy does not.
pub fn ask(
    poll: &PollConfig,
    address: &str,
    path: &str,
    body: Option<&[u8]>,
    timeout: Duration,
) -> Option<u32> {
    let ip = address.rsplit_once(':').map_or(address, |(ip, _)| ip);
    let asked = poll.port.map(|port| format!("{ip}:{port}"));
    let asked = asked.as_deref().unwrap_or(address);
    let authority = poll.authority.as_deref().unwrap_or(asked);
    let key = poll.api_key.as_ref().map(|key| format!("Bearer {}", key.reveal()));
    let mut headers = vec![(ROUTING_HEADER, asked)];
    headers.extend(key.as_deref().map(|key| ("authorization", key)));
    match body {
        Some(body) => host::post(&poll.cluster, authority, path, &headers, body, timeout),
        None => host::call(&poll.cluster, authority, path, &headers, timeout),
    }
}
