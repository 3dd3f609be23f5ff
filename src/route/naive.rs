//! The decision as one would first write it: everything in full, asked of each replica by itself, and sorted.
//!
//! What [`super::decide`] leaves out, walks once or keeps in short must not change any decision, so seeded fleets are
//! asked both.

use super::tests::{Fleet, fleet, prompt};
use super::*;
use crate::learn::Speed;
use crate::replicas::models::Served;
use crate::replicas::strikes::{PassiveHealth, Proof};
use crate::replicas::{Health, Load, Member};
use crate::score::{self, Signals};
use crate::tokens::blocks::Chains;

/// One replica, with all that may be asked of it.
struct Whole<'a> {
    replica: &'a Replica,
    block_size: BlockSize,
    candidate: Candidate,
}

impl Whole<'_> {
    fn total(&self) -> f64 {
        self.candidate.cost.total()
    }

    fn requests(&self) -> f64 {
        self.candidate.signals.in_flight + self.candidate.signals.foreign()
    }

    fn drawn(&self, key: u64) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(self.replica.address.as_bytes(), key)
    }

    fn rendezvous(&self, chains: &[Chain], number: u64) -> u64 {
        let chain = chains.iter().find(|chain| chain.block_size() == self.block_size);
        self.drawn(chain.and_then(|chain| chain.block_at(2048)).map_or(number, |head| head.0))
    }
}

fn decide(config: &RouteConfig, view: &View<'_>, question: &Question<'_>) -> Decision {
    let known: Vec<&Replica> = view.table.in_cluster(question.cluster).collect();
    if known.is_empty() {
        return Decision::unrouted(Reason::NoReplicas);
    }
    let mut able: Vec<&Replica> =
        known.into_iter().filter(|replica| replica.health == Health::Healthy).collect();
    if able.is_empty() {
        return Decision::unrouted(Reason::NoHealthyReplica);
    }
    if !question.model_names.is_empty() {
        let says = |says: Option<bool>| -> Vec<&Replica> {
            let says = |r: &&Replica| r.serves(question.model_names) == says;
            able.iter().copied().filter(says).collect()
        };
        able =
            [says(Some(true)), says(None)].into_iter().find(|v| !v.is_empty()).unwrap_or_default();
    }
    if able.is_empty() {
        return Decision::unrouted(Reason::ModelNotServed);
    }
    let bars = |replica: &&Replica| view.strikes.of(replica.id).bars(view.now);
    let (suspended, free): (Vec<&Replica>, Vec<&Replica>) = able.iter().copied().partition(bars);
    let (mut able, suspended) =
        if free.is_empty() { (able, Vec::new()) } else { (free, suspended) };
    let priority = able.iter().map(|replica| replica.priority).min().unwrap();
    able.retain(|replica| replica.priority == priority);

    let (chains, prompt_tokens) = match question.prompt {
        PromptKnowledge::Hashed { prompt_tokens, chains } => (chains.to_vec(), prompt_tokens),
        PromptKnowledge::Tokens { tokens, seed } => {
            let sizes = sizes(config, able.iter().copied());
            let chains = sizes.into_iter().map(|size| Chain::new(seed, size, tokens)).collect();
            (chains, tokens.len() as u32)
        }
        PromptKnowledge::Unknown { estimated_tokens, .. } => (Vec::new(), estimated_tokens),
    };
    let in_flight: u32 = able.iter().map(|r| view.charges.of(r.id).requests).sum();
    let rates: f64 = able.iter().map(|replica| rate(config, view, replica)).sum();
    let charges = || able.iter().map(|replica| view.charges.of(replica.id));
    let unfinished: f64 = charges().map(|charge| charge.unfinished_tokens as f64).sum();
    let answering: u32 = charges().map(|charge| charge.answering).sum();
    let lasted: f64 = charges().map(|charge| charge.answering_s(view.now)).sum();
    let loads = |replica: &&&Replica| question.adapter.is_some_and(|a| replica.must_load(a));
    let loading = able.iter().filter(loads).count() as f64 / able.len() as f64;
    let usual = [
        f64::from(in_flight) / rates,
        unfinished / rates + loading * config.cost.adapter_load_s,
        lasted / f64::from(answering.max(1)),
    ];
    let weigh = |replica| whole(config, view, question, replica, (&chains, prompt_tokens), usual);
    let mut all: Vec<Whole<'_>> = able.into_iter().map(weigh).collect();
    let share = (f64::from(in_flight) + 1.0) / all.len() as f64;
    let bound = (share * 1.25).ceil();
    relieve(config, &mut all, (share * 1.15).ceil());
    if let Some(retry_after_s) = overloaded(config, question, &all, &chains) {
        let refused = Decision::unrouted(Reason::Overloaded);
        return Decision { retry_after_s: Some(retry_after_s), ..refused };
    }
    let best_overlap = all.iter().map(|w| w.candidate.overlap_tokens).max().unwrap();
    let session = question.session.filter(|_| !question.prompt.is_matched());
    sort(config, &mut all, bound, (&chains, session), question.tie_seed);

    let mut rivals = Rivals::default();
    let others = &all[1..];
    let least = others.iter().min_by(|a, b| a.total().total_cmp(&b.total()));
    rivals.least = least.map(|least| (least.total(), least.candidate.cost.seconds()));
    rivals.overlap_tokens = others.iter().map(|w| w.candidate.overlap_tokens).max().unwrap_or(0);
    if rivals.overlap_tokens > 0 {
        let holders = others.iter().filter(|w| w.candidate.overlap_tokens == rivals.overlap_tokens);
        rivals.holder_cost = holders.map(Whole::total).min_by(f64::total_cmp).unwrap();
    }
    let weigh = |replica| whole(config, view, question, replica, (&chains, prompt_tokens), usual);
    let had = suspended.iter().map(|replica| weigh(replica).candidate.overlap_tokens);
    rivals.suspended_overlap_tokens = had.max().unwrap_or(0);

    let chain = chains.into_iter().find(|chain| chain.block_size() == all[0].block_size);
    let reason = match (question.prompt, &chain, all[0].candidate.overlap_tokens) {
        (PromptKnowledge::Unknown { reason, .. }, ..) => reason,
        (_, Some(chain), _) if chain.hashes().is_empty() && chain.is_open() => {
            Reason::UnsupportedPrompt
        }
        (_, Some(chain), _) if chain.hashes().is_empty() => Reason::ShortPrompt,
        (_, _, 0) if best_overlap == 0 => Reason::Cold,
        (_, _, 0) => Reason::PrefixBusy,
        _ => Reason::Prefix,
    };
    let ranked = all.into_iter().take(3).map(|whole| whole.candidate).collect();
    let suspended = suspended.len();
    let is_matched = chain.is_some();
    let known_tokens = chain.as_ref().filter(|chain| chain.is_open()).map(Chain::token_count);
    Decision {
        reason,
        ranked,
        chain,
        is_matched,
        known_tokens,
        prompt_tokens,
        suspended,
        rivals,
        retry_after_s: None,
    }
}

