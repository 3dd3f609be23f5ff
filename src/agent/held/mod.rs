//! Which blocks an engine holds, and which of them a prompt can reach.
//!
//! An engine may hold a block more than once and names each copy's end, so copies are counted, for each tier by itself. A block
//! can only be used while all in front of it are held, and only those that can be are told: when one in the middle goes, all
//! behind it are told to be gone, though the engine has them, and are told again when it comes back. So a block that is gone
//! stays known as long as one behind it is held.
//!
//! No events, no sequence and no hashing: blocks come here with both of their names.

use super::events::EngineHash;
use super::tell::Teller;
use crate::report::Tier;
use crate::tokens::blocks::BlockHash;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// No block.
const NONE: u32 = u32::MAX;

/// One block, as the engine and as we call it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Named {
    /// The engine's name.
    pub engine: EngineHash,
    /// Ours; `None` for one whose content is not known, which nobody is told of, nor of any behind it.
    pub block: Option<BlockHash>,
}

/// What a block stands behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behind {
    /// Nothing.
    Root,
    /// A block.
    Block(EngineHash),
}

/// Why nothing was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misplaced {
    /// What it should stand behind has never been seen.
    UnknownParent,
    /// As many blocks are known as may be.
    Full,
}

#[derive(Debug, Clone)]
struct Node {
    engine: EngineHash,
    block: BlockHash,
    parent: u32,
    first_child: u32,
    next: u32,
    previous: u32,
    /// Copies, of either tier.
    copies: [u32; 2],
    is_left_out: bool,
    /// Whether it has been told.
    is_told: bool,
}

impl Node {
    fn is_held(&self) -> bool {
        self.copies != [0; 2]
    }

    fn tiers(&self) -> impl Iterator<Item = Tier> + use<> {
        let [here, away] = self.copies;
        [(here, Tier::Gpu), (away, Tier::Offload)]
            .into_iter()
            .filter_map(|(copies, tier)| (copies > 0).then_some(tier))
    }
}

fn copies(node: &mut Node, tier: Tier) -> &mut u32 {
    let [here, away] = &mut node.copies;
    match tier {
        Tier::Gpu => here,
        Tier::Offload => away,
    }
}

/// How many blocks there are of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Told to be held.
    pub told: u64,
    /// Of these, the ones that only an offloading tier holds.
    pub offloaded: u64,
    /// Held, and left out with all behind them.
    pub left_out: u64,
    /// Held, and not to be reached.
    pub unreachable: u64,
    /// Copies where the engine computes, of all of them.
    pub copies: u64,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Held {
    nodes: Vec<Node>,
    free: Vec<u32>,
    by_engine: HashTable<u32>,
    first_root: u32,
    most_blocks: usize,
    counts: Counts,
}

impl Held {
    /// Nothing, and later so many blocks at most.
    pub fn new(most_blocks: usize) -> Self {
        let (nodes, free, by_engine) = (Vec::new(), Vec::new(), HashTable::new());
        let most_blocks = most_blocks.min(NONE as usize);
        Self { nodes, free, by_engine, first_root: NONE, most_blocks, counts: Counts::default() }
    }

    /// Forgets all, and tells nobody.
    pub fn clear(&mut self) {
        *self = Self::new(self.most_blocks);
    }

    /// How many there are.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The bytes that this takes, but for a few hundred.
    pub fn bytes(&self) -> usize {
        // A table keeps a byte for each place beside the entry, and an eighth of them free.
        self.nodes.capacity() * size_of::<Node>()
            + self.free.capacity() * size_of::<u32>()
            + self.by_engine.capacity() * 8 / 7 * (size_of::<u32>() + 1)
    }

    /// What is known of a block that the engine names: whether it is known at all, and what we call it.
    pub fn known(&self, engine: EngineHash) -> Option<Option<BlockHash>> {
        let node = self.nodes.get(self.find(engine)? as usize)?;
        Some((!node.is_left_out).then_some(node.block))
    }

    /// One more copy of each of these blocks, each behind the one before it.
    ///
    /// # Errors
    /// When they cannot be placed. What was placed before it was found out stays.
    pub fn store(
        &mut self,
        behind: Behind,
        blocks: impl IntoIterator<Item = Named>,
        tier: Tier,
        teller: &mut Teller,
    ) -> Result<(), Misplaced> {
        let mut parent = match behind {
            Behind::Root => NONE,
            Behind::Block(parent) => self.find(parent).ok_or(Misplaced::UnknownParent)?,
        };
        for named in blocks {
            let place = match self.find(named.engine) {
                Some(place) => place,
                None => self.insert(named, parent).ok_or(Misplaced::Full)?,
            };
            self.add_copy(place, tier, teller);
            parent = place;
        }
        Ok(())
    }

