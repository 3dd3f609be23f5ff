//! What it costs to send a request to a replica, in seconds. The formula and nothing else.
//!
//! ```text
//! cost     = wait + prefill + late + stall + decode + pressure + eviction + adapter + transfer
//! wait     = base_s + (queued + recent_weight * done / busy) / rate + room
//! queued   = unfinished - computed + min(foreign, waiting) * mean_uncached
//! computed = the less of 0.9 * head and rate * since
//! busy     = (1 + in_flight) * (1 + 5 * neighbours)
//! room     = 0.5 * lasted * lacking / held
//! lacking  = queued + uncached - (capacity - held), at least 0 and at most what is held
//! prefill  = work / rate
//! work     = uncached * (1 + (prompt - uncached / 2) / attention_tokens)
//! late     = first * (1.5 * first / usual - 1)
//! first    = wait + prefill + adapter + transfer
//! usual    = usual_wait + base_s + what computing all of the prompt takes
//! stall    = neighbour_weight * (neighbours + later + grown) * prefill
//! later    = 0.1 / s * wait
//! grown    = 0.25 * answering / (usual_answering + 1 s)
//! decode   = (1 + neighbour_weight) * decoding * answer_tokens * decode_s_per_token
//! decoding = in_flight + foreign_weight * foreign, no more of those than are running
//! pressure = pressure_s * k / (1 - k)
//! eviction = eviction_weight * evicted * 2 ^ (-age / half-life) / rate
//! adapter  = adapter_load_s, where it must be loaded
//! transfer = offloaded / transfer_rate
//! ```
//!
//! `wait`, `prefill`, `late`, `adapter`, `transfer` and half of `decode` are this request's own time; `stall` and the
//! other half are what it takes from others, since every sequence of a batch waits for a prefill in
//! it; `eviction` is what it takes from those to come. A choice by own time alone leaves a prefix
//! as soon as another replica is free for a moment, and everybody pays: `warmpath-replay simulate
//! --seeds 3` computes 664,000 tokens a run with `--cost '{"neighbour_weight": 0}'` and 606,000
//! without.
//!
//! `stall` goes by the replica's share of the fleet's requests, not by the replica's own number of requests: it weighs
//! computing against not computing, and must not send a long prompt to where few requests are
//! but long ones wait. That is what `later` is for: whoever comes before a queue is through waits for
//! this prompt as well, and the longer both are, the more come. Without it long prompts queue behind
//! each other as readily as short ones do.
//!
//! A sum of seconds takes a long time of few for short ones of many: the mean gets better and the tail worse. So a second
//! before the first token counts the more, the later that token is beside what is usual: with `late` the four terms that
//! make `first` become 1.5 * first² / usual. Usual is what the request would take where nothing is cached, behind the fleet's
//! mean queue: what takes two thirds of that costs as many seconds as it takes.
//!
//! Answers that are on their way stand still while this prompt is computed. They are weighed in the same manner, each by how
//! long it has lasted beside what is usual, and count a quarter of what the neighbours do: whole answers and first tokens pull
//! apart. The router with the shortest whole answers goes to where fewest are answered, which makes first tokens wait half as
//! long again.
//!
//! | term | unit | source | missing, stale or absurd |
//! | --- | --- | --- | --- |
//! | `rate` | tokens/s | learned from the replica's streamed answers ([`crate::learn`]) | its cluster's median; where nobody was measured, the configured rate. Bounded when learned, and when read from another VM |
//! | `base_s` | s | learned: what a first token takes beside queue and prompt | the cluster's median; 0 |
//! | `unfinished` | tokens of work | prompts that any VM of this Envoy sent there and that have not begun to answer: the work of what is not cached | never missing |
//! | `head`, `since` | tokens of work, s | of those the prompt that was sent first, and the time since it was sent or since the last answer began there, whichever is later: engines compute prompts in the order in which they come. Not more than [`MOST_COMPUTED`] of it is taken to be done, since what is done answers: a replica that hangs does not seem to get through its queue | `computed` is 0 |
//! | `held` | tokens | reported KV usage, of `capacity`: those of requests that run, not what is only cached | not reported: no `room`; at least one, so that a report from before the queue came says that there is none behind it |
//! | `capacity` | tokens | reported: blocks, of the size that the replica reports | not reported: no `room` |
//! | `lasted` | s | for how long a request there has lasted, in the mean: an answer since it began, and one that has none yet half as long as the first of those; of others' it is not known, and they are taken to last as long. The sooner they end the sooner there is room, and how long they go on is what they have lasted, as far as one can tell | 0 |
//! | `usual_wait` | s | what is unfinished in the whole fleet, by what the fleet computes per second, and the mean of `adapter`: with its own in it a replica that must load would be the better place wherever first tokens are late | never missing |
//! | `answering` | s | for how long the answers to own requests that are on their way there have lasted, added up | never missing |
//! | `usual_answering` | s | for how long one of the fleet's has, in the mean | 0 where there is none |
//! | `foreign` | requests | the replica's running and waiting requests less our own, as many as are in flight now or were when it reported: what other gateways sent. A report outlives the requests in it: without the latter, our own that has just ended would pass for a stranger's until the next one | 0: own in-flight still counts. At most [`MAX_FOREIGN`] |
//! | `waiting` | requests | reported. Of what others sent, only that has its prompt before it: most of what runs decodes | 0 |
//! | `mean_uncached` | tokens | configured | - |
//! | `done` | tokens of work | what was sent there lately, halved every [`CostConfig::recent_half_life`], less the unfinished: when requests come one by one nothing is in flight, and this alone keeps one replica from taking all of them. Where requests are in flight they say more (`RECENT_FADES`) | never missing |
//! | `neighbours` | requests | the replica's share of all that are in flight, by its `rate`: the mean, where all are equally fast. At the mean, one that is half as fast would be charged twice as much for neighbours of whom it has half | never missing |
//! | `later` | requests | 0.1 for each second of `wait` | as `wait` |
//! | `decoding` | requests | own in flight, and a share ([`FOREIGN_WEIGHT`]) of the reported running requests that are foreign | own in-flight alone |
//! | `answer_tokens` | tokens | the request's own limit, at most the configured mean | the mean |
//! | `decode_s_per_token` | s | learned from the gaps of streamed answers, at least half of the configured | as `rate` |
//! | `k` | share | reported KV usage, clamped to [`MAX_KV_USAGE`] | 0, no pressure: an unknown replica is neither idle nor full in the other terms |
//! | `evicted` | tokens | of the blocks that are new to the replica, those beyond what its shadow has room for. Each may be missed by whoever comes back for it: `eviction_weight` is how many are of those just used, the less the longer ago that was | 0: nothing is known to be held |
//! | `adapter` | s | the adapters that the replica's last reports named as running or waiting, as many as it has places for | 0: one that does not report adapters is taken to have it |
//! | `offloaded` | tokens | of the cached ones, those of blocks that the replica's agent has in a slower tier only | 0 |
//! | `transfer_rate` | tokens/s | configured | - |
//!
//! Each signal degrades alone. With no report from anywhere the cost still orders replicas by
//! cache overlap and by the work this Envoy itself has in flight.
//!
//! Blocks that only a slower tier holds are cached as those in the accelerator's memory are, and take their transfer besides.
//! Only an agent says in which tier a block is; what is known without one is taken to be at hand.

