//! An Envoy with the filter, and mock replicas behind it, for as long as a test runs.

mod plan;
mod process;
mod updates;

pub use plan::{ALIAS, MODEL, Plan, QWEN3, fast_replica, replica_with, start_replica};
pub use process::{Envoy, free_ports, fresh_folder, send_signal, spawn, validate};

use crate::client::{Answer, Ask, Connection};
use crate::shipped::Config;
use crate::stats::Scrape;
use process::write_parts;
use std::future::Future;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep};
use warmpath::mock::replica::Seen;
use warmpath::mock::{Handle, Replica};

/// Until a condition must hold. Far more than it takes: only a failing test waits that long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks at a condition.
const LOOK: Duration = Duration::from_millis(20);

static PREPARED: LazyLock<Option<PathBuf>> = LazyLock::new(|| from_env("WARMPATH_PREPARED"));

/// A file that the environment names.
pub fn from_env(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The files without which nothing can be tested.
#[derive(Clone)]
pub struct Files {
    pub envoy: PathBuf,
    pub wasm: PathBuf,
    pub prepared: PathBuf,
}

impl Files {
    fn find() -> Result<Self, &'static str> {
        let find = |name| from_env(name).ok_or(name);
        let (envoy, wasm) = (find("ENVOY_BIN")?, find("WARMPATH_WASM")?);
        Ok(Self { envoy, wasm, prepared: PREPARED.clone().ok_or("WARMPATH_PREPARED")? })
    }

    /// The Envoy's minor version: 38 for 1.38.2.
    pub fn minor(&self) -> u32 {
        let output = Command::new(&self.envoy).arg("--version").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let minor = text.split("/1.").nth(1).and_then(|rest| rest.split('.').next()?.parse().ok());
        minor.unwrap_or_else(|| panic!("no version: {text}"))
    }
}

/// Says that a test is not run.
pub fn skip(name: &str, missing: &str) {
    // Past the test harness, which swallows what passing tests print.
    let line = format!("SKIPPED: envoy {name}: {missing} is not set\n");
    std::io::stderr().write_all(line.as_bytes()).expect("standard error");
}

/// Runs a test with the files it needs, alone on the machine as far as this suite goes.
pub fn with_envoy<F: Future<Output = ()>>(name: &str, test: impl FnOnce(Files) -> F) {
    static ALONE: Mutex<()> = Mutex::new(());
    let files = match Files::find() {
        Ok(files) => files,
        Err(missing) => return skip(name, missing),
    };
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(test(files));
}

/// Envoy and replicas.
pub struct Rig {
    pub workers: usize,
    pub replicas: Vec<Handle>,
    pub address: SocketAddr,
    /// Where monitoring may read.
    pub metrics: SocketAddr,
    /// What this Envoy runs with, to be changed and pushed.
    pub config: Config,
    pub admin: SocketAddr,
    envoy: Envoy,
    vms_created: f64,
    pushes: u32,
}

impl Rig {
    /// Starts everything and waits until the filter is ready.
    pub async fn start(files: &Files, plan: Plan) -> Self {
        let mut replicas = Vec::new();
        for config in plan.replicas {
            replicas.push(start_replica(config).await);
        }
        Self::start_with(files, plan.workers, replicas, plan.config, fresh_folder(), plan.early)
            .await
    }

    /// As [`Self::start`], with replicas that the filter knows from its configuration.
    pub async fn start_static(files: &Files, plan: Plan) -> Self {
        let (plan, replicas) = plan.with_static_replicas().await;
        Self::start_with(files, plan.workers, replicas, plan.config, fresh_folder(), plan.early)
            .await
    }

    /// Starts Envoy in front of replicas that run, with a folder that it takes over.
    pub async fn start_with(
        files: &Files,
        workers: usize,
        replicas: Vec<Handle>,
        config: Config,
        folder: PathBuf,
        early: bool,
    ) -> Self {
        let mut rig = Self::launch(files, workers, replicas, config, folder);
        rig.wait_for_listeners().await;
        if !early {
            rig.wait_until_ready().await;
        }
        rig.note_vms().await;
        rig
    }

    /// Starts Envoy and does not wait for it.
    pub fn launch(
        files: &Files,
        workers: usize,
        replicas: Vec<Handle>,
        mut config: Config,
        folder: PathBuf,
    ) -> Self {
        let [inference, admin, files_port, metrics] = free_ports();
        config.set_files(&files.wasm, &files.prepared);
        config.set_ports(inference, admin, files_port, metrics);
        if config.text().contains("port_value: 8001") {
            let addresses: Vec<SocketAddr> =
                replicas.iter().map(|replica| replica.address).collect();
            config.set_replicas(&addresses);
        }
        write_parts(&config, &folder, 0, |_| true);
        let envoy = spawn(files, workers, &config, folder);
        Self::around(envoy, workers, [inference, admin, metrics], replicas, config)
    }

