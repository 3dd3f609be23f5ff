//! Other transports to the replicas, other ways to find them, and Envoy's own policies beside the filter.

use crate::client::Ask;
use crate::deployments::{addresses, assert_chosen_serves, base, replicas, start, why};
use crate::fleet::{CLUSTERS, file, write_endpoints};
use crate::harness::{Rig, fast_replica, fresh_folder, has_header, until, with_envoy};
use crate::prompts::{chat, reusable};
use crate::shipped::Config;
use crate::tls::{Authority, Front, NAME, transport_socket};
use serde_json::json;
use std::collections::BTreeMap;
use tokio::net::TcpListener;
use tokio::time::Instant;
use warmpath::mock::{Handle, serve};

/// Turns of a few conversations: each is served where the filter chose, and from the cache when it may be.
async fn assert_routes_by_prefix(rig: &Rig) {
    for seed in 0..3 {
        let ask = why(Ask::chat(&chat(seed, 300, 1)));
        let cold = rig.send(&ask).await;
        assert_chosen_serves(rig, &cold);
        rig.settle().await;
        let warm = rig.send(&ask).await;
        assert_chosen_serves(rig, &warm);
        assert_eq!(warm.replica(), cold.replica());
        assert_eq!(warm.usage().cached_tokens, reusable(warm.usage().prompt_tokens));
    }
    let scrape = rig.scrape().await;
    assert_eq!(scrape.sum("warmpath_served_elsewhere_total", &[]), 0.0);
    assert_eq!(scrape.sum("warmpath_polls_total", &[("result", "failed")]), 0.0);
    assert_eq!(scrape.sum("warmpath_polls_total", &[("result", "unreadable")]), 0.0);
}

const HTTP2: &str = "    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        \"@type\": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
";

fn speak_http2(config: &mut Config) {
    config.add_to_cluster("replicas", HTTP2);
    config.add_to_cluster("replicas_poll", HTTP2);
    let check = "http_health_check: {path: /health}";
    config.replace(check, "http_health_check: {path: /health, codec_client_type: HTTP2}");
}

#[test]
fn replicas_may_speak_http2() {
    with_envoy("replicas_may_speak_http2", |files| async move {
        let mut config = base();
        speak_http2(&mut config);
        let rig = start(&files, 1, replicas(&["a", "b"]).await, config).await;
        assert_routes_by_prefix(&rig).await;
        let stats = rig.plain_stats("cluster.replicas(_poll)?.upstream_cx_http[12]_total").await;
        let of =
            |name: &str| stats.iter().find(|(other, _)| other == name).map(|(_, count)| *count);
        for cluster in ["replicas", "replicas_poll"] {
            let http1 = of(&format!("cluster.{cluster}.upstream_cx_http1_total"));
            assert_eq!(http1, Some(0.0), "{cluster}");
            assert!(of(&format!("cluster.{cluster}.upstream_cx_http2_total")) > Some(0.0));
        }
        rig.finish().await;
    });
}

#[test]
fn replicas_may_want_tls_and_a_clients_certificate() {
    with_envoy("replicas_may_want_tls_and_a_clients_certificate", |files| async move {
        for protocol in ["http/1.1", "h2"] {
            let folder = fresh_folder();
            let authority = Authority::new(&folder);
            let mut all = replicas(&["a", "b"]).await;
            let mut fronts: Vec<Front> = Vec::new();
            for replica in &mut all {
                fronts.push(authority.front(replica.address).await);
                replica.address = fronts.last().unwrap().address;
            }
            let mut config = base();
            for cluster in ["replicas", "replicas_poll"] {
                config.add_to_cluster(cluster, &transport_socket(&folder, protocol));
            }
            if protocol == "h2" {
                speak_http2(&mut config);
            }
            config.change_plugin(|plugin| {
                plugin["clusters"][0]["poll_authority"] = json!(NAME);
                plugin["clusters"][0]["poll_api_key"] = json!("a key");
            });
            let rig = Rig::start_with(&files, 1, all, config, folder, false).await;
            assert_routes_by_prefix(&rig).await;
            for front in &fronts {
                let protocols = front.protocols();
                assert!(protocols.len() >= 3, "requests, polls and health checks: {protocols:?}");
                assert!(protocols.iter().all(|spoken| spoken == protocol), "{protocols:?}");
            }
            assert_polls_with_a_key(&rig);
            rig.finish().await;
        }
    });
}

/// The filter's own questions carry the name and the key, and nobody else's requests do.
#[track_caller]
fn assert_polls_with_a_key(rig: &Rig) {
    let seen: Vec<_> = rig.replicas.iter().flat_map(|handle| handle.replica.seen()).collect();
    for path in ["/metrics", "/v1/models"] {
        let asked = seen.iter().rfind(|seen| seen.path.ends_with(path)).expect(path);
        let header = |name: &str| {
            let found = asked.headers.iter().find(|(other, _)| other == name);
            found.map(|(_, value)| value.as_str())
        };
        assert_eq!(header("authorization"), Some("Bearer a key"), "{asked:?}");
        // HTTP/2 has it in the target.
        let authority = header("host").unwrap_or(&asked.path);
        assert!(authority.contains(NAME), "{asked:?}");
    }
    assert!(!rig.received().iter().any(|seen| has_header(seen, "authorization")));
}

