//! How many replicas the load of a cluster asks for, and whose end would cost least.
//!
//! Each signal is a sum over replicas of what there is against what one is to have, so it says by itself how many are
//! needed; the signal that asks for most decides. Who has not reported counts as idle where replicas would be added and as
//! loaded just right where one would be taken away, so what is missing never decides. `Window`s make it hysteresis: up
//! when the least that was asked for over some seconds is more, down when the most over some minutes is less.
//!
//! It starts and stops nothing, and knows no cluster but the one whose replicas it is given: the number is a gauge, and an
//! autoscaler's to act on.

mod coldest;
mod window;

use crate::replicas::Moment;
pub use coldest::{Coldest, Drainable};
use std::time::Duration;
use window::Window;

/// What a replica is to have, and between which bounds their number is.
#[derive(Debug, Clone, PartialEq)]
pub struct ScalingConfig {
    /// Fewest replicas.
    pub min_replicas: u32,
    /// Most replicas.
    pub max_replicas: u32,
    /// Share of its time in which a replica computes prompts.
    pub prefill_share: f64,
    /// Seconds of prompts that wait on a replica to be computed.
    pub backlog_s: f64,
    /// Requests that a replica has queued.
    pub waiting: f64,
    /// Share of a replica's KV blocks that running requests hold.
    pub kv_usage: f64,
    /// What the 99th percentile of first tokens is to be under; none: not looked at.
    pub first_token: Option<Duration>,
    /// So long more must be needed until it is said.
    pub up_after: Duration,
    /// So long fewer must be enough until it is said.
    pub down_after: Duration,
}

impl Default for ScalingConfig {
    fn default() -> Self {
        Self {
            min_replicas: 1,
            max_replicas: 64,
            prefill_share: 0.7,
            backlog_s: 1.0,
            waiting: 2.0,
            kv_usage: 0.8,
            first_token: None,
            up_after: Duration::from_secs(15),
            down_after: Duration::from_secs(300),
        }
    }
}

/// A replica that gets requests, as it is seen now.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Seen {
    /// Work, in tokens, of prompts whose answer has not begun.
    pub unfinished_tokens: f64,
    /// Such work that it is sent in a second.
    pub sent_tokens_per_s: f64,
    /// Prompt tokens that it computes in a second.
    pub prefill_tokens_per_s: f64,
    /// Its report, if it is fresh: requests that it has queued, and its share of KV blocks held, if it says so.
    pub report: Option<(u32, Option<f64>)>,
}

/// What a cluster's load is measured by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Time spent on computing prompts.
    Prefill,
    /// Prompts that wait to be computed.
    Backlog,
    /// Requests queued.
    Queue,
    /// KV blocks held by running requests.
    Kv,
    /// First tokens that come late.
    FirstToken,
}

impl Signal {
    /// All signals, in the order of [`Asked::loads`].
    pub const ALL: [Self; 5] =
        [Self::Prefill, Self::Backlog, Self::Queue, Self::Kv, Self::FirstToken];

    /// The value of the metric's `kind` label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Backlog => "backlog",
            Self::Queue => "queue",
            Self::Kv => "kv",
            Self::FirstToken => "first_token",
        }
    }
}

/// As far from what a replica is to have, as many replicas as there are are enough. Halved, a fleet of ten grows and
/// shrinks by one for nothing; doubled, one runs a fifth over its targets for good.
const TOLERANCE: f64 = 0.1;

/// A replica that has more than so many times what it is to have counts as one that has this: so in one step there are no
/// more than twice as many, and one prompt of a million tokens, of which others cannot take a part, adds nobody.
const MOST_OVER: f64 = 2.0;

/// The share of first tokens that may be late: what makes the target a 99th percentile.
const LATE_SHARE: f64 = 0.01;

/// With fewer first tokens lately, a late one is chance.
const MIN_FIRST_TOKENS: f64 = 50.0;

/// How many replicas a load asks for.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Asked {
    /// Replicas that get requests now.
    pub replicas: u32,
    /// Those of them that have not reported, or not all.
    pub missing: u32,
    /// For how many replicas there is load by each signal, as far as it is told; none: nobody tells.
    pub loads: [Option<f64>; 5],
    /// Seconds of prompts that wait, on average over the replicas.
    pub backlog_s: f64,
    /// As many are needed for what is known.
    at_least: u32,
    /// As many are enough, whatever is not known.
    at_most: u32,
}

impl Asked {
    /// What a signal comes to beside what all replicas are to have: 1 is as it should be.
    pub fn pressure(&self, signal: Signal) -> Option<f64> {
        let at = Signal::ALL.iter().position(|other| *other == signal)?;
        let load = self.loads.get(at).copied().flatten()?;
        (self.replicas > 0).then(|| load / f64::from(self.replicas))
    }

