//! What goes wrong with the replicas and their agents, when, and the log of it by which client errors are judged.
//!
//! Two lanes, each with half of the replicas, each with one fault at a time: so at most two of six are bad at once. What
//! goes wrong with agents is a lane of its own, and excuses nothing. A lane goes through all faults in a shuffled order before any comes again. What is drawn depends on the seed alone;
//! when exactly a fault begins also depends on how long the ones before it took to be over.

use super::fleet::{AgentMember, Member};
use serde_json::json;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep, timeout};
use warmpath::mock::chance::Chance;

/// How a replica goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// `kill -9`, and a new process on the same address.
    Kill,
    /// SIGTERM, and a new process.
    Terminate,
    /// An engine that shuts down as vLLM does: prompts get 500 while `/health` is good, then it ends.
    Shutdown,
    /// SIGSTOP: it takes connections and says nothing, then goes on.
    Pause,
    /// Prompts get 500 while `/health` is good.
    Fail,
    /// Prompts get no answer while `/health` is good; then they do.
    Hang,
    /// Its port is closed and its connections are cut.
    Refuse,
    /// Streams that begin are cut after some tokens.
    Cut,
    /// Prompts wait before they are computed.
    Slow,
    /// `/health` says 503; prompts are answered.
    Unhealthy,
    /// `/metrics` goes wrong in one of the mock's ways.
    Metrics(&'static str),
    /// The agent beside the replica goes wrong.
    Agent(AgentFault),
}

/// How an agent goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AgentFault {
    /// `kill -9`, and a new process on the same address.
    Kill,
    /// SIGSTOP: it takes connections and says nothing, then goes on.
    Pause,
    /// Something else answers in its place, with bytes that are no report.
    Garbage,
    /// Batches of its engine's events go astray in one of the mock's ways.
    Events(&'static str),
}

const AGENT_FAULTS: [AgentFault; 6] = [
    AgentFault::Kill,
    AgentFault::Pause,
    AgentFault::Garbage,
    AgentFault::Events("drop"),
    AgentFault::Events("lose"),
    AgentFault::Events("garble"),
];

const FAULTS: [Fault; 16] = [
    Fault::Kill,
    Fault::Terminate,
    Fault::Shutdown,
    Fault::Pause,
    Fault::Fail,
    Fault::Hang,
    Fault::Refuse,
    Fault::Cut,
    Fault::Slow,
    Fault::Unhealthy,
    Fault::Kill,
    Fault::Metrics("garbage"),
    Fault::Metrics("huge"),
    Fault::Metrics("nan"),
    Fault::Metrics("error"),
    Fault::Metrics("slow"),
];

impl Fault {
    /// Whether it may cut responses that have begun: by the replica's end, or by Envoy, which closes the connections
    /// to a replica whose health checks fail.
    fn cuts(self) -> bool {
        matches!(
            self,
            Self::Kill
                | Self::Terminate
                | Self::Shutdown
                | Self::Pause
                | Self::Refuse
                | Self::Cut
                | Self::Unhealthy
        )
    }

    /// Seconds that it lasts, at least and at most. Twelve of 500 are what was measured of a vLLM that shuts down.
    fn seconds(self) -> (f64, f64) {
        match self {
            Self::Kill | Self::Terminate => (0.5, 4.0),
            Self::Shutdown | Self::Fail => (12.0, 12.0),
            Self::Pause => (3.0, 9.0),
            Self::Unhealthy => (5.0, 9.0),
            Self::Refuse => (2.0, 5.0),
            Self::Hang | Self::Cut | Self::Slow | Self::Metrics(_) | Self::Agent(_) => (4.0, 8.0),
        }
    }

    /// For a report: without what tells kinds of bad metrics apart.
    pub fn label(self) -> String {
        match self {
            Self::Metrics(kind) => format!("metrics {kind}"),
            Self::Agent(AgentFault::Events(kind)) => format!("agent's events {kind}"),
            Self::Agent(fault) => format!("agent {fault:?}").to_lowercase(),
            other => format!("{other:?}").to_lowercase(),
        }
    }
}

/// A fault that happened, or happens.
#[derive(Debug, Clone)]
pub struct Entry {
    pub fault: Fault,
    pub place: usize,
    pub began: Instant,
    /// When the replica was good again.
    pub over: Option<Instant>,
}

/// All faults of a run.
#[derive(Default)]
pub struct Log {
    entries: Mutex<Vec<Entry>>,
    traps: Mutex<Vec<Instant>>,
}

