//! One run: sessions, gateways and replicas on a clock that jumps from event to event.

use super::fault::What;
use super::fleet::FleetConfig;
use super::policy::{Ask, Ended, Policy, ReplicaReport, Router, Standing};
use super::replica::{Progress, Replica};
use crate::random::Random;
use crate::stats::Sample;
use crate::trace::{Trace, Turn};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;
use warmpath::mock::scheduler::{RequestId, Work};

/// From an answer's last token to the next turn on its way, think time apart: what the client and
/// the network take on one machine.
const TURNAROUND: Duration = Duration::from_millis(2);

/// From a request's failure to its client's next attempt.
const RETRY: Duration = Duration::from_millis(100);

/// The stream of chance that connections are drawn from.
const CONNECTIONS: u64 = 21;

/// Of events at one moment the first named comes first: a step that begins when a request comes has it in its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Fault(usize),
    /// A replica that went down is back.
    Back(usize),
    /// A gateway asks for reports.
    Report {
        gateway: usize,
    },
    /// They come in.
    Heard {
        gateway: usize,
    },
    Ask {
        session: usize,
        turn: usize,
    },
    Retry {
        sample: usize,
    },
    /// Meant for the phase with this number only.
    Wake {
        replica: usize,
        phase: u64,
    },
}

/// One attempt at a request.
struct Flight {
    sample: usize,
    replica: usize,
    gateway: usize,
    router: usize,
    /// When its latest token came.
    last: Duration,
    is_over: bool,
}

/// A request, through all its attempts.
struct Asked {
    session: usize,
    turn: usize,
    sample: Sample,
}

/// What the fleet looks like from outside.
struct Place {
    replica: Replica,
    phase: u64,
    /// When the event that ends its phase is due.
    wakes: Option<Duration>,
    standing: Standing,
}

/// One session on its way.
#[derive(Clone, Default)]
struct Talk {
    /// Its latest prompt.
    prompt: Vec<u64>,
    /// Its connection's gateway and router.
    connection: Option<(usize, usize)>,
}

type Reports = Vec<Option<ReplicaReport>>;

/// See the module.
pub struct Simulation<'a> {
    fleet: &'a FleetConfig,
    trace: &'a Trace,
    /// All gateways' routers, one gateway's after the other's.
    routers: Vec<Box<dyn Router + 'a>>,
    connections: Random,
    places: Vec<Place>,
    serving: Vec<bool>,
    /// By gateway and replica.
    in_flight: Vec<Vec<usize>>,
    /// Reports on their way, by gateway.
    reports: Vec<VecDeque<Reports>>,
    report_interval: Duration,
    /// No reports before this.
    silent_until: Duration,
    talks: Vec<Talk>,
    flights: Vec<Flight>,
    asked: Vec<Asked>,
    /// Sessions that have not ended.
    open: usize,
    events: BinaryHeap<Reverse<(Duration, Event, u64)>>,
    event_count: u64,
    told: Vec<Progress>,
}

impl<'a> Simulation<'a> {
    /// A run that has not begun.
    pub fn new(
        fleet: &'a FleetConfig,
        trace: &'a Trace,
        policy: Policy,
        routers: Vec<Box<dyn Router + 'a>>,
        seed: u64,
    ) -> Self {
        let gateways = fleet.gateways.max(1);
        let place = |(number, replica)| {
            let there = fleet.begins_with(number);
            let standing = if there { Standing::Serving } else { Standing::Absent };
            Place { replica, phase: 0, wakes: None, standing }
        };
        Self {
            fleet,
            trace,
            routers,
            connections: Random::new(seed, CONNECTIONS),
            places: fleet.engines(policy).into_iter().enumerate().map(place).collect(),
            serving: Vec::new(),
            in_flight: vec![vec![0; fleet.replicas]; gateways],
            reports: vec![VecDeque::new(); gateways],
            report_interval: policy
                .report_interval()
                .map_or(fleet.report_interval, |own| own.min(fleet.report_interval)),
            silent_until: Duration::ZERO,
            talks: vec![Talk::default(); trace.sessions.len()],
            flights: Vec::with_capacity(trace.requests()),
            asked: Vec::with_capacity(trace.requests()),
            open: trace.sessions.iter().filter(|session| !session.turns.is_empty()).count(),
            events: BinaryHeap::new(),
            event_count: 0,
            told: Vec::new(),
        }
    }

