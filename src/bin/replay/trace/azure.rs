//! Azure's LLM inference traces: a CSV of when a request came, its prompt's length and its answer's.
//!
//! They say nothing of what prompts have in common, so here no block is like any other, and each request is a session.

use super::chained;
use super::lines::Lines;
use super::open::{MAX_PROMPT_TOKENS, Reading};
use super::writing::{Asked, Writing};
use std::time::Duration;

/// The first line.
pub const HEADING: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// Reads all requests.
pub fn read(reading: &mut Reading, lines: &mut Lines) -> Result<u32, String> {
    let heading = lines.next_line()?.unwrap_or_default();
    if heading != HEADING {
        return Err(lines.error(format_args!("expected {HEADING}")));
    }
    let mut start = None;
    let mut number = 0;
    while let Some(line) = lines.next_line()? {
        let (at, prompt_tokens, answer_tokens) = row(line).map_err(|what| lines.error(what))?;
        let start = *start.get_or_insert(at);
        let blocks = prompt_tokens / reading.block_tokens;
        reading.count(blocks as usize, lines)?;
        let prompt: Vec<u64> = (0..u64::from(blocks)).map(|n| chained(n, number, 0)).collect();
        number += 1;
        let mut session = Writing::new(format!("row-{number}"), at.saturating_sub(start));
        session.ask(Asked {
            prompt: &prompt,
            prompt_tokens,
            answer_blocks: Vec::new(),
            answer_tokens,
            think: Duration::ZERO,
            class: "completion",
        });
        reading.add(session.session());
    }
    Ok(reading.block_tokens)
}

fn row(line: &str) -> Result<(Duration, u32, u32), String> {
    let mut fields = line.split(',').map(str::trim);
    let (Some(at), Some(prompt), Some(answer), None) =
        (fields.next(), fields.next(), fields.next(), fields.next())
    else {
        return Err("expected three fields".to_owned());
    };
    let tokens = |field: &str| match field.parse() {
        Ok(tokens) if tokens <= MAX_PROMPT_TOKENS => Ok(tokens),
        Ok(tokens) => Err(format!("{tokens} tokens")),
        Err(error) => Err(format!("{field:?}: {error}")),
    };
    let at = moment(at).ok_or_else(|| format!("{at:?}: expected 2023-11-16 18:17:03.9799600"))?;
    Ok((at, tokens(prompt)?, tokens(answer)?))
}

/// A date and time, since the first of January of the year 0 of this calendar.
fn moment(text: &str) -> Option<Duration> {
    let (date, time) = text.split_once(' ')?;
    let mut date = date.splitn(3, '-').map(|part| part.parse::<u64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.splitn(3, ':');
    let hour: u64 = time.next()?.parse().ok()?;
    let minute: u64 = time.next()?.parse().ok()?;
    let second: f64 = time.next()?.parse().ok()?;
    let in_range = (1..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && (0.0..61.0).contains(&second);
    if !in_range {
        return None;
    }
    // Years begin in March here, so that the leap day is the last of one.
    let year = if month < 3 { year - 1 } else { year };
    let days_in_months = (153 * ((month + 9) % 12) + 2) / 5;
    let days = 365 * year + year / 4 - year / 100 + year / 400 + days_in_months + day;
    let whole = Duration::from_secs(((days * 24 + hour) * 60 + minute) * 60);
    Some(whole + Duration::try_from_secs_f64(second).ok()?)
}

#[cfg(test)]
mod tests {
    use super::super::open::Format;
    use super::*;

    #[track_caller]
    fn check(row: &str, expected: Result<(f64, u32, u32), &str>) {
        let first = moment("2023-12-31 23:59:58.5").unwrap().as_secs_f64();
        let read =
            self::row(row).map(|(at, prompt, answer)| (at.as_secs_f64() - first, prompt, answer));
        assert_eq!(read, expected.map_err(str::to_owned));
    }

    #[test]
    fn rows_are_times_and_lengths() {
        check("2023-12-31 23:59:59.5000000,4808,10", Ok((1.0, 4808, 10)));
        check("2024-01-01 00:00:00.5,1,2", Ok((2.0, 1, 2)));
        check("2024-03-01 23:59:58.5,1,2", Ok((61.0 * 86400.0, 1, 2)));
        check("2024-01-01 00:00:00,1", Err("expected three fields"));
        check("2024-01-01 00:00:00,1,2,3", Err("expected three fields"));
        check("2024-01-01 00:00:00,-1,2", Err("\"-1\": invalid digit found in string"));
        check("2024-01-01 00:00:00,1,99999999", Err("99999999 tokens"));
        for time in
            ["2024-13-01 00:00:00", "2024-01-01 24:00:00", "0-1-1 0:0:nan", "2024-01-01", ""]
        {
            let text = format!("{time:?}: expected 2023-11-16 18:17:03.9799600");
            check(&format!("{time},1,2"), Err(&text));
        }
    }

    #[test]
    fn an_error_names_its_line() {
        let error = Reading::text(&format!("{HEADING}\nx,1,2"), Format::Azure).unwrap_err();
        assert_eq!(error, "f:2: \"x\": expected 2023-11-16 18:17:03.9799600");
    }
}
