//! What each candidate has of the prompt, what is in flight there, and what that comes to.
//!
//! What a replica would evict is asked of those alone that may be chosen, or are told of: it is to be found out branch by
//! branch, and takes as long as all the rest. No candidate is left out for it, and no choice is another.

use super::{Candidate, Question, RouteConfig, Source, View, guards, policy};
use crate::charge::Charge;
use crate::index::{Evicted, Outlook, Overlaps};
use crate::learn::Speed;
use crate::replicas::{Moment, Replica, ReplicaId};
use crate::score::{self, Cost, Signals};
use crate::tokens::blocks::{BlockSize, Chain};

/// One replica, and what is known of it.
#[derive(Debug)]
pub(super) struct Seen<'a> {
    pub(super) replica: &'a Replica,
    charge: &'a Charge,
    speed: &'a Speed,
    pub(super) had: Had,
}

impl Seen<'_> {
    /// Own requests there.
    pub(super) fn in_flight(&self) -> f64 {
        f64::from(self.charge.requests)
    }

    /// Own work there that has not begun to answer.
    pub(super) fn unfinished_tokens(&self) -> f64 {
        self.charge.unfinished_tokens as f64
    }
}

/// What it costs, as far as all are compared by it: the rest is to be had of the few that are ranked.
#[derive(Debug)]
pub(super) struct Weighed<'a> {
    pub(super) seen: &'a Seen<'a>,
    /// Those whom computing there stalls.
    neighbours: f64,
    /// What it would evict, where that was asked.
    evicted: Option<Evicted>,
    /// Without what it would evict where that was not asked.
    pub(super) cost: Cost,
    /// The cost's sum.
    pub(super) total: f64,
}

/// What is the same for every candidate, and what each is weighed by.
pub(super) struct Scales<'a> {
    pub(super) config: &'a RouteConfig,
    known: &'a Known<'a>,
    pub(super) prompt_tokens: u32,
    answer_limit: Option<u32>,
    adapter: Option<u64>,
    /// Requests in flight in the whole fleet.
    pub(super) in_flight: f64,
    /// Those, by what the fleet computes per second: as many are a replica's share.
    neighbours_per_rate: f64,
    /// Seconds of work before a replica and of loading the adapter there, in the fleet's mean.
    usual_wait_s: f64,
    /// Seconds for which an answer on its way has lasted, in the fleet's mean.
    usual_answering_s: f64,
    /// Where its session alone says where it goes.
    pub(super) session: Option<u64>,
}

/// What is known of the prompt, and of who has it.
pub(super) struct Known<'a> {
    config: &'a RouteConfig,
    view: &'a View<'a>,
    /// By which identity a replica's blocks and requests are known.
    identity: fn(ReplicaId) -> ReplicaId,
    chains: Vec<Walked<'a>>,
    /// Of a replica to which nothing was sent, and of one that nothing was learned of.
    strange: (Charge, Speed),
}

/// A chain, and who holds how much of it. It is walked once, whoever holds it.
struct Walked<'a> {
    chain: &'a Chain,
    block_size: BlockSize,
    reusable_blocks: usize,
    overlaps: Overlaps<'a>,
}

/// What one replica has of the prompt.
#[derive(Debug)]
pub(super) struct Had {
    pub(super) block_size: BlockSize,
    pub(super) blocks: usize,
    /// What that saves.
    pub(super) tokens: u32,
    /// What of it must be fetched from a slower tier.
    pub(super) offloaded: u32,
    pub(super) source: Source,
}

