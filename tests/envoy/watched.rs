//! What there is to watch the filter by, in the shipped `envoy/watched.yaml`: the access log, the live page, and the
//! rules, alerts and dashboard on a real Prometheus that scrapes a real run.
//!
//! Two of these tests need a program that not every machine has: `PROMETHEUS_BIN`, and `CHROMIUM_BIN` for the page. Without
//! it they say `SKIPPED`. Grafana itself is not run: its queries are.

use crate::client::{Ask, Connection};
use crate::harness::{
    Files, MODEL, Rig, fast_replica, free_ports, fresh_folder, from_env, replica_with, skip,
    start_replica, with_envoy,
};
use crate::prompts::{chat, next_turn, streamed, words};
use crate::reporters::{Agent, Mode, OFFSET, start_with_agent};
use crate::shipped::Config;
use crate::stats::Scrape;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use warmpath::metrics::{ALL, Kind};
use warmpath::mock::control::Fail;
use warmpath::mock::engine::EngineConfig;
use warmpath::mock::{Handle, ReplicaConfig};
use warmpath::tokens::blocks::{BlockSize, Chain, ChainSeed};

/// Stands in every prompt, and may stand nowhere else.
const SECRET: &str = "sesame";

/// Until a condition must hold.
const PATIENCE: Duration = Duration::from_secs(120);

struct Watched {
    rig: Rig,
    live: SocketAddr,
    access_log: PathBuf,
}

/// So many replicas that answer at once.
async fn fast(count: usize) -> Vec<Handle> {
    let mut replicas = Vec::new();
    for n in 0..count {
        replicas.push(start_replica(fast_replica(&format!("replica-{n}"))).await);
    }
    replicas
}

/// The shipped file in front of these replicas, its access log in a file.
async fn start(files: &Files, replicas: Vec<Handle>, change: impl FnOnce(&mut Config)) -> Watched {
    let folder = fresh_folder();
    let access_log = folder.join("access.log");
    let [live] = free_ports();
    let mut config = Config::read_named("watched.yaml");
    config.replace("/dev/stdout", &access_log.display().to_string());
    config.replace("port_value: 9904", &format!("port_value: {live}"));
    config.arguments = vec!["--file-flush-interval-msec".to_owned(), "100".to_owned()];
    config.change_plugin(|plugin| plugin["poll_interval_ms"] = json!(100));
    change(&mut config);
    let rig = Rig::start_with(files, 1, replicas, config, folder, false).await;
    Watched { rig, live: SocketAddr::from(([127, 0, 0, 1], live)), access_log }
}

fn prompt(seed: u64, tokens: usize) -> Value {
    let mut body = chat(seed, tokens, 6);
    let text = format!("{SECRET} {}", words(seed, tokens));
    body["messages"][0]["content"] = json!(text);
    body
}

/// Some of everything that is counted apart, each prompt twice.
async fn mixed(rig: &Rig, seed: u64) {
    let mut connection = Connection::open(rig.address).await;
    let mut agent = prompt(seed, 300);
    agent["tools"] = json!([{"type": "function", "function": {"name": "look", "parameters": {}}}]);
    let document = prompt(seed + 1, 3000);
    let question = prompt(seed + 2, 400);
    for body in [&agent, &document, &question] {
        let answer = connection.send(&Ask::chat(&streamed(body))).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let next = next_turn(body, &answer.text(), "And then?");
        assert_eq!(connection.send(&Ask::chat(&next)).await.status, 200);
    }
    let text = json!({"model": "qwen3", "prompt": words(seed + 3, 200), "max_tokens": 4});
    assert_eq!(connection.send(&Ask::completion(&text)).await.status, 200);
    let several =
        json!({"model": "qwen3", "prompt": ["one two three", "four five six"], "max_tokens": 2});
    assert_eq!(connection.send(&Ask::completion(&several)).await.status, 200);
    connection.send(&Ask::post("/v1/chat/completions", "{no JSON")).await;
    connection.send(&Ask::get("/v1/models")).await;
}

async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let answer = Connection::open(address).await.send(&Ask::get(path)).await;
    (answer.status, String::from_utf8_lossy(&answer.body).into_owned())
}

