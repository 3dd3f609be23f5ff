//! Clients: how they send, and what each of them saw.
//!
//! A client sends one request at a time over a connection that it gives up after a few requests or seconds, as clients
//! behind a balancer of connections do. It tries nothing a second time: what fails counts.

use super::asks::{Kind, Source};
use super::faults::Log;
use super::gateway::NUMBER_HEADER;
use crate::client::{Answer, Ask, Connection};
use http_body_util::BodyExt as _;
use hyper::Response;
use hyper::body::Incoming;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::time::{Instant, sleep, timeout};

/// A request that takes longer hangs: no fault lasts that long, nor do three in a row.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a client uses a connection: well under the time that an old listener leaves it.
const CONNECTION_AGE: Duration = Duration::from_secs(4);

/// How a request ended, for its client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// With the answer that it should have.
    Complete,
    /// The client left.
    Left,
    /// The head of a good response came, and not all of the rest.
    Cut(String),
    /// Another answer than it should have.
    Wrong(String),
    /// No answer.
    None(String),
}

/// A request that did not end well.
#[derive(Debug, Clone)]
pub struct Trouble {
    pub number: u64,
    pub kind: Kind,
    pub end: End,
    pub began: Instant,
    /// When the response's head came, and from which replica.
    pub head: Option<(Instant, Option<usize>)>,
    pub ended: Instant,
    pub connection: &'static str,
}

/// What all clients saw.
#[derive(Default)]
pub struct Tally {
    pub ends: Mutex<BTreeMap<(Kind, &'static str), u64>>,
    pub troubles: Mutex<Vec<Trouble>>,
    pub slowest: Mutex<Duration>,
    sent: AtomicU64,
}

impl Tally {
    /// Requests sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    fn next_number(&self) -> u64 {
        self.sent.fetch_add(1, Ordering::Relaxed)
    }

    fn note(&self, trouble: Trouble) {
        let word = match &trouble.end {
            End::Complete => "complete",
            End::Left => "left",
            End::Cut(_) => "cut",
            End::Wrong(_) => "wrong",
            End::None(_) => "none",
        };
        *self
            .ends
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry((trouble.kind, word))
            .or_default() += 1;
        let took = trouble.ended - trouble.began;
        let mut slowest = self.slowest.lock().unwrap_or_else(PoisonError::into_inner);
        *slowest = took.max(*slowest);
        if !matches!(trouble.end, End::Complete | End::Left) {
            self.troubles.lock().unwrap_or_else(PoisonError::into_inner).push(trouble);
        }
    }
}

/// One client.
pub struct Client<'a> {
    address: SocketAddr,
    source: Source,
    tally: &'a Tally,
    connection: Option<Open>,
}

struct Open {
    connection: Connection,
    since: Instant,
    left: u64,
    kind: &'static str,
}

/// What has arrived of a response.
struct Began {
    at: Option<Instant>,
    place: Option<usize>,
}

impl<'a> Client<'a> {
    pub fn new(place: u64, seed: u64, address: SocketAddr, tally: &'a Tally) -> Self {
        Self { address, source: Source::new(place, seed), tally, connection: None }
    }

    /// Sends requests until `end`, `most` by all clients together.
    pub async fn run(mut self, end: Instant, most: u64) {
        while Instant::now() < end && self.tally.sent() < most {
            let kind = self.source.kind();
            let number = self.tally.next_number();
            match kind {
                Kind::Talk => {
                    let (at, ask) = self.source.talk();
                    // What failed is tried again at the conversation's next turn, as users do.
                    if let Some(answer) = self.exchange(number, kind, &ask, &[200]).await {
                        self.source.answered(at, &answer);
                    }
                }
                Kind::Leave => self.leave(number).await,
                _ => {
                    let (ask, statuses) = self.source.ask(kind);
                    self.exchange(number, kind, &ask, statuses).await;
                }
            }
            sleep(Duration::from_millis(20 + self.source.chance.below(300))).await;
        }
    }

    /// A connection that is young enough, one in four HTTP/2.
    async fn connect(&mut self) -> Result<Open, String> {
        let usable = |open: &Open| open.left > 0 && open.since.elapsed() < CONNECTION_AGE;
        if let Some(mut open) = self.connection.take().filter(usable)
            && open.connection.is_usable().await
        {
            return Ok(open);
        }
        let (opened, kind) = if self.source.chance.below(4) == 0 {
            (Connection::try_open_http2(self.address).await, "h2")
        } else {
            (Connection::try_open(self.address).await, "h1")
        };
        let connection = opened.map_err(|error| format!("connecting: {error}"))?;
        let left = 1 + self.source.chance.below(6);
        Ok(Open { connection, since: Instant::now(), left, kind })
    }

