//! One configuration in one VM: its ticks, and the state that its streams share.
//!
//! It has no work of its own: a tick goes to the link, the poller and the models in turn.

use super::http::Stream;
use super::link::{self, Link};
use super::models::Models;
use super::poller::Poller;
use super::seat::Seat;
use super::{host, meters};
use crate::config::Config;
use crate::metrics;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// Heartbeats, lease, loading and polling all happen on ticks. Twice as often costs idle CPU in
/// every VM; half as often doubles how long a new VM routes unshared.
const TICK: Duration = Duration::from_millis(100);

/// What a configuration's streams share in this VM.
pub struct Shared {
    pub config: Rc<Config>,
    pub link: Link,
    pub models: Models,
    poller: Poller,
    seat: Rc<Seat>,
    /// The slot under which this VM's memory was last told.
    told_memory: Option<u32>,
    has_ended: bool,
    pub has_traffic: bool,
    pub streams: u64,
}

impl Shared {
    fn new(config: Config) -> Self {
        let config = Rc::new(config);
        let seat = Rc::new(Seat::new(&config));
        let link = link::link(&config);
        let models = Models::new(&config, link.vm());
        let poller = Poller::new(Rc::clone(&config), Rc::clone(&seat), link.vm());
        Self {
            config,
            link,
            models,
            poller,
            seat,
            told_memory: None,
            has_ended: false,
            has_traffic: false,
            streams: 0,
        }
    }

    fn tick(&mut self) {
        if self.has_ended {
            return;
        }
        let now = host::now();
        self.has_traffic = Seat::vm_has_traffic(self.has_traffic);
        self.link.set_traits(self.models.all_ready(), self.has_traffic);
        self.link.tick(now);
        self.link.count();
        self.poller.tick(&mut self.link, now, self.has_traffic);
        // The leader is the main thread's VM as a rule, which routes nothing and so needs no
        // tokenizer: it is some tens of megabytes.
        if self.has_traffic || !self.poller.holds_lease() {
            self.models.tick(now);
        } else {
            self.models.give_up_turn(now);
        }
        self.tell_memory(self.link.slot().filter(|_| self.seat.is_newest()));
    }

    /// Of a VM's roots one tells its memory, under its own slot.
    fn tell_memory(&mut self, slot: Option<u32>) {
        if let Some(told) = self.told_memory.filter(|told| slot != Some(*told)) {
            meters::clear(&metrics::VM_MEMORY, &[&told.to_string()]);
        }
        if let Some(slot) = slot {
            meters::record(&metrics::VM_MEMORY, &[&slot.to_string()], host::memory_bytes());
        }
        self.told_memory = slot;
    }

    /// Envoy is done with this configuration: leaves to others what it did for them.
    fn end(&mut self) {
        let now = host::now();
        self.has_ended = true;
        self.seat.leave();
        self.poller.end(now);
        self.models.give_up_turn(now);
        self.tell_memory(None);
        self.link.leave();
        self.link.count();
    }
}

/// The root context. Without a configuration it does nothing, and neither do its streams.
#[derive(Default)]
pub struct Root {
    shared: Option<Rc<RefCell<Shared>>>,
}

impl Context for Root {
    fn on_done(&mut self) -> bool {
        let shared = self.shared.as_ref().and_then(|shared| shared.try_borrow_mut().ok());
        if let Some(mut shared) = shared {
            shared.end();
        }
        true
    }

    fn on_http_call_response(
        &mut self,
        token: u32,
        num_headers: usize,
        body_size: usize,
        _num_trailers: usize,
    ) {
        let shared = self.shared.as_ref().and_then(|shared| shared.try_borrow_mut().ok());
        if let Some(mut shared) = shared {
            let Shared { poller, link, .. } = &mut *shared;
            let polled = poller.answer(link, token, num_headers, body_size);
            if !polled {
                shared.models.answer(token, num_headers, body_size);
            }
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
                self.shared = Some(Rc::new(RefCell::new(Shared::new(config))));
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
        let shared = self.shared.as_ref().and_then(|shared| shared.try_borrow_mut().ok());
        if let Some(mut shared) = shared {
            shared.tick();
        }
    }

    fn create_http_context(&self, _context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream::new(self.shared.clone())))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
