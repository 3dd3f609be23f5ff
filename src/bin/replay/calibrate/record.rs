//! What a measurement leaves behind: enough to fit and simulate again without the engine.

use super::fit::{Fit, Point};
use super::measure::{self, Measurement};
use super::probe::Facts;
use crate::stats::Run;
use serde_json::{Value, json};
use std::path::Path;

/// One engine, measured.
pub struct Record {
    /// What the engine says of itself.
    pub facts: Facts,
    /// Tokens that it computes in a step.
    pub tokens_per_step: usize,
    /// Requests that it runs at once.
    pub max_num_seqs: usize,
    /// Of the prompts and the mixed workload.
    pub seed: u64,
    /// Sessions of the mixed workload.
    pub sessions: usize,
    /// Over which those arrived.
    pub seconds: f64,
    /// All that was measured.
    pub measurement: Measurement,
    /// The mixed workload on the live engine.
    pub live: Run,
}

impl Record {
    /// The parameters that fit the measurements.
    ///
    /// # Errors
    /// When there are too few.
    pub fn fit(&self) -> Result<Fit, String> {
        Fit::of(&measure::medians(&self.measurement), self.tokens_per_step)
    }

    /// Reads what [`Record::write`] wrote.
    ///
    /// # Errors
    /// When the file cannot be read or is not such a record.
    pub fn read(path: &Path) -> Result<Self, String> {
        let name = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
        let value = serde_json::from_str(&text).map_err(|error| format!("{name}: {error}"))?;
        Self::from_json(&value).ok_or_else(|| format!("{name}: not a calibration"))
    }

    /// Writes the record, and the parameters with it for those who only want these.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path, fit: Fit) -> Result<(), String> {
        let mut value = self.to_json();
        if let Some(fields) = value.as_object_mut() {
            fields.insert("parameters".to_owned(), fit.to_json());
        }
        let text = format!("{value:#}\n");
        std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn to_json(&self) -> Value {
        let point = |(point, seconds): (&Point, &Vec<f64>)| {
            // On one line, since a thousand lines of numbers tell nobody anything.
            let times: Vec<String> = seconds.iter().map(|s| format!("{:.2}", s * 1e3)).collect();
            let times = times.join(" ");
            match point {
                Point::First { prompt_tokens, cached_tokens } => {
                    json!({ "prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "first_token_ms": times })
                }
                Point::Gap { sequences, context } => {
                    json!({ "sequences": sequences, "context": context, "gap_ms": times })
                }
            }
        };
        json!({
            "engine": self.facts.version,
            "block_size": self.facts.block_size,
            "capacity_blocks": self.facts.capacity_blocks,
            "tokens_per_step": self.tokens_per_step,
            "max_num_seqs": self.max_num_seqs,
            "seed": self.seed,
            "sessions": self.sessions,
            "seconds": self.seconds,
            "measured": self.measurement.iter().map(point).collect::<Vec<_>>(),
            "live": self.live.to_json(),
        })
    }

    fn from_json(value: &Value) -> Option<Self> {
        let number = |key: &str| value.get(key)?.as_u64();
        let size = |key: &str| usize::try_from(number(key)?).ok();
        let mut measurement = Measurement::new();
        for measured in value.get("measured")?.as_array()? {
            let (point, seconds) = point(measured)?;
            measurement.insert(point, seconds);
        }
        Some(Self {
            facts: Facts {
                version: value.get("engine")?.as_str()?.to_owned(),
                block_size: size("block_size")?,
                capacity_blocks: number("capacity_blocks")?.try_into().ok()?,
            },
            tokens_per_step: size("tokens_per_step")?,
            max_num_seqs: size("max_num_seqs")?,
            seed: number("seed")?,
            sessions: size("sessions")?,
            seconds: value.get("seconds")?.as_f64()?,
            measurement,
            live: Run::from_json(value.get("live")?)?,
        })
    }
}

fn point(value: &Value) -> Option<(Point, Vec<f64>)> {
    let size = |key: &str| usize::try_from(value.get(key)?.as_u64()?).ok();
    let times = |key: &str| {
        let text = value.get(key)?.as_str()?;
        text.split(' ').map(|time| Some(time.parse::<f64>().ok()? / 1e3)).collect::<Option<_>>()
    };
    if let Some(sequences) = size("sequences") {
        return Some((Point::Gap { sequences, context: size("context")? }, times("gap_ms")?));
    }
    let (prompt_tokens, cached_tokens) = (size("prompt_tokens")?, size("cached_tokens")?);
    Some((Point::First { prompt_tokens, cached_tokens }, times("first_token_ms")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back() {
        let first = Point::First { prompt_tokens: 512, cached_tokens: 256 };
        let record = Record {
            facts: Facts { version: "vLLM 1".to_owned(), block_size: 32, capacity_blocks: 100 },
            tokens_per_step: 2048,
            max_num_seqs: 16,
            seed: 3,
            sessions: 60,
            seconds: 30.5,
            measurement: [
                (first, vec![0.01, 0.02]),
                (Point::Gap { sequences: 4, context: 96 }, vec![0.5]),
            ]
            .into(),
            live: Run::default(),
        };
        let json = record.to_json();
        let read = Record::from_json(&json).unwrap();
        assert_eq!(read.measurement, record.measurement);
        assert_eq!(read.to_json(), json);
        assert!(Record::from_json(&json!({ "engine": "x" })).is_none());
    }

    #[test]
    fn the_simulated_engine_takes_as_long_as_the_one_that_was_measured() {
        let record =
            Record::read(Path::new("tests/data/calibration/vllm-0.32.0-cpu.json")).unwrap();
        let fit = record.fit().unwrap();
        let mut off: Vec<f64> = measure::medians(&record.measurement)
            .iter()
            .map(|(point, seconds)| {
                (fit.seconds(*point, record.tokens_per_step) / seconds - 1.0).abs()
            })
            .collect();
        off.sort_unstable_by(f64::total_cmp);
        assert!(off.len() > 25);
        let (half, most) = (off[off.len() / 2], off[off.len() - 1]);
        assert!(half < 0.08 && most < 0.35, "off by {half} in the median, {most} at most");
    }
}
