//! A request on its way to a replica: from the decision to what its response proved.
//!
//! Every step is told to the other VMs at once: the charge, the blocks, the release; the beginning
//! of an answer that is no stream with its end. It reads no body and keeps no phase; when which step
//! is due is [`super::http`]'s part.

mod account;
mod answered;
mod choice;
mod learned;
mod prompt;

pub use choice::{Held, Unrouted};

use super::kept::keep;
use super::root::Shared;
use super::shadow::Shadow;
use super::{host, meters};
use crate::classes::Label;
use crate::feedback::Feedback;
use crate::kept::Kept;
use crate::metrics;
use crate::replicas::{Moment, ReplicaId};
use crate::route::{Decision, ROUTING_HEADER, Reason};
use crate::share::log::{Fate, Record};
use crate::tokens::blocks::Chain;
use choice::decide;
use prompt::{PromptFacts, is_proven, sampled};
use std::ops::Range;

/// See the module.
pub struct Routed {
    replica: ReplicaId,
    address: String,
    decision: Decision,
    class: Label,
    /// Where the prompt's tokens are known.
    prompt: Option<PromptFacts>,
    began: Moment,
    /// When it was decided, which is long after it began where its prompt had to wait to be read.
    sent: Moment,
    /// When its answer began, and how many other requests the replica had then. Of a stream only.
    first_token: Option<(Moment, u32)>,
    is_retried: bool,
    /// When its answer began; until then its tokens are charged.
    answered: Option<Moment>,
    /// Which of the chain's blocks the replica was not believed to hold before this request.
    recorded: Range<usize>,
    _kept: Kept,
    served_elsewhere: bool,
    /// Whether the answer is Envoy's own, or another filter's.
    is_made_up: bool,
    /// The suspended replica that this request tries out.
    probe: Option<ReplicaId>,
    /// The choice that was only counted.
    shadow: Option<Shadow>,
}

impl Routed {
    /// Decides, sets the header, charges the choice and records its blocks. An error leaves the
    /// choice to Envoy, unless it says when to come back.
    pub fn new(shared: &mut Shared<'_>, held: Held<'_>) -> Result<Self, Unrouted> {
        shared.fleet.has_traffic = true;
        shared.fleet.streams = shared.fleet.streams.wrapping_add(1);
        let now = host::now();
        shared.fleet.link.refresh(now);
        let (mut decision, imagined) = decide(shared, &held, now);
        let Decision { reason, retry_after_s, .. } = decision;
        let Some(chosen) = decision.chosen() else {
            return Err(Unrouted { reason, retry_after_s });
        };
        if !host::set_request_header(ROUTING_HEADER, &decision.header()) {
            return Err(Reason::HostError.into());
        }
        let (replica, address) = (chosen.id, chosen.address.clone());
        let (spared, labels) = (chosen.overlap_tokens, [held.cluster, address.as_str()]);
        meters::add(&metrics::REPLICA_CACHED_TOKENS, &labels, spared.into());
        let recorded = record_new(shared, &decision);
        shared.fleet.link.charge(replica, decision.charged_tokens(), now);
        let probe = shared.fleet.link.probe_began(replica, now).then_some(replica);
        let shadow = Shadow::began(shared, &decision, imagined, now);
        shared.fleet.link.publish(now);
        let proven = is_proven(shared, &decision, now);
        let body_bytes = held.body_bytes;
        let mut prompt = held.known.ok().map(|known| {
            let sampled = sampled(shared, held.cluster, &known, body_bytes, now);
            PromptFacts {
                is_proven: proven,
                ..PromptFacts::counted(shared, *known, &decision, &held.class, sampled)
            }
        });
        let kept = match &mut prompt {
            Some(prompt) if prompt.chain.is_some() => keep(&mut prompt.chain),
            _ => keep(&mut decision.chain),
        };
        Ok(Self {
            replica,
            address,
            decision,
            class: held.class,
            prompt,
            began: held.began,
            sent: now,
            is_retried: false,
            answered: None,
            recorded,
            _kept: kept,
            served_elsewhere: false,
            is_made_up: false,
            first_token: None,
            probe,
            shadow,
        })
    }

    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    fn cluster(&self, shared: &Shared<'_>) -> Option<String> {
        shared.fleet.link.table().by_id(self.replica).map(|replica| replica.cluster.clone())
    }

