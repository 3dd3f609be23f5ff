//! What one policy showed in one cell, all seeds together.
//!
//! Times to first token and to the end are pooled and their quantiles exact, so that a cell's tail is the tail of all that
//! was asked in it. Gaps between tokens are hundreds per request: of them only each seed's quantiles are kept, and the
//! median of those.

use crate::stats::{Quantiles, Sample};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// What one seed's run showed.
#[derive(Debug, Clone, Default)]
pub struct Seed {
    requests: u64,
    errors: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    first_token: Vec<Duration>,
    whole: Vec<Duration>,
    gap: Quantiles,
    spread: f64,
    seconds: f64,
}

/// See the module.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    /// Requests asked, over all seeds.
    pub requests: u64,
    /// Those without a whole answer.
    pub errors: u64,
    /// Tokens of the answered prompts.
    pub prompt_tokens: u64,
    /// Those of them that were computed.
    pub computed_tokens: u64,
    /// Time to first token, in milliseconds.
    pub first_token: Quantiles,
    /// Time between tokens, in milliseconds.
    pub gap: Quantiles,
    /// Time to the end, in milliseconds.
    pub whole: Quantiles,
    /// Prompt tokens computed by the replica that computed most, as a multiple of the mean.
    pub spread: f64,
    /// Requests answered per second, from the first to the last.
    pub throughput: f64,
}

impl Seed {
    /// Of one run's samples against so many replicas.
    pub fn of(samples: &[Sample], replicas: usize) -> Self {
        let mut seed = Self { requests: samples.len() as u64, ..Self::default() };
        let mut computed: BTreeMap<&str, u64> = BTreeMap::new();
        let mut end = Duration::ZERO;
        for sample in samples {
            let (None, Some(first_token)) = (&sample.error, sample.first_token) else {
                seed.errors += 1;
                continue;
            };
            seed.prompt_tokens += sample.prompt_tokens;
            seed.cached_tokens += sample.cached_tokens;
            seed.first_token.push(first_token);
            seed.whole.push(sample.whole);
            let replica = sample.replica.as_deref().unwrap_or_default();
            *computed.entry(replica).or_default() += sample.prompt_tokens - sample.cached_tokens;
            end = end.max(sample.arrival + sample.whole);
        }
        let answered = samples.iter().filter(|sample| sample.error.is_none());
        seed.gap = Quantiles::of_gaps(answered.map(|sample| &sample.gaps));
        let most = computed.values().max().copied().unwrap_or_default();
        let sum: u64 = computed.values().sum();
        seed.spread = most as f64 * replicas as f64 / sum.max(1) as f64;
        seed.seconds = end.as_secs_f64();
        seed
    }
}

impl Figures {
    /// Of all seeds.
    pub fn of(seeds: &[&Seed]) -> Self {
        let sum = |part: fn(&Seed) -> u64| seeds.iter().copied().map(part).sum::<u64>();
        let pooled = |part: fn(&Seed) -> &[Duration]| {
            Quantiles::of(seeds.iter().flat_map(|seed| part(seed).iter().copied()).collect())
        };
        let middle = |part: fn(&Seed) -> f64| median(seeds.iter().copied().map(part).collect());
        let seconds: f64 = seeds.iter().map(|seed| seed.seconds).sum();
        let (requests, errors) = (sum(|seed| seed.requests), sum(|seed| seed.errors));
        Self {
            requests,
            errors,
            prompt_tokens: sum(|seed| seed.prompt_tokens),
            computed_tokens: sum(|seed| seed.prompt_tokens - seed.cached_tokens),
            first_token: pooled(|seed| &seed.first_token),
            whole: pooled(|seed| &seed.whole),
            gap: Quantiles {
                p50: middle(|seed| seed.gap.p50),
                p90: middle(|seed| seed.gap.p90),
                p99: middle(|seed| seed.gap.p99),
            },
            spread: middle(|seed| seed.spread),
            throughput: (requests - errors) as f64 / seconds.max(f64::MIN_POSITIVE),
        }
    }

