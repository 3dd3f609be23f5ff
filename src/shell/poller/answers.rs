//! What answers hold: members, load, models, and what an agent says of a cache. It goes into the leader's table.
//!
//! Bodies are read by the core. Here nothing is asked; but for a replica that has restarted, nothing is published.

use super::Poller;
use crate::metrics;
use crate::replicas::agents::Standing;
use crate::replicas::stats::Report;
use crate::replicas::{Moment, Replica, ReplicaId, clusters, models};
use crate::shell::calls::{self, Call};
use crate::shell::gauges::Topology;
use crate::shell::link::Link;
use crate::shell::{host, meters, reports};

const NOT_IN_ADMIN: &str = "Envoy's admin knows no such cluster (yet)";
const INCOMPLETE: &str = "a replica's metrics lack some of the numbers that routing goes by";
const DATA_PARALLEL: &str = "several engines behind one address: their caches are not told apart";
const DISAGGREGATED: &str = "replicas compute prompts for others: who holds what is not known";
const WEIGHTED: &str = "replicas have unequal weights, which are not heeded";

impl Poller {
    /// Takes in the answer to a call. Returns false when the call was not the poller's.
    pub fn answer(
        &mut self,
        link: &mut Link,
        token: u32,
        num_headers: usize,
        body_size: usize,
    ) -> bool {
        let Some((call, answer)) = self.calls.take(token, num_headers, body_size) else {
            return false;
        };
        self.answered(&call);
        let taken = answer.and_then(|body| match call {
            Call::Report(id, own) => self.take_cache_report(link, id, own, body),
            _ => self.take(link, &call, &body).ok_or(calls::UNREADABLE),
        });
        let result = taken.unwrap_or_else(|problem| {
            if let Call::Report(id, _) = call {
                self.reports.missed(id);
            }
            problem
        });
        self.count(&call, result);
        true
    }

    /// Takes in an answer: what is counted of it, or nothing when it is not what was asked for.
    fn take(&mut self, link: &mut Link, call: &Call, body: &[u8]) -> Option<&'static str> {
        let taken = match call {
            Call::Admin(admin) => self.take_members(admin, body),
            Call::Metrics(id, own) => self.take_report(link, *id, *own, body),
            Call::Models(id) => self.take_models(*id, body),
            Call::Report(..) => None,
        };
        self.dirty |= taken.is_some();
        taken
    }

    fn take_members(&mut self, admin: &str, body: &[u8]) -> Option<&'static str> {
        let names = self.names_of(admin);
        let found = clusters::members(body, &names)?;
        let names: Vec<String> = names.into_iter().map(str::to_owned).collect();
        for name in names {
            if !found.iter().any(|found| found.cluster == name) {
                self.complain(&name, NOT_IN_ADMIN);
            }
        }
        for clusters::Found { cluster, members, weighted } in found {
            let unplaced = self.table.set_members(&cluster, &members);
            if weighted {
                self.complain(&cluster, WEIGHTED);
            }
            self.findings
                .weighted
                .insert(cluster.clone(), if weighted { members.len() } else { 0 });
            self.findings.unplaced.insert(cluster, unplaced);
        }
        Some("ok")
    }

    fn take_report(
        &mut self,
        link: &mut Link,
        id: ReplicaId,
        asked: u32,
        body: &[u8],
    ) -> Option<&'static str> {
        let page = String::from_utf8_lossy(body);
        let report = Report::parse(&page)?;
        let result = if report.is_complete() { "ok" } else { "incomplete" };
        // The place may have gone to another replica while the call was under way.
        let Some(replica) = self.table.by_id(id) else { return Some(result) };
        let cluster = replica.cluster.clone();
        self.take_load(link, id, asked, &report, host::now());
        self.take_topology(id, &cluster, &report);
        Some(result)
    }

    /// Takes in what a replica, or its agent, says of its load. Whether it is another process' now.
    fn take_load(
        &mut self,
        link: &mut Link,
        id: ReplicaId,
        asked: u32,
        report: &Report,
        now: Moment,
    ) -> bool {
        link.refresh(now);
        // The engine wrote it some time between the question and its answer.
        let own = asked.max(link.all_charges(now).of(id).requests);
        let restarted = self.table.set_report(id.slot, report, own, now);
        if restarted {
            // What was there may be another model's now: that does not wait for a tick.
            if let Some(epoch) = self.leading
                && self.publish(link, epoch, now).is_err()
            {
                self.leading = None;
            }
            meters::add(&metrics::RESTARTS, &[], 1);
        }
        restarted
    }

    /// Takes in what an agent reports: what is counted of it, or why it is no report.
    fn take_cache_report(
        &mut self,
        link: &mut Link,
        id: ReplicaId,
        asked: u32,
        body: Vec<u8>,
    ) -> Result<&'static str, &'static str> {
        let report = self.reports.read(body)?;
        let Some(report) = report else { return Ok(self.reports.defer(id)) };
        let known = self.table.by_id(id).filter(|_| self.leading.is_some());
        let Some(replica) = known else { return Ok("late") };
        let (cluster, before) = (replica.cluster.clone(), shown(replica));
        let standing = Standing::of(&self.config, replica, &report.status);
        if let Standing::LoadOnly(misfit) = standing {
            self.complain(&cluster, misfit.complaint());
        }
        let (said, now) = (reports::page(&report.status, standing), host::now());
        if self.take_load(link, id, asked, &said, now) {
            return Ok("restarted");
        }
        if let Some(load) = report.status.load() {
            self.take_topology(id, &cluster, &load);
        }
        self.dirty |= self.table.set_drains(id, report.status.draining);
        // What is as it was need not be told at once: it is published within a second.
        self.dirty |= self.table.by_id(id).map(shown) != Some(before);
        Ok(self.reports.take(link, id, standing, report, now))
    }

    /// Says what routing does not understand of a replica, once a minute.
    fn take_topology(&mut self, id: ReplicaId, cluster: &str, report: &Report) {
        let topology =
            Topology { data_parallel: report.engines > 1, disaggregated: report.disaggregated };
        for (is_so, problem) in [
            (topology.data_parallel, DATA_PARALLEL),
            (topology.disaggregated, DISAGGREGATED),
            (!report.is_complete(), INCOMPLETE),
        ] {
            if is_so {
                self.complain(cluster, problem);
            }
        }
        self.findings.topology.insert(id, topology);
    }

    fn take_models(&mut self, id: ReplicaId, body: &[u8]) -> Option<&'static str> {
        let models = models::served(body)?;
        if self.table.by_id(id).is_some() {
            self.table.set_models(id.slot, models);
        }
        Some("ok")
    }
}

/// What others go by of what a replica reports, but for when that was.
fn shown(replica: &Replica) -> impl PartialEq + use<> {
    let load = replica.load.map(|load| (load.running, load.waiting, load.kv_usage, load.own));
    (load, replica.block_size, replica.capacity_blocks, replica.adapters.clone())
}
