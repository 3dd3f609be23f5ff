//! Chance from a seed, for tests: a failure names the seed that shows it.
//!
//! No secret and no tie is drawn from it.

/// A generator (xorshift64*). Its seed is not zero.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % bound
    }
}