use crate::learn::Speed;
use std::time::Duration;

/// KV usage is clamped here. At 0.98 the pressure term is 49 times its coefficient; nearer to 1 a
/// rounding step of the gauge would decide between replicas.
pub const MAX_KV_USAGE: f64 = 0.98;

/// More requests of others are not believed: no engine queues so many, and a replica that claims four billion would have
/// a cost beside which every other difference vanishes.
pub const MAX_FOREIGN: f64 = 10_000.0;

/// How much a foreign request that decodes counts. A report is of one moment, and all gateways act on it alike until the
/// next: counted whole, they leave a replica together, and their prefixes with it: the less it is, the earlier the first
/// tokens of four gateways in `threads_and_gateways_do_as_well_as_one`. Not 0, since a client that is no gateway may keep a
/// replica busy for long.
pub const FOREIGN_WEIGHT: f64 = 0.02;

/// The least share of the configured seconds per token and neighbour that is believed to have been learned: noise makes
/// a slope of 0 now and then, and where all is cached everywhere one replica would then get everything.
const LEAST_DECODE: f64 = 0.5;

/// Blocks that nobody has used for this long are missed half as often as those just used. Turns of a conversation are
/// seconds to minutes apart: halved, a person's next question is not provided for; doubled, what is over for good counts.
const EVICTED_HALF_LIFE_S: f64 = 120.0;

