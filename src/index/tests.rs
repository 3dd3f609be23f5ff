use super::*;
use crate::seeded::Random;

pub(super) const REPLICA: ReplicaId = ReplicaId { slot: 0, incarnation: 1 };

pub(super) fn hashes(values: &[u64]) -> Vec<BlockHash> {
    values.iter().copied().map(BlockHash).collect()
}

#[track_caller]
pub(super) fn check_overlap(index: &PrefixIndex, chain: &[u64], expected: usize) {
    assert_eq!(index.overlap_blocks(REPLICA, &hashes(chain)), expected, "{chain:?}");
    assert_eq!(index.overlaps(&hashes(chain)).outlook(REPLICA).blocks, expected, "{chain:?}");
}

#[test]
fn overlap_counts_from_the_root_to_the_first_block_not_held() {
    let mut index = PrefixIndex::new();
    index.record(REPLICA, 10, &hashes(&[1, 2, 3]));
    check_overlap(&index, &[1, 2, 3, 4], 3);
    check_overlap(&index, &[1, 2, 9, 30], 2);
    check_overlap(&index, &[9, 8], 0);
    check_overlap(&index, &[], 0);
}

#[test]
fn blocks_without_a_held_parent_are_not_reachable_and_not_kept() {
    let mut index = PrefixIndex::new();
    let recorded = index.record_behind(REPLICA, 10, Some(BlockHash(7)), &hashes(&[8]));
    assert_eq!(recorded, Recorded::Orphaned);
    assert_eq!(index.held_blocks(REPLICA), 0);
}

#[test]
fn the_tail_of_the_least_recently_used_sequence_goes_first() {
    let mut index = PrefixIndex::new();
    index.record(REPLICA, 5, &hashes(&[1, 2, 3]));
    index.record(REPLICA, 5, &hashes(&[1, 4, 5]));
    index.record(REPLICA, 5, &hashes(&[1, 4, 5, 6]));
    check_overlap(&index, &[1, 2, 3], 2);
    check_overlap(&index, &[1, 4, 5, 6], 4);
}

#[test]
fn what_was_not_computed_is_taken_back_up_to_what_others_built_on() {
    let mut index = PrefixIndex::new();
    index.record(REPLICA, 10, &hashes(&[1, 2, 3, 4]));
    index.record(REPLICA, 10, &hashes(&[1, 2, 5]));
    index.forget(REPLICA, Stretch::of(&hashes(&[1, 2, 3, 4]), 0));
    check_overlap(&index, &[1, 2, 3, 4], 2);
    check_overlap(&index, &[1, 2, 5], 3);
    index.forget(REPLICA, Stretch::of(&hashes(&[9]), 0));
    assert_eq!(index.held_blocks(REPLICA), 3);
}

#[test]
fn what_a_replica_proved_not_to_hold_goes_with_all_that_hangs_behind_it() {
    let mut index = PrefixIndex::new();
    let other = ReplicaId { slot: 9, ..REPLICA };
    for replica in [REPLICA, other] {
        index.record(replica, 20, &hashes(&[1, 2, 3, 4]));
        index.record(replica, 20, &hashes(&[1, 2, 3, 5, 6]));
        index.record(replica, 20, &hashes(&[1, 7]));
    }
    index.forget_beyond(REPLICA, &hashes(&[1, 2, 3, 4]), 2);
    check_overlap(&index, &[1, 2, 3, 4], 2);
    check_overlap(&index, &[1, 2, 3, 5], 2);
    check_overlap(&index, &[1, 7], 2);
    assert_eq!(index.overlap_blocks(other, &hashes(&[1, 2, 3, 5, 6])), 5);
    // All of what was asked for is held: nothing is beyond.
    index.forget_beyond(other, &hashes(&[1, 7]), 2);
    assert_eq!((index.held_blocks(REPLICA), index.held_blocks(other)), (3, 7));
}

