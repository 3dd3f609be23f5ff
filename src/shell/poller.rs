//! The leader's work: who the replicas are and how they do, asked on ticks and published.
//!
//! Every VM has a [`Poller`]; only the one that holds the lease asks. The VM on Envoy's main
//! thread is preferred, since it serves no traffic: a VM that has served some leaves an ended
//! lease to the others for a while.
//!
//! It does not choose replicas, and a replica that fails to answer is not taken for dead: only
//! Envoy's membership and health verdicts count.

use super::gauges::Gauges;
use super::link::{self, Link, SharedLease};
use super::seat::Seat;
use super::{ROUTING_HEADER, host, meters};
use crate::config::{Config, Membership};
use crate::metrics::{self, Kind};
use crate::replicas::stats::Report;
use crate::replicas::{Health, Member, Moment, ReplicaId, ReplicaTable, clusters, models};
use crate::share::table::Refusal;
use hashbrown::{HashMap, HashSet};
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

/// An answer larger than this is not read: Envoy's admin has 700 bytes a host.
const MAX_ANSWER_BYTES: usize = 8 << 20;

/// A table is published this often even if nothing changed: a VM that was creating the key when
/// it was first written may have emptied it. Longer, and a new VM waits that long to route.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    Admin(String),
    /// With our own requests in flight there when it was asked.
    Metrics(ReplicaId, u32),
    Models(ReplicaId),
}

impl Call {
    fn target(&self) -> &'static str {
        match self {
            Self::Admin(_) => "admin",
            Self::Metrics(..) => "metrics",
            Self::Models(_) => "models",
        }
    }
}

/// When a replica is asked next.
#[derive(Debug, Clone, Copy, Default)]
struct Due {
    metrics: Moment,
    models: Moment,
}

/// See the module.
pub struct Poller {
    config: Rc<Config>,
    seat: Rc<Seat>,
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
    calls: HashMap<u32, Call>,
    admin_due: Moment,
    due: HashMap<ReplicaId, Due>,
    /// Members that found no place, by cluster.
    unplaced: HashMap<String, usize>,
    gauges: Gauges,
    /// Clusters that have been complained of: once is enough for the log, the rest is counted.
    complained_of: HashSet<String>,
}

impl Poller {
    pub fn new(config: Rc<Config>, seat: Rc<Seat>, vm: u64) -> Self {
        let lease = link::lease("lease", config.fingerprint(), vm, LEASE_TERM);
        let gauges = Gauges::new(Rc::clone(&config), Rc::clone(&seat));
        Self {
            config,
            seat,
            lease,
            held: None,
            leading: None,
            table: ReplicaTable::default(),
            dirty: false,
            publish_due: Moment::default(),
            taken: 0,
            calls: HashMap::new(),
            admin_due: Moment::default(),
            due: HashMap::new(),
            unplaced: HashMap::new(),
            gauges,
            complained_of: HashSet::new(),
        }
    }

    /// Whether this VM leads, or is about to: what it holds for the first time it mostly keeps.
    pub fn holds_lease(&self) -> bool {
        self.held.is_some()
    }

