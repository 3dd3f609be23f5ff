//! Token ids to a chain of [`BlockHash`]es: the keys under which cached prefixes are known.
//!
//! A block's hash covers its own tokens and, through its parent's hash, every token before it, so
//! equal hashes mean equal prefixes and a prefix is found by its last block alone.
//!
//! This is deliberately not the engine's hash. Engines change theirs between versions, seed it at
//! random, and publish only eight bytes of it.

use super::More;
use std::num::NonZeroU32;
use std::sync::Arc;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Tokens per block. A type of its own because zero would make every chain infinite.
pub type BlockSize = NonZeroU32;

/// Blocks of a chain at most: a million tokens in blocks of 16, the longest context of today's models. What is behind
/// has no hash and counts as not cached. Halved, such contexts are known by half; doubled, so is the longest time that
/// recording a prompt takes, and the memory of each that is in flight: half a megabyte.
pub const MAX_CHAIN_BLOCKS: usize = 1 << 16;

/// Tokens hashed in one step: a fraction of a millisecond.
const STEP_TOKENS: usize = 8 << 10;

/// The identity of one full block and of everything in front of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// Where a chain starts: everything but the tokens that separates one cache entry from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainSeed(u64);

impl ChainSeed {
    /// Mixes the served model (or LoRA adapter) name and the cache salt.
    ///
    /// Each part goes in behind its own length: without that, model `a` with salt `bc` and model
    /// `ab` with salt `c` would share entries, across tenants.
    pub fn new(model: &str, cache_salt: Option<&str>) -> Self {
        let mut hasher = Xxh3::new();
        for part in [model.as_bytes(), cache_salt.unwrap_or_default().as_bytes()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(hasher.digest())
    }

    /// Where a chain goes on behind a block that is known by its hash alone.
    pub fn behind(block: BlockHash) -> Self {
        Self(block.0)
    }

    /// Sets it apart by something more, such as an adapter or a tenant: what kind of thing it is, and which.
    #[must_use]
    pub fn apart(self, kind: &str, parts: &[&[u8]]) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(&self.0.to_le_bytes());
        for part in std::iter::once(kind.as_bytes()).chain(parts.iter().copied()) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(hasher.digest())
    }
}

/// A prompt's full blocks, and the tokens after the last of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    seed: ChainSeed,
    block_size: BlockSize,
    /// Shared, since a decision keeps those of its prompt, and there may be tens of thousands.
    hashes: Arc<Vec<BlockHash>>,
    tail: Vec<u32>,
    tokens: usize,
    /// Whether the prompt goes on behind them.
    is_open: bool,
}

impl Chain {
    /// Hashes a prompt's full blocks. The partial block at the end has no hash: engines cache
    /// whole blocks only.
    pub fn new(seed: ChainSeed, block_size: BlockSize, tokens: &[u32]) -> Self {
        let (hashes, tail) = (Arc::default(), Vec::new());
        let mut chain = Self { seed, block_size, hashes, tail, tokens: 0, is_open: false };
        chain.extend(tokens);
        chain
    }

    /// The chain of other tokens that starts where this one does.
    #[must_use]
    pub fn of_same_origin(&self, tokens: &[u32]) -> Self {
        Self::new(self.seed, self.block_size, tokens)
    }

