//! Mooncake's traces: a request per line, its prompt as ids of blocks of 512 tokens.
//!
//! They name no sessions. Routers that keep a session on one replica need some, and a turn must wait for the answer
//! before it, so they are derived: a request goes on with the session whose last prompt's full blocks are the longest
//! beginning of its own, if it is longer than that prompt. Blocks that more than one request in a hundred has (and
//! more than ten) are what all applications have in common, and by those alone nothing is continued. Sessions that have the
//! same block behind those are a family, and are named after it: `block~number`.
//!
//! The block at the end that is not full has an id too; it is left out, since engines keep full blocks only. The clock's
//! unit is the millisecond.

use super::chained;
use super::lines::Lines;
use super::open::{MAX_PROMPT_TOKENS, Reading};
use super::writing::{Asked, Writing, pause};
use hashbrown::HashMap;
use serde::Deserialize;
use std::time::Duration;

/// Tokens per id.
const BLOCK_TOKENS: u32 = 512;

/// What so few requests have in common is theirs alone, however short the trace.
const FEW_REQUESTS: usize = 10;

/// A first prompt from here on brings a document with it. Halved, long chats become documents; doubled, papers of a
/// dozen pages are chats.
const DOCUMENT_TOKENS: u32 = 16 << 10;

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// A session on its way.
struct Open {
    writing: Writing,
    last: Line,
    class: &'static str,
}

/// Reads all requests.
pub fn read(reading: &mut Reading, lines: &mut Lines) -> Result<u32, String> {
    let mut requests = Vec::new();
    while let Some(mut line) = lines.next_json::<Line>()? {
        let full = (line.input_length / BLOCK_TOKENS) as usize;
        let told = line.hash_ids.len();
        let has_all = told == full || told == line.input_length.div_ceil(BLOCK_TOKENS) as usize;
        if !has_all || line.input_length > MAX_PROMPT_TOKENS {
            let length = line.input_length;
            return Err(
                lines.error(format_args!("{told} hash_ids for a prompt of {length} tokens"))
            );
        }
        line.hash_ids.truncate(full);
        reading.count(full, lines)?;
        chain(&mut line.hash_ids);
        requests.push(line);
    }
    requests.sort_by_key(|request| request.timestamp);
    for session in sessions(requests, reading) {
        reading.add(session.writing.session());
    }
    Ok(BLOCK_TOKENS)
}

/// Makes each id stand for all before it as well, in case that it does not yet.
fn chain(ids: &mut [u64]) {
    let mut parent = 0;
    for id in ids {
        *id = chained(parent, 0, *id);
        parent = *id;
    }
}

fn sessions(requests: Vec<Line>, reading: &Reading) -> Vec<Open> {
    let mut counts: HashMap<u64, usize> = HashMap::new();
    for id in requests.iter().flat_map(|request| &request.hash_ids) {
        *counts.entry(*id).or_default() += 1;
    }
    let most = (requests.len() / 100).max(FEW_REQUESTS);
    let is_common = |id: &u64| counts.get(id).is_some_and(|count| *count > most);
    let mut open: Vec<Open> = Vec::new();
    // The session whose last prompt ends in a block.
    let mut ends: HashMap<u64, usize> = HashMap::new();
    let start = requests.first().map_or(0, |request| request.timestamp);
    for request in requests {
        let own = request.hash_ids.iter().rev().take_while(|id| !is_common(id));
        let goes_on = own.clone().find_map(|id| ends.get(id).copied()).filter(|number| {
            open.get(*number).is_some_and(|open| open.last.input_length < request.input_length)
        });
        let number = goes_on.unwrap_or(open.len());
        if goes_on.is_none() {
            let arrival = Duration::from_millis(request.timestamp - start);
            let root = own.last().copied().unwrap_or(number as u64);
            open.push(Open::new(format!("{root:016x}~{number}"), arrival, &request));
        }
        let Some(session) = open.get_mut(number) else { continue };
        if let Some(end) = session.last.hash_ids.last() {
            ends.remove(end);
        }
        if let Some(end) = request.hash_ids.last().filter(|id| !is_common(id)) {
            ends.insert(*end, number);
        }
        session.ask(request, reading);
    }
    open
}

impl Open {
    fn new(name: String, arrival: Duration, first: &Line) -> Self {
        let class = if first.input_length < DOCUMENT_TOKENS { "chat" } else { "document" };
        let Line { timestamp, .. } = *first;
        let last = Line { timestamp, input_length: 0, output_length: 0, hash_ids: Vec::new() };
        Self { writing: Writing::new(name, arrival), last, class }
    }

