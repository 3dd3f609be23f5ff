//! What replicas report of their own caches, beside what was routed there.
//!
//! A replica that reports is in the tree under one more identity, [`ReplicaId::observed`]: what it has of a chain is the most
//! that either has. What was routed there counts only until the reports must have it, if it came about.
//!
//! A report names blocks by their hashes, in no order but that a parent comes before what follows it. That is looked up
//! once, by whoever hears the report, and told to the others as stretches that every index finds its way to.
//!
//! What a slower tier alone holds counts as held, and takes longer to be used. So a replica that has such a tier is in the
//! tree once more, under [`ReplicaId::at_hand`], with what is at hand. Whether it has one must be known before a report begins.
//!
//! It does not read reports, nor does it know how they get here: see [`crate::share`].

use super::slab::NONE;
use super::tree::{Place, STRIDE, Slot, Tree};
use super::{EVICTED_AT_ONCE, PrefixIndex, Recorded, Stretch};
use crate::replicas::ReplicaId;
use crate::report::{Change, Tier};
use crate::tokens::blocks::BlockHash;
use hashbrown::HashSet;
use std::time::Duration;

/// How long what was routed to a replica that reports counts without being reported: longer than a prompt waits and is
/// computed where all is well, and than a report is late. Halved, what long prompts share is computed twice while the first
/// is; doubled, what did not come about is counted on for twice as long.
pub const CONFIRM_WITHIN: Duration = Duration::from_secs(5);

/// Blocks looked through for one piece of a report, and the rest of the last look: a millisecond. Engines compute behind ends,
/// and of what other gateways send there few begin where nothing ended before. What is looked for beyond is left out.
const MOST_LOOKED_THROUGH: usize = 1 << 20;

/// Blocks removed by one change that are neither ends nor in front of one: nobody reports such. Each takes a look at all
/// branches.
const MOST_MIDDLES: usize = 8;

/// How many blocks a replica can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// As it says, at hand: what it evicts for new ones goes by that.
    pub stated: usize,
    /// Most that are believed here.
    pub most: usize,
}

/// What only who hears a replica's reports knows of it: which of its blocks are in a slower tier, since a block is gone when
/// it is in none.
#[derive(Debug, Default)]
pub struct Hearing {
    /// Whether the replica has slower tiers.
    has_tiers: bool,
    away: HashSet<BlockHash>,
    /// Of these, the ones that are at hand, too.
    both: HashSet<BlockHash>,
    /// Blocks looked through for the present piece of a report.
    looked: usize,
}

impl Hearing {
    /// Of a report that says everything anew.
    pub fn new(has_tiers: bool) -> Self {
        Self { has_tiers, ..Self::default() }
    }

    /// Notes that a block is in a tier. `is_held`: in whichever it was.
    fn stored(&mut self, block: BlockHash, tier: Tier, is_held: bool) {
        match tier {
            Tier::Gpu if self.away.contains(&block) => drop(self.both.insert(block)),
            Tier::Gpu => {}
            Tier::Offload if self.away.insert(block) && is_held => drop(self.both.insert(block)),
            Tier::Offload => {}
        }
    }

    /// Notes that a block is not in a tier any more. Whether it is in none.
    fn removed(&mut self, block: BlockHash, tier: Tier) -> bool {
        if tier == Tier::Offload {
            return self.away.remove(&block) && !self.both.remove(&block);
        }
        !self.away.contains(&block) || {
            self.both.remove(&block);
            false
        }
    }

    /// Whether the replica has a slower tier, as far as was known when its report began.
    pub fn has_tiers(&self) -> bool {
        self.has_tiers
    }

    /// Before each piece of a report.
    pub fn begin_piece(&mut self) {
        self.looked = 0;
    }
}

