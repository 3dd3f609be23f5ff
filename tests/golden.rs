//! Golden vectors: request bodies, chats and texts whose token ids other programs computed.
//!
//! `tests/data/README.md` says which program and version made each file. Most tokenizers are too large for this
//! repository, or may not be part of it; `scripts/models.sh` fetches them, and without one its tests say `SKIPPED` on
//! standard error, or fail when `WARMPATH_REQUIRE_MODELS` is set.

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
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use warmpath::request::{Api, Input, RequestError, parse};
use warmpath::template::{ChatTemplate, Harmony, TemplateError};
use warmpath::tokens::Tokenizer;
use warmpath::tokens::prepared::LoadError;

/// 2026-01-15T12:30:00, when the transformers vectors were made.
const MADE_AT: u64 = 1_768_480_200;

/// Half a surrogate pair, which one body holds and no JSON reader of Rust's takes, and what stands for it in a test.
const HALF_PAIR: &str = r"\ud83d b";
const STAND_IN: &str = "<half a pair>";

/// Tests that found no model in this run.
static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// A model's files, loaded.
struct Reference {
    tokenizer: Result<Tokenizer, LoadError>,
    config: Value,
    folder: PathBuf,
}

/// The models that vectors were made with: Qwen3's files are part of this repository, the others are fetched.
const MODELS: [&str; 10] = [
    "deepseek-v3",
    "gemma3",
    "glm-4.5",
    "gpt-oss",
    "llama3.1",
    "mistral-nemo",
    "phi-4",
    "qwen2.5",
    "qwen3",
    "qwen3.5",
];

/// Each is loaded by the first test that wants it.
static LOADED: [OnceLock<Option<Reference>>; MODELS.len()] =
    [const { OnceLock::new() }; MODELS.len()];

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

/// A model, or `None` after saying so past the test harness, which swallows what passing tests print.
fn model(name: &str, test: &str) -> Option<&'static Reference> {
    let place = MODELS.iter().position(|model| *model == name).expect(name);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = match name {
        "qwen3" => data("models/qwen3"),
        _ => root.join(".work/models").join(name),
    };
    let is_there = folder.join("chat_template.jinja").exists();
    let reference = LOADED[place].get_or_init(|| is_there.then(|| Reference::load(&folder)));
    if reference.is_none() {
        assert!(
            std::env::var_os("WARMPATH_REQUIRE_MODELS").is_none(),
            "{name} is missing: run scripts/models.sh"
        );
        skip(&format!("{test}: no {name}, run scripts/models.sh"));
    }
    reference.as_ref()
}