#[test]
fn what_would_go_for_new_blocks_is_what_was_used_longest_ago() {
    let mut index = PrefixIndex::new();
    for (used, block) in [(100, 10), (200, 20), (300, 30)] {
        index.advance(Moment(used * 1000 - 1000));
        index.record(REPLICA, 6, &hashes(&[block, block + 1]));
    }
    let check = |new_blocks, blocks, used| {
        assert_eq!(index.would_evict(REPLICA, new_blocks), Evicted { blocks, used });
    };
    check(0, 0, 0);
    check(2, 2, 100);
    check(4, 4, 150);
    check(100, 6, 200);
    let unknown = ReplicaId { slot: 5, ..REPLICA };
    assert_eq!(index.would_evict(unknown, 9), Evicted::default());
}

#[test]
fn a_smaller_capacity_takes_effect_in_steps() {
    let mut index = PrefixIndex::new();
    let other = ReplicaId { slot: 9, ..REPLICA };
    for replica in [REPLICA, other] {
        index.record(replica, 10, &hashes(&[1, 2, 3, 4]));
        index.set_capacity(replica, 2);
    }
    for left in [8, 5, 4, 4] {
        assert_eq!(index.held_blocks(REPLICA) + index.held_blocks(other), left);
        index.shrink(3);
    }
    check_overlap(&index, &[1, 2, 3, 4], 2);
}

#[test]
fn branches_of_a_block_each_are_fewer_than_blocks_would_fit() {
    let mut index = PrefixIndex::new();
    for prompt in 0..2000 {
        index.record(REPLICA, 1600, &hashes(&[1, 100 + prompt]));
    }
    let held = index.held_blocks(REPLICA);
    assert_eq!(held, 1600 / 16 + 32);
    check_overlap(&index, &[1, 2099], 2);
    check_overlap(&index, &[1, 100], 1);
}

fn settle(index: &mut PrefixIndex) {
    let mut settling = Settling::default();
    while !index.settle(REPLICA, &mut settling) {}
}

/// Hands an index on, with `between` done to it after each run.
fn handed_on(index: &mut PrefixIndex, mut between: impl FnMut(&mut PrefixIndex)) -> PrefixIndex {
    let (mut copy, mut cursor) = (PrefixIndex::with_seed(5), index.cursor());
    while let Some(run) = index.export(&mut cursor) {
        copy.import(run);
        between(index);
    }
    settle(&mut copy);
    copy
}

#[test]
fn an_index_is_handed_on_with_its_order_of_use() {
    let mut index = PrefixIndex::new();
    index.record(REPLICA, 5, &hashes(&[1, 2, 3]));
    index.record(REPLICA, 5, &hashes(&[1, 4, 5]));
    let mut copy = handed_on(&mut index, |_| {});
    for index in [&mut index, &mut copy] {
        assert_eq!(index.held_blocks(REPLICA), 5);
        index.record(REPLICA, 5, &hashes(&[1, 4, 5, 6]));
        check_overlap(index, &[1, 2, 3], 2);
        check_overlap(index, &[1, 4, 5, 6], 4);
    }
}

#[test]
fn what_lost_its_parent_on_the_way_is_dropped() {
    let mut copy = PrefixIndex::new();
    let run = |used, parent, blocks: &[u64]| Run {
        replica: REPLICA,
        used,
        parent,
        blocks: hashes(blocks),
    };
    copy.import(run(4, Some(BlockHash(8)), &[9, 10]));
    copy.import(run(2, Some(BlockHash(1)), &[2, 3]));
    copy.import(run(1, None, &[1]));
    // Nobody writes this: a circle must end all the same.
    copy.import(run(1, Some(BlockHash(21)), &[20, 21]));
    settle(&mut copy);
    assert_eq!(copy.held_blocks(REPLICA), 3);
    check_overlap(&copy, &[1, 2, 3], 3);
    check_overlap(&copy, &[9, 10], 0);
    copy.record(REPLICA, 3, &hashes(&[1, 7]));
    check_overlap(&copy, &[1, 7], 2);
    check_overlap(&copy, &[1, 2, 3], 2);
}

#[test]
fn a_count_of_uses_beyond_reason_does_not_begin_again() {
    let mut index = PrefixIndex::new();
    index.import(Run { replica: REPLICA, used: u64::MAX, parent: None, blocks: hashes(&[1]) });
    settle(&mut index);
    index.advance(Moment(u64::MAX));
    index.record(REPLICA, 2, &hashes(&[2]));
    index.record(REPLICA, 2, &hashes(&[3]));
    check_overlap(&index, &[1], 0);
    check_overlap(&index, &[3], 1);
}

