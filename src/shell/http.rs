//! One request and its response: what each callback holds, releases and counts.
//!
//! It holds no body beyond the configured limit and no response at all. What is read, weighed or
//! learned is the core's part.

use super::root::Shared;
use super::{EXPLAIN_HEADER, ROUTING_HEADER, host, meters};
use crate::config::ExplainConfig;
use crate::feedback::{self, Feedback, Usage};
use crate::metrics;
use crate::model::Model;
use crate::replicas::{Moment, ReplicaId};
use crate::request::{self, Api, Prompt};
use crate::route::{self, Decision, PromptKnowledge, Question, Reason};
use crate::share::log::{Fate, Record};
use crate::tokens::blocks::{BlockHash, Chain, ChainSeed};
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;
use std::cell::RefCell;
use std::rc::Rc;

/// Bytes of JSON per token, for a prompt whose tokens are unknown: only how much its replica is
/// charged depends on it.
const BYTES_PER_TOKEN: usize = 4;

/// A request that is on its way to a replica.
struct Routed {
    replica: ReplicaId,
    address: String,
    decision: Decision,
    /// Where the prompt's tokens are known.
    prompt: Option<PromptFacts>,
    began: Moment,
    tokens_charged: bool,
    /// Blocks that the replica was not believed to hold before this request.
    recorded: Vec<BlockHash>,
    served_elsewhere: bool,
}

/// What is remembered of a prompt.
struct PromptFacts {
    model: Rc<Model>,
    model_name: String,
    usage_is_comparable: bool,
}

enum Phase {
    /// Nothing known yet, or not ours.
    Idle,
    /// The body is being held.
    Holding { api: Api, cluster: String, held: usize },
    /// The request has gone on.
    Sent { api: Api, routed: Box<Routed> },
}

/// See the module.
pub struct Stream {
    shared: Option<Rc<RefCell<Shared>>>,
    phase: Phase,
    explain: Option<String>,
    wants_explain: bool,
    status: Option<u16>,
    feedback: Option<Feedback>,
}

impl Stream {
    pub fn new(shared: Option<Rc<RefCell<Shared>>>) -> Self {
        Self {
            shared,
            phase: Phase::Idle,
            explain: None,
            wants_explain: false,
            status: None,
            feedback: None,
        }
    }

    /// Calls `act` with the shared state. A state that is in use cannot be: callbacks do not
    /// nest. Should they ever, the call is skipped rather than trapping.
    fn with<T>(&self, act: impl FnOnce(&mut Shared) -> T) -> Option<T> {
        let shared = self.shared.as_ref()?;
        match shared.try_borrow_mut() {
            Ok(mut shared) => Some(act(&mut shared)),
            Err(_) => {
                meters::add(&metrics::HOST_ERRORS, &[], 1);
                None
            }
        }
    }

    fn take_explain_header(&mut self) {
        let Some(Some(explain)) = self.with(|shared| shared.config.explain.clone()) else { return };
        let ExplainConfig { request_header, secret } = explain;
        if let Some(value) = host::request_header(&request_header) {
            self.wants_explain = value == secret.as_bytes();
            host::remove_request_header(&request_header);
        }
    }

    /// What the headers say: a body to hold, or why not.
    fn read_headers(&self, end_of_stream: bool) -> Result<(Api, String), (Option<Api>, Reason)> {
        let text =
            |name| host::request_header(name).and_then(|value| String::from_utf8(value).ok());
        let api = text(":path").as_deref().and_then(Api::of_path);
        let json = text("content-type").is_none_or(|kind| {
            kind.trim_start().to_ascii_lowercase().starts_with("application/json")
        });
        let post = text(":method").as_deref() == Some("POST");
        let Some(api) = api.filter(|_| post && json) else {
            return Err((None, Reason::NotInference));
        };
        let cluster = host::property(&["xds", "cluster_name"]);
        let known = self.with(|shared| {
            cluster.filter(|cluster| shared.config.cluster_named(cluster).is_some())
        });
        let Some(Some(cluster)) = known else { return Err((None, Reason::UnknownCluster)) };
        if end_of_stream {
            return Err((Some(api), Reason::NoBody));
        }
        let encoding = text("content-encoding").unwrap_or_default();
        if !matches!(encoding.as_str(), "" | "identity") {
            return Err((Some(api), Reason::ContentEncoding));
        }
        Ok((api, cluster))
    }

    fn unrouted(&mut self, reason: Reason) {
        meters::add(&metrics::REQUESTS, &[reason.as_str()], 1);
        self.phase = Phase::Idle;
    }

