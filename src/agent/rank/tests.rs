//! Streams with all that happens to them.

use super::*;
use crate::agent::published::{Publisher, batch, removed, stored, with};
use crate::identity::seed_of;
use crate::mock::chance::Chance;
use crate::report::{Change, Report, Status, Tier, write_head};
use crate::tokens::blocks::{Chain, ChainSeed};
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn rank() -> Rank {
    Rank::new(RankConfig {
        names: Names { base: "m".to_owned(), adapters: vec![("lora".to_owned(), 77)] },
        block_tokens: None,
        most_blocks: 1000,
        history_bytes: 1 << 20,
        rank: None,
        seed: 5,
    })
}

/// A rank that follows a stream from its beginning.
fn following(publisher: &Publisher) -> Rank {
    let mut rank = rank();
    rank.connected();
    publisher.catch_up(&mut rank, || usize::MAX);
    assert!(rank.is_live());
    rank
}

fn chain(seed: ChainSeed, tokens: &[u32]) -> Vec<BlockHash> {
    Chain::new(seed, BlockSize::new(4).unwrap(), tokens).hashes().to_vec()
}

fn base() -> ChainSeed {
    ChainSeed::new("m", None)
}

fn held(rank: &Rank) -> BTreeSet<BlockHash> {
    rank.held().collect()
}

#[track_caller]
fn check(rank: &Rank, expected: &[BlockHash]) {
    assert_eq!(held(rank), expected.iter().copied().collect());
}

/// What a reader makes of one answer after another.
#[derive(Default)]
struct Reader {
    position: Option<Position>,
    held: BTreeSet<(BlockHash, Tier)>,
    snapshots: u32,
}

impl Reader {
    fn ask(&mut self, rank: &mut Rank) {
        let answer = rank.answer(self.position);
        let changes = answer.pieces.concat();
        let head = write_head(&Status::default(), answer.since, answer.position, changes.len());
        let mut report = Report::read([head, changes].concat()).unwrap();
        match report.since {
            Some(since) => assert_eq!(Some(since), self.position),
            None => {
                self.held.clear();
                self.snapshots += 1;
            }
        }
        while let Some(changes) = report.step(3).unwrap() {
            for change in changes {
                match change {
                    Change::Stored { blocks, tier, .. } => {
                        self.held.extend(blocks.into_iter().map(|block| (block, tier)));
                    }
                    Change::Removed { blocks, tier } => {
                        blocks.iter().for_each(|block| assert!(self.held.remove(&(*block, tier))));
                    }
                }
            }
        }
        self.position = Some(report.position);
    }

    fn blocks(&self) -> BTreeSet<BlockHash> {
        self.held.iter().map(|(block, _)| *block).collect()
    }
}

const TOKENS: [u32; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

#[test]
fn blocks_have_the_names_that_the_filter_gives_them() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    let frame = publisher.publish(&[
        stored(&[10, u64::MAX], None, &TOKENS[..8]),
        stored(&[12], Some(u64::MAX), &TOKENS[8..]),
    ]);
    assert_eq!(rank.take(frame), Effect::Applied);
    check(&rank, &chain(base(), &TOKENS));
    assert!(!rank.is_incomplete());
}

#[test]
fn salts_and_adapters_have_chains_of_their_own() {
    let salted = with(stored(&[1], None, &TOKENS[..4]), json!({"extra_keys": [["salt"]]}));
    let lora = json!({"lora_id": 1, "lora_name": "lora", "extra_keys": [["lora"], ["lora"]]});
    let lora = with(stored(&[2, 3], None, &TOKENS[..8]), lora);
    let both = json!({"lora_id": 1, "lora_name": "lora", "extra_keys": [["lora", "salt"]]});
    let both = with(stored(&[4], None, &TOKENS[..4]), both);
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[salted, lora, both]));
    let adapter = Some(("lora", &[77][..]));
    let expected = [
        chain(ChainSeed::new("m", Some("salt")), &TOKENS[..4]),
        chain(seed_of("m", None, adapter), &TOKENS[..8]),
        chain(seed_of("m", Some("salt"), adapter), &TOKENS[..4]),
    ];
    check(&rank, &expected.concat());
}

