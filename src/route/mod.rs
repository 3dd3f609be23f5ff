//! The decision: which replica gets the request, which two are next, and why.
//!
//! [`decide`] is the only path from a prompt's tokens to a replica. It reads values and returns
//! one; it does not charge, record, count or send anything.

mod candidates;
mod decision;
#[cfg(test)]
mod field_tests;
mod guards;
#[cfg(test)]
mod herd_tests;
#[cfg(test)]
mod naive;
mod overload;
mod policy;
mod reason;
pub mod regret;
mod session;
#[cfg(test)]
mod tests;
mod weigh;

pub use decision::{Candidate, Decision, ROUTING_HEADER, Source};
pub use policy::Policy;
pub use reason::Reason;

use crate::charge::Charges;
use crate::index::PrefixIndex;
use crate::learn::Rates;
use crate::replicas::strikes::Strikes;
use crate::replicas::{Moment, Replica, ReplicaId, ReplicaTable};
use crate::score::CostConfig;
use crate::tokens::blocks::{BlockSize, Chain, ChainSeed};
use candidates::{serving, unsuspended};
use regret::Rivals;
use std::time::Duration;
use weigh::{Known, Scales, Seen, Weighed};

/// Replicas named in the routing header: the choice and two to retry on.
pub const MAX_RANKED: usize = 3;

/// Block sizes for which one prompt is hashed: a fleet has one, and two while it is changed. A replica of a further one
/// goes by load, so that what replicas say of themselves does not multiply the work.
const MAX_BLOCK_SIZES: usize = 4;

/// No share of a cost that is more than this is a tie: seconds. A twentieth of a long prompt's cost is a second, and for a
/// tie a replica would be passed over that is a second sooner. A fifth of it moves Mooncake's p99s by less than 2 %, first
/// tokens to less and whole answers to more.
const MOST_TIE_S: f64 = 0.1;

/// What a request asks for, as far as the choice depends on it.
#[derive(Debug, Clone)]
pub struct Question<'a> {
    /// Cluster that the route chose.
    pub cluster: &'a str,
    /// All names of the model; empty when it is not known.
    pub model_names: &'a [String],
    /// The prompt.
    pub prompt: PromptKnowledge<'a>,
    /// What the name of the adapter that it asks for hashes to, if it is one.
    pub adapter: Option<u64>,
    /// Most tokens the answer may have, if the request says so.
    pub answer_limit: Option<u32>,
    /// What the name of its session hashes to, if it has one: where it goes while its prompt cannot be matched.
    pub session: Option<u64>,
    /// The request's number: whose turn it is where replicas take turns, and what decides ties where the prompt cannot.
    pub tie_seed: u64,
}

/// How much is known of a prompt.
#[derive(Debug, Clone, Copy)]
pub enum PromptKnowledge<'a> {
    /// Its tokens, and where their chain of blocks starts.
    Tokens {
        /// Token ids.
        tokens: &'a [u32],
        /// Model and salt.
        seed: ChainSeed,
    },
    /// Its tokens' number, and the chains of them, hashed beforehand for [`block_sizes`].
    Hashed {
        /// How many there are, those included that are only guessed.
        prompt_tokens: u32,
        /// One for each block size.
        chains: &'a [Chain],
    },
    /// Only why not, and how many tokens it may have.
    Unknown {
        /// What stood in the way.
        reason: Reason,
        /// A guess at its length.
        estimated_tokens: u32,
    },
}

impl PromptKnowledge<'_> {
    /// Whether what replicas have cached can be compared with it.
    pub fn is_matched(&self) -> bool {
        match self {
            Self::Tokens { .. } => true,
            Self::Hashed { chains, .. } => {
                chains.iter().any(|chain| !chain.is_open() || !chain.hashes().is_empty())
            }
            Self::Unknown { .. } => false,
        }
    }
}

/// What is known of the fleet.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Replicas.
    pub table: &'a ReplicaTable,
    /// Their caches.
    pub index: &'a PrefixIndex,
    /// What is in flight, over all VMs.
    pub charges: &'a Charges,
    /// What is held against replicas, by all VMs.
    pub strikes: &'a Strikes,
    /// How fast they are, as all VMs have learned it.
    pub rates: &'a Rates,
    /// The time.
    pub now: Moment,
}

/// The parts of the configuration that a decision depends on.
#[derive(Debug, Clone, PartialEq)]
pub struct RouteConfig {
    /// How a replica is chosen.
    pub policy: Policy,
    /// The formula's coefficients.
    pub cost: CostConfig,
    /// Costs this close are a tie: seconds.
    pub tie_s: f64,
    /// Costs this close are a tie: share of the least.
    pub tie_share: f64,
    /// Requests are refused where even the least cost is over this: seconds.
    pub max_cost_s: Option<f64>,
    /// A report older than this is not used.
    pub stale_after: Duration,
    /// Block size of a replica that has not said its own.
    pub default_block_size: BlockSize,
}

impl RouteConfig {
    /// How far from the least cost is a tie, in seconds.
    fn epsilon(&self, least: f64) -> f64 {
        self.tie_s.max((least * self.tie_share).min(MOST_TIE_S))
    }

