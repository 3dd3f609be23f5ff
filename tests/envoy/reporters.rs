//! Stand-ins for agents, which report what a test says: truly, wrongly, for ever, or not at all.
//!
//! A report is what a real agent writes, by the same code. What it is asked with is kept; it knows no engine.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use warmpath::mock::{Handle, ReplicaConfig};
use warmpath::report::{self, CONTENT_TYPE, Change, PATH, Position, Status, Tier};
use warmpath::tokens::blocks::{BlockHash, Chain};

use crate::harness::{MODEL, start_replica};

/// So far above its replica's port each of them listens.
pub const OFFSET: u16 = 1000;

/// How an agent answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// As it should.
    Reports,
    /// It takes questions and says nothing.
    Stopped,
    /// It cuts every connection.
    Cuts,
    /// It wants another token.
    Refuses,
    /// A page that is no report.
    Page,
    /// Bytes that are no report, called one.
    Garbage,
    /// A report of another version.
    Version,
    /// A report that is damaged far behind.
    Damaged,
    /// What it said of its first change, whatever is asked: a cache in between that does not heed queries.
    Old,
    /// A body that never ends.
    Endless,
    /// A long body, a byte at a time.
    Slow,
}

/// What an agent says, and what it was asked.
#[derive(Debug)]
pub struct Reporter {
    pub mode: Mode,
    pub status: Status,
    generation: u64,
    /// All that was ever said in this generation.
    changes: Vec<Change>,
    /// The heads of all questions.
    pub asked: Vec<String>,
}

impl Reporter {
    /// Its replica holds a chain.
    pub fn store(&mut self, chain: &Chain) {
        let blocks = chain.hashes().to_vec();
        self.changes.push(Change::Stored { parent: None, blocks, tier: Tier::Gpu });
    }

    /// So many blocks of nobody's prompts.
    pub fn fill(&mut self, blocks: u64) {
        let blocks = (0..blocks).map(BlockHash).collect();
        self.changes.push(Change::Stored { parent: None, blocks, tier: Tier::Gpu });
    }

    /// And no more.
    pub fn remove(&mut self, chain: &Chain) {
        let blocks: Vec<BlockHash> = chain.hashes().iter().rev().copied().collect();
        self.changes.push(Change::Removed { blocks, tier: Tier::Gpu });
    }

    /// All is forgotten: the engine or the agent begins anew.
    pub fn begin_anew(&mut self) {
        self.generation += 1;
        self.changes.clear();
    }

    /// Snapshots are the history so far, which says the same.
    fn report(&self, since: Option<Position>) -> Vec<u8> {
        let position = Position { generation: self.generation, seq: self.changes.len() as u64 };
        let since = since
            .filter(|since| since.generation == position.generation && since.seq <= position.seq);
        let known = since.map_or(0, |since| since.seq as usize);
        report::write(&self.status, since, position, self.changes[known..].to_vec())
    }

    fn answer(&self, since: Option<Position>) -> Answer {
        let whole = |status, content_type, body| Answer::Whole(status, content_type, body);
        match self.mode {
            Mode::Reports => whole(200, CONTENT_TYPE, self.report(since)),
            Mode::Stopped => Answer::None,
            Mode::Cuts => Answer::Cut,
            Mode::Refuses => whole(401, "text/plain", b"no".to_vec()),
            Mode::Page => whole(200, "text/html", b"<html>hello</html>".to_vec()),
            Mode::Garbage => whole(200, CONTENT_TYPE, vec![0xff; 4096]),
            Mode::Version => {
                let mut body = self.report(since);
                body[4] += 1;
                whole(200, CONTENT_TYPE, body)
            }
            Mode::Damaged => {
                let far = (0..3000).map(BlockHash).collect();
                let last = [BlockHash(1)].to_vec();
                let changes = [far, last].map(|blocks| Change::Stored {
                    parent: None,
                    blocks,
                    tier: Tier::Gpu,
                });
                let position = Position { generation: 99, seq: 2 };
                let mut body = report::write(&self.status, None, position, changes);
                // The kind of the last change: its tier, number of blocks and block come behind it.
                let kind = body.len() - 8 - 4 - 2;
                body[kind] = 77;
                whole(200, CONTENT_TYPE, body)
            }
            Mode::Old => {
                let [since, position] =
                    [0, 1].map(|seq| Position { generation: self.generation, seq });
                let changes = self.changes[..1].to_vec();
                let body = report::write(&self.status, Some(since), position, changes);
                whole(200, CONTENT_TYPE, body)
            }
            Mode::Endless => Answer::Endless,
            Mode::Slow => Answer::Slow,
        }
    }
}