fn rate(config: &RouteConfig, view: &View<'_>, replica: &Replica) -> f64 {
    let learned = view.rates.of(replica.id).prefill_tokens_per_s;
    learned.unwrap_or(config.cost.prefill_tokens_per_s)
}

fn whole<'a>(
    config: &RouteConfig,
    view: &View<'_>,
    question: &Question<'_>,
    replica: &'a Replica,
    (chains, prompt_tokens): (&[Chain], u32),
    [neighbours_per_rate, usual_wait_s, usual_answering_s]: [f64; 3],
) -> Whole<'a> {
    let block_size = replica.block_size.unwrap_or(config.default_block_size);
    let chain = chains.iter().find(|chain| chain.block_size() == block_size);
    let held_blocks = chain.map_or(0, |c| view.index.overlap_blocks(replica.id, c.hashes()));
    let reusable = chain.map_or(0, |chain| held_blocks.min(chain.reusable_blocks()));
    let overlap_tokens = (reusable as u32).saturating_mul(block_size.get());
    let new_blocks = chain.map_or(0, |chain| chain.hashes().len() - held_blocks);
    let evicted = view.index.would_evict(replica.id, new_blocks);
    let charge = view.charges.of(replica.id);
    let load = replica.fresh_load(view.now, config.stale_after);
    let signals = Signals {
        prompt_tokens: f64::from(prompt_tokens),
        cached_tokens: f64::from(overlap_tokens),
        // No replica here has a slower tier.
        offloaded_tokens: 0.0,
        answer_limit: question.answer_limit.map(f64::from),
        neighbours: neighbours_per_rate * rate(config, view, replica),
        in_flight: f64::from(charge.requests),
        answering: f64::from(charge.answering),
        answering_s: charge.answering_s(view.now),
        usual_answering_s,
        lasted_s: {
            let unbegun = f64::from(charge.requests.saturating_sub(charge.answering));
            let first = match charge.head.tokens {
                0 => 0.0,
                _ => view.now.since(charge.head.sent).as_secs_f64(),
            };
            charge.answering_s(view.now) + unbegun * first / 2.0
        },
        usual_wait_s,
        unfinished_tokens: charge.unfinished_tokens as f64,
        computed_tokens: {
            let began = charge.head.sent.max(charge.began_at);
            let done = rate(config, view, replica) * view.now.since(began).as_secs_f64();
            done.min(0.9 * charge.head.tokens as f64)
        },
        recent_tokens: match question.session.is_some() && !question.prompt.is_matched() {
            true => 0.0,
            false => charge.recent(view.now, config.cost.recent_half_life),
        },
        reported: load.map(|load| (f64::from(load.running), f64::from(load.waiting))),
        reported_own: load.map_or(0.0, |load| f64::from(load.own)),
        kv_usage: load.and_then(|load| load.kv_usage),
        capacity_tokens: replica
            .capacity_blocks
            .map(|blocks| f64::from(blocks) * f64::from(block_size.get())),
        speed: view.rates.of(replica.id),
        evicted_tokens: evicted.blocks as f64 * f64::from(block_size.get()),
        evicted_age_s: match evicted.blocks {
            0 => 0.0,
            _ => view.now.since(Moment(evicted.used * 1000)).as_secs_f64(),
        },
        loads_adapter: question.adapter.is_some_and(|adapter| replica.must_load(adapter)),
    };
    let observed = chain
        .filter(|_| view.index.is_reporting(replica.id))
        .map(|chain| view.index.overlap_blocks(replica.id.observed(), chain.hashes()));
    let source = match observed {
        None => Source::Routed,
        Some(observed) if observed >= reusable => Source::Observed,
        Some(_) => Source::Pending,
    };
    let candidate = Candidate {
        id: replica.id,
        address: replica.address.clone(),
        overlap_tokens,
        source,
        held_blocks,
        cost: score::cost(&config.cost, &signals),
        work: signals.work(&config.cost),
        queued: signals.queued(&config.cost),
        signals,
    };
    Whole { replica, block_size, candidate }
}

