//! The shipped configuration, and what happens before the filter knows everything.

use crate::client::{Ask, Connection};
use crate::harness::{
    Files, Plan, Rig, fast_replica, free_ports, fresh_folder, from_env, has_header, spawn,
    start_replica, validate, with_envoy,
};
use crate::prompts::{chat, cold_choice};
use crate::shipped::{Config, shipped};
use crate::stats::{Scrape, reasons_between};
use crate::traffic::connect_when_open;
use serde_json::json;
use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const ROUTING: &str = "x-gateway-destination-endpoint";

/// Set for Envoys beside the one that is pinned. Envoy takes a second to compile the filter, whatever the file; and what the
/// filter says of a file's plugin configuration is the same in all. So these compile it for one file.
const OLDER: &str = "WARMPATH_OLDER";

/// A module that says yes to everything: `(module (memory (export "memory") 1) (func (export "proxy_abi_version_0_2_1"))
/// (func (export "malloc") (param i32) (result i32) i32.const 1024))`.
const EMPTY_MODULE: &[u8] = b"\0asm\x01\0\0\0\
    \x01\x09\x02\x60\0\0\x60\x01\x7f\x01\x7f\
    \x03\x03\x02\0\x01\
    \x05\x03\x01\0\x01\
    \x07\x2d\x03\x06memory\x02\0\x17proxy_abi_version_0_2_1\0\0\x06malloc\0\x01\
    \x0a\x0a\x02\x02\0\x0b\x05\0\x41\x80\x08\x0b";

#[test]
fn every_shipped_configuration_is_valid() {
    with_envoy("every_shipped_configuration_is_valid", |files| async move {
        let folder = fresh_folder();
        let empty = folder.join("empty.wasm");
        std::fs::write(&empty, EMPTY_MODULE).unwrap();
        let is_tried_elsewhere = |name: &str| name != "envoy.yaml" && from_env(OLDER).is_some();
        for name in shipped() {
            let mut config = Config::read_named(&name);
            let wasm = if is_tried_elsewhere(&name) { &empty } else { &files.wasm };
            config.set_files(wasm, &files.prepared);
            let verdict = validate(&files, &config);
            match config.needs_minor() {
                Some(minor) if files.minor() < minor => {
                    verdict.expect_err("a file that says which Envoy it needs");
                    continue;
                }
                _ => verdict.unwrap_or_else(|refusal| panic!("{name}: {refusal}")),
            }
            config.replace("least_request.v3.LeastRequest", "least_request.v3.MostRequest");
            validate(&files, &config).expect_err("a configuration that cannot be valid");
        }
        std::fs::remove_dir_all(folder).unwrap();
    });
}

#[test]
fn a_private_admin_serves_the_filter_and_shows_metrics_alone() {
    with_envoy("a_private_admin_serves_the_filter_and_shows_metrics_alone", |files| async move {
        let folder = fresh_folder();
        let socket = folder.join("admin.sock");
        let mut config = Config::read_named("private-admin.yaml");
        config.set_files(&files.wasm, &files.prepared);
        let [inference, prepared, metrics] = free_ports();
        for (old, new) in [(8080, inference), (9902, prepared), (9903, metrics)] {
            config.replace(&format!("port_value: {old}"), &format!("port_value: {new}"));
        }
        config.replace("/run/warmpath/admin.sock", &socket.display().to_string());
        let replicas =
            [start_replica(fast_replica("a")).await, start_replica(fast_replica("b")).await];
        config.set_replicas(&replicas.each_ref().map(|replica| replica.address));
        if config.needs_minor().is_some_and(|minor| files.minor() < minor) {
            config.replace(
                "  allow_paths:\n  - {prefix: /clusters}\n  - {prefix: /stats/prometheus}\n  - {exact: /ready}\n",
                "",
            );
        }
        let mut envoy = spawn(&files, 1, &config, folder);
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let scrape = Ask::get("/stats/prometheus");
        let end = Instant::now() + Duration::from_secs(60);
        connect_when_open(local(metrics)).await;
        loop {
            let page = Connection::open(local(metrics)).await.send(&scrape).await;
            let scrape = Scrape::parse(&String::from_utf8_lossy(&page.body));
            let known = scrape.sum("warmpath_replicas", &[("health", "healthy")]) == 2.0
                && scrape.sum("warmpath_vms", &[("state", "ready")]) == 1.0;
            if known {
                break;
            }
            assert!(Instant::now() < end && !envoy.has_ended(), "{:?}", page.body);
            sleep(Duration::from_millis(20)).await;
        }
        let ask = Ask::chat(&chat(1, 200, 1));
        let mut connection = Connection::open(local(inference)).await;
        connection.send(&ask).await;
        assert!(connection.send(&ask).await.usage().cached_tokens > 0);
        for refused in [
            "/",
            "/config_dump",
            "/clusters",
            "/quitquitquit",
            "/stats/prometheus/../../config_dump",
        ] {
            for ask in [Ask::get(refused), Ask::post(refused, "")] {
                let answer = Connection::open(local(metrics)).await.send(&ask).await;
                assert_eq!(answer.status, 404, "{refused}");
            }
        }
        let ask = Ask::post("/stats/prometheus", "");
        assert_eq!(Connection::open(local(metrics)).await.send(&ask).await.status, 404);
        let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    });
}