#[test]
fn media_and_all_behind_are_left_out_and_counted() {
    let keys = json!({"extra_keys": [null, [["image", 0]], null]});
    let image = with(stored(&[1, 2, 3], None, &TOKENS), keys);
    let behind = stored(&[4], Some(3), &TOKENS[..4]);
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[image, behind]));
    check(&rank, &chain(base(), &TOKENS[..4]));
    assert_eq!((rank.cache().unmatched(), rank.seen().keyed), (3, 2));
    rank.take(publisher.publish(&[removed(4), removed(3)]));
    assert_eq!((rank.cache().unmatched(), rank.seen().unknown_removals), (1, 0));
    assert!(!rank.is_incomplete());
}

#[test]
fn groups_with_a_window_are_left_out_and_counted() {
    let window = json!({"group_idx": 1, "kv_cache_spec_kind": "sliding_window"});
    let window = with(stored(&[1, 2], None, &TOKENS[..8]), window);
    let gone = with(removed(1), json!({"group_idx": 1}));
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[window, stored(&[1, 2], None, &TOKENS[..8]), gone]));
    check(&rank, &chain(base(), &TOKENS[..8]));
    assert_eq!(rank.cache().unmatched(), 1);
}

#[test]
fn an_adapter_that_is_not_listed_yet_is_placed_once_it_is() {
    let lora = json!({"lora_id": 2, "lora_name": "new", "extra_keys": [["new"]]});
    let lora = with(stored(&[1], None, &TOKENS[..4]), lora);
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[lora]));
    check(&rank, &[]);
    assert!(rank.cache().wants_names() && rank.wants_replay().is_none());
    let names = Names { base: "m".to_owned(), adapters: vec![("new".to_owned(), 3)] };
    rank.set_names(names);
    publisher.catch_up(&mut rank, || usize::MAX);
    check(&rank, &chain(seed_of("m", None, Some(("new", &[3]))), &TOKENS[..4]));
    assert!(!rank.cache().wants_names());
}

#[test]
fn arrays_and_maps_of_all_engines_say_the_same() {
    let signed = -7_i64;
    let vllm = [
        json!([
            "BlockStored",
            [10, 11],
            null,
            TOKENS[..8],
            4,
            null,
            "GPU",
            null,
            [null, null],
            0,
            "full_attention"
        ]),
        json!(["BlockStored", [12], 11, TOKENS[8..], 4, null, "GPU", null]),
        json!(["BlockRemoved", [12], "GPU"]),
    ];
    let sglang = [
        json!(["BlockStored", [10, signed], null, TOKENS[..8], 4, null, "GPU"]),
        json!(["BlockStored", [12, 13], signed, [9, 10, 11, 12, 1, 2, 3, 4], 4, null]),
        json!(["BlockRemoved", [13, 12]]),
    ];
    let tagged = [
        json!({"type": "BlockStored", "block_hashes": [10, signed], "parent_block_hash": null, "token_ids": TOKENS[..8],
            "block_size": 4, "lora_id": null, "medium": "GPU", "session_id": "s", "new_key": {"a": [1]}}),
        json!({"type": "BlockStored", "block_hashes": [12], "parent_block_hash": signed, "token_ids": TOKENS[8..], "block_size": 4}),
        json!({"type": "BlockRemoved", "block_hashes": [12], "medium": null}),
        json!({"type": "BlockAdmired", "block_hashes": [10]}),
    ];
    for (events, says_adapters) in [(&vllm[..], true), (&sglang[..], false), (&tagged[..], false)] {
        let mut publisher = Publisher::default();
        let mut rank = following(&publisher);
        rank.take(publisher.publish(events));
        check(&rank, &chain(base(), &TOKENS[..8]));
        assert_eq!(rank.happened().junk, 0, "{:?}", rank.take_junk());
        assert_eq!(rank.cache().adapters_unknown(), !says_adapters);
    }
}

#[test]
fn the_salt_of_sglang_is_a_field() {
    let event = json!({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": TOKENS[..4],
        "block_size": 4, "cache_salt": "salt"});
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[event]));
    check(&rank, &chain(ChainSeed::new("m", Some("salt")), &TOKENS[..4]));
}

