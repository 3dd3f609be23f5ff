//! How well a policy foresaw when first tokens would come: what its choice rests on, beside what came of it.
//!
//! A rule that foresees badly chooses badly whatever it weighs; one that foresees well and still loses weighs wrongly. Of
//! requests that failed nothing is said.

use crate::stats::Sample;
use std::fmt::Write as _;

/// The classes of requests, by seconds until the first token.
const CLASSES: [f64; 7] = [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0];

/// A line for each class: how many, and by how much first tokens came later than expected (before, if below zero).
/// `None` where nothing was expected.
pub fn render(samples: &[Sample]) -> Option<String> {
    let mut all: Vec<(f64, f64)> = samples.iter().filter_map(times).collect();
    if all.is_empty() {
        return None;
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut text =
        String::from("first token after   requests   later than expected, p10 / p50 / p90\n");
    let mut from = 0.0;
    for to in CLASSES.into_iter().chain([f64::INFINITY]) {
        let within = all.iter().filter(|(took, _)| (from..to).contains(took));
        let mut late: Vec<f64> = within.map(|(took, expected)| took - expected).collect();
        late.sort_by(f64::total_cmp);
        let at = |tenths: usize| late.get(late.len() * tenths / 10);
        if let (Some(p10), Some(p50), Some(p90)) = (at(1), at(5), at(9)) {
            let count = late.len();
            let _ = writeln!(
                text,
                "{from:>8} s and more {count:>10}   {p10:+.3} / {p50:+.3} / {p90:+.3} s"
            );
        }
        from = to;
    }
    Some(text)
}

/// When it came and was expected, in seconds.
fn times(sample: &Sample) -> Option<(f64, f64)> {
    let answered = sample.first_token.filter(|_| sample.error.is_none() && sample.failures == 0)?;
    Some((answered.as_secs_f64(), sample.expected_first_token?.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn sample(took: u64, expected: Option<u64>) -> Sample {
        Sample {
            first_token: Some(Duration::from_millis(took)),
            expected_first_token: expected.map(Duration::from_millis),
            ..Sample::default()
        }
    }

    #[test]
    fn each_class_says_by_how_much_it_was_late() {
        let mut samples = vec![sample(1500, None), sample(700, Some(650)), sample(700, Some(800))];
        samples.extend([sample(100, Some(90)), sample(60_000, Some(50_000))]);
        let failed = Sample { failures: 1, ..sample(100, Some(1)) };
        let text = render(&[samples, vec![failed]].concat()).unwrap();
        let rows: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(
            rows,
            [
                "       0 s and more          1   +0.010 / +0.010 / +0.010 s",
                "     0.5 s and more          2   -0.100 / +0.050 / +0.050 s",
                "      30 s and more          1   +10.000 / +10.000 / +10.000 s",
            ]
        );
    }

    #[test]
    fn who_expects_nothing_is_not_judged() {
        assert_eq!(render(&[sample(1, None)]), None);
    }
}
