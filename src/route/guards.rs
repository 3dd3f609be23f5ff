//! What the cost of one request does not see: that others come for the same prefix.
//!
//! A prefix that everybody asks for is best computed more than once, one that is just being computed is not. Both are
//! told from what is known of the candidates; nothing is remembered between requests.

use super::{RouteConfig, Weighed};
use crate::score::Signals;

/// A replica has its share while its requests in flight are at most this many times the mean. 1.25 is the bound of
/// "consistent hashing with bounded loads": lower scatters a prefix, higher lets it pile up.
const LOAD_BOUND: f64 = 1.25;

/// A prefix is hot from so many times the mean on. Less than [`LOAD_BOUND`]: while its holders have less than this, no further
/// one computes it, and those who do not hold it may have nothing at all.
const RELIEF_BOUND: f64 = 1.15;

/// The most requests in flight that a replica may have and still get more for a tie.
pub(super) fn bound(candidates: &[Weighed<'_>]) -> f64 {
    share(candidates, LOAD_BOUND)
}

/// So many times the mean of the requests in flight, this one included.
fn share(candidates: &[Weighed<'_>], times: f64) -> f64 {
    let total: f64 = candidates.iter().map(|c| c.signals.in_flight).sum();
    ((total + 1.0) / candidates.len() as f64 * times).ceil()
}

/// Lets a hot prefix be computed once more.
///
/// What computing costs the neighbours is taken from the fleet's mean, so that a prefix is not left for every replica
/// that is free for a moment. But where all requests are one prefix's, they are the mean: the more come, the more it would
/// cost to compute it elsewhere, and one replica would get all of them. So once those who hold most of a prompt have more
/// than their share, computing it costs others only the neighbours that they really have.
///
/// Not while the prefix itself seems to be under way there: computing it again would be over no sooner.
pub(super) fn relieve(config: &RouteConfig, candidates: &mut [Weighed<'_>]) {
    let most = candidates.iter().map(|c| c.overlap_tokens).max().unwrap_or(0);
    let bound = share(candidates, RELIEF_BOUND);
    let holds = |candidate: &Weighed<'_>| candidate.overlap_tokens == most;
    let is_hot =
        |c: &Weighed<'_>| c.signals.in_flight >= bound && !computes(config, c, f64::from(most));
    if most == 0 || !candidates.iter().filter(|c| holds(c)).all(is_hot) {
        return;
    }
    for candidate in candidates.iter_mut().filter(|candidate| !holds(candidate)) {
        let neighbours = candidate.signals.neighbours.min(candidate.signals.in_flight);
        candidate.reweigh(&config.cost, Signals { neighbours, ..candidate.signals });
    }
}

/// Whether so many tokens seem to be under way at a replica: it has them to compute, and beside them for each of its
/// requests what this one would bring. Where it has twice as much, waiting is no better than computing anyway.
fn computes(config: &RouteConfig, candidate: &Weighed<'_>, tokens: f64) -> bool {
    let Signals { in_flight, unfinished_tokens, .. } = candidate.signals;
    // Whole tokens are charged: of many short requests the rest would add up to more than one has.
    let others = (in_flight - 1.0).max(0.0) * candidate.signals.work(&config.cost).floor();
    let work = Signals { prompt_tokens: tokens, ..Signals::default() }.work(&config.cost).floor();
    (work + others..2.0 * work).contains(&unfinished_tokens)
}
