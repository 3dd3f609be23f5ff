//! What of the configuration says how many replicas there should be. It checks only that the numbers can be.

use super::fields::Fields;
use super::{ConfigError, error};
use crate::scaling::ScalingConfig;
use std::time::Duration;

/// As many as a table holds.
const MAX_REPLICAS: u32 = crate::replicas::MAX_REPLICAS as u32;

pub(super) fn scaling(fields: &mut Fields<'_>) -> Result<ScalingConfig, ConfigError> {
    let usual = ScalingConfig::default();
    let first_token = fields.optional_number("first_token_ms", 1.0, 600_000.0)?;
    let config = ScalingConfig {
        min_replicas: fields.integer("min_replicas", usual.min_replicas, 1, MAX_REPLICAS)? as u32,
        max_replicas: fields.integer("max_replicas", usual.max_replicas, 1, MAX_REPLICAS)? as u32,
        prefill_share: fields.number("prefill_share", usual.prefill_share, 0.01, 1.0)?,
        backlog_s: fields.number("backlog_s", usual.backlog_s, 0.01, 600.0)?,
        waiting: fields.number("waiting", usual.waiting, 0.01, 10_000.0)?,
        kv_usage: fields.number("kv_usage", usual.kv_usage, 0.01, 1.0)?,
        first_token: first_token.map(|ms| Duration::from_secs_f64(ms / 1000.0)),
        up_after: seconds(fields, "up_after_s", usual.up_after)?,
        down_after: seconds(fields, "down_after_s", usual.down_after)?,
    };
    if config.max_replicas < config.min_replicas {
        let problem = "expected no less than min_replicas".to_owned();
        return Err(error(&fields.path_of("max_replicas"), problem));
    }
    fields.finish()?;
    Ok(config)
}

fn seconds(
    fields: &mut Fields<'_>,
    key: &'static str,
    usual: Duration,
) -> Result<Duration, ConfigError> {
    let usual = u32::try_from(usual.as_secs()).unwrap_or(u32::MAX);
    fields.integer(key, usual, 1, 3600).map(Duration::from_secs)
}