/// Requests that come to a replica while it works off a second of its queue and are served behind it: fewer than come in
/// all, since most are sent where nothing waits. Without it Mooncake's p99 first token is 5 % later in the mean of eight
/// cells, and with caches of a tenth at high load a fifth above the best router's; doubled, it is no better.
const LATER_PER_S: f64 = 0.1;

/// The most of a prompt that is computed before its answer begins. At 1 a replica that hangs seems to be free of it;
/// halved, a long prompt that is nearly through keeps others away.
pub const MOST_COMPUTED: f64 = 0.9;

/// How much less what was sent lately counts for each request in flight on a replica, in the fleet's mean: it is for requests
/// that come one by one, and beside queues it is noise. At 0 both of Mooncake's p99s are 1.5 % later in the mean of fifteen
/// cells, and two of these are more than a tenth above the best router's in place of one.
const RECENT_FADES: f64 = 5.0;

/// What the seconds of a first token that takes as long as is usual count. At 1 Mooncake's p99 first token is 2.5 % later in the
/// mean of fifteen cells and six seeds; at 2 it is 1.7 % earlier and the p99 answer 1 % later, and a prefix that is too much
/// for one replica loads one to 1.29 times the mean.
const LATENESS: f64 = 1.5;

/// Share of the forecast wait for room that is believed. Requests end in no order, and the report is of a moment ago. At 0 the
/// agents' p99 first token with caches of a tenth is 13 % above the best router's at 95 % of the load and nine seeds, at 0.5 half a
/// per cent; at 0.7 what is won in one cell is lost in another.
const ROOM_WEIGHT: f64 = 0.5;

/// A first token within this is late for nobody. Without it a prompt of no known length, on a fleet that seems idle, makes any
/// wait infinitely late; prompts of a hundred tokens and more are usually beyond it.
const LEAST_USUAL_S: f64 = 0.01;

/// What a second counts that is lost by an answer under way which has lasted as long as is usual. Halved, Mooncake's p99 first
/// token is 2 % earlier in the mean of fifteen cells and six seeds, and its p99 answer 2 % later; doubled, 3 % later and 1 %
/// earlier. The agents' p99 first token is 2 and 3 % later.
const ANSWERING_WEIGHT: f64 = 0.25;

/// Added to what is usual, so that where all answers have just begun one that is a tenth of a second older does not count ten
/// times as much. It is far under what answers last where there are many.
const LEAST_ANSWERING_S: f64 = 1.0;

/// The formula's coefficients. All are finite and none is negative; the two that are divided by, a rate and `attention_tokens`,
/// are at least 1. The configuration sees to that.
#[derive(Debug, Clone, PartialEq)]
pub struct CostConfig {
    /// Prompt tokens that a replica computes per second.
    pub prefill_tokens_per_s: f64,
    /// Prompt length at which attention costs as much as everything else in a prefill.
    pub attention_tokens: f64,
    /// Uncached tokens assumed of a request that somebody else sent.
    pub mean_uncached_tokens: f64,
    /// Answer length assumed where the request gives no smaller limit.
    pub mean_answer_tokens: f64,
    /// Seconds that one sequence already decoding there adds to each token of this answer.
    pub decode_s_per_token: f64,
    /// How much a second that this request costs another one there counts against a second of
    /// its own.
    pub neighbour_weight: f64,
    /// Seconds of pressure at half-full KV cache.
    pub pressure_s: f64,
    /// Share of the recently sent uncached tokens that counts as waiting.
    pub recent_weight: f64,
    /// How long until recently sent tokens count half.
    pub recent_half_life: Duration,
    /// Share of the evicted tokens that somebody will have computed again.
    pub eviction_weight: f64,
    /// Seconds until an adapter that is not loaded is.
    pub adapter_load_s: f64,
    /// Tokens per second that a replica fetches from a slower tier than its accelerator's memory.
    pub transfer_tokens_per_s: f64,
}

