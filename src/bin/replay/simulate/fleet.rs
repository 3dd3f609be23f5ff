//! Engines, sessions and a clock that jumps from event to event.

use super::gateway::Gateway;
use super::policy::{Ask, Baseline, Policy};
use crate::stats::Sample;
use crate::workload::{Plan, Session};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;
use warmpath::mock::engine::{Engine, EngineConfig, Produced, Request, RequestId, StepReport};
use warmpath::route::RouteConfig;
use xxhash_rust::xxh3::xxh3_64;

/// From an answer's last token to the next turn on its way, think time apart: what the client and
/// the network take on one machine.
const TURNAROUND: Duration = Duration::from_millis(2);

/// Equal replicas behind one gateway.
pub struct Fleet {
    /// How many.
    pub replicas: usize,
    /// What each is.
    pub engine: EngineConfig,
    /// The gateway's configuration.
    pub route: RouteConfig,
    /// Time between a replica's reports.
    pub report_interval: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Report,
    StepEnds { replica: usize },
    Ask { session: usize, turn: usize },
}

/// A request under way or done.
struct Flight {
    session: usize,
    turn: usize,
    replica: usize,
    sent: Duration,
    last: Duration,
    answer: Vec<u32>,
    sample: Sample,
}

enum Router {
    Baseline(Baseline),
    Gateway(Box<Gateway>),
}

struct Simulation<'a> {
    fleet: &'a Fleet,
    plan: &'a Plan,
    router: Router,
    engines: Vec<Engine>,
    /// The step that each engine is in.
    steps: Vec<Option<StepReport>>,
    in_flight: Vec<usize>,
    /// Each session's prompt so far.
    prompts: Vec<Vec<u32>>,
    flights: Vec<Flight>,
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    event_count: u64,
}

impl Fleet {
    /// Plays a plan to its end. Samples are in the order in which requests were sent.
    ///
    /// # Errors
    /// When a request cannot be placed, or does not fit an engine.
    pub fn play(&self, plan: &Plan, policy: Policy, seed: u64) -> Result<Vec<Sample>, String> {
        let router = match Baseline::new(policy, seed) {
            Some(baseline) => Router::Baseline(baseline),
            None => {
                let gateway = Gateway::new(self.route.clone(), &self.engine, self.replicas);
                Router::Gateway(Box::new(gateway))
            }
        };
        let mut simulation = Simulation {
            fleet: self,
            plan,
            router,
            engines: vec![Engine::new(self.engine.clone()); self.replicas],
            steps: vec![None; self.replicas],
            in_flight: vec![0; self.replicas],
            prompts: plan.sessions.iter().map(|session| opening(plan, session)).collect(),
            flights: Vec::new(),
            events: BinaryHeap::new(),
            event_count: 0,
        };
        simulation.run()?;
        Ok(simulation.flights.into_iter().map(|flight| flight.sample).collect())
    }
}

impl Simulation<'_> {
    fn run(&mut self) -> Result<(), String> {
        for (session, planned) in self.plan.sessions.iter().enumerate() {
            self.at(planned.arrival, Event::Ask { session, turn: 0 });
        }
        self.at(Duration::ZERO, Event::Report);
        while let Some(Reverse((now, _, event))) = self.events.pop() {
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
        self.events.push(Reverse((time, self.event_count, event)));
    }

    fn report(&mut self, now: Duration) {
        if let Router::Gateway(gateway) = &mut self.router {
            for (replica, engine) in self.engines.iter().enumerate() {
                gateway.report(replica, engine.load(), self.fleet.engine.block_size, now);
            }
        }
        self.at(now + self.fleet.report_interval, Event::Report);
    }

    fn ask(&mut self, session: usize, turn: usize, now: Duration) -> Result<(), String> {
        let plan = self.plan;
        let missing = || format!("session {session} has no turn {turn}");
        let planned = plan.sessions.get(session).ok_or_else(missing)?;
        let said = planned.turns.get(turn).ok_or_else(missing)?;
        let prompt = self.prompts.get_mut(session).ok_or_else(missing)?;
        words(&said.text, prompt);
        let prompt = prompt.clone();
        let id = RequestId(self.flights.len() as u64);
        let replica = match &mut self.router {
            Router::Gateway(gateway) => gateway.choose(id, &prompt, said.answer_tokens, now)?,
            Router::Baseline(baseline) => baseline.choose(&Ask {
                session: &planned.name,
                head: plan.head(planned),
                in_flight: &self.in_flight,
            }),
        };
        let sample = Sample {
            replica: Some(format!("replica {:02}", replica + 1)),
            prompt_tokens: prompt.len() as u64,
            ..Sample::default()
        };
        let request = Request {
            id,
            prompt,
            max_tokens: said.answer_tokens as usize,
            salt: None,
            lora: None,
            reads_cache: true,
        };
        let engine = self.engines.get_mut(replica).ok_or("no such replica")?;
        engine.submit(request).map_err(|error| format!("a prompt is refused: {error:?}"))?;
        let answer = Vec::new();
        self.flights.push(Flight { session, turn, replica, sent: now, last: now, answer, sample });
        if let Some(count) = self.in_flight.get_mut(replica) {
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
        for produced in &report.produced {
            self.produced(produced, report.ended);
        }
        self.step(replica, report.ended);
    }

    fn produced(&mut self, produced: &Produced, now: Duration) {
        let Some(flight) = self.flights.get_mut(produced.id.0 as usize) else { return };
        if produced.first {
            flight.sample.first_token = Some(now - flight.sent);
            if let Router::Gateway(gateway) = &mut self.router {
                gateway.answer_began(produced.id);
            }
        } else {
            flight.sample.gaps.push(now - flight.last);
        }
        flight.last = now;
        flight.answer.push(produced.token);
        if produced.last {
            self.ended(produced.id, now);
        }
    }

    fn ended(&mut self, id: RequestId, now: Duration) {
        let Some(flight) = self.flights.get_mut(id.0 as usize) else { return };
        flight.sample.whole = now - flight.sent;
        let (session, turn) = (flight.session, flight.turn + 1);
        if let Router::Gateway(gateway) = &mut self.router {
            gateway.ended(id, &flight.answer);
        }
        if let Some(count) = self.in_flight.get_mut(flight.replica) {
            *count -= 1;
        }
        if let Some(prompt) = self.prompts.get_mut(session) {
            prompt.append(&mut flight.answer);
        }
        let next = self.plan.sessions.get(session).and_then(|planned| planned.turns.get(turn));
        if let Some(next) = next {
            self.at(now + TURNAROUND + next.think, Event::Ask { session, turn });
        }
    }
}

/// What a session's prompts all begin with: its app's tools and system prompt.
fn opening(plan: &Plan, session: &Session) -> Vec<u32> {
    let mut prompt = Vec::new();
    if let Some(turn) = session.turns.first() {
        let body = plan.body(session, turn, &[], "m");
        if let Some(tools) = body.get("tools") {
            words(&tools.to_string(), &mut prompt);
        }
        if session.app.is_some() {
            words(plan.head(session), &mut prompt);
        }
    }
    prompt
}

/// A token for each word, with a mark of its own where a text ends.
fn words(text: &str, prompt: &mut Vec<u32>) {
    let words = text.split([' ', '"', '\n']).filter(|word| !word.is_empty());
    prompt.extend(words.map(|word| xxh3_64(word.as_bytes()) as u32));
    prompt.push(u32::MAX);
}
