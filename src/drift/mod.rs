//! Whether what is computed here is the engine's prompt: a verdict per model and kind of prompt, from comparisons.
//!
//! A router that renders or tokenizes a little differently from the engine finds nothing, and nothing else looks wrong.
//! So every response that tells something is compared, and where too many differ, prompts of that kind are no longer
//! matched until enough are equal again. One kind may be wrong while the others are right: a template that prints tools
//! in another way says nothing about completions.
//!
//! It compares nothing and keeps no clock: outcomes go in with the time, and the verdict changes or does not. How several
//! VMs share one is [`crate::share::drift`]'s part.

pub mod canary;
pub mod evidence;
pub mod ids;
pub mod rota;
mod shape;

pub use shape::Shape;

use crate::replicas::Moment;
use crate::request::{Api, Input};
use std::time::Duration;

/// When a kind of prompt stops and starts being trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriftConfig {
    /// Responses that must differ, of the last [`Self::window`]; 0 turns the alarm off.
    pub differing: u32,
    /// Responses that are looked at, at most [`Window::LONGEST`].
    pub window: u32,
    /// Responses in a row that must be equal again, at most [`Window::LONGEST`].
    pub recovery: u32,
    /// How long distrust lasts at least; each time that it comes back soon doubles it.
    pub hold: Duration,
    /// How often each model's canaries are sent; none: never.
    pub canary_interval: Option<Duration>,
    /// Whether a client's prompt, now and then, is tokenized once more by the replica that served it.
    pub sample_live: bool,
}

impl Default for DriftConfig {
    fn default() -> Self {
        Self {
            differing: 5,
            window: 20,
            recovery: 20,
            hold: Duration::from_secs(10),
            canary_interval: Some(Duration::from_secs(60)),
            sample_live: true,
        }
    }
}

impl DriftConfig {
    /// How long distrust lasts at least that came `trips` times in a row.
    fn term(&self, trips: u32) -> Duration {
        self.hold.saturating_mul(1 << trips.saturating_sub(1).min(MAX_DOUBLINGS))
    }
}

/// Distrust is held for at most 2 to this times [`DriftConfig::hold`]: by default eleven minutes. One more, and an engine
/// that was mended is believed that much later.
const MAX_DOUBLINGS: u32 = 6;

/// Trusted for this long, a kind's earlier distrust is forgotten. Shorter than the longest hold and it would never be held
/// for that long; much longer, and yesterday's mishap lengthens today's.
const FORGIVEN_AFTER: Duration = Duration::from_secs(15 * 60);

/// Of this many predictions that rest on fresh evidence...
const PREDICTIONS: u32 = 10;

/// ... so many must be over. An engine that evicts early, or is shared with others, is over now and then; one that has no
/// cache, or other tokens, is always.
const OVERPREDICTED: u32 = 8;

/// Of this many comparisons of ids...
const ORACLES: u32 = 10;

/// ... so many must differ. One can be an accident: a date that changed between two renderings, a replica that was another
/// model's for a moment.
const ORACLES_DIFFERING: u32 = 2;

/// Comparisons of ids in a row that must be equal again.
const ORACLES_EQUAL: u32 = 2;

/// What makes two prompts of one model right or wrong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Messages: template and tokenizer.
    Chat,
    /// Messages with tools: what templates differ in most.
    Tools,
    /// Text: the tokenizer alone.
    Text,
    /// `/v1/responses`, which makes messages of its items in a way of its own.
    Responses,
    /// `/v1/messages`, likewise.
    Messages,
    /// What computes no answer (embeddings, scores): text in templates of its own.
    Pooling,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 6] =
        [Self::Chat, Self::Tools, Self::Text, Self::Responses, Self::Messages, Self::Pooling];

    /// The kind of a prompt. `None` for token ids, which nothing here can get wrong.
    pub fn of(api: Api, input: &Input) -> Option<Self> {
        let is_ids = matches!(input, Input::Tokens(_));
        let kind = match api {
            Api::Responses => Self::Responses,
            Api::Messages => Self::Messages,
            Api::Chat | Api::ChatBatch | Api::Completions | Api::Generate | Api::Tokenize => {
                match input {
                    Input::Chat(chat) if chat.tools.is_some() => Self::Tools,
                    Input::Chat(_) => Self::Chat,
                    Input::Text { .. } | Input::Tokens(_) => Self::Text,
                }
            }
            Api::Embeddings
            | Api::Embed
            | Api::Pooling
            | Api::Classify
            | Api::Score
            | Api::Rerank => Self::Pooling,
        };
        (!is_ids).then_some(kind)
    }

    /// Whether a body of this kind is one that `/tokenize` takes, too.
    pub fn is_tokenized(self) -> bool {
        matches!(self, Self::Chat | Self::Tools | Self::Text)
    }

    /// The value of the metrics' `kind` label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Tools => "tools",
            Self::Text => "text",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Pooling => "pooling",
        }
    }
}

