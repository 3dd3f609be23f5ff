//! How fast each replica is, learned from the answers that it streams.
//!
//! Each VM keeps [`Lessons`]: per replica a window of the last answers. What they come to, one
//! [`Learned`] per replica, is published; all VMs merge everybody's into the same [`Rates`], and
//! those are what the cost goes by.
//!
//! | what | from | until it is known | bounds |
//! | --- | --- | --- | --- |
//! | prefill rate, and seconds before it | work computed (tokens that were not cached, and what was queued in front) against the time from sending to the first event with content. One resistant line through the answers of the whole cluster: its slope is the usual rate, its base what an engine takes besides (network, steps). Where all prompts are alike it has no slope: the median of work by time, and no base | the configured rate, no base | [`MIN_RATE`] to [`MAX_RATE`], [`MAX_BASE_S`] |
//! | decode seconds per token and neighbour | mean gap between an answer's tokens, less the time of the prompts that were computed meanwhile (as far as this VM sent them: they have a term of their own, and left in they made it two to three times what it is), against the requests in flight there: a line again, through the shorter gaps. Only where no other gateway is seen | the configured one | [`MAX_DECODE_S`] |
//! | how a replica differs from its cluster, in each of the two | the median of its own answers' times by what the cluster's line says of them | as usual | differences under [`SAME`] are noise |
//!
//! A line for each replica would be told by too few answers: simulated, four equal replicas seemed to differ by three to
//! one, and a quarter more was computed than with rates that are told.
//!
//! A replica's own speed needs [`MIN_SAMPLES`] answers, forgets those older than [`MAX_AGE`], and
//! decays towards the usual with [`HALF_LIFE`]: one that was slow and therefore gets nothing is not
//! slow for ever. It belongs to an incarnation, so a restart begins anew.
//!
//! An answer that comes whole tells nothing here: how its time is shared out between the prompt and
//! the answer cannot be seen. (What it says of cached tokens is compared all the same, by
//! [`sizing`].) It has no clock and shares nothing by itself; that is [`crate::share::learned`]'s.

pub mod line;
pub mod pending;
pub mod sizing;

use crate::replicas::{ByReplica, Moment, ReplicaId, ReplicaTable, of_replica};
use hashbrown::HashMap;
use line::{Line, median};
use sizing::Evidence;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Answers that are remembered of each replica and in each VM: 4 KB. Halved, thirds of it are ten answers and medians
/// jump; doubled, a replica that became slow is believed to be fast for twice as many answers.
pub const WINDOW: usize = 64;

/// Answers, of all VMs together, before an estimate is gone by: the thirds of a line have two points each and more.
/// Halved, one odd answer decides; doubled, a new replica is taken for an average one for longer.
pub const MIN_SAMPLES: u32 = 8;

/// Older answers say nothing of how fast a replica is now.
pub const MAX_AGE: Duration = Duration::from_secs(600);

/// How long after its last answer a replica is half as far from the cluster's median. Halved, one that is slow is tried
/// too often; doubled, one that recovered is avoided for minutes.
pub const HALF_LIFE: Duration = Duration::from_secs(120);

/// Prompt tokens per second: fewer are no engine's, at more nothing would ever be waited for.
pub const MIN_RATE: f64 = 10.0;
/// See [`MIN_RATE`].
pub const MAX_RATE: f64 = 1e7;
/// Seconds before a first token that are not its prompt's: more are an outage, not a property.
pub const MAX_BASE_S: f64 = 10.0;
/// Seconds per token and neighbour: no engine gets slower by more than this with one more sequence.
pub const MAX_DECODE_S: f64 = 0.1;

/// Less work says nothing of a rate by itself: a step of the engine and the network take as long. (On a line it is
/// what shows the base.)
const MIN_WORK: f64 = 256.0;

/// How far apart a line's thirds must be: prompt tokens; requests in flight.
const WORK_SPREAD: f64 = 512.0;
const NEIGHBOUR_SPREAD: f64 = 3.0;

/// The share of gaps that others' prompts have not made longer.
const UNDISTURBED: f64 = 0.25;

/// Answers of one cluster that a line goes through: some tenths of a millisecond. Of more replicas each gives fewer.
const MOST_POINTS: usize = 4096;

