//! What a client, a replica or a reader of metrics must not be able to do.

use crate::client::{Answer, Ask};
use crate::harness::{Plan, Rig, has_header, with_envoy};
use crate::prompts::{chat, words};
use crate::wire::Raw;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tokio::net::TcpListener;

const ROUTING: &str = "x-gateway-destination-endpoint";
const ORIGINAL: &str = "x-envoy-original-dst-host";
const CHAT: &str = "/v1/chat/completions";

/// Requests of every path through the filter, each with another prompt.
fn requests(seed: u64) -> Vec<Ask> {
    vec![
        Ask::chat(&chat(seed, 40, 1)),
        Ask::chat(&chat(seed, 40, 1)).chunked(100),
        Ask::get("/v1/models"),
        Ask::get(CHAT),
        Ask::post(CHAT, ""),
        Ask::post(CHAT, "{\"model\":"),
        Ask::post(CHAT, vec![b' '; 5 << 20]),
        Ask::post("/upload", vec![b'x'; 100_000])
            .header("content-type", "application/octet-stream"),
    ]
}

/// Adds headers that name a place, one of them twice.
fn spoofed(mut ask: Ask, place: &str) -> Ask {
    for name in [ROUTING, "X-Gateway-Destination-Endpoint", ORIGINAL] {
        ask.headers.push((name.to_owned(), place.as_bytes().to_vec()));
    }
    ask
}

/// Wishes for one of the replicas, for the admin, and for a place that is none of the fleet's: none comes true.
pub async fn wishes_are_ignored(rig: &Rig) {
    let outside = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let others = [rig.admin.to_string(), outside.local_addr().unwrap().to_string()];
    let wish = rig.replicas[0].address.to_string();
    let (kinds, before) = (requests(0).len(), rig.received().len());
    let mut servers = vec![BTreeSet::new(); kinds];
    for seed in 0..12 {
        for (kind, ask) in requests(seed).into_iter().enumerate() {
            let answer = rig.send(&spoofed(ask, &wish)).await;
            servers[kind].insert(answer.replica().to_owned());
        }
    }
    for (kind, servers) in servers.iter().enumerate() {
        assert!(servers.len() > 1, "12 of kind {kind} all went where the client wished");
    }
    for place in &others {
        for ask in requests(100) {
            rig.send(&spoofed(ask, place)).await.replica();
        }
    }
    let nobody = std::time::Duration::from_millis(50);
    let called = tokio::time::timeout(nobody, outside.accept()).await;
    assert!(called.is_err(), "Envoy called a place that the client named");
    let received = rig.received();
    assert_eq!(received.len(), before + 14 * kinds);
    for seen in &received {
        assert!(!has_header(seen, ROUTING) && !has_header(seen, ORIGINAL), "{seen:?}");
    }
}

#[test]
fn a_clients_wish_is_ignored_on_every_path() {
    with_envoy("a_clients_wish_is_ignored_on_every_path", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 4)).await;
        wishes_are_ignored(&rig).await;
        rig.finish().await;
    });
}

#[test]
fn a_clients_wish_is_ignored_where_the_cluster_is_not_ours() {
    with_envoy("a_clients_wish_is_ignored_where_the_cluster_is_not_ours", |files| async move {
        let mut plan = Plan::new(1, 4).plugin(|plugin| {
            plugin["clusters"] = json!([{"name": "nobody", "replicas": ["127.0.0.1:1"]}]);
        });
        plan.early = true;
        let rig = Rig::start(&files, plan).await;
        wishes_are_ignored(&rig).await;
        let scrape = rig.scrape().await;
        assert!(scrape.sum("warmpath_requests_total", &[("reason", "unknown_cluster")]) > 12.0);
        rig.finish().await;
    });
}

