//! What is measured of an engine: first tokens of prompts alone, cold and partly cached, and gaps at several concurrencies.
//!
//! Points are measured in turns, all of them once and then all again, so that a busy minute of the machine reaches every
//! point and not one of them.

use super::fit::{Measured, Point};
use super::probe::{Probe, ids};
use crate::gaps::Gaps;
use std::collections::BTreeMap;

/// Prompt lengths, up to the longest wanted.
const LENGTHS: [usize; 9] = [64, 128, 512, 1024, 2048, 4096, 8192, 16_000, 32_000];
/// Parts of a prompt that are cached.
const CACHED: [f64; 3] = [0.5, 0.8, 1.0];
/// Sequences that decode at once.
const SEQUENCES: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Tokens before them: next to none for all of those, and much for some.
const NO_CONTEXT: usize = 96;
const CONTEXTS: [(usize, usize); 5] = [(1, 4096), (4, 4096), (8, 4096), (1, 15_000), (4, 15_000)];
/// Gaps of each decoding sequence.
const GAPS: u32 = 48;
/// Shorter prompts are not measured with a cached head: their time is all overhead.
const SHORTEST_HIT: usize = 512;
/// Requests whose times do not count: an engine's first ones build what later ones use.
const WARM_UP: usize = 4;

/// All repeats of every point, in seconds.
pub type Measurement = BTreeMap<Point, Vec<f64>>;

/// What to measure.
pub struct Wanted {
    /// Times of each point.
    pub repeats: usize,
    /// Tokens of the longest prompt.
    pub longest: usize,
    /// Requests that the engine runs at once.
    pub max_num_seqs: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Of the prompts.
    pub seed: u64,
}

/// Measures everything.
///
/// # Errors
/// When an answer is not whole, or a prompt that should be new is known.
pub async fn all(probe: &Probe, wanted: &Wanted) -> Result<Measurement, String> {
    let mut prompts = Prompts(wanted.seed << 32);
    for _ in 0..WARM_UP {
        probe.ask(&prompts.next(1024), 8).await?;
    }
    let mut decoding: Vec<(usize, usize)> = SEQUENCES.map(|count| (count, NO_CONTEXT)).to_vec();
    decoding.extend(CONTEXTS);
    decoding.retain(|(sequences, context)| {
        *sequences <= wanted.max_num_seqs && *context <= wanted.longest
    });
    let mut measurement = Measurement::new();
    for repeat in 0..wanted.repeats {
        eprintln!("  measuring, {} of {}", repeat + 1, wanted.repeats);
        for length in LENGTHS.into_iter().filter(|length| *length <= wanted.longest) {
            first_tokens(probe, wanted, length, &mut prompts, &mut measurement).await?;
        }
        for &(sequences, context) in &decoding {
            let gap = gap(probe, sequences, context, wanted.seed).await?;
            let point = Point::Gap { sequences, context };
            measurement.entry(point).or_default().push(gap);
        }
    }
    Ok(measurement)
}

/// The median of each point.
pub fn medians(measurement: &Measurement) -> Vec<Measured> {
    measurement.iter().map(|(point, seconds)| (*point, median(seconds.clone()))).collect()
}

/// One prompt cold, and then prompts that begin as it does.
async fn first_tokens(
    probe: &Probe,
    wanted: &Wanted,
    length: usize,
    prompts: &mut Prompts,
    measurement: &mut Measurement,
) -> Result<(), String> {
    let prompt = prompts.next(length);
    let (cold, seconds) = first_token(probe, &prompt).await?;
    if !matches!(cold, Point::First { cached_tokens: 0, .. }) {
        return Err(
            "the engine knows a prompt that should be new: restart it, or give another --seed"
                .to_owned(),
        );
    }
    measurement.entry(cold).or_default().push(seconds);
    for part in CACHED {
        let kept = (length as f64 * part) as usize / wanted.block_size * wanted.block_size;
        if length >= SHORTEST_HIT {
            let same = prompt.iter().take(kept).copied();
            let other: Vec<u32> = same.chain(prompts.next(length - kept)).collect();
            let (hit, seconds) = first_token(probe, &other).await?;
            measurement.entry(hit).or_default().push(seconds);
        }
    }
    Ok(())
}

async fn first_token(probe: &Probe, prompt: &[u32]) -> Result<(Point, f64), String> {
    let sample = probe.ask(prompt, 1).await?;
    let (prompt_tokens, cached_tokens) = (prompt.len(), sample.cached_tokens as usize);
    let seconds = sample.first_token.unwrap_or_default().as_secs_f64();
    Ok((Point::First { prompt_tokens, cached_tokens }, seconds))
}

/// The median gap of so many sequences that decode at the same time. Their prompts are the same each time: what is cached begins
/// to decode at once.
async fn gap(probe: &Probe, sequences: usize, context: usize, seed: u64) -> Result<f64, String> {
    let prompts = (0..sequences).map(|number| ids((seed << 48) + number as u64, context));
    let prompts: Vec<Vec<u32>> = prompts.collect();
    if context > NO_CONTEXT {
        for prompt in &prompts {
            probe.ask(prompt, 1).await?;
        }
    }
    let asked: Vec<_> = prompts
        .into_iter()
        .map(|prompt| {
            let probe = probe.clone();
            tokio::spawn(async move { probe.ask(&prompt, GAPS).await })
        })
        .collect();
    let mut gaps = Vec::new();
    for answer in asked {
        gaps.push(answer.await.map_err(|error| error.to_string())??.gaps);
    }
    // Those at the ends are not all alone with the others, but the median is.
    let [median] = Gaps::quantiles(gaps.iter(), [0.5]);
    Ok(median.as_secs_f64())
}

/// Prompts of which no two begin alike.
struct Prompts(u64);

impl Prompts {
    fn next(&mut self, tokens: usize) -> Vec<u32> {
        self.0 += 1;
        ids(self.0, tokens)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_one_of_the_values() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![2.0, 1.0]), 2.0);
        assert_eq!(median(Vec::new()), 0.0);
    }

    #[test]
    fn no_two_prompts_begin_alike() {
        let mut prompts = Prompts(7);
        assert_ne!(prompts.next(4), prompts.next(4));
    }
}
