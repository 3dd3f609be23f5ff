//! Which replica is asked what next.
//!
//! Whoever waits longest is asked first, so that with more replicas than can be asked in time each
//! is asked less often and none never. A replica that does not answer is not asked again meanwhile.
//! It asks nothing itself, and how often an agent is worth asking is [`super::agents`]' part.

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
    /// What its agent reports.
    Report,
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

/// A replica, and what there is to ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wish {
    /// Whom.
    pub id: ReplicaId,
    /// Whether itself for its load and models.
    pub metrics: bool,
    /// See there.
    pub models: bool,
    /// Whether its agent for a report.
    pub report: Option<Interval>,
}

/// How often one agent is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interval {
    /// Between two questions.
    pub every: Duration,
    /// Whether it is only tried out: its last answer was no report, or there was none yet.
    pub is_trial: bool,
}

/// Agents tried out at once. What does not report may answer with anything, and Envoy collects up to 32 MiB of each
/// answer: a quarter of a gigabyte. Halved, an unreachable fleet of agents takes longer to come back; doubled, so is that.
const MAX_TRIALS: usize = 8;

/// When a replica is asked next.
#[derive(Debug, Clone, Copy, Default)]
struct Due {
    metrics: Moment,
    models: Moment,
    report: Reported,
}

#[derive(Debug, Clone, Copy, Default)]
struct Reported {
    /// When the last question was due.
    asked: Option<Moment>,
    is_under_way: bool,
    is_trial: bool,
}

impl Reported {
    fn due(&self, interval: Interval, timeout: Duration) -> Moment {
        let Some(asked) = self.asked else { return Moment::default() };
        let lost = if self.is_under_way { timeout } else { Duration::ZERO };
        asked.plus(interval.every + lost)
    }

    /// A question that is due at `due` is asked now. The next one is so much after this one was due, or ticks that come
    /// late would add up; but not sooner for a question that was never due before.
    fn ask(&mut self, id: ReplicaId, due: Moment, interval: Interval, now: Moment) {
        let is_late = now.since(due) >= interval.every;
        self.asked = Some(match self.asked {
            None => now.plus(stagger(id, interval.every)),
            Some(_) if is_late => now,
            Some(_) => due,
        });
        (self.is_under_way, self.is_trial) = (true, interval.is_trial);
    }
}

/// How much longer a replica's first interval is than its others, so that not all are asked on one tick: less than one
/// of them, and by the golden ratio far from that of each neighbour.
fn stagger(id: ReplicaId, every: Duration) -> Duration {
    let share = id.slot.wrapping_mul(0x9e37_79b9);
    every.mul_f64(f64::from(share) / 2f64.powi(32))
}

/// See the module.
#[derive(Debug, Default)]
pub struct Schedule {
    due: HashMap<ReplicaId, Due>,
}

impl Schedule {
    /// At most `most` questions that are due now. Who is not among `wishes` is forgotten.
    pub fn next(
        &mut self,
        wishes: impl Iterator<Item = Wish>,
        pace: &Pace,
        now: Moment,
        most: usize,
    ) -> Vec<(ReplicaId, Question)> {
        let mut kept = HashMap::with_capacity(self.due.len());
        let mut waiting = Vec::new();
        for Wish { id, metrics, models, report } in wishes {
            let due = self.due.get(&id).copied().unwrap_or_default();
            kept.insert(id, due);
            if metrics {
                waiting.push((due.metrics, id, Question::Metrics, None));
            }
            if models {
                waiting.push((due.models, id, Question::Models, None));
            }
            if let Some(interval) = report {
                let due = due.report.due(interval, pace.timeout);
                waiting.push((due, id, Question::Report, Some(interval)));
            }
        }
        self.due = kept;
        waiting.retain(|(due, ..)| *due <= now);
        waiting.sort_by_key(|(due, ..)| *due);
        let mut trials = MAX_TRIALS.saturating_sub(self.trials(now, pace));
        waiting.retain(|(.., interval)| {
            let is_trial = interval.is_some_and(|interval| interval.is_trial);
            let has_turn = !is_trial || trials > 0;
            trials -= usize::from(is_trial && has_turn);
            has_turn
        });
        waiting.truncate(most);
        for (due, id, question, interval) in &waiting {
            let Some(next) = self.due.get_mut(id) else { continue };
            match (question, interval) {
                (Question::Metrics, _) => next.metrics = now.plus(pace.metrics + pace.timeout),
                (Question::Models, _) => next.models = now.plus(pace.models + pace.timeout),
                (Question::Report, Some(interval)) => next.report.ask(*id, *due, *interval, now),
                (Question::Report, None) => {}
            }
        }
        waiting.into_iter().map(|(_, id, question, _)| (id, question)).collect()
    }

