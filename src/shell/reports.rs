//! The leader's cache reports: which agent is asked when, what its answer is taken for, and how it reaches the index.
//!
//! A report of many blocks is taken in by pieces, some on each tick, and its agent is not asked again before that; others'
//! reports are taken in between, and where that takes long the load is asked of the replica. Whoever
//! does not report is given up after a stated time; its replica is then what was routed there, as without an agent. This
//! asks nobody itself: calls are the poller's.

use super::host;
use super::link::Link;
use super::meters;
use crate::config::{CacheReportConfig, Config};
use crate::metrics;
use crate::replicas::agents::{Agents, Heard, Misfit, Standing, turns_over};
use crate::replicas::schedule::Interval;
use crate::replicas::{Moment, Replica, ReplicaId, ReplicaTable, stats};
use crate::report::{Piece, Pieces, Position, Report, ReportError, Status, Waiting};
use crate::tokens::blocks::BlockSize;
use hashbrown::HashMap;
use std::time::Duration;

/// How long reports are taken in at a stretch. Halved, a fleet's snapshots take twice as long; doubled, so does the
/// longest pause of a worker that leads.
const AT_A_STRETCH: Duration = Duration::from_millis(4);

/// Blocks taken in between two looks at the clock: a fraction of a millisecond.
const BLOCKS_AT_ONCE: usize = 1 << 10;

/// Blocks taken in on one tick at most. The log that tells them to the other VMs holds 130,000, and each reads
/// 16,000 at a time: more would overtake them.
const BLOCKS_PER_TICK: usize = 16 << 10;

/// Bytes of reports that wait to be taken in: two of the longest, or sixty of a large cache. Halved, agents that claim
/// much are put off sooner; doubled, so is what they can fill the VM with.
const MAX_WAITING_BYTES: usize = 32 << 20;

/// For how long a report may wait before its replica's load is asked of the replica: what agents tell of it is stale with the
/// shipped options after three times as long. Halved, replicas are asked for nothing while a fleet's snapshots are taken in.
const LATE: Duration = Duration::from_secs(1);

/// What is said of an agent's answer that will not get better by itself.
pub fn complaint(result: &str) -> Option<&'static str> {
    Some(match result {
        "refused" => "an agent refuses the filter's questions: see cache_report.token",
        "foreign" => "what answers where an agent should is none",
        "other_version" => "an agent's reports are of another version than this filter reads",
        "too_large" | "cut" => "an agent's report is too long, or does not end",
        "damaged" => "an agent's report makes no sense",
        _ => return None,
    })
}

/// What an agent says of its engine, as the engine's own page would.
pub fn page(status: &Status, standing: Standing) -> stats::Report {
    let said = status.load().unwrap_or_default();
    // One that does not hear its engine may still speak of the last one's blocks.
    let is_doubtful = matches!(standing, Standing::Deaf | Standing::LoadOnly(Misfit::BlockSize));
    let block_size = BlockSize::new(status.block_tokens).filter(|_| !is_doubtful);
    stats::Report { block_size, ..said }
}

/// See the module.
#[derive(Default)]
pub struct Reports {
    agents: Agents,
    waiting: Waiting<ReplicaId>,
    /// Times [`BLOCKS_AT_ONCE`] that may be taken in before the next tick.
    left: usize,
    /// What agents last reported whose blocks are not used: they need not say it again.
    unused: HashMap<ReplicaId, Position>,
}

impl Reports {
    /// Takes over from another leader.
    pub fn take_over(&mut self, link: &Link, table: &ReplicaTable, now: Moment) {
        *self = Self::default();
        for replica in table.iter() {
            if link.observed_position(replica.id).is_some() {
                self.agents.inherit(replica.id, now);
            }
        }
    }

    /// This VM leads no longer.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// Whether a replica itself is to be asked for its load.
    pub fn needs_metrics(&self, id: ReplicaId, now: Moment) -> bool {
        // Then no agent is asked at all.
        let is_full = self.waiting.bytes() >= MAX_WAITING_BYTES;
        let is_late = self.waiting.time(id, now).is_some_and(|time| time >= LATE);
        is_full || is_late || self.agents.needs_metrics(id)
    }

    /// What a replica's agent is asked, if it is.
    pub fn interval(
        &self,
        config: &CacheReportConfig,
        replica: &Replica,
        has_requests: bool,
        now: Moment,
    ) -> Option<Interval> {
        let is_waiting = self.waiting.time(replica.id, now).is_some();
        config.agent.address(&replica.address)?;
        (!is_waiting && self.waiting.bytes() < MAX_WAITING_BYTES)
            .then(|| self.agents.interval(replica.id, config, has_requests))
    }

    /// What an agent is asked to go on from.
    pub fn since(&self, link: &Link, id: ReplicaId) -> Option<Position> {
        if self.agents.is_astray(id) {
            return None;
        }
        link.observed_position(id).or_else(|| self.unused.get(&id).copied())
    }

    pub fn asked(&mut self, id: ReplicaId, now: Moment) {
        self.agents.asked(id, now);
    }

    /// A question brought no report.
    pub fn missed(&mut self, id: ReplicaId) {
        self.agents.missed(id);
    }

