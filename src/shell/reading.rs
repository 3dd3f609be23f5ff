//! Held requests whose prompts are being read: each callback reads for a bounded time, and one request at a time.
//!
//! A prompt of megabytes takes longer than a callback may. What its own callback cannot finish goes on from ticks, which
//! come every millisecond while anything waits. The first in the queue alone holds anything in the VM: the bodies of the
//! others lie in Envoy's buffers until it is their turn. It weighs nothing: that is [`super::routed`]'s part.

use super::root::Shared;
use super::routed::{Held, Routed};
use super::{host, meters};
use crate::drift::Shape;
use crate::metrics;
use crate::model::{self, Model};
use crate::replicas::Moment;
use crate::request::{self, Api, Input, Prompt};
use crate::route::{self, Reason};
use crate::tokens::blocks::{ChainSeed, Chains};
use crate::tokens::ids::Ids;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

/// How long one callback reads. A fifth of the 50 ms that no callback may exceed, since steps that cannot be divided
/// (JSON, the template, the decision) come on top. Halved, long prompts are resumed twice as often; doubled, all else on
/// the worker waits twice as long behind each piece.
pub const PIECE: Duration = Duration::from_millis(10);

/// Bodies up to this size do not queue behind longer ones: they are read in their own callback. Of prose this takes a
/// millisecond or two. Halved, long chats wait for other people's documents; doubled, those wait for chats.
const SHORT_BODY_BYTES: usize = 64 << 10;

/// Between the pieces of long prompts, where Envoy sees to all else on the worker. Less is not to be had.
pub const READING_TICK: Duration = Duration::from_millis(1);

/// A request that is held while its prompt is read.
pub struct Turn {
    context_id: u32,
    api: Api,
    cluster: String,
    body_bytes: usize,
    /// When its body was complete.
    began: Moment,
    /// When its turn came: the wait and the reading have the same bound, each its own. With one for both, a queue that
    /// is too long would give each request its turn just before it is over, and finish none.
    turn_began: Moment,
    stage: Stage,
    outcome: Option<Result<Routed, Reason>>,
}

enum Stage {
    /// Its body is still Envoy's.
    Waiting,
    Prompt {
        prompt: Prompt,
        shape: Shape,
        model: Rc<Model>,
        index: usize,
        reading: Box<model::Reading>,
    },
    /// Its tokens are known and become blocks.
    Hashing(Box<Known>),
    Read(Result<Box<Known>, Reason>),
}

/// What is known of a body's prompt.
pub struct Known {
    /// The prompt, without its input.
    pub prompt: Prompt,
    /// Of when it had it.
    pub shape: Shape,
    pub ids: Ids,
    pub chains: Chains,
    pub model: Rc<Model>,
    /// The model's place in the configuration.
    pub index: usize,
}

/// The requests that wait to be read on, oldest first. Those whose client left are gone.
#[derive(Default)]
pub struct Queue {
    turns: VecDeque<Weak<RefCell<Turn>>>,
    /// Whether ticks come for them.
    has_ticks: bool,
}

impl Queue {
    fn first(&mut self) -> Option<Rc<RefCell<Turn>>> {
        loop {
            if let Some(turn) = self.turns.front()?.upgrade() {
                return Some(turn);
            }
            self.turns.pop_front();
        }
    }

    fn push(&mut self, turn: &Rc<RefCell<Turn>>) {
        self.turns.push_back(Rc::downgrade(turn));
        // Only once: asking again would begin the wait for the next tick anew.
        if !std::mem::replace(&mut self.has_ticks, true) {
            host::set_tick_period(READING_TICK);
        }
    }

    /// Gives the ticks back when there is nothing left to read.
    pub fn rest(&mut self, period: Duration) {
        if self.turns.is_empty() && std::mem::take(&mut self.has_ticks) {
            host::set_tick_period(period);
        }
    }
}

/// Says for how long a callback that began at `began` goes on.
pub fn until(began: Moment) -> impl FnMut() -> bool {
    move || host::now().since(began) < PIECE
}

impl Turn {
    pub fn new(context_id: u32, api: Api, cluster: String, body_bytes: usize) -> Self {
        let (began, stage) = (host::now(), Stage::Waiting);
        let turn_began = began;
        Self { context_id, api, cluster, body_bytes, began, turn_began, stage, outcome: None }
    }

    /// The outcome, once.
    pub fn take_outcome(&mut self) -> Option<Result<Routed, Reason>> {
        self.outcome.take()
    }

    /// Decides without a prompt.
    pub fn give_up(&mut self, shared: &mut Shared<'_>, reason: Reason) {
        self.stage = Stage::Read(Err(reason));
        self.decide(shared);
    }

