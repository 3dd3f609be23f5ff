//! What a VM remembers of the prompts it read, so that a conversation's next turn costs what is new in it.
//!
//! A rendered text is cut into stretches of [`STRETCH`] bytes. Behind each the memo keeps where the text's ids could last be
//! cut (a [`Mark`]: behind an added token, or between pieces) and the chains of blocks up to there. The next text that
//! begins with the same stretches is encoded and hashed from that mark on. What is left of a text behind its stretches has
//! an entry, too: there, as a rule, a conversation goes on. What is kept for a token is its share of a block's hash: half a
//! byte, where its text has four and its id as many.
//!
//! - A stretch is found by a hash of 128 bits over its bytes and all before it, the model's prepared file, the origin of the
//!   chains (served name, salt) and their block sizes, seeded by the VM's own number. Texts are not compared: of a
//!   million stretches, the chance that any two are taken for one another is below 1 in 10^26. Block hashes have 64 bits.
//! - A salt has entries of its own. What others asked cannot be told from how long an answer takes.
//! - It is bounded in bytes. What was used least recently goes first, the end of a text before its beginning, so that
//!   what many conversations share stays.
//!
//! It does not render: a template may look at all of a conversation, and does so for every turn. Prompts that are cut
//! (`truncate_prompt_tokens`), given as ids, or end in a way that only the engine knows, are read without it.

mod chaining;
mod path;
mod recency;

pub use chaining::{Chained, Chaining};
use path::Path;

use crate::tokens::blocks::{BlockHash, Chain, Chains};
use crate::tokens::{Encoding, Mark};
use recency::Recency;

/// Bytes of text between two entries. Halved, a turn reads a kilobyte less anew, some 20 microseconds, and the memo holds
/// two thirds as much; doubled, it holds a quarter more.
pub const STRETCH: usize = 2 << 10;

/// What is known behind one stretch of a text.
#[derive(Debug, Clone, Default)]
struct Entry {
    /// The last mark that depends on nothing behind the stretch; none where the entry before has the same.
    mark: Option<Mark>,
    /// For each chain the blocks since the entry before, and the tokens after the last of them: see [`pack`].
    growth: Box<[u32]>,
    /// How long the rest was of the text that last ended behind this stretch, where that rest has an entry.
    rest: u16,
}

/// See the module.
#[derive(Debug)]
pub struct Memo {
    seed: u64,
    max_bytes: usize,
    entries: Recency<Entry>,
    bytes: usize,
}

/// What was remembered of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Recalled {
    /// How many of its stretches were known.
    stretches: usize,
    /// Whether more of it is known, behind them.
    has_rest: bool,
    /// Where it is to be gone on from, with the number of ids before.
    mark: Option<Mark>,
}

impl Recalled {
    fn tokens(&self) -> usize {
        self.mark.map_or(0, |mark| mark.ids)
    }
}

impl Memo {
    /// An empty memo of at most so many bytes. Nobody outside knows the seed.
    pub fn new(seed: u64, max_bytes: usize) -> Self {
        Self { seed, max_bytes, entries: Recency::default(), bytes: 0 }
    }

    /// Sets how many bytes it may have, and forgets what is too much. Without any it does nothing.
    pub fn set_max_bytes(&mut self, max_bytes: usize) {
        self.max_bytes = max_bytes;
        self.shrink();
    }

    /// Bytes it has, about.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it may hold anything.
    pub fn is_on(&self) -> bool {
        self.max_bytes > 0
    }

    /// Leads the chains, which have no tokens, as far along a path as it is known.
    fn recall(&mut self, path: &Path, chains: &mut Chains) -> Recalled {
        let mut recalled = Recalled { stretches: 0, has_rest: false, mark: None };
        for key in path.keys() {
            let Some(entry) = self.entries.get(*key) else { break };
            recalled.stretches += 1;
            if let Some(mark) = entry.mark {
                unpack(&entry.growth, mark.ids, chains);
                recalled.mark = Some(mark);
            }
        }
        self.touch(path, recalled.stretches);
        recalled
    }

