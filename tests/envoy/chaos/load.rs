//! Clients: what they send, what they must get, and what each of them saw.
//!
//! A client sends one request at a time over a connection that it gives up after a few requests or seconds, as clients
//! behind a balancer of connections do. It tries nothing a second time: what fails counts.

use super::faults::Log;
use super::fleet::SECOND_MODEL;
use super::gateway::NUMBER_HEADER;
use crate::client::{Answer, Ask, Connection};
use crate::prompts::{chat, next_turn, streamed, words};
use http_body_util::BodyExt as _;
use hyper::Response;
use hyper::body::Incoming;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::time::{Instant, sleep, timeout};
use warmpath::mock::chance::Chance;

/// A request that takes longer hangs: no fault lasts that long, nor do three in a row.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a client uses a connection: well under the time that an old listener leaves it.
const CONNECTION_AGE: Duration = Duration::from_secs(4);

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The next turn of a conversation.
    Talk,
    /// A prompt that shares nothing with any other.
    Fresh,
    /// A prompt for the model that is configured now and then.
    Second,
    /// A request without a body.
    Get,
    /// A body that the replica refuses.
    Bad,
    /// A body of megabytes.
    Large,
    /// The client leaves at some point.
    Leave,
}

/// Of a hundred requests.
const MIX: [(Kind, u64); 7] = [
    (Kind::Talk, 46),
    (Kind::Fresh, 14),
    (Kind::Second, 6),
    (Kind::Get, 8),
    (Kind::Bad, 11),
    (Kind::Large, 3),
    (Kind::Leave, 12),
];

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
    chance: Chance,
    tally: &'a Tally,
    connection: Option<Open>,
    talks: Vec<Value>,
    /// Seeds of prompts, different from all other clients'.
    next_seed: u64,
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
        let chance = Chance::of_tokens(seed, &[7, u32::try_from(place).unwrap()]);
        let next_seed = (place + 1) * 1_000_000;
        Self { address, chance, tally, connection: None, talks: Vec::new(), next_seed }
    }

    /// Sends requests until `end`, `most` by all clients together.
    pub async fn run(mut self, end: Instant, most: u64) {
        while Instant::now() < end && self.tally.sent() < most {
            let kind = self.draw_kind();
            let number = self.tally.next_number();
            match kind {
                Kind::Talk => self.talk(number).await,
                Kind::Leave => self.leave(number).await,
                _ => {
                    let (ask, statuses) = self.ask(kind);
                    self.exchange(number, kind, &ask, &statuses).await;
                }
            }
            sleep(Duration::from_millis(20 + self.chance.below(300))).await;
        }
    }

    fn draw_kind(&mut self) -> Kind {
        let mut drawn = self.chance.below(MIX.iter().map(|(_, weight)| weight).sum());
        for (kind, weight) in MIX {
            if drawn < weight {
                return kind;
            }
            drawn -= weight;
        }
        Kind::Talk
    }

    fn seed(&mut self) -> u64 {
        self.next_seed += 1;
        self.next_seed
    }

    fn fresh(&mut self) -> Value {
        let (seed, length) = (self.seed(), 20 + self.chance.below(600) as usize);
        chat(seed, length, 2 + self.chance.below(24))
    }

    fn maybe_streamed(&mut self, body: &Value) -> Value {
        if self.chance.below(5) < 3 { streamed(body) } else { body.clone() }
    }

    /// A request of its own, and the statuses that are right for it.
    fn ask(&mut self, kind: Kind) -> (Ask, Vec<u16>) {
        match kind {
            Kind::Get => {
                let path = ["/v1/models", "/version", "/load"][self.chance.below(3) as usize];
                (Ask::get(path), vec![200])
            }
            Kind::Bad => self.bad(),
            Kind::Large => self.large(),
            Kind::Second => {
                let mut body = self.fresh();
                body["model"] = json!(SECOND_MODEL);
                (Ask::chat(&self.maybe_streamed(&body)), vec![200])
            }
            _ => {
                let body = self.fresh();
                (Ask::chat(&self.maybe_streamed(&body)), vec![200])
            }
        }
    }

    fn bad(&mut self) -> (Ask, Vec<u16>) {
        let chat = |body: &[u8]| Ask::post("/v1/chat/completions", body);
        let good = self.fresh().to_string();
        let ask = match self.chance.below(9) {
            0 => chat(b""),
            1 => chat(b"{\"model\": \"qwen3\", \"messages\""),
            2 => chat(b"[1, 2]"),
            3 => chat(b"{\"model\": \"qwen3\", \"messages\": null}"),
            4 => chat(b"{\"model\": \"nobody\", \"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}"),
            5 => chat(good.as_bytes()).header("content-type", "text/plain"),
            6 => chat(b"\xff\xfe{\"model\": \"qwen3\"}").chunked(3),
            7 => chat(b"\x1f\x8b\x08\0garbage").header("content-encoding", "gzip"),
            _ => Ask::completion(&json!({"model": "qwen3", "prompt": {"a": 1}})),
        };
        (ask, vec![400, 404, 415, 422])
    }

    fn large(&mut self) -> (Ask, Vec<u16>) {
        let body = self.fresh();
        let megabytes = 1 + self.chance.below(6) as usize;
        match self.chance.below(3) {
            // Longer than the replica takes: it says so.
            0 => {
                let long = chat(self.seed(), 60_000, 4);
                (Ask::chat(&long), vec![400])
            }
            // Longer than the filter holds, from four megabytes on; all that Envoy keeps for a retry.
            1 => {
                let padded = format!("{body}{}", " ".repeat(megabytes << 20));
                (Ask::post("/v1/chat/completions", padded), vec![200])
            }
            _ => {
                let padded = format!("{body}{}", " ".repeat(megabytes << 20));
                (Ask::post("/v1/chat/completions", padded).chunked(1 << 17), vec![200])
            }
        }
    }

    async fn talk(&mut self, number: u64) {
        if self.talks.len() < 3 {
            let (seed, length) = (self.seed(), 100 + self.chance.below(500) as usize);
            self.talks.push(chat(seed, length, 4 + self.chance.below(40)));
        }
        let at = self.chance.below(self.talks.len() as u64) as usize;
        let talk = self.talks[at].clone();
        let body = self.maybe_streamed(&talk);
        let answer = self.exchange(number, Kind::Talk, &Ask::chat(&body), &[200]).await;
        let turns = talk["messages"].as_array().map_or(0, Vec::len);
        match answer {
            Some(answer) if turns < 12 => {
                let question = words(self.seed(), 10 + self.chance.below(60) as usize);
                self.talks[at] = next_turn(&talk, &answer.text(), &question);
            }
            // Users try again what failed.
            None => (),
            Some(_) => drop(self.talks.swap_remove(at)),
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
        let (opened, kind) = if self.chance.below(4) == 0 {
            (Connection::try_open_http2(self.address).await, "h2")
        } else {
            (Connection::try_open(self.address).await, "h1")
        };
        let connection = opened.map_err(|error| format!("connecting: {error}"))?;
        let left = 1 + self.chance.below(6);
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
        let mut body = self.fresh();
        body["max_tokens"] = json!(200);
        let ask = Ask::chat(&streamed(&body)).header(NUMBER_HEADER, number.to_string());
        let end = match self.chance.below(3) {
            0 => self.leave_within_the_body(&ask).await,
            phase => {
                let wait = Duration::from_millis(self.chance.below(60));
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
        let part = self.chance.below(ask.body.len() as u64) as usize;
        let sent = async {
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&ask.body[..part]).await
        };
        if let Err(error) = sent.await {
            return End::None(error.to_string());
        }
        sleep(Duration::from_millis(self.chance.below(100))).await;
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
