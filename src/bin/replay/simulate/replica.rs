//! One replica in virtual time: an engine that is in a step, or in many at once.
//!
//! Steps that only decode are taken as one run. Whoever wants something of the replica in the middle of a run cuts it
//! short at the end of the step that is under way, so that the outcome is that of single steps.

use super::policy::Change;
use std::time::Duration;
use warmpath::mock::engine::EngineConfig;
use warmpath::mock::scheduler::{Load, RequestId, Scheduler, StepReport, SubmitError, Work};

/// See the module.
pub struct Replica {
    /// As it was configured, and what it is now.
    nominal: EngineConfig,
    engine: Scheduler<u64>,
    phase: Phase,
    started_at: f64,
    has_events: bool,
    /// What became of its blocks in phases that have ended.
    changes: Vec<Change>,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Step(StepReport),
    /// So many steps of equal length, none of which is done in the engine yet.
    Run {
        began: Duration,
        each: Duration,
        steps: u32,
    },
    /// What is left of a run that was cut short; in the engine it is done.
    Until(Duration),
}

/// What a replica did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// A request came into the batch, and so much of its prompt was cached.
    Admitted { id: RequestId, cached_tokens: usize },
    /// It got a token.
    Token { id: RequestId, first: bool, last: bool, at: Duration },
    /// It got so many tokens, neither the first nor the last among them.
    Tokens { id: RequestId, began: Duration, each: Duration, count: u32 },
}

impl Replica {
    /// An idle one, which may keep what becomes of its blocks.
    pub fn new(config: EngineConfig, has_events: bool) -> Self {
        let engine = Scheduler::new(config.clone());
        let (phase, started_at, changes) = (Phase::Idle, 1.0, Vec::new());
        let mut replica = Self { nominal: config, engine, phase, started_at, has_events, changes };
        replica.listen();
        replica
    }

    fn listen(&mut self) {
        if self.has_events {
            self.engine.listen();
            self.changes = self.engine.changes();
        }
    }

    /// What became of its blocks in phases that have ended, since the last call.
    pub fn changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// When its process began, and the blocks it says it has.
    pub fn process(&self) -> (f64, u32) {
        (self.started_at, self.nominal.capacity_blocks)
    }

    /// How busy it is. A run that is under way must have been cut short.
    pub fn load(&self) -> Load {
        self.engine.load()
    }

    /// When its phase ends, unless it is cut short.
    pub fn wakes(&self) -> Option<Duration> {
        match &self.phase {
            Phase::Idle => None,
            Phase::Step(report) => Some(report.ended),
            Phase::Run { began, each, steps } => Some(*began + *each * *steps),
            Phase::Until(end) => Some(*end),
        }
    }

    /// Ends its phase and begins the next. `told` gets what it did.
    pub fn wake(&mut self, now: Duration, told: &mut Vec<Progress>) {
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Step(report) => tell(&report, told),
            Phase::Run { began, each, steps } => self.run(began, each, steps, told),
            Phase::Idle | Phase::Until(_) => {}
        }
        self.changes.append(&mut self.engine.changes());
        self.begin(now);
    }

    /// Begins a step or a run, unless it is in one or has nothing to do.
    pub fn begin(&mut self, now: Duration) {
        if !matches!(self.phase, Phase::Idle) || self.engine.is_idle() {
            return;
        }
        let steps = u32::try_from(self.engine.decode_steps()).unwrap_or(u32::MAX);
        self.phase = if steps > 0 {
            Phase::Run { began: now, each: self.engine.decode_time(), steps }
        } else {
            Phase::Step(self.engine.step(now))
        };
    }

    /// Cuts a run short at the end of the step that is under way.
    pub fn cut_short(&mut self, now: Duration, told: &mut Vec<Progress>) {
        let Phase::Run { began, each, steps } = self.phase else { return };
        let begun = (now - began).as_nanos().div_ceil(each.as_nanos().max(1));
        let begun = u32::try_from(begun).unwrap_or(u32::MAX).clamp(1, steps);
        self.run(began, each, begun, told);
        self.phase = Phase::Until(began + each * begun);
    }

    fn run(&mut self, began: Duration, each: Duration, count: u32, told: &mut Vec<Progress>) {
        told.extend(self.engine.running().map(|id| Progress::Tokens { id, began, each, count }));
        self.engine.decode(count as usize);
    }

    /// Queues a request. A run that is under way must have been cut short.
    ///
    /// # Errors
    /// When it could never fit.
    pub fn submit(&mut self, work: Work<u64>) -> Result<(), SubmitError> {
        self.engine.submit(work)
    }

    /// Has another process in its place, with nothing in flight and nothing cached.
    pub fn restart(&mut self, now: Duration) {
        self.nominal.capacity_blocks = u32::try_from(self.load().capacity_blocks).unwrap_or(0);
        let config = EngineConfig {
            capacity_blocks: self.nominal.capacity_blocks,
            ..self.engine.config().clone()
        };
        self.engine = Scheduler::new(config);
        self.phase = Phase::Idle;
        self.started_at = 1.0 + now.as_secs_f64();
        self.listen();
    }

    /// Gives its cache so many blocks, and says which requests can never fit any more: they are aborted.
    pub fn set_cache(&mut self, blocks: u32) -> Vec<RequestId> {
        self.engine.resize(blocks as usize)
    }

    /// Makes it so many times as fast as it was configured, from its next step on.
    pub fn set_speed(&mut self, times: f64) {
        self.engine.set_pace(&at_speed(&self.nominal, times));
    }
}

/// An engine that is so many times as fast.
pub fn at_speed(config: &EngineConfig, times: f64) -> EngineConfig {
    EngineConfig {
        step_base: config.step_base.div_f64(times),
        prefill_rate: config.prefill_rate * times,
        attention_rate: config.attention_rate * times,
        decode_per_sequence: config.decode_per_sequence.div_f64(times),
        ..config.clone()
    }
}

fn tell(report: &StepReport, told: &mut Vec<Progress>) {
    told.extend(report.admitted.iter().map(|admitted| Progress::Admitted {
        id: admitted.id,
        cached_tokens: admitted.cached_tokens,
    }));
    told.extend(report.produced.iter().map(|produced| Progress::Token {
        id: produced.id,
        first: produced.first,
        last: produced.last,
        at: report.ended,
    }));
}
