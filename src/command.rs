//! What the native commands share: the numbers of their arguments, and the lines that they print.
//!
//! It knows no argument, and writes to nothing but standard output.

use std::fmt::Display;
use std::io::{Write, stdout};

/// No rate, time or share that means anything is beyond it, and times up to it can be counted in nanoseconds.
const MOST: f64 = 1e15;

/// An argument that is a number above zero.
///
/// # Errors
/// When it is none.
pub fn positive(text: &str) -> Result<f64, String> {
    let number = not_negative(text).ok().filter(|number| *number > 0.0);
    number.ok_or_else(|| format!("expected a number above 0 and up to {MOST:e}"))
}

/// An argument that is zero or a number above it.
///
/// # Errors
/// When it is none.
pub fn not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=MOST).contains(number));
    number.ok_or_else(|| format!("expected a number from 0 to {MOST:e}"))
}

/// Prints, and says so where nobody reads any more (`| head`): `print!` would panic.
///
/// # Errors
/// When standard output takes no more.
pub fn print(text: impl Display) -> Result<(), String> {
    let mut out = stdout().lock();
    let written = write!(out, "{text}").and_then(|()| out.flush());
    written.map_err(|error| format!("standard output: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_that_make_sense_are_taken() {
        for (text, expected) in [
            ("5", Some(5.0)),
            ("2e9", Some(2e9)),
            ("0.15", Some(0.15)),
            ("0", None),
            ("-0", None),
            ("-1", None),
            ("NaN", None),
            ("inf", None),
            ("1e300", None),
            ("", None),
            ("5 ms", None),
        ] {
            assert_eq!(positive(text).ok(), expected, "{text:?}");
            let is_zero = matches!(text, "0" | "-0");
            assert_eq!(not_negative(text).ok(), expected.or(is_zero.then_some(0.0)), "{text:?}");
        }
        assert_eq!(positive("NaN").unwrap_err(), "expected a number above 0 and up to 1e15");
    }
}
