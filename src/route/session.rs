//! Where a request goes whose prompt cannot be matched, but whose session is named: where the session's last one went.
//!
//! Nothing is remembered for it. Each session has its own order of the replicas, by hashes, which all VMs and gateways
//! share; of those that are worth waiting for the first is its home. So a session stays while its home does, moves once
//! when that is gone, and goes elsewhere for as long as its home is busy.

use super::policy::drawn;
use super::{Candidate, RouteConfig};

/// The position of the session's home among candidates sorted by cost.
///
/// A replica is worth waiting for while it costs no more than the best does (or is a tie), were its prompt cached there:
/// that it is, is what the name of a session promises.
pub(super) fn home(config: &RouteConfig, candidates: &[Candidate], session: u64) -> usize {
    let Some(best) = candidates.first().map(|candidate| candidate.cost.total()) else { return 0 };
    let most = best + config.epsilon(best);
    let is_worth = |candidate: &Candidate| {
        candidate.cost.total() - candidate.cost.prefill - candidate.cost.stall <= most
    };
    let worth = candidates.iter().enumerate().filter(|(_, candidate)| is_worth(candidate));
    worth.max_by_key(|(_, candidate)| drawn(candidate, session)).map_or(0, |(place, _)| place)
}