    /// Holds the lease if it may, and if so asks who is due and publishes what changed.
    pub fn tick(&mut self, link: &mut Link, now: Moment, has_traffic: bool) {
        if !self.seat.may_lead() {
            // A newer configuration of this VM goes on with the same replicas.
            self.give_up(now);
            return;
        }
        let grace = if has_traffic { LEASE_GRACE } else { Duration::ZERO };
        let held = self.lease.hold(now, grace, self.taken);
        if held.is_some() && held != self.held {
            link.prepare_table();
        }
        let confirmed = held.filter(|_| held == self.held);
        self.held = held;
        let led = self.leading.take();
        let Some(epoch) = confirmed else { return };
        if let Err(refusal) = self.lead(link, epoch, led, now) {
            if let Refusal::Superseded(epoch) = refusal {
                self.taken = epoch;
            }
            return;
        }
        self.leading = confirmed;
        self.gauges.report(link, &self.table, &self.unplaced, now);
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
            self.dirty = true;
            self.calls.clear();
            self.set_static_members();
            show_counters();
        }
        self.ask(link, now);
        if self.dirty || now >= self.publish_due {
            match link.publish_table(epoch, &self.table) {
                Ok(()) => {
                    self.dirty = false;
                    self.publish_due = now.plus(PUBLISH_INTERVAL);
                }
                Err(Refusal::Raced) => self.dirty = true,
                Err(superseded) => return Err(superseded),
            }
        }
        Ok(())
    }

    fn set_static_members(&mut self) {
        for cluster in &self.config.clusters {
            let Membership::Static(addresses) = &cluster.membership else { continue };
            let members: Vec<Member> = addresses
                .iter()
                .map(|address| Member { address: address.clone(), health: Health::Healthy })
                .collect();
            let unplaced = self.table.set_members(&cluster.name, &members);
            self.unplaced.insert(cluster.name.clone(), unplaced);
        }
    }

    fn ask(&mut self, link: &Link, now: Moment) {
        if now >= self.admin_due {
            self.admin_due = now.plus(self.config.poll_interval);
            self.ask_admin();
        }
        let replicas: Vec<(ReplicaId, String, String)> = self
            .table
            .iter()
            .filter_map(|replica| {
                let cluster = self.config.cluster_named(&replica.cluster)?;
                Some((replica.id, replica.address.clone(), cluster.poll_cluster.clone()?))
            })
            .collect();
        self.due.retain(|id, _| replicas.iter().any(|(replica, ..)| replica == id));
        let charges = link.all_charges(now);
        let mut calls = 0;
        for (id, address, cluster) in replicas {
            if calls >= MAX_CALLS_PER_TICK {
                return;
            }
            let due = self.due.entry(id).or_default();
            let models = now >= due.models;
            if models {
                due.models = now.plus(MODELS_INTERVAL);
            }
            let metrics = now >= due.metrics;
            if metrics {
                due.metrics = now.plus(self.config.poll_interval);
            }
            let ask_metrics = Call::Metrics(id, charges.of(id).requests);
            for (due, call) in [(metrics, ask_metrics), (models, Call::Models(id))] {
                if due {
                    calls += 1;
                    self.ask_replica(call, &cluster, &address);
                }
            }
        }
    }

    fn ask_admin(&mut self) {
        let mut admins: Vec<String> = Vec::new();
        for cluster in &self.config.clusters {
            if let Membership::Admin(admin) = &cluster.membership
                && !admins.contains(admin)
            {
                admins.push(admin.clone());
            }
        }
        for admin in admins {
            let path = "/clusters?format=json";
            let token = host::call(&admin, "envoy-admin", path, &[], self.config.poll_timeout);
            self.begin(token, Call::Admin(admin.clone()), &admin);
        }
    }

    fn ask_replica(&mut self, call: Call, cluster: &str, address: &str) {
        let path = if matches!(call, Call::Metrics(..)) { "/metrics" } else { "/v1/models" };
        let headers = [(ROUTING_HEADER, address)];
        let token = host::call(cluster, address, path, &headers, self.config.poll_timeout);
        self.begin(token, call, cluster);
    }

    fn begin(&mut self, token: Option<u32>, call: Call, cluster: &str) {
        match token {
            Some(token) => {
                self.calls.insert(token, call);
            }
            None => {
                meters::add(&metrics::POLLS, &[call.target(), "failed"], 1);
                self.complain(cluster, "Envoy has no such cluster to poll through");
            }
        }
    }

    fn complain(&mut self, cluster: &str, problem: &str) {
        if self.complained_of.insert(cluster.to_owned()) {
            log::error!("cluster {cluster:?}: {problem}");
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
        let Some(call) = self.calls.remove(&token) else { return false };
        // Without headers the call was reset, and asking for one would be an error.
        let ok = num_headers > 0 && host::call_header(":status").as_deref() == Some(b"200");
        let result = if !ok || body_size > MAX_ANSWER_BYTES {
            "failed"
        } else if host::call_body(body_size).is_some_and(|body| self.take(link, &call, &body)) {
            "ok"
        } else {
            "unreadable"
        };
        meters::add(&metrics::POLLS, &[call.target(), result], 1);
        true
    }

    fn take(&mut self, link: &mut Link, call: &Call, body: &[u8]) -> bool {
        let taken = match call {
            Call::Admin(admin) => self.take_members(admin, body),
            Call::Metrics(id, own) => self.take_report(link, *id, *own, body),
            Call::Models(id) => self.take_models(*id, body),
        };
        self.dirty |= taken;
        taken
    }

    fn take_members(&mut self, admin: &str, body: &[u8]) -> bool {
        let of_admin = |membership: &Membership| *membership == Membership::Admin(admin.to_owned());
        let configured = self.config.clusters.iter();
        let names: Vec<&str> = configured
            .filter(|cluster| of_admin(&cluster.membership))
            .map(|cluster| cluster.name.as_str())
            .collect();
        let Some(found) = clusters::members(body, &names) else { return false };
        let is_found = |name: &&str| found.iter().any(|(cluster, _)| cluster == name);
        let missing: Vec<String> =
            names.iter().filter(|name| !is_found(name)).map(|name| (*name).to_owned()).collect();
        for name in missing {
            self.complain(&name, "Envoy's admin knows no such cluster (yet)");
        }
        for (cluster, members) in found {
            let unplaced = self.table.set_members(&cluster, &members);
            self.unplaced.insert(cluster, unplaced);
        }
        true
    }

    fn take_report(&mut self, link: &mut Link, id: ReplicaId, asked: u32, body: &[u8]) -> bool {
        let page = String::from_utf8_lossy(body);
        let Some(report) = Report::parse(&page) else { return false };
        let now = host::now();
        link.refresh(now);
        // The engine wrote the page some time between the question and its answer.
        let own = asked.max(link.all_charges(now).of(id).requests);
        // The place may have gone to another replica while the call was under way.
        if self.table.by_id(id).is_some() && self.table.set_report(id.slot, &report, own, now) {
            meters::add(&metrics::RESTARTS, &[], 1);
        }
        true
    }

    fn take_models(&mut self, id: ReplicaId, body: &[u8]) -> bool {
        let Some(models) = models::names(body) else { return false };
        if self.table.by_id(id).is_some() {
            self.table.set_models(id.slot, models);
        }
        true
    }
}

/// Makes the counters without labels visible before the first time they count, so that a rate over
/// them has a beginning.
fn show_counters() {
    for metric in metrics::ALL {
        if metric.kind == Kind::Counter && metric.labels.is_empty() {
            meters::add(metric, &[], 0);
        }
    }
}
