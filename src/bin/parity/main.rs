//! `warmpath-parity`: whether a live engine makes the same token ids of requests as the filter would.
//!
//! It plays requests against one engine and says of each whether the ids are equal, or where they first differ. It
//! measures nothing, and asks for one token of an answer.

mod oracle;
mod requests;
mod verdict;

use clap::Parser;
use oracle::Engine;
use requests::{Request, golden, of_file};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use verdict::{Reader, Verdict};
use warmpath::command;
use warmpath::config::Config;
use warmpath::model::Model;
use warmpath::rules::Rules;

/// Plays requests against a live engine and compares its token ids with the filter's.
///
/// Of each request it says one word. equal: the same ids. count: as many tokens, where the engine says no more. differs:
/// other ids or another number of them, and where they first differ. unsaid: the engine says only a number that is not of
/// this prompt alone. unread: the filter routes it by load, for the reason that follows. refused: the engine answers no
/// such request.
///
/// Exits with 0 when none differs, with 1 when one does, and with 2 when nothing could be compared.
#[derive(Parser)]
#[command(name = "warmpath-parity", version)]
struct Arguments {
    /// The engine, as http://host:port or https://host:port.
    url: String,
    /// The name that the engine serves the model by.
    #[arg(long)]
    model: String,
    /// What warmpath-prepare made of the model.
    #[arg(long, value_name = "FILE")]
    prepared: PathBuf,
    /// The filter's configuration (the JSON in the plugin's value), for what it says of how the model's engine reads
    /// prompts.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Requests of your own, one a line: a body, or {"path": ..., "body": ...}, with a "name" if you like. A body without
    /// a path goes to chat completions if it has messages, to responses if it has an input, else to completions. Repeatable.
    #[arg(long, value_name = "FILE")]
    requests: Vec<PathBuf>,
    /// Leaves the golden requests out, which are played otherwise.
    #[arg(long)]
    no_golden: bool,
    /// A header for each request, such as "authorization: Bearer ...". Repeatable.
    #[arg(long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// The engine's time zone, for templates that print the date: minutes east of UTC.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    utc_offset_minutes: i64,
    /// Prints only what differs, and the sum.
    #[arg(long)]
    quiet: bool,
    /// Writes what was found here, too, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(error) => {
            eprintln!("warmpath-parity: {error}");
            ExitCode::from(2)
        }
    }
}

/// Plays everything, and returns how many requests differ.
fn run(arguments: &Arguments) -> Result<usize, String> {
    command::writable(arguments.json.as_deref())?;
    let engine = Engine::new(&arguments.url, &arguments.headers)?;
    let reader = Reader {
        model: model(arguments)?,
        rules: rules(arguments)?,
        utc_offset_s: arguments.utc_offset_minutes.saturating_mul(60),
    };
    let requests = requests(arguments)?;
    // What is wrong here shows without an engine.
    engine.check()?;
    let mut rows = Vec::new();
    for request in requests {
        let verdict = verdict::of(&request, &reader, &engine);
        if !arguments.quiet || verdict.kind() == "differs" {
            let row = format_args!("{:9} {:44} {verdict}\n", verdict.kind(), request.name);
            command::print(row)?;
        }
        rows.push((request, verdict));
    }
    let counts = counts(&rows);
    let said: Vec<_> = counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    command::print(format_args!("{} requests: {}\n", rows.len(), said.join(", ")))?;
    if let Some(path) = &arguments.json {
        let json = verdict::json(&arguments.model, &rows);
        std::fs::write(path, json).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if !["equal", "count", "differs"].iter().any(|kind| counts.contains_key(kind)) {
        return Err("nothing could be compared".to_owned());
    }
    Ok(counts.get("differs").copied().unwrap_or(0))
}

fn model(arguments: &Arguments) -> Result<Model, String> {
    let path = arguments.prepared.display();
    let bytes = std::fs::read(&arguments.prepared).map_err(|error| format!("{path}: {error}"))?;
    Model::load(bytes).map_err(|error| format!("{path}: {error}"))
}

fn rules(arguments: &Arguments) -> Result<Arc<Rules>, String> {
    let Some(path) = &arguments.config else { return Ok(Arc::default()) };
    let at = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let json = std::fs::read(path).map_err(|error| at(&error))?;
    let config = Config::parse(&json).map_err(|error| at(&error))?;
    let index = config.model_named(Some(&arguments.model));
    let model = index.and_then(|index| config.models.get(index));
    let model = model.ok_or_else(|| at(&format!("no model is called {}", arguments.model)))?;
    Ok(Arc::clone(&model.rules))
}

fn requests(arguments: &Arguments) -> Result<Vec<Request>, String> {
    let mut requests = if arguments.no_golden { Vec::new() } else { golden() };
    for path in &arguments.requests {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| format!("{}: {error}", path.display()))?;
        requests.extend(of_file(&text).map_err(|error| format!("{}: {error}", path.display()))?);
    }
    for request in &mut requests {
        request.play_as(&arguments.model);
    }
    Ok(requests)
}

fn counts(rows: &[(Request, Verdict)]) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for (_, verdict) in rows {
        *counts.entry(verdict.kind()).or_default() += 1;
    }
    counts
}

/// The time where the engine is.
#[expect(clippy::disallowed_methods, reason = "a native command has a clock of its own")]
fn now(utc_offset_s: i64) -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_secs().saturating_add_signed(utc_offset_s)
}