/// What was compared, and so why a kind is not trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Signal {
    /// A response's `prompt_tokens`, or its `prompt_token_ids`, with what was computed here.
    Prompt,
    /// The ids that a replica's `/tokenize` made of a prompt with those computed here.
    Oracle,
    /// A response's `cached_tokens` with a prediction that rests on fresh evidence; differs: it was over.
    Prediction,
    /// Whether the model has a chat template; differs: it has none.
    Template,
}

impl Signal {
    /// All signals.
    pub const ALL: [Self; 4] = [Self::Prompt, Self::Oracle, Self::Prediction, Self::Template];

    /// What it compares, for a log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prompt => "prompt_tokens",
            Self::Oracle => "tokenize",
            Self::Prediction => "cached_tokens",
            Self::Template => "no_chat_template",
        }
    }
}

/// One comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// [`crate::config::ModelConfig::identity`]
    pub model: u64,
    /// The kind of its prompt.
    pub kind: Kind,
    /// What was compared.
    pub signal: Signal,
    /// Whether it differs.
    pub differs: bool,
}

/// What an outcome changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// The first difference since the kind was trusted.
    FirstDifference,
    /// The kind is not trusted any more.
    Distrusted,
    /// It is again.
    Trusted,
}

/// The latest outcomes of one signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Window {
    /// A bit each, the latest lowest; 1: differs.
    pub bits: u64,
    /// How many there are.
    pub len: u32,
}

impl Window {
    /// Most outcomes that are kept.
    pub const LONGEST: u32 = u64::BITS;

    fn push(&mut self, differs: bool) {
        self.bits = self.bits << 1 | u64::from(differs);
        self.len = self.len.saturating_add(1).min(Self::LONGEST);
    }

    /// How many of the last `count` differ.
    fn differing(self, count: u32) -> u32 {
        let unused = Self::LONGEST - count.clamp(1, Self::LONGEST);
        (self.bits << unused).count_ones()
    }

    /// Whether there are `count`, and all of the last `count` are equal.
    fn is_equal_for(self, count: u32) -> bool {
        self.len >= count && self.differing(count) == 0
    }
}

/// What is known of one kind of one model's prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// [`Outcome::model`]
    pub model: u64,
    /// [`Outcome::kind`]
    pub kind: Kind,
    /// By [`Signal::Prompt`], since the verdict last changed.
    pub prompts: Window,
    /// By [`Signal::Oracle`].
    pub oracles: Window,
    /// By [`Signal::Prediction`].
    pub predictions: Window,
    /// Why it is not trusted, if it is not.
    pub distrust: Option<Signal>,
    /// When that last changed.
    pub since: Moment,
    /// How many times in a row it was distrusted.
    pub trips: u32,
    /// Whether a difference has been told since it is trusted.
    pub told: bool,
    /// When a client's prompt was last chosen to be tokenized once more.
    pub sampled_at: Moment,
    /// When there was last an outcome.
    pub touched: Moment,
}

impl Verdict {
    /// Nothing is known.
    pub fn new(model: u64, kind: Kind) -> Self {
        let (none, never) = (Window::default(), Moment::default());
        Self {
            model,
            kind,
            prompts: none,
            oracles: none,
            predictions: none,
            distrust: None,
            since: never,
            trips: 0,
            told: false,
            sampled_at: never,
            touched: never,
        }
    }

    fn take(&mut self, config: &DriftConfig, outcome: Outcome, now: Moment) -> Option<News> {
        self.touched = now;
        match outcome.signal {
            Signal::Prompt => self.prompts.push(outcome.differs),
            Signal::Oracle => self.oracles.push(outcome.differs),
            Signal::Prediction => self.predictions.push(outcome.differs),
            Signal::Template => {}
        }
        match self.distrust {
            None => {
                if let Some(signal) = self.trips_by(config, outcome) {
                    let forgiven = now.since(self.since) >= FORGIVEN_AFTER;
                    self.trips = if forgiven { 1 } else { self.trips.saturating_add(1) };
                    self.change(Some(signal), now);
                    return Some(News::Distrusted);
                }
                // A prediction that was over is no difference of prompts, as a rule.
                let is_first = outcome.differs && outcome.signal != Signal::Prediction;
                (is_first && !std::mem::replace(&mut self.told, true))
                    .then_some(News::FirstDifference)
            }
            Some(signal) if self.recovers(config, signal, outcome, now) => {
                self.change(None, now);
                Some(News::Trusted)
            }
            Some(_) => None,
        }
    }

