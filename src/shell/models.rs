//! The models of this VM: prepared files fetched and loaded on ticks, from each server by one VM at a time.
//!
//! A file is some megabytes and every VM needs its own copy, so VMs take turns: while one loads,
//! the others route that model by load. Each server has turns of its own, so that one which hangs keeps nobody from
//! what the others serve. What is loaded stays, under its cluster and path, for as
//! long as any configuration of the VM names it: while one replaces another both do.

use super::link::{self, SharedLease};
use super::{host, meters};
use crate::config::{Config, ModelConfig};
use crate::loaded::{self, Loaded, Next, Stage};
use crate::metrics;
use crate::model::Model;
use crate::replicas::Moment;
use crate::route::Reason;
use crate::tokens::prepared::{Loader, MAX_FILE_BYTES, Progress, too_large};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// How long one VM may keep the others from loading without a sign of life. A step holds it for
/// far less; a fetch takes at most [`FETCH_TIMEOUT`], during which it still ticks.
const TURN_TERM: Duration = Duration::from_secs(5);

/// A prepared file is a few megabytes from Envoy itself or a neighbour. Halved, a slow neighbour is
/// never waited for; doubled, one that hangs keeps every other VM's turn for that much longer.
const FETCH_TIMEOUT: Duration = Duration::from_secs(20);

/// A file that could not be fetched or read is tried again this much later. Halved, a damaged file
/// is fetched and logged twice as often by every VM; doubled, so is the wait once it is mended.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// How long one tick goes on loading. Half of the 50 ms that no callback may exceed, because the
/// last step begins before the limit and ends behind it.
const TICK_BUDGET: Duration = Duration::from_millis(25);

/// Servers that have turns of their own; those beyond wait for one another. Halved, fewer do; doubled, so many more leases are
/// asked for on each tick of a VM that waits.
const MAX_SERVERS: usize = 8;

thread_local! {
    /// All roots of a VM share what is loaded.
    static LOADED: RefCell<Loaded<Model>> = RefCell::default();
}

enum State {
    /// To be fetched, not before this moment.
    Waiting(Moment),
    Fetching(u32),
    Loading(Box<Loader>),
    Ready(Rc<Model>),
}

struct Entry {
    config: ModelConfig,
    /// The place of its server.
    server: usize,
    state: State,
    failed: bool,
    /// Whether it has been told that this model is loaded.
    told: bool,
}

/// Whose turn it is to load from one server. Of which configuration does not matter: what is loaded costs the same.
struct Server {
    turn: SharedLease,
    has_turn: bool,
}

impl Server {
    fn new(place: usize) -> Self {
        let vm = host::unique_number();
        Self { turn: link::lease("loading", place as u64, vm, TURN_TERM), has_turn: false }
    }

    fn hold_turn(&mut self, now: Moment) -> bool {
        self.has_turn = self.turn.hold(now, Duration::ZERO, 0).is_some();
        self.has_turn
    }

    fn give_up_turn(&mut self, now: Moment) {
        if std::mem::take(&mut self.has_turn) {
            self.turn.give_up(now);
        }
    }
}

/// See the module.
pub struct Models {
    entries: Vec<Entry>,
    servers: Vec<Server>,
}

impl Models {
    pub fn new(config: &Config) -> Self {
        let clusters = config.models.iter().map(|model| model.prepared_cluster.as_str());
        let places = loaded::places(clusters, MAX_SERVERS);
        let count = places.iter().max().map_or(0, |last| last + 1);
        let entry = |(config, server): (&ModelConfig, usize)| Entry {
            config: config.clone(),
            server,
            state: State::Waiting(Moment::default()),
            failed: false,
            told: false,
        };
        Self {
            entries: config.models.iter().zip(places).map(entry).collect(),
            servers: (0..count).map(Server::new).collect(),
        }
    }

    /// The model at this place of the configuration, or why it cannot be used yet.
    pub fn model(&self, index: usize) -> Result<Rc<Model>, Reason> {
        match self.entries.get(index) {
            Some(Entry { state: State::Ready(model), .. }) => Ok(Rc::clone(model)),
            Some(Entry { failed: true, .. }) => Err(Reason::TokenizerUnavailable),
            Some(_) => Err(Reason::TokenizerLoading),
            None => Err(Reason::UnknownModel),
        }
    }

    pub fn all_ready(&self) -> bool {
        self.entries.iter().all(|entry| matches!(entry.state, State::Ready(_)))
    }

    /// Goes on loading where it is this VM's turn. What has been loaded since the last call, and whether it has a template.
    pub fn tick(&mut self, now: Moment) -> Vec<(u64, bool)> {
        self.go_on(now);
        self.entries.iter_mut().filter_map(Entry::news).collect()
    }

    fn go_on(&mut self, now: Moment) {
        for entry in &mut self.entries {
            entry.take_loaded();
        }
        let mut reads = false;
        for (place, server) in self.servers.iter_mut().enumerate() {
            let next = loaded::next(self.entries.iter().map(|entry| entry.stage_at(place)), now);
            // What failed is tried again in a turn of its own: whoever has not tried yet goes before.
            let next = next.filter(|next| !(next.is_retry && server.has_turn));
            let entry = next.and_then(|Next { index, .. }| self.entries.get_mut(index));
            match entry {
                None => server.give_up_turn(now),
                Some(_) if !server.hold_turn(now) => {}
                // One tick reads of one file only.
                Some(entry) if entry.is_loading() && std::mem::replace(&mut reads, true) => {}
                Some(entry) => entry.go_on(now),
            }
        }
    }

