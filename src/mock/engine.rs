//! An engine in virtual time: requests go in, [`Engine::step`] says what one step did and how long
//! it took. Scheduling, caching and preemption are the [`Scheduler`]'s; what is added here is tokens:
//! vLLM's digests of the prompts', the answers', and KV events that tell what became of blocks.
//!
//! It has no clock, no thread and no I/O: a server paces it against the real clock. It does not
//! tokenize, and its output tokens mean nothing.

use super::chance::Chance;
use super::digest::{self, Chain, Digest, Lora};
use super::events::{KvEvent, Stored};
use super::scheduler::{Deed, Scheduler, Work};
use hashbrown::HashMap;
use std::sync::Arc;
use std::time::Duration;

pub use super::scheduler::{Admitted, Load, Produced, RequestId, StepReport, SubmitError, Totals};

/// What an engine is and how fast. The defaults resemble a mid-size GPU with an 8B model, with a
/// cache small enough that a demo of some minutes fills it.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks in the pool. Half as many and prefixes are evicted sooner; the hit rate falls.
    pub capacity_blocks: u32,
    /// Tokens one step may compute, prefill and decode together; longer prompts go in chunks.
    pub max_num_batched_tokens: usize,
    /// Requests that may run at once.
    pub max_num_seqs: usize,
    /// Time of a step that does nothing else.
    pub step_base: Duration,
    /// Prompt tokens per second, attention apart.
    pub prefill_rate: f64,
    /// Pairs of (prompt token, token it attends to) per second: the quadratic part of prefill. At
    /// the default an 8,000-token prompt takes a fifth longer than its linear part.
    pub attention_rate: f64,
    /// Time that each decoding sequence adds to a step.
    pub decode_per_sequence: Duration,
    /// Seed text of the block digests.
    pub hash_seed: String,
    /// Seed of the output tokens.
    pub seed: u64,
    /// Output tokens are drawn from these.
    pub vocabulary: Vocabulary,
}

/// The tokens an engine answers with.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    /// For the first token of an answer.
    pub first: Arc<[u32]>,
    /// For the others.
    pub rest: Arc<[u32]>,
}

impl Default for Vocabulary {
    fn default() -> Self {
        let ids: Arc<[u32]> = (1000..2000).collect();
        Self { first: Arc::clone(&ids), rest: ids }
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            capacity_blocks: 4096,
            max_num_batched_tokens: 2048,
            max_num_seqs: 64,
            step_base: Duration::from_millis(8),
            prefill_rate: 10_000.0,
            attention_rate: 200_000_000.0,
            decode_per_sequence: Duration::from_micros(300),
            hash_seed: digest::DEFAULT_SEED.to_owned(),
            seed: 0,
            vocabulary: Vocabulary::default(),
        }
    }
}

#[cfg(test)]
impl EngineConfig {
    /// Bounds that a few prompts reach.
    pub(super) fn small(chance: &mut Chance) -> Self {
        Self {
            block_size: 1 + chance.below(8) as usize,
            capacity_blocks: 12 + chance.below(60) as u32,
            max_num_batched_tokens: 3 + chance.below(40) as usize,
            max_num_seqs: 1 + chance.below(8) as usize,
            ..Self::default()
        }
    }
}

/// One prompt to answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Its name.
    pub id: RequestId,
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Tokens to generate; the end-of-text token is never drawn.
    pub max_tokens: usize,
    /// `cache_salt`.
    pub salt: Option<String>,
    /// The adapter.
    pub lora: Option<Lora>,
    /// False where an engine computes the whole prompt anyway (`prompt_logprobs`).
    pub reads_cache: bool,
}

/// The engine.
#[derive(Debug, Clone)]
pub struct Engine {
    root: Digest,
    scheduler: Scheduler<Digest>,
    texts: HashMap<RequestId, Text>,
    events: Vec<KvEvent>,
}

