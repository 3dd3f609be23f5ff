//! When a replica, or a model's prompts, are doubted for what was seen in passing.

use super::fields::Fields;
use super::{ConfigError, error};
use crate::drift::{DriftConfig, Window};
use crate::replicas::strikes::PassiveHealth;

pub(super) fn passive_health(fields: &mut Fields<'_>) -> Result<PassiveHealth, ConfigError> {
    let config = PassiveHealth {
        failures: fields.integer("failures", 5, 0, 1000)? as u32,
        base: fields.millis("base_ms", 1000, 1, 600_000)?,
        max: fields.millis("max_ms", 30_000, 1, 600_000)?,
    };
    if config.max < config.base {
        let problem = format!("expected at least base_ms ({})", config.base.as_millis());
        return Err(error(&fields.path_of("max_ms"), problem));
    }
    fields.finish()?;
    Ok(config)
}

pub(super) fn drift(fields: &mut Fields<'_>) -> Result<DriftConfig, ConfigError> {
    let default = DriftConfig::default();
    let longest = Window::LONGEST;
    let canary = fields.millis("canary_ms", 60_000, 0, 86_400_000)?;
    let config = DriftConfig {
        differing: fields.integer("differing", default.differing, 0, longest)? as u32,
        window: fields.integer("window", default.window, 1, longest)? as u32,
        recovery: fields.integer("recovery", default.recovery, 1, longest)? as u32,
        hold: fields.millis("hold_ms", 10_000, 0, 3_600_000)?,
        canary_interval: Some(canary).filter(|interval| !interval.is_zero()),
        sample_live: fields.switch_or("sample_live", default.sample_live)?,
    };
    if config.differing > config.window {
        let problem = format!("expected at most window ({})", config.window);
        return Err(error(&fields.path_of("differing"), problem));
    }
    fields.finish()?;
    Ok(config)
}
