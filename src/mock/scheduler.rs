//! How an engine batches prompts, caches blocks and throws requests back: vLLM V1's scheduling, in virtual time.
//!
//! A block is known by a key of the caller's choice, equal keys meaning equal prefixes, so the same code runs a mock
//! replica on vLLM's digests and a simulated fleet on the block ids of a trace. It has no clock, no thread and no I/O,
//! and it knows no tokens, only how many there are.

use super::cache::{BlockCache, BlockId, Change};
use super::engine::EngineConfig;
use std::collections::VecDeque;
use std::hash::Hash;
use std::time::Duration;

/// Names a request within one engine; the caller chooses and must not reuse it while it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One prompt to answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work<K> {
    /// Its name.
    pub id: RequestId,
    /// Its full blocks in order, those of the answer behind them as far as they are known beforehand.
    pub keys: Vec<K>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens to generate.
    pub max_tokens: usize,
    /// False where an engine computes the whole prompt anyway.
    pub reads_cache: bool,
}

/// Why a request was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubmitError {
    /// No prompt token, or nothing to generate.
    Empty,
    /// Prompt and answer together need more blocks than the pool has.
    TooLong,
}

/// What one step did. Everything in it becomes true at its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepReport {
    /// How long the step took.
    pub duration: Duration,
    /// When it ended: `now` plus the duration.
    pub ended: Duration,
    /// Requests that began to run, with what the cache spared them.
    pub admitted: Vec<Admitted>,
    /// Tokens sampled, at most one per request.
    pub produced: Vec<Produced>,
    /// Requests that have all their tokens.
    pub finished: Vec<RequestId>,
    /// Requests thrown back into the queue for want of blocks.
    pub preempted: Vec<RequestId>,
    /// Prompt tokens computed.
    pub prefill_tokens: usize,
    /// Sequences that decoded.
    pub decoding: usize,
}

/// A request that began to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    /// Which.
    pub id: RequestId,
    /// Prompt tokens found in the cache.
    pub cached_tokens: usize,
}

/// A sampled token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Produced {
    /// Of which request.
    pub id: RequestId,
    /// Its token id; 0 where tokens have none.
    pub token: u32,
    /// Whether it is the first of the answer.
    pub first: bool,
    /// Whether it is the last.
    pub last: bool,
}

/// How busy an engine is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests in the batch.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Blocks that running requests hold.
    pub held_blocks: usize,
    /// Blocks that can be hit.
    pub cached_blocks: usize,
    /// Blocks in all.
    pub capacity_blocks: usize,
    /// Tokens of running and waiting requests not yet computed, as if nothing were cached.
    pub uncomputed_tokens: usize,
}

/// Sums since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prompt tokens of admitted requests: what the cache was asked for.
    pub queried_tokens: u64,
    /// Prompt tokens the cache had.
    pub hit_tokens: u64,
    /// Prompt tokens of requests whose prompt is done.
    pub prompt_tokens: u64,
    /// Prompt tokens computed, after preemptions again.
    pub prefill_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Requests finished.
    pub finished: u64,
    /// Requests aborted.
    pub aborted: u64,
    /// Requests thrown back.
    pub preemptions: u64,
    /// Cached blocks evicted.
    pub evicted_blocks: u64,
    /// Steps run.
    pub steps: u64,
}

/// What became of blocks, every copy told apart, as an engine's KV events tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed<K> {
    /// A request's blocks became known, some of them perhaps once more.
    Stored {
        /// Whose.
        id: RequestId,
        /// The first of them, counted in the request's blocks.
        first: usize,
        /// How many.
        count: usize,
    },
    /// A block was given up for room.
    Removed(K),
    /// All blocks were.
    Cleared,
}

/// Deeds in their order; none are kept while nobody asks.
#[derive(Debug, Clone)]
struct Journal<K>(Option<Vec<Deed<K>>>);

