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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::python::write_str;

    /// Expected texts were printed by Python's `repr(json.loads(text))`.
    #[track_caller]
    fn check(text: &str, expected: &str) {
        let mut out = String::new();
        let number = value(serde_json::from_str(text).expect(text)).expect(text);
        write_str(&mut out, &number).expect("a String takes all");
        assert_eq!(out, expected, "{text}");
    }

    #[test]
    fn floats_are_the_ones_that_python_reads() {
        check("0.30000000000000004", "0.30000000000000004");
        check("47.376887123456789", "47.37688712345679");
        check("-122.41941550000001", "-122.41941550000001");
        check("2.2250738585072014e-308", "2.2250738585072014e-308");
        check("1.7976931348623157e15", "1797693134862315.8");
        check("0.00001", "1e-05");
        check("123456789012345.678", "123456789012345.67");
        check("1e5", "100000.0");
    }
}
