//! One configuration in one VM: its ticks, and the state that its streams share.
//!
//! It has no work of its own: a tick goes to the fleet, the models and the prompts that wait.

use super::fleet::Fleet;
use super::http::Stream;
use super::models::Models;
use super::reading::Queue;
use super::seat::Seat;
use super::{host, meters};
use crate::config::Config;
use crate::replicas::Moment;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;
use std::cell::{RefCell, RefMut};
use std::rc::Rc;
use std::time::Duration;

/// Heartbeats, lease, loading and polling all happen on ticks. Twice as often costs idle CPU in
/// every VM; half as often doubles how long a new VM routes unshared. While prompts wait to be
/// read there are more ticks, which see to them alone.
pub const TICK: Duration = Duration::from_millis(100);

/// What a configuration's streams share in this VM.
#[derive(Clone)]
pub struct State {
    config: Rc<Config>,
    own: Rc<RefCell<Own>>,
    fleet: Rc<RefCell<Fleet>>,
}

/// What no other configuration shares.
struct Own {
    models: Models,
    queue: Queue,
    /// When models are due.
    due: Moment,
}

/// A [`State`] in use.
pub struct Shared<'a> {
    pub config: &'a Config,
    pub models: RefMut<'a, Models>,
    /// Held requests whose prompts are being read.
    pub queue: RefMut<'a, Queue>,
    pub fleet: RefMut<'a, Fleet>,
}

impl State {
    fn new(config: Config) -> Self {
        let config = Rc::new(config);
        let (models, queue) = (Models::new(&config), Queue::default());
        let own = Own { models, queue, due: Moment::default() };
        Self { own: Rc::new(RefCell::new(own)), fleet: Fleet::of(&config), config }
    }

    /// The state. `None` when it is in use: callbacks do not nest.
    pub fn borrow(&self) -> Option<Shared<'_>> {
        let own = self.own.try_borrow_mut().ok()?;
        let fleet = self.fleet.try_borrow_mut().ok()?;
        let (models, queue) = RefMut::map_split(own, |own| (&mut own.models, &mut own.queue));
        Some(Shared { config: &self.config, models, queue, fleet })
    }

    fn tick(&self) {
        let now = host::now();
        if self.is_due(now) {
            if let Some(mut shared) = self.borrow() {
                self.beat(&mut shared, now);
            }
            // While anything waits to be read the next tick comes at once: one does not do both.
            return;
        }
        if let Some(mut shared) = self.borrow() {
            shared.queue.rest(TICK);
            // Last, since it makes host calls be about other contexts.
            shared.read_on();
        }
    }

    fn is_due(&self, now: Moment) -> bool {
        let Ok(mut own) = self.own.try_borrow_mut() else { return false };
        let is_due = now >= own.due;
        if is_due {
            // Half of it, so that a tick which comes a little early counts.
            own.due = now.plus(TICK / 2);
        }
        is_due
    }

    fn beat(&self, shared: &mut Shared<'_>, now: Moment) {
        meters::tick(true);
        if shared.fleet.is_latest(&self.config) {
            let ready = shared.models.all_ready();
            shared.fleet.set_ready(ready);
        }
        shared.fleet.tick(now);
        if shared.fleet.needs_models() {
            for (model, has_template) in shared.models.tick(now) {
                shared.fleet.trust.loaded(model, has_template, now);
            }
        } else {
            shared.models.give_up_turns(now);
        }
        if shared.fleet.is_latest(&self.config) {
            let Shared { fleet, models, .. } = shared;
            fleet.ask_oracle(models, now);
        }
    }
}

/// The root context. Without a configuration it does nothing, and neither do its streams.
#[derive(Default)]
pub struct Root {
    state: Option<State>,
    has_ended: bool,
}

impl Root {
    /// Envoy is done with this configuration.
    fn end(&mut self) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        if let Some(mut shared) = self.state.as_ref().and_then(State::borrow) {
            shared.models.give_up_turns(host::now());
            shared.fleet.leave();
        }
        meters::tick(false);
    }
}

/// A root that never came to its end, too.
impl Drop for Root {
    fn drop(&mut self) {
        self.end();
    }
}

impl Context for Root {
    fn on_done(&mut self) -> bool {
        self.end();
        true
    }

    fn on_http_call_response(
        &mut self,
        token: u32,
        num_headers: usize,
        body_size: usize,
        _num_trailers: usize,
    ) {
        if let Some(mut shared) = self.state.as_ref().and_then(State::borrow) {
            meters::time("call", || {
                if !shared.fleet.answer(token, num_headers, body_size) {
                    shared.models.answer(token, num_headers, body_size);
                }
            });
        }
    }
}

impl RootContext for Root {
    fn on_vm_start(&mut self, _size: usize) -> bool {
        host::log_info(concat!("warmpath ", env!("CARGO_PKG_VERSION"), ": VM started"));
        Seat::vm_starts();
        true
    }

    fn on_configure(&mut self, size: usize) -> bool {
        match Config::parse(&host::configuration(size)) {
            Ok(config) => {
                // No lease, no call, no slot here: this also runs in a VM that only tries the
                // configuration and is thrown away.
                self.state = Some(State::new(config));
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
        if let Some(state) = self.state.as_ref().filter(|_| !self.has_ended) {
            meters::time("tick", || state.tick());
        }
    }

    fn create_http_context(&self, context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream::new(context_id, self.state.clone())))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
