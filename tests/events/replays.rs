//! A real engine's events, replayed through the agent's core and the filter's index: is what is predicted for each request
//! what the engine then said it had cached?
//!
//! One by one, a request is predicted when it is sent. Side by side, the engine comes to a request some steps later, and
//! other requests store and evict meanwhile: there a request is predicted from all events in front of its own first one,
//! which is what an agent without any delay would know, and how many would be right when they are sent is counted beside.

use crate::consumer::Consumer;
use crate::engine::frame;
use crate::held::{Held, events};
use crate::recording::{Frame, Line, Recording, Request};
use std::collections::BTreeMap;
use warmpath::agent::cache::Names;
use warmpath::identity::seed_of;
use warmpath::replicas::models::hash;
use warmpath::tokens::blocks::ChainSeed;

/// How the requests of a section were predicted.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Tally {
    exact: usize,
    over: usize,
    under: usize,
}

impl Tally {
    fn note(&mut self, predicted: usize, cached: usize) {
        match predicted.cmp(&cached) {
            std::cmp::Ordering::Equal => self.exact += 1,
            std::cmp::Ordering::Greater => self.over += 1,
            std::cmp::Ordering::Less => self.under += 1,
        }
    }
}

fn all_exact(exact: usize) -> Tally {
    Tally { exact, ..Tally::default() }
}

fn names(recording: &Recording) -> Names {
    let adapters = recording.models.iter().filter(|model| model.parent.is_some());
    Names {
        base: "tiny".to_owned(),
        adapters: adapters.map(|model| (model.name.clone(), hash(&model.root))).collect(),
    }
}

/// Where the filter starts the chain of a request's prompt.
fn seed(recording: &Recording, request: &Request) -> ChainSeed {
    let model = recording.models.iter().find(|model| model.name == request.model).unwrap();
    let root = [hash(&model.root)];
    let adapter = model.parent.is_some().then_some((model.name.as_str(), root.as_slice()));
    seed_of("tiny", request.salt.as_deref(), adapter)
}

/// What the engine can be asked for again: what has been heard of it since it started, but for what is too old.
fn kept(engine: &BTreeMap<u64, Frame>, batches: usize) -> impl Fn(u64) -> Vec<Frame> {
    let first = engine.keys().rev().nth(batches - 1).copied().unwrap_or(0);
    move |from| engine.range(from.max(first)..).map(|(_, frame)| frame.clone()).collect()
}

/// By sections, what was predicted for each request when it was sent.
fn play(recording: &Recording) -> BTreeMap<String, Tally> {
    let mut consumer = Consumer::new(names(recording), recording.block_tokens);
    let (mut engine, mut section, mut tallies) = (BTreeMap::new(), String::new(), BTreeMap::new());
    for line in &recording.lines {
        match line {
            Line::Section(name) => section.clone_from(name),
            Line::Replay(_, frames) => {
                engine.extend(frames.iter().map(|frame| (frame.seq, frame.clone())))
            }
            Line::Batch(frame) => {
                engine.insert(frame.seq, frame.clone());
                consumer.hear(frame, kept(&engine, recording.replay_batches));
                consumer.read_report();
            }
            Line::Started => engine.clear(),
            Line::Sent(request) => {
                let Some(cached) = recording.cached_tokens(request.number) else { continue };
                let predicted = consumer.cached_tokens(seed(recording, request), &request.prompt);
                tallies
                    .entry(section.clone())
                    .or_insert_with(Tally::default)
                    .note(predicted, cached);
            }
            Line::Lost(_) | Line::Answered { .. } | Line::Reset(_) | Line::Killed => {}
        }
    }
    tallies
}

#[test]
fn what_is_predicted_of_an_engine_is_what_it_has() {
    let tallies = play(&Recording::read("one_by_one"));
    let expected = [
        ("adapters", all_exact(8)),
        ("duplicates", all_exact(26)),
        ("eviction", all_exact(114)),
        ("gap", all_exact(17)),
        // What was stored while nobody listened, and is not to be had again, is never predicted: too little, never too much.
        ("gap_beyond_replay", Tally { exact: 63, over: 0, under: 9 }),
        ("plain", all_exact(12)),
        // Reset at rest, an engine says so with the events of its next step: whoever is first cannot know.
        ("reset", Tally { exact: 5, over: 1, under: 0 }),
        ("restart", all_exact(6)),
        ("salts", all_exact(9)),
    ];
    assert_eq!(tallies, expected.map(|(name, tally)| (name.to_owned(), tally)).into());
}

