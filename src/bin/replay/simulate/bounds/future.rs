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

#[cfg(test)]
mod tests {
    use super::super::known::{trace, turn};
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_block_is_used_again_when_its_session_asks_the_next_turn_that_keeps_it() {
        // Answers have 100 tokens: two seconds, as far as is known.
        let turns = vec![turn(0, &[1, 2, 3]), turn(2, &[4]), turn(1, &[5])];
        let mut future = Future::of(&trace(vec![turns]));
        future.asked(0, at(10));
        assert_eq!(future.next_use(1, at(11)), Some(at(11)), "ten of pause and one of the answer");
        assert_eq!(future.next_use(3, at(11)), None, "the second turn does not keep it");
        future.answered(0, at(20));
        assert_eq!(future.next_use(2, at(25)), Some(at(5)));
        future.asked(0, at(30));
        assert_eq!(future.next_use(1, at(30)), Some(at(12)));
        assert_eq!(future.next_use(2, at(30)), None);
        future.asked(0, at(60));
        assert_eq!(future.next_use(1, at(60)), None, "that was the last turn");
        assert_eq!(future.next_use(99, at(60)), None);
    }

    #[test]
    fn what_several_share_is_about_to_be_used_until_the_last_has_asked() {
        let sessions = vec![vec![turn(0, &[1, 2])], vec![turn(0, &[1, 2]), turn(1, &[3])]];
        let future = Future::of(&trace(sessions));
        assert_eq!(future.next_use(2, at(9)), Some(Duration::ZERO));
        assert_eq!(future.next_use(2, at(10)), None, "both have asked at ten");
        // The second session's next turn comes ten seconds behind its answer, and asks for the first block only.
        assert_eq!(future.next_use(1, at(21)), Some(Duration::ZERO));
        assert_eq!(future.next_use(1, at(22)), None);
        assert!(future.is_own(3, 1) && !future.is_own(3, 0) && !future.is_own(1, 1));
    }
}
