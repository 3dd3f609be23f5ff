//! Golden vectors: request bodies, chats and texts whose token ids other programs computed.
//!
//! `tests/data/README.md` says which program and version made each file. Llama's tokenizer may not be part of this
//! repository; `scripts/models.sh` fetches it, and without it these tests say `SKIPPED` on standard error, or fail
//! when `WARMPATH_REQUIRE_MODELS` is set.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test fails by panicking, and clippy's exemption does not reach the functions that tests share"
)]

use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use warmpath::request::{Api, Input, RequestError, parse};
use warmpath::template::ChatTemplate;
use warmpath::tokens::Tokenizer;

/// 2026-01-15T12:30:00, when the transformers vectors were made.
const MADE_AT: u64 = 1_768_480_200;

/// Half a surrogate pair, which one body holds and no JSON reader of Rust's takes, and what stands for it in a test.
const HALF_PAIR: &str = r"\ud83d b";
const STAND_IN: &str = "<half a pair>";

/// Tests that found no model in this run.
static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// A model's files, loaded.
struct Reference {
    tokenizer: Tokenizer,
    config: Value,
    folder: PathBuf,
}

static QWEN3: LazyLock<Reference> = LazyLock::new(|| Reference::load(&data("models/qwen3")));
static LLAMA31: LazyLock<Option<Reference>> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(".work/models/llama3.1");
    folder.join("tokenizer.json").exists().then(|| Reference::load(&folder))
});

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn text_of(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn json_lines(name: &str) -> Vec<Value> {
    let text = text_of(&data(name));
    let line = |line: &str| serde_json::from_str(&line.replace(HALF_PAIR, STAND_IN)).expect(name);
    text.lines().map(line).collect()
}

/// Llama's files, or `None` after saying so past the test harness, which swallows what passing tests print.
fn llama31(test: &str) -> Option<&'static Reference> {
    let reference = LLAMA31.as_ref();
    if reference.is_none() {
        assert!(
            std::env::var_os("WARMPATH_REQUIRE_MODELS").is_none(),
            "llama3.1 is missing: run scripts/models.sh"
        );
        let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
        let line = format!("SKIPPED {test} ({count} so far): no llama3.1, run scripts/models.sh\n");
        std::io::stderr().write_all(line.as_bytes()).expect("standard error");
    }
    reference
}

impl Reference {
    fn load(folder: &Path) -> Self {
        let packed = folder.join("tokenizer.json.gz");
        let json = if packed.exists() {
            let mut json = String::new();
            let file = std::fs::File::open(packed).expect("tokenizer.json.gz");
            flate2::read::GzDecoder::new(file).read_to_string(&mut json).expect("gzip");
            json
        } else {
            text_of(&folder.join("tokenizer.json"))
        };
        let config = text_of(&folder.join("tokenizer_config.json"));
        Self {
            tokenizer: Tokenizer::from_json(&json).expect("tokenizer.json"),
            config: serde_json::from_str(&config).expect("tokenizer_config.json"),
            folder: folder.to_owned(),
        }
    }

    fn special_tokens(&self) -> BTreeMap<String, String> {
        let names = ["bos_token", "eos_token", "pad_token", "unk_token"];
        let token = |name: &str| {
            let token = &self.config[name];
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            Some((name.to_owned(), text.to_owned()))
        };
        names.into_iter().filter_map(token).collect()
    }

    /// The template in a file of its own.
    fn template_file(&self) -> ChatTemplate {
        let source = text_of(&self.folder.join("chat_template.jinja"));
        ChatTemplate::compile(&source, &self.special_tokens()).expect("chat_template.jinja")
    }

    /// The template in `tokenizer_config.json`, which is what the engine had.
    fn template_in_config(&self) -> ChatTemplate {
        let source = self.config["chat_template"].as_str().expect("chat_template");
        ChatTemplate::compile(source, &self.special_tokens()).expect("chat_template")
    }

    fn encode(&self, text: &str, add_special_tokens: bool) -> Vec<u32> {
        self.tokenizer.encode(text, add_special_tokens).expect("encode")
    }
}

fn ids(value: &Value) -> Vec<u32> {
    let id = |id: &Value| u32::try_from(id.as_u64().expect("an id")).expect("an id");
    value.as_array().expect("ids").iter().map(id).collect()
}

/// What `apply_chat_template` was called with.
fn variables(case: &Value) -> Map<String, Value> {
    let mut variables = Map::new();
    for name in ["messages", "tools", "documents"] {
        variables.insert(name.to_owned(), case.get(name).cloned().unwrap_or_default());
    }
    variables.extend(case["kwargs"].as_object().expect("kwargs").clone());
    variables
}

