//! A trace by its name or its file.
//!
//! Names stand for the files in `tests/data/traces` and for the two workloads that are made up. Everything else is a
//! path, read in the format that is said, or that its first line shows.

use super::lines::Lines;
use super::measure::Measure;
use super::{Session, Trace, azure, chat, lmcache, mooncake, packed};
use crate::random::Random;
use crate::workload::{Plan, Workload};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// New blocks that a trace may have: half a gigabyte of ids. The largest one here has a twentieth of it.
const MAX_BLOCKS: usize = 64 << 20;

/// The longest prompt, in tokens: sixteen times the longest context of today's models. A number above it is a mistake in
/// the file, and is found before memory is filled by it.
pub const MAX_PROMPT_TOKENS: u32 = 1 << 24;

/// Between arrivals of sessions whose trace has no common clock, in the mean.
const MEAN_ARRIVAL: Duration = Duration::from_secs(10);

/// The lane of chance for those arrivals.
const ARRIVALS: u64 = 21;

/// How files are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Mooncake's JSON lines: `timestamp`, `input_length`, `output_length`, `hash_ids` of 512 tokens.
    Mooncake,
    /// Packed agent conversations: `id`, `block`, `tool_tokens`, `reqs`.
    Packed,
    /// LMCache's agent traces: `timestamp`, `input`, `output`, `session_id`.
    Lmcache,
    /// Azure's CSV of lengths: `TIMESTAMP,ContextTokens,GeneratedTokens`.
    Azure,
    /// Chats as JSON lines with `messages`, `question` or `turns`.
    Chat,
}

/// How a trace is read. `Default` is what the command line's defaults are.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// The folder of the traces that have names.
    #[arg(long = "traces", default_value = "tests/data/traces")]
    pub folder: PathBuf,
    /// The format of a file given by its path, where its first line does not show it.
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Tool descriptions (JSON, or JSON lines by file) that a chat trace's prompts begin with.
    #[arg(long)]
    pub tools: Option<PathBuf>,
    /// A file of `warmpath-prepare`, whose tokenizer texts are measured by. Without, four bytes make a token.
    #[arg(long)]
    pub prepared: Option<PathBuf>,
    /// Tokens per block, where the trace does not say.
    #[arg(long, default_value_t = 64)]
    pub block_tokens: u32,
    /// Seconds that a pause before a turn is cut to.
    #[arg(long, default_value_t = 60.0)]
    pub most_think: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            folder: PathBuf::from("tests/data/traces"),
            format: None,
            tools: None,
            prepared: None,
            block_tokens: 64,
            most_think: 60.0,
        }
    }
}

/// A trace that has a name.
struct Named {
    name: &'static str,
    file: &'static str,
    format: Format,
    tools: Option<&'static str>,
}

const fn named(name: &'static str, file: &'static str, format: Format) -> Named {
    Named { name, file, format, tools: None }
}

/// The traces that have names.
const NAMED: [Named; 9] = [
    named("mooncake", "mooncake_conversation.jsonl.zst", Format::Mooncake),
    named("claude_code", "claude_code_weka.jsonl.zst", Format::Packed),
    named("magagent", "lmcache_agent_magagent.jsonl.zst", Format::Lmcache),
    named("taubench", "lmcache_agent_taubench.jsonl.zst", Format::Lmcache),
    named("azure_code", "azure_llm_2023_code.csv.zst", Format::Azure),
    Named {
        name: "tau_airline",
        file: "tau_airline_gpt4o_trajectories.jsonl.zst",
        format: Format::Chat,
        tools: Some("tau_airline_tools.json"),
    },
    Named {
        name: "bfcl_multi_turn",
        file: "bfcl_multi_turn_base.jsonl.zst",
        format: Format::Chat,
        tools: Some("bfcl_func_docs.jsonl.zst"),
    },
    named("bfcl_parallel", "bfcl_parallel_multiple.jsonl.zst", Format::Chat),
    named("mt_bench", "mt_bench_question.jsonl", Format::Chat),
];

/// Every name that [`open`] knows.
pub fn names() -> impl Iterator<Item = &'static str> {
    let made_up = [Workload::Conversations.name(), Workload::NoReuse.name()];
    NAMED.iter().map(|named| named.name).chain(made_up)
}

