//! Held requests whose prompts are being read: each callback reads for a bounded time, and one request at a time.
//!
//! A prompt of megabytes takes longer than a callback may. What its own callback cannot finish goes on from ticks, which
//! come every millisecond while anything waits. The first in the queue alone holds anything in the VM: the bodies of the
//! others lie in Envoy's buffers until it is their turn. It weighs nothing: that is [`super::routed`]'s part.

use super::root::Shared;
use super::routed::{Held, Routed, Unrouted};
use super::{classes, host, meters, noted};
use crate::budget::{Account, OverBudget, Rates, Step};
use crate::classes::Class;
use crate::drift::Shape;
use crate::identity::{Identity, Tenant};
use crate::memo::{Chained, Chaining, Memo};
use crate::metrics;
use crate::model::{Model, Reading};
use crate::refusal;
use crate::replicas::Moment;
use crate::request::{self, Api, Input, Prompt};
use crate::route::{self, Reason};
use crate::tokens::blocks::Chains;
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
    class: Class,
    /// When its body was complete.
    began: Moment,
    /// When its turn came: the wait and the reading have the same bound, each its own. With one for both, a queue that
    /// is too long would give each request its turn just before it is over, and finish none.
    turn_began: Moment,
    /// What reading it took of the processor, and the step that comes next, with its bytes.
    account: Account,
    next: Option<(Step, usize)>,
    stage: Stage,
    outcome: Option<Result<Routed, Unrouted>>,
    /// Whether the request was answered here.
    is_answered: bool,
}

enum Stage {
    /// Its body is still Envoy's.
    Waiting,
    Prompt(Box<Parsed>),
    Read(Result<Box<Known>, Reason>),
}

/// A prompt on its way to its blocks.
struct Parsed {
    prompt: Prompt,
    shape: Shape,
    model: Rc<Model>,
    identity: Identity,
    chaining: Chaining,
}

/// What is known of a body's prompt.
pub struct Known {
    /// The prompt, without its input.
    pub prompt: Prompt,
    /// Of when it had it.
    pub shape: Shape,
    pub chained: Chained,
    pub model: Rc<Model>,
    /// Whose entries of a cache it can use.
    pub identity: Identity,
}

/// The requests that wait to be read on, oldest first. Those whose client left are gone.
#[derive(Default)]
pub struct Queue {
    turns: VecDeque<Weak<RefCell<Turn>>>,
    /// Whether ticks come for them.
    has_ticks: bool,
    /// What reading took lately.
    rates: Rates,
}

thread_local! {
    /// A VM has one memo, whatever the configuration.
    static MEMO: RefCell<Option<Memo>> = RefCell::default();
}

/// Calls `act` with the VM's memo. An error when it is in use: callbacks do not nest.
fn with_memo<T>(max_bytes: usize, act: impl FnOnce(&mut Memo) -> T) -> Result<T, Reason> {
    MEMO.with(|memo| {
        let mut memo = memo.try_borrow_mut().map_err(|_| Reason::HostError)?;
        let memo = memo.get_or_insert_with(|| Memo::new(host::unique_number(), max_bytes));
        memo.set_max_bytes(max_bytes);
        Ok(act(memo))
    })
}

