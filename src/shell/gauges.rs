//! The leader's gauges, which speak of the whole Envoy.
//!
//! Envoy keeps a gauge's last value for good, so whoever set one of a replica or cluster that is
//! gone must also set it to 0. Of several configurations in a VM only the one that speaks for a
//! cluster sets its gauges. It asks nobody: what it tells is the table's and the poller's.

use super::link::Link;
use super::meters;
use super::reports::Reports;
use super::seat::Seat;
use super::trust::Trust;
use crate::charge::Charges;
use crate::config::{Config, Left};
use crate::drift::Kind;
use crate::learn::Speed;
use crate::metrics::{self, Metric};
use crate::replicas::agents::Standing;
use crate::replicas::strikes::Strikes;
use crate::replicas::{Health, Moment, Replica, ReplicaId, ReplicaTable};
use crate::series::Round;
use hashbrown::{HashMap, HashSet};
use std::rc::Rc;

/// Every gauge of one replica.
const OF_REPLICA: [&Metric; 17] = [
    &metrics::REPLICA_IN_FLIGHT,
    &metrics::REPLICA_UNFINISHED,
    &metrics::REPLICA_SUSPENDED,
    &metrics::REPLICA_PREFILL_RATE,
    &metrics::REPLICA_DECODE_TIME,
    &metrics::REPLICA_WAIT_ERROR,
    &metrics::REPLICA_SAMPLES,
    &metrics::REPLICA_SHADOW,
    &metrics::REPLICA_CAPACITY,
    &metrics::REPLICA_BLOCK_SIZE,
    &metrics::REPLICA_RUNNING,
    &metrics::REPLICA_WAITING,
    &metrics::REPLICA_REPORT_AGE,
    &metrics::REPLICA_KV_USAGE,
    &metrics::REPLICA_DRAIN_RANK,
    &metrics::REPLICA_OBSERVED,
    &metrics::REPLICA_CACHE_REPORT_AGE,
];

/// Replicas whose gauges are told on a tick, each by up to 16 calls to Envoy: a millisecond or so. A full table has its
/// turn within 1.1 s; halved, that is longer than who scrapes takes for now; doubled, so is the leader's tick.
const REPLICAS_PER_TICK: usize = 100;

const HEALTH: [(Health, &str); 3] = [
    (Health::Healthy, "healthy"),
    (Health::Unhealthy, "unhealthy"),
    (Health::Draining, "draining"),
];

/// Arrangements that routing does not understand.
const UNSUPPORTED: [&str; 3] = ["data_parallel", "disaggregated", "weighted"];

/// What a replica's report told of its arrangement.
#[derive(Debug, Clone, Copy, Default)]
pub struct Topology {
    pub data_parallel: bool,
    pub disaggregated: bool,
}

/// What the leader found that is not in the table.
#[derive(Debug, Default)]
pub struct Findings {
    pub topology: HashMap<ReplicaId, Topology>,
    /// Members of clusters with unequal weights, by cluster.
    pub weighted: HashMap<String, usize>,
    /// Members that found no place, by cluster.
    pub unplaced: HashMap<String, usize>,
}

impl Findings {
    /// How many replicas of a cluster are in each of the arrangements of [`UNSUPPORTED`].
    fn unsupported(&self, table: &ReplicaTable, cluster: &str) -> [(&'static str, u64); 3] {
        let [data_parallel, disaggregated, weighted] = UNSUPPORTED;
        let topologies = || {
            let of_cluster = table.in_cluster(cluster);
            of_cluster.filter_map(|replica| self.topology.get(&replica.id))
        };
        let weights = self.weighted.get(cluster).copied().unwrap_or_default();
        [
            (data_parallel, topologies().filter(|found| found.data_parallel).count() as u64),
            (disaggregated, topologies().filter(|found| found.disaggregated).count() as u64),
            (weighted, weights as u64),
        ]
    }
}

/// See the module.
pub struct Gauges {
    config: Rc<Config>,
    seat: Rc<Seat>,
    /// Clusters and addresses of the replicas whose gauges may not be 0.
    reported: Vec<(String, String)>,
    /// Whose turn it is.
    round: Round,
}

impl Gauges {
    pub fn new(config: Rc<Config>, seat: Rc<Seat>) -> Self {
        Self { config, seat, reported: Vec::new(), round: Round::default() }
    }