/// Replicas whose speeds differ by less, as a logarithm (a quarter), are taken for equal, and only from twice that on for
/// what they seem: the median of some answers' times is not more exact than this, and where equal replicas seem to
/// differ, prompts leave their prefixes for nothing.
pub const SAME: f64 = 0.25;

/// With more requests of others anywhere there are other gateways, and gaps show nothing: nobody knows how many of theirs
/// come to a replica while an answer is on its way, nor what their prompts take there. Learned all the same, a sequence of
/// our own passed for four. (One more than our own may be a request on its way.)
const MOST_FOREIGN: f64 = 1.0;

/// Fewer gaps are the engine's first steps, which are slower.
const MIN_GAPS: u32 = 8;

/// A first token that took longer was not waiting for its prompt.
const LONGEST: Duration = Duration::from_secs(600);

/// What one streamed answer showed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Answered {
    /// From sending to the first event with content.
    pub first_token: Duration,
    /// What it was expected to be.
    pub expected_s: f64,
    /// Work of the prompt's tokens that were not cached, in tokens.
    pub work: f64,
    /// Work that was queued on the replica when it was sent.
    pub queued: f64,
    /// From the first event with content to the answer's end.
    pub rest: Duration,
    /// Tokens of the answer.
    pub answer_tokens: u32,
    /// Requests in flight there meanwhile, this one not counted.
    pub neighbours: f64,
    /// Requests that others had on any of the replicas when it was sent, as far as those report.
    pub foreign: f64,
    /// Whether the replica had to load its adapter first.
    pub loads_adapter: bool,
}

/// What became of an [`Answered`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lesson {
    /// It counts.
    Taken,
    /// No engine behaves like that: not taken.
    Absurd,
    /// It waited for an adapter, which says nothing of how fast prompts are computed: not taken.
    Adapter,
}

impl Lesson {
    /// The value of the metric's `result` label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Absurd => "absurd",
            Self::Adapter => "adapter",
        }
    }
}

/// What one VM has learned of one replica.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Learned {
    /// Prompt tokens per second.
    pub prefill_tokens_per_s: Option<f64>,
    /// Seconds that a first token takes besides.
    pub base_s: f64,
    /// Seconds that one more request in flight adds to each token of an answer.
    pub decode_s_per_token: Option<f64>,
    /// How far first tokens were from where they were expected, in the median.
    pub wait_error_s: f64,
    /// Answers that this comes from.
    pub samples: u32,
    /// When the last of them came.
    pub at: Moment,
    /// How predictions of cached tokens came out, since the beginning.
    pub evidence: Evidence,
}

/// One replica's speed as decisions take it; `None`: as configured.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Speed {
    /// Prompt tokens per second.
    pub prefill_tokens_per_s: Option<f64>,
    /// Seconds that a first token takes besides.
    pub base_s: f64,
    /// Seconds that one more request in flight adds to each token of an answer.
    pub decode_s_per_token: Option<f64>,
    /// How far first tokens were from where they were expected, in the median.
    pub wait_error_s: f64,
    /// Answers that it comes from, over all VMs; 0 for one that is taken for an average one.
    pub samples: u32,
}

#[derive(Debug, Clone, Copy)]
struct Point {
    at: Moment,
    work: f32,
    first_token_s: f32,
    error_s: f32,
    neighbours: f32,
    /// Work of its own prompt.
    prompt: f32,
    rest: Duration,
    /// Work of prompts that were computed while this answer came.
    met: f32,
    /// 0 where there are too few to tell.
    gaps: u32,
}

#[derive(Debug, Default)]
struct Answers {
    points: VecDeque<Point>,
    evidence: Evidence,
    learned: Learned,
    is_new: bool,
}

/// What one VM learns.
#[derive(Debug, Default)]
pub struct Lessons {
    /// In an order of its own: sums of points must not depend on a map's seed.
    by_replica: BTreeMap<ReplicaId, Answers>,
}

