//! What replicas report, in the index: what it says, what it takes, and what is left out.

use super::tests::{REPLICA, check_overlap, hashes};
use super::*;
use crate::report::{Change, Tier};
use crate::seeded::Random;

const ROOM: Room = Room { stated: 65_536, most: 65_536 };

fn stored(parent: u64, blocks: &[u64]) -> Change {
    let parent = (parent > 0).then_some(BlockHash(parent));
    Change::Stored { parent, blocks: hashes(blocks), tier: Tier::Gpu }
}

fn store(index: &mut PrefixIndex, parent: u64, blocks: &[u64]) -> Vec<Sighting> {
    let mut told = Vec::new();
    index.observe(REPLICA, ROOM, &stored(parent, blocks), &mut Hearing::default(), &mut told);
    told
}

fn remove(index: &mut PrefixIndex, blocks: &[u64]) -> Vec<Sighting> {
    let mut told = Vec::new();
    let change = Change::Removed { blocks: hashes(blocks), tier: Tier::Gpu };
    index.observe(REPLICA, ROOM, &change, &mut Hearing::default(), &mut told);
    told
}

#[test]
fn what_is_routed_counts_until_reports_must_have_it() {
    let mut index = PrefixIndex::new();
    index.complete_report(REPLICA);
    store(&mut index, 0, &[1, 2, 3]);
    index.advance(Moment(1_000_000_000));
    let chain = hashes(&[1, 2, 3, 4, 5]);
    // Behind a block that only a report has.
    let new = Stretch::of(&chain, 3);
    assert_eq!(index.record_behind(REPLICA, 100, new.parent, new.blocks), Recorded::Held);
    check_overlap(&index, &[1, 2, 3, 4, 5], 5);
    assert_eq!(index.overlaps(&chain).outlook(REPLICA).observed, Some(3));
    store(&mut index, 3, &[4]);
    index.advance(Moment(7_000_000_000));
    index.shrink(usize::MAX);
    check_overlap(&index, &[1, 2, 3, 4, 5], 4);
    assert_eq!(index.held_blocks(REPLICA), 0);
}

#[test]
fn a_replica_without_reports_keeps_its_shadow_for_longer_than_that() {
    let mut index = PrefixIndex::new();
    index.record(REPLICA, 100, &hashes(&[1, 2]));
    index.advance(Moment(900_000_000_000));
    index.shrink(usize::MAX);
    check_overlap(&index, &[1, 2], 2);
}

#[test]
fn what_no_report_has_seen_since_a_reset_is_forgotten_with_what_was_routed() {
    let mut index = PrefixIndex::new();
    index.record(REPLICA, 100, &hashes(&[8, 9]));
    // While the first report comes in, what was known before stands in for it.
    index.begin_report(REPLICA, false);
    store(&mut index, 0, &[1, 2]);
    check_overlap(&index, &[8, 9], 2);
    index.complete_report(REPLICA);
    check_overlap(&index, &[8, 9], 0);
    index.record(REPLICA, 100, &hashes(&[8, 9]));
    index.begin_report(REPLICA, false);
    check_overlap(&index, &[8, 9], 0);
    check_overlap(&index, &[1, 2], 0);
}

#[test]
fn when_reports_end_the_last_one_is_what_the_shadow_goes_on_from() {
    let mut index = PrefixIndex::new();
    index.begin_report(REPLICA, false);
    store(&mut index, 0, &[1, 2, 3]);
    index.complete_report(REPLICA);
    index.end_reports(REPLICA);
    assert!(!index.is_reporting(REPLICA));
    check_overlap(&index, &[1, 2, 3], 3);
    index.record(REPLICA, 4, &hashes(&[7, 8, 9]));
    check_overlap(&index, &[1, 2, 3], 1);
    // And takes its place again.
    index.begin_report(REPLICA, false);
    store(&mut index, 0, &[7]);
    index.complete_report(REPLICA);
    check_overlap(&index, &[7, 8], 1);
    check_overlap(&index, &[1], 0);
}

