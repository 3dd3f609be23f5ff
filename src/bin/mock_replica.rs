//! Mock replicas for demos and tests: an OpenAI-compatible server with a KV cache worth routing to.

use clap::{Parser, ValueEnum};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};
use warmpath::agent::stop;
use warmpath::command;
use warmpath::mock::digest::Lora;
use warmpath::mock::engine::EngineConfig;
use warmpath::mock::exposition::MetricNames;
use warmpath::mock::publisher::EventsConfig;
use warmpath::mock::{Handle, ReplicaConfig, Skew, serve};
use warmpath::model::Model;

/// An OpenAI-compatible server that behaves like vLLM where routing can tell, and computes nothing.
#[derive(Parser)]
#[command(name = "warmpath-mock-replica")]
struct Arguments {
    /// Where to listen, as ADDRESS or NAME@ADDRESS; each gives one more independent replica.
    #[arg(long = "listen", value_name = "[NAME@]ADDRESS", required = true)]
    listen: Vec<String>,
    /// A served name, and once the prepared file of the model behind all of them.
    #[arg(long = "model", value_name = "NAME[=FILE]", default_value = "mock")]
    models: Vec<String>,
    /// A LoRA adapter's name and path.
    #[arg(long = "lora", value_name = "NAME=PATH")]
    loras: Vec<String>,
    /// Tokens per KV block.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    block_size: u32,
    /// KV blocks of each replica.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    capacity_blocks: u32,
    /// Prompt tokens per second, attention apart.
    #[arg(long, default_value_t = 10_000.0, value_parser = command::positive)]
    prefill_rate: f64,
    /// Pairs of tokens per second that attention adds to a prefill; 0 adds nothing.
    #[arg(long, default_value_t = 200_000_000.0, value_parser = command::not_negative)]
    attention_rate: f64,
    /// Milliseconds of a step that does nothing else.
    #[arg(long, default_value_t = 8.0, value_parser = command::not_negative)]
    step_ms: f64,
    /// Milliseconds that each decoding sequence adds to a step.
    #[arg(long, default_value_t = 0.3, value_parser = command::not_negative)]
    decode_ms: f64,
    /// Tokens that one step may compute.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_batched_tokens: u32,
    /// Requests that may run at once.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_seqs: u32,
    /// Tokens of a prompt and its answer; never more than fit into the cache.
    #[arg(long, default_value_t = 32_768)]
    max_model_len: u32,
    /// Length of an answer to a chat that sets none.
    #[arg(long, default_value_t = 64)]
    default_max_tokens: u32,
    /// Tokenize differently from the model: one more token in front, or the same number of others.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "extra")]
    skew: Option<SkewArgument>,
    /// Publish KV events here: an endpoint that vLLM would bind, with `*` or `::` in it. Each further replica takes the
    /// next port.
    #[arg(long, value_name = "ENDPOINT")]
    events: Option<String>,
    /// Where batches of KV events can be asked for again; further replicas as with --events.
    #[arg(long, value_name = "ENDPOINT", requires = "events")]
    replay: Option<String>,
    /// What comes in front of each batch of KV events.
    #[arg(long, default_value = "", requires = "events")]
    event_topic: String,
    /// Batches of KV events that can be asked for again.
    #[arg(long, default_value_t = 10_000, requires = "events")]
    event_buffer: usize,
    /// Use SGLang's names in /metrics.
    #[arg(long)]
    sglang_metrics: bool,
    /// Seed of the answers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads; one is enough for some thousand tokens a second.
    #[arg(long, default_value_t = 1)]
    threads: u16,
    /// Once told to end: seconds that it has to finish what it has. Its /health says 503 meanwhile; 0 ends it at once.
    #[arg(long, default_value_t = 0.0, value_parser = command::not_negative)]
    drain_s: f64,
}