impl Lessons {
    /// Takes in an answer.
    pub fn take(&mut self, replica: ReplicaId, answered: &Answered, now: Moment) -> Lesson {
        let Answered { first_token, expected_s, work, queued, .. } = *answered;
        let work = work + queued;
        let seconds = first_token.as_secs_f64();
        let is_sane = first_token > Duration::ZERO && first_token < LONGEST;
        let is_sane = is_sane && work.is_finite() && work >= 0.0 && work / seconds <= MAX_RATE;
        if !is_sane || !expected_s.is_finite() || !answered.neighbours.is_finite() {
            return Lesson::Absurd;
        }
        if answered.loads_adapter {
            return Lesson::Adapter;
        }
        let gaps = answered.answer_tokens.saturating_sub(1);
        let tells = answered.rest < LONGEST && answered.foreign <= MOST_FOREIGN;
        let gaps = if tells { gaps } else { 0 };
        let answers = self.by_replica.entry(replica).or_default();
        if answers.points.len() >= WINDOW {
            answers.points.pop_front();
        }
        let mut point = Point {
            at: now,
            work: work as f32,
            first_token_s: seconds as f32,
            error_s: (seconds - expected_s).abs() as f32,
            neighbours: answered.neighbours as f32,
            prompt: answered.work as f32,
            rest: answered.rest,
            met: 0.0,
            gaps: if gaps < MIN_GAPS { 0 } else { gaps },
        };
        answers.points.iter_mut().for_each(|other| point.meet(other));
        answers.points.push_back(point);
        answers.is_new = true;
        Lesson::Taken
    }

    /// Takes in how a prediction came out.
    pub fn compared(&mut self, replica: ReplicaId, predicted: u32, cached: u32) {
        let answers = self.by_replica.entry(replica).or_default();
        answers.evidence.take(predicted, cached);
        answers.is_new = true;
    }

    /// Forgets how long answers took, as where their work was counted in another way. How predictions came out is as
    /// true as before.
    pub fn forget_speeds(&mut self) {
        for answers in self.by_replica.values_mut() {
            answers.points.clear();
            answers.is_new = true;
        }
    }

    /// Drops replicas that are no more, and brings what was learned of the others up to date. Whether anything changed.
    pub fn settle(&mut self, now: Moment, table: &ReplicaTable) -> bool {
        let before = self.by_replica.len();
        self.by_replica.retain(|replica, _| table.by_id(*replica).is_some());
        let mut changed = self.by_replica.len() != before;
        let mut by_cluster: HashMap<&str, Vec<&mut Answers>> = HashMap::new();
        for (replica, answers) in &mut self.by_replica {
            let all = answers.points.len();
            answers.points.retain(|point| now.since(point.at) < MAX_AGE);
            changed |= std::mem::take(&mut answers.is_new) || answers.points.len() != all;
            let cluster = table.by_id(*replica).map_or("", |replica| replica.cluster.as_str());
            by_cluster.entry(cluster).or_default().push(answers);
        }
        if changed {
            for answers in by_cluster.into_values() {
                let usual = Usual::of(&answers);
                answers.into_iter().for_each(|answers| answers.learned = answers.learned(&usual));
            }
        }
        changed
    }

    /// What was learned, as of the last [`Self::settle`].
    pub fn learned(&self) -> impl ExactSizeIterator<Item = (ReplicaId, Learned)> {
        self.by_replica.iter().map(|(replica, answers)| (*replica, answers.learned))
    }
}

/// What the answers of a whole cluster show.
struct Usual {
    first_token: Option<Line>,
    gap: Option<Line>,
}

impl Usual {
    fn of(answers: &[&mut Answers]) -> Self {
        let each = (MOST_POINTS / answers.len().max(1)).max(1);
        let all = || answers.iter().flat_map(|answers| answers.points.iter().rev().take(each));
        let first_tokens = all().map(Point::first_token).collect();
        let first_token = first_token(first_tokens);
        let s_per_token = first_token.map_or(0.0, |line| line.slope);
        let gaps = all().filter_map(|point| point.gap(s_per_token)).collect();
        Self { first_token, gap: gap(gaps) }
    }
}

/// A first token's time by the work before it.
fn first_token(mut all: Vec<(f64, f64)>) -> Option<Line> {
    let line = Line::through(&mut all, WORK_SPREAD, 0.5);
    let line = line.filter(|line| line.slope > 0.0 && line.base >= 0.0);
    let line = line.or_else(|| {
        let worth = all.iter().filter(|(work, _)| *work >= MIN_WORK);
        Some(Line { base: 0.0, slope: median(worth.map(|(work, seconds)| seconds / work))? })
    })?;
    let slope = line.slope.clamp(1.0 / MAX_RATE, 1.0 / MIN_RATE);
    Some(Line { base: line.base.min(MAX_BASE_S), slope })
}

