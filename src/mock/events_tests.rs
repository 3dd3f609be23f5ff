//! A consumer of its own reads the bytes, and knows after each step what the engine's cache holds.

use super::super::chance::Chance;
use super::super::digest::{Chain, DEFAULT_SEED, Lora, root};
use super::super::engine::{Engine, EngineConfig, Request, RequestId};
use super::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

const RECORDED: &str = include_str!("../../tests/data/vllm_kv_events.jsonl");

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn decode(payload: &[u8]) -> Value {
    rmp_serde::from_slice(payload).unwrap()
}

/// A digest of which only what was published is known.
fn digest(value: &Value) -> Digest {
    let mut digest = [0; 32];
    digest[24..].copy_from_slice(&value.as_u64().unwrap().to_be_bytes());
    Digest(digest)
}

fn event(value: &Value) -> KvEvent {
    let hashes = || value["block_hashes"].as_array().unwrap();
    match value["type"].as_str().unwrap() {
        "AllBlocksCleared" => KvEvent::Cleared,
        "BlockRemoved" => {
            assert_eq!(hashes().len(), 1, "one event for each block");
            KvEvent::Removed(digest(&hashes()[0]))
        }
        "BlockStored" => {
            let lora = value["lora_name"].as_str();
            let keys = value["extra_keys"][0].as_array();
            let salt = keys.and_then(|keys| keys.get(usize::from(lora.is_some()))?.as_str());
            let tokens = value["token_ids"].as_array().unwrap();
            KvEvent::Stored(Stored {
                digests: hashes().iter().map(digest).collect(),
                parent: Some(&value["parent_block_hash"]).filter(|v| !v.is_null()).map(digest),
                tokens: tokens.iter().map(|id| id.as_u64().unwrap() as u32).collect(),
                lora: lora.map(str::to_owned),
                salt: salt.map(str::to_owned),
            })
        }
        other => panic!("{other}"),
    }
}

#[test]
fn what_an_engine_published_is_written_as_the_same_bytes() {
    let loras = vec!["lora-one".to_owned(), "lora-two".to_owned()];
    let encoder = Encoder { block_size: 32, loras };
    let mut kinds = BTreeMap::new();
    for line in RECORDED.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let payload = bytes(line["payload"].as_str().unwrap());
        let batch = decode(&payload);
        let events: Vec<KvEvent> = batch[1].as_array().unwrap().iter().map(event).collect();
        assert_eq!(encoder.batch(batch[0].as_f64().unwrap(), &events), payload, "{line}");
        for event in batch[1].as_array().unwrap() {
            *kinds.entry(event["type"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        }
    }
    let seen: Vec<(&str, i32)> = kinds.iter().map(|(kind, n)| (kind.as_str(), *n)).collect();
    assert_eq!(seen, [("AllBlocksCleared", 1), ("BlockRemoved", 3), ("BlockStored", 7)]);
}

fn request(id: u64, prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request { id: RequestId(id), prompt, max_tokens, salt: None, lora: None, reads_cache: true }
}

fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut chance = Chance::new(seed);
    (0..count).map(|_| chance.below(150_000) as u32).collect()
}

fn small(capacity_blocks: u32) -> EngineConfig {
    EngineConfig { block_size: 4, capacity_blocks, ..EngineConfig::default() }
}

fn lora() -> Lora {
    Lora { name: "one".to_owned(), path: "adapters/one".to_owned() }
}

/// What is known of a cache from its events alone: copies of each block.
#[derive(Default)]
struct Consumer {
    copies: BTreeMap<u64, usize>,
    /// Of each block ever stored, what was said of it.
    said: BTreeMap<u64, (Value, Vec<Value>, Value, Value)>,
}

impl Consumer {
    fn hear(&mut self, payload: &[u8]) -> Vec<String> {
        let batch = decode(payload);
        assert_eq!((&batch[0], &batch[2]), (&Value::from(1.5), &Value::from(0)));
        let events = batch[1].as_array().unwrap();
        events.iter().for_each(|event| self.apply(event));
        events.iter().map(|event| event["type"].as_str().unwrap().to_owned()).collect()
    }

    fn apply(&mut self, event: &Value) {
        match event["type"].as_str().unwrap() {
            "AllBlocksCleared" => self.copies.clear(),
            "BlockRemoved" => {
                let hash = event["block_hashes"][0].as_u64().unwrap();
                let copies = self.copies.get_mut(&hash).expect("a block that was stored");
                *copies -= 1;
                if *copies == 0 {
                    self.copies.remove(&hash);
                }
            }
            _ => self.store(event),
        }
    }

    fn store(&mut self, event: &Value) {
        let hashes = event["block_hashes"].as_array().unwrap();
        let ids = event["token_ids"].as_array().unwrap();
        assert_eq!(ids.len(), hashes.len() * 4);
        let mut parent = event["parent_block_hash"].clone();
        if let Some(hash) = parent.as_u64() {
            assert!(self.copies.contains_key(&hash), "behind a block that is not there");
        }
        for (at, (hash, ids)) in hashes.iter().zip(ids.chunks(4)).enumerate() {
            let keys = event["extra_keys"][at].clone();
            let said = (parent, ids.to_vec(), keys, event["lora_name"].clone());
            let hash_number = hash.as_u64().unwrap();
            let before = self.said.insert(hash_number, said.clone());
            assert!(before.is_none_or(|before| before == said), "one hash, two contents");
            *self.copies.entry(hash_number).or_default() += 1;
            parent = hash.clone();
        }
    }

