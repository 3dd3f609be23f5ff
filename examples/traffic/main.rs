//! The two ends that `scripts/bench.sh requests` puts around an Envoy: replicas that answer at once and cost little, and
//! a client that plays chats and times them.
//!
//! The client does what it is told, a line of JSON on its input for each thing, and answers each with a line. It
//! measures no CPU: who tells it what to play knows which process that costs. Every request says what usage its answer
//! will tell, so that the filter's own count is proven by the run.
#![expect(clippy::disallowed_methods, reason = "latency is measured by the clock")]

mod chat;
mod client;
mod replica;
mod text;

use chat::{Chats, Order};
use clap::{Parser, Subcommand};
use serde_json::{Value, json};
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use warmpath::model::Model;

#[derive(Parser)]
#[command(about = "Replicas that cost nothing, and a client that plays chats")]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Answer as vLLM would, at once. Prints a line when it listens everywhere.
    Replica {
        /// Addresses, a replica each.
        #[arg(long, required = true)]
        listen: Vec<String>,
        /// Name of the model.
        #[arg(long)]
        model: String,
    },
    /// Play what the lines of the standard input say.
    Load {
        /// The model's prepared file, by which tokens are counted.
        #[arg(long)]
        prepared: PathBuf,
        /// Name of the model.
        #[arg(long)]
        model: String,
    },
}

fn main() -> ExitCode {
    let outcome = match Command::parse().action {
        Action::Replica { listen, model } => replica::serve(&listen, &model),
        Action::Load { prepared, model } => load(&prepared, &model),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("traffic: {error}");
            ExitCode::FAILURE
        }
    }
}

fn load(prepared: &PathBuf, name: &str) -> Result<(), String> {
    let bytes = std::fs::read(prepared).map_err(|error| error.to_string())?;
    let model = Model::load(bytes).map_err(|error| error.to_string())?;
    let mut chats = Chats::default();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let order: Value = serde_json::from_str(&line).map_err(|error| error.to_string())?;
        let number = |name: &str| order.get(name).and_then(Value::as_u64).unwrap_or(0);
        let answer = match order.get("do").and_then(Value::as_str) {
            Some("write") => {
                chats = Chats::write(
                    &model,
                    name,
                    &Order {
                        tokens: number("tokens") as usize,
                        count: number("count") as usize,
                        seed: number("seed"),
                        is_stream: number("events") > 0,
                    },
                )?;
                json!({"tokens": chats.mean_tokens(), "bytes": chats.mean_bytes()})
            }
            Some("play") => {
                let turn = usize::from(order.get("turn").and_then(Value::as_str) == Some("next"));
                let play = client::Play {
                    port: number("port") as u16,
                    connections: number("connections").max(1) as usize,
                    events: number("events") as usize,
                    pace_us: number("pace_us"),
                };
                client::play(&play, &chats.turn(turn))?
            }
            _ => return Err(format!("not understood: {line}")),
        };
        println!("{answer}");
        std::io::stdout().flush().map_err(|error| error.to_string())?;
    }
    Ok(())
}
