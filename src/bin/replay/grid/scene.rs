//! What one cell is played with: a trace made to fit, a fleet, and what is asked of it.

use super::cells::Cell;
use crate::simulate::{Ceiling, FleetConfig, Policy};
use crate::stats::{Quantiles, Sample};
use crate::trace::Trace;
use crate::trace::load::{self, Load};
use crate::trace::work;
use hashbrown::HashSet;
use std::time::Duration;
use warmpath::mock::engine::EngineConfig;

/// Times the p99 of an unloaded fleet that the target is. Halved, no loaded fleet keeps to it; doubled, it is kept to until
/// queues grow without an end, which says nothing of latency.
const TARGET: f64 = 2.0;

/// How a trace is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Requests at least.
    pub requests: usize,
    /// Turns of a session.
    pub turns: Option<usize>,
    /// Tokens of the longest prompt.
    pub prompt_tokens: Option<u32>,
}

/// The fleet of every cell, but for replicas and cache.
#[derive(Debug, Clone)]
pub struct Equipment {
    /// How fast replicas are.
    pub engine: EngineConfig,
    /// Worker threads of the gateway.
    pub threads: usize,
    /// Warmpath's `cost` options, as JSON.
    pub cost: String,
}

/// See the module.
pub struct Scene {
    /// To play.
    pub trace: Trace,
    /// Against.
    pub fleet: FleetConfig,
    /// Whether the cache is larger than the cell says.
    pub is_raised: bool,
}

impl Scene {
    /// Of a cell and a seed; none where the trace cannot offer the load.
    ///
    /// # Errors
    /// When the fleet makes no sense, or a request cannot be placed.
    pub fn of(
        trace: &Trace,
        cell: &Cell,
        cut: Cut,
        equipment: &Equipment,
        seed: u64,
    ) -> Result<Option<Self>, String> {
        let load = Load {
            replicas: cell.replicas,
            share: cell.load,
            requests: cut.requests,
            turns: cut.turns,
            prompt_tokens: cut.prompt_tokens,
            seed,
        };
        let Ok(endless) = load::scale(trace, &equipment.engine, &load) else { return Ok(None) };
        let cache = load::cache(&endless.trace, cell.replicas, cell.cache);
        let engine = EngineConfig {
            block_size: endless.trace.block_tokens as usize,
            capacity_blocks: cache.blocks,
            ..equipment.engine.clone()
        };
        let fleet = FleetConfig::equal(cell.replicas, engine, &equipment.cost)?;
        let fleet = FleetConfig { threads: equipment.threads, ..fleet };
        let more = needed(&fleet, &endless.trace, seed)? / endless.work.as_secs_f64();
        let load = Load { share: load.share / more.max(1.0), ..load };
        let trace = load::scale(trace, &equipment.engine, &load)?.trace;
        Ok(Some(Self { trace, fleet, is_raised: cache.is_raised }))
    }

    /// The hit rate of one infinite cache for the fleet.
    pub fn ceiling(&self) -> f64 {
        Ceiling::of(&self.trace).hit_rate()
    }

    /// The p99 time to first token that is asked of it, in milliseconds: a multiple of what it is when every prompt is alone
    /// on an engine that has cached whatever anyone asked before. It depends on nothing but trace and engine.
    pub fn target(&self) -> f64 {
        let engine = &self.fleet.engine;
        let mut seen: HashSet<u64> = HashSet::new();
        let turns = self.trace.sessions.iter().flat_map(|session| &session.turns);
        let alone = turns.map(|turn| {
            let known = turn.blocks.iter().take_while(|block| seen.contains(*block)).count();
            seen.extend(turn.blocks.iter().chain(&turn.answer_blocks));
            let prompt = f64::from(turn.prompt_tokens);
            let cached = (turn.keep + known) as f64 * f64::from(self.trace.block_tokens);
            first_token(engine, prompt, (prompt - cached).max(1.0))
        });
        Quantiles::of(alone.collect()).p99 * TARGET
    }
}

/// The work that is left with caches of this size, in replica-seconds, where it is known beforehand who comes back.
fn needed(fleet: &FleetConfig, trace: &Trace, seed: u64) -> Result<f64, String> {
    let samples = fleet.play(trace, Policy::Lookahead, seed)?;
    let prefill = |sample: &Sample| {
        work::prefill(sample.prompt_tokens as f64, sample.cached_tokens as f64, &fleet.engine)
    };
    let turns = trace.sessions.iter().flat_map(|session| &session.turns);
    let answers: f64 = turns.map(|turn| work::decode(turn, &fleet.engine)).sum();
    Ok(samples.iter().map(prefill).sum::<f64>() + answers)
}

/// How long an idle engine takes for a prompt of which so many tokens are not cached.
fn first_token(engine: &EngineConfig, prompt: f64, uncached: f64) -> Duration {
    let steps = (uncached / engine.max_num_batched_tokens.max(1) as f64).ceil();
    let attended = uncached * (prompt - uncached / 2.0);
    let seconds = steps * engine.step_base.as_secs_f64()
        + uncached / engine.prefill_rate
        + attended / engine.attention_rate;
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::open::{Options, open};

    fn scene(cell: &Cell, seed: u64) -> Scene {
        let equipment =
            Equipment { engine: EngineConfig::default(), threads: 1, cost: "{}".to_owned() };
        let cut = Cut { requests: 200, turns: None, prompt_tokens: None };
        let trace = open("conversations", &Options::default(), seed).unwrap();
        Scene::of(&trace, cell, cut, &equipment, seed).unwrap().unwrap()
    }

    #[test]
    fn cache_and_replicas_are_the_cells_and_the_target_is_the_traces() {
        let cell = Cell { trace: 0, replicas: 2, cache: 0.5, load: 0.4 };
        let (small, large) = (scene(&cell, 1), scene(&Cell { cache: 1.0, load: 0.8, ..cell }, 1));
        let blocks = |scene: &Scene| f64::from(scene.fleet.engine.capacity_blocks);
        assert!((blocks(&large) / blocks(&small) - 2.0).abs() < 0.01);
        assert_eq!(small.fleet.replicas, 2);
        assert_eq!(small.target(), large.target());
    }

    #[test]
    fn a_prompt_alone_takes_its_steps_its_tokens_and_their_pairs() {
        let engine = EngineConfig {
            max_num_batched_tokens: 1000,
            step_base: Duration::from_millis(10),
            prefill_rate: 10_000.0,
            attention_rate: 1e8,
            ..EngineConfig::default()
        };
        // Two steps, 150 ms for the tokens, 33.75 ms for 1500 tokens that attend to 2250 on average.
        assert_eq!(first_token(&engine, 3000.0, 1500.0), Duration::from_micros(203_750));
    }
}