/// The scheduler.
#[derive(Debug, Clone)]
pub struct Scheduler<K> {
    config: EngineConfig,
    cache: BlockCache<K>,
    journal: Journal<K>,
    running: Vec<Sequence<K>>,
    waiting: VecDeque<Sequence<K>>,
    /// What the first in the queue needed when it was last tried: it cannot fit before the idle blocks and the cache's
    /// churn together are as many, since one block that becomes known, or whose twin takes its place, saves it one.
    /// Nobody else's hits grow meanwhile, as none is admitted past it.
    blocked: Option<u64>,
    totals: Totals,
}

#[derive(Debug, Clone)]
struct Sequence<K> {
    id: RequestId,
    keys: Vec<K>,
    prompt_tokens: usize,
    generated: usize,
    max_tokens: usize,
    reads_cache: bool,
    blocks: Vec<BlockId>,
    stored_blocks: usize,
    computed: usize,
    /// Tokens that the step being planned computes.
    planned: usize,
    was_admitted: bool,
}

impl<K: Copy + Eq + Hash> Scheduler<K> {
    /// An idle one with an empty cache.
    pub fn new(mut config: EngineConfig) -> Self {
        config.block_size = config.block_size.max(1);
        config.max_num_batched_tokens = config.max_num_batched_tokens.max(1);
        config.max_num_seqs = config.max_num_seqs.max(1);
        Self {
            cache: BlockCache::new(config.capacity_blocks),
            journal: Journal(None),
            config,
            running: Vec::new(),
            waiting: VecDeque::new(),
            blocked: None,
            totals: Totals::default(),
        }
    }

    /// Its configuration.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Queues a request; the next step may run it.
    ///
    /// # Errors
    /// When it is empty or could never fit.
    pub fn submit(&mut self, work: Work<K>) -> Result<(), SubmitError> {
        if work.prompt_tokens == 0 || work.max_tokens == 0 {
            return Err(SubmitError::Empty);
        }
        // The last token generated is never computed, so it needs no room.
        let tokens = work.prompt_tokens.saturating_add(work.max_tokens - 1);
        if tokens.div_ceil(self.config.block_size) > self.cache.capacity() {
            return Err(SubmitError::TooLong);
        }
        self.waiting.push_back(Sequence {
            id: work.id,
            keys: work.keys,
            prompt_tokens: work.prompt_tokens,
            generated: 0,
            max_tokens: work.max_tokens,
            reads_cache: work.reads_cache,
            blocks: Vec::new(),
            stored_blocks: 0,
            computed: 0,
            planned: 0,
            was_admitted: false,
        });
        Ok(())
    }

    /// Says what a request's further blocks are called, once its answer has filled them.
    pub fn name_blocks(&mut self, id: RequestId, keys: &[K]) {
        let mut all = self.running.iter_mut().chain(&mut self.waiting);
        if let Some(sequence) = all.find(|sequence| sequence.id == id) {
            sequence.keys.extend_from_slice(keys);
        }
    }