    /// Goes on for another configuration that names the same clusters, and takes back what it does not ask for.
    pub fn reconfigure(&mut self, config: Rc<Config>, seat: Rc<Seat>) {
        let Left { cache_report, scaling, models } = self.config.left_by(&config);
        let replicas =
            || self.reported.iter().map(|(cluster, address)| [cluster.as_str(), address]);
        if cache_report {
            for cluster in self.config.clusters.iter().map(|cluster| cluster.name.as_str()) {
                clear_agents(cluster);
            }
            for labels in replicas() {
                meters::clear(&metrics::REPLICA_OBSERVED, &labels);
                meters::clear(&metrics::REPLICA_CACHE_REPORT_AGE, &labels);
            }
        }
        if scaling {
            replicas().for_each(|labels| meters::clear(&metrics::REPLICA_DRAIN_RANK, &labels));
        }
        models.into_iter().for_each(trust_again);
        self.config = config;
        self.seat = seat;
    }

    /// The clusters whose gauges are this root's to move.
    fn ours<'a>(&self, config: &'a Config) -> Vec<&'a str> {
        let clusters = config.clusters.iter().map(|cluster| cluster.name.as_str());
        clusters.filter(|cluster| self.seat.speaks_for(cluster)).collect()
    }

    /// Takes over from a leader that has reported this table.
    pub fn take_over(&mut self, table: &ReplicaTable) {
        let config = Rc::clone(&self.config);
        for (cluster, address) in of(table, &self.ours(&config)).map(names) {
            if !self.reported.iter().any(|(c, a)| c == cluster && a == address) {
                self.reported.push((cluster.to_owned(), address.to_owned()));
            }
        }
    }

    /// Tells what there is, of replicas some at a time; `reports`: where agents are asked.
    pub fn report(
        &mut self,
        link: &Link,
        table: &ReplicaTable,
        findings: &mut Findings,
        reports: Option<&Reports>,
        now: Moment,
    ) {
        let config = Rc::clone(&self.config);
        let ours = self.ours(&config);
        findings.topology.retain(|id, _| table.by_id(*id).is_some());
        self.clear_gone(table, &ours);
        if self.seat.is_newest() {
            let (alive, ready) = link.count_vms();
            meters::record(&metrics::VMS, &["all"], alive);
            meters::record(&metrics::VMS, &["ready"], ready);
        }
        for cluster in &ours {
            report_cluster(table, findings, cluster);
            if let Some(reports) = reports {
                report_standings(table, reports, cluster);
            }
        }
        let turn = self.round.turn(self.reported.len(), REPLICAS_PER_TICK);
        let (charges, strikes) = (link.all_charges(now), link.all_strikes());
        for replica in of(table, &ours).skip(turn.start).take(turn.len()) {
            report_replica(link, replica, &charges, &strikes, now);
            if let Some(reports) = reports {
                report_agent(link, reports, replica, now);
            }
        }
    }

    fn clear_gone(&mut self, table: &ReplicaTable, ours: &[&str]) {
        let reported = self.reported.iter().map(|(c, a)| (c.as_str(), a.as_str()));
        if of(table, ours).map(names).eq(reported) {
            return;
        }
        let stays: HashSet<(&str, &str)> = of(table, ours).map(names).collect();
        for (cluster, address) in &self.reported {
            if !stays.contains(&(cluster.as_str(), address.as_str())) {
                clear_replica(cluster, address);
            }
        }
        let owned = |(cluster, address): (&str, &str)| (cluster.to_owned(), address.to_owned());
        self.reported = of(table, ours).map(names).map(owned).collect();
    }

    /// Tells which prompts are matched.
    pub fn report_trust(&self, trust: &Trust) {
        if !self.seat.is_newest() {
            return;
        }
        for (model, name) in self.config.models.iter().zip(self.config.shown_models()) {
            for kind in Kind::ALL {
                let is_trusted = trust.is_trusted(model.identity(), kind);
                meters::record(&metrics::MODEL_TRUSTED, &[name, kind.as_str()], is_trusted.into());
            }
        }
    }

    /// The root ends: what it set is taken back where nobody else sets it any more.
    pub fn end(&mut self) {
        for (cluster, address) in std::mem::take(&mut self.reported) {
            if !Seat::is_named(&cluster) {
                clear_replica(&cluster, &address);
            }
        }
        for cluster in self.config.clusters.iter().map(|cluster| cluster.name.as_str()) {
            if !Seat::is_named(cluster) {
                meters::clear(&metrics::UNPLACED_REPLICAS, &[cluster]);
                UNSUPPORTED.iter().for_each(|kind| {
                    meters::clear(&metrics::UNSUPPORTED_TOPOLOGY, &[cluster, kind]);
                });
                HEALTH.iter().for_each(|(_, label)| {
                    meters::clear(&metrics::REPLICAS, &[cluster, label]);
                });
                clear_agents(cluster);
            }
        }
        // Another configuration that has the model tells with its next tick what is so.
        self.config.shown_models().for_each(trust_again);
    }
}

