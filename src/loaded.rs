//! What has been loaded, for as long as somebody uses it; and what is to be loaded next.
//!
//! While one configuration of a VM replaces another, both name models, mostly the same. A model stays as long as one of
//! them holds it and not longer, or a VM would grow by some ten megabytes with every update that brings a new path. It
//! loads nothing itself.

use crate::replicas::Moment;
use hashbrown::HashMap;
use std::rc::{Rc, Weak};

/// Values by the cluster and the path that they came from.
#[derive(Debug)]
pub struct Loaded<T>(HashMap<(String, String), Weak<T>>);

impl<T> Default for Loaded<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> Loaded<T> {
    /// What was loaded from there, if somebody still holds it.
    pub fn find(&self, cluster: &str, path: &str) -> Option<Rc<T>> {
        self.0.get(&(cluster.to_owned(), path.to_owned()))?.upgrade()
    }

    /// Notes what was loaded, and forgets what nobody holds any more.
    pub fn note(&mut self, cluster: &str, path: &str, value: &Rc<T>) {
        self.0.retain(|_, value| value.strong_count() > 0);
        self.0.insert((cluster.to_owned(), path.to_owned()), Rc::downgrade(value));
    }
}

/// How far a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// To be fetched, not before this moment, and whether that has failed before.
    Waiting(Moment, bool),
    /// Being fetched or read.
    UnderWay,
    /// There.
    Ready,
}

/// Which one to go on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Next {
    /// Its place.
    pub index: usize,
    /// Whether it is begun anew after a failure: such a one lets whoever else waits go first.
    pub is_retry: bool,
}

/// Which place each server has, the same where it is named again. Those that are more than `most` share the last.
pub fn places<'a>(servers: impl Iterator<Item = &'a str>, most: usize) -> Vec<usize> {
    let mut named: Vec<&str> = Vec::new();
    let place = |server| {
        let known = named.iter().position(|name| *name == server);
        let place = known.unwrap_or_else(|| {
            named.push(server);
            named.len() - 1
        });
        place.min(most.saturating_sub(1))
    };
    servers.map(place).collect()
}

/// What is under way, else what has waited longest: were it the first in the list, values that fail slowly would keep those
/// behind them away for ever.
pub fn next(stages: impl Iterator<Item = Stage>, now: Moment) -> Option<Next> {
    let due = stages.enumerate().filter_map(|(index, stage)| match stage {
        Stage::UnderWay => Some((None, Next { index, is_retry: false })),
        Stage::Waiting(at, is_retry) if at <= now => Some((Some(at), Next { index, is_retry })),
        Stage::Waiting(..) | Stage::Ready => None,
    });
    due.min_by_key(|(at, _)| *at).map(|(_, next)| next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64) -> Moment {
        Moment::default().plus(Duration::from_secs(seconds))
    }

    #[test]
    fn what_is_under_way_is_gone_on_with_and_then_what_has_waited_longest() {
        use Stage::{Ready, UnderWay, Waiting};
        let new = Waiting(at(0), false);
        #[track_caller]
        fn check(stages: &[Stage], expected: Option<(usize, bool)>) {
            let next = next(stages.iter().copied(), at(9));
            assert_eq!(next.map(|next| (next.index, next.is_retry)), expected);
        }
        check(&[], None);
        check(&[Ready, Waiting(at(10), true)], None);
        check(&[new, new, UnderWay], Some((2, false)));
        check(&[Ready, new, new], Some((1, false)));
        check(&[Waiting(at(5), true), new], Some((1, false)));
        check(&[Waiting(at(5), true), Waiting(at(4), true), Ready], Some((1, true)));
    }

    /// Each value of each VM is fetched for 20 s and fails, but for the last, and may be tried again 5 s later. Only one VM at
    /// a time has the turn, and lets go of it when nothing is left but to try again.
    #[test]
    fn values_that_fail_slowly_keep_no_other_and_no_other_vm_away() {
        let mut vms = [[Stage::Waiting(at(0), false); 4]; 3];
        let mut was_ready = [None; 3];
        let (mut now, mut turn, mut has_begun) = (0, 0, false);
        while now < 1_000 {
            let stages = &mut vms[turn];
            let next = next(stages.iter().copied(), at(now));
            let Some(Next { index, .. }) = next.filter(|next| !(next.is_retry && has_begun)) else {
                (turn, has_begun) = ((turn + 1) % 3, false);
                now += u64::from(turn == 0);
                continue;
            };
            has_begun = true;
            if index == 3 {
                stages[3] = Stage::Ready;
                was_ready[turn] = Some(now);
            } else {
                now += 20;
                stages[index] = Stage::Waiting(at(now + 5), true);
            }
        }
        assert_eq!(was_ready, [Some(60), Some(120), Some(180)]);
    }

    #[test]
    fn each_server_has_a_place() {
        let named = ["a", "b", "a", "c", "b", "d"];
        assert_eq!(places(named.into_iter(), 8), [0, 1, 0, 2, 1, 3]);
        assert_eq!(places(named.into_iter(), 2), [0, 1, 0, 1, 1, 1]);
        assert_eq!(places([].into_iter(), 8), [0; 0]);
    }

    #[test]
    fn what_two_configurations_name_is_loaded_once_and_stays_with_the_last() {
        let mut loaded = Loaded::default();
        let of_the_old = Rc::new(1);
        loaded.note("files", "/a", &of_the_old);
        let of_the_new = loaded.find("files", "/a");
        drop(of_the_old);
        assert_eq!(of_the_new.as_deref(), Some(&1));
        assert_eq!(loaded.find("files", "/b"), None);
        assert_eq!(loaded.find("others", "/a"), None);
        drop(of_the_new);
        assert_eq!(loaded.find("files", "/a"), None);
    }

    #[test]
    fn updates_without_end_leave_nothing_behind() {
        let mut loaded = Loaded::default();
        let mut current = Rc::new(0);
        for version in 0..1_000 {
            let next = Rc::new(version);
            loaded.note("files", &format!("/{version}"), &next);
            current = next;
            assert!(loaded.0.len() <= 2, "{version}");
        }
        assert_eq!(loaded.find("files", "/999").as_deref(), Some(&*current));
    }

    #[test]
    fn the_same_place_may_be_loaded_again() {
        let mut loaded = Loaded::default();
        loaded.note("files", "/a", &Rc::new(1));
        let second = Rc::new(2);
        loaded.note("files", "/a", &second);
        assert_eq!(loaded.find("files", "/a").as_deref(), Some(&2));
    }
}
