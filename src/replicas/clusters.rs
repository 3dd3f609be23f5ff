//! Envoy's admin answer to `/clusters?format=json` as the [`Member`]s of one cluster.
//!
//! Only addresses and Envoy's own health verdicts are taken. Hosts without an IP address and a
//! port (pipes, internal listeners) cannot be named in the override header and are left out.

use super::{Health, Member};
use serde_json::Value;
use std::net::SocketAddr;

/// Reads the members of each named cluster. A cluster that the answer does not mention is not in
/// the result: that is no proof that it is empty. `None` when the answer is not what Envoy sends.
pub fn members(answer: &[u8], names: &[&str]) -> Option<Vec<(String, Vec<Member>)>> {
    let answer: Value = serde_json::from_slice(answer).ok()?;
    let statuses = answer.get("cluster_statuses")?.as_array()?;
    let mut found = Vec::new();
    for status in statuses {
        let Some(name) = status.get("name").and_then(Value::as_str) else { continue };
        if names.contains(&name) {
            let hosts = status.get("host_statuses").and_then(Value::as_array);
            let members = hosts.into_iter().flatten().filter_map(member).collect();
            found.push((name.to_owned(), members));
        }
    }
    Some(found)
}

fn member(host: &Value) -> Option<Member> {
    let socket = host.get("address")?.get("socket_address")?;
    let ip = socket.get("address")?.as_str()?;
    let port = socket.get("port_value")?.as_u64()?;
    let address = if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") };
    // It goes into a header whose commas have a meaning.
    address.parse::<SocketAddr>().ok()?;
    Some(Member { address, health: health(host.get("health_status")) })
}

fn health(status: Option<&Value>) -> Health {
    let Some(status) = status else { return Health::Healthy };
    let is_set = |name: &str| status.get(name).and_then(Value::as_bool).unwrap_or(false);
    if is_set("failed_active_health_check") || is_set("failed_outlier_check") {
        return Health::Unhealthy;
    }
    // Envoy keeps a removed host while its health checks pass, to finish what it has.
    if is_set("pending_dynamic_removal") {
        return Health::Draining;
    }
    match status.get("eds_health_status").and_then(Value::as_str) {
        Some("UNHEALTHY" | "TIMEOUT") => Health::Unhealthy,
        Some("DRAINING") => Health::Draining,
        _ => Health::Healthy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(ip: &str, health: &str) -> String {
        format!(
            r#"{{"address":{{"socket_address":{{"address":"{ip}","port_value":8000}}}},"health_status":{health}}}"#
        )
    }

    fn answer(hosts: &[String]) -> Vec<u8> {
        format!(
            r#"{{"cluster_statuses":[{{"name":"other"}},{{"name":"replicas","host_statuses":[{}]}}]}}"#,
            hosts.join(",")
        )
        .into_bytes()
    }

    #[track_caller]
    fn check(health: &str, expected: Health) {
        let found = members(&answer(&[host("10.0.0.1", health)]), &["replicas"]).unwrap();
        let address = "10.0.0.1:8000".to_owned();
        assert_eq!(found, [("replicas".to_owned(), vec![Member { address, health: expected }])]);
    }

    #[test]
    fn envoys_verdicts_are_read() {
        check(r#"{"eds_health_status":"HEALTHY"}"#, Health::Healthy);
        check("{}", Health::Healthy);
        check(r#"{"eds_health_status":"DRAINING"}"#, Health::Draining);
        check(r#"{"eds_health_status":"TIMEOUT"}"#, Health::Unhealthy);
        check(
            r#"{"failed_active_health_check":true,"eds_health_status":"HEALTHY"}"#,
            Health::Unhealthy,
        );
        check(r#"{"failed_outlier_check":true}"#, Health::Unhealthy);
        check(
            r#"{"eds_health_status":"HEALTHY","pending_dynamic_removal":true}"#,
            Health::Draining,
        );
    }

    #[test]
    fn ipv6_is_bracketed() {
        let found = members(&answer(&[host("fd00::1", "{}")]), &["replicas"]).unwrap();
        assert_eq!(found[0].1[0].address, "[fd00::1]:8000");
    }

    #[test]
    fn a_cluster_that_is_not_mentioned_is_not_reported_empty() {
        assert_eq!(members(&answer(&[]), &["missing"]), Some(Vec::new()));
        assert_eq!(
            members(&answer(&[]), &["replicas"]),
            Some(vec![("replicas".to_owned(), Vec::new())])
        );
    }

    #[test]
    fn hosts_that_cannot_be_addressed_are_left_out() {
        let pipe = r#"{"address":{"pipe":{"path":"/run/x"}}}"#.to_owned();
        let list = host("10.0.0.3:80, 10.0.0.4", "{}");
        let port = host("10.0.0.5", "{}").replace("8000", "80000");
        let hosts = [pipe, list, port, host("pool.local", "{}"), host("10.0.0.2", "{}")];
        let found = members(&answer(&hosts), &["replicas"]).unwrap();
        assert_eq!(found[0].1.len(), 1);
    }

    #[test]
    fn garbage_is_no_answer() {
        for bytes in [&b""[..], b"not json", b"[]", b"{}", br#"{"cluster_statuses":7}"#, b"\xff"] {
            assert_eq!(members(bytes, &["replicas"]), None);
        }
    }
}
