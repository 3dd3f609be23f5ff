//! Times between an answer's tokens, as runs of equal ones.
//!
//! Engines that only decode take equally long for every step, so a thousand gaps are some ten runs: exact quantiles
//! over all gaps of all requests, without holding each.

use std::time::Duration;

/// The gaps of one answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gaps(Vec<Run>);

/// So many gaps of so many nanoseconds. The field order is the sort order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Run {
    nanoseconds: u64,
    times: u32,
}

impl Gaps {
    /// Adds one.
    pub fn push(&mut self, gap: Duration) {
        self.push_run(gap, 1);
    }

    /// Adds equal ones.
    pub fn push_run(&mut self, gap: Duration, times: u32) {
        let nanoseconds = u64::try_from(gap.as_nanos()).unwrap_or(u64::MAX);
        match self.0.last_mut() {
            Some(run) if run.nanoseconds == nanoseconds => {
                run.times = run.times.saturating_add(times);
            }
            _ if times == 0 => {}
            _ => self.0.push(Run { nanoseconds, times }),
        }
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// These quantiles, by the nearest rank, of all gaps of several answers: each is one of the gaps, or zero when there
    /// are none.
    pub fn quantiles<'a, const N: usize>(
        all: impl Iterator<Item = &'a Self>,
        fractions: [f64; N],
    ) -> [Duration; N] {
        let mut runs: Vec<Run> = all.flat_map(|gaps| &gaps.0).copied().collect();
        runs.sort_unstable();
        let count: u64 = runs.iter().map(|run| u64::from(run.times)).sum();
        fractions.map(|fraction| {
            let mut left = ((fraction * count as f64).ceil() as u64).max(1);
            let run = runs.iter().find(|run| {
                let times = u64::from(run.times);
                let reached = times >= left;
                left = left.saturating_sub(times);
                reached
            });
            Duration::from_nanos(run.map_or(0, |run| run.nanoseconds))
        })
    }
}

impl FromIterator<Duration> for Gaps {
    fn from_iter<T: IntoIterator<Item = Duration>>(gaps: T) -> Self {
        let mut all = Self::default();
        gaps.into_iter().for_each(|gap| all.push(gap));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn quantiles_of_runs_are_those_of_single_gaps() {
        let mut random = Random::new(1, 0);
        for answers in [1, 2, 30] {
            let (mut all, mut single) = (Vec::new(), Vec::new());
            for _ in 0..answers {
                let mut gaps = Gaps::default();
                for _ in 0..random.below(20) {
                    let gap = Duration::from_millis(random.below(9) as u64);
                    let times = random.below(40);
                    gaps.push_run(gap, times as u32);
                    single.extend(std::iter::repeat_n(gap, times));
                }
                all.push(gaps);
            }
            single.sort_unstable();
            for fraction in [0.01, 0.5, 0.9, 0.99, 1.0] {
                let rank = (fraction * single.len() as f64).ceil() as usize;
                let expected = single.get(rank.saturating_sub(1)).copied().unwrap_or_default();
                assert_eq!(Gaps::quantiles(all.iter(), [fraction]), [expected], "{fraction}");
            }
        }
    }

    #[test]
    fn there_is_no_quantile_of_nothing() {
        assert_eq!(Gaps::quantiles([].iter(), [0.5, 0.99]), [Duration::ZERO; 2]);
    }
}
