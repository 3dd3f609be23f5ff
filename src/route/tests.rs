use super::*;
use crate::index::{Hearing, Room};
use crate::learn::Speed;
use crate::replicas::models::Served;
use crate::replicas::strikes::{PassiveHealth, Proof};
use crate::replicas::{Health, Load, Member};
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

#[test]
fn who_is_a_tie_but_for_what_it_evicts_is_none() {
    let mut fleet = fleet(5);
    fleet.config.tie_s = 0.3;
    fleet.config.cost.eviction_weight = 5.0;
    let full = fleet.table.at(4).unwrap().id;
    fleet.rates.insert(full, Speed { base_s: 0.01, ..Speed::default() });
    let is_taken = |fleet: &Fleet| (0..40).any(|kind| chosen(&fleet.ask(&prompt(kind, 1000))) == 4);
    assert!(is_taken(&fleet), "its first token is hardly later");
    let other =
        Chain::new(ChainSeed::new("m", None), BlockSize::new(16).unwrap(), &prompt(99, 4000));
    fleet.index.advance(fleet.now);
    fleet.index.record(full, 250, other.hashes());
    assert!(!is_taken(&fleet));
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
        let known = PromptKnowledge::Tokens { tokens: &tokens, seed: ChainSeed::new("m", None) };
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
    let stored =
        |blocks: &[BlockHash], tier| Change::Stored { parent: None, blocks: blocks.to_vec(), tier };
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
            prompt: PromptKnowledge::Tokens { tokens: &tokens, seed: ChainSeed::new("m", None) },
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
        let decision = fleet.decide(PromptKnowledge::Tokens { tokens: &tokens, seed }, tie_seed);
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
