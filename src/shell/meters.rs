//! The metrics of this VM, defined in Envoy when first used.
//!
//! Names and kinds are [`crate::metrics`]'s, sums are Envoy's: only ids are kept here.

use super::host;
use crate::metrics::{self, Kind, Metric};
use crate::route::Reason;
use crate::series::{Full, Series};
use proxy_wasm::types::MetricType;
use std::cell::RefCell;
use std::time::Duration;

thread_local! {
    /// Envoy makes a new id at every definition, so all roots of a VM share theirs.
    static SERIES: RefCell<Series> = RefCell::default();

    static WAITING: RefCell<Waiting> = RefCell::default();
}

/// What Envoy is still to be told of histograms.
#[derive(Default)]
struct Waiting {
    /// Ids and values.
    values: Vec<(u32, u64)>,
    /// Whether there is a tick to come.
    has_ticks: bool,
}

/// Values that wait at most: some 64 KB. Between two ticks a busy worker has a few hundred.
const MAX_WAITING: usize = 4096;

/// Defines the counters that have no label, and the one of reasons, before anything counts.
///
/// A rate over them then has a beginning. And Envoy drops a series with the last VM that defined it: when another build
/// of the filter takes over, the counts go on only if its VMs define them while the old ones still live.
pub fn show_counters() {
    for metric in metrics::ALL {
        if metric.kind == Kind::Counter && metric.labels.is_empty() {
            add(metric, &[], 0);
        }
    }
    for reason in Reason::ALL {
        add(&metrics::REQUESTS, &[reason.as_str()], 0);
    }
}

/// Adds to a counter.
pub fn add(metric: &Metric, labels: &[&str], by: u64) {
    if let Some(id) = id(metric, labels) {
        host::increment_metric(id, by);
    }
}

/// Sets a gauge, or adds a value to a histogram. Histograms learn it with the next tick: Envoy shows them seconds later
/// anyway, and one call after the other costs a fraction of as many between other things.
pub fn record(metric: &Metric, labels: &[&str], value: u64) {
    let Some(id) = id(metric, labels) else { return };
    if metric.kind != Kind::Histogram {
        return host::record_metric(id, value);
    }
    let may_wait = WAITING.with(|waiting| {
        let Ok(mut waiting) = waiting.try_borrow_mut() else { return true };
        waiting.values.push((id, value));
        waiting.has_ticks && waiting.values.len() < MAX_WAITING
    });
    if !may_wait {
        tell();
    }
}

/// Tells Envoy what waits.
fn tell() {
    WAITING.with(|waiting| {
        if let Ok(mut waiting) = waiting.try_borrow_mut() {
            waiting.values.drain(..).for_each(|(id, value)| host::record_metric(id, value));
        }
    });
}

/// As [`tell`], on a tick or when a root ends: whether there will be another tick. Other roots of the VM may have some.
pub fn tick(has_more: bool) {
    tell();
    WAITING.with(|waiting| {
        if let Ok(mut waiting) = waiting.try_borrow_mut() {
            waiting.has_ticks = has_more;
        }
    });
}

/// What a counter or gauge stands at, whichever VM moved it; it begins at 0.
pub fn read(metric: &Metric, labels: &[&str]) -> u64 {
    id(metric, labels).and_then(host::metric).unwrap_or_default()
}

/// As [`record`], for a time in milliseconds.
pub fn record_ms(metric: &Metric, labels: &[&str], took: Duration) {
    record(metric, labels, u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
}

/// As [`record`], for a time in microseconds.
pub fn record_us(metric: &Metric, labels: &[&str], took: Duration) {
    record(metric, labels, u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
}

/// Calls `act`, which is all of a callback, and records how long it took.
pub fn time<T>(callback: &str, act: impl FnOnce() -> T) -> T {
    let began = host::now();
    let result = act();
    record_us(&metrics::CALLBACK, &[callback], host::now().since(began));
    result
}

/// Sets a gauge to 0, if this VM ever set it.
pub fn clear(metric: &Metric, labels: &[&str]) {
    put_back(metric, labels, 0);
}

/// Sets a gauge to what it stands at where there is nothing to tell, if this VM ever set it.
pub fn put_back(metric: &Metric, labels: &[&str], value: u64) {
    let known = SERIES.with(|series| series.try_borrow().ok()?.known(metric, labels));
    if let Some(id) = known {
        host::record_metric(id, value);
    }
}

fn id(metric: &Metric, labels: &[&str]) -> Option<u32> {
    SERIES.with(|series| {
        let mut series = series.try_borrow_mut().ok()?;
        match series.id(metric, labels, define) {
            Ok(id) => id,
            Err(Full) => {
                let dropped = series.id(&metrics::DROPPED_SAMPLES, &[], define).ok().flatten()?;
                host::increment_metric(dropped, 1);
                None
            }
        }
    })
}

fn define(kind: Kind, name: &str) -> Option<u32> {
    let kind = match kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
        Kind::Histogram => MetricType::Histogram,
    };
    host::define_metric(kind, name)
}
