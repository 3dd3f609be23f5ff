//! A closed loop: each connection sends its next request when the answer to the last has come whole.

use crate::chat::Request;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How to play.
pub struct Play {
    pub port: u16,
    pub connections: usize,
    /// Events of each answer; 0 is an answer in one piece.
    pub events: usize,
    /// What a replica waits between them.
    pub pace_us: u64,
}

/// An answer that takes longer is a failure of the run.
const PATIENCE: Duration = Duration::from_secs(20);

/// Plays every request once, and says how long each took.
pub fn play(play: &Play, requests: &[&Request]) -> Result<Value, String> {
    let (next, began) = (AtomicUsize::new(0), Instant::now());
    let outcomes: Vec<Result<Vec<u64>, String>> = std::thread::scope(|scope| {
        let connection = || scope.spawn(|| connection(play, requests, &next));
        let threads: Vec<_> = (0..play.connections).map(|_| connection()).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.map(|end| end.unwrap_or_else(|_| Err("a thread panicked".to_owned()))).collect()
    });
    let wall_us = micros(began);
    let mut latencies = Vec::with_capacity(requests.len());
    for outcome in outcomes {
        latencies.extend(outcome?);
    }
    let body_bytes: usize = requests.iter().map(|request| request.body.len()).sum();
    Ok(json!({"body_bytes": body_bytes, "wall_us": wall_us, "latencies_us": latencies}))
}

fn connection(play: &Play, requests: &[&Request], next: &AtomicUsize) -> Result<Vec<u64>, String> {
    let text = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect(("127.0.0.1", play.port)).map_err(text)?;
    stream.set_nodelay(true).map_err(text)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(text)?;
    let mut latencies = Vec::new();
    let mut answer = Vec::with_capacity(64 << 10);
    while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
        let head = head(play, request);
        let began = Instant::now();
        stream.write_all(head.as_bytes()).map_err(text)?;
        stream.write_all(&request.body).map_err(text)?;
        read(&mut stream, &mut answer)?;
        latencies.push(micros(began));
        check(play, request, &answer)?;
    }
    Ok(latencies)
}

fn micros(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX)
}

fn head(play: &Play, request: &Request) -> String {
    let Request { body, prompt_tokens, cached_tokens, answer_tokens } = request;
    let answer_tokens = if play.events > 0 { play.events + 1 } else { *answer_tokens };
    let stream = match play.events {
        0 => String::new(),
        n => format!("x-bench-events: {n}\r\nx-bench-pace-us: {}\r\n", play.pace_us),
    };
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nuser-agent: bench\r\naccept: */*\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\
         x-bench-usage: {prompt_tokens} {cached_tokens} {answer_tokens}\r\n{stream}\r\n",
        body.len()
    )
}

/// Reads one answer whole.
fn read(stream: &mut TcpStream, answer: &mut Vec<u8>) -> Result<(), String> {
    answer.clear();
    let mut piece = [0; 16 << 10];
    loop {
        let count = stream.read(&mut piece).map_err(|error| error.to_string())?;
        if count == 0 {
            return Err("the connection ended within an answer".to_owned());
        }
        answer.extend_from_slice(piece.get(..count).unwrap_or_default());
        if is_whole(answer) {
            return Ok(());
        }
    }
}

fn is_whole(answer: &[u8]) -> bool {
    let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { return false };
    let head = String::from_utf8_lossy(answer.get(..end).unwrap_or_default());
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    match length.and_then(|length| length.parse::<usize>().ok()) {
        Some(length) => answer.len() >= end + 4 + length,
        None => answer.ends_with(b"\r\n0\r\n\r\n"),
    }
}

fn check(play: &Play, request: &Request, answer: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(answer);
    let usage = format!("\"prompt_tokens\":{},", request.prompt_tokens);
    // The role, the usage and the end are events, too.
    let wanted = if play.events > 0 { play.events + 3 } else { 0 };
    let events = text.matches("data: ").count();
    if !text.starts_with("HTTP/1.1 200") || !text.contains(&usage) || events != wanted {
        let head: String = text.chars().take(300).collect();
        return Err(format!("not the answer that was asked for ({events} events): {head}"));
    }
    Ok(())
}
