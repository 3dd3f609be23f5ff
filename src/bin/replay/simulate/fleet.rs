//! Engines, gateways, sessions and a clock that jumps from event to event.
//!
//! A gateway has worker threads, and each request comes on a connection of one of them, drawn at random, as Envoy's do.
//! A thread sees what its gateway has in flight. Policies whose threads share what they know have one router per
//! gateway, the others one per thread; Warmpath's threads read each other's logs at each decision, so one router is
//! the truth for it. Gateways share nothing: each knows of the others' requests by the replicas' reports alone.

use super::policy::{Ask, Ended, Policy, ReplicaReport, Router, Setting};
use crate::random::Random;
use crate::stats::Sample;
use crate::trace::Trace;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;
use warmpath::mock::engine::EngineConfig;
use warmpath::mock::scheduler::{Produced, RequestId, Scheduler, StepReport, Work};
use warmpath::route::RouteConfig;

/// From an answer's last token to the next turn on its way, think time apart: what the client and
/// the network take on one machine.
const TURNAROUND: Duration = Duration::from_millis(2);

/// The stream of chance that threads are drawn from.
const THREADS: u64 = 21;

/// What requests are played against.
#[derive(Debug, Clone)]
pub struct FleetConfig {
    /// How many replicas.
    pub replicas: usize,
    /// What each is.
    pub engine: EngineConfig,
    /// How fast each is, as a multiple of that; those that are not named are as fast.
    pub speeds: Vec<f64>,
    /// Warmpath's configuration.
    pub route: RouteConfig,
    /// Time between a replica's reports.
    pub report_interval: Duration,
    /// Gateways, each with as many of the sessions.
    pub gateways: usize,
    /// Worker threads of each.
    pub threads: usize,
    /// Whether responses say how many tokens were cached.
    pub usage: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Report,
    Ask { session: usize, turn: usize },
    StepEnds { replica: usize },
}

/// A request under way or done.
struct Flight {
    session: usize,
    turn: usize,
    replica: usize,
    gateway: usize,
    router: usize,
    sent: Duration,
    last: Duration,
    sample: Sample,
}

struct Simulation<'a> {
    fleet: &'a FleetConfig,
    trace: &'a Trace,
    /// All gateways' routers, one gateway's after the other's.
    routers: Vec<Box<dyn Router + 'a>>,
    routers_per_gateway: usize,
    threads: Random,
    engines: Vec<Scheduler<u64>>,
    /// The step that each engine is in.
    steps: Vec<Option<StepReport>>,
    has_events: bool,
    report_interval: Duration,
    /// By gateway and replica.
    in_flight: Vec<Vec<usize>>,
    serving: Vec<bool>,
    /// Each session's prompt so far.
    prompts: Vec<Vec<u64>>,
    flights: Vec<Flight>,
    events: BinaryHeap<Reverse<(Duration, Event, u64)>>,
    event_count: u64,
}

impl FleetConfig {
    /// Plays a trace to its end. Samples are in the order in which requests were sent.
    ///
    /// # Errors
    /// When a request cannot be placed, or does not fit an engine.
    pub fn play(&self, trace: &Trace, policy: Policy, seed: u64) -> Result<Vec<Sample>, String> {
        let gateways = self.gateways.max(1);
        let routers_per_gateway =
            if policy.is_shared_by_threads() { 1 } else { self.threads.max(1) };
        let router = |number: usize| {
            let seed = seed.wrapping_add((number as u64) << 32);
            policy.router(&Setting { fleet: self, trace, seed })
        };
        let mut simulation = Simulation {
            fleet: self,
            trace,
            routers: (0..gateways * routers_per_gateway).map(router).collect(),
            routers_per_gateway,
            threads: Random::new(seed, THREADS),
            engines: (0..self.replicas).map(|n| Scheduler::new(self.engine(n))).collect(),
            steps: vec![None; self.replicas],
            has_events: policy.has_events(),
            report_interval: policy
                .report_interval()
                .map_or(self.report_interval, |own| own.min(self.report_interval)),
            in_flight: vec![vec![0; self.replicas]; gateways],
            serving: vec![true; self.replicas],
            prompts: vec![Vec::new(); trace.sessions.len()],
            flights: Vec::with_capacity(trace.requests()),
            events: BinaryHeap::new(),
            event_count: 0,
        };
        simulation.run()?;
        Ok(simulation.flights.into_iter().map(|flight| flight.sample).collect())
    }

    /// What one replica is.
    fn engine(&self, replica: usize) -> EngineConfig {
        let speed = self.speeds.get(replica).copied().unwrap_or(1.0).max(1e-6);
        EngineConfig {
            step_base: self.engine.step_base.div_f64(speed),
            prefill_rate: self.engine.prefill_rate * speed,
            attention_rate: self.engine.attention_rate * speed,
            decode_per_sequence: self.engine.decode_per_sequence.div_f64(speed),
            ..self.engine.clone()
        }
    }
}

