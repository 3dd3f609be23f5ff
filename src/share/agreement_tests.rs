//! Several gateways that hear the same reports and have as much in flight, each with shared data of its own, and know nothing
//! else of each other: not what another has sent since the last report.

use super::link::envoy::Envoy;
use crate::index::observed_tests::Engine;
use crate::replicas::stats;
use crate::report::{Change, Position};
use crate::route::{self, Decision, Policy, PromptKnowledge, Question, RouteConfig, View};
use crate::score::CostConfig;
use crate::seeded::Random;
use crate::share::log::{Fate, Record};
use crate::tokens::blocks::{BlockHash, BlockSize, Chain, ChainSeed};
use std::time::Duration;

const REPLICAS: u64 = 8;
const ROOM: usize = 4000;

/// Requests between two reports.
const BETWEEN: u64 = 4;

fn config() -> RouteConfig {
    RouteConfig {
        policy: Policy::default(),
        max_cost_s: None,
        cost: CostConfig::default(),
        tie_s: 0.005,
        tie_share: 0.05,
        stale_after: Duration::from_secs(3),
        default_block_size: BlockSize::new(16).unwrap(),
    }
}

impl Envoy {
    fn decides(&mut self, chain: &Chain) -> Decision {
        let now = self.now;
        let link = &mut self.links[0];
        link.refresh(now);
        let view = View {
            table: link.table(),
            index: link.index(),
            charges: &link.all_charges(now),
            strikes: &link.all_strikes(),
            rates: link.rates(),
            now,
        };
        let prompt_tokens = chain.token_count() as u32;
        let question = Question {
            cluster: "c",
            model_names: &[],
            prompt: PromptKnowledge::Hashed { prompt_tokens, chains: std::slice::from_ref(chain) },
            adapter: None,
            answer_limit: Some(100),
            session: None,
            tie_seed: 1,
        };
        route::decide(&config(), &view, &question)
    }

    /// Sends a request.
    fn sends(&mut self, decision: &Decision) {
        let (chosen, chain) = (decision.chosen().unwrap(), decision.chain.as_ref().unwrap());
        let record = Record::of(Fate::Held, chosen.id, chain.hashes(), chosen.held_blocks);
        self.links[0].record(record);
    }

    /// A request of its own that is as large was in flight there for a moment.
    fn is_charged(&mut self, slot: u32, tokens: u64) {
        let (now, replica) = (self.now, self.replica(slot));
        let link = &mut self.links[0];
        link.charge(replica, tokens, now);
        link.answer_began(replica, tokens, now);
        link.release(replica, now);
    }

    fn hears(&mut self, loads: &[(u32, u32)], seq: u64, said: &[Vec<Change>]) {
        for (slot, (running, waiting)) in (0..).zip(loads) {
            let report = stats::Report {
                running: Some(*running),
                waiting: Some(*waiting),
                kv_usage: Some(f64::from(*running) / 10.0),
                block_size: BlockSize::new(16),
                capacity_blocks: Some(ROOM as u32),
                ..stats::Report::default()
            };
            self.table.set_report(slot, &report, 0, self.now);
        }
        self.links[0].publish_table(1, &self.table).unwrap();
        self.links[0].refresh(self.now);
        let at = |seq| Position { generation: 7, seq };
        for (slot, changes) in (0..).zip(said) {
            let replica = self.replica(slot);
            let from = seq.checked_sub(1).map(at);
            self.links[0].observe(replica, from, at(seq), changes, true);
        }
        self.tick();
    }
}

/// A prompt's chain: a conversation's blocks are named by their text and place.
fn chain(blocks: &[u64]) -> Chain {
    let mut chain = Chain::new(ChainSeed::new("m", None), BlockSize::new(16).unwrap(), &[]);
    let tokens = blocks.len() * 16 + 7;
    chain.go_on_behind(blocks.iter().copied().map(BlockHash), &[], tokens);
    chain
}

fn prompt(random: &mut Random, talks: &mut Vec<Vec<u64>>, number: u64) -> Vec<u64> {
    let text = |text: u64, from: u64, to: u64| (from..to).map(move |at| 1 + (text << 20 | at));
    let mut talk: Vec<u64> = match random.below(10) {
        // Nothing is known of it, or what many share.
        0..=1 => Vec::new(),
        2..=4 => text(number % 6, 0, 128).collect(),
        _ if talks.is_empty() => Vec::new(),
        _ => {
            let last = talks.len() - 1 - random.below(talks.len().min(50) as u64) as usize;
            talks.swap_remove(last)
        }
    };
    let more = if talk.len() > 128 { 20 } else { 100 + random.below(300) };
    talk.extend(text(1000 + number, 0, more));
    talk
}

/// How many of the requests all gateways would have sent to the same replica, and how many of them were warm.
fn agreed(gateways: usize, seed: u64, requests: u64) -> (u64, u64) {
    let mut random = Random(seed);
    let addresses: Vec<String> = (0..REPLICAS).map(|n| format!("10.0.0.{n}:1")).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let mut all: Vec<Envoy> = (0..gateways).map(|_| Envoy::new(1)).collect();
    all.iter_mut().for_each(|gateway| gateway.set_members(&addresses));
    let mut engines: Vec<Engine> = (0..REPLICAS).map(|_| Engine::new(ROOM)).collect();
    let mut said: Vec<Vec<Change>> = vec![Vec::new(); REPLICAS as usize];
    let (mut talks, mut agreed, mut warm) = (Vec::new(), 0, 0);
    for number in 0..requests {
        if number % BETWEEN == 0 {
            let loads: Vec<(u32, u32)> =
                (0..REPLICAS).map(|_| (random.below(4) as u32, 0)).collect();
            all.iter_mut().for_each(|gateway| gateway.hears(&loads, number / BETWEEN, &said));
            said.iter_mut().for_each(Vec::clear);
        }
        let talk = prompt(&mut random, &mut talks, number);
        let chain = chain(&talk);
        let decisions: Vec<Decision> =
            all.iter_mut().map(|gateway| gateway.decides(&chain)).collect();
        let chosen = |decision: &Decision| decision.chosen().unwrap().id.slot;
        let first = chosen(&decisions[0]);
        agreed += u64::from(decisions.iter().all(|decision| chosen(decision) == first));
        let by = random.below(gateways as u64) as usize;
        all[by].sends(&decisions[by]);
        let (slot, tokens) = (chosen(&decisions[by]), decisions[by].charged_tokens());
        all.iter_mut().for_each(|gateway| gateway.is_charged(slot, tokens));
        let engine = slot as usize;
        warm += u64::from(engines[engine].cached(&talk) > 0);
        said[engine].extend(engines[engine].compute(&talk, 8));
        talks.push(talk);
    }
    (agreed, warm)
}

#[test]
fn gateways_that_hear_the_same_reports_choose_the_same_replica() {
    let requests = 600;
    for gateways in [2, 4] {
        let (agreed, warm) = agreed(gateways, 11, requests);
        println!("{gateways} gateways: {agreed} of {requests}, {warm} of them warm");
        assert!(warm > requests / 3 && warm < requests, "{warm}");
        assert!(agreed * 100 >= requests * 99, "{gateways} gateways: {agreed} of {requests}");
    }
}
