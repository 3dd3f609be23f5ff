//! The leader's work: who the replicas are and how they do, asked on ticks and published.
//!
//! Every VM has a [`Poller`]; only the one that holds the lease asks. The VM on Envoy's main
//! thread is preferred, since it serves no traffic: a VM that has served some leaves an ended
//! lease to the others for a while.
//!
//! It does not choose replicas, and a replica that fails to answer is not taken for dead: only
//! Envoy's membership and health verdicts count.

use super::calls::{self, Call, Calls};
use super::gauges::{Findings, Gauges, Topology};
use super::link::{self, Link, SharedLease};
use super::reports::{self, Reports};
use super::scaling::Scaler;
use super::seat::Seat;
use super::trust::Trust;
use super::{host, meters};
use crate::config::{Config, Membership};
use crate::learn::sizing::Sizing;
use crate::metrics;
use crate::replicas::agents::Standing;
use crate::replicas::schedule::{Pace, Question, Schedule, Wish};
use crate::replicas::stats::Report;
use crate::replicas::{Member, Moment, Replica, ReplicaId, ReplicaTable, clusters, models};
use crate::share::table::Refusal;
use hashbrown::HashMap;
use std::rc::Rc;
use std::time::Duration;

/// How long a claim holds. Renewed on every tick, so a leader is replaced after some ten missed
/// ticks; shorter, and a worker that is held up for a moment loses it to no purpose.
const LEASE_TERM: Duration = Duration::from_secs(1);

/// How long a VM with traffic leaves an ended lease to one without: ten ticks. Halved, a main thread
/// that is held up loses it to a worker; doubled, so is the time without reports when it is gone.
const LEASE_GRACE: Duration = Duration::from_secs(1);

/// How often a replica is asked for its models: they change with a deployment, not with traffic.
/// Halved, each replica answers twice as many questions for nothing; doubled, a model that moved is
/// sought at its old place for longer.
const MODELS_INTERVAL: Duration = Duration::from_secs(10);

/// Calls begun in one tick. A page costs some 100 us to read, so the answers to this many hold
/// the thread for a few milliseconds; with 100 ms ticks it is 320 replicas a second.
const MAX_CALLS_PER_TICK: usize = 32;

/// How often the log says the same of the same cluster.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(60);

const NO_SUCH_CLUSTER: &str = "Envoy has no such cluster to poll through, or it has no members";
const NOT_IN_ADMIN: &str = "Envoy's admin knows no such cluster (yet)";
const INCOMPLETE: &str = "a replica's metrics lack some of the numbers that routing goes by";
const DATA_PARALLEL: &str = "several engines behind one address: their caches are not told apart";
const DISAGGREGATED: &str = "replicas compute prompts for others: who holds what is not known";
const WEIGHTED: &str = "replicas have unequal weights, which are not heeded";

/// A table is published this often even if nothing changed: a VM that was creating the key when
/// it was first written may have emptied it. Longer, and a new VM waits that long to route.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);

/// See the module.
pub struct Poller {
    config: Rc<Config>,
    lease: SharedLease,
    /// The epoch held at the last tick.
    held: Option<u64>,
    /// The epoch in which this VM acts: held for at least two ticks in a row.
    leading: Option<u64>,
    table: ReplicaTable,
    dirty: bool,
    publish_due: Moment,
    /// Lease epochs up to this one are another VM's.
    taken: u64,
    calls: Calls,
    admin_due: Moment,
    schedule: Schedule,
    reports: Reports,
    findings: Findings,
    sizing: Sizing,
    gauges: Gauges,
    scaler: Scaler,
    /// What has been complained of, by cluster, and from when on it may be again: the rest is counted.
    complaints: HashMap<(String, &'static str), Moment>,
}

impl Poller {
    pub fn new(config: Rc<Config>, seat: Rc<Seat>, vm: u64) -> Self {
        let lease = link::lease("lease", config.fingerprint(), vm, LEASE_TERM);
        let gauges = Gauges::new(Rc::clone(&config), Rc::clone(&seat));
        let scaler = Scaler::new(Rc::clone(&config), seat);
        Self {
            config,
            lease,
            held: None,
            leading: None,
            table: ReplicaTable::default(),
            dirty: false,
            publish_due: Moment::default(),
            taken: 0,
            calls: Calls::default(),
            admin_due: Moment::default(),
            schedule: Schedule::default(),
            reports: Reports::default(),
            findings: Findings::default(),
            sizing: Sizing::default(),
            gauges,
            scaler,
            complaints: HashMap::new(),
        }
    }