    /// Ends the hold with the whole body, or with what stands in its way.
    fn decide(&mut self, body: Result<&[u8], Reason>, body_bytes: usize) {
        let Phase::Holding { api, cluster, .. } = std::mem::replace(&mut self.phase, Phase::Idle)
        else {
            return;
        };
        let began = host::now();
        let routed = self.with(|shared| {
            let known = body.and_then(|body| read_prompt(shared, api, body));
            route(shared, &cluster, known, body_bytes, began)
        });
        let took = host::now().since(began).as_micros();
        meters::record(&metrics::DECISION, &[], u64::try_from(took).unwrap_or(u64::MAX));
        match routed.unwrap_or(Err(Reason::HostError)) {
            Err(reason) => self.unrouted(reason),
            Ok(routed) => {
                meters::add(&metrics::REQUESTS, &[routed.decision.reason.as_str()], 1);
                if self.wants_explain {
                    self.explain = Some(routed.decision.explain());
                }
                self.phase = Phase::Sent { api, routed: Box::new(routed) };
            }
        }
    }

    /// The held body, read once: its size so far is what the last callback said.
    fn decide_with_body(&mut self, size: usize) {
        let body = host::request_body(size);
        self.decide(body.as_deref().ok_or(Reason::HostError), size);
    }

    fn response_began(&mut self) {
        let Phase::Sent { api, routed } = &mut self.phase else { return };
        let address = host::property(&["upstream", "address"]);
        if let Some(address) = address.filter(|address| *address != routed.address) {
            let moved = self.shared.as_ref().and_then(|shared| {
                let mut shared = shared.try_borrow_mut().ok()?;
                move_to(&mut shared, routed, &address)
            });
            if moved.is_some() {
                meters::add(&metrics::SERVED_ELSEWHERE, &[], 1);
            }
        }
        if self.status == Some(200) {
            let header =
                |name| host::response_header(name).and_then(|value| String::from_utf8(value).ok());
            let (kind, encoding) = (header("content-type"), header("content-encoding"));
            let feedback = Feedback::new(*api, kind.as_deref(), encoding.as_deref());
            if !feedback.is_stream() {
                // The answer is complete, or its beginning cannot be seen.
                self.answer_began(false);
            }
            self.feedback = Some(feedback);
        }
    }

    fn answer_began(&mut self, streamed: bool) {
        let Phase::Sent { routed, .. } = &mut self.phase else { return };
        if !std::mem::take(&mut routed.tokens_charged) {
            return;
        }
        let (replica, uncached) = (routed.replica, routed.decision.uncached_tokens());
        let now = host::now();
        if streamed {
            let took = now.since(routed.began).as_millis();
            meters::record(&metrics::TTFT, &[], u64::try_from(took).unwrap_or(u64::MAX));
        }
        self.with(|shared| {
            shared.link.answer_began(replica, uncached);
            shared.link.publish(now);
        });
    }

    /// Accounts for the request once, at its end.
    fn end(&mut self) {
        // Envoy's own answer (too large, too slow) ends a response while the body is still held.
        if matches!(self.phase, Phase::Holding { .. }) {
            return;
        }
        let Phase::Sent { mut routed, .. } = std::mem::replace(&mut self.phase, Phase::Idle) else {
            return;
        };
        let class = match self.status {
            Some(200) => None,
            Some(300..400) => Some("3xx"),
            Some(400..500) => Some("4xx"),
            Some(500..) => Some("5xx"),
            Some(_) => Some("other"),
            None => Some("none"),
        };
        if let Some(class) = class {
            meters::add(&metrics::FAILED_RESPONSES, &[class], 1);
        }
        let feedback = self.feedback.take();
        self.with(|shared| {
            if routed.tokens_charged {
                shared.link.answer_began(routed.replica, routed.decision.uncached_tokens());
            }
            shared.link.release(routed.replica);
            // An engine that answers with an error has not computed the prompt. One whose client
            // left before any answer may have, and keeps what it has.
            if class.is_some() && self.status.is_some() {
                take_back(shared, &mut routed);
            }
            if let Some(feedback) = feedback {
                learn(shared, &mut routed, &feedback);
            }
            shared.link.publish(host::now());
        });
    }
}

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, _num_headers: usize, end_of_stream: bool) -> Action {
        host::remove_request_header(ROUTING_HEADER);
        self.take_explain_header();
        match self.read_headers(end_of_stream) {
            Ok((api, cluster)) => {
                self.phase = Phase::Holding { api, cluster, held: 0 };
                let limit = self.with(|shared| shared.config.max_body_bytes).unwrap_or(0);
                let length = host::request_header("content-length")
                    .and_then(|value| String::from_utf8(value).ok()?.parse::<usize>().ok());
                if let Some(length) = length.filter(|length| *length > limit) {
                    self.decide(Err(Reason::BodyTooLarge), length);
                    return Action::Continue;
                }
                Action::Pause
            }
            Err((Some(api), reason)) => {
                let cluster = host::property(&["xds", "cluster_name"]).unwrap_or_default();
                self.phase = Phase::Holding { api, cluster, held: 0 };
                self.decide(Err(reason), 0);
                Action::Continue
            }
            Err((None, reason)) => {
                self.unrouted(reason);
                Action::Continue
            }
        }
    }

    fn on_http_request_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
        let Phase::Holding { held, .. } = &mut self.phase else { return Action::Continue };
        *held = body_size;
        let limit = self.with(|shared| shared.config.max_body_bytes).unwrap_or(0);
        if body_size > limit {
            self.decide(Err(Reason::BodyTooLarge), body_size);
        } else if end_of_stream {
            self.decide_with_body(body_size);
        } else {
            return Action::Pause;
        }
        Action::Continue
    }

    fn on_http_request_trailers(&mut self, _num_trailers: usize) -> Action {
        if let Phase::Holding { held, .. } = &self.phase {
            self.decide_with_body(*held);
        }
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _num_headers: usize, end_of_stream: bool) -> Action {
        self.status = host::response_header(":status")
            .and_then(|value| String::from_utf8(value).ok()?.parse().ok());
        self.response_began();
        if let Some(explain) = self.explain.take() {
            host::set_response_header(EXPLAIN_HEADER, &explain);
        }
        if end_of_stream {
            self.end();
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
        if let Some(feedback) = self.feedback.as_mut().filter(|feedback| feedback.is_readable()) {
            let chunk = host::response_body(body_size).unwrap_or_default();
            feedback.push(&chunk);
            if end_of_stream {
                feedback.finish();
            }
            if feedback.answer_began() {
                self.answer_began(true);
            }
        }
        if end_of_stream {
            self.end();
        }
        Action::Continue
    }

    fn on_log(&mut self) {
        if matches!(self.phase, Phase::Holding { .. }) {
            // The client left, or Envoy answered, before the body was complete.
            self.unrouted(Reason::ClientLeft);
        }
        self.end();
    }
}