#[test]
fn a_clients_wish_is_ignored_where_a_route_disables_the_filter() {
    with_envoy("a_clients_wish_is_ignored_where_a_route_disables_the_filter", |files| async move {
        let mut plan = Plan::new(1, 4);
        let route = "              - match: {prefix: \"/\"}\n";
        let disabled = "                typed_per_filter_config: {warmpath: {\"@type\": type.googleapis.com/envoy.config.route.v3.FilterConfig, disabled: true}}\n";
        plan.config.replace(route, &format!("{route}{disabled}"));
        let rig = Rig::start(&files, plan).await;
        wishes_are_ignored(&rig).await;
        assert_eq!(rig.scrape().await.sum("warmpath_requests_total", &[]), 0.0);
        rig.finish().await;
    });
}

#[test]
fn a_clients_wish_is_ignored_without_the_filter() {
    with_envoy("a_clients_wish_is_ignored_without_the_filter", |files| async move {
        let mut plan = Plan { early: true, ..Plan::new(1, 4) };
        let text = plan.config.text().to_owned();
        let start = text.find("          - name: warmpath\n").unwrap();
        let end =
            start + text[start..].find("          - name: envoy.filters.http.router").unwrap();
        plan.config.replace(&text[start..end], "");
        // The harness names the file; nobody reads it.
        plan.config.replace("admin:\n  #", "# /etc/warmpath/warmpath.wasm\nadmin:\n  #");
        let rig = Rig::start(&files, plan).await;
        wishes_are_ignored(&rig).await;
        rig.finish().await;
    });
}

/// Lets every replica add a header to its responses.
fn with_forgery(plan: &mut Plan) {
    let last = "                    - remove: x-gateway-destination-endpoint\n";
    let forged = "                    response_mutations:\n                    - append: {header: {key: x-warmpath-explain, value: forged}}\n";
    plan.config.replace(last, &format!("{last}{forged}"));
}

#[test]
fn nobody_explains_in_the_filters_name() {
    with_envoy("nobody_explains_in_the_filters_name", |files| async move {
        let mut plan = Plan::new(1, 2).plugin(|plugin| {
            plugin["explain"] = json!({"request_header": "x-why", "secret": "open sesame"});
        });
        with_forgery(&mut plan);
        let rig = Rig::start(&files, plan).await;
        for (kind, ask) in requests(1).into_iter().enumerate() {
            let plain = rig.send(&ask).await;
            assert_eq!(plain.header("x-warmpath-explain"), None, "{kind}");
            let asked = rig.send(&ask.header("x-why", "open sesame")).await;
            let told: Vec<_> = asked.headers.get_all("x-warmpath-explain").iter().collect();
            assert!(told.len() <= 1, "{kind}: {told:?}");
            assert!(
                told.iter().all(|why| why.to_str().unwrap().starts_with("reason=")),
                "{told:?}"
            );
            assert!(kind > 0 || told.len() == 1, "no explanation");
        }
        let received = rig.received();
        assert!(received.iter().all(|seen| !has_header(seen, "x-why")), "the secret arrived");
        rig.finish().await;
    });
}

const CANARY: &str = "canary7f3a9e";

/// Bodies that carry the word into every corner, broken ones among them.
fn canaries() -> Vec<Ask> {
    let body = chat(1, 200, 1);
    let with = |change: fn(&mut Value)| {
        let mut body = body.clone();
        change(&mut body);
        Ask::chat(&body)
    };
    vec![
        with(|body| body["messages"][0]["content"] = json!(format!("{CANARY} {}", words(1, 100)))),
        with(|body| body["messages"][0]["role"] = json!(CANARY)),
        with(|body| body["model"] = json!(CANARY)),
        with(|body| body["cache_salt"] = json!(CANARY)),
        with(|body| body["user"] = json!(CANARY)),
        with(|body| body["chat_template"] = json!(format!("{{{{ {CANARY}("))),
        with(|body| body["chat_template_kwargs"] = json!({"enable_thinking": CANARY, CANARY: 1})),
        with(|body| {
            body["tools"] =
                json!([{"type": "function", "function": {"name": CANARY, "parameters": CANARY}}])
        }),
        with(
            |body| body["messages"] = json!([{"role": "assistant", "tool_calls": [{"function": {"name": CANARY, "arguments": format!("{{{CANARY}")}}]}]),
        ),
        Ask::completion(
            &json!({"prompt": [CANARY, words(2, 100)], "model": "qwen3", "max_tokens": 1}),
        ),
        Ask::post(CHAT, format!("{{\"{CANARY}\": {CANARY}")),
        Ask::post(&format!("{CHAT}?{CANARY}=1"), chat(3, 100, 1).to_string()),
    ]
}