    /// Sends a request, reads the answer, and notes how it went. The answer, if all is well.
    async fn exchange(
        &mut self,
        number: u64,
        kind: Kind,
        ask: &Ask,
        statuses: &[u16],
    ) -> Option<Answer> {
        let ask = ask.clone().header(NUMBER_HEADER, number.to_string());
        let (start, mut began) = (Instant::now(), Began { at: None, place: None });
        let mut connection = "none";
        let result = match self.connect().await {
            Err(error) => Err(End::None(error)),
            Ok(mut open) => {
                connection = open.kind;
                let sent = send(&mut open.connection, &ask, statuses, &mut began);
                let late = |_| Err(End::None("no end in time".to_owned()));
                let result = timeout(PATIENCE, sent).await.unwrap_or_else(late);
                open.left -= 1;
                if result.is_ok() {
                    self.connection = Some(open);
                }
                result
            }
        };
        let end = result.as_ref().err().cloned().unwrap_or(End::Complete);
        self.note(number, kind, end, start, &began, connection);
        result.ok()
    }

    fn note(
        &self,
        number: u64,
        kind: Kind,
        end: End,
        start: Instant,
        began: &Began,
        connection: &'static str,
    ) {
        let head = began.at.map(|at| (at, began.place));
        let ended = Instant::now();
        self.tally.note(Trouble { number, kind, end, began: start, head, ended, connection });
    }

    /// Sends a request and leaves: within the body, while nothing is there, or in the middle of the answer.
    async fn leave(&mut self, number: u64) {
        let start = Instant::now();
        let mut began = Began { at: None, place: None };
        let ask = self.source.long_stream().header(NUMBER_HEADER, number.to_string());
        let end = match self.source.chance.below(3) {
            0 => self.leave_within_the_body(&ask).await,
            phase => {
                let wait = Duration::from_millis(self.source.chance.below(60));
                self.leave_while_answered(&ask, (phase == 1).then_some(wait), &mut began).await
            }
        };
        self.note(number, Kind::Leave, end, start, &began, "h1");
    }

    async fn leave_within_the_body(&mut self, ask: &Ask) -> End {
        let Ok(mut stream) = tokio::net::TcpStream::connect(self.address).await else {
            return End::None("connecting".to_owned());
        };
        let mut head = format!(
            "POST {} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n",
            ask.path,
            ask.body.len()
        );
        for (name, value) in &ask.headers {
            head.push_str(&format!("{name}: {}\r\n", String::from_utf8_lossy(value)));
        }
        head.push_str("\r\n");
        let part = self.source.chance.below(ask.body.len() as u64) as usize;
        let sent = async {
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&ask.body[..part]).await
        };
        if let Err(error) = sent.await {
            return End::None(error.to_string());
        }
        sleep(Duration::from_millis(self.source.chance.below(100))).await;
        End::Left
    }

    async fn leave_while_answered(
        &mut self,
        ask: &Ask,
        wait: Option<Duration>,
        began: &mut Began,
    ) -> End {
        let mut connection = match Connection::try_open(self.address).await {
            Ok(connection) => connection,
            Err(error) => return End::None(format!("connecting: {error}")),
        };
        let answer = timeout(wait.unwrap_or(PATIENCE), connection.try_begin(ask)).await;
        let mut response = match answer {
            Err(_) if wait.is_some() => return End::Left,
            Err(_) => return End::None("no answer in time".to_owned()),
            Ok(Err(error)) => return End::None(format!("{error:?}")),
            Ok(Ok(response)) => response,
        };
        began.at = Some(Instant::now());
        began.place = place(&response);
        if response.status() != 200 {
            return End::Wrong(format!("status {}", response.status()));
        }
        let _ = timeout(PATIENCE, response.body_mut().frame()).await;
        End::Left
    }
}

/// The replica that signed a response.
fn place(response: &Response<Incoming>) -> Option<usize> {
    let name = response.headers().get("x-mock-replica")?.to_str().ok()?;
    name.strip_prefix("replica-")?.parse().ok()
}

async fn send(
    connection: &mut Connection,
    ask: &Ask,
    statuses: &[u16],
    began: &mut Began,
) -> Result<Answer, End> {
    let response = connection.try_begin(ask).await.map_err(|e| End::None(format!("{e:?}")))?;
    began.at = Some(Instant::now());
    began.place = place(&response);
    let status = response.status().as_u16();
    let (head, body) = response.into_parts();
    let body = body.collect().await.map_err(|error| error.to_string());
    if !statuses.contains(&status) {
        let text = body.map(|body| String::from_utf8_lossy(&body.to_bytes()).into_owned());
        return Err(End::Wrong(format!("status {status}: {}", text.unwrap_or_else(|error| error))));
    }
    let answer = Answer { status, headers: head.headers, body: body.map_err(End::Cut)?.to_bytes() };
    let ends_well = !answer.is_stream() || answer.body.ends_with(b"data: [DONE]\n\n");
    if ends_well { Ok(answer) } else { Err(End::Cut("a stream without its last event".to_owned())) }
}

/// Why a trouble is no fault of ours: its response had begun on a replica that a fault then cut. Or a VM was made to trap.
pub fn excuse(trouble: &Trouble, log: &Log) -> Option<String> {
    if log.trapped(trouble.began, trouble.ended) {
        return Some("a trap".to_owned());
    }
    let (End::Cut(_), Some((at, Some(place)))) = (&trouble.end, trouble.head) else { return None };
    log.cutter(place, at, trouble.ended).map(super::faults::Fault::label)
}
