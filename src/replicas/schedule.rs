//! Which replica is asked what next.
//!
//! Whoever waits longest is asked first, so that with more replicas than can be asked in time each
//! is asked less often and none never. A replica that does not answer is not asked again meanwhile.
//! It asks nothing itself.

use super::{Moment, ReplicaId};
use hashbrown::HashMap;
use std::time::Duration;

/// What a replica is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// Its load.
    Metrics,
    /// The models it serves.
    Models,
}

/// How often.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Between two questions for the load.
    pub metrics: Duration,
    /// Between two questions for the models.
    pub models: Duration,
    /// How long an answer may take.
    pub timeout: Duration,
}

/// When a replica is asked next.
#[derive(Debug, Clone, Copy, Default)]
struct Due {
    metrics: Moment,
    models: Moment,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Schedule {
    due: HashMap<ReplicaId, Due>,
}

impl Schedule {
    /// At most `most` questions that are due now. Who is not among `replicas` is forgotten.
    pub fn next(
        &mut self,
        replicas: impl Iterator<Item = ReplicaId>,
        pace: &Pace,
        now: Moment,
        most: usize,
    ) -> Vec<(ReplicaId, Question)> {
        let mut kept = HashMap::with_capacity(self.due.len());
        let mut waiting = Vec::new();
        for id in replicas {
            let due = self.due.get(&id).copied().unwrap_or_default();
            kept.insert(id, due);
            waiting.push((due.metrics, id, Question::Metrics));
            waiting.push((due.models, id, Question::Models));
        }
        self.due = kept;
        waiting.retain(|(due, ..)| *due <= now);
        waiting.sort_by_key(|(due, ..)| *due);
        waiting.truncate(most);
        for (_, id, question) in &waiting {
            if let Some(due) = self.due.get_mut(id) {
                match question {
                    Question::Metrics => due.metrics = now.plus(pace.metrics + pace.timeout),
                    Question::Models => due.models = now.plus(pace.models + pace.timeout),
                }
            }
        }
        waiting.into_iter().map(|(_, id, question)| (id, question)).collect()
    }

    /// A question has been answered, or could not be asked: the time that the answer might have
    /// taken is not waited for.
    pub fn answered(&mut self, id: ReplicaId, question: Question, pace: &Pace) {
        if let Some(due) = self.due.get_mut(&id) {
            let due = match question {
                Question::Metrics => &mut due.metrics,
                Question::Models => &mut due.models,
            };
            let timeout = u64::try_from(pace.timeout.as_nanos()).unwrap_or(u64::MAX);
            *due = Moment(due.0.saturating_sub(timeout));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Pace = Pace {
        metrics: Duration::from_millis(500),
        models: Duration::from_secs(10),
        timeout: Duration::from_secs(2),
    };

    fn at(ms: u64) -> Moment {
        Moment::default().plus(Duration::from_millis(ms))
    }

    fn ids(count: u32) -> impl Iterator<Item = ReplicaId> {
        (0..count).map(|slot| ReplicaId { slot, incarnation: 1 })
    }

    #[test]
    fn a_replica_is_asked_at_once_and_then_at_its_pace() {
        let mut schedule = Schedule::default();
        let mut ask = |ms| {
            let asked = schedule.next(ids(1), &PACE, at(ms), 32);
            for (id, question) in &asked {
                schedule.answered(*id, *question, &PACE);
            }
            asked.into_iter().map(|(_, question)| question).collect::<Vec<_>>()
        };
        assert_eq!(ask(1), [Question::Metrics, Question::Models]);
        assert_eq!(ask(500), []);
        assert_eq!(ask(501), [Question::Metrics]);
    }

    #[test]
    fn who_does_not_answer_is_not_asked_again_before_it_must_have() {
        let mut schedule = Schedule::default();
        assert_eq!(schedule.next(ids(1), &PACE, at(0), 32).len(), 2);
        assert_eq!(schedule.next(ids(1), &PACE, at(2499), 32).len(), 0);
        assert_eq!(schedule.next(ids(1), &PACE, at(2500), 32).len(), 1);
    }

    #[test]
    fn with_more_replicas_than_time_each_gets_its_turn() {
        let mut schedule = Schedule::default();
        let mut counts = [0_u32; 1024];
        for tick in 0..1024 {
            for (id, question) in schedule.next(ids(1024), &PACE, at(100 * tick), 32) {
                schedule.answered(id, question, &PACE);
                counts[id.slot as usize] += u32::from(question == Question::Metrics);
            }
        }
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(*least >= 20 && most - least <= 2, "{least} to {most}");
    }

    #[test]
    fn who_left_is_forgotten() {
        let mut schedule = Schedule::default();
        schedule.next(ids(9), &PACE, at(0), 32);
        schedule.next(ids(2), &PACE, at(0), 32);
        assert_eq!(schedule.due.len(), 2);
    }
}
