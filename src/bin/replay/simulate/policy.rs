//! The policies that are compared, and what a router is told.
//!
//! A router sees what a gateway sees: requests, its own in flight, answers, reports. It never sees an engine.

use super::baselines::dynamo::Dynamo;
use super::baselines::estimated::Estimated;
use super::baselines::least_request::LeastRequest;
use super::baselines::llm_d::{LlmD, Rule};
use super::baselines::prefix_only::PrefixOnly;
use super::baselines::random::Anyone;
use super::baselines::ring_hash::{Key, RingHash};
use super::baselines::round_robin::RoundRobin;
use super::baselines::smg::{SmgCacheAware, SmgLeastLoad};
use super::baselines::vllm_router::VllmRouter;
use super::bounds::lookahead::Lookahead;
use super::fleet::FleetConfig;
use super::gateway::Gateway;
use crate::random::Random;
use crate::trace::Trace;
use clap::ValueEnum;
use std::time::Duration;
use warmpath::mock::cache;
use warmpath::mock::scheduler::RequestId;

/// The stream of chance that policies choose by.
const CHOICES: u64 = 11;

/// How a replica is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// Anyone.
    Random,
    /// One after another.
    RoundRobin,
    /// Of two random replicas the one with fewer requests in flight.
    LeastRequest,
    /// Of all replicas the one with fewest requests in flight.
    LeastRequestScan,
    /// By the session's name.
    RingHashSession,
    /// By the prompt's first 512 tokens.
    RingHashPrefix,
    /// The longest prefix, whatever waits there.
    PrefixOnly,
    /// Weighted scores over estimated tokens, an index per thread: Higress.
    Estimated,
    /// vllm-project/router's `cache_aware`.
    VllmRouter,
    /// SMG's `cache_aware` with KV events.
    SmgCacheAware,
    /// SMG's `least_load`.
    SmgLeastLoad,
    /// NVIDIA Dynamo's cost with KV events.
    Dynamo,
    /// NVIDIA Dynamo's cost with predicted caches.
    DynamoPredicted,
    /// llm-d's weighted scores.
    LlmDWeighted,
    /// llm-d's sticky until saturated.
    LlmDSticky,
    /// An assignment that knows the future: no policy, but what they are measured by.
    Lookahead,
    /// The filter's core.
    Warmpath,
}

impl Policy {
    /// Every policy, in the table's order.
    pub const ALL: [Self; 17] = [
        Self::Random,
        Self::RoundRobin,
        Self::LeastRequest,
        Self::LeastRequestScan,
        Self::RingHashSession,
        Self::RingHashPrefix,
        Self::PrefixOnly,
        Self::Estimated,
        Self::VllmRouter,
        Self::SmgCacheAware,
        Self::SmgLeastLoad,
        Self::Dynamo,
        Self::DynamoPredicted,
        Self::LlmDWeighted,
        Self::LlmDSticky,
        Self::Lookahead,
        Self::Warmpath,
    ];

