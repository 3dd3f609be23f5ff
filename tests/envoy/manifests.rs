//! The manifests of `envoy/istio` and `envoy/kubernetes`: what is Envoy's in them, in a real one.
//!
//! Istio itself is not here. Its part, putting an EnvoyFilter's patches into what it generates, is done by [`patched`] as its
//! documentation says, on a bootstrap shaped as a proxy's is: the clusters' names and policies, a listener for each port,
//! the routes, the admin as a cluster, and a mesh of other services beside them.

use crate::client::Ask;
use crate::harness::{
    Files, Rig, fast_replica, free_ports, fresh_folder, has_header, start_replica, validate,
    with_envoy,
};
use crate::prompts::chat;
use crate::shipped::Config;
use serde::Deserialize as _;
use serde_json::{Map, Value, json};
use std::net::SocketAddr;
use std::path::Path;

const HCM: &str = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const ROUTER: &str = "envoy.filters.http.router";
const ROUTING: &str = "x-gateway-destination-endpoint";

const AGENTS: &str = "outbound|9402||engine-agent.inference.svc.cluster.local";

/// Services of the mesh that have nothing to do with inference, and pods of each.
const OTHERS: (usize, usize) = (300, 4);

/// The documents of a file of manifests.
fn documents(name: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("envoy").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
    let read = |document| Value::deserialize(document).unwrap_or_else(|e| panic!("{name}: {e}"));
    serde_yaml_ng::Deserializer::from_str(&text).map(read).collect()
}

/// The patches of a file's one EnvoyFilter.
fn patches(name: &str) -> Vec<Value> {
    let documents = documents(name);
    let mut filters = documents.iter().filter(|document| document["kind"] == "EnvoyFilter");
    let filter = filters.next().expect("an EnvoyFilter");
    assert!(filters.next().is_none(), "{name} has two");
    filter["spec"]["configPatches"].as_array().unwrap().clone()
}

fn socket(address: SocketAddr) -> Value {
    json!({"socket_address": {
        "address": address.ip().to_string(), "port_value": address.port(),
    }})
}

fn assignment(name: &str, members: &[SocketAddr]) -> Value {
    let endpoints: Vec<Value> =
        members.iter().map(|member| json!({"endpoint": {"address": socket(*member)}})).collect();
    json!({"cluster_name": name, "endpoints": [{
        "locality": {"region": "here", "zone": "a"}, "lb_endpoints": endpoints,
        "load_balancing_weight": members.len(),
    }]})
}

/// A cluster as Istio makes one of a service. Localities have weights unless a DestinationRule takes them away.
fn cluster(name: &str, members: &[SocketAddr]) -> Value {
    let circuit = json!({"thresholds": [{
        "max_connections": 16384, "max_pending_requests": 16384, "max_requests": 16384,
        "max_retries": 16384, "track_remaining": true,
    }]});
    let mut policy = json!({"healthy_panic_threshold": {}});
    if !has_no_localities(name) {
        policy["locality_weighted_lb_config"] = json!({});
    }
    json!({
        "name": name, "type": "STATIC", "connect_timeout": "10s", "lb_policy": "LEAST_REQUEST",
        "common_lb_config": policy, "circuit_breakers": circuit,
        "load_assignment": assignment(name, members),
    })
}

fn has_no_localities(cluster: &str) -> bool {
    documents("istio/routes.yaml").iter().any(|rule| {
        let host = rule["spec"]["host"].as_str();
        let setting =
            &rule["spec"]["trafficPolicy"]["loadBalancer"]["localityLbSetting"]["enabled"];
        rule["kind"] == "DestinationRule"
            && host.is_some_and(|host| cluster.ends_with(host))
            && *setting == false
    })
}