/// Reads the trace of this name or in this file. The seed decides what the file does not say, such as when its sessions
/// arrive.
///
/// # Errors
/// When there is none, or it is not in its format; the text names file and line.
pub fn open(name: &str, options: &Options, seed: u64) -> Result<Trace, String> {
    let cap = Duration::try_from_secs_f64(options.most_think);
    let most_think = cap.map_err(|error| format!("--most-think: {error}"))?;
    if options.block_tokens == 0 {
        return Err("--block-tokens: a block has at least one token".to_owned());
    }
    if let Some(workload) = Workload::named(name) {
        let plan = Plan::new(workload, 1500, Duration::from_secs(20), seed);
        return Ok(Trace::of_plan(workload.name(), &plan, options.block_tokens));
    }
    let known = NAMED.iter().find(|named| named.name == name);
    let path = known.map_or(PathBuf::from(name), |known| options.folder.join(known.file));
    let format = match known.map(|known| known.format).or(options.format) {
        Some(format) => format,
        None => guess(&path)?,
    };
    let tools = known.and_then(|known| known.tools).map(|file| options.folder.join(file));
    let reading = Reading {
        measure: Measure::open(options.prepared.as_deref())?,
        tools: options.tools.clone().or(tools),
        block_tokens: options.block_tokens,
        most_think,
        ..Reading::new(seed)
    };
    let label = known.map_or_else(|| file_stem(&path), |known| known.name.to_owned());
    reading.read(label, Lines::open(&path)?, format)
}

fn file_stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.split('.').next().unwrap_or_default().to_owned()
}

/// What a file's first line looks like.
fn guess(path: &Path) -> Result<Format, String> {
    let mut lines = Lines::open(path)?;
    let first = lines.next_line()?.unwrap_or_default();
    let has = |key: &str| first.contains(&format!("\"{key}\""));
    if has("hash_ids") {
        Ok(Format::Mooncake)
    } else if has("reqs") {
        Ok(Format::Packed)
    } else if has("session_id") && has("input") {
        Ok(Format::Lmcache)
    } else if first.starts_with(azure::HEADING) {
        Ok(Format::Azure)
    } else if has("messages") || has("question") || has("turns") {
        Ok(Format::Chat)
    } else {
        let known: Vec<&str> = names().collect();
        let known = known.join(", ");
        Err(lines.error(format_args!("no known format; name one with --format. Names: {known}")))
    }
}

/// A trace on its way from a file.
pub struct Reading {
    /// How texts are measured.
    pub measure: Measure,
    /// What chats' prompts begin with.
    pub tools: Option<PathBuf>,
    /// Tokens per block, where the file does not say.
    pub block_tokens: u32,
    /// Decides what the file does not say.
    pub seed: u64,
    most_think: Duration,
    arrivals: Random,
    clock: f64,
    sessions: Vec<Session>,
    blocks: usize,
}

impl Reading {
    fn new(seed: u64) -> Self {
        Self {
            measure: Measure::Bytes,
            tools: None,
            block_tokens: 64,
            seed,
            most_think: Duration::MAX,
            arrivals: Random::new(seed, ARRIVALS),
            clock: 0.0,
            sessions: Vec::new(),
            blocks: 0,
        }
    }

    /// Reads a text as if it were in a file named `f`.
    #[cfg(test)]
    pub fn text(text: &str, format: Format) -> Result<Trace, String> {
        Self::new(1).read("t".to_owned(), Lines::of("f", text), format)
    }

    fn read(mut self, name: String, mut lines: Lines, format: Format) -> Result<Trace, String> {
        let block_tokens = match format {
            Format::Mooncake => mooncake::read(&mut self, &mut lines),
            Format::Packed => packed::read(&mut self, &mut lines),
            Format::Lmcache => lmcache::read(&mut self, &mut lines),
            Format::Azure => azure::read(&mut self, &mut lines),
            Format::Chat => chat::read(&mut self, &mut lines),
        }?;
        if self.sessions.is_empty() {
            return Err(lines.error_in_file("no requests"));
        }
        let mut sessions = self.sessions;
        sessions.sort_by_key(|session| session.arrival);
        Ok(Trace { name, block_tokens, sessions })
    }

    /// A pause, cut to the longest.
    pub fn think(&self, pause: Duration) -> Duration {
        pause.min(self.most_think)
    }

    /// When the next session arrives, in a trace that does not say: at random, on average every ten seconds. Scaling
    /// to a load replaces it.
    pub fn next_arrival(&mut self) -> Duration {
        self.clock -= MEAN_ARRIVAL.as_secs_f64() * (1.0 - self.arrivals.unit()).ln();
        Duration::try_from_secs_f64(self.clock).unwrap_or_default()
    }

    /// Counts blocks before they are kept.
    ///
    /// # Errors
    /// When the trace has more than fit in memory.
    pub fn count(&mut self, blocks: usize, lines: &Lines) -> Result<(), String> {
        self.blocks = self.blocks.saturating_add(blocks);
        if self.blocks > MAX_BLOCKS {
            return Err(lines.error(format_args!("more than {MAX_BLOCKS} blocks so far")));
        }
        Ok(())
    }