    /// Its name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
            Self::LeastRequest => "least_request",
            Self::LeastRequestScan => "least_request_scan",
            Self::RingHashSession => "ring_hash_session",
            Self::RingHashPrefix => "ring_hash_prefix",
            Self::PrefixOnly => "prefix_only",
            Self::Estimated => "estimated",
            Self::VllmRouter => "vllm_router",
            Self::SmgCacheAware => "smg_cache_aware",
            Self::SmgLeastLoad => "smg_least_load",
            Self::Dynamo => "dynamo",
            Self::DynamoPredicted => "dynamo_predicted",
            Self::LlmDWeighted => "llm_d_weighted",
            Self::LlmDSticky => "llm_d_sticky",
            Self::Lookahead => "lookahead",
            Self::Warmpath => "warmpath",
        }
    }

    /// Whether the worker threads of a gateway work with one router rather than one each.
    pub fn is_shared_by_threads(self) -> bool {
        let is_envoys = matches!(
            self,
            Self::Random
                | Self::RoundRobin
                | Self::LeastRequest
                | Self::LeastRequestScan
                | Self::RingHashSession
                | Self::RingHashPrefix
        );
        !is_envoys && self != Self::Estimated
    }

    /// Whether replicas tell it what becomes of their blocks: Warmpath's, where they have agents.
    pub fn has_events(self, agents: bool) -> bool {
        match self {
            Self::SmgCacheAware | Self::Dynamo | Self::Lookahead => true,
            Self::Warmpath => agents,
            _ => false,
        }
    }

    /// The time between reports that its own kind asks for, where that is not the fleet's.
    pub fn report_interval(self) -> Option<Duration> {
        match self {
            Self::Estimated => Some(Duration::from_millis(250)),
            Self::LlmDWeighted | Self::LlmDSticky => Some(Duration::from_millis(50)),
            _ => None,
        }
    }

    /// A router of this policy.
    pub fn router<'a>(self, setting: &Setting<'a>) -> Box<dyn Router + 'a> {
        let random = Random::new(setting.seed, CHOICES);
        let FleetConfig { replicas, ref engine, .. } = *setting.fleet;
        let capacity = engine.capacity_blocks as usize;
        let tokens_per_s = engine.prefill_rate;
        let by_scores =
            |rule, random| Box::new(LlmD::new(rule, replicas, capacity, random)) as Box<dyn Router>;
        match self {
            Self::Random => Box::new(Anyone::new(random)),
            Self::RoundRobin => Box::new(RoundRobin::new(random)),
            Self::LeastRequest => Box::new(LeastRequest::of_two(random)),
            Self::LeastRequestScan => Box::new(LeastRequest::of_all(random)),
            Self::RingHashSession => Box::new(RingHash::new(Key::Session, replicas)),
            Self::RingHashPrefix => Box::new(RingHash::new(Key::Head, replicas)),
            Self::PrefixOnly => Box::new(PrefixOnly::new(replicas, capacity, random)),
            Self::Estimated => {
                let block_tokens = setting.trace.block_tokens;
                Box::new(Estimated::new(replicas, capacity, block_tokens, random))
            }
            Self::VllmRouter => Box::new(VllmRouter::default()),
            Self::SmgCacheAware => Box::new(SmgCacheAware::new(replicas)),
            Self::SmgLeastLoad => Box::new(SmgLeastLoad::new(replicas)),
            Self::Dynamo => Box::new(Dynamo::by_events(replicas, random)),
            Self::DynamoPredicted => Box::new(Dynamo::by_prediction(replicas, capacity, random)),
            Self::LlmDWeighted => by_scores(Rule::Weighted, random),
            Self::LlmDSticky => by_scores(Rule::Sticky { tokens_per_s }, random),
            Self::Lookahead => Box::new(Lookahead::new(setting.trace, replicas, capacity)),
            Self::Warmpath => Box::new(Gateway::new(setting.fleet)),
        }
    }
}

/// What a router is made for.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// The fleet in front of which it stands.
    pub fleet: &'a FleetConfig,
    /// What will be asked. Only a bound may look at it.
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

    /// Who is there, by Envoy's account: at the start and at each change.
    fn standing(&mut self, _standing: &[Standing]) {}

    /// A replica's report.
    fn report(&mut self, _replica: usize, _report: &ReplicaReport, _now: Duration) {}

    /// A chain that somebody computes: what follows what.
    fn chained(&mut self, _blocks: &[u64]) {}

    /// What became of a replica's blocks in a step that has ended, in order; for policies that have KV events.
    fn cached(&mut self, _replica: usize, _changes: &[Change], _now: Duration) {}
}

/// How a replica stands with Envoy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Not one of the cluster's.
    Absent,
    /// Healthy.
    Serving,
    /// Finishing what it has.
    Draining,
    /// Not answering.
    Down,
}

/// A request that must be placed.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Its name.
    pub id: RequestId,
    /// The session's number.
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

impl Ask<'_> {
    /// Tokens of so many of its blocks.
    pub fn tokens_of(&self, blocks: usize) -> u32 {
        (blocks as u32 * self.block_tokens).min(self.prompt_tokens)
    }
}

/// What a choice went by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Why {
    /// Tokens expected to come from the cache, where the policy expects any number.
    pub predicted_tokens: Option<u32>,
    /// Until the first token, where the policy expects any time.
    pub first_token: Option<Duration>,
    /// In a word, where it has one.
    pub reason: &'static str,
}

/// How a request ended.
#[derive(Debug, Clone, Copy)]
pub struct Ended<'a> {
    /// Prompt tokens that were cached, `None` where the engine does not say.
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
