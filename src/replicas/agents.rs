//! Whether the agents beside replicas report: how often each is asked, and when it is given up.
//!
//! An agent that never reported is asked seldom, one that does as often as its replica has something to do, and one that
//! stopped is given up after a stated time and asked on. This reads no report and knows no block: what a replica holds
//! by its agent's account is the index' part, and whom to ask on which tick [`super::schedule`]'s.

use super::schedule::Interval;
use super::{Moment, Replica, ReplicaId};
use crate::config::{CacheReportConfig, Config};
use crate::report::Status;
use crate::tokens::blocks::BlockSize;
use hashbrown::HashMap;
use std::time::Duration;

/// Between two questions to an agent that never reported, at most: there is none as a rule. Halved, a fleet without
/// agents is asked twice as often for nothing; doubled, an agent that is added is found a minute later.
pub const LONGEST_INTERVAL: Duration = Duration::from_secs(30);

/// Between two questions to an agent whose engine's cache turns over, unless less is configured: a tick. Halved, it could
/// not be kept to; doubled, it is what is asked for without it.
const BRISK_INTERVAL: Duration = Duration::from_millis(100);

/// A cache turns over where a report changes the such part of it: then a conversation's tail has a chance of a few
/// percent to go between two reports. Halved, such a cache is noticed later; doubled, large ones that are filled are, too.
const BRISK_SHARE: usize = 32;

/// For so many reports more an agent is asked sooner: engines store by steps, and between two of these nothing changes.
/// Halved, the pace falls back within a long step; doubled, it is kept for seconds after.
const BRISK_REPORTS: u32 = 10;

/// Answers in a row that continue something else than was asked, of which the last is a question's that asked for all: one is
/// a race, and what goes on is no agent of this replica, or a copy of what it said long ago. Halved, a race would end in a
/// snapshot; doubled, what is long gone is believed for longer.
const MOST_ASTRAY: u32 = 4;

/// What an agent is to its replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Standing {
    /// It has not reported yet: there may be none.
    #[default]
    Unheard,
    /// It reports, and what it says is what the replica holds.
    Reporting,
    /// It reports, and only the load that it tells can be used.
    LoadOnly(Misfit),
    /// It reports that it does not hear its engine's events.
    Deaf,
    /// It reported once and does not any more.
    Lost,
}

impl Standing {
    /// What an agent is that says this of a replica.
    pub fn of(config: &Config, replica: &Replica, status: &Status) -> Self {
        if !status.live {
            return Self::Deaf;
        }
        let is_ours = |name: Option<&String>| name == Some(&status.model);
        let size = BlockSize::new(status.block_tokens);
        let misfit = if config.tenant_header.is_some() {
            Misfit::Tenants
        } else if !config.models.iter().any(|model| is_ours(model.names.first())) {
            Misfit::Model
        } else if size.is_some_and(|size| replica.block_size.is_some_and(|own| own != size)) {
            Misfit::BlockSize
        } else {
            return Self::Reporting;
        };
        Self::LoadOnly(misfit)
    }

    /// The states without their causes.
    pub const LABELS: [&str; 5] = ["unheard", "reporting", "load_only", "deaf", "lost"];

    /// Its label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unheard => "unheard",
            Self::Reporting => "reporting",
            Self::LoadOnly(_) => "load_only",
            Self::Deaf => "deaf",
            Self::Lost => "lost",
        }
    }

    /// Why what the replica holds is not known from its agent any more.
    pub fn cause(self) -> &'static str {
        match self {
            Self::LoadOnly(misfit) => misfit.as_str(),
            Self::Deaf => "deaf",
            _ => "silent",
        }
    }
}

/// Why a report's blocks are not the filter's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Misfit {
    /// They are of a model whose own name is none that is configured.
    Model,
    /// They are as long as the replica says its blocks are not.
    BlockSize,
    /// The filter sets tenants apart, which no agent does.
    Tenants,
}

impl Misfit {
    /// Its label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Model => "other_model",
            Self::BlockSize => "other_block_size",
            Self::Tenants => "tenants",
        }
    }

    /// What is said of it.
    pub fn complaint(self) -> &'static str {
        match self {
            Self::Model => {
                "an agent reports blocks of a model that is not the own name of any that is configured \
                 (its --model): only its load is used"
            }
            Self::BlockSize => {
                "an agent reports blocks of another size than its engine's: only its load is used"
            }
            Self::Tenants => {
                "tenant_header sets tenants apart, which no agent does: only the load that agents report is used"
            }
        }
    }
}

