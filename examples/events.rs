//! What following an engine's events costs: `scripts/bench.sh events`.
//!
//! An engine with a full cache publishes as vLLM does, over real sockets, so many blocks a second: with each step as many blocks
//! are removed, one event each, as are stored. The built agent follows it, while a reader asks for what is new five times a
//! second. It is judged by its own count: what the reader knows at the end must be what the engine holds.
#![expect(
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    reason = "a measurement, of a form of its own"
)]

use hashbrown::HashSet;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use warmpath::report::{Change, Position, Report};
use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

/// Tokens per block.
const BLOCK: usize = 16;

/// Blocks of one step: a prompt's chunk of 2,048 tokens.
const STEP: u32 = 128;

/// Blocks that the engine holds.
const CAPACITY: usize = 65_536;

/// Ticks of a process's time per second, on Linux.
const TICKS: f64 = 100.0;

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u32| {
        arguments.get(at).map_or(Some(default), |number| number.parse().ok()).unwrap_or(default)
    };
    let Some(agent) = arguments.first() else {
        eprintln!("usage: events AGENT [blocks a second] [seconds]");
        return ExitCode::FAILURE;
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let result = runtime
        .map_err(Failure::from)
        .and_then(|runtime| runtime.block_on(measure(agent, number(1, 20_000), number(2, 20))));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("events: {error}");
            ExitCode::FAILURE
        }
    }
}

/// An engine's cache: steps of blocks, oldest first.
#[derive(Default)]
struct Engine {
    steps: VecDeque<u32>,
    step: u32,
    seq: u64,
}

impl Engine {
    /// The next step's batch.
    fn batch(&mut self) -> Result<Vec<u8>, Failure> {
        let mut events: Vec<Value> = Vec::new();
        if self.steps.len() * STEP as usize >= CAPACITY
            && let Some(old) = self.steps.pop_front()
        {
            events.extend((0..STEP).rev().map(|block| {
                json!({"type": "BlockRemoved", "block_hashes": [name(old, block)], "medium": "GPU", "group_idx": 0})
            }));
        }
        let blocks: Vec<u64> = (0..STEP).map(|block| name(self.step, block)).collect();
        let tokens: Vec<u32> =
            (0..STEP * BLOCK as u32).map(|at| (self.step * 7919 + at) % 150_000).collect();
        events.push(json!({"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": null,
            "token_ids": tokens, "block_size": BLOCK, "lora_id": null, "medium": "GPU", "lora_name": null,
            "extra_keys": vec![Value::Null; STEP as usize], "group_idx": 0, "kv_cache_spec_kind": "full_attention"}));
        self.steps.push_back(self.step);
        self.step += 1;
        Ok(rmp_serde::to_vec(&(f64::from(self.step), events, 0))?)
    }
}

