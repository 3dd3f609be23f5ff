//! Operators and tests between two values, where both are of kinds that this knows.

use super::program::Operator;
use super::value::{Items, Value};
use super::{Beyond, Here};
use crate::request::field;

/// Whether two values are equal.
pub(super) fn equal(a: &Value<'_>, b: &Value<'_>) -> Here<bool> {
    use Value::{Bool, Items, List, Null, Number, Object, Text, Undefined};
    Ok(match (a, b) {
        (Text(a), Text(b)) => a.as_str() == b.as_str(),
        (Number(a), Number(b)) => a == b,
        (Bool(a), Bool(b)) => a == b,
        (Bool(a), Number(b)) | (Number(b), Bool(a)) => i64::from(*a) == *b,
        (Null, Null) | (Undefined, Undefined) => true,
        // Of different kinds, one of which has no parts.
        (Null | Undefined | Text(_), Null | Undefined | Text(_) | Bool(_) | Number(_))
        | (Bool(_) | Number(_), Null | Undefined | Text(_)) => false,
        (Null | Undefined | Text(_) | Bool(_) | Number(_), Items(_) | List(_) | Object(_))
        | (Items(_) | List(_) | Object(_), Null | Undefined | Text(_) | Bool(_) | Number(_)) => {
            false
        }
        _ => return Err(Beyond),
    })
}

/// Whether a value is among others.
pub(super) fn contains(all: &Value<'_>, one: &Value<'_>) -> Here<bool> {
    Ok(match (all, one) {
        (Value::Undefined, _) => false,
        (Value::Text(all), Value::Text(one)) => {
            memchr::memmem::find(all.as_str().as_bytes(), one.as_str().as_bytes()).is_some()
        }
        (Value::Object(fields), Value::Text(name)) => field(fields, name.as_str()).is_some(),
        (Value::Items(_) | Value::List(_), _) => {
            let items = all.items()?;
            for place in 0..items.len() {
                if equal(&items.get(place), one)? {
                    return Ok(true);
                }
            }
            false
        }
        _ => return Err(Beyond),
    })
}

/// The outcome of an operator.
pub(super) fn apply<'a>(operator: Operator, a: &Value<'a>, b: &Value<'a>) -> Here<Value<'a>> {
    let numbers = || Ok((a.number()?, b.number()?));
    Ok(match operator {
        Operator::Equal => Value::Bool(equal(a, b)?),
        Operator::Unequal => Value::Bool(!equal(a, b)?),
        Operator::Less => numbers().map(|(a, b)| Value::Bool(a < b))?,
        Operator::LessOrEqual => numbers().map(|(a, b)| Value::Bool(a <= b))?,
        Operator::Greater => numbers().map(|(a, b)| Value::Bool(a > b))?,
        Operator::GreaterOrEqual => numbers().map(|(a, b)| Value::Bool(a >= b))?,
        Operator::In => Value::Bool(contains(b, a)?),
        Operator::NotIn => Value::Bool(!contains(b, a)?),
        Operator::Add => match (a, b) {
            (Value::Text(a), Value::Text(b)) => Value::made([a.as_str(), b.as_str()].concat()),
            _ => {
                let (a, b) = numbers()?;
                Value::Number(a.checked_add(b).ok_or(Beyond)?)
            }
        },
        Operator::Subtract => {
            let (a, b) = numbers()?;
            Value::Number(a.checked_sub(b).ok_or(Beyond)?)
        }
        Operator::Remainder => match numbers()? {
            (a @ 0.., b @ 1..) => Value::Number(a % b),
            _ => return Err(Beyond),
        },
        Operator::Join => Value::made([printed(a)?, printed(b)?].concat()),
    })
}

/// A text or a number as an output writes it.
pub(super) fn printed(value: &Value<'_>) -> Here<String> {
    match value {
        Value::Text(text) => Ok(text.as_str().to_owned()),
        Value::Number(number) => Ok(number.to_string()),
        _ => Err(Beyond),
    }
}

/// The part of a client's list between two places, or any list in reverse.
pub(super) fn slice<'a>(value: &Value<'a>, places: [Option<i64>; 3]) -> Here<Value<'a>> {
    let [start, stop, step] = places;
    if let (Value::Items(_) | Value::List(_), [None, None, Some(-1)]) = (value, places) {
        let items = value.items()?;
        let reversed = (0..items.len()).rev().map(|place| items.get(place));
        return Ok(Value::List(reversed.collect()));
    }
    if step.is_some_and(|step| step != 1) {
        return Err(Beyond);
    }
    let Value::Items(items) = value else { return Err(Beyond) };
    let end = i64::try_from(items.len()).unwrap_or(i64::MAX);
    let place = |place: i64| if place < 0 { (end + place).max(0) } else { place.min(end) };
    let (start, stop) = (start.map_or(0, place), stop.map_or(end, place));
    let place = |place| usize::try_from(place).unwrap_or_default();
    Ok(Value::Items(items.get(place(start)..place(stop.max(start))).unwrap_or_default()))
}

/// An item by its key or its place.
pub(super) fn item<'a>(value: &Value<'a>, key: &Value<'a>) -> Here<Value<'a>> {
    let items = match (value, key) {
        (Value::Object(fields), Value::Text(name)) => {
            return Ok(Value::of_option(field(fields, name.as_str())));
        }
        (Value::Items(items), Value::Number(_)) => Items::Json(items),
        (Value::List(items), Value::Number(_)) => Items::List(items.clone()),
        _ => return Err(Beyond),
    };
    let place = key.number()?;
    let length = i64::try_from(items.len()).unwrap_or(i64::MAX);
    let place = if place < 0 { length.saturating_add(place) } else { place };
    Ok(usize::try_from(place).map_or(Value::Undefined, |place| items.get(place)))
}
