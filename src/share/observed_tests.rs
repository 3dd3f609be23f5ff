//! What one VM hears of replicas' caches, in every VM: leaders that follow one another, readers that were overtaken.

use super::link::Counts;
use super::link::envoy::{Envoy, PROMPT_BLOCKS, TICK};
use crate::replicas::ReplicaId;
use crate::report::{Change, Position, Tier};
use crate::tokens::blocks::BlockHash;

fn at(generation: u64, seq: u64) -> Position {
    Position { generation, seq }
}

fn chain(text: u64, blocks: u64) -> Vec<BlockHash> {
    (0..blocks).map(|at| BlockHash(1 + (text << 24 | at))).collect()
}

fn stored(text: u64, from: u64, to: u64) -> Change {
    let mut blocks = chain(text, to);
    let blocks = blocks.split_off(from as usize);
    let parent = from.checked_sub(1).and_then(|last| chain(text, to).get(last as usize).copied());
    Change::Stored { parent, blocks, tier: Tier::Gpu }
}

fn removed(text: u64, from: u64, to: u64) -> Change {
    let mut blocks = chain(text, to).split_off(from as usize);
    blocks.reverse();
    Change::Removed { blocks, tier: Tier::Gpu }
}

impl Envoy {
    fn observe(&mut self, vm: usize, from: Option<Position>, to: Position, changes: &[Change]) {
        let replica = self.replica(0);
        self.links[vm].observe(replica, from, to, changes, true);
        self.links[vm].publish(self.now);
    }

    fn observe_half(&mut self, vm: usize, from: Option<Position>, to: Position, change: Change) {
        let replica = self.replica(0);
        self.links[vm].observe(replica, from, to, &[change], false);
        self.links[vm].publish(self.now);
    }

    /// Another VM leads from now on.
    fn lead(&mut self, vm: usize, epoch: u64) {
        self.links[vm].refresh(self.now);
        self.table = self.links[vm].adopt_table(epoch).unwrap();
        self.links[vm].publish_table(epoch, &self.table).unwrap();
    }

    #[track_caller]
    fn check_observed(&mut self, position: Option<Position>, texts: &[(u64, usize)]) {
        let (replica, now) = (self.replica(0), self.now);
        for (vm, link) in self.links.iter_mut().enumerate() {
            link.refresh(now);
            assert_eq!(link.observed_position(replica), position, "VM {vm}");
            for (text, blocks) in texts {
                let seen = link.index().overlap_blocks(replica, &chain(*text, 1000));
                assert_eq!(seen, *blocks, "VM {vm}, text {text}");
            }
        }
    }

    fn ticks(&mut self, count: usize) {
        (0..count).for_each(|_| self.tick());
    }

    fn sum(&self, count: fn(&Counts) -> u64) -> u64 {
        self.counts.iter().map(count).sum()
    }
}

#[test]
fn what_one_vm_hears_all_know() {
    let mut envoy = Envoy::new(3);
    envoy.observe(0, None, at(7, 2), &[stored(1, 0, 40), stored(2, 0, 9)]);
    envoy.check_observed(Some(at(7, 2)), &[(1, 40), (2, 9)]);
    let changes = [removed(1, 21, 40), stored(1, 21, 23), removed(2, 0, 9)];
    envoy.observe(0, Some(at(7, 2)), at(7, 5), &changes);
    envoy.check_observed(Some(at(7, 5)), &[(1, 23), (2, 0)]);
    // Another generation says nothing of what the last one said.
    envoy.observe(0, None, at(8, 1), &[stored(3, 0, 5)]);
    envoy.check_observed(Some(at(8, 1)), &[(1, 0), (3, 5)]);
    let replica = envoy.replica(0);
    envoy.links[0].unobserve(replica);
    envoy.links[0].publish(envoy.now);
    // What it said last is what the shadow goes on from.
    envoy.check_observed(None, &[(3, 5)]);
    assert!(envoy.links.iter().all(|link| !link.index().is_reporting(replica)));
    assert_eq!(envoy.sum(|counts| counts.gaps + counts.orphaned), 0);
}

