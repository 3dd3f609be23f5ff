//! What the native commands share: the numbers and files of their arguments, and the lines that they print.
//!
//! It knows no argument, and writes to nothing but standard output.

use std::fmt::Display;
use std::fs::{self, OpenOptions};
use std::io::{self, Write, stdout};
use std::path::Path;

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

/// Looks whether files can be written that will be when the work is done. What they hold stays.
///
/// # Errors
/// Names the first that cannot.
pub fn writable<'a>(files: impl IntoIterator<Item = &'a Path>) -> Result<(), String> {
    let mut files = files.into_iter();
    files.try_for_each(|path| open(path).map_err(|error| format!("{}: {error}", path.display())))
}

fn open(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        // A pipe's reader would take a closed one for its end.
        Ok(found) if !found.is_file() && !found.is_dir() => Ok(()),
        Ok(_) => OpenOptions::new().append(true).open(path).map(drop),
        // A link that leads nowhere yet: what it names is not to be made here.
        Err(_) if path.is_symlink() => Ok(()),
        Err(_) => {
            OpenOptions::new().write(true).create_new(true).open(path)?;
            fs::remove_file(path)
        }
    }
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
    fn what_cannot_be_written_is_named_and_what_can_stays_as_it_is() {
        let folder = std::env::temp_dir().join(format!("warmpath-command-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (kept, new, missing) =
            (folder.join("kept"), folder.join("new"), folder.join("no/such"));
        fs::write(&kept, "kept").unwrap();
        assert_eq!(writable([kept.as_path(), &new, Path::new("/dev/null")]), Ok(()));
        assert_eq!(fs::read_to_string(&kept).unwrap(), "kept");
        assert!(!new.exists());
        let named = |path: &Path| writable([kept.as_path(), path]).unwrap_err();
        let expected = format!("{}: No such file or directory (os error 2)", missing.display());
        assert_eq!(named(&missing), expected);
        assert!(named(&folder).starts_with(&format!("{}: ", folder.display())));
        assert!(writable([Path::new("")]).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }

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
