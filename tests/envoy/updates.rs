//! Changes of configuration under traffic: no request is lost, a wrong one changes nothing, and nothing grows.

use crate::client::{Ask, Connection};
use crate::harness::{Files, Plan, Rig, fresh_folder, start_replica, until, with_envoy};
use crate::prompts::{chat, reusable};
use crate::shipped::{Config, Part};
use crate::stats::{Scrape, reasons_between};
use crate::traffic::{LongStream, Traffic};
use serde_json::json;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// A rig whose configuration is in files that Envoy watches.
async fn start(files: &Files, workers: usize, parts: &[Part], drain_s: u32) -> Rig {
    let mut plan = Plan::new(workers, 2);
    parts.iter().for_each(|part| plan.config.watch(*part));
    if parts.contains(&Part::Clusters) {
        // A route in the bootstrap may name only clusters in the bootstrap, unless it says so.
        let metrics = "          route_config:\n            name: metrics\n";
        plan.config.replace(metrics, &format!("{metrics}            validate_clusters: false\n"));
    }
    let drain = drain_s.to_string();
    plan.config.arguments =
        ["--drain-time-s", &drain, "--drain-strategy", "immediate"].map(str::to_owned).to_vec();
    let generation = generation(&plan.config, 0);
    plan.config = generation;
    let mut replicas = Vec::new();
    for config in plan.replicas.drain(..) {
        replicas.push(start_replica(config).await);
    }
    Rig::start_with(files, workers, replicas, plan.config, fresh_folder(), false).await
}

/// The configuration with a mark by which its answers are told from others': the value that the explain header wants.
fn generation(config: &Config, number: u32) -> Config {
    let mut config = config.clone();
    config.change_plugin(|plugin| {
        plugin["explain"] = json!({"request_header": "x-why", "secret": number.to_string()});
    });
    config
}

/// Whether new connections are served by this generation.
async fn serves(rig: &Rig, generation: u32) -> bool {
    let ask = Ask::chat(&chat(7, 60, 1)).header("x-why", generation.to_string());
    let answer = rig.send(&ask).await;
    assert_eq!(answer.status, 200);
    answer.header("x-warmpath-explain").is_some()
}

async fn soon_serves(rig: &Rig, generation: u32) {
    let end = Instant::now() + Duration::from_secs(60);
    while !serves(rig, generation).await {
        assert!(Instant::now() < end, "generation {generation} does not serve");
        sleep(Duration::from_millis(10)).await;
    }
}

