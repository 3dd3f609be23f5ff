//! Events to blocks under our own names.
//!
//! A stored event carries its tokens, so its blocks are hashed anew as the filter hashes a prompt's: behind the parent, or from
//! the seed of the model or adapter and the salt. What cannot be named like that is left out, and with it all behind it: media,
//! prompt embeddings, adapters that the engine does not list, keys that are not known, tokens that are not there. Of several
//! groups of layers the first that uses all blocks is followed; the others are only counted.
//!
//! It neither knows in what order events should come nor keeps what it has told.

use super::events::{Adapter, EngineHash, Event, Keys, Place, Removed, Stored};
use super::held::{Behind, Counts, Held, Misplaced, Named};
use super::tell::Teller;
use crate::identity::seed_of;
use crate::report::Tier;
use crate::tokens::blocks::{BlockHash, BlockSize, Chain, ChainSeed};
use hashbrown::HashMap;

/// Most groups of layers that are counted; engines have a handful.
const MAX_GROUPS: usize = 64;

/// Whose blocks they can be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Names {
    /// What the chains of the base model start from.
    pub base: String,
    /// The adapters' names, and what their files' paths hash to.
    pub adapters: Vec<(String, u64)>,
}

/// What an event did beside what is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing.
    Done,
    /// All that was held is not any more.
    Cleared,
    /// Blocks are of another size than before: what was held says nothing now. The event is still to be applied.
    OtherSize,
    /// Blocks stand behind one that was never seen, and were left out.
    UnknownParent,
}

/// What has been seen since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Seen {
    /// Blocks stored, of all groups.
    pub stored: u64,
    /// Blocks removed, of all groups.
    pub removed: u64,
    /// Removals of blocks that were not known to be held.
    pub unknown_removals: u64,
    /// Blocks behind one that was never seen.
    pub unknown_parents: u64,
    /// Blocks beyond the most that may be known.
    pub over_limit: u64,
    /// Blocks left out as they came: media and prompt embeddings, or keys that are not known.
    pub keyed: u64,
    /// Blocks left out as they came: of an adapter that is not listed, or has no name.
    pub unlisted_adapters: u64,
    /// Blocks left out as they came: their tokens are missing or do not fit.
    pub without_tokens: u64,
    /// Events of a type that is not known.
    pub unknown_events: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Cache {
    names: Names,
    held: Held,
    block_tokens: Option<BlockSize>,
    /// The group that is followed.
    group: Option<u32>,
    /// Blocks in the other groups.
    others: HashMap<u32, u64>,
    seen: Seen,
    adapters_unknown: bool,
    wants_names: bool,
}

impl Cache {
    /// An empty cache, of so many blocks at most.
    pub fn new(names: Names, block_tokens: Option<BlockSize>, most_blocks: usize) -> Self {
        Self {
            names,
            held: Held::new(most_blocks),
            block_tokens,
            group: None,
            others: HashMap::new(),
            seen: Seen::default(),
            adapters_unknown: false,
            wants_names: false,
        }
    }

    /// Forgets what is held.
    pub fn clear(&mut self) {
        self.held.clear();
        self.others.clear();
        self.group = None;
        self.wants_names = false;
    }

    /// Whose blocks they can be from now on. Whether that changes what has been seen already.
    pub fn set_names(&mut self, names: Names) -> bool {
        let root_of = |name: &String| names.adapters.iter().find(|(other, _)| other == name);
        let is_other = names.base != self.names.base
            || self.wants_names && names != self.names
            || self
                .names
                .adapters
                .iter()
                .any(|adapter| root_of(&adapter.0).is_some_and(|other| other.1 != adapter.1));
        self.names = names;
        is_other
    }

    /// Whose blocks they can be.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// Whether blocks were left out since the engine's list of adapters is not known, or older than they are.
    pub fn wants_names(&self) -> bool {
        self.wants_names
    }

    /// Tokens per block, once it is known.
    pub fn block_tokens(&self) -> Option<BlockSize> {
        self.block_tokens
    }

    /// Whether events do not say whose blocks are.
    pub fn adapters_unknown(&self) -> bool {
        self.adapters_unknown
    }

    /// How many blocks there are.
    pub fn counts(&self) -> Counts {
        self.held.counts()
    }

    /// Blocks that the engine holds and nobody is told of: left out, or in groups of layers that are not followed.
    pub fn unmatched(&self) -> u64 {
        self.held.counts().left_out + self.others.values().sum::<u64>()
    }

    /// What has been seen since the start.
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// What is held.
    pub fn held(&self) -> &Held {
        &self.held
    }

    /// Applies an event.
    pub fn apply(&mut self, event: &Event, teller: &mut Teller) -> Outcome {
        match event {
            Event::Stored(stored) => self.store(stored, teller),
            Event::Removed(removed) => {
                self.remove(removed, teller);
                Outcome::Done
            }
            Event::Cleared => Outcome::Cleared,
            Event::Unknown => {
                self.seen.unknown_events += 1;
                Outcome::Done
            }
        }
    }

