//! Real agents beside mock replicas: what they report is what the replicas hold, whatever becomes of batches on their way,
//! and requests do not notice when agents or engines come and go.
//!
//! What a report's bytes are, what an agent makes of every kind of event, and how the filter reads reports that a test
//! makes up is tested elsewhere; here nothing is made up but the engine.

use crate::client::{Answer, Ask, Connection};
use crate::harness::{
    ALIAS, Files, MODEL, Rig, fast_replica, free_ports, fresh_folder, until, with_envoy,
};
use crate::prompts::{chat, next_turn};
use crate::shipped::Config;
use crate::stats::Scrape;
use crate::traffic::Traffic;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};
use warmpath::mock::chance::Chance;
use warmpath::mock::control::EventFault;
use warmpath::mock::engine::EngineConfig;
use warmpath::mock::publisher::EventsConfig;
use warmpath::mock::{Handle, ReplicaConfig, serve};
use warmpath::report::{Change, PATH, Report, Status};
use warmpath::tokens::blocks::{BlockHash, BlockSize, Chain, ChainSeed};

/// Until an agent has caught up. Only a failing test waits that long.
const PATIENCE: Duration = Duration::from_secs(60);

/// How many of a report's blocks are read at once.
const STEP: usize = 1_000;

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// A replica that publishes what becomes of its cache, and the agent beside it.
pub struct Place {
    config: ReplicaConfig,
    address: SocketAddr,
    /// Where its events are, and where they can be asked for again.
    events: [u16; 2],
    pub agent: SocketAddr,
    process: Option<Child>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.kill_agent();
    }
}

impl Place {
    /// A place on free ports, where nothing runs yet.
    pub fn new(mut config: ReplicaConfig, buffer_batches: usize, agent: u16, replica: u16) -> Self {
        let events: [u16; 2] = free_ports();
        let [endpoint, replay] = events.map(|port| format!("tcp://[::ffff:127.0.0.1]:{port}"));
        let (replay, topic) = (Some(replay), "kv-events".to_owned());
        config.events = Some(EventsConfig { endpoint, replay, topic, buffer_batches });
        Self { config, address: local(replica), events, agent: local(agent), process: None }
    }