    /// Leads the chains on to where another text ended that was the same so far, if this one has the same rest.
    fn recall_rest(
        &mut self,
        path: &Path,
        encoding: &Encoding,
        recalled: &mut Recalled,
        chains: &mut Chains,
    ) {
        let last = recalled.stretches.checked_sub(1).and_then(|last| path.keys().get(last));
        let rest = last.and_then(|last| self.entries.get(*last)).map_or(0, |entry| entry.rest);
        let key = path.key_of_rest(encoding, recalled.stretches, rest.into());
        let Some(entry) = key.and_then(|key| self.entries.get(key)) else { return };
        let Some(mark) = entry.mark else { return };
        unpack(&entry.growth, mark.ids, chains);
        (recalled.has_rest, recalled.mark) = (true, Some(mark));
    }

    /// Learns what is behind the stretches of a path, from one of them on, and behind its rest.
    fn learn(
        &mut self,
        path: &Path,
        from: usize,
        entries: Vec<Entry>,
        rest: Option<(u128, Entry)>,
    ) {
        let learned = entries.len();
        for (key, entry) in path.keys().iter().skip(from).zip(entries) {
            self.put(*key, entry);
        }
        if let Some((key, entry)) = rest
            && let Some(last) = path.keys().last().and_then(|last| self.entries.get_mut(*last))
        {
            last.rest = u16::try_from(path.rest()).unwrap_or_default();
            self.put(key, entry);
        }
        self.touch(path, from + learned);
        self.shrink();
    }

    fn put(&mut self, key: u128, entry: Entry) {
        let bytes = size(&entry);
        if self.entries.put(key, entry) {
            self.bytes += bytes;
        }
    }

    /// Makes the beginning of a path its most recent part.
    fn touch(&mut self, path: &Path, stretches: usize) {
        for key in path.keys().iter().take(stretches).rev() {
            self.entries.touch(*key);
        }
    }

    fn shrink(&mut self) {
        while self.bytes > self.max_bytes {
            let Some(entry) = self.entries.pop_oldest() else { break };
            self.bytes = self.bytes.saturating_sub(size(&entry));
        }
    }
}

fn size(entry: &Entry) -> usize {
    // What the allocator adds to each.
    const ALLOCATION: usize = 16;
    Recency::<Entry>::BYTES + ALLOCATION + size_of_val(&*entry.growth)
}

/// What chains grew by since they had so many blocks: for each the number of blocks and of tokens behind them, then these.
fn pack(chains: &[Chain], blocks_before: &[usize]) -> Box<[u32]> {
    let mut packed = Vec::new();
    for (index, chain) in chains.iter().enumerate() {
        let before = blocks_before.get(index).copied().unwrap_or_default();
        let new = chain.hashes().get(before..).unwrap_or_default();
        packed.reserve_exact(2 + 2 * new.len() + chain.tail().len());
        packed.extend([new.len() as u32, chain.tail().len() as u32]);
        packed.extend(new.iter().flat_map(|hash| [hash.0 as u32, (hash.0 >> 32) as u32]));
        packed.extend_from_slice(chain.tail());
    }
    packed.into_boxed_slice()
}

/// Lets chains grow by what [`pack`] packed, to so many tokens.
fn unpack(packed: &[u32], tokens: usize, chains: &mut Chains) {
    let mut rest = packed;
    for chain in chains.as_mut_slice() {
        let [blocks, tail, after @ ..] = rest else { return };
        let Some((hashes, after)) = after.split_at_checked(2 * *blocks as usize) else { return };
        let Some((tail, after)) = after.split_at_checked(*tail as usize) else { return };
        let hash = |[low, high]: &[u32; 2]| BlockHash(u64::from(*low) | u64::from(*high) << 32);
        chain.go_on_behind(hashes.as_chunks().0.iter().map(hash), tail, tokens);
        rest = after;
    }
}

#[cfg(test)]
mod tests;
