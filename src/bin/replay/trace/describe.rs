//! `warmpath-replay trace`: what a trace is like, and what it takes to make it fit a fleet.

use super::load::{self, Load};
use super::open::{Options, open};
use super::shape::Shape;
use std::fmt::Write as _;
use std::time::Duration;
use warmpath::command;
use warmpath::mock::engine::EngineConfig;

/// Which trace, and what fleet.
#[derive(clap::Args)]
pub struct TraceArgs {
    /// A trace's name, or its file.
    name: String,
    #[command(flatten)]
    options: Options,
    /// Decides what the file does not say, and which sessions are drawn.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Offered load, as a share of what the fleet can do.
    #[arg(long)]
    load: Option<f64>,
    /// Replicas of the fleet.
    #[arg(long, default_value_t = 8)]
    replicas: usize,
    /// Requests at least.
    #[arg(long, default_value_t = 5000)]
    requests: usize,
    /// Turns that a session is cut to.
    #[arg(long)]
    turns: Option<usize>,
    /// A session ends before its first prompt longer than this.
    #[arg(long)]
    prompt_tokens: Option<u32>,
    /// Prompt tokens per second of a replica, attention apart.
    #[arg(long, default_value_t = 60_000.0, value_parser = command::positive)]
    prefill_rate: f64,
    /// Pairs of tokens per second that attention adds to a prefill.
    #[arg(long, default_value_t = 2e9, value_parser = command::positive)]
    attention_rate: f64,
}

/// Prints it.
///
/// # Errors
/// When the trace cannot be read, or not be made to fit.
pub fn run(args: &TraceArgs) -> Result<(), String> {
    let trace = open(&args.name, &args.options, args.seed)?;
    let Some(share) = args.load else {
        return command::print(Shape::of(&trace));
    };
    let engine = EngineConfig {
        prefill_rate: args.prefill_rate,
        attention_rate: args.attention_rate,
        step_base: Duration::from_millis(5),
        decode_per_sequence: Duration::from_micros(150),
        max_num_seqs: 256,
        ..EngineConfig::default()
    };
    let scaled = load::scale(
        &trace,
        &engine,
        &Load {
            replicas: args.replicas,
            share,
            requests: args.requests,
            turns: args.turns,
            prompt_tokens: args.prompt_tokens,
            seed: args.seed,
        },
    )?;
    let mut text = Shape::of(&scaled.trace).to_string();
    let (work, load) = (scaled.work.as_secs_f64(), scaled.share * 100.0);
    let _ = writeln!(text, "{work:.0} replica-seconds of work, a load of {load:.1} %");
    let _ = writeln!(text, "pauses are {:.4} of the trace's", scaled.pauses);
    for share in [0.1, 0.3, 1.0] {
        let cache = load::cache(&scaled.trace, args.replicas, share);
        let raised = if cache.is_raised { ", raised to hold the longest request" } else { "" };
        let blocks = cache.blocks;
        let _ = writeln!(text, "{share} of the working set per replica: {blocks} blocks{raised}");
    }
    command::print(text)
}
