//! `warmpath-replay`: plays a workload, against a gateway or a simulated fleet, and says what
//! came of it.
//!
//! Open loop: sessions arrive when the plan says, however slow the answers; only turns of one
//! session wait for each other. It does not retry, it does not warm up, and it does not leave
//! out slow or failed requests. Its own lateness is measured, and a run in which it was late is
//! a failure.

mod calibrate;
mod gaps;
mod grid;
mod live;
mod random;
mod script;
mod simulate;
mod sse;
mod stats;
mod table;
mod trace;
mod workload;

use clap::{Args, Parser, Subcommand};
use script::Script;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use trace::load::{self, Limits};
use warmpath::command;
use workload::{Plan, Workload};

#[derive(Parser)]
#[command(version, about = "Plays LLM workloads against a gateway and reports what came of it")]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Play a workload against a gateway in real time.
    ///
    /// Every request carries a session header and a hash of its prompt's head, which two of the
    /// baselines route by. A real deployment would need clients that set them; Warmpath does not
    /// read them.
    Live(LiveArgs),
    /// Play a workload against a fleet in virtual time, under any policy.
    Simulate(simulate::SimulateArgs),
    /// Play traces under every policy on fleets of several sizes, caches and loads, and say who wins where.
    Grid(Box<grid::GridArgs>),
    /// Measure a live engine, fit the simulated one to it, and play one workload on both.
    Calibrate(calibrate::CalibrateArgs),
    /// Say what a trace is like, and how it is made to fit a fleet.
    Trace(trace::TraceArgs),
    /// Print the table of a file of records.
    Table {
        /// What `live --json` wrote.
        file: PathBuf,
    },
    /// Wait until every URL answers 200, and fail when that takes too long.
    Ready {
        /// URLs to GET.
        #[arg(required = true)]
        urls: Vec<String>,
        /// Seconds to wait.
        #[arg(long, default_value_t = 30.0, value_parser = command::not_negative)]
        within: f64,
        /// Text that the answer must also contain.
        #[arg(long)]
        containing: Option<String>,
    },
}

/// How to play.
#[derive(Args)]
struct LiveArgs {
    /// The gateway, as http://host:port. Where it is repeated each request goes to any of them, also those of one session.
    #[arg(long = "url", value_name = "URL", required = true)]
    urls: Vec<String>,
    /// What to play: `conversations`, `no_reuse`, or what `warmpath-replay trace` knows.
    #[arg(long, default_value = "conversations")]
    workload: String,
    /// What a trace's prompts are written as.
    #[arg(long, value_enum, default_value = "ids")]
    prompts: script::Form,
    /// Turns that a trace's sessions are cut to.
    #[arg(long)]
    turns: Option<usize>,
    /// A trace's session ends before its first prompt longer than this.
    #[arg(long)]
    prompt_tokens: Option<u32>,
    /// What a trace's pauses are multiplied by.
    #[arg(long, default_value_t = 1.0, value_parser = command::not_negative)]
    pauses: f64,
    #[command(flatten)]
    options: trace::open::Options,
    /// What the record calls the way requests are routed.
    #[arg(long, default_value = "direct")]
    policy: String,
    /// How many requests.
    #[arg(long, default_value_t = 1500)]
    requests: usize,
    /// Seconds over which sessions arrive.
    #[arg(long, default_value_t = 20.0, value_parser = command::not_negative)]
    duration: f64,
    /// Equal seeds give equal requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The model to ask for.
    #[arg(long, default_value = "qwen3")]
    model: String,
    /// Header with the session's name.
    #[arg(long, default_value = "x-session-id")]
    session_header: String,
    /// Header with the hash of the prompt's first 2,000 bytes.
    #[arg(long, default_value = "x-prompt-head")]
    head_header: String,
    /// Response header that names the replica.
    #[arg(long, default_value = "x-mock-replica")]
    replica_header: String,
    /// The secret of the filter's `explain`: what it expected to be cached is compared with what was.
    #[arg(long, value_name = "SECRET")]
    explain: Option<String>,
    /// Seconds after which a request is given up. Shorter than a run, it hides how slow a policy can be.
    #[arg(long, default_value_t = 40.0, value_parser = command::not_negative)]
    patience: f64,
    /// Send `ignore_eos`, which vLLM and SGLang know: answers are then as long as asked for.
    #[arg(long)]
    ignore_eos: bool,
    /// Replica whose prefix cache is emptied first, as http://host:port. May be repeated.
    #[arg(long)]
    reset: Vec<String>,
    /// Add the run's record to this JSON list.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Above this the generator itself was too slow for its times to mean anything.
const MOST_LAG: Duration = Duration::from_millis(10);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let outcome = match Command::parse().action {
        Action::Live(args) => live(args).await,
        Action::Simulate(args) => simulate::run(&args),
        Action::Grid(args) => grid::run(&args),
        Action::Calibrate(args) => calibrate::run(&args).await,
        Action::Trace(args) => trace::run(&args),
        Action::Table { file } => {
            table::read(&file).and_then(|runs| command::print(table::render(&runs)))
        }
        Action::Ready { urls, within, containing } => {
            live::ready(&urls, Duration::from_secs_f64(within), containing.as_deref()).await
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("warmpath-replay: {error}");
            ExitCode::FAILURE
        }
    }
}