impl Default for CostConfig {
    fn default() -> Self {
        Self {
            prefill_tokens_per_s: 8000.0,
            attention_tokens: 100_000.0,
            mean_uncached_tokens: 512.0,
            mean_answer_tokens: 128.0,
            decode_s_per_token: 0.000_15,
            neighbour_weight: 1.0,
            pressure_s: 0.01,
            recent_weight: 0.1,
            recent_half_life: Duration::from_secs(5),
            eviction_weight: 0.1,
            adapter_load_s: 0.1,
            transfer_tokens_per_s: 100_000.0,
        }
    }
}

/// What is known of the request and one replica.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Signals {
    /// All tokens of the prompt.
    pub prompt_tokens: f64,
    /// Those that the replica would take from its cache.
    pub cached_tokens: f64,
    /// Those of them that it must fetch from a slower tier first.
    pub offloaded_tokens: f64,
    /// Most tokens the answer may have, if the request says so.
    pub answer_limit: Option<f64>,
    /// Own requests in flight there, over all VMs.
    pub in_flight: f64,
    /// Own requests there whose answer is on its way.
    pub answering: f64,
    /// For how long those answers have lasted, in seconds, together.
    pub answering_s: f64,
    /// For how long one of the fleet's has, on average.
    pub usual_answering_s: f64,
    /// For how long own requests have been there, in seconds, together.
    pub lasted_s: f64,
    /// Seconds of own work before a replica of the fleet and of loading the adapter there, on average.
    pub usual_wait_s: f64,
    /// Requests in flight on one replica of the fleet, on average.
    pub neighbours: f64,
    /// Work, in tokens, of those whose answer has not begun.
    pub unfinished_tokens: f64,
    /// What of it is probably done.
    pub computed_tokens: f64,
    /// Work sent there lately, decayed.
    pub recent_tokens: f64,
    /// Reported running and waiting requests, if a fresh report exists.
    pub reported: Option<(f64, f64)>,
    /// Own requests that were in flight when that report was made.
    pub reported_own: f64,
    /// Reported KV usage, if fresh.
    pub kv_usage: Option<f64>,
    /// Tokens that its KV cache has room for, if it has said so.
    pub capacity_tokens: Option<f64>,
    /// How fast the replica is.
    pub speed: Speed,
    /// Tokens in blocks that it would evict.
    pub evicted_tokens: f64,
    /// How long ago those were used.
    pub evicted_age_s: f64,
    /// Whether the request's adapter must be loaded first.
    pub loads_adapter: bool,
}

/// The cost, term by term, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Until the replica begins with this prompt.
    pub wait: f64,
    /// Computing what is not cached.
    pub prefill: f64,
    /// What the first token's being late counts beside its seconds.
    pub late: f64,
    /// What computing it costs the answers under way meanwhile.
    pub stall: f64,
    /// What this answer and the ones already there cost each other.
    pub decode: f64,
    /// What a nearly full KV cache risks (preemption, queueing for blocks).
    pub pressure: f64,
    /// Computing again what its blocks push out.
    pub eviction: f64,
    /// Loading its adapter.
    pub adapter: f64,
    /// Fetching what is cached in a slower tier.
    pub transfer: f64,
}

impl Cost {
    /// The sum of the terms: what a choice goes by.
    pub fn total(&self) -> f64 {
        self.seconds() + self.late
    }

    /// The seconds that it takes of this request and of others, each counted once.
    pub fn seconds(&self) -> f64 {
        self.wait + self.to_do() + self.stall + self.decode + self.pressure + self.eviction
    }

    /// What of it passes before the first token.
    pub fn first_token(&self) -> f64 {
        self.wait + self.to_do()
    }

    /// What of that is this prompt's own.
    pub fn to_do(&self) -> f64 {
        self.prefill + self.adapter + self.transfer
    }
}

impl Speed {
    /// Prompt tokens that it computes per second, as learned or configured.
    pub fn rate(&self, config: &CostConfig) -> f64 {
        self.prefill_tokens_per_s.unwrap_or(config.prefill_tokens_per_s)
    }
}

impl Signals {
    /// Tokens of the prompt that the replica must compute, longer attention counted as more of them.
    pub fn work(&self, config: &CostConfig) -> f64 {
        self.work_of(config, self.uncached())
    }

    /// The same of as many tokens at its end.
    fn work_of(&self, config: &CostConfig, uncached: f64) -> f64 {
        uncached * (1.0 + (self.prompt_tokens - uncached / 2.0) / config.attention_tokens)
    }