/// From the request that makes a VM trap until that VM is replaced: Envoy waits a second, and the leader traps at the
/// next answer to a poll only.
const TRAP_LASTS: Duration = Duration::from_secs(4);

/// Between an event at a replica and its being noted, here or at the client, on a machine with other work.
const SLACK: Duration = Duration::from_millis(500);

impl Log {
    fn begin(&self, fault: Fault, place: usize) -> usize {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.push(Entry { fault, place, began: Instant::now(), over: None });
        entries.len() - 1
    }

    fn end(&self, number: usize) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries[number].over = Some(Instant::now());
    }

    /// A copy.
    pub fn entries(&self) -> Vec<Entry> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The fault that explains why a response of this replica, which had begun, was cut: one that cuts, there, then.
    pub fn cutter(&self, place: usize, begun: Instant, cut: Instant) -> Option<Fault> {
        let explains = |entry: &&Entry| {
            entry.place == place
                && entry.fault.cuts()
                && entry.began <= cut + SLACK
                && entry.over.is_none_or(|over| over + SLACK >= begun)
        };
        self.entries().iter().find(explains).map(|entry| entry.fault)
    }

    /// Notes that a VM is made to trap.
    pub fn trap(&self) {
        self.traps.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
    }

    /// Whether a trap may have cut, or refused, what was under way between these.
    pub fn trapped(&self, from: Instant, to: Instant) -> bool {
        let traps = self.traps.lock().unwrap_or_else(PoisonError::into_inner);
        traps.iter().any(|trap| *trap <= to + SLACK && *trap + TRAP_LASTS >= from)
    }

    /// What was wrong anywhere at this moment, in words.
    pub fn at(&self, moment: Instant) -> String {
        let entries = self.entries();
        let on = entries.iter().filter(|entry| {
            entry.began <= moment + SLACK && entry.over.is_none_or(|over| over + SLACK >= moment)
        });
        let words: Vec<String> =
            on.map(|entry| format!("{} of {}", entry.fault.label(), entry.place)).collect();
        if words.is_empty() { "nothing".to_owned() } else { words.join(", ") }
    }
}

/// A shuffled order, again and again.
pub struct Deck<T> {
    all: Vec<T>,
    left: Vec<T>,
}

impl<T: Copy> Deck<T> {
    pub fn new(all: &[T]) -> Self {
        Self { all: all.to_vec(), left: Vec::new() }
    }

    pub fn draw(&mut self, chance: &mut Chance) -> T {
        if self.left.is_empty() {
            self.left.clone_from(&self.all);
        }
        self.left.swap_remove(chance.below(self.left.len() as u64) as usize)
    }
}

/// A length between two, in seconds times a scale.
pub fn between(chance: &mut Chance, (least, most): (f64, f64), scale: f64) -> Duration {
    let part = chance.below(1_001) as f64 / 1_000.0;
    Duration::from_secs_f64((least + part * (most - least)) * scale)
}

/// Lets one fault after another happen to these replicas until `end`, and leaves all of them well.
pub async fn lane(
    mut members: Vec<Member>,
    mut chance: Chance,
    log: &Log,
    scale: f64,
    end: Instant,
) -> Vec<Member> {
    let mut deck = Deck::new(&FAULTS);
    loop {
        sleep(between(&mut chance, (0.5, 2.0), scale)).await;
        let fault = deck.draw(&mut chance);
        let at = chance.below(members.len() as u64) as usize;
        let length = between(&mut chance, fault.seconds(), scale);
        if Instant::now() + length > end {
            return members;
        }
        let member = &mut members[at];
        let number = log.begin(fault, member.place);
        happen(fault, member, length, &mut chance).await;
        member.wait_until_it_answers().await;
        log.end(number);
    }
}

