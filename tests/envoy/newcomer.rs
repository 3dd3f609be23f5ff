//! README's way from an `envoy.yaml` of one's own to a cache-aware route, followed to the letter: its pieces, its commands and
//! nothing else are put into a file that knows nothing of Warmpath.
//!
//! What makes it hold (retries, health checks, an admin out of reach) is in `docs/install.md` and tested in the shipped files.

use crate::client::Ask;
use crate::harness::{Rig, fast_replica, free_ports, fresh_folder, start_replica, with_envoy};
use crate::prompts::chat;
use crate::shipped::Config;
use std::net::SocketAddr;
use std::process::Command;
use warmpath::mock::ReplicaConfig;

/// A gateway as it was before, and in comments where each piece goes.
const OWN: &str = r#"# bootstrap
static_resources:
  listeners:
  - name: mine
    address: {socket_address: {address: 127.0.0.1, port_value: 8080}}
    # listener
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: mine
          route_config:
            virtual_hosts:
            - name: mine
              domains: ["*"]
              # virtual host
              routes:
              - match: {prefix: /}
                route:
                  cluster: replicas
                  # route
          http_filters:
          # first filter
          # filter
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  # listeners
  clusters:
  - name: replicas
    type: STATIC
    # balancer
    load_assignment:
      cluster_name: replicas
      endpoints:
      - lb_endpoints:
        # replicas
  # clusters
"#;

/// Puts a piece where a comment says, indented as that is, with the comment behind it.
#[track_caller]
fn put(text: &mut String, place: &str, piece: &str) {
    let comment = format!("# {place}\n");
    let at = text.find(&comment).unwrap_or_else(|| panic!("no place {place}"));
    let indent = at - text[..at].rfind('\n').map_or(0, |end| end + 1);
    let indent = " ".repeat(indent);
    let lines = piece.lines().enumerate().map(|(number, line)| match number {
        0 => format!("{line}\n"),
        _ if line.is_empty() => "\n".to_owned(),
        _ => format!("{indent}{line}\n"),
    });
    text.insert_str(at, &format!("{}{indent}", lines.collect::<String>()));
}

/// What the commands of the README that begin so print.
fn printed(section: &str, command: &str) -> Vec<String> {
    let commands = section.lines().filter(|line| line.starts_with(command));
    let run = |line: &str| {
        let root = env!("CARGO_MANIFEST_DIR");
        let output = Command::new("sh").args(["-c", line]).current_dir(root).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    commands.map(run).collect()
}

/// The file, with all that the README says.
fn followed(replicas: &[SocketAddr]) -> String {
    let readme = include_str!("../../README.md");
    let (_, section) = readme.split_once("\n## Into the Envoy you have\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let pieces: Vec<&str> = section
        .split("```yaml\n")
        .skip(1)
        .map(|rest| rest.split_once("\n```").unwrap().0)
        .collect();
    let &[filter, header, balancer, clusters, files] = pieces.as_slice() else {
        panic!("{} pieces", pieces.len())
    };
    let said = |begin: &str| {
        let found = section.split('`').find(|span| span.starts_with(begin));
        found.unwrap_or_else(|| panic!("no {begin}")).to_owned()
    };
    let [poll, stats] = printed(section, "sed -n").try_into().unwrap();
    let mut text = OWN.to_owned();
    put(&mut text, "bootstrap", &said("admin: "));
    put(&mut text, "bootstrap", stats.trim_end());
    put(&mut text, "listener", &said("per_connection_buffer_limit_bytes"));
    put(&mut text, "virtual host", &said("request_body_buffer_limit"));
    put(&mut text, "route", &said("timeout: "));
    put(&mut text, "route", &said("idle_timeout: "));
    put(&mut text, "first filter", header);
    put(&mut text, "filter", filter);
    put(&mut text, "listeners", files);
    put(&mut text, "balancer", balancer);
    put(&mut text, "clusters", clusters);
    let poll: String =
        poll.lines().map(|line| format!("{}\n", line.strip_prefix("  ").unwrap())).collect();
    let members =
        "    cluster_name: replicas_poll\n    endpoints:\n    - lb_endpoints:\n      # replicas\n";
    put(&mut text, "clusters", &format!("{poll}{members}"));
    for replica in replicas {
        let (ip, port) = (replica.ip(), replica.port());
        let address = format!("{{socket_address: {{address: {ip}, port_value: {port}}}}}");
        let line = format!("- endpoint: {{address: {address}}}\n        # replicas\n");
        text = text.replace("# replicas\n", &line);
    }
    text
}

/// A replica with the names of the README's command for mock replicas, asked for as the README asks.
fn mock(name: &str) -> ReplicaConfig {
    let readme = include_str!("../../README.md");
    let (_, command) = readme.split_once("--bin warmpath-mock-replica -- ").unwrap();
    let (command, _) = command.split_once("\n```").unwrap();
    let models = command.split("--model ").skip(1);
    let names = models.map(|model| model.split(['=', ' ', '\n']).next().unwrap().to_owned());
    assert!(readme.contains("{\"model\": \"qwen3\", \"max_tokens\": 4"));
    ReplicaConfig { served_names: names.collect(), ..fast_replica(name) }
}

#[test]
fn readme_alone_leads_to_a_cache_aware_route() {
    with_envoy("readme_alone_leads_to_a_cache_aware_route", |files| async move {
        let replicas =
            [start_replica(mock("replica-0")).await, start_replica(mock("replica-1")).await];
        let mut config = Config::of(followed(&replicas.each_ref().map(|handle| handle.address)));
        config.set_files(&files.wasm, &files.prepared);
        let ports @ [inference, admin, served] = free_ports();
        for (old, new) in [(8080, inference), (9901, admin), (9902, served)] {
            config.replace(&format!("port_value: {old}"), &format!("port_value: {new}"));
        }
        let rig = Rig::of_config(&files, 1, config, ports, fresh_folder()).await;
        rig.eventually("a tokenizer and both replicas", |scrape| {
            scrape.sum("warmpath_vms", &[("state", "ready")]) == 1.0
                && scrape.count("warmpath_replica_report_age_ms", &[]) == 2
        })
        .await;
        let ask = Ask::chat(&chat(1, 200, 4));
        for _ in 0..2 {
            assert_eq!(rig.send(&ask).await.status, 200);
        }
        let scrape = rig.scrape().await;
        let sum = |name: &str, label, value| scrape.sum(name, &[(label, value)]);
        // What the README says to look for.
        assert_eq!(sum("warmpath_requests_total", "reason", "cold"), 1.0);
        assert_eq!(sum("warmpath_requests_total", "reason", "prefix"), 1.0);
        assert_eq!(sum("warmpath_prediction_total", "result", "equal"), 2.0);
    });
}
