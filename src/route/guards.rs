//! What the cost of one request does not see: that others come for the same prefix.
//!
//! A prefix that everybody asks for is best computed more than once, one that is just being computed is not. Both are
//! told from what is known of the candidates; nothing is remembered between requests.

use super::{Scales, Seen};
use crate::score::Signals;

/// A replica has its share while its requests in flight are at most this many times the mean. 1.25 is the bound of
/// "consistent hashing with bounded loads": lower scatters a prefix, higher lets it pile up.
const LOAD_BOUND: f64 = 1.25;

/// A prefix is hot from so many times the mean on. Less than [`LOAD_BOUND`]: while its holders have less than this, no further
/// one computes it, and those who do not hold it may have nothing at all.
const RELIEF_BOUND: f64 = 1.15;

/// The most requests in flight that a replica may have and still get more for a tie.
pub(super) fn bound(scales: &Scales<'_>, candidates: usize) -> f64 {
    share(scales, candidates, LOAD_BOUND)
}

/// So many times the mean of the requests in flight, this one included.
fn share(scales: &Scales<'_>, candidates: usize, times: f64) -> f64 {
    ((scales.in_flight + 1.0) / candidates as f64 * times).ceil()
}

/// Lets a hot prefix be computed once more.
///
/// What computing costs the neighbours is taken from the fleet's mean, so that a prefix is not left for every replica
/// that is free for a moment. But where all requests are one prefix's, they are the mean: the more come, the more it would
/// cost to compute it elsewhere, and one replica would get all of them. So once those who hold most of a prompt have more
/// than their share, computing it costs others only the neighbours that they really have.
///
/// Not while the prefix itself seems to be under way there: computing it again would be over no sooner.
pub(super) fn relieved(scales: &Scales<'_>, seen: &[Seen<'_>]) -> Option<u32> {
    let most = seen.iter().map(|seen| seen.had.tokens).max().filter(|most| *most > 0)?;
    let bound = share(scales, seen.len(), RELIEF_BOUND);
    let mut holders = seen.iter().filter(|seen| seen.had.tokens == most);
    let is_hot = |holder: &Seen<'_>| holder.in_flight() >= bound && !computes(scales, holder);
    holders.all(is_hot).then_some(most)
}

/// Whether what it holds of the prompt seems to be under way at a replica: it has that to compute, and beside it for each of
/// its requests what this one would bring. Where it has twice as much, waiting is no better than computing anyway.
fn computes(scales: &Scales<'_>, holder: &Seen<'_>) -> bool {
    let (prompt_tokens, cached_tokens) =
        (f64::from(scales.prompt_tokens), f64::from(holder.had.tokens));
    let own = Signals { prompt_tokens, cached_tokens, ..Signals::default() };
    let prefix = Signals { prompt_tokens: cached_tokens, ..Signals::default() };
    // Whole tokens are charged: of many short requests the rest would add up to more than one has.
    let [own, prefix] = [own, prefix].map(|signals| signals.work(&scales.config.cost).floor());
    let others = (holder.in_flight() - 1.0).max(0.0) * own;
    (prefix + others..2.0 * prefix).contains(&holder.unfinished_tokens())
}