#[test]
fn replicas_may_have_ipv6_addresses_and_share_them() {
    with_envoy("replicas_may_have_ipv6_addresses_and_share_them", |files| async move {
        let mut all = Vec::new();
        for name in ["six-0", "six-1"] {
            let listener = TcpListener::bind("[::1]:0").await.expect("a loopback with IPv6");
            all.push(serve(fast_replica(name), listener).unwrap());
        }
        let rig = start(&files, 1, all, base()).await;
        assert_routes_by_prefix(&rig).await;
        rig.finish().await;
    });
}

#[test]
fn replicas_may_be_found_by_name() {
    with_envoy("replicas_may_be_found_by_name", |files| async move {
        let all = replicas(&["a", "b", "c"]).await;
        let mut config = base();
        config.set_replicas(&addresses(&all));
        for cluster in ["replicas", "replicas_poll"] {
            let section = config.cluster(cluster);
            let section = section
                .replace("type: STATIC", "type: STRICT_DNS\n    dns_lookup_family: V4_ONLY")
                .replace("address: \"127.0.0.1\"", "address: localhost");
            config.set_cluster(cluster, &section);
        }
        let rig = start(&files, 1, all, config).await;
        assert_routes_by_prefix(&rig).await;
        rig.finish().await;
    });
}

/// Requests that carry a prompt nobody has, and how many each replica got.
async fn cold(rig: &Rig, seeds: std::ops::Range<u64>) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for seed in seeds {
        let answer = rig.send(&why(Ask::chat(&chat(seed, 100, 1)))).await;
        assert_chosen_serves(rig, &answer);
        *counts.entry(answer.replica().to_owned()).or_default() += 1;
    }
    counts
}

fn names(counts: &BTreeMap<String, u32>) -> Vec<&str> {
    counts.keys().map(String::as_str).collect()
}

/// What `override_host` bypasses: zones, and the subset that a route asks for. Where the filter makes no
/// choice, the fallback policy is asked, and these hold.
#[test]
fn a_chosen_replica_is_used_whatever_envoys_other_policies_say() {
    with_envoy("a_chosen_replica_is_used_whatever_envoys_other_policies_say", |files| async move {
        let all = replicas(&["near", "far", "spare"]).await;
        let mut config = base();
        config.set_replicas(&addresses(&all));
        let at = |index: usize, zone: &str, priority: u32| {
            let mut endpoint = crate::shipped::endpoint(&addresses(&all)[index]);
            endpoint["metadata"] = json!({"filter_metadata": {"envoy.lb": {"stage": zone}}});
            json!({"locality": {"region": "here", "zone": zone}, "priority": priority,
                   "load_balancing_weight": 1, "lb_endpoints": [endpoint]})
        };
        let places = json!([at(0, "near", 0), at(1, "far", 0), at(2, "spare", 1)]);
        let section = config.cluster("replicas");
        let kept = section.split("      endpoints:\n").next().unwrap().to_owned();
        let kept = kept
            .replace("load_balancing_policies.least_request\n", "load_balancing_policies.subset\n");
        let least =
            kept.split("                    \"@type\": ").nth(1).unwrap().lines().next().unwrap();
        assert!(least.ends_with("LeastRequest"), "{least}");
        let subset = format!(
            "{}\n                    subset_selectors: [{{keys: [stage]}}]\n                    fallback_policy: ANY_ENDPOINT\n                    \
             subset_lb_policy: {{policies: [{{typed_extension_config: {{name: rr, typed_config: {{\"@type\": {}}}}}}}]}}",
            least.replace("least_request.v3.LeastRequest", "subset.v3.Subset"),
            least.replace("least_request.v3.LeastRequest", "round_robin.v3.RoundRobin"),
        );
        let kept = kept.replace(least, &subset);
        config.set_cluster("replicas", &format!("{kept}      endpoints: {places}\n"));
        config.replace(
            "                  cluster: replicas\n",
            "                  cluster: replicas\n                  \
             metadata_match: {filter_metadata: {envoy.lb: {stage: near}}}\n",
        );
        let rig = start(&files, 1, all, config).await;
        // The filter itself keeps to the first priority while that has a healthy replica.
        assert_eq!(names(&cold(&rig, 0..30).await), ["far", "near"]);
        for _ in 0..10 {
            let answer = rig.send(&Ask::get("/v1/models")).await;
            assert_eq!((answer.status, answer.replica()), (200, "near"), "the route's subset");
        }
        rig.finish().await;
    });
}