    /// One copy less of a block. Whether there was one.
    pub fn remove(&mut self, engine: EngineHash, tier: Tier, teller: &mut Teller) -> bool {
        let Some(place) = self.find(engine) else { return false };
        let Some(node) = self.nodes.get_mut(place as usize) else { return false };
        let copies = copies(node, tier);
        if *copies == 0 {
            return false;
        }
        *copies -= 1;
        let is_last = *copies == 0;
        self.counts.copies -= u64::from(tier == Tier::Gpu);
        if !is_last {
            return true;
        }
        let (is_held, is_told, is_left_out) = (node.is_held(), node.is_told, node.is_left_out);
        match (is_told, is_held) {
            (true, true) => {
                teller.removed(node.block, tier);
                self.counts.offloaded += u64::from(tier == Tier::Gpu);
            }
            (true, false) => self.tell_gone(place, tier, teller),
            (false, true) => {}
            (false, false) if is_left_out => self.counts.left_out -= 1,
            (false, false) => self.counts.unreachable -= 1,
        }
        if !is_held {
            self.drop_unneeded(place);
        }
        true
    }

    /// All that has been told, as if it were told now: parents first.
    pub fn tell_all(&self, teller: &mut Teller) {
        let told: Vec<u32> = self.walk(self.first_root, true, |node| node.is_told);
        self.tell_stored(&told, teller);
    }

