//! An engine's parameters out of what was measured of it.
//!
//! Every time is a sum of the same seven unknowns, each times something known:
//!
//! - the first token after `p` prompt tokens of which `c` were cached: `overhead + p x reading + steps x step_base
//!   + (p - c) / prefill_rate + (p - c) (c + (p - c) / 2) / attention_rate`, with as many steps as `p - c` makes;
//! - the gap between tokens while `n` sequences decode: `step_base + n x decode_per_sequence + n x context / context_rate`,
//!   with as many tokens of context as each has before it.
//!
//! So one linear system over all of them, in which every row is divided by its measurement (a per cent of a short time
//! counts as much as one of a long time) and rows far off weigh less (Huber). No unknown is negative: one that would be is
//! nothing. `overhead` and `reading` lie outside of the engine's steps: the front end that parses a prompt and hashes its
//! blocks, the connection, this client.

use serde_json::{Value, json};
use std::fmt;
use std::time::Duration;
use warmpath::mock::engine::EngineConfig;

/// A median of some measurements of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Point {
    /// The first token of a prompt alone in the engine.
    First {
        /// Its length.
        prompt_tokens: usize,
        /// The part of it that is cached.
        cached_tokens: usize,
    },
    /// The gap between tokens.
    Gap {
        /// How many sequences decode.
        sequences: usize,
        /// Tokens before the answer of each.
        context: usize,
    },
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First { prompt_tokens, cached_tokens } => {
                write!(f, "first token, prompt of {prompt_tokens}, {cached_tokens} cached")
            }
            Self::Gap { sequences, context } => {
                write!(f, "gap, {sequences} sequences behind {context} tokens each")
            }
        }
    }
}

/// A point and how long it took, in seconds.
pub type Measured = (Point, f64);

/// The unknowns.
const UNKNOWNS: usize = 7;
/// Off by more than this part, a row begins to weigh less. Twice as much and a burst of another program's work on the same
/// machine bends the fit; half, and the points that show the attention's share count as outliers.
const OUTLIER: f64 = 0.1;
/// Rounds of weighing anew; it stands still after some ten.
const ROUNDS: usize = 50;

/// What the engine's times are made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fit {
    /// Seconds that a request takes outside of the engine's steps.
    pub overhead: f64,
    /// Seconds of that per prompt token, cached or not.
    pub reading: f64,
    /// Seconds of a step that does nothing else.
    pub step_base: f64,
    /// Seconds per prompt token.
    pub per_token: f64,
    /// Seconds per pair of tokens.
    pub per_pair: f64,
    /// Seconds that each decoding sequence adds.
    pub per_sequence: f64,
    /// Seconds that each token before a decoding sequence adds.
    pub per_context: f64,
}

impl Fit {
    /// Of these measurements, for an engine that computes so many tokens a step.
    ///
    /// # Errors
    /// When they do not determine the unknowns.
    pub fn of(measured: &[Measured], tokens_per_step: usize) -> Result<Self, String> {
        let rows: Vec<[f64; UNKNOWNS]> =
            measured.iter().map(|(point, _)| row(*point, tokens_per_step)).collect();
        let mut weights = vec![1.0; rows.len()];
        let mut fit = Self::unpack([0.0; UNKNOWNS]);
        for _ in 0..ROUNDS {
            fit = Self::unpack(not_negative(&rows, measured, &weights)?);
            for (weight, (point, seconds)) in weights.iter_mut().zip(measured) {
                let off = (fit.seconds(*point, tokens_per_step) / seconds - 1.0).abs();
                *weight = if off > OUTLIER { OUTLIER / off } else { 1.0 };
            }
        }
        Ok(fit)
    }

    /// Seconds that a request takes outside of the engine's steps.
    pub fn outside(&self, prompt_tokens: u64) -> f64 {
        self.overhead + self.reading * prompt_tokens as f64
    }

    /// How long the fit says that a point takes.
    pub fn seconds(&self, point: Point, tokens_per_step: usize) -> f64 {
        row(point, tokens_per_step)
            .iter()
            .zip(self.pack())
            .map(|(known, value)| known * value)
            .sum()
    }

    /// The parameters put into a configuration.
    pub fn apply(&self, engine: &mut EngineConfig) {
        let rate = |seconds: f64| if seconds > 0.0 { 1.0 / seconds } else { f64::INFINITY };
        engine.step_base = Duration::from_secs_f64(self.step_base);
        engine.prefill_rate = rate(self.per_token);
        engine.attention_rate = rate(self.per_pair);
        engine.decode_per_sequence = Duration::from_secs_f64(self.per_sequence);
    }

