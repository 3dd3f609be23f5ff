//! Byte pair encoding over tables that lie in the prepared file, read in place.
//!
//! Three lookups, all bounds-checked, so that damaged tables give wrong ids but neither a trap nor an endless loop:
//! a word that is a token and encodes to itself, an atom (byte or character), and the merge of two ids.
//! A small cache of words stands before them: the tables are megabytes, the words of one text mostly fit a processor's cache.

use super::EncodeError;
use super::unigram::{Kind, Lattice, Other, too_long};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// No id, no merge, an empty slot.
pub(super) const NONE: u32 = u32::MAX;
/// Longest word that is merged, in bytes. Merging costs some 40 bytes of memory and 200 ns a byte.
pub(super) const MAX_WORD_BYTES: usize = 1 << 19;
/// Up to this many symbols a scan for the best pair beats a heap.
const SCAN_SYMBOLS: usize = 48;
/// A word longer than this, in bytes, is merged in steps. Halved, more words take the slower way; doubled, the longest
/// uninterrupted merge takes a millisecond.
const STEPPED_WORD_BYTES: usize = 4 << 10;
/// Symbols looked up, or pairs merged, in one step: a fraction of a millisecond.
const STEP: usize = 2 << 10;

/// What the tables mean, beside their bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Settings {
    /// Atoms are the 256 bytes; otherwise they are characters.
    pub byte_level: bool,
    /// A run of unknown characters is one unknown token.
    pub fuse_unk: bool,
    /// The unknown token, or [`NONE`].
    pub unk: u32,
    /// A character before which a word may be cut, because no merge crosses there; `None` when there is no such character.
    pub cut_before: Option<char>,
    /// The characters after which it may not.
    pub cut_exceptions: Vec<char>,
    /// Most slots a lookup in the word table visits.
    pub word_probes: u32,
    /// Most slots a lookup in the merge table visits.
    pub merge_probes: u32,
}

/// The model: the prepared file's bytes and where its tables lie.
pub(super) struct Bpe {
    /// The whole file.
    pub bytes: Vec<u8>,
    /// Where the tables lie in it.
    pub layout: Layout,
    /// What they mean.
    pub settings: Settings,
    /// What a model that merges nothing has beside.
    pub other: Other,
    /// What an unknown character costs such a model.
    pub unknown_score: f64,
}

/// The byte ranges of the tables.
#[derive(Debug, Clone, Default)]
pub(super) struct Layout {
    /// 256 ids (u32), one for each byte, [`NONE`] where there is none.
    pub atoms: Range<usize>,
    /// Open addressing, 8 bytes a slot: upper half of the word's hash, id.
    pub words: Range<usize>,
    /// For each id the end of its text (u32).
    pub ends: Range<usize>,
    /// The tokens' texts, in the order of their ids.
    pub texts: Range<usize>,
    /// Open addressing, 16 bytes a slot: left id, right id, rank, product. Of a Unigram model node, byte, id, node.
    pub merges: Range<usize>,
    /// For each id its score (f64), if the model has scores.
    pub scores: Range<usize>,
}

/// The tables as slices, for the length of one call.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    pub settings: &'a Settings,
    pub atoms: &'a [[u8; 4]],
    pub words: &'a [[u8; 8]],
    pub ends: &'a [[u8; 4]],
    pub texts: &'a [u8],
    pub merges: &'a [[u8; 16]],
    pub other: &'a Other,
    pub scores: &'a [[u8; 8]],
    pub unknown_score: f64,
}

/// Buffers of the merge loop, kept between words.
#[derive(Default)]
pub(super) struct MergeScratch {
    symbols: Vec<u32>,
    /// For the pair that starts at a symbol: rank in the upper half, product in the lower.
    pairs: Vec<u64>,
    previous: Vec<u32>,
    next: Vec<u32>,
    heap: BinaryHeap<Reverse<u64>>,
    cache: WordCache,
    stage: Stage,
    pub(super) lattice: Lattice,
}

/// How far a long word is.
#[derive(Default)]
enum Stage {
    /// Its atoms are looked up; this many bytes are done.
    Atoms { at: usize, in_unknown_run: bool },
    /// Its pairs are looked up, as many as there are.
    Pairs,
    /// Its pairs are merged, best first.
    Merge,
    /// Its best path is looked for.
    Path,
    /// No word is being merged.
    #[default]
    Done,
}