    /// Releases the prompt's uncached tokens, once.
    pub fn answer_began(&mut self, shared: &mut Shared<'_>, streamed: bool) {
        if self.answered.is_some() {
            return;
        }
        let now = host::now();
        self.answered = Some(now);
        shared.fleet.link.answer_began(self.replica, self.decision.charged_tokens(), now);
        if let Some(shadow) = &mut self.shadow {
            shadow.answer_began(shared);
        }
        // Of an answer that comes whole the end comes at once and tells this, too; should it not, the next tick does.
        if streamed {
            meters::record_ms(&metrics::TTFT, &[self.class.as_str()], now.since(self.began));
            self.count_promise(shared, now);
            let in_flight = shared.fleet.link.in_flight(self.replica);
            self.first_token = Some((now, in_flight.saturating_sub(1)));
            self.was_computed(shared, now);
            shared.fleet.link.publish(now);
        }
    }

    /// Releases the request and takes in what its response proved. What there is to log of it, to which the request's id
    /// can only be added when all is over.
    pub fn end(
        mut self,
        shared: &mut Shared<'_>,
        status: Option<u16>,
        feedback: Option<&Feedback>,
    ) -> Option<String> {
        let class = failure_class(status).or(self.is_made_up.then_some("other"));
        if let Some(class) = class {
            meters::add(&metrics::FAILED_RESPONSES, &[class], 1);
        }
        let answered = self.answered.unwrap_or_else(|| {
            let (now, charged) = (host::now(), self.decision.charged_tokens());
            shared.fleet.link.answer_began(self.replica, charged, now);
            now
        });
        let in_flight = shared.fleet.link.in_flight(self.replica);
        shared.fleet.link.release(self.replica, answered);
        if let Some(shadow) = &mut self.shadow {
            shadow.ended(shared);
        }
        self.end_probe(shared);
        // An engine that answers with an error has not computed the prompt. One whose client left
        // before any answer may have, and keeps what it has.
        if class.is_some() && status.is_some() {
            self.take_back(shared);
            if let (Some(shadow), Some(chain)) = (&self.shadow, &self.decision.chain) {
                shadow.take_back(shared, chain);
            }
        }
        let (now, mut notice) = (host::now(), None);
        if self.first_token.is_none() {
            self.was_computed(shared, now);
        }
        if let Some(feedback) = feedback {
            notice = self.check(shared, feedback, now);
            if class.is_none() {
                self.correct(shared, feedback);
            }
            self.learn(shared, feedback, now);
            if class.is_none() {
                self.count_regret(shared, feedback);
                self.remember(shared, feedback, now);
                self.record_pace(feedback, now);
                let result = self.time(shared, feedback, in_flight.saturating_sub(1), now);
                meters::add(&metrics::RATE_SAMPLES, &[result], 1);
            }
        }
        shared.fleet.link.publish(now);
        notice
    }

    /// Whether it was a probe until now.
    fn end_probe(&mut self, shared: &mut Shared<'_>) -> bool {
        let probe = self.probe.take();
        if let Some(replica) = probe {
            shared.fleet.link.probe_ended(replica);
        }
        probe.is_some()
    }

    /// Takes back what was recorded of a request that its replica did not compute.
    fn take_back(&mut self, shared: &mut Shared<'_>) {
        let (replica, recorded) = (self.replica, std::mem::take(&mut self.recorded));
        let hashes = self.decision.chain.as_ref().map(Chain::hashes).unwrap_or_default();
        if !recorded.is_empty() {
            let record = Record::of(Fate::Forgotten, replica, hashes, recorded.start);
            shared.fleet.link.record(record);
        }
    }
}

/// Records the blocks that the choice will hold, and returns their places in the chain.
fn record_new(shared: &mut Shared<'_>, decision: &Decision) -> Range<usize> {
    let (Some(chosen), Some(chain)) = (decision.chosen(), &decision.chain) else { return 0..0 };
    let new = chosen.held_blocks..chain.hashes().len();
    shared.fleet.link.record(Record::of(Fate::Held, chosen.id, chain.hashes(), new.start));
    new
}

fn failure_class(status: Option<u16>) -> Option<&'static str> {
    match status {
        Some(200) => None,
        Some(300..400) => Some("3xx"),
        Some(400..500) => Some("4xx"),
        Some(500..) => Some("5xx"),
        Some(_) => Some("other"),
        None => Some("none"),
    }
}