    /// As it stands in the record.
    pub fn to_json(self) -> Value {
        let rate =
            |seconds: f64| if seconds > 0.0 { json!((1.0 / seconds).round()) } else { Value::Null };
        json!({
            "overhead_ms": self.overhead * 1e3,
            "reading_us_per_token": self.reading * 1e6,
            "step_base_ms": self.step_base * 1e3,
            "prefill_tokens_per_s": rate(self.per_token),
            "attention_pairs_per_s": rate(self.per_pair),
            "decode_per_sequence_ms": self.per_sequence * 1e3,
            "context_tokens_per_s": rate(self.per_context),
        })
    }

    fn pack(&self) -> [f64; UNKNOWNS] {
        [
            self.overhead,
            self.reading,
            self.step_base,
            self.per_token,
            self.per_pair,
            self.per_sequence,
            self.per_context,
        ]
    }

    fn unpack(values: [f64; UNKNOWNS]) -> Self {
        let [overhead, reading, step_base, per_token, per_pair, per_sequence, per_context] = values;
        Self { overhead, reading, step_base, per_token, per_pair, per_sequence, per_context }
    }
}

/// What each unknown is multiplied by.
fn row(point: Point, tokens_per_step: usize) -> [f64; UNKNOWNS] {
    match point {
        Point::First { prompt_tokens, cached_tokens } => {
            let new = prompt_tokens.saturating_sub(cached_tokens);
            let pairs = new as f64 * (cached_tokens as f64 + new as f64 / 2.0);
            let steps = new.div_ceil(tokens_per_step.max(1)) as f64;
            [1.0, prompt_tokens as f64, steps, new as f64, pairs, 0.0, 0.0]
        }
        Point::Gap { sequences, context } => {
            let read = (sequences * context) as f64;
            [0.0, 0.0, 1.0, 0.0, 0.0, sequences as f64, read]
        }
    }
}

/// Least squares in which what comes out negative is left out, the most negative first.
fn not_negative(
    rows: &[[f64; UNKNOWNS]],
    measured: &[Measured],
    weights: &[f64],
) -> Result<[f64; UNKNOWNS], String> {
    // Where all contexts are as long, theirs and the sequences' own share cannot be told apart.
    let mut contexts = measured.iter().filter_map(|(point, _)| match point {
        Point::Gap { context, .. } => Some(context),
        Point::First { .. } => None,
    });
    let first = contexts.next();
    let mut kept = [true; UNKNOWNS];
    kept[UNKNOWNS - 1] = contexts.any(|context| Some(context) != first);
    loop {
        let solution = least_squares(rows, measured, weights, kept)
            .ok_or("the measurements do not determine the engine's parameters")?;
        let lowest = solution.iter().copied().fold(0.0, f64::min);
        if lowest >= 0.0 {
            return Ok(solution);
        }
        for (kept, value) in kept.iter_mut().zip(solution) {
            *kept &= value > lowest;
        }
    }
}

/// The solution in the unknowns that are kept; the others are zero.
fn least_squares(
    rows: &[[f64; UNKNOWNS]],
    measured: &[Measured],
    weights: &[f64],
    kept: [bool; UNKNOWNS],
) -> Option<[f64; UNKNOWNS]> {
    let largest = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).copied().fold(f64::MIN_POSITIVE, f64::max)
    };
    // Pairs are billions and steps are few: without this the elimination would lose the small ones.
    let scales: Vec<f64> = (0..UNKNOWNS).map(largest).collect();
    let mut normal = [[0.0; UNKNOWNS + 1]; UNKNOWNS];
    for ((row, (_, seconds)), weight) in rows.iter().zip(measured).zip(weights) {
        let scaled: Vec<f64> =
            row.iter().zip(&scales).map(|(known, scale)| known / scale / seconds).collect();
        for (equation, left) in normal.iter_mut().zip(&scaled) {
            for (cell, right) in equation.iter_mut().zip(scaled.iter().chain([&1.0])) {
                *cell += weight * left * right;
            }
        }
    }
    for (at, equation) in normal.iter_mut().enumerate() {
        if !*kept.get(at)? {
            *equation = [0.0; UNKNOWNS + 1];
            *equation.get_mut(at)? = 1.0;
        } else {
            for (cell, kept) in equation.iter_mut().zip(kept) {
                *cell *= f64::from(u8::from(kept));
            }
        }
    }
    let mut solution = eliminate(normal)?;
    for (value, scale) in solution.iter_mut().zip(scales) {
        *value /= scale;
    }
    Some(solution)
}