fn service(name: &str) -> String {
    format!("outbound|8000||{name}.inference.svc.cluster.local")
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// A listener for HTTP on a port of the mesh, with the routes that a VirtualService or a Service makes.
fn listener(port: u16, at: SocketAddr, host: &str) -> Value {
    let previous =
        "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate";
    let retry = json!({
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [500, 502, 503, 504], "num_retries": 3,
        "retry_host_predicate": [{
            "name": "envoy.retry_host_predicates.previous_hosts",
            "typed_config": {"@type": previous},
        }],
        "host_selection_retry_max_attempts": 5,
    });
    let route = json!({"match": {"prefix": "/"}, "route": {
        "cluster": service("engine"), "timeout": "0s", "retry_policy": retry,
    }});
    let manager = json!({
        "@type": HCM, "stat_prefix": format!("outbound_0.0.0.0_{port}"),
        "route_config": {"name": format!("http.{port}"), "virtual_hosts": [
            {"name": host, "domains": ["*"], "routes": [route]},
        ]},
        "http_filters": [{"name": ROUTER, "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
        }}],
    });
    json!({"name": format!("0.0.0.0_{port}"), "address": socket(at), "filter_chains": [
        {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]},
    ]})
}

/// A proxy's configuration before any patch.
fn proxy(
    port: u16,
    host: &str,
    at: SocketAddr,
    admin: SocketAddr,
    engines: &[SocketAddr],
) -> Value {
    let mut clusters = vec![
        cluster(&service("engine"), engines),
        cluster(&service("engine-poll"), engines),
        // No agent answers: replicas without one are used all the same.
        cluster(AGENTS, &[local(9)]),
        cluster("prometheus_stats", &[admin]),
    ];
    for other in 0..OTHERS.0 {
        // Addresses for documentation: nobody calls them.
        let pods: Vec<SocketAddr> = (0..OTHERS.1)
            .map(|pod| SocketAddr::from(([192, 0, 2, pod as u8 + 1], 9000 + other as u16)))
            .collect();
        clusters
            .push(cluster(&format!("outbound|80||other-{other}.shop.svc.cluster.local"), &pods));
    }
    json!({
        "admin": {"address": socket(admin)},
        "stats_config": {"use_all_default_tags": false, "stats_tags": [
            {"tag_name": "cluster_name", "regex": r"^cluster\.((.+?(\..+?\.svc\.cluster\.local)?)\.)"},
        ]},
        "static_resources": {"listeners": [listener(port, at, host)], "clusters": clusters},
    })
}

/// Merges as protocol buffers do: what is a list grows, what is an object is merged, all else is replaced.
fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) => into.extend(from.iter().cloned()),
        (into, from) => *into = from.clone(),
    }
}

fn list<'a>(value: &'a mut Value, path: &str) -> &'a mut Vec<Value> {
    value.pointer_mut(path).and_then(Value::as_array_mut).unwrap_or_else(|| panic!("no {path}"))
}

/// Whether an EnvoyFilter's match has no more than these fields, so that none is overlooked here.
fn has_only(part: &Value, fields: &[&str]) {
    let known = |key: &String| fields.contains(&key.as_str());
    let keys: Vec<&String> =
        part.as_object().into_iter().flat_map(Map::keys).filter(|key| !known(key)).collect();
    assert!(keys.is_empty(), "not read here: {keys:?}");
}