/// How long a draining replica stays at least, so that whoever asks /health has noticed: it still answers.
const NOTICE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, ValueEnum)]
enum SkewArgument {
    Extra,
    Ids,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime = if arguments.threads <= 1 {
        tokio::runtime::Builder::new_current_thread().enable_all().build()
    } else {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(arguments.threads.into())
            .enable_all()
            .build()
    };
    let result = runtime
        .map_err(|error| error.to_string())
        .and_then(|runtime| runtime.block_on(run(&arguments)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("warmpath-mock-replica: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &Arguments) -> Result<(), String> {
    let base = config(arguments)?;
    let mut handles = Vec::new();
    for (at, listen) in arguments.listen.iter().enumerate() {
        let (name, address) = match listen.split_once('@') {
            Some((name, address)) => (name.to_owned(), address),
            None => (format!("replica-{}", at + 1), listen.as_str()),
        };
        let describe = |error: std::io::Error| format!("{listen}: {error}");
        let listener = TcpListener::bind(address).await.map_err(describe)?;
        let place = u16::try_from(at).map_err(|error| format!("{listen}: {error}"))?;
        let events = base.events.as_ref().map(|events| events.offset(place));
        let config = ReplicaConfig { name, events, ..base.clone() };
        let handle = serve(config, listener).map_err(describe)?;
        // Whoever started it need not read that.
        let _ = command::print(format_args!(
            "{} listens on {}\n",
            handle.replica.name(),
            handle.address
        ));
        handles.push(handle);
    }
    stop::signal().await;
    let limit = Duration::try_from_secs_f64(arguments.drain_s).unwrap_or_default();
    if !limit.is_zero() {
        drain(&handles, limit).await;
    }
    Ok(())
}

/// Answers on, unhealthy, until nothing is under way or the limit is reached.
async fn drain(handles: &[Handle], limit: Duration) {
    for handle in handles {
        handle.replica.set_control(|control| control.health = Some(503));
    }
    let _ = command::print("draining\n");
    let began = Instant::now();
    while began.elapsed() < limit {
        sleep(Duration::from_millis(200)).await;
        let is_idle = handles.iter().all(|handle| handle.replica.in_flight() == 0);
        if is_idle && began.elapsed() >= NOTICE {
            break;
        }
    }
    // What an answer that has just ended still has to write.
    sleep(Duration::from_millis(200)).await;
}

fn config(arguments: &Arguments) -> Result<ReplicaConfig, String> {
    let (served_names, model) = models(&arguments.models)?;
    let loras: Result<Vec<Lora>, String> =
        arguments.loras.iter().map(|lora| adapter(lora)).collect();
    let milliseconds =
        |ms: f64| Duration::try_from_secs_f64(ms / 1000.0).map_err(|e| format!("{ms} ms: {e}"));
    let engine = EngineConfig {
        block_size: arguments.block_size as usize,
        capacity_blocks: arguments.capacity_blocks,
        max_num_batched_tokens: arguments.max_num_batched_tokens as usize,
        max_num_seqs: arguments.max_num_seqs as usize,
        step_base: milliseconds(arguments.step_ms)?,
        prefill_rate: arguments.prefill_rate,
        attention_rate: arguments.attention_rate,
        decode_per_sequence: milliseconds(arguments.decode_ms)?,
        seed: arguments.seed,
        ..EngineConfig::default()
    };
    Ok(ReplicaConfig {
        engine,
        served_names,
        model,
        loras: loras?,
        skew: arguments.skew.map(|skew| match skew {
            SkewArgument::Extra => Skew::Extra,
            SkewArgument::Ids => Skew::Ids,
        }),
        metric_names: if arguments.sglang_metrics {
            MetricNames::Sglang
        } else {
            MetricNames::Vllm
        },
        max_model_len: arguments.max_model_len as usize,
        default_max_tokens: arguments.default_max_tokens as usize,
        events: arguments.events.clone().map(|endpoint| EventsConfig {
            endpoint,
            replay: arguments.replay.clone(),
            topic: arguments.event_topic.clone(),
            buffer_batches: arguments.event_buffer,
        }),
        ..ReplicaConfig::default()
    })
}

fn models(arguments: &[String]) -> Result<(Vec<String>, Option<Arc<Model>>), String> {
    let (mut names, mut model) = (Vec::new(), None);
    for argument in arguments {
        let Some((name, file)) = argument.split_once('=') else {
            names.push(argument.clone());
            continue;
        };
        if model.is_some() {
            return Err(format!("{argument}: a replica has one model; other names take no file"));
        }
        let bytes = std::fs::read(file).map_err(|error| format!("{file}: {error}"))?;
        let loaded = Model::load(bytes).map_err(|error| format!("{file}: {}", error.0))?;
        model = Some(Arc::new(loaded));
        names.push(name.to_owned());
    }
    Ok((names, model))
}

fn adapter(argument: &str) -> Result<Lora, String> {
    let (name, path) =
        argument.split_once('=').ok_or_else(|| format!("{argument}: expected NAME=PATH"))?;
    Ok(Lora { name: name.to_owned(), path: path.to_owned() })
}