/// A change as every index finds its way to it: see [`Stretch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    /// Whether they are there; else the last of them is not, nor is what follows it.
    pub is_held: bool,
    /// Whether that is so at hand: there and so held anywhere, or not there but maybe held by a slower tier.
    pub at_hand: bool,
    /// What they follow.
    pub parent: Option<BlockHash>,
    /// They.
    pub blocks: Vec<BlockHash>,
    /// How many of them only lead to those that are meant.
    pub known: u32,
}

impl Sighting {
    fn stretch(&self) -> Stretch<'_> {
        Stretch { parent: self.parent, blocks: &self.blocks, known: self.known as usize }
    }
}

/// What the replica itself says.
impl PrefixIndex {
    /// Takes in a change that a replica reports, and tells it for other indices.
    pub fn observe(
        &mut self,
        replica: ReplicaId,
        room: Room,
        change: &Change,
        hearing: &mut Hearing,
        told: &mut Vec<Sighting>,
    ) {
        let slot = self.slot(replica.observed());
        match change {
            Change::Stored { parent, blocks, tier } => {
                let blocks = match tier {
                    Tier::Offload => blocks.get(..room.most - hearing.away.len().min(room.most)),
                    Tier::Gpu => None,
                }
                .unwrap_or(blocks);
                let next = blocks.first().copied();
                let looked = &mut hearing.looked;
                let place = match *parent {
                    None => Some(Place::ROOT),
                    Some(parent) => self.tree.locate(slot, parent, next, looked),
                };
                let Some(place) = place else {
                    self.cut += blocks.len() as u64;
                    return;
                };
                if hearing.has_tiers {
                    let held = self.tree.follow(slot, place, blocks);
                    let held = self.depth(held).saturating_sub(self.depth(place));
                    for (at, block) in blocks.iter().enumerate().take(room.most) {
                        hearing.stored(*block, *tier, at < held);
                    }
                }
                let sighting = self.tree.told(place, blocks, *tier == Tier::Gpu);
                self.put(slot, room, place, blocks);
                self.put_at_hand(replica, room, &sighting);
                told.push(sighting);
            }
            Change::Removed { blocks, tier } => {
                let before = told.len();
                let at_hand = self.slots.get(&replica.at_hand()).copied();
                if let Some(slot) = at_hand.filter(|_| *tier == Tier::Gpu) {
                    self.tree.remove(slot, blocks, &mut hearing.looked, told);
                    told.iter_mut().skip(before).for_each(|sighting| sighting.at_hand = true);
                }
                let gone: Vec<BlockHash>;
                let mut blocks = blocks;
                if hearing.has_tiers {
                    gone = blocks.iter().copied().filter(|b| hearing.removed(*b, *tier)).collect();
                    blocks = &gone;
                }
                self.tree.remove(slot, blocks, &mut hearing.looked, told);
                for sighting in told.get(before..).unwrap_or_default() {
                    self.lose(replica, sighting.stretch());
                }
            }
        }
    }

    /// Takes in what is at hand of a replica that has slower tiers, if there is a way to it that is.
    fn put_at_hand(&mut self, replica: ReplicaId, room: Room, sighting: &Sighting) {
        let slot = self.slots.get(&replica.at_hand()).copied();
        let Some(slot) = slot.filter(|_| sighting.at_hand) else { return };
        if let Some((place, new)) = self.way_to(slot, sighting) {
            let cut = self.cut;
            self.put(slot, room, place, new);
            // What there is no room for is counted where all of it is held.
            self.cut = cut;
        }
    }