impl<'a> Known<'a> {
    pub(super) fn of(
        config: &'a RouteConfig,
        view: &'a View<'_>,
        identity: fn(ReplicaId) -> ReplicaId,
        chains: &'a [Chain],
    ) -> Self {
        let walked = |chain: &'a Chain| Walked {
            chain,
            block_size: chain.block_size(),
            reusable_blocks: chain.reusable_blocks(),
            overlaps: view.index.overlaps(chain.hashes()),
        };
        let strange = Default::default();
        Self { config, view, identity, chains: chains.iter().map(walked).collect(), strange }
    }

    #[inline]
    fn walked(&self, block_size: BlockSize) -> Option<&Walked<'a>> {
        self.chains.iter().find(|walked| walked.block_size == block_size)
    }

    pub(super) fn chain(&self, block_size: BlockSize) -> Option<&'a Chain> {
        self.walked(block_size).map(|walked| walked.chain)
    }

    /// A replica before it is weighed.
    #[inline]
    pub(super) fn seen<'b>(&'b self, replica: &'b Replica) -> Seen<'b> {
        let (idle, unheard) = &self.strange;
        Seen {
            replica,
            charge: self.view.charges.find((self.identity)(replica.id)).unwrap_or(idle),
            speed: self.view.rates.find(replica.id).unwrap_or(unheard),
            had: self.by(replica),
        }
    }

    /// What a replica has.
    #[inline]
    pub(super) fn by(&self, replica: &Replica) -> Had {
        let block_size = replica.block_size.unwrap_or(self.config.default_block_size);
        let Some(Walked { reusable_blocks, overlaps, .. }) = self.walked(block_size) else {
            return Had { block_size, blocks: 0, tokens: 0, offloaded: 0, source: Source::Routed };
        };
        let Outlook { blocks, at_hand, observed } = overlaps.outlook((self.identity)(replica.id));
        let reusable = blocks.min(*reusable_blocks);
        let source = match observed {
            None => Source::Routed,
            Some(observed) if observed >= reusable => Source::Observed,
            Some(_) => Source::Pending,
        };
        let tokens = |blocks: usize| {
            u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(block_size.get())
        };
        let offloaded = tokens(reusable.saturating_sub(at_hand));
        Had { block_size, blocks, tokens: tokens(reusable), offloaded, source }
    }

    /// What it would evict for the blocks that it does not have.
    fn evicted(&self, replica: &Replica, had: &Had) -> Evicted {
        let all = self.chain(had.block_size).map_or(0, |chain| chain.hashes().len());
        let new_blocks = all.saturating_sub(had.blocks);
        self.view.index.would_evict((self.identity)(replica.id), new_blocks)
    }
}

