//! Golden vectors of the APIs beside chat: bodies that a real vLLM was sent, and the token ids it made of them.
//!
//! `tests/data/README.md` says how they were made. Llama's tokenizer is fetched by `scripts/models.sh`; without it its
//! test says `SKIPPED`, or fails when `WARMPATH_REQUIRE_MODELS` is set.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test fails by panicking, and clippy's exemption does not reach the functions that tests share"
)]

use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use warmpath::request::{Api, Input, RequestError, parse};
use warmpath::template::ChatTemplate;
use warmpath::tokens::Tokenizer;

/// No template that is used here prints the time.
const ANY_TIME: u64 = 1_768_480_200;

/// A model's files, loaded.
struct Reference {
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn text_of(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Reference {
    fn new(tokenizer: &str, config: &Value, template: &str) -> Self {
        let text = |name: &str| {
            let token = &config[name];
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            Some((name.to_owned(), text.to_owned()))
        };
        let names = ["bos_token", "eos_token", "pad_token", "unk_token"];
        let special: BTreeMap<String, String> = names.into_iter().filter_map(text).collect();
        Self {
            tokenizer: Tokenizer::from_json(tokenizer).expect("tokenizer.json"),
            template: ChatTemplate::compile(template, &special).expect("a template"),
        }
    }

    fn qwen3() -> Self {
        let folder = data("models/qwen3");
        let packed = std::fs::File::open(folder.join("tokenizer.json.gz")).expect("a tokenizer");
        let mut tokenizer = String::new();
        flate2::read::GzDecoder::new(packed).read_to_string(&mut tokenizer).expect("gzip");
        let config = serde_json::from_str(&text_of(&folder.join("tokenizer_config.json")));
        let template = text_of(&folder.join("chat_template.jinja"));
        Self::new(&tokenizer, &config.expect("tokenizer_config.json"), &template)
    }

    /// `None` after saying so past the test harness, which swallows what passing tests print.
    fn llama31(test: &str) -> Option<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(".work/models/llama3.1");
        if !folder.join("tokenizer.json").exists() {
            let is_required = std::env::var_os("WARMPATH_REQUIRE_MODELS").is_some();
            assert!(!is_required, "llama3.1 is missing: run scripts/models.sh");
            let line = format!("SKIPPED {test}: no llama3.1, run scripts/models.sh\n");
            std::io::stderr().write_all(line.as_bytes()).expect("standard error");
            return None;
        }
        let config = text_of(&folder.join("tokenizer_config.json"));
        let config: Value = serde_json::from_str(&config).expect("tokenizer_config.json");
        let template = config["chat_template"].as_str().expect("a template").to_owned();
        Some(Self::new(&text_of(&folder.join("tokenizer.json")), &config, &template))
    }

    /// The first prompt's ids, and whether there are more.
    fn ids(&self, path: &str, body: &Value) -> Result<(Vec<u32>, bool), RequestError> {
        let api = Api::of_path(path).expect(path);
        let prompt = parse(api, body.to_string().as_bytes())?;
        let ids = match prompt.input {
            Input::Chat(chat) => {
                let text = self.template.render(&chat, ANY_TIME).expect("a rendering");
                self.tokenizer.encode(&text, chat.add_special_tokens).expect("ids")
            }
            Input::Text { text, add_special_tokens } => {
                self.tokenizer.encode(&text, add_special_tokens).expect("ids")
            }
            Input::Tokens(ids) => ids,
        };
        let ids =
            prompt.truncation.map_or(Some(ids.clone()), |truncation| truncation.apply(ids, 0));
        Ok((ids.expect("a side"), prompt.more_prompts > 0))
    }
}

/// Bodies that the engine takes and whose tokens cannot be known here, or are not by intent.
fn is_unknown_here(name: &str) -> bool {
    // The engine shows custom tools in words of its own.
    name == "tools_custom"
        // The engine makes an id of the time.
        || name == "use_without_id"
}

/// Every body of a file. What the engine refuses must not be taken for a prompt.
#[track_caller]
fn check(name: &str, reference: &Reference, count: usize) {
    let text = text_of(&data(name));
    let mut checked = 0;
    let mut wrong = Vec::new();
    for line in text.lines() {
        let case: Value = serde_json::from_str(line).expect(name);
        let path = case["path"].as_str().expect("path");
        let case_name = case["name"].as_str().expect("name");
        if case_name == "image" {
            // Refused only because the engine's model has no eyes.
            continue;
        }
        let ours = reference.ids(path, &case["request"]);
        let Some(truth) = case["token_ids"].as_array() else {
            if ours.is_ok() {
                wrong.push(format!("{path} {case_name}: the engine refuses it"));
            }
            continue;
        };
        let id = |id: &Value| u32::try_from(id.as_u64().expect("an id")).expect("an id");
        let truth: Vec<u32> = truth.iter().map(id).collect();
        match ours {
            Ok((ours, is_batch))
                if ours == truth
                    && is_batch == (case["prompts"].as_u64() > Some(1))
                    && !is_unknown_here(case_name) =>
            {
                checked += 1
            }
            Err(RequestError::Unsupported(_)) if is_unknown_here(case_name) => {}
            ours => {
                wrong.push(format!("{path} {case_name}: {ours:?}, not {truth:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{name}:\n{}", wrong.join("\n"));
    assert_eq!(checked, count, "{name}: vectors checked");
}

#[test]
fn qwen3_bodies_of_every_api_give_the_engines_ids() {
    check("vllm/golden_apis_qwen3.jsonl", &Reference::qwen3(), 140);
}

/// Prompts that are not answered, of which the engine tells the number of tokens, over all prompts of a batch.
#[track_caller]
fn check_counts(name: &str, reference: &Reference, count: usize) {
    let text = text_of(&data(name));
    let mut checked = 0;
    for line in text.lines() {
        let case: Value = serde_json::from_str(line).expect(name);
        let Some(truth) = case["prompt_tokens"].as_u64() else { continue };
        let (ours, is_batch) =
            reference.ids(case["path"].as_str().expect("path"), &case["request"]).expect(line);
        let ours = ours.len() as u64;
        assert!(if is_batch { ours < truth } else { ours == truth }, "{ours} tokens: {line}");
        checked += 1;
    }
    assert_eq!(checked, count, "{name}: vectors checked");
}

#[test]
fn prompts_without_an_answer_are_counted_as_the_engine_does() {
    let test = "prompts_without_an_answer_are_counted_as_the_engine_does";
    if let Some(reference) = Reference::llama31(test) {
        check_counts("vllm/golden_pooling_llama3.jsonl", &reference, 24);
    }
}

#[test]
fn llama31_bodies_of_every_api_give_the_engines_ids() {
    let test = "llama31_bodies_of_every_api_give_the_engines_ids";
    if let Some(reference) = Reference::llama31(test) {
        check("vllm/golden_apis_llama3.jsonl", &reference, 140);
    }
}
