//! The second policy: what it would have chosen, and the caches and queues as they would be had it chosen all along.
//!
//! Its choices are charged and recorded like real ones, under the replicas' imagined identities, so every VM sees them.
//! They move no request, and no real choice sees them.

use super::root::Shared;
use super::{host, meters};
use crate::metrics;
use crate::replicas::{Moment, ReplicaId};
use crate::route::{Decision, Policy};
use crate::share::log::{Fate, Record};
use crate::tokens::blocks::{BlockSize, Chain};

/// A request as the second policy would have sent it.
pub struct Shadow {
    replica: ReplicaId,
    /// What the replica is charged with until the answer begins.
    unfinished: u64,
    /// When the answer began.
    answered: Option<Moment>,
    /// How many of the prompt's blocks it would have had.
    held_blocks: usize,
    /// How it counts them; none: the prompt is not known.
    block_size: Option<BlockSize>,
}

impl Shadow {
    /// Counts, charges and records a choice beside the one that was made.
    pub fn began(
        shared: &mut Shared<'_>,
        made: &Decision,
        imagined: Option<Decision>,
        now: Moment,
    ) -> Option<Self> {
        let imagined = imagined?;
        let policies = (shared.config.route.policy, shared.config.shadow.as_ref()?.policy);
        count(policies, made, &imagined);
        let chosen = imagined.chosen()?;
        let replica = chosen.id.imagined();
        if let Some(chain) = &imagined.chain {
            let record = Record::of(Fate::Held, replica, chain.hashes(), chosen.held_blocks);
            shared.fleet.link.record(record);
        }
        let unfinished = imagined.charged_tokens();
        shared.fleet.link.charge(replica, unfinished, now);
        let block_size = imagined.chain.as_ref().map(Chain::block_size);
        let held_blocks = chosen.held_blocks;
        Some(Self { replica, unfinished, answered: None, held_blocks, block_size })
    }

    /// The answer has begun: nobody knows when it would have.
    pub fn answer_began(&mut self, shared: &mut Shared<'_>) -> Moment {
        *self.answered.get_or_insert_with(|| {
            let now = host::now();
            shared.fleet.link.answer_began(self.replica, self.unfinished, now);
            now
        })
    }

    /// The request has ended.
    pub fn ended(&mut self, shared: &mut Shared<'_>) {
        let answered = self.answer_began(shared);
        shared.fleet.link.release(self.replica, answered);
    }

    /// The blocks behind the first `from` of a chain, which is the prompt's as it went on, are cached, too.
    pub fn learn(&self, shared: &mut Shared<'_>, chain: &Chain, from: usize) {
        if self.block_size == Some(chain.block_size()) {
            shared.fleet.link.record(Record::of(Fate::Held, self.replica, chain.hashes(), from));
        }
    }

    /// The prompt was not computed.
    pub fn take_back(&self, shared: &mut Shared<'_>, chain: &Chain) {
        let Self { replica, held_blocks, block_size, .. } = *self;
        if block_size == Some(chain.block_size()) && held_blocks < chain.hashes().len() {
            let record = Record::of(Fate::Forgotten, replica, chain.hashes(), held_blocks);
            shared.fleet.link.record(record);
        }
    }
}

fn count(policies: (Policy, Policy), made: &Decision, imagined: &Decision) {
    let id = |decision: &Decision| decision.chosen().map(|chosen| chosen.id);
    let result = if id(made) == id(imagined) { "agree" } else { "differ" };
    meters::add(&metrics::SHADOW_DECISIONS, &[result], 1);
    for (policy, decision) in [(policies.0, made), (policies.1, imagined)] {
        let Some(chosen) = decision.chosen() else { continue };
        let (labels, cost) = ([policy.as_str()], chosen.cost.total());
        meters::add(&metrics::SHADOW_CACHED_TOKENS, &labels, chosen.overlap_tokens.into());
        meters::add(&metrics::SHADOW_COST_US, &labels, (cost * 1e6) as u64);
    }
}
