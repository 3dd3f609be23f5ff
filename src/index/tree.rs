//! The blocks of all replicas in one tree of segments, and who holds how much of each.
//!
//! A segment is a stretch of blocks that nobody has branched off within. A hold says how many of a segment's blocks, from
//! its first on, one replica has. Two things are always true and carry everything else:
//!
//! - Who holds anything of a segment holds all of what is in front of it. So the deepest hold of a replica on a chain says
//!   how far it has that chain, and within a segment the first difference is found by halving.
//! - Somebody holds a segment to its end: what nobody holds is not kept.
//!
//! It does not know which use was when, nor what a replica has room for: see [`super::shadow`].

use super::Seeded;
use super::ends::Ends;
use super::places::Places;
use super::shadow::{Shadow, UNLINKED};
use super::slab::{NONE, Slab, Spare};
use crate::tokens::blocks::BlockHash;

/// Every block whose place in its chain is a multiple of this can be found by its hash alone; others only behind one. At
/// half of it the index takes half a byte more for each block; at double, logs name eight blocks more with each record.
pub(super) const STRIDE: usize = 16;

/// A replica's number within an index.
pub(super) type Slot = u16;

/// The slot of a hold that is not in use.
pub(super) const NOBODY: Slot = Slot::MAX;

#[derive(Debug)]
pub(super) struct Segment {
    pub(super) head: BlockHash,
    pub(super) rest: Box<[BlockHash]>,
    /// The segment that it follows; [`NONE`]: the root.
    pub(super) parent: u32,
    /// Blocks in front of it, from the root on.
    pub(super) start: u32,
    /// The first of its holds; each has the next one's number.
    pub(super) holds: u32,
    /// How many these are.
    pub(super) holders: u32,
    /// Segments that follow.
    pub(super) children: u32,
}

impl Segment {
    pub(super) fn len(&self) -> u32 {
        // A chain has at most 65,536 blocks, and what others hand on far fewer than 2^32.
        u32::try_from(self.rest.len()).unwrap_or(u32::MAX).saturating_add(1)
    }

    pub(super) fn block(&self, at: u32) -> Option<BlockHash> {
        match at.checked_sub(1) {
            None => Some(self.head),
            Some(at) => self.rest.get(at as usize).copied(),
        }
    }

    /// How many blocks behind the first `from` are those of `chain`.
    fn common(&self, from: u32, chain: &[BlockHash]) -> u32 {
        let (head, rest, chain) = match from.checked_sub(1) {
            None if chain.first() != Some(&self.head) => return 0,
            None => (1, &*self.rest, chain.get(1..)),
            Some(from) => (0, self.rest.get(from as usize..).unwrap_or_default(), Some(chain)),
        };
        head + u32::try_from(common(rest, chain.unwrap_or_default())).unwrap_or(0)
    }
}

/// How many blocks two stretches behind the same block share. Equal hashes are equal prefixes, so the last ones tell first.
fn common(a: &[BlockHash], b: &[BlockHash]) -> usize {
    let most = a.len().min(b.len());
    let same = |at: usize| a.get(at) == b.get(at);
    if most == 0 || same(most - 1) {
        return most;
    }
    let (mut same_to, mut differs_at) = (0, most - 1);
    while same_to < differs_at {
        let middle = usize::midpoint(same_to, differs_at);
        if same(middle) { same_to = middle + 1 } else { differs_at = middle }
    }
    same_to
}

impl Spare for Segment {
    fn spare(&mut self) -> &mut u32 {
        &mut self.parent
    }
}

/// What one replica has of one segment. 32 bytes, of which there are as many as a replica has branches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    pub(super) segment: u32,
    /// The segment's next hold.
    pub(super) next: u32,
    /// The replica's hold that was used before, and the one after; [`UNLINKED`] where it has no place in that order.
    pub(super) older: u32,
    pub(super) newer: u32,
    /// Blocks of the segment.
    pub(super) held: u32,
    /// Segments that follow and of which this replica holds something.
    pub(super) children: u32,
    used_low: u32,
    used_high: u16,
    pub(super) slot: Slot,
}

impl Hold {
    fn new(slot: Slot, segment: u32, held: u32, children: u32, used: u64) -> Self {
        let (older, newer) = (UNLINKED, UNLINKED);
        let (used_low, used_high) = (0, 0);
        let mut hold =
            Self { segment, next: NONE, older, newer, held, children, used_low, used_high, slot };
        hold.set_used(used);
        hold
    }

