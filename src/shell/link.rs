//! [`crate::share::link`] on Envoy's shared data.
//!
//! The protocols are the core's; here are the two calls they are made of, and what is counted. It
//! neither reads nor writes a format.

use super::{host, meters};
use crate::config::Config;
use crate::metrics;
use crate::replicas::Moment;
use crate::route::View;
use crate::share::lease;
use crate::share::link::LinkConfig;
use crate::share::store::Store;
use std::cell::Cell;
use std::time::Duration;

/// Envoy's shared data.
#[derive(Clone, Copy)]
pub struct SharedData;

impl Store for SharedData {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        host::shared(key)
    }

    fn set(&self, key: &str, value: &[u8], mark: Option<u32>) -> bool {
        host::set_shared(key, value, mark)
    }
}

/// This VM's link to the others.
pub type Link = crate::share::link::Link<SharedData>;

/// A lease in Envoy's shared data.
pub type SharedLease = lease::SharedLease<SharedData>;

thread_local! {
    /// Statics are a VM's own, so this tells VMs apart whatever they are configured with.
    static INSTANCE: Cell<u64> = Cell::new(host::unique_number());
}

/// A link for a configuration.
pub fn link(config: &Config) -> Link {
    Link::new(SharedData, self::config(config), host::unique_number(), INSTANCE.get())
}

/// What a configuration says to the link.
pub fn config(config: &Config) -> LinkConfig {
    let cost = &config.route.cost;
    LinkConfig {
        fingerprint: config.fingerprint(),
        recent_half_life: cost.recent_half_life,
        default_capacity_blocks: config.default_capacity_blocks,
        learns_rates: config.learn_rates,
        work: (cost.attention_tokens, cost.mean_uncached_tokens),
        imagines: config.shadow.is_some(),
    }
}

/// A lease for all with this fingerprint.
pub fn lease(name: &str, fingerprint: u64, vm: u64, term: Duration) -> SharedLease {
    SharedLease::new(SharedData, name, fingerprint, vm, term)
}

impl Link {
    /// Calls `decide` with the present picture.
    pub fn decide<T>(&self, now: Moment, decide: impl FnOnce(&View<'_>) -> T) -> T {
        let charges = self.all_charges(now);
        let strikes = self.all_strikes();
        let (table, index) = (self.table(), self.index());
        let (charges, strikes, rates) = (&charges, &strikes, self.rates());
        decide(&View { table, index, charges, strikes, rates, now })
    }

    /// Counts what has happened.
    pub fn count(&mut self) {
        let counts = self.take_counts();
        meters::add(&metrics::LOG_LAPPED, &[], counts.lapped);
        meters::add(&metrics::LOG_ORPHANED, &[], counts.orphaned);
        meters::add(&metrics::OBSERVED_GAPS, &[], counts.gaps);
        meters::add(&metrics::OBSERVED_CUT, &[], counts.cut);
        meters::add(&metrics::HOST_ERRORS, &[], counts.refused);
        // They begin at 0, so that a rate over them has a beginning.
        meters::add(&metrics::NO_ROOM, &["slot"], counts.unshared);
        meters::add(&metrics::NO_ROOM, &["record"], counts.unlogged);
        let snapshots = counts.snapshots;
        for (result, count) in [
            ("written", snapshots.written),
            ("cut", snapshots.cut),
            ("abandoned", snapshots.abandoned),
            ("taken", snapshots.taken),
            ("torn", snapshots.torn),
        ] {
            if count > 0 {
                meters::add(&metrics::SNAPSHOTS, &[result], count);
            }
        }
    }
}