    /// Takes a request out. Its full blocks stay cached. False when it is not here.
    pub fn abort(&mut self, id: RequestId) -> bool {
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.running.remove(at);
            self.cache.release(&sequence.blocks);
        } else if let Some(at) = self.waiting.iter().position(|sequence| sequence.id == id) {
            self.waiting.remove(at);
            self.blocked = None;
        } else {
            return false;
        }
        self.totals.aborted += 1;
        true
    }

    /// Forgets the cache; refused while requests run.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let done = self.cache.clear();
        if let (true, Some(deeds)) = (done, &mut self.journal.0) {
            deeds.push(Deed::Cleared);
        }
        done
    }

    /// Deeds are kept from now on.
    pub fn keep_journal(&mut self) {
        self.cache.keep_lost();
        self.journal.0 = Some(Vec::new());
    }

    /// The deeds since the last call.
    pub fn journal(&mut self) -> Vec<Deed<K>> {
        self.journal.0.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Changes to what can be hit are kept from now on.
    pub fn listen(&mut self) {
        self.cache.listen();
    }

    /// The changes since the last call.
    pub fn changes(&mut self) -> Vec<Change<K>> {
        self.cache.changes()
    }

    /// Gives the cache so many blocks. Requests that can never fit any more are aborted: which.
    pub fn resize(&mut self, blocks: usize) -> Vec<RequestId> {
        self.cache.resize(blocks);
        self.blocked = None;
        let room = blocks.saturating_mul(self.config.block_size);
        let all = self.running.iter().chain(&self.waiting);
        let too_long =
            all.filter(|sequence| sequence.prompt_tokens + sequence.max_tokens - 1 > room);
        let aborted: Vec<RequestId> = too_long.map(|sequence| sequence.id).collect();
        for id in &aborted {
            self.abort(*id);
        }
        aborted
    }

    /// Takes over how long things take, from the next step on.
    pub fn set_pace(&mut self, config: &EngineConfig) {
        self.config.step_base = config.step_base;
        self.config.prefill_rate = config.prefill_rate;
        self.config.attention_rate = config.attention_rate;
        self.config.decode_per_sequence = config.decode_per_sequence;
    }

    /// True when a step would do nothing.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// How busy it is.
    pub fn load(&self) -> Load {
        let all = self.running.iter().chain(&self.waiting);
        Load {
            running: self.running.len(),
            waiting: self.waiting.len(),
            held_blocks: self.cache.held(),
            cached_blocks: self.cache.cached(),
            capacity_blocks: self.cache.capacity(),
            uncomputed_tokens: all.map(Sequence::uncomputed).sum(),
        }
    }

    /// Sums since the start.
    pub fn totals(&self) -> Totals {
        Totals { evicted_blocks: self.cache.evicted(), ..self.totals }
    }

    /// Prompt tokens that a prompt of these blocks would find in the cache now. Changes nothing.
    pub fn cached_tokens(&self, keys: &[K], prompt_tokens: usize) -> usize {
        self.find(keys, prompt_tokens).len() * self.config.block_size
    }

    /// Runs one step that starts at `now`.
    pub fn step(&mut self, now: Duration) -> StepReport {
        let mut report = StepReport::default();
        let budget = self.plan_running(&mut report);
        // As in vLLM: an engine that just threw requests out lets none in.
        if report.preempted.is_empty() {
            self.plan_waiting(budget, &mut report);
        }
        report.duration = self.duration(&mut report);
        report.ended = now + report.duration;
        self.totals.prefill_tokens += report.prefill_tokens as u64;
        self.totals.steps += 1;
        self.finish_step(&mut report);
        report
    }

    fn plan_running(&mut self, report: &mut StepReport) -> usize {
        let mut budget = self.config.max_num_batched_tokens;
        let mut at = 0;
        while let Some(sequence) = self.running.get_mut(at) {
            let planned = sequence.uncomputed().min(budget);
            if sequence.plan(planned, &mut self.cache, self.config.block_size, &mut self.journal) {
                budget -= planned;
                at += 1;
                continue;
            }
            // The youngest goes, be it this one.
            if let Some(mut youngest) = self.running.pop() {
                self.cache.release(&youngest.blocks);
                youngest.start_over();
                report.preempted.push(youngest.id);
                self.totals.preemptions += 1;
                self.waiting.push_front(youngest);
                self.blocked = None;
            }
        }
        budget
    }

    fn plan_waiting(&mut self, mut budget: usize, report: &mut StepReport) {
        while budget > 0
            && self.running.len() < self.config.max_num_seqs
            && self.lacking().is_none()
        {
            let Some(sequence) = self.waiting.front() else { break };
            let hits = if sequence.reads_cache {
                self.find(&sequence.keys, sequence.tokens())
            } else {
                Vec::new()
            };
            // The whole prompt must fit, or two half-computed prompts could starve each other.
            let needed = sequence.tokens().div_ceil(self.config.block_size) - hits.len();
            let needed = needed + self.cache.idle_among(&hits);
            if needed > self.cache.idle() {
                self.blocked = Some(needed as u64 + self.cache.churn());
                break;
            }
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            self.blocked = None;
            self.cache.claim(&hits);
            sequence.computed = hits.len() * self.config.block_size;
            sequence.stored_blocks = hits.len();
            sequence.blocks = hits;
            let planned = sequence.uncomputed().min(budget);
            sequence.plan(planned, &mut self.cache, self.config.block_size, &mut self.journal);
            budget -= planned;
            self.admit(&mut sequence, report);
            self.running.push(sequence);
        }
    }

    /// How many blocks the first in the queue lacks at least, as can be said without looking for its blocks again;
    /// `None` when it may lack none.
    fn lacking(&self) -> Option<usize> {
        let room = self.cache.idle() as u64 + self.cache.churn();
        let lacking = self.blocked?.checked_sub(room)?;
        usize::try_from(lacking).ok().filter(|lacking| *lacking > 0)
    }

    fn admit(&mut self, sequence: &mut Sequence<K>, report: &mut StepReport) {
        if sequence.was_admitted {
            return;
        }
        sequence.was_admitted = true;
        if sequence.reads_cache {
            self.totals.queried_tokens += sequence.prompt_tokens as u64;
            self.totals.hit_tokens += sequence.computed as u64;
        }
        report.admitted.push(Admitted { id: sequence.id, cached_tokens: sequence.computed });
    }

    /// Hits are whole blocks, and at least one of the `tokens` is left to compute.
    fn find(&self, keys: &[K], tokens: usize) -> Vec<BlockId> {
        let limit = tokens.saturating_sub(1) / self.config.block_size;
        self.cache.find(keys.get(..limit.min(keys.len())).unwrap_or_default())
    }

    fn duration(&self, report: &mut StepReport) -> Duration {
        let mut attended = 0.0;
        for sequence in &self.running {
            if sequence.computed >= sequence.prompt_tokens && sequence.planned == 1 {
                report.decoding += 1;
            } else {
                report.prefill_tokens += sequence.planned;
                let context = sequence.computed as f64 + sequence.planned as f64 / 2.0;
                attended += sequence.planned as f64 * context;
            }
        }
        let prefill = seconds(report.prefill_tokens as f64, self.config.prefill_rate)
            + seconds(attended, self.config.attention_rate);
        let decode = self.config.decode_per_sequence * u32::try_from(report.decoding).unwrap_or(0);
        self.config.step_base + prefill + decode
    }

    fn finish_step(&mut self, report: &mut StepReport) {
        let (cache, totals) = (&mut self.cache, &mut self.totals);
        self.running.retain_mut(|sequence| {
            let planned = std::mem::take(&mut sequence.planned);
            sequence.computed += planned;
            if planned == 0 || sequence.uncomputed() > 0 {
                return true;
            }
            let produced = sequence.produce();
            report.produced.push(produced);
            totals.generated_tokens += 1;
            if produced.first {
                totals.prompt_tokens += sequence.prompt_tokens as u64;
            }
            if produced.last {
                totals.finished += 1;
                report.finished.push(sequence.id);
                cache.release(&sequence.blocks);
            }
            !produced.last
        });
    }

    /// How many of the next steps will only decode: each gives each running request a token, and none finishes, is
    /// admitted or is thrown back. 0 when that is not certain. Each takes [`Self::decode_time`].
    pub fn decode_steps(&self) -> usize {
        let batch = self.running.len();
        if batch == 0 || batch > self.config.max_num_batched_tokens {
            return 0;
        }
        let left = |sequence: &Sequence<K>| {
            let decodes = sequence.computed >= sequence.prompt_tokens && sequence.uncomputed() == 1;
            if decodes { sequence.max_tokens - sequence.generated - 1 } else { 0 }
        };
        let steps = self.running.iter().map(left).min().unwrap_or(0);
        let is_full =
            batch >= self.config.max_num_seqs || batch == self.config.max_num_batched_tokens;
        let blocks = match self.lacking() {
            _ if self.waiting.is_empty() || is_full => self.cache.idle(),
            Some(lacking) => self.cache.idle().min(lacking - 1),
            None => 0,
        };
        // A request fills as many blocks as steps make, and the one it is in.
        let most = (blocks / batch * self.config.block_size).saturating_sub(1);
        steps.min(most)
    }

    /// How long a step of the running requests takes that only decodes.
    pub fn decode_time(&self) -> Duration {
        let batch = u32::try_from(self.running.len()).unwrap_or(0);
        self.config.step_base + self.config.decode_per_sequence * batch
    }

    /// Runs so many steps at once, at most [`Self::decode_steps`].
    pub fn decode(&mut self, steps: usize) {
        let size = self.config.block_size;
        // Blocks are taken and stored in the order in which single steps would.
        let mut growth: Vec<(usize, usize)> = Vec::new();
        for (at, sequence) in self.running.iter().enumerate() {
            let takes = sequence.blocks.len() * size - sequence.computed;
            let stores = takes.checked_sub(1).unwrap_or(size - 1);
            for first in [takes, stores] {
                growth.extend((first..steps).step_by(size).map(|step| (step, at)));
            }
        }
        growth.sort_unstable();
        growth.dedup();
        for (step, at) in growth {
            let Some(sequence) = self.running.get_mut(at) else { continue };
            sequence.computed += step;
            sequence.plan(1, &mut self.cache, size, &mut self.journal);
            sequence.computed -= step;
        }
        for sequence in &mut self.running {
            sequence.planned = 0;
            sequence.computed += steps;
            sequence.generated += steps;
        }
        self.totals.steps += steps as u64;
        self.totals.generated_tokens += (steps * self.running.len()) as u64;
    }

    /// The requests in the batch, the oldest first.
    pub fn running(&self) -> impl Iterator<Item = RequestId> {
        self.running.iter().map(|sequence| sequence.id)
    }
}