#[test]
fn tokens_that_are_pairs_or_do_not_fit_name_no_block() {
    let pairs =
        with(stored(&[1], None, &[]), json!({"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]}));
    let short = stored(&[2, 3], None, &TOKENS[..4]);
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[pairs, short]));
    check(&rank, &[]);
    assert_eq!((rank.cache().unmatched(), rank.seen().without_tokens), (3, 3));
}

#[test]
fn an_offloaded_copy_needs_no_tokens_where_the_block_is_known() {
    let away = |hash: u64| with(stored(&[hash], None, &[]), json!({"medium": "CPU"}));
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[stored(&[1], None, &TOKENS[..4]), away(1), away(9), removed(1)]));
    check(&rank, &chain(base(), &TOKENS[..4]));
    assert_eq!((rank.cache().counts().offloaded, rank.cache().unmatched()), (1, 1));
    let gone = with(removed(1), json!({"medium": "CPU"}));
    rank.take(publisher.publish(&[gone]));
    check(&rank, &[]);
}

#[test]
fn what_came_before_the_agent_is_had_by_replay() {
    let mut publisher = Publisher::default();
    publisher.publish(&[stored(&[10, 11], None, &TOKENS[..8])]);
    publisher.publish(&[stored(&[12], Some(11), &TOKENS[8..])]);
    publisher.publish(&[stored(&[12], Some(11), &TOKENS[8..])]);
    publisher.publish(&[removed(12)]);
    // An engine's socket drops what does not fit: only two frames of each answer arrive.
    let mut rank = rank();
    rank.connected();
    publisher.catch_up(&mut rank, || 2);
    check(&rank, &chain(base(), &TOKENS));
    assert!(!rank.is_incomplete());
}

#[test]
fn while_it_catches_up_nothing_is_told() {
    let mut publisher = Publisher::default();
    publisher.publish(&[stored(&[10], None, &TOKENS[..4])]);
    publisher.publish(&[removed(10)]);
    let mut rank = rank();
    rank.connected();
    rank.begin_replay();
    rank.take_replayed(publisher.frame(0));
    let mut reader = Reader::default();
    reader.ask(&mut rank);
    assert!(reader.held.is_empty() && !rank.is_live());
    rank.take_replayed(publisher.frame(1));
    rank.end_replay(Ended::Over);
    publisher.catch_up(&mut rank, || usize::MAX);
    reader.ask(&mut rank);
    assert!(reader.held.is_empty() && rank.is_live());
}

#[test]
fn a_gap_that_a_replay_fills_changes_no_generation() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[stored(&[10], None, &TOKENS[..4])]));
    let generations = rank.generations();
    publisher.publish(&[stored(&[11], Some(10), &TOKENS[4..8])]);
    publisher.publish(&[stored(&[12], Some(11), &TOKENS[8..])]);
    assert_eq!(rank.take(publisher.frame(2)), Effect::Waits);
    assert_eq!(rank.wants_replay(), Some(0));
    publisher.catch_up(&mut rank, || usize::MAX);
    check(&rank, &chain(base(), &TOKENS));
    assert_eq!(rank.take(publisher.frame(2)), Effect::Known);
    assert_eq!((rank.generations(), rank.happened().gaps), (generations, 1));
}

#[test]
fn what_was_lost_last_is_found_when_it_is_quiet() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[stored(&[10], None, &TOKENS[..4])]));
    publisher.publish(&[stored(&[11], Some(10), &TOKENS[4..8])]);
    rank.check();
    assert!(rank.is_live());
    publisher.catch_up(&mut rank, || usize::MAX);
    check(&rank, &chain(base(), &TOKENS[..8]));
    // Nothing is lost where nobody answers, and another engine is known by its answer.
    rank.check();
    rank.begin_replay();
    rank.end_replay(Ended::Failed);
    check(&rank, &chain(base(), &TOKENS[..8]));
    assert!(rank.is_live() && !rank.is_incomplete());
    rank.check();
    Publisher::started(9.0).catch_up(&mut rank, || usize::MAX);
    check(&rank, &[]);
    assert!(rank.is_live());
}