    /// Takes a session that has turns. An engine is asked for a token at least, about one at least.
    pub fn add(&mut self, mut session: Session) {
        for turn in &mut session.turns {
            turn.prompt_tokens = turn.prompt_tokens.max(1);
            turn.answer_tokens = turn.answer_tokens.max(1);
        }
        if !session.turns.is_empty() {
            self.sessions.push(session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::Shape;
    use super::*;

    fn shape(name: &str, block_tokens: u32) -> Shape {
        Shape::of(&open(name, &Options { block_tokens, ..Options::default() }, 1).unwrap())
    }

    #[track_caller]
    fn check_close(actual: f64, expected: f64, tolerance: f64) {
        assert!((actual - expected).abs() <= tolerance, "{actual} is not near {expected}");
    }

    /// The figures of tests/data/traces/stats.json, which an independent program counted.
    #[track_caller]
    fn check(
        shape: &Shape,
        [requests, blocks, unique]: [u64; 3],
        hit_blocks: f64,
        hit_tokens: f64,
    ) {
        assert_eq!(
            [shape.requests as u64, shape.blocks, shape.unique_blocks],
            [requests, blocks, unique]
        );
        check_close(shape.hit_blocks, hit_blocks, 5e-5);
        check_close(shape.hit_tokens, hit_tokens, 5e-5);
    }

    #[test]
    fn packed_agent_traces_have_the_published_figures() {
        let shape = shape("claude_code", 64);
        check(&shape, [49_334, 94_310_647, 3_338_425], 0.9646, 0.9644);
        assert_eq!(shape.prompt_tokens, [122_379, 103_662, 233_633, 894_371]);
        assert_eq!(shape.answer_tokens[..3], [440, 216, 898]);
        check_close(shape.reuse, 0.9971, 5e-5);
        // 710 conversations and 63 sub-agents.
        assert_eq!(shape.sessions, 773);
    }

    #[test]
    fn lengths_alone_share_nothing() {
        let shape = shape("azure_code", 64);
        assert_eq!((shape.requests, shape.sessions, shape.hit_blocks), (8819, 8819, 0.0));
        assert_eq!(shape.prompt_tokens[..3], [2048, 1469, 5194]);
        assert_eq!(shape.answer_tokens[..3], [28, 13, 55]);
        check_close(shape.span.as_secs_f64(), 3435.9, 0.1);
    }

    #[test]
    fn every_name_is_a_trace_whose_equal_blocks_have_equal_beginnings() {
        // The packed one is too large for a check of every block in a test, and its own figures would show it.
        for name in names().filter(|name| *name != "claude_code") {
            let trace = open(name, &Options::default(), 1).unwrap();
            let mut parents = hashbrown::HashMap::new();
            let mut chain = Vec::new();
            for (number, session) in trace.sessions.iter().enumerate() {
                chain.clear();
                for (index, turn) in session.turns.iter().enumerate() {
                    trace.advance(number, index, &mut chain);
                    let full = turn.prompt_tokens / trace.block_tokens;
                    assert_eq!(chain.len() as u32, full, "{name} {} {index}", session.name);
                    let behind = turn.keep.checked_sub(1).and_then(|last| chain.get(last)).copied();
                    let mut parent = behind;
                    for block in turn.blocks.iter().chain(&turn.answer_blocks) {
                        assert_eq!(*parents.entry(*block).or_insert(parent), parent, "{name}");
                        parent = Some(*block);
                    }
                }
            }
            assert!(trace.sessions.is_sorted_by_key(|session| session.arrival), "{name}");
        }
    }

    #[test]
    fn one_seed_gives_one_trace() {
        let open = |seed| open("mt_bench", &Options::default(), seed).unwrap();
        assert_eq!(open(1), open(1));
        assert_ne!(open(1), open(2));
    }

    #[test]
    fn names_paths_and_formats_that_are_not_there_are_errors() {
        let error = |name| open(name, &Options::default(), 1).unwrap_err();
        assert!(error("no_such_trace").starts_with("no_such_trace: "));
        let text = error("Cargo.toml");
        assert!(text.starts_with(
            "Cargo.toml:1: no known format; name one with --format. Names: mooncake, "
        ));
        let options = Options { format: Some(Format::Azure), ..Options::default() };
        let error = open("Cargo.toml", &options, 1).unwrap_err();
        assert_eq!(error, "Cargo.toml:1: expected TIMESTAMP,ContextTokens,GeneratedTokens");
        let options = Options { most_think: -1.0, ..Options::default() };
        assert!(open("mooncake", &options, 1).unwrap_err().starts_with("--most-think: "));
    }

    #[test]
    fn a_file_shows_its_format() {
        let path = "tests/data/traces/lmcache_agent_taubench.jsonl.zst";
        let trace = open(path, &Options::default(), 1).unwrap();
        assert_eq!((trace.name.as_str(), trace.requests()), ("lmcache_agent_taubench", 471));
    }
}