#[test]
fn a_block_is_gone_when_no_tier_has_it() {
    let (mut index, mut hearing) = (PrefixIndex::new(), Hearing::new(true));
    let mut say = |is_stored, from, to, tier: Tier, held| {
        let (parent, blocks) = ((from > 1).then(|| BlockHash(from - 1)), from..=to);
        let mut blocks = hashes(&blocks.collect::<Vec<u64>>());
        let change = if is_stored {
            Change::Stored { parent, blocks, tier }
        } else {
            blocks.reverse();
            Change::Removed { blocks, tier }
        };
        index.observe(REPLICA, ROOM, &change, &mut hearing, &mut Vec::new());
        check_overlap(&index, &[1, 2, 3, 4, 5, 6], held);
    };
    let (gpu, offload) = (Tier::Gpu, Tier::Offload);
    say(true, 1, 4, gpu, 4);
    // Neither tier has all that is in front of what it has.
    say(true, 3, 6, offload, 6);
    say(false, 3, 4, gpu, 6);
    say(false, 5, 6, offload, 4);
    say(true, 4, 4, gpu, 4);
    say(false, 4, 4, offload, 4);
    say(false, 4, 4, gpu, 3);
    // Once more is no more.
    say(false, 4, 4, gpu, 3);
    say(true, 3, 3, offload, 3);
    say(false, 3, 3, offload, 2);
    say(false, 1, 2, gpu, 0);
}

#[test]
fn what_is_at_hand_is_known_apart_wherever_it_is_told() {
    let (mut index, mut reader) = (PrefixIndex::new(), PrefixIndex::with_seed(1));
    let mut hearing = Hearing::new(true);
    for index in [&mut index, &mut reader] {
        index.begin_report(REPLICA, true);
        index.complete_report(REPLICA);
    }
    let whole = hashes(&(1..=40).collect::<Vec<u64>>());
    let blocks = |from: usize, to: usize| whole[from - 1..to].to_vec();
    let store = |from: usize, to, tier| Change::Stored {
        parent: (from > 1).then(|| whole[from - 2]),
        blocks: blocks(from, to),
        tier,
    };
    let remove = |from, to, tier| {
        let mut blocks = blocks(from, to);
        blocks.reverse();
        Change::Removed { blocks, tier }
    };
    let check = |index: &PrefixIndex, expected: (usize, usize)| {
        let overlaps = index.overlaps(&whole);
        let outlook = overlaps.outlook(REPLICA);
        assert_eq!((outlook.blocks, outlook.at_hand), expected);
    };
    let (gpu, offload) = (Tier::Gpu, Tier::Offload);
    for (change, expected) in [
        (store(1, 30, gpu), (30, 30)),
        (store(1, 20, offload), (30, 30)),
        (remove(11, 30, gpu), (20, 10)),
        // Behind what is not at hand nothing is.
        (store(31, 40, gpu), (20, 10)),
        (store(11, 15, gpu), (20, 15)),
        (remove(1, 15, gpu), (20, 0)),
        (store(1, 18, gpu), (20, 18)),
        (remove(1, 20, offload), (18, 18)),
        (remove(1, 18, gpu), (0, 0)),
        (store(1, 5, offload), (5, 0)),
    ] {
        let mut told = Vec::new();
        index.observe(REPLICA, ROOM, &change, &mut hearing, &mut told);
        for sighting in &told {
            reader.sight(REPLICA, ROOM, sighting);
        }
        check(&index, expected);
        check(&reader, expected);
    }
    // Whoever takes the index over knows it, too.
    let (mut copy, mut cursor) = (PrefixIndex::with_seed(2), index.cursor());
    while let Some(run) = index.export(&mut cursor) {
        copy.import(run);
    }
    for id in copy.replicas().collect::<Vec<ReplicaId>>() {
        let mut settling = Settling::default();
        while !copy.settle(id, &mut settling) {}
    }
    copy.set_room(REPLICA, ROOM);
    copy.go_on_reporting([(REPLICA, true)].into_iter());
    check(&copy, (5, 0));
    // What is routed there is going to be fetched.
    index.record(REPLICA, 100, &whole[..3]);
    check(&index, (5, 3));
    // Without reports nobody knows better.
    index.end_reports(REPLICA);
    check(&index, (5, 5));
}

