//! How a response's account compares with what was predicted, and how soon its tokens came: what is counted of it.
//!
//! A comparison is told to the verdicts on its model; here it changes no charge and no block.

use super::Routed;
use super::learned::answer_tokens;
use crate::drift::ids::first_difference;
use crate::drift::{Outcome, Signal};
use crate::feedback::{Feedback, Usage};
use crate::metrics;
use crate::replicas::Moment;
use crate::route::regret::{Loss, Regret, Turnout};
use crate::route::{Reason, Source};
use crate::shell::meters;
use crate::shell::root::Shared;

impl Routed {
    /// Counts whether the first token came within what is configured, if anything is.
    pub(super) fn count_promise(&self, shared: &Shared<'_>, now: Moment) {
        let promised = shared.config.scaling.as_ref().and_then(|scaling| scaling.first_token);
        let (Some(promised), Some(cluster)) = (promised, self.cluster(shared)) else { return };
        let result = if now.since(self.began) <= promised { "within" } else { "late" };
        meters::add(&metrics::FIRST_TOKENS, &[&cluster, result], 1);
    }

    /// Records how far apart the tokens of a stream were.
    pub(super) fn record_pace(&self, feedback: &Feedback, now: Moment) {
        let Some((began, _)) = self.first_token.filter(|_| feedback.was_read()) else { return };
        let gaps = answer_tokens(feedback).saturating_sub(1);
        if let Some(gap) = now.since(began).checked_div(gaps) {
            meters::record_us(&metrics::TOKEN_TIME, &[self.class.as_str()], gap);
        }
    }

    /// Compares what the engine says of the prompt with what was computed here. What there is to log.
    pub(super) fn check(
        &self,
        shared: &mut Shared<'_>,
        feedback: &Feedback,
        now: Moment,
    ) -> Option<String> {
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

    /// Counts what the choice lost, as far as the response tells.
    pub(super) fn count_regret(&self, shared: &Shared<'_>, feedback: &Feedback) {
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

/// What a successful response's usage carried.
pub(super) fn carried(feedback: &Feedback) -> &'static str {
    match feedback.usage() {
        Some(Usage { cached_tokens: Some(_), .. }) => "cached",
        Some(_) => "no_cached",
        None if feedback.was_read() => "none",
        None if feedback.is_readable() => "cut",
        None => "unreadable",
    }
}