/// The first words of an answer to whom a browser takes this for.
async fn status_for(address: SocketAddr, host: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!("GET /stats HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).chars().take(12).collect()
}

/// The lines of the access log, once there are so many.
async fn logged(path: &Path, count: usize) -> (String, Vec<Value>) {
    let end = Instant::now() + PATIENCE;
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if text.lines().count() >= count {
            let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
            return (text.clone(), lines.collect());
        }
        assert!(Instant::now() < end, "{count} lines are not there in time:\n{text}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn access_logs_show_decisions_and_the_live_page_is_this_machines_alone() {
    with_envoy(
        "access_logs_show_decisions_and_the_live_page_is_this_machines_alone",
        |files| async move {
            let Watched { rig, live, access_log } = start(&files, fast(2).await, |_| ()).await;
            let body = prompt(1, 300);
            for _ in 0..2 {
                assert_eq!(rig.send(&Ask::chat(&body)).await.status, 200);
            }
            rig.send(&Ask::post("/v1/chat/completions?api-key=tulip", "{no JSON")).await;
            rig.send(&Ask::get("/v1/models")).await;
            let (text, lines) = logged(&access_log, 4).await;
            for secret in [SECRET, "tulip"] {
                assert!(!text.contains(secret), "{text}");
            }
            let reasons: Vec<&str> =
                lines.iter().filter_map(|line| line["reason"].as_str()).collect();
            assert_eq!(reasons, ["cold", "prefix", "invalid_json", "not_inference"]);
            let [cold, prefix, unread, other] = lines.as_slice() else { panic!("{text}") };
            assert_eq!((&cold["class"], &cold["overlap_tokens"]), (&json!("chat"), &json!("0")));
            assert_eq!(cold["replica"], cold["answered_by"]);
            assert_eq!((&prefix["replica"], &prefix["status"]), (&cold["replica"], &json!(200)));
            let tokens =
                |name: &str| prefix[name].as_str().and_then(|text| text.parse::<u32>().ok());
            assert!(tokens("overlap_tokens") >= Some(288), "{prefix}");
            assert!(tokens("prompt_tokens") > tokens("overlap_tokens"), "{prefix}");
            assert_eq!(
                (&unread["class"], unread["replica"].is_string()),
                (&json!("unknown"), true)
            );
            assert_eq!(other.get("replica"), None);

            let (status, page) = get(live, "/").await;
            assert_eq!(status, 200);
            assert!(page.starts_with("<!doctype html>") && page.contains("</html>"), "{page}");
            assert!(
                !page.contains("http://") && !page.contains("https://"),
                "the page names another origin"
            );
            let (status, stats) = get(live, "/stats?format=json&filter=warmpath_vms").await;
            assert!(status == 200 && stats.contains("warmpath_vms"), "{stats}");
            assert_eq!(get(live, "/clusters?format=json").await.0, 200);
            for path in ["/config_dump", "/stats/prometheus", "/quitquitquit", "/clusters/x"] {
                assert_eq!(get(live, path).await.0, 404, "{path}");
            }
            let mut connection = Connection::open(live).await;
            assert_eq!(connection.send(&Ask::post("/stats", "")).await.status, 404);
            assert_eq!(status_for(live, "rebound.example").await, "HTTP/1.1 404");
            assert_eq!(status_for(live, "localhost:1").await, "HTTP/1.1 200");

            let scrape = rig.scrape().await;
            // Nobody has watched for long enough to take one away.
            assert_eq!(scrape.sum("warmpath_recommended_replicas", &[]), 2.0);
            assert_eq!(scrape.sum("warmpath_scaling_unheard_replicas", &[]), 0.0);
            // Each is told, those too that nobody tells anything of.
            for kind in ["prefill", "backlog", "queue", "kv", "first_token"] {
                let told = scrape.count("warmpath_scaling_pressure_percent", &[("kind", kind)]);
                assert_eq!(told, 1, "{kind}");
            }
            rig.eventually("an order of drains", |scrape| {
                scrape.sum("warmpath_replica_drain_rank", &[]) == 3.0
            })
            .await;
            rig.finish().await;
        },
    );
}

/// A program that ends with its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The shipped configuration for Prometheus, in a hurry, and pointed at this Envoy alone.
fn prometheus(program: &Path, folder: &Path, target: SocketAddr) -> (Running, SocketAddr) {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("envoy/prometheus");
    let text = std::fs::read_to_string(shipped.join("prometheus.yml")).unwrap();
    let (gateways, _) =
        text.split_once("# What engines say of themselves").expect("the job of replicas");
    let text = gateways.replace("envoy:9903", &target.to_string()).replace("5s", "1s");
    assert!(text.contains(&target.to_string()) && text.contains("evaluation_interval: 1s"));
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("prometheus.yml"), text).unwrap();
    for name in ["warmpath.rules.yml", "warmpath.alerts.yml"] {
        std::fs::copy(shipped.join(name), folder.join(name)).unwrap();
    }
    let [port] = free_ports();
    let process = Command::new(program)
        .arg(format!("--config.file={}", folder.join("prometheus.yml").display()))
        .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
        .args([&format!("--web.listen-address=127.0.0.1:{port}"), "--log.level=error"])
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(folder.join("prometheus.log")).unwrap())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    (Running(process), SocketAddr::from(([127, 0, 0, 1], port)))
}

