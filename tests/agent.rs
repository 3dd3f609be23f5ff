//! The built `warmpath-agent` beside engines that publish over real sockets.
#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, and clippy's exemption does not reach the functions that tests share"
)]
#![expect(clippy::disallowed_methods, reason = "a test waits with a deadline")]

use axum::Router;
use axum::routing::get;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;
use warmpath::report::{Change, Position, Report, Tier};
use warmpath::tokens::blocks::{BlockHash, BlockSize, Chain, ChainSeed};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Long, since machines are busy; what is waited for comes in a fraction of a second.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until it is so.
#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "not so: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A port that was free just now.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

fn message(parts: &[&[u8]]) -> ZmqMessage {
    let parts: Vec<_> = parts.iter().map(|part| part.to_vec()).collect();
    let mut message = ZmqMessage::from(parts[0].clone());
    parts.into_iter().skip(1).for_each(|part| message.push_back(part.into()));
    message
}

#[derive(Clone, Copy)]
struct Ports {
    events: u16,
    replay: u16,
    http: u16,
}

impl Ports {
    fn free() -> Self {
        Self { events: free_port(), replay: free_port(), http: free_port() }
    }
}

/// What an engine has published, and how long it keeps it.
#[derive(Default)]
struct Log {
    batches: Vec<Vec<u8>>,
    oldest: usize,
}

