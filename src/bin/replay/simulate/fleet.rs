//! What requests are played against: replicas, gateways, what fails.
//!
//! A gateway has worker threads, and requests come over connections, each of which belongs to one thread, drawn at
//! random, as Envoy's do. A session keeps its connection, unless each request is to open one. A thread sees what its
//! gateway has in flight. Policies whose threads share what they know have one router per gateway, the others one per
//! thread; Warmpath's threads read each other's logs at each decision, so one router is the truth for it. Gateways
//! share nothing: each knows of the others' requests by the replicas' reports alone, which it asks for itself.

use super::fault::{Fault, What};
use super::policy::{Policy, Setting};
use super::replica::{Replica, at_speed};
use super::run::Simulation;
use crate::stats::Sample;
use crate::trace::Trace;
use std::time::Duration;
use warmpath::mock::engine::EngineConfig;
use warmpath::route::RouteConfig;

/// See the module.
#[derive(Debug, Clone)]
pub struct FleetConfig {
    /// How many replicas, those included that join later.
    pub replicas: usize,
    /// What each is.
    pub engine: EngineConfig,
    /// How fast each is, as a multiple of that; those that are not named are as fast.
    pub speeds: Vec<f64>,
    /// Warmpath's configuration.
    pub route: RouteConfig,
    /// Whether it learns how fast replicas are.
    pub learn_rates: bool,
    /// Whether it takes in what answers say of cached tokens.
    pub correction: bool,
    /// Time between a replica's reports.
    pub report_interval: Duration,
    /// From a report's being true to its being known.
    pub report_delay: Duration,
    /// How many gateways.
    pub gateways: usize,
    /// Worker threads of each.
    pub threads: usize,
    /// Whether each request opens a connection, rather than each session.
    pub reconnects: bool,
    /// Whether replicas say in their reports what they have cached.
    pub agents: bool,
    /// Whether responses say how many tokens were cached.
    pub usage: bool,
    /// What goes wrong, in any order.
    pub faults: Vec<Fault>,
}

impl FleetConfig {
    /// Plays a trace to its end. Samples are in the order in which requests were first sent.
    ///
    /// # Errors
    /// When a request cannot be placed or does not fit an engine, or a fault names no replica.
    pub fn play(&self, trace: &Trace, policy: Policy, seed: u64) -> Result<Vec<Sample>, String> {
        let missing = |fault: &&Fault| fault.what.replica().is_some_and(|n| n >= self.replicas);
        if let Some(fault) = self.faults.iter().find(missing) {
            return Err(format!("there is no such replica: {fault:?}"));
        }
        let per_gateway = if policy.is_shared_by_threads() { 1 } else { self.threads.max(1) };
        let router = |number: usize| {
            let seed = seed.wrapping_add((number as u64) << 32);
            policy.router(&Setting { fleet: self, trace, seed })
        };
        let routers = (0..self.gateways.max(1) * per_gateway).map(router).collect();
        Simulation::new(self, trace, policy, routers, seed).run()
    }

    /// The replicas, each as fast as it is, and telling what becomes of their blocks where the policy has that.
    pub fn engines(&self, policy: Policy) -> Vec<Replica> {
        let speed = |n| self.speeds.get(n).copied().unwrap_or(1.0);
        let replica =
            |n| Replica::new(at_speed(&self.engine, speed(n)), policy.has_events(self.agents));
        (0..self.replicas).map(replica).collect()
    }

    /// Whether a replica is there from the start.
    pub fn begins_with(&self, number: usize) -> bool {
        let joins =
            |fault: &Fault| matches!(fault.what, What::Join { replica } if replica == number);
        !self.faults.iter().any(joins)
    }
}
