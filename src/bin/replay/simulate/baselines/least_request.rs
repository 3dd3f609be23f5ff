//! Fewest requests in flight: Envoy's `LEAST_REQUEST`.
//!
//! Envoy (v1.40 `api-v3/extensions/load_balancing_policies/least_request`): by default two replicas are drawn at random,
//! and the one with fewer active requests gets the request; with `selection_method: FULL_SCAN` it is the least of all,
//! equals by chance. Both count the requests of the whole Envoy, all worker threads together, and nobody else's.
//!
//! What the simulation cannot show of it: weights, and slow start of a new replica.

use super::super::policy::{Ask, Router};
use super::choice;
use crate::random::Random;

/// See the module.
pub struct LeastRequest {
    drawn: Option<usize>,
    random: Random,
}

impl LeastRequest {
    /// The less busy of two.
    pub fn of_two(random: Random) -> Self {
        Self { drawn: Some(2), random }
    }

    /// The least busy of all.
    pub fn of_all(random: Random) -> Self {
        Self { drawn: None, random }
    }
}

impl Router for LeastRequest {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let Self { drawn, random } = self;
        let load = |replica| choice::in_flight(ask, replica);
        let Some(drawn) = drawn else {
            return choice::any_cheapest(choice::serving(ask), random, load);
        };
        let serving: Vec<usize> = choice::serving(ask).collect();
        let mut draw = || serving.get(random.below(serving.len())).copied();
        // Envoy draws with replacement: both may be the same.
        let drawn: Vec<usize> = (0..*drawn).filter_map(|_| draw()).collect();
        choice::first_cheapest(drawn.into_iter(), load)
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk::Desk;
    use super::*;

    fn shares(mut router: LeastRequest) -> [usize; 4] {
        let mut desk = Desk::new(4);
        desk.in_flight = vec![5, 3, 3, 9];
        let mut chosen = [0; 4];
        (0..4000).for_each(|_| chosen[desk.ask(&mut router, &[])] += 1);
        chosen
    }

    #[test]
    fn of_all_the_least_busy_are_chosen_by_chance() {
        let [first, second, third, last] = shares(LeastRequest::of_all(Random::new(1, 0)));
        assert_eq!((first, last), (0, 0));
        assert!(second > 1800 && third > 1800);
    }

    #[test]
    fn of_two_the_busiest_is_chosen_only_against_itself() {
        // Drawn twice in one of sixteen; the next above it in three of sixteen; the others share the rest.
        let [first, second, third, last] = shares(LeastRequest::of_two(Random::new(1, 0)));
        for (count, sixteenths) in [(last, 1), (first, 3), (second, 6), (third, 6)] {
            let expected = 4000 * sixteenths / 16;
            assert!(count.abs_diff(expected) < 120, "{count} is not near {expected}");
        }
    }
}