#[test]
fn a_gap_that_nothing_fills_begins_a_generation() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[stored(&[10], None, &TOKENS[..4])]));
    publisher.publish(&[removed(10)]);
    publisher.publish(&[stored(&[20], None, &TOKENS[4..8])]);
    let generations = rank.generations();
    assert_eq!(rank.take(publisher.frame(2)), Effect::Waits);
    rank.begin_replay();
    rank.end_replay(Ended::Failed);
    check(&rank, &chain(base(), &TOKENS[4..8]));
    assert!(rank.generations() > generations && rank.is_incomplete() && rank.is_live());
    // The same where the engine still answers, but has what was missed no more.
    let mut rank = following(&publisher);
    for _ in 0..3 {
        publisher.publish(&[]);
    }
    publisher.publish(&[stored(&[21], Some(20), &TOKENS[..4])]);
    publisher.oldest = 5;
    assert_eq!(rank.take(publisher.frame(6)), Effect::Waits);
    publisher.catch_up(&mut rank, || usize::MAX);
    check(&rank, &[]);
    assert!(rank.is_incomplete() && rank.is_live());
}

#[test]
fn an_engine_that_starts_again_is_another_one() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    let mut reader = Reader::default();
    for hash in 10..15 {
        rank.take(publisher.publish(&[stored(&[hash], None, &[hash as u32; 4])]));
    }
    reader.ask(&mut rank);
    // Behind a proxy the connection stays: only the numbers show it.
    let mut another = Publisher::started(0.25);
    assert_eq!(rank.take(another.publish(&[stored(&[10], None, &[10; 4])])), Effect::Waits);
    another.catch_up(&mut rank, || usize::MAX);
    check(&rank, &chain(base(), &[10; 4]));
    reader.ask(&mut rank);
    assert_eq!((reader.blocks(), reader.snapshots), (held(&rank), 2));
    assert!(!rank.is_incomplete());
    // And with a new connection.
    for lately in [1, 9] {
        let mut third = Publisher::started(lately as f64);
        for hash in 0..lately {
            third.publish(&[stored(&[hash], None, &[hash as u32; 4])]);
        }
        rank.disconnected();
        assert!(!rank.is_live());
        rank.connected();
        third.catch_up(&mut rank, || usize::MAX);
        assert_eq!(held(&rank).len(), lately as usize);
    }
}

#[test]
fn an_engine_that_was_only_out_of_reach_is_the_same() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[stored(&[10], None, &TOKENS[..4])]));
    let mut reader = Reader::default();
    reader.ask(&mut rank);
    rank.disconnected();
    // It may be gone as well.
    reader.ask(&mut rank);
    assert!(reader.held.is_empty() && held(&rank).is_empty() && rank.counts().told == 0);
    publisher.publish(&[stored(&[11], Some(10), &TOKENS[4..8])]);
    rank.connected();
    publisher.catch_up(&mut rank, || usize::MAX);
    check(&rank, &chain(base(), &TOKENS[..8]));
    reader.ask(&mut rank);
    assert_eq!((reader.blocks(), rank.happened().replays), (held(&rank), 3));
    // Without a replay nobody can say which of the two it is.
    rank.disconnected();
    rank.connected();
    rank.begin_replay();
    rank.end_replay(Ended::Failed);
    assert!(held(&rank).is_empty() && rank.is_live() && rank.is_incomplete());
}

/// Something is learned of the engine while all it has published is being heard.
#[track_caller]
fn check_during_a_replay(learn: impl Fn(&mut Rank)) {
    let mut publisher = Publisher::default();
    for hash in 1..=3 {
        publisher.publish(&[stored(&[hash], None, &[hash as u32; 4])]);
    }
    let mut rank = rank();
    rank.connected();
    rank.begin_replay();
    rank.take_replayed(publisher.frame(0));
    learn(&mut rank);
    rank.take_replayed(publisher.frame(1));
    rank.take_replayed(publisher.frame(2));
    rank.end_replay(Ended::Over);
    assert!(!rank.is_live());
    publisher.catch_up(&mut rank, || usize::MAX);
    assert!(rank.is_live() && !rank.is_incomplete());
    assert_eq!((held(&rank).len(), rank.cache().unmatched()), (3, 0));
}

#[test]
fn what_is_learned_of_an_engine_during_a_replay_costs_no_batch() {
    check_during_a_replay(Rank::restarted);
    let adapters = vec![("another".to_owned(), 5)];
    check_during_a_replay(|rank| {
        rank.set_names(Names { base: "n".to_owned(), adapters: adapters.clone() });
    });
}

