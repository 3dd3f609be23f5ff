//! Over sockets, with the client's side of the same crate.

use super::super::control::Control;
use super::super::engine::{EngineConfig, Request, RequestId};
use super::super::{Handle, ReplicaConfig, serve};
use super::*;
use crate::mock::driver::{Command, Listener};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use zeromq::{DealerSocket, SubSocket};

const LOOPBACK: &str = "tcp://[::ffff:127.0.0.1]:0";

/// Until something must have come. Only a failing test waits that long.
const PATIENCE: Duration = Duration::from_secs(20);

fn config(buffer_batches: usize) -> ReplicaConfig {
    let events = EventsConfig {
        endpoint: LOOPBACK.to_owned(),
        replay: Some(LOOPBACK.to_owned()),
        topic: "kv-events".to_owned(),
        buffer_batches,
    };
    let engine = EngineConfig { step_base: Duration::from_millis(1), ..EngineConfig::default() };
    ReplicaConfig { engine, events: Some(events), ..ReplicaConfig::default() }
}

async fn start(config: ReplicaConfig) -> Handle {
    serve(config, tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap()
}

struct Subscriber {
    socket: SubSocket,
}

impl Subscriber {
    /// Subscribes, and waits until the replica knows.
    async fn of(handle: &Handle) -> Self {
        let mut socket = SubSocket::new();
        socket.connect(&format!("tcp://{}", handle.events.unwrap().0)).await.unwrap();
        socket.subscribe("kv-").await.unwrap();
        let mut subscriber = Self { socket };
        let end = Instant::now() + PATIENCE;
        let mut prompt = 1_000_000;
        while subscriber.next(Duration::from_millis(50)).await.is_none() {
            assert!(Instant::now() < end, "no batch comes");
            prompt += 1;
            ask(handle, prompt).await;
        }
        while subscriber.next(Duration::from_millis(200)).await.is_some() {}
        subscriber
    }

    async fn next(&mut self, patience: Duration) -> Option<(u64, Vec<u8>)> {
        let message = timeout(patience, self.socket.recv()).await.ok()?.unwrap();
        let [topic, number, payload] = message.into_vec().try_into().expect("three frames");
        assert_eq!(topic.as_ref(), b"kv-events");
        Some((u64::from_be_bytes(number.as_ref().try_into().unwrap()), payload.to_vec()))
    }

    /// The numbers of so many batches, counted from `first`.
    async fn numbers(&mut self, count: usize, first: u64) -> Vec<u64> {
        let mut numbers = Vec::new();
        for _ in 0..count {
            numbers.push(self.next(PATIENCE).await.expect("a batch").0 - first);
        }
        numbers
    }
}

/// One request that fills a block, to its end: one batch.
async fn ask(handle: &Handle, seed: u32) {
    let (events, mut answer) = mpsc::unbounded_channel();
    let request = Request {
        id: RequestId(handle.replica.next_number()),
        prompt: (0..17).map(|token| token + seed * 100).collect(),
        max_tokens: 1,
        salt: None,
        lora: None,
        reads_cache: true,
    };
    let listener = Listener { events, choice: 0, arrived: Instant::now() };
    handle.replica.commands.send(Command::Submit(request, listener)).unwrap();
    assert!(answer.recv().await.is_some_and(|event| event.last));
}

/// All that is replayed from a number on.
async fn replay(handle: &Handle, first: u64) -> Vec<(u64, Vec<u8>)> {
    let mut socket = DealerSocket::new();
    socket.connect(&format!("tcp://{}", handle.events.unwrap().1.unwrap())).await.unwrap();
    socket.send(frames([b"", &first.to_be_bytes()])).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let message = timeout(PATIENCE, socket.recv()).await.unwrap().unwrap();
        let [empty, topic, number, payload] = message.into_vec().try_into().expect("four frames");
        assert!(empty.is_empty());
        if number.as_ref() == END {
            assert!(topic.is_empty() && payload.is_empty());
            return batches;
        }
        assert_eq!(topic.as_ref(), b"kv-events");
        batches.push((u64::from_be_bytes(number.as_ref().try_into().unwrap()), payload.to_vec()));
    }
}

/// Batches that were published so far.
async fn published(handle: &Handle) -> u64 {
    replay(handle, 0).await.last().map_or(0, |(number, _)| number + 1)
}

/// A batch, if it is one.
fn decode(payload: &[u8]) -> Option<Value> {
    rmp_serde::from_slice(payload).ok().filter(Value::is_array)
}

#[tokio::test]
async fn batches_are_numbered_and_can_be_had_again() {
    let handle = start(config(100)).await;
    let mut subscriber = Subscriber::of(&handle).await;
    let first = published(&handle).await;
    for seed in 1..=3 {
        ask(&handle, seed).await;
    }
    let mut heard = Vec::new();
    for _ in 0..3 {
        heard.push(subscriber.next(PATIENCE).await.unwrap());
    }
    let numbers: Vec<u64> = heard.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [first, first + 1, first + 2]);
    let batch = decode(&heard[1].1).unwrap();
    assert_eq!(batch[1][0]["token_ids"][0], json!(200));
    assert_eq!(replay(&handle, first).await, heard);
    assert_eq!(replay(&handle, 0).await.len() as u64, first + 3);
    assert_eq!(replay(&handle, first + 3).await, []);
}

