//! A text as the keys of its stretches, each of which stands for all that is before it, too.
//!
//! It does not know what is kept under them.

use super::STRETCH;
use crate::tokens::Encoding;
use crate::tokens::blocks::Chains;
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// The keys of a text's whole stretches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Path(Vec<u128>);

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
        let stretches = encoding.text().as_bytes().chunks_exact(STRETCH).enumerate();
        let mut ends = Vec::new();
        let keys = stretches.map(|(index, stretch)| {
            let at = index * STRETCH;
            ends.clear();
            for (end, is_token) in encoding.piece_ends(&(at..at + STRETCH)) {
                ends.extend(((end as u64) << 1 | u64::from(is_token)).to_le_bytes());
            }
            let parts = [key, xxh3_128_with_seed(stretch, seed), xxh3_128_with_seed(&ends, seed)];
            let mut bytes = [0; 48];
            for (slot, part) in bytes.as_chunks_mut().0.iter_mut().zip(parts) {
                *slot = part.to_le_bytes();
            }
            key = xxh3_128_with_seed(&bytes, seed);
            key
        });
        Self(keys.collect())
    }

    pub(super) fn keys(&self) -> &[u128] {
        &self.0
    }
}