    /// Appends tokens, for instance those of the answer.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.tokens = self.tokens.saturating_add(tokens.len());
        if self.hashes.len() >= MAX_CHAIN_BLOCKS {
            return;
        }
        let block = self.block_size.get() as usize;
        let missing = block.saturating_sub(self.tail.len()).min(tokens.len());
        let (head, rest) = tokens.split_at(missing);
        self.tail.extend_from_slice(head);
        if self.tail.len() < block {
            return;
        }
        let hashes = Arc::make_mut(&mut self.hashes);
        let blocks = rest.chunks_exact(block);
        let room = MAX_CHAIN_BLOCKS - hashes.len();
        hashes.reserve((1 + blocks.len()).min(room));
        let first = std::mem::take(&mut self.tail);
        self.tail.extend_from_slice(blocks.remainder());
        let mut parent = hashes.last().map_or(self.seed.0, |hash| hash.0);
        let mut bytes = vec![0; 8 + 4 * block];
        for tokens in std::iter::once(first.as_slice()).chain(blocks).take(room) {
            // Not one byte after the other: of a long prompt that took as long as hashing them three times.
            if let Some((first, rest)) = bytes.split_first_chunk_mut() {
                *first = parent.to_le_bytes();
                for (slot, token) in rest.as_chunks_mut().0.iter_mut().zip(tokens) {
                    *slot = token.to_le_bytes();
                }
            }
            parent = xxh3_64(&bytes);
            hashes.push(BlockHash(parent));
        }
    }

    /// The hashes, root first.
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Tokens per block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// All tokens, those without a hash included.
    pub fn token_count(&self) -> usize {
        self.tokens
    }

    /// The most blocks of this prompt that an engine can take from cache.
    ///
    /// An engine always computes at least one token, since it needs a token's output to go on
    /// from: of N tokens at most `floor((N - 1) / B)` blocks can hit (observed on vLLM).
    /// Where the prompt goes on, that token is not among these.
    pub fn reusable_blocks(&self) -> usize {
        let computed = usize::from(!self.is_open);
        let before_the_last = self.tokens.saturating_sub(computed) / self.block_size.get() as usize;
        before_the_last.min(self.hashes.len())
    }

    /// The tokens after the last block.
    pub fn tail(&self) -> &[u32] {
        &self.tail
    }

    /// Goes on where another chain of the same seed and size stood: behind these blocks, then this tail, so many tokens
    /// in all.
    pub fn go_on_behind(
        &mut self,
        blocks: impl Iterator<Item = BlockHash>,
        tail: &[u32],
        tokens: usize,
    ) {
        Arc::make_mut(&mut self.hashes).extend(blocks);
        self.tail.clear();
        self.tail.extend_from_slice(tail);
        self.tokens = tokens;
    }

    /// What all its hashes depend on beside the tokens.
    pub fn origin(&self) -> (u64, BlockSize) {
        (self.seed.0, self.block_size)
    }

    /// Whether the prompt goes on behind these tokens, in a way that is not known.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// The last full block within the first `tokens` tokens, or `None` when there is none.
    pub fn block_at(&self, tokens: usize) -> Option<BlockHash> {
        let blocks = (tokens / self.block_size.get() as usize).min(self.hashes.len());
        self.hashes.get(blocks.checked_sub(1)?).copied()
    }
}

/// A prompt's chains, one for each block size that is asked for, on their way in steps of bounded work.
#[derive(Debug, Clone, Default)]
pub struct Chains {
    chains: Vec<Chain>,
    /// Tokens that are in all of them.
    hashed: usize,
}

impl Chains {
    /// Begins with no tokens.
    pub fn new(seed: ChainSeed, sizes: &[BlockSize]) -> Self {
        let chains = sizes.iter().map(|size| Chain::new(seed, *size, &[])).collect();
        Self { chains, hashed: 0 }
    }

    /// Says that the prompt goes on behind the tokens that will be given.
    pub fn leave_open(&mut self) {
        for chain in &mut self.chains {
            chain.is_open = true;
        }
    }

    /// Goes on with a prompt's tokens, the same each time, while there is `more` time, and for one step at least.
    /// Whether all are hashed.
    pub fn go_on(&mut self, tokens: &[u32], more: More<'_>) -> bool {
        loop {
            let rest = tokens.get(self.hashed..).unwrap_or_default();
            let step = rest.get(..STEP_TOKENS).unwrap_or(rest);
            for chain in &mut self.chains {
                chain.extend(step);
            }
            self.hashed += step.len();
            if self.hashed >= tokens.len() {
                return true;
            }
            if !more() {
                return false;
            }
        }
    }

    /// The chains.
    pub fn as_slice(&self) -> &[Chain] {
        &self.chains
    }