/// The same for requests side by side: what each could be predicted to have when the engine came to it.
///
/// Batches are taken apart, so that each event is a batch of its own.
fn play_apart(recording: &Recording) -> BTreeMap<String, Tally> {
    let mut consumer = Consumer::new(names(recording), recording.block_tokens);
    let requests: BTreeMap<String, (&str, &Request)> = sent(recording);
    let (mut begun, mut tallies) = (BTreeMap::new(), BTreeMap::<String, Tally>::new());
    let (mut engine, mut seq) = (BTreeMap::new(), 0);
    for line in &recording.lines {
        let frame_of_all = match line {
            Line::Batch(frame) => frame,
            // Until an event of its own, the engine has stored nothing for it that it had not.
            Line::Sent(request) => {
                begun.insert(request.number, None);
                continue;
            }
            _ => continue,
        };
        for event in events(&frame_of_all.payload) {
            if let Some((_, request)) =
                event["session_id"].as_str().and_then(|name| requests.get(name))
            {
                let place = begun.get_mut(&request.number).unwrap();
                place.get_or_insert_with(|| {
                    consumer.cached_tokens(seed(recording, request), &request.prompt)
                });
            }
            let frame = frame(seq, vec![event]);
            engine.insert(seq, frame.clone());
            seq += 1;
            consumer.hear(&frame, kept(&engine, recording.replay_batches));
            consumer.read_report();
        }
    }
    for (section, request) in requests.values() {
        let Some(cached) = recording.cached_tokens(request.number) else { continue };
        // Without a full block of its own it has no event that says when.
        if let Some(Some(predicted)) = begun.get(&request.number)
            && cached + recording.block_tokens <= request.prompt.len()
        {
            tallies.entry((*section).to_owned()).or_default().note(*predicted, cached);
        }
    }
    tallies
}

/// The requests by the names under which they are in the events, each with its section.
fn sent(recording: &Recording) -> BTreeMap<String, (&str, &Request)> {
    let mut section = "";
    let mut requests = BTreeMap::new();
    for line in &recording.lines {
        match line {
            Line::Section(name) => section = name,
            Line::Sent(request) => {
                requests.insert(format!("request-{}", request.number), (section, request));
            }
            _ => {}
        }
    }
    requests
}

#[test]
fn side_by_side_what_is_predicted_of_an_engine_is_what_it_has_when_it_comes_to_a_request() {
    let recording = Recording::read("concurrent");
    let tallies = play_apart(&recording);
    let expected = [
        ("copies", all_exact(18)),
        ("crowd", all_exact(168)),
        ("one_prefix", all_exact(8)),
        ("reset_while_running", all_exact(20)),
    ];
    assert_eq!(tallies, expected.map(|(name, tally)| (name.to_owned(), tally)).into());
    // When they were sent, five of the crowd found less than that: the first ones, of which one had yet to compute what they
    // share. So did six of eight with one beginning.
    let at_sending = play(&recording);
    assert_eq!(at_sending["crowd"], Tally { exact: 163, over: 0, under: 5 });
    assert_eq!(at_sending["one_prefix"], Tally { exact: 2, over: 0, under: 6 });
    // One of the two copies of their last block goes, and a prompt that is longer still finds it.
    assert_eq!(at_sending["copies"], all_exact(34));
    assert_eq!(at_sending["left"], all_exact(4));
}

#[test]
fn more_than_a_fifth_of_the_recorded_blocks_are_evicted() {
    for name in ["one_by_one", "concurrent"] {
        let mut held = Held::default();
        for line in &Recording::read(name).lines {
            if let Line::Batch(frame) = line {
                events(&frame.payload).iter().for_each(|event| held.apply(event));
            }
        }
        assert!(held.removed * 5 > held.stored, "{name}: {} of {}", held.removed, held.stored);
    }
}
