//! Deployments other than the example: more clusters, models, routes and listeners.

use crate::client::{Answer, Ask, Connection};
use crate::harness::{
    MODEL, Plan, Rig, fast_replica, free_ports, fresh_folder, has_header, start_replica, with_envoy,
};
use crate::prompts::{chat, reusable, streamed};
use crate::shipped::Config;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use warmpath::mock::{Handle, ReplicaConfig};

const ROUTING: &str = "x-gateway-destination-endpoint";

/// Starts a fast replica for each name.
pub async fn replicas(names: &[&str]) -> Vec<Handle> {
    let mut started = Vec::new();
    for name in names {
        started.push(start_replica(fast_replica(name)).await);
    }
    started
}

pub fn addresses(replicas: &[Handle]) -> Vec<SocketAddr> {
    replicas.iter().map(|replica| replica.address).collect()
}

/// The shipped configuration, polled often, and with its reasons told to whoever knows the secret.
pub fn base() -> Config {
    let mut config = Plan::new(1, 0).config;
    config.change_plugin(|plugin| {
        plugin["explain"] = json!({"request_header": "x-why", "secret": "open"});
    });
    config
}

pub async fn start(
    files: &crate::harness::Files,
    workers: usize,
    replicas: Vec<Handle>,
    config: Config,
) -> Rig {
    Rig::start_with(files, workers, replicas, config, fresh_folder(), false).await
}

/// The address that the filter put first.
#[track_caller]
fn chosen(answer: &Answer) -> SocketAddr {
    let why = answer.header("x-warmpath-explain").unwrap_or_else(|| panic!("why? {answer:?}"));
    let first = why.split("; replica=").nth(1).unwrap_or_else(|| panic!("no choice: {why}"));
    first.split(',').next().unwrap().parse().unwrap()
}

/// Asserts that the replica which answered is the one that the filter chose.
#[track_caller]
pub fn assert_chosen_serves(rig: &Rig, answer: &Answer) {
    assert_eq!(answer.status, 200);
    let served = rig.replicas.iter().find(|handle| handle.replica.name() == answer.replica());
    assert_eq!(served.unwrap().address, chosen(answer));
}

pub fn why(ask: Ask) -> Ask {
    ask.header("x-why", "open")
}

/// A request of many shapes.
fn mixed(seed: u64) -> Ask {
    let body = chat(seed % 40, 20 + (seed as usize * 37) % 300, 1);
    why(match seed % 4 {
        0 => Ask::chat(&body),
        1 => Ask::chat(&streamed(&body)),
        2 => Ask::chat(&body).chunked(64),
        _ => Ask::completion(
            &json!({"model": MODEL, "max_tokens": 1, "prompt": body["messages"][0]["content"]}),
        ),
    })
}

#[test]
fn a_canary_is_decided_in_the_cluster_that_the_route_chose() {
    with_envoy("a_canary_is_decided_in_the_cluster_that_the_route_chose", |files| async move {
        let mut config = base();
        let all = replicas(&["stable-0", "stable-1", "canary-0", "canary-1"]).await;
        config.set_replicas(&addresses(&all)[..2]);
        config.add_replicas("canary", &addresses(&all)[2..]);
        config.change_plugin(add_cluster("canary"));
        config.replace(
            "                  cluster: replicas\n",
            "                  weighted_clusters:\n                    clusters:\n                    \
             - {name: replicas, weight: 80}\n                    - {name: canary, weight: 20}\n",
        );
        let rig = start(&files, 2, all, config).await;
        let mut clients = Vec::new();
        for client in 0..4_u64 {
            let mut connection = Connection::open(rig.address).await;
            clients.push(tokio::spawn(async move {
                let mut answers = Vec::new();
                for turn in 0..250 {
                    answers.push(connection.send(&mixed(client * 250 + turn)).await);
                }
                answers
            }));
        }
        let mut counts: BTreeMap<String, u32> = BTreeMap::new();
        for client in clients {
            for answer in client.await.unwrap() {
                assert_chosen_serves(&rig, &answer);
                *counts.entry(answer.replica().to_owned()).or_default() += 1;
            }
        }
        let canary = counts["canary-0"] + counts["canary-1"];
        assert!((120..280).contains(&canary), "200 of 1,000 are due to the canary: {counts:?}");
        let scrape = rig.scrape().await;
        assert_eq!(scrape.sum("warmpath_served_elsewhere_total", &[]), 0.0);
        assert_eq!(scrape.by("warmpath_requests_total", "reason").values().sum::<u64>(), 1_000);
        let healthy = |cluster| [("cluster", cluster), ("health", "healthy")];
        for cluster in ["replicas", "canary"] {
            assert_eq!(scrape.sum("warmpath_replicas", &healthy(cluster)), 2.0, "{cluster}");
        }
        rig.finish().await;
    });
}

