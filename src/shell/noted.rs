//! What an access log can show of a request: `%FILTER_STATE(wasm.warmpath.reason:PLAIN)%` and so on.
//!
//! The decision alone: who, why, of how many tokens, and the request's class. Nothing of a prompt or a tenant is here.

use super::host;
use crate::route::{Decision, Reason};

/// Why it went where it went.
pub fn reason(reason: Reason) {
    host::set_filter_state("warmpath.reason", reason.as_str());
}

/// Where it went. Another replica may answer: that is Envoy's `%UPSTREAM_HOST%`.
pub fn decision(class: &str, decision: Option<&Decision>) {
    host::set_filter_state("warmpath.class", class);
    let Some((decision, chosen)) = decision.and_then(|it| Some((it, it.chosen()?))) else { return };
    host::set_filter_state("warmpath.replica", &chosen.address);
    host::set_filter_state("warmpath.prompt_tokens", &decision.prompt_tokens.to_string());
    host::set_filter_state("warmpath.overlap_tokens", &chosen.overlap_tokens.to_string());
}