/// Lets one fault after another happen to these agents until `end`, and leaves all of them well.
pub async fn agents_lane(
    mut agents: Vec<AgentMember>,
    mut chance: Chance,
    log: &Log,
    scale: f64,
    end: Instant,
) -> Vec<AgentMember> {
    let mut deck = Deck::new(&AGENT_FAULTS);
    loop {
        sleep(between(&mut chance, (0.5, 2.0), scale)).await;
        let fault = deck.draw(&mut chance);
        let at = chance.below(agents.len() as u64) as usize;
        let length = between(&mut chance, Fault::Agent(fault).seconds(), scale);
        if Instant::now() + length > end {
            return agents;
        }
        let agent = &mut agents[at];
        let number = log.begin(Fault::Agent(fault), agent.place);
        match fault {
            AgentFault::Kill => {
                agent.kill();
                sleep(length).await;
                agent.start();
            }
            AgentFault::Pause => {
                agent.signal("STOP");
                sleep(length).await;
                agent.signal("CONT");
            }
            AgentFault::Garbage => {
                agent.kill();
                let _ = timeout(length, answer_garbage(agent)).await;
                agent.start();
            }
            AgentFault::Events(kind) => {
                agent.disturb(kind).await;
                sleep(length).await;
            }
        }
        log.end(number);
    }
}

/// Answers in an agent's place with what is no report, until it is dropped.
async fn answer_garbage(agent: &AgentMember) {
    let listener = loop {
        match TcpListener::bind(agent.address).await {
            Ok(listener) => break listener,
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    };
    loop {
        let Ok((mut visitor, _)) = listener.accept().await else { continue };
        let mut asked = [0; 4096];
        while visitor.read(&mut asked).await.is_ok_and(|size| size > 0) {
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nWPCR\x63\0abc";
            if visitor.write_all(answer).await.is_err() {
                break;
            }
        }
    }
}

async fn happen(fault: Fault, member: &mut Member, length: Duration, chance: &mut Chance) {
    let wish = match fault {
        Fault::Kill => {
            member.kill();
            sleep(length).await;
            return member.start();
        }
        Fault::Terminate => {
            member.terminate().await;
            sleep(length).await;
            return member.start();
        }
        Fault::Shutdown => {
            member.control(json!({"fail": {"status": 500}})).await;
            sleep(length).await;
            member.terminate().await;
            return member.start();
        }
        Fault::Pause => {
            member.signal("STOP");
            sleep(length).await;
            return member.signal("CONT");
        }
        Fault::Refuse => {
            let length_ms = u64::try_from(length.as_millis()).unwrap();
            member.control(json!({"refuse_ms": length_ms})).await;
            return sleep(length).await;
        }
        Fault::Fail => json!({"fail": {"status": ([500, 502, 503][chance.below(3) as usize])}}),
        Fault::Hang => json!({"hang": true}),
        Fault::Cut => json!({"cut_after": 1 + chance.below(6)}),
        Fault::Slow => json!({"slow_ms": 200 + chance.below(1_300)}),
        Fault::Unhealthy => json!({"health": 503}),
        Fault::Metrics(kind) => json!({"metrics": kind}),
        // Of another lane.
        Fault::Agent(_) => return,
    };
    member.control(wish).await;
    sleep(length).await;
    member.behave().await;
}

#[test]
fn a_deck_gives_everything_once_before_anything_twice() {
    let mut chance = Chance::new(1);
    let mut deck = Deck::new(&[1, 2, 3, 4, 5]);
    let mut round = || {
        let mut drawn: Vec<i32> = (0..5).map(|_| deck.draw(&mut chance)).collect();
        let order = drawn.clone();
        drawn.sort_unstable();
        assert_eq!(drawn, [1, 2, 3, 4, 5]);
        order
    };
    let orders: Vec<Vec<i32>> = (0..20).map(|_| round()).collect();
    assert!(orders.iter().any(|order| *order != orders[0]));
}

#[test]
fn only_a_cutting_fault_there_and_then_excuses_a_cut() {
    let now = Instant::now();
    let s = |seconds: u64| now + Duration::from_secs(seconds);
    let entry = |fault, place, began, over| Entry { fault, place, began: s(began), over };
    let entries = vec![
        entry(Fault::Kill, 1, 10, Some(s(12))),
        entry(Fault::Fail, 2, 10, Some(s(12))),
        entry(Fault::Cut, 3, 10, None),
    ];
    let log = Log { entries: Mutex::new(entries), traps: Mutex::default() };
    assert_eq!(log.cutter(1, s(9), s(10)), Some(Fault::Kill));
    assert_eq!(log.cutter(1, s(13), s(14)), None, "begun after it was over");
    assert_eq!(log.cutter(1, s(7), s(9)), None, "cut before it began");
    assert_eq!(log.cutter(0, s(9), s(10)), None, "another replica");
    assert_eq!(log.cutter(2, s(10), s(11)), None, "a fault that cuts nothing");
    assert_eq!(log.cutter(3, s(20), s(21)), Some(Fault::Cut), "not over yet");
}
