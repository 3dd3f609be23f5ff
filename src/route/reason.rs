//! Why a request went where it went: one [`Reason`] for every request, and its name.
//!
//! The reasons are named here and given elsewhere: by [`super::decide`], and by whatever stood in
//! the way before it was called.

use crate::model::PromptError;
use crate::request::RequestError;

/// Why a request went where it went. Every request has exactly one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// To a replica that holds part of its prefix.
    Prefix,
    /// Nobody holds any of its prefix: to the least costly.
    Cold,
    /// Somebody holds part of it, but waiting there costs more than computing it elsewhere; or another policy than
    /// [`super::Policy::Warmpath`] went elsewhere.
    PrefixBusy,
    /// Under one block, so nothing can be cached: to the least costly.
    ShortPrompt,
    /// By load: prompts of this kind seem to differ from the engine's, and are not matched until they do not.
    PromptDistrusted,
    /// By load: the model's tokenizer is not loaded yet in this VM.
    TokenizerLoading,
    /// By load: the model's tokenizer could not be fetched or read.
    TokenizerUnavailable,
    /// By load: no configured model has this name.
    UnknownModel,
    /// By load: the body is not JSON.
    InvalidJson,
    /// By load: the body is JSON but holds no prompt that can be read.
    NoPrompt,
    /// By load: the prompt has parts whose tokens cannot be known here.
    UnsupportedPrompt,
    /// By load: the prompt goes on from one that only the engine has (`previous_response_id`, `conversation`, `prompt`).
    StoredPrompt,
    /// By load: the chat template refused the messages, or would have worked too long on them.
    TemplateError,
    /// By load: the tokenizer refused the text.
    TokenizerError,
    /// By load: the prompt's turn did not come within `max_prompt_ms`, or it took longer to read.
    PromptTimeout,
    /// By load: reading the prompt would have taken more processor time than `max_prompt_cpu_ms`, or did.
    PromptCpu,
    /// By load: the body is longer than `max_body_bytes`, or, in chunks, than what of it may be held.
    BodyTooLarge,
    /// By load: the body is compressed.
    ContentEncoding,
    /// By load: the request ended without a body.
    NoBody,
    /// To Envoy's own policy: the path, method or content type carries no prompt, or it is an upgrade.
    NotInference,
    /// To Envoy's own policy: the path is one where no prompt is computed (tokenizing, rendering, counting).
    NoPrefill,
    /// To Envoy's own policy: the route's cluster is not configured here.
    UnknownCluster,
    /// To Envoy's own policy: no replica of the cluster is known yet.
    NoReplicas,
    /// To Envoy's own policy: every known replica is unhealthy or draining.
    NoHealthyReplica,
    /// To Envoy's own policy: no replica serves the model.
    ModelNotServed,
    /// Nowhere: even the least cost is over `max_cost_s`; answered with 429.
    Overloaded,
    /// To Envoy's own policy: a call to the host failed.
    HostError,
    /// Nowhere: the client left, or Envoy answered, before the request could go on.
    ClientLeft,
}

impl Reason {
    /// All reasons, in the order of their declaration.
    pub const ALL: [Self; 28] = [
        Self::Prefix,
        Self::Cold,
        Self::PrefixBusy,
        Self::ShortPrompt,
        Self::PromptDistrusted,
        Self::TokenizerLoading,
        Self::TokenizerUnavailable,
        Self::UnknownModel,
        Self::InvalidJson,
        Self::NoPrompt,
        Self::UnsupportedPrompt,
        Self::StoredPrompt,
        Self::TemplateError,
        Self::TokenizerError,
        Self::PromptTimeout,
        Self::PromptCpu,
        Self::BodyTooLarge,
        Self::ContentEncoding,
        Self::NoBody,
        Self::NotInference,
        Self::NoPrefill,
        Self::UnknownCluster,
        Self::NoReplicas,
        Self::NoHealthyReplica,
        Self::ModelNotServed,
        Self::Overloaded,
        Self::HostError,
        Self::ClientLeft,
    ];

    /// The value of the metric's `reason` label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Cold => "cold",
            Self::PrefixBusy => "prefix_busy",
            Self::ShortPrompt => "short_prompt",
            Self::PromptDistrusted => "prompt_distrusted",
            Self::TokenizerLoading => "tokenizer_loading",
            Self::TokenizerUnavailable => "tokenizer_unavailable",
            Self::UnknownModel => "unknown_model",
            Self::InvalidJson => "invalid_json",
            Self::NoPrompt => "no_prompt",
            Self::UnsupportedPrompt => "unsupported_prompt",
            Self::StoredPrompt => "stored_prompt",
            Self::TemplateError => "template_error",
            Self::TokenizerError => "tokenizer_error",
            Self::PromptTimeout => "prompt_timeout",
            Self::PromptCpu => "prompt_cpu",
            Self::BodyTooLarge => "body_too_large",
            Self::ContentEncoding => "content_encoding",
            Self::NoBody => "no_body",
            Self::NotInference => "not_inference",
            Self::NoPrefill => "no_prefill",
            Self::UnknownCluster => "unknown_cluster",
            Self::NoReplicas => "no_replicas",
            Self::NoHealthyReplica => "no_healthy_replica",
            Self::ModelNotServed => "model_not_served",
            Self::Overloaded => "overloaded",
            Self::HostError => "host_error",
            Self::ClientLeft => "client_left",
        }
    }
}

impl From<&RequestError> for Reason {
    fn from(error: &RequestError) -> Self {
        match error {
            RequestError::Json | RequestError::NotAnObject => Self::InvalidJson,
            RequestError::NoPrompt | RequestError::Field(_) => Self::NoPrompt,
            RequestError::Stored => Self::StoredPrompt,
            RequestError::Unsupported(_) | RequestError::Media | RequestError::TooManyValues => {
                Self::UnsupportedPrompt
            }
        }
    }
}

impl From<&PromptError> for Reason {
    fn from(error: &PromptError) -> Self {
        match error {
            PromptError::Template(_) => Self::TemplateError,
            PromptError::Tokenizer(_) => Self::TokenizerError,
            PromptError::Truncation | PromptError::Partial => Self::UnsupportedPrompt,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_reason_has_a_name_of_its_own() {
        let names: BTreeSet<&str> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
    }
}
