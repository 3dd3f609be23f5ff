//! LMCache's agent traces: a request per line with its prompt and its answer as text, when it came in microseconds, and
//! its session.
//!
//! Requests of a session may have overlapped; here each waits for the one before it. Whether an answer's blocks are in
//! the next prompt is seen from the texts.

use super::lines::Lines;
use super::open::Reading;
use super::writing::{Asked, Growing, Writing, pause};
use hashbrown::HashMap;
use serde::Deserialize;
use std::borrow::Cow;
use std::time::Duration;

#[derive(Deserialize)]
struct Line<'a> {
    timestamp: u64,
    #[serde(borrow)]
    input: Cow<'a, str>,
    #[serde(borrow)]
    output: Cow<'a, str>,
    session_id: String,
}

/// A line whose texts have become blocks.
struct Request {
    timestamp: u64,
    session: String,
    prompt: Vec<u64>,
    prompt_tokens: u32,
    answer_blocks: Vec<u64>,
    answer_tokens: u32,
}

/// Reads all requests.
pub fn read(reading: &mut Reading, lines: &mut Lines) -> Result<u32, String> {
    let mut requests = Vec::new();
    while let Some(line) = lines.next_line()? {
        let request = request(line, reading).map_err(|what| lines.error(what))?;
        reading.count(request.prompt.len() + request.answer_blocks.len(), lines)?;
        requests.push(request);
    }
    requests.sort_by_key(|request| request.timestamp);
    let start = requests.first().map_or(0, |request| request.timestamp);
    // In order of arrival, with when the last request came and how long its answer is.
    let mut sessions: Vec<(Writing, u64, u32)> = Vec::new();
    let mut numbers: HashMap<String, usize> = HashMap::new();
    for request in requests {
        let arrival = Duration::from_micros(request.timestamp - start);
        let number = *numbers.entry(request.session.clone()).or_insert(sessions.len());
        if number == sessions.len() {
            sessions.push((Writing::new(request.session.clone(), arrival), request.timestamp, 0));
        }
        let Some((session, came, answered)) = sessions.get_mut(number) else { continue };
        let since = Duration::from_micros(request.timestamp.saturating_sub(*came));
        session.ask(Asked {
            prompt: &request.prompt,
            prompt_tokens: request.prompt_tokens,
            answer_blocks: request.answer_blocks,
            answer_tokens: request.answer_tokens,
            think: reading.think(pause(since, *answered)),
            class: "agent",
        });
        (*came, *answered) = (request.timestamp, request.answer_tokens);
    }
    sessions.into_iter().for_each(|(session, ..)| reading.add(session.session()));
    Ok(reading.block_tokens)
}

fn request(line: &str, reading: &Reading) -> Result<Request, String> {
    let line: Line<'_> = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let mut text = Growing::new(reading.block_tokens);
    text.extend(&reading.measure.tokens(&line.input)?);
    let (prompt, prompt_tokens) = (text.blocks(), text.tokens());
    let answer = reading.measure.tokens(&line.output)?;
    Ok(Request {
        timestamp: line.timestamp,
        session: line.session_id,
        prompt,
        prompt_tokens,
        answer_tokens: u32::try_from(answer.len()).unwrap_or(u32::MAX),
        answer_blocks: text.answer(&answer),
    })
}

#[cfg(test)]
mod tests {
    use super::super::open::{Format, Options, open};
    use super::super::shape::Shape;
    use super::*;

    /// Texts of which four bytes are a token and 64 of those a block.
    fn line(timestamp: u64, session: &str, input: &str, output: &str) -> String {
        serde_json::json!({
            "timestamp": timestamp, "input": input, "output": output, "session_id": session,
        })
        .to_string()
    }

    #[test]
    fn sessions_are_told_apart_and_answers_are_found_in_the_next_prompt() {
        let (head, answer) = ("head! ".repeat(64), "answer! ".repeat(64));
        let second = format!("{head}{answer}{head}");
        let lines = [
            line(9_000_000, "a", &second, "short"),
            line(3_000_000, "b", &head, &answer),
            line(1_000_000, "a", &head, &answer),
        ];
        let trace = Reading::text(&lines.join("\n"), Format::Lmcache).unwrap();
        let names: Vec<&str> = trace.sessions.iter().map(|session| session.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        let [first, next] = &trace.sessions[0].turns[..] else { panic!("two turns") };
        assert_eq!((first.prompt_tokens, first.blocks.len()), (96, 1));
        // Of the answer's 128 tokens 32 fill the prompt's second block, 64 the third.
        assert_eq!((first.answer_tokens, first.answer_blocks.len()), (128, 2));
        assert_eq!((next.keep, next.blocks.len()), (3, 2));
        // Eight seconds, less 128 tokens of 20 ms.
        assert_eq!(next.think, Duration::from_millis(8000 - 2560));
        assert_eq!(trace.sessions[1].arrival, Duration::from_secs(2));
    }

    #[test]
    fn a_line_of_another_form_is_an_error_with_its_place() {
        let text = format!("{}\n{{\"timestamp\": 1}}", line(1, "a", "b", "c"));
        let error = Reading::text(&text, Format::Lmcache).unwrap_err();
        assert!(error.starts_with("f:2: missing field `input`"), "{error}");
    }

    /// The published figures are by Qwen3's tokenizer; four bytes a token come near them.
    #[test]
    fn agent_traces_are_near_the_published_figures() {
        let shape = Shape::of(&open("magagent", &Options::default(), 1).unwrap());
        assert_eq!((shape.requests, shape.sessions), (746, 25));
        // By Qwen3's tokenizer 2,109.
        assert_eq!(shape.prompt_tokens[0], 2027);
        assert!((shape.hit_tokens - 0.832).abs() < 0.02, "{}", shape.hit_tokens);
    }
}
