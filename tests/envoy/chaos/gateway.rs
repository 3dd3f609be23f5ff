//! What goes wrong with Envoy itself: new configurations, good and bad, a new build of the filter, an admin that does not
//! answer the poller, and an Envoy that stands still for a moment.
//!
//! The configuration is the shipped one. Its listener comes from a file, so that it can change; between the filter and
//! the admin stands a door that can be shut; and an access log says what became of each request.

use super::Wish;
use super::faults::{Deck, Log, between};
use super::fleet::{AGENT_OFFSET, Member, SECOND_MODEL};
use crate::client::{Ask, Connection};
use crate::harness::{Files, Rig, free_ports, fresh_folder, send_signal};
use crate::prompts::chat;
use crate::shipped::Config;
use serde_json::json;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use warmpath::mock::chance::Chance;

/// The header by which a request is found in the access log. The filter and the replicas do not know it.
pub const NUMBER_HEADER: &str = "x-chaos";

/// Until Envoy has taken a configuration in: a new build is compiled on the main thread.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a listener's configuration says that another one does not.
#[derive(Debug, Clone, Copy, Default)]
struct Generation {
    /// One of a few prefill rates.
    rate: u64,
    second_model: bool,
    second_build: bool,
    unknown_option: bool,
}

/// How Envoy's surroundings go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The cost formula gets other constants.
    Costs,
    /// A model is added, or taken away again.
    Models,
    /// A configuration that the filter must refuse.
    Refused,
    /// Another build of the filter under the same `vm_id`. Compiling it holds the main thread, where the leader is as a
    /// rule, for longer than its lease.
    Build,
    /// The admin, as the poller sees it.
    Admin(Door),
    /// All of Envoy stands still, as on a machine that is moved.
    Freeze,
    /// A VM traps in this callback. Only a build with the feature `trap` does; `call` is the leader's next answer.
    Trap(&'static str),
}

/// What an admin does to those who ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    Open,
    /// Every connection is closed.
    Shut,
    /// Connections are taken, and nothing is said.
    Silent,
    /// 200, and half a document.
    Garbage,
    /// 200, and a document without any cluster.
    Empty,
}

const FAULTS: [Fault; 9] = [
    Fault::Costs,
    Fault::Models,
    Fault::Refused,
    Fault::Build,
    Fault::Admin(Door::Shut),
    Fault::Admin(Door::Silent),
    Fault::Admin(Door::Garbage),
    Fault::Admin(Door::Empty),
    Fault::Freeze,
];

const TRAPS: [Fault; 5] = [
    Fault::Trap("call"),
    Fault::Trap("tick"),
    Fault::Trap("request_body"),
    Fault::Trap("response_body"),
    Fault::Trap("log"),
];

/// Envoy, and what its configurations are written from.
pub struct Gateway {
    pub rig: Rig,
    texts: Texts,
    door: watch::Sender<Door>,
    doorkeeper: JoinHandle<()>,
    counts: Mutex<BTreeMap<String, u64>>,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.doorkeeper.abort();
    }
}

impl Gateway {
    /// Starts Envoy with this many workers. `drain` is how long an old listener's connections may go on.
    pub async fn start(files: &Files, workers: usize, fleet: &[Member], drain: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let admin_door = listener.local_addr().unwrap().port();
        let ports = free_ports();
        let (door, doors) = watch::channel(Door::Open);
        let admin = SocketAddr::from(([127, 0, 0, 1], ports[1]));
        let doorkeeper = tokio::spawn(keep_door(listener, admin, doors));
        let folder = fresh_folder();
        second_build(&files.wasm, &folder.join("second.wasm"));
        let replicas: Vec<SocketAddr> = fleet.iter().map(|member| member.address).collect();
        let texts = Texts::new(files, &folder, &replicas, ports, admin_door);
        let (mut config, lds) = texts.write(Generation::default());
        std::fs::write(folder.join("listener.yaml"), lds).unwrap();
        let seconds = drain.as_secs().to_string();
        let arguments = ["--drain-time-s", &seconds, "--file-flush-interval-msec", "200"];
        config.arguments.extend(arguments.map(str::to_owned));
        let ports = [ports[0], ports[1], ports[3]];
        let rig = Rig::of_config(files, workers, config, ports, folder).await;
        Self { rig, texts, door, doorkeeper, counts: Mutex::default() }
    }

