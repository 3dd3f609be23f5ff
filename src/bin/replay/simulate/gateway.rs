//! One gateway with the filter's core: what `src/shell` does with it, in virtual time.

use hashbrown::HashMap;
use std::time::Duration;
use warmpath::charge::Charges;
use warmpath::feedback;
use warmpath::index::PrefixIndex;
use warmpath::learn::Rates;
use warmpath::mock::engine::{EngineConfig, Load, RequestId};
use warmpath::replicas::stats::Report;
use warmpath::replicas::strikes::Strikes;
use warmpath::replicas::{Member, Moment, ReplicaId, ReplicaTable};
use warmpath::route::{self, Decision, PromptKnowledge, Question, RouteConfig, View};
use warmpath::tokens::blocks::{BlockSize, ChainSeed};

/// The cluster's name.
pub const CLUSTER: &str = "fleet";

/// See the module.
pub struct Gateway {
    route: RouteConfig,
    table: ReplicaTable,
    index: PrefixIndex,
    charges: Charges,
    capacity_blocks: u32,
    under_way: HashMap<RequestId, Decision>,
}

impl Gateway {
    /// A gateway in front of this many equal replicas, none of which it has sent anything.
    pub fn new(route: RouteConfig, engine: &EngineConfig, replicas: usize) -> Self {
        let member = |n: usize| Member::healthy(format!("127.0.0.1:{}", 8000 + n));
        let mut table = ReplicaTable::default();
        table.set_members(CLUSTER, &(0..replicas).map(member).collect::<Vec<_>>());
        Self {
            route,
            table,
            index: PrefixIndex::new(),
            charges: Charges::default(),
            capacity_blocks: engine.capacity_blocks,
            under_way: HashMap::new(),
        }
    }

    /// Takes in a replica's report.
    pub fn report(&mut self, replica: usize, load: Load, block_size: usize, now: Duration) {
        let count = |n: usize| u32::try_from(n).ok();
        let usage = load.held_blocks as f64 / load.capacity_blocks.max(1) as f64;
        let report = Report {
            running: count(load.running),
            waiting: count(load.waiting),
            kv_usage: Some(usage),
            block_size: count(block_size).and_then(BlockSize::new),
            capacity_blocks: count(load.capacity_blocks),
            started_at: Some(1.0),
            ..Report::default()
        };
        let slot = count(replica).unwrap_or(u32::MAX);
        let own = self.table.at(slot).map_or(0, |replica| self.charges.of(replica.id).requests);
        self.table.set_report(slot, &report, own, moment(now));
    }

    /// Decides, charges and records, as the filter does with a request.
    ///
    /// # Errors
    /// When nobody can be chosen.
    pub fn choose(
        &mut self,
        id: RequestId,
        prompt: &[u32],
        answer_tokens: u32,
        now: Duration,
    ) -> Result<usize, String> {
        let now = moment(now);
        let strikes = Strikes::default();
        let (table, index, charges) = (&self.table, &self.index, &self.charges);
        let view = View { table, index, charges, strikes: &strikes, rates: &Rates::default(), now };
        let question = Question {
            cluster: CLUSTER,
            model_names: &[],
            prompt: PromptKnowledge::Tokens { tokens: prompt, seed: ChainSeed::new("m", None) },
            adapter: None,
            answer_limit: Some(answer_tokens),
            tie_seed: id.0,
        };
        let decision = route::decide(&self.route, &view, &question);
        let Some(chosen) = decision.chosen().map(|candidate| candidate.id) else {
            return Err(format!("nobody was chosen: {}", decision.reason.as_str()));
        };
        if let Some((replica, parent, blocks)) = decision.new_blocks() {
            self.index.record(replica, self.capacity_blocks as usize, parent, blocks);
        }
        let half_life = self.route.cost.recent_half_life;
        self.charges.start(chosen, decision.uncached_tokens(), now, half_life);
        self.under_way.insert(id, decision);
        Ok(chosen.slot as usize)
    }

    /// The first token of an answer.
    pub fn answer_began(&mut self, id: RequestId) {
        if let Some((replica, decision)) = self.of(id) {
            let uncached = decision.uncached_tokens();
            self.charges.answer_began(replica, uncached);
        }
    }

    /// The end of an answer, with its tokens.
    pub fn ended(&mut self, id: RequestId, answer: &[u32]) {
        let Some(decision) = self.under_way.remove(&id) else { return };
        let (Some(chosen), Some(mut chain)) = (decision.chosen(), decision.chain.clone()) else {
            return;
        };
        self.charges.end(chosen.id);
        let before = chain.hashes().len();
        let cached = feedback::cached_answer_tokens(answer.len(), None);
        chain.extend(answer.get(..cached).unwrap_or_default());
        if let Some((old, new)) = chain.hashes().split_at_checked(before) {
            let parent = old.last().copied();
            self.index.record(chosen.id, self.capacity_blocks as usize, parent, new);
        }
    }

    fn of(&self, id: RequestId) -> Option<(ReplicaId, &Decision)> {
        let decision = self.under_way.get(&id)?;
        Some((decision.chosen()?.id, decision))
    }
}

/// Virtual time begins late enough for nothing to look as if it had happened at zero.
fn moment(now: Duration) -> Moment {
    Moment::default().plus(Duration::from_secs(1000) + now)
}
