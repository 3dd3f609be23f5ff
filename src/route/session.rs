//! Where a request goes whose prompt cannot be matched, but whose session is named: where the session's last one went.
//!
//! Nothing is remembered for it. Each session has its own order of the replicas, by hashes, which all VMs and gateways
//! share; of those that are worth waiting for the first is its home. So a session stays while its home does, moves once
//! when that is gone, and goes elsewhere for as long as its home is busy.

use super::policy::drawn;
use super::{Scales, Weighed};
use crate::score::{self, Signals};

/// The place of the session's home among candidates of which the best costs so much.
///
/// A replica is worth waiting for while it costs no more than the best does (or is a tie), were its prompt cached there:
/// that it is, is what the name of a session promises.
pub(super) fn home(
    scales: &Scales<'_>,
    candidates: &[Weighed<'_>],
    best: f64,
    session: u64,
) -> Option<usize> {
    let most = best + scales.config.epsilon(best);
    let is_worth = |c: &Weighed<'_>| {
        let signals = scales.signals_of(c);
        let cached = Signals { cached_tokens: signals.prompt_tokens, ..signals };
        score::cost(&scales.config.cost, &cached).total() <= most
    };
    let worth = candidates.iter().enumerate().filter(|(_, candidate)| is_worth(candidate));
    worth.max_by_key(|(_, candidate)| drawn(candidate, session)).map(|(place, _)| place)
}
