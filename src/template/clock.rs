//! `strftime`, from seconds since the Unix epoch.
//!
//! Civil date arithmetic only: the time zone is the caller's affair, and so is knowing the time.

use std::fmt::Write as _;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

struct Civil {
    year: u64,
    month: u64,
    day: u64,
    weekday: u64,
    day_of_year: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Civil {
    /// Howard Hinnant's `civil_from_days`, for dates from 1970 on.
    fn new(now: u64) -> Self {
        let days = now / 86_400;
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_march_year =
            day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_march_year + 2) / 153;
        let day = day_of_march_year - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let day_of_year = if month <= 2 {
            day_of_march_year - 306 + 1
        } else {
            day_of_march_year + 60 + u64::from(is_leap)
        };
        let second = now % 86_400;
        Self {
            year,
            month,
            day,
            weekday: (days + 4) % 7,
            day_of_year,
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }

    fn month_name(&self) -> &'static str {
        name(&MONTHS, self.month.saturating_sub(1))
    }

    fn day_name(&self) -> &'static str {
        name(&DAYS, self.weekday)
    }

    fn hour12(&self) -> u64 {
        (self.hour + 11) % 12 + 1
    }
}

fn name(names: &[&'static str], index: u64) -> &'static str {
    usize::try_from(index).ok().and_then(|index| names.get(index)).copied().unwrap_or_default()
}

/// Formats `now` as glibc does in the C locale, or `None` for a directive that needs more than the time.
pub(super) fn strftime(format: &str, now: u64) -> Option<String> {
    let time = Civil::new(now);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next()?;
        let is_bare = directive == '-';
        if is_bare {
            directive = chars.next()?;
        }
        push(&mut out, &time, now, directive, is_bare)?;
    }
    Some(out)
}

fn push(out: &mut String, time: &Civil, now: u64, directive: char, is_bare: bool) -> Option<()> {
    let number = |out: &mut String, value: u64, width: usize| {
        let width = if is_bare { 0 } else { width };
        write!(out, "{value:0width$}").ok()
    };
    match directive {
        'Y' => number(out, time.year, 0),
        'y' => number(out, time.year % 100, 2),
        'C' => number(out, time.year / 100, 2),
        'm' => number(out, time.month, 2),
        'd' => number(out, time.day, 2),
        'e' if is_bare => number(out, time.day, 0),
        'e' => write!(out, "{:2}", time.day).ok(),
        'j' => number(out, time.day_of_year, 3),
        'H' => number(out, time.hour, 2),
        'I' => number(out, time.hour12(), 2),
        'M' => number(out, time.minute, 2),
        'S' => number(out, time.second, 2),
        'f' => number(out, 0, 6),
        's' => number(out, now, 0),
        'u' => number(out, (time.weekday + 6) % 7 + 1, 0),
        'U' => number(out, (time.day_of_year + 6 - time.weekday) / 7, 2),
        'W' => number(out, (time.day_of_year + 6 - (time.weekday + 6) % 7) / 7, 2),
        'w' => number(out, time.weekday, 0),
        'B' => push_text(out, time.month_name()),
        'b' | 'h' => push_text(out, time.month_name().get(..3)?),
        'A' => push_text(out, time.day_name()),
        'a' => push_text(out, time.day_name().get(..3)?),
        'p' => push_text(out, if time.hour < 12 { "AM" } else { "PM" }),
        '%' => push_text(out, "%"),
        'n' => push_text(out, "\n"),
        't' => push_text(out, "\t"),
        'F' => expand(out, "%Y-%m-%d", now),
        'D' | 'x' => expand(out, "%m/%d/%y", now),
        'T' | 'X' => expand(out, "%H:%M:%S", now),
        'R' => expand(out, "%H:%M", now),
        'c' => expand(out, "%a %b %e %H:%M:%S %Y", now),
        // A naive datetime has no zone, and Python prints nothing for it.
        'Z' | 'z' => Some(()),
        _ => None,
    }
}

fn push_text(out: &mut String, text: &str) -> Option<()> {
    out.push_str(text);
    Some(())
}

fn expand(out: &mut String, format: &str, now: u64) -> Option<()> {
    out.push_str(&strftime(format, now)?);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts were printed by Python's `datetime.fromtimestamp(now, timezone.utc)` without its zone.
    #[track_caller]
    fn check(format: &str, now: u64, expected: Option<&str>) {
        assert_eq!(strftime(format, now).as_deref(), expected, "{format} at {now}");
    }

    #[test]
    fn dates_are_civil_across_leap_years() {
        check("%Y-%m-%d %j %A", 0, Some("1970-01-01 001 Thursday"));
        check("%Y-%m-%d %j %a", 951_782_400, Some("2000-02-29 060 Tue"));
        check("%Y-%m-%d %j %a", 978_220_800, Some("2000-12-31 366 Sun"));
        check("%Y-%m-%d %j %a", 4_107_542_400, Some("2100-03-01 060 Mon"));
        check("%Y-%m-%d", 1_767_225_599, Some("2025-12-31"));
        check("%Y-%m-%d", 1_767_225_600, Some("2026-01-01"));
    }

    #[test]
    fn directives_are_glibcs() {
        let now = 1_768_480_205;
        check("%d %b %Y, %B %-d %e %y", now, Some("15 Jan 2026, January 15 15 26"));
        check("%H:%M:%S %I %p %f", now, Some("12:30:05 12 PM 000000"));
        check(
            "%c|%x|%X|%F|%T|%D|%R",
            now,
            Some("Thu Jan 15 12:30:05 2026|01/15/26|12:30:05|2026-01-15|12:30:05|01/15/26|12:30"),
        );
        check("%u %w %Z%z%%%n%t", now, Some("4 4 %\n\t"));
        check("%U %W", now, Some("02 02"));
        check("%I %-I", 0, Some("12 12"));
        check("%e|%-d", 0, Some(" 1|1"));
    }

    #[test]
    fn unknown_directives_are_refused() {
        check("%Q", 0, None);
        check("%", 0, None);
    }

    #[test]
    fn times_beyond_all_calendars_do_not_overflow() {
        assert!(strftime("%c", u64::MAX).is_some());
    }
}