#[tokio::test]
async fn what_is_older_than_the_ring_is_gone_without_a_word() {
    let handle = start(config(2)).await;
    for seed in 0..5 {
        ask(&handle, seed).await;
    }
    let end = Instant::now() + PATIENCE;
    while published(&handle).await < 5 {
        assert!(Instant::now() < end, "not all are published");
        sleep(Duration::from_millis(5)).await;
    }
    let numbers = async |first| {
        replay(&handle, first).await.iter().map(|(number, _)| *number).collect::<Vec<u64>>()
    };
    assert_eq!(numbers(0).await, [3, 4]);
    handle.replica.set_control(|control| control.replay_limit = Some(1));
    assert_eq!(numbers(0).await, [3]);
}

#[tokio::test]
async fn batches_go_astray_as_they_are_told_to() {
    let handle = start(config(100)).await;
    let mut subscriber = Subscriber::of(&handle).await;
    let first = published(&handle).await;
    let fault = async |fault, seeds: std::ops::Range<u32>| {
        let events = Some((fault, 1));
        handle.replica.set_control(|control| *control = Control { events, ..Control::default() });
        for seed in seeds {
            ask(&handle, seed).await;
        }
    };
    fault(EventFault::Drop, 0..2).await;
    assert_eq!(subscriber.numbers(1, first).await, [1]);
    fault(EventFault::Lose, 2..4).await;
    assert_eq!(subscriber.numbers(1, first).await, [3]);
    fault(EventFault::Reorder, 4..6).await;
    assert_eq!(subscriber.numbers(2, first).await, [5, 4]);
    fault(EventFault::Repeat, 6..7).await;
    assert_eq!(subscriber.numbers(2, first).await, [6, 6]);
    fault(EventFault::Garble, 7..8).await;
    let (number, payload) = subscriber.next(PATIENCE).await.unwrap();
    assert_eq!((number - first, decode(&payload)), (7, None));
    let again = replay(&handle, first).await;
    let numbers: Vec<u64> = again.iter().map(|(number, _)| number - first).collect();
    assert_eq!(numbers, [0, 1, 3, 4, 5, 6, 7], "what was dropped is there, what was lost is not");
    assert!(again.iter().all(|(_, payload)| decode(payload).is_some()));
}

#[tokio::test]
async fn a_new_engine_counts_from_nought() {
    for _ in 0..2 {
        let handle = start(config(100)).await;
        ask(&handle, 1).await;
        let end = Instant::now() + PATIENCE;
        while published(&handle).await == 0 {
            assert!(Instant::now() < end, "nothing is published");
        }
        assert_eq!(replay(&handle, 0).await[0].0, 0);
    }
}

#[tokio::test]
async fn a_port_that_is_taken_ends_a_replica_at_its_start() {
    let handle = start(config(1)).await;
    let mut other = config(1);
    let taken = format!("tcp://[::ffff:127.0.0.1]:{}", handle.events.unwrap().0.port());
    other.events.as_mut().unwrap().endpoint = taken;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let error = serve(other, listener).err().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
}

#[track_caller]
fn check_address(endpoint: &str, expected: Result<&str, &str>) {
    let found = address(endpoint).map(|address| address.to_string()).map_err(|e| e.to_string());
    assert_eq!(found, expected.map(str::to_owned).map_err(str::to_owned));
}

#[test]
fn endpoints_are_bound_where_an_engine_binds_them() {
    check_address("tcp://*:5557", Ok("0.0.0.0:5557"));
    check_address("tcp://[::ffff:127.0.0.1]:5557", Ok("127.0.0.1:5557"));
    let connects = "vLLM would connect to this; expected * or a mapped address such as \
                    [::ffff:127.0.0.1]";
    for endpoint in ["tcp://127.0.0.1:5557", "tcp://engine:5557", "tcp://[::1]:5557"] {
        check_address(endpoint, Err(&format!("{endpoint}: {connects}")));
    }
    check_address("ipc:///tmp/a", Err("ipc:///tmp/a: expected tcp://HOST:PORT"));
    check_address("tcp://*", Err("tcp://*: no port"));
    check_address("tcp://*:x", Err("tcp://*:x: the port is no number"));
}

#[test]
fn each_further_replica_takes_the_next_ports() {
    let third = EventsConfig {
        endpoint: "tcp://*:5557".to_owned(),
        replay: Some("tcp://[::ffff:127.0.0.1]:5657".to_owned()),
        ..EventsConfig::default()
    };
    let third = third.offset(2);
    assert_eq!(third.endpoint, "tcp://*:5559");
    assert_eq!(third.replay.as_deref(), Some("tcp://[::ffff:127.0.0.1]:5659"));
}
