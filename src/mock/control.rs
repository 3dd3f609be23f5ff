//! Faults on demand: what a test asks a mock replica to do wrong.
//!
//! The wishes only: the server carries them out, and the engine underneath knows of none.

use super::replica::Skew;
use serde_json::Value;
use std::time::Duration;

/// How a replica misbehaves. The default is not at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Control {
    /// Answer prompts with an error.
    pub fail: Option<Fail>,
    /// Let prompts wait this long before they reach the engine.
    pub slow: Duration,
    /// Never answer prompts; `/health` stays good, as in a paused engine.
    pub hang: bool,
    /// Refuse connections and cut open ones. Over HTTP, `refuse_ms` ends by itself; a replica told
    /// to `refuse` there cannot be told to stop.
    pub refuse: bool,
    /// Cut a stream's connection after this many tokens.
    pub cut_after: Option<usize>,
    /// Answer prompts whose body has this text with 500, whoever sends them.
    pub poison: Option<String>,
    /// Answer nothing at all, `/health` included, as a stopped process does.
    pub freeze: bool,
    /// Send the role chunk of a chat stream before the first token, as some engines do.
    pub early_role: bool,
    /// The status of `/health`, when not 200.
    pub health: Option<u16>,
    /// What `/metrics` answers.
    pub metrics: MetricsMode,
    /// How its tokens differ from the truth from now on, in `/tokenize`, too.
    pub skew: Option<Skew>,
    /// What happens to so many of the next batches of KV events.
    pub events: Option<(EventFault, u64)>,
    /// Batches that one replay brings at most: an engine's socket drops what its queue has no room for.
    pub replay_limit: Option<usize>,
}

/// What happens to a batch of KV events on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventFault {
    /// It is lost, and can be asked for again.
    Drop,
    /// It is lost for good.
    Lose,
    /// Its payload is no batch.
    Garble,
    /// It comes after the next one.
    Reorder,
    /// It comes twice.
    Repeat,
}

/// An error to answer with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fail {
    /// HTTP status.
    pub status: u16,
    /// How many more prompts fail; `None` for all.
    pub count: Option<u64>,
}

/// What `/metrics` answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MetricsMode {
    /// The truth.
    #[default]
    Normal,
    /// Bytes that are no metrics and no UTF-8.
    Garbage,
    /// The truth after 8 MB of other metrics.
    Huge,
    /// The truth, ten seconds late.
    Slow,
    /// Gauges that are NaN, infinite and negative.
    Nan,
    /// Status 500.
    Error,
    /// Nothing.
    Empty,
    /// A page for people.
    Html,
    /// Compressed, which nobody asked for.
    Gzip,
    /// The truth under names that no engine has.
    Renamed,
    /// Each page says that the process started before the last page's did.
    Backwards,
    /// Every series twice, the first time with another number.
    Twice,
    /// The truth of two engines behind one address.
    Ranks,
    /// The truth of an engine that computes prompts for others.
    Prefill,
}

impl Control {
    /// Changes what `wish`, an object, names; `{"reset": true}` takes everything back first. Other
    /// keys: `fail: {status, count?}`, `slow_ms`, `hang`, `refuse`, `refuse_ms` (which the server times), `cut_after`, `poison`, `freeze`, `early_role`,
    /// `health`, `metrics`, `skew` (`extra` or `ids`), `events: {fault, count}`, `replay_limit`; null takes one back.
    ///
    /// # Errors
    /// With the name of a key that is unknown or has a value of another type. Nothing is changed.
    pub fn apply(&mut self, wish: &Value) -> Result<(), String> {
        let Some(wish) = wish.as_object() else { return Err("expected an object".to_owned()) };
        let mut next = self.clone();
        if wish.get("reset").and_then(Value::as_bool) == Some(true) {
            next = Self::default();
        }
        for (key, value) in wish {
            next.set(key, value).ok_or_else(|| format!("{key}: unknown, or not of this type"))?;
        }
        *self = next;
        Ok(())
    }

    /// Counts one prompt against [`Self::fail`]: the status to answer with, if any.
    pub fn failure(&mut self) -> Option<u16> {
        let fail = self.fail.as_mut()?;
        if let Some(count) = &mut fail.count {
            *count = count.saturating_sub(1);
        }
        let status = fail.status;
        if fail.count == Some(0) {
            self.fail = None;
        }
        Some(status)
    }

    /// Counts one batch of KV events against [`Self::events`]: what happens to it, if anything.
    pub fn event_fault(&mut self) -> Option<EventFault> {
        let (fault, count) = self.events.as_mut()?;
        let fault = *fault;
        *count = count.saturating_sub(1);
        if *count == 0 {
            self.events = None;
        }
        Some(fault)
    }