    /// Where a replica's new blocks begin, and they; `None` where it does not hold what leads to them.
    fn way_to<'a>(&self, slot: Slot, sighting: &'a Sighting) -> Option<(Place, &'a [BlockHash])> {
        let (known, new) = sighting.blocks.split_at_checked(sighting.known as usize)?;
        let from = self.held_place(slot, sighting.parent)?;
        let place = self.tree.follow(slot, from, known);
        (self.depth(place) == self.depth(from) + known.len()).then_some((place, new))
    }

    /// Takes in what another index has told.
    pub fn sight(&mut self, replica: ReplicaId, room: Room, sighting: &Sighting) -> Recorded {
        let id = replica.observed();
        let stretch = sighting.stretch();
        if !sighting.is_held {
            self.lose(replica.at_hand(), stretch);
            if !sighting.at_hand {
                self.lose(id, stretch);
            }
            // What was routed there is not waited for any more: it came about, and has been evicted. Where it was routed
            // once more since, that is reported again soon.
            self.lose(replica, stretch);
            return Recorded::Held;
        }
        let slot = self.slot(id);
        let Some((place, new)) = self.way_to(slot, sighting) else {
            self.cut += sighting.blocks.len().saturating_sub(sighting.known as usize) as u64;
            return Recorded::Orphaned;
        };
        self.put(slot, room, place, new);
        self.put_at_hand(replica, room, sighting);
        Recorded::Held
    }

    fn put(&mut self, slot: Slot, room: Room, place: Place, blocks: &[BlockHash]) {
        if let Some(shadow) = self.tree.shadow_mut(slot) {
            (shadow.capacity, shadow.stated) = (room.most, room.stated);
        }
        let in_front = self.depth(place);
        let most = room.most.saturating_sub(in_front).min(blocks.len());
        self.used += 1;
        let end = self.tree.insert(slot, place, blocks.get(..most).unwrap_or(blocks), self.used);
        // What is said again is no use, but it says that the engine has it in hand.
        let hold = self.tree.hold_of(end.segment, slot);
        if let Some(at) = hold.filter(|at| self.tree.is_held_to(*at, end.blocks)) {
            self.tree.touch(at, self.used);
        }
        let placed = self.depth(end).saturating_sub(in_front);
        let gone = self.tree.evict(slot, blocks.len() + EVICTED_AT_ONCE);
        self.cut += (blocks.len().saturating_sub(placed) + gone) as u64;
        self.clear_away(EVICTED_AT_ONCE);
    }

    /// Blocks that replicas reported and that were left out here, since a replica claims more than it has room for, or
    /// something that follows nothing. Since the last call.
    pub fn take_cut(&mut self) -> u64 {
        std::mem::take(&mut self.cut)
    }

    /// Says anew what a replica that reports has room for.
    pub fn set_room(&mut self, replica: ReplicaId, room: Room) {
        for id in [replica.observed(), replica.at_hand()] {
            let slot = self.slots.get(&id).copied();
            if let Some(shadow) = slot.and_then(|slot| self.tree.shadow_mut(slot)) {
                (shadow.capacity, shadow.stated) = (room.most, room.stated);
            }
        }
    }

    /// Whether a replica reports, and all of a report has been taken in.
    #[inline]
    pub fn is_reporting(&self, replica: ReplicaId) -> bool {
        self.reporting.contains(&replica)
    }

    /// Blocks that a replica says it holds, of those that are known here.
    pub fn observed_blocks(&self, replica: ReplicaId) -> usize {
        self.held_blocks(replica.observed())
    }

    /// A report begins that says everything anew: what was known before is of a cache that is no more, and so is what was
    /// routed there while the replica reported. `has_tiers`: some of what it says may be in a slower tier.
    pub fn begin_report(&mut self, replica: ReplicaId, has_tiers: bool) {
        self.leave(replica.observed());
        self.leave(replica.at_hand());
        if has_tiers {
            self.slot(replica.at_hand());
        }
        if self.reporting.remove(&replica) {
            self.leave(replica);
        }
    }

    /// All of a report has been taken in. What was believed of the replica before it reported is not any more.
    pub fn complete_report(&mut self, replica: ReplicaId) {
        if self.reporting.insert(replica) {
            self.leave(replica);
            self.slot(replica.observed());
        }
    }

    /// Whose reports are complete in the index that this one was taken in from, and whether they have slower tiers.
    pub fn go_on_reporting(&mut self, replicas: impl Iterator<Item = (ReplicaId, bool)>) {
        for (replica, has_tiers) in replicas {
            if has_tiers {
                self.slot(replica.at_hand());
            }
            self.reporting.insert(replica);
            self.slot(replica.observed());
        }
    }

    /// The replica reports no longer. Of what it holds, what it said last is the best that is known, and grows old from now
    /// on as what is routed does.
    pub fn end_reports(&mut self, replica: ReplicaId) {
        let was_reporting = self.reporting.remove(&replica);
        let observed = self.slots.get(&replica.observed()).copied().filter(|_| was_reporting);
        if let Some(slot) = observed {
            self.slots.remove(&replica.observed());
            self.leave(replica);
            if let Some(shadow) = self.tree.shadow_mut(slot) {
                (shadow.id, shadow.is_observed) = (replica, false);
            }
            self.slots.insert(replica, slot);
        }
        self.leave(replica.observed());
        self.leave(replica.at_hand());
    }

    /// Forgets what is known under an identity; its memory is given back with the next records and [`Self::shrink`].
    pub(super) fn leave(&mut self, id: ReplicaId) {
        let Some(slot) = self.slots.remove(&id) else { return };
        self.leaving.push(slot);
        if let Some(shadow) = self.tree.shadow_mut(slot) {
            shadow.capacity = 0;
        }
    }

    /// Drops what was routed to replicas that report and was not reported since, at most so many blocks. Returns how many
    /// are left of that.
    pub(super) fn expire(&mut self, most: usize) -> usize {
        let mut left = most;
        let since = self.used.saturating_sub(CONFIRM_WITHIN.as_micros() as u64);
        for replica in &self.reporting {
            if left > 0
                && let Some(slot) = self.slots.get(replica)
            {
                left = left.saturating_sub(self.tree.expire(*slot, since, left));
            }
        }
        left
    }

    /// Where what was routed to a replica is, and what it reports.
    pub(super) fn slots_of(&self, replica: ReplicaId) -> impl Iterator<Item = Slot> {
        self.slots.get(&replica).copied().into_iter().chain(self.observed_slot(replica))
    }

    #[inline]
    pub(super) fn observed_slot(&self, replica: ReplicaId) -> Option<Slot> {
        let is_real = self.hears_reports && replica.real() == replica;
        is_real.then(|| self.slots.get(&replica.observed()).copied()).flatten()
    }

    /// Where that is of what it reports which it has at hand, if it has slower tiers.
    #[inline]
    pub(super) fn at_hand_slot(&self, replica: ReplicaId) -> Option<Slot> {
        let is_real = self.hears_reports && replica.real() == replica;
        is_real.then(|| self.slots.get(&replica.at_hand()).copied()).flatten()
    }

    /// By whom a replica's room is judged: itself, where it reports.
    pub(super) fn room_slot(&self, replica: ReplicaId) -> Option<Slot> {
        let id = if self.is_reporting(replica) { replica.observed() } else { replica };
        self.slots.get(&id).copied()
    }

    /// Makes a replica's routed part hold what is in front of a place that its reported part holds, so that something can be
    /// routed behind it.
    pub(super) fn lay_to(
        &mut self,
        replica: ReplicaId,
        slot: Slot,
        parent: BlockHash,
    ) -> Option<Place> {
        let place = self.tree.place_of(parent)?;
        let is_held = self.observed_slot(replica).is_some_and(|other| {
            let hold = self.tree.hold_of(place.segment, other);
            hold.is_some_and(|at| self.tree.is_held_at_least(at, place.blocks))
        });
        if !is_held {
            return None;
        }
        // As what is going to be put behind it.
        self.tree.lay(slot, place, self.used + 1);
        Some(place)
    }
}