/// Bytes of the VM's memo.
pub fn memo_bytes() -> usize {
    let bytes = |memo: &RefCell<Option<Memo>>| Some(memo.try_borrow().ok()?.as_ref()?.bytes());
    MEMO.with(bytes).unwrap_or_default()
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
        Self {
            context_id,
            api,
            cluster,
            body_bytes,
            class: Class::Unknown,
            began,
            turn_began: began,
            account: Account::default(),
            next: None,
            stage,
            outcome: None,
            is_answered: false,
        }
    }

    /// The outcome, once.
    pub fn take_outcome(&mut self) -> Option<Result<Routed, Unrouted>> {
        self.outcome.take()
    }

    /// Whether there is nothing to let go, because the request was answered here.
    pub fn is_answered(&self) -> bool {
        self.is_answered
    }

    /// Decides without a prompt.
    pub fn give_up(&mut self, shared: &mut Shared<'_>, reason: Reason) {
        self.stage = Stage::Read(Err(reason));
        self.decide(shared);
    }

    /// Reads on for one piece, in a callback of this request or with its context in effect. True when it is decided.
    fn go_on(
        &mut self,
        shared: &mut Shared<'_>,
        now: Moment,
        more: &mut dyn FnMut() -> bool,
    ) -> bool {
        let is_read = matches!(self.stage, Stage::Read(_));
        if !is_read && now.since(self.turn_began) >= shared.config.max_prompt {
            self.stage = Stage::Read(Err(Reason::PromptTimeout));
        } else if matches!(self.stage, Stage::Waiting) {
            self.turn_began = now;
        }
        let mut began = now;
        loop {
            if matches!(self.stage, Stage::Read(_)) {
                self.decide(shared);
                return true;
            }
            let stage = self.step(shared, more);
            let rates = &mut shared.queue.rates;
            let ended = host::now();
            let spent = self.account.spend(rates, ended.since(began));
            began = ended;
            self.stage = match (stage, spent) {
                (Ok(Stage::Prompt(_)), Err(OverBudget)) => Stage::Read(Err(Reason::PromptCpu)),
                (Ok(stage), _) => stage,
                (Err(reason), _) => Stage::Read(Err(reason)),
            };
            if matches!(self.stage, Stage::Read(Ok(_))) {
                self.account.end(rates);
            }
            if !more() {
                return false;
            }
        }
    }

    /// One step of reading, or a part of one.
    fn step(
        &mut self,
        shared: &mut Shared<'_>,
        more: &mut dyn FnMut() -> bool,
    ) -> Result<Stage, Reason> {
        match std::mem::replace(&mut self.stage, Stage::Waiting) {
            Stage::Waiting => {
                self.account = Account::new(shared.config.max_prompt_cpu);
                self.next = Some((Step::Parse, self.body_bytes));
                self.begin_next(shared, 0)?;
                self.parse(shared)
            }
            Stage::Prompt(parsed) => {
                self.begin_next(shared, parsed.identity.index())?;
                self.read_on(shared, parsed, more)
            }
            read @ Stage::Read(_) => Ok(read),
        }
    }

    /// Begins with the step that comes next, if there is time for it.
    fn begin_next(&mut self, shared: &mut Shared<'_>, model: usize) -> Result<(), Reason> {
        let Some((step, bytes)) = self.next.take() else { return Ok(()) };
        let begun = self.account.begin(&mut shared.queue.rates, step, model, bytes);
        begun.map_err(|OverBudget| Reason::PromptCpu)
    }

    fn parse(&mut self, shared: &mut Shared<'_>) -> Result<Stage, Reason> {
        let body = host::request_body(self.body_bytes).ok_or(Reason::HostError)?;
        let mut prompt = request::parse(self.api, &body).map_err(|error| Reason::from(&error))?;
        self.class = Class::of(self.api, &prompt);
        let table = shared.fleet.link.table();
        let named = Identity::of(shared.config, table, &self.cluster, prompt.model.as_deref());
        let identity = named.ok_or(Reason::UnknownModel)?;
        let model = shared.models.model(identity.index())?;
        if let (Input::Chat(chat), Some(config)) =
            (&mut prompt.input, shared.config.models.get(identity.index()))
        {
            chat.rules = Arc::clone(&config.rules);
        }
        let local = host::wall_seconds().saturating_add_signed(shared.config.engine_utc_offset_s);
        let shape = Shape::of(self.api, &prompt);
        let chains = self.chains(shared, &prompt, &identity);
        let chaining = Chaining::new(Reading::new(&mut prompt, local), chains);
        self.next = Some((Step::Render, self.body_bytes));
        Ok(Stage::Prompt(Box::new(Parsed { prompt, shape, model, identity, chaining })))
    }

    fn read_on(
        &mut self,
        shared: &Shared<'_>,
        mut parsed: Box<Parsed>,
        more: &mut dyn FnMut() -> bool,
    ) -> Result<Stage, Reason> {
        let Parsed { model, chaining, .. } = &mut *parsed;
        let max_bytes = shared.config.memo_bytes;
        if !chaining.is_rendered() {
            let left = with_memo(max_bytes, |memo| chaining.render(model, memo, more))?;
            let left = left.map_err(|error| Reason::from(&error))?;
            self.next = left.map(|bytes| (Step::Encode, bytes));
            return Ok(Stage::Prompt(parsed));
        }
        let chained = with_memo(max_bytes, |memo| chaining.go_on(model, memo, more))?;
        let chained = chained.map_err(|error| Reason::from(&error))?;
        let Some(chained) = chained else { return Ok(Stage::Prompt(parsed)) };
        count(&chained);
        let Parsed { prompt, shape, model, identity, .. } = *parsed;
        Ok(Stage::Read(Ok(Box::new(Known { prompt, shape, chained, model, identity }))))
    }

    /// The prompt's chains, which have no tokens yet.
    fn chains(&self, shared: &Shared<'_>, prompt: &Prompt, identity: &Identity) -> Chains {
        let tenant = match &shared.config.tenant_header {
            None => Tenant::One,
            Some(header) => Tenant::of(host::request_header(header)),
        };
        let seed = identity.seed(shared.config, prompt.cache_salt.as_deref(), &tenant);
        let table = shared.fleet.link.table();
        Chains::new(seed, &route::block_sizes(&shared.config.route, table, &self.cluster))
    }

    fn decide(&mut self, shared: &mut Shared<'_>) {
        let Stage::Read(known) = std::mem::replace(&mut self.stage, Stage::Waiting) else { return };
        let Self { api, body_bytes, began, .. } = *self;
        let prompt = if known.is_ok() { "known" } else { "unknown" };
        let class = classes::label(&shared.config.classes, self.class);
        meters::add(&metrics::PROMPTS, &[api.as_str(), prompt, class.as_str()], 1);
        let more = known.as_ref().map_or(0, |known| known.prompt.more_prompts);
        if more > 0 {
            meters::add(&metrics::MORE_PROMPTS, &[api.as_str()], more as u64);
        }
        let noted = class.as_str().to_owned();
        let held = Held { cluster: &self.cluster, known, body_bytes, class, began };
        let outcome = Routed::new(shared, held);
        meters::record_us(&metrics::DECISION, &[], host::now().since(began));
        let reason = match &outcome {
            Ok(routed) => routed.decision().reason,
            Err(unrouted) => unrouted.reason,
        };
        if let Err(Unrouted { retry_after_s: Some(seconds), .. }) = &outcome {
            self.is_answered = refuse(api, *seconds);
        }
        meters::add(&metrics::REQUESTS, &[reason.as_str()], 1);
        noted::reason(reason);
        noted::decision(&noted, outcome.as_ref().ok().map(Routed::decision));
        self.outcome = Some(outcome);
    }
}