    /// The same in percent. 0 where nobody tells: what was told last must not stand, since an alert goes by it.
    pub fn percent(&self, signal: Signal) -> u64 {
        self.pressure(signal).map_or(0, |pressure| (pressure * 100.0) as u64)
    }
}

/// Adds up what the replicas of a cluster have. `late`: how many first tokens came late of so many.
pub fn asked(config: &ScalingConfig, replicas: &[Seen], late: Option<(f64, f64)>) -> Asked {
    let count = replicas.len() as f64;
    let seconds = |tokens: f64, seen: &Seen| tokens / seen.prefill_tokens_per_s.max(1.0);
    let over = |has: f64, target: f64| (has / target).min(MOST_OVER);
    let sum = |of: &dyn Fn(&Seen) -> f64| replicas.iter().map(of).sum::<f64>();
    // More than all of its time nobody works: what is beyond waits, and counts as that.
    let busy = |seen: &Seen| seconds(seen.sent_tokens_per_s, seen).min(1.0);
    let reports = || replicas.iter().filter_map(|seen| seen.report);
    let waiting: Vec<f64> = reports().map(|(waiting, _)| f64::from(waiting)).collect();
    let kv: Vec<f64> = reports().filter_map(|(_, usage)| usage).collect();
    let told = |values: &[f64], target: f64| {
        let load = values.iter().map(|value| over(*value, target)).sum::<f64>();
        (!values.is_empty()).then_some((load, values.len()))
    };
    let own = |load: f64| Some((load, replicas.len()));
    let loads = [
        own(sum(&|seen| over(busy(seen), config.prefill_share))),
        own(sum(&|seen| over(seconds(seen.unfinished_tokens, seen), config.backlog_s))),
        told(&waiting, config.waiting),
        told(&kv, config.kv_usage),
        late.and_then(|late| first_tokens(late, count)).map(|load| (load, replicas.len())),
    ];
    let unknown = |known: usize| replicas.len().saturating_sub(known) as f64;
    let most = |add: &dyn Fn(usize) -> f64| {
        let each = loads.iter().flatten().map(|(load, known)| wanted(load + add(*known), count));
        each.max().unwrap_or(0)
    };
    let reported = waiting.len();
    let at_most = match reported {
        // Nobody says how much they have to do: not one can be spared.
        0 => replicas.len() as u32,
        _ => 0,
    };
    Asked {
        replicas: replicas.len() as u32,
        missing: unknown(if kv.is_empty() { reported } else { kv.len() }) as u32,
        loads: loads.map(|load| load.map(|(load, _)| load)),
        backlog_s: sum(&|seen| seconds(seen.unfinished_tokens, seen)) / count.max(1.0),
        at_least: most(&|_| 0.0),
        at_most: at_most.max(most(&unknown)),
    }
}

/// For how many replicas late first tokens ask: at most for one more, or a tenth. How many more, they do not say.
fn first_tokens((late, all): (f64, f64), count: f64) -> Option<f64> {
    if all < MIN_FIRST_TOKENS {
        return None;
    }
    let over = late / all / LATE_SHARE;
    let more = (count * TOLERANCE * 1.001).max(1.0);
    Some((over * count).min(count + more))
}

fn wanted(load: f64, count: f64) -> u32 {
    if (load - count).abs() <= count * TOLERANCE {
        return count as u32;
    }
    // A hundredth of a replica is none.
    (load - 0.01).ceil() as u32
}

/// What is recommended, and what has been asked for lately.
#[derive(Debug, Default)]
pub struct Recommendation {
    replicas: Option<u32>,
    /// Whether it was handed on, and not found.
    is_heir: bool,
    least: Window,
    most: Window,
}

impl Recommendation {
    /// Goes on from what another has recommended.
    pub fn from(replicas: Option<u32>) -> Self {
        Self { replicas, is_heir: replicas.is_some(), ..Self::default() }
    }

    /// Takes in what is asked for now, of a cluster with so many members that are not on their way out: how many replicas
    /// there should be. None as long as none was ever seen.
    pub fn take(
        &mut self,
        config: &ScalingConfig,
        asked: &Asked,
        members: u32,
        now: Moment,
    ) -> Option<u32> {
        // Where nobody gets requests nothing is known, and what was said before holds.
        if asked.replicas > 0 {
            let least = self.least.lowest(asked.at_least, config.up_after, now);
            let most = self.most.highest(asked.at_most, config.down_after, now);
            let mut before = self.replicas.unwrap_or(members);
            if most.is_none() && !self.is_heir {
                // A gateway that has just begun hears of its replicas one by one: none of them is too many yet.
                before = before.max(members);
            }
            let up = least.filter(|least| *least > before);
            self.replicas = Some(up.or(most.filter(|most| *most < before)).unwrap_or(before));
        }
        let (min, max) = (config.min_replicas, config.max_replicas.max(config.min_replicas));
        self.replicas.map(|replicas| replicas.clamp(min, max))
    }
}

#[cfg(test)]
mod tests;
