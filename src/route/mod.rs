//! The decision: which replica gets the request, which two are next, and why.
//!
//! [`decide`] is the only path from a prompt's tokens to a replica. It reads values and returns
//! one; it does not charge, record, count or send anything.

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

pub use policy::Policy;
pub use reason::Reason;

use crate::charge::{Charge, Charges};
use crate::index::{Evicted, Outlook, Overlaps, PrefixIndex, Stretch};
use crate::learn::{Rates, Speed};
use crate::replicas::strikes::Strikes;
use crate::replicas::{Health, Moment, Replica, ReplicaId, ReplicaTable};
use crate::score::{self, Cost, CostConfig, Signals};
use crate::tokens::blocks::{BlockSize, Chain, ChainSeed};
use regret::Rivals;
use std::time::Duration;

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
    signals: Signals,
}

impl Candidate {
    /// Whether the request's adapter must be loaded there first.
    pub fn loads_adapter(&self) -> bool {
        self.signals.loads_adapter
    }
}

/// One replica while all are compared: what is only wanted of the few that are ranked is still to be had from it.
#[derive(Debug)]
struct Weighed<'a> {
    replica: &'a Replica,
    block_size: BlockSize,
    held_blocks: usize,
    overlap_tokens: u32,
    source: Source,
    signals: Signals,
    cost: Cost,
    /// The cost's sum.
    total: f64,
}

impl Weighed<'_> {
    /// Requests there: own ones, and those of others that it reports.
    fn requests(&self) -> f64 {
        self.signals.in_flight + self.signals.foreign()
    }

    /// Lets it cost what these signals say.
    fn reweigh(&mut self, config: &CostConfig, signals: Signals) {
        self.signals = signals;
        self.cost = score::cost(config, &signals);
        self.total = self.cost.total();
    }

    fn candidate(&self, config: &CostConfig) -> Candidate {
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

/// The outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Why.
    pub reason: Reason,
    /// Best first, at most [`MAX_RANKED`]; empty leaves the choice to Envoy.
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
    let known = Known::of(view.index, chains);
    let (idle, unheard) = (Charge::default(), Speed::default());
    let loads: Vec<(&Charge, &Speed)> = replicas
        .iter()
        .map(|replica| {
            let charge = view.charges.find(identity(replica.id)).unwrap_or(&idle);
            (charge, view.rates.find(replica.id).unwrap_or(&unheard))
        })
        .collect();
    let sum = |of: &dyn Fn(&Charge) -> f64| loads.iter().map(|(charge, _)| of(charge)).sum::<f64>();
    let in_flight = sum(&|charge| f64::from(charge.requests));
    let unfinished = sum(&|charge| charge.unfinished_tokens as f64);
    let answering = sum(&|charge| f64::from(charge.answering));
    let answering_s = sum(&|charge| charge.answering_s(view.now));
    let rates: f64 = loads.iter().map(|(_, speed)| speed.rate(&config.cost)).sum();
    let loads_it = |adapter| replicas.iter().filter(|replica| replica.must_load(adapter)).count();
    let loading_share = question.adapter.map_or(0, loads_it) as f64 / replicas.len() as f64;
    let request = Request {
        prompt_tokens,
        answer_limit: question.answer_limit,
        adapter: question.adapter,
        neighbours_per_rate: in_flight / rates,
        usual_wait_s: unfinished / rates + loading_share * config.cost.adapter_load_s,
        usual_answering_s: answering_s / answering.max(1.0),
        session: question.session.filter(|_| !question.prompt.is_matched()),
        identity,
    };
    let mut weighed: Vec<Weighed<'_>> = replicas
        .iter()
        .zip(loads)
        .map(|(replica, load)| weigh(config, view, &request, replica, load, &known))
        .collect();
    guards::relieve(config, &mut weighed);
    let retry_after_s =
        overload::retry_after(config.max_cost_s, &weighed, &question.prompt, chains);
    if retry_after_s.is_some() {
        return Decision { retry_after_s, ..Decision::unrouted(Reason::Overloaded) };
    }
    let ranked = match request.session.filter(|_| config.policy == Policy::Warmpath) {
        Some(session) => {
            policy::by_cost(&weighed, |best| session::home(config, &weighed, best, session))
        }
        None => config.policy.rank(config, &weighed, chains, question.tie_seed),
    };
    let suspended_overlap =
        suspended.iter().map(|replica| known.by(config, replica, identity(replica.id)).tokens);
    let first = ranked.first().copied().unwrap_or_default();
    let rivals = Rivals::of(&weighed, first, suspended_overlap.max().unwrap_or(0));
    let chosen = weighed.get(first);
    let chain = chosen.and_then(|chosen| known.chain(chosen.block_size)).cloned();
    let reason = reason(question, chosen, chain.as_ref(), rivals.overlap_tokens);
    let ranked = ranked.iter().filter_map(|at| weighed.get(*at));
    let open = chain.as_ref().filter(|chain| chain.is_open());
    Decision {
        reason,
        ranked: ranked.map(|weighed| weighed.candidate(&config.cost)).collect(),
        is_matched: chain.is_some(),
        known_tokens: open.map(Chain::token_count),
        chain,
        prompt_tokens,
        suspended: suspended.len(),
        rivals,
        retry_after_s: None,
    }
}