/// What Istio makes of a configuration and a patch. The port and the host are those of the proxy's own listener.
fn patch(config: &mut Value, patch: &Value, context: &str, port: u16, host: &str) {
    let (kind, matches) = (patch["applyTo"].as_str().unwrap(), &patch["match"]);
    let (operation, value) =
        (patch["patch"]["operation"].as_str().unwrap(), &patch["patch"]["value"]);
    let wanted = if kind == "BOOTSTRAP" { "ANY" } else { context };
    assert_eq!(matches["context"], wanted);
    has_only(matches, &["context", "listener", "cluster", "routeConfiguration"]);
    has_only(&matches["listener"], &["portNumber", "filterChain"]);
    has_only(&matches["routeConfiguration"], &["portNumber", "vhost"]);
    has_only(&matches["cluster"], &["service", "portNumber"]);
    for asked in [&matches["listener"]["portNumber"], &matches["routeConfiguration"]["portNumber"]]
    {
        assert!(asked.is_null() || *asked == port, "{patch}");
    }
    if let Some(name) = matches["routeConfiguration"]["vhost"]["name"].as_str() {
        assert_eq!(name, host);
    }
    let own = "/static_resources/listeners/0";
    let manager = format!("{own}/filter_chains/0/filters/0/typed_config");
    let vhost = format!("{manager}/route_config/virtual_hosts/0");
    match (kind, operation) {
        ("HTTP_FILTER", "INSERT_BEFORE" | "MERGE") => {
            let sub = &matches["listener"]["filterChain"]["filter"]["subFilter"]["name"];
            let filters = list(config, &format!("{manager}/http_filters"));
            let at = filters.iter().position(|filter| filter["name"] == *sub).expect("the filter");
            match operation {
                "MERGE" => merge(&mut filters[at], value),
                _ => filters.insert(at, value.clone()),
            }
        }
        ("CLUSTER", "MERGE") => {
            let asked = &matches["cluster"];
            let name =
                format!("outbound|{}||{}", asked["portNumber"], asked["service"].as_str().unwrap());
            let clusters = list(config, "/static_resources/clusters");
            let cluster = clusters.iter_mut().find(|cluster| cluster["name"] == *name);
            merge(cluster.unwrap_or_else(|| panic!("no {name}")), value);
        }
        ("CLUSTER", "ADD") => list(config, "/static_resources/clusters").push(value.clone()),
        ("LISTENER", "ADD") => list(config, "/static_resources/listeners").push(value.clone()),
        ("LISTENER", "MERGE") => merge(config.pointer_mut(own).unwrap(), value),
        ("VIRTUAL_HOST", "MERGE") => merge(config.pointer_mut(&vhost).unwrap(), value),
        ("HTTP_ROUTE", "MERGE") => {
            merge(config.pointer_mut(&format!("{vhost}/routes/0")).unwrap(), value);
        }
        ("BOOTSTRAP", "MERGE") => merge(config, value),
        _ => panic!("not done here: {operation} of {kind}"),
    }
}

/// A proxy with a file's patches.
struct Mesh {
    config: Config,
    /// Where clients come, the admin, and the admin again, since nothing else shows metrics there.
    ports: [u16; 3],
}

fn patched(
    files: &Files,
    name: &str,
    context: &str,
    port: u16,
    host: &str,
    engines: &[SocketAddr],
) -> Mesh {
    let [inference, admin, prepared] = free_ports();
    let mut value = proxy(port, host, local(inference), local(admin), engines);
    let patches = patches(name);
    assert!(patches.len() >= 10, "{name}");
    for one in &patches {
        patch(&mut value, one, context, port, host);
    }
    let mut config = Config::of(value.to_string());
    config.replace("/etc/warmpath/filter/plugin.wasm", &files.wasm.display().to_string());
    config
        .replace("/etc/warmpath/tokenizers/qwen3.warmpath", &files.prepared.display().to_string());
    config.replace("\"port_value\":9902", &format!("\"port_value\":{prepared}"));
    Mesh { config, ports: [inference, admin, admin] }
}

async fn a_prefix_is_found_again(mut rig: Rig, cluster: &str) {
    rig.eventually("the engines of a mesh of hundreds", |scrape| {
        scrape.sum("warmpath_replicas", &[("cluster", cluster), ("health", "healthy")]) == 2.0
            && scrape.count("warmpath_replica_report_age_ms", &[("cluster", cluster)]) == 2
            && scrape.sum("warmpath_vms", &[("state", "ready")]) == 1.0
    })
    .await;
    rig.note_vms().await;
    for seed in 0..6 {
        let ask = Ask::chat(&chat(seed, 300, 1));
        let first = rig.send(&ask).await.replica().to_owned();
        // Whoever is named by a client is not asked for it.
        let wish = rig.replicas.iter().find(|handle| handle.replica.name() != first);
        let spoofed = ask.header(ROUTING, wish.unwrap().address.to_string());
        assert_eq!(rig.send(&spoofed).await.replica(), first);
    }
    let scrape = rig
        .eventually("predictions", |scrape| scrape.sum("warmpath_prediction_total", &[]) == 12.0)
        .await;
    assert_eq!(scrape.sum("warmpath_requests_total", &[("reason", "prefix")]), 6.0);
    assert_eq!(scrape.sum("warmpath_prediction_total", &[("result", "equal")]), 12.0);
    for target in ["admin", "metrics", "models"] {
        let failed = [("target", target), ("result", "failed")];
        assert_eq!(scrape.sum("warmpath_polls_total", &failed), 0.0, "{target}");
    }
    assert_eq!(scrape.sum("warmpath_unplaced_replicas", &[]), 0.0);
    let seen = rig.received();
    assert_eq!(seen.len(), 12);
    assert!(!seen.iter().any(|seen| has_header(seen, ROUTING)), "replicas see the header");
    rig.finish().await;
}