#[test]
fn a_run_of_removed_blocks_is_told_as_one() {
    let mut index = PrefixIndex::new();
    store(&mut index, 0, &(1..=100).collect::<Vec<u64>>());
    let told = remove(&mut index, &(41..=100).rev().collect::<Vec<u64>>());
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((told[0].parent, told[0].known), (Some(BlockHash(32)), 8));
    assert_eq!(index.observed_blocks(REPLICA), 40);
}

#[test]
fn a_report_of_more_than_there_is_room_for_is_cut_and_counted() {
    let mut index = PrefixIndex::new();
    for prompt in 1..100 {
        let change = Change::Stored {
            parent: None,
            blocks: hashes(&(0..30).map(|n| prompt * 1000 + n).collect::<Vec<u64>>()),
            tier: Tier::Gpu,
        };
        let room = Room { most: 1000, ..ROOM };
        index.observe(REPLICA, room, &change, &mut Hearing::default(), &mut Vec::new());
    }
    assert_eq!(index.observed_blocks(REPLICA), 1000);
    assert_eq!(index.take_cut(), 99 * 30 - 1000);
    store(&mut index, 7, &[8, 9]);
    assert_eq!(index.take_cut(), 2, "behind nothing");
}

/// An engine's cache that says what changes: the block that was used least recently and has no child goes first.
pub(crate) struct Engine {
    room: usize,
    /// By block: what it follows, how many follow it, and its last use.
    held: HashMap<u64, (u64, u32, u64)>,
    ends: std::collections::BTreeSet<(u64, u64)>,
    now: u64,
}

impl Engine {
    pub(crate) fn new(room: usize) -> Self {
        Self { room, held: HashMap::new(), ends: std::collections::BTreeSet::new(), now: 0 }
    }

    /// How many blocks of a chain need not be computed.
    pub(crate) fn cached(&self, chain: &[u64]) -> usize {
        chain.iter().take_while(|block| self.held.contains_key(*block)).count()
    }

    /// Computes a chain, and says so by so many blocks at once, one by one as while an answer is written.
    pub(crate) fn compute(&mut self, chain: &[u64], by: usize) -> Vec<Change> {
        self.now += 1;
        let mut said = Vec::new();
        let known = chain.iter().take_while(|block| self.held.contains_key(*block)).count();
        for (at, block) in chain.iter().enumerate() {
            let parent = at.checked_sub(1).map_or(0, |at| chain[at]);
            let (_, children, used) = self.held.entry(*block).or_insert((parent, 0, 0));
            self.ends.remove(&(*used, *block));
            *used = self.now;
            if *children == 0 {
                self.ends.insert((self.now, *block));
            }
            if at >= known
                && let Some((_, children, used)) = self.held.get_mut(&parent)
            {
                *children += 1;
                self.ends.remove(&(*used, parent));
            }
        }
        for (n, blocks) in chain[known..].chunks(by).enumerate() {
            let parent = (known + n * by).checked_sub(1).map(|at| BlockHash(chain[at]));
            let change = Change::Stored { parent, blocks: hashes(blocks), tier: Tier::Gpu };
            said.push(change);
        }
        let mut gone = Vec::new();
        while self.held.len() > self.room {
            let (_, end) = self.ends.pop_first().unwrap();
            let (parent, ..) = self.held.remove(&end).unwrap();
            gone.push(end);
            if let Some((_, children, used)) = self.held.get_mut(&parent) {
                *children -= 1;
                if *children == 0 {
                    self.ends.insert((*used, parent));
                }
            }
        }
        if !gone.is_empty() {
            said.push(Change::Removed { blocks: hashes(&gone), tier: Tier::Gpu });
        }
        said
    }
}

fn say(index: &mut PrefixIndex, replica: ReplicaId, change: &Change) {
    index.observe(replica, ROOM, change, &mut Hearing::default(), &mut Vec::new());
}

/// Block `at` of a text. What is shared has the same number everywhere.
fn block(text: u64, at: u64) -> u64 {
    1 + (text << 20 | at)
}

