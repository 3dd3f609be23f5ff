//! One gateway with the filter's core: what `src/shell` does with it, in virtual time.

use super::agent::Said;
use super::fleet::FleetConfig;
use super::policy::{Ask, Change, Ended, ReplicaReport, Router, Standing, Why};
use hashbrown::HashMap;
use std::time::Duration;
use warmpath::charge::Charges;
use warmpath::index::{PrefixIndex, Stretch};
use warmpath::learn::pending::Pending;
use warmpath::learn::sizing::Sizing;
use warmpath::learn::{Answered, Lessons, Rates};
use warmpath::mock::scheduler::RequestId;
use warmpath::replicas::stats::Report;
use warmpath::replicas::strikes::Strikes;
use warmpath::replicas::{Health, Member, Moment, ReplicaId, ReplicaTable};
use warmpath::route::{self, Candidate, Decision, PromptKnowledge, Question, RouteConfig, View};
use warmpath::score::Signals;
use warmpath::tokens::blocks::{BlockHash, BlockSize, Chain, ChainSeed};

/// The cluster's name.
pub const CLUSTER: &str = "fleet";

/// How often what was learned is brought up to date: the filter's own tick.
const TICK: Duration = Duration::from_millis(100);

/// Blocks that go on one tick where a capacity has shrunk.
const SHRUNK_PER_TICK: usize = 8 << 10;

/// See the module.
pub struct Gateway {
    route: RouteConfig,
    learns_rates: bool,
    corrects: bool,
    table: ReplicaTable,
    index: PrefixIndex,
    charges: Charges,
    lessons: Lessons,
    pending: Pending,
    sizing: Sizing,
    rates: Rates,
    ticked: Moment,
    block_size: Option<BlockSize>,
    capacity_blocks: u32,
    under_way: HashMap<RequestId, UnderWay>,
    /// What replicas say of their caches, if they do.
    said: Option<Said>,
    why: Why,
}

struct UnderWay {
    decision: Decision,
    sent: Moment,
    /// When its answer began, and how many other requests the replica had then.
    began: Option<(Moment, u32)>,
}

impl UnderWay {
    /// The first block that was not believed to be on the replica.
    fn first_new(&self) -> Option<BlockHash> {
        let hashes = self.decision.chain.as_ref()?.hashes();
        hashes.get(self.chosen()?.held_blocks).copied()
    }

    fn chosen(&self) -> Option<&Candidate> {
        self.decision.chosen()
    }
}

impl Gateway {
    /// A gateway in front of a fleet, no replica of which it has sent anything.
    pub fn new(fleet: &FleetConfig) -> Self {
        Self {
            route: fleet.route.clone(),
            learns_rates: fleet.learn_rates,
            corrects: fleet.correction,
            table: ReplicaTable::default(),
            index: PrefixIndex::new(),
            charges: Charges::default(),
            lessons: Lessons::default(),
            pending: Pending::default(),
            sizing: Sizing::default(),
            rates: Rates::default(),
            ticked: Moment::default(),
            block_size: count(fleet.engine.block_size).and_then(BlockSize::new),
            capacity_blocks: fleet.engine.capacity_blocks,
            under_way: HashMap::new(),
            said: fleet.agents.then(Said::default),
            why: Why::default(),
        }
    }

    /// The prompt's chain: the trace's ids are its hashes.
    fn chain(&self, ask: &Ask<'_>) -> Chain {
        let size = self.block_size.unwrap_or(self.route.default_block_size);
        let mut chain = Chain::new(ChainSeed::new("m", None), size, &[]);
        let hashes = ask.blocks.iter().copied().map(BlockHash);
        chain.go_on_behind(hashes, &[], ask.prompt_tokens as usize);
        chain
    }

    fn tick(&mut self, now: Moment) {
        if now.since(self.ticked) < TICK {
            return;
        }
        self.ticked = now;
        let table = &self.table;
        self.index.retain(|replica| table.by_id(replica).is_some());
        self.index.shrink(SHRUNK_PER_TICK);
        self.charges.forget_idle(now, self.route.cost.recent_half_life);
        self.lessons.settle(now, table);
        if self.learns_rates {
            self.rates = Rates::merged(self.lessons.learned(), table, now);
        }
        if self.corrects {
            self.size();
        }
    }