    /// Lets another VM load. Without this it would wait for the turns' end.
    pub fn give_up_turns(&mut self, now: Moment) {
        self.servers.iter_mut().for_each(|server| server.give_up_turn(now));
    }

    /// Takes in the answer to a fetch. Returns false when the call was not for a model.
    pub fn answer(&mut self, token: u32, num_headers: usize, body_size: usize) -> bool {
        let fetching = |entry: &&mut Entry| matches!(entry.state, State::Fetching(t) if t == token);
        let Some(entry) = self.entries.iter_mut().find(fetching) else { return false };
        if body_size > MAX_FILE_BYTES {
            entry.fail("damaged", &too_large(body_size).to_string());
            return true;
        }
        match file(num_headers, body_size) {
            Ok(body) => match Loader::new(body) {
                Ok(loader) => entry.state = State::Loading(Box::new(loader)),
                Err(error) => entry.fail("damaged", &error.to_string()),
            },
            Err(problem) => entry.fail("fetch_failed", &problem),
        }
        true
    }
}

/// The answer to a fetch, or why it is no file.
fn file(num_headers: usize, body_size: usize) -> Result<Vec<u8>, String> {
    // Without headers it was reset, and asking for one would be an error.
    let status = (num_headers > 0).then(|| host::call_header(":status")).flatten();
    match status.as_deref() {
        Some(b"200") => {
            let body = host::call_body(body_size).filter(|body| !body.is_empty());
            body.ok_or_else(|| "answered 200 without a body".to_owned())
        }
        Some(b"504") => Err("answered 504, or not within 20 s".to_owned()),
        Some(other) => Err(format!("answered {}", String::from_utf8_lossy(other))),
        None => Err("the answer broke off, or is longer than Envoy takes in (32 MB, or \
                     http.async_response_buffer_limit in its runtime)"
            .to_owned()),
    }
}

impl Entry {
    fn name(&self) -> &str {
        self.config.names.first().map_or("", String::as_str)
    }

    /// What there is to tell of a model that has been loaded, once.
    fn news(&mut self) -> Option<(u64, bool)> {
        let State::Ready(model) = &self.state else { return None };
        let is_news = !std::mem::replace(&mut self.told, true);
        is_news.then(|| (self.config.identity(), model.has_template()))
    }

    fn is_loading(&self) -> bool {
        matches!(self.state, State::Loading(_))
    }

    /// How far it is, for who asks for those of one server.
    fn stage_at(&self, server: usize) -> Stage {
        match self.state {
            _ if self.server != server => Stage::Ready,
            State::Waiting(at) => Stage::Waiting(at, self.failed),
            State::Fetching(_) | State::Loading(_) => Stage::UnderWay,
            State::Ready(_) => Stage::Ready,
        }
    }

    fn take_loaded(&mut self) {
        if matches!(self.state, State::Waiting(_)) {
            let ModelConfig { prepared_cluster, prepared_path, .. } = &self.config;
            let loaded = LOADED
                .with(|loaded| loaded.try_borrow().ok()?.find(prepared_cluster, prepared_path));
            if let Some(model) = loaded {
                self.state = State::Ready(model);
            }
        }
    }

    fn go_on(&mut self, now: Moment) {
        match &self.state {
            State::Waiting(_) => self.fetch(),
            State::Loading(_) => self.load(now),
            State::Fetching(_) | State::Ready(_) => {}
        }
    }

    fn fetch(&mut self) {
        let ModelConfig { prepared_cluster, prepared_path, .. } = &self.config;
        match host::call(prepared_cluster, "warmpath", prepared_path, &[], FETCH_TIMEOUT) {
            Some(token) => self.state = State::Fetching(token),
            None => self.fail("fetch_failed", "no such cluster, or it has no members"),
        }
    }

    fn load(&mut self, began: Moment) {
        loop {
            let State::Loading(loader) = &mut self.state else { return };
            let step_began = host::now();
            let progress = loader.step();
            meters::record_ms(&metrics::TOKENIZER_STEP, &[], host::now().since(step_began));
            match progress {
                Ok(Progress::Pending) if host::now().since(began) < TICK_BUDGET => {}
                Ok(Progress::Pending) => return,
                Ok(Progress::Ready(prepared)) => match Model::new(*prepared) {
                    Ok(model) => self.succeed(Rc::new(model)),
                    Err(error) => self.fail("damaged", &error.to_string()),
                },
                Err(error) => self.fail("damaged", &error.to_string()),
            }
        }
    }

    fn succeed(&mut self, model: Rc<Model>) {
        meters::add(&metrics::TOKENIZER_LOADS, &[self.name(), "ok"], 1);
        let ModelConfig { prepared_cluster, prepared_path, .. } = &self.config;
        if !model.renders_chats() {
            log::warn!(
                "model {:?}: {prepared_path} has no chat template: its chats go by load (template_error); prepare it anew \
                 with --chat-template",
                self.name()
            );
        }
        LOADED.with(|loaded| {
            if let Ok(mut loaded) = loaded.try_borrow_mut() {
                loaded.note(prepared_cluster, prepared_path, &model);
            }
        });
        self.state = State::Ready(model);
        self.failed = false;
    }

    fn fail(&mut self, result: &str, problem: &str) {
        meters::add(&metrics::TOKENIZER_LOADS, &[self.name(), result], 1);
        let ModelConfig { prepared_cluster, prepared_path, .. } = &self.config;
        log::error!(
            "model {:?}: {prepared_path} from cluster {prepared_cluster}: {result}: {problem}",
            self.name()
        );
        self.state = State::Waiting(host::now().plus(RETRY_AFTER));
        self.failed = true;
    }
}