    /// How far from a prediction is as predicted, in seconds.
    fn noise(&self, predicted: f64) -> f64 {
        self.tie_s.max(predicted * self.tie_share)
    }
}

/// Decides.
pub fn decide(config: &RouteConfig, view: &View<'_>, question: &Question<'_>) -> Decision {
    choose(config, view, question, |id| id)
}

/// Decides for the replicas' imagined identities: by what would be in flight and cached, had this configuration decided
/// all along. What replicas report is real all the same, and so is who is ranked.
pub fn imagine(config: &RouteConfig, view: &View<'_>, question: &Question<'_>) -> Decision {
    choose(config, view, question, ReplicaId::imagined)
}

fn choose(
    config: &RouteConfig,
    view: &View<'_>,
    question: &Question<'_>,
    identity: fn(ReplicaId) -> ReplicaId,
) -> Decision {
    let serving = match serving(view.table, question) {
        Ok(serving) => serving,
        Err(reason) => return Decision::unrouted(reason),
    };
    let (replicas, suspended) = unsuspended(view, serving);
    let hashed_here: Vec<Chain>;
    let chains = match question.prompt {
        PromptKnowledge::Hashed { chains, .. } => chains,
        PromptKnowledge::Tokens { tokens, seed } => {
            let sizes = sizes(config, replicas.iter().copied());
            hashed_here = sizes.into_iter().map(|size| Chain::new(seed, size, tokens)).collect();
            &hashed_here
        }
        PromptKnowledge::Unknown { .. } => &[],
    };
    let prompt_tokens = match question.prompt {
        PromptKnowledge::Tokens { tokens, .. } => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
        PromptKnowledge::Hashed { prompt_tokens, .. } => prompt_tokens,
        PromptKnowledge::Unknown { estimated_tokens, .. } => estimated_tokens,
    };
    let known = Known::of(config, view, identity, chains);
    let seen: Vec<Seen<'_>> = replicas.iter().map(|replica| known.seen(replica)).collect();
    let scales = Scales::of(&known, question, prompt_tokens, &seen);
    let weighed = scales.weigh(&seen);
    let retry_after_s = overload::retry_after(&scales, &weighed, &question.prompt, chains);
    if retry_after_s.is_some() {
        return Decision { retry_after_s, ..Decision::unrouted(Reason::Overloaded) };
    }
    let ranked = match scales.session.filter(|_| config.policy == Policy::Warmpath) {
        Some(session) => {
            policy::by_cost(&weighed, |best| session::home(&scales, &weighed, best, session))
        }
        None => config.policy.rank(&scales, &weighed, chains, question.tie_seed),
    };
    let suspended_overlap = suspended.iter().map(|replica| known.by(replica).tokens);
    let first = ranked.first().copied().unwrap_or_default();
    let rivals = Rivals::of(&scales, &weighed, first, suspended_overlap.max().unwrap_or(0));
    let chosen = weighed.get(first);
    let chain = chosen.and_then(|chosen| known.chain(chosen.seen.had.block_size)).cloned();
    let reason = reason(question, chosen, chain.as_ref(), rivals.overlap_tokens);
    let ranked = ranked.iter().filter_map(|at| weighed.get(*at));
    let open = chain.as_ref().filter(|chain| chain.is_open());
    Decision {
        reason,
        ranked: ranked.map(|weighed| scales.candidate(weighed)).collect(),
        is_matched: chain.is_some(),
        known_tokens: open.map(Chain::token_count),
        chain,
        prompt_tokens,
        suspended: suspended.len(),
        rivals,
        retry_after_s: None,
    }
}

/// The block sizes for which a prompt of this cluster is to be hashed.
pub fn block_sizes(config: &RouteConfig, table: &ReplicaTable, cluster: &str) -> Vec<BlockSize> {
    sizes(config, table.in_cluster(cluster))
}

fn sizes<'a>(config: &RouteConfig, replicas: impl Iterator<Item = &'a Replica>) -> Vec<BlockSize> {
    let mut sizes = Vec::new();
    for replica in replicas {
        let size = replica.block_size.unwrap_or(config.default_block_size);
        if sizes.len() < MAX_BLOCK_SIZES && !sizes.contains(&size) {
            sizes.push(size);
        }
    }
    sizes
}

fn reason(
    question: &Question<'_>,
    chosen: Option<&Weighed<'_>>,
    chain: Option<&Chain>,
    others_overlap: u32,
) -> Reason {
    if let PromptKnowledge::Unknown { reason, .. } = question.prompt {
        return reason;
    }
    if let Some(chain) = chain.filter(|chain| chain.hashes().is_empty()) {
        return if chain.is_open() { Reason::UnsupportedPrompt } else { Reason::ShortPrompt };
    }
    match chosen.map_or(0, |candidate| candidate.seen.had.tokens) {
        0 if others_overlap == 0 => Reason::Cold,
        0 => Reason::PrefixBusy,
        _ => Reason::Prefix,
    }
}