impl Tree {
    pub(super) fn is_held_to(&self, at: u32, blocks: u32) -> bool {
        self.holds.get(at).is_some_and(|hold| hold.held == blocks)
    }

    pub(super) fn is_held_at_least(&self, at: u32, blocks: u32) -> bool {
        self.holds.get(at).is_some_and(|hold| hold.held >= blocks)
    }

    /// Makes a replica hold everything from the root to a place.
    fn lay(&mut self, slot: Slot, place: Place, used: u64) {
        let mut path = vec![(place.segment, place.blocks)];
        let mut at = self.segments.get(place.segment).map_or(NONE, |segment| segment.parent);
        while let Some(segment) = self.segments.get(at) {
            if self.hold_of(at, slot).is_some_and(|hold| self.is_held_to(hold, segment.len())) {
                break;
            }
            path.push((at, segment.len()));
            at = segment.parent;
        }
        for (segment, blocks) in path.into_iter().rev() {
            self.hold(slot, segment, blocks, used);
        }
    }

    /// The place behind a block that a replica holds. Ends and every [`STRIDE`]th block are
    /// found at once; so is what `next` follows, if somebody is known to have that; else all that the replica has is looked
    /// through, what it had last first.
    fn locate(
        &self,
        slot: Slot,
        hash: BlockHash,
        next: Option<BlockHash>,
        looked: &mut usize,
    ) -> Option<Place> {
        if let Some(hold) = self.ends.find(&self.segments, &self.holds, (slot, hash)) {
            let hold = self.holds.get(hold)?;
            return Some(Place { segment: hold.segment, blocks: hold.held });
        }
        let by_next =
            || self.in_front_of(next?).filter(|place| self.block_at(*place) == Some(hash));
        if let Some(place) = self.place_of(hash).or_else(by_next) {
            let hold = self.hold_of(place.segment, slot);
            return hold.filter(|at| self.is_held_at_least(*at, place.blocks)).map(|_| place);
        }
        let mut found = None;
        self.look_through(slot, looked, |place, block| {
            if block == hash {
                found = Some(place);
            }
            block == hash
        });
        found
    }

