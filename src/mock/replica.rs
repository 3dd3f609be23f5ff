//! One mock replica: its configuration, and what its parts share while it runs.

use super::chance::Chance;
use super::control::Control;
use super::digest::Lora;
use super::driver::Command;
use super::engine::{EngineConfig, RequestId};
use super::exposition::{Identity, MetricNames, Published};
use super::publisher::EventsConfig;
use super::speech::Speech;
use crate::model::Model;
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};

/// What a mock replica is.
#[derive(Clone)]
pub struct ReplicaConfig {
    /// Its name in `x-mock-replica` and in the request log.
    pub name: String,
    /// The engine. Its vocabulary is replaced by words of the model.
    pub engine: EngineConfig,
    /// Served names, all of one model; the first labels the metrics.
    pub served_names: Vec<String>,
    /// The model; without one only token ids are exact, and text is one token per word.
    pub model: Option<Arc<Model>>,
    /// Adapters, served under their names.
    pub loras: Vec<Lora>,
    /// How its tokens differ from the truth.
    pub skew: Option<Skew>,
    /// Names in `/metrics`.
    pub metric_names: MetricNames,
    /// Tokens of prompt and answer together; never more than fit into the cache.
    pub max_model_len: usize,
    /// Length of an answer to a chat that sets none. A real engine goes on until the model stops.
    pub default_max_tokens: usize,
    /// Where it publishes KV events, if it does.
    pub events: Option<EventsConfig>,
}

/// A replica that tokenizes differently from what the router computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skew {
    /// One more token in front of each prompt: counts and ids differ.
    Extra,
    /// All ids differ, no count does: only `cached_tokens` can tell.
    Ids,
    /// One id stands for the other everywhere, as in a vocabulary that has two words mixed up.
    Swapped(u32, u32),
}

impl Default for ReplicaConfig {
    fn default() -> Self {
        Self {
            name: "mock".to_owned(),
            engine: EngineConfig::default(),
            served_names: vec!["mock".to_owned()],
            model: None,
            loras: Vec::new(),
            skew: None,
            metric_names: MetricNames::Vllm,
            max_model_len: 32_768,
            default_max_tokens: 64,
            events: None,
        }
    }
}

impl Skew {
    /// By its name.
    pub(super) fn read(value: &Value) -> Option<Self> {
        match value.as_str()? {
            "extra" => Some(Self::Extra),
            "ids" => Some(Self::Ids),
            // A pair needs no name: tests set it themselves.
            _ => None,
        }
    }

    /// The prompt as the skewed replica has it.
    pub fn apply(self, mut prompt: Vec<u32>) -> Vec<u32> {
        match self {
            Self::Extra => prompt.insert(0, 1),
            Self::Ids => prompt.iter_mut().for_each(|id| *id = id.wrapping_add(1)),
            Self::Swapped(one, other) => prompt.iter_mut().for_each(|id| {
                *id = match *id {
                    id if id == one => other,
                    id if id == other => one,
                    id => id,
                };
            }),
        }
        prompt
    }
}

/// A request as it arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Counts up from 0 in each replica.
    pub number: u64,
    /// Which replica.
    pub replica: String,
    /// Method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names in lower case, in the order of arrival; bytes that are no UTF-8 are replaced.
    pub headers: Vec<(String, String)>,
    /// Length of the body.
    pub body_bytes: usize,
    /// SHA-256 of the body, in hex.
    pub body_sha256: String,
}

/// Requests kept of each kind, prompts and others: polls must not push prompts out.
const SEEN_LIMIT: usize = 1024;

/// A running replica.
pub struct Replica {
    pub(super) config: ReplicaConfig,
    pub(super) speech: Arc<Speech>,
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(super) identity: Identity,
    pub(super) in_flight: AtomicUsize,
    pub(super) refuse: watch::Sender<bool>,
    published: Mutex<Published>,
    control: Mutex<Control>,
    seen: Mutex<[VecDeque<Seen>; 2]>,
    seen_count: AtomicU64,
    request_count: AtomicU64,
}

impl Replica {
    pub(super) fn new(
        mut config: ReplicaConfig,
        speech: Arc<Speech>,
        commands: mpsc::UnboundedSender<Command>,
    ) -> Self {
        let room = config.engine.capacity_blocks as usize * config.engine.block_size;
        config.max_model_len = config.max_model_len.min(room);
        let identity = Identity {
            model_name: config.served_names.first().cloned().unwrap_or_default(),
            block_size: config.engine.block_size,
            started: unix_time(),
        };
        Self {
            config,
            speech,
            commands,
            identity,
            in_flight: AtomicUsize::new(0),
            refuse: watch::Sender::new(false),
            published: Mutex::default(),
            control: Mutex::default(),
            seen: Mutex::default(),
            seen_count: AtomicU64::new(0),
            request_count: AtomicU64::new(0),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// What the engine showed at its latest step's end.
    pub fn published(&self) -> MutexGuard<'_, Published> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How its tokens differ from the truth now.
    pub(super) fn skew(&self) -> Option<Skew> {
        self.control().skew.or(self.config.skew)
    }

    /// A copy of its present faults.
    pub fn control(&self) -> Control {
        self.control.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes its faults.
    pub fn set_control<T>(&self, change: impl FnOnce(&mut Control) -> T) -> T {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut control);
        self.refuse.send_if_modified(|refuse| std::mem::replace(refuse, control.refuse) != *refuse);
        result
    }

    /// Requests that arrived, oldest first: those with a body, then the others.
    pub fn seen(&self) -> Vec<Seen> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().flatten().cloned().collect()
    }

    /// Requests in the HTTP layer: what an engine that tracks it says in `/load`.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Sixteen hex digits that no answer of another replica has, but by chance.
    pub(super) fn answer_name(&self, id: Option<&RequestId>) -> String {
        let start = Chance::new(self.identity.started.to_bits()).draw();
        let place = self.config.name.bytes().map(u32::from).collect::<Vec<u32>>();
        let number = id.map_or(0, |id| id.0);
        format!("{:016x}", Chance::of_tokens(start.wrapping_add(number), &place).draw())
    }

    pub(super) fn remember(&self, mut seen: Seen) {
        seen.number = self.seen_count.fetch_add(1, Ordering::Relaxed);
        let mut rings = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let [prompts, others] = &mut *rings;
        let ring = if seen.body_bytes > 0 { prompts } else { others };
        if ring.len() >= SEEN_LIMIT {
            ring.pop_front();
        }
        ring.push_back(seen);
    }

    /// A number that no other request of this replica has.
    pub(super) fn next_number(&self) -> u64 {
        self.request_count.fetch_add(1, Ordering::Relaxed)
    }
}

/// Seconds since the Unix epoch.
#[expect(clippy::disallowed_methods, reason = "a mock replica is a server, not the core")]
pub(super) fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