    fn uncached(&self) -> f64 {
        (self.prompt_tokens - self.cached_tokens).max(0.0)
    }

    /// Work in front of it.
    pub fn queued(&self, config: &CostConfig) -> f64 {
        let (_, waiting) = self.reported.unwrap_or_default();
        (self.unfinished_tokens - self.computed_tokens).max(0.0)
            + self.foreign().min(waiting) * config.mean_uncached_tokens
    }

    /// Requests there that somebody else sent, as far as it reports.
    pub fn foreign(&self) -> f64 {
        let (running, waiting) = self.reported.unwrap_or_default();
        let own = self.in_flight.max(self.reported_own);
        (running + waiting - own).clamp(0.0, MAX_FOREIGN)
    }

    /// Until requests that run there have ended whose room the queue and this one need.
    fn room_wait(&self, config: &CostConfig) -> f64 {
        let (Some(capacity), Some(usage)) = (self.capacity_tokens, self.kv_usage) else {
            return 0.0;
        };
        let held = (usage.clamp(0.0, 1.0) * capacity).max(1.0);
        let needed = self.queued(config) + self.uncached();
        let lacking = (needed - (capacity - held)).clamp(0.0, held);
        let lasted = self.lasted_s / self.in_flight.max(1.0);
        ROOM_WEIGHT * lasted * lacking / held
    }

    fn decoding(&self) -> f64 {
        let (running, _) = self.reported.unwrap_or_default();
        self.in_flight + FOREIGN_WEIGHT * self.foreign().min(running)
    }
}

/// Its term of that name.
pub fn eviction(config: &CostConfig, speed: &Speed, evicted_tokens: f64, age_s: f64) -> f64 {
    // Most replicas have room, and a power takes as long as all the rest.
    if evicted_tokens == 0.0 {
        return 0.0;
    }
    let missed = evicted_tokens * (-age_s / EVICTED_HALF_LIFE_S).exp2();
    config.eviction_weight * missed / speed.rate(config)
}

