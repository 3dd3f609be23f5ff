//! The poller's calls: what is asked through Envoy, and the bytes of its answers.
//!
//! When to ask whom is [`crate::replicas::schedule`]'s part, and what an answer says the poller's.

use super::{ROUTING_HEADER, host};
use crate::config::PollConfig;
use crate::replicas::schedule::Question;
use crate::replicas::{ReplicaId, clusters, models, stats};
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
}

impl Call {
    /// The value of the metric's `target` label.
    pub fn target(&self) -> &'static str {
        match self {
            Self::Admin(_) => "admin",
            Self::Metrics(..) => "metrics",
            Self::Models(_) => "models",
        }
    }

    /// A longer answer is not read.
    fn max_bytes(&self) -> usize {
        match self {
            Self::Admin(_) => clusters::MAX_ANSWER_BYTES,
            Self::Metrics(..) => stats::MAX_PAGE_BYTES,
            Self::Models(_) => models::MAX_ANSWER_BYTES,
        }
    }

    /// What it asks a replica.
    pub fn question(&self) -> Option<(ReplicaId, Question)> {
        match self {
            Self::Admin(_) => None,
            Self::Metrics(id, _) => Some((*id, Question::Metrics)),
            Self::Models(id) => Some((*id, Question::Models)),
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
        // Without headers the call was reset, and asking for one would be an error.
        let ok = num_headers > 0 && host::call_header(":status").as_deref() == Some(b"200");
        let answer = if !ok {
            Err("failed")
        } else if body_size > call.max_bytes() {
            Err("too_large")
        } else {
            host::call_body(body_size).ok_or(UNREADABLE)
        };
        Some((call, answer))
    }

    /// Takes it that none of them will be answered.
    pub fn forget(&mut self) {
        self.0.clear();
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
