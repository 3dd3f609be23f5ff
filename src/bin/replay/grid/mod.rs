//! `warmpath-replay grid`: every policy on every trace, before fleets of several sizes, caches and loads, and who wins.
//!
//! Cells are independent and every run is in virtual time, so that two cores take half as long and nothing else changes. It
//! judges nothing by itself but the promises in `summary`; what those mean is in `docs/simulation.md`.

mod cells;
mod crew;
mod figures;
mod files;
mod peers;
mod plot;
mod report;
mod scene;
mod smoke;
mod summary;
mod verdict;

use crate::simulate::Policy;
use crate::trace::Trace;
use crate::trace::open::{Options, open};
use cells::{Cell, Result as Played};
use clap::Args;
use figures::{Figures, Seed};
use scene::{Cut, Equipment, Scene};
use serde_json::json;
use std::io::{IsTerminal, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use verdict::Kind;
use warmpath::command;
use warmpath::mock::engine::EngineConfig;

/// The traces of the table, unless others are named; the turns that their sessions are cut to; and the prompt that ends
/// them. An agent asks again when it has its answer, so that a load needs many of them at once, and whole sessions of as
/// many would be a hundred thousand requests. One prompt of 900,000 tokens would raise every small cache.
const TRACES: [(&str, Option<usize>, Option<u32>); 4] = [
    ("mooncake", None, None),
    ("claude_code", Some(12), Some(200_000)),
    ("magagent", Some(3), None),
    ("azure_code", None, None),
];

/// What to play. Without arguments it is more than the tables of `docs/simulation.md`, each of which has its command there.
#[derive(Args, Clone)]
pub struct GridArgs {
    /// A trace by its name or file; may be repeated.
    #[arg(long = "trace")]
    names: Vec<String>,
    #[command(flatten)]
    options: Options,
    /// Replicas of the fleet.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 64])]
    replicas: Vec<usize>,
    /// All replicas' caches together, as parts of the trace's working set.
    #[arg(long, value_delimiter = ',', default_values_t = [0.1, 0.3, 1.0])]
    cache: Vec<f64>,
    /// Offered load, as parts of what the fleet can do.
    #[arg(long, value_delimiter = ',', default_values_t = [0.3, 0.5, 0.7, 0.85, 0.95])]
    load: Vec<f64>,
    /// Seeds of each cell, from 1.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Only this policy; may be repeated.
    #[arg(long, value_enum)]
    policy: Vec<Policy>,
    /// Requests of each run, at least: a number for each of the fleets, the last for those that have none.
    #[arg(long, value_delimiter = ',', default_values_t = [1500, 4000])]
    requests: Vec<usize>,
    /// Turns that a session is cut to, in place of each trace's own number.
    #[arg(long)]
    turns: Option<usize>,
    /// A session ends before its first prompt longer than this.
    #[arg(long)]
    prompt_tokens: Option<u32>,
    /// Worker threads of the simulated gateway.
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Threads that play; as many as there are cores unless said.
    #[arg(long)]
    jobs: Option<usize>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Warmpath's `cost` options as JSON; the replicas' speed is told it in any case.
    #[arg(long, default_value = "{}")]
    cost: String,
    /// The trace that Warmpath's defaults were tuned on, which the tables mark.
    #[arg(long, default_value = "mooncake")]
    tuned_on: String,
    /// Print every cell's table, not only the summary.
    #[arg(long)]
    cells: bool,
    /// A few small cells, and a failure if what they show is out of order.
    #[arg(long)]
    smoke: bool,
    /// Write every policy's figures here, as CSV.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write everything here, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the tables here, as Markdown.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Draw p99 times to first token over the load, as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// How fast replicas are. The defaults resemble an 8B model on one GPU of the A100's kind.
#[derive(Args, Clone, Debug)]
struct EngineArgs {
    /// Prompt tokens per second, attention apart.
    #[arg(long, default_value_t = 10_000.0, value_parser = command::positive)]
    prefill_rate: f64,
    /// Pairs of tokens per second that attention adds to a prefill.
    #[arg(long, default_value_t = 2e8, value_parser = command::positive)]
    attention_rate: f64,
    /// Milliseconds of a step that does nothing else.
    #[arg(long, default_value_t = 8.0, value_parser = command::not_negative)]
    step_ms: f64,
    /// Milliseconds that each decoding sequence adds to a step.
    #[arg(long, default_value_t = 0.3, value_parser = command::not_negative)]
    decode_ms: f64,
    /// Requests that may run at once.
    #[arg(long, default_value_t = 64)]
    max_num_seqs: usize,
    /// Tokens that a step computes at most.
    #[arg(long, default_value_t = 2048)]
    tokens_per_step: usize,
}

impl EngineArgs {
    fn engine(&self) -> EngineConfig {
        EngineConfig {
            prefill_rate: self.prefill_rate,
            attention_rate: self.attention_rate,
            step_base: Duration::from_secs_f64(self.step_ms.max(0.0) / 1e3),
            decode_per_sequence: Duration::from_secs_f64(self.decode_ms.max(0.0) / 1e3),
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.tokens_per_step,
            ..EngineConfig::default()
        }
    }
}

/// Plays and prints.
///
/// # Errors
/// When a trace cannot be read or offer a load, a file cannot be written, or the smoke test fails.
pub fn run(args: &GridArgs) -> Result<(), String> {
    let args = if args.smoke { &smoke::smaller(args) } else { args };
    let files = [&args.csv, &args.json, &args.markdown, &args.svg];
    command::writable(files.into_iter().flatten().map(PathBuf::as_path))?;
    let (results, unplayed) = play(args)?;
    if args.cells {
        results.iter().try_for_each(|result| command::print(report::cell(result)))?;
    }
    let summary = report::summary(&results) + &report::unplayed(&unplayed);
    command::print(summary)?;
    if let Some(seconds) = crew::cpu_seconds() {
        command::print(format_args!("\n{seconds:.0} s of CPU\n"))?;
    }
    let write = |path: &Option<PathBuf>, text: &dyn Fn() -> String| {
        path.as_ref().map_or(Ok(()), |path| written(path, &text()))
    };
    write(&args.csv, &|| files::csv(&results))?;
    write(&args.json, &|| format!("{:#}\n", files::json(&results, setting(args))))?;
    write(&args.markdown, &|| {
        report::markdown(&results, &args.tuned_on) + &report::unplayed(&unplayed)
    })?;
    write(&args.svg, &|| plot::svg(&results))?;
    if args.smoke { smoke::check(&results) } else { Ok(()) }
}

fn written(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn setting(args: &GridArgs) -> serde_json::Value {
    json!({
        "seeds": args.seeds,
        "requests": args.requests,
        "turns": args.turns,
        "prompt_tokens": args.prompt_tokens,
        "threads": args.threads,
        "prefill_tokens_per_s": args.engine.prefill_rate,
        "attention_pairs_per_s": args.engine.attention_rate,
        "step_base_ms": args.engine.step_ms,
        "decode_per_sequence_ms": args.engine.decode_ms,
        "max_num_seqs": args.engine.max_num_seqs,
        "tokens_per_step": args.engine.tokens_per_step,
        "cost": args.cost,
        "tuned_on": args.tuned_on,
        "cpu_seconds": crew::cpu_seconds(),
    })
}

/// Plays every cell, with every seed, under every policy. Beside the results, the cells whose load a trace cannot offer.
fn play(args: &GridArgs) -> Result<(Vec<Played>, Vec<String>), String> {
    let traces = traces(args)?;
    let cells = cells::all(traces.len(), &args.replicas, &args.cache, &args.load);
    let seeds = args.seeds.max(1) as usize;
    let jobs = args.jobs.or_else(|| std::thread::available_parallelism().ok().map(Into::into));
    let pieces = cells.len() * seeds;
    let piece = |number: usize| {
        let (cell, seed) = (number / seeds, number % seeds);
        let cell = cells.get(cell).ok_or("no such cell")?;
        let trace = traces.get(cell.trace).and_then(|seeds| seeds.get(seed));
        one(args, cell, trace.ok_or("no such trace")?, seed as u64 + 1)
    };
    let played = crew::work(pieces, jobs.unwrap_or(1), piece, |_, done| progress(done, pieces))?;
    let (mut results, mut unplayed) = (Vec::new(), Vec::new());
    for (cell, seeds) in cells.into_iter().zip(played.chunks(seeds)) {
        let trace = traces.get(cell.trace).and_then(|seeds| seeds.first());
        let trace = trace.map_or("", |trace| trace.name.as_str());
        match seeds.iter().map(Option::as_ref).collect::<Option<Vec<&One>>>() {
            Some(seeds) => results.push(pool(cell, trace, &policies(args), &seeds)),
            None => unplayed.push(cell.name(trace)),
        }
    }
    Ok((results, unplayed))
}

/// Each trace with each seed.
fn traces(args: &GridArgs) -> Result<Vec<Vec<Trace>>, String> {
    let named = TRACES.map(|(name, ..)| name.to_owned()).to_vec();
    let names = if args.names.is_empty() { &named } else { &args.names };
    let seeds = 1..=args.seeds.max(1);
    names
        .iter()
        .map(|name| seeds.clone().map(|seed| open(name, &args.options, seed)).collect())
        .collect()
}

fn policies(args: &GridArgs) -> Vec<Policy> {
    if args.policy.is_empty() { Policy::ALL.to_vec() } else { args.policy.clone() }
}

/// One cell with one seed.
struct One {
    policies: Vec<Seed>,
    target: f64,
    ceiling: f64,
    is_raised: bool,
}

fn one(args: &GridArgs, cell: &Cell, trace: &Trace, seed: u64) -> Result<Option<One>, String> {
    let cut = cut(args, cell, &trace.name);
    let engine = args.engine.engine();
    let equipment = Equipment { engine, threads: args.threads, cost: args.cost.clone() };
    let Some(scene) = Scene::of(trace, cell, cut, &equipment, seed)? else { return Ok(None) };
    let policies = policies(args).into_iter().map(|policy| {
        let samples = scene.fleet.play(&scene.trace, policy, seed);
        let samples = samples.map_err(|error| format!("{}: {error}", policy.name()))?;
        Ok(Seed::of(&samples, cell.replicas))
    });
    Ok(Some(One {
        policies: policies.collect::<Result<_, String>>()?,
        target: scene.target(),
        ceiling: scene.ceiling(),
        is_raised: scene.is_raised,
    }))
}

fn cut(args: &GridArgs, cell: &Cell, trace: &str) -> Cut {
    let fleet = args.replicas.iter().position(|replicas| *replicas == cell.replicas);
    let requests = fleet.and_then(|fleet| args.requests.get(fleet)).or(args.requests.last());
    let own = TRACES.iter().find(|(name, ..)| *name == trace);
    Cut {
        requests: requests.copied().unwrap_or(1),
        turns: args.turns.or(own.and_then(|(_, turns, _)| *turns)),
        prompt_tokens: args.prompt_tokens.or(own.and_then(|(.., tokens)| *tokens)),
    }
}

/// All seeds of a cell together.
fn pool(cell: Cell, trace: &str, policies: &[Policy], seeds: &[&One]) -> Played {
    let mean = |part: fn(&One) -> f64| {
        seeds.iter().map(|one| part(one)).sum::<f64>() / seeds.len().max(1) as f64
    };
    let played = policies.iter().enumerate().map(|(number, policy)| {
        let seeds = seeds.iter().filter_map(|one| one.policies.get(number));
        let kind = match policy {
            Policy::Warmpath => Kind::Ours,
            Policy::Lookahead => Kind::Bound,
            _ => Kind::Baseline,
        };
        let figures = Figures::of(&seeds.collect::<Vec<_>>());
        verdict::Played { policy: policy.name(), kind, figures }
    });
    let played: Vec<_> = played.collect();
    let lookahead = played.iter().find(|played| played.kind == Kind::Bound);
    Played {
        lookahead: lookahead.map(|bound| bound.figures.hit_rate()),
        played,
        cell,
        trace: trace.to_owned(),
        target: mean(|one| one.target),
        ceiling: mean(|one| one.ceiling),
        is_raised: seeds.iter().any(|one| one.is_raised),
    }
}

/// A line that is written over on a terminal, and every twentieth part elsewhere.
fn progress(done: usize, of: usize) {
    let mut stderr = std::io::stderr();
    let _ = if stderr.is_terminal() {
        let end = if done == of { "\n" } else { "" };
        write!(stderr, "\r  {done} of {of} runs of all policies{end}")
    } else if done.is_multiple_of(of.div_ceil(20)) {
        writeln!(stderr, "  {done} of {of} runs of all policies")
    } else {
        Ok(())
    };
}