fn relieve(config: &RouteConfig, all: &mut [Whole<'_>], bound: f64) {
    let most = all.iter().map(|w| w.candidate.overlap_tokens).max().unwrap();
    let (holders, others): (Vec<&mut Whole<'_>>, Vec<&mut Whole<'_>>) =
        all.iter_mut().partition(|w| w.candidate.overlap_tokens == most);
    let prefix = Signals { prompt_tokens: f64::from(most), ..Signals::default() };
    let prefix = prefix.work(&config.cost).floor();
    let is_hot = |whole: &&mut Whole<'_>| {
        let Candidate { signals, work, .. } = &whole.candidate;
        let beside = (signals.in_flight - 1.0).max(0.0) * work.floor();
        let unfinished = signals.unfinished_tokens;
        let is_computed = unfinished >= prefix + beside && unfinished < 2.0 * prefix;
        signals.in_flight >= bound && !is_computed
    };
    if most > 0 && holders.iter().all(is_hot) {
        for Whole { candidate, .. } in others {
            let signals = &mut candidate.signals;
            signals.neighbours = signals.neighbours.min(signals.in_flight);
            candidate.cost = score::cost(&config.cost, signals);
        }
    }
}

fn overloaded(
    config: &RouteConfig,
    question: &Question<'_>,
    all: &[Whole<'_>],
    chains: &[Chain],
) -> Option<u64> {
    let is_guessed = matches!(question.prompt, PromptKnowledge::Unknown { .. });
    let is_free = all.iter().any(|whole| whole.requests() == 0.0);
    if is_guessed || is_free || chains.iter().any(Chain::is_open) {
        return None;
    }
    let seconds = |whole: &Whole<'_>| whole.candidate.cost.seconds();
    let over = all.iter().map(seconds).min_by(f64::total_cmp)? - config.max_cost_s?;
    (over > 0.0).then(|| over.ceil().clamp(1.0, 600.0) as u64)
}

fn sort(
    config: &RouteConfig,
    all: &mut [Whole<'_>],
    bound: f64,
    (chains, session): (&[Chain], Option<u64>),
    number: u64,
) {
    match config.policy {
        Policy::RoundRobin => all.rotate_left((number % all.len() as u64) as usize),
        Policy::LeastLoaded => all.sort_by(|a, b| {
            let unfinished = |w: &Whole<'_>| w.candidate.signals.unfinished_tokens;
            let by_requests = a.requests().total_cmp(&b.requests());
            let by_work = unfinished(a).total_cmp(&unfinished(b));
            by_requests.then(by_work).then(a.drawn(number).cmp(&b.drawn(number)))
        }),
        Policy::PrefixOnly => all.sort_by(|a, b| {
            let drawn = |w: &Whole<'_>| w.rendezvous(chains, number);
            let by_overlap = b.candidate.overlap_tokens.cmp(&a.candidate.overlap_tokens);
            by_overlap.then(drawn(b).cmp(&drawn(a)))
        }),
        Policy::Warmpath if session.is_some() => {
            all.sort_by(|a, b| a.total().total_cmp(&b.total()));
            let most =
                all[0].total() + config.tie_s.max((all[0].total() * config.tie_share).min(0.1));
            let is_worth = |at: &usize| {
                let signals = all[*at].candidate.signals;
                let cached = Signals { cached_tokens: signals.prompt_tokens, ..signals };
                score::cost(&config.cost, &cached).total() <= most
            };
            let worth = (0..all.len()).filter(is_worth);
            let home = worth.max_by_key(|at| all[*at].drawn(session.unwrap()));
            all[..=home.unwrap()].rotate_right(1);
        }
        Policy::Warmpath => {
            all.sort_by(|a, b| a.total().total_cmp(&b.total()));
            let epsilon = config.tie_s.max((all[0].total() * config.tie_share).min(0.1));
            let mut tied: Vec<usize> =
                (0..all.len()).filter(|at| all[*at].total() <= all[0].total() + epsilon).collect();
            let to_do = |at: &usize| all[*at].candidate.cost.to_do();
            let least = tied.iter().map(to_do).min_by(f64::total_cmp).unwrap();
            tied.retain(|at| to_do(at) <= least + epsilon);
            let has_room = |at: &usize| all[*at].candidate.signals.in_flight < bound;
            if tied.iter().any(has_room) {
                tied.retain(has_room);
            }
            let has_most = |at: &usize| {
                let Candidate { overlap_tokens, signals, .. } = &all[*at].candidate;
                2.0 * f64::from(*overlap_tokens) > signals.prompt_tokens
            };
            if tied.iter().any(has_most) {
                tied.retain(has_most);
            }
            let winner = tied.into_iter().max_by_key(|at| all[*at].rendezvous(chains, number));
            all[..=winner.unwrap()].rotate_right(1);
        }
    }
}

/// Numbers from a seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = xxhash_rust::xxh3::xxh3_64(&self.0.to_le_bytes());
        self.0 % bound
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }

    fn prompt(&mut self) -> Vec<u32> {
        let lengths = [5, 100, 700, 2000, 4000];
        let mut tokens = prompt(self.below(3) as u32, 600);
        tokens.extend(prompt(10 + self.below(3) as u32, 3400));
        tokens.truncate(lengths[self.below(5) as usize]);
        tokens
    }
}

