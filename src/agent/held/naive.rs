//! The obvious version: what is told is found out anew each time.

use super::{Behind, Named};
use crate::agent::events::EngineHash;
use crate::report::{Change, Tier};
use crate::tokens::blocks::BlockHash;
use std::collections::{BTreeMap, BTreeSet};

struct Block {
    name: Option<BlockHash>,
    parent: Option<EngineHash>,
    copies: BTreeMap<Tier, u32>,
}

/// See the module.
#[derive(Default)]
pub struct Naive {
    blocks: BTreeMap<EngineHash, Block>,
}

impl Naive {
    /// Whether it could be placed.
    pub fn store(&mut self, behind: Behind, blocks: &[Named], tier: Tier) -> bool {
        let mut parent = match behind {
            Behind::Root => None,
            Behind::Block(parent) if self.is_known(parent) => Some(parent),
            Behind::Block(_) => return false,
        };
        for named in blocks {
            let new = Block { name: named.block, parent, copies: BTreeMap::new() };
            let block = self.blocks.entry(named.engine).or_insert(new);
            *block.copies.entry(tier).or_default() += 1;
            parent = Some(named.engine);
        }
        true
    }

    /// Whether there was a copy.
    pub fn remove(&mut self, engine: EngineHash, tier: Tier) -> bool {
        let copies = self.blocks.get_mut(&engine).and_then(|block| block.copies.get_mut(&tier));
        let Some(copies) = copies.filter(|copies| **copies > 0) else { return false };
        *copies -= 1;
        let unknown: Vec<EngineHash> =
            self.blocks.keys().copied().filter(|engine| !self.is_known(*engine)).collect();
        unknown.iter().for_each(|engine| drop(self.blocks.remove(engine)));
        true
    }

    fn is_held(&self, engine: EngineHash) -> bool {
        self.blocks
            .get(&engine)
            .is_some_and(|block| block.copies.values().any(|copies| *copies > 0))
    }

    /// It is held, or something behind it is.
    pub fn is_known(&self, engine: EngineHash) -> bool {
        let is_behind = |mut other: EngineHash| loop {
            if other == engine {
                return true;
            }
            match self.blocks[&other].parent {
                Some(parent) => other = parent,
                None => return false,
            }
        };
        self.blocks.keys().any(|other| self.is_held(*other) && is_behind(*other))
    }

    fn is_told(&self, engine: EngineHash) -> bool {
        let mut at = Some(engine);
        while let Some(engine) = at {
            let block = &self.blocks[&engine];
            if block.name.is_none() || !self.is_held(engine) {
                return false;
            }
            at = block.parent;
        }
        true
    }

    /// What a reader should know.
    pub fn told(&self) -> BTreeSet<(BlockHash, Tier)> {
        let told = self.blocks.iter().filter(|(engine, _)| self.is_told(**engine));
        told.flat_map(|(_, block)| {
            let tiers = block.copies.iter().filter(|(_, copies)| **copies > 0);
            tiers.map(|(tier, _)| (block.name.unwrap(), *tier))
        })
        .collect()
    }

    /// Blocks that are held, and those of them that are told, that are left out by their name or one in front.
    pub fn counts(&self) -> (u64, u64, u64) {
        let held = self.blocks.keys().filter(|engine| self.is_held(**engine));
        let (mut told, mut left_out, mut unreachable) = (0, 0, 0);
        for engine in held {
            let mut at = Some(*engine);
            let mut is_left_out = false;
            while let Some(engine) = at {
                is_left_out |= self.blocks[&engine].name.is_none();
                at = self.blocks[&engine].parent;
            }
            if self.is_told(*engine) {
                told += 1;
            } else if is_left_out {
                left_out += 1;
            } else {
                unreachable += 1;
            }
        }
        (told, left_out, unreachable)
    }
}

/// What a reader makes of changes. It fails on any that its own rules do not allow.
#[derive(Default)]
pub struct Reader {
    pub held: BTreeSet<(BlockHash, Tier)>,
    parents: BTreeMap<BlockHash, Option<BlockHash>>,
}

impl Reader {
    fn has(&self, block: BlockHash) -> bool {
        [Tier::Gpu, Tier::Offload].iter().any(|tier| self.held.contains(&(block, *tier)))
    }

    pub fn take(&mut self, change: &Change) {
        match change {
            Change::Stored { parent, blocks, tier } => {
                let mut parent = *parent;
                for block in blocks {
                    assert!(
                        parent.is_none_or(|parent| self.has(parent)),
                        "{block:?} behind nothing"
                    );
                    assert!(self.held.insert((*block, *tier)), "{block:?} was stored already");
                    self.parents.insert(*block, parent);
                    parent = Some(*block);
                }
            }
            Change::Removed { blocks, tier } => {
                for block in blocks {
                    assert!(self.held.remove(&(*block, *tier)), "{block:?} was not stored");
                    let behind =
                        self.held.iter().find(|(other, _)| self.parents[other] == Some(*block));
                    assert!(self.has(*block) || behind.is_none(), "{behind:?} hangs in the air");
                }
            }
        }
    }
}
