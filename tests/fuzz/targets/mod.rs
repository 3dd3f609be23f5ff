//! What is fuzzed. A target is a function from bytes that fails by panicking; what holds for every input is said in it.
//!
//! The bytes of a target are what an attacker or a broken peer controls, taken where they come in. Where that needs more
//! than one text, a NUL byte stands between them.

mod operator;
mod report;
mod request;
mod response;
mod shared;
pub mod tokenizer;

use std::fs;
use std::path::Path;

/// One thing to fuzz.
pub struct Target {
    /// What it is called on the command line, and the folder of its seeds.
    pub name: &'static str,
    /// Runs one input.
    pub run: fn(&[u8]),
    /// Words of the format.
    pub words: &'static [&'static str],
    /// Seeds beside those in the folder.
    more_seeds: fn() -> Vec<Vec<u8>>,
    /// Inputs an ordinary test run makes: some hundred milliseconds of work, unoptimised.
    pub cases: u64,
}

/// All targets.
pub const ALL: &[Target] = &[
    request::BODIES,
    request::PROMPTS,
    response::RESPONSES,
    response::METRICS,
    response::ADMIN,
    response::MODELS,
    response::ATTEMPTS,
    shared::VALUES,
    shared::LOGS,
    shared::LINKS,
    report::REPORTS,
    operator::CONFIGS,
    operator::TEMPLATES,
    tokenizer::TOKENIZERS,
    tokenizer::PREPARED,
    tokenizer::TEXTS,
];

impl Target {
    /// What inputs are made from.
    pub fn seeds(&self) -> Vec<Vec<u8>> {
        let mut seeds = files(&Path::new("tests/fuzz/corpus").join(self.name));
        seeds.extend((self.more_seeds)());
        assert!(!seeds.is_empty(), "{} has seeds", self.name);
        seeds
    }
}

/// The files of a folder, in the order of their names: tests run in the package's folder, as wasm too.
fn files(folder: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("a folder's entry").path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("a seed")).collect()
}

fn no_more_seeds() -> Vec<Vec<u8>> {
    Vec::new()
}

/// The text before the first NUL, and what follows it.
fn halves(data: &[u8]) -> (&[u8], &[u8]) {
    let at = data.iter().position(|byte| *byte == 0);
    at.map_or((data, &[]), |at| (&data[..at], &data[at + 1..]))
}

/// Bytes taken one by one, zero when there are no more: decisions of a target that no format makes.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn u8(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    /// Small, or the largest there is, or near it.
    fn u32(&mut self) -> u32 {
        match self.u8() {
            255 => u32::MAX,
            254 => u32::MAX - 1,
            number @ 200.. => 1 << (number - 200).min(31),
            number => number.into(),
        }
    }

    fn u64(&mut self) -> u64 {
        match self.u8() {
            255 => u64::MAX,
            254 => u64::MAX - 1,
            number @ 190.. => 1 << (number - 190),
            number => number.into(),
        }
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
