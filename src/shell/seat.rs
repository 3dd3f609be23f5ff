//! A root context's seat among those of its VM: what it may do is [`crate::share::roots`]' part.

use super::link::SharedData;
use crate::config::Config;
use crate::share::births;
use crate::share::roots::Roots;
use std::cell::{Cell, RefCell};

thread_local! {
    /// Statics are a VM's own, and all its roots'.
    static ROOTS: RefCell<Roots> = RefCell::default();

    /// Whether any of them has served a request: the main thread's serve none.
    static HAS_TRAFFIC: Cell<bool> = const { Cell::new(false) };

    /// Whether this passes for the main thread's VM, once it has started.
    static PASSES_FOR_MAIN: Cell<Option<bool>> = const { Cell::new(None) };
}

/// See the module.
pub struct Seat {
    number: u64,
}

impl Seat {
    pub fn new(config: &Config) -> Self {
        let clusters = config.clusters.iter().map(|cluster| cluster.name.clone()).collect();
        let added = ROOTS.with(|roots| Some(roots.try_borrow_mut().ok()?.add(clusters)));
        Self { number: added.unwrap_or_default() }
    }

    pub fn is_newest(&self) -> bool {
        ask(|roots| roots.is_newest(self.number))
    }

    pub fn speaks_for(&self, cluster: &str) -> bool {
        ask(|roots| roots.speaks_for(self.number, cluster))
    }

    /// Whether any root of this VM still has to do with a cluster.
    pub fn is_named(cluster: &str) -> bool {
        ask(|roots| roots.is_named(cluster))
    }

    /// This VM starts. Envoy says so of each of its roots, and thus with every update.
    pub fn vm_starts() {
        if PASSES_FOR_MAIN.get().is_none() {
            PASSES_FOR_MAIN.set(Some(births::is_main_threads(&SharedData)));
        }
    }

    /// Whether this VM may be the main thread's: by the order in which VMs started, until it has served a request.
    pub fn vm_may_be_main() -> bool {
        PASSES_FOR_MAIN.get() == Some(true) && !HAS_TRAFFIC.get()
    }

    /// Whether this VM has served a request, under any configuration. `own`: under this one.
    pub fn vm_has_traffic(own: bool) -> bool {
        HAS_TRAFFIC.set(HAS_TRAFFIC.get() || own);
        HAS_TRAFFIC.get()
    }

    /// The root ends.
    pub fn leave(&self) {
        ROOTS.with(|roots| {
            if let Ok(mut roots) = roots.try_borrow_mut() {
                roots.remove(self.number);
            }
        });
    }
}

fn ask(question: impl FnOnce(&Roots) -> bool) -> bool {
    ROOTS.with(|roots| roots.try_borrow().is_ok_and(|roots| question(&roots)))
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave();
    }
}