#[test]
fn clearing_begins_a_generation_and_what_follows_counts() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[stored(&[10, 11], None, &TOKENS[..8])]));
    let position = rank.answer(None).position;
    let cleared = json!({"type": "AllBlocksCleared"});
    rank.take(publisher.publish(&[removed(11), cleared, stored(&[20], None, &TOKENS[4..8])]));
    check(&rank, &chain(base(), &TOKENS[4..8]));
    let answer = rank.answer(Some(position));
    assert_eq!((answer.since, answer.position.generation == position.generation), (None, false));
    assert!(!rank.is_incomplete());
}

#[test]
fn blocks_of_another_size_begin_a_generation() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[stored(&[10, 11], None, &TOKENS[..8])]));
    let eight = with(stored(&[20], None, &TOKENS[..8]), json!({"block_size": 8}));
    rank.take(publisher.publish(&[eight]));
    let expected = Chain::new(base(), BlockSize::new(8).unwrap(), &TOKENS[..8]);
    check(&rank, expected.hashes());
    // An offloading tier may have its own size: it is only left out.
    let away = json!({"block_size": 4, "medium": "CPU"});
    rank.take(publisher.publish(&[with(stored(&[30], None, &TOKENS[..4]), away)]));
    check(&rank, expected.hashes());
}

#[test]
fn an_unknown_parent_is_looked_for_once_and_then_left_out() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.take(publisher.publish(&[stored(&[10], None, &TOKENS[..4])]));
    rank.take(publisher.publish(&[stored(&[21], Some(20), &TOKENS[4..8])]));
    assert_eq!(rank.wants_replay(), Some(0));
    publisher.catch_up(&mut rank, || usize::MAX);
    assert!(rank.is_live() && rank.is_incomplete());
    let generations = rank.generations();
    rank.take(publisher.publish(&[stored(&[22], Some(21), &TOKENS[..4]), removed(22)]));
    assert_eq!((rank.wants_replay(), rank.generations()), (None, generations));
    check(&rank, &chain(base(), &TOKENS[..4]));
    assert_eq!(rank.seen().unknown_parents, 3);
}

#[test]
fn an_agent_that_comes_late_tells_what_it_can_place() {
    let mut publisher = Publisher::default();
    publisher.publish(&[stored(&[10], None, &TOKENS[..4])]);
    publisher.publish(&[stored(&[11], Some(10), &TOKENS[4..8]), stored(&[20], None, &TOKENS[8..])]);
    publisher.oldest = 1;
    let rank = following(&publisher);
    check(&rank, &chain(base(), &TOKENS[8..]));
    assert!(rank.is_incomplete());
    assert_eq!(rank.happened().replays, 2);
}

#[test]
fn a_batch_that_cannot_be_read_forgets_all() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    let junk: [&[u8]; 7] = [
        b"",
        b"\xc1",
        b"\x93\xcb",
        b"\x90",
        b"\x92\x00\x91\x81\xa4type\xabBlockStored",
        b"\x92\x00\x91\x92\xacBlockRemoved\xa1x",
        &[0x91; 4000],
    ];
    for (at, payload) in junk.iter().enumerate() {
        rank.take(publisher.publish(&[stored(&[10], None, &TOKENS[..4])]));
        check(&rank, &chain(base(), &TOKENS[..4]));
        rank.take(publisher.publish_bytes(payload.to_vec()));
        check(&rank, &[]);
        assert_eq!(rank.happened().junk, at as u64 + 1, "{payload:?}");
        assert!(rank.take_junk().is_some() && rank.is_incomplete() && rank.is_live());
    }
}

#[test]
fn more_than_there_is_room_for_is_not_believed() {
    let mut publisher = Publisher::default();
    let mut rank = following(&publisher);
    rank.set_capacity(Some(4));
    for at in 0..4 {
        rank.take(publisher.publish(&[stored(&[10, 11], None, &TOKENS[..8])]));
        assert_eq!(held(&rank).len(), if at == 2 { 0 } else { 2 }, "{at}");
    }
    assert_eq!(rank.happened().overflows, 1);
    assert!(rank.is_live() && rank.is_incomplete());
    // Copies that end make room.
    rank.take(publisher.publish(&[removed(11), removed(10), stored(&[20], None, &TOKENS[..4])]));
    assert_eq!((held(&rank).len(), rank.happened().overflows), (1, 1));
}

