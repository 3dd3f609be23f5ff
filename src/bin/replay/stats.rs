//! Statistics of a played workload: exact quantiles and the record written for each run.
//!
//! Every sample is kept and sorted. Nothing is binned or sketched: a table that compares tails
//! within a few per cent cannot afford a histogram's error.

use crate::gaps::Gaps;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// What one request showed.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// Who served it, by the mock replica's response header.
    pub replica: Option<String>,
    /// What kind of request it was.
    pub class: &'static str,
    /// When it was sent, from the start.
    pub arrival: Duration,
    /// How much later than planned it was sent.
    pub lag: Duration,
    /// From sending to the first content event.
    pub first_token: Option<Duration>,
    /// Between content events.
    pub gaps: Gaps,
    /// From sending to the end of the stream.
    pub whole: Duration,
    /// Prompt tokens, as the replica counted them.
    pub prompt_tokens: u64,
    /// Those of them that the replica did not compute.
    pub cached_tokens: u64,
    /// Those that the policy expected to be cached, if it expected any number.
    pub predicted_tokens: Option<u64>,
    /// When the policy expected the first token, if it expected any time.
    pub expected_first_token: Option<Duration>,
    /// Why the replica was chosen, in a word, if there is one.
    pub reason: &'static str,
    /// Attempts that failed before the one that did not.
    pub failures: u32,
    /// What went wrong, if anything did.
    pub error: Option<String>,
}

/// Three quantiles in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Quantiles {
    /// The median.
    pub p50: f64,
    /// Nine in ten are at or below it.
    pub p90: f64,
    /// Ninety-nine in a hundred are at or below it.
    pub p99: f64,
}

impl Quantiles {
    /// Of these durations; zeros when there are none.
    pub fn of(mut durations: Vec<Duration>) -> Self {
        durations.sort_unstable();
        let at = |fraction| quantile(&durations, fraction).as_secs_f64() * 1e3;
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }

    /// Of all gaps of several answers.
    pub fn of_gaps<'a>(all: impl Iterator<Item = &'a Gaps>) -> Self {
        let at = Gaps::quantiles(all, [0.5, 0.9, 0.99]);
        let [p50, p90, p99] = at.map(|duration| duration.as_secs_f64() * 1e3);
        Self { p50, p90, p99 }
    }

    fn to_json(self) -> Value {
        json!({ "p50": rounded(self.p50), "p90": rounded(self.p90), "p99": rounded(self.p99) })
    }

    fn from_json(value: &Value) -> Option<Self> {
        let at = |key: &str| value.get(key)?.as_f64();
        Some(Self { p50: at("p50")?, p90: at("p90")?, p99: at("p99")? })
    }
}

/// The nearest-rank quantile of a sorted list: always one of its values, never between two.
fn quantile(sorted: &[Duration], fraction: f64) -> Duration {
    let rank = (fraction * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

fn rounded(milliseconds: f64) -> f64 {
    (milliseconds * 1e3).round() / 1e3
}

/// How what a policy expected to be cached compares with what was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Predictions {
    /// Answers with exactly as many cached tokens as expected.
    pub equal: u64,
    /// Answers with fewer.
    pub over: u64,
    /// Answers with more.
    pub under: u64,
    /// Tokens that were expected in vain.
    pub over_tokens: u64,
    /// Tokens that were cached and not expected.
    pub under_tokens: u64,
}

impl Predictions {
    /// Of the answered requests; `None` where nothing was expected of any.
    pub fn of(samples: &[Sample]) -> Option<Self> {
        let mut all = Self::default();
        for sample in samples.iter().filter(|sample| sample.error.is_none()) {
            let Some(predicted) = sample.predicted_tokens else { continue };
            let over = predicted.saturating_sub(sample.cached_tokens);
            let under = sample.cached_tokens.saturating_sub(predicted);
            all.equal += u64::from(over == 0 && under == 0);
            all.over += u64::from(over > 0);
            all.under += u64::from(under > 0);
            all.over_tokens += over;
            all.under_tokens += under;
        }
        (all != Self::default()).then_some(all)
    }

    /// Answers as expected in all, 0 to 1.
    pub fn share(&self) -> f64 {
        self.equal as f64 / (self.equal + self.over + self.under).max(1) as f64
    }

    fn to_json(self) -> Value {
        let Self { equal, over, under, over_tokens, under_tokens } = self;
        json!({
            "equal": equal, "over": over, "under": under,
            "over_tokens": over_tokens, "under_tokens": under_tokens,
        })
    }

    fn from_json(value: &Value) -> Option<Self> {
        let number = |key: &str| value.get(key)?.as_u64();
        Some(Self {
            equal: number("equal")?,
            over: number("over")?,
            under: number("under")?,
            over_tokens: number("over_tokens")?,
            under_tokens: number("under_tokens")?,
        })
    }
}

/// One policy's run of one workload.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Run {
    /// How requests were routed.
    pub policy: String,
    /// What was played.
    pub workload: String,
    /// Requests sent.
    pub requests: u64,
    /// Requests without a whole answer.
    pub errors: u64,
    /// Prompt tokens of the answered ones.
    pub prompt_tokens: u64,
    /// Prompt tokens computed for them.
    pub computed_tokens: u64,
    /// Time to first token.
    pub first_token: Quantiles,
    /// Inter-token time, over all gaps of all requests.
    pub gap: Quantiles,
    /// End-to-end time.
    pub whole: Quantiles,
    /// Answered requests by replica.
    pub requests_per_replica: BTreeMap<String, u64>,
    /// Where the policy says what it expects.
    pub predictions: Option<Predictions>,
}