impl<K: Copy + Eq + Hash> Sequence<K> {
    fn tokens(&self) -> usize {
        self.prompt_tokens + self.generated
    }

    fn uncomputed(&self) -> usize {
        self.tokens() - self.computed
    }

    /// Gets the blocks that `planned` more tokens need. False when there are too few.
    fn plan(
        &mut self,
        planned: usize,
        cache: &mut BlockCache<K>,
        block_size: usize,
        journal: &mut Journal<K>,
    ) -> bool {
        let end = self.computed + planned;
        let wanted = end.div_ceil(block_size).saturating_sub(self.blocks.len());
        if !cache.take(wanted, &mut self.blocks) {
            return false;
        }
        self.planned = planned;
        // Blocks are known as soon as the step that fills them is planned, as in vLLM: a twin in the same step reads
        // them layer by layer as they are written.
        let full = end / block_size;
        let fresh = self.blocks.get(self.stored_blocks..full).unwrap_or_default();
        let keys = self.keys.get(self.stored_blocks..).unwrap_or_default();
        for (block, key) in fresh.iter().zip(keys) {
            cache.store(*block, *key);
        }
        journal.note(cache, self.id, self.stored_blocks, fresh.len().min(keys.len()));
        self.stored_blocks = self.stored_blocks.max(full);
        true
    }

    fn start_over(&mut self) {
        self.blocks.clear();
        self.stored_blocks = 0;
        self.computed = 0;
        self.planned = 0;
    }

    fn produce(&mut self) -> Produced {
        let first = self.generated == 0;
        self.generated += 1;
        let last = self.generated >= self.max_tokens;
        Produced { id: self.id, token: 0, first, last }
    }
}

impl<K: Copy + Eq + Hash> Journal<K> {
    /// What taking blocks gave up, and then what was stored in them.
    fn note(&mut self, cache: &mut BlockCache<K>, id: RequestId, first: usize, count: usize) {
        let Some(deeds) = &mut self.0 else { return };
        deeds.extend(cache.lost().map(Deed::Removed));
        if count > 0 {
            deeds.push(Deed::Stored { id, first, count });
        }
    }
}

/// A rate of zero or less, or none at all, means that the work takes no time.
fn seconds(amount: f64, rate: f64) -> Duration {
    Duration::try_from_secs_f64(amount / rate).unwrap_or_default()
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