#[test]
fn istios_gateway_routes_by_prefix_in_a_mesh_of_hundreds() {
    with_envoy("istios_gateway_routes_by_prefix_in_a_mesh_of_hundreds", |files| async move {
        let replicas =
            vec![start_replica(fast_replica("a")).await, start_replica(fast_replica("b")).await];
        let engines: Vec<SocketAddr> = replicas.iter().map(|replica| replica.address).collect();
        let mut mesh = patched(&files, "istio/gateway.yaml", "GATEWAY", 8080, "*:8080", &engines);
        // As every test: by what such fast replicas show, nothing would go by its prefix.
        mesh.config.replace(
            "\\\"max_body_bytes\\\"",
            "\\\"learn_rates\\\": false, \\\"max_body_bytes\\\"",
        );
        let mut rig = Rig::of_config(&files, 1, mesh.config, mesh.ports, fresh_folder()).await;
        rig.replicas = replicas;
        // What a label cannot have is written as `_`.
        a_prefix_is_found_again(rig, &service("engine").replace('|', "_")).await;
    });
}

#[test]
fn istios_sidecar_is_valid_and_does_what_the_gateway_does() {
    // What differs is where it is put: the filters and the clusters are the gateway's, to the letter.
    let parts = |name: &str| -> Vec<Value> {
        let mut patches = patches(name);
        patches.retain(|patch| {
            !["LISTENER", "VIRTUAL_HOST"].contains(&patch["applyTo"].as_str().unwrap())
                || patch["patch"]["operation"] == "ADD"
        });
        patches.into_iter().map(|patch| patch["patch"].clone()).collect()
    };
    assert_eq!(parts("istio/gateway.yaml"), parts("istio/sidecar.yaml"));
    with_envoy("istios_sidecar_is_valid_and_does_what_the_gateway_does", |files| async move {
        let host = "engine.inference.svc.cluster.local:8000";
        let mesh =
            patched(&files, "istio/sidecar.yaml", "SIDECAR_OUTBOUND", 8000, host, &[local(9)]);
        validate(&files, &mesh.config).unwrap_or_else(|refusal| panic!("{refusal}"));
        let mut broken = mesh.config;
        broken.replace("least_request.v3.LeastRequest", "least_request.v3.MostRequest");
        validate(&files, &broken).expect_err("a configuration that cannot be valid");
    });
}

/// What the patches put into a proxy is what the shipped configuration has, to the letter.
#[test]
fn istios_patches_are_parts_of_the_shipped_configuration() {
    let shipped = &documents("envoy.yaml")[0];
    let manager =
        "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
    let filters = shipped.pointer(manager).unwrap();
    let patches = patches("istio/gateway.yaml");
    let value = |at: usize| &patches[at]["patch"]["value"];
    assert_eq!(value(0), &filters[0]);
    let plugin = |filter: &Value| {
        let mut filter = filter["typed_config"]["config"].clone();
        filter["vm_config"]["code"] = Value::Null;
        filter["configuration"] = Value::Null;
        filter
    };
    assert_eq!(plugin(value(1)), plugin(&filters[1]));
    assert_eq!(value(2)["typed_config"], filters[2]["typed_config"]);
    let clusters = &shipped["static_resources"]["clusters"];
    for (at, cluster) in [(3, 0), (4, 1), (5, 1)] {
        let policy = "load_balancing_policy";
        assert_eq!(value(at)[policy], clusters[cluster][policy]);
    }
    let last = patches.last().unwrap();
    assert_eq!(last["patch"]["value"]["stats_config"], shipped["stats_config"]);
}