impl Run {
    /// Sums the samples of a run. A failed request counts as an error and nowhere else.
    pub fn of(policy: &str, workload: &str, samples: &[Sample]) -> Self {
        let answered: Vec<&Sample> = samples.iter().filter(|s| s.error.is_none()).collect();
        let prompt_tokens: u64 = answered.iter().map(|s| s.prompt_tokens).sum();
        let cached_tokens: u64 = answered.iter().map(|s| s.cached_tokens).sum();
        let mut requests_per_replica = BTreeMap::new();
        for sample in &answered {
            let replica = sample.replica.clone().unwrap_or_else(|| "unknown".to_owned());
            *requests_per_replica.entry(replica).or_insert(0) += 1;
        }
        Self {
            policy: policy.to_owned(),
            workload: workload.to_owned(),
            requests: samples.len() as u64,
            errors: (samples.len() - answered.len()) as u64,
            prompt_tokens,
            computed_tokens: prompt_tokens.saturating_sub(cached_tokens),
            first_token: Quantiles::of(answered.iter().filter_map(|s| s.first_token).collect()),
            gap: Quantiles::of_gaps(answered.iter().map(|s| &s.gaps)),
            whole: Quantiles::of(answered.iter().map(|s| s.whole).collect()),
            requests_per_replica,
            predictions: None,
        }
    }

    /// Adds a zero for each replica that earlier runs know and this one never came to.
    pub fn count_idle_replicas(&mut self, earlier: &[Self]) {
        for replica in earlier.iter().flat_map(|run| run.requests_per_replica.keys()) {
            self.requests_per_replica.entry(replica.clone()).or_insert(0);
        }
    }

