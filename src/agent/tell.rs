//! Single blocks that are stored and removed, gathered into as few changes as say the same.
//!
//! An engine names each block that it removes by itself; told like that, a full cache's turnover would be a change a block.

use crate::report::{Changes, Tier};
use crate::tokens::blocks::BlockHash;

/// See the module.
#[derive(Debug, Default)]
pub struct Teller {
    changes: Changes,
    run: Option<Run>,
}

#[derive(Debug)]
struct Run {
    kind: Kind,
    tier: Tier,
    blocks: Vec<BlockHash>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Stored(Option<BlockHash>),
    Removed,
}

impl Teller {
    /// A block is held behind its parent.
    pub fn stored(&mut self, parent: Option<BlockHash>, block: BlockHash, tier: Tier) {
        if let Some(run) = &mut self.run
            && matches!(run.kind, Kind::Stored(_))
            && run.tier == tier
            && parent.is_some()
            && run.blocks.last().copied() == parent
        {
            run.blocks.push(block);
            return;
        }
        self.begin(Kind::Stored(parent), block, tier);
    }

    /// A block is not held any more; nothing behind it is.
    pub fn removed(&mut self, block: BlockHash, tier: Tier) {
        if let Some(run) = &mut self.run
            && run.kind == Kind::Removed
            && run.tier == tier
        {
            run.blocks.push(block);
            return;
        }
        self.begin(Kind::Removed, block, tier);
    }

    fn begin(&mut self, kind: Kind, block: BlockHash, tier: Tier) {
        self.end();
        self.run = Some(Run { kind, tier, blocks: vec![block] });
    }

    fn end(&mut self) {
        let Some(Run { kind, tier, blocks }) = self.run.take() else { return };
        match kind {
            Kind::Stored(parent) => self.changes.stored(parent, &blocks, tier),
            Kind::Removed => self.changes.removed(&blocks, tier),
        }
    }

    /// All of it.
    pub fn finish(mut self) -> Changes {
        self.end();
        self.changes
    }
}
