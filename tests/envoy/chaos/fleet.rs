//! Six mock replicas and the agents beside them, as processes of their own, so that what kills or stops one is real.
//!
//! It starts, stops and asks; when to do what is the schedule's part.

use crate::client::{Ask, Connection};
use crate::harness::{ALIAS, Files, MODEL, send_signal};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// A model that the filter's configuration names only now and then, and that all replicas serve.
pub const SECOND_MODEL: &str = "second";

/// Until a replica that was started, or let go on, answers. Only a run that fails waits that long.
const PATIENCE: Duration = Duration::from_secs(30);

/// One replica.
pub struct Member {
    pub place: usize,
    pub address: SocketAddr,
    command: Vec<String>,
    process: Option<Child>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The name by which a replica signs its responses.
pub fn name(place: usize) -> String {
    format!("replica-{place}")
}

/// Starts this many replicas.
pub async fn start(files: &Files, count: usize) -> Vec<Member> {
    let mut members: Vec<Member> =
        addresses(count).into_iter().enumerate().map(|(at, a)| Member::new(files, at, a)).collect();
    for member in &mut members {
        member.start();
    }
    for member in &members {
        member.wait_until_it_answers().await;
    }
    members
}

/// How far above a replica's port its agent listens, its events are published, and they can be asked for again.
pub const AGENT_OFFSET: u16 = 400;
const EVENTS_OFFSET: u16 = 800;
const REPLAY_OFFSET: u16 = 1_200;

/// Free addresses below the ports that the kernel gives to connections: a replica that is down must find its own free
/// when it comes back, and nobody may reach himself by connecting to it.
fn addresses(count: usize) -> Vec<SocketAddr> {
    let first = 20_000 + (std::process::id() % 500) as u16 * 20;
    let is_free = |port: &u16| {
        let all = [0, AGENT_OFFSET, EVENTS_OFFSET, REPLAY_OFFSET];
        all.iter().all(|offset| std::net::TcpListener::bind(local(port + offset)).is_ok())
    };
    let found: Vec<SocketAddr> =
        (first..first + AGENT_OFFSET).filter(is_free).map(local).take(count).collect();
    assert_eq!(found.len(), count, "not enough free ports");
    found
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// An address so far above another one.
fn above(address: SocketAddr, offset: u16) -> SocketAddr {
    local(address.port() + offset)
}

/// The agent beside a replica.
pub struct AgentMember {
    pub place: usize,
    pub address: SocketAddr,
    replica: SocketAddr,
    process: Option<Child>,
}

impl Drop for AgentMember {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts an agent beside each replica.
pub fn start_agents(members: &[Member]) -> Vec<AgentMember> {
    let agent = |member: &Member| {
        let (place, replica) = (member.place, member.address);
        let address = above(replica, AGENT_OFFSET);
        let mut agent = AgentMember { place, address, replica, process: None };
        agent.start();
        agent
    };
    members.iter().map(agent).collect()
}

impl AgentMember {
    /// Starts it, on the address it always has.
    pub fn start(&mut self) {
        let [events, replay] = [EVENTS_OFFSET, REPLAY_OFFSET]
            .map(|offset| format!("tcp://{}", above(self.replica, offset)));
        let process = Command::new(env!("CARGO_BIN_EXE_warmpath-agent"))
            .args(["--listen", &self.address.to_string()])
            .args(["--engine-url", &format!("http://{}", self.replica)])
            .args(["--events", &events, "--replay", &replay])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("an agent");
        self.process = Some(process);
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Sends it a signal by `kill`'s name for it.
    pub fn signal(&self, name: &str) {
        if let Some(process) = &self.process {
            send_signal(process.id(), name);
        }
    }

    /// Lets the replica's next batches of events go astray, if it is there.
    pub async fn disturb(&self, fault: &str) {
        let wish = json!({"events": {"fault": fault, "count": 3}});
        let ask = Ask::post("/mock/control", wish.to_string());
        let told =
            async { Connection::try_open(self.replica).await.ok()?.try_begin(&ask).await.ok() };
        let _ = timeout(Duration::from_secs(1), told).await;
    }
}

impl Member {
    fn new(files: &Files, place: usize, address: SocketAddr) -> Self {
        let file = files.prepared.display();
        // Fast enough for some tens of requests a second on a machine with other work.
        let command = [
            "--listen".to_owned(),
            format!("{}@{address}", name(place)),
            "--model".to_owned(),
            format!("{MODEL}={file}"),
            "--model".to_owned(),
            ALIAS.to_owned(),
            "--model".to_owned(),
            SECOND_MODEL.to_owned(),
            "--prefill-rate=400000".to_owned(),
            "--attention-rate=0".to_owned(),
            "--step-ms=4".to_owned(),
            "--decode-ms=0".to_owned(),
            "--capacity-blocks=8192".to_owned(),
            format!("--events={}", endpoint(address, EVENTS_OFFSET)),
            format!("--replay={}", endpoint(address, REPLAY_OFFSET)),
        ];
        Self { place, address, command: command.to_vec(), process: None }
    }

    /// Starts it, on the address it always has.
    pub fn start(&mut self) {
        let process = Command::new(env!("CARGO_BIN_EXE_warmpath-mock-replica"))
            .args(&self.command)
            .stdout(Stdio::null())
            .spawn()
            .expect("a mock replica");
        self.process = Some(process);
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Asks it to end, and sees to it that it does.
    pub async fn terminate(&mut self) {
        self.signal("TERM");
        let end = Instant::now() + Duration::from_secs(2);
        while let Some(process) = &mut self.process
            && process.try_wait().unwrap().is_none()
            && Instant::now() < end
        {
            sleep(Duration::from_millis(10)).await;
        }
        self.kill();
    }

    /// Sends it a signal by `kill`'s name for it.
    pub fn signal(&self, name: &str) {
        if let Some(process) = &self.process {
            send_signal(process.id(), name);
        }
    }

    /// Tells it how to misbehave; see the mock's control.
    pub async fn control(&self, wish: Value) {
        let ask = Ask::post("/mock/control", wish.to_string());
        let told = async {
            let mut connection = Connection::try_open(self.address).await.ok()?;
            connection.try_begin(&ask).await.ok().filter(|response| response.status() == 200)
        };
        let told = timeout(PATIENCE, told).await.ok().flatten();
        assert!(told.is_some(), "{} does not take {wish}", name(self.place));
    }

    /// Takes every wish back.
    pub async fn behave(&self) {
        self.control(json!({"reset": true})).await;
    }

    /// Waits until it is there.
    pub async fn wait_until_it_answers(&self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let answer = async {
                let mut connection = Connection::try_open(self.address).await.ok()?;
                connection.try_begin(&Ask::get("/version")).await.ok()
            };
            if timeout(PATIENCE, answer).await.ok().flatten().is_some() {
                return;
            }
            assert!(Instant::now() < end, "{} does not answer", name(self.place));
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// As vLLM binds it: to an address with a `::`.
fn endpoint(replica: SocketAddr, offset: u16) -> String {
    format!("tcp://[::ffff:127.0.0.1]:{}", above(replica, offset).port())
}
