//! A request on its way to a replica: from the decision to what its response proved.
//!
//! Every step is told to the other VMs at once: the charge, the blocks, the release; the beginning
//! of an answer that is no stream with its end. It reads no body and keeps no phase; when which step
//! is due is [`super::http`]'s part.

use super::kept::Kept;
use super::oracle::Question as Asking;
use super::reading::{Known, until};
use super::root::Shared;
use super::shadow::Shadow;
use super::{ROUTING_HEADER, host, meters};
use crate::classes::Label;
use crate::config::ModelConfig;
use crate::drift::evidence::At;
use crate::drift::ids::first_difference;
use crate::drift::{Kind, Outcome, Shape, Signal, canary};
use crate::feedback::{self, ExactAnswer, Feedback, Usage};
use crate::learn::Answered;
use crate::metrics;
use crate::model::Model;
use crate::replicas::attempts::{Attempts, Seen, VIA_UPSTREAM};
use crate::replicas::{Moment, ReplicaId};
use crate::request::{self, Prompt};
use crate::route::regret::{Loss, Regret, Turnout};
use crate::route::{self, Decision, PromptKnowledge, Question, Reason, Source};
use crate::score::Signals;
use crate::share::log::{Fate, Record};
use crate::tokens::blocks::Chain;
use std::ops::Range;
use std::rc::Rc;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of JSON per token, for a prompt whose tokens are unknown: only how much its replica is
/// charged depends on it.
const BYTES_PER_TOKEN: usize = 4;

/// In longer bodies the name of a session is not looked for: their JSON is read once more for it, in one go.
const MAX_NAMED_BODY_BYTES: usize = 64 << 10;

/// A request whose hold ends.
pub struct Held<'a> {
    /// The cluster that the route chose.
    pub cluster: &'a str,
    /// What its body says, or what stood in the way.
    pub known: Result<Box<Known>, Reason>,
    /// The body's size as far as it is known.
    pub body_bytes: usize,
    /// What it is counted as.
    pub class: Label,
    /// When the body was complete.
    pub began: Moment,
}

/// Why a request is not routed.
pub struct Unrouted {
    pub reason: Reason,
    /// When the client is told to come back, where nobody is to get the request.
    pub retry_after_s: Option<u64>,
}

impl From<Reason> for Unrouted {
    fn from(reason: Reason) -> Self {
        Self { reason, retry_after_s: None }
    }
}

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
    tokens_charged: bool,
    /// Which of the chain's blocks the replica was not believed to hold before this request.
    recorded: Range<usize>,
    _kept: Kept,
    served_elsewhere: bool,
    /// The suspended replica that this request tries out.
    probe: Option<ReplicaId>,
    /// The choice that was only counted.
    shadow: Option<Shadow>,
}

