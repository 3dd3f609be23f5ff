//! Which predictions must come true: those that rest on what a replica has just been seen to compute.
//!
//! An engine may evict what it likes, share its cache with other gateways and be told to forget; a prediction that was
//! over proves nothing as a rule. It does where the last block it counts on ended a request that the same process has
//! just answered, little has been sent there since, and nobody else is there. Nothing is judged here.

use crate::replicas::{Load, Moment, ReplicaId};
use crate::tokens::blocks::BlockHash;
use std::collections::VecDeque;
use std::time::Duration;

/// Answered requests that are remembered: some kilobytes in each VM. Halved, conversations that take turns with a hundred
/// others are not judged; doubled, looking for one costs a microsecond.
const REMEMBERED: usize = 256;

/// How long one is fresh. Others may have used the replica meanwhile, unseen between two reports.
const FRESH: Duration = Duration::from_secs(30);

/// What may have been sent to the replica since, as a share of its blocks.
const MAX_SHARE: u64 = 8;

struct Served {
    replica: ReplicaId,
    last: BlockHash,
    at: Moment,
    recorded: u64,
}

/// What is known of a replica when evidence is noted or asked for.
#[derive(Debug, Clone, Copy)]
pub struct At {
    /// Which.
    pub replica: ReplicaId,
    /// Blocks that were ever recorded there, evicted ones included.
    pub recorded: u64,
    /// Blocks that it has.
    pub capacity: usize,
    /// Its last report, if that is fresh.
    pub load: Option<Load>,
    /// The time.
    pub now: Moment,
}

/// See the module.
#[derive(Default)]
pub struct Evidence(VecDeque<Served>);

impl Evidence {
    /// A request whose blocks end with `last` has been answered.
    pub fn note(&mut self, at: &At, last: BlockHash) {
        if self.0.len() >= REMEMBERED {
            self.0.pop_front();
        }
        let At { replica, recorded, now, .. } = *at;
        self.0.push_back(Served { replica, last, at: now, recorded });
    }

    /// Whether a prediction whose last block is `last` must come true.
    pub fn proves(&self, at: &At, last: BlockHash) -> bool {
        let is_others = |load: Load| load.running.saturating_add(load.waiting) > load.own;
        let mut served = self.0.iter().rev();
        let served = served.find(|served| served.replica == at.replica && served.last == last);
        served.is_some_and(|served| {
            // A count that went back is that of another index, taken over from another VM.
            let since = at.recorded.checked_sub(served.recorded);
            at.now.since(served.at) < FRESH
                && since.is_some_and(|blocks| blocks <= at.capacity as u64 / MAX_SHARE)
                && !at.load.is_some_and(is_others)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST: BlockHash = BlockHash(7);

    fn at(seconds: u64, recorded: u64) -> At {
        At {
            replica: ReplicaId { slot: 1, incarnation: 1 },
            recorded,
            capacity: 80,
            load: None,
            now: Moment::default().plus(Duration::from_secs(seconds)),
        }
    }

    #[track_caller]
    fn check(at: At, expected: bool) {
        let mut evidence = Evidence::default();
        evidence.note(&self::at(100, 500), LAST);
        assert_eq!(evidence.proves(&at, LAST), expected, "{at:?}");
        assert!(!evidence.proves(&at, BlockHash(8)), "nothing else was served");
    }

    #[test]
    fn only_what_was_just_served_by_the_same_process_must_still_be_there() {
        check(at(100, 500), true);
        check(at(129, 510), true);
        check(at(130, 510), false);
        check(at(101, 511), false);
        check(at(101, 499), false);
        let restarted = ReplicaId { slot: 1, incarnation: 2 };
        check(At { replica: restarted, ..at(101, 500) }, false);
    }

    #[test]
    fn a_replica_that_others_use_proves_nothing() {
        let load = Load { running: 2, waiting: 1, own: 3, ..Load::default() };
        check(At { load: Some(load), ..at(101, 500) }, true);
        check(At { load: Some(Load { own: 2, ..load }), ..at(101, 500) }, false);
    }

    #[test]
    fn it_is_bounded() {
        let mut evidence = Evidence::default();
        for n in 0..10_000 {
            evidence.note(&at(1, n), BlockHash(n));
        }
        assert_eq!(evidence.0.len(), REMEMBERED);
        assert!(evidence.proves(&at(2, 9_999), BlockHash(9_999)));
    }
}
