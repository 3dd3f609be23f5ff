//! Stands beside an engine and says what is in its KV cache: see `docs/cache-report.md`.

use clap::Parser;
use std::hash::BuildHasher;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use tokio::net::TcpListener;
use warmpath::agent::cache::Names;
use warmpath::agent::engine::{Engine, watch};
use warmpath::agent::follow::{Followed, Source, follow};
use warmpath::agent::rank::{Rank, RankConfig};
use warmpath::agent::server::{Shared, serve};
use warmpath::agent::stop;
use warmpath::agent::zmtp::Endpoint;
use warmpath::command;
use warmpath::tokens::blocks::BlockSize;

/// Most blocks of a rank: what a report has room for, and eight million tokens in blocks of 16.
const MOST_BLOCKS: u32 = 1 << 19;

/// Changes that are kept for readers: several seconds of a busy engine's.
const HISTORY_BYTES: usize = 4 << 20;

/// Follows an engine's KV events and answers which blocks it holds, and how busy it is.
#[derive(Parser)]
#[command(name = "warmpath-agent", version)]
struct Arguments {
    /// Where to answer.
    #[arg(long, default_value = "127.0.0.1:9402", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// The engine's HTTP interface, for its models and metrics.
    #[arg(long, default_value = "http://127.0.0.1:8000", value_name = "URL")]
    engine_url: String,
    /// A file with the key that the engine wants for /v1/models.
    #[arg(long, value_name = "FILE")]
    engine_token_file: Option<PathBuf>,
    /// Where the engine publishes its events.
    #[arg(long, default_value = "tcp://127.0.0.1:5557", value_name = "ENDPOINT")]
    events: String,
    /// Bind that endpoint instead, for an engine that connects to it.
    #[arg(long)]
    events_bind: bool,
    /// Where the engine repeats its events; empty for an engine that does not.
    #[arg(long, default_value = "tcp://127.0.0.1:5558", value_name = "ENDPOINT")]
    replay: String,
    /// What the topics of the engine's events begin with.
    #[arg(long, default_value = "", value_name = "TOPIC")]
    topic: String,
    /// Data-parallel ranks: each has its events at the next port, and its report at ?rank=N.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    ranks: u32,
    /// Tokens per block, until the engine's events say it.
    #[arg(long, value_name = "N")]
    block_tokens: Option<BlockSize>,
    /// The model's name in the filter's configuration, if it is not the engine's first.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    model: Option<String>,
    /// Most blocks that are known, of each rank.
    #[arg(long, default_value_t = MOST_BLOCKS, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_BLOCKS)))]
    most_blocks: u32,
    /// A file with the token that readers must bear.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Answer on an address that others reach without asking for a token.
    #[arg(long)]
    insecure: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let result = runtime.map_err(|error| error.to_string());
    let result = result.and_then(|runtime| {
        let result = runtime.block_on(run(arguments));
        // A request to the engine that is under way is not waited for.
        runtime.shutdown_background();
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("warmpath-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<(), String> {
    let token = arguments.token_file.as_deref().map(token).transpose()?;
    if !arguments.listen.ip().is_loopback() && token.is_none() && !arguments.insecure {
        let listen = arguments.listen;
        return Err(format!("--listen {listen}: others reach it: give --token-file or --insecure"));
    }
    let engine_token = arguments.engine_token_file.as_deref().map(self::token).transpose()?;
    let engine = Engine::new(&arguments.engine_url, engine_token)?;
    let sources = (0..arguments.ranks).map(|rank| source(&arguments, rank));
    let sources: Vec<Source> = sources.collect::<Result<_, _>>()?;
    let ranks = (0..arguments.ranks).map(|rank| Arc::new(followed(&arguments, rank))).collect();
    let shared = Arc::new(Shared::new(ranks, token));
    let listener = TcpListener::bind(arguments.listen).await;
    let listener = listener.map_err(|error| format!("--listen {}: {error}", arguments.listen))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    // Whoever started it need not read that.
    let _ = command::print(format_args!("warmpath-agent listens on {address}\n"));
    if let Some(base) = &arguments.model {
        shared.set_names(&Names { base: base.clone(), adapters: Vec::new() });
    }
    tokio::spawn(serve(listener, Arc::clone(&shared)));
    tokio::spawn(watch(engine, arguments.model.clone(), Arc::clone(&shared)));
    let mut following = tokio::task::JoinSet::new();
    for (followed, source) in shared.ranks.iter().cloned().zip(sources) {
        let shared = Arc::clone(&shared);
        following.spawn(async move {
            let named = shared.named.notified();
            if shared.known().names.is_none() {
                named.await;
            }
            let endpoint = source.events.clone();
            let ended = follow(followed, source).await;
            ended.map_err(|error| format!("--events {endpoint:?}: {error}"))
        });
    }
    tokio::select! {
        () = stop::signal() => Ok(()),
        ended = following.join_next() => match ended {
            Some(Ok(ended)) => ended,
            Some(Err(error)) => Err(error.to_string()),
            None => Ok(()),
        },
    }
}

fn token(file: &Path) -> Result<String, String> {
    let text =
        std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let token = text.trim().to_owned();
    if token.is_empty() {
        return Err(format!("{}: expected a token", file.display()));
    }
    Ok(token)
}

fn source(arguments: &Arguments, rank: u32) -> Result<Source, String> {
    let endpoint = |name: &str, text: &str| {
        let endpoint = Endpoint::parse(text).and_then(|endpoint| endpoint.of_rank(rank));
        endpoint.map_err(|error| format!("{name} {error}"))
    };
    let replay = Some(&arguments.replay).filter(|replay| !replay.is_empty());
    Ok(Source {
        events: endpoint("--events", &arguments.events)?,
        is_bound: arguments.events_bind,
        replay: replay.map(|replay| endpoint("--replay", replay)).transpose()?,
        topic: arguments.topic.clone(),
    })
}

fn followed(arguments: &Arguments, number: u32) -> Followed {
    let rank = Rank::new(RankConfig {
        names: Names::default(),
        block_tokens: arguments.block_tokens,
        most_blocks: arguments.most_blocks as usize,
        history_bytes: HISTORY_BYTES,
        // One rank alone may have any number: each engine of a group has an agent of its own then.
        rank: (arguments.ranks > 1).then_some(number),
        seed: std::hash::RandomState::new().hash_one(number),
    });
    Followed::new(number, rank)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_document_lists_every_flag() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/agents.md");
        let document = std::fs::read_to_string(path).unwrap();
        let (_, section) = document.split_once("\n| Flag | Default | For |\n").unwrap();
        let rows = section.lines().skip(1).take_while(|line| line.starts_with('|'));
        let listed: Vec<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();
        let command = Arguments::command();
        let real: Vec<String> = command
            .get_arguments()
            .filter_map(|argument| Some(format!("--{}", argument.get_long()?)))
            .filter(|name| name != "--help" && name != "--version")
            .collect();
        assert_eq!(listed, real);
    }
}
