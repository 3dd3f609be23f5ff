//! What the other VMs say: their slots, and how far their logs are read.
//!
//! What is in a log is applied by [`crate::share::records`]. Here nothing is written.

use super::Link;
use super::learned::PeersLearned;
use crate::index::PrefixIndex;
use crate::replicas::{Moment, ReplicaId};
use crate::share::log::LogReader;
use crate::share::observed::Standing;
use crate::share::slot::OwnSlot;
use crate::share::store::Store;
use crate::share::vm::{LogHead, VmState};
use crate::share::{MAX_VM_SLOTS, slot_key};
use hashbrown::{HashMap, HashSet};

/// Blocks read from the logs of others at one refresh, and the rest of the last segment, which has some 6,000: some
/// milliseconds. Halved, a VM that is far behind takes twice as long to come up; doubled, so does the longest pause of
/// its worker.
const BLOCKS_PER_REFRESH: usize = 16 << 10;

/// Another VM.
#[derive(Default)]
pub(in crate::share) struct Peer {
    pub(in crate::share) reader: LogReader,
    /// What was last read of its slot, until that changes: a VM that is idle writes on ticks alone.
    value: Vec<u8>,
    /// Whose it is, if its log is for this configuration.
    owner: Option<u64>,
    /// While it lives.
    pub(super) state: Option<VmState>,
    /// How far its log goes, whoever wrote it.
    pub(in crate::share) head: LogHead,
    pub(super) learned: Option<PeersLearned>,
}

impl<S: Store> Link<S> {
    /// Slots are claimed from the lowest number, so the first that was never claimed ends them.
    pub(super) fn find_peers(&mut self) {
        while let Ok(number) = u32::try_from(self.peers.len()) {
            let exists = self.store.get(&slot_key(number)).1.is_some();
            if number >= MAX_VM_SLOTS || !exists {
                return;
            }
            self.peers.push(Peer::default());
        }
    }

    /// Takes in the table, every VM's charges and every VM's log, as far as they are new.
    pub fn refresh(&mut self, now: Moment) {
        self.now = now;
        self.index.advance(now);
        self.refresh_table();
        // What waited for the table comes before what is read now.
        self.apply_waiting();
        let own = self.slot();
        let mut peers = std::mem::take(&mut self.peers);
        let mut budget = BLOCKS_PER_REFRESH;
        let mut is_behind = false;
        let mut numbered: Vec<(u32, &mut Peer)> = (0u32..).zip(&mut peers).collect();
        let first = self.first_peer.min(numbered.len());
        numbered.rotate_left(first);
        for (number, peer) in numbered {
            if own == Some(number) {
                (peer.state, peer.head) = (None, self.own_until);
                peer.value.clear();
                // All at once: what this VM records next comes behind it.
                let mut whole_log = usize::MAX;
                self.read_log(number, peer, self.vm, &mut whole_log);
            } else if let Some(owner) = self.refresh_peer(number, peer, now) {
                is_behind |= !self.read_log(number, peer, owner, &mut budget);
            }
        }
        self.peers = peers;
        if is_behind {
            self.first_peer = (self.first_peer + 1) % self.peers.len().max(1);
        } else {
            self.apply_orphans();
        }
    }

    /// Reads a slot. Who owns it, if its log is for this configuration.
    fn refresh_peer(&self, number: u32, peer: &mut Peer, now: Moment) -> Option<u64> {
        let (value, _) = self.store.get(&slot_key(number));
        let value = value.unwrap_or_default();
        if value != peer.value || value.is_empty() {
            let read = VmState::read(&value);
            let read = read.filter(|(fingerprint, _)| *fingerprint == self.config.fingerprint);
            peer.state = read.map(|(_, state)| state);
            peer.owner = peer.state.as_ref().map(|state| state.owner);
            peer.head = peer.state.as_ref().map_or(peer.head, |state| state.head);
            peer.value = value;
        }
        peer.state = peer.state.take().filter(|state| state.is_alive(now));
        peer.owner
    }

    /// The other VMs that live, by slot.
    pub(in crate::share) fn peer_states(&self) -> impl Iterator<Item = (u32, &VmState)> + Clone {
        let peers = (0u32..).zip(&self.peers);
        peers.filter_map(|(number, peer)| Some((number, peer.state.as_ref()?)))
    }

    /// How far every log goes.
    pub(in crate::share) fn heads(&self) -> impl Iterator<Item = (u32, LogHead)> {
        let own = self.own.as_ref().map(|own| (own.number, own.head()));
        (0u32..).zip(&self.peers).map(move |(number, peer)| match own {
            Some((slot, head)) if slot == number => (number, head),
            _ => (number, peer.head),
        })
    }

    /// How far every log is in the index.
    pub(in crate::share) fn positions(&self) -> Vec<(u32, LogHead)> {
        let own = self.own.as_ref().map(|own| (own.number, own.head()));
        let position = |(number, peer): (u32, &Peer)| match own {
            Some((slot, head)) if slot == number => (number, head),
            _ => (number, peer.reader.position()),
        };
        (0u32..).zip(&self.peers).map(position).collect()
    }

    /// Puts another VM's index in the place of this one's, which has all of every log up to there.
    pub(in crate::share) fn go_on_from(
        &mut self,
        index: PrefixIndex,
        logs: &[(u32, LogHead)],
        standings: HashMap<ReplicaId, Standing>,
    ) {
        self.index = index;
        self.standings = standings;
        self.hearings.clear();
        let whole = self.standings.iter().filter(|(_, standing)| standing.is_whole);
        let whole = whole.map(|(replica, standing)| (*replica, standing.has_tiers));
        self.index.go_on_reporting(whole);
        let gone: Vec<ReplicaId> = self
            .index
            .replicas()
            .filter(|id| self.table.by_id(*id).is_none() && !self.is_unheard_of(*id))
            .collect();
        self.index.retain(|replica| !gone.contains(&replica));
        self.standings.retain(|replica, _| !gone.contains(&replica.observed()));
        self.orphans.clear();
        for (number, peer) in (0u32..).zip(&mut self.peers) {
            let log = logs.iter().find(|(slot, _)| *slot == number);
            peer.reader.go_to(log.map_or(LogHead::default(), |(_, head)| *head));
        }
        self.own_until = self.own.as_ref().map(OwnSlot::head).unwrap_or_default();
    }

    /// How many VMs live, this one included, and how many of them have every tokenizer. One that
    /// has two slots, while a configuration is replaced, counts once.
    pub fn count_vms(&self) -> (u64, u64) {
        let all = || {
            let others = self.peer_states().map(|(_, state)| state.traits);
            others.chain([self.traits])
        };
        let instances: HashSet<u64> = all().map(|vm| vm.instance).collect();
        let ready: HashSet<u64> = all().filter(|vm| vm.ready).map(|vm| vm.instance).collect();
        (instances.len() as u64, ready.len() as u64)
    }
}