/// Who may get it, as far as Envoy and the replicas themselves say.
fn serving<'a>(
    table: &'a ReplicaTable,
    question: &Question<'a>,
) -> Result<Vec<&'a Replica>, Reason> {
    let mut is_empty = true;
    let mut healthy = Vec::with_capacity(table.places().size_hint().0);
    for replica in table.in_cluster(question.cluster) {
        is_empty = false;
        if replica.health == Health::Healthy {
            healthy.push(replica);
        }
    }
    if healthy.is_empty() {
        return Err(if is_empty { Reason::NoReplicas } else { Reason::NoHealthyReplica });
    }
    let names = question.model_names;
    if names.is_empty() {
        return Ok(healthy);
    }
    let (mut serving, mut unheard) = (Vec::with_capacity(healthy.len()), Vec::new());
    for replica in healthy {
        match replica.serves(names) {
            Some(true) => serving.push(replica),
            Some(false) => {}
            None => unheard.push(replica),
        }
    }
    // Who has not listed its models yet has just come, or come back as another model's.
    let serving = if serving.is_empty() { unheard } else { serving };
    if serving.is_empty() { Err(Reason::ModelNotServed) } else { Ok(serving) }
}

/// Those of the first priority that has any which is not suspended, and those that are. Where all
/// are, it is not theirs alone, and being refused by a replica is no worse than being refused here:
/// then nobody is left out for it.
fn unsuspended<'a>(
    view: &View<'_>,
    serving: Vec<&'a Replica>,
) -> (Vec<&'a Replica>, Vec<&'a Replica>) {
    let (mut candidates, mut suspended) = (serving, Vec::new());
    if !view.strikes.is_empty() {
        let bars = |replica: &&Replica| view.strikes.of(replica.id).bars(view.now);
        let (barred, free): (Vec<&Replica>, Vec<&Replica>) =
            candidates.iter().copied().partition(bars);
        if !free.is_empty() {
            (candidates, suspended) = (free, barred);
        }
    }
    let first = candidates.iter().map(|replica| replica.priority).min().unwrap_or(0);
    candidates.retain(|replica| replica.priority == first);
    (candidates, suspended)
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

/// What is the same for every candidate.
struct Request {
    prompt_tokens: u32,
    answer_limit: Option<u32>,
    adapter: Option<u64>,
    /// Requests in flight in the whole fleet, by what the fleet computes per second: as many are a replica's share.
    neighbours_per_rate: f64,
    /// Seconds of work before a replica and of loading the adapter there, in the fleet's mean.
    usual_wait_s: f64,
    /// Seconds for which an answer on its way has lasted, in the fleet's mean.
    usual_answering_s: f64,
    /// Where its session alone says where it goes.
    session: Option<u64>,
    /// By which identity a replica's blocks and requests are known.
    identity: fn(ReplicaId) -> ReplicaId,
}

/// What is known of the prompt, and of who has it.
struct Known<'a> {
    index: &'a PrefixIndex,
    chains: &'a [Chain],
    /// Of each chain. It is walked once, whoever holds it.
    overlaps: Vec<Overlaps<'a>>,
}

/// What one replica has of the prompt.
struct Had {
    block_size: BlockSize,
    blocks: usize,
    /// What that saves.
    tokens: u32,
    /// What of it must be fetched from a slower tier.
    offloaded: u32,
    source: Source,
    /// What it would evict for the other blocks.
    evicted: Evicted,
}