    /// When it was last used to its end, by [`super::PrefixIndex`]'s count.
    pub(super) fn used(&self) -> u64 {
        u64::from(self.used_high) << 32 | u64::from(self.used_low)
    }

    pub(super) fn set_used(&mut self, used: u64) {
        self.used_low = used as u32;
        self.used_high = (used >> 32) as u16;
    }
}

impl Spare for Hold {
    fn spare(&mut self) -> &mut u32 {
        &mut self.next
    }
}

/// A place in the tree: behind so many blocks of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) segment: u32,
    pub(super) blocks: u32,
}

impl Place {
    pub(super) const ROOT: Self = Self { segment: NONE, blocks: 0 };
}

/// Segments of a path that are found step by step, each by its hash. Most paths have a few; behind these some ten look-ups find
/// the end of any, so halved a short path may take twice as many, and doubled a long one.
const STEPS: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) segments: Slab<Segment>,
    pub(super) holds: Slab<Hold>,
    pub(super) shadows: Vec<Shadow>,
    places: Places,
    pub(super) ends: Ends,
    /// Holds that came about by splitting while the tree is handed on: the cursor may be past their place.
    pub(super) late: Option<Vec<u32>>,
}

/// Splits that are remembered while a tree is handed on. Beyond, a reader misses what hangs behind them.
const MOST_LATE: usize = 1 << 16;

impl Tree {
    pub(super) fn new(seeded: Seeded) -> Self {
        Self { places: Places::new(seeded), ends: Ends::new(seeded), ..Self::default() }
    }

    /// The place behind a block that can be found by its hash.
    pub(super) fn place_of(&self, hash: BlockHash) -> Option<Place> {
        let (segment, at) = self.places.find(&self.segments, hash)?;
        let start = self.segments.get(segment)?.start;
        Some(Place { segment, blocks: at.checked_sub(start)? + 1 })
    }

    /// The segments that a chain goes through, and how many blocks of each are the chain's.
    pub(super) fn path(&self, chain: &[BlockHash]) -> Vec<Place> {
        self.path_by(chain, STEPS)
    }

    /// As [`Self::path`], which is so found however many steps come before the leap.
    pub(super) fn path_by(&self, chain: &[BlockHash], steps: usize) -> Vec<Place> {
        let mut path = Vec::with_capacity(16);
        self.walk(chain, &mut path, steps);
        if path.len() == steps {
            self.leap(chain, &mut path);
            self.walk(chain, &mut path, usize::MAX);
        }
        path
    }

    /// Goes on from a path's end, a segment at a time, until it has so many.
    fn walk(&self, chain: &[BlockHash], path: &mut Vec<Place>, most: usize) {
        let Some((mut parent, mut depth)) = self.end_of(path) else { return };
        while path.len() < most
            && let Some((head, rest)) =
                chain.get(depth..).and_then(|rest| Some((rest.first()?, rest)))
        {
            let Some(id) = self.child(parent, *head) else { break };
            let Some(segment) = self.segments.get(id) else { break };
            let blocks = segment.common(0, rest);
            path.push(Place { segment: id, blocks });
            if blocks < segment.len() {
                break;
            }
            depth += blocks as usize;
            parent = id;
        }
    }

    /// The segment at the end of a path, and the blocks to there. `None` where the chain leaves that segment.
    fn end_of(&self, path: &[Place]) -> Option<(u32, usize)> {
        let Some(last) = path.last() else { return Some((NONE, 0)) };
        let segment = self.segments.get(last.segment)?;
        (last.blocks == segment.len())
            .then_some((last.segment, (segment.start + last.blocks) as usize))
    }