impl Simulation<'_> {
    fn run(&mut self) -> Result<(), String> {
        if self.has_events {
            self.engines.iter_mut().for_each(Scheduler::listen);
        }
        for (session, planned) in self.trace.sessions.iter().enumerate() {
            self.at(planned.arrival, Event::Ask { session, turn: 0 });
        }
        self.at(Duration::ZERO, Event::Report);
        while let Some(Reverse((now, event, _))) = self.events.pop() {
            match event {
                // The last report has nothing to come before.
                Event::Report if self.events.is_empty() => {}
                Event::Report => self.report(now),
                Event::StepEnds { replica } => self.step_ends(replica),
                Event::Ask { session, turn } => self.ask(session, turn, now)?,
            }
        }
        Ok(())
    }

    fn at(&mut self, time: Duration, event: Event) {
        self.event_count += 1;
        self.events.push(Reverse((time, event, self.event_count)));
    }

    fn report(&mut self, now: Duration) {
        for (replica, engine) in self.engines.iter().enumerate() {
            let load = engine.load();
            let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            let report = ReplicaReport {
                running: count(load.running),
                waiting: count(load.waiting),
                kv_usage: load.held_blocks as f64 / load.capacity_blocks.max(1) as f64,
                capacity_blocks: count(load.capacity_blocks),
                started_at: 1.0,
            };
            for router in &mut self.routers {
                router.report(replica, &report, now);
            }
        }
        self.at(now + self.report_interval, Event::Report);
    }

    fn ask(&mut self, session: usize, turn: usize, now: Duration) -> Result<(), String> {
        let missing = || format!("session {session} has no turn {turn}");
        let said = self.trace.turn(session, turn).ok_or_else(missing)?;
        let prompt = self.prompts.get_mut(session).ok_or_else(missing)?;
        self.trace.advance(session, turn, prompt);
        let gateway = session % self.in_flight.len();
        let thread = self.threads.below(self.routers_per_gateway);
        let router = gateway * self.routers_per_gateway + thread;
        let id = RequestId(self.flights.len() as u64);
        let ask = Ask {
            id,
            session,
            session_name: self.trace.sessions.get(session).map_or("", |planned| &planned.name),
            blocks: prompt,
            block_tokens: self.trace.block_tokens,
            prompt_tokens: said.prompt_tokens,
            answer_tokens: said.answer_tokens,
            now,
            in_flight: self.in_flight.get(gateway).map_or(&[], Vec::as_slice),
            serving: &self.serving,
        };
        let routing = self.routers.get_mut(router).ok_or("no such router")?;
        let replica = routing.choose(&ask)?;
        let why = routing.why();
        let sample = Sample {
            replica: Some(format!("replica {:02}", replica + 1)),
            prompt_tokens: u64::from(said.prompt_tokens),
            class: said.class,
            arrival: now,
            predicted_tokens: why.predicted_tokens.map(u64::from),
            reason: why.reason,
            ..Sample::default()
        };
        let mut keys = Vec::with_capacity(prompt.len() + said.answer_blocks.len());
        keys.extend_from_slice(prompt);
        keys.extend_from_slice(&said.answer_blocks);
        let work = Work {
            id,
            keys,
            prompt_tokens: said.prompt_tokens as usize,
            max_tokens: said.answer_tokens as usize,
            reads_cache: true,
        };
        let engine = self.engines.get_mut(replica).ok_or("no such replica")?;
        engine.submit(work).map_err(|error| format!("a prompt is refused: {error:?}"))?;
        let (sent, last) = (now, now);
        self.flights.push(Flight { session, turn, replica, gateway, router, sent, last, sample });
        if let Some(count) = self.in_flight.get_mut(gateway).and_then(|row| row.get_mut(replica)) {
            *count += 1;
        }
        self.step(replica, now);
        Ok(())
    }

    /// Begins a step, unless the engine is in one or has nothing to do.
    fn step(&mut self, replica: usize, now: Duration) {
        let (Some(engine), Some(step)) =
            (self.engines.get_mut(replica), self.steps.get_mut(replica))
        else {
            return;
        };
        if step.is_some() || engine.is_idle() {
            return;
        }
        let report = engine.step(now);
        let ended = report.ended;
        *step = Some(report);
        self.at(ended, Event::StepEnds { replica });
    }

    fn step_ends(&mut self, replica: usize) {
        let Some(report) = self.steps.get_mut(replica).and_then(Option::take) else { return };
        for admitted in &report.admitted {
            if let Some(flight) = self.flights.get_mut(admitted.id.0 as usize) {
                flight.sample.cached_tokens = admitted.cached_tokens as u64;
            }
        }
        let changes = self.engines.get_mut(replica).map(Scheduler::changes).unwrap_or_default();
        if !changes.is_empty() {
            for router in &mut self.routers {
                router.cached(replica, &changes, report.ended);
            }
        }
        for produced in &report.produced {
            self.produced(produced, report.ended);
        }
        self.step(replica, report.ended);
    }

    fn produced(&mut self, produced: &Produced, now: Duration) {
        let Some(flight) = self.flights.get_mut(produced.id.0 as usize) else { return };
        if produced.first {
            flight.sample.first_token = Some(now - flight.sent);
            if let Some(router) = self.routers.get_mut(flight.router) {
                router.answer_began(produced.id, now);
            }
        } else {
            flight.sample.gaps.push(now - flight.last);
        }
        flight.last = now;
        if produced.last {
            self.ended(produced.id, now);
        }
    }

    fn ended(&mut self, id: RequestId, now: Duration) {
        let Some(flight) = self.flights.get_mut(id.0 as usize) else { return };
        flight.sample.whole = now - flight.sent;
        let (session, turn) = (flight.session, flight.turn);
        let Some(said) = self.trace.turn(session, turn) else { return };
        let cached = u32::try_from(flight.sample.cached_tokens).ok();
        let ended = Ended {
            cached_tokens: cached.filter(|_| self.fleet.usage),
            answer_tokens: said.answer_tokens,
            answer_blocks: &said.answer_blocks,
            first_token: flight.sample.first_token.unwrap_or_default(),
            failed: false,
        };
        if let Some(router) = self.routers.get_mut(flight.router) {
            router.ended(id, &ended, now);
        }
        let row = self.in_flight.get_mut(flight.gateway);
        if let Some(count) = row.and_then(|row| row.get_mut(flight.replica)) {
            *count -= 1;
        }
        if let Some(next) = self.trace.turn(session, turn + 1) {
            self.at(now + TURNAROUND + next.think, Event::Ask { session, turn: turn + 1 });
        }
    }
}
