//! The policies that are compared, and what a router is told.
//!
//! A router sees what a gateway sees: requests, its own in flight, answers, reports. It never sees an engine.

use super::fleet::FleetConfig;
use super::gateway::Gateway;
use crate::random::Random;
use crate::trace::Trace;
use clap::ValueEnum;
use std::time::Duration;
use warmpath::mock::cache;
use warmpath::mock::scheduler::RequestId;
use xxhash_rust::xxh3::xxh3_64;

/// How a replica is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// One after another.
    RoundRobin,
    /// Of two random replicas the one with fewer requests in flight.
    LeastRequest,
    /// By the session's name.
    RingHashSession,
    /// By the prompt's first 512 tokens.
    RingHashPrefix,
    /// The filter's core.
    Warmpath,
}

/// Tokens of a prompt's head that [`Policy::RingHashPrefix`] goes by.
const HEAD_TOKENS: u32 = 512;

impl Policy {
    /// Every policy, in the table's order.
    pub const ALL: [Self; 5] = [
        Self::RoundRobin,
        Self::LeastRequest,
        Self::RingHashSession,
        Self::RingHashPrefix,
        Self::Warmpath,
    ];

    /// Its name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::LeastRequest => "least_request",
            Self::RingHashSession => "ring_hash_session",
            Self::RingHashPrefix => "ring_hash_prefix",
            Self::Warmpath => "warmpath",
        }
    }

    /// Whether the worker threads of a gateway work with one router rather than one each.
    pub fn is_shared_by_threads(self) -> bool {
        self == Self::Warmpath
    }

    /// Whether replicas tell it what becomes of their blocks.
    pub fn has_events(self) -> bool {
        false
    }

    /// The time between reports that its own kind asks for, where that is not the fleet's.
    pub fn report_interval(self) -> Option<Duration> {
        None
    }

    /// A router of this policy.
    pub fn router<'a>(self, setting: &Setting<'a>) -> Box<dyn Router + 'a> {
        match self {
            Self::Warmpath => Box::new(Gateway::new(setting.fleet)),
            _ => {
                Box::new(Baseline { policy: self, turn: 0, random: Random::new(setting.seed, 11) })
            }
        }
    }
}

/// What a router is made for.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// The fleet in front of which it stands.
    pub fleet: &'a FleetConfig,
    /// What will be asked. Only a bound may look at it.
    #[expect(dead_code, reason = "for the bounds, which are yet to come")]
    pub trace: &'a Trace,
    /// A number that no other router of the run has.
    pub seed: u64,
}

/// What became of a block.
pub type Change = cache::Change<u64>;

/// A router at work: one per worker thread, or one per gateway where its threads share what they know.
pub trait Router {
    /// The replica that gets a request.
    ///
    /// # Errors
    /// When nobody can be chosen.
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String>;

    /// What the last choice went by.
    fn why(&self) -> Why {
        Why::default()
    }

    /// The first token of an answer.
    fn answer_began(&mut self, _id: RequestId, _now: Duration) {}

    /// The end of a request that this router placed.
    fn ended(&mut self, _id: RequestId, _ended: &Ended<'_>, _now: Duration) {}

    /// A replica's report.
    fn report(&mut self, _replica: usize, _report: &ReplicaReport, _now: Duration) {}

    /// What became of a replica's blocks in a step that has ended, in order; for policies that have KV events.
    fn cached(&mut self, _replica: usize, _changes: &[Change], _now: Duration) {}
}

/// A request that must be placed.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Its name.
    pub id: RequestId,
    /// The session's number.
    #[expect(dead_code, reason = "for baselines that are yet to come")]
    pub session: usize,
    /// The session's name.
    pub session_name: &'a str,
    /// The prompt's full blocks.
    pub blocks: &'a [u64],
    /// Tokens of each.
    pub block_tokens: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    pub answer_tokens: u32,
    /// The time.
    pub now: Duration,
    /// Requests in flight on each replica that this gateway sent.
    pub in_flight: &'a [usize],
    /// Whether each replica is one of the cluster's, healthy and not about to leave. There is always one.
    pub serving: &'a [bool],
}

/// What a choice went by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Why {
    /// Tokens expected to come from the cache, where the policy expects any number.
    pub predicted_tokens: Option<u32>,
    /// In a word, where it has one.
    pub reason: &'static str,
}

/// How a request ended.
#[derive(Debug, Clone, Copy)]
pub struct Ended<'a> {
    /// Prompt tokens that were cached, `None` where the engine does not say.
    #[expect(dead_code, reason = "for learning, which is yet to come")]
    pub cached_tokens: Option<u32>,
    /// Tokens of the answer.
    pub answer_tokens: u32,
    /// The blocks that the answer filled, where they are known.
    pub answer_blocks: &'a [u64],
    /// From sending to the first token.
    #[expect(dead_code, reason = "for learning, which is yet to come")]
    pub first_token: Duration,
    /// Whether there was no whole answer.
    pub failed: bool,
}

/// What a replica says of itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplicaReport {
    /// Requests in the batch.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// The part of blocks that running requests hold.
    pub kv_usage: f64,
    /// Blocks in all.
    pub capacity_blocks: u32,
    /// When its process began: another number after a restart.
    pub started_at: f64,
}

/// What Envoy itself has.
struct Baseline {
    policy: Policy,
    turn: usize,
    random: Random,
}

impl Router for Baseline {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let serving: Vec<usize> = (0..ask.serving.len())
            .filter(|n| ask.serving.get(*n).copied().unwrap_or(false))
            .collect();
        let pick = |n: usize| serving.get(n).copied().ok_or_else(|| "nobody serves".to_owned());
        // A ring with its many points per replica spreads keys as a plain remainder does.
        let ring = |key: u64| pick((key % serving.len().max(1) as u64) as usize);
        match self.policy {
            Policy::LeastRequest => {
                let (a, b) = (self.random.below(serving.len()), self.random.below(serving.len()));
                let (a, b) = (pick(a)?, pick(b)?);
                let load = |replica: usize| ask.in_flight.get(replica).copied().unwrap_or(0);
                Ok(if load(b) < load(a) { b } else { a })
            }
            Policy::RingHashSession => ring(xxh3_64(ask.session_name.as_bytes())),
            Policy::RingHashPrefix => {
                let head = (HEAD_TOKENS / ask.block_tokens.max(1)).max(1) as usize;
                let block = ask.blocks.get(head - 1).or(ask.blocks.last()).copied();
                ring(xxh3_64(&block.unwrap_or_default().to_le_bytes()))
            }
            Policy::RoundRobin | Policy::Warmpath => {
                self.turn += 1;
                pick((self.turn - 1) % serving.len().max(1))
            }
        }
    }
}
