//! The workload against a fleet in virtual time: the mock replica's engine, and the filter's own
//! core deciding.
//!
//! A run takes seconds of CPU and is the same every time, so it is where the cost formula is
//! judged. What it leaves out: Envoy, the network and tokenizing.

mod agent;
mod baselines;
mod bounds;
mod fault;
mod fleet;
mod foresight;
mod gateway;
#[cfg(test)]
mod guards;
mod policy;
mod replica;
mod run;
#[cfg(test)]
mod spread;

use crate::stats::Run;
use crate::table;
use crate::trace::load::{self, Limits, Load};
use crate::trace::{Trace, open};
use crate::workload::{Plan, Workload};
use clap::Args;
use fault::Fault;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;
use warmpath::command;
use warmpath::config::Config;
use warmpath::mock::engine::EngineConfig;
use warmpath::route::RouteConfig;

pub use bounds::infinite::Ceiling;
pub use fleet::FleetConfig;
pub use policy::Policy;

/// What to simulate. The fleet's defaults are those of `scripts/demo.sh`.
#[derive(Args)]
pub struct SimulateArgs {
    /// What to play.
    #[arg(long, value_enum, default_value = "conversations")]
    workload: Workload,
    /// A trace to play in its place: what `warmpath-replay trace` knows. `--block-size` must be its own.
    #[arg(long)]
    trace: Option<String>,
    #[command(flatten)]
    options: open::Options,
    /// What a trace offers of what the fleet can do. Without, its sessions arrive over `--duration`.
    #[arg(long)]
    load: Option<f64>,
    /// Turns that a trace's sessions are cut to.
    #[arg(long)]
    turns: Option<usize>,
    /// A trace's session ends before its first prompt longer than this.
    #[arg(long)]
    prompt_tokens: Option<u32>,
    /// How many requests.
    #[arg(long, default_value_t = 1500)]
    requests: usize,
    /// Seconds over which sessions arrive.
    #[arg(long, default_value_t = 20.0, value_parser = command::not_negative)]
    duration: f64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds, one after another.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Only this policy; may be repeated.
    #[arg(long, value_enum)]
    policy: Vec<Policy>,
    /// Replicas of the fleet.
    #[arg(long, default_value_t = 4)]
    replicas: usize,
    /// Tokens per KV block.
    #[arg(long, default_value_t = 16)]
    block_size: u32,
    /// KV blocks of each replica.
    #[arg(long, default_value_t = 7000)]
    capacity_blocks: u32,
    /// Prompt tokens per second, attention apart.
    #[arg(long, default_value_t = 60_000.0, value_parser = command::positive)]
    prefill_rate: f64,
    /// Pairs of tokens per second that attention adds to a prefill.
    #[arg(long, default_value_t = 2e9, value_parser = command::positive)]
    attention_rate: f64,
    /// Milliseconds of a step that does nothing else.
    #[arg(long, default_value_t = 5.0, value_parser = command::not_negative)]
    step_ms: f64,
    /// Milliseconds that each decoding sequence adds to a step.
    #[arg(long, default_value_t = 0.15, value_parser = command::not_negative)]
    decode_ms: f64,
    /// Requests that may run at once.
    #[arg(long, default_value_t = 256)]
    max_num_seqs: usize,
    /// Milliseconds between a replica's reports.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..))]
    report_ms: u64,
    /// Milliseconds that a report is on its way.
    #[arg(long, default_value_t = 0)]
    report_delay_ms: u64,
    /// Speed of the first, second, ... replica as a multiple of the others'.
    #[arg(long, value_delimiter = ',', value_parser = command::positive)]
    speeds: Vec<f64>,
    /// How many gateways.
    #[arg(long, default_value_t = 1)]
    gateways: usize,
    /// Worker threads of each gateway.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Each request opens a connection, and so comes to any thread of any gateway.
    #[arg(long)]
    reconnects: bool,
    /// What goes wrong: SECONDS:restart:REPLICA:SECONDS, SECONDS:cache:REPLICA:BLOCKS, SECONDS:speed:REPLICA:TIMES,
    /// SECONDS:silence:SECONDS, SECONDS:join:REPLICA or SECONDS:drain:REPLICA. May be repeated.
    #[arg(long = "fault")]
    faults: Vec<Fault>,
    /// Replicas say in their reports what they have cached: Warmpath's agents.
    #[arg(long)]
    agents: bool,
    /// Responses do not say how many tokens were cached.
    #[arg(long)]
    no_usage: bool,
    /// Warmpath takes replicas to be as fast as `cost` says.
    #[arg(long)]
    no_learning: bool,
    /// Warmpath does not take in what answers say of cached tokens.
    #[arg(long)]
    no_correction: bool,
    /// Warmpath's `cost` options as JSON; the replicas' speed is told it in any case.
    #[arg(long, default_value = "{}")]
    cost: String,
    /// Print how well first tokens were foreseen, too.
    #[arg(long)]
    explain: bool,
    /// Write the runs' records to this JSON list.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Simulates and prints the table.
///
/// # Errors
/// When an argument makes no sense or the file cannot be written.
pub fn run(args: &SimulateArgs) -> Result<(), String> {
    command::writable(args.json.as_deref())?;
    let fleet = args.fleet()?;
    let policies = if args.policy.is_empty() { Policy::ALL.to_vec() } else { args.policy.clone() };
    let mut runs: Vec<Run> = Vec::new();
    let mut ceilings = String::new();
    for seed in args.seed..args.seed.saturating_add(args.seeds) {
        let trace = args.trace(&fleet, seed)?;
        let workload = format!("{}, seed {seed}", trace.name);
        let most = Ceiling::of(&trace).hit_rate() * 100.0;
        let _ = writeln!(ceilings, "{workload}: no fleet can hit more than {most:.1} %.");
        for &policy in &policies {
            let samples = fleet.play(&trace, policy, seed)?;
            let foreseen = foresight::render(&samples).filter(|_| args.explain);
            if let Some(foreseen) = foreseen {
                let _ = writeln!(ceilings, "\n{}, {workload}:\n{foreseen}", policy.name());
            }
            let mut run = Run::of(policy.name(), &workload, &samples);
            run.count_idle_replicas(&runs);
            runs.push(run);
        }
    }
    command::print(format_args!("{}\n{ceilings}", table::render(&runs)))?;
    args.json.as_ref().map_or(Ok(()), |path| table::write(path, &runs))
}

impl SimulateArgs {
    /// What is played: a trace, made to fit the fleet, or a workload.
    fn trace(&self, fleet: &FleetConfig, seed: u64) -> Result<Trace, String> {
        let duration = Duration::try_from_secs_f64(self.duration);
        let duration = duration.map_err(|error| format!("--duration: {error}"))?;
        let Some(name) = &self.trace else {
            let plan = Plan::new(self.workload, self.requests, duration, seed);
            return Ok(Trace::of_plan(self.workload.name(), &plan, self.block_size));
        };
        let trace = open::open(name, &self.options, seed)?;
        if trace.block_tokens != self.block_size {
            return Err(format!("--block-size: {name} has blocks of {}", trace.block_tokens));
        }
        let Self { requests, turns, prompt_tokens, replicas, .. } = *self;
        if let Some(share) = self.load {
            let load = Load { replicas, share, requests, turns, prompt_tokens, seed };
            return Ok(load::scale(&trace, &fleet.engine, &load)?.trace);
        }
        let mut trace = load::draw(&trace, &Limits { requests, turns, prompt_tokens, seed })?;
        load::spread(&mut trace, duration, 1.0)?;
        Ok(trace)
    }

