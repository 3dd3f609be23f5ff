//! A simulated engine that is as fast as a real one: measures it over HTTP, fits the parameters, and plays one mixed
//! workload on both.
//!
//! It measures one engine alone, from a client beside it. It does not start the engine, and it knows vLLM's names only.

mod fit;
mod measure;
mod mixed;
mod probe;
mod record;

use crate::stats::{Quantiles, Run};
use crate::table::align;
use clap::Args;
use fit::Fit;
use probe::Probe;
use record::Record;
use std::fmt::Write as _;
use std::path::PathBuf;
use warmpath::command;

/// What to measure.
#[derive(Args)]
pub struct CalibrateArgs {
    /// The engine, as http://host:port. Nothing else may be asking it.
    #[arg(required_unless_present = "from")]
    url: Option<String>,
    /// Measure nothing, but fit and simulate what an earlier run wrote with --json.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// The model to ask for; without it the first that is served.
    #[arg(long, default_value = "")]
    model: String,
    /// Times that each point is measured; the median counts.
    #[arg(long, default_value_t = 7)]
    repeats: usize,
    /// The longest prompt, in tokens.
    #[arg(long, default_value_t = 16_000)]
    longest: usize,
    /// Tokens that the engine computes in a step (vLLM: --max-num-batched-tokens).
    #[arg(long, default_value_t = 2048)]
    tokens_per_step: usize,
    /// Requests that the engine runs at once (vLLM: --max-num-seqs).
    #[arg(long, default_value_t = 64)]
    max_num_seqs: usize,
    /// Sessions of the mixed workload.
    #[arg(long, default_value_t = 60)]
    sessions: usize,
    /// Part of the engine's time that the mixed workload takes.
    #[arg(long, default_value_t = 0.5)]
    load: f64,
    /// Of the prompts and arrivals. An engine that was measured before knows the prompts of that seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write measurements, parameters and the live run here.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures, fits, plays on both, and prints all three.
///
/// # Errors
/// When the engine cannot be measured or the file cannot be written.
pub async fn run(args: &CalibrateArgs) -> Result<(), String> {
    command::writable(args.json.as_deref())?;
    let record = match (&args.from, &args.url) {
        (Some(path), _) => Record::read(path)?,
        (None, Some(url)) => measured(args, url).await?,
        (None, None) => return Err("neither an engine nor a file".to_owned()),
    };
    let fit = record.fit()?;
    command::print(parameters(&record, fit))?;
    let plan = mixed::plan(record.sessions, record.seed);
    let simulated = Run::of("simulated", "mixed", &mixed::simulated(&plan, &record, fit)?);
    command::print(compared(&record.live, &simulated))?;
    args.json.as_ref().map_or(Ok(()), |path| record.write(path, fit))
}

async fn measured(args: &CalibrateArgs, url: &str) -> Result<Record, String> {
    let mut probe = Probe::new(url, &args.model);
    let facts = probe.facts().await?;
    let wanted = measure::Wanted {
        repeats: args.repeats.max(1),
        longest: args.longest,
        max_num_seqs: args.max_num_seqs,
        block_size: facts.block_size,
        seed: args.seed,
    };
    let measurement = measure::all(&probe, &wanted).await?;
    let mut record = Record {
        facts,
        tokens_per_step: args.tokens_per_step,
        max_num_seqs: args.max_num_seqs,
        seed: args.seed,
        sessions: args.sessions,
        seconds: 0.0,
        measurement,
        live: Run::default(),
    };
    let plan = mixed::plan(args.sessions, args.seed);
    let fit = record.fit()?;
    record.seconds = mixed::work(&plan, &record, fit) / args.load;
    eprintln!("  playing {} sessions over {:.0} s", args.sessions, record.seconds);
    let samples = mixed::live(&probe, plan, &record).await?;
    record.live = Run::of("live", "mixed", &samples);
    Ok(record)
}

/// The mixed workload's times on both engines, a row each.
fn compared(live: &Run, simulated: &Run) -> String {
    let heading =
        ["", "p50 live", "simulated", "", "p90 live", "simulated", "", "p99 live", "simulated", ""];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    let mut row = |name: &str, live: Quantiles, simulated: Quantiles| {
        let mut cells = vec![name.to_owned()];
        let pairs =
            [(live.p50, simulated.p50), (live.p90, simulated.p90), (live.p99, simulated.p99)];
        for (live, simulated) in pairs {
            let off = (simulated / live - 1.0) * 100.0;
            cells.extend([format!("{live:.1}"), format!("{simulated:.1}"), format!("{off:+.0} %")]);
        }
        rows.push(cells);
    };
    row("TTFT", live.first_token, simulated.first_token);
    row("inter-token", live.gap, simulated.gap);
    row("end to end", live.whole, simulated.whole);
    let (live_hits, simulated_hits) = (live.hit_rate() * 100.0, simulated.hit_rate() * 100.0);
    format!(
        "\n{} requests, hit rate {live_hits:.1} % live and {simulated_hits:.1} % simulated, times in ms\n\n{}",
        live.requests,
        align(&rows)
    )
}

/// The parameters, and below them every point with what the fit makes of it.
fn parameters(record: &Record, fit: Fit) -> String {
    let mut text = format!(
        "{}, {} blocks of {} tokens\n\n{:#}\n\n",
        record.facts.version,
        record.facts.capacity_blocks,
        record.facts.block_size,
        fit.to_json()
    );
    for (point, seconds) in measure::medians(&record.measurement) {
        let fitted = fit.seconds(point, record.tokens_per_step);
        let off = (fitted / seconds - 1.0) * 100.0;
        let (measured, fitted) = (seconds * 1e3, fitted * 1e3);
        let _ = writeln!(text, "{point}: {measured:.1} ms, fitted {fitted:.1} ms, {off:+.0} %");
    }
    text
}