/// The replicas of these clusters, in the table's order.
fn of<'a>(table: &'a ReplicaTable, clusters: &'a [&str]) -> impl Iterator<Item = &'a Replica> {
    table.iter().filter(|replica| clusters.contains(&replica.cluster.as_str()))
}

fn names(replica: &Replica) -> (&str, &str) {
    (&replica.cluster, &replica.address)
}

fn report_cluster(table: &ReplicaTable, findings: &Findings, cluster: &str) {
    let unplaced = findings.unplaced.get(cluster).copied().unwrap_or_default();
    meters::record(&metrics::UNPLACED_REPLICAS, &[cluster], unplaced as u64);
    for (kind, count) in findings.unsupported(table, cluster) {
        meters::record(&metrics::UNSUPPORTED_TOPOLOGY, &[cluster, kind], count);
    }
    for (health, label) in HEALTH {
        let replicas = table.in_cluster(cluster);
        let count = replicas.filter(|replica| replica.health == health).count();
        meters::record(&metrics::REPLICAS, &[cluster, label], count as u64);
    }
}

fn report_standings(table: &ReplicaTable, reports: &Reports, cluster: &str) {
    let counts = reports.standings(table, cluster);
    for state in Standing::LABELS {
        let count = counts.get(state).copied().unwrap_or_default();
        meters::record(&metrics::AGENTS, &[cluster, state], count);
    }
}

fn report_agent(link: &Link, reports: &Reports, replica: &Replica, now: Moment) {
    let labels = [replica.cluster.as_str(), replica.address.as_str()];
    let observed = link.index().observed_blocks(replica.id) as u64;
    meters::record(&metrics::REPLICA_OBSERVED, &labels, observed);
    if let Some(heard) = reports.last_heard(replica.id) {
        meters::record_ms(&metrics::REPLICA_CACHE_REPORT_AGE, &labels, now.since(heard));
    }
}

fn clear_agents(cluster: &str) {
    Standing::LABELS.iter().for_each(|state| meters::clear(&metrics::AGENTS, &[cluster, state]));
}

/// A model that is not routed for is not distrusted either: an alert that fired for it ends.
fn trust_again(model: &str) {
    for kind in Kind::ALL {
        meters::put_back(&metrics::MODEL_TRUSTED, &[model, kind.as_str()], 1);
    }
}

fn clear_replica(cluster: &str, address: &str) {
    OF_REPLICA.iter().for_each(|gauge| meters::clear(gauge, &[cluster, address]));
}

fn report_replica(
    link: &Link,
    replica: &Replica,
    charges: &Charges,
    strikes: &Strikes,
    now: Moment,
) {
    let labels = [replica.cluster.as_str(), replica.address.as_str()];
    let charge = charges.of(replica.id);
    meters::record(&metrics::REPLICA_IN_FLIGHT, &labels, charge.requests.into());
    meters::record(&metrics::REPLICA_UNFINISHED, &labels, charge.unfinished_tokens);
    let suspended = strikes.of(replica.id).is_suspended();
    meters::record(&metrics::REPLICA_SUSPENDED, &labels, suspended.into());
    report_speed(link.rates().of(replica.id), &labels);
    let held = link.index().held_blocks(replica.id) as u64;
    meters::record(&metrics::REPLICA_SHADOW, &labels, held);
    meters::record(&metrics::REPLICA_CAPACITY, &labels, link.blocks_of(replica.id) as u64);
    if let Some(size) = replica.block_size {
        meters::record(&metrics::REPLICA_BLOCK_SIZE, &labels, size.get().into());
    }
    let Some(load) = replica.load else { return };
    meters::record(&metrics::REPLICA_RUNNING, &labels, load.running.into());
    meters::record(&metrics::REPLICA_WAITING, &labels, load.waiting.into());
    meters::record_ms(&metrics::REPLICA_REPORT_AGE, &labels, now.since(load.at));
    if let Some(usage) = load.kv_usage {
        meters::record(&metrics::REPLICA_KV_USAGE, &labels, (usage * 100.0) as u64);
    }
}

fn report_speed(speed: Speed, labels: &[&str]) {
    meters::record(&metrics::REPLICA_SAMPLES, labels, speed.samples.into());
    if let Some(rate) = speed.prefill_tokens_per_s {
        meters::record(&metrics::REPLICA_PREFILL_RATE, labels, rate as u64);
    }
    if let Some(seconds) = speed.decode_s_per_token {
        meters::record(&metrics::REPLICA_DECODE_TIME, labels, (seconds * 1e6) as u64);
    }
    let error = (speed.wait_error_s * 1e3) as u64;
    meters::record(&metrics::REPLICA_WAIT_ERROR, labels, error);
}
