//! The shipped configuration, and what happens before the filter knows everything.

use crate::client::{Ask, Connection};
use crate::harness::{Files, Plan, Rig, has_header, validate, with_envoy};
use crate::prompts::{chat, cold_choice};
use crate::shipped::Config;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use tokio::time::Instant;

const ROUTING: &str = "x-gateway-destination-endpoint";

#[test]
fn the_shipped_configuration_is_valid() {
    with_envoy("the_shipped_configuration_is_valid", |files| async move {
        let mut config = Config::read();
        config.set_files(&files.wasm, &files.prepared);
        validate(&files, &config).unwrap();
        config.replace("least_request.v3.LeastRequest", "least_request.v3.MostRequest");
        validate(&files, &config).expect_err("a configuration that cannot be valid");
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
        let strip = "- remove: x-gateway-destination-endpoint\n          - name: warmpath\n";
        plan.config.replace(strip, "- remove: x-other\n          - name: warmpath\n");
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