    /// Cached prompt tokens in all prompt tokens, 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        if self.prompt_tokens == 0 {
            return 0.0;
        }
        1.0 - self.computed_tokens as f64 / self.prompt_tokens as f64
    }

    /// The record as it stands in the JSON file.
    pub fn to_json(&self) -> Value {
        let mut record = json!({
            "policy": self.policy,
            "workload": self.workload,
            "requests": self.requests,
            "errors": self.errors,
            "hit_rate": (self.hit_rate() * 1e5).round() / 1e5,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "ttft_ms": self.first_token.to_json(),
            "itl_ms": self.gap.to_json(),
            "e2e_ms": self.whole.to_json(),
            "requests_per_replica": self.requests_per_replica,
        });
        if let (Some(predictions), Some(fields)) = (self.predictions, record.as_object_mut()) {
            fields.insert("predictions".to_owned(), predictions.to_json());
        }
        record
    }

    /// Reads a record back; `None` when a field is missing or of another type.
    pub fn from_json(value: &Value) -> Option<Self> {
        let text = |key: &str| Some(value.get(key)?.as_str()?.to_owned());
        let number = |key: &str| value.get(key)?.as_u64();
        let quantiles = |key: &str| Quantiles::from_json(value.get(key)?);
        let replicas = value.get("requests_per_replica")?.as_object()?;
        let counts = replicas.iter().map(|(name, count)| Some((name.clone(), count.as_u64()?)));
        Some(Self {
            policy: text("policy")?,
            workload: text("workload")?,
            requests: number("requests")?,
            errors: number("errors")?,
            prompt_tokens: number("prompt_tokens")?,
            computed_tokens: number("computed_tokens")?,
            first_token: quantiles("ttft_ms")?,
            gap: quantiles("itl_ms")?,
            whole: quantiles("e2e_ms")?,
            requests_per_replica: counts.collect::<Option<_>>()?,
            predictions: value.get("predictions").and_then(Predictions::from_json),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milliseconds(values: impl IntoIterator<Item = u64>) -> Vec<Duration> {
        values.into_iter().map(Duration::from_millis).collect()
    }

    #[track_caller]
    fn check(values: Vec<Duration>, p50: f64, p90: f64, p99: f64) {
        assert_eq!(Quantiles::of(values), Quantiles { p50, p90, p99 });
    }

    #[test]
    fn quantiles_are_values_of_the_list() {
        check(milliseconds([]), 0.0, 0.0, 0.0);
        check(milliseconds([7]), 7.0, 7.0, 7.0);
        check(milliseconds([3, 1, 2]), 2.0, 3.0, 3.0);
        check(milliseconds((1..=100).rev()), 50.0, 90.0, 99.0);
        check(milliseconds(1..=1000), 500.0, 900.0, 990.0);
    }

    fn sample(replica: &str, prompt_tokens: u64, cached_tokens: u64) -> Sample {
        Sample {
            replica: Some(replica.to_owned()),
            first_token: Some(Duration::from_millis(40)),
            gaps: milliseconds([10, 12]).into_iter().collect(),
            whole: Duration::from_millis(62),
            prompt_tokens,
            cached_tokens,
            ..Sample::default()
        }
    }

    #[test]
    fn a_run_sums_what_was_answered_and_counts_what_was_not() {
        let failed = Sample { error: Some("503".to_owned()), ..sample("b", 900, 900) };
        let run = Run::of("p", "w", &[sample("a", 100, 80), sample("b", 300, 0), failed]);
        assert_eq!((run.requests, run.errors), (3, 1));
        assert_eq!((run.prompt_tokens, run.computed_tokens), (400, 320));
        assert!((run.hit_rate() - 0.2).abs() < 1e-12);
        assert_eq!(run.gap, Quantiles { p50: 10.0, p90: 12.0, p99: 12.0 });
        let expected = [("a".to_owned(), 1), ("b".to_owned(), 1)];
        assert_eq!(run.requests_per_replica, BTreeMap::from(expected));
    }

    #[test]
    fn a_replica_that_got_nothing_is_counted_as_zero() {
        let earlier = [Run::of("p", "w", &[sample("a", 1, 0), sample("b", 1, 0)])];
        let mut run = Run::of("q", "w", &[sample("b", 1, 0)]);
        run.count_idle_replicas(&earlier);
        let expected = [("a".to_owned(), 0), ("b".to_owned(), 1)];
        assert_eq!(run.requests_per_replica, BTreeMap::from(expected));
    }

    #[test]
    fn the_hit_rate_of_nothing_is_zero() {
        assert_eq!(Run::of("p", "w", &[]).hit_rate(), 0.0);
    }

    #[test]
    fn what_was_expected_is_compared_where_something_was() {
        assert_eq!(Predictions::of(&[sample("a", 100, 80)]), None);
        let expected = |cached, predicted, error: Option<&str>| Sample {
            predicted_tokens: Some(predicted),
            error: error.map(str::to_owned),
            ..sample("a", 100, cached)
        };
        let samples = [
            expected(80, 80, None),
            expected(0, 0, None),
            expected(16, 80, None),
            expected(48, 32, None),
            expected(0, 80, Some("503")),
        ];
        let predictions = Predictions::of(&samples).unwrap();
        let (over_tokens, under_tokens) = (64, 16);
        let all = Predictions { equal: 2, over: 1, under: 1, over_tokens, under_tokens };
        assert_eq!((predictions, predictions.share()), (all, 0.5));
        let run = Run { predictions: Some(predictions), ..Run::of("p", "w", &samples) };
        assert_eq!(Run::from_json(&run.to_json()), Some(run));
    }

    #[test]
    fn a_record_has_exactly_the_promised_fields_and_reads_back() {
        let run = Run::of("p", "w", &[sample("a", 100, 80)]);
        let record = run.to_json();
        let fields: Vec<&str> = record.as_object().unwrap().keys().map(String::as_str).collect();
        let promised = [
            "policy",
            "workload",
            "requests",
            "errors",
            "hit_rate",
            "prompt_tokens",
            "computed_tokens",
            "ttft_ms",
            "itl_ms",
            "e2e_ms",
            "requests_per_replica",
        ];
        assert_eq!(fields, promised);
        assert_eq!(Run::from_json(&record), Some(run));
        assert_eq!(Run::from_json(&json!({ "policy": "p" })), None);
    }
}