/// A gap by the neighbours.
fn gap(mut all: Vec<(f64, f64)>) -> Option<Line> {
    let line = Line::through(&mut all, NEIGHBOUR_SPREAD, UNDISTURBED)?;
    // Some engines do not get slower until they are half full.
    Some(Line { slope: line.slope.clamp(0.0, MAX_DECODE_S), ..line })
}

/// How often as long as the line says it takes here.
fn factor(line: &Line, points: impl Iterator<Item = (f64, f64)>) -> Option<f64> {
    let ratios = points.map(|(x, y)| (line.at(x), y)).filter(|(usual, _)| *usual > 0.0);
    median(ratios.map(|(usual, y)| y / usual)).filter(|factor| *factor > 0.0)
}

impl Point {
    fn first_token(&self) -> (f64, f64) {
        (f64::from(self.work), f64::from(self.first_token_s))
    }

    /// The mean gap, without what the prompts took that were computed meanwhile.
    fn gap(&self, s_per_token: f64) -> Option<(f64, f64)> {
        let rest = self.rest.as_secs_f64() - f64::from(self.met) * s_per_token;
        let worth = self.gaps > 0 && rest > 0.0;
        worth.then(|| (f64::from(self.neighbours), rest / f64::from(self.gaps)))
    }

    /// When its answer began: its prompt had been computed then.
    fn began(&self) -> Duration {
        self.at.since(Moment::default()).saturating_sub(self.rest)
    }

    /// Two answers of one replica: whoever was coming while the other began has waited for the other's prompt.
    fn meet(&mut self, other: &mut Self) {
        let (own, others) = (self.began(), other.began());
        let end = |point: &Self| point.at.since(Moment::default());
        if own < others && others <= end(self) {
            self.met += other.prompt;
        }
        if others < own && own <= end(other) {
            other.met += self.prompt;
        }
    }
}

impl Answers {
    fn learned(&self, usual: &Usual) -> Learned {
        let Self { points, evidence, .. } = self;
        let first_token = usual.first_token.and_then(|line| {
            let factor = factor(&line, points.iter().map(Point::first_token))?;
            let rate = 1.0 / (line.slope * factor);
            Some((rate.clamp(MIN_RATE, MAX_RATE), (line.base * factor).min(MAX_BASE_S)))
        });
        let (prefill_tokens_per_s, base_s) = first_token.unzip();
        let decode_s_per_token = usual.gap.and_then(|line| {
            let s_per_token = usual.first_token.map_or(0.0, |line| line.slope);
            let factor = factor(&line, points.iter().filter_map(|p| p.gap(s_per_token)))?;
            Some((line.slope * factor).min(MAX_DECODE_S))
        });
        Learned {
            prefill_tokens_per_s,
            base_s: base_s.unwrap_or(0.0),
            decode_s_per_token,
            wait_error_s: median(points.iter().map(|p| f64::from(p.error_s))).unwrap_or(0.0),
            samples: points.len() as u32,
            at: points.back().map(|point| point.at).unwrap_or_default(),
            evidence: *evidence,
        }
    }
}

/// The speed of every replica.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rates {
    by_replica: ByReplica<Speed>,
}

impl Rates {
    /// What all VMs have learned together. Replicas that nobody has measured are as fast as the median of their cluster.
    pub fn merged(
        all: impl Iterator<Item = (ReplicaId, Learned)>,
        table: &ReplicaTable,
        now: Moment,
    ) -> Self {
        let mut sums: HashMap<ReplicaId, Sums> = HashMap::new();
        for (replica, learned) in all {
            sums.entry(replica).or_default().add(&learned);
        }
        let mut by_cluster: HashMap<&str, Vec<(ReplicaId, Speed, Moment)>> = HashMap::new();
        for replica in table.iter() {
            let sums = sums.get(&replica.id).copied().unwrap_or_default();
            let of_cluster = by_cluster.entry(&replica.cluster).or_default();
            of_cluster.push((replica.id, sums.speed(), sums.at));
        }
        let mut by_replica = ByReplica::default();
        for replicas in by_cluster.values() {
            let measured = || replicas.iter().filter(|(_, speed, _)| speed.samples > 0);
            let rates = measured().filter_map(|(_, speed, _)| speed.prefill_tokens_per_s);
            let decodes = measured().filter_map(|(_, speed, _)| speed.decode_s_per_token);
            let usual = Speed {
                prefill_tokens_per_s: median(rates),
                decode_s_per_token: median(decodes),
                base_s: median(measured().map(|(_, speed, _)| speed.base_s)).unwrap_or(0.0),
                ..Speed::default()
            };
            for (replica, speed, at) in replicas {
                let faded = now.since(*at).as_secs_f64() / HALF_LIFE.as_secs_f64();
                let speed = speed.beyond_noise(&usual).blend(&usual, (-faded).exp2());
                by_replica.insert(*replica, speed);
            }
        }
        Self { by_replica }
    }