    /// Tokens of a prompt that the cache must have.
    fn cached(&self, prompt: &[u32], lora: Option<Lora>, salt: Option<String>) -> usize {
        let mut chain = Chain::new(root(DEFAULT_SEED), 4, lora, salt);
        chain.extend(prompt);
        let usable = chain.digests().iter().take((prompt.len() - 1) / 4);
        4 * usable.take_while(|digest| self.copies.contains_key(&published(digest))).count()
    }
}

/// One request to its end: the types of each step's events.
fn ask(engine: &mut Engine, consumer: &mut Consumer, request: Request) -> Vec<Vec<String>> {
    engine.submit(request).unwrap();
    let encoder = Encoder { block_size: 4, loras: vec!["one".to_owned()] };
    let mut batches = Vec::new();
    while !engine.is_idle() {
        engine.step(Duration::ZERO);
        let events = engine.events();
        if !events.is_empty() {
            batches.push(consumer.hear(&encoder.batch(1.5, &events)));
        }
    }
    batches
}

fn listening(config: EngineConfig) -> (Engine, Consumer) {
    let mut engine = Engine::new(config);
    engine.listen();
    (engine, Consumer::default())
}

#[test]
fn a_consumer_knows_after_each_step_what_the_cache_holds() {
    for seed in 0..8 {
        let mut chance = Chance::new(seed);
        let config = EngineConfig { max_num_batched_tokens: 24, max_num_seqs: 3, ..small(40) };
        let (mut engine, mut consumer) = listening(config);
        let encoder = Encoder { block_size: 4, loras: vec!["one".to_owned()] };
        let mut prompts: Vec<Request> = Vec::new();
        let mut cleared = 0;
        for id in 0..120 {
            let mut next = request(id, tokens(chance.below(5), 60), 1 + chance.below(30) as usize);
            next.prompt.truncate(1 + chance.below(60) as usize);
            next.salt = (chance.below(4) == 0).then(|| "salt".to_owned());
            next.lora = (chance.below(4) == 0).then(lora);
            prompts.push(next.clone());
            engine.submit(next).unwrap();
            if chance.below(10) == 0 {
                engine.abort(RequestId(id.saturating_sub(chance.below(4))));
            }
            if chance.below(10) == 0 {
                while !engine.is_idle() {
                    engine.step(Duration::ZERO);
                    let events = engine.events();
                    consumer.hear(&encoder.batch(1.5, &events));
                }
                cleared += usize::from(engine.reset_prefix_cache());
                assert_eq!(engine.events(), [], "an idle engine tells nothing");
                continue;
            }
            for _ in 0..chance.below(6) {
                engine.step(Duration::ZERO);
                let events = engine.events();
                consumer.hear(&encoder.batch(1.5, &events));
                let copies: usize = consumer.copies.values().sum();
                assert_eq!(copies, engine.load().cached_blocks, "seed {seed}");
                for _ in 0..3 {
                    let known = &prompts[chance.below(prompts.len() as u64) as usize];
                    let (lora, salt) = (known.lora.clone(), known.salt.clone());
                    let cached = engine.cached_tokens(&known.prompt, salt.clone(), lora.clone());
                    assert_eq!(consumer.cached(&known.prompt, lora, salt), cached, "seed {seed}");
                }
            }
        }
        let totals = engine.totals();
        assert!(totals.evicted_blocks > 100 && totals.preemptions > 0 && cleared > 0, "{totals:?}");
    }
}

#[test]
fn the_room_is_made_before_it_is_filled() {
    let (mut engine, mut consumer) = listening(small(10));
    assert_eq!(ask(&mut engine, &mut consumer, request(1, tokens(1, 40), 1)), [["BlockStored"]]);
    let second = ask(&mut engine, &mut consumer, request(2, tokens(2, 8), 1));
    assert_eq!(second, [["BlockRemoved", "BlockRemoved", "BlockStored"]]);
}

#[test]
fn a_repeated_prompt_of_whole_blocks_stores_its_last_block_again() {
    let (mut engine, mut consumer) = listening(small(10));
    for id in 1..=2 {
        let batches = ask(&mut engine, &mut consumer, request(id, tokens(1, 16), 1));
        assert_eq!(batches, [["BlockStored"]]);
    }
    let copies: Vec<usize> = consumer.copies.values().copied().collect();
    assert_eq!(copies.iter().sum::<usize>(), 5);
    assert_eq!(copies.iter().filter(|copies| **copies == 2).count(), 1);
}

#[test]
fn a_hit_is_not_told() {
    let (mut engine, mut consumer) = listening(small(10));
    ask(&mut engine, &mut consumer, request(1, tokens(1, 18), 1));
    let again = ask(&mut engine, &mut consumer, request(2, tokens(1, 18), 1));
    assert_eq!(again, [[""; 0]; 0]);
}

#[test]
fn a_reset_is_told_in_front_of_the_next_steps_events() {
    let (mut engine, mut consumer) = listening(small(10));
    ask(&mut engine, &mut consumer, request(1, tokens(1, 16), 1));
    assert!(engine.reset_prefix_cache());
    let batches = ask(&mut engine, &mut consumer, request(2, tokens(2, 8), 1));
    assert_eq!(batches, [["AllBlocksCleared", "BlockStored"]]);
    assert_eq!(consumer.copies.len(), 2);
}
