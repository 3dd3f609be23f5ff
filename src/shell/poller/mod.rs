//! The leader's work: who the replicas are and how they do, asked on ticks and published.
//!
//! Every VM has a [`Poller`]; only the one that holds the lease asks. The VM on Envoy's main
//! thread is preferred, since it serves no traffic: a VM that has served some leaves an ended
//! lease to the others for a while.
//!
//! It does not choose replicas, and a replica that fails to answer is not taken for dead: only
//! Envoy's membership and health verdicts count.

mod answers;
mod asking;

use super::calls::Calls;
use super::gauges::{Findings, Gauges};
use super::link::{self, Link, SharedLease};
use super::reports::Reports;
use super::scaling::Scaler;
use super::seat::Seat;
use super::trust::Trust;
use crate::config::{Config, Membership};
use crate::learn::sizing::Sizing;
use crate::replicas::schedule::Schedule;
use crate::replicas::{Member, Moment, ReplicaTable};
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
}
