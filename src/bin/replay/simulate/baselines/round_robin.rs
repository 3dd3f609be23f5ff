//! One after another: Envoy's `ROUND_ROBIN`, and every gateway's.
//!
//! It knows neither load nor caches. Each worker thread has a turn of its own, begun at a place of its own, as Envoy's
//! are; so with several it is not quite in turn.

use super::super::policy::{Ask, Router};
use crate::random::Random;

/// See the module.
pub struct RoundRobin {
    turn: usize,
}

impl RoundRobin {
    /// A turn that begins anywhere.
    pub fn new(mut random: Random) -> Self {
        Self { turn: random.below(usize::from(u16::MAX)) }
    }
}

impl Router for RoundRobin {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let count = super::choice::serving(ask).count();
        let place = self.turn.checked_rem(count).unwrap_or_default();
        self.turn += 1;
        super::choice::serving(ask).nth(place).ok_or_else(|| "no replica serves".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk::Desk;
    use super::*;

    #[test]
    fn those_who_serve_come_one_after_another() {
        let mut desk = Desk::new(4);
        desk.serving[1] = false;
        let mut router = RoundRobin { turn: 3 };
        let chosen: Vec<usize> = (0..6).map(|_| desk.ask(&mut router, &[])).collect();
        assert_eq!(chosen, [0, 2, 3, 0, 2, 3]);
    }
}
