//! What the roots of one VM that route to the same replicas have in common.
//!
//! While one configuration replaces another both have a root in this VM, for as long as the old
//! listener drains. If they mean the same replicas they have one slot, one index and one poller:
//! a set each would be multiplied by every update. It knows no tokenizer: those are a root's own.

use super::link::{self, Link};
use super::models::Models;
use super::oracle::Oracle;
use super::poller::Poller;
use super::reading::memo_bytes;
use super::root::TICK;
use super::seat::Seat;
use super::trust::Trust;
use super::{host, meters};
use crate::config::Config;
use crate::metrics;
use crate::replicas::Moment;
use hashbrown::HashMap;
use std::cell::RefCell;
use std::rc::{Rc, Weak};

thread_local! {
    /// By fingerprint.
    static FLEETS: RefCell<HashMap<u64, Weak<RefCell<Fleet>>>> = RefCell::default();
}

/// See the module.
pub struct Fleet {
    /// The latest of the roots' configurations: polling goes by it.
    config: Rc<Config>,
    pub link: Link,
    pub trust: Trust,
    pub oracle: Oracle,
    poller: Poller,
    seat: Rc<Seat>,
    /// Roots that have not ended.
    roots: u32,
    /// The slot under which this VM's memory was last told.
    told_memory: Option<u32>,
    pub has_traffic: bool,
    pub streams: u64,
    /// When the next tick has work, whichever root's it is.
    due: Moment,
    has_ticked: bool,
}

impl Fleet {
    /// The fleet of a configuration: that of another root of this VM, if their fingerprints are the same.
    pub fn of(config: &Rc<Config>) -> Rc<RefCell<Self>> {
        let new = || Rc::new(RefCell::new(Self::new(Rc::clone(config))));
        FLEETS.with(|fleets| {
            let Ok(mut fleets) = fleets.try_borrow_mut() else { return new() };
            fleets.retain(|_, fleet| fleet.strong_count() > 0);
            let known = fleets.get(&config.fingerprint()).and_then(Weak::upgrade);
            if let Some(fleet) = known
                && fleet.try_borrow_mut().is_ok_and(|mut fleet| fleet.join(config))
            {
                return fleet;
            }
            let fleet = new();
            fleets.insert(config.fingerprint(), Rc::downgrade(&fleet));
            fleet
        })
    }

    fn new(config: Rc<Config>) -> Self {
        let seat = Rc::new(Seat::new(&config));
        let link = link::link(&config);
        let poller = Poller::new(Rc::clone(&config), Rc::clone(&seat), link.vm());
        let trust = Trust::new(Rc::clone(&config), link.vm());
        let oracle = Oracle::new(Rc::clone(&config), link.vm());
        Self {
            config,
            link,
            trust,
            oracle,
            poller,
            seat,
            roots: 1,
            told_memory: None,
            has_traffic: false,
            streams: 0,
            due: Moment::default(),
            has_ticked: false,
        }
    }

    /// One more root. False when the last one has ended, and only its streams are left.
    fn join(&mut self, config: &Rc<Config>) -> bool {
        if self.roots == 0 {
            return false;
        }
        self.roots += 1;
        self.config = Rc::clone(config);
        self.seat = Rc::new(Seat::new(config));
        self.link.reconfigure(link::config(config));
        self.poller.reconfigure(Rc::clone(config), Rc::clone(&self.seat));
        self.trust.reconfigure(Rc::clone(config));
        self.oracle.reconfigure(Rc::clone(config));
        true
    }

    /// Whether this is the latest root's configuration.
    pub fn is_latest(&self, config: &Rc<Config>) -> bool {
        Rc::ptr_eq(&self.config, config)
    }

    /// Whether this VM has use for tokenizers: the main thread's routes nothing, and a tokenizer is some tens of megabytes.
    pub fn needs_models(&self) -> bool {
        self.has_traffic || !Seat::vm_may_be_main()
    }

    /// Says whether the latest root has every tokenizer.
    pub fn set_ready(&mut self, ready: bool) {
        self.link.set_traits(ready, self.has_traffic);
    }

    /// A root's tick.
    pub fn tick(&mut self, now: Moment) {
        if now < self.due || self.roots == 0 {
            return;
        }
        // Half of it, so that a tick which comes a little early counts.
        self.due = now.plus(TICK / 2);
        // Not in `on_configure`: what a VM that is thrown away defines goes with it.
        if !std::mem::replace(&mut self.has_ticked, true) {
            meters::show_counters();
        }
        self.has_traffic = Seat::vm_has_traffic(self.has_traffic);
        self.link.tick(now);
        self.link.count();
        self.trust.tick(now);
        self.poller.tick(&mut self.link, &self.trust, now, self.has_traffic);
        self.tell_memory(self.link.slot().filter(|_| self.seat.is_newest()));
    }

    /// Has replicas asked for the ids of prompts, by a VM that has the latest root's models.
    pub fn ask_oracle(&mut self, models: &Models, now: Moment) {
        self.oracle.tick(&self.link, models, now);
    }

    /// Takes in the answer to a call. Returns false when the call was a model's.
    pub fn answer(&mut self, token: u32, num_headers: usize, body_size: usize) -> bool {
        self.poller.answer(&mut self.link, token, num_headers, body_size)
            || self.oracle.answer(&mut self.trust, token, num_headers, body_size)
    }

    /// Of a VM's fleets one tells its memory, under its own slot.
    fn tell_memory(&mut self, slot: Option<u32>) {
        if let Some(told) = self.told_memory.filter(|told| slot != Some(*told)) {
            meters::clear(&metrics::VM_MEMORY, &[&told.to_string()]);
            meters::clear(&metrics::MEMO_BYTES, &[&told.to_string()]);
        }
        if let Some(slot) = slot {
            let label = slot.to_string();
            meters::record(&metrics::VM_MEMORY, &[&label], host::memory_bytes());
            meters::record(&metrics::MEMO_BYTES, &[&label], memo_bytes() as u64);
        }
        self.told_memory = slot;
    }

    /// A root ends, and the answers to its calls with it. The last one leaves to other VMs what was done for them.
    pub fn leave(&mut self) {
        self.poller.forget_calls();
        self.oracle.forget_calls();
        self.roots = self.roots.saturating_sub(1);
        if self.roots > 0 {
            return;
        }
        self.seat.leave();
        self.poller.end(host::now());
        self.tell_memory(None);
        self.link.leave();
        self.link.count();
    }
}