async fn api(prometheus: SocketAddr, path: &str) -> Value {
    let answer: Value = serde_json::from_str(&get(prometheus, path).await.1).expect("JSON");
    assert_eq!(answer["status"], "success", "{path}: {answer}");
    answer["data"].clone()
}

/// How many series a query has now.
async fn series(prometheus: SocketAddr, query: &str) -> usize {
    let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let found = api(prometheus, &format!("/api/v1/query?query={encoded}")).await;
    found["result"].as_array().map_or(0, Vec::len)
}

async fn names(prometheus: SocketAddr) -> BTreeSet<String> {
    let names = api(prometheus, "/api/v1/label/__name__/values").await;
    names.as_array().unwrap().iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect()
}

/// The queries of the dashboard, as Grafana would send them.
fn dashboard() -> Vec<String> {
    let text = include_str!("../../envoy/grafana/dashboards/warmpath.json");
    let dashboard: Value = serde_json::from_str(text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    targets.map(|t| t["expr"].as_str().unwrap().replace("$__rate_interval", "1m")).collect()
}

/// The metrics that an expression names.
fn named(expression: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_:".contains(c);
    let words = expression.split(|c: char| !is_part(c));
    words.filter(|word| word.starts_with("warmpath")).map(str::to_owned).collect()
}

/// What this run has not, and the test that sees it. (It takes thousands of addresses.)
const SEEN_ELSEWHERE: [(&str, &str); 1] =
    [("warmpath_dropped_samples_total", "addresses_that_come_and_go_leave_memory_flat")];

/// Slow enough that its speed can be told from its answers, the one of prompts and the one of answers.
fn slow_replica(name: &str) -> ReplicaConfig {
    let engine = EngineConfig {
        step_base: Duration::from_millis(1),
        prefill_rate: 100_000.0,
        attention_rate: 0.0,
        decode_per_sequence: Duration::from_millis(2),
        ..EngineConfig::default()
    };
    replica_with(name, engine)
}

/// An agent that reports some blocks, and then no more.
async fn reported_and_lost(rig: &Rig, agent: &Agent) {
    let ids: Vec<u32> = (1000..1640).collect();
    let size = BlockSize::new(16).unwrap();
    agent.reporter().store(&Chain::new(ChainSeed::new(MODEL, None), size, &ids));
    rig.eventually("what the agent reports", |scrape| {
        scrape.sum("warmpath_replica_observed_blocks", &[]) == 40.0
    })
    .await;
    agent.reporter().mode = Mode::Stopped;
    rig.eventually("an agent that is not believed", |scrape| {
        scrape.sum("warmpath_cache_report_fallbacks_total", &[("reason", "silent")]) == 1.0
    })
    .await;
}

/// Who answers this, and so holds it.
async fn holder<'a>(rig: &'a Rig, body: &Value) -> &'a Handle {
    let answer = rig.send(&Ask::chat(body)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let found = rig.replicas.iter().find(|handle| handle.replica.name() == answer.replica());
    found.expect("a replica")
}

/// What is lost: a cache, one that fails, and a prompt's end.
async fn losses(rig: &Rig, seed: u64) {
    let forgotten = prompt(seed, 300);
    let mut engine = Connection::open(holder(rig, &forgotten).await.address).await;
    assert_eq!(engine.send(&Ask::post("/reset_prefix_cache", "{}")).await.status, 200);
    assert_eq!(rig.send(&Ask::chat(&forgotten)).await.status, 200);
    let elsewhere = prompt(seed + 1, 300);
    let fail = Some(Fail { status: 503, count: Some(1) });
    holder(rig, &elsewhere).await.replica.set_control(|control| control.fail = fail);
    assert_eq!(rig.send(&Ask::chat(&elsewhere)).await.status, 200);
    let mut picture = chat(seed + 2, 100, 2);
    let image =
        json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}});
    let text = json!({"type": "text", "text": picture["messages"][0]["content"]});
    picture["messages"][0]["content"] = json!([text, image]);
    // The mock sees no pictures; the filter has routed it all the same.
    assert!(rig.send(&Ask::chat(&picture)).await.status < 500);
}