/// Solves the equations, the last column being their right side; none when they are not independent.
fn eliminate(mut equations: [[f64; UNKNOWNS + 1]; UNKNOWNS]) -> Option<[f64; UNKNOWNS]> {
    for at in 0..UNKNOWNS {
        let size = |row: &usize| {
            equations.get(*row).and_then(|row| row.get(at)).map_or(0.0, |cell| cell.abs())
        };
        let pivot = (at..UNKNOWNS).max_by(|a, b| size(a).total_cmp(&size(b)))?;
        equations.swap(at, pivot);
        let pivot = *equations.get(at)?;
        let head = *pivot.get(at)?;
        if head.abs() < 1e-12 {
            return None;
        }
        for (row, equation) in equations.iter_mut().enumerate() {
            let factor = equation.get(at)? / head;
            if row != at {
                for (cell, above) in equation.iter_mut().zip(pivot) {
                    *cell -= factor * above;
                }
            }
        }
    }
    let mut solution = [0.0; UNKNOWNS];
    for (at, value) in solution.iter_mut().enumerate() {
        let equation = equations.get(at)?;
        *value = equation.get(UNKNOWNS)? / equation.get(at)?;
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUE: Fit = Fit {
        overhead: 0.004,
        reading: 2e-6,
        step_base: 0.006,
        per_token: 1.0 / 40_000.0,
        per_pair: 1.0 / 3e8,
        per_sequence: 0.0004,
        per_context: 1.0 / 4e6,
    };

    fn points() -> Vec<Point> {
        let cold = [64, 256, 1024, 2048, 4096, 8192, 16_000];
        let hit = [(4096, 2048), (8192, 4096), (16_000, 12_800), (16_000, 15_968)];
        let cold = cold.map(|prompt_tokens| Point::First { prompt_tokens, cached_tokens: 0 });
        let hit =
            hit.map(|(prompt_tokens, cached_tokens)| Point::First { prompt_tokens, cached_tokens });
        let gaps = [(1, 96), (2, 96), (4, 96), (8, 96), (16, 96), (1, 8192), (8, 4096)];
        let gaps = gaps.map(|(sequences, context)| Point::Gap { sequences, context });
        cold.into_iter().chain(hit).chain(gaps).collect()
    }

    fn exact(truth: Fit) -> Vec<Measured> {
        points().into_iter().map(|point| (point, truth.seconds(point, 2048))).collect()
    }

    #[track_caller]
    fn check_close(found: Fit, expected: Fit, part: f64) {
        for (found, expected) in found.pack().into_iter().zip(expected.pack()) {
            let off = (found - expected).abs();
            assert!(off <= part * expected + 1e-12, "{found} is not near {expected}");
        }
    }

    #[test]
    fn exact_times_give_their_parameters_back() {
        check_close(Fit::of(&exact(TRUE), 2048).unwrap(), TRUE, 1e-6);
    }

    #[test]
    fn what_takes_no_time_is_nothing_and_never_less() {
        let truth = Fit { overhead: 0.0, per_pair: 0.0, ..TRUE };
        let mut measured = exact(truth);
        for (at, (_, seconds)) in measured.iter_mut().enumerate() {
            *seconds *= if at % 2 == 0 { 0.99 } else { 1.01 };
        }
        let fit = Fit::of(&measured, 2048).unwrap();
        assert!(fit.pack().iter().all(|value| *value >= 0.0), "{fit:?}");
        assert!((fit.step_base / TRUE.step_base - 1.0).abs() < 0.05, "{fit:?}");
    }

    #[test]
    fn one_point_far_off_moves_the_fit_little() {
        let mut measured = exact(TRUE);
        if let Some((_, seconds)) = measured.get_mut(3) {
            *seconds *= 3.0;
        }
        check_close(Fit::of(&measured, 2048).unwrap(), TRUE, 0.1);
    }

    #[test]
    fn too_few_points_are_an_error() {
        let gaps = [1, 2].map(|sequences| (Point::Gap { sequences, context: 96 }, 0.01));
        assert!(Fit::of(&gaps, 2048).is_err());
    }

    #[test]
    fn a_configuration_takes_as_long_as_the_fit() {
        let mut engine = EngineConfig::default();
        Fit { per_pair: 0.0, ..TRUE }.apply(&mut engine);
        assert_eq!(engine.step_base, Duration::from_millis(6));
        assert_eq!(engine.decode_per_sequence, Duration::from_micros(400));
        assert_eq!((engine.prefill_rate.round(), engine.attention_rate), (40_000.0, f64::INFINITY));
    }
}