    fn block_at(&self, place: Place) -> Option<BlockHash> {
        self.segments.get(place.segment)?.block(place.blocks.checked_sub(1)?)
    }

    /// The place in front of a block that can be found by its hash.
    fn in_front_of(&self, hash: BlockHash) -> Option<Place> {
        self.before(self.place_of(hash)?)
    }

    /// One block nearer to the root.
    fn before(&self, place: Place) -> Option<Place> {
        if place.blocks > 1 {
            return Some(Place { blocks: place.blocks - 1, ..place });
        }
        let parent = self.segments.get(place.segment)?.parent;
        Some(
            self.segments
                .get(parent)
                .map_or(Place::ROOT, |segment| Place { segment: parent, blocks: segment.len() }),
        )
    }

    /// Goes through all that a replica holds, branch by branch, until `is_enough` or too much was looked through.
    fn look_through(
        &self,
        slot: Slot,
        looked: &mut usize,
        mut is_enough: impl FnMut(Place, BlockHash) -> bool,
    ) {
        let mut seen = HashSet::new();
        let mut next = self.shadow(slot).map_or(NONE, |shadow| shadow.newest);
        while let Some(leaf) = self.holds.get(next).filter(|_| *looked < MOST_LOOKED_THROUGH) {
            let (mut id, mut held) = (leaf.segment, leaf.held);
            next = leaf.older;
            // What is in front of a branch has not always a place of its own in the order.
            while let Some(segment) = self.segments.get(id).filter(|_| seen.insert(id)) {
                for at in 0..held {
                    let place = Place { segment: id, blocks: at + 1 };
                    if segment.block(at).is_some_and(|block| is_enough(place, block)) {
                        *looked += at as usize;
                        return;
                    }
                }
                // A branch of few blocks takes its time, too.
                *looked += held as usize + 32;
                id = segment.parent;
                held = self.segments.get(id).map_or(0, super::tree::Segment::len);
            }
        }
    }