/// Whoever routed it, whoever leads, and whichever log is read first.
#[test]
fn what_was_routed_before_a_cache_was_lost_is_lost_with_it() {
    for (leader, router) in [(0, 1), (1, 0), (2, 0), (0, 2)] {
        let mut envoy = Envoy::new(4);
        envoy.observe(leader, None, at(7, 2), &[stored(1, 0, 40)]);
        envoy.check_observed(Some(at(7, 2)), &[(1, 40)]);
        // All of this between two looks of the others.
        envoy.route(router, 0, 5);
        envoy.observe(leader, None, at(8, 1), &[stored(3, 0, 5)]);
        envoy.observe(leader, Some(at(8, 1)), at(8, 2), &[stored(3, 5, 9)]);
        envoy.check_observed(Some(at(8, 2)), &[(1, 0), (3, 9)]);
        envoy.check_all_see(0, 5, 0);
        // And what is routed from then on counts.
        envoy.route(router, 0, 6);
        envoy.check_observed(Some(at(8, 2)), &[(3, 9)]);
        envoy.check_all_see(0, 6, PROMPT_BLOCKS as usize);
        assert_eq!(envoy.sum(|counts| counts.gaps + counts.orphaned), 0);
    }
}

#[test]
fn a_piece_that_does_not_continue_the_last_one_is_passed_over() {
    let mut envoy = Envoy::new(2);
    envoy.observe(0, Some(at(7, 1)), at(7, 2), &[stored(1, 0, 4)]);
    envoy.check_observed(None, &[(1, 0)]);
    envoy.observe(0, None, at(7, 2), &[stored(1, 0, 4)]);
    envoy.observe(0, Some(at(7, 1)), at(7, 3), &[removed(1, 0, 4)]);
    envoy.check_observed(Some(at(7, 2)), &[(1, 4)]);
}

#[test]
fn a_new_leader_goes_on_from_what_the_old_one_told() {
    let mut envoy = Envoy::new(3);
    envoy.observe(0, None, at(7, 2), &[stored(1, 0, 40)]);
    envoy.lead(1, 2);
    let replica = envoy.replica(0);
    let since = envoy.links[1].observed_position(replica);
    assert_eq!(since, Some(at(7, 2)));
    envoy.observe(1, since, at(7, 4), &[stored(1, 40, 50), removed(1, 45, 50)]);
    // The old one, who was stalled, tells some of that, too, and in its epoch no more than that.
    envoy.observe(0, since, at(7, 3), &[stored(1, 40, 50)]);
    envoy.ticks(2);
    envoy.observe(1, Some(at(7, 4)), at(7, 5), &[stored(4, 0, 3)]);
    envoy.check_observed(Some(at(7, 5)), &[(1, 45), (4, 3)]);
    envoy.ticks(10);
    envoy.check_observed(Some(at(7, 5)), &[(1, 45), (4, 3)]);
    assert_eq!(envoy.sum(|counts| counts.gaps), 0);
}

#[test]
fn half_a_report_of_a_leader_that_died_is_followed_by_a_whole_one() {
    let mut envoy = Envoy::new(3);
    envoy.observe(0, None, at(7, 2), &[stored(1, 0, 40)]);
    envoy.observe_half(0, Some(at(7, 2)), at(!7, 1), stored(2, 0, 40));
    envoy.lead(1, 2);
    let replica = envoy.replica(0);
    // No agent knows that position: it says everything.
    assert_eq!(envoy.links[1].observed_position(replica), Some(at(!7, 1)));
    envoy.observe(1, None, at(7, 6), &[stored(3, 0, 8)]);
    envoy.check_observed(Some(at(7, 6)), &[(1, 0), (2, 0), (3, 8)]);
    // The old one wakes up with the other half.
    envoy.observe_half(0, Some(at(7, 6)), at(!7, 2), stored(2, 40, 60));
    envoy.ticks(10);
    envoy.lead(1, 3);
    envoy.observe(1, None, at(7, 9), &[stored(3, 0, 9)]);
    envoy.check_observed(Some(at(7, 9)), &[(2, 0), (3, 9)]);
}