/// Replicas of which few are alike in everything and many in something.
fn drawn_fleet(draws: &mut Draws) -> Fleet {
    let mut fleet = fleet(1 + draws.below(24) as usize);
    let slots = fleet.table.places().count() as u32;
    fleet.table.set_members("another", &[Member::healthy("10.9.9.9:80".to_owned())]);
    fleet.config.policy = Policy::ALL[[0, 0, 0, 1, 2, 3][draws.below(6) as usize]];
    fleet.config.max_cost_s = draws.one_in(4).then_some(0.5);
    // What is evicted decides nothing, or a lot; few are near to a tie, or many.
    fleet.config.cost.eviction_weight = [0.1, 5.0][draws.below(2) as usize];
    fleet.config.tie_s = [0.005, 0.3][draws.below(2) as usize];
    fleet.answer_limit = [None, Some(8), Some(4000)][draws.below(3) as usize];
    let (lists_models, now) = (draws.one_in(2), fleet.now);
    for slot in 0..slots {
        fleet.slot(slot, |replica| {
            let bad = [Health::Unhealthy, Health::Draining][draws.below(2) as usize];
            replica.health = if draws.one_in(8) { bad } else { Health::Healthy };
            replica.priority = u32::from(draws.one_in(5));
            replica.block_size = [None, None, BlockSize::new(64)][draws.below(3) as usize];
            replica.adapters = draws.one_in(2).then(|| vec![draws.below(3)]);
            let name = if draws.one_in(3) { "another" } else { "m" };
            replica.models = (lists_models && !draws.one_in(3)).then(|| vec![Served::named(name)]);
            let [running, waiting, own] = [0; 3].map(|_| draws.below(6) as u32);
            let kv_usage = draws.one_in(2).then(|| draws.below(5) as f64 / 4.0);
            let at = Moment(now.0 - draws.below(5) * 1_000_000_000);
            let load = Load { running, waiting, kv_usage, own, at };
            replica.load = (!draws.one_in(3)).then_some(load);
            replica.capacity_blocks = draws.one_in(2).then_some(300);
        });
        let id = fleet.table.at(slot).unwrap().id;
        let size =
            fleet.table.at(slot).unwrap().block_size.unwrap_or(fleet.config.default_block_size);
        for _ in 0..draws.below(6) {
            fleet.index.advance(Moment(fleet.now.0 - draws.below(90_000_000_000)));
            let chain = Chain::new(ChainSeed::new("m", None), size, &draws.prompt());
            fleet.index.record(id, 300, chain.hashes());
        }
        for _ in 0..draws.below(5) {
            let began = Moment(fleet.now.0 - draws.below(2) * 500_000_000);
            let tokens = 1000 * draws.below(5);
            fleet.charges.start(id, tokens, began, Duration::from_secs(5));
            if draws.one_in(3) {
                let at = Moment(fleet.now.0 - draws.below(2) * 400_000_000);
                fleet.charges.answer_began(id, tokens, at);
            }
        }
        if draws.one_in(2) {
            let prefill_tokens_per_s = draws.one_in(2).then_some(4000.0);
            let base_s = draws.below(2) as f64 / 50.0;
            fleet.rates.insert(id, Speed { prefill_tokens_per_s, base_s, ..Speed::default() });
        }
        if draws.one_in(6) {
            let (config, none) = (PassiveHealth::default(), Strikes::default());
            fleet.strikes.failed(&config, &none, id, Proof::Proven, fleet.now, fleet.now);
        }
    }
    fleet
}

