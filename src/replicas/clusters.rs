//! Envoy's admin answer to `/clusters?format=json` as the [`Member`]s of one cluster.
//!
//! Only addresses, priorities and Envoy's own health verdicts are taken; the rest, most of it
//! statistics, is skipped without being built. Hosts without an IP address and a port (pipes,
//! internal listeners) cannot be named in the override header and are left out.

use super::{Health, Member};
use serde::Deserialize;
use std::borrow::Cow;
use std::net::SocketAddr;

/// A longer answer is not read. Envoy has some 450 to 700 bytes a host, so it is 4,000 hosts or
/// more, of which 1,024 take 2 ms in the VM. The worst that can be made of this much takes 40 ms;
/// twice as much would hold the thread for longer than requests should wait.
pub const MAX_ANSWER_BYTES: usize = 3 << 20;

/// A filter longer than this is left out: it is a header, and those are limited.
const MAX_FILTER_BYTES: usize = 16 << 10;

/// One cluster of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its name.
    pub cluster: String,
    /// Its hosts.
    pub members: Vec<Member>,
    /// Whether hosts of one priority are to get unequal shares.
    pub weighted: bool,
}

/// The admin's path that asks for these clusters.
///
/// Envoy from 1.38 on answers for clusters whose names match; before, for all it has.
pub fn path(names: &[&str]) -> String {
    let mut pattern = String::from("^(?:");
    for (index, name) in names.iter().enumerate() {
        if index > 0 {
            pattern.push('|');
        }
        for character in name.chars() {
            if character.is_ascii_punctuation() && character != '_' {
                pattern.push('\\');
            }
            pattern.push(character);
        }
    }
    pattern.push_str(")$");
    let mut path = String::from("/clusters?format=json");
    if pattern.len() > MAX_FILTER_BYTES {
        return path;
    }
    path.push_str("&filter=");
    for byte in pattern.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) {
            path.push(char::from(byte));
        } else {
            path.push_str(&format!("%{byte:02X}"));
        }
    }
    path
}

/// Reads the members of each named cluster. A cluster that the answer does not mention is not in
/// the result: that is no proof that it is empty. `None` when the answer is not what Envoy sends.
pub fn members(answer: &[u8], names: &[&str]) -> Option<Vec<Found>> {
    let answer: Answer<'_> = serde_json::from_slice(answer).ok()?;
    let named = |cluster: &Cluster<'_>| names.contains(&cluster.name.as_ref());
    Some(answer.cluster_statuses.into_iter().filter(named).map(Found::from).collect())
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    cluster_statuses: Vec<Cluster<'a>>,
}

#[derive(Deserialize)]
struct Cluster<'a> {
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    host_statuses: Vec<Host<'a>>,
}

#[derive(Deserialize)]
struct Host<'a> {
    #[serde(borrow, default)]
    address: Address<'a>,
    #[serde(borrow, default)]
    health_status: Status<'a>,
    #[serde(default)]
    priority: u32,
    #[serde(default)]
    weight: u32,
}

#[derive(Deserialize, Default)]
struct Address<'a> {
    #[serde(borrow)]
    socket_address: Option<SocketAddress<'a>>,
}

#[derive(Deserialize)]
struct SocketAddress<'a> {
    #[serde(borrow, default)]
    address: Cow<'a, str>,
    port_value: Option<u32>,
}

/// A verdict is there only when it is against the host.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Status<'a> {
    failed_active_health_check: bool,
    failed_outlier_check: bool,
    pending_dynamic_removal: bool,
    #[serde(borrow)]
    eds_health_status: Cow<'a, str>,
}

impl From<Cluster<'_>> for Found {
    fn from(cluster: Cluster<'_>) -> Self {
        let weighted = cluster.host_statuses.iter().any(|host| {
            let peer = cluster.host_statuses.iter().find(|peer| peer.priority == host.priority);
            peer.is_some_and(|peer| peer.weight != host.weight)
        });
        let members = cluster.host_statuses.iter().filter_map(Host::member).collect();
        Self { cluster: cluster.name.into_owned(), members, weighted }
    }
}