/// What no plugin can start with, and what the log must say of it.
const WRONG: [(&str, &str); 6] = [
    ("", "configuration: missing"),
    ("{\"models\": [", "configuration: not JSON"),
    ("[]", "configuration: expected an object"),
    (r#"{"models": 7, "clusters": []}"#, "models: expected a list"),
    (r#"{"max_body_bites": 1, "#, "max_body_bites: unknown option"),
    (r#"{"poll_interval_ms": 123456789012345678901234567890, "#, "poll_interval_ms: expected"),
];

/// Puts a wrong plugin configuration in. One that ends with a comma goes on with what is there.
fn wrong(config: &Config, text: &str) -> Config {
    let mut whole = String::new();
    let mut config = config.clone();
    config.change_plugin(|plugin| whole = plugin.to_string());
    let text = match text.strip_suffix(", ") {
        Some(head) => {
            let rest = whole.replace("\"poll_interval_ms\":100", "\"tie_ms\":5");
            format!("{head}, {}", rest.trim_start_matches('{'))
        }
        None => text.to_owned(),
    };
    config.set_plugin_text(&text);
    config
}

/// A model's file under a path that the listener before the last update had not, while that one still drains.
async fn loads_from_another_path(rig: &mut Rig) {
    let loads = |scrape: &Scrape, result| {
        scrape.sum("warmpath_tokenizer_loads_total", &[("result", result)])
    };
    let before = loads(&rig.scrape().await, "ok");
    let mut config = generation(&rig.config, 4);
    let path = json!("/qwen3-2.warmpath");
    config.change_plugin(|plugin| plugin["models"][0]["prepared"]["path"] = path);
    assert!(rig.push(Part::Listeners, &config).await);
    soon_serves(rig, 4).await;
    let scrape = rig.eventually("the other file", |scrape| loads(scrape, "ok") > before).await;
    assert_eq!(loads(&scrape, "fetch_failed"), 0.0);
}

/// Good, wrong, and good again, with traffic all the time and two streams that outlast the changes.
async fn updates_of_the_filter_lose_nothing(files: &Files, part: Part) {
    let mut rig = start(files, 2, &[part], 4).await;
    let ask = Ask::chat(&chat(99, 400, 1));
    rig.send(&ask).await;
    let traffic = Traffic::start(rig.address, 3);
    // Slow enough to outlast a change, and quick enough for the drain time.
    let streams = [
        LongStream::begin(rig.address, 1, 800).await,
        LongStream::begin(rig.address, 2, 800).await,
    ];

    let config = generation(&rig.config, 1);
    assert!(rig.push(part, &config).await);
    soon_serves(&rig, 1).await;
    assert!(!streams.iter().any(LongStream::has_ended), "the streams were too short to tell");
    for stream in streams {
        stream.end(800).await;
    }

    for (text, complaint) in WRONG {
        let config = wrong(&rig.config, text);
        let taken = rig.push(part, &config).await;
        assert!(!taken, "{text:?} was taken");
        let log = rig.log();
        assert!(log.contains(&format!("configuration refused: {complaint}")), "{text}: {log}");
        traffic.flows().await;
        assert!(serves(&rig, 1).await, "{text:?} has changed something");
    }

    // After all that one good one is enough. What was learned is still known, since only a cost changes.
    let mut config = generation(&rig.config, 2);
    config.change_plugin(|plugin| plugin["cost"] = json!({"pressure_ms": 11}));
    assert!(rig.push(part, &config).await);
    soon_serves(&rig, 2).await;
    traffic.flows().await;

    // Another name for a model; and a listener that serves its file under another path, too.
    let mut config = generation(&rig.config, 3);
    config.change_plugin(|plugin| plugin["models"][0]["aliases"] = json!(["qwen3", "another"]));
    if part == Part::Listeners {
        config.replace("match: {path: /qwen3.warmpath}", "match: {prefix: /qwen3}");
    }
    assert!(rig.push(part, &config).await);
    soon_serves(&rig, 3).await;
    traffic.flows().await;
    if part == Part::Listeners {
        loads_from_another_path(&mut rig).await;
    }
    let sent = traffic.stop().await;
    assert!(sent > 50, "only {sent} requests");
    let rejected = rig.scrape().await.sum("warmpath_failed_responses_total", &[]);
    assert_eq!(rejected, 0.0);
    rig.settle().await;
    let warm = rig.send(&ask).await;
    rig.send(&ask).await;
    assert_eq!(warm.status, 200);
    rig.finish_after_updates().await;
}

#[test]
fn updates_of_the_listener_lose_no_request() {
    with_envoy("updates_of_the_listener_lose_no_request", |files| async move {
        updates_of_the_filter_lose_nothing(&files, Part::Listeners).await;
    });
}

#[test]
fn updates_of_the_filter_alone_lose_no_request() {
    with_envoy("updates_of_the_filter_alone_lose_no_request", |files| async move {
        updates_of_the_filter_lose_nothing(&files, Part::Filter).await;
    });
}

#[test]
fn updates_of_routes_and_clusters_lose_no_request() {
    with_envoy("updates_of_routes_and_clusters_lose_no_request", |files| async move {
        let mut rig = start(&files, 2, &[Part::Routes, Part::Clusters], 2).await;
        let ask = Ask::chat(&chat(99, 400, 1));
        rig.send(&ask).await;
        let traffic = Traffic::start(rig.address, 3);
        let stream = LongStream::begin(rig.address, 1, 300).await;
        let shipped = rig.config.clone();
        for turn in 1..5 {
            let mut config = shipped.clone();
            // Another cluster in the place of the old: its hosts are new to Envoy, and the same to the filter.
            let section = config.cluster("replicas");
            let changed = format!("connect_timeout: 1.{turn}s");
            config.set_cluster("replicas", &section.replace("connect_timeout: 1s", &changed));
            assert!(rig.push(Part::Clusters, &config).await);
            traffic.flows().await;
            config.add_routes(&[json!({
                "match": {"path": format!("/other/{turn}")}, "route": {"cluster": "replicas"},
            })]);
            assert!(rig.push(Part::Routes, &config).await);
            traffic.flows().await;
        }
        stream.end(300).await;
        traffic.stop().await;
        rig.settle().await;
        let warm = rig.send(&ask).await;
        assert_eq!(warm.usage().cached_tokens, reusable(warm.usage().prompt_tokens));
        rig.finish().await;
    });
}

/// R12: what a hundred changes cost when the old ones are drained soon.
#[test]
fn a_hundred_updates_leave_nothing_behind() {
    with_envoy("a_hundred_updates_leave_nothing_behind", |files| async move {
        let count =
            std::env::var("WARMPATH_UPDATES").ok().and_then(|n| n.parse().ok()).unwrap_or(100);
        let mut rig = start(&files, 2, &[Part::Listeners], 1).await;
        let rate = poll_rate(&rig).await;
        let traffic = Traffic::start(rig.address, 1);
        let mut memory = Vec::new();
        for number in 1..=count {
            let mut config = generation(&rig.config, number);
            config.change_plugin(|plugin| plugin["cost"] = json!({"pressure_ms": number}));
            assert!(rig.push(Part::Listeners, &config).await);
            memory.push(rig.memory_bytes());
        }
        traffic.stop().await;
        soon_serves(&rig, count).await;
        rig.finish_after_updates().await;
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64 / 1e6;
        let quarter = memory.len() / 4;
        let (second, last) = (mean(&memory[quarter..2 * quarter]), mean(&memory[3 * quarter..]));
        let line = format!(
            "updates: {count}, RSS {second:.1} MB in the second quarter, {last:.1} MB in the last\n"
        );
        std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
        let pushes = (count / 2) as f64;
        assert!((last - second) / pushes < 0.05, "{line}");
        let after = poll_rate(&rig).await;
        assert!(after < 1.5 * rate, "{rate} polls a second before, {after} after");
    });
}

/// The old configurations tick on for as long as their listeners drain, by default ten minutes.
#[test]
fn configurations_that_drain_share_one_state_with_their_successor() {
    with_envoy(
        "configurations_that_drain_share_one_state_with_their_successor",
        |files| async move {
            let mut rig = start(&files, 2, &[Part::Listeners], 600).await;
            let ask = Ask::chat(&chat(99, 400, 1));
            let cold = rig.send(&ask).await;
            let stream = LongStream::begin(rig.address, 1, 1_500).await;
            let rate = poll_rate(&rig).await;
            for number in 1..=20 {
                let mut config = generation(&rig.config, number);
                config.change_plugin(|plugin| {
                    plugin["cost"] =
                        json!({"pressure_ms": number, "recent_half_life_ms": 4000 + number});
                });
                assert!(rig.push(Part::Listeners, &config).await);
            }
            soon_serves(&rig, 20).await;
            let after = poll_rate(&rig).await;
            assert!(after < 1.5 * rate, "{rate} polls a second before, {after} after");
            // One a worker and the main thread's, whatever the number of configurations; all with the one tokenizer.
            let scrape = rig.scrape().await;
            assert_eq!(scrape.sum("warmpath_vms", &[("state", "all")]), 3.0);
            assert_eq!(scrape.sum("warmpath_vms", &[("state", "ready")]), 2.0);
            let loads = scrape.sum("warmpath_tokenizer_loads_total", &[("result", "ok")]);
            assert_eq!(loads, 2.0);
            stream.end(1_500).await;
            rig.settle().await;
            let warm = rig.send(&ask).await;
            assert_eq!(warm.replica(), cold.replica());
            assert_eq!(warm.usage().cached_tokens, reusable(warm.usage().prompt_tokens));
            let scrape = rig.scrape().await;
            assert!(scrape.sum("warmpath_requests_total", &[("reason", "prefix")]) >= 1.0);
            rig.finish_after_updates().await;
        },
    );
}

/// Answers to polls in a second.
async fn poll_rate(rig: &Rig) -> f64 {
    let count = |scrape: crate::stats::Scrape| scrape.sum("warmpath_polls_total", &[]);
    let (before, began) = (count(rig.scrape().await), Instant::now());
    sleep(Duration::from_secs(2)).await;
    (count(rig.scrape().await) - before) / began.elapsed().as_secs_f64()
}

#[test]
fn a_hot_restart_loses_no_request() {
    with_envoy("a_hot_restart_loses_no_request", |files| async move {
        let mut plan = Plan::new(2, 2);
        plan.config.arguments = [
            "--drain-time-s",
            "3",
            "--parent-shutdown-time-s",
            "6",
            "--drain-strategy",
            "immediate",
            "--base-id",
        ]
        .map(str::to_owned)
        .to_vec();
        // Any number that no other Envoy of this machine has.
        plan.config.arguments.push((std::process::id() % 100_000 + 1_000).to_string());
        let mut rig = Rig::start(&files, plan).await;
        let [ask, early] = [99, 9_000_098].map(|seed| Ask::chat(&chat(seed, 400, 1)));
        rig.send(&ask).await;
        rig.send(&early).await;
        let traffic = Traffic::start(rig.address, 3);
        let stream = LongStream::begin(rig.address, 1, 400).await;
        let mut old = rig.restart_hot(&files).await;
        let mut idle = Connection::open(rig.address).await;
        assert_eq!(idle.send(&ask).await.status, 200);
        traffic.flows().await;
        stream.end(400).await;
        until("the old process has ended", || old.has_ended()).await;
        traffic.flows().await;
        traffic.stop().await;
        rig.settle().await;
        // The one before may have come to the old process, which takes connections until the new one has its workers.
        rig.send(&ask).await;
        let warm = rig.send(&ask).await;
        assert_eq!(warm.usage().cached_tokens, reusable(warm.usage().prompt_tokens));
        assert_forgotten_and_learned_anew(&rig, &early).await;
        rig.finish().await;
    });
}

/// What the process before placed is nobody's, as metrics tell, until it is asked for once.
async fn assert_forgotten_and_learned_anew(rig: &Rig, ask: &Ask) {
    let before = rig.scrape().await;
    let first = rig.send(ask).await;
    let reasons = reasons_between(&before, &rig.scrape().await);
    assert_eq!(reasons.into_iter().collect::<Vec<_>>(), [("cold".to_owned(), 1)]);
    rig.settle().await;
    let again = rig.send(ask).await;
    assert_eq!(again.replica(), first.replica());
    assert_eq!(again.usage().cached_tokens, reusable(again.usage().prompt_tokens));
}
