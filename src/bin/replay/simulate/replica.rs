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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gaps::Gaps;
    use crate::random::Random;
    use std::collections::BTreeMap;

    /// What came of one request.
    #[derive(Debug, Default, PartialEq)]
    struct Outcome {
        cached: usize,
        first: Duration,
        last: Duration,
        gaps: Gaps,
    }

    struct Side {
        replica: Replica,
        is_single: bool,
        told: Vec<Progress>,
        outcomes: BTreeMap<RequestId, Outcome>,
    }

    impl Side {
        /// Lives through the phases that end before this.
        fn until(&mut self, now: Duration) {
            while let Some(wakes) = self.replica.wakes().filter(|wakes| *wakes < now) {
                self.replica.wake(wakes, &mut self.told);
                self.begun(wakes);
            }
        }

        fn begun(&mut self, now: Duration) {
            if self.is_single {
                self.replica.cut_short(now, &mut self.told);
            }
            for progress in std::mem::take(&mut self.told) {
                match progress {
                    Progress::Admitted { id, cached_tokens } => {
                        self.outcomes.entry(id).or_default().cached = cached_tokens;
                    }
                    Progress::Tokens { id, began, each, count } => {
                        let outcome = self.outcomes.entry(id).or_default();
                        outcome.gaps.push(began + each - outcome.last);
                        outcome.gaps.push_run(each, count - 1);
                        outcome.last = began + each * count;
                    }
                    Progress::Token { id, first, at, .. } => {
                        let outcome = self.outcomes.entry(id).or_default();
                        if first {
                            outcome.first = at;
                        } else {
                            outcome.gaps.push(at - outcome.last);
                        }
                        outcome.last = at;
                    }
                }
            }
        }
    }

    #[test]
    fn runs_cut_anywhere_are_what_single_steps_are() {
        for seed in 0..20 {
            let mut random = Random::new(seed, 0);
            let config =
                EngineConfig { capacity_blocks: 120, max_num_seqs: 6, ..EngineConfig::default() };
            let mut sides = [false, true].map(|is_single| Side {
                replica: Replica::new(config.clone(), false),
                is_single,
                told: Vec::new(),
                outcomes: BTreeMap::new(),
            });
            let mut now = Duration::ZERO;
            for number in 0..120 {
                now += Duration::from_micros(1 + random.below(400_000) as u64);
                let prompt = 1 + random.below(40) as u64;
                let family = random.below(3) as u64 * 1000;
                let work = Work {
                    id: RequestId(number),
                    keys: (family..family + prompt).collect(),
                    prompt_tokens: prompt as usize * 16 + random.below(16),
                    max_tokens: 1 + random.below(300),
                    reads_cache: true,
                };
                let is_look = random.below(3) == 0;
                let loads = sides.each_mut().map(|side| {
                    side.until(now);
                    side.replica.cut_short(now, &mut side.told);
                    if !is_look {
                        side.replica.submit(work.clone()).unwrap();
                        side.replica.begin(now);
                    }
                    side.begun(now);
                    side.replica.load()
                });
                assert_eq!(loads[0], loads[1], "seed {seed}, request {number}");
            }
            sides.iter_mut().for_each(|side| side.until(Duration::MAX));
            let [runs, single] = sides;
            assert!(runs.outcomes.len() > 50);
            assert_eq!(runs.outcomes, single.outcomes, "seed {seed}");
        }
    }

    #[test]
    fn a_replica_at_half_speed_takes_twice_as_long() {
        let took = |speed| {
            let mut replica = Replica::new(EngineConfig::default(), false);
            replica.set_speed(speed);
            let (keys, prompt_tokens, max_tokens) = ((0..100).collect(), 1600, 50);
            let work =
                Work { id: RequestId(0), keys, prompt_tokens, max_tokens, reads_cache: true };
            replica.submit(work).unwrap();
            replica.begin(Duration::ZERO);
            let (mut end, mut told) = (Duration::ZERO, Vec::new());
            while let Some(wakes) = replica.wakes() {
                end = wakes;
                replica.wake(wakes, &mut told);
            }
            end.as_secs_f64()
        };
        assert!((took(0.5) / took(1.0) - 2.0).abs() < 1e-6);
    }
}