/// What is remembered of a prompt.
struct PromptFacts {
    model: Rc<Model>,
    model_name: String,
    /// What verdicts know the model by.
    identity: u64,
    usage_is_comparable: bool,
    shape: Shape,
    /// Its chain, where the decision does not have it.
    chain: Option<Chain>,
    /// Whether the prediction rests on what the replica was just seen to compute.
    is_proven: bool,
    /// To be asked about once it has been served.
    sample: Option<Asking>,
    is_continued: bool,
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
            Some(prompt) if prompt.chain.is_some() => Kept::within_bounds(&mut prompt.chain),
            _ => Kept::within_bounds(&mut decision.chain),
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
            tokens_charged: true,
            recorded,
            _kept: kept,
            served_elsewhere: false,
            first_token: None,
            probe,
            shadow,
        })
    }

    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Takes in what the response's head tells: who answered, and who did not.
    pub fn responded(&mut self, shared: &mut Shared<'_>, status: u16) {
        let address = host::property(&["upstream", "address"]).unwrap_or_default();
        // Where a replica was asked, Envoy makes no success up.
        let details = match status {
            200..300 => VIA_UPSTREAM.to_owned(),
            _ => host::property(&["response", "code_details"]).unwrap_or_default(),
        };
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

    fn cluster(&self, shared: &Shared<'_>) -> Option<String> {
        shared.fleet.link.table().by_id(self.replica).map(|replica| replica.cluster.clone())
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
        shared.fleet.link.release(self.replica);
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

    /// Releases the prompt's uncached tokens, once.
    pub fn answer_began(&mut self, shared: &mut Shared<'_>, streamed: bool) {
        if !std::mem::take(&mut self.tokens_charged) {
            return;
        }
        let now = host::now();
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

    /// Counts whether the first token came within what is configured, if anything is.
    fn count_promise(&self, shared: &Shared<'_>, now: Moment) {
        let promised = shared.config.scaling.as_ref().and_then(|scaling| scaling.first_token);
        let (Some(promised), Some(cluster)) = (promised, self.cluster(shared)) else { return };
        let result = if now.since(self.began) <= promised { "within" } else { "late" };
        meters::add(&metrics::FIRST_TOKENS, &[&cluster, result], 1);
    }

    /// Releases the request and takes in what its response proved. What there is to log of it, to which the request's id
    /// can only be added when all is over.
    pub fn end(
        mut self,
        shared: &mut Shared<'_>,
        status: Option<u16>,
        feedback: Option<&Feedback>,
    ) -> Option<String> {
        let class = failure_class(status);
        if let Some(class) = class {
            meters::add(&metrics::FAILED_RESPONSES, &[class], 1);
        }
        if self.tokens_charged {
            let charged = self.decision.charged_tokens();
            shared.fleet.link.answer_began(self.replica, charged, host::now());
        }
        let in_flight = shared.fleet.link.in_flight(self.replica);
        shared.fleet.link.release(self.replica);
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

    /// Its prompt has been computed, and so is there.
    fn was_computed(&self, shared: &mut Shared<'_>, now: Moment) {
        let chain = self.decision.chain.as_ref().map(Chain::hashes).unwrap_or_default();
        if let Some(first) = chain.get(self.recorded.start).filter(|_| !self.recorded.is_empty()) {
            shared.fleet.link.computed(self.replica, *first, now);
        }
    }

    /// Takes in what the engine found in its cache, where that can be compared with what was predicted.
    fn correct(&self, shared: &mut Shared<'_>, feedback: &Feedback) {
        let Some(usage) = feedback.usage().filter(|_| shared.config.correction) else { return };
        let prompt = self.prompt.as_ref().filter(|prompt| prompt.usage_is_comparable);
        let (Some(chosen), Some(chain), Some(_)) =
            (self.decision.chosen(), &self.decision.chain, prompt)
        else {
            return;
        };
        let Some(cached) = usage.cached_tokens else { return };
        if self.served_elsewhere || usage.prompt_tokens != self.decision.prompt_tokens {
            return;
        }
        let predicted = chosen.overlap_tokens;
        let link = &mut shared.fleet.link;
        if cached < predicted {
            let blocks = chain.hashes().get(..chosen.held_blocks).unwrap_or_default();
            let computing = link.was_computing(self.replica, blocks, self.sent);
            let result = if computing { "computing" } else { "corrected" };
            meters::add(&metrics::CORRECTIONS, &[result], 1);
            if computing {
                return;
            }
            // What the replica reports is not taken back: its next report says it better.
            if chosen.source == Source::Observed {
                meters::add(&metrics::OBSERVED_CONTRADICTED, &[], 1);
            }
            link.correct(
                self.replica,
                chain.hashes(),
                (cached / chain.block_size().get()) as usize,
            );
        }
        link.compared(self.replica, predicted, cached);
    }

    /// Records how far apart the tokens of a stream were.
    fn record_pace(&self, feedback: &Feedback, now: Moment) {
        let Some((began, _)) = self.first_token.filter(|_| feedback.was_read()) else { return };
        let gaps = answer_tokens(feedback).saturating_sub(1);
        if let Some(gap) = now.since(began).checked_div(gaps) {
            meters::record_us(&metrics::TOKEN_TIME, &[self.class.as_str()], gap);
        }
    }

    /// Learns from how long its answer took. What that came to.
    fn time(
        &self,
        shared: &mut Shared<'_>,
        feedback: &Feedback,
        neighbours: u32,
        now: Moment,
    ) -> &'static str {
        let chosen = self.decision.chosen().filter(|_| self.decision.is_matched);
        let prompt = self.prompt.as_ref().filter(|prompt| prompt.usage_is_comparable);
        let (Some(chosen), Some(_)) = (chosen, prompt) else { return "unknown" };
        if self.is_retried || self.served_elsewhere {
            return "retried";
        }
        let Some((began, neighbours_then)) = self.first_token else { return "whole" };
        if !feedback.was_read() {
            return "cut";
        }
        let usage = feedback.usage();
        let cached = usage.and_then(|usage| usage.cached_tokens);
        let prompt_tokens = f64::from(self.decision.prompt_tokens);
        let told = cached.map(|cached| Signals {
            prompt_tokens,
            cached_tokens: f64::from(cached),
            ..Signals::default()
        });
        let cost = &shared.config.route.cost;
        let told = told.map(|told| told.work(cost));
        let answered = Answered {
            first_token: began.since(self.sent),
            expected_s: chosen.cost.first_token(),
            // What the engine says it computed, where it does.
            work: told.unwrap_or(chosen.work),
            queued: chosen.queued,
            rest: now.since(began),
            answer_tokens: answer_tokens(feedback),
            neighbours: f64::from(neighbours_then + neighbours) / 2.0,
            foreign: self.decision.foreign(),
            loads_adapter: chosen.loads_adapter(),
        };
        shared.fleet.link.answered(self.replica, &answered, now).as_str()
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

    fn learn(&mut self, shared: &mut Shared<'_>, feedback: &Feedback, now: Moment) {
        let Some(prompt) = &self.prompt else { return };
        meters::add(&metrics::RESPONSES, &[carried(feedback)], 1);
        if !prompt.usage_is_comparable {
            return;
        }
        let usage = feedback.usage();
        let answer = feedback.exact_answer().filter(|_| prompt.is_continued);
        let Some(answer) = answer else { return };
        let ids = match answer {
            ExactAnswer::Tokens(ids) => ids.to_vec(),
            ExactAnswer::Text(text) => {
                // The response is over and cannot be held: what does not fit into this callback is not learned.
                let mut more = until(now);
                let Ok(Some(ids)) = prompt.model.answer_ids(text, &mut more) else { return };
                ids
            }
        };
        let cached = feedback::cached_answer_tokens(ids.len(), usage);
        let Some(chain) = &mut self.decision.chain else { return };
        let before = chain.hashes().len();
        chain.extend(ids.get(..cached).unwrap_or_default());
        if chain.hashes().len() > before {
            let record = Record::of(Fate::Held, self.replica, chain.hashes(), before);
            shared.fleet.link.record(record);
            if let Some(shadow) = &self.shadow {
                shadow.learn(shared, chain, before);
            }
        }
    }

    /// Compares what the engine says of the prompt with what was computed here. What there is to log.
    fn check(&self, shared: &mut Shared<'_>, feedback: &Feedback, now: Moment) -> Option<String> {
        let prompt = self.prompt.as_ref().filter(|prompt| prompt.usage_is_comparable)?;
        let model = &prompt.model_name;
        let chain = self.decision.chain.as_ref().or(prompt.chain.as_ref());
        // Media have numbers of their own in the chain.
        let ids = feedback.prompt_ids().zip(chain).filter(|_| !prompt.shape.has_media());
        let ids_differ = ids.map(|(ids, chain)| first_difference(chain, ids).is_some());
        if let Some(differs) = ids_differ {
            let result = if differs { "differs" } else { "equal" };
            meters::add(&metrics::ORACLE, &[model, "response", result], 1);
        }
        let usage = feedback.usage();
        let is_over = usage.and_then(|usage| self.compare(model, usage));
        let kind = prompt.shape.kind?;
        let outcome = |signal, differs| Outcome { model: prompt.identity, kind, signal, differs };
        if let Some(differs) = is_over.filter(|_| prompt.is_proven) {
            shared.fleet.trust.take(outcome(Signal::Prediction, differs), now);
        }
        let count = usage.map(|usage| usage.prompt_tokens);
        let count_differs = count.map(|count| count != self.decision.prompt_tokens);
        if ids_differ.is_none() && count_differs.is_none() {
            return None;
        }
        let differs = ids_differ == Some(true) || count_differs == Some(true);
        let is_first = shared.fleet.trust.take(outcome(Signal::Prompt, differs), now);
        is_first.then(|| {
            let count = count.map_or("unknown".to_owned(), |count| count.to_string());
            format!(
                "model {model:?}: a response differs from what was computed here: prompt_tokens={count}, here {}{}; {}",
                self.decision.prompt_tokens,
                if ids_differ == Some(true) { ", prompt_token_ids differ" } else { "" },
                prompt.shape
            )
        })
    }

    /// Notes what its replica has now certainly computed, and has it asked about.
    fn remember(&mut self, shared: &mut Shared<'_>, feedback: &Feedback, now: Moment) {
        let Some(prompt) = &mut self.prompt else { return };
        if let Some(sample) = prompt.sample.take() {
            shared.fleet.oracle.offer(self.replica, sample);
        }
        let is_complete = feedback.usage().is_some() && prompt.usage_is_comparable;
        let last = self.decision.chain.as_ref().and_then(|chain| chain.hashes().last());
        if let Some(last) = last.filter(|_| is_complete) {
            let at = at(shared, self.replica, now);
            shared.fleet.trust.evidence.note(&at, *last);
        }
    }

    /// Counts what the choice lost, as far as the response tells.
    fn count_regret(&self, shared: &Shared<'_>, feedback: &Feedback) {
        let is_comparable = self.prompt.as_ref().is_some_and(|prompt| prompt.usage_is_comparable);
        let turnout = Turnout {
            cached_tokens: feedback.usage().filter(|_| is_comparable).and_then(|u| u.cached_tokens),
            first_token: self.first_token.map(|(at, _)| at.since(self.sent)),
            is_elsewhere: self.served_elsewhere,
        };
        let regret = self.decision.regret(&shared.config.route, &turnout);
        let reason = match &regret {
            Some(regret) => regret.main().map_or("none", Loss::as_str),
            None if self.decision.is_matched => "untold",
            None => "unknown_prompt",
        };
        meters::add(&metrics::REGRET_REQUESTS, &[reason], 1);
        let Regret { tokens, seconds } = regret.unwrap_or_default();
        for (loss, tokens) in tokens {
            meters::add(&metrics::REGRET_TOKENS, &[loss.as_str()], tokens.into());
        }
        for (loss, seconds) in seconds {
            meters::add(&metrics::REGRET_US, &[loss.as_str()], (seconds * 1e6) as u64);
        }
    }

    /// Counts how the engine's account compares with ours. Whether more was predicted to be cached than was.
    fn compare(&self, model: &str, usage: Usage) -> Option<bool> {
        let is_equal = usage.prompt_tokens == self.decision.prompt_tokens;
        let result = if is_equal { "equal" } else { "differs" };
        meters::add(&metrics::PROMPT_COUNT, &[model, result], 1);
        let cached = usage.cached_tokens?;
        let labels = [model, self.class.as_str()];
        meters::add(&metrics::REPORTED_PROMPT_TOKENS, &labels, usage.prompt_tokens.into());
        meters::add(&metrics::REPORTED_CACHED_TOKENS, &labels, cached.into());
        // What is not matched is not predicted.
        if self.served_elsewhere || self.decision.reason == Reason::PromptDistrusted {
            return None;
        }
        let chosen = self.decision.chosen();
        let (predicted, source) =
            chosen.map_or((0, Source::Routed), |chosen| (chosen.overlap_tokens, chosen.source));
        let (over, under) = (predicted.saturating_sub(cached), cached.saturating_sub(predicted));
        let result = match (over, under) {
            (0, 0) => "equal",
            (0, _) => "under",
            _ => "over",
        };
        meters::add(&metrics::PREDICTION, &[model, result], 1);
        meters::add(&metrics::PREDICTION_SOURCE, &[source.as_str(), result], 1);
        meters::add(&metrics::OVERPREDICTED_TOKENS, &[model], over.into());
        meters::add(&metrics::UNDERPREDICTED_TOKENS, &[model], under.into());
        Some(over > 0)
    }
}

impl PromptFacts {
    /// What must be remembered of a prompt, which is counted by the way.
    fn counted(
        shared: &Shared<'_>,
        known: Known,
        decision: &Decision,
        class: &Label,
        sample_body: Option<Vec<u8>>,
    ) -> Self {
        let model_name =
            shared.config.model_names(known.identity.index()).first().cloned().unwrap_or_default();
        let cached = decision.chosen().map_or(0, |chosen| chosen.overlap_tokens);
        let labels = [model_name.as_str(), class.as_str()];
        meters::add(&metrics::PROMPT_TOKENS, &labels, known.chained.tokens as u64);
        meters::add(&metrics::PREDICTED_CACHED_TOKENS, &labels, cached.into());
        if let Some(unread) = known.chained.unread {
            meters::add(&metrics::PARTIAL_PROMPTS, &[unread.cause.as_str()], 1);
        }
        let Known { prompt, shape, chained, model, identity: served } = known;
        let identity = identity(shared, served.index());
        let Prompt { usage_is_comparable, is_continued, .. } = prompt;
        let usage_is_comparable = usage_is_comparable && chained.unread.is_none();
        let chain = || chained.chains.as_slice().first().cloned();
        let sample = sample_body.zip(shape.kind).zip(chain());
        let sample =
            sample.map(|((body, kind), chain)| Asking { model: identity, kind, body, chain });
        let chain = if decision.reason == Reason::PromptDistrusted { chain() } else { None };
        Self {
            model,
            model_name,
            identity,
            usage_is_comparable,
            shape,
            chain,
            is_proven: false,
            sample,
            is_continued,
        }
    }
}

fn identity(shared: &Shared<'_>, index: usize) -> u64 {
    shared.config.models.get(index).map_or(0, ModelConfig::identity)
}

fn is_trusted(shared: &Shared<'_>, known: &Known) -> bool {
    let is_trusted =
        |kind: Kind| shared.fleet.trust.is_trusted(identity(shared, known.identity.index()), kind);
    known.shape.kind.is_none_or(is_trusted)
}

/// What evidence must know of a replica.
fn at(shared: &Shared<'_>, replica: ReplicaId, now: Moment) -> At {
    let link = &shared.fleet.link;
    let load = link.table().by_id(replica);
    let load = load.and_then(|replica| replica.fresh_load(now, shared.config.route.stale_after));
    let (recorded, capacity) = (link.index().recorded_blocks(replica), link.capacity(replica));
    At { replica, recorded, capacity, load, now }
}

/// Whether a decision's prediction must come true.
fn is_proven(shared: &Shared<'_>, decision: &Decision, now: Moment) -> bool {
    let (Some(chosen), Some(chain)) = (decision.chosen(), &decision.chain) else { return false };
    let last = chosen.held_blocks.checked_sub(1).and_then(|last| chain.hashes().get(last));
    last.is_some_and(|last| shared.fleet.trust.evidence.proves(&at(shared, chosen.id, now), *last))
}

/// The body of a prompt that its replica is to be asked about, if it is this one's turn.
fn sampled(
    shared: &mut Shared<'_>,
    cluster: &str,
    known: &Known,
    body_bytes: usize,
    now: Moment,
) -> Option<Vec<u8>> {
    let kind = known.shape.kind.filter(|_| known.shape.is_known_to_tokenize())?;
    let rules = shared.config.models.get(known.identity.index()).map(|model| &model.rules);
    // It does not know `tool_choice`.
    if kind == Kind::Tools && rules.is_some_and(|rules| rules.exclude_tools_when_tool_choice_none) {
        return None;
    }
    let can_be_asked = shared.config.cluster_named(cluster)?.poll.is_some();
    let is_single = known.prompt.usage_is_comparable && known.chained.unread.is_none();
    if !can_be_asked || !is_single || body_bytes > canary::MAX_SAMPLE_BYTES {
        return None;
    }
    let model = identity(shared, known.identity.index());
    shared.fleet.trust.sample(model, kind, now).then(|| host::request_body(body_bytes)).flatten()
}

/// The decision, and what the second policy would have decided.
fn decide(shared: &Shared<'_>, held: &Held<'_>, now: Moment) -> (Decision, Option<Decision>) {
    let known = &held.known;
    let model_names = known.as_ref().map_or(&[][..], |known| known.identity.names());
    let prompt = match known {
        Ok(known) => {
            let prompt_tokens = known.chained.token_count();
            match is_trusted(shared, known) {
                true => PromptKnowledge::Hashed {
                    prompt_tokens,
                    chains: known.chained.chains.as_slice(),
                },
                // Its length may be a little wrong and still says more than the body's.
                false => PromptKnowledge::Unknown {
                    reason: Reason::PromptDistrusted,
                    estimated_tokens: prompt_tokens,
                },
            }
        }
        Err(reason) => {
            let estimate = held.body_bytes / BYTES_PER_TOKEN;
            let estimated_tokens = u32::try_from(estimate).unwrap_or(u32::MAX);
            PromptKnowledge::Unknown { reason: *reason, estimated_tokens }
        }
    };
    let question = Question {
        cluster: held.cluster,
        model_names,
        prompt,
        session: if prompt.is_matched() { None } else { session(shared, held) },
        adapter: known.as_ref().ok().and_then(|known| known.identity.adapter()),
        answer_limit: known.as_ref().ok().and_then(|known| known.prompt.max_answer_tokens),
        tie_seed: shared.fleet.link.vm().wrapping_add(shared.fleet.streams),
    };
    shared.fleet.link.decide(now, |view| {
        let imagined = shared.config.shadow.as_ref();
        let imagined = imagined.map(|config| route::imagine(config, view, &question));
        (route::decide(&shared.config.route, view, &question), imagined)
    })
}

/// What the name of a request's session hashes to: that of the header, or that of the body.
fn session(shared: &Shared<'_>, held: &Held<'_>) -> Option<u64> {
    let header = shared.config.session_header.as_ref().and_then(|name| host::request_header(name));
    let name = header.filter(|name| !name.is_empty()).or_else(|| {
        let has_body = (1..=MAX_NAMED_BODY_BYTES).contains(&held.body_bytes);
        let body = has_body.then(|| host::request_body(held.body_bytes)).flatten()?;
        request::session(&body).map(String::into_bytes)
    });
    name.map(|name| xxh3_64(&name))
}

/// Records the blocks that the choice will hold, and returns their places in the chain.
fn record_new(shared: &mut Shared<'_>, decision: &Decision) -> Range<usize> {
    let (Some(chosen), Some(chain)) = (decision.chosen(), &decision.chain) else { return 0..0 };
    let new = chosen.held_blocks..chain.hashes().len();
    shared.fleet.link.record(Record::of(Fate::Held, chosen.id, chain.hashes(), new.start));
    new
}

/// How many tokens an answer has, as the engine says, or as it came in pieces.
fn answer_tokens(feedback: &Feedback) -> u32 {
    feedback.usage().and_then(|usage| usage.completion_tokens).unwrap_or(feedback.pieces())
}

/// What a successful response's usage carried.
fn carried(feedback: &Feedback) -> &'static str {
    match feedback.usage() {
        Some(Usage { cached_tokens: Some(_), .. }) => "cached",
        Some(_) => "no_cached",
        None if feedback.was_read() => "none",
        None if feedback.is_readable() => "cut",
        None => "unreadable",
    }
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