/// Fills replicas with texts of `shared` blocks that all have, of one of eight, and `own` blocks. Bytes, and what is held.
fn filled(replicas: u32, shared: u64, own: u64) -> (usize, usize) {
    let mut index = PrefixIndex::with_seed(7);
    let (mut held, mut text) = (0, 1000);
    for slot in 0..replicas {
        let replica = ReplicaId { slot, incarnation: 1 };
        for part in 0..8 {
            let blocks: Vec<u64> = (0..shared).map(|at| block(part, at)).collect();
            if shared > 0 {
                say(&mut index, replica, &stored(0, &blocks));
            }
        }
        while index.observed_blocks(replica) + own as usize <= ROOM.most {
            let parent = if shared > 0 { block(text % 8, shared - 1) } else { 0 };
            let blocks: Vec<u64> = (0..own).map(|at| block(text, at)).collect();
            say(&mut index, replica, &stored(parent, &blocks));
            text += 1;
        }
        held += index.observed_blocks(replica);
    }
    assert_eq!(index.take_cut(), 0);
    (index.tree.bytes(), held)
}

#[track_caller]
fn check_bytes(replicas: u32, shared: u64, own: u64, most: f64) {
    let (bytes, held) = filled(replicas, shared, own);
    let each = bytes as f64 / held as f64;
    println!("{replicas} replicas, {shared} and {own}: {each:.2} bytes, {bytes} for {held}");
    // Every other word of a host with 64 bits is longer.
    let most = if cfg!(target_pointer_width = "32") { most } else { most * 1.0625 };
    assert!(each <= most, "{shared} and {own}: {each} bytes for each block of each replica");
}

#[test]
fn sixty_four_replicas_that_report_take_sixteen_bytes_a_block() {
    // 10,000 tokens in blocks of 16, and 2,048 of them shared.
    check_bytes(64, 0, 625, 16.0);
    check_bytes(16, 128, 497, 16.0);
    check_bytes(4, 128, 62, 16.0);
}

#[test]
fn what_comes_and_goes_block_by_block_takes_little_more_than_what_stays() {
    let mut random = Random(5);
    let (mut index, mut engine) = (PrefixIndex::with_seed(7), Engine::new(16_384));
    let mut texts: Vec<Vec<u64>> = Vec::new();
    let mut early = 0;
    for turn in 0..6000_u64 {
        let mut chain = match random.below(10) {
            // A new conversation, behind what some share.
            0..=3 => (0..128).map(|at| block(turn % 8, at)).collect(),
            // One goes on, or again from somewhere within.
            4..=8 if !texts.is_empty() => {
                texts[texts.len() - 1 - random.below(texts.len().min(60) as u64) as usize].clone()
            }
            _ if !texts.is_empty() => {
                let text = &texts[random.below(texts.len() as u64) as usize];
                text[..text.len() - random.below(text.len() as u64 / 2) as usize].to_vec()
            }
            _ => Vec::new(),
        };
        chain.extend((0..1 + random.below(40)).map(|at| block(1000 + turn, at)));
        for change in engine.compute(&chain, 1 + random.below(4) as usize) {
            say(&mut index, REPLICA, &change);
        }
        if chain.len() < 2000 {
            texts.push(chain);
        }
        if turn == 1000 {
            early = index.tree.bytes();
        }
    }
    assert_eq!(index.observed_blocks(REPLICA), engine.held.len());
    let each = index.tree.bytes() as f64 / engine.held.len() as f64;
    println!("{each:.2} bytes a block, {early} and then {}", index.tree.bytes());
    assert_eq!(index.take_cut(), 0);
    assert!(each < 22.0, "{each}");
}

#[test]
fn a_report_of_nothing_but_short_prompts_is_cut_before_it_takes_three_times_that() {
    let mut index = PrefixIndex::with_seed(7);
    for prompt in 0..ROOM.most as u64 {
        say(&mut index, REPLICA, &stored(0, &[block(prompt, 0)]));
    }
    let (held, cut) = (index.observed_blocks(REPLICA), index.take_cut() as usize);
    assert_eq!((held, held + cut), (ROOM.most / 8 + 32, ROOM.most));
    let each = index.tree.bytes() as f64 / ROOM.most as f64;
    assert!(each < 24.0, "{each:.2} bytes for each block that it has room for");
}