    /// What makes it distrusted now.
    fn trips_by(&self, config: &DriftConfig, outcome: Outcome) -> Option<Signal> {
        let trips = match outcome.signal {
            _ if config.differing == 0 => false,
            Signal::Prompt => self.prompts.differing(config.window) >= config.differing,
            Signal::Oracle => self.oracles.differing(ORACLES) >= ORACLES_DIFFERING,
            Signal::Prediction => self.predictions.differing(PREDICTIONS) >= OVERPREDICTED,
            Signal::Template => outcome.differs,
        };
        trips.then_some(outcome.signal)
    }

    /// Whether what was wrong has been right for long enough. Predictions are not made while there is no trust, so theirs
    /// is a matter of time.
    fn recovers(
        &self,
        config: &DriftConfig,
        signal: Signal,
        outcome: Outcome,
        now: Moment,
    ) -> bool {
        if signal == Signal::Template {
            return outcome.signal == signal && !outcome.differs;
        }
        let is_mended = match signal {
            Signal::Prompt => self.prompts.is_equal_for(config.recovery),
            Signal::Oracle => self.oracles.is_equal_for(ORACLES_EQUAL),
            Signal::Prediction | Signal::Template => true,
        };
        let rest_is_equal = self.prompts.differing(config.window) == 0
            && self.oracles.differing(ORACLES_EQUAL) == 0;
        is_mended && rest_is_equal && now.since(self.since) >= config.term(self.trips)
    }

    /// What was seen under the old verdict must not decide about the new one.
    fn change(&mut self, distrust: Option<Signal>, now: Moment) {
        let Self { model, kind, trips, sampled_at, .. } = *self;
        let (since, touched) = (now, now);
        *self = Self {
            distrust,
            since,
            trips,
            sampled_at,
            touched,
            // The trip tells it; after a recovery the next difference is news.
            told: distrust.is_some(),
            ..Self::new(model, kind)
        };
    }
}

/// Verdicts that are kept: the models of several configurations. More, and those that were silent for longest go.
pub const MAX_VERDICTS: usize = 128;

/// Every verdict. What is not there is trusted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Verdicts(Vec<Verdict>);

impl Verdicts {
    /// Verdicts as they were read.
    pub fn new(mut verdicts: Vec<Verdict>) -> Self {
        verdicts.truncate(MAX_VERDICTS);
        Self(verdicts)
    }

    /// All of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Verdict> {
        self.0.iter()
    }

    /// One of them.
    pub fn of(&self, model: u64, kind: Kind) -> Option<&Verdict> {
        self.0.iter().find(|verdict| verdict.model == model && verdict.kind == kind)
    }

    /// Whether prompts of this kind may be matched.
    pub fn is_trusted(&self, model: u64, kind: Kind) -> bool {
        self.of(model, kind).is_none_or(|verdict| verdict.distrust.is_none())
    }

    /// Takes in an outcome.
    pub fn take(&mut self, config: &DriftConfig, outcome: Outcome, now: Moment) -> Option<News> {
        self.verdict(outcome.model, outcome.kind, now)?.take(config, outcome, now)
    }

    /// Whether a client's prompt may be tokenized once more now; then not again before `interval` is over.
    pub fn sample(&mut self, model: u64, kind: Kind, interval: Duration, now: Moment) -> bool {
        if !self.is_sample_due(model, kind, interval, now) {
            return false;
        }
        let verdict = self.verdict(model, kind, now);
        verdict.map(|verdict| verdict.sampled_at = now).is_some()
    }

    /// Whether [`Self::sample`] would say so.
    pub fn is_sample_due(&self, model: u64, kind: Kind, interval: Duration, now: Moment) -> bool {
        let Some(verdict) = self.of(model, kind) else { return true };
        // What has differed is looked at again at once.
        let latest_differs =
            verdict.oracles.bits & 1 == 1 || verdict.distrust == Some(Signal::Oracle);
        let interval = if latest_differs { interval.min(HURRY) } else { interval };
        verdict.sampled_at == Moment::default() || now.since(verdict.sampled_at) >= interval
    }

    fn verdict(&mut self, model: u64, kind: Kind, now: Moment) -> Option<&mut Verdict> {
        let found = self.0.iter().position(|known| known.model == model && known.kind == kind);
        let place = match found {
            Some(place) => place,
            None => {
                let new = Verdict { touched: now, ..Verdict::new(model, kind) };
                if self.0.len() < MAX_VERDICTS {
                    self.0.push(new);
                    self.0.len() - 1
                } else {
                    let places = 0..self.0.len();
                    let oldest =
                        places.min_by_key(|place| self.0.get(*place).map(|v| v.touched))?;
                    *self.0.get_mut(oldest)? = new;
                    oldest
                }
            }
        };
        self.0.get_mut(place)
    }
}

/// How soon a replica is asked again where its ids differed.
pub const HURRY: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