/// Names that must be the same in several places, or nothing finds anything.
#[test]
fn the_manifests_name_each_other_as_they_are_called() {
    let text = |name: &str| {
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("envoy").join(name))
            .unwrap()
    };
    for name in ["istio/gateway.yaml", "istio/sidecar.yaml"] {
        let plugin =
            patches(name).into_iter().find(|patch| patch["patch"]["value"]["name"] == "warmpath");
        let plugin = &plugin.unwrap()["patch"]["value"]["typed_config"]["config"];
        assert_eq!(plugin["allow_on_headers_stop_iteration"], true);
        let plugin: Value =
            serde_json::from_str(plugin["configuration"]["value"].as_str().unwrap()).unwrap();
        let cluster = &plugin["clusters"][0];
        let services = documents("istio/services.yaml");
        assert_eq!(plugin["cache_report"]["cluster"], AGENTS);
        for (named, service) in [("name", "engine"), ("poll_cluster", "engine-poll")] {
            assert_eq!(cluster[named], self::service(service));
            let found = services.iter().find(|one| one["metadata"]["name"] == service).unwrap();
            assert_eq!(found["spec"]["ports"][0]["port"], 8000);
            assert_eq!(found["spec"]["selector"], json!({"app": "replica"}));
        }
    }
    let selector =
        &documents("kubernetes/replica.yaml")[0]["spec"]["template"]["metadata"]["labels"];
    assert_eq!(selector["app"], "replica");
    assert_eq!(patches_selector("istio/gateway.yaml"), json!({"app": "inference-gateway"}));
    // Volumes are where the configurations read them.
    for (folder, file) in [("filter", "plugin.wasm"), ("tokenizers", "qwen3.warmpath")] {
        let path = format!("/etc/warmpath/{folder}");
        for (manifest, reader) in [
            ("kubernetes/gateway.yaml", "kubernetes/envoy.yaml"),
            ("istio/deployment.yaml", "istio/gateway.yaml"),
        ] {
            assert!(
                text(manifest).contains(&format!("mountPath: {path}, readOnly: true")),
                "{manifest}"
            );
            assert!(text(reader).contains(&format!("{path}/{file}")), "{reader}");
        }
    }
}

fn patches_selector(name: &str) -> Value {
    documents(name)[0]["spec"]["workloadSelector"]["labels"].clone()
}

/// As Kubernetes' pods and compose's containers are found: by a name with an address for each.
#[test]
fn replicas_are_found_by_their_name() {
    with_envoy("replicas_are_found_by_their_name", |files| async move {
        let folder = fresh_folder();
        let replica = start_replica(fast_replica("a")).await;
        let mut config = Config::read_named("kubernetes/envoy.yaml");
        let [inference, prepared, metrics] = free_ports();
        for (old, new) in [(8080, inference), (9902, prepared), (9903, metrics)] {
            config.replace(&format!("port_value: {old}"), &format!("port_value: {new}"));
        }
        config.replace("address: replica, ", "address: localhost, ");
        config.replace("port_value: 8000", &format!("port_value: {}", replica.address.port()));
        config.replace("/etc/warmpath/filter/plugin.wasm", &files.wasm.display().to_string());
        config.replace(
            "/etc/warmpath/tokenizers/qwen3.warmpath",
            &files.prepared.display().to_string(),
        );
        let [admin] = free_ports();
        let pipe = "address: {pipe: {path: /run/warmpath/admin.sock, mode: 384}}";
        let tcp =
            format!("address: {{socket_address: {{address: 127.0.0.1, port_value: {admin}}}}}");
        config.replace(pipe, &tcp);
        config.replace("address: {pipe: {path: /run/warmpath/admin.sock}}", &tcp);
        let allowed = "  allow_paths:\n  - {prefix: /clusters}\n  - {prefix: /stats/prometheus}\n  - {exact: /ready}\n";
        config.replace(allowed, "");
        let mut rig = Rig::of_config(&files, 1, config, [inference, admin, metrics], folder).await;
        let place = format!("127.0.0.1:{}", replica.address.port());
        rig.eventually("the replica's report", |scrape| {
            scrape.sum("warmpath_replicas", &[("health", "healthy")]) == 1.0
                && scrape.count("warmpath_replica_report_age_ms", &[("replica", &place)]) == 1
        })
        .await;
        rig.note_vms().await;
        rig.replicas.push(replica);
        assert_eq!(rig.send(&Ask::chat(&chat(1, 40, 1))).await.replica(), "a");
        rig.finish().await;
    });
}