fn skip(what: &str) {
    let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
    let line = format!("SKIPPED ({count} so far) {what}\n");
    std::io::stderr().write_all(line.as_bytes()).expect("standard error");
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
            tokenizer: Tokenizer::from_json(&json),
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
        let tokenizer = self.tokenizer.as_ref().expect("tokenizer.json");
        tokenizer.encode(text, add_special_tokens).expect("encode")
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
fn check_transformers(name: &str, chats: usize, texts: usize) {
    let Some(reference) = model(name, &format!("vectors of {name}")) else { return };
    let golden: Value =
        serde_json::from_str(&text_of(&data(&format!("golden/{name}.json")))).expect(name);
    let template = reference.template_file();
    let cases = golden["cases"].as_array().expect("cases");
    for case in cases {
        let rendered = template.render_variables(variables(case), MADE_AT);
        check_case(name, case, rendered, reference);
    }
    let raw = golden["raw"].as_array().expect("raw");
    for case in raw {
        let text = case["text"].as_str().expect("text");
        assert_eq!(reference.encode(text, false), ids(&case["ids"]), "{name}: {text:?}");
        assert_eq!(reference.encode(text, true), ids(&case["ids_special"]), "{name}: {text:?}");
    }
    assert_eq!((cases.len(), raw.len()), (chats, texts), "{name}: vectors checked");
}

/// One chat: its text and its ids, or that it has neither.
#[track_caller]
fn check_case(
    name: &str,
    case: &Value,
    rendered: Result<String, TemplateError>,
    reference: &Reference,
) {
    let case_name = &case["name"];
    match case["rendered"].as_str() {
        Some(text) => {
            assert_eq!(rendered.as_deref(), Ok(text), "{name}: {case_name}");
            assert_eq!(reference.encode(text, false), ids(&case["ids"]), "{name}: {case_name}");
        }
        None => assert!(rendered.is_err(), "{name}: {case_name}: {rendered:?}"),
    }
}

#[test]
fn deepseek_v3_renders_and_tokenizes_as_transformers_does() {
    check_transformers("deepseek-v3", 36, 18);
}

#[test]
fn gemma3_renders_and_tokenizes_as_transformers_does() {
    check_transformers("gemma3", 31, 20);
}

#[test]
fn glm45_renders_and_tokenizes_as_transformers_does() {
    check_transformers("glm-4.5", 28, 20);
}

/// The Jinja template, which engines do not use for this family.
#[test]
fn gpt_oss_renders_and_tokenizes_as_transformers_does() {
    check_transformers("gpt-oss", 39, 24);
}

#[test]
fn llama31_renders_and_tokenizes_as_transformers_does() {
    check_transformers("llama3.1", 35, 21);
}

#[test]
fn mistral_nemo_renders_and_tokenizes_as_transformers_does() {
    check_transformers("mistral-nemo", 35, 24);
}

#[test]
fn phi4_renders_and_tokenizes_as_transformers_does() {
    check_transformers("phi-4", 27, 20);
}

#[test]
fn qwen25_renders_and_tokenizes_as_transformers_does() {
    check_transformers("qwen2.5", 29, 21);
}

#[test]
fn qwen3_renders_and_tokenizes_as_transformers_does() {
    check_transformers("qwen3", 34, 20);
}

#[test]
fn qwen35_renders_and_tokenizes_as_transformers_does() {
    check_transformers("qwen3.5", 38, 17);
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

/// One body for each rule of the engine. What it answers 400 may come to anything here, but not to a panic.
fn check_engine_bodies(name: &str, reference: &Reference, template: &ChatTemplate) {
    let lines = json_lines(name);
    let (mut compared, mut wrong) = (0, Vec::new());
    for case in &lines {
        let ours = engine_ids(&case["request"], reference, template);
        let truth = &case["chat_prompt_token_ids"];
        let is_right = match case["name"].as_str().unwrap_or_default() {
            // The model's own limit of tokens, an argument of the code around the template.
            "truncate_minus_one" | "argument_tokenize" => ours.is_err(),
            // A number whose digits are lost, which one of the templates writes.
            "numbers_in_tools" => ours.is_err() || ours == Ok(ids(truth)),
            _ if truth.is_array() => {
                compared += 1;
                ours == Ok(ids(truth))
            }
            _ => true,
        };
        if !is_right {
            wrong.push(format!("{}: {ours:?}", case["name"]));
        }
    }
    assert!(wrong.is_empty(), "{name}: {wrong:#?}");
    assert_eq!((lines.len(), compared), (129, 105), "{name}: vectors checked");
}

fn engine_ids(
    body: &Value,
    reference: &Reference,
    template: &ChatTemplate,
) -> Result<Vec<u32>, String> {
    let prompt = parse(Api::Chat, body.to_string().as_bytes()).map_err(|e| e.to_string())?;
    let Input::Chat(chat) = prompt.input else { return Err("no chat".to_owned()) };
    let text = template.render(&chat, MADE_AT).map_err(|error| error.to_string())?;
    let ids = reference.encode(&text, chat.add_special_tokens);
    match prompt.truncation {
        None => Ok(ids),
        Some(truncation) => truncation.apply(ids, 0).ok_or_else(|| "truncation".to_owned()),
    }
}

#[test]
fn qwen3_bodies_give_the_engines_ids() {
    let Some(reference) = model("qwen3", "qwen3_bodies_give_the_engines_ids") else { return };
    let template = reference.template_file();
    check_engine_chats("vllm/golden_chat_qwen3.jsonl", reference, &template, 33);
    check_engine_bodies("vllm/bodies_qwen3.jsonl", reference, &template);
    check_engine_completions("vllm/golden_completions_qwen3.jsonl", reference, 12);
}

#[test]
fn llama31_bodies_give_the_engines_ids() {
    let Some(reference) = model("llama3.1", "llama31_bodies_give_the_engines_ids") else { return };
    let template = reference.template_in_config();
    check_engine_chats("vllm/golden_chat_llama3.jsonl", reference, &template, 23);
    check_engine_bodies("vllm/bodies_llama3.jsonl", reference, &template);
    check_engine_completions("vllm/golden_completions_llama3.jsonl", reference, 6);
}

/// The ids of a conversation, or what it fails with.
fn harmony_ids(harmony: Harmony, body: &Value, reference: &Reference) -> Result<Vec<u32>, String> {
    let prompt = parse(Api::Chat, body.to_string().as_bytes()).map_err(|e| e.to_string())?;
    let Input::Chat(chat) = prompt.input else { panic!("a chat") };
    let pieces = harmony.render(&chat, MADE_AT).map_err(|error| error.to_string())?;
    let tokenizer = reference.tokenizer.as_ref().expect("tokenizer.json");
    let mut encoding = tokenizer.begin_pieces(pieces).expect("an encoding");
    loop {
        if let Some(ids) = encoding.go_on(tokenizer, &mut || true).expect("encode") {
            return Ok(ids);
        }
    }
}

/// Texts are compared in `src/template/harmony/tests.rs`, without a tokenizer.
#[test]
fn gpt_oss_bodies_give_the_engines_ids() {
    let Some(reference) = model("gpt-oss", "gpt_oss_bodies_give_the_engines_ids") else { return };
    let mut checked = 0;
    for case in json_lines("vllm/harmony.jsonl").iter().filter(|case| case["ids"].is_array()) {
        let ours = harmony_ids(Harmony::Vllm, &case["request"], reference);
        assert_eq!(ours, Ok(ids(&case["ids"])), "{}", case["name"]);
        checked += 1;
    }
    let golden = text_of(&data("golden/gpt-oss.harmony.json"));
    let golden: Value = serde_json::from_str(&golden).expect("golden/gpt-oss.harmony.json");
    for case in golden["cases"].as_array().expect("cases") {
        let mut body = serde_json::json!({"messages": case["messages"]});
        if case["tools"].is_array() {
            body["tools"] = case["tools"].clone();
        }
        let ours = harmony_ids(Harmony::Library, &body, reference);
        assert_eq!(ours, Ok(ids(&case["ids"])), "{}", case["name"]);
        checked += 1;
    }
    assert_eq!(checked, 132 + 25);
}
