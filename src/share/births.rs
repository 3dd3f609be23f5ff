//! Which VM is the main thread's: the second that starts.
//!
//! No call of the host's says on which thread a VM runs, but VMs start in an order. Before any worker runs Envoy tries the
//! configuration in a VM that it throws away, then makes the main thread's. So the first two are counted, and no more.
//!
//! A filter that is new to an Envoy that already runs is tried first too, but then the workers' VMs and the main thread's
//! start at once: a worker's may pass for the main thread's. And while others have been counted that still live, as with
//! another version's code under the same `vm_id`, none of the new ones passes for it. So it may save work, and must not be
//! relied on.

use super::store::{Store, get_or_create};
use super::{Header, Kind};

const KEY: &str = "warmpath/births";

/// The VM that only tries the configuration, and the main thread's.
const COUNTED: u64 = 2;

/// Counts a VM that starts. Whether it passes for the main thread's.
pub fn is_main_threads(store: &impl Store) -> bool {
    // Who is overtaken finds a higher number, so it is overtaken once per number at most.
    for _ in 0..COUNTED {
        let (value, mark) = get_or_create(store, KEY);
        let header = Header::read(value.as_deref().unwrap_or_default(), Kind::Births);
        let before = header.map_or(0, |(header, _)| header.version);
        if before >= COUNTED {
            return false;
        }
        let number = before.saturating_add(1);
        let header = Header { fingerprint: 0, writer: 0, version: number };
        if store.set(KEY, &header.begin(Kind::Births).finish(), mark) {
            return number == COUNTED;
        }
    }
    false
}
