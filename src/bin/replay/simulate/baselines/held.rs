//! What each replica is thought to hold, from what it was sent: a bounded cache for each, least recently used tail out
//! first.
//!
//! This is what the approximate indexes of peers come to: a router remembers where it sent what, and forgets as the
//! engine would. A use touches only the prompt's last block; a block inherits its follower's time when that is evicted,
//! which is the only moment at which its own can matter.

use super::super::policy::ReplicaReport;
use super::holders::{ByBlock, Holders};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::ControlFlow;

/// See the module.
pub struct Held {
    holders: Holders,
    shadows: Vec<Shadow>,
}

/// One replica's blocks.
#[derive(Default)]
struct Shadow {
    capacity: usize,
    /// When its process began, once it has said so.
    started_at: Option<f64>,
    places: ByBlock<usize>,
    nodes: Vec<Node>,
    free: Vec<usize>,
    /// Blocks that nothing follows, by the time of their use. An entry is void when its block has gone, or has been
    /// used or followed since.
    tails: BinaryHeap<Reverse<(u64, usize)>>,
    uses: u64,
}

#[derive(Clone, Copy)]
struct Node {
    block: u64,
    before: Option<usize>,
    followers: usize,
    used: u64,
    is_held: bool,
}

impl Held {
    /// Nothing yet, on replicas of so many blocks each.
    pub fn new(replicas: usize, capacity: usize) -> Self {
        let shadow = || Shadow { capacity, ..Shadow::default() };
        let shadows = std::iter::repeat_with(shadow).take(replicas).collect();
        Self { holders: Holders::default(), shadows }
    }

    /// How many blocks from the first each replica holds of a prompt.
    pub fn depths(&self, blocks: &[u64]) -> Vec<usize> {
        self.holders.depths(blocks, self.shadows.len())
    }

    /// A replica was sent a prompt.
    pub fn record(&mut self, replica: usize, blocks: &[u64]) {
        let Some(shadow) = self.shadows.get_mut(replica) else { return };
        let depth = blocks.partition_point(|block| shadow.places.contains_key(block));
        let (old, new) = blocks.split_at(depth);
        shadow.extend(old.last(), new);
        new.iter().for_each(|block| self.holders.add(replica, *block));
        self.shrink(replica);
    }

    /// A replica says how many blocks it has, and by when its process began whether it still holds any.
    pub fn reported(&mut self, replica: usize, report: &ReplicaReport) {
        let Some(shadow) = self.shadows.get_mut(replica) else { return };
        let capacity = report.capacity_blocks as usize;
        let restarted =
            shadow.started_at.is_some_and(|at| at.total_cmp(&report.started_at).is_ne());
        if restarted {
            *shadow = Shadow::default();
            self.holders.clear(replica);
        }
        if let Some(shadow) = self.shadows.get_mut(replica) {
            (shadow.capacity, shadow.started_at) = (capacity, Some(report.started_at));
        }
        self.shrink(replica);
    }

    /// How many blocks a replica holds.
    pub fn count(&self, replica: usize) -> usize {
        self.shadows.get(replica).map_or(0, |shadow| shadow.places.len())
    }

    /// How many more blocks a replica must give up for so many new ones.
    pub fn excess(&self, replica: usize, new: usize) -> usize {
        let Some(shadow) = self.shadows.get(replica) else { return 0 };
        (shadow.places.len() + new).saturating_sub(shadow.capacity)
    }

    /// Shows a replica's blocks in the order in which they would be given up, until it is told that this is enough.
    pub fn oldest(&self, replica: usize, show: impl FnMut(u64) -> ControlFlow<()>) {
        if let Some(shadow) = self.shadows.get(replica) {
            shadow.oldest(show);
        }
    }

    fn shrink(&mut self, replica: usize) {
        let Some(shadow) = self.shadows.get_mut(replica) else { return };
        while shadow.places.len() > shadow.capacity {
            let Some(block) = shadow.evict() else { return };
            self.holders.remove(replica, block);
        }
    }
}

impl Shadow {
    /// Adds `new` behind the block `last`, and takes the whole chain as used now.
    fn extend(&mut self, last: Option<&u64>, new: &[u64]) {
        self.uses += 1;
        let mut before = last.and_then(|block| self.places.get(block)).copied();
        for block in new {
            if let Some(node) = before.and_then(|place| self.nodes.get_mut(place)) {
                node.followers += 1;
            }
            let node = Node { block: *block, before, followers: 0, used: 0, is_held: true };
            before = Some(self.settle(node));
        }
        if let Some(place) = before {
            self.touch(place, self.uses);
        }
    }

    fn settle(&mut self, node: Node) -> usize {
        let place = self.free.pop().unwrap_or(self.nodes.len());
        match self.nodes.get_mut(place) {
            Some(vacant) => *vacant = node,
            None => self.nodes.push(node),
        }
        self.places.insert(node.block, place);
        place
    }

