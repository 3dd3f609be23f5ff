//! How the agents beside replicas are asked for their cache reports.
//!
//! It says nothing of what is in a report, nor of what follows when none comes.

use super::fields::Fields;
use super::{ConfigError, Secret, error};
use std::time::Duration;

/// Where agents listen unless they are told otherwise.
const DEFAULT_PORT: u16 = 9402;

/// How agents are asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheReportConfig {
    /// How each of them is reached.
    pub agent: AgentConfig,
    /// Between two questions to the agent of a replica that has something to do.
    pub interval: Duration,
    /// Between two questions to the agent of one that has nothing to do.
    pub idle_interval: Duration,
    /// How long an agent may leave questions unanswered before what it told is not believed any more.
    pub lost_after: Duration,
}

/// How the agent beside a replica is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentConfig {
    /// Cluster through which each agent can be reached by its address.
    pub cluster: String,
    /// Where it listens, on its replica's IP address.
    port: AgentPort,
    /// What it wants to see.
    pub token: Option<Secret>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AgentPort {
    At(u16),
    /// So far above its replica's port: for several replicas on one address.
    Above(u16),
}

impl AgentConfig {
    /// The address of the agent of the replica at `replica`. `None` where its port would be none.
    pub fn address(&self, replica: &str) -> Option<String> {
        let (ip, port) = replica.rsplit_once(':')?;
        let port = match self.port {
            AgentPort::At(port) => port,
            AgentPort::Above(offset) => port.parse::<u16>().ok()?.checked_add(offset)?,
        };
        Some(format!("{ip}:{port}"))
    }
}

pub(super) fn cache_report(fields: &mut Fields<'_>) -> Result<CacheReportConfig, ConfigError> {
    let agent = agent(fields)?;
    let config = CacheReportConfig {
        agent,
        interval: fields.millis("interval_ms", 200, 100, 60_000)?,
        idle_interval: fields.millis("idle_interval_ms", 2000, 100, 60_000)?,
        lost_after: fields.millis("lost_after_ms", 2000, 100, 600_000)?,
    };
    if config.idle_interval < config.interval {
        let problem = format!("expected at least interval_ms ({})", config.interval.as_millis());
        return Err(error(&fields.path_of("idle_interval_ms"), problem));
    }
    // One question without an answer would be the end of it, before the next is due.
    if config.lost_after < config.interval {
        let problem = format!("expected at least interval_ms ({})", config.interval.as_millis());
        return Err(error(&fields.path_of("lost_after_ms"), problem));
    }
    fields.finish()?;
    Ok(config)
}

fn agent(fields: &mut Fields<'_>) -> Result<AgentConfig, ConfigError> {
    let cluster = fields.text("cluster")?;
    // 0 is none: it is out of bounds for what is given.
    let port = fields.integer("port", 0, 1, u16::MAX.into())? as u16;
    let offset = fields.integer("port_offset", 0, 1, u16::MAX.into())? as u16;
    let port = match (port, offset) {
        (0, 0) => AgentPort::At(DEFAULT_PORT),
        (port, 0) => AgentPort::At(port),
        (0, offset) => AgentPort::Above(offset),
        _ => {
            let problem = "expected one of port and port_offset".to_owned();
            return Err(error(&fields.path, problem));
        }
    };
    let token = fields.optional_secret("token")?.map(Secret);
    Ok(AgentConfig { cluster, port, token })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn parse(report: &str) -> Result<CacheReportConfig, String> {
        let json = format!(
            r#"{{"models": [{{"name": "m", "prepared": {{"cluster": "files", "path": "/m"}}}}],
                "clusters": [{{"name": "pool", "admin_cluster": "admin"}}], "cache_report": {report}}}"#
        );
        let config = Config::parse(json.as_bytes()).map_err(|error| error.to_string())?;
        config.cache_report.ok_or_else(|| "none".to_owned())
    }

    fn with(options: &str) -> Result<CacheReportConfig, String> {
        parse(&format!(r#"{{"cluster": "agents"{options}}}"#))
    }

    #[track_caller]
    fn check_address(options: &str, replica: &str, expected: Option<&str>) {
        let config = with(options).unwrap();
        assert_eq!(config.agent.address(replica).as_deref(), expected, "{options}");
    }

    #[test]
    fn an_agent_listens_on_a_port_or_so_far_above_its_replicas() {
        check_address("", "10.0.0.1:8000", Some("10.0.0.1:9402"));
        check_address(r#","port": 9500"#, "[fd00::1]:8000", Some("[fd00::1]:9500"));
        check_address(r#","port_offset": 1000"#, "10.0.0.1:8001", Some("10.0.0.1:9001"));
        check_address(r#","port_offset": 65000"#, "10.0.0.1:8001", None);
        let both = with(r#","port": 1, "port_offset": 1"#);
        assert_eq!(both, Err("cache_report: expected one of port and port_offset".to_owned()));
    }

    #[test]
    fn the_token_is_not_shown() {
        let config = with(r#","token": "t1""#).unwrap();
        assert_eq!(config.agent.token.as_ref().map(Secret::reveal), Some("t1"));
        assert!(!format!("{config:?}").contains("t1"));
    }

    #[track_caller]
    fn check_error(report: &str, expected: &str) {
        assert_eq!(parse(report), Err(expected.to_owned()));
    }

    #[test]
    fn every_refusal_names_the_field() {
        check_error("{}", "cache_report.cluster: missing");
        check_error("7", "cache_report: expected an object, found 7");
        for (option, expected) in [
            (r#""port": 0"#, "port: expected a whole number from 1 to 65535, found 0"),
            (
                r#""port_offset": -1"#,
                "port_offset: expected a whole number from 1 to 65535, found -1",
            ),
            (r#""token": "a\nb""#, "token: expected a text of visible characters"),
            (
                r#""interval_ms": 99"#,
                "interval_ms: expected a whole number from 100 to 60000, found 99",
            ),
            (
                r#""interval_ms": 500, "idle_interval_ms": 400"#,
                "idle_interval_ms: expected at least interval_ms (500)",
            ),
            (
                r#""interval_ms": 500, "lost_after_ms": 400"#,
                "lost_after_ms: expected at least interval_ms (500)",
            ),
            (
                r#""lost_after_ms": "long""#,
                "lost_after_ms: expected a whole number from 100 to 600000, found \"long\"",
            ),
            (r#""ports": 1"#, "ports: unknown option"),
        ] {
            let report = format!(r#"{{"cluster": "agents", {option}}}"#);
            check_error(&report, &format!("cache_report.{expected}"));
        }
    }
}