/// Answers one at a time, and many at once.
async fn crowd(rig: &Rig, seed: u64) {
    for count in [100, 900] {
        let ask = Ask::chat(&streamed(&chat(seed + count, count as usize, 12)));
        assert_eq!(rig.send(&ask).await.status, 200);
    }
    let mut tasks = JoinSet::new();
    for n in 0..24 {
        let mut connection = Connection::open(rig.address).await;
        let ask = Ask::chat(&streamed(&chat(seed + n, 60, 12)));
        tasks.spawn(async move { connection.send(&ask).await.status });
    }
    assert_eq!(tasks.join_all().await, [200; 24]);
}

#[test]
fn every_query_of_the_dashboard_the_rules_and_the_alerts_has_data_in_a_run() {
    let name = "every_query_of_the_dashboard_the_rules_and_the_alerts_has_data_in_a_run";
    let Some(program) = from_env("PROMETHEUS_BIN") else { return skip(name, "PROMETHEUS_BIN") };
    with_envoy(name, |files| async move {
        let (mut replicas, mut agents) = (Vec::new(), Vec::new());
        for name in ["replica-0", "replica-1", "replica-2"] {
            let (replica, agent) = start_with_agent(|| slow_replica(name)).await;
            // But for the first they never say anything, and so what is routed counts.
            agent.reporter().mode = if agents.is_empty() { Mode::Reports } else { Mode::Stopped };
            replicas.push(replica);
            agents.push(agent);
        }
        let with_agents = |config: &mut Config| {
            let addresses: Vec<SocketAddr> = agents.iter().map(|agent| agent.address).collect();
            config.set_endpoints("agents", &addresses);
            config.change_plugin(|plugin| {
                plugin["cache_report"] = json!({
                    "cluster": "agents", "port_offset": OFFSET, "interval_ms": 100,
                    "idle_interval_ms": 200, "lost_after_ms": 600,
                });
            });
        };
        let Watched { rig, .. } = start(&files, replicas, with_agents).await;
        reported_and_lost(&rig, &agents[0]).await;
        let folder = fresh_folder();
        let (_prometheus, api_address) = prometheus(&program, &folder, rig.metrics);
        let end = Instant::now() + PATIENCE;
        while tokio::net::TcpStream::connect(api_address).await.is_err() {
            assert!(Instant::now() < end, "Prometheus does not listen");
            sleep(Duration::from_millis(50)).await;
        }
        // One replica fails for a while, and all of them this prompt.
        for handle in &rig.replicas {
            handle.replica.set_control(|control| control.poison = Some("hemlock".to_owned()));
        }
        let failing = &rig.replicas[0].replica;
        failing.set_control(|control| control.fail = Some(Fail { status: 503, count: Some(3) }));
        let end = Instant::now() + PATIENCE;
        let mut seed = 100;
        loop {
            mixed(&rig, seed).await;
            losses(&rig, seed + 2_000).await;
            crowd(&rig, seed + 10_000).await;
            seed += 10;
            let cold = rig.send(&Ask::chat(&chat(seed, 80, 2)).chunked(64)).await;
            assert_eq!(cold.status, 200);
            let mut body = chat(seed + 5, 80, 2);
            body["messages"][0]["content"] = json!(format!("hemlock {seed}"));
            assert!(rig.send(&Ask::chat(&body)).await.status >= 500);
            let missing = missing(api_address).await;
            if missing.is_empty() {
                break;
            }
            assert!(Instant::now() < end, "without data:\n{}", missing.join("\n"));
        }
        let _ = std::fs::remove_dir_all(&folder);
    });
}

/// Queries of the dashboard without data, rules that fail or record nothing, what alerts name and nothing has, and metrics of
/// the README that are not there.
async fn missing(prometheus: SocketAddr) -> Vec<String> {
    let mut missing = Vec::new();
    for query in dashboard() {
        if series(prometheus, &query).await == 0 {
            missing.push(format!("dashboard: {query}"));
        }
    }
    let found = names(prometheus).await;
    let groups = api(prometheus, "/api/v1/rules").await;
    let groups = groups["groups"].as_array().unwrap();
    let rules: Vec<&Value> =
        groups.iter().filter_map(|g| g["rules"].as_array()).flatten().collect();
    if rules.len() < 40 {
        missing.push(format!("only {} rules", rules.len()));
    }
    for rule in rules {
        if rule["health"] != "ok" {
            missing.push(format!("rule: {rule}"));
        }
        let (name, query) = (rule["name"].as_str().unwrap(), rule["query"].as_str().unwrap());
        let wanted = if rule["type"] == "recording" {
            BTreeSet::from([name.to_owned()])
        } else {
            named(query)
        };
        for wanted in wanted {
            if !found.contains(&wanted) {
                missing.push(format!("{name}: {wanted}"));
            }
        }
    }
    let elsewhere = SEEN_ELSEWHERE.map(|(name, _)| name);
    for metric in ALL.iter().filter(|metric| !elsewhere.contains(&metric.name)) {
        let suffix = if metric.kind == Kind::Histogram { "_bucket" } else { "" };
        if !found.contains(&format!("{}{suffix}", metric.name)) {
            missing.push(format!("README.md: {}", metric.name));
        }
    }
    missing
}