    /// Goes on from a path's end at once to the deepest block of the chain that can be found by its hash: by halving, and
    /// from there back, from segment to segment.
    ///
    /// What is found is what steps would find. Where a block is not at its place in the chain, or what is in front of it is
    /// not the chain's, the path stays as it is: only what nobody has computed can be so.
    fn leap(&self, chain: &[BlockHash], path: &mut Vec<Place>) {
        let Some((end, depth)) = self.end_of(path) else { return };
        // The last block of each so many.
        let spot = |number: usize| {
            let at = number * STRIDE + STRIDE - 1;
            let (segment, place) = self.places.find(&self.segments, *chain.get(at)?)?;
            (place as usize == at).then_some(segment)
        };
        let (mut found, mut from, mut to) = (None, depth / STRIDE, chain.len() / STRIDE);
        while from < to {
            let middle = usize::midpoint(from, to);
            match spot(middle) {
                Some(segment) => (found, from) = (Some(segment), middle + 1),
                None => to = middle,
            }
        }
        let (kept, mut id) = (path.len(), found.unwrap_or(end));
        while id != end {
            let (at, is_last) = (self.segments.get(id), path.len() == kept);
            let rest = at.and_then(|segment| chain.get(segment.start as usize..));
            let blocks = at.zip(rest).map_or(0, |(segment, rest)| segment.common(0, rest));
            if blocks == 0 || !(is_last || at.is_some_and(|segment| blocks == segment.len())) {
                path.truncate(kept);
                break;
            }
            path.push(Place { segment: id, blocks });
            id = at.map_or(end, |segment| segment.parent);
        }
        path.get_mut(kept..).unwrap_or_default().reverse();
    }

    pub(super) fn child(&self, parent: u32, head: BlockHash) -> Option<u32> {
        let (id, _) = self.places.find(&self.segments, head)?;
        let segment = self.segments.get(id)?;
        (segment.head == head && segment.parent == parent).then_some(id)
    }

    pub(super) fn hold_of(&self, segment: u32, slot: Slot) -> Option<u32> {
        self.holds_of(segment).find(|(_, hold)| hold.slot == slot).map(|(id, _)| id)
    }

    pub(super) fn holds_of(&self, segment: u32) -> impl Iterator<Item = (u32, &Hold)> {
        let mut next = self.segments.get(segment).map_or(NONE, |segment| segment.holds);
        std::iter::from_fn(move || {
            let (id, hold) = (next, self.holds.get(next)?);
            next = hold.next;
            Some((id, hold))
        })
    }

    /// How far from a place that it holds a replica holds these blocks.
    pub(super) fn follow(&self, slot: Slot, from: Place, blocks: &[BlockHash]) -> Place {
        let (mut place, mut rest) = (from, blocks);
        while let Some(head) = rest.first() {
            let within = self.segments.get(place.segment).is_some_and(|s| place.blocks < s.len());
            let next = match within {
                true => Some((place.segment, place.blocks)),
                false => self.child(place.segment, *head).map(|child| (child, 0)),
            };
            let Some((id, from)) = next else { break };
            let hold = self.hold_of(id, slot).and_then(|hold| self.holds.get(hold));
            let held = hold.map_or(0, |hold| hold.held);
            let common = self.segments.get(id).map_or(0, |segment| segment.common(from, rest));
            let blocks = held.min(from + common);
            if blocks <= from {
                break;
            }
            place = Place { segment: id, blocks };
            rest = rest.get((blocks - from) as usize..).unwrap_or_default();
        }
        place
    }

    /// Makes a replica hold these blocks, which follow a place that it holds. Returns the place behind them.
    pub(super) fn insert(
        &mut self,
        slot: Slot,
        from: Place,
        blocks: &[BlockHash],
        used: u64,
    ) -> Place {
        let (mut place, mut rest) = (from, blocks);
        while !rest.is_empty() {
            let Some((next, taken)) = self.step(slot, place, rest, used) else { break };
            place = next;
            rest = rest.get(taken..).unwrap_or_default();
        }
        place
    }

    /// Notes a use that ended at a place which the replica holds. What it holds behind stays used when it was, apart.
    pub(super) fn used_to(&mut self, slot: Slot, place: Place, used: u64) -> Place {
        let mut segment = place.segment;
        let held = self.hold_of(segment, slot).and_then(|hold| self.holds.get(hold));
        if held.is_some_and(|hold| hold.held > place.blocks) {
            segment = self.split(segment, place.blocks).unwrap_or(segment);
        }
        if let Some(hold) = self.hold_of(segment, slot) {
            self.touch(hold, used);
        }
        Place { segment, ..place }
    }