    /// One replica's.
    pub fn of(&self, replica: ReplicaId) -> Speed {
        self.find(replica).copied().unwrap_or_default()
    }

    /// One replica's, where anything is known of it.
    #[inline]
    pub fn find(&self, replica: ReplicaId) -> Option<&Speed> {
        of_replica(&self.by_replica, replica)
    }

    /// Puts one.
    pub fn insert(&mut self, replica: ReplicaId, speed: Speed) {
        self.by_replica.insert(replica, speed);
    }
}

/// Several VMs' estimates of one replica, each as much as its answers.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    samples: u32,
    at: Moment,
    rate: Mean,
    base: Mean,
    decode: Mean,
    error: Mean,
}

#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    weight: f64,
    sum: f64,
}

impl Mean {
    fn add(&mut self, value: f64, weight: f64) {
        self.weight += weight;
        self.sum += value * weight;
    }

    fn mean(self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }
}

impl Sums {
    fn add(&mut self, learned: &Learned) {
        let weight = f64::from(learned.samples);
        self.samples = self.samples.saturating_add(learned.samples);
        self.at = self.at.max(learned.at);
        if let Some(rate) = learned.prefill_tokens_per_s {
            // Of seconds per token, since those are what costs are made of.
            self.rate.add(1.0 / rate.clamp(MIN_RATE, MAX_RATE), weight);
            self.base.add(learned.base_s, weight);
        }
        if let Some(decode) = learned.decode_s_per_token {
            self.decode.add(decode, weight);
        }
        self.error.add(learned.wait_error_s, weight);
    }

    fn speed(self) -> Speed {
        if self.samples < MIN_SAMPLES {
            return Speed::default();
        }
        Speed {
            prefill_tokens_per_s: self.rate.mean().map(|seconds| 1.0 / seconds),
            base_s: self.base.mean().unwrap_or(0.0),
            decode_s_per_token: self.decode.mean(),
            wait_error_s: self.error.mean().unwrap_or(0.0),
            samples: self.samples,
        }
    }
}

impl Speed {
    /// Without differences that are too small to be told from noise.
    fn beyond_noise(self, usual: &Self) -> Self {
        let differs = |own: Option<f64>, usual: Option<f64>| match (own, usual) {
            (Some(own), Some(usual)) if own > 0.0 && usual > 0.0 => {
                (((own / usual).ln().abs() - SAME) / SAME).clamp(0.0, 1.0)
            }
            _ => 1.0,
        };
        let prefill = differs(self.prefill_tokens_per_s, usual.prefill_tokens_per_s);
        let decode = differs(self.decode_s_per_token, usual.decode_s_per_token);
        let Self { prefill_tokens_per_s, base_s, .. } = self.blend(usual, prefill);
        let decode_s_per_token = self.blend(usual, decode).decode_s_per_token;
        Self { prefill_tokens_per_s, base_s, decode_s_per_token, ..self }
    }

    /// Between what was measured (`share` of it) and what is usual, in ratios.
    fn blend(self, usual: &Self, share: f64) -> Self {
        let between = |own: Option<f64>, usual: Option<f64>| match (own, usual) {
            (Some(own), Some(usual)) if own > 0.0 && usual > 0.0 => {
                Some((own.ln() * share + usual.ln() * (1.0 - share)).exp())
            }
            (own, usual) => own.or(usual),
        };
        let is_measured = self.samples > 0;
        let base_s = self.base_s * share + usual.base_s * (1.0 - share);
        Self {
            prefill_tokens_per_s: between(self.prefill_tokens_per_s, usual.prefill_tokens_per_s),
            base_s: if is_measured { base_s } else { usual.base_s },
            decode_s_per_token: between(self.decode_s_per_token, usual.decode_s_per_token),
            ..self
        }
    }
}

#[cfg(test)]
mod tests;