#[test]
fn what_changes_is_remembered_for_those_who_are_handed_it_alone() {
    let mut index = PrefixIndex::new();
    let long: Vec<u64> = (1..1000).collect();
    index.record(REPLICA, 1 << 14, &hashes(&long));
    let split = |index: &mut PrefixIndex, at: usize| {
        let mut branch = hashes(&long[..at]);
        branch.push(BlockHash(20_000));
        index.record(REPLICA, 1 << 14, &branch);
        index.tree.late.as_ref().map_or(0, Vec::len)
    };
    let mut cursor = index.cursor();
    assert!(index.export(&mut cursor).is_some());
    assert!(split(&mut index, 300) > 0);
    index.end_export();
    assert_eq!(split(&mut index, 700), 0);
}

#[test]
fn what_stays_while_an_index_is_handed_on_arrives() {
    let mut index = PrefixIndex::new();
    let long: Vec<u64> = (1..5000).collect();
    index.record(REPLICA, 1 << 14, &hashes(&long));
    for branch in 0..40 {
        index.record(REPLICA, 1 << 14, &hashes(&[1, 2, 10_000 + branch]));
    }
    // What is split meanwhile is in front of what was handed on, and of what was not.
    let mut cut = 0;
    let copy = handed_on(&mut index, |index| {
        cut = (cut + 97) % 4000;
        let mut branch = hashes(&long[..cut]);
        branch.push(BlockHash(20_000));
        index.record(REPLICA, 1 << 14, &branch);
        index.forget(REPLICA, Stretch::of(&branch, cut));
    });
    check_overlap(&copy, &long, 4999);
    for branch in 0..40 {
        check_overlap(&copy, &[1, 2, 10_000 + branch], 3);
    }
}

#[test]
fn a_snapshot_of_more_replicas_than_there_can_be_does_not_fill_the_memory() {
    let mut index = PrefixIndex::new();
    for slot in 0..10_000 {
        let replica = ReplicaId { slot, incarnation: 1 };
        index.import(Run { replica, used: 1, parent: None, blocks: hashes(&[1]) });
    }
    assert_eq!(index.replicas().count(), 4 * MAX_REPLICAS);
}

/// Block hashes that all fall into the first of 65,536 buckets, as far as a client that does
/// not know the seed can tell.
#[test]
fn a_client_that_knows_the_hash_but_not_the_seed_cannot_fill_one_bucket() {
    let bucket = |seeded: Seeded, hash: u64| seeded.hash_one(BlockHash(hash)) % 65_536;
    let chosen = (0..).filter(|hash| bucket(Seeded(0), *hash) == 0);
    let chosen: Vec<u64> = chosen.take(64).collect();
    let mut hit: Vec<u64> = chosen.iter().map(|hash| bucket(Seeded(77), *hash)).collect();
    hit.sort_unstable();
    hit.dedup();
    assert!(hit.len() >= 60, "{} buckets", hit.len());
}

#[test]
fn a_new_incarnation_starts_empty_and_the_old_one_can_be_dropped() {
    let mut index = PrefixIndex::new();
    let restarted = ReplicaId { slot: 0, incarnation: 2 };
    index.record(REPLICA, 10, &hashes(&[1]));
    assert_eq!(index.overlap_blocks(restarted, &hashes(&[1])), 0);
    index.retain(|replica| replica == restarted);
    check_overlap(&index, &[1], 0);
}

/// Prompts that share nothing, some used twice, of a few blocks each.
fn use_prompts(index: &mut PrefixIndex, capacity: usize, from: u64, count: u64) {
    for prompt in from..from + count {
        let blocks: Vec<BlockHash> =
            (0..1 + prompt % 4).map(|n| BlockHash((prompt << 3) + n)).collect();
        index.record(REPLICA, capacity, &blocks);
        if prompt % 3 == 0 {
            index.record(REPLICA, capacity, &blocks);
        }
        if prompt % 50 == 0 {
            index.forget(REPLICA, Stretch::of(&blocks, 0));
        }
    }
}