fn percent(part: f64, whole: f64) -> String {
    format!("{:.1} %", 100.0 * part / whole)
}

#[test]
fn the_live_page_shows_the_figures_of_stats() {
    let name = "the_live_page_shows_the_figures_of_stats";
    let Some(browser) = from_env("CHROMIUM_BIN") else { return skip(name, "CHROMIUM_BIN") };
    with_envoy(name, |files| async move {
        let Watched { rig, live, .. } = start(&files, fast(3).await, |_| ()).await;
        for seed in [10, 20, 30] {
            mixed(&rig, seed).await;
        }
        rig.settle().await;
        // Histograms are flushed every five seconds.
        let scrape = rig
            .eventually("all answers in the histogram", |scrape| {
                scrape.sum("warmpath_inter_token_us_count", &[]) >= 9.0
            })
            .await;
        let picture = Path::new(env!("CARGO_TARGET_TMPDIR")).join("live.png");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/watched/page.py");
        let output = tokio::task::spawn_blocking({
            let picture = picture.clone();
            move || {
                Command::new("python3")
                    .arg(script)
                    .arg(browser)
                    .args([format!("http://{live}/"), "4".to_owned()])
                    .arg(picture)
                    .output()
            }
        });
        let output = output.await.unwrap().expect("python3");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let page: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        compare(&page, &scrape, &rig);
        let bytes = std::fs::metadata(&picture).unwrap().len();
        assert!(bytes > 20_000, "a picture of {bytes} bytes");
        eprintln!("the page as it was: {}", picture.display());
        rig.finish().await;
    });
}

fn compare(page: &Value, scrape: &Scrape, rig: &Rig) {
    let text = |id: &str| page["texts"][id].as_str().unwrap_or_default().to_owned();
    assert_eq!(text("error"), "");
    let sum = |name: &str| scrape.sum(name, &[]);
    let hit = percent(
        sum("warmpath_reported_cached_tokens_total"),
        sum("warmpath_reported_prompt_tokens_total"),
    );
    assert_eq!(text("hit-all"), hit);
    let prompts = sum("warmpath_prompt_tokens_total");
    let predicted = percent(sum("warmpath_predicted_cached_tokens_total"), prompts);
    assert_eq!(text("predicted-all"), predicted);
    let shadow = scrape.sum("warmpath_shadow_cached_tokens_total", &[("policy", "round_robin")]);
    assert_eq!(
        (text("other").as_str(), text("shadow-all")),
        ("round robin", percent(shadow, prompts))
    );
    let cost = scrape.sum("warmpath_shadow_cost_us_total", &[("policy", "warmpath")]);
    let cost = cost / sum("warmpath_shadow_decisions_total") / 1000.0;
    assert_eq!(text("cost"), format!("{cost:.0} ms"));
    assert_eq!(text("recommended"), sum("warmpath_recommended_replicas").to_string());
    for id in ["ttft-all", "gap-all"] {
        let numbers = text(id);
        let numbers: Vec<f64> = numbers.split(" / ").map(|n| n.parse().expect(id)).collect();
        assert!(numbers.len() == 3 && numbers.is_sorted() && numbers[0] > 0.0, "{id}: {numbers:?}");
    }
    let replicas = page["replicas"].as_array().unwrap();
    assert_eq!(replicas.len(), rig.replicas.len());
    for handle in &rig.replicas {
        let address = handle.address.to_string();
        let shown = replicas.iter().find(|replica| replica["name"] == address.as_str()).unwrap();
        let value = |name: &str| scrape.sum(name, &[("replica", &address)]) as u64;
        let (held, capacity) =
            (value("warmpath_replica_shadow_blocks"), value("warmpath_replica_capacity_blocks"));
        let blocks = shown["blocks"].as_str().unwrap().replace(',', "");
        assert_eq!(blocks, format!("{held} of {capacity} blocks"));
        let rank = value("warmpath_replica_drain_rank");
        assert!(
            shown["text"].as_str().unwrap().ends_with(&format!(", drain order {rank}")),
            "{shown}"
        );
    }
    for (reason, count) in scrape.by("warmpath_requests_total", "reason") {
        assert!(text("reasons").contains(&reason), "{reason}, {count} times");
    }
}