    /// Reads on for one piece, in a callback of this request or with its context in effect. True when it is decided.
    fn go_on(&mut self, shared: &mut Shared<'_>, more: &mut dyn FnMut() -> bool) -> bool {
        let now = host::now();
        let is_read = matches!(self.stage, Stage::Read(_));
        if !is_read && now.since(self.turn_began) >= shared.config.max_prompt {
            self.stage = Stage::Read(Err(Reason::PromptTimeout));
        } else if matches!(self.stage, Stage::Waiting) {
            self.turn_began = now;
        }
        loop {
            self.stage = match std::mem::replace(&mut self.stage, Stage::Waiting) {
                Stage::Waiting => match self.parse(shared) {
                    Ok(stage) => stage,
                    Err(reason) => Stage::Read(Err(reason)),
                },
                Stage::Prompt { prompt, shape, model, index, mut reading } => {
                    match reading.go_on(&model, more) {
                        Ok(None) => Stage::Prompt { prompt, shape, model, index, reading },
                        Ok(Some(ids)) => {
                            let mut chains = self.chains(shared, &prompt, index);
                            if ids.unread.is_some() {
                                chains.leave_open();
                            }
                            let known = Known { prompt, shape, ids, chains, model, index };
                            Stage::Hashing(Box::new(known))
                        }
                        Err(error) => Stage::Read(Err(Reason::from(&error))),
                    }
                }
                Stage::Hashing(mut known) => {
                    let Known { ids, chains, .. } = &mut *known;
                    match chains.go_on(&ids.known, more) {
                        true => Stage::Read(Ok(known)),
                        false => Stage::Hashing(known),
                    }
                }
                read @ Stage::Read(_) => {
                    self.stage = read;
                    self.decide(shared);
                    return true;
                }
            };
            if !more() {
                return false;
            }
        }
    }

    fn parse(&self, shared: &Shared<'_>) -> Result<Stage, Reason> {
        let body = host::request_body(self.body_bytes).ok_or(Reason::HostError)?;
        let mut prompt = request::parse(self.api, &body).map_err(|error| Reason::from(&error))?;
        let named = shared.config.model_named(prompt.model.as_deref());
        let index = named.ok_or(Reason::UnknownModel)?;
        let model = shared.models.model(index)?;
        if let (Input::Chat(chat), Some(config)) =
            (&mut prompt.input, shared.config.models.get(index))
        {
            chat.rules = Arc::clone(&config.rules);
        }
        let local = host::wall_seconds().saturating_add_signed(shared.config.engine_utc_offset_s);
        let shape = Shape::of(self.api, &prompt);
        let reading = Box::new(model::Reading::new(&mut prompt, local));
        Ok(Stage::Prompt { prompt, shape, model, index, reading })
    }

    /// The prompt's chains, which have no tokens yet.
    fn chains(&self, shared: &Shared<'_>, prompt: &Prompt, index: usize) -> Chains {
        let own_name = shared.config.model_names(index).first().map_or("", String::as_str);
        let seed = ChainSeed::new(own_name, prompt.cache_salt.as_deref());
        let table = shared.fleet.link.table();
        Chains::new(seed, &route::block_sizes(&shared.config.route, table, &self.cluster))
    }

    fn decide(&mut self, shared: &mut Shared<'_>) {
        let Stage::Read(known) = std::mem::replace(&mut self.stage, Stage::Waiting) else { return };
        let Self { api, body_bytes, began, .. } = *self;
        let prompt = if known.is_ok() { "known" } else { "unknown" };
        meters::add(&metrics::PROMPTS, &[api.as_str(), prompt], 1);
        let held = Held { cluster: &self.cluster, known, body_bytes, began };
        let outcome = Routed::new(shared, held);
        meters::record_us(&metrics::DECISION, &[], host::now().since(began));
        let reason = match &outcome {
            Ok(routed) => routed.decision().reason,
            Err(reason) => *reason,
        };
        meters::add(&metrics::REQUESTS, &[reason.as_str()], 1);
        self.outcome = Some(outcome);
    }
}

impl Shared<'_> {
    /// Reads a request whose body has just come to its end. False when it must be held for longer.
    pub fn read(&mut self, turn: &Rc<RefCell<Turn>>) -> bool {
        let Ok(mut current) = turn.try_borrow_mut() else { return true };
        let is_first = self.queue.first().is_none();
        if is_first || current.body_bytes <= SHORT_BODY_BYTES {
            if current.go_on(self, &mut until(host::now())) {
                return true;
            }
            if !is_first {
                // Only the first of the queue may hold anything: this one begins again when it is.
                current.stage = Stage::Waiting;
                current.turn_began = current.began;
            }
        }
        self.queue.push(turn);
        false
    }

    /// Queues a request whose body has just come to its end.
    pub fn read_later(&mut self, turn: &Rc<RefCell<Turn>>) {
        self.queue.push(turn);
    }

    /// Reads on for one piece, and lets those go that are decided.
    pub fn read_on(&mut self) {
        let mut more = until(host::now());
        while let Some(turn) = self.queue.first() {
            let Ok(mut turn) = turn.try_borrow_mut() else { break };
            if !host::set_context(turn.context_id) {
                self.queue.turns.pop_front();
                continue;
            }
            if turn.go_on(self, &mut more) {
                self.queue.turns.pop_front();
                host::resume_request();
            }
            if !more() {
                break;
            }
        }
    }
}