#[test]
fn ejected_and_unhealthy_replicas_are_not_chosen_and_panic_is_envoys() {
    with_envoy(
        "ejected_and_unhealthy_replicas_are_not_chosen_and_panic_is_envoys",
        |files| async move {
            let mut config = base();
            // Envoy takes an ejection back at the next good health check unless it is told not to.
            config.add_to_cluster(
            "replicas",
            "    outlier_detection: {consecutive_5xx: 1, interval: 0.1s, base_ejection_time: 60s, \
             max_ejection_percent: 100, successful_active_health_check_uneject_host: false}\n",
        );
            let rig = start(&files, 1, replicas(&["a", "b", "c"]).await, config).await;
            let ask = why(Ask::chat(&chat(1, 300, 1)));
            let first = rig.send(&ask).await;
            rig.settle().await;
            let sick = first.replica().to_owned();
            rig.replica(&sick).set_control(|control| {
                control.apply(&json!({"fail": {"status": 500}})).unwrap();
            });
            // Another replica spares the client the failure.
            assert_eq!(rig.send(&ask).await.status, 200);
            let unhealthy = [("health", "unhealthy")];
            rig.eventually("the ejection is known", |scrape| {
                scrape.sum("warmpath_replicas", &unhealthy) >= 1.0
            })
            .await;
            rig.replica(&sick).set_control(|control| control.fail = None);
            let counts = cold(&rig, 100..115).await;
            assert!(!counts.contains_key(&sick) && counts.len() == 2, "without {sick}: {counts:?}");

            // One healthy replica of three is Envoy's panic, which would spread over all; the filter does not.
            let healthy = names(&counts)[0].to_owned();
            for handle in rig.replicas.iter().filter(|handle| handle.replica.name() != healthy) {
                handle.replica.set_control(|control| control.health = Some(503));
            }
            rig.eventually("two unhealthy", |scrape| {
                scrape.sum("warmpath_replicas", &unhealthy) == 2.0
            })
            .await;
            assert_eq!(names(&cold(&rig, 200..210).await), [healthy.as_str()]);

            // With none left the choice is Envoy's, and its panic mode tries whoever there is.
            rig.replica(&healthy).set_control(|control| control.health = Some(503));
            rig.eventually("all unhealthy", |scrape| {
                scrape.sum("warmpath_replicas", &unhealthy) == 3.0
            })
            .await;
            for seed in 300..310 {
                assert_eq!(rig.send(&Ask::chat(&chat(seed, 100, 1))).await.status, 200);
            }
            let scrape = rig.scrape().await;
            assert_eq!(
                scrape.sum("warmpath_requests_total", &[("reason", "no_healthy_replica")]),
                10.0
            );
            rig.finish().await;
        },
    );
}

#[test]
fn who_is_asked_follows_discovery() {
    with_envoy("who_is_asked_follows_discovery", |files| async move {
        let mut all = replicas(&["0", "1", "2", "3", "4"]).await;
        let folder = fresh_folder();
        let listed = |all: &[Handle], folder: &std::path::Path| {
            write_endpoints(folder, &all.iter().collect::<Vec<&Handle>>());
        };
        listed(&all[..3], &folder);
        let mut config = base();
        CLUSTERS.iter().for_each(|cluster| config.set_eds(cluster, &file(&folder, cluster)));
        let added = all.split_off(3);
        let mut rig = Rig::start_with(&files, 1, all, config, folder.clone(), false).await;
        let asked = |handles: &[Handle]| -> Vec<usize> {
            let count = |handle: &Handle| {
                handle.replica.seen().iter().filter(|seen| seen.path == "/metrics").count()
            };
            handles.iter().map(count).collect()
        };
        assert_eq!(asked(&added), [0, 0]);

        rig.replicas.extend(added);
        let began = Instant::now();
        listed(&rig.replicas, &folder);
        until("all five are asked", || asked(&rig.replicas).iter().all(|count| *count > 0)).await;
        // One interval of 100 ms until the admin is asked, two ticks of 100 ms until the new ones are.
        assert!(began.elapsed().as_secs() < 5, "asked after {:?}", began.elapsed());

        let began = Instant::now();
        listed(&rig.replicas[..2], &folder);
        rig.eventually("two are chosen from", |scrape| {
            scrape.sum("warmpath_replicas", &[("health", "healthy")]) == 2.0
        })
        .await;
        assert!(began.elapsed().as_secs() < 5, "left out after {:?}", began.elapsed());
        let before = asked(&rig.replicas);
        until("the two are asked on", || {
            asked(&rig.replicas)[..2].iter().all(|now| *now > before[0] + 3)
        })
        .await;
        assert_eq!(asked(&rig.replicas)[2..], before[2..], "who left is not asked");
        assert_eq!(names(&cold(&rig, 0..20).await), ["0", "1"]);
        rig.finish().await;
    });
}
