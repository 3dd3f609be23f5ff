//! What is remembered of a prompt while it is in flight, and counted of it as it is sent.
//!
//! It reads no prompt and compares none: what a response says of one is [`super::account`]'s part.

use crate::classes::Label;
use crate::config::ModelConfig;
use crate::drift::evidence::At;
use crate::drift::{Kind, Shape, canary};
use crate::metrics;
use crate::model::Model;
use crate::replicas::{Moment, ReplicaId};
use crate::request::Prompt;
use crate::route::{Decision, Reason};
use crate::shell::oracle::Question as Asking;
use crate::shell::reading::Known;
use crate::shell::root::Shared;
use crate::shell::{host, meters};
use crate::tokens::blocks::Chain;
use std::rc::Rc;

/// What is remembered of a prompt.
pub(super) struct PromptFacts {
    pub(super) model: Rc<Model>,
    pub(super) model_name: String,
    /// What verdicts know the model by.
    pub(super) identity: u64,
    pub(super) usage_is_comparable: bool,
    pub(super) shape: Shape,
    /// Its chain, where the decision does not have it.
    pub(super) chain: Option<Chain>,
    /// Whether the prediction rests on what the replica was just seen to compute.
    pub(super) is_proven: bool,
    /// To be asked about once it has been served.
    pub(super) sample: Option<Asking>,
    pub(super) is_continued: bool,
}

impl PromptFacts {
    /// What must be remembered of a prompt, which is counted by the way.
    pub(super) fn counted(
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

pub(super) fn identity(shared: &Shared<'_>, index: usize) -> u64 {
    shared.config.models.get(index).map_or(0, ModelConfig::identity)
}

/// What evidence must know of a replica.
pub(super) fn at(shared: &Shared<'_>, replica: ReplicaId, now: Moment) -> At {
    let link = &shared.fleet.link;
    let load = link.table().by_id(replica);
    let load = load.and_then(|replica| replica.fresh_load(now, shared.config.route.stale_after));
    let (recorded, capacity) = (link.index().recorded_blocks(replica), link.capacity(replica));
    At { replica, recorded, capacity, load, now }
}

/// Whether a decision's prediction must come true.
pub(super) fn is_proven(shared: &Shared<'_>, decision: &Decision, now: Moment) -> bool {
    let (Some(chosen), Some(chain)) = (decision.chosen(), &decision.chain) else { return false };
    let last = chosen.held_blocks.checked_sub(1).and_then(|last| chain.hashes().get(last));
    last.is_some_and(|last| shared.fleet.trust.evidence.proves(&at(shared, chosen.id, now), *last))
}

/// The body of a prompt that its replica is to be asked about, if it is this one's turn.
pub(super) fn sampled(
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