/// What is known of a body's prompt.
struct Known {
    prompt: Prompt,
    tokens: Vec<u32>,
    model: Rc<Model>,
    index: usize,
}

fn read_prompt(shared: &Shared, api: Api, body: &[u8]) -> Result<Known, Reason> {
    let prompt = request::parse(api, body).map_err(|error| Reason::from(&error))?;
    let index = shared.config.model_named(prompt.model.as_deref()).ok_or(Reason::UnknownModel)?;
    let model = shared.models.model(index)?;
    let local = host::wall_seconds().saturating_add_signed(shared.config.engine_utc_offset_s);
    let tokens = model.token_ids(&prompt, local).map_err(|error| Reason::from(&error))?;
    Ok(Known { prompt, tokens, model, index })
}

/// Decides, sets the header, charges the choice and tells the other VMs. An error leaves the
/// choice to Envoy.
fn route(
    shared: &mut Shared,
    cluster: &str,
    known: Result<Known, Reason>,
    body_bytes: usize,
    began: Moment,
) -> Result<Routed, Reason> {
    shared.has_traffic = true;
    shared.streams = shared.streams.wrapping_add(1);
    let now = host::now();
    shared.link.refresh(now);
    let config = Rc::clone(&shared.config);
    let estimated_tokens = u32::try_from(body_bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX);
    let names = known.as_ref().ok().and_then(|known| config.models.get(known.index));
    let names = names.map(|model| model.names.as_slice()).unwrap_or_default();
    let prompt = match &known {
        Ok(known) => {
            let own_name = names.first().map_or("", String::as_str);
            let seed = ChainSeed::new(own_name, known.prompt.cache_salt.as_deref());
            PromptKnowledge::Tokens { tokens: &known.tokens, seed }
        }
        Err(reason) => PromptKnowledge::Unknown { reason: *reason, estimated_tokens },
    };
    let question = Question {
        cluster,
        model_names: names,
        prompt,
        answer_limit: known.as_ref().ok().and_then(|known| known.prompt.max_answer_tokens),
        tie_seed: shared.link.vm() ^ shared.streams,
    };
    let decision = shared.link.decide(now, |view| route::decide(&config.route, view, &question));
    let Some(chosen) = decision.chosen() else { return Err(decision.reason) };
    if !host::set_request_header(ROUTING_HEADER, &decision.header()) {
        return Err(Reason::HostError);
    }
    let (replica, address) = (chosen.id, chosen.address.clone());
    let mut recorded = Vec::new();
    if let Some((replica, parent, blocks)) = decision.new_blocks() {
        recorded = blocks.to_vec();
        let blocks = blocks.to_vec();
        shared.link.record(&Record { fate: Fate::Held, replica, parent, blocks });
    }
    shared.link.charge(replica, decision.uncached_tokens(), now);
    shared.link.publish(now);
    let prompt = known.ok().map(|known| {
        let model_name = names.first().cloned().unwrap_or_default();
        let cached = chosen.overlap_tokens.into();
        meters::add(&metrics::PROMPT_TOKENS, &[&model_name], decision.prompt_tokens.into());
        meters::add(&metrics::PREDICTED_CACHED_TOKENS, &[&model_name], cached);
        let usage_is_comparable = known.prompt.usage_is_comparable;
        PromptFacts { model: known.model, model_name, usage_is_comparable }
    });
    Ok(Routed {
        replica,
        address,
        decision,
        prompt,
        began,
        tokens_charged: true,
        recorded,
        served_elsewhere: false,
    })
}