    /// Cached prompt tokens in all prompt tokens, 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        if self.prompt_tokens == 0 {
            return 0.0;
        }
        1.0 - self.computed_tokens as f64 / self.prompt_tokens as f64
    }

    /// The names of [`Figures::values`].
    pub const NAMES: [&str; 16] = [
        "requests",
        "errors",
        "prompt_tokens",
        "computed_tokens",
        "hit_rate",
        "ttft_p50_ms",
        "ttft_p90_ms",
        "ttft_p99_ms",
        "itl_p50_ms",
        "itl_p90_ms",
        "itl_p99_ms",
        "e2e_p50_ms",
        "e2e_p90_ms",
        "e2e_p99_ms",
        "spread",
        "requests_per_s",
    ];

    /// All of them, as files have them.
    pub fn values(&self) -> [Value; 16] {
        let three = |quantiles: Quantiles| {
            [quantiles.p50, quantiles.p90, quantiles.p99].map(|value| rounded(value, 1e3))
        };
        let ([t50, t90, t99], [g50, g90, g99]) = (three(self.first_token), three(self.gap));
        let [e50, e90, e99] = three(self.whole);
        [
            json!(self.requests),
            json!(self.errors),
            json!(self.prompt_tokens),
            json!(self.computed_tokens),
            rounded(self.hit_rate(), 1e5),
            t50,
            t90,
            t99,
            g50,
            g90,
            g99,
            e50,
            e90,
            e99,
            rounded(self.spread, 1e3),
            rounded(self.throughput, 1e3),
        ]
    }
}

fn rounded(value: f64, steps: f64) -> Value {
    json!((value * steps).round() / steps)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(replica: &str, prompt_tokens: u64, cached_tokens: u64, milliseconds: u64) -> Sample {
        Sample {
            replica: Some(replica.to_owned()),
            arrival: Duration::from_secs(1),
            first_token: Some(Duration::from_millis(milliseconds)),
            gaps: std::iter::once(Duration::from_millis(10)).collect(),
            whole: Duration::from_millis(milliseconds + 10),
            prompt_tokens,
            cached_tokens,
            ..Sample::default()
        }
    }

    #[test]
    fn seeds_are_pooled_and_failures_counted_apart() {
        let failed = Sample { error: Some("503".to_owned()), ..sample("a", 900, 0, 5) };
        let one = Seed::of(&[sample("a", 100, 50, 40), sample("b", 100, 0, 60), failed], 2);
        let two = Seed::of(&[sample("a", 200, 200, 90)], 2);
        let figures = Figures::of(&[&one, &two]);
        assert_eq!((figures.requests, figures.errors), (4, 1));
        assert_eq!((figures.prompt_tokens, figures.computed_tokens), (400, 150));
        assert!((figures.hit_rate() - 0.625).abs() < 1e-12);
        assert_eq!(figures.first_token, Quantiles { p50: 60.0, p90: 90.0, p99: 90.0 });
        assert_eq!(figures.whole.p99, 100.0);
        assert_eq!(figures.values().len(), Figures::NAMES.len());
    }

    #[track_caller]
    fn check_spread(computed: &[(&str, u64)], replicas: usize, expected: f64) {
        let samples: Vec<Sample> =
            computed.iter().map(|(replica, tokens)| sample(replica, *tokens, 0, 1)).collect();
        let spread = Figures::of(&[&Seed::of(&samples, replicas)]).spread;
        assert!((spread - expected).abs() < 1e-12, "{spread}");
    }

    #[test]
    fn spread_is_the_most_over_the_mean_of_all_replicas() {
        check_spread(&[("a", 100), ("b", 100)], 2, 1.0);
        check_spread(&[("a", 100), ("b", 100)], 4, 2.0);
        check_spread(&[("a", 300), ("b", 100)], 2, 1.5);
        check_spread(&[], 2, 0.0);
    }
}