#[test]
fn every_decision_is_the_one_that_is_arrived_at_in_full() {
    let (mut draws, mut reasons) = (Draws(11), std::collections::BTreeMap::new());
    let names = ["m".to_owned()];
    for round in 0..200 {
        let fleet = drawn_fleet(&mut draws);
        let sizes = [16, 64].map(|size| BlockSize::new(size).unwrap());
        for _ in 0..4 {
            let (tokens, seed) = (draws.prompt(), ChainSeed::new("m", None));
            let mut chains = Chains::new(seed, &sizes);
            if draws.one_in(2) {
                chains.leave_open();
            }
            while !chains.go_on(&tokens, &mut || true) {}
            let prompt = match draws.below(4) {
                0 => PromptKnowledge::Unknown { reason: Reason::NoBody, estimated_tokens: 900 },
                1 => PromptKnowledge::Tokens { tokens: &tokens, seed },
                _ => PromptKnowledge::Hashed {
                    prompt_tokens: tokens.len() as u32 + 100,
                    chains: chains.as_slice(),
                },
            };
            let (adapter, seed) = (draws.one_in(2).then(|| draws.below(3)), draws.below(1000));
            let is_named = draws.one_in(2);
            let session = draws.one_in(3).then(|| draws.below(100));
            fleet.with(prompt, seed, |view, question| {
                let model_names = if is_named { &names[..] } else { &[] };
                let question = Question { adapter, model_names, session, ..question.clone() };
                let quick = super::decide(&fleet.config, view, &question);
                let full = decide(&fleet.config, view, &question);
                assert_eq!(quick, full, "round {round}: {:?}", fleet.config.policy);
                *reasons.entry(quick.reason.as_str()).or_insert(0) += 1;
            });
        }
    }
    for reason in ["prefix", "cold", "prefix_busy", "short_prompt", "overloaded", "no_body"] {
        assert!(reasons.get(reason).is_some_and(|count| *count > 10), "{reasons:?}");
    }
}
