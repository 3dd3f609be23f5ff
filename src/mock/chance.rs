//! Repeatable pseudo-random numbers (SplitMix64) for output tokens and seeded tests.
//!
//! Not for anything that must be hard to guess.

/// A generator; equal seeds give equal numbers.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Starts from a seed and a sequence of tokens, all of which count.
    pub fn of_tokens(seed: u64, tokens: &[u32]) -> Self {
        let mut chance = Self(seed);
        for token in tokens {
            chance.0 ^= u64::from(*token);
            chance.0 = chance.draw();
        }
        chance
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`; zero when `limit` is zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw().checked_rem(limit).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_tokens_give_the_same_numbers_and_others_do_not() {
        let draws = |seed, tokens: &[u32]| Chance::of_tokens(seed, tokens).draw();
        assert_eq!(draws(1, &[1, 2, 3]), draws(1, &[1, 2, 3]));
        assert_ne!(draws(1, &[1, 2, 3]), draws(2, &[1, 2, 3]));
        assert_ne!(draws(1, &[1, 2, 3]), draws(1, &[3, 2, 1]));
    }
}