#[test]
fn a_stalled_leader_does_not_bring_back_a_cache_that_is_no_more() {
    let mut envoy = Envoy::new(3);
    envoy.observe(0, None, at(7, 2), &[stored(1, 0, 40)]);
    let mut stalled = envoy.links.remove(0);
    envoy.counts.remove(0);
    // It has asked before, and tells only when the next one has told of the restart.
    let replica = envoy.replica(0);
    envoy.lead(0, 2);
    envoy.observe(0, None, at(8, 3), &[stored(3, 0, 8)]);
    envoy.check_observed(Some(at(8, 3)), &[(1, 0), (3, 8)]);
    stalled.observe(replica, None, at(7, 9), &[stored(1, 0, 44)], true);
    stalled.unobserve(replica);
    stalled.publish(envoy.now);
    envoy.links.push(stalled);
    envoy.counts.push(Counts::default());
    envoy.ticks(10);
    for link in &envoy.links[..2] {
        assert_eq!(link.observed_position(replica), Some(at(8, 3)));
        assert_eq!(link.index().overlap_blocks(replica, &chain(1, 50)), 0);
    }
}

#[test]
fn a_new_vm_learns_what_was_observed_from_a_snapshot() {
    let mut envoy = Envoy::new(3);
    envoy.observe(0, None, at(7, 1), &[stored(1, 0, 40)]);
    // More than the log keeps.
    for seq in 2..200 {
        let (text, before) = (100 + seq, 99 + seq);
        let changes = [stored(text, 0, 999), removed(before, 0, 999)];
        envoy.observe(0, Some(at(7, seq - 1)), at(7, seq), &changes);
        if seq % 8 == 0 {
            envoy.tick();
        }
    }
    envoy.start();
    let mut seq = 199;
    envoy.until_taken(|envoy, _| {
        // What is told meanwhile is in it, or behind it.
        envoy.observe(0, Some(at(7, seq)), at(7, seq + 1), &[stored(2, seq - 199, seq - 198)]);
        seq += 1;
    });
    envoy.check_observed(Some(at(7, seq)), &[(1, 40), (299, 999), (2, seq as usize - 199)]);
    let replica = envoy.replica(0);
    assert!(envoy.links.iter().all(|link| link.index().is_reporting(replica)));
}

#[test]
fn a_vm_that_missed_something_takes_the_replica_for_what_it_was_until_a_snapshot_comes() {
    let mut envoy = Envoy::new(2);
    envoy.start();
    envoy.ticks(2);
    envoy.observe(0, None, at(7, 1), &[stored(1, 0, 40)]);
    let replica = envoy.replica(0);
    let mut stalled = envoy.links.pop().unwrap();
    stalled.refresh(envoy.now);
    for seq in 2..300 {
        let changes = [stored(100 + seq, 0, 999), removed(99 + seq, 0, 999)];
        envoy.observe(0, Some(at(7, seq - 1)), at(7, seq), &changes);
        if seq % 8 == 0 {
            envoy.tick();
        }
    }
    envoy.links.push(stalled);
    envoy.counts[2] = Counts::default();
    envoy.until_taken(|_, _| {});
    assert!(envoy.counts[2].lapped > 0, "{:?}", envoy.counts[2]);
    envoy.check_observed(Some(at(7, 299)), &[(1, 40), (399, 999)]);
    let position = envoy.links[2].observed_position(replica);
    assert_eq!(position, Some(at(7, 299)));
}

#[test]
fn what_only_a_leader_knew_of_tiers_is_asked_for_anew() {
    let mut envoy = Envoy::new(2);
    let offloaded = Change::Stored { parent: None, blocks: chain(1, 9), tier: Tier::Offload };
    envoy.observe(0, None, at(7, 1), &[stored(1, 0, 9), offloaded, removed(1, 4, 9)]);
    let replica = envoy.replica(0);
    envoy.links[1].refresh(envoy.now);
    assert_eq!(envoy.links[0].observed_position(replica), Some(at(7, 1)));
    assert_eq!(envoy.links[1].observed_position(replica), None);
    assert_eq!(envoy.links[1].index().overlap_blocks(replica, &chain(1, 9)), 9);
}