    /// Trials under way.
    fn trials(&self, now: Moment, pace: &Pace) -> usize {
        let is_open = |reported: &Reported| {
            let asked = reported.asked.unwrap_or_default();
            reported.is_trial && reported.is_under_way && now <= asked.plus(pace.timeout)
        };
        self.due.values().filter(|due| is_open(&due.report)).count()
    }

    /// A question has been answered, or could not be asked: the time that the answer might have
    /// taken is not waited for.
    pub fn answered(&mut self, id: ReplicaId, question: Question, pace: &Pace) {
        let Some(due) = self.due.get_mut(&id) else { return };
        let due = match question {
            Question::Metrics => &mut due.metrics,
            Question::Models => &mut due.models,
            Question::Report => {
                due.report.is_under_way = false;
                return;
            }
        };
        let timeout = u64::try_from(pace.timeout.as_nanos()).unwrap_or(u64::MAX);
        *due = Moment(due.0.saturating_sub(timeout));
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

    fn id(slot: u32) -> ReplicaId {
        ReplicaId { slot, incarnation: 1 }
    }

    fn ids(count: u32) -> impl Iterator<Item = Wish> {
        let wish = |slot| Wish { id: id(slot), metrics: true, models: true, report: None };
        (0..count).map(wish)
    }

    fn agents(count: u32, every_ms: u64, is_trial: bool) -> impl Iterator<Item = Wish> {
        let interval = Interval { every: Duration::from_millis(every_ms), is_trial };
        let wish = move |slot| Wish {
            id: id(slot),
            metrics: false,
            models: false,
            report: Some(interval),
        };
        (0..count).map(wish)
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

    /// On how many of the ticks from 10 s on each of 64 agents is asked, and how many at most on one.
    fn asked(every_ms: u64, late_ms: u64, ticks: u64) -> (u32, u32, usize) {
        let mut schedule = Schedule::default();
        let (mut counts, mut at_once) = ([0_u32; 64], 0);
        for tick in 0..100 + ticks {
            let now = at(100 * tick + tick % 2 * late_ms);
            let questions = schedule.next(agents(64, every_ms, false), &PACE, now, 32);
            for (id, question) in &questions {
                schedule.answered(*id, *question, &PACE);
                counts[id.slot as usize] += u32::from(tick >= 100);
            }
            at_once = at_once.max(if tick >= 100 { questions.len() } else { 0 });
        }
        (*counts.iter().min().unwrap(), *counts.iter().max().unwrap(), at_once)
    }

    #[test]
    fn agents_are_asked_in_their_interval_and_not_all_at_once() {
        let (least, most, at_once) = asked(2000, 0, 200);
        assert!(least >= 9 && most <= 11 && at_once <= 5, "{least} to {most}, {at_once} at once");
        let (least, most, at_once) = asked(400, 0, 200);
        assert!(least >= 49 && most <= 51 && at_once <= 20, "{least} to {most}, {at_once} at once");
    }

    #[test]
    fn ticks_that_come_late_do_not_add_up() {
        let (least, most, _) = asked(200, 30, 200);
        assert!(least >= 95 && most <= 101, "{least} to {most}");
    }

    #[test]
    fn an_agent_that_is_to_be_asked_sooner_is() {
        let mut schedule = Schedule::default();
        let mut ask = |every_ms, ms| {
            let questions = schedule.next(agents(1, every_ms, false), &PACE, at(ms), 32);
            for (id, question) in &questions {
                schedule.answered(*id, *question, &PACE);
            }
            questions.len()
        };
        // The first interval of the first place is no longer than its others.
        assert_eq!([ask(2000, 1), ask(2000, 2000), ask(2000, 2001)], [1, 0, 1]);
        assert_eq!([ask(2000, 2500), ask(200, 2500), ask(200, 2600), ask(200, 2700)], [0, 1, 0, 1]);
    }

    #[test]
    fn an_agent_that_does_not_answer_is_not_asked_again_before_it_must_have() {
        let mut schedule = Schedule::default();
        let mut ask = |ms| schedule.next(agents(1, 200, false), &PACE, at(ms), 32).len();
        assert_eq!([ask(0), ask(2100), ask(2200)], [1, 0, 1]);
    }

    #[test]
    fn few_agents_are_tried_out_at_once_and_all_in_turn() {
        let mut schedule = Schedule::default();
        let mut counts = [0_u32; 64];
        for tick in 0..200 {
            let questions = schedule.next(agents(64, 200, true), &PACE, at(100 * tick), 32);
            assert!(questions.len() <= MAX_TRIALS, "{}", questions.len());
            for (id, _) in questions {
                counts[id.slot as usize] += 1;
            }
        }
        // Nobody answers, so eight have their turn in two seconds.
        assert!(counts.iter().all(|count| (1..=2).contains(count)), "{counts:?}");
    }
}
