//! Whether this Envoy trusts what it computes, told: outcomes go in, and what they change is logged once.
//!
//! The rules and the protocol are the core's. No text of a client's is logged, and no difference but the first.

use super::host;
use super::link::SharedData;
use crate::config::Config;
use crate::drift::evidence::Evidence;
use crate::drift::{Kind, News, Outcome, Signal, Verdict};
use crate::replicas::Moment;
use crate::share::drift::SharedDrift;
use std::rc::Rc;

/// See the module.
pub struct Trust {
    config: Rc<Config>,
    shared: SharedDrift<SharedData>,
    /// What this VM has just seen replicas compute.
    pub evidence: Evidence,
}

impl Trust {
    pub fn new(config: Rc<Config>, vm: u64) -> Self {
        let shared = SharedDrift::new(SharedData, config.fingerprint(), vm);
        Self { config, shared, evidence: Evidence::default() }
    }

    /// Goes on by another configuration of the same fingerprint.
    pub fn reconfigure(&mut self, config: Rc<Config>) {
        self.config = config;
    }

    pub fn is_trusted(&self, model: u64, kind: Kind) -> bool {
        self.shared.verdicts().is_trusted(model, kind)
    }

    pub fn verdict(&self, model: u64, kind: Kind) -> Option<&Verdict> {
        self.shared.verdicts().of(model, kind)
    }

    /// Shares what waits, and takes in what others found.
    pub fn tick(&mut self, now: Moment) {
        let news = self.shared.apply(&self.config.drift, now);
        self.tell(&news);
    }

    /// Takes in an outcome. True when it is the first difference, which its caller tells in full.
    pub fn take(&mut self, outcome: Outcome, now: Moment) -> bool {
        let news = self.shared.take(&self.config.drift, outcome, now);
        self.tell(&news);
        news.contains(&(outcome, News::FirstDifference))
    }

    /// Whether this VM may have a client's prompt tokenized once more.
    pub fn sample(&mut self, model: u64, kind: Kind, now: Moment) -> bool {
        let drift = &self.config.drift;
        let interval = drift.canary_interval.filter(|_| drift.sample_live);
        interval.is_some_and(|interval| self.shared.sample(model, kind, interval, now))
    }

    fn tell(&self, news: &[(Outcome, News)]) {
        for (Outcome { model, kind, signal, .. }, news) in news {
            let (name, kind, signal) = (self.name(*model), kind.as_str(), signal.as_str());
            match news {
                News::FirstDifference => {}
                News::Distrusted => log::warn!(
                    "model {name:?}: {kind} prompts are not matched any more: {signal}: they seem to differ from the engine's"
                ),
                News::Trusted => {
                    host::log_info(&format!("model {name:?}: {kind} prompts are matched again"))
                }
            }
        }
    }

    /// The name of a model; empty when it is another configuration's.
    pub fn name(&self, model: u64) -> &str {
        let mut models = self.config.models.iter();
        let found = models.find(|config| config.identity() == model);
        found.and_then(|config| config.names.first()).map_or("", String::as_str)
    }

    /// A model has been loaded.
    pub fn loaded(&mut self, model: u64, has_template: bool, now: Moment) {
        let signal = Signal::Template;
        for kind in [Kind::Chat, Kind::Tools, Kind::Responses, Kind::Messages] {
            let is_known =
                self.verdict(model, kind).and_then(|verdict| verdict.distrust) == Some(signal);
            // What has a template was never doubted for it, as a rule.
            if !has_template || is_known {
                self.take(Outcome { model, kind, signal, differs: !has_template }, now);
            }
        }
    }
}
