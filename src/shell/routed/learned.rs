//! What a response teaches: what its replica holds, and how fast and how large it is.
//!
//! It counts what it learned and nothing else. Whether an engine's account is to be trusted is [`super::account`]'s part.

use super::Routed;
use super::account::carried;
use super::prompt::at;
use crate::feedback::{self, ExactAnswer, Feedback};
use crate::learn::Answered;
use crate::metrics;
use crate::replicas::Moment;
use crate::route::Source;
use crate::score::Signals;
use crate::share::log::{Fate, Record};
use crate::shell::meters;
use crate::shell::reading::until;
use crate::shell::root::Shared;
use crate::tokens::blocks::Chain;

impl Routed {
    /// Its prompt has been computed, and so is there.
    pub(super) fn was_computed(&self, shared: &mut Shared<'_>, now: Moment) {
        let chain = self.decision.chain.as_ref().map(Chain::hashes).unwrap_or_default();
        if let Some(first) = chain.get(self.recorded.start).filter(|_| !self.recorded.is_empty()) {
            shared.fleet.link.computed(self.replica, *first, now);
        }
    }

    /// Takes in what the engine found in its cache, where that can be compared with what was predicted.
    pub(super) fn correct(&self, shared: &mut Shared<'_>, feedback: &Feedback) {
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

    /// Learns from how long its answer took. What that came to.
    pub(super) fn time(
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

    pub(super) fn learn(&mut self, shared: &mut Shared<'_>, feedback: &Feedback, now: Moment) {
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

    /// Notes what its replica has now certainly computed, and has it asked about.
    pub(super) fn remember(&mut self, shared: &mut Shared<'_>, feedback: &Feedback, now: Moment) {
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
}

/// How many tokens an answer has, as the engine says, or as it came in pieces.
pub(super) fn answer_tokens(feedback: &Feedback) -> u32 {
    feedback.usage().and_then(|usage| usage.completion_tokens).unwrap_or(feedback.pieces())
}