impl<'a> Scales<'a> {
    pub(super) fn of(
        known: &'a Known<'_>,
        question: &Question<'_>,
        prompt_tokens: u32,
        candidates: &[Seen<'_>],
    ) -> Self {
        let Known { config, view, .. } = *known;
        let [mut in_flight, mut unfinished, mut answering, mut answering_s, mut rates] = [0.0; 5];
        for candidate in candidates {
            in_flight += candidate.in_flight();
            unfinished += candidate.unfinished_tokens();
            answering += f64::from(candidate.charge.answering);
            answering_s += candidate.charge.answering_s(view.now);
            rates += candidate.speed.rate(&config.cost);
        }
        let adapter = question.adapter;
        let must_load = |c: &&Seen<'_>| adapter.is_some_and(|id| c.replica.must_load(id));
        let loading = candidates.iter().filter(must_load).count() as f64 / candidates.len() as f64;
        Self {
            config,
            known,
            prompt_tokens,
            answer_limit: question.answer_limit,
            adapter,
            in_flight,
            neighbours_per_rate: in_flight / rates,
            usual_wait_s: unfinished / rates + loading * config.cost.adapter_load_s,
            usual_answering_s: answering_s / answering.max(1.0),
            session: question.session.filter(|_| !question.prompt.is_matched()),
        }
    }

    /// What each costs.
    pub(super) fn weigh<'b>(&self, seen: &'b [Seen<'b>]) -> Vec<Weighed<'b>> {
        let relieved = guards::relieved(self, seen);
        let weigh = |seen: &'b Seen<'b>| {
            let usual = self.neighbours_per_rate * seen.speed.rate(&self.config.cost);
            let is_relieved = relieved.is_some_and(|most| seen.had.tokens < most);
            let neighbours = if is_relieved { usual.min(seen.in_flight()) } else { usual };
            let signals = self.signals(seen, neighbours, Evicted::default());
            let cost = score::cost(&self.config.cost, &signals);
            Weighed { seen, neighbours, evicted: None, cost, total: cost.total() }
        };
        let mut weighed: Vec<Weighed<'_>> = seen.iter().map(weigh).collect();
        self.settle(&mut weighed);
        weighed
    }

    /// Adds what they would evict to all whose place may depend on it. It only adds: who costs more without it than others
    /// do with it, as many as are ranked, and no tie, does not come before them.
    fn settle(&self, weighed: &mut [Weighed<'_>]) {
        let (mut least, mut most) = (f64::INFINITY, 0.0_f64);
        for at in policy::cheapest(weighed) {
            if let Some(weighed) = weighed.get_mut(at) {
                self.add_evicted(weighed);
                (least, most) = (least.min(weighed.total), most.max(weighed.total));
            }
        }
        let most = most.max(least + self.config.epsilon(least));
        for weighed in weighed.iter_mut().filter(|weighed| weighed.total <= most) {
            self.add_evicted(weighed);
        }
    }

    fn add_evicted(&self, weighed: &mut Weighed<'_>) {
        let (evicted, cost) = self.with_evicted(weighed);
        weighed.evicted = Some(evicted);
        (weighed.cost, weighed.total) = (cost, cost.total());
    }

    /// What it would evict, and the seconds that it costs with that.
    fn with_evicted(&self, weighed: &Weighed<'_>) -> (Evicted, Cost) {
        if let Some(evicted) = weighed.evicted {
            return (evicted, weighed.cost);
        }
        let Seen { replica, speed, had, .. } = weighed.seen;
        let evicted = self.known.evicted(replica, had);
        let (tokens, age_s) = self.evicted_tokens(had, evicted);
        // The last term of the sum.
        let eviction = score::eviction(&self.config.cost, speed, tokens, age_s);
        (evicted, Cost { eviction, ..weighed.cost })
    }

    /// [`score::Cost::seconds`].
    pub(super) fn cost(&self, weighed: &Weighed<'_>) -> Cost {
        self.with_evicted(weighed).1
    }

    /// Requests there: own ones, and those of others that it reports.
    pub(super) fn requests(&self, weighed: &Weighed<'_>) -> f64 {
        let Weighed { seen, neighbours, .. } = weighed;
        seen.in_flight() + self.signals(seen, *neighbours, Evicted::default()).foreign()
    }

    /// What its cost rests on.
    pub(super) fn signals_of(&self, weighed: &Weighed<'_>) -> Signals {
        let (evicted, _) = self.with_evicted(weighed);
        self.signals(weighed.seen, weighed.neighbours, evicted)
    }

    pub(super) fn candidate(&self, weighed: &Weighed<'_>) -> Candidate {
        let (Seen { replica, had, .. }, config) = (weighed.seen, &self.config.cost);
        let (evicted, cost) = self.with_evicted(weighed);
        let signals = self.signals(weighed.seen, weighed.neighbours, evicted);
        Candidate {
            id: replica.id,
            address: replica.address.clone(),
            overlap_tokens: had.tokens,
            source: had.source,
            held_blocks: had.blocks,
            cost,
            work: signals.work(config),
            queued: signals.queued(config),
            signals,
        }
    }

    /// How many tokens that is, and for how many seconds they have not been used.
    fn evicted_tokens(&self, had: &Had, evicted: Evicted) -> (f64, f64) {
        if evicted.blocks == 0 {
            return (0.0, 0.0);
        }
        let used = Moment(evicted.used.saturating_mul(1000));
        let age_s = self.known.view.now.since(used).as_secs_f64();
        (evicted.blocks as f64 * f64::from(had.block_size.get()), age_s)
    }

    // As `score::cost`.
    #[cfg_attr(target_family = "wasm", inline)]
    #[cfg_attr(not(target_family = "wasm"), inline(always))]
    fn signals(&self, seen: &Seen<'_>, neighbours: f64, evicted: Evicted) -> Signals {
        let Known { config, view, .. } = *self.known;
        let Seen { replica, charge, speed, had } = seen;
        let load = replica.fresh_load(view.now, config.stale_after);
        let (since, head) = charge.computing(view.now);
        let computed = speed.rate(&config.cost) * since.as_secs_f64();
        let block_tokens = f64::from(had.block_size.get());
        let (evicted_tokens, evicted_age_s) = self.evicted_tokens(had, evicted);
        Signals {
            prompt_tokens: f64::from(self.prompt_tokens),
            cached_tokens: f64::from(had.tokens),
            offloaded_tokens: f64::from(had.offloaded),
            answer_limit: self.answer_limit.map(f64::from),
            neighbours,
            in_flight: seen.in_flight(),
            unfinished_tokens: seen.unfinished_tokens(),
            computed_tokens: computed.min(score::MOST_COMPUTED * head as f64),
            answering: f64::from(charge.answering),
            answering_s: charge.answering_s(view.now),
            usual_answering_s: self.usual_answering_s,
            lasted_s: charge.lasted_s(view.now),
            usual_wait_s: self.usual_wait_s,
            // What a session asked for before is no reason to send it elsewhere.
            recent_tokens: self
                .session
                .map_or_else(|| charge.recent(view.now, config.cost.recent_half_life), |_| 0.0),
            reported: load.map(|load| (f64::from(load.running), f64::from(load.waiting))),
            reported_own: load.map_or(0.0, |load| f64::from(load.own)),
            kv_usage: load.and_then(|load| load.kv_usage),
            capacity_tokens: replica.capacity_blocks.map(|blocks| f64::from(blocks) * block_tokens),
            speed: **speed,
            evicted_tokens,
            evicted_age_s,
            loads_adapter: self.adapter.is_some_and(|adapter| replica.must_load(adapter)),
        }
    }
}
