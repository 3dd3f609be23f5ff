//! One gateway with the filter's core: what `src/shell` does with it, in virtual time.

use super::fleet::FleetConfig;
use super::policy::{Ask, Ended, ReplicaReport, Router, Standing, Why};
use hashbrown::HashMap;
use std::time::Duration;
use warmpath::charge::Charges;
use warmpath::index::{PrefixIndex, Stretch};
use warmpath::mock::scheduler::RequestId;
use warmpath::replicas::stats::Report;
use warmpath::replicas::strikes::Strikes;
use warmpath::replicas::{Health, Member, Moment, ReplicaId, ReplicaTable};
use warmpath::route::{self, Decision, PromptKnowledge, Question, RouteConfig, View};
use warmpath::tokens::blocks::{BlockHash, BlockSize, Chain, ChainSeed};

/// The cluster's name.
pub const CLUSTER: &str = "fleet";

/// See the module.
pub struct Gateway {
    route: RouteConfig,
    table: ReplicaTable,
    index: PrefixIndex,
    charges: Charges,
    block_size: Option<BlockSize>,
    capacity_blocks: u32,
    under_way: HashMap<RequestId, Decision>,
    why: Why,
}

impl Gateway {
    /// A gateway in front of a fleet, no replica of which it has sent anything.
    pub fn new(fleet: &FleetConfig) -> Self {
        Self {
            route: fleet.route.clone(),
            table: ReplicaTable::default(),
            index: PrefixIndex::new(),
            charges: Charges::default(),
            block_size: count(fleet.engine.block_size).and_then(BlockSize::new),
            capacity_blocks: fleet.engine.capacity_blocks,
            under_way: HashMap::new(),
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

    fn of(&self, id: RequestId) -> Option<(ReplicaId, &Decision)> {
        let decision = self.under_way.get(&id)?;
        Some((decision.chosen()?.id, decision))
    }
}

impl Router for Gateway {
    fn choose(&mut self, ask: &Ask<'_>) -> Result<usize, String> {
        let now = moment(ask.now);
        self.index.advance(now);
        let strikes = Strikes::default();
        let chains = [self.chain(ask)];
        let (table, index, charges) = (&self.table, &self.index, &self.charges);
        let view = View { table, index, charges, strikes: &strikes, now };
        let question = Question {
            cluster: CLUSTER,
            model_names: &[],
            prompt: PromptKnowledge::Hashed { prompt_tokens: ask.prompt_tokens, chains: &chains },
            answer_limit: Some(ask.answer_tokens),
            tie_seed: ask.id.0,
        };
        let decision = route::decide(&self.route, &view, &question);
        let Some(chosen) = decision.chosen() else {
            return Err(format!("nobody was chosen: {}", decision.reason.as_str()));
        };
        let (predicted, id) = (chosen.overlap_tokens, chosen.id);
        self.why = Why { predicted_tokens: Some(predicted), reason: decision.reason.as_str() };
        if let Some((replica, new)) = decision.new_blocks() {
            let capacity = self.capacity_blocks as usize;
            self.index.record_behind(replica, capacity, new.parent, new.blocks);
        }
        let half_life = self.route.cost.recent_half_life;
        self.charges.start(id, decision.uncached_tokens(), now, half_life);
        self.under_way.insert(ask.id, decision);
        Ok(id.slot as usize)
    }

    fn why(&self) -> Why {
        self.why
    }

    fn answer_began(&mut self, id: RequestId, _now: Duration) {
        if let Some((replica, decision)) = self.of(id) {
            let uncached = decision.uncached_tokens();
            self.charges.answer_began(replica, uncached);
        }
    }

    fn ended(&mut self, id: RequestId, ended: &Ended<'_>, _now: Duration) {
        let Some(mut decision) = self.under_way.remove(&id) else { return };
        let Some(chosen) = decision.chosen().map(|chosen| chosen.id) else { return };
        let Some(chain) = &mut decision.chain else { return };
        self.charges.end(chosen);
        if ended.failed {
            return;
        }
        // The last token of an answer is never computed, so a block that it fills is not cached.
        let size = chain.block_size().get();
        let tokens = chain.token_count() + (ended.answer_tokens as usize).saturating_sub(1);
        let before = chain.hashes().len();
        let filled = (tokens / size as usize).saturating_sub(before);
        let filled = ended.answer_blocks.iter().take(filled).copied().map(BlockHash);
        chain.go_on_behind(filled, &[], tokens);
        let new = Stretch::of(chain.hashes(), before);
        self.index.record_behind(chosen, self.capacity_blocks as usize, new.parent, new.blocks);
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
    }
}

fn count(n: usize) -> Option<u32> {
    u32::try_from(n).ok()
}

/// Virtual time begins late enough for nothing to look as if it had happened at zero.
fn moment(now: Duration) -> Moment {
    Moment::default().plus(Duration::from_secs(1000) + now)
}