#[test]
fn no_prompt_text_is_logged_counted_or_passed_on_in_headers() {
    with_envoy("no_prompt_text_is_logged_counted_or_passed_on_in_headers", |files| async move {
        let mut plan = Plan::new(1, 2).plugin(|plugin| {
            plugin["explain"] = json!({"request_header": "x-why", "secret": "open"});
        });
        plan.config.log_level = "trace";
        let rig = Rig::start(&files, plan).await;
        for ask in canaries() {
            let in_path = ask.path.contains(CANARY);
            let answer = rig.send(&ask.header("x-why", "open")).await;
            assert!(!format!("{:?}", answer.headers).contains(CANARY), "{answer:?}");
            for seen in rig.received() {
                let headers = format!("{:?}", seen.headers);
                assert!(in_path || !headers.contains(CANARY), "{headers}");
            }
        }
        // Envoy's own trace shows what passes through it; the lines of its wasm part are the filter's.
        let log = rig.log();
        let ours: Vec<&str> = log.lines().filter(|line| line.contains("][wasm]")).collect();
        assert!(ours.iter().any(|line| line.contains("VM started")), "no line of the filter");
        assert!(log.lines().any(|line| line.contains("][http]")), "no trace");
        let found = ours.iter().find(|line| line.contains(CANARY));
        assert_eq!(found, None, "a line of the filter has the prompt's text");
        for page in ["/stats/prometheus", "/stats", "/clusters", "/config_dump"] {
            let page = rig.admin_get(page).await;
            assert!(!String::from_utf8_lossy(&page.body).contains(CANARY));
        }
        let models = rig.scrape().await.by("warmpath_prompt_tokens_total", "model");
        assert_eq!(models.into_keys().collect::<Vec<_>>(), ["Qwen/Qwen3-8B"]);
        rig.finish().await;
    });
}

async fn get(rig: &Rig, method: &'static str, path: &str) -> Answer {
    let mut raw = Raw::open(rig.metrics).await;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    );
    raw.write(head).await;
    raw.answer().await
}

#[test]
fn the_metrics_listener_shows_metrics_and_nothing_else() {
    with_envoy("the_metrics_listener_shows_metrics_and_nothing_else", |files| async move {
        let rig = Rig::start(&files, Plan::new(1, 1)).await;
        rig.send(&Ask::chat(&chat(1, 40, 1))).await;
        let page = get(&rig, "GET", "/stats/prometheus").await;
        assert_eq!(page.status, 200);
        assert!(
            String::from_utf8_lossy(&page.body)
                .contains("warmpath_requests_total{reason=\"cold\"} 1")
        );
        assert_eq!(get(&rig, "GET", "/ready").await.status, 200);
        for path in [
            "/",
            "/stats",
            "/stats/",
            "/clusters",
            "/config_dump",
            "/certs",
            "/listeners",
            "/memory",
            "/help",
            "/quitquitquit",
            "/healthcheck/fail",
            "/logging?level=trace",
            "/reset_counters",
            "/ready/",
            "/stats/prometheus/",
            "/stats/prometheus/../../quitquitquit",
            "/ready/..%2fquitquitquit",
            "//quitquitquit",
            "/%71uitquitquit",
            "/STATS/PROMETHEUS",
        ] {
            for method in ["GET", "POST"] {
                assert_eq!(get(&rig, method, path).await.status, 404, "{method} {path}");
            }
        }
        for method in ["POST", "PUT", "DELETE", "HEAD"] {
            assert_eq!(get(&rig, method, "/stats/prometheus").await.status, 404, "{method}");
            assert_eq!(get(&rig, method, "/ready").await.status, 404, "{method}");
        }
        rig.finish().await;
    });
}
