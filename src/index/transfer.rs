//! Handing a shadow on, run by run, in the order of its memory: no sorting and no pause, however
//! large it is.
//!
//! It knows neither who wants the shadow nor what it goes through: that is [`crate::share`]'s part.

use super::Run;
use super::shadow::{Node, NodeIndex, Shadow, Tenant};
use crate::replicas::ReplicaId;
use crate::tokens::blocks::BlockHash;

/// Blocks of one run at most: a step of handing on is some microseconds.
const RUN_BLOCKS: usize = 1024;

/// No replica is used more often: what says so is wrong, and counting on from the largest number there is would start
/// again at zero, with the newest uses as the oldest.
const MOST_USES: u64 = 1 << 62;

/// Nodes looked at in one step of settling: a millisecond or two, since each is looked at once by each pass.
const SETTLED_AT_ONCE: usize = 32 << 10;

/// Whether a node can be reached from the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Unknown,
    /// Being looked at: to come here again is to go in circles.
    Asked,
    Yes,
    No,
}

impl Shadow {
    /// The run that begins at the first block from `next` on; moves `next` behind it.
    pub(super) fn export(&self, replica: ReplicaId, next: &mut usize) -> Option<Run> {
        let rest = self.nodes.get(*next..)?;
        *next += rest.iter().position(|node| node.tenant == Tenant::Block)?;
        let first = self.nodes.get(*next)?;
        let parent = first.parent.and_then(|parent| self.nodes.get(parent as usize));
        let mut run = Run {
            replica,
            used: first.used,
            parent: parent.map(|parent| parent.hash),
            blocks: vec![first.hash],
        };
        let mut last = *next;
        while let Some(node) = self.nodes.get(last + 1) {
            let follows = node.tenant == Tenant::Block
                && node.used == first.used
                && node.parent.is_some_and(|parent| parent as usize == last);
            if !follows || run.blocks.len() >= RUN_BLOCKS {
                break;
            }
            run.blocks.push(node.hash);
            last += 1;
        }
        *next = last + 1;
        Some(run)
    }

    pub(super) fn import(&mut self, run: &Run) {
        let run_used = run.used.min(MOST_USES);
        self.uses = self.uses.max(run_used);
        let mut parent = run.parent.map(|hash| match self.by_hash.get(&hash) {
            Some(index) => *index,
            None => self.put_transferred(hash, Tenant::Named, None, 0),
        });
        for hash in &run.blocks {
            parent = Some(match self.by_hash.get(hash).copied() {
                Some(index) => {
                    if let Some(node) = self.node_mut(index) {
                        let used = node.used.max(run_used);
                        *node = Node { tenant: Tenant::Block, parent, used, ..*node };
                    }
                    index
                }
                None => self.put_transferred(*hash, Tenant::Block, parent, run_used),
            });
        }
    }

    fn put_transferred(
        &mut self,
        hash: BlockHash,
        tenant: Tenant,
        parent: Option<NodeIndex>,
        used: u64,
    ) -> NodeIndex {
        self.put(Node { hash, tenant, parent, children: 0, used })
    }

    /// Drops what cannot be reached from the root and counts children anew, some nodes at a time. Whether all is done.
    pub(super) fn settle(&mut self, settling: &mut Settling) -> bool {
        let from = settling.next;
        let to = from.saturating_add(SETTLED_AT_ONCE).min(self.nodes.len());
        for index in from..to {
            match settling.pass {
                Pass::Reach => settling.reach(&self.nodes, index),
                Pass::Drop => self.drop_unreached(settling, index),
                Pass::Children => self.count_child(index),
                Pass::Leaves => self.note_leaf(index),
            }
        }
        settling.next = to;
        if to < self.nodes.len() {
            return false;
        }
        settling.next = 0;
        settling.pass = match settling.pass {
            Pass::Reach => Pass::Drop,
            Pass::Drop => Pass::Children,
            Pass::Children => Pass::Leaves,
            Pass::Leaves => return true,
        };
        false
    }

    fn drop_unreached(&mut self, settling: &Settling, index: usize) {
        let is_reached = settling.reach.get(index) == Some(&Reach::Yes);
        let Some(node) = self.nodes.get_mut(index) else { return };
        node.children = 0;
        let hash = node.hash;
        if !is_reached && node.tenant != Tenant::Nobody {
            // A shadow has far fewer than 2^32 nodes.
            self.vacate(NodeIndex::try_from(index).unwrap_or(NodeIndex::MAX), hash);
        }
    }

    fn count_child(&mut self, index: usize) {
        let held = self.nodes.get(index).filter(|node| node.tenant == Tenant::Block);
        let parent = held.and_then(|node| node.parent);
        if let Some(parent) = parent.and_then(|parent| self.node_mut(parent)) {
            parent.children += 1;
        }
    }

    fn note_leaf(&mut self, index: usize) {
        let Some(node) = self.nodes.get(index) else { return };
        if node.tenant == Tenant::Block && node.children == 0 {
            let used = node.used;
            self.add_leaf(NodeIndex::try_from(index).unwrap_or(NodeIndex::MAX), used);
        }
    }
}

/// How far a shadow that was taken in is settled.
#[derive(Debug, Default)]
pub struct Settling {
    pass: Pass,
    /// The node to begin the next step at.
    next: usize,
    reach: Vec<Reach>,
    path: Vec<usize>,
}

/// What is done to every node before the next of these begins.
#[derive(Debug, Clone, Copy, Default)]
enum Pass {
    #[default]
    Reach,
    Drop,
    Children,
    Leaves,
}

impl Settling {
    /// Finds out whether a node can be reached. What lies between it and the root is found out by the way.
    fn reach(&mut self, nodes: &[Node], start: usize) {
        self.reach.resize(nodes.len(), Reach::Unknown);
        let mut at = Some(start);
        let reached = loop {
            let Some(index) = at else { break Reach::Yes };
            let Some((node, reach)) = nodes.get(index).zip(self.reach.get_mut(index)) else {
                break Reach::No;
            };
            match *reach {
                Reach::Unknown if node.tenant == Tenant::Block => *reach = Reach::Asked,
                // What only was named, and what goes in circles.
                Reach::Unknown | Reach::Asked => break Reach::No,
                known => break known,
            }
            self.path.push(index);
            at = node.parent.map(|parent| parent as usize);
        };
        for index in self.path.drain(..) {
            if let Some(reach) = self.reach.get_mut(index) {
                *reach = reached;
            }
        }
    }
}
