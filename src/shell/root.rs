//! One configuration in one VM: its ticks, and the state that its streams share.
//!
//! It has no work of its own: a tick goes to the link, the poller and the models in turn.

use super::http::Stream;
use super::link::{self, Link};
use super::models::Models;
use super::poller::Poller;
use super::reading::Queue;
use super::{host, meters};
use crate::config::Config;
use crate::metrics;
use crate::replicas::Moment;
use hashbrown::HashMap;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;
use std::cell::{RefCell, RefMut};
use std::rc::{Rc, Weak};
use std::time::Duration;

/// Heartbeats, lease, loading and polling all happen on ticks. Twice as often costs idle CPU in
/// every VM; half as often doubles how long a new VM routes unshared. While prompts wait to be
/// read there are more ticks, which see to them alone.
const TICK: Duration = Duration::from_millis(100);

thread_local! {
    /// By fingerprint. While one configuration replaces another both have a root in this VM, for as long as the old
    /// listener drains; if they mean the same by what is shared, they have one state: a slot, an index and a poller
    /// each would be multiplied by every update otherwise.
    static STATES: RefCell<HashMap<u64, Weak<RefCell<Shared>>>> = RefCell::default();
}

/// What the streams of configurations with the same fingerprint share in this VM.
pub struct Shared {
    /// The configuration of whoever uses the state at the moment.
    pub config: Rc<Config>,
    pub link: Link,
    pub models: Models,
    poller: Poller,
    pub has_traffic: bool,
    pub streams: u64,
    /// Held requests whose prompts are being read.
    pub queue: Queue,
    /// When heartbeats and all that comes with them are due, whichever root's tick it is.
    due: Moment,
}

impl Shared {
    /// The state for a configuration: that of another root of this VM, if their fingerprints are the same. Of what
    /// the fingerprint leaves open, polling goes by the latest.
    fn of(config: &Rc<Config>) -> Rc<RefCell<Self>> {
        let new = || Rc::new(RefCell::new(Self::new(Rc::clone(config))));
        STATES.with(|states| {
            let Ok(mut states) = states.try_borrow_mut() else { return new() };
            states.retain(|_, state| state.strong_count() > 0);
            if let Some(state) = states.get(&config.fingerprint()).and_then(Weak::upgrade) {
                if let Ok(mut shared) = state.try_borrow_mut() {
                    shared.link.reconfigure(link::config(config));
                    shared.poller.reconfigure(Rc::clone(config));
                }
                return state;
            }
            let state = new();
            states.insert(config.fingerprint(), Rc::downgrade(&state));
            state
        })
    }

    fn new(config: Rc<Config>) -> Self {
        let link = link::link(&config);
        let models = Models::new(&config, link.vm());
        let poller = Poller::new(Rc::clone(&config), link.vm());
        Self {
            config,
            link,
            models,
            poller,
            has_traffic: false,
            streams: 0,
            queue: Queue::default(),
            due: Moment::default(),
        }
    }

    fn tick(&mut self) {
        let now = host::now();
        self.queue.rest(TICK);
        if now >= self.due {
            // Half of it, so that a tick which comes a little early counts.
            self.due = now.plus(TICK / 2);
            self.beat(now);
        }
        // Last, since it makes host calls be about other contexts.
        self.read_on();
    }

    fn beat(&mut self, now: Moment) {
        self.link.tick(now);
        self.poller.tick(&mut self.link, now, self.has_traffic);
        // The leader is the main thread's VM as a rule, which routes nothing and so needs no
        // tokenizer: it is some tens of megabytes.
        if self.has_traffic || !self.poller.holds_lease() {
            self.models.tick(now);
        } else {
            self.models.give_up_turn(now);
        }
        self.link.set_ready(self.models.all_ready());
        self.link.count();
        if let Some(slot) = self.link.slot() {
            meters::record(&metrics::VM_MEMORY, &[&slot.to_string()], host::memory_bytes());
        }
    }
}

/// The root context. Without a configuration it does nothing, and neither do its streams.
#[derive(Default)]
pub struct Root {
    state: Option<State>,
}

/// A configuration, and the state that it shares with others.
#[derive(Clone)]
pub struct State {
    config: Rc<Config>,
    shared: Rc<RefCell<Shared>>,
}

impl State {
    /// The shared state, for this configuration. `None` when it is in use: callbacks do not nest.
    pub fn borrow(&self) -> Option<RefMut<'_, Shared>> {
        let mut shared = self.shared.try_borrow_mut().ok()?;
        shared.config = Rc::clone(&self.config);
        Some(shared)
    }
}

/// The host takes the answers to a root's calls with it.
impl Drop for Root {
    fn drop(&mut self) {
        if let Some(mut shared) = self.state.as_ref().and_then(State::borrow) {
            shared.poller.forget_calls();
            shared.models.forget_calls();
        }
    }
}

impl Context for Root {
    fn on_http_call_response(
        &mut self,
        token: u32,
        num_headers: usize,
        body_size: usize,
        _num_trailers: usize,
    ) {
        if let Some(mut shared) = self.state.as_ref().and_then(State::borrow) {
            meters::time("call", || {
                let Shared { poller, link, models, .. } = &mut *shared;
                if !poller.answer(link, token, num_headers, body_size) {
                    models.answer(token, num_headers, body_size);
                }
            });
        }
    }
}

impl RootContext for Root {
    fn on_vm_start(&mut self, _size: usize) -> bool {
        host::log_info(concat!("warmpath ", env!("CARGO_PKG_VERSION"), ": VM started"));
        true
    }

    fn on_configure(&mut self, size: usize) -> bool {
        match Config::parse(&host::configuration(size)) {
            Ok(config) => {
                // No lease, no call, no slot here: this also runs in a VM that only tries the
                // configuration and is thrown away.
                let config = Rc::new(config);
                let shared = Shared::of(&config);
                self.state = Some(State { config, shared });
                host::set_tick_period(TICK);
                true
            }
            Err(error) => {
                log::error!("configuration refused: {error}");
                false
            }
        }
    }

    fn on_tick(&mut self) {
        if let Some(mut shared) = self.state.as_ref().and_then(State::borrow) {
            meters::time("tick", || shared.tick());
        }
    }

    fn create_http_context(&self, context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream::new(context_id, self.state.clone())))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