    fn ask(&mut self, request: Line, reading: &Reading) {
        let since = Duration::from_millis(request.timestamp.saturating_sub(self.last.timestamp));
        self.writing.ask(Asked {
            prompt: &request.hash_ids,
            prompt_tokens: request.input_length,
            answer_blocks: Vec::new(),
            answer_tokens: request.output_length,
            think: reading.think(pause(since, self.last.output_length)),
            class: self.class,
        });
        self.last = request;
    }
}

#[cfg(test)]
mod tests {
    use super::super::open::{Format, Options, open};
    use super::super::shape::Shape;
    use super::*;

    fn line(timestamp: u64, input_length: u32, hash_ids: &[u64]) -> String {
        format!(
            r#"{{"timestamp": {timestamp}, "input_length": {input_length}, "output_length": 50, "hash_ids": {hash_ids:?}}}"#
        )
    }

    #[track_caller]
    fn check_error(line: &str, expected: &str) {
        let text = format!("{}\n{line}\n", self::line(0, 600, &[0, 1]));
        assert_eq!(Reading::text(&text, Format::Mooncake).unwrap_err(), expected);
    }

    #[test]
    fn a_prompt_that_begins_with_a_whole_other_one_goes_on_with_its_session() {
        let lines = [
            line(0, 1100, &[0, 1, 2]),
            line(1000, 1100, &[0, 1, 9]),
            // Longer than the second, whose session is the newer one.
            line(4000, 2000, &[0, 1, 3, 4]),
            // Not longer than the prompt that it begins with.
            line(5000, 2000, &[0, 1, 3, 4]),
            line(6000, 1100, &[0, 7, 8]),
            line(6000, 1100, &[0, 5, 6]),
        ]
        .into_iter()
        // Enough others for their first block to be everyone's.
        .chain((0..10).map(|other| line(7000, 600, &[0, 100 + other])));
        let lines: Vec<String> = lines.collect();
        let trace = Reading::text(&lines.join("\n"), Format::Mooncake).unwrap();
        let turns: Vec<usize> = trace.sessions.iter().map(|session| session.turns.len()).collect();
        assert_eq!(turns[..6], [1, 2, 1, 1, 1, 1]);
        let second = &trace.sessions[1].turns[1];
        assert_eq!(
            (second.keep, second.blocks.len(), second.think),
            (2, 1, Duration::from_secs(2))
        );
        let families: Vec<&str> =
            trace.sessions.iter().map(|session| session.name.split_once('~').unwrap().0).collect();
        assert!(families[0] == families[1] && families[1] == families[2]);
        assert_ne!(families[3], families[4]);
        assert!(trace.sessions.iter().flat_map(|s| &s.turns).all(|turn| turn.class == "chat"));
    }

    #[test]
    fn what_cannot_be_is_an_error_with_its_line() {
        check_error("{", "f:2: EOF while parsing an object at column 1");
        check_error(&line(0, 600, &[0, 1, 2]), "f:2: 3 hash_ids for a prompt of 600 tokens");
        check_error(&line(0, u32::MAX, &[]), "f:2: 0 hash_ids for a prompt of 4294967295 tokens");
        let negative = r#"{"timestamp":-1,"input_length":1,"output_length":1,"hash_ids":[0]}"#;
        check_error(negative, "f:2: invalid value: integer `-1`, expected u64 at column 15");
    }

    /// The published figures count the partial block at a prompt's end, which engines do not keep: 288,500 blocks, 0.3664
    /// of them known.
    #[test]
    fn the_conversation_trace_has_the_published_figures_less_partial_blocks() {
        let trace = open("mooncake", &Options::default(), 1).unwrap();
        let shape = Shape::of(&trace);
        assert_eq!(shape.requests, 12_031);
        assert_eq!(shape.prompt_tokens, [12_035, 6909, 27_367, 126_195]);
        assert_eq!(shape.answer_tokens[..3], [343, 350, 597]);
        assert_eq!((shape.blocks, shape.unique_blocks), (276_491, 170_899));
        assert_eq!((shape.sessions, shape.span), (8196, Duration::from_millis(3_536_999)));
        let longest = trace.sessions.iter().map(|session| session.turns.len()).max();
        assert!(longest.is_some_and(|longest| longest > 8), "{longest:?}");
    }
}