/// The formula.
// Called for every replica of a choice, which natively takes a tenth less for it; a VM's compiler makes no more of it.
#[cfg_attr(not(target_family = "wasm"), inline(always))]
pub fn cost(config: &CostConfig, signals: &Signals) -> Cost {
    let Speed { decode_s_per_token, base_s, .. } = signals.speed;
    let rate = signals.speed.rate(config);
    let learned = decode_s_per_token.unwrap_or(config.decode_s_per_token);
    let decode_s_per_token = learned.max(LEAST_DECODE * config.decode_s_per_token);
    let done = (signals.recent_tokens - signals.unfinished_tokens).max(0.0);
    let busy = (1.0 + signals.in_flight) * (1.0 + RECENT_FADES * signals.neighbours);
    let recent = config.recent_weight * done / busy;
    let wait = base_s + (signals.queued(config) + recent) / rate + signals.room_wait(config);
    let prefill = signals.work(config) / rate;
    let adapter = if signals.loads_adapter { config.adapter_load_s } else { 0.0 };
    let transfer =
        signals.offloaded_tokens.min(signals.cached_tokens) / config.transfer_tokens_per_s;
    let first_token = wait + (prefill + adapter + transfer);
    let whole = signals.work_of(config, signals.prompt_tokens) / rate;
    let usual = signals.usual_wait_s + base_s + whole;
    let late = first_token * (LATENESS * first_token / usual.max(LEAST_USUAL_S) - 1.0);
    let answering = signals.answering_s / (signals.usual_answering_s + LEAST_ANSWERING_S);
    let stalled = config.neighbour_weight
        * (signals.neighbours + LATER_PER_S * wait + ANSWERING_WEIGHT * answering);
    let answer = signals.answer_limit.unwrap_or(f64::INFINITY).min(config.mean_answer_tokens);
    let slowed = signals.decoding() * answer * decode_s_per_token;
    let usage = signals.kv_usage.unwrap_or(0.0).clamp(0.0, MAX_KV_USAGE);
    Cost {
        wait,
        prefill,
        late,
        stall: stalled * prefill,
        decode: (1.0 + config.neighbour_weight) * slowed,
        pressure: config.pressure_s * usage / (1.0 - usage),
        eviction: eviction(config, &signals.speed, signals.evicted_tokens, signals.evicted_age_s),
        adapter,
        transfer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> CostConfig {
        CostConfig {
            prefill_tokens_per_s: 1000.0,
            attention_tokens: 10_000.0,
            mean_uncached_tokens: 500.0,
            mean_answer_tokens: 100.0,
            decode_s_per_token: 0.001,
            neighbour_weight: 0.0,
            pressure_s: 0.15,
            recent_weight: 0.1,
            recent_half_life: Duration::from_secs(5),
            eviction_weight: 0.5,
            adapter_load_s: 0.2,
            transfer_tokens_per_s: 20_000.0,
        }
    }

    #[track_caller]
    fn check(signals: Signals, term: fn(&Cost) -> f64, expected: f64) {
        let cost = cost(&config(), &signals);
        assert!((term(&cost) - expected).abs() < 1e-9, "{cost:?}, expected {expected}");
    }

    #[test]
    fn an_idle_replica_costs_the_prefill_alone() {
        let signals = Signals { prompt_tokens: 1000.0, ..Signals::default() };
        check(signals, |cost| cost.prefill, 1.05);
        check(signals, Cost::seconds, 1.05);
        check(signals, Cost::total, LATENESS * 1.05);
    }

    #[test]
    fn computing_stalls_the_answers_under_way_and_a_hit_does_not() {
        let config = CostConfig { neighbour_weight: 0.5, ..config() };
        let cold = Signals { prompt_tokens: 1000.0, neighbours: 4.0, ..Signals::default() };
        assert!((cost(&config, &cold).stall - 2.1).abs() < 1e-9);
        let warm = Signals { cached_tokens: 1000.0, ..cold };
        assert_eq!(cost(&config, &warm).stall, 0.0);
    }

    #[test]
    fn a_prompt_in_a_queue_stalls_those_who_come_before_it_is_through() {
        let config = CostConfig { neighbour_weight: 0.5, ..config() };
        let queued = Signals {
            prompt_tokens: 1000.0,
            neighbours: 4.0,
            unfinished_tokens: 20_000.0,
            ..Signals::default()
        };
        assert!((cost(&config, &queued).stall - 0.5 * (4.0 + 2.0) * 1.05).abs() < 1e-9);
    }

    #[test]
    fn an_answer_slows_its_neighbours_as_they_slow_it() {
        let config = CostConfig { neighbour_weight: 1.0, ..config() };
        let signals = Signals { in_flight: 2.0, ..Signals::default() };
        assert!((cost(&config, &signals).decode - 0.4).abs() < 1e-9);
    }

    #[test]
    fn cached_tokens_cost_nothing_but_their_attention() {
        let signals =
            Signals { prompt_tokens: 10_000.0, cached_tokens: 9_000.0, ..Signals::default() };
        check(signals, |cost| cost.prefill, 1.0 + 0.95);
    }

    #[test]
    fn what_is_cached_in_a_slower_tier_is_fetched() {
        let held = Signals { prompt_tokens: 9000.0, cached_tokens: 9000.0, ..Signals::default() };
        let offloaded = Signals { offloaded_tokens: 8000.0, ..held };
        check(held, Cost::seconds, 0.0);
        check(offloaded, Cost::seconds, 0.4);
        check(offloaded, Cost::first_token, 0.4);
        // Less is cached than was thought.
        check(Signals { cached_tokens: 1000.0, ..offloaded }, |cost| cost.transfer, 0.05);
    }

    #[test]
    fn waiting_is_what_was_sent_and_has_not_answered() {
        let signals = Signals { unfinished_tokens: 3000.0, in_flight: 2.0, ..Signals::default() };
        check(signals, |cost| cost.wait, 3.0);
    }

    #[test]
    fn what_is_computed_of_a_queue_is_not_waited_for() {
        let queue = Signals { unfinished_tokens: 3000.0, in_flight: 2.0, ..Signals::default() };
        check(Signals { computed_tokens: 1000.0, ..queue }, |cost| cost.wait, 2.0);
        check(Signals { computed_tokens: 9000.0, ..queue }, |cost| cost.wait, 0.0);
    }

    #[test]
    fn where_requests_are_in_flight_what_was_sent_lately_hardly_counts() {
        let idle = Signals { recent_tokens: 10_000.0, ..Signals::default() };
        check(idle, |cost| cost.wait, 1.0);
        check(Signals { neighbours: 3.8, ..idle }, |cost| cost.wait, 0.05);
        check(Signals { neighbours: 3.8, in_flight: 4.0, ..idle }, |cost| cost.wait, 0.01);
    }

    #[test]
    fn an_answer_counts_by_how_long_it_has_lasted_beside_others() {
        let config = CostConfig { neighbour_weight: 1.0, ..config() };
        let stall = |signals| cost(&config, &signals).stall;
        let cold = Signals { prompt_tokens: 1000.0, answering_s: 8.0, ..Signals::default() };
        assert_eq!(stall(cold), ANSWERING_WEIGHT * 8.0 * 1.05);
        assert_eq!(
            stall(Signals { usual_answering_s: 3.0, ..cold }),
            ANSWERING_WEIGHT * 2.0 * 1.05
        );
        assert_eq!(stall(Signals { cached_tokens: 1000.0, ..cold }), 0.0);
    }

    #[test]
    fn a_first_token_counts_by_its_square_beside_what_is_usual() {
        let own = |cost: &Cost| cost.first_token() + cost.late;
        let cold = Signals { prompt_tokens: 1000.0, ..Signals::default() };
        let half = Signals { cached_tokens: 1000.0, unfinished_tokens: 525.0, ..cold };
        check(cold, own, LATENESS * 1.05);
        check(half, own, LATENESS * 1.05 / 4.0);
        let late = Signals { unfinished_tokens: 2100.0, ..cold };
        check(late, own, LATENESS * 9.0 * 1.05);
        check(Signals { usual_wait_s: 2.1, ..late }, own, LATENESS * 3.0 * 1.05);
        check(Signals { prompt_tokens: 0.0, ..late }, own, LATENESS * 2.1 * 2.1 / LEAST_USUAL_S);
    }

    #[test]
    fn a_full_cache_is_waited_for_as_long_as_what_is_there_has_lasted() {
        let full = Signals {
            prompt_tokens: 1000.0,
            cached_tokens: 600.0,
            capacity_tokens: Some(10_000.0),
            kv_usage: Some(0.8),
            in_flight: 4.0,
            lasted_s: 80.0,
            ..Signals::default()
        };
        check(full, |cost| cost.wait, 0.0);
        // Two seconds of queue, and with what it takes 400 tokens too many of the 8,000 that are held.
        let queue = Signals { unfinished_tokens: 2000.0, ..full };
        check(queue, |cost| cost.wait, 2.0 + ROOM_WEIGHT * 20.0 * 0.05);
        // Half of those that run are others', which may last as long.
        let shared = Signals { reported: Some((8.0, 0.0)), ..queue };
        check(shared, |cost| cost.wait, 2.0 + ROOM_WEIGHT * 20.0 * 0.05);
        // No more ends than there is.
        let small = Signals { capacity_tokens: Some(500.0), ..queue };
        check(small, |cost| cost.wait, 2.0 + ROOM_WEIGHT * 20.0);
        for unknown in [
            Signals { kv_usage: None, ..queue },
            Signals { capacity_tokens: None, ..queue },
            Signals { lasted_s: 0.0, ..queue },
        ] {
            check(unknown, |cost| cost.wait, 2.0);
        }
        for absurd in [0.0, 1.0, 7.0, -1.0, f64::NAN] {
            let wait = cost(&config(), &Signals { kv_usage: Some(absurd), ..queue }).wait;
            assert!((2.0..2.0 + ROOM_WEIGHT * 20.0 + 1e-9).contains(&wait), "{absurd}: {wait}");
        }
    }

    #[test]
    fn loading_and_fetching_are_part_of_the_first_tokens_lateness() {
        let cached = Signals {
            prompt_tokens: 1000.0,
            cached_tokens: 1000.0,
            offloaded_tokens: 1000.0,
            ..Signals::default()
        };
        let fetched = cost(&config(), &cached).transfer;
        check(cached, |cost| cost.late, fetched * (LATENESS * fetched / 1.05 - 1.0));
        let loads = Signals { loads_adapter: true, ..Signals { offloaded_tokens: 0.0, ..cached } };
        check(loads, |cost| cost.late, 0.2 * (LATENESS * 0.2 / 1.05 - 1.0));
        check(
            Signals { usual_wait_s: 0.2, ..loads },
            |cost| cost.late,
            0.2 * (LATENESS * 0.2 / 1.25 - 1.0),
        );
    }

    #[test]
    fn own_requests_in_a_report_are_not_counted_twice() {
        let own = Signals { in_flight: 4.0, reported: Some((3.0, 1.0)), ..Signals::default() };
        check(own, |cost| cost.wait, 0.0);
        let foreign = Signals { in_flight: 1.0, ..own };
        check(foreign, |cost| cost.wait, 0.5);
    }

    #[test]
    fn what_others_have_running_has_its_prompt_behind_it() {
        let running = Signals { reported: Some((8.0, 0.0)), ..Signals::default() };
        check(running, |cost| cost.wait, 0.0);
        let waiting = Signals { reported: Some((8.0, 2.0)), ..running };
        check(waiting, |cost| cost.wait, 1.0);
    }

    #[test]
    fn own_requests_that_ended_after_the_report_are_nobody_elses() {
        let ended = Signals { reported: Some((3.0, 1.0)), reported_own: 4.0, ..Signals::default() };
        check(ended, Cost::total, 0.0);
        let foreign = Signals { reported_own: 1.0, ..ended };
        check(foreign, |cost| cost.wait, 0.5);
        check(foreign, |cost| cost.decode, 0.1 * 3.0 * FOREIGN_WEIGHT);
    }

    #[test]
    fn a_missing_report_is_not_a_full_replica_nor_hides_own_requests() {
        let signals = Signals { in_flight: 2.0, unfinished_tokens: 100.0, ..Signals::default() };
        check(signals, |cost| cost.pressure, 0.0);
        check(signals, |cost| cost.wait, 0.1);
        check(signals, |cost| cost.decode, 0.2);
    }

    #[test]
    fn pressure_rises_steeply_and_stays_finite() {
        let at = |usage| Signals { kv_usage: Some(usage), ..Signals::default() };
        check(at(0.5), |cost| cost.pressure, 0.15);
        check(at(1.0), |cost| cost.pressure, 0.15 * 49.0);
        check(at(7.0), |cost| cost.pressure, 0.15 * 49.0);
    }

    #[test]
    fn a_short_answer_suffers_less_from_who_is_decoding() {
        let signals = Signals { in_flight: 10.0, answer_limit: Some(10.0), ..Signals::default() };
        check(signals, |cost| cost.decode, 0.1);
        check(Signals { answer_limit: Some(1e6), ..signals }, |cost| cost.decode, 1.0);
    }

    #[test]
    fn unfinished_tokens_are_not_counted_again_as_recent() {
        let signals =
            Signals { unfinished_tokens: 900.0, recent_tokens: 1000.0, ..Signals::default() };
        check(signals, |cost| cost.wait, 0.91);
    }

    #[test]
    fn sequential_requests_are_felt_after_they_are_done() {
        check(Signals { recent_tokens: 1000.0, ..Signals::default() }, |cost| cost.wait, 0.1);
    }

    #[test]
    fn a_replica_goes_by_its_own_speed() {
        let speed = Speed {
            prefill_tokens_per_s: Some(500.0),
            decode_s_per_token: Some(0.002),
            base_s: 0.05,
            ..Speed::default()
        };
        let signals = Signals {
            prompt_tokens: 1000.0,
            unfinished_tokens: 100.0,
            in_flight: 1.0,
            speed,
            ..Signals::default()
        };
        check(signals, |cost| cost.prefill, 2.1);
        check(signals, |cost| cost.wait, 0.25);
        check(signals, |cost| cost.decode, 0.2);
    }

    #[test]
    fn what_is_pushed_out_and_an_adapter_that_is_not_there_cost_seconds() {
        let signals = Signals { evicted_tokens: 300.0, loads_adapter: true, ..Signals::default() };
        let old = Signals { evicted_age_s: EVICTED_HALF_LIFE_S, ..signals };
        check(old, |cost| cost.eviction, 0.075);
        check(signals, |cost| cost.eviction, 0.15);
        check(signals, |cost| cost.adapter, 0.2);
        check(signals, Cost::seconds, 0.35);
    }

    #[test]
    fn a_replica_that_claims_billions_of_requests_is_not_believed() {
        let signals =
            Signals { reported: Some((4e9, 4e9)), kv_usage: Some(1.0), ..Signals::default() };
        check(signals, |cost| cost.wait, 5000.0);
    }
}
