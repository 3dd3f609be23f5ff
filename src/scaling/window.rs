//! The most, or the least, of what was said in the last while.
//!
//! It keeps only what may still become the most: values that fall, one for each that there is between the most and the
//! last. So it is as long as there are numbers of replicas, however often it is told one.

use crate::replicas::Moment;
use std::collections::VecDeque;
use std::time::Duration;

/// After such a pause nobody knows what there was meanwhile, and a window begins anew. It is told something every second.
const PAUSE: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Window {
    falling: VecDeque<(Moment, u32)>,
    began: Option<Moment>,
}

impl Window {
    /// Takes in a value: the highest of the last `span`. None until it has been told values for so long.
    pub(super) fn highest(&mut self, value: u32, span: Duration, now: Moment) -> Option<u32> {
        if self.falling.back().is_some_and(|(at, _)| now.since(*at) > PAUSE) {
            *self = Self::default();
        }
        while self.falling.back().is_some_and(|(_, last)| *last <= value) {
            self.falling.pop_back();
        }
        self.falling.push_back((now, value));
        while self.falling.len() > 1
            && self.falling.front().is_some_and(|(at, _)| now.since(*at) > span)
        {
            self.falling.pop_front();
        }
        let began = *self.began.get_or_insert(now);
        let (_, highest) = self.falling.front()?;
        (now.since(began) >= span).then_some(*highest)
    }

    /// As [`Self::highest`], for the lowest. A window is for one of the two.
    pub(super) fn lowest(&mut self, value: u32, span: Duration, now: Moment) -> Option<u32> {
        self.highest(!value, span, now).map(|value| !value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values at seconds 0, 1, 2... give these highest and lowest ones of the last two seconds.
    #[track_caller]
    fn check(values: &[u32], highest: &[Option<u32>], lowest: &[Option<u32>]) {
        let (mut high, mut low) = (Window::default(), Window::default());
        let span = Duration::from_secs(2);
        let at = |second| Moment::default().plus(Duration::from_secs(second as u64));
        let all = values.iter().enumerate();
        let found: Vec<_> =
            all.clone().map(|(second, value)| high.highest(*value, span, at(second))).collect();
        assert_eq!(found, highest);
        let found: Vec<_> =
            all.map(|(second, value)| low.lowest(*value, span, at(second))).collect();
        assert_eq!(found, lowest);
        assert!(high.falling.len() <= 3 && low.falling.len() <= 3);
    }

    #[test]
    fn the_highest_and_the_lowest_are_those_of_the_last_while() {
        let (none, some) = (None, Some);
        check(
            &[1, 5, 2, 3, 1, 1, 1],
            &[none, none, some(5), some(5), some(3), some(3), some(1)],
            &[none, none, some(1), some(2), some(1), some(1), some(1)],
        );
        check(&[0], &[None], &[None]);
        check(&[7, 7, 7], &[None, None, Some(7)], &[None, None, Some(7)]);
    }

    #[test]
    fn a_window_begins_anew_after_a_pause() {
        let mut high = Window::default();
        let mut take = |value, second| {
            let now = Moment::default().plus(Duration::from_secs(second));
            high.highest(value, Duration::from_secs(2), now)
        };
        assert_eq!([take(9, 0), take(9, 1), take(9, 2)], [None, None, Some(9)]);
        assert_eq!([take(1, 100), take(1, 101), take(1, 102)], [None, None, Some(1)]);
    }
}
