//! The work in a trace, when it comes, and at which pace it comes at a given rate: see [`super::load`] for what counts as
//! work.
//!
//! It does not choose sessions.

use super::{Session, Trace, Turn};
use hashbrown::{HashMap, HashSet};
use std::time::Duration;
use warmpath::mock::engine::EngineConfig;

/// How often pauses are halved before they are left out altogether.
const HALVINGS: i32 = 8;

/// Steps in which a pace is looked for: enough for a load within a thousandth.
const STEPS: usize = 40;

/// What sessions ask of a fleet and when, in seconds.
pub struct Works {
    /// As in the trace.
    pub sessions: Vec<Times>,
    /// When the last family arrives.
    pub span: f64,
}

/// A session's.
pub struct Times {
    /// When the family arrives.
    family: f64,
    /// How much later this session does, at the pace of the family's pauses.
    behind: f64,
    /// Its turns'.
    pub turns: Vec<Work>,
}

/// A turn's.
#[derive(Clone, Copy)]
pub struct Work {
    think: f64,
    /// In replica-seconds.
    pub work: f64,
    /// From being asked to the answer's end, on an idle engine.
    pub takes: f64,
}

impl Times {
    fn arrival(&self, pace: f64, pauses: f64) -> f64 {
        self.family * pace + self.behind * pauses
    }

    fn length(&self, pauses: f64) -> f64 {
        self.turns.iter().map(|turn| turn.think * pauses + turn.takes).sum()
    }
}

impl Works {
    /// That of a trace.
    pub fn of(trace: &Trace, engine: &EngineConfig) -> Self {
        let mut conversations: HashMap<&str, f64> = HashMap::new();
        for session in &trace.sessions {
            let arrival = session.arrival.as_secs_f64();
            let first = conversations.entry(conversation(&session.name)).or_insert(arrival);
            *first = first.min(arrival);
        }
        let mut seen: HashSet<u64> = HashSet::new();
        let times = |session: &Session| {
            let arrival = session.arrival.as_secs_f64();
            let family = conversations.get(conversation(&session.name)).copied();
            let family = family.unwrap_or(arrival);
            let turns = session.turns.iter().map(|turn| {
                let known = turn.blocks.iter().take_while(|block| seen.contains(*block)).count();
                seen.extend(turn.blocks.iter().chain(&turn.answer_blocks));
                of_turn(turn, (turn.keep + known) as f64 * f64::from(trace.block_tokens), engine)
            });
            Times { family, behind: arrival - family, turns: turns.collect() }
        };
        let sessions: Vec<Times> = trace.sessions.iter().map(times).collect();
        let span = sessions.iter().map(|session| session.family).fold(0.0, f64::max);
        Self { sessions, span }
    }

    /// Gives the trace these times.
    pub fn apply(&self, trace: &mut Trace, pace: f64, pauses: f64) {
        for (session, times) in trace.sessions.iter_mut().zip(&self.sessions) {
            session.arrival = seconds(times.arrival(pace, pauses));
            for turn in &mut session.turns {
                turn.think = seconds(turn.think.as_secs_f64() * pauses);
            }
        }
        trace.sessions.sort_by_key(|session| session.arrival);
    }

    /// All of it.
    pub fn total(&self) -> f64 {
        self.sessions.iter().flat_map(|session| &session.turns).map(|turn| turn.work).sum()
    }

    /// How far to move families together, and what to shorten pauses by, for so much work per second. Else the most
    /// work per second there can be.
    pub fn pace(&self, rate: f64) -> Result<(f64, f64), f64> {
        for halving in 0..=HALVINGS + 1 {
            let is_last = halving > HALVINGS;
            let pauses = if is_last { 0.0 } else { 0.5_f64.powi(halving) };
            let lengths: f64 = self.sessions.iter().map(|session| session.length(pauses)).sum();
            let mean = lengths / self.sessions.len().max(1) as f64;
            let least = if is_last { 0.0 } else { mean / self.span.max(f64::MIN_POSITIVE) };
            if self.rate(least, pauses) >= rate {
                return Ok((self.pace_from(least, pauses, rate), pauses));
            }
        }
        Err(self.rate(0.0, 0.0))
    }

    /// The slowest pace that still has this rate, which `least` exceeds.
    fn pace_from(&self, least: f64, pauses: f64, rate: f64) -> f64 {
        let (mut fast, mut slow) = (least, least.max(1e-6) * 2.0);
        for _ in 0..STEPS {
            if self.rate(slow, pauses) < rate {
                break;
            }
            (fast, slow) = (slow, slow * 2.0);
        }
        for _ in 0..STEPS {
            let middle = f64::midpoint(fast, slow);
            let half = if self.rate(middle, pauses) < rate { &mut slow } else { &mut fast };
            *half = middle;
        }
        fast
    }

    /// Work per second while the middle four fifths of it arrive.
    pub fn rate(&self, pace: f64, pauses: f64) -> f64 {
        let mut arriving = Vec::new();
        for session in &self.sessions {
            let mut now = session.arrival(pace, pauses);
            for turn in &session.turns {
                now += turn.think * pauses;
                arriving.push((now, turn.work));
                now += turn.takes;
            }
        }
        arriving.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
        let total: f64 = arriving.iter().map(|(_, work)| work).sum();
        let at = |share: f64| {
            let mut so_far = 0.0;
            let reached = arriving.iter().find(|(_, work)| {
                so_far += work;
                so_far >= total * share
            });
            reached.or(arriving.last()).map_or(0.0, |(time, _)| *time)
        };
        total * 0.8 / (at(0.9) - at(0.1)).max(1e-9)
    }
}

fn of_turn(turn: &Turn, cached: f64, engine: &EngineConfig) -> Work {
    let prefill = prefill(f64::from(turn.prompt_tokens), cached, engine);
    let answer = f64::from(turn.answer_tokens);
    let (step, each) = (engine.step_base.as_secs_f64(), engine.decode_per_sequence.as_secs_f64());
    Work {
        think: turn.think.as_secs_f64(),
        work: prefill + decode(turn, engine),
        takes: prefill + answer * (each + step),
    }
}

/// The work of a prompt, in replica-seconds, where so many of its tokens are cached.
pub fn prefill(prompt: f64, cached: f64, engine: &EngineConfig) -> f64 {
    // An engine computes the last token in any case.
    let uncached = (prompt - cached).max(1.0);
    let attended = uncached * (prompt - uncached / 2.0);
    uncached / engine.prefill_rate + attended / engine.attention_rate
}

/// The work of a turn's answer, in replica-seconds, in full steps.
pub fn decode(turn: &Turn, engine: &EngineConfig) -> f64 {
    let (step, each) = (engine.step_base.as_secs_f64(), engine.decode_per_sequence.as_secs_f64());
    f64::from(turn.answer_tokens) * (each + step / engine.max_num_seqs.max(1) as f64)
}

/// A time from a number that may be too large for one.
pub fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// The conversation that a session is, or is a sub-agent of.
pub fn conversation(name: &str) -> &str {
    name.split('/').next().unwrap_or(name)
}
