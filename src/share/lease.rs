//! Which VM may do what only one at a time should: a lease with an epoch, claimed by
//! compare-and-swap.
//!
//! The epoch grows with every change of holder and goes into all that the holder publishes, so
//! that one which was stalled past its lease cannot overwrite what its successor wrote. Nothing here
//! waits, and nothing here knows what the lease is for.

use super::store::{Store, get_or_create};
use super::{Header, Kind, lease_key};
use crate::replicas::Moment;
use std::time::Duration;

/// A lease as it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// Who holds it.
    pub holder: u64,
    /// Which holder this is, counting from 1.
    pub epoch: u64,
    /// When it ends.
    pub until: Moment,
}

impl Lease {
    /// Reads a lease of this configuration.
    pub fn read(value: &[u8], fingerprint: u64) -> Option<Self> {
        let (header, mut reader) = Header::read(value, Kind::Lease)?;
        let until = Moment(reader.u64()?);
        (header.fingerprint == fingerprint).then_some(Self {
            holder: header.writer,
            epoch: header.version,
            until,
        })
    }

    /// The bytes.
    pub fn write(&self, fingerprint: u64) -> Vec<u8> {
        let header = Header { fingerprint, writer: self.holder, version: self.epoch };
        let mut writer = header.begin(Kind::Lease);
        writer.u64(self.until.0);
        writer.finish()
    }
}

/// A wish to hold a lease.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    /// By whom.
    pub vm: u64,
    /// For how long.
    pub term: Duration,
    /// How long an ended lease is left to others.
    pub grace: Duration,
    /// Epochs up to this one are another's: it was seen to act in them.
    pub taken: u64,
}

impl Claim {
    /// What to write over `current`, if the lease may be held.
    pub fn over(&self, current: Option<Lease>, now: Moment) -> Option<Lease> {
        let until = now.plus(self.term);
        let last = current.map_or(0, |lease| lease.epoch);
        let new = Lease { holder: self.vm, epoch: last.max(self.taken).saturating_add(1), until };
        match current {
            None => Some(new),
            Some(lease) if lease.holder == self.vm && now < lease.until => {
                // Two that created the lease at once have one epoch between them.
                Some(if lease.epoch > self.taken { Lease { until, ..lease } } else { new })
            }
            Some(lease) if now >= lease.until.plus(self.grace) => Some(new),
            Some(_) => None,
        }
    }
}

/// A lease in a store, as one VM sees it.
pub struct SharedLease<S> {
    store: S,
    key: String,
    fingerprint: u64,
    vm: u64,
    term: Duration,
}

impl<S: Store> SharedLease<S> {
    /// A lease of this name within a configuration.
    pub fn new(store: S, name: &str, fingerprint: u64, vm: u64, term: Duration) -> Self {
        Self { store, key: lease_key(name, fingerprint), fingerprint, vm, term }
    }

    /// Claims or renews it, with [`Claim::grace`] and [`Claim::taken`]. The epoch, when it is held.
    pub fn hold(&self, now: Moment, grace: Duration, taken: u64) -> Option<u64> {
        let (value, mark) = get_or_create(&self.store, &self.key);
        let current = value.and_then(|value| Lease::read(&value, self.fingerprint));
        let claim = Claim { vm: self.vm, term: self.term, grace, taken };
        let claimed = claim.over(current, now)?;
        let written = self.store.set(&self.key, &claimed.write(self.fingerprint), mark);
        (written && mark.is_some()).then_some(claimed.epoch)
    }

    /// Gives it up, so that the next one need not wait for its end.
    pub fn give_up(&self, now: Moment) {
        let (value, mark) = self.store.get(&self.key);
        let current = value.and_then(|value| Lease::read(&value, self.fingerprint));
        if let Some(lease) = current.filter(|lease| lease.holder == self.vm) {
            let ended = Lease { until: now, ..lease };
            self.store.set(&self.key, &ended.write(self.fingerprint), mark);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(current: Option<Lease>, vm: u64, now: Moment, grace: Duration) -> Option<Lease> {
        Claim { vm, term: Duration::from_secs(1), grace, taken: 0 }.over(current, now)
    }

    const NO_GRACE: Duration = Duration::ZERO;

    fn at(millis: u64) -> Moment {
        Moment::default().plus(Duration::from_millis(millis))
    }

    #[test]
    fn a_lease_round_trips_within_its_configuration() {
        let lease = Lease { holder: 7, epoch: 3, until: at(5) };
        assert_eq!(Lease::read(&lease.write(1), 1), Some(lease));
        assert_eq!(Lease::read(&lease.write(1), 2), None);
        assert_eq!(Lease::read(b"junk", 1), None);
    }

    #[test]
    fn the_holder_renews_in_the_same_epoch_and_others_wait() {
        let lease = claim(None, 1, at(0), NO_GRACE).unwrap();
        let renewed = claim(Some(lease), 1, at(900), NO_GRACE).unwrap();
        assert_eq!((renewed.epoch, renewed.until), (1, at(1900)));
        assert_eq!(claim(Some(renewed), 2, at(1899), NO_GRACE), None);
    }

    #[test]
    fn an_ended_lease_goes_to_another_in_a_new_epoch() {
        let lease = claim(None, 1, at(0), NO_GRACE).unwrap();
        let next = claim(Some(lease), 2, at(1000), NO_GRACE).unwrap();
        assert_eq!((next.holder, next.epoch), (2, 2));
    }

    #[test]
    fn a_holder_that_was_stalled_past_its_lease_starts_a_new_epoch_too() {
        let lease = claim(None, 1, at(0), NO_GRACE).unwrap();
        assert_eq!(claim(Some(lease), 1, at(3000), NO_GRACE).unwrap().epoch, 2);
    }

    #[test]
    fn an_epoch_in_which_another_acted_is_left_for_a_new_one() {
        let lease = claim(None, 1, at(0), NO_GRACE).unwrap();
        let mut wish = Claim { vm: 1, term: Duration::from_secs(1), grace: NO_GRACE, taken: 1 };
        assert_eq!(wish.over(Some(lease), at(100)).unwrap().epoch, 2);
        wish.taken = 7;
        assert_eq!(wish.over(None, at(100)).unwrap().epoch, 8);
    }

    #[test]
    fn a_vm_with_traffic_leaves_an_ended_lease_to_idle_ones_for_a_while() {
        let lease = claim(None, 1, at(0), NO_GRACE).unwrap();
        let grace = Duration::from_millis(500);
        assert_eq!(claim(Some(lease), 2, at(1200), grace), None);
        assert!(claim(Some(lease), 2, at(1500), grace).is_some());
    }
}