    fn step(
        &mut self,
        slot: Slot,
        place: Place,
        rest: &[BlockHash],
        used: u64,
    ) -> Option<(Place, usize)> {
        let within = self.segments.get(place.segment).filter(|s| place.blocks < s.len());
        let (id, from) = match within {
            Some(_) => (place.segment, place.blocks),
            None => {
                let head = *rest.first()?;
                if self.places.find(&self.segments, head).is_none() {
                    return Some(self.grow(slot, place.segment, rest, used));
                }
                // The same block behind two others is nobody's prompt.
                (self.child(place.segment, head)?, 0)
            }
        };
        let common = self.segments.get(id)?.common(from, rest);
        if common == 0 && from == 0 {
            return None;
        }
        if common == 0 {
            return Some((Place { segment: self.split(id, from)?, blocks: from }, 0));
        }
        let held = self.hold_of(id, slot).and_then(|hold| self.holds.get(hold)).copied();
        if let Some(held) = held.filter(|hold| hold.held < from + common && hold.used() > used) {
            // What it had was used after what it gets, so these two cannot go together.
            return Some((Place { segment: self.split(id, held.held)?, blocks: from }, 0));
        }
        self.hold(slot, id, from + common, used);
        Some((Place { segment: id, blocks: from + common }, common as usize))
    }

    /// Makes a replica hold at least so much of a segment.
    pub(super) fn hold(&mut self, slot: Slot, id: u32, blocks: u32, used: u64) {
        let mut new = blocks;
        match self.hold_of(id, slot) {
            None => self.add_hold(slot, id, blocks, used),
            Some(at) => {
                let Some(hold) = self.holds.get(at) else { return };
                new = blocks.saturating_sub(hold.held);
                if new > 0 {
                    self.set_held(at, blocks);
                    self.touch(at, used);
                }
            }
        }
        self.count_new(slot, new);
    }

    fn count_new(&mut self, slot: Slot, new: u32) {
        if let Some(shadow) = self.shadow_mut(slot) {
            shadow.held += new as usize;
            shadow.recorded += u64::from(new);
        }
    }

    /// Makes a hold of so many blocks. Where a replica's branches end is known of those that report.
    fn set_held(&mut self, at: u32, held: u32) {
        let Some(slot) = self.holds.get(at).map(|hold| hold.slot) else { return };
        let is_found = self.shadow(slot).is_some_and(|shadow| shadow.has_ends);
        if is_found {
            self.ends.remove(&self.segments, &self.holds, at);
        }
        if let Some(hold) = self.holds.get_mut(at) {
            hold.held = held;
        }
        if is_found && held > 0 {
            self.ends.insert(&self.segments, &self.holds, at);
        }
    }

    fn add_hold(&mut self, slot: Slot, id: u32, held: u32, used: u64) {
        let at = self.holds.put(Hold::new(slot, id, 0, 0, used));
        self.attach(id, at);
        self.set_held(at, held);
        let parent = self.segments.get(id).map_or(NONE, |segment| segment.parent);
        if let Some(parent) = self.hold_of(parent, slot).and_then(|hold| self.holds.get_mut(hold)) {
            parent.children += 1;
        }
        if let Some(shadow) = self.shadow_mut(slot) {
            shadow.holds += 1;
        }
        self.touch(at, used);
    }

    /// Puts a hold behind a segment's first one. Those that came first and those that came last are seen first, and one of
    /// these is who leaves a path here, where replicas leave it one by one.
    fn attach(&mut self, id: u32, at: u32) {
        let Some(segment) = self.segments.get_mut(id) else { return };
        segment.holders += 1;
        let next = match self.holds.get_mut(segment.holds) {
            Some(first) => std::mem::replace(&mut first.next, at),
            None => std::mem::replace(&mut segment.holds, at),
        };
        if let Some(hold) = self.holds.get_mut(at) {
            hold.segment = id;
            hold.next = next;
        }
    }

    /// Puts blocks that nobody holds behind a segment that the replica holds to its end.
    fn grow(&mut self, slot: Slot, id: u32, blocks: &[BlockHash], used: u64) -> (Place, usize) {
        let hold = self.hold_of(id, slot).and_then(|hold| self.holds.get(hold)).copied();
        let last = self.segments.get_mut(id).filter(|segment| {
            segment.children == 0 && hold.is_some_and(|hold| hold.used() <= used)
        });
        let (id, from) = match last {
            Some(segment) => {
                let from = segment.len();
                let mut rest = std::mem::take(&mut segment.rest).into_vec();
                rest.reserve_exact(blocks.len());
                rest.extend_from_slice(blocks);
                segment.rest = rest.into_boxed_slice();
                (id, from)
            }
            None => match blocks.split_first() {
                Some((head, rest)) => (self.put_segment(id, *head, rest), 0),
                None => return (Place { segment: id, blocks: 0 }, 0),
            },
        };
        let to = from + u32::try_from(blocks.len()).unwrap_or(0);
        self.index(id, from, to);
        self.hold(slot, id, to, used);
        (Place { segment: id, blocks: to }, blocks.len())
    }