impl<'a> Known<'a> {
    fn of(index: &'a PrefixIndex, chains: &'a [Chain]) -> Self {
        let overlaps = chains.iter().map(|chain| index.overlaps(chain.hashes())).collect();
        Self { index, chains, overlaps }
    }

    fn chain(&self, block_size: BlockSize) -> Option<&'a Chain> {
        self.chains.iter().find(|chain| chain.block_size() == block_size)
    }

    /// What a replica has that is known by this identity.
    fn by(&self, config: &RouteConfig, replica: &Replica, id: ReplicaId) -> Had {
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

fn weigh<'a>(
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
    match chosen.map_or(0, |candidate| candidate.overlap_tokens) {
        0 if others_overlap == 0 => Reason::Cold,
        0 => Reason::PrefixBusy,
        _ => Reason::Prefix,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Hearing, Room};
    use crate::replicas::models::Served;
    use crate::replicas::strikes::{PassiveHealth, Proof};
    use crate::replicas::{Load, Member};
    use crate::report::{Change, Tier};
    use crate::tokens::blocks::{BlockHash, Chains};

    pub(super) struct Fleet {
        pub(super) config: RouteConfig,
        pub(super) table: ReplicaTable,
        pub(super) index: PrefixIndex,
        pub(super) charges: Charges,
        pub(super) strikes: Strikes,
        pub(super) rates: Rates,
        pub(super) answer_limit: Option<u32>,
        pub(super) now: Moment,
    }

    #[test]
    fn a_share_of_a_long_cost_is_no_tie() {
        let config = fleet(1).config;
        let ties = [0.01, 1.0, 100.0].map(|least| config.epsilon(least));
        assert_eq!(ties, [0.005, 0.05, MOST_TIE_S]);
        assert_eq!(RouteConfig { tie_s: 0.5, ..config.clone() }.epsilon(100.0), 0.5);
        assert_eq!(config.noise(100.0), 5.0);
    }

    pub(super) fn fleet(replicas: usize) -> Fleet {
        let members: Vec<Member> =
            (0..replicas).map(|n| Member::healthy(format!("10.0.0.{n}:80"))).collect();
        let mut table = ReplicaTable::default();
        table.set_members("pool", &members);
        Fleet {
            config: RouteConfig {
                policy: Policy::default(),
                max_cost_s: None,
                cost: CostConfig::default(),
                tie_s: 0.005,
                tie_share: 0.05,
                stale_after: Duration::from_secs(3),
                default_block_size: BlockSize::new(16).unwrap(),
            },
            table,
            index: PrefixIndex::new(),
            charges: Charges::default(),
            rates: Rates::default(),
            strikes: Strikes::default(),
            answer_limit: Some(8),
            now: Moment::default().plus(Duration::from_secs(100)),
        }
    }

    impl Fleet {
        pub(super) fn ask(&self, tokens: &[u32]) -> Decision {
            let seed = ChainSeed::new("m", None);
            self.decide(PromptKnowledge::Tokens { tokens, seed }, 0)
        }

        pub(super) fn decide(&self, prompt: PromptKnowledge<'_>, tie_seed: u64) -> Decision {
            self.with(prompt, tie_seed, |view, question| decide(&self.config, view, question))
        }

        pub(super) fn with<T>(
            &self,
            prompt: PromptKnowledge<'_>,
            tie_seed: u64,
            act: impl FnOnce(&View<'_>, &Question<'_>) -> T,
        ) -> T {
            let view = View {
                table: &self.table,
                index: &self.index,
                charges: &self.charges,
                strikes: &self.strikes,
                rates: &self.rates,
                now: self.now,
            };
            let question = Question {
                cluster: "pool",
                model_names: &[],
                prompt,
                adapter: None,
                answer_limit: self.answer_limit,
                session: None,
                tie_seed,
            };
            act(&view, &question)
        }

        pub(super) fn apply(&mut self, decision: &Decision) {
            if let Some((id, new)) = decision.new_blocks() {
                self.index.record_behind(id, 10_000, new.parent, new.blocks);
            }
            let half_life = self.config.cost.recent_half_life;
            let uncached = decision.charged_tokens();
            self.charges.start(decision.chosen().unwrap().id, uncached, self.now, half_life);
        }

        pub(super) fn finish(&mut self, decision: &Decision) {
            let id = decision.chosen().unwrap().id;
            self.charges.answer_began(id, decision.charged_tokens(), self.now);
            self.charges.end(id, self.now);
        }

        /// A prompt whose first tokens are known, and of which `unread` more are guessed.
        pub(super) fn ask_open(&self, tokens: &[u32], unread: u32) -> Decision {
            let size = self.config.default_block_size;
            let mut chains = Chains::new(ChainSeed::new("m", None), &[size]);
            chains.leave_open();
            chains.go_on(tokens, &mut || true);
            let prompt_tokens = tokens.len() as u32 + unread;
            self.decide(PromptKnowledge::Hashed { prompt_tokens, chains: chains.as_slice() }, 0)
        }

        pub(super) fn slot(&mut self, slot: u32, change: impl FnOnce(&mut Replica)) {
            let mut places: Vec<(u32, Option<Replica>)> =
                self.table.places().map(|(n, replica)| (n, replica.cloned())).collect();
            change(places[slot as usize].1.as_mut().unwrap());
            self.table = ReplicaTable::from_places(places);
        }
    }

    pub(super) fn prompt(kind: u32, tokens: u32) -> Vec<u32> {
        (0..tokens).map(|n| kind * 100_000 + n).collect()
    }

    pub(super) fn chosen(decision: &Decision) -> u32 {
        decision.chosen().unwrap().id.slot
    }

    #[test]
    fn where_an_adapter_must_be_loaded_is_never_the_better_place() {
        for waiting in [0, 20] {
            let mut fleet = fleet(2);
            for slot in 0..2 {
                let load = Load { running: 8, waiting, kv_usage: None, own: 0, at: fleet.now };
                let adapters = if slot == 0 { vec![] } else { vec![7] };
                fleet.slot(slot, |replica| {
                    (replica.load, replica.adapters) = (Some(load), Some(adapters));
                });
            }
            let tokens = prompt(1, 800);
            let known =
                PromptKnowledge::Tokens { tokens: &tokens, seed: ChainSeed::new("m", None) };
            let decision = fleet.with(known, 0, |view, question| {
                decide(&fleet.config, view, &Question { adapter: Some(7), ..question.clone() })
            });
            assert_eq!(chosen(&decision), 1, "{}", decision.explain());
        }
    }

    #[test]
    fn a_prompt_goes_back_to_the_replica_that_holds_it() {
        let mut fleet = fleet(4);
        let first = fleet.ask(&prompt(1, 1000));
        assert_eq!(first.reason, Reason::Cold);
        fleet.apply(&first);
        fleet.finish(&first);
        let second = fleet.ask(&prompt(1, 1100));
        assert_eq!(second.reason, Reason::Prefix);
        assert_eq!(chosen(&second), chosen(&first));
        assert_eq!(second.chosen().unwrap().overlap_tokens, 992);
        assert_eq!(second.uncached_tokens(), 108);
    }

    #[test]
    fn an_overlap_says_whether_it_was_reported() {
        let mut fleet = fleet(1);
        let (id, asked) = (fleet.table.iter().next().unwrap().id, prompt(1, 1000));
        let source = |fleet: &Fleet| {
            let decision = fleet.ask(&asked);
            let chosen = decision.chosen().unwrap();
            assert!(decision.explain().contains(chosen.source.as_str()));
            (chosen.overlap_tokens, chosen.source)
        };
        assert_eq!(source(&fleet), (0, Source::Routed));
        let chain = fleet.ask(&asked).chain.unwrap();
        let blocks = chain.hashes()[..30].to_vec();
        let change = Change::Stored { parent: None, blocks, tier: Tier::Gpu };
        let (room, mut hearing) = (Room { stated: 999, most: 999 }, Hearing::default());
        fleet.index.observe(id, room, &change, &mut hearing, &mut Vec::new());
        fleet.index.complete_report(id);
        assert_eq!(source(&fleet), (480, Source::Observed));
        fleet.index.advance(fleet.now);
        let sent = fleet.ask(&asked);
        fleet.apply(&sent);
        assert_eq!(source(&fleet), (992, Source::Pending));
        // What was never reported did not come about.
        fleet.index.advance(fleet.now.plus(Duration::from_secs(6)));
        fleet.index.shrink(1000);
        assert_eq!(source(&fleet), (480, Source::Observed));
    }

    #[test]
    fn what_only_a_slower_tier_holds_is_worth_its_transfer() {
        let mut fleet = fleet(2);
        let ids: Vec<ReplicaId> = fleet.table.iter().map(|replica| replica.id).collect();
        let asked = prompt(1, 1000);
        let blocks = fleet.ask(&asked).chain.unwrap().hashes().to_vec();
        let stored = |blocks: &[BlockHash], tier| Change::Stored {
            parent: None,
            blocks: blocks.to_vec(),
            tier,
        };
        let room = Room { stated: 999, most: 999 };
        let mut report = |id: ReplicaId, changes: &[Change], has_tiers| {
            fleet.index.begin_report(id, has_tiers);
            let mut hearing = Hearing::new(has_tiers);
            for change in changes {
                fleet.index.observe(id, room, change, &mut hearing, &mut Vec::new());
            }
            fleet.index.complete_report(id);
            let decision = fleet.ask(&asked);
            let chosen = decision.chosen().unwrap();
            (chosen.id, chosen.overlap_tokens, (chosen.cost.transfer * 100_000.0).round())
        };
        let (first, second) = (ids[0], ids[1]);
        let gpu = stored(&blocks[..20], Tier::Gpu);
        let offloaded = stored(&blocks[..60], Tier::Offload);
        // Fetched is sooner there than computed, and at hand is sooner than fetched.
        assert_eq!(report(first, &[gpu, offloaded], true), (first, 960, 640.0));
        assert_eq!(report(second, &[stored(&blocks[..58], Tier::Gpu)], false), (first, 960, 640.0));
        assert_eq!(report(second, &[stored(&blocks[..60], Tier::Gpu)], false), (second, 960, 0.0));
    }

    #[test]
    fn a_prompt_known_in_part_is_routed_by_its_head() {
        let mut fleet = fleet(4);
        let first = fleet.ask(&prompt(1, 1000));
        fleet.apply(&first);
        fleet.finish(&first);
        let open = fleet.ask_open(&prompt(1, 992), 500);
        assert_eq!((open.reason, chosen(&open)), (Reason::Prefix, chosen(&first)));
        assert_eq!(open.chosen().unwrap().overlap_tokens, 992);
        assert_eq!(open.uncached_tokens(), 500);
        assert!(open.explain().contains("prompt_tokens=1492, known_tokens=992;"));
        assert_eq!(fleet.ask_open(&prompt(2, 992), 500).reason, Reason::Cold);
        assert_eq!(fleet.ask_open(&prompt(1, 15), 500).reason, Reason::UnsupportedPrompt);
    }

    #[test]
    fn different_cold_prompts_spread_over_all_replicas() {
        let fleet = fleet(4);
        let mut counts = [0; 4];
        for kind in 0..400 {
            counts[chosen(&fleet.ask(&prompt(kind, 600))) as usize] += 1;
        }
        assert!(counts.iter().all(|&count| count > 60), "{counts:?}");
    }

    #[test]
    fn gateways_agree_on_a_cold_prompt_without_talking() {
        let fleets = [fleet(4), fleet(4)];
        let seed = ChainSeed::new("m", None);
        for kind in 0..50 {
            let tokens = prompt(kind, 600);
            let [one, other] = [0, 1].map(|gateway| {
                let known = PromptKnowledge::Tokens { tokens: &tokens, seed };
                // A seed of its own, as each gateway has: it must not matter.
                chosen(&fleets[gateway].decide(known, 1 + gateway as u64))
            });
            assert_eq!(one, other, "prompt {kind}");
        }
    }

    #[test]
    fn a_burst_of_one_cold_prompt_waits_for_one_or_two_prefills() {
        let mut fleet = fleet(4);
        let mut prefills = 0;
        for _ in 0..32 {
            let decision = fleet.ask(&prompt(1, 8000));
            prefills += u32::from(decision.uncached_tokens() > 4000);
            fleet.apply(&decision);
        }
        assert!((1..=2).contains(&prefills), "{prefills} prefills");
    }

    #[test]
    fn a_holder_that_is_too_busy_is_left_for_an_idle_replica() {
        let mut fleet = fleet(2);
        let first = fleet.ask(&prompt(1, 1000));
        fleet.apply(&first);
        fleet.finish(&first);
        let holder = first.chosen().unwrap().id;
        fleet.charges.start(holder, 50_000, fleet.now, Duration::from_secs(2));
        let second = fleet.ask(&prompt(1, 1000));
        assert_eq!(second.reason, Reason::PrefixBusy);
        assert_ne!(chosen(&second), holder.slot);
    }

    #[test]
    fn unhealthy_and_draining_replicas_are_left_out() {
        let mut fleet = fleet(3);
        fleet.slot(0, |replica| replica.health = Health::Unhealthy);
        fleet.slot(1, |replica| replica.health = Health::Draining);
        for kind in 0..20 {
            let decision = fleet.ask(&prompt(kind, 600));
            assert_eq!(decision.ranked.len(), 1);
            assert_eq!(chosen(&decision), 2);
        }
        fleet.slot(2, |replica| replica.health = Health::Unhealthy);
        assert_eq!(fleet.ask(&prompt(1, 600)), Decision::unrouted(Reason::NoHealthyReplica));
    }

    #[test]
    fn suspended_replicas_are_left_out_unless_all_are() {
        let mut fleet = fleet(3);
        let suspend = |fleet: &mut Fleet, slot| {
            let (id, none) = (fleet.table.at(slot).unwrap().id, Strikes::default());
            let config = PassiveHealth::default();
            fleet.strikes.failed(&config, &none, id, Proof::Proven, fleet.now, fleet.now);
        };
        suspend(&mut fleet, 0);
        suspend(&mut fleet, 2);
        for kind in 0..20 {
            let decision = fleet.ask(&prompt(kind, 600));
            assert_eq!((decision.ranked.len(), chosen(&decision)), (1, 1));
            assert!(decision.explain().contains(", suspended=2;"), "{}", decision.explain());
        }
        suspend(&mut fleet, 1);
        assert_eq!(fleet.ask(&prompt(1, 600)).ranked.len(), 3);
        fleet.now = fleet.now.plus(Duration::from_secs(1));
        assert_eq!(fleet.ask(&prompt(1, 600)).suspended, 0, "time for probes");
    }

    #[test]
    fn replicas_of_another_model_are_left_out() {
        let mut fleet = fleet(2);
        fleet.slot(0, |replica| replica.models = Some(vec![Served::named("other")]));
        fleet.slot(1, |replica| replica.models = Some(vec![Served::named("mine")]));
        let (table, index, charges) = (&fleet.table, &fleet.index, &fleet.charges);
        let strikes = &fleet.strikes;
        let view = View { table, index, charges, strikes, rates: &fleet.rates, now: fleet.now };
        let ask = |name: &str| {
            let tokens = prompt(1, 100);
            let question = Question {
                cluster: "pool",
                model_names: &[name.to_owned()],
                prompt: PromptKnowledge::Tokens {
                    tokens: &tokens,
                    seed: ChainSeed::new("m", None),
                },
                adapter: None,
                answer_limit: None,
                session: None,
                tie_seed: 0,
            };
            decide(&fleet.config, &view, &question)
        };
        assert_eq!(chosen(&ask("mine")), 1);
        assert_eq!(ask("nobody's"), Decision::unrouted(Reason::ModelNotServed));
    }

    #[test]
    fn who_has_not_listed_its_models_stands_behind_who_has() {
        let mut fleet = fleet(3);
        let ask = |fleet: &Fleet| {
            let (table, index) = (&fleet.table, &fleet.index);
            let (charges, strikes) = (&fleet.charges, &fleet.strikes);
            let view = View { table, index, charges, strikes, rates: &fleet.rates, now: fleet.now };
            let question = Question {
                cluster: "pool",
                model_names: &["mine".to_owned()],
                prompt: PromptKnowledge::Unknown { reason: Reason::NoBody, estimated_tokens: 9 },
                adapter: None,
                answer_limit: None,
                session: None,
                tie_seed: 0,
            };
            decide(&fleet.config, &view, &question).ranked.len()
        };
        assert_eq!(ask(&fleet), 3);
        fleet.slot(0, |replica| replica.models = Some(vec![Served::named("mine")]));
        assert_eq!(ask(&fleet), 1);
        fleet.slot(0, |replica| replica.models = Some(vec![Served::named("other")]));
        assert_eq!(ask(&fleet), 2);
    }

    #[test]
    fn replicas_of_a_later_priority_stand_by() {
        let mut fleet = fleet(3);
        fleet.slot(0, |replica| replica.priority = 1);
        fleet.slot(1, |replica| replica.priority = 1);
        assert_eq!(fleet.ask(&prompt(1, 600)).header(), "10.0.0.2:80");
        fleet.slot(2, |replica| replica.health = Health::Unhealthy);
        assert_eq!(fleet.ask(&prompt(1, 600)).ranked.len(), 2);
        fleet.slot(2, |replica| replica.health = Health::Healthy);
        let (id, none) = (fleet.table.at(2).unwrap().id, Strikes::default());
        let config = PassiveHealth::default();
        fleet.strikes.failed(&config, &none, id, Proof::Proven, fleet.now, fleet.now);
        assert_eq!(fleet.ask(&prompt(1, 600)).ranked.len(), 2);
    }

    #[test]
    fn an_empty_cluster_is_left_to_envoy() {
        assert_eq!(fleet(0).ask(&prompt(1, 100)), Decision::unrouted(Reason::NoReplicas));
    }

    #[test]
    fn a_prompt_under_one_block_goes_by_load_and_spreads() {
        let fleet = fleet(4);
        let seed = ChainSeed::new("m", None);
        let tokens = prompt(1, 15);
        let mut used = [false; 4];
        for tie_seed in 0..64 {
            let decision =
                fleet.decide(PromptKnowledge::Tokens { tokens: &tokens, seed }, tie_seed);
            assert_eq!(decision.reason, Reason::ShortPrompt);
            used[chosen(&decision) as usize] = true;
        }
        assert_eq!(used, [true; 4]);
    }

    #[test]
    fn an_unknown_prompt_goes_to_the_least_loaded_for_its_own_reason() {
        let mut fleet = fleet(2);
        let busy = fleet.table.at(0).unwrap().id;
        fleet.charges.start(busy, 5000, fleet.now, Duration::from_secs(2));
        let unknown =
            PromptKnowledge::Unknown { reason: Reason::TokenizerLoading, estimated_tokens: 300 };
        let decision = fleet.decide(unknown, 0);
        assert_eq!((decision.reason, chosen(&decision)), (Reason::TokenizerLoading, 1));
        assert_eq!(decision.uncached_tokens(), 300);
        assert!(decision.new_blocks().is_none());
    }

    #[test]
    fn the_header_lists_three_best_first() {
        let mut fleet = fleet(5);
        for (slot, tokens) in [(0, 40_000), (1, 10_000), (2, 20_000), (3, 30_000), (4, 0)] {
            let id = fleet.table.at(slot).unwrap().id;
            fleet.charges.start(id, tokens, fleet.now, Duration::from_secs(2));
        }
        assert_eq!(fleet.ask(&prompt(1, 600)).header(), "10.0.0.4:80, 10.0.0.1:80, 10.0.0.2:80");
    }

    #[test]
    fn sequential_requests_do_not_all_go_to_one_replica() {
        let mut fleet = fleet(4);
        let mut counts = [0u32; 4];
        for session in 0..200 {
            let mut tokens = prompt(0, 64);
            tokens.extend(prompt(session + 1, 400));
            let decision = fleet.ask(&tokens);
            fleet.apply(&decision);
            fleet.finish(&decision);
            counts[chosen(&decision) as usize] += 1;
            fleet.now = fleet.now.plus(Duration::from_millis(500));
        }
        assert!(counts.iter().all(|&count| count > 20), "{counts:?}");
    }

    #[test]
    fn a_stale_report_is_not_believed() {
        let mut fleet = fleet(2);
        let old = Moment::default();
        fleet.slot(0, |replica| {
            replica.load =
                Some(Load { running: 50, waiting: 50, kv_usage: Some(1.0), own: 0, at: old });
        });
        let stale = fleet.ask(&prompt(1, 600));
        let cost = stale.ranked.iter().find(|c| c.id.slot == 0).unwrap().cost;
        assert_eq!((cost.wait, cost.pressure), (0.0, 0.0));
    }

    #[test]
    fn replicas_with_different_block_sizes_are_compared_in_tokens() {
        let mut fleet = fleet(2);
        fleet.slot(1, |replica| replica.block_size = BlockSize::new(64));
        let tokens = prompt(1, 1000);
        for block_size in [16, 64] {
            let chain =
                Chain::new(ChainSeed::new("m", None), BlockSize::new(block_size).unwrap(), &tokens);
            let id = fleet.table.at(u32::from(block_size == 64)).unwrap().id;
            fleet.index.record(id, 1000, chain.hashes());
        }
        let decision = fleet.ask(&tokens);
        let overlap = |slot| {
            decision.ranked.iter().find(|c| c.id.slot == slot).map(|c| c.overlap_tokens).unwrap()
        };
        assert_eq!((overlap(0), overlap(1)), (992, 960));
    }

    #[test]
    fn replicas_that_claim_a_thousand_block_sizes_are_hashed_for_a_few() {
        let mut fleet = fleet(200);
        for slot in 0..200 {
            // Among them the smallest and the largest that can be claimed.
            let size = [1, u32::MAX, 16].get(slot as usize).copied().unwrap_or(17 + slot);
            fleet.slot(slot, |replica| replica.block_size = BlockSize::new(size));
        }
        let tokens = prompt(1, 1000);
        let seed = ChainSeed::new("m", None);
        let sizes = block_sizes(&fleet.config, &fleet.table, "pool");
        assert_eq!(sizes.len(), MAX_BLOCK_SIZES);
        let sixteen = Chain::new(seed, BlockSize::new(16).unwrap(), &tokens);
        let (holder, beyond) = (fleet.table.at(2).unwrap().id, fleet.table.at(199).unwrap().id);
        fleet.index.record(holder, 1000, sixteen.hashes());
        let decision = fleet.ask(&tokens);
        let chosen = decision.chosen().unwrap();
        assert_eq!((chosen.id, chosen.overlap_tokens), (holder, 992));
        // One beyond them can still be chosen, and nothing is recorded of it.
        for slot in 0..199 {
            fleet.slot(slot, |replica| replica.health = Health::Draining);
        }
        assert_eq!(fleet.ask(&tokens).chosen().unwrap().id, beyond);
    }

    #[test]
    fn what_is_imagined_goes_by_its_own_caches_and_queues() {
        let mut fleet = fleet(2);
        let (tokens, seed) = (prompt(1, 1000), ChainSeed::new("m", None));
        let [first, second] = [0, 1].map(|slot| fleet.table.at(slot).unwrap().id);
        let chain = Chain::new(seed, BlockSize::new(16).unwrap(), &tokens);
        fleet.index.record(first, 1000, chain.hashes());
        fleet.index.record(second.imagined(), 1000, &chain.hashes()[..50]);
        let choices = |fleet: &Fleet, policy| {
            let config = RouteConfig { policy, ..fleet.config.clone() };
            let prompt = PromptKnowledge::Tokens { tokens: &tokens, seed };
            let made = fleet.decide(prompt, 0);
            let imagined = fleet.with(prompt, 0, |view, question| imagine(&config, view, question));
            let overlap = |decision: &Decision| decision.chosen().unwrap().overlap_tokens;
            (chosen(&made), overlap(&made), chosen(&imagined), overlap(&imagined))
        };
        assert_eq!(choices(&fleet, Policy::PrefixOnly), (0, 992, 1, 800));
        fleet.charges.start(second.imagined(), 0, fleet.now, Duration::from_secs(5));
        assert_eq!(choices(&fleet, Policy::LeastLoaded), (0, 992, 0, 0));
        fleet.charges.start(first, 80_000, fleet.now, Duration::from_secs(5));
        assert_eq!(choices(&fleet, Policy::LeastLoaded), (1, 0, 0, 0));
    }

    #[test]
    fn an_explanation_names_each_ranked_replica_with_its_terms() {
        let text = fleet(2).ask(&prompt(1, 800)).explain();
        assert!(text.starts_with("reason=cold, prompt_tokens=800; replica=10.0.0."), "{text}");
        assert!(
            text.contains("overlap_tokens=0, overlap_source=routed, cost_s=0.1506, wait_s=0.0000, prefill_s=0.1004, late_s=0.0502"),
            "{text}"
        );
        assert_eq!(text.matches("replica=").count(), 2);
    }
}
