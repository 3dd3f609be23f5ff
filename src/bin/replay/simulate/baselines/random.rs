//! Any replica: Envoy's `RANDOM`, and the default of more than one gateway.
//!
//! It knows neither load nor caches. It is the floor: what is worse than this does harm.

use super::super::policy::{Ask, Router};
use super::choice;
use crate::random::Random;

/// See the module.
pub struct Anyone(Random);

impl Anyone {
    /// A chooser with chance of its own.
    pub fn new(random: Random) -> Self {
        Self(random)
    }
}

impl Router for Anyone {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        choice::any_cheapest(choice::serving(ask), &mut self.0, |_| 0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk::Desk;
    use super::*;

    #[test]
    fn everybody_who_serves_gets_as_much_whatever_is_in_flight() {
        let mut desk = Desk::new(4);
        desk.in_flight = vec![90, 0, 0, 0];
        desk.serving[2] = false;
        let mut router = Anyone::new(Random::new(1, 0));
        let mut chosen = [0; 4];
        for _ in 0..3000 {
            chosen[desk.ask(&mut router, &[1, 2])] += 1;
        }
        assert_eq!(chosen[2], 0);
        for replica in [0, 1, 3] {
            assert!((900..1100).contains(&chosen[replica]), "{chosen:?}");
        }
    }
}