#[test]
fn a_wrong_plugin_configuration_keeps_envoy_from_starting() {
    with_envoy("a_wrong_plugin_configuration_keeps_envoy_from_starting", |files| async move {
        let mut config = Config::read();
        config.set_files(&files.wasm, &files.prepared);
        config.change_plugin(|plugin| plugin["max_bodybytes"] = 1.into());
        let refusal = validate(&files, &config).expect_err("an unknown key");
        assert!(refusal.contains("max_bodybytes"), "{refusal}");
    });
}

#[test]
fn a_clients_routing_header_is_neither_obeyed_nor_passed_on() {
    with_envoy("a_clients_routing_header_is_neither_obeyed_nor_passed_on", |files| async move {
        a_routing_header_is_not_obeyed(&files, Plan::new(1, 4)).await;
    });
}

/// Envoy's own removal is taken out, so that the filter's is what is tested.
#[test]
fn the_filter_alone_removes_a_clients_routing_header() {
    with_envoy("the_filter_alone_removes_a_clients_routing_header", |files| async move {
        let mut plan = Plan::new(1, 4);
        let next = "\n                - remove: x-envoy-original-dst-host";
        let strip = format!("- remove: x-gateway-destination-endpoint{next}");
        plan.config.replace(&strip, &format!("- remove: x-other{next}"));
        a_routing_header_is_not_obeyed(&files, plan).await;
    });
}

async fn a_routing_header_is_not_obeyed(files: &Files, plan: Plan) {
    let rig = Rig::start(files, plan).await;
    let addresses: Vec<SocketAddr> = rig.replicas.iter().map(|handle| handle.address).collect();
    let mut obeyed = 0;
    for seed in 0..12 {
        let body = chat(seed, 40, 1);
        let choice = cold_choice(&body, &addresses);
        let other = rig.replicas.iter().find(|replica| replica.address != choice).unwrap();
        let wish = other.address.to_string();
        let answer = rig.send(&Ask::chat(&body).header(ROUTING, &wish)).await;
        assert_eq!(answer.status, 200);
        obeyed += u32::from(answer.replica() == other.replica.name());
    }
    // Load may now and then make a choice of what the client wished for.
    assert!(obeyed < 6, "{obeyed} of 12 went where the client wished");
    let wish = addresses[0].to_string();
    let mut servers = BTreeSet::new();
    for path in ["/v1/models", "/version", "/v1/nothing"].iter().cycle().take(24) {
        let answer = rig.send(&Ask::get(path).header(ROUTING, &wish)).await;
        servers.insert(answer.replica().to_owned());
    }
    assert!(servers.len() > 1, "24 requests all went where the client wished");
    let received = rig.received();
    assert_eq!(received.len(), 36);
    for seen in &received {
        assert!(!has_header(seen, ROUTING), "{seen:?}");
    }
    let scrape = rig.scrape().await;
    assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "not_inference")]), 24.0);
    rig.finish().await;
}

#[test]
fn requests_are_answered_while_tokenizers_load() {
    with_envoy("requests_are_answered_while_tokenizers_load", |files| async move {
        let plan = Plan { early: true, ..Plan::new(4, 2) };
        let rig = Rig::start_static(&files, plan).await;
        let began = Instant::now();
        let mut sent = 0;
        let scrape = loop {
            // A connection each, so that all workers are asked.
            let answer =
                Connection::open(rig.address).await.send(&Ask::chat(&chat(sent, 60, 1))).await;
            assert_eq!(answer.status, 200, "{answer:?}");
            sent += 1;
            let scrape = rig.scrape().await;
            if scrape.sum("warmpath_vms", &[("state", "ready")]) == 4.0 {
                break scrape;
            }
            assert!(began.elapsed().as_secs() < 30, "the tokenizers are not loaded in time");
        };
        let reasons = scrape.by("warmpath_requests_total", "reason");
        assert!(reasons.get("tokenizer_loading").is_some_and(|count| *count > 0), "{reasons:?}");
        assert_eq!(reasons.values().sum::<u64>(), sent, "{reasons:?}");
        let early = ["no_replicas", "tokenizer_loading", "cold"];
        for reason in reasons.keys() {
            assert!(early.contains(&reason.as_str()), "{reasons:?}");
        }
        // With the tokenizers the same client is served by its prefix.
        let ask = Ask::chat(&chat(1_000, 400, 1));
        rig.send(&ask).await;
        assert!(rig.send(&ask).await.usage().cached_tokens > 0);
        rig.finish().await;
    });
}

