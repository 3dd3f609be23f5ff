//! Who is asked what on a tick, and what came of a call: counted, and said where an operator should know.
//!
//! What an answer holds is [`super::answers`]'s part, and whose turn it is the schedule's.

use super::Poller;
use crate::config::Membership;
use crate::metrics;
use crate::replicas::schedule::{Pace, Question, Wish};
use crate::replicas::{Moment, Replica, clusters};
use crate::shell::calls::Call;
use crate::shell::link::Link;
use crate::shell::{host, meters, reports};
use std::rc::Rc;
use std::time::Duration;

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

impl Poller {
    pub(super) fn ask(&mut self, link: &Link, now: Moment) {
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
                metrics: polled(replica).is_some() && self.reports.needs_metrics(replica.id, now),
                models: polled(replica).is_some(),
                report: asked.and_then(|c| self.reports.interval(c, replica, has_requests, now)),
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
    pub(super) fn names_of(&self, admin: &str) -> Vec<&str> {
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
    pub(super) fn count(&mut self, call: &Call, result: &'static str) {
        let Call::Report(id, _) = call else {
            return meters::add(&metrics::POLLS, &[call.target(), result], 1);
        };
        meters::add(&metrics::REPORTS, &[result], 1);
        let cluster = self.table.by_id(*id).map(|replica| replica.cluster.clone());
        if let (Some(complaint), Some(cluster)) = (reports::complaint(result), cluster) {
            self.complain(&cluster, complaint);
        }
    }

    pub(super) fn answered(&mut self, call: &Call) {
        if let Some((id, question)) = call.question() {
            let pace = self.pace();
            self.schedule.answered(id, question, &pace);
        }
    }

    pub(super) fn complain(&mut self, cluster: &str, problem: &'static str) {
        let now = host::now();
        let due = self.complaints.entry((cluster.to_owned(), problem)).or_insert(now);
        if now >= *due {
            *due = now.plus(COMPLAINT_INTERVAL);
            log::warn!("cluster {cluster:?}: {problem}");
        }
    }
}