#[test]
fn any_changed_byte_of_a_batch_is_read_or_counted() {
    let salted = json!({"extra_keys": [["salt"], [["image", 3]], null], "lora_name": "lora"});
    let batch = batch(
        1.5,
        &[
            with(stored(&[1, 2, 3], None, &TOKENS), salted),
            removed(2),
            json!({"type": "AllBlocksCleared"}),
        ],
    );
    let mut rank = following(&Publisher::default());
    let mut seq = 0;
    for at in 0..batch.len() {
        for value in [0, 0x7F, 0x90, 0xC0, 0xC1, 0xC4, 0xCF, 0xDC, 0xDF, 0xFF] {
            let mut forged = batch.clone();
            forged[at] = value;
            rank.take(Frame { seq, payload: &forged });
            seq += 1;
        }
    }
    let happened = rank.happened();
    assert_eq!(happened.batches + happened.junk, seq);
    assert!(happened.batches > 100 && happened.junk > 100, "{happened:?}");
}

#[test]
fn frames_are_told_from_what_is_none() {
    let parse = |parts: &[&[u8]]| Frame::parse(parts).map(|frame| (frame.seq, frame.payload.len()));
    let seq = 7_u64.to_be_bytes();
    assert_eq!(parse(&[b"topic", &seq, b"abc"]), Some((7, 3)));
    assert_eq!(parse(&[b"", b"topic", &seq, b"abc"]), Some((7, 3)));
    assert_eq!(parse(&[b"", &seq, b"abc"]), Some((7, 3)));
    assert_eq!(parse(&[b"", b"", &[255; 8], b""]), Some((Frame::END, 0)));
    let foreign: [&[&[u8]]; 4] =
        [&[], &[b"a"], &[b"a", b"b", b"c"], &[b"", b"", b"", &seq, b"abc"]];
    for parts in foreign {
        assert_eq!(parse(parts), None, "{parts:?}");
    }
}

#[test]
fn events_of_another_rank_are_not_ours() {
    let mut rank = Rank::new(RankConfig { rank: Some(1), ..config() });
    let mut publisher = Publisher::default();
    rank.connected();
    publisher.catch_up(&mut rank, || usize::MAX);
    rank.take(publisher.publish(&[stored(&[10], None, &TOKENS[..4])]));
    assert_eq!((held(&rank).len(), rank.happened().other_rank), (0, 1));
}

fn config() -> RankConfig {
    RankConfig {
        names: Names { base: "m".to_owned(), adapters: Vec::new() },
        block_tokens: None,
        most_blocks: 1000,
        history_bytes: 1 << 20,
        rank: None,
        seed: 5,
    }
}

#[test]
fn readers_that_come_and_go_know_what_is_held() {
    let mut chance = Chance::new(3);
    let mut publisher = Publisher::default();
    let mut rank = Rank::new(RankConfig { history_bytes: 8000, ..config() });
    rank.connected();
    publisher.catch_up(&mut rank, || usize::MAX);
    let mut asked = 0;
    let mut readers: Vec<Reader> = (0..5).map(|_| Reader::default()).collect();
    for hash in 0..2000_u64 {
        let mut events = vec![stored(&[hash], None, &[hash as u32; 4])];
        if let Some(old) = hash.checked_sub(40) {
            events.push(removed(old));
        }
        rank.take(publisher.publish(&events));
        let reader = chance.below(60) as usize;
        if let Some(reader) = readers.get_mut(reader) {
            reader.ask(&mut rank);
            asked += 1;
            assert_eq!(reader.blocks(), held(&rank));
        }
    }
    let snapshots: u32 = readers.iter().map(|reader| reader.snapshots).sum();
    assert!(snapshots > 8, "{snapshots} of {asked}: the ring never ran out");
    assert!(snapshots < asked / 2, "{snapshots} of {asked}: the ring was hardly ever enough");
}

/// An engine that stores and removes at random, and what of its events arrives how.
struct Storm {
    chance: Chance,
    publisher: Publisher,
    /// Blocks by number, of which n stands behind n/2.
    copies: Vec<u32>,
    /// Whether a block has been lost to whoever follows, so that less may be known.
    restarts: u32,
}

impl Storm {
    fn tokens(number: usize) -> Vec<u32> {
        vec![number as u32; 4]
    }

    fn name(number: usize) -> BlockHash {
        let mut numbers = vec![number];
        while numbers[numbers.len() - 1] > 1 {
            numbers.push(numbers[numbers.len() - 1] / 2);
        }
        let tokens: Vec<u32> = numbers.into_iter().rev().flat_map(Self::tokens).collect();
        *chain(base(), &tokens).last().unwrap()
    }