/// It takes connections and never answers, and holds nobody up but those who wait for what it serves.
#[test]
fn a_file_server_that_hangs_delays_its_own_models_alone() {
    with_envoy("a_file_server_that_hangs_delays_its_own_models_alone", |files| async move {
        let hanging = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = hanging.local_addr().unwrap();
        let taken = tokio::spawn(async move {
            let mut taken = Vec::new();
            while let Ok((stream, _)) = hanging.accept().await {
                taken.push(stream);
            }
        });
        let mut plan = Plan { early: true, ..Plan::new(3, 2) }.plugin(|plugin| {
            let prepared = json!({"cluster": "hanging", "path": "/other.warmpath"});
            let other = json!({"name": "org/other", "prepared": prepared});
            // The first, which a worker would wait for before all others.
            plugin["models"].as_array_mut().unwrap().insert(0, other);
        });
        plan.config.add_replicas("hanging", &[address]);
        plan.replicas
            .iter_mut()
            .for_each(|replica| replica.served_names.push("org/other".to_owned()));
        let rig = Rig::start_static(&files, plan).await;
        let began = Instant::now();
        let loads = |scrape: &Scrape, result| {
            scrape.sum("warmpath_tokenizer_loads_total", &[("result", result)])
        };
        let scrape = rig.eventually("every worker's other model", |s| loads(s, "ok") == 3.0).await;
        let elapsed = began.elapsed();
        assert!(elapsed < Duration::from_secs(15), "{elapsed:?}");
        assert_eq!(loads(&scrape, "fetch_failed"), 0.0);
        // Its own go by load meanwhile.
        let mut body = chat(1, 400, 1);
        body["model"] = json!("org/other");
        for (body, reason) in
            [(body, "tokenizer_loading"), (chat(2, 400, 1), "cold"), (chat(2, 400, 1), "prefix")]
        {
            let before = rig.scrape().await;
            assert_eq!(rig.send(&Ask::chat(&body)).await.status, 200);
            let reasons = reasons_between(&before, &rig.scrape().await);
            assert_eq!(reasons, [(reason.to_owned(), 1)].into());
        }
        taken.abort();
        rig.finish().await;
    });
}

/// Many VMs at once (R09, R15, W31), and requests that come before they are there (W19).
#[test]
fn many_workers_start_while_requests_come() {
    with_envoy("many_workers_start_while_requests_come", |files| async move {
        let starts = std::env::var("WARMPATH_STARTS").ok();
        let starts = starts.map_or(2, |count| count.parse().expect("a number of starts"));
        for start in 0..starts {
            let workers = if start % 2 == 0 { 32 } else { 64 };
            let figures = start_under_requests(&files, workers).await;
            let line = format!("start {start}: {workers} workers, {figures}\n");
            // Past the test harness, which swallows what passing tests print.
            std::io::stderr().write_all(line.as_bytes()).unwrap();
        }
    });
}

/// Starts Envoy with requests from the moment its port is open, until every VM has its place. Returns figures to print.
async fn start_under_requests(files: &Files, workers: usize) -> String {
    let began = Instant::now();
    let mut replicas = Vec::new();
    for name in ["a", "b"] {
        replicas.push(start_replica(fast_replica(name)).await);
    }
    // The poll interval as it is shipped, too.
    let mut rig = Rig::launch(files, workers, replicas, Config::read(), fresh_folder());
    let stop = Arc::new(AtomicBool::new(false));
    let (address, stopped) = (rig.address, Arc::clone(&stop));
    let client = tokio::spawn(async move {
        let mut answered = 0;
        connect_when_open(address).await;
        while !stopped.load(Ordering::Relaxed) {
            // A connection each, so that all workers are asked.
            let ask = Ask::chat(&chat(answered, 40, 1));
            let answer = Connection::open(address).await.send(&ask).await;
            assert_eq!(answer.status, 200, "{answer:?}");
            answered += 1;
        }
        answered
    });
    rig.wait_for_listeners().await;
    let ready = began.elapsed();
    // One a worker, and the main thread's.
    let scrape = rig
        .eventually("a place for every VM", |scrape| {
            scrape.sum("warmpath_vms", &[("state", "all")]) == workers as f64 + 1.0
                && scrape.sum("warmpath_replicas", &[("health", "healthy")]) == 2.0
        })
        .await;
    let shared = began.elapsed();
    rig.note_vms().await;
    stop.store(true, Ordering::Relaxed);
    let answered = client.await.expect("every request answered");
    assert!(answered > 0, "no request came while Envoy started");
    let reasons = scrape.by("warmpath_requests_total", "reason");
    let early = ["no_replicas", "no_healthy_replica", "tokenizer_loading", "cold", "prefix"];
    let unexpected = reasons.keys().find(|reason| !early.contains(&reason.as_str()));
    assert_eq!(unexpected, None, "{reasons:?}");
    let memory = rig.memory_bytes() / 1e6;
    rig.finish().await;
    format!(
        "ready after {} ms, all VMs after {} ms, {answered} requests answered, RSS {memory:.0} MB",
        ready.as_millis(),
        shared.as_millis()
    )
}
