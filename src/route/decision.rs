//! The outcome of a decision: who is ranked, at what cost, and why, in the forms in which it is told.
//!
//! It weighs nothing.

use super::Reason;
use super::regret::Rivals;
use crate::index::Stretch;
use crate::replicas::ReplicaId;
use crate::score::{Cost, Signals};
use crate::tokens::blocks::Chain;

/// The request header that the `override_host` load-balancing policy reads. It names an upstream
/// address, so a client's own copy is removed from every request.
pub const ROUTING_HEADER: &str = "x-gateway-destination-endpoint";

/// By what an overlap is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Source {
    /// By what was routed there: the replica says nothing of its cache.
    #[default]
    Routed,
    /// By the replica's own reports.
    Observed,
    /// By both: some of it was routed there lately, and is not in a report yet.
    Pending,
}

impl Source {
    /// As in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Routed => "routed",
            Self::Observed => "observed",
            Self::Pending => "pending",
        }
    }
}

/// One replica, as it was weighed.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Who.
    pub id: ReplicaId,
    /// Its address.
    pub address: String,
    /// Tokens predicted to come from its cache.
    pub overlap_tokens: u32,
    /// How that is known.
    pub source: Source,
    /// Blocks of the prompt it is believed to hold, the last one included.
    pub held_blocks: usize,
    /// What it would cost.
    pub cost: Cost,
    /// What it would have to compute of the prompt, in tokens: those that it attends to counted in.
    pub work: f64,
    /// Such work in front of it.
    pub queued: f64,
    /// What that rests on.
    pub(super) signals: Signals,
}

impl Candidate {
    /// Whether the request's adapter must be loaded there first.
    pub fn loads_adapter(&self) -> bool {
        self.signals.loads_adapter
    }
}

/// The outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Why.
    pub reason: Reason,
    /// Best first, at most [`super::MAX_RANKED`]; empty leaves the choice to Envoy.
    pub ranked: Vec<Candidate>,
    /// The prompt's blocks at the chosen replica's block size; `None` when its tokens are unknown, or when there is no room
    /// to keep them.
    pub chain: Option<Chain>,
    /// Whether the choice went by them.
    pub is_matched: bool,
    /// Of a prompt whose end is not known, the tokens that are.
    pub known_tokens: Option<usize>,
    /// The prompt's tokens, or the guess.
    pub prompt_tokens: u32,
    /// Replicas that might have been chosen but for their failures.
    pub suspended: usize,
    /// What the others offered.
    pub rivals: Rivals,
    /// For [`Reason::Overloaded`]: when the client is told to come back.
    pub retry_after_s: Option<u64>,
}

impl Decision {
    /// Requests of others on the replicas that were ranked, as far as those report.
    pub fn foreign(&self) -> f64 {
        self.ranked.iter().map(|candidate| candidate.signals.foreign()).sum()
    }

    /// A decision to leave the choice to Envoy.
    pub fn unrouted(reason: Reason) -> Self {
        Self {
            reason,
            ranked: Vec::new(),
            chain: None,
            is_matched: false,
            known_tokens: None,
            prompt_tokens: 0,
            suspended: 0,
            rivals: Rivals::default(),
            retry_after_s: None,
        }
    }

    /// The choice.
    pub fn chosen(&self) -> Option<&Candidate> {
        self.ranked.first()
    }

    /// The prompt's tokens that the chosen replica must compute.
    pub fn uncached_tokens(&self) -> u64 {
        let cached = self.chosen().map_or(0, |candidate| candidate.overlap_tokens);
        u64::from(self.prompt_tokens.saturating_sub(cached))
    }

    /// What the chosen replica is charged with: the work of those tokens.
    pub fn charged_tokens(&self) -> u64 {
        self.chosen().map_or(0, |candidate| candidate.work as u64)
    }

    /// The routing header's value: addresses, best first.
    pub fn header(&self) -> String {
        let addresses: Vec<&str> = self.ranked.iter().map(|c| c.address.as_str()).collect();
        addresses.join(", ")
    }

    /// Why, for a person: the reason, and each ranked replica with its overlap and cost terms.
    pub fn explain(&self) -> String {
        let mut text =
            format!("reason={}, prompt_tokens={}", self.reason.as_str(), self.prompt_tokens);
        if let Some(known) = self.known_tokens {
            text.push_str(&format!(", known_tokens={known}"));
        }
        if self.suspended > 0 {
            text.push_str(&format!(", suspended={}", self.suspended));
        }
        for candidate in &self.ranked {
            let Candidate { address, overlap_tokens, source, cost, .. } = candidate;
            let Cost { wait, prefill, late, stall, decode, pressure, eviction, adapter, transfer } =
                cost;
            text.push_str(&format!(
                "; replica={address}, overlap_tokens={overlap_tokens}, overlap_source={}, cost_s={:.4}, \
                 wait_s={wait:.4}, prefill_s={prefill:.4}, late_s={late:.4}, stall_s={stall:.4}, decode_s={decode:.4}, \
                 pressure_s={pressure:.4}, eviction_s={eviction:.4}, adapter_s={adapter:.4}, transfer_s={transfer:.4}",
                source.as_str(),
                cost.total()
            ));
        }
        text
    }

    /// The blocks that the chosen replica will hold once it has computed the prompt and that it
    /// is not believed to hold yet.
    pub fn new_blocks(&self) -> Option<(ReplicaId, Stretch<'_>)> {
        let (chosen, chain) = (self.chosen()?, self.chain.as_ref()?);
        Some((chosen.id, Stretch::of(chain.hashes(), chosen.held_blocks)))
    }
}