    fn set(&mut self, key: &str, value: &Value) -> Option<()> {
        let flag = || if value.is_null() { Some(false) } else { value.as_bool() };
        match key {
            "fail" => self.fail = optional(value, Fail::read)?,
            "slow_ms" => {
                self.slow = Duration::from_millis(optional(value, Value::as_u64)?.unwrap_or(0))
            }
            "hang" => self.hang = flag()?,
            "refuse" => self.refuse = flag()?,
            "cut_after" => self.cut_after = optional(value, |v| usize::try_from(v.as_u64()?).ok())?,
            "poison" => self.poison = optional(value, |v| v.as_str().map(str::to_owned))?,
            "freeze" => self.freeze = flag()?,
            "early_role" => self.early_role = flag()?,
            "health" => self.health = optional(value, |v| u16::try_from(v.as_u64()?).ok())?,
            "metrics" => self.metrics = optional(value, MetricsMode::read)?.unwrap_or_default(),
            "events" => self.events = optional(value, EventFault::read)?,
            "replay_limit" => {
                self.replay_limit = optional(value, |v| usize::try_from(v.as_u64()?).ok())?
            }
            "skew" => self.skew = optional(value, Skew::read)?,
            "reset" | "refuse_ms" => {
                value.is_boolean().then_some(()).or(value.as_u64().map(drop))?
            }
            _ => return None,
        }
        Some(())
    }
}

impl Fail {
    fn read(value: &Value) -> Option<Self> {
        let status = u16::try_from(value.get("status")?.as_u64()?).ok()?;
        let count = value.get("count").and_then(Value::as_u64);
        (400..600).contains(&status).then_some(Self { status, count })
    }
}

impl EventFault {
    fn read(value: &Value) -> Option<(Self, u64)> {
        let fault = match value.get("fault")?.as_str()? {
            "drop" => Self::Drop,
            "lose" => Self::Lose,
            "garble" => Self::Garble,
            "reorder" => Self::Reorder,
            "repeat" => Self::Repeat,
            _ => return None,
        };
        let count = value.get("count").map_or(Some(1), Value::as_u64)?;
        (count > 0).then_some((fault, count))
    }
}

impl MetricsMode {
    fn read(value: &Value) -> Option<Self> {
        Some(match value.as_str()? {
            "normal" => Self::Normal,
            "garbage" => Self::Garbage,
            "huge" => Self::Huge,
            "slow" => Self::Slow,
            "nan" => Self::Nan,
            "error" => Self::Error,
            "empty" => Self::Empty,
            "html" => Self::Html,
            "gzip" => Self::Gzip,
            "renamed" => Self::Renamed,
            "backwards" => Self::Backwards,
            "twice" => Self::Twice,
            "ranks" => Self::Ranks,
            "prefill" => Self::Prefill,
            _ => return None,
        })
    }
}

/// Null is nothing; what cannot be read is an error.
fn optional<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Option<T>> {
    if value.is_null() { Some(None) } else { read(value).map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn check(wish: &Value, expected: Result<Control, &str>) {
        let mut control = Control::default();
        let result = control.apply(wish).map(|()| control).map_err(|error| error.to_string());
        assert_eq!(result, expected.map_err(str::to_owned));
    }

    #[test]
    fn wishes_are_read() {
        let normal = Control::default;
        check(&json!({}), Ok(normal()));
        check(&json!({"hang": true}), Ok(Control { hang: true, ..normal() }));
        check(&json!({"hang": null}), Ok(normal()));
        check(&json!({"slow_ms": 20}), Ok(Control { slow: Duration::from_millis(20), ..normal() }));
        check(&json!({"metrics": "nan"}), Ok(Control { metrics: MetricsMode::Nan, ..normal() }));
        let fail = Some(Fail { status: 503, count: Some(2) });
        check(&json!({"fail": {"status": 503, "count": 2}}), Ok(Control { fail, ..normal() }));
        check(
            &json!({"reset": true, "cut_after": 3}),
            Ok(Control { cut_after: Some(3), ..normal() }),
        );
        check(&json!([]), Err("expected an object"));
        check(&json!({"hung": true}), Err("hung: unknown, or not of this type"));
        check(&json!({"fail": {"status": 200}}), Err("fail: unknown, or not of this type"));
        check(&json!({"metrics": "odd"}), Err("metrics: unknown, or not of this type"));
    }

    #[test]
    fn faults_of_events_run_out() {
        check(
            &json!({"events": {"fault": "lose", "count": 2}, "replay_limit": 5}),
            Ok(Control {
                events: Some((EventFault::Lose, 2)),
                replay_limit: Some(5),
                ..Control::default()
            }),
        );
        check(&json!({"events": {"fault": "odd"}}), Err("events: unknown, or not of this type"));
        let mut control = Control::default();
        control.apply(&json!({"events": {"fault": "garble"}})).unwrap();
        assert_eq!(
            [control.event_fault(), control.event_fault()],
            [Some(EventFault::Garble), None]
        );
    }

    #[test]
    fn failures_run_out() {
        let mut control = Control::default();
        control.apply(&json!({"fail": {"status": 500, "count": 2}})).unwrap();
        assert_eq!(
            [control.failure(), control.failure(), control.failure()],
            [Some(500), Some(500), None]
        );
        control.apply(&json!({"fail": {"status": 429}})).unwrap();
        assert_eq!([control.failure(), control.failure(), control.failure()], [Some(429); 3]);
    }
}
