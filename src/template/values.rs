//! A client's JSON, as values a template can read.
//!
//! Nothing is left out or renamed here: that is `normalise`'s part.

use super::TemplateError;
use super::python::{Dict, Exponential, List};
use minijinja::value::Value;
use serde_json::{Map, Number, Value as Json};

/// Turns JSON into a template's value.
pub(super) fn value(json: Json) -> Result<Value, TemplateError> {
    Ok(match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(value),
        Json::Number(number) => self::number(&number)?,
        Json::String(text) => Value::from(text),
        Json::Array(items) => {
            Value::from_object(List(items.into_iter().map(value).collect::<Result<_, _>>()?))
        }
        Json::Object(fields) => dict(fields)?,
    })
}

/// Turns a JSON object into a dict.
pub(super) fn dict(fields: Map<String, Json>) -> Result<Value, TemplateError> {
    let entry = |(key, json)| Ok((key, value(json)?));
    let entries = fields.into_iter().map(entry).collect::<Result<_, TemplateError>>()?;
    Ok(Value::from_object(Dict::new(entries)))
}

/// Integers beyond 64 bits and `-0` come out of the JSON reader as floats, though Python keeps them as integers
/// and prints other digits. A float that could be one of them is refused rather than guessed.
fn number(number: &Number) -> Result<Value, TemplateError> {
    if let Some(integer) = number.as_u64() {
        return Ok(Value::from(integer));
    }
    if let Some(integer) = number.as_i64() {
        return Ok(Value::from(integer));
    }
    match number.as_f64() {
        Some(float) if float.abs() < 9.2e18 && !(float == 0.0 && float.is_sign_negative()) => {
            let is_written_out = float == 0.0 || (1e-4..1e16).contains(&float.abs());
            Ok(match is_written_out {
                true => Value::from(float),
                false => Value::from_object(Exponential(float)),
            })
        }
        _ => Err(TemplateError::Number),
    }
}
