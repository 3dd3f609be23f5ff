//! What a replica's agent would report to a gateway: what has changed in its cache since its last report.
//!
//! It stands for `warmpath-agent` and the report's way through the gateway's VMs, of which it has neither bytes nor delay of
//! its own: what a report says is true when it is made.

use super::policy::Change as Event;
use hashbrown::HashMap;
use warmpath::index::{Hearing, PrefixIndex, Room};
use warmpath::replicas::ReplicaId;
use warmpath::report::{Change, Tier};
use warmpath::tokens::blocks::BlockHash;

/// See the module.
#[derive(Default)]
pub struct Said {
    /// By block, the one that it follows; `None`: the root.
    parents: HashMap<u64, Option<u64>>,
    /// By replica, what its next report is made of.
    events: Vec<Vec<Event>>,
}

impl Said {
    /// Takes in a chain, which an engine's events would name with what they say is stored.
    pub fn learn(&mut self, blocks: &[u64]) {
        // Equal blocks have equal ones in front.
        for at in (0..blocks.len()).rev() {
            let parent = at.checked_sub(1).and_then(|at| blocks.get(at)).copied();
            let Some(block) = blocks.get(at) else { return };
            if self.parents.insert(*block, parent).is_some() {
                return;
            }
        }
    }

    /// Takes in what an engine did.
    pub fn hear(&mut self, replica: usize, events: &[Event]) {
        if self.events.len() <= replica {
            self.events.resize_with(replica + 1, Vec::new);
        }
        if let Some(all) = self.events.get_mut(replica) {
            all.extend_from_slice(events);
        }
    }

    /// Tells an index what has changed.
    pub fn tell(&mut self, index: &mut PrefixIndex, replica: usize, id: ReplicaId, blocks: usize) {
        if !index.is_reporting(id) {
            index.begin_report(id, false);
            index.complete_report(id);
        }
        let events = self.events.get_mut(replica).map(std::mem::take).unwrap_or_default();
        let (room, mut hearing) = (Room { stated: blocks, most: blocks }, Hearing::default());
        let mut run: Option<Change> = None;
        for event in events {
            if run.as_mut().is_some_and(|run| self.goes_on(run, event)) {
                continue;
            }
            tell(index, id, room, run.take(), &mut hearing);
            run = self.change(event);
            if run.is_none() {
                index.begin_report(id, false);
                index.complete_report(id);
            }
        }
        tell(index, id, room, run, &mut hearing);
        index.take_cut();
    }

    fn change(&self, event: Event) -> Option<Change> {
        match event {
            Event::Stored(block) => Some(Change::Stored {
                parent: self.parents.get(&block).copied().flatten().map(BlockHash),
                blocks: vec![BlockHash(block)],
                tier: Tier::Gpu,
            }),
            Event::Evicted(block) => {
                Some(Change::Removed { blocks: vec![BlockHash(block)], tier: Tier::Gpu })
            }
            Event::Cleared => None,
        }
    }

    /// Puts an event behind those of its kind, if it is one more of the same.
    fn goes_on(&self, run: &mut Change, event: Event) -> bool {
        match (run, event) {
            (Change::Stored { blocks, .. }, Event::Stored(block)) => {
                let parent = self.parents.get(&block).copied().flatten();
                let follows = parent.is_some() && blocks.last().map(|last| last.0) == parent;
                if follows {
                    blocks.push(BlockHash(block));
                }
                follows
            }
            (Change::Removed { blocks, .. }, Event::Evicted(block)) => {
                blocks.push(BlockHash(block));
                true
            }
            _ => false,
        }
    }
}

fn tell(
    index: &mut PrefixIndex,
    id: ReplicaId,
    room: Room,
    change: Option<Change>,
    hearing: &mut Hearing,
) {
    if let Some(change) = change {
        hearing.begin_piece();
        index.observe(id, room, &change, hearing, &mut Vec::new());
    }
}