/// Answers that all replicas are overloaded. Where even that fails, Envoy chooses.
fn refuse(api: Api, retry_after_s: u64) -> bool {
    let seconds = retry_after_s.to_string();
    let headers = [("content-type", "application/json"), ("retry-after", seconds.as_str())];
    host::answer(refusal::STATUS, &headers, refusal::body(api).as_bytes())
}

/// Counts what the memo knew.
fn count(chained: &Chained) {
    let result = match chained.recalled_tokens {
        None => "none",
        Some(0) => "miss",
        Some(_) => "hit",
    };
    meters::add(&metrics::MEMO_PROMPTS, &[result], 1);
    let recalled = chained.recalled_tokens.unwrap_or_default();
    meters::add(&metrics::MEMO_TOKENS, &[], recalled as u64);
}

impl Shared<'_> {
    /// Reads a request whose body has just come to its end. False when it must be held for longer.
    pub fn read(&mut self, turn: &Rc<RefCell<Turn>>) -> bool {
        let Ok(mut current) = turn.try_borrow_mut() else { return true };
        let is_first = self.queue.first().is_none();
        if is_first || current.body_bytes <= SHORT_BODY_BYTES {
            // It has just been made.
            let now = current.began;
            if current.go_on(self, now, &mut until(now)) {
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
            if turn.go_on(self, host::now(), &mut more) {
                self.queue.turns.pop_front();
                if !turn.is_answered() {
                    host::resume_request();
                }
            }
            if !more() {
                break;
            }
        }
    }
}