    fn put_segment(&mut self, parent: u32, head: BlockHash, rest: &[BlockHash]) -> u32 {
        let mut start = 0;
        if let Some(parent) = self.segments.get_mut(parent) {
            parent.children += 1;
            start = parent.start + parent.len();
        }
        let rest = rest.into();
        self.segments.put(Segment {
            head,
            rest,
            parent,
            start,
            holds: NONE,
            holders: 0,
            children: 0,
        })
    }

    /// Makes blocks `from..to` of a segment findable, those that are to be.
    fn index(&mut self, id: u32, from: u32, to: u32) {
        let Some(segment) = self.segments.get(id) else { return };
        for at in findable(segment.start, from, to) {
            if let Some(hash) = segment.block(at) {
                self.places.insert(&self.segments, hash, (id, segment.start + at));
            }
        }
    }

    fn unindex(&mut self, id: u32, from: u32, to: u32) {
        let Some(segment) = self.segments.get(id) else { return };
        for at in findable(segment.start, from, to) {
            if let Some(hash) = segment.block(at) {
                self.places.remove(&self.segments, hash);
            }
        }
    }

    /// Makes the first blocks of a segment one of their own, in front of it. Returns it, or the segment itself when there
    /// is nothing to split off.
    pub(super) fn split(&mut self, id: u32, blocks: u32) -> Option<u32> {
        let segment = self.segments.get(id)?;
        if blocks == 0 || blocks >= segment.len() {
            return Some(id);
        }
        self.unindex(id, 0, blocks);
        let segment = self.segments.get_mut(id)?;
        let (head, start, parent) = (segment.head, segment.start, segment.parent);
        let (front, back) = segment.rest.split_at_checked(blocks as usize - 1)?;
        let (new_head, back) = back.split_first()?;
        let front: Box<[BlockHash]> = front.into();
        (segment.head, segment.rest) = (*new_head, back.into());
        segment.start += blocks;
        segment.holders = 0;
        let mut next = std::mem::replace(&mut segment.holds, NONE);
        let new =
            Segment { head, rest: front, parent, start, holds: NONE, holders: 0, children: 1 };
        let new = self.segments.put(new);
        self.segments.get_mut(id)?.parent = new;
        self.index(new, 0, blocks);
        self.index(id, 0, 1);
        let mut fronts = Vec::new();
        while let Some(hold) = self.holds.get(next) {
            let (at, held) = (next, hold.held);
            next = hold.next;
            if held <= blocks {
                self.attach(new, at);
            } else {
                self.attach(id, at);
                fronts.extend(self.split_hold(at, new, blocks));
            }
        }
        // Before all holds are in their segments no end can be told from its hold.
        for front in fronts {
            self.set_held(front, blocks);
        }
        Some(new)
    }

    fn split_hold(&mut self, at: u32, front: u32, blocks: u32) -> Option<u32> {
        let hold = self.holds.get_mut(at)?;
        hold.held -= blocks;
        let (slot, used) = (hold.slot, hold.used());
        let new = self.holds.put(Hold::new(slot, front, 0, 1, used));
        self.attach(front, new);
        self.link_before(new, at);
        if let Some(shadow) = self.shadow_mut(slot) {
            shadow.holds += 1;
        }
        if let Some(late) = self.late.as_mut().filter(|late| late.len() < MOST_LATE) {
            late.push(new);
        }
        Some(new)
    }

    /// Takes the last blocks of a hold that nothing follows, down to so many.
    pub(super) fn cut(&mut self, at: u32, to: u32) {
        let Some(hold) = self.holds.get(at) else { return };
        let (slot, segment, gone) = (hold.slot, hold.segment, hold.held.saturating_sub(to));
        self.set_held(at, hold.held - gone);
        if let Some(shadow) = self.shadow_mut(slot) {
            shadow.held -= gone as usize;
        }
        if to == 0 {
            self.remove_hold(at);
        }
        self.trim(segment);
    }