/// One more cluster for the filter, found and polled as the first.
fn add_cluster(name: &str) -> impl FnOnce(&mut Value) {
    let cluster =
        json!({"name": name, "admin_cluster": "admin", "poll_cluster": format!("{name}_poll")});
    |plugin| plugin["clusters"].as_array_mut().unwrap().push(cluster)
}

#[test]
fn several_models_each_have_clusters_of_their_own() {
    with_envoy("several_models_each_have_clusters_of_their_own", |files| async move {
        let of_model = |name: &str, models: &[&str]| ReplicaConfig {
            served_names: models.iter().map(|model| (*model).to_owned()).collect(),
            ..fast_replica(name)
        };
        let mut all = replicas(&["qwen-0", "qwen-1"]).await;
        // The second cluster has replicas of two models: each is asked which it serves.
        for (name, models) in
            [("other-0", ["org/other"]), ("other-1", ["org/other"]), ("third", ["org/third"])]
        {
            all.push(start_replica(of_model(name, &models)).await);
        }
        let mut config = base();
        config.set_replicas(&addresses(&all)[..2]);
        config.add_replicas("shared", &addresses(&all)[2..]);
        config.change_plugin(add_cluster("shared"));
        config.serve_prepared_as("/other.warmpath");
        config.change_plugin(|plugin| {
            for name in ["org/other", "org/third"] {
                plugin["models"].as_array_mut().unwrap().push(json!({
                    "name": name, "prepared": {"cluster": "warmpath_files", "path": "/other.warmpath"},
                }));
            }
        });
        config.add_routes(&[json!({
            "match": {"path_separated_prefix": "/v1", "headers": [
                {"name": "x-pool", "string_match": {"exact": "shared"}},
            ]},
            "route": {"cluster": "shared", "timeout": "0s"},
        })]);
        let rig = start(&files, 2, all, config).await;
        rig.eventually("all models known", |scrape| {
            scrape.sum("warmpath_polls_total", &[("target", "models"), ("result", "ok")]) >= 5.0
        })
        .await;
        rig.settle().await;
        for seed in 0..2 {
            for (model, names) in
                [("org/other", ["other-0", "other-1"]), ("org/third", ["third"; 2])]
            {
                let mut body = chat(seed, 100, 1);
                body["model"] = json!(model);
                let ask = why(Ask::chat(&body)).header("x-pool", "shared");
                let cold = rig.send(&ask).await;
                assert_chosen_serves(&rig, &cold);
                assert!(names.contains(&cold.replica()), "{model} by {}", cold.replica());
                rig.settle().await;
                let warm = rig.send(&ask).await;
                assert_eq!(warm.replica(), cold.replica());
                let usage = warm.usage();
                assert_eq!(usage.cached_tokens, reusable(usage.prompt_tokens), "{model}");
            }
            let answer = rig.send(&why(Ask::chat(&chat(seed, 100, 1)))).await;
            assert_chosen_serves(&rig, &answer);
            assert!(answer.replica().starts_with("qwen"), "{}", answer.replica());
        }
        rig.finish().await;
    });
}