    /// Starts the engine, perhaps once more: as soon as its ports are free.
    pub async fn start_engine(&self) -> Handle {
        let end = Instant::now() + PATIENCE;
        loop {
            let started = match TcpListener::bind(self.address).await {
                Ok(listener) => serve(self.config.clone(), listener),
                Err(error) => Err(error),
            };
            match started {
                Ok(handle) => return handle,
                Err(error) => assert!(Instant::now() < end, "{}: {error}", self.address),
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Starts the agent, perhaps once more.
    pub fn start_agent(&mut self) {
        let [events, replay] = self.events.map(|port| format!("tcp://127.0.0.1:{port}"));
        let process = Command::new(env!("CARGO_BIN_EXE_warmpath-agent"))
            .args(["--listen", &self.agent.to_string()])
            .args(["--engine-url", &format!("http://{}", self.address)])
            .args(["--events", &events, "--replay", &replay, "--topic", "kv-events"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("an agent");
        self.process = Some(process);
    }

    /// Ends the agent at once.
    pub fn kill_agent(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Sends the agent a signal by `kill`'s name for it.
    pub fn signal_agent(&self, name: &str) {
        let pid = self.process.as_ref().expect("an agent").id().to_string();
        let sent = Command::new("kill").args([&format!("-{name}"), &pid]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill -{name} {pid}");
    }

    /// The agent's resident memory in bytes.
    pub fn agent_memory(&self) -> u64 {
        let pid = self.process.as_ref().expect("an agent").id();
        let pages = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
        pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    /// What the agent reports as held; `None` while it does not answer, or does not hear its engine.
    async fn reported(&self) -> Option<(BTreeSet<BlockHash>, Status)> {
        let mut connection = Connection::try_open(self.agent).await.ok()?;
        let response = connection.try_begin(&Ask::get(PATH)).await.ok()?;
        if response.status() != 200 {
            return None;
        }
        let answer = connection.finish(response).await;
        let mut report = Report::read(answer.body.to_vec()).expect("a report");
        assert_eq!(report.since, None, "nobody asked for changes");
        let mut held = BTreeSet::new();
        while let Some(changes) = report.step(STEP).expect("changes") {
            for change in changes {
                match change {
                    Change::Stored { blocks, .. } => held.extend(blocks),
                    Change::Removed { blocks, .. } => {
                        blocks.iter().for_each(|block| assert!(held.remove(block)))
                    }
                }
            }
        }
        report.status.live.then_some((held, report.status))
    }
}

/// A conversation's prompt, of which a part is sent: token ids, and whose cache it is.
#[derive(Clone)]
struct Asked {
    prompt: Vec<u32>,
    salt: Option<String>,
}

impl Asked {
    fn body(&self) -> Value {
        let mut body = json!({ "model": ALIAS, "prompt": self.prompt, "max_tokens": 1 });
        if let Some(salt) = &self.salt {
            body["cache_salt"] = json!(salt);
        }
        body
    }
}

async fn post(address: SocketAddr, path: &str, body: &Value) -> Value {
    let answer = Connection::open(address).await.send(&Ask::post(path, body.to_string())).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    serde_json::from_slice(&answer.body).unwrap_or(Value::Null)
}

/// What the engine holds of all that it was ever asked, by the filter's own hashes.
async fn held(address: SocketAddr, asked: &[Asked]) -> BTreeSet<BlockHash> {
    let size = BlockSize::new(16).unwrap();
    let mut held = BTreeSet::new();
    for asked in asked {
        // One token more, since the last one of a prompt is always computed.
        let mut longer = asked.clone();
        longer.prompt.push(0);
        let cached = post(address, "/mock/cached", &longer.body()).await;
        let blocks = cached["cached_tokens"].as_u64().expect("a number") as usize / 16;
        let seed = ChainSeed::new(MODEL, asked.salt.as_deref());
        let chain = Chain::new(seed, size, &longer.prompt);
        held.extend(&chain.hashes()[..blocks]);
    }
    held
}

/// Asks the engine some things, of which some begin like others.
async fn ask_some(address: SocketAddr, chance: &mut Chance, asked: &mut Vec<Asked>, count: usize) {
    for _ in 0..count {
        let mut tokens = Chance::new(chance.below(12));
        let prompt: Vec<u32> = (0..400).map(|_| tokens.below(100_000) as u32).collect();
        let prompt = prompt[..20 + chance.below(380) as usize].to_vec();
        let salt = (chance.below(5) == 0).then(|| "tenant".to_owned());
        let next = Asked { prompt, salt };
        post(address, "/v1/completions", &next.body()).await;
        asked.push(next);
    }
}

/// Waits until what is reported satisfies a condition on that and on what is held.
async fn eventually(
    place: &Place,
    asked: &[Asked],
    what: &str,
    holds: impl Fn(&Status, &BTreeSet<BlockHash>, &BTreeSet<BlockHash>) -> bool,
) {
    let end = Instant::now() + PATIENCE;
    loop {
        let held = held(place.address, asked).await;
        let reported = place.reported().await;
        if let Some((reported, status)) = &reported
            && holds(status, reported, &held)
        {
            return;
        }
        let count = reported.map(|(reported, status)| (reported.len(), status));
        assert!(Instant::now() < end, "{what}: {} held, reported {count:?}", held.len());
        sleep(Duration::from_millis(20)).await;
    }
}

fn engine() -> ReplicaConfig {
    let engine = EngineConfig {
        step_base: Duration::from_millis(1),
        prefill_rate: 1e7,
        attention_rate: 0.0,
        // Less than is asked for: blocks are evicted all the time.
        capacity_blocks: 100,
        ..EngineConfig::default()
    };
    let served_names = vec![MODEL.to_owned(), ALIAS.to_owned()];
    ReplicaConfig { engine, served_names, ..ReplicaConfig::default() }
}

#[test]
fn an_agent_reports_what_its_engine_holds_whatever_batches_go_astray() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let [agent, replica] = free_ports();
        let mut place = Place::new(engine(), 10_000, agent, replica);
        let mut handle = place.start_engine().await;
        let (mut chance, mut asked) = (Chance::new(7), Vec::new());
        // What was published before anybody listened is asked for.
        ask_some(place.address, &mut chance, &mut asked, 30).await;
        place.start_agent();
        type Blocks = BTreeSet<BlockHash>;
        let equal =
            |_: &Status, reported: &Blocks, held: &Blocks| !held.is_empty() && reported == held;
        eventually(&place, &asked, "from the beginning", equal).await;
        let evicted = handle.replica.published().totals.evicted_blocks;
        assert!(evicted > 0, "nothing was evicted");

        for fault in [EventFault::Drop, EventFault::Reorder, EventFault::Repeat] {
            for count in [1, 3] {
                handle.replica.set_control(|control| control.events = Some((fault, count)));
                ask_some(place.address, &mut chance, &mut asked, 12).await;
                until("the fault is over", || handle.replica.control().events.is_none()).await;
                // The last batch may be the one that goes astray: only the next one shows it.
                ask_some(place.address, &mut chance, &mut asked, 3).await;
                eventually(&place, &asked, &format!("{fault:?}, {count} times"), equal).await;
            }
        }

        // What nobody can know any more is not guessed at: nothing is reported that is not held.
        for fault in [EventFault::Lose, EventFault::Garble] {
            handle.replica.set_control(|control| control.events = Some((fault, 2)));
            ask_some(place.address, &mut chance, &mut asked, 12).await;
            let part = |status: &Status, reported: &Blocks, held: &Blocks| {
                status.incomplete && reported.is_subset(held)
            };
            eventually(&place, &asked, &format!("{fault:?}"), part).await;
        }
        // A reset is told by the next step, and then all is known again.
        let reset = post(place.address, "/reset_prefix_cache", &json!({})).await;
        assert_eq!(reset["success"], true);
        ask_some(place.address, &mut chance, &mut asked, 12).await;
        eventually(&place, &asked, "a reset", equal).await;

        // A new engine on the old ports, which says nothing of being new.
        drop(handle);
        handle = place.start_engine().await;
        ask_some(place.address, &mut chance, &mut asked, 12).await;
        eventually(&place, &asked, "a new engine", equal).await;
        place.kill_agent();
        ask_some(place.address, &mut chance, &mut asked, 12).await;
        place.start_agent();
        eventually(&place, &asked, "a new agent", equal).await;
        drop(handle);
    });
}

/// How far above its replica's port an agent listens.
const OFFSET: u16 = 500;

/// Replicas behind the Envoys of these tests, each with an agent.
const PLACES: usize = 3;

/// What is not waited for. Ten times what it takes, and less than any time limit that a request could run into.
const AT_ONCE: Duration = Duration::from_secs(5);

/// Places whose agents are all as far above their replicas.
fn places() -> Vec<Place> {
    let mut places = Vec::new();
    while places.len() < PLACES {
        let [replica] = free_ports();
        if std::net::TcpListener::bind(local(replica + OFFSET)).is_ok() {
            let mut config = fast_replica(&format!("replica-{}", places.len()));
            // Room for all that is sent, so that what is not cached was lost.
            config.engine.capacity_blocks = 65_536;
            places.push(Place::new(config, 10_000, replica + OFFSET, replica));
        }
    }
    places
}

/// The shipped configuration in front of these places, with everything asked ten times a second.
fn config(places: &[Place]) -> Config {
    let mut config = Config::read();
    let agents: Vec<SocketAddr> = places.iter().map(|place| place.agent).collect();
    let replicas: Vec<SocketAddr> = places.iter().map(|place| place.address).collect();
    config.set_replicas(&replicas);
    config.set_endpoints("agents", &agents);
    config.change_plugin(|plugin| {
        plugin["poll_interval_ms"] = json!(100);
        plugin["learn_rates"] = json!(false);
        plugin["explain"] = json!({"request_header": "x-why", "secret": "open"});
        plugin["cache_report"] = json!({
            "cluster": "agents", "port_offset": OFFSET, "interval_ms": 100, "idle_interval_ms": 100,
            "lost_after_ms": 500,
        });
    });
    config
}

/// How many agents are as this label says.
fn agents(scrape: &Scrape, state: &str) -> f64 {
    scrape.sum("warmpath_agents", &[("state", state)])
}

async fn all_report(rig: &Rig) {
    rig.eventually("all agents report", |scrape| agents(scrape, "reporting") == PLACES as f64)
        .await;
}

/// Waits until every agent has reported twice from now on. A third may be under way that was true before now. Each by itself:
/// one that is idle is asked less often than others.
async fn two_reports(rig: &Rig) {
    // Gauges are told on ticks.
    const GAUGE: u128 = 200;
    for _ in 0..3 {
        let began = Instant::now();
        rig.eventually("a report of each agent", |scrape| {
            let ages = scrape.by("warmpath_replica_cache_report_age_ms", "replica");
            ages.into_values().all(|age| u128::from(age) + GAUGE < began.elapsed().as_millis())
        })
        .await;
    }
}

/// Requests that fell back because of this, so far.
async fn fallbacks(rig: &Rig, reason: &str) -> f64 {
    rig.scrape().await.sum("warmpath_cache_report_fallbacks_total", &[("reason", reason)])
}

/// An answer that came at once, and how many tokens the filter expected to be cached.
async fn ask(rig: &Rig, body: &Value) -> (u64, Answer) {
    let began = Instant::now();
    let answer = rig.send(&Ask::chat(body).header("x-why", "open")).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(began.elapsed() < AT_ONCE, "an answer took {:?}", began.elapsed());
    let why = answer.header("x-warmpath-explain").unwrap_or_else(|| panic!("why? {answer:?}"));
    let overlap = why.split("overlap_tokens=").nth(1).and_then(|rest| rest.split(',').next());
    let predicted = overlap.and_then(|tokens| tokens.parse().ok());
    (predicted.unwrap_or_else(|| panic!("no overlap: {why}")), answer)
}

/// Conversations, each with the next thing to be said in it.
struct Talks(Vec<Value>);

impl Talks {
    fn new(seeds: std::ops::Range<u64>) -> Self {
        Self(seeds.map(|seed| chat(seed, 400, 6)).collect())
    }

    /// Says the next thing in each. What was predicted and what was cached.
    async fn go_on(&mut self, rig: &Rig) -> Vec<(u64, u64)> {
        let mut figures = Vec::new();
        for talk in &mut self.0 {
            let (predicted, answer) = ask(rig, talk).await;
            figures.push((predicted, answer.usage().cached_tokens));
            *talk = next_turn(talk, &answer.text(), "And then?");
        }
        figures
    }

    /// As [`Self::go_on`]: everything so far must be cached, and known to be.
    async fn are_known(&mut self, rig: &Rig, when: &str) {
        let figures = self.go_on(rig).await;
        let right = |(predicted, cached): &(u64, u64)| predicted == cached && *cached >= 384;
        assert!(figures.iter().all(right), "{when}: predicted and cached {figures:?}");
    }
}

/// Kills an engine, waits until the fleet does without, and starts it once more.
async fn restart_engine(rig: &mut Rig, places: &[Place], at: usize) {
    drop(rig.replicas.remove(at));
    for seed in 0..10 {
        ask(rig, &chat(900 + seed, 60, 2)).await;
    }
    let handle = places[at].start_engine().await;
    rig.replicas.insert(at, handle);
    rig.eventually("all replicas are healthy", |scrape| {
        scrape.sum("warmpath_replicas", &[("health", "healthy")]) == PLACES as f64
            && scrape.sum("warmpath_replica_suspended", &[]) == 0.0
    })
    .await;
}

/// Empties every cache, and lets each engine do something: vLLM tells of a reset with its next step.
async fn reset_all(places: &[Place]) {
    for place in places {
        let end = Instant::now() + PATIENCE;
        loop {
            // Refused while an answer that has just ended is still there.
            let reset = post(place.address, "/reset_prefix_cache", &json!({})).await;
            if reset["success"] == true {
                break;
            }
            assert!(Instant::now() < end, "the cache is not reset");
            sleep(Duration::from_millis(20)).await;
        }
    }
    all_do_something(places, 800).await;
}

/// Lets each engine do something, past the gateway.
async fn all_do_something(places: &[Place], seed: u64) {
    for (at, place) in (0..).zip(places) {
        post(place.address, "/v1/chat/completions", &chat(seed + at, 60, 1)).await;
    }
}

async fn start(files: &Files, places: &mut [Place]) -> Rig {
    let mut replicas = Vec::new();
    for place in places.iter_mut() {
        replicas.push(place.start_engine().await);
        place.start_agent();
    }
    let rig = Rig::start_with(files, 2, replicas, config(places), fresh_folder(), false).await;
    all_report(&rig).await;
    rig
}

/// Another gateway in front of the same places, which has seen no request.
async fn another(files: &Files, places: &[Place]) -> Rig {
    let folder = fresh_folder();
    let mut rig = Rig::start_with(files, 2, Vec::new(), config(places), folder, true).await;
    rig.eventually("tokenizers in both workers", |scrape| {
        scrape.sum("warmpath_vms", &[("state", "ready")]) == 2.0
    })
    .await;
    all_report(&rig).await;
    two_reports(&rig).await;
    // Each worker must have heard of the replicas, too: which one takes a connection is the kernel's choice.
    let (end, mut routed) = (Instant::now() + PATIENCE, 0);
    while routed < 12 {
        let probe = Ask::chat(&chat(12_345, 20, 1)).header("x-why", "open");
        let is_routed = rig.send(&probe).await.header("x-warmpath-explain").is_some();
        routed = if is_routed { routed + 1 } else { 0 };
        assert!(Instant::now() < end, "a worker does not route");
    }
    rig.note_vms().await;
    rig
}

/// Rules: every request is answered at once with 200, whatever happens to agents; what they cannot tell is counted; they are
/// believed again by themselves; and what is gone is not predicted from two reports on.
#[test]
fn agents_and_engines_come_and_go_and_no_request_fails_or_waits() {
    with_envoy(
        "agents_and_engines_come_and_go_and_no_request_fails_or_waits",
        |files| async move {
            let mut places = places();
            let mut rig = start(&files, &mut places).await;
            let mut talks = Talks::new(1..7);
            assert!(talks.go_on(&rig).await.iter().all(|(predicted, _)| *predicted == 0));
            two_reports(&rig).await;
            talks.are_known(&rig, "with agents").await;

            // An agent is killed, and started again.
            let silent = fallbacks(&rig, "silent").await;
            places[0].kill_agent();
            rig.eventually("an agent is given up", |scrape| agents(scrape, "lost") == 1.0).await;
            assert_eq!(fallbacks(&rig, "silent").await, silent + 1.0);
            let traffic = Traffic::start(rig.address, 4);
            traffic.flows().await;
            places[0].start_agent();
            all_report(&rig).await;

            // An agent is stopped: its connections stay, and nothing comes.
            places[1].signal_agent("STOP");
            rig.eventually("an agent is given up", |scrape| agents(scrape, "lost") == 1.0).await;
            assert_eq!(fallbacks(&rig, "silent").await, silent + 2.0);
            traffic.flows().await;
            ask(&rig, &chat(600, 60, 2)).await;
            places[1].signal_agent("CONT");
            all_report(&rig).await;

            // Batches of events go astray, and are asked for again once the next one shows it.
            for handle in &rig.replicas {
                handle.replica.set_control(|control| control.events = Some((EventFault::Drop, 3)));
            }
            for handle in &rig.replicas {
                until("batches went astray", || handle.replica.control().events.is_none()).await;
            }
            traffic.stop().await;
            all_do_something(&places, 700).await;
            two_reports(&rig).await;
            all_report(&rig).await;
            talks.are_known(&rig, "after agents were killed, stopped and misled").await;

            // An engine is killed, and comes back with nothing.
            restart_engine(&mut rig, &places, 2).await;
            all_report(&rig).await;
            two_reports(&rig).await;
            let figures = talks.go_on(&rig).await;
            let gone = figures.iter().filter(|(predicted, cached)| predicted > cached).count();
            assert_eq!(gone, 0, "a new engine: predicted and cached {figures:?}");

            // All engines lose their caches, and stay.
            reset_all(&places).await;
            two_reports(&rig).await;
            let figures = talks.go_on(&rig).await;
            assert!(figures.iter().all(|figure| *figure == (0, 0)), "a reset: {figures:?}");
            two_reports(&rig).await;

            // A gateway that has seen nothing knows as much as the one that has seen everything.
            let other = another(&files, &places).await;
            talks.are_known(&other, "through a new gateway").await;
            two_reports(&rig).await;
            talks.are_known(&rig, "after another gateway sent").await;
            for place in &places {
                assert!(place.agent_memory() < 200 << 20, "{} bytes", place.agent_memory());
            }
            other.finish().await;
            rig.finish().await;
        },
    );
}
