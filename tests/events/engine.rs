//! An engine's cache at random: it stores, copies and gives up blocks as no engine would in such order, and publishes what
//! it did as vLLM does.

use crate::held::Held;
use crate::recording::Frame;
use rmpv::Value;
use std::collections::VecDeque;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub const BLOCK_TOKENS: usize = 2;

/// Numbers that look random and are the same each time.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    pub fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }
}

/// Everything in front of a block, and itself.
type Tokens = Vec<u32>;

#[derive(Debug)]
pub struct Engine {
    /// What a block's name depends on beside its tokens: another one with each process.
    process: u64,
    /// Each a copy of its own.
    blocks: Vec<(Option<&'static str>, Tokens)>,
    room: usize,
    events: Vec<Value>,
    pub seq: u64,
    /// What it can still be asked for.
    kept: VecDeque<Frame>,
    keeps: usize,
    /// What it really holds.
    pub truth: Held,
}

impl Engine {
    pub fn new(room: usize, keeps: usize) -> Self {
        Self {
            process: 0,
            blocks: Vec::new(),
            room,
            events: Vec::new(),
            seq: 0,
            kept: VecDeque::new(),
            keeps,
            truth: Held::default(),
        }
    }

    /// A new process: empty, and without a word.
    pub fn restart(&mut self) {
        let process = self.process + 1;
        *self = Self { process, ..Self::new(self.room, self.keeps) };
    }

    /// One step of it, published.
    pub fn step(&mut self, chance: &mut Chance) -> Frame {
        for _ in 0..1 + chance.below(3) {
            match chance.below(40) {
                0 => self.clear(),
                1..8 => self.give_up(chance),
                _ => self.compute(chance),
            }
        }
        self.publish()
    }

    /// What it has published from this number on, as far as it has it.
    pub fn replay(&self, from: u64) -> Vec<Frame> {
        self.kept.iter().filter(|frame| frame.seq >= from).cloned().collect()
    }

    fn publish(&mut self) -> Frame {
        let events = std::mem::take(&mut self.events);
        events.iter().for_each(|event| self.truth.apply(event));
        let frame = frame(self.seq, events);
        self.seq += 1;
        self.kept.push_back(frame.clone());
        if self.kept.len() > self.keeps {
            self.kept.pop_front();
        }
        frame
    }

    fn clear(&mut self) {
        self.blocks.clear();
        self.events.push(map([("type", "AllBlocksCleared".into())]));
    }

    fn give_up(&mut self, chance: &mut Chance) {
        if self.blocks.is_empty() {
            return;
        }
        let (salt, tokens) = self.blocks.swap_remove(chance.below(self.blocks.len()));
        self.removed(salt, &tokens);
    }

    /// Takes what it has of a prompt and stores the rest, now and then also once more what it has.
    fn compute(&mut self, chance: &mut Chance) {
        let salt = [None, None, None, Some("a"), Some("b")][chance.below(5)];
        let blocks = 1 + chance.below(6);
        // Few different tokens, so that beginnings are shared.
        let prompt: Tokens = (0..blocks * BLOCK_TOKENS)
            .map(|at| (chance.below(2) * (at % BLOCK_TOKENS)) as u32)
            .collect();
        let is_cached = |blocks: &usize| {
            let path = &prompt[..blocks * BLOCK_TOKENS];
            self.blocks.iter().any(|(whose, tokens)| *whose == salt && tokens == path)
        };
        let cached = (1..=blocks).take_while(is_cached).count();
        let cached = cached - usize::from(cached > 0 && (cached == blocks || chance.one_in(8)));
        let in_use =
            |(whose, tokens): &(Option<&str>, Tokens)| *whose == salt && prompt.starts_with(tokens);
        while self.blocks.len() + blocks - cached > self.room {
            // What is computed on is not given up.
            let idle =
                (0..self.blocks.len()).filter(|at| !in_use(&self.blocks[*at])).collect::<Vec<_>>();
            if idle.is_empty() {
                return;
            }
            let last = self.blocks.len() - 1;
            self.blocks.swap(idle[chance.below(idle.len())], last);
            let (whose, tokens) = self.blocks.pop().unwrap();
            self.removed(whose, &tokens);
        }
        self.stored(salt, &prompt, cached);
        let ends = cached + 1..=blocks;
        self.blocks.extend(ends.map(|end| (salt, prompt[..end * BLOCK_TOKENS].to_vec())));
    }

    fn removed(&mut self, salt: Option<&'static str>, tokens: &[u32]) {
        let hashes = Value::Array(vec![self.name(salt, tokens).into()]);
        let kind = ("type", "BlockRemoved".into());
        self.events.push(map([
            kind,
            ("block_hashes", hashes),
            ("medium", "GPU".into()),
            ("group_idx", 0.into()),
        ]));
    }

    fn stored(&mut self, salt: Option<&'static str>, prompt: &[u32], cached: usize) {
        let blocks = prompt.len() / BLOCK_TOKENS;
        let name = |end: usize| Value::from(self.name(salt, &prompt[..end * BLOCK_TOKENS]));
        let parent = if cached == 0 { Value::Nil } else { name(cached) };
        let keys = (cached..blocks).map(|at| match salt {
            Some(salt) if at == 0 => Value::Array(vec![salt.into()]),
            _ => Value::Nil,
        });
        let tokens = prompt[cached * BLOCK_TOKENS..].iter().map(|token| Value::from(*token));
        self.events.push(map([
            ("type", "BlockStored".into()),
            ("block_hashes", (cached + 1..=blocks).map(name).collect()),
            ("parent_block_hash", parent),
            ("token_ids", tokens.collect()),
            ("block_size", BLOCK_TOKENS.into()),
            ("lora_id", Value::Nil),
            ("medium", "GPU".into()),
            ("lora_name", Value::Nil),
            ("extra_keys", keys.collect()),
            ("group_idx", 0.into()),
            ("kv_cache_spec_kind", "full_attention".into()),
        ]));
    }

    fn name(&self, salt: Option<&str>, tokens: &[u32]) -> u64 {
        let mut bytes = salt.unwrap_or_default().as_bytes().to_vec();
        tokens.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
        xxh3_64_with_seed(&bytes, self.process)
    }
}

/// A batch with these events.
pub fn frame(seq: u64, events: Vec<Value>) -> Frame {
    let batch = Value::Array(vec![1.5.into(), Value::Array(events), 0.into()]);
    let mut payload = Vec::new();
    rmpv::encode::write_value(&mut payload, &batch).unwrap();
    Frame { topic: String::new(), seq, payload }
}

fn map<const N: usize>(entries: [(&str, Value); N]) -> Value {
    Value::Map(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
}