    /// Goes on by another configuration of the same fingerprint.
    pub fn reconfigure(&mut self, config: Rc<Config>, seat: Rc<Seat>) {
        self.gauges.reconfigure(Rc::clone(&config), Rc::clone(&seat));
        self.scaler.reconfigure(Rc::clone(&config), seat);
        self.config = config;
    }

    /// Takes it that no call under way will be answered: each is due again in its turn.
    pub fn forget_calls(&mut self) {
        self.calls.forget();
    }

    /// Holds the lease if it may, and if so asks who is due and publishes what changed.
    pub fn tick(&mut self, link: &mut Link, trust: &Trust, now: Moment, has_traffic: bool) {
        let grace = if has_traffic { LEASE_GRACE } else { Duration::ZERO };
        let held = self.lease.hold(now, grace, self.taken);
        if held.is_some() && held != self.held {
            link.prepare_table();
        }
        let confirmed = held.filter(|_| held == self.held);
        self.held = held;
        let led = self.leading.take();
        let Some(epoch) = confirmed else {
            self.reports.forget();
            return;
        };
        if let Err(refusal) = self.lead(link, epoch, led, now) {
            if let Refusal::Superseded(epoch) = refusal {
                self.taken = epoch;
            }
            return;
        }
        self.leading = confirmed;
        let reports = self.config.cache_report.as_ref().map(|_| &self.reports);
        self.gauges.report(link, &self.table, &mut self.findings, reports, now);
        self.gauges.report_trust(trust);
        self.scaler.report(link, &self.table, now);
    }

    fn give_up(&mut self, now: Moment) {
        if self.held.take().is_some() {
            self.lease.give_up(now);
        }
        self.leading = None;
    }

    /// The root ends, and has left its seat.
    pub fn end(&mut self, now: Moment) {
        self.give_up(now);
        self.gauges.end();
        self.scaler.end();
    }

    /// A leader's tick. An error ends its term: it may begin another.
    fn lead(
        &mut self,
        link: &mut Link,
        epoch: u64,
        led: Option<u64>,
        now: Moment,
    ) -> Result<(), Refusal> {
        if led != Some(epoch) {
            self.table = link.adopt_table(epoch)?;
            self.gauges.take_over(&self.table);
            self.scaler.take_over();
            self.dirty = true;
            self.calls.forget();
            self.set_static_members();
            self.reports.take_over(link, &self.table, now);
        }
        for id in self.reports.tick(link, &self.config, &self.table, now) {
            self.dirty |= self.table.set_drains(id, false);
        }
        self.ask(link, now);
        self.size(link);
        if self.dirty || now >= self.publish_due {
            self.publish(link, epoch, now)?;
        }
        Ok(())
    }

    /// Takes shadows for as large as predictions show their caches to be.
    fn size(&mut self, link: &Link) {
        if !self.config.correction {
            return;
        }
        self.sizing.retain(|replica| self.table.by_id(replica).is_some());
        for (id, evidence) in link.all_evidence() {
            let Some(share) = self.table.by_id(id).map(|replica| replica.shadow_share) else {
                continue;
            };
            if let Some(share) = self.sizing.judge(id, &evidence, share) {
                self.table.set_shadow_share(id, share);
                self.dirty = true;
            }
        }
    }

    fn publish(&mut self, link: &mut Link, epoch: u64, now: Moment) -> Result<(), Refusal> {
        match link.publish_table(epoch, &self.table) {
            Ok(()) => {
                self.dirty = false;
                self.publish_due = now.plus(PUBLISH_INTERVAL);
            }
            Err(Refusal::Raced) => self.dirty = true,
            Err(superseded) => return Err(superseded),
        }
        Ok(())
    }

    fn set_static_members(&mut self) {
        for cluster in &self.config.clusters {
            let Membership::Static(addresses) = &cluster.membership else { continue };
            let members: Vec<Member> =
                addresses.iter().map(|address| Member::healthy(address.clone())).collect();
            let unplaced = self.table.set_members(&cluster.name, &members);
            self.findings.unplaced.insert(cluster.name.clone(), unplaced);
        }
    }

