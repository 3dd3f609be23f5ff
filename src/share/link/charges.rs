//! What is in flight on replicas and what is held against them, here and over all VMs.
//!
//! How charges and strikes are counted and merged is their own part. Nothing is published here.

use super::Link;
use crate::charge::Charges;
use crate::replicas::strikes::{PassiveHealth, Proof, Strikes};
use crate::replicas::{Moment, ReplicaId};
use crate::share::store::Store;

impl<S: Store> Link<S> {
    /// Everybody's charges.
    pub fn all_charges(&self, now: Moment) -> Charges {
        let half_life = self.config.recent_half_life;
        let mut sum = Charges::default();
        sum.add(&self.charges, now, half_life);
        for (_, state) in self.peer_states() {
            sum.add(&state.charges, now, half_life);
        }
        sum
    }

    /// Everybody's strikes.
    pub fn all_strikes(&self) -> Strikes {
        let peers = self.peer_states().map(|(_, state)| &state.strikes);
        Strikes::merged(peers.chain([&self.strikes]))
    }

    /// Charges a request that is being sent.
    pub fn charge(&mut self, replica: ReplicaId, uncached: u64, now: Moment) {
        self.counts.unshared += u64::from(self.own.is_none() && !replica.is_imagined());
        self.charges.start(replica, uncached, now, self.config.recent_half_life);
    }

    /// Releases the tokens of a request whose answer has begun.
    pub fn answer_began(&mut self, replica: ReplicaId, uncached: u64, now: Moment) {
        self.charges.answer_began(replica, uncached, now);
    }

    /// Releases a request that has ended, and whose answer was said to have begun at this moment.
    pub fn release(&mut self, replica: ReplicaId, began: Moment) {
        self.charges.end(replica, began);
    }

    /// This Envoy's requests in flight on a replica.
    pub fn in_flight(&self, replica: ReplicaId) -> u32 {
        let peers = self.peer_states().map(|(_, state)| &state.charges);
        let all = peers.chain([&self.charges]).map(|charges| charges.of(replica).requests);
        all.fold(0, u32::saturating_add)
    }
}

/// What was seen of replicas in passing.
impl<S: Store> Link<S> {
    /// Notes that a replica failed a request sent at `sent`. Whether that suspends it.
    pub fn failed(
        &mut self,
        config: &PassiveHealth,
        replica: ReplicaId,
        proof: Proof,
        sent: Moment,
        now: Moment,
    ) -> bool {
        if self.table.by_id(replica).is_none() {
            return false;
        }
        let all = self.all_strikes();
        self.strikes.failed(config, &all, replica, proof, sent, now)
    }

    /// Notes that a replica answered a request sent at `sent` as it should. Whether that takes
    /// anything back.
    pub fn succeeded(&mut self, replica: ReplicaId, sent: Moment, now: Moment) -> bool {
        let all = self.all_strikes();
        self.strikes.succeeded(&all, replica, sent, now)
    }

    /// Counts a request among those that try out a suspended replica, if it is one. Whether it is.
    pub fn probe_began(&mut self, replica: ReplicaId, now: Moment) -> bool {
        let suspended = self.all_strikes().of(replica).is_suspended();
        if suspended {
            self.strikes.probe_began(replica, now);
        }
        suspended
    }

    /// And that its answer has begun, or never will.
    pub fn probe_ended(&mut self, replica: ReplicaId) {
        self.strikes.probe_ended(replica);
    }
}
