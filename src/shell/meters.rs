//! The metrics of this VM, defined in Envoy when first used.
//!
//! Names and kinds are [`crate::metrics`]'s, sums are Envoy's: only ids are kept here.

use super::host;
use crate::metrics::{Kind, Metric};
use hashbrown::HashMap;
use proxy_wasm::types::MetricType;
use std::cell::RefCell;

/// Most series a VM defines. Envoy keeps a series for good, so labels that take ever new values
/// (replica addresses) must end somewhere; beyond this their numbers are dropped.
const MAX_SERIES: usize = 8192;

thread_local! {
    /// Envoy makes a new id at every definition, so all roots of a VM share theirs.
    static SERIES: RefCell<HashMap<String, Option<u32>>> = RefCell::default();
}

/// Adds to a counter.
pub fn add(metric: &Metric, labels: &[&str], by: u64) {
    if let Some(id) = id(metric, labels) {
        host::increment_metric(id, by);
    }
}

/// Sets a gauge, or adds a value to a histogram.
pub fn record(metric: &Metric, labels: &[&str], value: u64) {
    if let Some(id) = id(metric, labels) {
        host::record_metric(id, value);
    }
}

/// Sets a gauge to 0, if this VM ever set it.
pub fn clear(metric: &Metric, labels: &[&str]) {
    let name = metric.envoy_name(labels);
    let known = SERIES.with(|series| series.try_borrow().ok()?.get(&name).copied().flatten());
    if let Some(id) = known {
        host::record_metric(id, 0);
    }
}

fn id(metric: &Metric, labels: &[&str]) -> Option<u32> {
    let name = metric.envoy_name(labels);
    SERIES.with(|series| {
        let mut series = series.try_borrow_mut().ok()?;
        if let Some(id) = series.get(&name) {
            return *id;
        }
        if series.len() >= MAX_SERIES {
            return None;
        }
        let kind = match metric.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
        };
        let id = host::define_metric(kind, &name);
        series.insert(name, id);
        id
    })
}
