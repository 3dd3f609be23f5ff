//! Which blocks a trace will ask for again, and when.
//!
//! It knows the trace to its end. When a turn will be asked depends on the answers before it; until those have ended it
//! is reckoned from a pace of generation.

use super::super::baselines::holders::ByBlock;
use crate::trace::Trace;
use std::time::Duration;

/// For a token of an answer, where its end is not yet known.
const TOKEN: Duration = Duration::from_millis(20);

/// See the module.
pub struct Future {
    uses: ByBlock<Uses>,
    sessions: Vec<Session>,
}

/// Who asks for a block.
#[derive(Clone, Copy)]
enum Uses {
    /// One session, last in this turn, about then.
    One { session: usize, turn: usize, at: Duration },
    /// Several, the last of them about then.
    Several { at: Duration },
}

/// A session as it stands.
struct Session {
    /// For each turn the pause before it, and the answer's tokens.
    turns: Vec<(Duration, u32)>,
    /// The turn to be asked next, and when.
    next: usize,
    due: Duration,
}

impl Future {
    /// Of a trace that has not begun.
    pub fn of(trace: &Trace) -> Self {
        let session = |planned: &crate::trace::Session| Session {
            turns: planned.turns.iter().map(|turn| (turn.think, turn.answer_tokens)).collect(),
            next: 0,
            due: planned.arrival,
        };
        let sessions = trace.sessions.iter().map(session).collect();
        let mut future = Self { uses: ByBlock::default(), sessions };
        let mut chain = Vec::new();
        for (number, planned) in trace.sessions.iter().enumerate() {
            chain.clear();
            let mut at = planned.arrival;
            for (turn, asked) in planned.turns.iter().enumerate() {
                at += asked.think;
                trace.advance(number, turn, &mut chain);
                // The next turn keeps the first of these; of the others this is the last use.
                let next = planned.turns.get(turn + 1).map_or(0, |next| next.keep);
                for block in chain.iter().skip(next) {
                    future.last_used(*block, Uses::One { session: number, turn, at });
                }
                at += TOKEN * asked.answer_tokens;
            }
        }
        future
    }

    fn last_used(&mut self, block: u64, last: Uses) {
        let Uses::One { session, at, .. } = last else { return };
        let known = self.uses.entry(block).or_insert(last);
        *known = match *known {
            Uses::One { session: same, .. } if same == session => last,
            Uses::One { at: other, .. } | Uses::Several { at: other } => {
                Uses::Several { at: at.max(other) }
            }
        };
    }

    /// A session asks its next turn.
    pub fn asked(&mut self, session: usize, now: Duration) {
        let Some(session) = self.sessions.get_mut(session) else { return };
        let answer = session.turns.get(session.next).map_or(0, |(_, tokens)| *tokens);
        session.next += 1;
        session.due = now + TOKEN * answer + session.pause();
    }

    /// A session's answer has ended.
    pub fn answered(&mut self, session: usize, now: Duration) {
        if let Some(session) = self.sessions.get_mut(session) {
            session.due = now + session.pause();
        }
    }

    /// How long until a block is asked for again, if it ever is. What several ask for is always about to be, until the
    /// last has asked.
    pub fn next_use(&self, block: u64, now: Duration) -> Option<Duration> {
        match *self.uses.get(&block)? {
            Uses::Several { at } => (at > now).then_some(Duration::ZERO),
            Uses::One { session, turn, .. } => {
                let session = self.sessions.get(session)?;
                (turn >= session.next).then(|| session.due.saturating_sub(now))
            }
        }
    }

    /// Whether a block is this session's alone.
    pub fn is_own(&self, block: u64, session: usize) -> bool {
        matches!(self.uses.get(&block), Some(Uses::One { session: owner, .. }) if *owner == session)
    }
}

impl Session {
    fn pause(&self) -> Duration {
        self.turns.get(self.next).map_or(Duration::ZERO, |(think, _)| *think)
    }
}
