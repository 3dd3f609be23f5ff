//! The leader's advice on how many replicas a cluster should have, as gauges.
//!
//! What the load asks for is [`crate::scaling`]'s part: here is only where its numbers come from. What all VMs count is read
//! back from Envoy, so it holds for the whole Envoy whoever leads.

use super::link::Link;
use super::meters;
use super::seat::Seat;
use crate::config::Config;
use crate::metrics::{self, Metric};
use crate::replicas::strikes::Strikes;
use crate::replicas::{Health, Moment, Replica, ReplicaId, ReplicaTable};
use crate::scaling::{Coldest, Drainable, Recommendation, ScalingConfig, Seen, Signal, asked};
use hashbrown::HashMap;
use std::rc::Rc;
use std::time::Duration;

/// What is asked for changes in seconds. Twice as often it costs twice as much; half as often, a window for going up of a
/// few seconds would have few looks in it.
const INTERVAL: Duration = Duration::from_secs(1);

/// First tokens count half after so long. Halved, 50 of them are rarer; doubled, what was late holds for longer.
const HALF_LIFE: Duration = Duration::from_secs(30);

/// Every gauge of a cluster that has but that label.
const OF_CLUSTER: [&Metric; 3] =
    [&metrics::RECOMMENDED_REPLICAS, &metrics::SCALING_UNHEARD, &metrics::SCALING_BACKLOG];

/// See the module.
pub struct Scaler {
    config: Rc<Config>,
    seat: Rc<Seat>,
    clusters: HashMap<String, Cluster>,
    due: Moment,
}

/// What is remembered of a cluster.
struct Cluster {
    recommendation: Recommendation,
    coldest: Coldest,
    first_tokens: FirstTokens,
}

impl Scaler {
    pub fn new(config: Rc<Config>, seat: Rc<Seat>) -> Self {
        Self { config, seat, clusters: HashMap::new(), due: Moment::default() }
    }

    /// Goes on for another configuration that names the same clusters.
    pub fn reconfigure(&mut self, config: Rc<Config>, seat: Rc<Seat>) {
        if config.scaling.is_none() {
            self.clusters.drain().for_each(|(cluster, _)| clear(&cluster));
        }
        self.config = config;
        self.seat = seat;
    }

    /// Goes on where another leader was.
    pub fn take_over(&mut self) {
        self.clusters.clear();
    }

    pub fn report(&mut self, link: &Link, table: &ReplicaTable, now: Moment) {
        let config = Rc::clone(&self.config);
        let Some(scaling) = config.scaling.as_ref().filter(|_| now >= self.due) else { return };
        self.due = now.plus(INTERVAL);
        for name in config.clusters.iter().map(|cluster| cluster.name.as_str()) {
            if self.seat.speaks_for(name) {
                let cluster = self.clusters.entry(name.to_owned()).or_insert_with(|| {
                    // What the last leader said, or nothing.
                    let said = meters::read(&metrics::RECOMMENDED_REPLICAS, &[name]);
                    let said = u32::try_from(said).ok().filter(|replicas| *replicas > 0);
                    Cluster {
                        recommendation: Recommendation::from(said),
                        coldest: Coldest::default(),
                        first_tokens: FirstTokens::default(),
                    }
                });
                cluster.report(&config, scaling, link, &Members { table, name }, now);
            }
        }
    }

    /// The root ends: what it set is taken back where nobody else sets it any more.
    pub fn end(&mut self) {
        for (cluster, _) in self.clusters.drain() {
            if !Seat::is_named(&cluster) {
                clear(&cluster);
            }
        }
    }
}

/// The replicas of one cluster.
struct Members<'a> {
    table: &'a ReplicaTable,
    name: &'a str,
}

impl<'a> Members<'a> {
    fn all(&self) -> impl Iterator<Item = &'a Replica> {
        self.table.in_cluster(self.name)
    }

    /// Those that get requests.
    fn serving(&self, strikes: &Strikes) -> Vec<&'a Replica> {
        let serves = |replica: &&Replica| {
            replica.health == Health::Healthy && !strikes.of(replica.id).is_suspended()
        };
        self.all().filter(serves).collect()
    }
}