    /// There is no room for a report now.
    pub fn defer(&mut self, id: ReplicaId) -> &'static str {
        self.agents.excuse(id);
        "deferred"
    }

    /// Gives up who is silent, and goes on with what has been reported. Of whom nothing counts any more that agents said.
    pub fn tick(
        &mut self,
        link: &mut Link,
        config: &Config,
        table: &ReplicaTable,
        now: Moment,
    ) -> Vec<ReplicaId> {
        self.agents.retain(|id| table.by_id(id).is_some());
        self.waiting.retain(|id| table.by_id(id).is_some());
        self.unused.retain(|id, _| table.by_id(*id).is_some());
        let Some(reported) = &config.cache_report else {
            return self.stop(link, table);
        };
        let lost = self.agents.give_up(reported, now);
        for (id, before) in &lost {
            self.fall_back(link, *id, *before, Standing::Lost.cause());
        }
        self.left = BLOCKS_PER_TICK / BLOCKS_AT_ONCE;
        self.take_in(link, now);
        lost.into_iter().map(|(id, _)| id).collect()
    }

    /// Agents are not asked any more.
    fn stop(&mut self, link: &mut Link, table: &ReplicaTable) -> Vec<ReplicaId> {
        let all: Vec<ReplicaId> = table.iter().map(|replica| replica.id).collect();
        for id in &all {
            if link.observed_position(*id).is_some() {
                link.unobserve(*id);
            }
        }
        *self = Self::default();
        all
    }

    /// A replica holds what was routed there, from now on.
    fn fall_back(&mut self, link: &mut Link, id: ReplicaId, before: Standing, cause: &'static str) {
        self.waiting.retain(|waiting| waiting != id);
        if before == Standing::Reporting {
            link.unobserve(id);
            meters::add(&metrics::REPORT_FALLBACKS, &[cause], 1);
        }
    }

    /// Reads an answer up to its blocks; `None` while there is no room for them.
    pub fn read(&self, body: Vec<u8>) -> Result<Option<Report>, &'static str> {
        meters::add(&metrics::REPORT_BYTES, &[], body.len() as u64);
        if self.waiting.bytes() + body.len() > MAX_WAITING_BYTES {
            return Ok(None);
        }
        let report = Report::read(body).map_err(|error| match error {
            ReportError::TooLong => "too_large",
            ReportError::Foreign => "foreign",
            ReportError::Version(_) => "other_version",
            ReportError::Head | ReportError::Changes => "damaged",
        });
        report.map(Some)
    }

    /// Takes in a report of a replica that is in the table, and says what it was. Its load is somebody else's.
    pub fn take(
        &mut self,
        link: &mut Link,
        id: ReplicaId,
        standing: Standing,
        report: Report,
        now: Moment,
    ) -> &'static str {
        let known = link.observed_position(id);
        let is_used = standing == Standing::Reporting;
        if is_used && report.since.is_some() && report.since != known {
            // The question was asked before something else was learned. The next one is not.
            self.agents.strayed(id, now);
            return "out_of_order";
        }
        let is_new = report.since != Some(report.position);
        let load = report.status.load().and_then(|load| Some((load.running?, load.waiting?)));
        let has_requests = load.is_some_and(|(running, waiting)| running > 0 || waiting > 0);
        let (is_busy, tells_load) = (is_new || has_requests, load.is_some());
        // A snapshot says nothing of how fast that was.
        let turns_over = report.since.is_some()
            && turns_over(report.most_blocks_left(), report.status.capacity_blocks);
        let heard = Heard { standing, is_busy, tells_load, turns_over };
        let before = self.agents.heard(id, heard, now);
        if !is_used {
            let generation = report.position.generation;
            if known.is_some_and(|known| known.generation != generation) {
                // What was held before says nothing about what is held now, nor does what was sent there.
                link.observe(id, None, report.position, &[], true);
            }
            self.fall_back(link, id, before, standing.cause());
            self.unused.insert(id, report.position);
            return "unused";
        }
        self.unused.remove(&id);
        if !is_new {
            return "unchanged";
        }
        let result = if report.since.is_some() { "changes" } else { "snapshot" };
        self.waiting.push(id, Pieces::new(report), now);
        if self.waiting.len() == 1 {
            self.take_in(link, now);
        }
        result
    }

    /// Takes in some of what has been reported, for a bounded time, and has the others read it.
    fn take_in(&mut self, link: &mut Link, now: Moment) {
        if !self.waiting.is_empty() {
            self.take_pieces(link);
            link.publish(now);
        }
    }

    fn take_pieces(&mut self, link: &mut Link) {
        let began = host::now();
        while self.left > 0 && host::now().since(began) < AT_A_STRETCH {
            let Some((id, piece)) = self.waiting.next(BLOCKS_AT_ONCE) else { return };
            self.left -= 1;
            match piece {
                Ok(Piece { from, to, changes, is_last }) => {
                    link.observe(id, from, to, &changes, is_last);
                }
                Err(_) => {
                    let before = self.agents.disprove(id);
                    self.fall_back(link, id, before, "damaged");
                    meters::add(&metrics::REPORTS, &["damaged"], 1);
                }
            }
        }
    }

    /// How many replicas of a cluster have an agent of each standing.
    pub fn standings(&self, table: &ReplicaTable, cluster: &str) -> HashMap<&'static str, u64> {
        let mut counts: HashMap<&'static str, u64> = HashMap::new();
        for replica in table.in_cluster(cluster) {
            *counts.entry(self.agents.standing(replica.id).as_str()).or_default() += 1;
        }
        counts
    }

    /// When a replica's agent last reported.
    pub fn last_heard(&self, id: ReplicaId) -> Option<Moment> {
        self.agents.last_heard(id)
    }
}
