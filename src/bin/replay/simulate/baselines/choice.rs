//! The best of the replicas that serve, and who of equals.
//!
//! It knows no policy: what is good is the caller's.

use super::super::policy::Ask;
use crate::random::Random;

/// Why nobody was chosen.
const NOBODY: &str = "no replica serves";

/// The replicas that may be chosen.
pub fn serving<'a>(ask: &Ask<'a>) -> impl Iterator<Item = usize> + Clone + use<'a> {
    ask.serving.iter().enumerate().filter(|(_, serves)| **serves).map(|(replica, _)| replica)
}

/// Requests that this gateway has in flight on a replica.
pub fn in_flight(ask: &Ask<'_>, replica: usize) -> usize {
    of(ask.in_flight, replica)
}

/// What is counted of a replica.
pub fn of(counts: &[usize], replica: usize) -> usize {
    counts.get(replica).copied().unwrap_or(0)
}

/// The replica of the lowest cost, the first of equals.
///
/// # Errors
/// When there is none.
pub fn first_cheapest<C: PartialOrd>(
    replicas: impl Iterator<Item = usize>,
    mut cost: impl FnMut(usize) -> C,
) -> Result<usize, String> {
    let mut best: Option<(C, usize)> = None;
    for replica in replicas {
        let cost = cost(replica);
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((cost, replica));
        }
    }
    best.map(|(_, replica)| replica).ok_or_else(|| NOBODY.to_owned())
}

/// The replica of the lowest cost, any of equals.
///
/// # Errors
/// When there is none.
pub fn any_cheapest<C: PartialOrd>(
    replicas: impl Iterator<Item = usize>,
    random: &mut Random,
    mut cost: impl FnMut(usize) -> C,
) -> Result<usize, String> {
    let mut best: Option<(C, usize)> = None;
    let mut equals = 0;
    for replica in replicas {
        let cost = cost(replica);
        match &best {
            Some((least, _)) if cost > *least => {}
            Some((least, _)) if cost == *least => {
                equals += 1;
                if random.below(equals) == 0 {
                    best = Some((cost, replica));
                }
            }
            _ => {
                equals = 1;
                best = Some((cost, replica));
            }
        }
    }
    best.map(|(_, replica)| replica).ok_or_else(|| NOBODY.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equals_or_any_of_them() {
        let costs = [3, 1, 2, 1, 1];
        assert_eq!(first_cheapest(0..5, |replica| costs[replica]), Ok(1));
        let mut random = Random::new(1, 0);
        let mut chosen = [0; 5];
        for _ in 0..3000 {
            chosen[any_cheapest(0..5, &mut random, |replica| costs[replica]).unwrap()] += 1;
        }
        assert_eq!((chosen[0], chosen[2]), (0, 0));
        for replica in [1, 3, 4] {
            assert!((900..1100).contains(&chosen[replica]), "{chosen:?}");
        }
    }

    #[test]
    fn nobody_is_an_error() {
        assert_eq!(first_cheapest(0..0, |_| 0), Err(NOBODY.to_owned()));
        assert_eq!(any_cheapest(0..0, &mut Random::new(1, 0), |_| 0), Err(NOBODY.to_owned()));
    }
}
