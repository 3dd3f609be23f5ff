//! Complaints from the field about choices: weights, ties, sessions, and claims on caches that are gone.

use super::*;
use crate::config::Config;
use crate::replicas::Member;
use crate::replicas::stats::Report;
use std::collections::BTreeSet;

struct Fleet {
    config: RouteConfig,
    table: ReplicaTable,
    index: PrefixIndex,
    charges: Charges,
    now: Moment,
}

/// So many replicas behind a gateway with these options.
fn fleet(replicas: usize, options: &str) -> Fleet {
    let json = format!(
        r#"{{"models": [{{"name": "m", "prepared": {{"cluster": "f", "path": "/m"}}}}],
             "clusters": [{{"name": "pool", "replicas": ["127.0.0.1:1"]}}]{options}}}"#
    );
    let members: Vec<Member> =
        (0..replicas).map(|n| Member::healthy(format!("10.0.0.{n}:80"))).collect();
    let mut table = ReplicaTable::default();
    table.set_members("pool", &members);
    Fleet {
        config: Config::parse(json.as_bytes()).unwrap().route,
        table,
        index: PrefixIndex::new(),
        charges: Charges::default(),
        now: Moment::default().plus(Duration::from_secs(100)),
    }
}

impl Fleet {
    fn decide(&self, prompt: PromptKnowledge<'_>, session: Option<u64>, number: u64) -> Decision {
        let view = View {
            table: &self.table,
            index: &self.index,
            charges: &self.charges,
            strikes: &Strikes::default(),
            rates: &Rates::default(),
            now: self.now,
        };
        let question = Question {
            cluster: "pool",
            model_names: &[],
            prompt,
            adapter: None,
            answer_limit: Some(100),
            session,
            tie_seed: number,
        };
        decide(&self.config, &view, &question)
    }

    /// Has a prompt of 10,000 tokens that cannot be read placed, and goes on in time.
    fn send(&mut self, session: Option<u64>, number: u64) -> u32 {
        let prompt =
            PromptKnowledge::Unknown { reason: Reason::StoredPrompt, estimated_tokens: 10_000 };
        let decision = self.decide(prompt, session, number);
        assert_eq!(decision.reason, Reason::StoredPrompt);
        let (id, work) = (decision.chosen().unwrap().id, decision.charged_tokens());
        self.charges.start(id, work, self.now, self.config.cost.recent_half_life);
        self.now = self.now.plus(Duration::from_millis(500));
        self.charges.answer_began(id, work, self.now);
        self.charges.end(id, self.now);
        id.slot
    }

    fn ask(&self, tokens: &[u32], number: u64) -> u32 {
        let prompt = PromptKnowledge::Tokens { tokens, seed: ChainSeed::new("m", None) };
        self.decide(prompt, None, number).chosen().unwrap().id.slot
    }

    fn id(&self, slot: u32) -> ReplicaId {
        self.table.at(slot).unwrap().id
    }
}

fn prompt(kind: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|n| kind * 100_000 + n).collect()
}

/// How far counts are from even ones: Pearson's statistic.
fn chi_square(counts: &[u32]) -> f64 {
    let mean = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
    counts.iter().map(|count| (f64::from(*count) - mean).powi(2) / mean).sum()
}

/// With three degrees of freedom, one even draw in a hundred is beyond this.
const CRITICAL: f64 = 11.34;

#[test]
fn equal_replicas_get_equal_shares_of_what_nobody_has() {
    let fleet = fleet(4, "");
    let [mut cold, mut unknown] = [[0; 4]; 2];
    let nothing = PromptKnowledge::Unknown { reason: Reason::NoBody, estimated_tokens: 100 };
    // Four workers of one Envoy, whose numbers for requests differ as theirs do.
    for worker in 0..4_u64 {
        for number in 0..1000 {
            let seed = worker.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number);
            let kind = u32::try_from(worker * 1000 + number).unwrap();
            cold[fleet.ask(&prompt(kind, 40), seed) as usize] += 1;
            let decision = fleet.decide(nothing, None, seed);
            unknown[decision.chosen().unwrap().id.slot as usize] += 1;
        }
    }
    assert!(chi_square(&cold) < CRITICAL, "{cold:?}");
    assert!(chi_square(&unknown) < CRITICAL, "{unknown:?}");
}

/// Replica 0 holds a prompt and has this much to do in front of it; who gets it under these options?
fn chosen_under(options: &str, queued: u64) -> u32 {
    let mut fleet = fleet(2, options);
    let tokens = prompt(1, 4000);
    let size = fleet.config.default_block_size;
    let chain = Chain::new(ChainSeed::new("m", None), size, &tokens);
    let (holder, now) = (fleet.id(0), fleet.now);
    fleet.index.record(holder, 1000, chain.hashes());
    if queued > 0 {
        fleet.charges.start(holder, queued, now, Duration::from_secs(5));
    }
    fleet.ask(&tokens, 1)
}