    pub(crate) fn fleet(&self) -> Result<FleetConfig, String> {
        if self.replicas == 0 {
            return Err("--replicas: at least one is needed".to_owned());
        }
        let engine = EngineConfig {
            block_size: self.block_size as usize,
            capacity_blocks: self.capacity_blocks,
            prefill_rate: self.prefill_rate,
            attention_rate: self.attention_rate,
            step_base: Duration::from_secs_f64(self.step_ms / 1e3),
            decode_per_sequence: Duration::from_secs_f64(self.decode_ms / 1e3),
            max_num_seqs: self.max_num_seqs,
            ..EngineConfig::default()
        };
        let route = route_config(&engine, &self.cost)?;
        let report_interval = Duration::from_millis(self.report_ms);
        Ok(FleetConfig {
            replicas: self.replicas,
            engine,
            speeds: self.speeds.clone(),
            route,
            learn_rates: !self.no_learning,
            correction: !self.no_correction,
            report_interval,
            report_delay: Duration::from_millis(self.report_delay_ms),
            gateways: self.gateways,
            threads: self.threads,
            reconnects: self.reconnects,
            agents: self.agents,
            usage: !self.no_usage,
            faults: self.faults.clone(),
        })
    }
}

impl FleetConfig {
    /// Equal replicas behind one gateway, whose Warmpath has its defaults but for what `cost` changes.
    ///
    /// # Errors
    /// When `cost` or the engine's speed is none that Warmpath can be told.
    pub fn equal(replicas: usize, engine: EngineConfig, cost: &str) -> Result<Self, String> {
        Ok(Self {
            replicas,
            route: route_config(&engine, cost)?,
            engine,
            speeds: Vec::new(),
            report_interval: Duration::from_millis(500),
            report_delay: Duration::ZERO,
            gateways: 1,
            threads: 1,
            reconnects: false,
            agents: false,
            usage: true,
            faults: Vec::new(),
            correction: true,
            learn_rates: true,
        })
    }
}

/// The filter's own defaults, the engine's speed, and what `cost` changes.
fn route_config(engine: &EngineConfig, cost: &str) -> Result<RouteConfig, String> {
    let mut options: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(cost).map_err(|error| format!("--cost: {error}"))?;
    let mut default = |name: &str, value: f64| {
        options.entry(name).or_insert_with(|| value.into());
    };
    default("prefill_tokens_per_s", engine.prefill_rate);
    default("attention_tokens", engine.attention_rate / engine.prefill_rate);
    let plugin = serde_json::json!({
        "models": [{ "name": "m", "prepared": { "cluster": "none", "path": "/none" } }],
        "clusters": [{ "name": gateway::CLUSTER, "replicas": ["127.0.0.1:1"] }],
        "default_block_size": engine.block_size,
        "cost": options,
    });
    let config = Config::parse(plugin.to_string().as_bytes());
    config.map(|config| config.route).map_err(|error| format!("--cost: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: SimulateArgs,
    }

    fn simulate(line: &str, policy: Policy, seed: u64) -> Run {
        let words = std::iter::once("simulate").chain(line.split_whitespace());
        let args = Command::parse_from(words).args;
        let duration = Duration::from_secs_f64(args.duration);
        let plan = Plan::new(args.workload, args.requests, duration, seed);
        let trace = Trace::of_plan(args.workload.name(), &plan, args.block_size);
        let samples = args.fleet().unwrap().play(&trace, policy, seed).unwrap();
        Run::of(policy.name(), args.workload.name(), &samples)
    }

    const SHORT: &str = "--requests 40 --duration 1";
    const LONGER: &str = "--requests 250 --duration 4";

    #[test]
    fn equal_seeds_give_equal_runs_and_others_do_not() {
        for policy in Policy::ALL {
            let run = simulate(SHORT, policy, 1);
            assert_eq!(run, simulate(SHORT, policy, 1), "{policy:?}");
            assert_ne!(run, simulate(SHORT, policy, 2), "{policy:?}");
            assert_eq!((run.requests, run.errors), (40, 0));
        }
    }

    #[test]
    fn every_policy_is_asked_the_same() {
        let asked = Policy::ALL.map(|policy| simulate(SHORT, policy, 3).prompt_tokens);
        let (least, most) = (asked.iter().min().unwrap(), asked.iter().max().unwrap());
        assert_eq!(least, most, "an answer's length is part of the plan");
    }

    #[test]
    fn nobody_hits_more_than_can_be_hit() {
        let words = std::iter::once("simulate").chain(LONGER.split_whitespace());
        let args = Command::parse_from(words).args;
        let plan = Plan::new(args.workload, args.requests, Duration::from_secs(4), 1);
        let ceiling = Ceiling::of(&Trace::of_plan("conversations", &plan, args.block_size));
        // One replica with room for all comes near it.
        let line = format!("{LONGER} --replicas 1 --capacity-blocks 200000");
        let one = simulate(&line, Policy::RoundRobin, 1);
        assert_eq!(ceiling.prompt_tokens, one.prompt_tokens);
        assert!(one.hit_rate() <= ceiling.hit_rate());
        assert!(one.hit_rate() > 0.98 * ceiling.hit_rate(), "{} of {ceiling:?}", one.hit_rate());
        for policy in [Policy::Dynamo, Policy::PrefixOnly, Policy::Warmpath] {
            assert!(simulate(LONGER, policy, 1).hit_rate() < ceiling.hit_rate(), "{policy:?}");
        }
    }

    #[test]
    fn a_prefix_is_worth_its_queue_and_costs_nobody_else() {
        let [mut round_robin, mut selfish, mut warmpath] = [0.0; 3];
        for seed in 1..=2 {
            round_robin += simulate(LONGER, Policy::RoundRobin, seed).hit_rate();
            let cost = format!("{LONGER} --cost {{\"neighbour_weight\":0}}");
            selfish += simulate(&cost, Policy::Warmpath, seed).hit_rate();
            warmpath += simulate(LONGER, Policy::Warmpath, seed).hit_rate();
        }
        assert!(warmpath > 1.15 * round_robin, "{warmpath} against {round_robin}");
        assert!(warmpath > selfish, "{warmpath} against {selfish}");
    }

    #[test]
    fn without_reuse_nobody_waits_longer_than_under_least_request() {
        let line = "--workload no-reuse --requests 300 --duration 6";
        let p99 = |policy| (1..=2).map(|s| simulate(line, policy, s).first_token.p99).sum::<f64>();
        let (warmpath, least_request) = (p99(Policy::Warmpath), p99(Policy::LeastRequest));
        assert!(warmpath < 1.05 * least_request, "{warmpath} ms against {least_request} ms");
    }

    #[test]
    fn a_wrong_cost_option_is_named() {
        let error = route_config(&EngineConfig::default(), r#"{"presure_ms": 1}"#).unwrap_err();
        assert_eq!(error, "--cost: cost.presure_ms: unknown option");
    }
}