#[test]
fn routes_keep_their_match_when_the_filter_sets_its_header() {
    with_envoy("routes_keep_their_match_when_the_filter_sets_its_header", |files| async move {
        let all = replicas(&["main", "gold-0", "gold-1", "header-0", "header-1"]).await;
        let mut config = base();
        config.set_replicas(&addresses(&all)[..1]);
        config.add_replicas("gold", &addresses(&all)[1..3]);
        config.add_replicas("by_header", &addresses(&all)[3..]);
        config.change_plugin(add_cluster("gold"));
        config.change_plugin(add_cluster("by_header"));
        let header = |name: &str, matcher: Value| {
            let mut matcher = matcher;
            matcher["name"] = json!(name);
            json!([matcher])
        };
        let route = |name: &str, matching: Value, route: Value| {
            json!({"name": name, "match": matching, "route": route, "response_headers_to_add": [
                {"header": {"key": "x-route", "value": name}},
            ]})
        };
        config.add_routes(&[
            json!({
                "name": "off", "match": {"prefix": "/", "headers": header("x-off", json!({"present_match": true}))},
                "route": {"cluster": "gold"},
                "response_headers_to_add": [{"header": {"key": "x-route", "value": "off"}}],
                "typed_per_filter_config": {"warmpath": {
                    "@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "disabled": true,
                }},
            }),
            route(
                "gold",
                json!({"prefix": "/", "headers": header("x-tier", json!({"string_match": {"exact": "gold"}}))}),
                json!({"cluster": "gold"}),
            ),
            route(
                "completions",
                json!({"safe_regex": {"regex": "/v1/comp.*"}}),
                json!({"cluster": "gold"}),
            ),
            route(
                "by_header",
                json!({"prefix": "/", "headers": header("x-cluster", json!({"present_match": true}))}),
                json!({"cluster_header": "x-cluster"}),
            ),
        ]);
        let rig = start(&files, 1, all, config).await;
        let chat_ask = |seed: u64| why(Ask::chat(&chat(seed, 120, 1)));
        for seed in 0..10 {
            let body = chat(seed, 120, 1);
            let completion = Ask::completion(
                &json!({"model": MODEL, "max_tokens": 1, "prompt": body["messages"][0]["content"]}),
            );
            for (ask, route, names) in [
                (chat_ask(seed).header("x-tier", "gold"), "gold", "gold-"),
                (why(completion), "completions", "gold-"),
                (chat_ask(seed).header("x-cluster", "by_header"), "by_header", "header-"),
                (chat_ask(seed), "", "main"),
            ] {
                let answer = rig.send(&ask).await;
                assert_chosen_serves(&rig, &answer);
                assert_eq!(answer.header("x-route").unwrap_or_default(), route);
                assert!(answer.replica().starts_with(names), "{route}: {}", answer.replica());
            }
        }
        let before = rig.scrape().await;
        assert_eq!(before.sum("warmpath_served_elsewhere_total", &[]), 0.0);

        // Where the route disables the filter it neither counts nor chooses, and a client does not either.
        let mut obeyed = 0;
        for wish in [1, 1, 2, 1, 2, 2, 2, 1, 1, 2, 1, 2, 2, 1, 2, 1, 1, 1, 2, 2] {
            let wish = &rig.replicas[wish];
            let ask = chat_ask(1).header("x-off", "1").header(ROUTING, wish.address.to_string());
            let answer = rig.send(&ask).await;
            assert_eq!((answer.status, answer.header("x-route")), (200, Some("off")));
            assert_eq!(answer.header("x-warmpath-explain"), None);
            obeyed += u32::from(answer.replica() == wish.replica.name());
        }
        assert!(obeyed < 18, "{obeyed} of 20 went where the client wished");
        let received = rig.received();
        assert!(received.iter().all(|seen| !has_header(seen, ROUTING)));
        let after = rig.scrape().await;
        let counted = |scrape: &crate::stats::Scrape| scrape.sum("warmpath_requests_total", &[]);
        assert_eq!(counted(&after), counted(&before));
        rig.finish().await;
    });
}