/// Every chat and every text of a file that transformers made.
#[track_caller]
fn check_transformers(name: &str, reference: &Reference, chats: usize, texts: usize) {
    let golden: Value = serde_json::from_str(&text_of(&data(name))).expect(name);
    let template = reference.template_file();
    let cases = golden["cases"].as_array().expect("cases");
    for case in cases {
        let rendered = template.render_variables(variables(case), MADE_AT);
        match case["rendered"].as_str() {
            Some(text) => {
                assert_eq!(rendered.as_deref(), Ok(text), "{name}: {}", case["name"]);
                assert_eq!(
                    reference.encode(text, false),
                    ids(&case["ids"]),
                    "{name}: {}",
                    case["name"]
                );
            }
            None => assert!(rendered.is_err(), "{name}: {}: {rendered:?}", case["name"]),
        }
    }
    let raw = golden["raw"].as_array().expect("raw");
    for case in raw {
        let text = case["text"].as_str().expect("text");
        assert_eq!(reference.encode(text, false), ids(&case["ids"]), "{name}: {text:?}");
        assert_eq!(reference.encode(text, true), ids(&case["ids_special"]), "{name}: {text:?}");
    }
    assert_eq!((cases.len(), raw.len()), (chats, texts), "{name}: vectors checked");
}

#[test]
fn qwen3_renders_and_tokenizes_as_transformers_does() {
    check_transformers("golden/qwen3.json", &QWEN3, 34, 20);
}

#[test]
fn llama31_renders_and_tokenizes_as_transformers_does() {
    let Some(reference) = llama31("llama31_renders_and_tokenizes_as_transformers_does") else {
        return;
    };
    check_transformers("golden/llama3.1.json", reference, 35, 21);
}

/// Why the engine has no ids for a body, in our words.
#[derive(Debug, PartialEq)]
enum Outcome {
    Ids(Vec<u32>),
    Refused(RequestError),
}

fn outcome(api: Api, body: &Value, reference: &Reference, template: &ChatTemplate) -> Outcome {
    let body = body.to_string().replace(STAND_IN, HALF_PAIR);
    let prompt = match parse(api, body.as_bytes()) {
        Ok(prompt) => prompt,
        Err(error) => return Outcome::Refused(error),
    };
    Outcome::Ids(match prompt.input {
        Input::Chat(chat) => {
            let text = template.render(&chat, MADE_AT).expect("render");
            reference.encode(&text, chat.add_special_tokens)
        }
        Input::Text { text, add_special_tokens } => reference.encode(&text, add_special_tokens),
        Input::Tokens(ids) => ids,
    })
}

/// Every chat body that a real engine was sent. `tokens` is what its `/tokenize` said where the chat endpoint
/// itself answered 400 for a reason that has nothing to do with the prompt (tools without a tool parser).
#[track_caller]
fn check_engine_chats(name: &str, reference: &Reference, template: &ChatTemplate, count: usize) {
    let lines = json_lines(name);
    for case in &lines {
        let case_name = case["name"].as_str().expect("name");
        let ours = outcome(Api::Chat, &case["request"], reference, template);
        let truth = [&case["chat_prompt_token_ids"], &case["tokens"]];
        match truth.into_iter().find(|ids| ids.is_array()) {
            Some(truth) => assert_eq!(ours, Outcome::Ids(ids(truth)), "{name}: {case_name}"),
            None => {
                let expected = match case_name {
                    "custom_template" => RequestError::Unsupported("chat_template"),
                    "surrogate_escape" => RequestError::Json,
                    other => panic!("{name}: {other} has no ids"),
                };
                assert_eq!(ours, Outcome::Refused(expected), "{name}: {case_name}");
            }
        }
    }
    assert_eq!(lines.len(), count, "{name}: vectors checked");
}

/// Every completions body. The engine answers 400 to an empty prompt, for which we have the tokenizer's ids (none,
/// or BOS): it is routed by load, being shorter than a block, and the engine answers.
#[track_caller]
fn check_engine_completions(name: &str, reference: &Reference, count: usize) {
    let template = ChatTemplate::compile("", &BTreeMap::new()).expect("compile");
    let lines = json_lines(name);
    for case in &lines {
        let ours = outcome(Api::Completions, &case["request"], reference, &template);
        let truth = [&case["completion_prompt_token_ids"], &case["tokens"]];
        let truth = truth.into_iter().find(|ids| ids.is_array()).expect("ids");
        assert_eq!(ours, Outcome::Ids(ids(truth)), "{name}: {case}");
    }
    assert_eq!(lines.len(), count, "{name}: vectors checked");
}

#[test]
fn qwen3_bodies_give_the_engines_ids() {
    check_engine_chats("vllm/golden_chat_qwen3.jsonl", &QWEN3, &QWEN3.template_file(), 33);
    check_engine_completions("vllm/golden_completions_qwen3.jsonl", &QWEN3, 12);
}

#[test]
fn llama31_bodies_give_the_engines_ids() {
    let Some(reference) = llama31("llama31_bodies_give_the_engines_ids") else { return };
    let template = reference.template_in_config();
    check_engine_chats("vllm/golden_chat_llama3.jsonl", reference, &template, 23);
    check_engine_completions("vllm/golden_completions_llama3.jsonl", reference, 6);
}
