//! Handing a shadow on, run by run, in the order of its memory: no sorting and no pause, however
//! large it is.

use super::Run;
use super::shadow::{Node, NodeIndex, Shadow, Tenant};
use crate::replicas::ReplicaId;
use crate::tokens::blocks::BlockHash;

/// Blocks of one run at most: a step of handing on is some microseconds.
const RUN_BLOCKS: usize = 1024;

/// No replica is used more often: what says so is wrong, and counting on from the largest number there is would start
/// again at zero, with the newest uses as the oldest.
const MOST_USES: u64 = 1 << 62;

/// Whether a node can be reached from the root.
#[derive(Clone, Copy, PartialEq, Eq)]
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

    /// Drops what cannot be reached from the root, and counts children anew.
    pub(super) fn settle(&mut self) {
        let reach = self.reach();
        for (index, reach) in (0..).zip(reach) {
            let Some(node) = self.node_mut(index) else { break };
            node.children = 0;
            let hash = node.hash;
            if reach == Reach::No && node.tenant != Tenant::Nobody {
                self.vacate(index, hash);
            }
        }
        for index in 0..self.nodes.len() {
            let held = self.nodes.get(index).filter(|node| node.tenant == Tenant::Block);
            let parent = held.and_then(|node| node.parent);
            if let Some(parent) = parent.and_then(|parent| self.node_mut(parent)) {
                parent.children += 1;
            }
        }
        self.rebuild_leaves();
    }

    fn reach(&self) -> Vec<Reach> {
        let mut all = vec![Reach::Unknown; self.nodes.len()];
        let mut path = Vec::new();
        for start in 0..self.nodes.len() {
            let mut at = Some(start);
            let reached = loop {
                let Some(index) = at else { break Reach::Yes };
                let Some((node, reach)) = self.nodes.get(index).zip(all.get_mut(index)) else {
                    break Reach::No;
                };
                match *reach {
                    Reach::Unknown if node.tenant == Tenant::Block => *reach = Reach::Asked,
                    Reach::Unknown | Reach::Asked => break Reach::No,
                    known => break known,
                }
                path.push(index);
                at = node.parent.map(|parent| parent as usize);
            };
            for index in path.drain(..) {
                if let Some(reach) = all.get_mut(index) {
                    *reach = reached;
                }
            }
        }
        // What is left is what only was named.
        all.iter().map(|reach| if *reach == Reach::Yes { Reach::Yes } else { Reach::No }).collect()
    }
}
