//! What is being computed: blocks that were recorded when a request was sent, and that its replica has only once it has
//! computed them.
//!
//! Another request with the same beginning is predicted to find them there. If it finds fewer, that
//! proves nothing: it may have come while they were computed. So a record is kept until its answer
//! has begun, and a while longer, to be asked about afterwards. It corrects nothing.

use crate::replicas::{Moment, ReplicaId};
use crate::tokens::blocks::BlockHash;
use hashbrown::HashSet;
use std::collections::VecDeque;
use std::time::Duration;

/// Records that are remembered: 40 KB. Of more, the oldest are taken to be computed; doubled, so is what an answer with
/// fewer cached tokens than predicted costs.
const REMEMBERED: usize = 1024;

/// A record of which nobody has said that it was computed is taken to be after this long: another VM's, whose answers
/// are not seen here. Halved, a long prompt that waits behind others is taken for evicted; doubled, twice as many turns
/// of one conversation on several threads correct nothing.
const LONGEST: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
struct Computing {
    replica: ReplicaId,
    /// Its first block that was new there.
    first: BlockHash,
    since: Moment,
    until: Option<Moment>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Pending(VecDeque<Computing>);

impl Pending {
    /// A request was sent, of whose blocks this is the first that is new to the replica.
    pub fn began(&mut self, replica: ReplicaId, first: BlockHash, now: Moment) {
        if self.0.len() >= REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(Computing { replica, first, since: now, until: None });
    }

    /// Its answer has begun: they are there. It is among the last that began, and what began longer ago than is asked
    /// about need not be told: to walk through all from the oldest would cost every request a microsecond, and the
    /// processor's cache.
    pub fn ended(&mut self, replica: ReplicaId, first: BlockHash, now: Moment) {
        let is_asked = |c: &&mut Computing| now.since(c.since) < LONGEST;
        let is_it =
            |c: &&mut Computing| c.replica == replica && c.first == first && c.until.is_none();
        if let Some(computing) = self.0.iter_mut().rev().take_while(is_asked).find(is_it) {
            computing.until = Some(now);
        }
    }

    /// Whether any of these blocks was being computed there when a request was sent.
    pub fn concerns(&self, replica: ReplicaId, blocks: &[BlockHash], sent: Moment) -> bool {
        let blocks: HashSet<BlockHash> = blocks.iter().copied().collect();
        self.0.iter().any(|computing| {
            computing.replica == replica
                && computing.since <= sent
                && sent.since(computing.since) < LONGEST
                && computing.until.is_none_or(|until| until > sent)
                && blocks.contains(&computing.first)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const R: ReplicaId = ReplicaId { slot: 1, incarnation: 1 };

    fn at(seconds: u64) -> Moment {
        Moment::default().plus(Duration::from_secs(100 + seconds))
    }

    #[track_caller]
    fn check(pending: &Pending, replica: ReplicaId, blocks: &[u64], sent: Moment, expected: bool) {
        let blocks: Vec<BlockHash> = blocks.iter().copied().map(BlockHash).collect();
        assert_eq!(pending.concerns(replica, &blocks, sent), expected, "{blocks:?} at {sent:?}");
    }

    #[test]
    fn blocks_are_being_computed_from_sending_to_the_answers_beginning() {
        let mut pending = Pending::default();
        pending.began(R, BlockHash(7), at(10));
        pending.ended(R, BlockHash(7), at(12));
        for (sent, expected) in [(9, false), (10, true), (11, true), (12, false)] {
            check(&pending, R, &[6, 7, 8], at(sent), expected);
        }
        check(&pending, R, &[6, 8], at(11), false);
        check(&pending, ReplicaId { slot: 2, ..R }, &[7], at(11), false);
    }

    #[test]
    fn what_nobody_ends_does_not_last() {
        let mut pending = Pending::default();
        pending.began(R, BlockHash(7), at(10));
        check(&pending, R, &[7], at(14), true);
        check(&pending, R, &[7], at(15), false);
    }

    #[test]
    fn of_the_same_block_twice_the_later_one_ends() {
        let mut pending = Pending::default();
        pending.began(R, BlockHash(7), at(10));
        pending.began(R, BlockHash(7), at(11));
        pending.began(R, BlockHash(8), at(11));
        pending.ended(R, BlockHash(7), at(12));
        check(&pending, R, &[7], at(12), true);
        pending.ended(R, BlockHash(7), at(13));
        check(&pending, R, &[7], at(13), false);
        check(&pending, R, &[8], at(13), true);
    }

    #[test]
    fn it_is_bounded() {
        let mut pending = Pending::default();
        (0..10_000).for_each(|n| pending.began(R, BlockHash(n), at(1)));
        assert_eq!(pending.0.len(), REMEMBERED);
        check(&pending, R, &[9_999], at(1), true);
    }
}