/// An engine's names are digests.
fn name(step: u32, block: u32) -> u64 {
    (u64::from(step) << 20 | u64::from(block)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

async fn publish(
    publisher: &mut PubSocket,
    engine: &mut Engine,
    batch: Vec<u8>,
) -> Result<(), Failure> {
    let mut message = ZmqMessage::from("kv-events");
    message.push_back(engine.seq.to_be_bytes().to_vec().into());
    message.push_back(batch.into());
    engine.seq += 1;
    Ok(publisher.send(message).await?)
}

async fn measure(agent: &str, rate: u32, seconds: u32) -> Result<(), Failure> {
    let mut publisher = PubSocket::new();
    let endpoint = publisher.bind("tcp://127.0.0.1:0").await?.to_string();
    let mut agent = Agent::start(agent, &endpoint)?;
    let mut engine = Engine::default();
    // The cache is filled first, and the agent found to follow.
    let end = Instant::now() + Duration::from_secs(60);
    while agent.held.is_empty() {
        if Instant::now() > end {
            return Err("the agent hears nothing".into());
        }
        let batch = engine.batch()?;
        publish(&mut publisher, &mut engine, batch).await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
        agent.read()?;
    }
    while engine.steps.len() * (STEP as usize) < CAPACITY {
        let batch = engine.batch()?;
        publish(&mut publisher, &mut engine, batch).await?;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Stored and removed blocks both count.
    let steps = rate * seconds / (2 * STEP);
    let batches: Vec<Vec<u8>> = (0..steps).map(|_| engine.batch()).collect::<Result<_, _>>()?;
    let bytes: usize = batches.iter().map(Vec::len).sum();
    agent.settle()?;
    let (before, began) = (agent.cpu()?, Instant::now());
    let (mut reports, mut read_at) = (0, began);
    for (step, batch) in (0..steps).zip(batches) {
        let due = began
            + Duration::from_secs_f64(f64::from(seconds) * f64::from(step) / f64::from(steps));
        tokio::time::sleep(due.saturating_duration_since(Instant::now())).await;
        publish(&mut publisher, &mut engine, batch).await?;
        if read_at.elapsed() >= Duration::from_millis(200) {
            read_at = Instant::now();
            agent.read()?;
            reports += 1;
        }
    }
    agent.settle()?;
    let (cpu, took) = (agent.cpu()? - before, began.elapsed().as_secs_f64());
    let blocks = f64::from(2 * STEP * steps);
    println!(
        "events: {:.0} blocks a second for {took:.0} s, {bytes} bytes, {reports} reports",
        blocks / took
    );
    println!(
        "agent: {:.1} % of a core, {:.2} CPU seconds per million blocks",
        100.0 * cpu / took,
        1e6 * cpu / blocks
    );
    let (held, expected) = (agent.held.len(), engine.steps.len() * STEP as usize);
    println!(
        "held at the end: {held} of {expected}; the agent has {} KB resident",
        agent.resident_kb()?
    );
    if held == expected { Ok(()) } else { Err("the agent does not say what is held".into()) }
}

/// The built agent, and what a reader knows by it.
struct Agent {
    child: Child,
    url: String,
    client: ureq::Agent,
    position: Option<Position>,
    held: HashSet<u64>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Agent {
    fn start(program: &str, events: &str) -> Result<Self, Failure> {
        let mut child = Command::new(program)
            .args(["--listen", "127.0.0.1:0", "--engine-url", "http://127.0.0.1:1", "--model", "m"])
            .args(["--events", events, "--replay", ""])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        let address = line.trim().rsplit(' ').next().unwrap_or_default();
        let url = format!("http://{address}{}", warmpath::report::PATH);
        Ok(Self {
            child,
            url,
            client: ureq::Agent::new_with_defaults(),
            position: None,
            held: HashSet::new(),
        })
    }

    /// Reads what is new. Whether anything was.
    fn read(&mut self) -> Result<bool, Failure> {
        let since = self.position.map_or(String::new(), |position| format!("?since={position}"));
        let mut body = Vec::new();
        let url = format!("{}{since}", self.url);
        self.client.get(url).call()?.body_mut().as_reader().read_to_end(&mut body)?;
        let mut report = Report::read(body).map_err(|error| error.to_string())?;
        if report.since.is_none() {
            self.held.clear();
        }
        while let Some(changes) = report.step(4096).map_err(|error| error.to_string())? {
            for change in changes {
                match change {
                    Change::Stored { blocks, .. } => {
                        self.held.extend(blocks.iter().map(|block| block.0))
                    }
                    Change::Removed { blocks, .. } => {
                        for block in blocks {
                            self.held.remove(&block.0);
                        }
                    }
                }
            }
        }
        let is_new = self.position != Some(report.position);
        self.position = Some(report.position);
        Ok(is_new)
    }

    /// Reads until nothing is new for a while.
    fn settle(&mut self) -> Result<(), Failure> {
        let mut quiet = 0;
        while quiet < 5 {
            quiet = if self.read()? { 0 } else { quiet + 1 };
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Seconds of CPU so far.
    fn cpu(&self) -> Result<f64, Failure> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let fields: Vec<&str> =
            stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = fields.get(11..13).ok_or("no times")?;
        Ok((ticks[0].parse::<f64>()? + ticks[1].parse::<f64>()?) / TICKS)
    }

    fn resident_kb(&self) -> Result<u64, Failure> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    }
}