/// An engine, as far as an agent can tell. Dropping it is killing it.
struct Engine {
    runtime: Arc<Runtime>,
    publisher: PubSocket,
    log: Arc<Mutex<Log>>,
    tasks: Vec<AbortHandle>,
    started_at: f64,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Engine {
    fn start(runtime: &Arc<Runtime>, ports: Ports, started_at: f64) -> Self {
        let end = Instant::now() + PATIENCE;
        loop {
            // The ports of an engine that was killed are free again soon.
            match runtime.block_on(Self::bind(runtime, ports, started_at)) {
                Ok(engine) => return engine,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    async fn bind(runtime: &Arc<Runtime>, ports: Ports, started_at: f64) -> Result<Self, String> {
        let mut publisher = PubSocket::new();
        let address = |port: u16| format!("tcp://127.0.0.1:{port}");
        publisher.bind(&address(ports.events)).await.map_err(|error| error.to_string())?;
        let mut router = RouterSocket::new();
        router.bind(&address(ports.replay)).await.map_err(|error| error.to_string())?;
        let http = tokio::net::TcpListener::bind(("127.0.0.1", ports.http)).await;
        let http = http.map_err(|error| error.to_string())?;
        let log = Arc::new(Mutex::new(Log::default()));
        let tasks = vec![
            runtime.spawn(repeat(router, Arc::clone(&log))).abort_handle(),
            runtime.spawn(answer(http, started_at)).abort_handle(),
        ];
        Ok(Self { runtime: Arc::clone(runtime), publisher, log, tasks, started_at })
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().expect("the log")
    }

    fn send(&mut self, parts: &[&[u8]]) {
        let sent = self.publisher.send(message(parts));
        self.runtime.block_on(sent).expect("a publisher sends to whoever is there");
    }

    /// Publishes a batch, which arrives or is lost.
    fn publish(&mut self, events: &[Value], arrives: bool) {
        let seq = self.log().batches.len();
        let batch = rmp_serde::to_vec(&(self.started_at + seq as f64, events, 0)).expect("a batch");
        self.publish_bytes(batch, arrives);
    }

    fn publish_bytes(&mut self, batch: Vec<u8>, arrives: bool) {
        let seq = self.log().batches.len() as u64;
        self.log().batches.push(batch.clone());
        if arrives {
            self.send(&[b"kv-events", &seq.to_be_bytes(), &batch]);
        }
    }
}

/// Answers replays as vLLM does.
async fn repeat(mut router: RouterSocket, log: Arc<Mutex<Log>>) {
    while let Ok(asked) = router.recv().await {
        let asked = asked.into_vec();
        let [client, empty, seq] = asked.as_slice() else { continue };
        assert!(empty.is_empty());
        let from = u64::from_be_bytes(seq[..].try_into().expect("eight bytes")) as usize;
        let batches: Vec<(usize, Vec<u8>)> = {
            let log = log.lock().expect("the log");
            let first = from.max(log.oldest);
            let batches = log.batches.iter().enumerate().skip(first);
            batches.map(|(at, batch)| (at, batch.clone())).collect()
        };
        for (at, batch) in batches {
            let seq = (at as u64).to_be_bytes();
            let _ = router.send(message(&[client, b"", b"kv-events", &seq, &batch])).await;
        }
        let _ = router.send(message(&[client, b"", b"", &[255; 8], b""])).await;
    }
}

async fn answer(listener: tokio::net::TcpListener, started_at: f64) {
    let page = format!(
        "vllm:num_requests_running{{engine=\"0\"}} 3\nvllm:num_requests_waiting{{engine=\"0\"}} 1\n\
         vllm:kv_cache_usage_perc{{engine=\"0\"}} 0.25\nprocess_start_time_seconds {started_at}\n\
         vllm:cache_config_info{{block_size=\"4\",num_gpu_blocks=\"99\"}} 1\n"
    );
    let models = json!({"data": [{"id": "m", "root": "/m", "parent": null}]}).to_string();
    let router = Router::new()
        .route("/metrics", get(async || page))
        .route("/v1/models", get(async || models));
    let _ = axum::serve(listener, router).await;
}

struct Agent {
    child: Child,
    address: String,
    client: ureq::Agent,
    position: Option<Position>,
    held: BTreeSet<(BlockHash, Tier)>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(ports: Ports, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmpath-agent"));
    command
        .args([
            "--listen",
            "127.0.0.1:0",
            "--engine-url",
            &format!("http://127.0.0.1:{}", ports.http),
        ])
        .args(["--events", &format!("tcp://127.0.0.1:{}", ports.events)])
        .args(["--replay", &format!("tcp://127.0.0.1:{}", ports.replay)])
        .args(more)
        .stdout(Stdio::piped());
    command
}

impl Agent {
    fn start(ports: Ports, more: &[&str]) -> Self {
        let mut child = command(ports, more).spawn().expect("the agent starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("its output");
        BufReader::new(output).read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("warmpath-agent listens on ").expect("its address");
        let config = ureq::Agent::config_builder().http_status_as_error(false);
        let client = config.timeout_global(Some(PATIENCE)).build().into();
        let address = address.to_owned();
        Self { child, address, client, position: None, held: BTreeSet::new() }
    }

    fn get(&self, path: &str) -> (u16, Vec<u8>) {
        let url = format!("http://{}{path}", self.address);
        let mut response = self.client.get(&url).call().expect("an answer");
        let mut body = Vec::new();
        response.body_mut().as_reader().read_to_end(&mut body).expect("a body");
        (response.status().as_u16(), body)
    }

    fn metric(&self, name: &str) -> u64 {
        let (_, page) = self.get("/metrics");
        let page = String::from_utf8(page).expect("text");
        let line = page.lines().find(|line| line.starts_with(&format!("warmpath_agent_{name} ")));
        let value = line.unwrap_or_else(|| panic!("{name} in {page}")).rsplit(' ').next();
        value.and_then(|value| value.parse().ok()).expect("a number")
    }

    /// Reads what is new, or all.
    fn read(&mut self, query: &str) -> Option<Report> {
        let since = self.position.map_or(String::new(), |position| format!("&since={position}"));
        let (status, body) = self.get(&format!("/v1/cache?{query}{since}"));
        if status != 200 {
            return None;
        }
        let mut report = Report::read(body).expect("a report");
        match report.since {
            Some(since) => assert_eq!(Some(since), self.position),
            None => self.held.clear(),
        }
        while let Some(changes) = report.step(100).expect("changes") {
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
        Some(report)
    }

    /// Waits until this is what is held, and the engine is heard.
    #[track_caller]
    fn holds(&mut self, expected: &[BlockHash]) -> Report {
        let expected = expected.iter().map(|block| (*block, Tier::Gpu)).collect();
        let mut last = None;
        until(&format!("{expected:?} are held"), || {
            last = self.read("").filter(|report| report.status.live && self.held == expected);
            last.is_some()
        });
        last.expect("it was so")
    }
}

/// Blocks whose numbers are their tokens, each behind the one before it.
fn stored(numbers: &[u32], parent: Option<u32>) -> Value {
    let tokens: Vec<u32> = numbers.iter().flat_map(|number| [*number; 4]).collect();
    json!({"type": "BlockStored", "block_hashes": numbers, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 4, "lora_id": null, "medium": "GPU", "lora_name": null})
}

fn removed(number: u32) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"})
}

fn names(numbers: &[u32]) -> Vec<BlockHash> {
    let tokens: Vec<u32> = numbers.iter().flat_map(|number| [*number; 4]).collect();
    let size = BlockSize::new(4).expect("a size");
    Chain::new(ChainSeed::new("m", None), size, &tokens).hashes().to_vec()
}

fn runtime() -> Arc<Runtime> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    Arc::new(runtime.worker_threads(2).enable_all().build().expect("a runtime"))
}

#[test]
fn a_report_follows_an_engine_through_losses_and_restarts() {
    let (runtime, ports) = (runtime(), Ports::free());
    let mut engine = Engine::start(&runtime, ports, 1000.0);
    engine.publish(&[stored(&[1, 2, 3], None)], false);
    let mut agent = Agent::start(ports, &[]);
    let report = agent.holds(&names(&[1, 2, 3]));
    let status = report.status;
    assert_eq!((status.model.as_str(), status.block_tokens, status.held_blocks), ("m", 4, 3));
    assert!(!status.incomplete && !status.draining && !status.adapters_unknown);

    // Deltas from here on, and none when nothing is new.
    engine.publish(&[stored(&[4], Some(3)), removed(4)], true);
    engine.publish(&[removed(3)], true);
    let report = agent.holds(&names(&[1, 2]));
    let generation = report.position.generation;
    assert!(report.since.is_some());
    until("the engine's load is told", || {
        let status = agent.read("").expect("a report").status;
        (status.running, status.waiting, status.kv_usage) == (Some(3), Some(1), Some(0.25))
            && (status.capacity_blocks, status.started_at) == (Some(99), Some(1000.0))
    });
    let since = format!("/v1/cache?since={}", agent.position.expect("a position"));
    let (_, short) = agent.get(&since);
    assert!(short.len() < 250, "{} bytes for nothing", short.len());

    // A batch that is lost is asked for again, and so are many.
    for number in 10..200 {
        engine.publish(&[stored(&[number], None)], false);
        engine.publish(&[removed(number)], false);
    }
    engine.publish(&[stored(&[3], Some(2))], true);
    let report = agent.holds(&names(&[1, 2, 3]));
    assert_eq!(report.position.generation, generation);
    assert!(agent.metric("gaps_total{rank=\"0\"}") >= 1);

    // What is not to be had any more begins a generation.
    engine.publish(&[removed(3)], false);
    let oldest = engine.log().batches.len();
    engine.log().oldest = oldest;
    engine.publish(&[stored(&[7], None)], true);
    let report = agent.holds(&names(&[7]));
    assert!(report.position.generation != generation && report.status.incomplete);

    // So does another engine, whatever the one before it held.
    drop(engine);
    until("nothing is told", || {
        let report = agent.read("").expect("a report");
        !report.status.live && agent.held.is_empty() && report.status.held_blocks == 0
    });
    let mut engine = Engine::start(&runtime, ports, 2000.0);
    engine.publish(&[stored(&[8, 9], None)], true);
    let report = agent.holds(&names(&[8, 9]));
    assert!(!report.status.incomplete);
    until("its start is told", || {
        agent.read("").expect("a report").status.started_at == Some(2000.0)
    });
    agent.holds(&names(&[8, 9]));
}

#[test]
fn garbage_is_counted_and_survived() {
    let (runtime, ports) = (runtime(), Ports::free());
    let mut engine = Engine::start(&runtime, ports, 1000.0);
    engine.publish(&[stored(&[1], None)], false);
    let mut agent = Agent::start(ports, &[]);
    agent.holds(&names(&[1]));
    engine.send(&[b"one part"]);
    engine.send(&[b"kv-events", b"no number", b"x"]);
    engine.send(&[b"a", b"b", b"c", b"d", b"e", b"f"]);
    until("it is counted", || agent.metric("ignored_total{rank=\"0\",reason=\"foreign\"}") >= 3);
    agent.holds(&names(&[1]));
    engine.publish_bytes(b"\xc1junk".to_vec(), true);
    until("it is counted", || agent.metric("ignored_total{rank=\"0\",reason=\"junk\"}") == 1);
    engine.publish(&[stored(&[2], None)], true);
    let report = agent.holds(&names(&[2]));
    assert!(report.status.incomplete);
    // Bytes that are no ZeroMQ at all, from whoever has taken the engine's port.
    drop(engine);
    let listener = loop {
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", ports.events)) {
            break listener;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let (mut stream, _) = listener.accept().expect("the agent tries again");
    let _ = stream.write_all(&[0xFF; 1 << 16]);
    drop((stream, listener));
    let mut engine = Engine::start(&runtime, ports, 2000.0);
    engine.publish(&[stored(&[3], None)], true);
    agent.holds(&names(&[3]));
}

#[test]
fn an_engine_that_connects_is_awaited() {
    let (runtime, ports) = (runtime(), Ports::free());
    let mut engine = Engine::start(&runtime, Ports { events: free_port(), ..ports }, 1000.0);
    let mut agent = Agent::start(ports, &["--events-bind", "--topic", "kv-"]);
    // A stranger says nothing, and keeps nobody away.
    let mut stranger = None;
    until("the agent listens", || {
        stranger = TcpStream::connect(("127.0.0.1", ports.events)).ok();
        stranger.is_some()
    });
    let address = format!("tcp://127.0.0.1:{}", ports.events);
    runtime.block_on(engine.publisher.connect(&address)).expect("the agent listens");
    engine.publish(&[stored(&[1, 2], None)], true);
    agent.holds(&names(&[1, 2]));
    engine.publish(&[removed(2)], true);
    agent.holds(&names(&[1]));
    drop(stranger);
}

#[test]
fn readers_are_told_what_is_wrong_and_only_with_the_token_what_is_held() {
    let folder = std::env::temp_dir().join(format!("warmpath-agent-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("token");
    std::fs::write(&file, "secret\n").expect("a file");
    let file = file.to_str().expect("a path");
    let (runtime, ports) = (runtime(), Ports::free());
    let agent = Agent::start(ports, &["--token-file", file]);
    let ask = |method: &str, path: &str, token: Option<&str>| {
        let url = format!("http://{}{path}", agent.address);
        let mut request = ureq::http::Request::builder().method(method).uri(url);
        if let Some(token) = token {
            request = request.header("authorization", token);
        }
        let response = agent.client.run(request.body(()).expect("a request"));
        let mut response = response.expect("an answer");
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap_or_default())
    };
    assert_eq!(ask("GET", "/healthz", None), (200, "ok\n".to_owned()));
    for token in
        [None, Some("secret"), Some("Bearer"), Some("Bearer secre"), Some("Bearer secret1")]
    {
        for path in ["/v1/cache", "/metrics"] {
            let refused = (401, "a bearer token is required\n".to_owned());
            assert_eq!(ask("GET", path, token), refused, "{token:?}");
        }
        assert_eq!(ask("POST", "/drain", token).0, 401);
    }
    let token = Some("Bearer secret");
    let unnamed = "the engine has not said yet which model it serves\n";
    assert_eq!(ask("GET", "/v1/cache", token), (503, unnamed.to_owned()));
    let engine = Engine::start(&runtime, ports, 1000.0);
    until("the model is known", || ask("GET", "/v1/cache", Some("bearer secret")).0 == 200);
    let asked = |query: &str| ask("GET", &format!("/v1/cache?{query}"), token);
    let position = "since: expected generation.seq, two numbers\n".to_owned();
    assert_eq!(asked("since=7"), (400, position.clone()));
    assert_eq!(asked("since=7.8.9"), (400, position));
    assert_eq!(asked("rank=1"), (404, "no such rank\n".to_owned()));
    let query = "expected ?since=GENERATION.SEQ and ?rank=N\n".to_owned();
    assert_eq!(asked("rank=x"), (400, query.clone()));
    assert_eq!(asked("sinc=7.8"), (400, query));
    assert_eq!(asked("since=7.8&rank=0").0, 200);
    let (status, text) = ask("GET", "/v1/cach", token);
    assert!(status == 404 && text.starts_with("no such path"), "{text}");

    let drained = || {
        let body = ask("GET", "/metrics", token).1;
        body.contains("\nwarmpath_agent_draining 1\n")
    };
    assert!(!drained());
    assert_eq!(ask("POST", "/drain", token), (200, "draining\n".to_owned()));
    assert!(drained());
    assert_eq!(ask("DELETE", "/drain", token), (200, "not draining\n".to_owned()));
    assert!(!drained());
    drop(engine);
    std::fs::remove_dir_all(&folder).expect("the folder");
}

#[track_caller]
fn refuses(more: &[&str], expected: &str) {
    let ports = Ports { events: 1, replay: 1, http: 1 };
    let output = command(ports, more).stderr(Stdio::piped()).output().expect("it ends");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains(expected), "{error}");
}

#[test]
fn options_that_cannot_be_meant_are_refused() {
    let token = "--listen 0.0.0.0:0: others reach it: give --token-file or --insecure";
    refuses(&["--listen", "0.0.0.0:0"], "cannot be used multiple times");
    let listen = |address: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmpath-agent"));
        let command = command.args(["--listen", address]).args(more);
        let output = command.output().expect("it ends");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(listen("0.0.0.0:0", &[]).contains(token));
    assert!(listen("127.0.0.1:0", &["--events", "x"]).contains("--events x: expected tcp://"));
    assert!(listen("127.0.0.1:0", &["--engine-url", "x"]).contains("x: expected http://"));
    assert!(listen("127.0.0.1:0", &["--token-file", "/nowhere"]).contains("/nowhere: "));
    assert!(listen("127.0.0.1:0", &["--most-blocks", "0"]).contains("--most-blocks"));
    let ranks = ["--ranks", "9", "--events", "tcp://127.0.0.1:65530"];
    assert!(listen("127.0.0.1:0", &ranks).contains("no port for rank 6"));
}

#[test]
fn readers_that_say_nothing_keep_nobody_away_for_long_and_a_signal_ends_it() {
    let (runtime, ports) = (runtime(), Ports::free());
    let mut engine = Engine::start(&runtime, ports, 1000.0);
    engine.publish(&[stored(&[1], None)], false);
    let mut agent = Agent::start(ports, &[]);
    agent.holds(&names(&[1]));
    let silent: Vec<TcpStream> = (0..100)
        .map(|at| {
            let mut stream = TcpStream::connect(&agent.address).expect("a connection");
            if at % 2 == 0 {
                stream.write_all(b"GET /v1/cache HTTP/1.1\r\nhost: ").expect("half a request");
            }
            stream
        })
        .collect();
    // A reader that comes now waits until they have had their time.
    let config = ureq::Agent::config_builder().http_status_as_error(false);
    agent.client = config.timeout_global(Some(PATIENCE)).build().into();
    agent.holds(&names(&[1]));
    drop(silent);

    let id = agent.child.id().to_string();
    let killed = Command::new("kill").args(["-TERM", &id]).status().expect("a kill");
    assert!(killed.success());
    let mut ended = None;
    until("it has ended", || {
        ended = agent.child.try_wait().expect("its status");
        ended.is_some()
    });
    assert!(ended.expect("its status").success());
}