#[test]
fn two_listeners_with_two_configurations_share_one_vm() {
    with_envoy("two_listeners_with_two_configurations_share_one_vm", |files| async move {
        let all = replicas(&["first-0", "first-1", "second-0", "second-1"]).await;
        let mut config = base();
        config.set_replicas(&addresses(&all)[..2]);
        config.add_replicas("second", &addresses(&all)[2..]);
        let [port, third_port] = free_ports();
        config.add_listener("second", port, |plugin| {
            plugin["clusters"] = json!([
                {"name": "second", "admin_cluster": "admin", "poll_cluster": "second_poll"},
            ]);
            plugin["models"][0]["aliases"] = json!(["qwen3", "second"]);
        });
        // And one of the same models and clusters as the first, with other options.
        config.add_listener("third", third_port, |plugin| {
            plugin["explain"]["secret"] = json!("other");
            plugin["max_body_bytes"] = json!(100);
        });
        // The second listener's own route.
        let text = config.text().to_owned();
        let at = text.find("  - name: second\n").unwrap();
        let (head, tail) = text.split_at(at);
        let changed = tail.replacen("cluster: replicas", "cluster: second", 1);
        config.replace(&text, &format!("{head}{changed}"));
        let rig = Rig::start_with(&files, 2, all, config, fresh_folder(), true).await;
        let second = SocketAddr::from(([127, 0, 0, 1], port));
        rig.eventually("both configurations ready in both workers", |scrape| {
            let healthy = |cluster| [("cluster", cluster), ("health", "healthy")];
            scrape.sum("warmpath_replicas", &healthy("replicas")) == 2.0
                && scrape.sum("warmpath_replicas", &healthy("second")) == 2.0
                && scrape.sum("warmpath_vms", &[("state", "ready")]) >= 2.0
        })
        .await;
        let listeners = [(rig.address, "first-"), (second, "second-")];
        for seed in 0..4 {
            for (listener, names) in listeners {
                let ask = why(Ask::chat(&chat(seed, 200, 1)));
                // Connections of their own, so that either worker may serve either.
                let cold = Connection::open(listener).await.send(&ask).await;
                assert_chosen_serves(&rig, &cold);
                assert!(cold.replica().starts_with(names), "{}", cold.replica());
                rig.settle().await;
                let warm = Connection::open(listener).await.send(&ask).await;
                assert_eq!(warm.replica(), cold.replica());
                assert_eq!(warm.usage().cached_tokens, reusable(warm.usage().prompt_tokens));
            }
        }
        let scrape = rig.scrape().await;
        assert_eq!(scrape.sum("warmpath_prediction_total", &[("result", "over")]), 0.0);
        assert_eq!(scrape.sum("warmpath_prediction_total", &[("result", "under")]), 0.0);
        // The first and the third know the same, and each goes by its own options.
        let third = SocketAddr::from(([127, 0, 0, 1], third_port));
        let body = chat(1, 200, 1);
        for (listener, secret, is_told, reason) in [
            (rig.address, "open", true, "reason=prefix,"),
            (rig.address, "other", false, ""),
            (third, "open", false, ""),
            (third, "other", true, "reason=body_too_large,"),
            (rig.address, "open", true, "reason=prefix,"),
        ] {
            let ask = Ask::chat(&body).header("x-why", secret);
            let answer = Connection::open(listener).await.send(&ask).await;
            let told = answer.header("x-warmpath-explain");
            assert_eq!(told.is_some(), is_told, "{told:?}");
            assert!(told.unwrap_or_default().starts_with(reason), "{told:?}");
        }
        // The name that only the second configuration knows.
        let mut body = chat(1, 100, 1);
        body["model"] = json!("second");
        for (listener, status) in [(rig.address, 404), (second, 404)] {
            let answer = Connection::open(listener).await.send(&Ask::chat(&body)).await;
            assert_eq!(answer.status, status, "no replica serves this name");
        }
        rig.finish().await;
    });
}