impl Host<'_> {
    fn member(&self) -> Option<Member> {
        let socket = self.address.socket_address.as_ref()?;
        let (ip, port) = (socket.address.as_ref(), socket.port_value?);
        let address =
            if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") };
        // It goes into a header whose commas have a meaning.
        address.parse::<SocketAddr>().ok()?;
        Some(Member { address, health: self.health_status.health(), priority: self.priority })
    }
}

impl Status<'_> {
    fn health(&self) -> Health {
        if self.failed_active_health_check || self.failed_outlier_check {
            return Health::Unhealthy;
        }
        // Envoy keeps a removed host while its health checks pass, to finish what it has.
        if self.pending_dynamic_removal {
            return Health::Draining;
        }
        match self.eds_health_status.as_ref() {
            "UNHEALTHY" | "TIMEOUT" => Health::Unhealthy,
            "DRAINING" => Health::Draining,
            _ => Health::Healthy,
        }
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
        let members = vec![Member { address, health: expected, priority: 0 }];
        assert_eq!(found, [Found { cluster: "replicas".to_owned(), members, weighted: false }]);
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
        assert_eq!(found[0].members[0].address, "[fd00::1]:8000");
    }

    #[test]
    fn a_cluster_that_is_not_mentioned_is_not_reported_empty() {
        assert_eq!(members(&answer(&[]), &["missing"]), Some(Vec::new()));
        let found = members(&answer(&[]), &["replicas"]).unwrap();
        assert_eq!((found.len(), found[0].members.len()), (1, 0));
    }

    #[test]
    fn hosts_that_cannot_be_addressed_are_left_out() {
        let pipe = r#"{"address":{"pipe":{"path":"/run/x"}}}"#.to_owned();
        let list = host("10.0.0.3:80, 10.0.0.4", "{}");
        let port = host("10.0.0.5", "{}").replace("8000", "80000");
        let hosts = [pipe, list, port, host("pool.local", "{}"), host("10.0.0.2", "{}")];
        let found = members(&answer(&hosts), &["replicas"]).unwrap();
        assert_eq!(found[0].members.len(), 1);
    }

    #[test]
    fn garbage_is_no_answer() {
        for bytes in [&b""[..], b"not json", b"[]", b"{}", br#"{"cluster_statuses":7}"#, b"\xff"] {
            assert_eq!(members(bytes, &["replicas"]), None);
        }
    }

    #[test]
    fn priorities_and_unequal_weights_are_seen() {
        let with = |ip: &str, more: &str| host(ip, &format!("{{}},{more}"));
        let read = |hosts: &[String]| members(&answer(hosts), &["replicas"]).unwrap().remove(0);
        let two = read(&[with("10.0.0.1", r#""weight":1"#), with("10.0.0.2", r#""priority":1"#)]);
        assert_eq!((two.members[0].priority, two.members[1].priority), (0, 1));
        assert!(!two.weighted, "weights of different priorities are not compared");
        assert!(
            read(&[with("10.0.0.1", r#""weight":1"#), with("10.0.0.2", r#""weight":3"#)]).weighted
        );
    }

    #[test]
    fn only_the_named_clusters_are_asked_for() {
        assert_eq!(path(&["a_b-1"]), "/clusters?format=json&filter=%5E%28%3F%3Aa_b%5C-1%29%24");
        let names = path(&["outbound|80||x.svc", "b"]);
        let expected = "outbound%5C%7C80%5C%7C%5C%7Cx%5C.svc%7Cb%29%24";
        assert!(names.ends_with(expected), "{names}");
        let long = "x".repeat(1000);
        assert_eq!(path(&[long.as_str(); 20]), "/clusters?format=json");
    }

    #[test]
    fn what_is_not_asked_for_is_skipped_however_deep_it_is() {
        let deep = format!(
            r#"{{"other":{}1{},"cluster_statuses":[]}}"#,
            "[".repeat(9999),
            "]".repeat(9999)
        );
        assert_eq!(members(deep.as_bytes(), &["replicas"]), Some(Vec::new()));
        let deep = deep.replace("\"other\"", "\"cluster_statuses\"");
        assert_eq!(members(deep.as_bytes(), &["replicas"]), None);
    }
}
