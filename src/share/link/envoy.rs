//! Some VMs and the shared data between them, for tests, in the memory of one thread.
//!
//! Nothing is asked or routed but what a test does.

use super::*;
use crate::replicas::Member;
use crate::share::log::{Fate, Record};
use crate::tokens::blocks::BlockHash;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

pub(in crate::share) const TICK: Duration = Duration::from_millis(100);
pub(in crate::share) const CONFIG: LinkConfig = LinkConfig {
    fingerprint: 7,
    recent_half_life: Duration::from_secs(5),
    default_capacity_blocks: 1 << 19,
    learns_rates: true,
    work: (100_000.0, 512.0),
    imagines: true,
};

type Values = BTreeMap<String, (Vec<u8>, u32)>;

/// Shared data in the memory of one thread, and what was read of it: keys and sizes.
#[derive(Clone, Default)]
pub(in crate::share) struct Data(
    pub(super) Rc<RefCell<Values>>,
    pub(super) Rc<RefCell<Vec<(String, usize)>>>,
);

impl Store for Data {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        let bytes = self.0.borrow().get(key).map_or(0, |(value, _)| value.len());
        self.1.borrow_mut().push((key.to_owned(), bytes));
        match self.0.borrow().get(key) {
            Some((value, mark)) => ((!value.is_empty()).then(|| value.clone()), Some(*mark)),
            None => (None, None),
        }
    }

    fn set(&self, key: &str, value: &[u8], mark: Option<u32>) -> bool {
        let last = self.0.borrow().get(key).map_or(0, |(_, mark)| *mark);
        let matches = last == 0 || mark.is_none_or(|mark| mark == last);
        if matches {
            self.0.borrow_mut().insert(key.to_owned(), (value.to_vec(), last + 1));
        }
        matches
    }
}

/// Some VMs, the first of which publishes the table.
pub(in crate::share) struct Envoy {
    pub(in crate::share) data: Data,
    pub(in crate::share) now: Moment,
    pub(in crate::share) table: ReplicaTable,
    pub(in crate::share) links: Vec<Link<Data>>,
    pub(in crate::share) counts: Vec<Counts>,
}

impl Envoy {
    pub(in crate::share) fn new(vms: usize) -> Self {
        let now = Moment::default().plus(Duration::from_secs(50));
        let data = Data::default();
        let mut envoy =
            Self { data, now, table: ReplicaTable::default(), links: vec![], counts: vec![] };
        (0..vms).for_each(|_| envoy.start());
        envoy.links[0].prepare_table();
        envoy.set_members(&["10.0.0.1:1", "10.0.0.2:1"]);
        (0..3).for_each(|_| envoy.tick());
        envoy
    }

    pub(in crate::share) fn start(&mut self) {
        let vm = self.links.len() as u64 + 1;
        self.links.push(Link::new(self.data.clone(), CONFIG, vm, vm));
        self.counts.push(Counts::default());
    }

    pub(in crate::share) fn set_members(&mut self, addresses: &[&str]) {
        let member = |address: &&str| Member::healthy((*address).to_owned());
        self.table.set_members("c", &addresses.iter().map(member).collect::<Vec<Member>>());
        self.links[0].publish_table(1, &self.table).unwrap();
    }

    pub(in crate::share) fn tick(&mut self) {
        self.now = self.now.plus(TICK);
        for (link, counts) in self.links.iter_mut().zip(&mut self.counts) {
            link.tick(self.now);
            let new = link.take_counts();
            counts.lapped += new.lapped;
            counts.orphaned += new.orphaned;
            counts.gaps += new.gaps;
            counts.cut += new.cut;
            counts.snapshots.taken += new.snapshots.taken;
            counts.snapshots.torn += new.snapshots.torn;
            counts.snapshots.written += new.snapshots.written;
        }
    }

    pub(in crate::share) fn replica(&self, place: u32) -> ReplicaId {
        self.table.at(place).unwrap().id
    }

    /// One VM routes a prompt of its own.
    pub(in crate::share) fn route(&mut self, vm: usize, place: u32, prompt: u64) {
        let (replica, now) = (self.replica(place), self.now);
        let link = &mut self.links[vm];
        link.refresh(now);
        let blocks = prompt_blocks(prompt);
        link.record(Record::of(Fate::Held, replica, &blocks, 0));
        link.publish(now);
    }

    #[track_caller]
    pub(in crate::share) fn check_all_see(&self, place: u32, prompt: u64, blocks: usize) {
        let replica = self.replica(place);
        for (number, link) in self.links.iter().enumerate() {
            let seen = link.index().overlap_blocks(replica, &prompt_blocks(prompt));
            assert_eq!(seen, blocks, "VM {number}, prompt {prompt}");
        }
    }

    /// All tick until the last VM has a snapshot, with something else done between.
    pub(in crate::share) fn until_taken(&mut self, mut between: impl FnMut(&mut Self, u64)) {
        for round in 0..400 {
            self.tick();
            if self.counts.last().unwrap().snapshots.taken > 0 {
                self.tick();
                return;
            }
            between(self, round);
        }
        panic!("no snapshot: {:?}", self.counts);
    }
}

pub(in crate::share) const PROMPT_BLOCKS: u64 = 400;

pub(super) fn prompt_blocks(prompt: u64) -> Vec<BlockHash> {
    (0..PROMPT_BLOCKS).map(|n| BlockHash(prompt * 1_000_000 + n)).collect()
}