    /// Takes blocks from a replica, and what is behind them.
    fn remove(
        &mut self,
        slot: Slot,
        blocks: &[BlockHash],
        looked: &mut usize,
        told: &mut Vec<Sighting>,
    ) {
        let rest = self.remove_ends(slot, blocks, told);
        // They may have been named from the root on.
        let rest: Vec<BlockHash> = rest.into_iter().rev().collect();
        let rest = self.remove_ends(slot, &rest, told);
        if rest.is_empty() || self.shadow(slot).is_none_or(|shadow| shadow.held == 0) {
            return;
        }
        let rest: HashSet<BlockHash> = rest.into_iter().collect();
        let mut found = Vec::new();
        self.look_through(slot, looked, |place, block| {
            if rest.contains(&block) {
                found.push(place);
            }
            found.len() == rest.len()
        });
        // What is nearest to the root takes the others along.
        found.sort_unstable_by_key(|place| self.depth_of(*place));
        let mut middles = 0;
        for place in found {
            let hold = self.hold_of(place.segment, slot);
            if hold.is_some_and(|at| self.is_held_at_least(at, place.blocks))
                && middles < MOST_MIDDLES
            {
                told.push(self.told_gone(place));
                self.lose_behind(slot, place.segment, place.blocks - 1);
                middles += 1;
            }
        }
    }

    /// Takes those blocks that nothing follows, one after the other. Returns the others.
    fn remove_ends(
        &mut self,
        slot: Slot,
        blocks: &[BlockHash],
        told: &mut Vec<Sighting>,
    ) -> Vec<BlockHash> {
        let mut rest = Vec::new();
        let mut next = blocks.iter().copied().peekable();
        while let Some(block) = next.next() {
            let end = self.ends.find(&self.segments, &self.holds, (slot, block));
            let hold = end.and_then(|at| Some((at, self.holds.get(at)?)));
            let Some((at, hold)) = hold.filter(|(_, hold)| hold.children == 0) else {
                rest.push(block);
                continue;
            };
            let (segment, mut first) = (hold.segment, hold.held);
            while let Some(before) = self.block_at(Place { segment, blocks: first - 1 })
                && next.next_if_eq(&before).is_some()
            {
                first -= 1;
            }
            told.push(self.told_gone(Place { segment, blocks: first }));
            self.cut(at, first - 1);
        }
        rest
    }

    fn depth_of(&self, place: Place) -> u32 {
        self.segments.get(place.segment).map_or(0, |segment| segment.start) + place.blocks
    }

    /// The blocks that lead to a place from the last one that every index finds by its hash, and that one.
    fn lead(&self, place: Place) -> (Option<BlockHash>, Vec<BlockHash>) {
        let steps = self.depth_of(place) as usize % STRIDE;
        let (mut at, mut lead) = (place, Vec::with_capacity(steps + 1));
        for _ in 0..steps {
            lead.extend(self.block_at(at));
            at = self.before(at).unwrap_or(Place::ROOT);
        }
        lead.reverse();
        (self.block_at(at), lead)
    }

    fn told(&self, place: Place, blocks: &[BlockHash], at_hand: bool) -> Sighting {
        let (parent, mut lead) = self.lead(place);
        let known = u32::try_from(lead.len()).unwrap_or(0);
        lead.extend_from_slice(blocks);
        Sighting { is_held: true, at_hand, parent, blocks: lead, known }
    }

    fn told_gone(&self, gone: Place) -> Sighting {
        let (parent, mut lead) = self.lead(self.before(gone).unwrap_or(Place::ROOT));
        let known = u32::try_from(lead.len()).unwrap_or(0);
        lead.extend(self.block_at(gone));
        Sighting { is_held: false, at_hand: false, parent, blocks: lead, known }
    }
}