    /// Takes shadows for as large as predictions show their caches to be.
    fn size(&mut self) {
        for (replica, learned) in self.lessons.learned() {
            let share = self.table.by_id(replica).map_or(1.0, |replica| replica.shadow_share);
            if let Some(share) = self.sizing.judge(replica, &learned.evidence, share) {
                self.table.set_shadow_share(replica, share);
                let capacity = self.table.shadow_blocks(replica, self.capacity_blocks);
                self.index.set_capacity(replica, capacity);
            }
        }
    }

    /// Takes in what the engine found in its cache.
    fn correct(&mut self, flight: &UnderWay, cached: u32) {
        let (Some(chosen), Some(chain)) = (flight.chosen(), &flight.decision.chain) else { return };
        let (replica, predicted) = (chosen.id, chosen.overlap_tokens);
        if cached < predicted {
            let blocks = chain.hashes().get(..chosen.held_blocks).unwrap_or_default();
            if self.pending.concerns(replica, blocks, flight.sent) {
                return;
            }
            let held = (cached / chain.block_size().get()) as usize;
            self.index.forget_beyond(replica, chain.hashes(), held);
            self.record(replica, chain, held);
        }
        let is_reporting = self.index.is_reporting(replica);
        if !is_reporting && (cached >= predicted || self.index.is_well_filled(replica)) {
            self.lessons.compared(replica, predicted, cached);
        }
    }

    fn was_computed(&mut self, replica: ReplicaId, first_new: Option<BlockHash>, now: Moment) {
        if let Some(first) = first_new {
            self.pending.ended(replica, first, now);
        }
    }

    /// Notes that a replica holds what is behind the first `from` blocks of a chain.
    fn record(&mut self, replica: ReplicaId, chain: &Chain, from: usize) {
        let capacity = self.table.shadow_blocks(replica, self.capacity_blocks);
        let new = Stretch::of(chain.hashes(), from);
        self.index.record_behind(replica, capacity, new.parent, new.blocks);
    }

    fn neighbours(&self, replica: ReplicaId) -> u32 {
        self.charges.of(replica).requests.saturating_sub(1)
    }

    /// Learns from how long an answer took.
    fn time(&mut self, flight: &UnderWay, ended: &Ended<'_>, neighbours: u32, now: Moment) {
        let (Some(chosen), Some((began, neighbours_then))) = (flight.chosen(), flight.began) else {
            return;
        };
        let told = ended.cached_tokens.map(|cached| Signals {
            prompt_tokens: f64::from(flight.decision.prompt_tokens),
            cached_tokens: f64::from(cached),
            ..Signals::default()
        });
        let answered = Answered {
            first_token: began.since(flight.sent),
            expected_s: chosen.cost.first_token(),
            work: told.map_or(chosen.work, |told| told.work(&self.route.cost)),
            queued: chosen.queued,
            rest: now.since(began),
            answer_tokens: ended.answer_tokens,
            neighbours: f64::from(neighbours_then + neighbours) / 2.0,
            foreign: flight.decision.foreign(),
            loads_adapter: chosen.loads_adapter(),
        };
        self.lessons.take(chosen.id, &answered, now);
    }
}

