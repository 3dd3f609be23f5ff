//! What `scripts/vllm/record.py` wrote: an engine's cache events beside requests, in the order in which they came and went.

use flate2::read::GzDecoder;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// One message of the engine's publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub topic: String,
    pub seq: u64,
    pub payload: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub number: u64,
    pub model: String,
    pub salt: Option<String>,
    pub prompt: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    Section(String),
    Batch(Frame),
    /// Batches that a listener is to have missed.
    Lost(Vec<u64>),
    /// What the engine answered when it was asked for what it had published from there on.
    Replay(u64, Vec<Frame>),
    Sent(Request),
    Answered {
        number: u64,
        cached_tokens: usize,
    },
    /// Whether a reset was granted.
    Reset(bool),
    Killed,
    Started,
}

#[derive(Debug)]
pub struct Model {
    pub name: String,
    pub root: String,
    pub parent: Option<String>,
}

#[derive(Debug)]
pub struct Recording {
    pub block_tokens: usize,
    pub replay_batches: usize,
    pub models: Vec<Model>,
    pub lines: Vec<Line>,
}

impl Recording {
    pub fn read(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/vllm/events");
        let file = File::open(folder.join(format!("{name}.jsonl.gz"))).unwrap();
        let mut lines = BufReader::new(GzDecoder::new(file))
            .lines()
            .map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        let header = lines.next().unwrap();
        let number = |key: &str| header[key].as_u64().unwrap() as usize;
        Self {
            block_tokens: number("block_tokens"),
            replay_batches: number("replay_batches"),
            models: header["models"].as_array().unwrap().iter().map(model).collect(),
            lines: lines.filter_map(|line| read_line(&line)).collect(),
        }
    }

    /// What the engine said of a request; `None` where the client left before it could.
    pub fn cached_tokens(&self, request: u64) -> Option<usize> {
        self.lines.iter().find_map(|line| match line {
            Line::Answered { number, cached_tokens } if *number == request => Some(*cached_tokens),
            _ => None,
        })
    }
}

fn model(value: &Value) -> Model {
    let text = |key: &str| value[key].as_str().map(str::to_owned);
    Model { name: text("id").unwrap(), root: text("root").unwrap(), parent: text("parent") }
}

fn read_line(line: &Value) -> Option<Line> {
    let (key, value) = line.as_object().unwrap().iter().next().unwrap();
    let number = || value.as_u64().unwrap();
    Some(match key.as_str() {
        "section" => Line::Section(value.as_str().unwrap().to_owned()),
        "batch" => Line::Batch(frame(value)),
        "lost" => Line::Lost(numbers(value)),
        "replay" => {
            let frames = line["frames"].as_array().unwrap();
            Line::Replay(number(), frames.iter().map(frame).collect())
        }
        "sent" => Line::Sent(Request {
            number: number(),
            model: line["model"].as_str().unwrap().to_owned(),
            salt: line["salt"].as_str().map(str::to_owned),
            prompt: numbers(&line["prompt"]).iter().map(|id| *id as u32).collect(),
        }),
        "answered" => {
            let cached_tokens = line["cached_tokens"].as_u64().unwrap() as usize;
            Line::Answered { number: number(), cached_tokens }
        }
        "call" => Line::Reset(line["answer"]["success"].as_bool().unwrap()),
        "engine" if value == "killed" => Line::Killed,
        "engine" => Line::Started,
        // When the first token came, and which client left: for readers.
        "first" | "left" => return None,
        other => panic!("a line of kind {other}"),
    })
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

fn frame(value: &Value) -> Frame {
    Frame {
        topic: value[0].as_str().unwrap().to_owned(),
        seq: value[1].as_u64().unwrap(),
        payload: from_base64(value[2].as_str().unwrap()),
    }
}

fn from_base64(text: &str) -> Vec<u8> {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for byte in text.bytes().filter(|byte| *byte != b'=') {
        let digit = digits.iter().position(|digit| *digit == byte).unwrap() as u32;
        bits = bits << 6 | digit;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
