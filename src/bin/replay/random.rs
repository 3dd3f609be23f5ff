//! Seeded chance: SplitMix64 and the few distributions the workload needs.
//!
//! It is not for secrets, and it never reads the system's entropy: the same seed gives the same
//! numbers on every machine, so that every policy is asked the same requests.

/// A SplitMix64 stream.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The stream of one seed. `lane` separates streams that must not move each other: a
    /// change to how texts are drawn then leaves arrival times as they were.
    pub fn new(seed: u64, lane: u64) -> Self {
        let mut random = Self(seed ^ lane.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        random.word();
        random
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `0..bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((self.unit() * bound as f64) as usize).min(bound.saturating_sub(1))
    }

    /// Log-normal, by its median and the standard deviation of its logarithm.
    pub fn lognormal(&mut self, shape: LogNormal) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.unit()).cos();
        (shape.median * (shape.sigma * normal).exp()).clamp(shape.least, shape.most)
    }

    /// Geometric on 1, 2, 3, ... with the given mean.
    pub fn geometric(&mut self, mean: f64) -> usize {
        let stay = 1.0 - 1.0 / mean;
        1 + ((1.0 - self.unit()).ln() / stay.ln()) as usize
    }

    /// A rank in `0..ranks`, rank r being drawn in proportion to `1 / (r + 1)^exponent`.
    pub fn zipf(&mut self, ranks: usize, exponent: f64) -> usize {
        let weight = |rank: usize| ((rank + 1) as f64).powf(-exponent);
        let mut left = self.unit() * (0..ranks).map(weight).sum::<f64>();
        for rank in 0..ranks {
            left -= weight(rank);
            if left < 0.0 {
                return rank;
            }
        }
        ranks.saturating_sub(1)
    }
}

/// The shape of a log-normal quantity, cut off at both ends.
#[derive(Debug, Clone, Copy)]
pub struct LogNormal {
    /// Half of the draws are below it.
    pub median: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
    /// No draw is smaller.
    pub least: f64,
    /// No draw is larger.
    pub most: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: usize = 20_000;

    #[track_caller]
    fn check_close(actual: f64, expected: f64, tolerance: f64) {
        assert!((actual - expected).abs() <= tolerance, "{actual} is not near {expected}");
    }

    #[test]
    fn one_seed_and_lane_give_one_stream() {
        let words = |seed, lane| {
            let mut random = Random::new(seed, lane);
            [random.word(), random.word()]
        };
        assert_eq!(words(1, 2), words(1, 2));
        assert_ne!(words(1, 2), words(1, 3));
        assert_ne!(words(1, 2), words(2, 2));
    }

    #[test]
    fn lognormal_has_the_median_it_was_asked_for_and_stays_in_bounds() {
        let shape = LogNormal { median: 100.0, sigma: 1.0, least: 20.0, most: 400.0 };
        let mut random = Random::new(7, 0);
        let draws: Vec<f64> = (0..DRAWS).map(|_| random.lognormal(shape)).collect();
        let below = draws.iter().filter(|draw| **draw < 100.0).count();
        check_close(below as f64 / DRAWS as f64, 0.5, 0.02);
        let over_one_sigma = draws.iter().filter(|draw| **draw > 271.8).count();
        check_close(over_one_sigma as f64 / DRAWS as f64, 0.1587, 0.015);
        assert!(draws.iter().all(|draw| (20.0..=400.0).contains(draw)));
    }

    #[test]
    fn geometric_has_the_mean_it_was_asked_for() {
        let mut random = Random::new(7, 0);
        let draws: Vec<usize> = (0..DRAWS).map(|_| random.geometric(6.0)).collect();
        check_close(draws.iter().sum::<usize>() as f64 / DRAWS as f64, 6.0, 0.2);
        assert_eq!(draws.iter().min(), Some(&1));
    }

    #[test]
    fn zipf_draws_the_first_rank_twice_as_often_as_the_second() {
        let mut random = Random::new(7, 0);
        let mut counts = [0usize; 4];
        for _ in 0..DRAWS {
            counts[random.zipf(4, 1.0)] += 1;
        }
        check_close(counts[0] as f64 / counts[1] as f64, 2.0, 0.15);
        check_close(counts[0] as f64 / counts[3] as f64, 4.0, 0.4);
    }
}
