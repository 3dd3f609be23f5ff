//! The series that a VM has in Envoy: their ids, a bound on their number, and whose turn it is to be told; no value of any.

use crate::metrics::{DROPPED_SAMPLES, Kind, Metric};
use hashbrown::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Most series of replicas that a VM has. Envoy keeps a series for good, so labels that take ever new values (replica
/// addresses) must end somewhere. A full table, all of whose replicas report and have agents, has nearly as many; half
/// would not hold it, and twice as many cost Envoy some megabytes more.
pub const MAX_REPLICA_SERIES: usize = 20_480;

/// Most other series: their labels are names that the configuration gives, and words of the filter's own. As many classes
/// as may be named have half of it with two models; half would cut those of five short, and twice as many cost Envoy
/// some megabytes more.
pub const MAX_OTHER_SERIES: usize = 12_288;

/// The label by which a series is a replica's.
const REPLICA: &str = "replica";

/// There are as many series as there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// The ids of the series that a VM has, as Envoy gave them.
#[derive(Debug, Default)]
pub struct Series {
    /// By the name that Envoy knows.
    ids: HashMap<String, Option<u32>>,
    /// How many of these are replicas'.
    of_replicas: usize,
    /// The same by a hash of what the name is made of: a request counts some twenty-five times, and a name is not made for
    /// each. To compare what it is made of would read four lines of memory more, which are in no cache by then.
    known: HashMap<u64, Option<u32>, BuildHasherDefault<Same>>,
}

/// A hash that is one already.
#[derive(Debug, Default)]
struct Same(u64);

impl Hasher for Same {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// What a name is made of, as a hash: of 64 bits, of some thousands, none is a client's to choose.
fn hash(metric: &Metric, labels: &[&str]) -> u64 {
    labels.iter().fold(metric.key, |hash, label| xxh3_64_with_seed(label.as_bytes(), hash))
}

impl Series {
    /// The id of a series, which is defined when it is new. `None` when Envoy would not.
    ///
    /// # Errors
    /// When it is new and there are too many. What counts that is always let in.
    pub fn id(
        &mut self,
        metric: &Metric,
        labels: &[&str],
        define: impl FnOnce(Kind, &str) -> Option<u32>,
    ) -> Result<Option<u32>, Full> {
        let hash = hash(metric, labels);
        if let Some(id) = self.known.get(&hash) {
            return Ok(*id);
        }
        let id = self.by_name(metric, labels, define)?;
        if self.known.len() < MAX_REPLICA_SERIES + MAX_OTHER_SERIES {
            self.known.insert(hash, id);
        }
        Ok(id)
    }

    fn by_name(
        &mut self,
        metric: &Metric,
        labels: &[&str],
        define: impl FnOnce(Kind, &str) -> Option<u32>,
    ) -> Result<Option<u32>, Full> {
        let name = metric.envoy_name(labels);
        if let Some(id) = self.ids.get(&name) {
            return Ok(*id);
        }
        // Those of replicas come and go: whatever they leave, reasons and counts of everything else have their room.
        let is_replicas = metric.labels.contains(&REPLICA);
        let is_full = match is_replicas {
            true => self.of_replicas >= MAX_REPLICA_SERIES,
            false => self.ids.len() - self.of_replicas >= MAX_OTHER_SERIES,
        };
        if is_full && *metric != DROPPED_SAMPLES {
            return Err(Full);
        }
        let id = define(metric.kind, &name);
        self.ids.insert(name, id);
        self.of_replicas += usize::from(is_replicas);
        Ok(id)
    }

    /// The id of a series that was defined before.
    pub fn known(&self, metric: &Metric, labels: &[&str]) -> Option<u32> {
        self.ids.get(&metric.envoy_name(labels)).copied().flatten()
    }
}

/// Goes through a list some at a time, over and over: what is told of each replica takes longer the more there are.
#[derive(Debug, Default)]
pub struct Round {
    next: usize,
}

impl Round {
    /// Which of so many have their turn, at most `most` of them. The list may change meanwhile: who comes in front of what
    /// was told has its turn with the next round.
    pub fn turn(&mut self, all: usize, most: usize) -> Range<usize> {
        let start = if self.next < all { self.next } else { 0 };
        let end = all.min(start + most);
        self.next = if end < all { end } else { 0 };
        start..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{ALL, MAX_LABEL_CHARS, PREDICTION, PROMPT_COUNT, REPLICA_RUNNING};
    use crate::replicas::MAX_REPLICAS;

    #[test]
    fn series_are_defined_once_and_end_somewhere() {
        for (metric, most) in
            [(&REPLICA_RUNNING, MAX_REPLICA_SERIES), (&PREDICTION, MAX_OTHER_SERIES)]
        {
            let mut series = Series::default();
            let mut defined = 0;
            for round in 0..2 {
                for n in 0..most + 5 {
                    let value = format!("10.0.0.1:{n}");
                    let id = series.id(metric, &["c", &value], |_, _| {
                        defined += 1;
                        Some(n as u32)
                    });
                    let expected = if n < most { Ok(Some(n as u32)) } else { Err(Full) };
                    assert_eq!(id, expected, "round {round}");
                }
            }
            assert_eq!(defined, most);
            assert_eq!(series.id(&DROPPED_SAMPLES, &[], |_, _| Some(7)), Ok(Some(7)));
        }
    }

    /// Every metric of a replica, of as many replicas as there can be.
    #[test]
    fn a_full_table_of_replicas_loses_no_sample_and_leaves_room_for_what_is_not_theirs() {
        let mut series = Series::default();
        let mut ask = |metric: &Metric, values: &[&str]| series.id(metric, values, |_, _| Some(1));
        let of_replicas = || ALL.iter().filter(|metric| metric.labels.contains(&REPLICA));
        assert!(of_replicas().count() >= 18);
        for n in 0..MAX_REPLICAS {
            let address = format!("10.0.{}.{}:8000", n / 256, n % 256);
            for metric in of_replicas() {
                assert_eq!(metric.labels, ["cluster", REPLICA], "{}", metric.name);
                assert_eq!(ask(metric, &["replicas", &address]), Ok(Some(1)), "{}", metric.name);
            }
        }
        // And then newcomers, until there is no room for more of them.
        let full = (0..MAX_REPLICA_SERIES)
            .find(|n| ask(&REPLICA_RUNNING, &["replicas", &n.to_string()]) == Err(Full));
        assert!(full.is_some());
        for metric in ALL.iter().filter(|metric| !metric.labels.contains(&REPLICA)) {
            for n in 0..40 {
                let values = vec![format!("value {n}"); metric.labels.len()];
                let values: Vec<&str> = values.iter().map(String::as_str).collect();
                assert_eq!(ask(metric, &values), Ok(Some(1)), "{}", metric.name);
            }
        }
    }

    #[test]
    fn everybody_has_a_turn_and_no_turn_is_long() {
        let mut round = Round::default();
        // As many as fit have theirs each time.
        assert_eq!(
            [8, 8, 100, 0, 3].map(|all| round.turn(all, 100)),
            [0..8, 0..8, 0..100, 0..0, 0..3]
        );
        for all in [101, 250, 1024] {
            let mut round = Round::default();
            let turns: Vec<Range<usize>> = (0..11).map(|_| round.turn(all, 100)).collect();
            assert!(turns.iter().all(|turn| (1..=100).contains(&turn.len())), "{turns:?}");
            let told: std::collections::BTreeSet<usize> = turns.into_iter().flatten().collect();
            assert_eq!(told.len(), all);
        }
        // Of a list that has become shorter than where it was.
        let mut round = Round::default();
        assert_eq!((round.turn(300, 100), round.turn(50, 100)), (0..100, 0..50));
    }

    #[test]
    fn values_that_make_one_name_are_one_series() {
        let mut series = Series::default();
        let mut names = Vec::new();
        let long = "x".repeat(MAX_LABEL_CHARS + 1);
        for (result, id) in [("a b", 0), ("a_b", 0), ("a b", 0), ("ab", 1), (&long, 2), (&long, 2)]
        {
            let found = series.id(&PREDICTION, &["m", result], |_, name| {
                names.push(name.to_owned());
                Some(names.len() as u32 - 1)
            });
            assert_eq!(found, Ok(Some(id)), "{result}");
        }
        // Neither values nor metrics run into each other.
        assert_eq!(series.id(&PREDICTION, &["ma", "b"], |_, _| Some(7)), Ok(Some(7)));
        assert_eq!(series.id(&PROMPT_COUNT, &["m", "ab"], |_, _| Some(8)), Ok(Some(8)));
        assert_eq!(series.known.len(), 6);
    }
}