    fn touch(&mut self, place: usize, used: u64) {
        if let Some(node) = self.nodes.get_mut(place) {
            node.used = node.used.max(used);
            if node.followers == 0 {
                self.tails.push(Reverse((node.used, place)));
            }
        }
    }

    /// What [`Self::evict`] would give, one after another, with nothing changed.
    fn oldest(&self, mut show: impl FnMut(u64) -> ControlFlow<()>) {
        let mut tails = self.tails.clone();
        // Followers left and time of use, of those whose followers were shown.
        let mut changed: ByBlock<(usize, u64)> = ByBlock::default();
        while let Some(Reverse((used, place))) = tails.pop() {
            let Some(node) = self.nodes.get(place).filter(|node| node.is_held) else { continue };
            let now = changed.get(&(place as u64)).copied().unwrap_or((node.followers, node.used));
            if now != (0, used) {
                continue;
            }
            if show(node.block).is_break() {
                return;
            }
            changed.insert(place as u64, (usize::MAX, used));
            let Some((place, before)) = node.before.and_then(|at| Some((at, self.nodes.get(at)?)))
            else {
                continue;
            };
            let entry = changed.entry(place as u64).or_insert((before.followers, before.used));
            *entry = (entry.0 - 1, entry.1.max(used));
            if entry.0 == 0 {
                tails.push(Reverse((entry.1, place)));
            }
        }
    }

    fn evict(&mut self) -> Option<u64> {
        loop {
            let Reverse((used, place)) = self.tails.pop()?;
            let Some(node) = self.nodes.get_mut(place) else { continue };
            if !node.is_held || node.followers > 0 || node.used != used {
                continue;
            }
            node.is_held = false;
            let Node { block, before, .. } = *node;
            self.places.remove(&block);
            self.free.push(place);
            if let Some(before) = before {
                if let Some(node) = self.nodes.get_mut(before) {
                    node.followers -= 1;
                }
                self.touch(before, used);
            }
            return Some(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::desk;
    use super::*;
    use crate::random::Random;

    /// The obvious one: every block of a prompt is stamped at its use, the head last.
    struct Naive {
        capacity: usize,
        blocks: Vec<u64>,
    }

    impl Naive {
        fn record(&mut self, blocks: &[u64]) {
            self.blocks.retain(|block| !blocks.contains(block));
            self.blocks.extend(blocks.iter().rev());
            let excess = self.blocks.len().saturating_sub(self.capacity);
            self.blocks.drain(..excess);
        }

        fn depth(&self, blocks: &[u64]) -> usize {
            blocks.iter().take_while(|block| self.blocks.contains(block)).count()
        }
    }

    /// A prompt whose blocks are named by what leads to them, so that equal ids are equal prefixes.
    fn prompt(random: &mut Random) -> Vec<u64> {
        let mut id = 1;
        (0..1 + random.below(12))
            .map(|_| {
                id = id * 3 + 1 + random.below(2) as u64;
                id
            })
            .collect()
    }

    #[test]
    fn it_holds_what_the_obvious_version_holds() {
        for seed in 0..20 {
            let mut random = Random::new(seed, 0);
            let capacity = 5 + random.below(60);
            let mut held = Held::new(2, capacity);
            let mut naive: Vec<Naive> =
                (0..2).map(|_| Naive { capacity, blocks: Vec::new() }).collect();
            for step in 0..400 {
                let (replica, blocks) = (random.below(2), prompt(&mut random));
                held.record(replica, &blocks);
                naive[replica].record(&blocks);
                let asked = prompt(&mut random);
                let expected: Vec<usize> = naive.iter().map(|one| one.depth(&asked)).collect();
                assert_eq!(held.depths(&asked), expected, "seed {seed}, step {step}");
            }
            let mut shown = Vec::new();
            held.oldest(0, |block| {
                shown.push(block);
                ControlFlow::Continue(())
            });
            assert_eq!(shown, naive[0].blocks, "seed {seed}");
            let counts = held.holders.counts(2);
            assert_eq!(counts, [naive[0].blocks.len(), naive[1].blocks.len()], "seed {seed}");
        }
    }

    #[test]
    fn a_smaller_cache_loses_the_oldest_tails_and_a_new_one_everything() {
        let mut held = Held::new(2, 10);
        held.record(0, &[1, 2, 3]);
        held.record(0, &[1, 2, 7, 8]);
        held.record(1, &[1, 2, 3]);
        let report = |capacity, started_at| ReplicaReport {
            capacity_blocks: capacity,
            ..desk::report(started_at)
        };
        held.reported(0, &report(3, 5.0));
        held.reported(1, &report(9, 5.0));
        assert_eq!(held.depths(&[1, 2, 3]), [2, 3], "the first report is no restart");
        assert_eq!(held.depths(&[1, 2, 7, 8]), [3, 2]);
        held.reported(1, &report(9, 6.0));
        assert_eq!(held.depths(&[1, 2, 3]), [2, 0]);
        held.record(1, &[1, 2, 3]);
        assert_eq!(held.depths(&[1, 2, 3]), [2, 3]);
    }
}