    fn is_reachable(&self, number: usize) -> bool {
        let mut at = number;
        while at > 0 {
            if self.copies[at] == 0 {
                return false;
            }
            at /= 2;
        }
        true
    }

    fn truth(&self) -> BTreeSet<BlockHash> {
        (1..self.copies.len()).filter(|number| self.is_reachable(*number)).map(Self::name).collect()
    }

    fn step(&mut self) {
        let mut events: Vec<Value> = Vec::new();
        for _ in 0..=self.chance.below(4) {
            let number = 1 + self.chance.below(63) as usize;
            if self.chance.below(5) < 3 {
                let parent = number / 2;
                if parent == 0 || self.copies[parent] > 0 {
                    self.copies[number] += 1;
                    let parent = Some(parent as u64).filter(|parent| *parent > 0);
                    events.push(stored(&[number as u64], parent, &Self::tokens(number)));
                }
            } else if self.copies[number] > 0 {
                self.copies[number] -= 1;
                events.push(removed(number as u64));
            }
        }
        if self.chance.below(150) == 0 {
            self.copies.fill(0);
            events.push(json!({"type": "AllBlocksCleared"}));
        }
        self.publisher.publish(&events);
        if self.chance.below(200) == 0 {
            self.copies.fill(0);
            self.restarts += 1;
            self.publisher = Publisher::started(f64::from(self.restarts) * 1e6);
        }
    }
}

#[test]
fn no_loss_restart_or_order_makes_it_tell_what_is_not_held() {
    let (mut complete, mut incomplete, mut restarts) = (0, 0, 0);
    for seed in 0..24 {
        println!("seed {seed}");
        let mut storm = Storm {
            chance: Chance::new(seed),
            publisher: Publisher::default(),
            copies: vec![0; 64],
            restarts: 0,
        };
        let keeps = if seed % 2 == 0 { usize::MAX } else { 2 };
        let mut rank = Rank::new(config());
        rank.connected();
        let mut reader = Reader::default();
        let mut sent = 0;
        for _ in 0..400 {
            let before = storm.restarts;
            storm.step();
            if storm.restarts > before {
                sent = 0;
                rank.disconnected();
                rank.connected();
            }
            storm.publisher.oldest = storm.publisher.len().saturating_sub(keeps);
            let mut frames: Vec<usize> = (sent..storm.publisher.len()).collect();
            sent = storm.publisher.len();
            match storm.chance.below(12) {
                0 => frames.clear(),
                // Late, and twice, and the wrong way round.
                1 => frames = (sent.saturating_sub(3)..sent).rev().collect(),
                _ => {}
            }
            for at in frames {
                let mut chance = storm.chance.clone();
                storm.publisher.catch_up(&mut rank, || 1 + chance.below(30) as usize + 2);
                rank.take(storm.publisher.frame(at));
            }
            let mut chance = storm.chance.clone();
            storm.publisher.catch_up(&mut rank, || 3 + chance.below(30) as usize);
            reader.ask(&mut rank);
            assert_eq!(reader.blocks(), held(&rank));
        }
        // Whatever was lost last shows with the next frame.
        storm.publisher.publish(&[]);
        rank.take(storm.publisher.frame(storm.publisher.len() - 1));
        storm.publisher.catch_up(&mut rank, || usize::MAX);
        assert!(rank.is_live());
        let (told, truth) = (held(&rank), storm.truth());
        assert!(told.is_subset(&truth), "told, but not held: {:?}", told.difference(&truth));
        if rank.is_incomplete() {
            incomplete += 1;
        } else {
            assert_eq!(told, truth);
            complete += 1;
        }
        restarts += storm.restarts;
    }
    println!("{complete} complete, {incomplete} incomplete, {restarts} restarts");
    assert!(complete > 8 && incomplete > 0 && restarts > 10);
}

#[test]
fn batches_come_as_messages_of_an_engine() {
    let payload = batch(1.5, &[stored(&[10], None, &TOKENS[..4])]);
    let parts = [b"kv-events".to_vec(), 0_u64.to_be_bytes().to_vec(), payload];
    let mut rank = following(&Publisher::default());
    rank.take(Frame::parse(&parts).unwrap());
    assert_eq!(held(&rank).len(), 1);
}
