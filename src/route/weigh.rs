//! One candidate against the question: what it has of the prompt, what is in flight there, and what that comes to.
//!
//! It compares no candidates.

use super::{Candidate, RouteConfig, Source, View};
use crate::charge::Charge;
use crate::index::{Evicted, Outlook, Overlaps, PrefixIndex};
use crate::learn::Speed;
use crate::replicas::{Moment, Replica, ReplicaId};
use crate::score::{self, Cost, CostConfig, Signals};
use crate::tokens::blocks::{BlockSize, Chain};

/// One replica while all are compared: what is only wanted of the few that are ranked is still to be had from it.
#[derive(Debug)]
pub(super) struct Weighed<'a> {
    pub(super) replica: &'a Replica,
    pub(super) block_size: BlockSize,
    pub(super) held_blocks: usize,
    pub(super) overlap_tokens: u32,
    pub(super) source: Source,
    pub(super) signals: Signals,
    pub(super) cost: Cost,
    /// The cost's sum.
    pub(super) total: f64,
}

impl Weighed<'_> {
    /// Requests there: own ones, and those of others that it reports.
    pub(super) fn requests(&self) -> f64 {
        self.signals.in_flight + self.signals.foreign()
    }

    /// Lets it cost what these signals say.
    pub(super) fn reweigh(&mut self, config: &CostConfig, signals: Signals) {
        self.signals = signals;
        self.cost = score::cost(config, &signals);
        self.total = self.cost.total();
    }

    pub(super) fn candidate(&self, config: &CostConfig) -> Candidate {
        Candidate {
            id: self.replica.id,
            address: self.replica.address.clone(),
            overlap_tokens: self.overlap_tokens,
            source: self.source,
            held_blocks: self.held_blocks,
            cost: self.cost,
            work: self.signals.work(config),
            queued: self.signals.queued(config),
            signals: self.signals,
        }
    }
}

/// What is the same for every candidate.
pub(super) struct Request {
    pub(super) prompt_tokens: u32,
    pub(super) answer_limit: Option<u32>,
    pub(super) adapter: Option<u64>,
    /// Requests in flight in the whole fleet, by what the fleet computes per second: as many are a replica's share.
    pub(super) neighbours_per_rate: f64,
    /// Seconds of work before a replica and of loading the adapter there, in the fleet's mean.
    pub(super) usual_wait_s: f64,
    /// Seconds for which an answer on its way has lasted, in the fleet's mean.
    pub(super) usual_answering_s: f64,
    /// Where its session alone says where it goes.
    pub(super) session: Option<u64>,
    /// By which identity a replica's blocks and requests are known.
    pub(super) identity: fn(ReplicaId) -> ReplicaId,
}

/// What is known of the prompt, and of who has it.
pub(super) struct Known<'a> {
    index: &'a PrefixIndex,
    chains: &'a [Chain],
    /// Of each chain. It is walked once, whoever holds it.
    overlaps: Vec<Overlaps<'a>>,
}

/// What one replica has of the prompt.
pub(super) struct Had {
    pub(super) block_size: BlockSize,
    pub(super) blocks: usize,
    /// What that saves.
    pub(super) tokens: u32,
    /// What of it must be fetched from a slower tier.
    pub(super) offloaded: u32,
    pub(super) source: Source,
    /// What it would evict for the other blocks.
    pub(super) evicted: Evicted,
}

impl<'a> Known<'a> {
    pub(super) fn of(index: &'a PrefixIndex, chains: &'a [Chain]) -> Self {
        let overlaps = chains.iter().map(|chain| index.overlaps(chain.hashes())).collect();
        Self { index, chains, overlaps }
    }

    pub(super) fn chain(&self, block_size: BlockSize) -> Option<&'a Chain> {
        self.chains.iter().find(|chain| chain.block_size() == block_size)
    }

    /// What a replica has that is known by this identity.
    pub(super) fn by(&self, config: &RouteConfig, replica: &Replica, id: ReplicaId) -> Had {
        let block_size = replica.block_size.unwrap_or(config.default_block_size);
        let mut all = self.chains.iter().zip(&self.overlaps);
        let Some((chain, overlaps)) = all.find(|(chain, _)| chain.block_size() == block_size)
        else {
            let evicted = self.index.would_evict(id, 0);
            let source = Source::Routed;
            return Had { block_size, blocks: 0, tokens: 0, offloaded: 0, source, evicted };
        };
        let Outlook { blocks, at_hand, observed, evicted } = overlaps.outlook(id);
        let reusable = blocks.min(chain.reusable_blocks());
        let source = match observed {
            None => Source::Routed,
            Some(observed) if observed >= reusable => Source::Observed,
            Some(_) => Source::Pending,
        };
        let tokens = |blocks: usize| {
            u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(block_size.get())
        };
        let offloaded = tokens(reusable.saturating_sub(at_hand));
        Had { block_size, blocks, tokens: tokens(reusable), offloaded, source, evicted }
    }
}

pub(super) fn weigh<'a>(
    config: &RouteConfig,
    view: &View<'_>,
    request: &Request,
    replica: &'a Replica,
    (charge, speed): (&Charge, &Speed),
    known: &Known<'_>,
) -> Weighed<'a> {
    let Had { block_size, blocks, tokens, offloaded, source, evicted } =
        known.by(config, replica, (request.identity)(replica.id));
    let used = Moment(evicted.used.saturating_mul(1000));
    let load = replica.fresh_load(view.now, config.stale_after);
    let (since, head) = charge.computing(view.now);
    let rate = speed.rate(&config.cost);
    let block_tokens = f64::from(block_size.get());
    let computed = (rate * since.as_secs_f64()).min(score::MOST_COMPUTED * head as f64);
    let signals = Signals {
        prompt_tokens: f64::from(request.prompt_tokens),
        cached_tokens: f64::from(tokens),
        offloaded_tokens: f64::from(offloaded),
        answer_limit: request.answer_limit.map(f64::from),
        neighbours: request.neighbours_per_rate * rate,
        in_flight: f64::from(charge.requests),
        unfinished_tokens: charge.unfinished_tokens as f64,
        computed_tokens: computed,
        answering: f64::from(charge.answering),
        answering_s: charge.answering_s(view.now),
        usual_answering_s: request.usual_answering_s,
        lasted_s: charge.lasted_s(view.now),
        usual_wait_s: request.usual_wait_s,
        // What a session asked for before is no reason to send it elsewhere.
        recent_tokens: request
            .session
            .map_or_else(|| charge.recent(view.now, config.cost.recent_half_life), |_| 0.0),
        reported: load.map(|load| (f64::from(load.running), f64::from(load.waiting))),
        reported_own: load.map_or(0.0, |load| f64::from(load.own)),
        kv_usage: load.and_then(|load| load.kv_usage),
        capacity_tokens: replica.capacity_blocks.map(|blocks| f64::from(blocks) * block_tokens),
        speed: *speed,
        evicted_tokens: evicted.blocks as f64 * block_tokens,
        evicted_age_s: view.now.since(used).as_secs_f64(),
        loads_adapter: request.adapter.is_some_and(|adapter| replica.must_load(adapter)),
    };
    let cost = score::cost(&config.cost, &signals);
    let (held_blocks, overlap_tokens, total) = (blocks, tokens, cost.total());
    Weighed { replica, block_size, held_blocks, overlap_tokens, source, signals, cost, total }
}
