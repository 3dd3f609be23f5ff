//! What a response's head tells: who answered, who failed, and that another replica than the chosen one served it.
//!
//! How attempts are read from it, and what suspends a replica, are the core's parts. It reads no body.

use super::Routed;
use crate::headers::Headers;
use crate::metrics;
use crate::replicas::attempts::{Attempts, Seen, VIA_UPSTREAM, is_plainly_upstreams};
use crate::share::log::{Fate, Record};
use crate::shell::root::Shared;
use crate::shell::{host, meters};

impl Routed {
    /// Takes in what the response's head tells: who answered, and who did not. Whether the answer is a replica's.
    pub fn responded(&mut self, shared: &mut Shared<'_>, status: u16, headers: &Headers) -> bool {
        let address = host::property(&["upstream", "address"]).unwrap_or_default();
        let details = match is_plainly_upstreams(status, headers) {
            true => VIA_UPSTREAM.to_owned(),
            false => host::property(&["response", "code_details"]).unwrap_or_default(),
        };
        // Where nothing is told, nothing is denied.
        self.is_made_up = !details.is_empty() && details != VIA_UPSTREAM;
        let attempts = host::number_property(&["upstream", "request_attempt_count"]);
        let list: Vec<&str> =
            self.decision.ranked.iter().map(|candidate| candidate.address.as_str()).collect();
        let seen =
            Seen { status, details: &details, attempts: attempts.unwrap_or(0), address: &address };
        let found = Attempts::read(&list, &seen);
        self.judge(shared, &found);
        self.is_retried = !found.failed.is_empty() || attempts.is_some_and(|count| count > 1);
        let has_answered = found.answered.is_some();
        // A probe has told what it can. Its answer may go on for minutes, and the next would wait for it.
        if self.end_probe(shared) {
            shared.fleet.link.publish(host::now());
        }
        if has_answered {
            self.served_by(shared, &address);
        }
        !self.is_made_up
    }

    /// Holds failures against those who failed, and takes back what a success disproves.
    fn judge(&self, shared: &mut Shared<'_>, found: &Attempts<'_>) {
        if found.failed.is_empty() && shared.fleet.link.all_strikes().is_empty() {
            return;
        }
        let Some(cluster) = self.cluster(shared) else { return };
        let of = |shared: &Shared<'_>, address: &str| {
            shared.fleet.link.table().by_address(&cluster, address).map(|replica| replica.id)
        };
        let now = host::now();
        if !found.failed.is_empty() {
            // Others may have told the same just now.
            shared.fleet.link.refresh(now);
        }
        for failure in &found.failed {
            let Some(replica) = of(shared, failure.address) else { continue };
            meters::add(&metrics::STRIKES, &[failure.kind.as_str()], 1);
            let (config, proof) = (&shared.config.passive_health, failure.kind.proof());
            if shared.fleet.link.failed(config, replica, proof, self.sent, now) {
                meters::add(&metrics::SUSPENSIONS, &[], 1);
            }
        }
        let answered = found.answered.filter(|_| found.is_success);
        let answered = answered.and_then(|address| of(shared, address));
        let restored =
            answered.is_some_and(|replica| shared.fleet.link.succeeded(replica, self.sent, now));
        if restored || !found.failed.is_empty() {
            shared.fleet.link.publish(now);
        }
    }

    /// Notes who really served it: charge and blocks move there from the replica that was chosen.
    fn served_by(&mut self, shared: &mut Shared<'_>, address: &str) {
        if address == self.address {
            return;
        }
        let table = shared.fleet.link.table();
        let cluster = table.by_id(self.replica).map(|replica| replica.cluster.as_str());
        let served = cluster.and_then(|cluster| table.by_address(cluster, address));
        let Some(served) = served.map(|replica| replica.id) else { return };
        let (now, charged) = (host::now(), self.decision.charged_tokens());
        shared.fleet.link.answer_began(self.replica, charged, now);
        shared.fleet.link.release(self.replica, now);
        self.end_probe(shared);
        self.take_back(shared);
        shared.fleet.link.charge(served, charged, now);
        if let Some(chain) = &self.decision.chain {
            let overlap = shared.fleet.link.index().overlap_blocks(served, chain.hashes());
            self.recorded = overlap..chain.hashes().len();
            let record = Record::of(Fate::Held, served, chain.hashes(), overlap);
            shared.fleet.link.record(record);
        }
        shared.fleet.link.publish(now);
        self.replica = served;
        address.clone_into(&mut self.address);
        self.served_elsewhere = true;
        meters::add(&metrics::SERVED_ELSEWHERE, &[], 1);
    }
}
