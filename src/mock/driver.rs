//! Paces an engine against the real clock and hands its tokens to the requests' streams.
//!
//! It does not schedule: what a step does and how long it takes is the engine's to say.

use super::engine::{Engine, Request, RequestId, StepReport};
use super::events::KvEvent;
use super::replica::Replica;
use hashbrown::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

/// What the server asks of its engine. Obeyed between steps, as in a real engine.
#[derive(Debug)]
pub enum Command {
    /// Run a request and send its tokens here.
    Submit(Request, Listener),
    /// The client is gone.
    Abort(RequestId),
    /// Forget the prefix cache, and say whether that was possible.
    ResetPrefixCache(oneshot::Sender<bool>),
    /// Say how many of this request's prompt tokens the cache has.
    Look(Request, oneshot::Sender<usize>),
}

/// Where a request's tokens go.
#[derive(Debug)]
pub struct Listener {
    /// The stream.
    pub events: UnboundedSender<Event>,
    /// Which of the answers in that stream this request is.
    pub choice: usize,
    /// When the request came.
    pub arrived: Instant,
}

/// One token of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Which answer.
    pub choice: usize,
    /// The token's id.
    pub token: u32,
    /// Prompt tokens that the cache had.
    pub cached_tokens: usize,
    /// Whether it is this answer's last.
    pub last: bool,
}

struct Live {
    listener: Listener,
    cached_tokens: usize,
    latest: Option<Instant>,
}

/// A step that ends later than this is not caught up with: the machine is too slow, and a burst of
/// steps at no distance would be no engine's behaviour.
const LATENESS_LIMIT: Duration = Duration::from_millis(250);

/// Runs an engine until nobody can send it commands any more. What it tells of its cache goes out at a step's end, in
/// one batch, before the step's tokens do.
pub async fn drive(
    mut engine: Engine,
    mut commands: UnboundedReceiver<Command>,
    batches: UnboundedSender<Vec<KvEvent>>,
    replica: Arc<Replica>,
) {
    let start = Instant::now();
    let mut live: HashMap<RequestId, Live> = HashMap::new();
    // Where the engine's time is. It lags the clock while a step is late, and so catches up.
    let mut now = start;
    publish(&engine, &replica, |_| ());
    loop {
        if engine.is_idle() {
            let Some(command) = commands.recv().await else { return };
            obey(command, &mut engine, &mut live);
            now = now.max(Instant::now());
        }
        while let Ok(command) = commands.try_recv() {
            obey(command, &mut engine, &mut live);
        }
        if engine.is_idle() {
            publish(&engine, &replica, |_| ());
            continue;
        }
        let report = engine.step(now - start);
        now += report.duration;
        sleep_until(now).await;
        let events = engine.events();
        if !events.is_empty() {
            let _ = batches.send(events);
        }
        deliver(&report, now, &engine, &mut live, &replica);
        if now.elapsed() > LATENESS_LIMIT {
            now = Instant::now();
        }
    }
}

fn obey(command: Command, engine: &mut Engine, live: &mut HashMap<RequestId, Live>) {
    match command {
        Command::Submit(request, listener) => {
            let id = request.id;
            // A refused request's listener is dropped here, which ends its stream with an error.
            if engine.submit(request).is_ok() {
                live.insert(id, Live { listener, cached_tokens: 0, latest: None });
            }
        }
        Command::Abort(id) => {
            engine.abort(id);
            live.remove(&id);
        }
        Command::ResetPrefixCache(answer) => {
            let _ = answer.send(engine.reset_prefix_cache());
        }
        Command::Look(Request { prompt, salt, lora, .. }, answer) => {
            let _ = answer.send(engine.cached_tokens(&prompt, salt, lora));
        }
    }
}

fn deliver(
    report: &StepReport,
    now: Instant,
    engine: &Engine,
    live: &mut HashMap<RequestId, Live>,
    replica: &Replica,
) {
    for admitted in &report.admitted {
        if let Some(request) = live.get_mut(&admitted.id) {
            request.cached_tokens = admitted.cached_tokens;
        }
    }
    publish(engine, replica, |published| {
        for produced in &report.produced {
            let Some(request) = live.get_mut(&produced.id) else { continue };
            let age = (now - request.listener.arrived).as_secs_f64();
            match request.latest {
                None => published.time_to_first_token.observe(age),
                Some(latest) => published.inter_token_latency.observe((now - latest).as_secs_f64()),
            }
            if produced.last {
                published.end_to_end.observe(age);
            }
            request.latest = Some(now);
            // A closed stream sends its own abort.
            let _ = request.listener.events.send(Event {
                choice: request.listener.choice,
                token: produced.token,
                cached_tokens: request.cached_tokens,
                last: produced.last,
            });
        }
    });
    for id in &report.finished {
        live.remove(id);
    }
}

fn publish(
    engine: &Engine,
    replica: &Replica,
    more: impl FnOnce(&mut super::exposition::Published),
) {
    let mut published = replica.published();
    published.load = engine.load();
    published.totals = engine.totals();
    more(&mut published);
}