#[test]
fn millions_of_prompts_take_no_more_memory_than_the_first_that_fill_it() {
    const CAPACITY: usize = 10_000;
    // Twenty times what fits, or as many as somebody cares to wait for.
    let prompts = std::env::var("WARMPATH_PROMPTS").ok();
    let prompts = prompts.map_or(200_000, |count| count.parse().expect("a number of prompts"));
    let mut index = PrefixIndex::with_seed(7);
    use_prompts(&mut index, CAPACITY, 0, 20_000);
    let early = index.tree.bytes();
    use_prompts(&mut index, CAPACITY, 20_000, prompts);
    // And one that is in use without a pause, so that nothing else is evicted.
    for _ in 0..100_000 {
        index.record(REPLICA, CAPACITY, &[BlockHash(7)]);
    }
    assert!(index.held_blocks(REPLICA) <= CAPACITY);
    assert!(index.tree.bytes() <= early + early / 4, "{early}, then {}", index.tree.bytes());
}

/// Fills replicas of 65,536 blocks with prompts of so many blocks each that share nothing but their first `shared`.
fn full(replicas: u32, shared: u64, own: u64) -> (PrefixIndex, usize) {
    let mut index = PrefixIndex::with_seed(7);
    let mut held = 0;
    for slot in 0..replicas {
        let replica = ReplicaId { slot, incarnation: 1 };
        // Of short ones there are only so many.
        for prompt in 0..(CAPACITY as u64 / own + 10).min(5000) {
            let first = 1 << 40 | u64::from(slot) << 32 | prompt << 12;
            let blocks: Vec<BlockHash> =
                (0..shared).chain((0..own).map(|n| first + n)).map(BlockHash).collect();
            index.record(replica, CAPACITY, &blocks);
        }
        held += index.held_blocks(replica);
    }
    (index, held)
}

const CAPACITY: usize = 65_536;

#[track_caller]
fn check_bytes(replicas: u32, shared: u64, own: u64) {
    let (index, held) = full(replicas, shared, own);
    let bytes = index.tree.bytes();
    // Every other word of a host with 64 bits is longer.
    let most = if cfg!(target_pointer_width = "32") { 16 } else { 17 };
    let full = replicas as usize * CAPACITY;
    println!("{replicas} {shared} {own}: {:.2} bytes a block, {held}", bytes as f64 / full as f64);
    assert!(
        bytes <= most * full,
        "{shared} and {own}: {} bytes a block",
        bytes as f64 / full as f64
    );
    assert!(own < 20 || held == full, "{held} blocks are held");
}

#[test]
fn sixty_four_full_replicas_take_sixteen_bytes_a_block() {
    check_bytes(64, 0, 625);
    // What a branch costs, in fewer replicas: the shorter they are, the more there are.
    check_bytes(6, 0, 1);
    check_bytes(6, 125, 12);
    check_bytes(6, 0, 17);
    check_bytes(6, 0, 20);
}

/// Chains that part from each other everywhere, some evicted in part, and some that no engine has: with a block replaced.
#[test]
fn a_path_is_the_same_by_leaps_and_by_steps() {
    let mut random = Random(0x9E37_79B9);
    let (mut index, mut chains) = (PrefixIndex::with_seed(7), vec![Vec::new()]);
    let (mut most_leapt, mut new) = (0, 0);
    for round in 0..400 {
        let mut chain: Vec<BlockHash> = chains[random.below(chains.len() as u64) as usize].clone();
        chain.truncate(random.below(chain.len() as u64 + 1) as usize);
        for _ in 0..random.below(120) {
            new += 1;
            chain.push(BlockHash(new));
        }
        let replica = ReplicaId { slot: random.below(6) as u32, incarnation: 1 };
        index.record(replica, 3000, &chain);
        chains.push(chain);
        for _ in 0..20 {
            let mut chain = chains[random.below(chains.len() as u64) as usize].clone();
            if random.below(4) == 0 && !chain.is_empty() {
                let at = random.below(chain.len() as u64) as usize;
                chain[at] = BlockHash(random.below(new + 2));
            }
            let walked = index.tree.path_by(&chain, usize::MAX);
            most_leapt = most_leapt.max(index.tree.leapt(&chain));
            for steps in [0, 1, 2, 5, 8] {
                let path = index.tree.path_by(&chain, steps);
                assert_eq!(path, walked, "round {round}, {steps} steps, {chain:?}");
            }
        }
    }
    assert!(most_leapt > 16, "{most_leapt}");
}
