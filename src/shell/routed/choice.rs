//! From what is known of a request to the decision, and to that of the second policy.
//!
//! It puts the question and answers none of it: that is [`crate::route`]'s part. It sets no header, charges nothing and
//! records nothing.

use super::prompt::identity;
use crate::classes::Label;
use crate::drift::Kind;
use crate::replicas::Moment;
use crate::request;
use crate::route::{self, Decision, PromptKnowledge, Question, Reason};
use crate::shell::host;
use crate::shell::reading::Known;
use crate::shell::root::Shared;
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

fn is_trusted(shared: &Shared<'_>, known: &Known) -> bool {
    let is_trusted =
        |kind: Kind| shared.fleet.trust.is_trusted(identity(shared, known.identity.index()), kind);
    known.shape.kind.is_none_or(is_trusted)
}

/// The decision, and what the second policy would have decided.
pub(super) fn decide(
    shared: &Shared<'_>,
    held: &Held<'_>,
    now: Moment,
) -> (Decision, Option<Decision>) {
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