/// Moves a request's charge and blocks to the replica that really served it.
fn move_to(shared: &mut Shared, routed: &mut Routed, address: &str) -> Option<()> {
    let cluster = shared.link.table().by_id(routed.replica)?.cluster.clone();
    let served = shared.link.table().by_address(&cluster, address)?.id;
    let uncached = routed.decision.uncached_tokens();
    shared.link.answer_began(routed.replica, uncached);
    shared.link.release(routed.replica);
    take_back(shared, routed);
    let now = host::now();
    shared.link.charge(served, uncached, now);
    if let Some(chain) = &routed.decision.chain {
        let held = shared.link.index().overlap_blocks(served, chain.hashes());
        routed.recorded = chain.hashes().iter().skip(held).copied().collect();
        let blocks = chain.hashes().to_vec();
        shared.link.record(&Record { fate: Fate::Held, replica: served, parent: None, blocks });
    }
    shared.link.publish(now);
    routed.replica = served;
    address.clone_into(&mut routed.address);
    routed.served_elsewhere = true;
    Some(())
}

/// Takes back what was recorded of a request that its replica did not compute.
fn take_back(shared: &mut Shared, routed: &mut Routed) {
    let (replica, blocks) = (routed.replica, std::mem::take(&mut routed.recorded));
    if !blocks.is_empty() {
        shared.link.record(&Record { fate: Fate::Forgotten, replica, parent: None, blocks });
    }
}

/// Takes in what a complete response proved.
fn learn(shared: &mut Shared, routed: &mut Routed, feedback: &Feedback) {
    let usage = feedback.usage();
    let Some(prompt) = &routed.prompt else { return };
    let carried = match usage {
        Some(Usage { cached_tokens: Some(_), .. }) => "cached",
        Some(_) => "no_cached",
        None if feedback.was_read() => "none",
        None if feedback.is_readable() => "cut",
        None => "unreadable",
    };
    meters::add(&metrics::RESPONSES, &[carried], 1);
    if !prompt.usage_is_comparable {
        return;
    }
    if let Some(usage) = usage {
        compare(&prompt.model_name, routed, usage);
    }
    let Some(answer) = feedback.exact_answer() else { return };
    let Ok(ids) = prompt.model.answer_ids(answer) else { return };
    let cached = feedback::cached_answer_tokens(ids.len(), usage);
    let Some(chain) = &mut routed.decision.chain else { return };
    if let Some((parent, blocks)) = extended(chain, ids.get(..cached).unwrap_or_default()) {
        let replica = routed.replica;
        shared.link.record(&Record { fate: Fate::Held, replica, parent, blocks });
    }
}

/// The blocks that the answer completes, behind the prompt's.
fn extended(chain: &mut Chain, answer: &[u32]) -> Option<(Option<BlockHash>, Vec<BlockHash>)> {
    let before = chain.hashes().len();
    chain.extend(answer);
    let (old, new) = chain.hashes().split_at_checked(before)?;
    (!new.is_empty()).then(|| (old.last().copied(), new.to_vec()))
}

/// Counts how the engine's account compares with ours.
fn compare(model: &str, routed: &Routed, usage: Usage) {
    let counted = routed.decision.prompt_tokens;
    let result = if usage.prompt_tokens == counted { "equal" } else { "differs" };
    meters::add(&metrics::PROMPT_COUNT, &[model, result], 1);
    let Some(cached) = usage.cached_tokens else { return };
    meters::add(&metrics::REPORTED_PROMPT_TOKENS, &[model], usage.prompt_tokens.into());
    meters::add(&metrics::REPORTED_CACHED_TOKENS, &[model], cached.into());
    if routed.served_elsewhere {
        return;
    }
    let predicted = routed.decision.chosen().map_or(0, |chosen| chosen.overlap_tokens);
    let (over, under) = (predicted.saturating_sub(cached), cached.saturating_sub(predicted));
    let result = match (over, under) {
        (0, 0) => "equal",
        (0, _) => "under",
        _ => "over",
    };
    meters::add(&metrics::PREDICTION, &[model, result], 1);
    meters::add(&metrics::OVERPREDICTED_TOKENS, &[model], over.into());
    meters::add(&metrics::UNDERPREDICTED_TOKENS, &[model], under.into());
}