impl Router for Gateway {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let now = moment(ask.now);
        self.tick(now);
        self.index.advance(now);
        let strikes = Strikes::default();
        let chains = [self.chain(ask)];
        let view = View {
            table: &self.table,
            index: &self.index,
            charges: &self.charges,
            strikes: &strikes,
            rates: &self.rates,
            now,
        };
        let question = Question {
            cluster: CLUSTER,
            model_names: &[],
            prompt: PromptKnowledge::Hashed { prompt_tokens: ask.prompt_tokens, chains: &chains },
            adapter: None,
            answer_limit: Some(ask.answer_tokens),
            session: None,
            tie_seed: ask.id.0,
        };
        let decision = route::decide(&self.route, &view, &question);
        let Some(chosen) = decision.chosen() else {
            return Err(format!("nobody was chosen: {}", decision.reason.as_str()));
        };
        let (predicted, id, held) = (chosen.overlap_tokens, chosen.id, chosen.held_blocks);
        let first_token = Duration::try_from_secs_f64(chosen.cost.first_token()).ok();
        let reason = decision.reason.as_str();
        self.why = Why { predicted_tokens: Some(predicted), first_token, reason };
        if let Some(chain) = &decision.chain {
            self.record(id, chain, held);
        }
        let half_life = self.route.cost.recent_half_life;
        self.charges.start(id, decision.charged_tokens(), now, half_life);
        let flight = UnderWay { decision, sent: now, began: None };
        if let Some(first) = flight.first_new() {
            self.pending.began(id, first, now);
        }
        self.under_way.insert(ask.id, flight);
        Ok(id.slot as usize)
    }

    fn why(&self) -> Why {
        self.why
    }

    fn answer_began(&mut self, id: RequestId, now: Duration) {
        let Some(flight) = self.under_way.get(&id) else { return };
        let Some(replica) = flight.chosen().map(|chosen| chosen.id) else { return };
        self.charges.answer_began(replica, flight.decision.charged_tokens(), moment(now));
        let first_new = flight.first_new();
        self.was_computed(replica, first_new, moment(now));
        let began = Some((moment(now), self.neighbours(replica)));
        if let Some(flight) = self.under_way.get_mut(&id) {
            flight.began = began;
        }
    }

    fn ended(&mut self, id: RequestId, ended: &Ended<'_>, now: Duration) {
        let Some(mut flight) = self.under_way.remove(&id) else { return };
        let Some(replica) = flight.chosen().map(|chosen| chosen.id) else { return };
        let now = moment(now);
        let neighbours = self.neighbours(replica);
        if flight.began.is_none() {
            self.charges.answer_began(replica, flight.decision.charged_tokens(), now);
        }
        self.charges.end(replica, flight.began.map_or(now, |(began, _)| began));
        if ended.failed {
            return;
        }
        self.time(&flight, ended, neighbours, now);
        if let Some(cached) = ended.cached_tokens.filter(|_| self.corrects) {
            self.correct(&flight, cached);
        }
        let Some(chain) = &mut flight.decision.chain else { return };
        // The last token of an answer is never computed, so a block that it fills is not cached.
        let size = chain.block_size().get();
        let tokens = chain.token_count() + (ended.answer_tokens as usize).saturating_sub(1);
        let before = chain.hashes().len();
        let filled = (tokens / size as usize).saturating_sub(before);
        let filled = ended.answer_blocks.iter().take(filled).copied().map(BlockHash);
        chain.go_on_behind(filled, &[], tokens);
        self.record(replica, chain, before);
    }

    /// Those that are not there yet have their places, so that places and replicas have the same numbers.
    fn standing(&mut self, standing: &[Standing]) {
        let member = |(n, standing): (usize, &Standing)| Member {
            health: match standing {
                Standing::Serving => Health::Healthy,
                Standing::Draining => Health::Draining,
                Standing::Absent | Standing::Down => Health::Unhealthy,
            },
            ..Member::healthy(format!("127.0.0.1:{}", 8000 + n))
        };
        let members: Vec<Member> = standing.iter().enumerate().map(member).collect();
        self.table.set_members(CLUSTER, &members);
    }

    fn report(&mut self, replica: usize, report: &ReplicaReport, now: Duration) {
        let report = Report {
            running: Some(report.running),
            waiting: Some(report.waiting),
            kv_usage: Some(report.kv_usage),
            block_size: self.block_size,
            capacity_blocks: Some(report.capacity_blocks),
            started_at: Some(report.started_at),
            ..Report::default()
        };
        let slot = count(replica).unwrap_or(u32::MAX);
        let own = self.table.at(slot).map_or(0, |replica| self.charges.of(replica.id).requests);
        self.table.set_report(slot, &report, own, moment(now));
        let capacity = report.capacity_blocks.unwrap_or_default() as usize;
        let id = self.table.at(slot).map(|replica| replica.id);
        if let (Some(said), Some(id)) = (&mut self.said, id) {
            said.tell(&mut self.index, replica, id, capacity);
        }
    }

    fn chained(&mut self, blocks: &[u64]) {
        if let Some(said) = &mut self.said {
            said.learn(blocks);
        }
    }

    fn cached(&mut self, replica: usize, changes: &[Change], _now: Duration) {
        if let Some(said) = &mut self.said {
            said.hear(replica, changes);
        }
    }
}

fn count(n: usize) -> Option<u32> {
    u32::try_from(n).ok()
}

/// Virtual time begins late enough for nothing to look as if it had happened at zero.
fn moment(now: Duration) -> Moment {
    Moment::default().plus(Duration::from_secs(1000) + now)
}
