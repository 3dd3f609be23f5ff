//! The workload that both engines play: sessions of some turns whose prompts begin with one of a few heads.
//!
//! Prompts are blocks of ids that a block's number gives, so that the simulation needs the numbers only. Answers are not part
//! of the next prompt: a live engine's are not known beforehand.

use super::fit::{Fit, Point};
use super::probe::{Probe, ids};
use super::record::Record;
use crate::random::{LogNormal, Random};
use crate::simulate::{FleetConfig, Policy};
use crate::stats::Sample;
use crate::trace::{self, Trace};
use hashbrown::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};
use warmpath::mock::engine::EngineConfig;

/// Heads that sessions share.
const HEADS: usize = 4;
/// Blocks of a head.
const HEAD_BLOCKS: usize = 40;
/// Blocks that a turn adds.
const TURN_BLOCKS: LogNormal = LogNormal { median: 12.0, sigma: 0.9, least: 1.0, most: 120.0 };
/// Turns of a session, on average.
const TURNS: f64 = 3.0;
/// Tokens of an answer.
const ANSWER_TOKENS: LogNormal = LogNormal { median: 40.0, sigma: 0.5, least: 8.0, most: 120.0 };
/// Seconds between an answer and the next turn.
const THINK_SECONDS: LogNormal = LogNormal { median: 0.5, sigma: 0.8, least: 0.05, most: 3.0 };

/// One session.
pub struct Session {
    /// Where it begins, as a part of the whole time.
    pub arrival: f64,
    /// Its turns.
    pub turns: Vec<Turn>,
}

/// One request.
pub struct Turn {
    /// From the answer before it.
    pub think: Duration,
    /// What it adds to the prompt, by number.
    pub blocks: Vec<u64>,
    /// Tokens to answer with.
    pub answer_tokens: u32,
}

/// Plans the sessions.
pub fn plan(sessions: usize, seed: u64) -> Vec<Session> {
    let mut random = Random::new(seed, 31);
    let mut last = 0;
    let mut number = || {
        last += 1;
        (seed << 32) + last
    };
    let heads: Vec<Vec<u64>> =
        (0..HEADS).map(|_| (0..HEAD_BLOCKS).map(|_| number()).collect()).collect();
    let mut session = |_| {
        let head = heads.get(random.below(HEADS)).cloned().unwrap_or_default();
        let arrival = random.unit();
        let turns = (0..random.geometric(TURNS)).map(|at| {
            let fresh = random.lognormal(TURN_BLOCKS) as usize;
            let mut blocks = if at == 0 { head.clone() } else { Vec::new() };
            blocks.extend((0..fresh).map(|_| number()));
            Turn {
                think: Duration::from_secs_f64(if at == 0 {
                    0.0
                } else {
                    random.lognormal(THINK_SECONDS)
                }),
                blocks,
                answer_tokens: random.lognormal(ANSWER_TOKENS) as u32,
            }
        });
        Session { arrival, turns: turns.collect() }
    };
    (0..sessions).map(&mut session).collect()
}

/// Seconds that the plan keeps an engine busy: each prompt alone, less what any prompt before it had, and four answers at
/// once.
pub fn work(plan: &[Session], record: &Record, fit: Fit) -> f64 {
    let (block_size, tokens_per_step) = (record.facts.block_size, record.tokens_per_step);
    let mut known = HashSet::new();
    let mut seconds = 0.0;
    for session in plan {
        let mut before = 0;
        for turn in &session.turns {
            let fresh = turn.blocks.iter().filter(|block| known.insert(**block)).count();
            before += turn.blocks.len();
            let (prompt_tokens, cached_tokens) =
                (before * block_size, (before - fresh) * block_size);
            let first = Point::First { prompt_tokens, cached_tokens };
            let gap = fit.seconds(
                Point::Gap { sequences: 4, context: before * block_size },
                tokens_per_step,
            ) / 4.0;
            seconds += fit.seconds(first, tokens_per_step) - fit.overhead
                + gap * f64::from(turn.answer_tokens);
        }
    }
    seconds
}

/// Plays them on a live engine.
///
/// # Errors
/// When an answer is not whole.
pub async fn live(
    probe: &Probe,
    sessions: Vec<Session>,
    record: &Record,
) -> Result<Vec<Sample>, String> {
    let (over, block_size) = (Duration::from_secs_f64(record.seconds), record.facts.block_size);
    let start = Instant::now() + Duration::from_millis(100);
    let tasks: Vec<_> = sessions
        .into_iter()
        .map(|session| {
            let probe = Arc::new(probe.clone());
            let start = start + over.mul_f64(session.arrival);
            tokio::spawn(play(probe, session, start, block_size))
        })
        .collect();
    let mut samples = Vec::new();
    for task in tasks {
        samples.extend(task.await.map_err(|error| error.to_string())??);
    }
    Ok(samples)
}

/// Plays them on a simulated engine with the record's parameters. What a request takes outside of the engine's steps is
/// added to its times.
///
/// # Errors
/// When a prompt does not fit the engine.
pub fn simulated(plan: &[Session], record: &Record, fit: Fit) -> Result<Vec<Sample>, String> {
    let block_tokens = u32::try_from(record.facts.block_size).map_err(|error| error.to_string())?;
    let over = Duration::from_secs_f64(record.seconds);
    let sessions = plan.iter().enumerate().map(|(number, session)| {
        let mut kept = 0;
        let turns = session.turns.iter().map(|turn| {
            let keep = kept;
            kept += turn.blocks.len();
            trace::Turn {
                think: turn.think,
                keep,
                blocks: turn.blocks.clone(),
                prompt_tokens: kept as u32 * block_tokens,
                answer_blocks: Vec::new(),
                answer_tokens: turn.answer_tokens,
                class: "mixed",
            }
        });
        let (turns, arrival) = (turns.collect(), over.mul_f64(session.arrival));
        trace::Session { name: number.to_string(), arrival, turns }
    });
    let trace = Trace { name: "mixed".to_owned(), block_tokens, sessions: sessions.collect() };
    let mut engine = EngineConfig {
        block_size: record.facts.block_size,
        capacity_blocks: record.facts.capacity_blocks,
        max_num_batched_tokens: record.tokens_per_step,
        max_num_seqs: record.max_num_seqs,
        ..EngineConfig::default()
    };
    fit.apply(&mut engine);
    let fleet = FleetConfig::equal(1, engine, "{}")?;
    let mut samples = fleet.play(&trace, Policy::RoundRobin, record.seed)?;
    for sample in &mut samples {
        let outside = Duration::from_secs_f64(fit.outside(sample.prompt_tokens));
        sample.whole += outside;
        sample.first_token = sample.first_token.map(|first| first + outside);
    }
    Ok(samples)
}

async fn play(
    probe: Arc<Probe>,
    session: Session,
    mut at: Instant,
    block_size: usize,
) -> Result<Vec<Sample>, String> {
    let (mut samples, mut prompt) = (Vec::new(), Vec::new());
    for turn in session.turns {
        prompt.extend(turn.blocks.iter().flat_map(|block| ids(*block, block_size)));
        at += turn.think;
        sleep_until(at).await;
        samples.push(probe.ask(&prompt, turn.answer_tokens).await?);
        at = Instant::now();
    }
    Ok(samples)
}