    fn store(&mut self, stored: &Stored, teller: &mut Teller) -> Outcome {
        let count = stored.hashes.len() as u64;
        if !self.follows(stored.place, stored.is_partial) {
            self.seen.stored += count;
            if self.others.len() < MAX_GROUPS || self.others.contains_key(&stored.place.group) {
                *self.others.entry(stored.place.group).or_default() += count;
            }
            return Outcome::Done;
        }
        let has_tokens = stored.tokens.as_ref().is_some_and(|tokens| !tokens.is_empty());
        let size = BlockSize::new(stored.block_tokens).filter(|_| has_tokens);
        // An offloading tier may have blocks of its own size; those of the tier that computes are what prompts are cut into.
        if let (false, Some(size)) = (stored.place.is_offloaded, size)
            && *self.block_tokens.get_or_insert(size) != size
        {
            self.block_tokens = Some(size);
            return Outcome::OtherSize;
        }
        self.seen.stored += count;
        self.adapters_unknown |= stored.adapter == Adapter::NotSaid;
        let Ok(blocks) = self.named(stored) else {
            self.seen.unknown_parents += count;
            return Outcome::UnknownParent;
        };
        let behind = stored.parent.map_or(Behind::Root, Behind::Block);
        let named = stored.hashes.iter().zip(blocks.into_iter().chain(std::iter::repeat(None)));
        let named = named.map(|(engine, block)| Named { engine: *engine, block });
        match self.held.store(behind, named, tier(stored.place), teller) {
            Ok(()) => Outcome::Done,
            Err(Misplaced::Full) => {
                self.seen.over_limit += count;
                Outcome::Done
            }
            Err(Misplaced::UnknownParent) => Outcome::UnknownParent,
        }
    }

    /// Whether these blocks are of the group that is followed.
    fn follows(&mut self, place: Place, is_partial: bool) -> bool {
        !is_partial && *self.group.get_or_insert(place.group) == place.group
    }

    fn remove(&mut self, removed: &Removed, teller: &mut Teller) {
        let count = removed.hashes.len() as u64;
        self.seen.removed += count;
        if self.group.is_some_and(|group| group != removed.place.group) || self.group.is_none() {
            if let Some(blocks) = self.others.get_mut(&removed.place.group) {
                *blocks = blocks.saturating_sub(count);
            }
            return;
        }
        for hash in &removed.hashes {
            let was_held = self.held.remove(*hash, tier(removed.place), teller);
            self.seen.unknown_removals += u64::from(!was_held);
        }
    }

    /// The names of the first blocks; the others have none.
    fn named(&mut self, stored: &Stored) -> Result<Vec<Option<BlockHash>>, UnknownParent> {
        let parent = stored.parent.map(|parent| self.held.known(parent).ok_or(UnknownParent));
        let parent = parent.transpose()?;
        if parent == Some(None) {
            return Ok(Vec::new());
        }
        let count = stored.hashes.len();
        let size = BlockSize::new(stored.block_tokens).filter(|size| {
            Some(*size) == self.block_tokens
                && stored
                    .tokens
                    .as_ref()
                    .is_some_and(|tokens| tokens.len() == count.saturating_mul(size.get() as usize))
        });
        let (Some(size), Some(tokens)) = (size, &stored.tokens) else {
            // A copy in another tier may come without its tokens: it is known by its name, if at all.
            let known = |hash: &EngineHash| self.held.known(*hash).flatten();
            let known: Vec<Option<BlockHash>> = stored.hashes.iter().map(known).collect();
            self.seen.without_tokens += known.iter().filter(|block| block.is_none()).count() as u64;
            return Ok(known);
        };
        let seed = match parent.flatten() {
            Some(parent) => Some(ChainSeed::behind(parent)),
            None => self.seed(stored),
        };
        let Some(seed) = seed else { return Ok(Vec::new()) };
        let usable = (0..count).take_while(|at| is_plain(stored, *at)).count();
        self.seen.keyed += (count - usable) as u64;
        let chain = Chain::new(seed, size, tokens);
        Ok(chain.hashes().iter().take(usable).map(|hash| Some(*hash)).collect())
    }

    /// Where the chain of a first block starts.
    fn seed(&mut self, stored: &Stored) -> Option<ChainSeed> {
        let root;
        let adapter = match &stored.adapter {
            Adapter::Base | Adapter::NotSaid => None,
            Adapter::Numbered => {
                self.seen.unlisted_adapters += stored.hashes.len() as u64;
                return None;
            }
            Adapter::Named(name) => {
                let Some(listed) = self.names.adapters.iter().find(|(other, _)| other == name)
                else {
                    self.wants_names = true;
                    self.seen.unlisted_adapters += stored.hashes.len() as u64;
                    return None;
                };
                root = [listed.1];
                Some((name.as_str(), root.as_slice()))
            }
        };
        let keys = stored.keys.first();
        let salt = keys.and_then(|keys| own_texts(stored, keys).first());
        Some(seed_of(&self.names.base, salt.map(String::as_str), adapter))
    }
}

/// See [`Outcome::UnknownParent`].
struct UnknownParent;

fn tier(place: Place) -> Tier {
    if place.is_offloaded { Tier::Offload } else { Tier::Gpu }
}

/// The texts among a block's keys, but for its adapter's name.
fn own_texts<'a>(stored: &Stored, keys: &'a Keys) -> &'a [String] {
    match (&stored.adapter, keys.texts.split_first()) {
        (Adapter::Named(name), Some((first, rest))) if first == name => rest,
        _ => &keys.texts,
    }
}

/// Whether nothing sets this block apart but its tokens, its adapter and, at the root, its salt.
fn is_plain(stored: &Stored, at: usize) -> bool {
    let Some(keys) = stored.keys.get(at) else { return true };
    let is_first = at == 0 && stored.parent.is_none();
    !keys.has_more && own_texts(stored, keys).len() <= usize::from(is_first)
}
