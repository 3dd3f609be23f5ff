//! `warmpath-parity` against a mock replica: what it says of requests, and how it exits.
//!
//! The mock reads prompts as the filter does, so equality here proves the command, not the prompts: those are compared
//! with a real engine by `scripts/vllm.sh`.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::expect_used,
    reason = "a test fails by panicking, and clippy's exemption does not reach the functions that tests share"
)]

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use tokio::net::TcpListener;
use warmpath::mock::engine::EngineConfig;
use warmpath::mock::{Handle, ReplicaConfig, serve};
use warmpath::model::Model;
use warmpath::tokens::prepared::prepare;

/// Qwen3, prepared.
fn prepared() -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/qwen3");
    let packed = std::fs::File::open(folder.join("tokenizer.json.gz")).expect("a tokenizer");
    let mut tokenizer = String::new();
    flate2::read::GzDecoder::new(packed).read_to_string(&mut tokenizer).expect("gzip");
    let text = |name: &str| std::fs::read_to_string(folder.join(name)).expect(name);
    let template = text("chat_template.jinja");
    prepare(&tokenizer, &text("tokenizer_config.json"), Some(&template)).expect("a model")
}

fn written(name: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("parity-{name}"));
    std::fs::write(&path, bytes).expect("a file");
    path
}

async fn replica(model: Vec<u8>) -> Handle {
    let model = Some(Arc::new(Model::load(model).expect("a model")));
    let engine = EngineConfig { prefill_rate: 1_000_000.0, ..EngineConfig::default() };
    let served_names = vec!["tiny".to_owned()];
    let config = ReplicaConfig { served_names, model, engine, ..ReplicaConfig::default() };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    serve(config, listener).expect("a replica")
}

const REQUESTS: &str = r#"{"name": "a chat", "body": {"model": "x", "messages": [{"role": "user", "content": "Hi"}]}}
{"name": "a text", "body": {"model": "x", "prompt": "The quick brown fox"}}
{"name": "a response", "body": {"model": "x", "input": "Hi"}}
{"name": "two texts", "path": "/v1/embeddings", "body": {"model": "x", "input": ["a", "b"]}}
{"name": "a file", "body": {"model": "x", "input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}}
{"name": "not served", "path": "/v1/chat/completions/batch", "body": {"model": "x", "messages": [[{"role": "user", "content": "Hi"}]]}}
"#;

/// Plays the requests, and returns the first word said of each, with the code of the exit.
async fn played(url: &str, prepared: &Path, config: &Path) -> (Vec<String>, Option<i32>, Output) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmpath-parity"));
    command.args([url, "--model", "tiny", "--no-golden", "--prepared"]).arg(prepared);
    command.arg("--requests").arg(written("requests.jsonl", REQUESTS.as_bytes()));
    command.arg("--config").arg(config);
    let output = tokio::task::spawn_blocking(move || command.output());
    let output = output.await.expect("a thread").expect("the command");
    let text = String::from_utf8_lossy(&output.stdout);
    let words = text.lines().filter_map(|line| line.split_whitespace().next());
    (words.map(str::to_owned).collect(), output.status.code(), output)
}

/// The filter's configuration, with these arguments for the model's template.
fn configured(name: &str, arguments: &str) -> PathBuf {
    let prepared = r#"{"cluster": "files", "path": "/tiny"}"#;
    let model =
        format!(r#"{{"name": "tiny", "prepared": {prepared}, "template_arguments": {arguments}}}"#);
    written(
        name,
        format!(r#"{{"models": [{model}], "clusters": [{{"name": "replicas", "admin_cluster": "admin"}}]}}"#).as_bytes(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_equal_or_differ_and_the_exit_says_so() {
    let model = prepared();
    let path = written("qwen3.warmpath", &model);
    let replica = replica(model).await;
    let url = format!("http://{}", replica.address);
    let words = |said: [&str; 7]| said.map(str::to_owned).to_vec();

    let as_it_is = configured("same.json", "{}");
    let (said, code, output) = played(&url, &path, &as_it_is).await;
    let expected = words(["equal", "equal", "count", "unsaid", "unread", "refused", "6"]);
    assert_eq!((said, code), (expected, Some(0)), "{output:?}");

    // The replica's template is not given this argument, which makes it write more.
    let otherwise = configured("otherwise.json", r#"{"enable_thinking": false}"#);
    let (said, code, output) = played(&url, &path, &otherwise).await;
    let expected = words(["differs", "equal", "differs", "unsaid", "unread", "refused", "6"]);
    assert_eq!((said, code), (expected, Some(1)), "{output:?}");

    let (said, code, output) = played("http://127.0.0.1:1", &path, &as_it_is).await;
    assert_eq!((said, code), (Vec::new(), Some(2)), "{output:?}");
}
