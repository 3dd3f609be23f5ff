//! The cost formula's coefficients, within the bounds that keep it finite.

use super::ConfigError;
use super::fields::Fields;
use crate::score::CostConfig;

pub(super) fn cost(fields: &mut Fields<'_>) -> Result<CostConfig, ConfigError> {
    let config = CostConfig {
        prefill_tokens_per_s: fields.number("prefill_tokens_per_s", 8000.0, 1.0, 1e9)?,
        attention_tokens: fields.number("attention_tokens", 100_000.0, 1.0, 1e12)?,
        mean_uncached_tokens: fields.number("mean_uncached_tokens", 512.0, 0.0, 1e9)?,
        mean_answer_tokens: fields.number("mean_answer_tokens", 128.0, 0.0, 1e9)?,
        decode_s_per_token: fields.number("decode_ms_per_token", 0.15, 0.0, 1e6)? / 1000.0,
        neighbour_weight: fields.number("neighbour_weight", 1.0, 0.0, 100.0)?,
        pressure_s: fields.number("pressure_ms", 10.0, 0.0, 1e6)? / 1000.0,
        recent_weight: fields.number("recent_weight", 0.1, 0.0, 1.0)?,
        recent_half_life: fields.millis("recent_half_life_ms", 5000, 1, 600_000)?,
        eviction_weight: fields.number("eviction_weight", 0.1, 0.0, 100.0)?,
        adapter_load_s: fields.number("adapter_load_ms", 100.0, 0.0, 1e6)? / 1000.0,
        transfer_tokens_per_s: fields.number("transfer_tokens_per_s", 100_000.0, 1.0, 1e9)?,
    };
    fields.finish()?;
    Ok(config)
}