fn seconds(seconds: f64) -> Result<Duration, String> {
    Duration::try_from_secs_f64(seconds).map_err(|error| format!("{seconds} s: {error}"))
}

/// What is played and its name: a workload's texts, or a trace whose sessions arrive over the time asked for.
fn script(args: &LiveArgs) -> Result<(String, Script), String> {
    let duration = seconds(args.duration)?;
    if let Some(workload) = Workload::named(&args.workload) {
        let plan = Plan::new(workload, args.requests, duration, args.seed);
        return Ok((workload.name().to_owned(), Script::Plan(plan)));
    }
    let trace = trace::open::open(&args.workload, &args.options, args.seed)?;
    let limits = Limits {
        requests: args.requests,
        turns: args.turns,
        prompt_tokens: args.prompt_tokens,
        seed: args.seed,
    };
    let mut trace = load::draw(&trace, &limits)?;
    load::spread(&mut trace, duration, args.pauses)?;
    Ok((trace.name.clone(), Script::Trace(trace, args.prompts)))
}

async fn live(args: LiveArgs) -> Result<(), String> {
    command::writable(args.json.as_deref())?;
    let (workload, script) = script(&args)?;
    let mut runs = match &args.json {
        Some(path) if path.exists() => table::read(path)?,
        _ => Vec::new(),
    };
    let gateway = live::Gateway {
        urls: args.urls,
        model: args.model,
        session_header: args.session_header,
        head_header: args.head_header,
        replica_header: args.replica_header,
        explain: args.explain,
        patience: seconds(args.patience)?,
        ignore_eos: args.ignore_eos,
    };
    live::reset(&args.reset).await?;
    let samples = live::play(script, gateway, &args.policy).await?;
    let mut run = stats::Run::of(&args.policy, &workload, &samples);
    run.count_idle_replicas(&runs);
    run.predictions = stats::Predictions::of(&samples);
    let lag = stats::Quantiles::of(samples.iter().map(|sample| sample.lag).collect());
    eprintln!("  {}", live::summary(&run, lag));
    let errors = run.errors;
    runs.push(run);
    if let Some(path) = &args.json {
        table::write(path, &runs)?;
    }
    if errors > 0 {
        return Err(format!(
            "{errors} of {} requests failed: {}",
            samples.len(),
            live::errors(&samples)
        ));
    }
    if lag.p99 > MOST_LAG.as_secs_f64() * 1e3 {
        return Err(format!(
            "the generator was late by {:.1} ms at p99, more than 10 ms: this machine is too busy for the figures to count",
            lag.p99
        ));
    }
    Ok(())
}