    /// The chains, before they are given tokens.
    pub fn as_mut_slice(&mut self) -> &mut [Chain] {
        &mut self.chains
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(tokens: u32) -> BlockSize {
        BlockSize::new(tokens).unwrap()
    }

    fn chain(tokens: &[u32]) -> Chain {
        Chain::new(ChainSeed::new("m", None), size(4), tokens)
    }

    #[track_caller]
    fn check_reusable(tokens: u32, expected: usize) {
        let tokens: Vec<u32> = (0..tokens).collect();
        assert_eq!(chain(&tokens).reusable_blocks(), expected, "{} tokens", tokens.len());
    }

    #[test]
    fn at_least_one_token_is_always_computed() {
        check_reusable(0, 0);
        check_reusable(3, 0);
        check_reusable(4, 0);
        check_reusable(5, 1);
        check_reusable(8, 1);
        check_reusable(9, 2);
    }

    #[test]
    fn the_last_block_counts_where_the_prompt_goes_on() {
        let mut chains = Chains::new(ChainSeed::new("m", None), &[size(4)]);
        chains.leave_open();
        chains.go_on(&[1, 2, 3, 4, 5, 6, 7, 8], &mut || true);
        let [open] = chains.as_slice() else { panic!("one size") };
        assert!(open.is_open());
        assert_eq!(open.reusable_blocks(), 2);
        assert_eq!(open.hashes(), chain(&[1, 2, 3, 4, 5, 6, 7, 8]).hashes());
    }

    #[test]
    fn equal_prefixes_have_equal_hashes_up_to_the_first_difference() {
        let a = chain(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let b = chain(&[1, 2, 3, 4, 5, 6, 7, 0, 9]);
        assert_eq!(a.hashes()[0], b.hashes()[0]);
        assert_ne!(a.hashes()[1], b.hashes()[1]);
    }

    #[test]
    fn a_later_block_depends_on_every_earlier_token() {
        let a = chain(&[1, 2, 3, 4, 5, 6, 7, 8]);
        let b = chain(&[9, 2, 3, 4, 5, 6, 7, 8]);
        assert_ne!(a.hashes()[1], b.hashes()[1]);
    }

    #[test]
    fn parts_of_the_seed_cannot_run_into_each_other() {
        assert_ne!(ChainSeed::new("a", Some("bc")), ChainSeed::new("ab", Some("c")));
        assert_ne!(ChainSeed::new("a", None), ChainSeed::new("a", Some("x")));
    }

    #[test]
    fn what_sets_seeds_apart_cannot_be_mistaken_for_anything_else() {
        let seed = ChainSeed::new("m", None);
        let seeds = [
            seed,
            seed.apart("tenant", &[b"a"]),
            seed.apart("tenant", &[]),
            seed.apart("adapter", &[b"a"]),
            seed.apart("adapter", &[b"a", b"b"]),
            seed.apart("adapter", &[b"ab"]),
            seed.apart("adapter", &[b"a"]).apart("tenant", &[b"a"]),
            ChainSeed::new("m", Some("a")),
        ];
        for (at, one) in seeds.iter().enumerate() {
            assert!(seeds.iter().skip(at + 1).all(|other| one != other), "{at}");
        }
        assert_eq!(seed.apart("tenant", &[b"a"]), seed.apart("tenant", &[b"a"]));
    }

    #[test]
    fn hashes_stay_as_they_were_since_they_cross_vms_and_versions() {
        let chain = chain(&[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(
            chain.hashes(),
            [BlockHash(0x88C6_D9F5_9440_343D), BlockHash(0x50C0_0ED7_4E78_0A71)]
        );
    }

    #[test]
    fn extending_in_pieces_equals_hashing_at_once() {
        let tokens: Vec<u32> = (0..57).collect();
        let whole = chain(&tokens);
        for cut in 0..tokens.len() {
            let mut pieces = chain(&tokens[..cut]);
            pieces.extend(&tokens[cut..]);
            assert_eq!(pieces, whole, "cut at {cut}");
        }
    }

    #[test]
    fn a_chain_goes_on_behind_a_block_by_its_hash_alone() {
        let whole = chain(&[1, 2, 3, 4, 5, 6, 7, 8]);
        let behind = ChainSeed::behind(whole.hashes()[0]);
        assert_eq!(Chain::new(behind, size(4), &[5, 6, 7, 8]).hashes(), &whole.hashes()[1..]);
    }

    #[test]
    fn chains_in_steps_equal_chains_at_once() {
        let tokens: Vec<u32> = (0..3 * STEP_TOKENS as u32 + 5).collect();
        let seed = ChainSeed::new("m", None);
        let mut chains = Chains::new(seed, &[size(4), size(7)]);
        let mut steps = 1;
        while !chains.go_on(&tokens, &mut || false) {
            steps += 1;
        }
        assert_eq!(steps, 4);
        let whole = [size(4), size(7)].map(|size| Chain::new(seed, size, &tokens));
        assert_eq!(chains.as_slice(), whole);
        assert!(Chains::new(seed, &[]).go_on(&[], &mut || false));
    }

    #[test]
    fn a_chain_ends_where_nobody_could_use_more() {
        let tokens: Vec<u32> = (0..4 * MAX_CHAIN_BLOCKS as u32 + 9).collect();
        let mut long = chain(&tokens);
        long.extend(&[1; 100]);
        assert_eq!(long.hashes(), chain(&tokens[..4 * MAX_CHAIN_BLOCKS]).hashes());
        assert_eq!(long.hashes().len(), MAX_CHAIN_BLOCKS);
        assert_eq!(long.reusable_blocks(), MAX_CHAIN_BLOCKS);
        assert_eq!(long.token_count(), tokens.len() + 100);
    }

    #[test]
    fn block_at_is_the_last_full_block_in_front() {
        let chain = chain(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(chain.block_at(3), None);
        assert_eq!(chain.block_at(7), Some(chain.hashes()[0]));
        assert_eq!(chain.block_at(2048), Some(chain.hashes()[1]));
    }
}