/// Blocks that a replica holds, by its agent's account where it has one.
fn held(link: &Link, replica: ReplicaId) -> u64 {
    let index = link.index();
    index.held_blocks(replica).max(index.observed_blocks(replica)) as u64
}

impl Cluster {
    fn report(
        &mut self,
        config: &Config,
        scaling: &ScalingConfig,
        link: &Link,
        members: &Members<'_>,
        now: Moment,
    ) {
        let (charges, name) = (link.all_charges(now), members.name);
        let serving = members.serving(&link.all_strikes());
        let half_life = config.route.cost.recent_half_life;
        let seen: Vec<Seen> = serving
            .iter()
            .map(|replica| {
                let (charge, speed) = (charges.of(replica.id), link.rates().of(replica.id));
                let load = replica.fresh_load(now, config.route.stale_after);
                let recent = charge.recent(now, half_life);
                Seen {
                    unfinished_tokens: charge.unfinished_tokens as f64,
                    sent_tokens_per_s: recent * std::f64::consts::LN_2 / half_life.as_secs_f64(),
                    prefill_tokens_per_s: speed
                        .prefill_tokens_per_s
                        .unwrap_or(config.route.cost.prefill_tokens_per_s),
                    report: load.map(|load| (load.waiting, load.kv_usage)),
                }
            })
            .collect();
        let late = scaling.first_token.map(|_| self.first_tokens.look(name, now));
        let asked = asked(scaling, &seen, late);
        let staying = members.all().filter(|replica| replica.health != Health::Draining).count();
        let staying = u32::try_from(staying).unwrap_or(u32::MAX);
        if let Some(replicas) = self.recommendation.take(scaling, &asked, staying, now) {
            meters::record(&metrics::RECOMMENDED_REPLICAS, &[name], replicas.into());
        }
        meters::record(&metrics::SCALING_UNHEARD, &[name], asked.missing.into());
        meters::record(&metrics::SCALING_BACKLOG, &[name], (asked.backlog_s * 1e3) as u64);
        for signal in Signal::ALL {
            let labels = [name, signal.as_str()];
            meters::record(&metrics::SCALING_PRESSURE, &labels, asked.percent(signal));
        }
        let drainable: Vec<Drainable> = serving
            .iter()
            .map(|replica| Drainable {
                id: replica.id,
                cached_tokens: meters::read(
                    &metrics::REPLICA_CACHED_TOKENS,
                    &[name, &replica.address],
                ),
                held_blocks: held(link, replica.id),
                in_flight: charges.of(replica.id).requests,
            })
            .collect();
        let order = self.coldest.order(&drainable, now);
        for replica in members.all() {
            let rank = order.iter().position(|id| *id == replica.id).map_or(0, |at| at + 1);
            let labels = [name, replica.address.as_str()];
            meters::record(&metrics::REPLICA_DRAIN_RANK, &labels, rank as u64);
        }
    }
}

/// First tokens of late, as they are counted by all VMs.
#[derive(Default)]
struct FirstTokens {
    /// Late ones and all, when they were last looked at.
    counted: Option<(u64, u64, Moment)>,
    late: f64,
    all: f64,
}

impl FirstTokens {
    fn look(&mut self, cluster: &str, now: Moment) -> (f64, f64) {
        let count = |result| meters::read(&metrics::FIRST_TOKENS, &[cluster, result]);
        let late = count("late");
        let all = late + count("within");
        if let Some((late_before, all_before, at)) = self.counted {
            let fade = (-now.since(at).as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2();
            self.late = self.late * fade + late.saturating_sub(late_before) as f64;
            self.all = self.all * fade + all.saturating_sub(all_before) as f64;
        }
        self.counted = Some((late, all, now));
        (self.late, self.all)
    }
}

fn clear(cluster: &str) {
    OF_CLUSTER.iter().for_each(|gauge| meters::clear(gauge, &[cluster]));
    for signal in Signal::ALL {
        meters::clear(&metrics::SCALING_PRESSURE, &[cluster, signal.as_str()]);
    }
}