    /// Runs to the end of the last session.
    ///
    /// # Errors
    /// When a request cannot be placed, or does not fit an engine.
    pub fn run(mut self) -> Result<Vec<Sample>, String> {
        for (session, planned) in self.trace.sessions.iter().enumerate() {
            if !planned.turns.is_empty() {
                self.at(planned.arrival, Event::Ask { session, turn: 0 });
            }
        }
        for (number, fault) in self.fleet.faults.iter().enumerate() {
            self.at(fault.at, Event::Fault(number));
        }
        let gateways = self.in_flight.len();
        for gateway in 0..gateways {
            let share = gateway as f64 / gateways as f64;
            self.at(self.report_interval.mul_f64(share), Event::Report { gateway });
        }
        self.stand();
        while let Some(Reverse((now, event, _))) = self.events.pop().filter(|_| self.open > 0) {
            self.happen(event, now)?;
        }
        Ok(self.asked.into_iter().map(|asked| asked.sample).collect())
    }

    fn happen(&mut self, event: Event, now: Duration) -> Result<(), String> {
        match event {
            Event::Fault(number) => self.fault(number, now),
            Event::Back(replica) => self.set_standing(replica, Standing::Serving),
            Event::Report { gateway } => self.report(gateway, now),
            Event::Heard { gateway } => self.heard(gateway, now),
            Event::Ask { session, turn } => {
                let asked = self.asked.len();
                let said = self.said(session, turn)?;
                if let Some(talk) = self.talks.get_mut(session) {
                    self.trace.advance(session, turn, &mut talk.prompt);
                }
                let prompt_tokens = u64::from(said.prompt_tokens);
                let (class, arrival) = (said.class, now);
                let sample = Sample { prompt_tokens, class, arrival, ..Sample::default() };
                self.asked.push(Asked { session, turn, sample });
                self.send(asked, now)?;
            }
            Event::Retry { sample } => self.send(sample, now)?,
            Event::Wake { replica, phase } => {
                if let Some(place) = self.places.get_mut(replica).filter(|at| at.phase == phase) {
                    place.wakes = None;
                    place.replica.wake(now, &mut self.told);
                    self.settle(replica, now);
                }
            }
        }
        Ok(())
    }

    fn at(&mut self, time: Duration, event: Event) {
        self.event_count += 1;
        self.events.push(Reverse((time, event, self.event_count)));
    }