/// What a report is to its agent's standing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heard {
    /// What of it can be used.
    pub standing: Standing,
    /// Whether the replica has something to do, or its cache has changed.
    pub is_busy: bool,
    /// Whether it tells the replica's load.
    pub tells_load: bool,
    /// Whether a notable part of the cache has changed: see [`turns_over`].
    pub turns_over: bool,
}

/// Whether so many blocks are much of what a cache has room for.
pub fn turns_over(changed_blocks: usize, capacity_blocks: Option<u32>) -> bool {
    capacity_blocks.is_some_and(|capacity| changed_blocks * BRISK_SHARE > capacity as usize)
}

#[derive(Debug, Clone, Copy, Default)]
struct Agent {
    standing: Standing,
    tells_load: bool,
    /// When it last reported.
    heard: Option<Moment>,
    /// When it was asked the first of those questions that brought no report.
    unanswered: Option<Moment>,
    /// How many that were.
    misses: u32,
    /// Reports in a row that told nothing new.
    quiet: u32,
    /// Reports for which it is asked sooner.
    brisk: u32,
    /// Answers in a row that continue something else than was asked.
    astray: u32,
}

impl Agent {
    fn interval(&self, config: &CacheReportConfig, is_busy: bool) -> Duration {
        let doubled = |times: u32, most: Duration| {
            let factor = 1_u32.checked_shl(times).unwrap_or(u32::MAX);
            config.interval.saturating_mul(factor).min(most)
        };
        let longest = LONGEST_INTERVAL.max(config.idle_interval);
        match self.standing {
            Standing::Unheard => doubled(self.misses, longest),
            Standing::Lost => config.idle_interval,
            // So that it is soon known whether it is gone.
            _ if self.misses > 0 => config.interval,
            _ if self.brisk > 0 => config.interval.min(BRISK_INTERVAL),
            _ if is_busy => config.interval,
            _ => doubled(self.quiet, config.idle_interval),
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Agents {
    agents: HashMap<ReplicaId, Agent>,
}

impl Agents {
    /// Forgets who is gone.
    pub fn retain(&mut self, is_there: impl Fn(ReplicaId) -> bool) {
        self.agents.retain(|id, _| is_there(*id));
    }

    /// Takes it from another leader that an agent reports. It has as long to show that it does as any.
    pub fn inherit(&mut self, id: ReplicaId, now: Moment) {
        let agent = self.agents.entry(id).or_default();
        if agent.standing == Standing::Unheard {
            let (standing, heard) = (Standing::Reporting, Some(now));
            *agent = Agent { standing, heard, ..Agent::default() };
        }
    }

    /// How soon an agent is asked again, and whether it is tried out. `has_requests`: its replica has some in flight.
    pub fn interval(
        &self,
        id: ReplicaId,
        config: &CacheReportConfig,
        has_requests: bool,
    ) -> Interval {
        let agent = self.agents.get(&id).copied().unwrap_or_default();
        let every = agent.interval(config, has_requests);
        let is_known = !matches!(agent.standing, Standing::Unheard | Standing::Lost);
        Interval { every, is_trial: !is_known || agent.misses > 0 }
    }

    /// Whether the replica itself is to be asked for its load.
    pub fn needs_metrics(&self, id: ReplicaId) -> bool {
        let agent = self.agents.get(&id).copied().unwrap_or_default();
        let reports = matches!(agent.standing, Standing::Reporting | Standing::LoadOnly(_));
        !reports || !agent.tells_load
    }

    /// An agent is asked.
    pub fn asked(&mut self, id: ReplicaId, now: Moment) {
        self.agents.entry(id).or_default().unanswered.get_or_insert(now);
    }

    /// Its answer was no report, or there was none.
    pub fn missed(&mut self, id: ReplicaId) {
        let agent = self.agents.entry(id).or_default();
        agent.misses = agent.misses.saturating_add(1);
    }

    /// Its answer could not be taken in, which is no fault of its.
    pub fn excuse(&mut self, id: ReplicaId) {
        if let Some(agent) = self.agents.get_mut(&id) {
            agent.unanswered = None;
        }
    }

    /// It has reported. What it was before.
    pub fn heard(&mut self, id: ReplicaId, heard: Heard, now: Moment) -> Standing {
        let agent = self.agents.entry(id).or_default();
        let before = agent.standing;
        let quiet = if heard.is_busy { 0 } else { agent.quiet.saturating_add(1) };
        let brisk = if heard.turns_over { BRISK_REPORTS } else { agent.brisk.saturating_sub(1) };
        let Heard { standing, tells_load, .. } = heard;
        let (unanswered, misses) = (None, 0);
        let (heard, astray) = (Some(now), 0);
        *agent = Agent { standing, tells_load, heard, unanswered, misses, quiet, brisk, astray };
        before
    }

    /// Its report continues something else than was asked. Whoever goes on so has not answered.
    pub fn strayed(&mut self, id: ReplicaId, now: Moment) {
        let agent = self.agents.entry(id).or_default();
        agent.astray = agent.astray.saturating_add(1);
        if agent.astray < MOST_ASTRAY {
            (agent.heard, agent.unanswered, agent.misses) = (Some(now), None, 0);
        } else {
            agent.misses = agent.misses.saturating_add(1);
        }
    }

    /// Whether it is to be asked for all that is held, whatever it said last.
    pub fn is_astray(&self, id: ReplicaId) -> bool {
        self.agents.get(&id).is_some_and(|agent| agent.astray > 1)
    }

    /// Its report turned out to be none after all: nothing that it told is believed, and it is tried out again. What it
    /// was before.
    pub fn disprove(&mut self, id: ReplicaId) -> Standing {
        let agent = self.agents.entry(id).or_default();
        agent.misses = agent.misses.saturating_add(1);
        std::mem::replace(&mut agent.standing, Standing::Lost)
    }

    /// Gives up who has left questions unanswered for too long. Who that is now, and what each was before.
    pub fn give_up(
        &mut self,
        config: &CacheReportConfig,
        now: Moment,
    ) -> Vec<(ReplicaId, Standing)> {
        let mut lost = Vec::new();
        for (id, agent) in &mut self.agents {
            let is_overdue =
                agent.unanswered.is_some_and(|since| now.since(since) >= config.lost_after);
            if is_overdue && !matches!(agent.standing, Standing::Unheard | Standing::Lost) {
                lost.push((*id, agent.standing));
                agent.standing = Standing::Lost;
            }
        }
        lost
    }

    /// What a replica's agent is to it.
    pub fn standing(&self, id: ReplicaId) -> Standing {
        self.agents.get(&id).map(|agent| agent.standing).unwrap_or_default()
    }

    /// When it last reported.
    pub fn last_heard(&self, id: ReplicaId) -> Option<Moment> {
        self.agents.get(&id)?.heard
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replicas::{Member, ReplicaTable, stats};

    const ID: ReplicaId = ReplicaId { slot: 0, incarnation: 1 };

    /// With an interval of 200 ms, 2 s when idle and lost after 2 s.
    fn config() -> CacheReportConfig {
        let json = br#"{"models": [{"name": "m", "prepared": {"cluster": "files", "path": "/m"}}],
            "clusters": [{"name": "pool", "admin_cluster": "admin"}], "cache_report": {"cluster": "agents"}}"#;
        Config::parse(json).unwrap().cache_report.unwrap()
    }

    fn at(ms: u64) -> Moment {
        Moment::default().plus(Duration::from_millis(ms))
    }

    fn heard(standing: Standing) -> Heard {
        Heard { standing, is_busy: false, tells_load: true, turns_over: false }
    }

    fn every(agents: &Agents, has_requests: bool) -> u128 {
        agents.interval(ID, &config(), has_requests).every.as_millis()
    }

    #[test]
    fn a_replica_without_an_agent_is_tried_ever_less() {
        let mut agents = Agents::default();
        let mut intervals = Vec::new();
        for _ in 0..40 {
            assert!(agents.interval(ID, &config(), false).is_trial && agents.needs_metrics(ID));
            intervals.push(every(&agents, true));
            agents.asked(ID, at(0));
            agents.missed(ID);
        }
        assert_eq!(intervals[..4], [200, 400, 800, 1600]);
        assert_eq!(*intervals.last().unwrap(), LONGEST_INTERVAL.as_millis());
        assert_eq!(agents.give_up(&config(), at(1_000_000)), []);
        assert_eq!(agents.standing(ID), Standing::Unheard);
    }

    #[test]
    fn an_agent_is_asked_less_while_nothing_happens_and_at_once_when_something_does() {
        let mut agents = Agents::default();
        let mut intervals = Vec::new();
        for n in 0..6 {
            agents.heard(ID, heard(Standing::Reporting), at(n));
            intervals.push(every(&agents, false));
        }
        assert_eq!(intervals, [400, 800, 1600, 2000, 2000, 2000]);
        assert_eq!(every(&agents, true), 200);
        agents.heard(ID, Heard { is_busy: true, ..heard(Standing::Reporting) }, at(9));
        assert_eq!(every(&agents, false), 200);
        assert!(!agents.interval(ID, &config(), false).is_trial && !agents.needs_metrics(ID));
    }

    #[test]
    fn an_agent_whose_cache_turns_over_is_asked_sooner_for_a_while() {
        assert!(turns_over(9, Some(256)) && !turns_over(8, Some(256)) && !turns_over(0, Some(1)));
        assert!(!turns_over(1 << 20, None));
        let mut agents = Agents::default();
        agents.heard(ID, Heard { turns_over: true, ..heard(Standing::Reporting) }, at(0));
        let mut intervals = Vec::new();
        for n in 1..=BRISK_REPORTS {
            intervals.push(every(&agents, true));
            agents.heard(ID, heard(Standing::Reporting), at(n.into()));
        }
        assert_eq!(intervals, vec![100; BRISK_REPORTS as usize]);
        assert_eq!(every(&agents, true), 200);
        // One that does not answer is not asked more often for it.
        agents.heard(ID, Heard { turns_over: true, ..heard(Standing::Reporting) }, at(99));
        agents.missed(ID);
        assert_eq!(every(&agents, true), 200);
    }

    #[test]
    fn an_agent_that_is_silent_is_given_up_once_and_comes_back() {
        let mut agents = Agents::default();
        agents.heard(ID, heard(Standing::Reporting), at(0));
        agents.asked(ID, at(1000));
        agents.missed(ID);
        assert_eq!(every(&agents, false), 200);
        assert!(agents.interval(ID, &config(), false).is_trial);
        agents.asked(ID, at(1200));
        assert_eq!(agents.give_up(&config(), at(2999)), []);
        assert!(!agents.needs_metrics(ID));
        assert_eq!(agents.give_up(&config(), at(3000)), [(ID, Standing::Reporting)]);
        assert_eq!(agents.give_up(&config(), at(3000)), []);
        assert_eq!((agents.standing(ID), every(&agents, true)), (Standing::Lost, 2000));
        assert!(agents.needs_metrics(ID));
        let before = agents.heard(ID, heard(Standing::Reporting), at(9000));
        assert_eq!((before, agents.standing(ID)), (Standing::Lost, Standing::Reporting));
        assert_eq!(agents.give_up(&config(), at(20_000)), []);
    }

    #[test]
    fn a_question_that_hangs_counts_from_when_it_was_asked() {
        let mut agents = Agents::default();
        agents.heard(ID, heard(Standing::Reporting), at(0));
        agents.asked(ID, at(1000));
        assert_eq!(agents.give_up(&config(), at(3000)), [(ID, Standing::Reporting)]);
    }

    #[test]
    fn an_agent_whose_answer_could_not_be_taken_in_is_not_silent() {
        let mut agents = Agents::default();
        agents.heard(ID, heard(Standing::Reporting), at(0));
        agents.asked(ID, at(1000));
        agents.excuse(ID);
        agents.asked(ID, at(2900));
        assert_eq!(agents.give_up(&config(), at(4800)), []);
    }

    #[test]
    fn an_agent_that_answers_other_questions_is_asked_for_all_and_then_given_up() {
        let mut agents = Agents::default();
        agents.heard(ID, heard(Standing::Reporting), at(0));
        let mut asked_for_all = Vec::new();
        for n in 1..=MOST_ASTRAY {
            agents.asked(ID, at(1000 * u64::from(n)));
            agents.strayed(ID, at(1000 * u64::from(n)));
            asked_for_all.push(agents.is_astray(ID));
        }
        assert_eq!(asked_for_all, [false, true, true, true]);
        assert_eq!(agents.give_up(&config(), at(5999)), []);
        assert_eq!(agents.give_up(&config(), at(6000)), [(ID, Standing::Reporting)]);
        agents.strayed(ID, at(7000));
        assert_eq!(agents.standing(ID), Standing::Lost);
        agents.heard(ID, heard(Standing::Reporting), at(8000));
        assert!(!agents.is_astray(ID));
        assert_eq!(agents.standing(ID), Standing::Reporting);
    }

    #[test]
    fn an_agent_of_the_last_leader_has_as_long_as_any_to_answer() {
        let mut agents = Agents::default();
        agents.inherit(ID, at(5000));
        assert_eq!((agents.standing(ID), every(&agents, true)), (Standing::Reporting, 200));
        assert_eq!(agents.give_up(&config(), at(60_000)), []);
        agents.asked(ID, at(6000));
        agents.inherit(ID, at(7000));
        assert_eq!(agents.give_up(&config(), at(8000)), [(ID, Standing::Reporting)]);
        agents.inherit(ID, at(8000));
        assert_eq!(agents.standing(ID), Standing::Lost);
    }

    #[test]
    fn load_that_an_agent_does_not_tell_is_asked_of_the_replica() {
        let mut agents = Agents::default();
        for (standing, tells_load, expected) in [
            (Standing::Reporting, true, false),
            (Standing::Reporting, false, true),
            (Standing::LoadOnly(Misfit::Model), true, false),
            (Standing::Deaf, true, true),
        ] {
            agents.heard(ID, Heard { tells_load, ..heard(standing) }, at(0));
            assert_eq!(agents.needs_metrics(ID), expected, "{standing:?}, {tells_load}");
        }
    }

    #[test]
    fn a_report_that_is_damaged_far_behind_is_no_report() {
        let mut agents = Agents::default();
        agents.heard(ID, heard(Standing::Reporting), at(0));
        assert_eq!(agents.disprove(ID), Standing::Reporting);
        assert_eq!((agents.standing(ID), every(&agents, true)), (Standing::Lost, 2000));
        assert!(agents.interval(ID, &config(), true).is_trial && agents.needs_metrics(ID));
    }

    #[track_caller]
    fn check_standing(options: &str, change: fn(&mut Status), expected: Standing) {
        let json = format!(
            r#"{{"models": [{{"name": "m", "aliases": ["n"], "prepared": {{"cluster": "files", "path": "/m"}}}}],
                "clusters": [{{"name": "pool", "admin_cluster": "admin"}}]{options}}}"#
        );
        let mut table = ReplicaTable::default();
        table.set_members("pool", &[Member::healthy("10.0.0.1:80".to_owned())]);
        let block_size = BlockSize::new(16);
        let page = stats::Report { block_size, ..stats::Report::default() };
        table.set_report(0, &page, 0, at(0));
        let (model, live) = ("m".to_owned(), true);
        let mut status = Status { model, live, block_tokens: 16, ..Status::default() };
        change(&mut status);
        let config = Config::parse(json.as_bytes()).unwrap();
        assert_eq!(Standing::of(&config, table.at(0).unwrap(), &status), expected);
    }

    #[test]
    fn blocks_are_used_where_they_are_what_the_filter_hashes() {
        check_standing("", |_| (), Standing::Reporting);
        check_standing("", |status| status.block_tokens = 0, Standing::Reporting);
        check_standing("", |status| status.live = false, Standing::Deaf);
        let misfit = Standing::LoadOnly;
        check_standing("", |status| status.block_tokens = 32, misfit(Misfit::BlockSize));
        // An alias is not what chains start from.
        check_standing("", |status| status.model = "n".to_owned(), misfit(Misfit::Model));
        check_standing(r#", "tenant_header": "x-tenant""#, |_| (), misfit(Misfit::Tenants));
    }

    #[test]
    fn who_left_is_forgotten() {
        let mut agents = Agents::default();
        agents.heard(ID, heard(Standing::Reporting), at(0));
        agents.retain(|_| false);
        assert_eq!((agents.standing(ID), agents.last_heard(ID)), (Standing::Unheard, None));
    }
}