#[test]
fn weights_lead_from_load_alone_to_prefixes_alone() {
    // Some: what a prompt of 4,000 tokens is worth is waited for, and no more.
    assert_eq!((chosen_under("", 1000), chosen_under("", 40_000)), (0, 1));
    // Computing is as good as free: load alone.
    let load = r#", "cost": {"prefill_tokens_per_s": 1000000000}, "tie_ms": 0, "tie_share": 0"#;
    assert_eq!((chosen_under(load, 0), chosen_under(load, 10)), (0, 1));
    // Answers cost nothing, and all costs are a tie, in which who must compute least wins: prefixes alone.
    let prefix = r#", "cost": {"decode_ms_per_token": 0, "recent_weight": 0}, "tie_ms": 10000"#;
    let long = chosen_under(prefix, 20_000);
    assert_eq!((chosen_under(prefix, 1000), long), (0, 0));
}

#[test]
fn requests_of_a_session_go_to_one_replica_while_their_prompts_cannot_be_read() {
    let mut fleet = fleet(4, "");
    let mut homes = BTreeSet::new();
    for session in 0..40 {
        let home = fleet.send(Some(session), 0);
        for number in 1..20 {
            assert_eq!(fleet.send(Some(session), number), home, "session {session}");
        }
        homes.insert(home);
    }
    assert_eq!(homes.len(), 4);
    let without: BTreeSet<u32> = (0..20).map(|number| fleet.send(None, number)).collect();
    assert_eq!(without.len(), 4, "without a name they go by load");
}

#[test]
fn a_session_moves_once_when_its_replica_is_gone_and_others_do_not() {
    let mut fleet = fleet(4, "");
    let before: Vec<u32> = (0..40).map(|session| fleet.send(Some(session), 0)).collect();
    let members: Vec<Member> =
        [0, 2, 3].map(|n| Member::healthy(format!("10.0.0.{n}:80"))).to_vec();
    fleet.table.set_members("pool", &members);
    for (session, home) in (0..).zip(before) {
        let places: BTreeSet<u32> = (0..5).map(|n| fleet.send(Some(session), n)).collect();
        assert_eq!(places.len(), 1, "session {session}");
        assert_eq!(places.contains(&home), home != 1, "session {session}");
    }
}

#[test]
fn a_session_does_not_wait_longer_for_its_replica_than_its_prompt_takes() {
    #[track_caller]
    fn check(queued: u64, stays: bool) {
        let mut fleet = fleet(4, "");
        let home = fleet.send(Some(7), 0);
        let (id, now) = (fleet.id(home), fleet.now);
        fleet.charges.start(id, queued, now, Duration::from_secs(5));
        assert_eq!(fleet.send(Some(7), 1) == home, stays, "{queued} tokens in front");
    }
    check(5_000, true);
    check(50_000, false);
}

#[test]
fn a_prompt_that_can_be_matched_does_not_go_by_its_session() {
    let fleet = fleet(4, "");
    let ask = |tokens: &[u32], session| {
        let prompt = PromptKnowledge::Tokens { tokens, seed: ChainSeed::new("m", None) };
        fleet.decide(prompt, Some(session), 0).header()
    };
    for kind in 0..10 {
        let tokens = prompt(kind, 100);
        assert_eq!(ask(&tokens, 1), ask(&tokens, 2));
    }
}

#[test]
fn claims_outlast_reports_that_fail_and_end_with_the_process_or_its_place() {
    let mut fleet = fleet(2, "");
    let tokens = prompt(1, 1000);
    let chain = Chain::new(ChainSeed::new("m", None), fleet.config.default_block_size, &tokens);
    let reason = |fleet: &Fleet| {
        let prompt = PromptKnowledge::Tokens { tokens: &tokens, seed: ChainSeed::new("m", None) };
        fleet.decide(prompt, None, 0).reason
    };
    let report = |started| Report { started_at: Some(started), ..Report::default() };
    fleet.table.set_report(0, &report(1.0), 0, fleet.now);
    fleet.index.record(fleet.id(0), 1000, chain.hashes());
    assert_eq!(reason(&fleet), Reason::Prefix);
    // That nobody can be asked for its load says nothing of what it has cached.
    fleet.now = fleet.now.plus(Duration::from_secs(3600));
    assert_eq!(reason(&fleet), Reason::Prefix);
    fleet.table.set_report(0, &report(1.0), 0, fleet.now);
    assert_eq!(reason(&fleet), Reason::Prefix);
    fleet.table.set_report(0, &report(2.0), 0, fleet.now);
    assert_eq!(reason(&fleet), Reason::Cold);

    fleet.index.record(fleet.id(0), 1000, chain.hashes());
    assert_eq!(reason(&fleet), Reason::Prefix);
    let [first, second] = [0, 1].map(|n| Member::healthy(format!("10.0.0.{n}:80")));
    fleet.table.set_members("pool", std::slice::from_ref(&second));
    fleet.table.set_members("pool", &[first, second]);
    assert_eq!(reason(&fleet), Reason::Cold, "the same address once more");
}