    /// The blocks that have been told, parents first.
    pub fn told(&self) -> impl Iterator<Item = BlockHash> + '_ {
        let told = self.walk(self.first_root, true, |node| node.is_told);
        told.into_iter().filter_map(|place| Some(self.nodes.get(place as usize)?.block))
    }

    fn find(&self, engine: EngineHash) -> Option<u32> {
        let is_it =
            |place: &u32| self.nodes.get(*place as usize).is_some_and(|node| node.engine == engine);
        self.by_engine.find(spread(engine), is_it).copied()
    }

    fn insert(&mut self, named: Named, parent: u32) -> Option<u32> {
        if self.by_engine.len() >= self.most_blocks {
            return None;
        }
        let is_left_out = named.block.is_none()
            || self.nodes.get(parent as usize).is_some_and(|parent| parent.is_left_out);
        let first = self.first_of(parent);
        let node = Node {
            engine: named.engine,
            block: named.block.unwrap_or(BlockHash(0)),
            parent,
            first_child: NONE,
            next: first,
            previous: NONE,
            copies: [0; 2],
            is_left_out,
            is_told: false,
        };
        let place = match self.free.pop() {
            Some(place) => {
                *self.nodes.get_mut(place as usize)? = node;
                place
            }
            None => {
                self.nodes.push(node);
                u32::try_from(self.nodes.len() - 1).ok()?
            }
        };
        if let Some(first) = self.nodes.get_mut(first as usize) {
            first.previous = place;
        }
        self.set_first_of(parent, place);
        let nodes = &self.nodes;
        let hash_of =
            |place: &u32| nodes.get(*place as usize).map_or(0, |node| spread(node.engine));
        let is_it = |place: &u32| {
            nodes.get(*place as usize).is_some_and(|node| node.engine == named.engine)
        };
        if let Entry::Vacant(entry) = self.by_engine.entry(spread(named.engine), is_it, hash_of) {
            entry.insert(place);
        }
        Some(place)
    }

    fn first_of(&self, parent: u32) -> u32 {
        self.nodes.get(parent as usize).map_or(self.first_root, |parent| parent.first_child)
    }

    fn set_first_of(&mut self, parent: u32, child: u32) {
        match self.nodes.get_mut(parent as usize) {
            Some(parent) => parent.first_child = child,
            None => self.first_root = child,
        }
    }

    fn add_copy(&mut self, place: u32, tier: Tier, teller: &mut Teller) {
        let Some(node) = self.nodes.get_mut(place as usize) else { return };
        let was_held = node.is_held();
        let copies = copies(node, tier);
        *copies += 1;
        self.counts.copies += u64::from(tier == Tier::Gpu);
        if *copies > 1 {
            return;
        }
        let (parent, block) = (node.parent, node.block);
        if was_held {
            if node.is_told {
                self.counts.offloaded -= u64::from(tier == Tier::Gpu);
                let parent = self.nodes.get(parent as usize).map(|parent| parent.block);
                teller.stored(parent, block, tier);
            }
            return;
        }
        if node.is_left_out {
            self.counts.left_out += 1;
            return;
        }
        self.counts.unreachable += 1;
        if self.nodes.get(parent as usize).is_none_or(|parent| parent.is_told) {
            let reached = self.walk(place, false, |node| node.is_held() && !node.is_left_out);
            self.tell_stored(&reached, teller);
            for place in reached {
                self.set_told(place, true);
            }
        }
    }

    /// Takes back a block that is told, and all told behind it. It has just lost its last copy, which was in this tier.
    fn tell_gone(&mut self, place: u32, tier: Tier, teller: &mut Teller) {
        let behind = self.walk(place, false, |node| node.is_told);
        for at in behind.into_iter().skip(1).rev() {
            let Some(node) = self.nodes.get(at as usize) else { continue };
            node.tiers().for_each(|tier| teller.removed(node.block, tier));
            self.set_told(at, false);
        }
        let Some(node) = self.nodes.get_mut(place as usize) else { return };
        teller.removed(node.block, tier);
        node.is_told = false;
        self.counts.told -= 1;
        self.counts.offloaded -= u64::from(tier == Tier::Offload);
    }

    /// A block that is held is told from now on, or no longer.
    fn set_told(&mut self, place: u32, is_told: bool) {
        let Some(node) = self.nodes.get_mut(place as usize) else { return };
        node.is_told = is_told;
        let offloaded = u64::from(matches!(node.copies, [0, _]));
        if is_told {
            self.counts.unreachable -= 1;
            self.counts.told += 1;
            self.counts.offloaded += offloaded;
        } else {
            self.counts.unreachable += 1;
            self.counts.told -= 1;
            self.counts.offloaded -= offloaded;
        }
    }

    /// Tells that these are held, of which parents come first: once each, so that whatever stands behind one comes after it,
    /// and then the copies in a second tier. Two runs are shorter than one that changes its tier with every block.
    fn tell_stored(&self, places: &[u32], teller: &mut Teller) {
        for is_first in [true, false] {
            for place in places {
                let Some(node) = self.nodes.get(*place as usize) else { continue };
                let parent = self.nodes.get(node.parent as usize).map(|parent| parent.block);
                let mut tiers = node.tiers();
                let tier = if is_first { tiers.next() } else { tiers.nth(1) };
                if let Some(tier) = tier {
                    teller.stored(parent, node.block, tier);
                }
            }
        }
    }

    /// A block and those behind it as long as they are `wanted`, parents first; with its siblings or without.
    fn walk(&self, from: u32, with_siblings: bool, wanted: impl Fn(&Node) -> bool) -> Vec<u32> {
        let mut found = Vec::new();
        // Places that are still to be visited: no recursion, since chains are tens of thousands of blocks long.
        let mut open = vec![(from, with_siblings)];
        while let Some((place, with_siblings)) = open.pop() {
            let Some(node) = self.nodes.get(place as usize) else { continue };
            if with_siblings {
                open.push((node.next, true));
            }
            if wanted(node) {
                found.push(place);
                open.push((node.first_child, true));
            }
        }
        found
    }

    /// Frees a block of which there is no copy and nothing behind it, and then perhaps what it stands behind.
    fn drop_unneeded(&mut self, mut place: u32) {
        while let Some(node) = self.nodes.get(place as usize) {
            if node.is_held() || node.first_child != NONE {
                return;
            }
            let (engine, parent, next, previous) =
                (node.engine, node.parent, node.next, node.previous);
            if let Some(next) = self.nodes.get_mut(next as usize) {
                next.previous = previous;
            }
            match self.nodes.get_mut(previous as usize) {
                Some(previous) => previous.next = next,
                None => self.set_first_of(parent, next),
            }
            let is_it = |other: &u32| *other == place;
            if let Ok(entry) = self.by_engine.find_entry(spread(engine), is_it) {
                entry.remove();
            }
            self.free.push(place);
            place = parent;
        }
    }
}

/// Engines' names are digests, but a hostile prompt may choose among them: the high bits are what the table goes by.
fn spread(engine: EngineHash) -> u64 {
    engine.0.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32)
}

#[cfg(test)]
#[cfg(feature = "demo")]
mod naive;
#[cfg(test)]
#[cfg(feature = "demo")]
mod tests;