    fn around(
        envoy: Envoy,
        workers: usize,
        [inference, admin, metrics]: [u16; 3],
        replicas: Vec<Handle>,
        config: Config,
    ) -> Self {
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let (address, admin, metrics) = (local(inference), local(admin), local(metrics));
        Self {
            workers,
            replicas,
            address,
            metrics,
            config,
            admin,
            envoy,
            vms_created: 0.0,
            pushes: 0,
        }
    }

    /// Starts Envoy by a configuration that is complete, with replicas that are not the rig's, and waits for its listeners.
    pub async fn of_config(
        files: &Files,
        workers: usize,
        config: Config,
        ports: [u16; 3],
        folder: PathBuf,
    ) -> Self {
        let envoy = spawn(files, workers, &config, folder);
        let mut rig = Self::around(envoy, workers, ports, Vec::new(), config);
        rig.wait_for_listeners().await;
        rig
    }

    /// Envoy's process.
    pub fn pid(&self) -> u32 {
        self.envoy.process.id()
    }

    /// From here on no VM may be made anew.
    pub async fn note_vms(&mut self) {
        self.vms_created = self.vms_created().await;
    }

    /// Waits until Envoy calls itself ready and listens.
    pub async fn wait_for_listeners(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.envoy.process.try_wait().unwrap() {
                panic!("Envoy ended: {status}");
            }
            let connects = tokio::net::TcpStream::connect(self.admin).await.is_ok();
            if connects && self.admin_get("/ready").await.status == 200 {
                // Envoy calls itself ready a moment before its workers listen.
                if tokio::net::TcpStream::connect(self.address).await.is_ok() {
                    return;
                }
            }
            assert!(Instant::now() < end, "Envoy is not ready in time");
            sleep(LOOK).await;
        }
    }

    /// Every worker has its tokenizer, and every replica has been heard of.
    async fn wait_until_ready(&self) {
        let (workers, replicas) = (self.workers as f64, self.replicas.len());
        self.eventually("tokenizers in all workers", |scrape| {
            scrape.sum("warmpath_vms", &[("state", "ready")]) == workers
        })
        .await;
        self.eventually("all replicas healthy", |scrape| {
            scrape.sum("warmpath_replicas", &[("health", "healthy")]) == replicas as f64
        })
        .await;
        if self.is_polling().await {
            self.eventually("a report of every replica", |scrape| {
                scrape.count("warmpath_replica_report_age_ms", &[]) == replicas
            })
            .await;
        }
    }

    async fn is_polling(&self) -> bool {
        self.admin_get("/clusters")
            .await
            .text_lines()
            .any(|line| line.starts_with("replicas_poll::"))
            && self.scrape().await.sum("warmpath_polls_total", &[("target", "metrics")]) > 0.0
    }

    /// A page of Envoy's admin.
    pub async fn admin_get(&self, path: &str) -> Answer {
        Connection::open(self.admin).await.send(&Ask::get(path)).await
    }

    /// What Envoy has logged so far.
    pub fn log(&self) -> String {
        self.envoy.log()
    }

    /// All statistics.
    pub async fn scrape(&self) -> Scrape {
        let page = self.admin_get("/stats/prometheus").await;
        assert_eq!(page.status, 200);
        Scrape::parse(&String::from_utf8_lossy(&page.body))
    }

    /// Plain statistics whose names match a pattern.
    pub async fn plain_stats(&self, pattern: &str) -> Vec<(String, f64)> {
        let page = self.admin_get(&format!("/stats?filter={pattern}")).await;
        let read = |line: &str| {
            let (name, value) = line.rsplit_once(": ")?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        page.text_lines().filter_map(read).collect()
    }

    async fn vms_created(&self) -> f64 {
        let stats = self.plain_stats("wasm.envoy.wasm.runtime.v8.created").await;
        stats.iter().map(|(_, value)| value).sum()
    }

    /// Resident memory of Envoy, in bytes.
    pub fn memory_bytes(&self) -> f64 {
        let path = format!("/proc/{}/statm", self.envoy.process.id());
        let pages = std::fs::read_to_string(path).unwrap();
        let pages: f64 = pages.split(' ').nth(1).unwrap().parse().unwrap();
        pages * 4096.0
    }

    /// Waits until the statistics say so.
    pub async fn eventually(&self, what: &str, holds: impl Fn(&Scrape) -> bool) -> Scrape {
        let end = Instant::now() + PATIENCE;
        loop {
            let scrape = self.scrape().await;
            if holds(&scrape) {
                return scrape;
            }
            assert!(Instant::now() < end, "not in time: {what}\n{}", self.own_stats().await);
            sleep(LOOK).await;
        }
    }

    /// Waits until every replica has said, after now, that it has nothing to do.
    ///
    /// A report outlives what it tells: until the next one, a request that has just ended looks like one of another
    /// gateway's, and a prefix of a few blocks is not worth waiting behind it.
    pub async fn settle(&self) {
        let reports = |scrape: &Scrape| {
            scrape.sum("warmpath_polls_total", &[("target", "metrics"), ("result", "ok")])
        };
        // One answer each may be under way that was true before now.
        let enough = reports(&self.scrape().await) + 2.0 * self.replicas.len() as f64;
        self.eventually("reports of idle replicas", |scrape| {
            let busy = scrape.sum("warmpath_replica_running", &[])
                + scrape.sum("warmpath_replica_waiting", &[]);
            reports(scrape) >= enough && busy == 0.0
        })
        .await;
    }

    async fn own_stats(&self) -> String {
        let page = self.admin_get("/stats/prometheus").await;
        let own = |line: &&str| line.starts_with("warmpath_") && !line.contains("_bucket");
        page.text_lines().filter(own).collect::<Vec<&str>>().join("\n")
    }

    /// A connection, and which worker thread took it.
    pub async fn connect(&self) -> Connection {
        let before = self.connections_by_worker().await;
        let mut connection = Connection::open(self.address).await;
        let end = Instant::now() + PATIENCE;
        loop {
            let after = self.connections_by_worker().await;
            if let Some(worker) = (0..self.workers).find(|worker| after[*worker] > before[*worker])
            {
                connection.worker = Some(worker);
                return connection;
            }
            assert!(Instant::now() < end, "no worker took the connection");
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// This many connections to each worker. The kernel spreads them at random, so what is too much is closed again.
    pub async fn connect_to_each(&self, count: usize) -> Vec<Vec<Connection>> {
        let mut found: Vec<Vec<Connection>> = (0..self.workers).map(|_| Vec::new()).collect();
        for _ in 0..100 * count * self.workers {
            let connection = self.connect().await;
            let worker = connection.worker.expect("a worker");
            if found[worker].len() < count {
                found[worker].push(connection);
            }
            if found.iter().all(|connections| connections.len() == count) {
                return found;
            }
        }
        panic!("the kernel leaves a worker out");
    }

    /// Connections that each worker has taken so far.
    pub async fn connections_by_worker(&self) -> Vec<u64> {
        let address = format!("listener.{}_{}.worker_", self.address.ip(), self.address.port());
        let mut counts = vec![0; self.workers];
        for (name, value) in self.plain_stats("worker_.*downstream_cx_total").await {
            let Some(rest) = name.strip_prefix(&address) else { continue };
            let Some((worker, "downstream_cx_total")) = rest.split_once('.') else { continue };
            counts[worker.parse::<usize>().unwrap()] = value as u64;
        }
        counts
    }

    /// Sends a request over a connection of its own.
    pub async fn send(&self, ask: &Ask) -> Answer {
        Connection::open(self.address).await.send(ask).await
    }

    /// The replica of this name.
    pub fn replica(&self, name: &str) -> &Arc<Replica> {
        let found = self.replicas.iter().find(|handle| handle.replica.name() == name);
        &found.unwrap_or_else(|| panic!("no replica {name}")).replica
    }

    /// What all replicas received through Envoy's listener: not the filter's own questions, nor health checks.
    pub fn received(&self) -> Vec<Seen> {
        let all = self.replicas.iter().flat_map(|handle| handle.replica.seen());
        all.filter(|seen| has_header(seen, "x-forwarded-proto")).collect()
    }

    /// As [`Self::finish`], for a rig whose configuration was changed: every change tries a VM.
    pub async fn finish_after_updates(&mut self) {
        self.eventually("nothing in flight", |scrape| {
            scrape.sum("warmpath_replica_in_flight", &[]) == 0.0
                && scrape.sum("warmpath_replica_unfinished_tokens", &[]) == 0.0
        })
        .await;
        for (name, value) in self.plain_stats("vm_reload").await {
            assert_eq!(value, 0.0, "{name}");
        }
        assert_eq!(self.scrape().await.sum("warmpath_host_errors_total", &[]), 0.0);
        assert!(!self.envoy.has_ended(), "Envoy has ended");
    }

    /// What a test must find at its end whatever it did: nothing in flight, no VM lost, no failed host call.
    pub async fn finish(mut self) {
        self.finish_after_updates().await;
        assert_eq!(self.vms_created().await, self.vms_created, "a VM was made anew");
    }
}

impl Answer {
    fn text_lines(&self) -> impl Iterator<Item = &str> {
        std::str::from_utf8(&self.body).unwrap_or_default().lines()
    }
}

/// Whether a request arrived with this header.
pub fn has_header(seen: &Seen, name: &str) -> bool {
    seen.headers.iter().any(|(other, _)| other == name)
}

/// Waits until something holds that no statistic shows.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "not in time: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}