    /// What was done to Envoy, and how often.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The access log's line about a request.
    pub fn access_log_line(&self, number: u64) -> String {
        let log = std::fs::read_to_string(self.texts.folder.join("access.log")).unwrap_or_default();
        let start = format!("{number} ");
        let line = log.lines().find(|line| line.starts_with(&start));
        line.unwrap_or("not in the access log").to_owned()
    }

    /// How requests ended, by the access log's words: status, flags, details, and whether they went to a replica.
    pub fn ends(&self) -> BTreeMap<String, u64> {
        let log = std::fs::read_to_string(self.texts.folder.join("access.log")).unwrap_or_default();
        let mut counts = BTreeMap::new();
        for line in log.lines() {
            let mut words: Vec<&str> = line.split(' ').skip(1).take(3).collect();
            words.extend(line.contains(" attempts 0 ").then_some("unsent"));
            *counts.entry(words.join(" ")).or_default() += 1;
        }
        counts
    }

    /// Lets one thing after another go wrong until `end`.
    pub async fn lane(&self, mut chance: Chance, log: &Log, wish: &Wish, end: Instant) {
        let (scale, traps) = (wish.scale, if wish.traps { &TRAPS[..] } else { &[] });
        let mut deck = Deck::new(&[&FAULTS[..], traps].concat());
        let mut generation = Generation::default();
        loop {
            sleep(between(&mut chance, (3.0, 8.0), scale)).await;
            let fault = deck.draw(&mut chance);
            let length = match fault {
                Fault::Admin(_) => between(&mut chance, (2.0, 8.0), scale),
                // Health checks time out after two seconds, and two in a row are a verdict.
                Fault::Freeze => between(&mut chance, (0.5, 1.8), 1.0),
                _ => Duration::ZERO,
            };
            if Instant::now() + length > end {
                return;
            }
            if let Fault::Trap(callback) = fault {
                log.trap();
                self.trap(callback).await;
            } else {
                self.happen(fault, length, &mut generation).await;
            }
            *self
                .counts
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .entry(format!("{fault:?}").to_lowercase())
                .or_default() += 1;
        }
    }

    async fn happen(&self, fault: Fault, length: Duration, generation: &mut Generation) {
        match fault {
            Fault::Costs => generation.rate = (generation.rate + 1) % 3,
            Fault::Models => generation.second_model = !generation.second_model,
            Fault::Build => generation.second_build = !generation.second_build,
            Fault::Refused => {
                let wrong = Generation { unknown_option: true, ..*generation };
                return self.update(wrong, "update_rejected").await;
            }
            Fault::Admin(door) => {
                self.door.send_replace(door);
                sleep(length).await;
                self.door.send_replace(Door::Open);
                return;
            }
            Fault::Freeze => {
                send_signal(self.rig.pid(), "STOP");
                sleep(length).await;
                return send_signal(self.rig.pid(), "CONT");
            }
            Fault::Trap(_) => return,
        }
        self.update(*generation, "update_success").await;
    }

    /// Sends a request that traps a VM; what becomes of it does not matter.
    async fn trap(&self, callback: &str) {
        if let Ok(mut connection) = Connection::try_open(self.rig.address).await {
            let ask = Ask::chat(&chat(1, 100, 4)).header("x-warmpath-trap", callback);
            let _ = timeout(PATIENCE, connection.try_begin(&ask)).await;
        }
    }