/// Whether a word's ids are all there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// They are.
    Done,
    /// [`Tables::merge_step`] must be called for the same word until they are.
    Long,
}

const NO_PAIR: u64 = u64::MAX;

/// Slots of the word cache, half a megabyte a VM. Halved, code and prose evict each other; doubled, it leaves the
/// processor's second-level cache.
const CACHE_SLOTS: usize = 1 << 13;
/// Longest word that is cached, in bytes.
const CACHED_BYTES: usize = 32;
/// Most ids a cached word has.
const CACHED_IDS: usize = 6;

/// Words seen lately, one to a slot. The whole word is compared, so a hit is exact.
#[derive(Default)]
struct WordCache {
    slots: Vec<CachedWord>,
}

#[derive(Clone, Default)]
struct CachedWord {
    length: u8,
    count: u8,
    word: [u8; CACHED_BYTES],
    ids: [u32; CACHED_IDS],
}

impl WordCache {
    fn ids(&self, hash: u64, word: &[u8]) -> Option<&[u32]> {
        let slot = self.slots.get(hash as usize % CACHE_SLOTS)?;
        let same = slot.word.get(..usize::from(slot.length)) == Some(word);
        slot.ids.get(..usize::from(slot.count)).filter(|_| same)
    }

    fn keep(&mut self, hash: u64, word: &[u8], ids: &[u32]) {
        if self.slots.is_empty() {
            self.slots = vec![CachedWord::default(); CACHE_SLOTS];
        }
        let Some(slot) = self.slots.get_mut(hash as usize % CACHE_SLOTS) else { return };
        if let (Some(bytes), Some(numbers)) =
            (slot.word.get_mut(..word.len()), slot.ids.get_mut(..ids.len()))
        {
            bytes.copy_from_slice(word);
            numbers.copy_from_slice(ids);
            slot.length = word.len() as u8;
            slot.count = ids.len() as u8;
        }
    }
}

impl MergeScratch {
    /// What the last word became.
    pub fn symbols(&self) -> &[u32] {
        &self.symbols
    }

    /// Whether a word begun by [`Tables::encode_word`] is not finished.
    pub fn is_merging(&self) -> bool {
        !matches!(self.stage, Stage::Done)
    }

    /// Makes the symbols a linked list and the pairs a heap.
    fn link(&mut self) {
        let count = self.symbols.len() as u32;
        self.pairs.push(NO_PAIR);
        self.previous.clear();
        self.previous.extend((0..count).map(|at| at.wrapping_sub(1)));
        self.next.clear();
        self.next.extend((1..count).chain([NONE]));
        let entries = self.pairs.iter().zip(0u64..).filter(|&(&pair, _)| pair != NO_PAIR);
        let mut heap = std::mem::take(&mut self.heap).into_vec();
        heap.clear();
        heap.extend(entries.map(|(&pair, at)| Reverse((pair >> 32 << 32) | at)));
        self.heap = BinaryHeap::from(heap);
    }

    /// Leaves in `symbols` what the list still holds.
    fn unlink(&mut self) {
        let mut kept = 0;
        let mut at = if self.symbols.is_empty() { NONE } else { 0 };
        while let Some(&symbol) = self.symbols.get(at as usize) {
            if let Some(slot) = self.symbols.get_mut(kept) {
                *slot = symbol;
            }
            kept += 1;
            at = self.next.get(at as usize).copied().unwrap_or(NONE);
        }
        self.symbols.truncate(kept);
    }

    /// Gives the buffers of a long word back, so that one does not fix a VM's memory. The cache stays.
    pub fn shrink(&mut self) {
        if self.symbols.capacity() > STEPPED_WORD_BYTES || self.lattice.is_large() {
            let cache = std::mem::take(&mut self.cache);
            *self = Self { cache, ..Self::default() };
        }
    }
}