    fn ask(&mut self, link: &Link, now: Moment) {
        if now >= self.admin_due {
            self.admin_due = now.plus(self.config.poll_interval);
            self.ask_admin();
        }
        let (config, pace) = (Rc::clone(&self.config), self.pace());
        let polled = |replica: &Replica| config.cluster_named(&replica.cluster)?.poll.as_ref();
        let charges = link.all_charges(now);
        let wishes = self.table.iter().map(|replica| {
            let has_requests = charges.of(replica.id).requests > 0;
            let asked = config.cache_report.as_ref();
            Wish {
                id: replica.id,
                metrics: polled(replica).is_some() && self.reports.needs_metrics(replica.id),
                models: polled(replica).is_some(),
                report: asked.and_then(|c| self.reports.interval(c, replica, has_requests)),
            }
        });
        for (id, question) in self.schedule.next(wishes, &pace, now, MAX_CALLS_PER_TICK) {
            let Some(replica) = self.table.by_id(id) else { continue };
            let own = charges.of(id).requests;
            let call = match question {
                Question::Metrics => Call::Metrics(id, own),
                Question::Models => Call::Models(id),
                Question::Report => Call::Report(id, own),
            };
            let timeout = pace.timeout;
            let (begun, through) = if let Call::Report(..) = call {
                let Some(report) = &config.cache_report else { continue };
                let Some(address) = report.agent.address(&replica.address) else { continue };
                self.reports.asked(id, now);
                let since = self.reports.since(link, id);
                (
                    self.calls.ask_agent(&call, &report.agent, &address, since, timeout),
                    &report.agent.cluster,
                )
            } else {
                let Some(poll) = polled(replica) else { continue };
                (self.calls.ask_replica(&call, poll, &replica.address, timeout), &poll.cluster)
            };
            self.note(begun, &call, through);
        }
    }

    fn pace(&self) -> Pace {
        let (metrics, timeout) = (self.config.poll_interval, self.config.poll_timeout);
        Pace { metrics, models: MODELS_INTERVAL, timeout }
    }

    fn ask_admin(&mut self) {
        let timeout = self.config.poll_timeout;
        let mut admins: Vec<String> = Vec::new();
        for cluster in &self.config.clusters {
            if let Membership::Admin(admin) = &cluster.membership
                && !admins.contains(admin)
            {
                admins.push(admin.clone());
            }
        }
        for admin in admins {
            let path = clusters::path(&self.names_of(&admin));
            let begun = self.calls.ask_admin(&admin, &path, timeout);
            self.note(begun, &Call::Admin(admin.clone()), &admin);
        }
    }

    /// The clusters whose members this admin names.
    fn names_of(&self, admin: &str) -> Vec<&str> {
        let of_admin = |membership: &Membership| matches!(membership, Membership::Admin(name) if name == admin);
        let configured = self.config.clusters.iter();
        configured.filter(|c| of_admin(&c.membership)).map(|c| c.name.as_str()).collect()
    }

    /// Notes whether a call has begun: one that has not is answered, by nothing.
    fn note(&mut self, begun: bool, call: &Call, cluster: &str) {
        if !begun {
            self.count(call, "failed");
            self.complain(cluster, NO_SUCH_CLUSTER);
            self.answered(call);
        }
    }

    /// Counts what came of a call.
    fn count(&mut self, call: &Call, result: &'static str) {
        let Call::Report(id, _) = call else {
            return meters::add(&metrics::POLLS, &[call.target(), result], 1);
        };
        meters::add(&metrics::REPORTS, &[result], 1);
        let cluster = self.table.by_id(*id).map(|replica| replica.cluster.clone());
        if let (Some(complaint), Some(cluster)) = (reports::complaint(result), cluster) {
            self.complain(&cluster, complaint);
        }
    }

    fn answered(&mut self, call: &Call) {
        if let Some((id, question)) = call.question() {
            let pace = self.pace();
            self.schedule.answered(id, question, &pace);
        }
    }

    fn complain(&mut self, cluster: &str, problem: &'static str) {
        let now = host::now();
        let due = self.complaints.entry((cluster.to_owned(), problem)).or_insert(now);
        if now >= *due {
            *due = now.plus(COMPLAINT_INTERVAL);
            log::warn!("cluster {cluster:?}: {problem}");
        }
    }

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
