//! Requests without a pause while something else happens, each of which must be answered as if nothing had.

use crate::client::{Ask, Connection};
use crate::prompts::{chat, streamed};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// Clients at work. A client that is not answered in full, with 200, fails the test when it is stopped.
pub struct Traffic {
    clients: Vec<JoinHandle<()>>,
    sent: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Traffic {
    /// Starts this many clients, which take turns between short chats, long ones, streams, and what is not inference.
    pub fn start(address: SocketAddr, clients: u64) -> Self {
        let (sent, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let client = |number| {
            let (sent, stop) = (Arc::clone(&sent), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut connection = None;
                for turn in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let mut open = match connection.take() {
                        Some(open) => open,
                        None => Connection::open(address).await,
                    };
                    let answer = open.send(&ask(number, turn)).await;
                    assert_eq!(answer.status, 200, "client {number}, turn {turn}: {answer:?}");
                    sent.fetch_add(1, Ordering::Relaxed);
                    // Envoy says so before it closes a connection that is to be drained.
                    if answer.header("connection") != Some("close") {
                        connection = Some(open);
                    }
                }
            })
        };
        let clients = (0..clients).map(client).collect();
        Self { clients, sent, stop }
    }

    /// Waits until some more requests have been answered.
    pub async fn flows(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        let enough = self.sent.load(Ordering::Relaxed) + 2 * self.clients.len() as u64;
        while self.sent.load(Ordering::Relaxed) < enough {
            assert!(Instant::now() < end, "the clients are not answered");
            let failed = self.clients.iter().any(JoinHandle::is_finished);
            assert!(!failed, "a client has ended; see above");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends it: how many requests were answered.
    pub async fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.await.expect("a client without an error");
        }
        self.sent.load(Ordering::Relaxed)
    }
}

fn ask(client: u64, turn: u64) -> Ask {
    let body = chat(client * 1_000 + turn / 8, 60, 2);
    match turn % 5 {
        0 => Ask::chat(&streamed(&chat(client, 200, 12))),
        1 => Ask::chat(&body).chunked(100),
        2 => Ask::get("/v1/models"),
        3 => Ask::chat(&body),
        _ => Ask::completion(&serde_json::json!({
            "model": "qwen3", "max_tokens": 1, "prompt": body["messages"][0]["content"],
        })),
    }
}

/// A stream that lasts, to be read to its end later.
pub struct LongStream(JoinHandle<Vec<Value>>);

impl LongStream {
    /// Begins one, and returns once its first event is there.
    pub async fn begin(address: SocketAddr, seed: u64, tokens: u64) -> Self {
        let mut connection = Connection::open(address).await;
        let ask = Ask::chat(&streamed(&chat(seed, 100, tokens)));
        let response = connection.begin(&ask).await;
        assert_eq!(response.status(), 200);
        Self(tokio::spawn(async move {
            let answer = connection.finish(response).await;
            answer.documents()
        }))
    }

    /// Reads it to its end: all the tokens that were asked for must have come.
    pub async fn end(self, tokens: u64) {
        let events = self.0.await.expect("a stream without an error");
        let usage = events.last().map(|event| event["usage"]["completion_tokens"].clone());
        assert_eq!(usage, Some(Value::from(tokens)));
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.0.is_finished()
    }
}

/// Connects as soon as somebody listens there.
pub async fn connect_when_open(address: SocketAddr) -> Connection {
    let end = Instant::now() + Duration::from_secs(60);
    while TcpStream::connect(address).await.is_err() {
        assert!(Instant::now() < end, "nobody listens at {address}");
        sleep(Duration::from_millis(5)).await;
    }
    Connection::open(address).await
}
