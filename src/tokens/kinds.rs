//! Small tokenizers of every kind against Python's `tokenizers`; also as wasm, so that both builds are held to one result.
//!
//! `tests/data/tokens/kinds.json` has them; `scripts/models/token_vectors.py` made it. Texts are generated here as there.

use super::Tokenizer;
use super::prepared::{load, prepare};
use serde_json::Value;
use std::io::Read;

const KINDS: &str = include_str!("../../tests/data/tokens/kinds.json");
const QWEN3: &[u8] = include_bytes!("../../tests/data/models/qwen3/tokenizer.json.gz");

struct Texts {
    state: u64,
    words: Vec<String>,
    odd: Vec<String>,
}

impl Texts {
    fn new(kinds: &Value) -> Self {
        let list = |name: &str| {
            let texts = kinds[name].as_array().unwrap().iter();
            texts.map(|text| text.as_str().unwrap().to_owned()).collect()
        };
        Self { state: kinds["seed"].as_u64().unwrap(), words: list("words"), odd: list("odd") }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.state >> 33) % bound as u64) as usize
    }

    fn word(&mut self) -> String {
        let at = self.below(self.words.len());
        self.words[at].clone()
    }

    fn odd(&mut self) -> String {
        let at = self.below(self.odd.len());
        self.odd[at].clone()
    }

    fn next(&mut self) -> String {
        let mut text = String::new();
        for _ in 0..1 + self.below(12) {
            match self.below(9) {
                0..4 => text.push_str(&self.word()),
                4 => text.push_str(&self.odd()),
                5 => text.push(' '),
                6 => text.push_str(&self.odd().repeat(1 + self.below(4))),
                7 => text.extend(char::from_u32(self.below(0x530) as u32)),
                _ => text.extend(char::from_u32(0x4E00 + self.below(0x5000) as u32)),
            }
        }
        text
    }
}

fn digest(tokenizer: &Tokenizer, kinds: &Value, count: &Value) -> String {
    let mut texts = Texts::new(kinds);
    let mut value = 0xCBF2_9CE4_8422_2325_u64;
    for _ in 0..count.as_u64().unwrap() {
        let mut ids = tokenizer.encode(&texts.next(), true).unwrap();
        ids.push(u32::MAX);
        for byte in ids.into_iter().flat_map(u32::to_le_bytes) {
            value = (value ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    }
    format!("{value:016x}")
}

/// A case's `tokenizer.json`: its base with some fields of its own.
fn tokenizer_json(kinds: &Value, case: &Value) -> Value {
    let mut tokenizer = kinds["bases"][case["base"].as_str().unwrap()].clone();
    for (path, value) in case["changes"].as_object().unwrap() {
        let (parent, field) = path.rsplit_once('/').unwrap();
        tokenizer.pointer_mut(parent).unwrap()[field] = value.clone();
    }
    tokenizer
}

#[test]
fn every_kind_of_tokenizer_gives_the_ids_of_pythons() {
    let kinds: Value = serde_json::from_str(KINDS).unwrap();
    let cases = kinds["cases"].as_array().unwrap();
    assert!(cases.len() > 50, "{} cases", cases.len());
    let mut wrong = Vec::new();
    for case in cases {
        let tokenizer = Tokenizer::from_json(&tokenizer_json(&kinds, case).to_string());
        let tokenizer = tokenizer.unwrap_or_else(|error| panic!("{}: {error}", case["name"]));
        if digest(&tokenizer, &kinds, &case["texts"]) != case["digest"].as_str().unwrap() {
            wrong.push(&case["name"]);
        }
    }
    assert!(wrong.is_empty(), "other ids than {}: {wrong:?}", kinds["made_by"]);
}

#[test]
fn qwen3_gives_the_ids_of_pythons_natively_and_as_wasm() {
    let kinds: Value = serde_json::from_str(KINDS).unwrap();
    let mut json = String::new();
    flate2::read::GzDecoder::new(QWEN3).read_to_string(&mut json).unwrap();
    let tokenizer = Tokenizer::from_json(&json).unwrap();
    let case = &kinds["qwen3"];
    assert_eq!(digest(&tokenizer, &kinds, &case["texts"]), case["digest"].as_str().unwrap());
}

/// Long texts, with pauses wherever one is possible, give what they give at once.
#[test]
fn every_kind_of_tokenizer_pauses_without_a_trace() {
    let kinds: Value = serde_json::from_str(KINDS).unwrap();
    for case in kinds["cases"].as_array().unwrap().iter().step_by(3) {
        let tokenizer = Tokenizer::from_json(&tokenizer_json(&kinds, case).to_string()).unwrap();
        let mut texts = Texts::new(&kinds);
        let mut text = String::new();
        while text.len() < 40_000 {
            text.push_str(&texts.next());
        }
        let whole = tokenizer.encode(&text, true).unwrap();
        let mut encoding = tokenizer.begin(text, true).unwrap();
        let mut steps = 0;
        let ids = loop {
            steps += 1;
            if let Some(ids) = encoding.go_on(&tokenizer, &mut || false).unwrap() {
                break ids;
            }
        };
        assert!(ids == whole, "{}", case["name"]);
        assert!(steps > 3, "{}: {steps} steps", case["name"]);
    }
}

/// The longest words there can be are encoded in steps, whatever the model.
#[test]
fn long_words_of_every_kind_are_bounded() {
    let kinds: Value = serde_json::from_str(KINDS).unwrap();
    for case in kinds["cases"].as_array().unwrap().iter().take(9) {
        let bytes = prepare(&tokenizer_json(&kinds, case).to_string(), "{}", None).unwrap();
        let tokenizer = load(bytes).unwrap().tokenizer;
        for text in ["the".repeat(30_000), "щ".repeat(30_000), "▁".repeat(30_000)] {
            let mut encoding = tokenizer.begin(text, false).unwrap();
            let mut steps = 0;
            while encoding.go_on(&tokenizer, &mut || false).unwrap().is_none() {
                steps += 1;
            }
            assert!(steps > 3, "{}: {steps} steps", case["name"]);
        }
    }
}