    /// Gives Envoy another listener and waits until it has said what it thinks of it.
    async fn update(&self, generation: Generation, verdict: &str) {
        let name = format!("listener_manager.lds.{verdict}");
        let before = self.stat(&name).await;
        let (_, lds) = self.texts.write(generation);
        let fresh = self.texts.folder.join("listener.new");
        std::fs::write(&fresh, lds).unwrap();
        std::fs::rename(&fresh, self.texts.folder.join("listener.yaml")).unwrap();
        let end = Instant::now() + PATIENCE;
        while self.stat(&name).await == before {
            assert!(Instant::now() < end, "no {verdict} of {generation:?}");
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// One of Envoy's plain statistics.
    pub async fn stat(&self, name: &str) -> f64 {
        let stats = self.rig.plain_stats(&format!("^{name}$")).await;
        stats.iter().map(|(_, value)| value).sum()
    }

    /// VMs that there are, those of builds that drain among them.
    pub async fn vms(&self) -> f64 {
        self.stat("wasm.envoy.wasm.runtime.v8.active").await
    }
}

/// What every configuration of a run is written from.
struct Texts {
    /// The shipped one, but for the listener's generation.
    base: Config,
    wasm: PathBuf,
    prepared: PathBuf,
    folder: PathBuf,
}

impl Texts {
    fn new(
        files: &Files,
        folder: &Path,
        replicas: &[SocketAddr],
        [inference, admin, files_port, metrics]: [u16; 4],
        admin_door: u16,
    ) -> Self {
        let mut base = Config::read();
        base.set_ports(inference, admin, files_port, metrics);
        base.set_replicas(replicas);
        let above =
            |replica: &SocketAddr| SocketAddr::from((replica.ip(), replica.port() + AGENT_OFFSET));
        let agents: Vec<SocketAddr> = replicas.iter().map(above).collect();
        base.set_endpoints("agents", &agents);
        let of_admin = "      cluster_name: admin\n      endpoints:\n      - lb_endpoints:\n        - endpoint: \
                        {address: {socket_address: {address: 127.0.0.1, port_value: ";
        base.replace(&format!("{of_admin}{admin}"), &format!("{of_admin}{admin_door}"));
        let route = "          route_config:\n            name: inference\n";
        base.replace(route, &format!("{}{route}", access_log(&folder.join("access.log"))));
        let (wasm, prepared) = (files.wasm.clone(), files.prepared.clone());
        Self { base, wasm, prepared, folder: folder.to_owned() }
    }

    /// Envoy's configuration, and the listener that it is to find in a file.
    fn write(&self, generation: Generation) -> (Config, String) {
        let mut config = self.base.clone();
        let second = self.folder.join("second.wasm");
        config
            .set_files(if generation.second_build { &second } else { &self.wasm }, &self.prepared);
        config.change_plugin(|plugin| {
            plugin["cache_report"] = json!({"cluster": "agents", "port_offset": AGENT_OFFSET});
            plugin["cost"]["prefill_tokens_per_s"] = json!(8_000 + 1_000 * generation.rate);
            if generation.second_model {
                let prepared =
                    json!({"cluster": "warmpath_files", "path": "/qwen3.warmpath?second"});
                let model = json!({"name": SECOND_MODEL, "prepared": prepared});
                plugin["models"].as_array_mut().unwrap().push(model);
            }
            if generation.unknown_option {
                plugin["max_bodybytes"] = json!(1);
            }
        });
        let lds = config.take_listener(&self.folder.join("listener.yaml"));
        (config, lds)
    }
}

/// An access log that says of each request how it ended and who answered it.
fn access_log(path: &Path) -> String {
    format!(
        "          access_log:\n          - name: envoy.access_loggers.file\n            typed_config:\n              \
         \"@type\": type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog\n              \
         path: {}\n              log_format: {{text_format_source: {{inline_string: \
         \"%REQ({NUMBER_HEADER})% %RESPONSE_CODE% %RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS% upstream \
         %UPSTREAM_HOST% attempts %UPSTREAM_REQUEST_ATTEMPT_COUNT% in %BYTES_RECEIVED% out %BYTES_SENT% ms \
         %DURATION%\\n\"}}}}\n",
        path.display()
    )
}

/// The same filter as another module: with one more custom section, which nobody reads.
fn second_build(wasm: &Path, to: &Path) {
    let mut module = std::fs::read(wasm).unwrap();
    // Section 0, of two bytes: a name of one.
    module.extend([0, 2, 1, b'2']);
    std::fs::write(to, module).unwrap();
}

async fn keep_door(listener: TcpListener, admin: SocketAddr, mut door: watch::Receiver<Door>) {
    loop {
        let Ok((visitor, _)) = listener.accept().await else { continue };
        let now = *door.borrow_and_update();
        let mut changes = door.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = serve(visitor, admin, now) => (),
                // What was let in under another rule does not stay.
                _ = changes.changed() => (),
            }
        });
    }
}

async fn serve(mut visitor: TcpStream, admin: SocketAddr, door: Door) {
    let body = match door {
        Door::Shut => return,
        Door::Silent => return std::future::pending().await,
        Door::Open => {
            if let Ok(mut inside) = TcpStream::connect(admin).await {
                let _ = copy_bidirectional(&mut visitor, &mut inside).await;
            }
            return;
        }
        Door::Garbage => "{\"cluster_statuses\": [{\"name\"",
        Door::Empty => "{\"cluster_statuses\": []}",
    };
    let mut asked = [0; 4096];
    while visitor.read(&mut asked).await.is_ok_and(|size| size > 0) {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
        let answer = format!("{head}: {}\r\n\r\n{body}", body.len());
        if visitor.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}
