//! Which replica of a model is sent the canaries next.
//!
//! One that has not been asked since its process began comes first, so that a replica with another tokenizer is found
//! before much goes there; then each in turn, once in an interval. It sends nothing.

use crate::replicas::{Moment, ReplicaId};
use hashbrown::{HashMap, HashSet};
use std::time::Duration;

/// Between two replicas of one model. A set of canaries costs a replica some 30 ms: a thousand new ones are asked in
/// seventeen minutes.
const GAP: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Turn {
    asked: HashSet<ReplicaId>,
    last: Option<ReplicaId>,
    not_before: Moment,
    due: Moment,
}

/// See the module.
#[derive(Default)]
pub struct Rota(HashMap<u64, Turn>);

impl Rota {
    /// Who of `replicas`, those that serve the model, is asked now.
    pub fn next(
        &mut self,
        model: u64,
        replicas: &[ReplicaId],
        interval: Duration,
        now: Moment,
    ) -> Option<ReplicaId> {
        let turn = self.0.entry(model).or_default();
        turn.asked.retain(|id| replicas.contains(id));
        if now < turn.not_before {
            return None;
        }
        let new = replicas.iter().find(|id| !turn.asked.contains(*id)).copied();
        let following = || {
            let after = replicas.iter().find(|id| turn.last.is_some_and(|last| **id > last));
            after.or_else(|| replicas.first()).copied()
        };
        let id = new.or_else(|| following().filter(|_| now >= turn.due))?;
        turn.asked.insert(id);
        turn.last = Some(id);
        turn.not_before = now.plus(GAP);
        turn.due = now.plus(interval);
        Some(id)
    }

    /// Lets a model be asked about again in `delay`, and not later.
    pub fn hurry(&mut self, model: u64, delay: Duration, now: Moment) {
        if let Some(turn) = self.0.get_mut(&model) {
            turn.due = turn.due.min(now.plus(delay));
        }
    }

    /// Forgets the models for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(u64) -> bool) {
        self.0.retain(|model, _| keep(*model));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(60);

    fn id(slot: u32, incarnation: u32) -> ReplicaId {
        ReplicaId { slot, incarnation }
    }

    fn at(seconds: u64) -> Moment {
        Moment::default().plus(Duration::from_secs(seconds))
    }

    #[track_caller]
    fn check(rota: &mut Rota, replicas: &[ReplicaId], seconds: u64, expected: Option<ReplicaId>) {
        assert_eq!(rota.next(1, replicas, INTERVAL, at(seconds)), expected, "at {seconds} s");
    }

    #[test]
    fn new_processes_are_asked_first_and_then_each_in_turn() {
        let mut rota = Rota::default();
        let two = [id(0, 1), id(1, 1)];
        check(&mut rota, &[], 10, None);
        check(&mut rota, &two, 10, Some(id(0, 1)));
        check(&mut rota, &two, 10, None);
        check(&mut rota, &two, 11, Some(id(1, 1)));
        check(&mut rota, &two, 12, None);
        check(&mut rota, &two, 70, None);
        check(&mut rota, &two, 71, Some(id(0, 1)));
        check(&mut rota, &two, 131, Some(id(1, 1)));
        let restarted = [id(0, 1), id(1, 2)];
        check(&mut rota, &restarted, 132, Some(id(1, 2)));
        check(&mut rota, &restarted, 133, None);
        check(&mut rota, &restarted, 192, Some(id(0, 1)));
    }

    #[test]
    fn what_differed_is_asked_again_soon() {
        let mut rota = Rota::default();
        let one = [id(0, 1)];
        check(&mut rota, &one, 10, Some(id(0, 1)));
        rota.hurry(1, Duration::from_secs(2), at(10));
        check(&mut rota, &one, 11, None);
        check(&mut rota, &one, 12, Some(id(0, 1)));
        check(&mut rota, &one, 14, None);
        rota.retain(|model| model != 1);
        check(&mut rota, &one, 14, Some(id(0, 1)));
    }
}