#[test]
fn a_tier_that_comes_later_is_heard_of_with_everything_else() {
    let mut envoy = Envoy::new(2);
    let replica = envoy.replica(0);
    let offloaded = Change::Stored { parent: None, blocks: chain(1, 9), tier: Tier::Offload };
    envoy.observe(0, None, at(7, 1), &[stored(1, 0, 9)]);
    // Which of its blocks are at hand has not been kept apart, so this cannot be taken in.
    envoy.observe(0, Some(at(7, 1)), at(7, 2), std::slice::from_ref(&offloaded));
    assert_eq!(envoy.links[0].observed_position(replica), None);
    // The next question is answered with everything.
    envoy.observe(0, None, at(7, 2), &[stored(1, 0, 5), offloaded]);
    assert_eq!(envoy.links[0].observed_position(replica), Some(at(7, 2)));
    // Changes of it go on from there.
    envoy.observe(0, Some(at(7, 2)), at(7, 3), &[removed(1, 3, 5)]);
    envoy.links[1].refresh(envoy.now);
    for link in &envoy.links {
        let chain = chain(1, 9);
        let overlaps = link.index().overlaps(&chain);
        let outlook = overlaps.outlook(replica);
        assert_eq!((outlook.blocks, outlook.at_hand), (9, 3));
    }
}

/// One replica says all it has, while the others only tick and route.
fn resync(blocks: u64) {
    const PIECE: u64 = 1 << 10;
    const PIECES_PER_TICK: usize = 16;
    let mut envoy = Envoy::new(3);
    let (texts, replica) = (blocks / 512, envoy.replica(0));
    let mut from = None;
    let mut piece = 0;
    let pieces = texts * 512 / PIECE;
    while piece < pieces {
        for _ in 0..PIECES_PER_TICK.min((pieces - piece) as usize) {
            let changes = [stored(2 * piece, 0, 512), stored(2 * piece + 1, 0, 512)];
            piece += 1;
            let to = if piece == pieces { at(7, 1) } else { at(!7, piece) };
            envoy.links[0].observe(replica, from, to, &changes, piece == pieces);
            from = Some(to);
        }
        envoy.links[0].publish(envoy.now);
        envoy.now = envoy.now.plus(TICK);
        envoy.links.iter_mut().for_each(|link| link.tick(envoy.now));
    }
    println!("{blocks} blocks in {} ticks", pieces.div_ceil(PIECES_PER_TICK as u64));
    envoy.ticks(1);
    let held = envoy.links[0].index().observed_blocks(replica);
    assert_eq!(held, (blocks as usize).min(1 << 19));
    for (vm, link) in envoy.links.iter_mut().enumerate() {
        let counts = link.take_counts();
        assert_eq!((counts.lapped, counts.gaps), (0, 0), "VM {vm}");
        assert_eq!(link.observed_position(replica), Some(at(7, 1)), "VM {vm}");
        assert_eq!(link.index().observed_blocks(replica), held, "VM {vm}");
    }
    assert_eq!(envoy.sum(|counts| counts.lapped + counts.gaps), 0);
}

#[test]
fn a_full_resync_overtakes_nobody_who_ticks() {
    // A million takes half a minute without optimization; half of it is remembered.
    let blocks = std::env::var("WARMPATH_BLOCKS").ok();
    resync(blocks.map_or(65_536, |blocks| blocks.parse().expect("a number of blocks")));
}

/// Every replica's identity is its own.
#[test]
fn what_is_observed_of_one_replica_is_not_anothers() {
    let mut envoy = Envoy::new(2);
    envoy.observe(0, None, at(7, 1), &[stored(1, 0, 40)]);
    envoy.links[1].refresh(envoy.now);
    let other: ReplicaId = envoy.replica(1);
    assert_eq!(envoy.links[1].index().overlap_blocks(other, &chain(1, 40)), 0);
    assert_eq!(envoy.links[1].observed_position(other), None);
}
