//! A text as the keys of its stretches and of what is left behind them, each of which stands for all that is before it,
//! too.
//!
//! It does not know what is kept under them.

use super::STRETCH;
use crate::tokens::Encoding;
use crate::tokens::blocks::Chains;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// The keys of a text's whole stretches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Path {
    seed: u64,
    keys: Vec<u128>,
    /// Bytes of the text.
    length: usize,
}

impl Path {
    /// The path of a text that is about to be encoded. All that its ids and blocks depend on goes in: the text, where its
    /// pieces end, the model, whether the tokenizer adds tokens of its own, and where the chains begin.
    pub(super) fn new(
        seed: u64,
        checksum: u64,
        adds_special_tokens: bool,
        chains: &Chains,
        encoding: &Encoding,
    ) -> Self {
        let mut origin = checksum.to_le_bytes().to_vec();
        origin.extend([u8::from(adds_special_tokens), u8::from(encoding.is_in_pieces())]);
        for chain in chains.as_slice() {
            let (chain_seed, size) = chain.origin();
            origin.extend(chain_seed.to_le_bytes());
            origin.extend(size.get().to_le_bytes());
        }
        let mut key = xxh3_128_with_seed(&origin, seed);
        let length = encoding.text().len();
        let mut ends = Vec::new();
        let keys = (0..length / STRETCH).map(|index| {
            let at = index * STRETCH;
            key = key_behind(key, seed, encoding, at..at + STRETCH, &mut ends);
            key
        });
        Self { seed, keys: keys.collect(), length }
    }

    pub(super) fn keys(&self) -> &[u128] {
        &self.keys
    }

    /// Bytes behind the whole stretches.
    pub(super) fn rest(&self) -> usize {
        self.length % STRETCH
    }

    /// The key of so many bytes behind so many stretches. None where there are no such bytes, or nothing before them.
    pub(super) fn key_of_rest(
        &self,
        encoding: &Encoding,
        stretches: usize,
        bytes: usize,
    ) -> Option<u128> {
        let key = *self.keys.get(stretches.checked_sub(1)?)?;
        let rest = stretches * STRETCH..stretches * STRETCH + bytes;
        let is_there = bytes > 0 && rest.end <= self.length;
        is_there.then(|| key_behind(key, self.seed, encoding, rest, &mut Vec::new()))
    }
}

/// The key of a part of a text, from the key of all that is before it.
fn key_behind(
    before: u128,
    seed: u64,
    encoding: &Encoding,
    part: Range<usize>,
    ends: &mut Vec<u8>,
) -> u128 {
    ends.clear();
    for (end, is_token) in encoding.piece_ends(&part) {
        ends.extend(((end as u64) << 1 | u64::from(is_token)).to_le_bytes());
    }
    let text = encoding.text().as_bytes().get(part).unwrap_or_default();
    let parts = [before, xxh3_128_with_seed(text, seed), xxh3_128_with_seed(ends, seed)];
    let mut bytes = [0; 48];
    for (slot, part) in bytes.as_chunks_mut().0.iter_mut().zip(parts) {
        *slot = part.to_le_bytes();
    }
    xxh3_128_with_seed(&bytes, seed)
}