enum Answer {
    Whole(u16, &'static str, Vec<u8>),
    Endless,
    Slow,
    Cut,
    None,
}

/// An agent that runs. Dropping it ends it and cuts its connections.
pub struct Agent {
    pub address: SocketAddr,
    reporter: Arc<Mutex<Reporter>>,
    task: JoinHandle<()>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Agent {
    fn start(listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let status = Status {
            model: MODEL.to_owned(),
            block_tokens: 16,
            live: true,
            capacity_blocks: Some(8192),
            running: Some(0),
            waiting: Some(0),
            kv_usage: Some(0.0),
            load_age_ms: Some(0),
            engines: 1,
            ..Status::default()
        };
        let reporter = Arc::new(Mutex::new(Reporter {
            mode: Mode::Reports,
            status,
            generation: 7,
            changes: Vec::new(),
            asked: Vec::new(),
        }));
        let task = tokio::spawn(accept(listener, Arc::clone(&reporter)));
        Self { address, reporter, task }
    }

    /// What it says, to be changed, and what it was asked.
    pub fn reporter(&self) -> MutexGuard<'_, Reporter> {
        self.reporter.lock().unwrap()
    }
}

/// A replica, and an agent so far above it.
pub async fn start_with_agent(config: impl Fn() -> ReplicaConfig) -> (Handle, Agent) {
    for _ in 0..100 {
        let replica = start_replica(config()).await;
        let mut address = replica.address;
        let Some(port) = address.port().checked_add(OFFSET) else { continue };
        address.set_port(port);
        if let Ok(listener) = TcpListener::bind(address).await {
            return (replica, Agent::start(listener));
        }
    }
    panic!("no two free ports that far apart");
}

async fn accept(listener: TcpListener, reporter: Arc<Mutex<Reporter>>) {
    // Aborted with this task.
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let reporter = Arc::clone(&reporter);
        connections.spawn(async move {
            // A connection that breaks is the other side's to report.
            let _ = converse(stream, &reporter).await;
        });
    }
}

async fn converse(stream: TcpStream, reporter: &Mutex<Reporter>) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if stream.read_line(&mut head).await? == 0 {
                return Ok(());
            }
        }
        let target = head.split(' ').nth(1).unwrap_or_default();
        assert!(target.starts_with(PATH), "{head}");
        let since = target.split_once("?since=").and_then(|(_, since)| since.parse().ok());
        let answer = {
            let mut reporter = reporter.lock().unwrap();
            reporter.asked.push(head);
            reporter.answer(since)
        };
        match answer {
            Answer::Whole(status, content_type, body) => {
                let head = format!(
                    "HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                stream.write_all(head.as_bytes()).await?;
                stream.write_all(&body).await?;
            }
            Answer::Endless => {
                let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\n\r\n");
                stream.write_all(head.as_bytes()).await?;
                let piece = vec![7; 64 << 10];
                loop {
                    stream.write_all(&piece).await?;
                }
            }
            Answer::Slow => {
                let head = format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: 100000\r\n\r\n"
                );
                stream.write_all(head.as_bytes()).await?;
                loop {
                    stream.write_all(b"W").await?;
                    sleep(Duration::from_millis(50)).await;
                }
            }
            Answer::Cut => return Ok(()),
            // For as long as the other side waits.
            Answer::None => drop(stream.fill_buf().await?),
        }
    }
}