/// A request's prompt and answer.
#[derive(Debug, Clone)]
struct Text {
    tokens: Vec<u32>,
    chain: Chain,
    chance: Chance,
    lora: Option<String>,
    salt: Option<String>,
}

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(config: EngineConfig) -> Self {
        Self {
            root: digest::root(&config.hash_seed),
            scheduler: Scheduler::new(config),
            texts: HashMap::new(),
            events: Vec::new(),
        }
    }

    /// Its configuration.
    pub fn config(&self) -> &EngineConfig {
        self.scheduler.config()
    }

    /// Queues a request; the next step may run it.
    ///
    /// # Errors
    /// When it is empty or could never fit.
    pub fn submit(&mut self, request: Request) -> Result<(), SubmitError> {
        let lora = request.lora.as_ref().map(|lora| lora.name.clone());
        let salt = request.salt.clone();
        let chain = self.chain(&request.prompt, request.salt, request.lora);
        self.scheduler.submit(Work {
            id: request.id,
            keys: chain.digests().to_vec(),
            prompt_tokens: request.prompt.len(),
            max_tokens: request.max_tokens,
            reads_cache: request.reads_cache,
        })?;
        let chance = Chance::of_tokens(self.config().seed, &request.prompt);
        self.texts.insert(request.id, Text { tokens: request.prompt, chain, chance, lora, salt });
        Ok(())
    }

    /// Takes a request out. Its full blocks stay cached. False when it is not here.
    pub fn abort(&mut self, id: RequestId) -> bool {
        self.texts.remove(&id);
        self.scheduler.abort(id)
    }

    /// Forgets the cache; refused while requests run.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.scheduler.reset_prefix_cache()
    }

    /// KV events are kept from now on.
    pub fn listen(&mut self) {
        self.scheduler.keep_journal();
    }

    /// What steps have made of the cache since the last call. What a reset does to it waits for the next step, as in
    /// vLLM.
    pub fn events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// True when a step would do nothing.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// How busy it is.
    pub fn load(&self) -> Load {
        self.scheduler.load()
    }

    /// Sums since the start.
    pub fn totals(&self) -> Totals {
        self.scheduler.totals()
    }

    /// Prompt tokens that `prompt` would find in the cache now. Changes nothing.
    pub fn cached_tokens(&self, prompt: &[u32], salt: Option<String>, lora: Option<Lora>) -> usize {
        self.scheduler.cached_tokens(self.chain(prompt, salt, lora).digests(), prompt.len())
    }

    /// Runs one step that starts at `now`.
    pub fn step(&mut self, now: Duration) -> StepReport {
        let mut report = self.scheduler.step(now);
        // Before the answers grow, and before those that are finished are forgotten.
        for deed in self.scheduler.journal() {
            let event = self.event(deed);
            self.events.extend(event);
        }
        for produced in &mut report.produced {
            self.sample(produced);
        }
        report
    }

    fn chain(&self, prompt: &[u32], salt: Option<String>, lora: Option<Lora>) -> Chain {
        let mut chain = Chain::new(self.root, self.config().block_size, lora, salt);
        chain.extend(prompt);
        chain
    }

    fn event(&self, deed: Deed<Digest>) -> Option<KvEvent> {
        let (id, first, count) = match deed {
            Deed::Removed(digest) => return Some(KvEvent::Removed(digest)),
            Deed::Cleared => return Some(KvEvent::Cleared),
            Deed::Stored { id, first, count } => (id, first, count),
        };
        let text = self.texts.get(&id)?;
        let (size, digests) = (self.config().block_size, text.chain.digests());
        Some(KvEvent::Stored(Stored {
            digests: digests.get(first..first + count)?.to_vec(),
            parent: first.checked_sub(1).and_then(|parent| digests.get(parent)).copied(),
            tokens: text.tokens.get(first * size..(first + count) * size)?.to_vec(),
            lora: text.lora.clone(),
            salt: text.salt.clone().filter(|_| first == 0),
        }))
    }

    fn sample(&mut self, produced: &mut Produced) {
        let Some(text) = self.texts.get_mut(&produced.id) else { return };
        let vocabulary = &self.scheduler.config().vocabulary;
        let ids = if produced.first { &vocabulary.first } else { &vocabulary.rest };
        let at = text.chance.below(ids.len() as u64) as usize;
        produced.token = ids.get(at).copied().unwrap_or(0);
        text.tokens.push(produced.token);
        let named = text.chain.digests().len();
        text.chain.extend(&text.tokens);
        if let Some(fresh @ [_, ..]) = text.chain.digests().get(named..) {
            self.scheduler.name_blocks(produced.id, fresh);
        }
        if produced.last {
            self.texts.remove(&produced.id);
        }
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