    /// What is in front was used when this was. That matters only from now on, when nothing else says so.
    fn remove_hold(&mut self, at: u32) {
        let Some(hold) = self.holds.get(at).copied() else { return };
        let parent = self.segments.get(hold.segment).map_or(NONE, |segment| segment.parent);
        if let Some(parent) = self.hold_of(parent, hold.slot) {
            let Some(before) = self.holds.get_mut(parent) else { return };
            before.children = before.children.saturating_sub(1);
            if before.used() < hold.used() || before.older == UNLINKED {
                before.set_used(hold.used());
                self.unlink(parent);
                self.link_before(parent, at);
            }
        }
        self.unlink(at);
        self.detach(hold.segment, at, hold.next);
        self.holds.take(at, Hold::new(NOBODY, NONE, 0, 0, 0));
        if let Some(shadow) = self.shadow_mut(hold.slot) {
            shadow.holds -= 1;
        }
    }

    fn detach(&mut self, id: u32, at: u32, next: u32) {
        if let Some(segment) = self.segments.get_mut(id) {
            segment.holders = segment.holders.saturating_sub(1);
        }
        let before = self.holds_of(id).find(|(_, hold)| hold.next == at).map(|(id, _)| id);
        match before.and_then(|before| self.holds.get_mut(before)) {
            Some(before) => before.next = next,
            None => {
                if let Some(segment) = self.segments.get_mut(id) {
                    segment.holds = next;
                }
            }
        }
    }

    /// Drops what nobody holds of a segment.
    fn trim(&mut self, id: u32) {
        let held = self.holds_of(id).map(|(_, hold)| hold.held).max().unwrap_or(0);
        let Some(segment) = self.segments.get(id) else { return };
        let (len, parent) = (segment.len(), segment.parent);
        if held >= len {
            return;
        }
        self.unindex(id, held, len);
        if held == 0 {
            let head = BlockHash(0);
            let vacant = Segment {
                head,
                rest: [].into(),
                parent: NONE,
                start: 0,
                holds: NONE,
                holders: 0,
                children: 0,
            };
            self.segments.take(id, vacant);
            if let Some(parent) = self.segments.get_mut(parent) {
                parent.children = parent.children.saturating_sub(1);
            }
        } else if let Some(segment) = self.segments.get_mut(id) {
            let kept = segment.rest.get(..held as usize - 1).unwrap_or_default();
            segment.rest = kept.into();
        }
    }

    pub(super) fn shadow(&self, slot: Slot) -> Option<&Shadow> {
        self.shadows.get(usize::from(slot))
    }

    pub(super) fn shadow_mut(&mut self, slot: Slot) -> Option<&mut Shadow> {
        self.shadows.get_mut(usize::from(slot))
    }

    /// How many segments of a chain's path are found by a leap from the root.
    #[cfg(test)]
    pub(super) fn leapt(&self, chain: &[BlockHash]) -> usize {
        let mut path = Vec::new();
        self.leap(chain, &mut path);
        path.len()
    }

    /// What it has asked the allocator for, with what an allocator adds to each stretch of blocks.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let stretch = |id: u32| {
            let blocks = self.segments.get(id).unwrap().rest.len();
            // dlmalloc, as in wasm32: a word in front, in steps of eight.
            if blocks == 0 { 0 } else { (blocks * 8 + 4).next_multiple_of(8) }
        };
        let stretches: usize = (0..self.segments.len() as u32).map(stretch).sum();
        let shadows = self.shadows.capacity() * size_of::<Shadow>();
        let found = self.places.bytes() + self.ends.bytes();
        stretches + shadows + self.segments.bytes() + self.holds.bytes() + found
    }
}

/// Those of a segment's blocks that can be found by their hashes: its first, and every [`STRIDE`]th from the root on.
fn findable(start: u32, from: u32, to: u32) -> impl Iterator<Item = u32> {
    let first = (from == 0 && to > 0).then_some(0);
    let stride = STRIDE as u32;
    let behind = start.saturating_add(from) % stride;
    let next = from.saturating_add(stride - 1 - behind);
    let others = (next..to).step_by(STRIDE).filter(move |at| first != Some(*at));
    first.into_iter().chain(others)
}