    fn said(&self, session: usize, turn: usize) -> Result<&'a Turn, String> {
        let missing = || format!("session {session} has no turn {turn}");
        self.trace.turn(session, turn).ok_or_else(missing)
    }

    /// The gateway and the router behind the session's connection.
    fn connection(&mut self, session: usize) -> (usize, usize) {
        let talk = self.talks.get_mut(session);
        let kept =
            talk.as_ref().and_then(|talk| talk.connection).filter(|_| !self.fleet.reconnects);
        kept.unwrap_or_else(|| {
            let gateways = self.in_flight.len();
            let router = self.connections.below(self.routers.len());
            let new = (router * gateways / self.routers.len().max(1), router);
            if let Some(talk) = talk {
                talk.connection = Some(new);
            }
            new
        })
    }

    /// Has a request placed, and begins it there.
    fn send(&mut self, number: usize, now: Duration) -> Result<(), String> {
        if !self.serving.contains(&true) {
            self.fail(number, now);
            return Ok(());
        }
        let asked = self.asked.get(number).ok_or("no such request")?;
        let (session, turn) = (asked.session, asked.turn);
        let said = self.said(session, turn)?;
        let (gateway, router) = self.connection(session);
        let id = RequestId(self.flights.len() as u64);
        let prompt = self.talks.get(session).map_or(&[][..], |talk| &talk.prompt);
        let routing = self.routers.get_mut(router).ok_or("no such router")?;
        let chosen = routing.choose(&Ask {
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
        })?;
        let why = routing.why();
        let work = Work {
            id,
            keys: [prompt, &said.answer_blocks].concat(),
            prompt_tokens: said.prompt_tokens as usize,
            max_tokens: said.answer_tokens as usize,
            reads_cache: true,
        };
        if self.fleet.agents {
            self.routers.iter_mut().for_each(|router| router.chained(&work.keys));
        }
        let replica = self.or_another(chosen);
        if let Some(asked) = self.asked.get_mut(number) {
            asked.sample.replica = Some(format!("replica {:02}", replica + 1));
            asked.sample.predicted_tokens = why.predicted_tokens.map(u64::from);
            asked.sample.expected_first_token = why.first_token;
            asked.sample.reason = why.reason;
        }
        let (sample, last, is_over) = (number, now, false);
        self.flights.push(Flight { sample, replica, gateway, router, last, is_over });
        self.count(gateway, replica, |count| count + 1);
        let place = self.places.get_mut(replica).ok_or("no such replica")?;
        place.replica.cut_short(now, &mut self.told);
        place.replica.submit(work).map_err(|error| format!("a prompt is refused: {error:?}"))?;
        place.replica.begin(now);
        self.settle(replica, now);
        Ok(())
    }

    /// Envoy takes the next when the one that it is told is not there.
    fn or_another(&self, chosen: usize) -> usize {
        let serves = |n: &usize| self.serving.get(*n).copied().unwrap_or(false);
        let mut others = (chosen..self.serving.len()).chain(0..chosen);
        others.find(serves).unwrap_or(chosen)
    }

    fn count(&mut self, gateway: usize, replica: usize, change: impl Fn(usize) -> usize) {
        let row = self.in_flight.get_mut(gateway);
        if let Some(count) = row.and_then(|row| row.get_mut(replica)) {
            *count = change(*count);
        }
    }

    /// Takes in what a replica did, and sees to it that it is woken in time.
    fn settle(&mut self, replica: usize, now: Duration) {
        let changes = self.places.get_mut(replica).map(|place| place.replica.changes());
        if let Some(changes) = changes.filter(|changes| !changes.is_empty()) {
            for router in &mut self.routers {
                router.cached(replica, &changes, now);
            }
        }
        let mut told = std::mem::take(&mut self.told);
        for progress in told.drain(..) {
            self.progress(progress);
        }
        self.told = told;
        let Some(place) = self.places.get_mut(replica) else { return };
        let wakes = place.replica.wakes();
        if wakes == place.wakes {
            return;
        }
        place.wakes = wakes;
        place.phase += 1;
        let phase = place.phase;
        if let Some(wakes) = wakes {
            self.at(wakes.max(now), Event::Wake { replica, phase });
        }
    }

    fn progress(&mut self, progress: Progress) {
        match progress {
            Progress::Admitted { id, cached_tokens } => {
                if let Some(sample) = self.sample(id) {
                    sample.cached_tokens = cached_tokens as u64;
                }
            }
            Progress::Tokens { id, began, each, count } => {
                let Some(flight) = self.flights.get_mut(id.0 as usize) else { return };
                let first = began + each - flight.last;
                flight.last = began + each * count;
                if let Some(sample) = self.sample(id) {
                    sample.gaps.push(first);
                    sample.gaps.push_run(each, count - 1);
                }
            }
            Progress::Token { id, first, last, at } => {
                let Some(flight) = self.flights.get_mut(id.0 as usize) else { return };
                let (router, gap) = (flight.router, at - flight.last);
                flight.last = at;
                let Some(sample) = self.sample(id) else { return };
                if first {
                    sample.first_token = Some(at - sample.arrival);
                    if let Some(router) = self.routers.get_mut(router) {
                        router.answer_began(id, at);
                    }
                } else {
                    sample.gaps.push(gap);
                }
                if last {
                    self.ended(id, at);
                }
            }
        }
    }

    fn sample(&mut self, id: RequestId) -> Option<&mut Sample> {
        let flight = self.flights.get(id.0 as usize)?;
        self.asked.get_mut(flight.sample).map(|asked| &mut asked.sample)
    }

    fn ended(&mut self, id: RequestId, now: Duration) {
        let Some(flight) = self.flights.get(id.0 as usize) else { return };
        let Some(asked) = self.asked.get_mut(flight.sample) else { return };
        asked.sample.whole = now - asked.sample.arrival;
        let (session, turn) = (asked.session, asked.turn + 1);
        self.over(id, false, now);
        match self.trace.turn(session, turn) {
            Some(next) => self.at(now + TURNAROUND + next.think, Event::Ask { session, turn }),
            None => {
                self.open -= 1;
                if let Some(talk) = self.talks.get_mut(session) {
                    talk.prompt = Vec::new();
                }
            }
        }
    }

    /// Tells the router that an attempt is over.
    fn over(&mut self, id: RequestId, failed: bool, now: Duration) {
        let Some(flight) = self.flights.get_mut(id.0 as usize) else { return };
        flight.is_over = true;
        let (gateway, replica) = (flight.gateway, flight.replica);
        let Some(asked) = self.asked.get(flight.sample) else { return };
        let Some(said) = self.trace.turn(asked.session, asked.turn) else { return };
        let cached = u32::try_from(asked.sample.cached_tokens).ok();
        let ended = Ended {
            cached_tokens: cached.filter(|_| self.fleet.usage && !failed),
            answer_tokens: said.answer_tokens,
            answer_blocks: &said.answer_blocks,
            first_token: asked.sample.first_token.unwrap_or_default(),
            failed,
        };
        if let Some(router) = self.routers.get_mut(flight.router) {
            router.ended(id, &ended, now);
        }
        self.count(gateway, replica, |count| count - 1);
    }

    /// An attempt came to nothing; the client will try again.
    fn fail(&mut self, number: usize, now: Duration) {
        if let Some(asked) = self.asked.get_mut(number) {
            asked.sample.failures += 1;
            asked.sample.first_token = None;
            asked.sample.cached_tokens = 0;
            asked.sample.gaps.clear();
        }
        self.at(now + RETRY, Event::Retry { sample: number });
    }

    fn report(&mut self, gateway: usize, now: Duration) {
        self.at(now + self.report_interval, Event::Report { gateway });
        if now < self.silent_until {
            return;
        }
        let all = (0..self.places.len()).map(|replica| self.report_of(replica, now)).collect();
        if self.fleet.report_delay.is_zero() {
            self.deliver(gateway, all, now);
        } else if let Some(reports) = self.reports.get_mut(gateway) {
            reports.push_back(all);
            self.at(now + self.fleet.report_delay, Event::Heard { gateway });
        }
    }

    fn report_of(&mut self, replica: usize, now: Duration) -> Option<ReplicaReport> {
        let place = self.places.get_mut(replica)?;
        if matches!(place.standing, Standing::Absent | Standing::Down) {
            return None;
        }
        place.replica.cut_short(now, &mut self.told);
        let (load, (started_at, capacity_blocks)) = (place.replica.load(), place.replica.process());
        self.settle(replica, now);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Some(ReplicaReport {
            running: count(load.running),
            waiting: count(load.waiting),
            kv_usage: load.held_blocks as f64 / load.capacity_blocks.max(1) as f64,
            capacity_blocks,
            started_at,
        })
    }

    fn heard(&mut self, gateway: usize, now: Duration) {
        if let Some(all) = self.reports.get_mut(gateway).and_then(VecDeque::pop_front) {
            self.deliver(gateway, all, now);
        }
    }

    fn deliver(&mut self, gateway: usize, all: Reports, now: Duration) {
        let each = self.routers.len() / self.in_flight.len();
        for router in self.routers.iter_mut().skip(gateway * each).take(each) {
            for (replica, report) in all.iter().enumerate() {
                if let Some(report) = report {
                    router.report(replica, report, now);
                }
            }
        }
    }

    fn fault(&mut self, number: usize, now: Duration) {
        let Some(fault) = self.fleet.faults.get(number) else { return };
        if let What::Silence { lasting } = fault.what {
            self.silent_until = now + lasting;
        }
        let Some(replica) = fault.what.replica() else { return };
        let Some(place) = self.places.get_mut(replica) else { return };
        place.replica.cut_short(now, &mut self.told);
        match fault.what {
            What::Restart { down, .. } => {
                place.replica.restart(now);
                self.set_standing(replica, Standing::Down);
                self.at(now + down, Event::Back(replica));
                let lost = self.flights.iter().enumerate();
                let lost = lost.filter(|(_, flight)| flight.replica == replica && !flight.is_over);
                let lost: Vec<RequestId> = lost.map(|(id, _)| RequestId(id as u64)).collect();
                self.lose(&lost, now);
            }
            What::Cache { blocks, .. } => {
                let lost = place.replica.set_cache(blocks);
                self.lose(&lost, now);
            }
            What::Speed { times, .. } => place.replica.set_speed(times),
            What::Join { .. } => self.set_standing(replica, Standing::Serving),
            What::Drain { .. } => self.set_standing(replica, Standing::Draining),
            What::Silence { .. } => {}
        }
        self.settle(replica, now);
    }

    fn lose(&mut self, lost: &[RequestId], now: Duration) {
        for id in lost {
            self.over(*id, true, now);
            if let Some(number) = self.flights.get(id.0 as usize).map(|flight| flight.sample) {
                self.fail(number, now);
            }
        }
    }

    fn set_standing(&mut self, replica: usize, standing: Standing) {
        if let Some(place) = self.places.get_mut(replica) {
            place.standing = standing;
        }
        self.stand();
    }

    /// Tells everyone who is there.
    fn stand(&mut self) {
        let standing: Vec<Standing> = self.places.iter().map(|place| place.standing).collect();
        self.serving = standing.iter().map(|standing| *standing == Standing::Serving).collect();
        for router in &mut self.routers {
            router.standing(&standing);
        }
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