impl Bpe {
    /// The tables as slices.
    pub fn tables(&self) -> Tables<'_> {
        let section = |range: &Range<usize>| self.bytes.get(range.clone()).unwrap_or_default();
        Tables {
            settings: &self.settings,
            atoms: section(&self.layout.atoms).as_chunks().0,
            words: section(&self.layout.words).as_chunks().0,
            ends: section(&self.layout.ends).as_chunks().0,
            texts: section(&self.layout.texts),
            merges: section(&self.layout.merges).as_chunks().0,
            other: &self.other,
            scores: section(&self.layout.scores).as_chunks().0,
            unknown_score: self.unknown_score,
        }
    }
}

/// The slot where a search for a hash starts, in a table of `slots`.
pub(super) fn home_slot(hash: u64, slots: usize) -> usize {
    // Multiplying maps the upper 32 bits to the table's size without a division.
    (((hash >> 32) * slots as u64) >> 32) as usize
}

/// The hash a word is filed under.
pub(super) fn word_hash(word: &[u8]) -> u64 {
    xxh3_64(word)
}

/// The hash a pair of ids is filed under.
pub(super) fn pair_hash(left: u32, right: u32) -> u64 {
    let key = (u64::from(left) << 32) | u64::from(right);
    let mixed = key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

impl Tables<'_> {
    /// Where the first part of a word ends that is encoded as it would be alone.
    pub fn first_cut(&self, word: &str) -> usize {
        let Some(mark) = self.settings.cut_before.filter(|_| self.other.kind == Kind::Bpe) else {
            return word.len();
        };
        let mut previous = None;
        for (at, character) in word.char_indices() {
            let cuts = character == mark
                && previous.is_some_and(|p| !self.settings.cut_exceptions.contains(&p));
            if cuts {
                return at;
            }
            previous = Some(character);
        }
        word.len()
    }

    /// Appends the ids of one pre-token, or of a part of it that [`Self::first_cut`] cut off. Of a long word it only
    /// begins the merge.
    ///
    /// # Errors
    /// When the word is longer than [`MAX_WORD_BYTES`].
    pub fn encode_word(
        &self,
        word: &str,
        scratch: &mut MergeScratch,
        ids: &mut Vec<u32>,
    ) -> Result<Word, EncodeError> {
        if word.is_empty() {
            return Ok(Word::Done);
        }
        let hash = word_hash(word.as_bytes());
        if let Some(cached) = scratch.cache.ids(hash, word.as_bytes()) {
            ids.extend_from_slice(cached);
            return Ok(Word::Done);
        }
        if self.other.kind != Kind::Bpe {
            if word.len() > MAX_WORD_BYTES && self.settings.cut_before.is_none() {
                return Err(too_long(word.len(), MAX_WORD_BYTES));
            }
            let begun = ids.len();
            if self.encode_other(word, scratch, ids) == Word::Long {
                scratch.stage = Stage::Path;
                return Ok(Word::Long);
            }
            scratch.cache.keep(hash, word.as_bytes(), ids.get(begun..).unwrap_or_default());
            return Ok(Word::Done);
        }
        if let Some(id) = self.word_at(hash, word.as_bytes()) {
            scratch.cache.keep(hash, word.as_bytes(), &[id]);
            ids.push(id);
            return Ok(Word::Done);
        }
        if word.len() > MAX_WORD_BYTES {
            return Err(too_long(word.len(), MAX_WORD_BYTES));
        }
        if word.len() > STEPPED_WORD_BYTES {
            scratch.symbols.clear();
            scratch.pairs.clear();
            scratch.stage = Stage::Atoms { at: 0, in_unknown_run: false };
            return Ok(Word::Long);
        }
        self.merge_word(word, scratch);
        scratch.cache.keep(hash, word.as_bytes(), &scratch.symbols);
        ids.extend_from_slice(&scratch.symbols);
        Ok(Word::Done)
    }

    /// One bounded piece of merging a long word; its ids are appended by the last.
    pub fn merge_step(&self, word: &str, scratch: &mut MergeScratch, ids: &mut Vec<u32>) -> Word {
        if matches!(scratch.stage, Stage::Path) {
            let word = self.path_step(word, scratch, ids);
            if word == Word::Done {
                scratch.stage = Stage::Done;
            }
            return word;
        }
        scratch.stage = match std::mem::take(&mut scratch.stage) {
            Stage::Atoms { at, in_unknown_run } => {
                let rest = word.get(at..).unwrap_or_default();
                let end = rest.floor_char_boundary(STEP);
                let part = rest.get(..end).unwrap_or_default();
                let in_unknown_run = self.push_atoms(part, in_unknown_run, &mut scratch.symbols);
                match end == rest.len() {
                    true => Stage::Pairs,
                    false => Stage::Atoms { at: at + end, in_unknown_run },
                }
            }
            Stage::Pairs => {
                self.push_pairs(scratch, STEP);
                match scratch.pairs.len() + 1 < scratch.symbols.len() {
                    true => Stage::Pairs,
                    false => {
                        scratch.link();
                        Stage::Merge
                    }
                }
            }
            Stage::Merge => {
                for _ in 0..STEP {
                    let Some(Reverse(entry)) = scratch.heap.pop() else { break };
                    self.merge_entry(entry, scratch);
                }
                match scratch.heap.is_empty() {
                    true => Stage::Done,
                    false => Stage::Merge,
                }
            }
            Stage::Path | Stage::Done => return Word::Done,
        };
        if scratch.is_merging() {
            return Word::Long;
        }
        scratch.unlink();
        ids.extend_from_slice(&scratch.symbols);
        Word::Done
    }

    /// Atoms, then merges: leaves the ids in `scratch.symbols`.
    pub fn merge_word(&self, word: &str, scratch: &mut MergeScratch) {
        scratch.symbols.clear();
        self.push_atoms(word, false, &mut scratch.symbols);
        scratch.pairs.clear();
        self.push_pairs(scratch, usize::MAX);
        if scratch.symbols.len() <= SCAN_SYMBOLS {
            self.merge_by_scan(scratch);
        } else {
            self.merge_by_heap(scratch);
        }
    }

    /// The next so many pairs, behind those that are there.
    fn push_pairs(&self, scratch: &mut MergeScratch, most: usize) {
        let MergeScratch { symbols, pairs, .. } = scratch;
        let rest = symbols.get(pairs.len()..).unwrap_or_default();
        let neighbours = rest.iter().zip(rest.iter().skip(1)).take(most);
        pairs.extend(neighbours.map(|(&left, &right)| self.merge(left, right)));
    }

    /// The atoms of a part of a word. Returns whether it ends in a run of unknown characters, as the part before did
    /// if `in_unknown_run`.
    fn push_atoms(&self, word: &str, in_unknown_run: bool, symbols: &mut Vec<u32>) -> bool {
        if self.settings.byte_level {
            symbols.extend(word.bytes().map(|byte| self.atom(byte)).filter(|&id| id != NONE));
            return false;
        }
        self.push_characters(word, in_unknown_run, symbols)
    }

    fn push_characters(&self, word: &str, run: bool, symbols: &mut Vec<u32>) -> bool {
        let mut in_unknown_run = run;
        let mut buffer = [0; 4];
        for character in word.chars() {
            let encoded = character.encode_utf8(&mut buffer);
            if let Some(id) = self.word(encoded.as_bytes()) {
                symbols.push(id);
                in_unknown_run = false;
            } else if self.atom(b'a') != NONE {
                symbols.extend(encoded.bytes().map(|byte| self.atom(byte)));
                in_unknown_run = false;
            } else if self.settings.unk != NONE {
                if !(self.settings.fuse_unk && in_unknown_run) {
                    symbols.push(self.settings.unk);
                }
                in_unknown_run = true;
            }
        }
        in_unknown_run
    }

    fn merge_by_scan(&self, scratch: &mut MergeScratch) {
        let MergeScratch { symbols, pairs, .. } = scratch;
        // `min_by_key` takes the first of equals, which is the leftmost occurrence of a pair.
        while let Some((at, &best)) = pairs.iter().enumerate().min_by_key(|&(_, pair)| *pair) {
            if best == NO_PAIR || at + 1 >= symbols.len() {
                break;
            }
            let product = best as u32;
            symbols.remove(at + 1);
            pairs.remove(at);
            if let Some(symbol) = symbols.get_mut(at) {
                *symbol = product;
            }
            if let (Some(&right), Some(pair)) = (symbols.get(at + 1), pairs.get_mut(at)) {
                *pair = self.merge(product, right);
            }
            let before = at.checked_sub(1);
            if let Some((before, &left)) = before.and_then(|b| Some((b, symbols.get(b)?)))
                && let Some(pair) = pairs.get_mut(before)
            {
                *pair = self.merge(left, product);
            }
        }
    }

    /// The same result in n log n: pairs wait in a heap, symbols are a linked list, and a heap entry
    /// that no longer agrees with `pairs` is stale.
    fn merge_by_heap(&self, scratch: &mut MergeScratch) {
        scratch.link();
        while let Some(Reverse(entry)) = scratch.heap.pop() {
            self.merge_entry(entry, scratch);
        }
        scratch.unlink();
    }

    fn merge_entry(&self, entry: u64, scratch: &mut MergeScratch) -> Option<()> {
        let MergeScratch { symbols, pairs, previous, next, heap, .. } = scratch;
        let at = entry as u32 as usize;
        let pair = *pairs.get(at)?;
        if pair == NO_PAIR || pair >> 32 != entry >> 32 {
            return None;
        }
        let product = pair as u32;
        let taken = *next.get(at)? as usize;
        let after = *next.get(taken)?;
        *symbols.get_mut(at)? = product;
        *pairs.get_mut(taken)? = NO_PAIR;
        *next.get_mut(at)? = after;
        let mut renew = |left_at: usize, left: u32, right: u32| {
            let pair = self.merge(left, right);
            if let Some(slot) = pairs.get_mut(left_at) {
                *slot = pair;
            }
            if pair != NO_PAIR {
                heap.push(Reverse((pair >> 32 << 32) | left_at as u64));
            }
        };
        match symbols.get(after as usize) {
            Some(&right) => renew(at, product, right),
            None => renew(at, NONE, NONE),
        }
        let before = *previous.get(at)? as usize;
        if let Some(&left) = symbols.get(before) {
            renew(before, left, product);
        }
        *previous.get_mut(after as usize)? = at as u32;
        Some(())
    }

    /// Tokens and merges.
    pub fn counts(&self) -> (usize, usize) {
        (self.ends.len(), self.merges.iter().filter(|slot| **slot != [0xFF; 16]).count())
    }

    pub(super) fn atom(&self, byte: u8) -> u32 {
        self.atoms.get(usize::from(byte)).map_or(NONE, |id| u32::from_le_bytes(*id))
    }

    /// The id of a word that is a token and encodes to itself.
    pub(super) fn word(&self, word: &[u8]) -> Option<u32> {
        self.word_at(word_hash(word), word)
    }

    fn word_at(&self, hash: u64, word: &[u8]) -> Option<u32> {
        let mut slot = home_slot(hash, self.words.len());
        for _ in 0..self.settings.word_probes {
            let [tag, id] = halves(*self.words.get(slot)?);
            if id == NONE {
                return None;
            }
            if tag == hash as u32 && self.text(id) == Some(word) {
                return Some(id);
            }
            slot = if slot + 1 == self.words.len() { 0 } else { slot + 1 };
        }
        None
    }

    /// The text of a token: its bytes in a byte-level model.
    pub fn text(&self, id: u32) -> Option<&[u8]> {
        let end = u32::from_le_bytes(*self.ends.get(id as usize)?) as usize;
        let start = match id.checked_sub(1) {
            Some(before) => u32::from_le_bytes(*self.ends.get(before as usize)?) as usize,
            None => 0,
        };
        self.texts.get(start..end)
    }

    /// Rank and product of the merge of two ids, or [`NO_PAIR`].
    pub(super) fn merge(&self, left: u32, right: u32) -> u64 {
        let wanted = (u64::from(right) << 32) | u64::from(left);
        let mut slot = home_slot(pair_hash(left, right), self.merges.len());
        for _ in 0..self.settings.merge_probes {
            let Some(bytes) = self.merges.get(slot) else { return NO_PAIR };
            let entry = u128::from_le_bytes(*bytes);
            if entry as u64 == wanted {
                // A slot with no ids is empty, and what it yields says so.
                return ((entry >> 64) as u64).rotate_left(32);
            }
            if entry as u64 == u64::MAX {
                return NO_PAIR;
            }
            slot = if slot + 1 == self.merges.len() { 0 } else { slot + 1 };
        }
        NO_PAIR
    }
}

fn halves(slot: [u8; 8]) -> [u32; 2] {
    let slot = u64::from_le_bytes(slot);
    [slot as u32, (slot >> 32) as u32]
}
