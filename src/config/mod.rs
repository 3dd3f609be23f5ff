//! The plugin's JSON configuration, checked once into a [`Config`] that cannot be wrong.
//!
//! Every refusal names the field. Unknown keys are refused too: a misspelt option that is
//! silently ignored is the costliest kind of wrong configuration. What can only be known at run
//! time (whether a cluster exists, whether a tokenizer can be fetched) is not checked here.

mod cache_report;
mod clusters;
mod cost;
mod fields;
mod health;
mod left;
mod models;
mod scaling;
mod unique;

use crate::classes::ClassConfig;
use crate::drift::DriftConfig;
use crate::replicas::strikes::PassiveHealth;
use crate::route::{Policy, ROUTING_HEADER, RouteConfig};
use crate::scaling::ScalingConfig;
use crate::score::CostConfig;
pub use cache_report::{AgentConfig, CacheReportConfig};
pub use clusters::{ClusterConfig, Membership, PollConfig};
use fields::{Fields, shown};
pub use left::Left;
pub use models::ModelConfig;
use serde_json::Value;
use std::fmt;
use std::time::Duration;

/// A checked configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Models whose prompts can be read.
    pub models: Vec<ModelConfig>,
    /// Envoy clusters whose replicas are chosen here.
    pub clusters: Vec<ClusterConfig>,
    /// How a choice is made.
    pub route: RouteConfig,
    /// How the second policy would choose.
    pub shadow: Option<RouteConfig>,
    /// What failures seen in passing do to a replica.
    pub passive_health: PassiveHealth,
    /// Whether replicas are as fast as their streamed answers show.
    pub learn_rates: bool,
    /// Whether what engines say of cached tokens corrects what replicas are believed to hold.
    pub correction: bool,
    /// When prompts that seem to differ from the engine's are not matched any more.
    pub drift: DriftConfig,
    /// Blocks assumed of a replica that has not said its capacity.
    pub default_capacity_blocks: u32,
    /// How often replicas are asked for their load.
    pub poll_interval: Duration,
    /// How long an answer to a poll may take.
    pub poll_timeout: Duration,
    /// How agents are asked what their replicas have cached; none: they are not.
    pub cache_report: Option<CacheReportConfig>,
    /// Bodies up to this size are held and read.
    pub max_body_bytes: usize,
    /// How long a request waits for its turn to have its prompt read, and how long that may take.
    pub max_prompt: Duration,
    /// Processor time that reading one prompt may take.
    pub max_prompt_cpu: Duration,
    /// Bytes that a VM's memo may have; none turns it off.
    pub memo_bytes: usize,
    /// The engine's local time is this far from UTC, in seconds, positive to the east: templates
    /// may print the date.
    pub engine_utc_offset_s: i64,
    /// The request header whose value sets tenants' routing keys apart.
    pub tenant_header: Option<String>,
    /// The request header that names a request's session.
    pub session_header: Option<String>,
    /// What requests are told apart by in metrics.
    pub classes: ClassConfig,
    /// Who may see why a replica was chosen.
    pub explain: Option<ExplainConfig>,
    /// How many replicas there should be; none: nobody asks.
    pub scaling: Option<ScalingConfig>,
    fingerprint: u64,
}

/// A text that is not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret")
    }
}

/// Who may see why a replica was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainConfig {
    /// Request header that asks for it; removed before the request goes on.
    pub request_header: String,
    /// The value it must have.
    pub secret: String,
}

/// Why a configuration is refused: the field, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    path: String,
    problem: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.path, self.problem)
    }
}

/// The policies by name, the one that is taken where none is named first.
const POLICIES: &[(&str, Policy)] = &[
    (Policy::Warmpath.as_str(), Policy::Warmpath),
    (Policy::LeastLoaded.as_str(), Policy::LeastLoaded),
    (Policy::PrefixOnly.as_str(), Policy::PrefixOnly),
    (Policy::RoundRobin.as_str(), Policy::RoundRobin),
];

/// Headers without which a request is another one, or none: what asks for an explanation is removed, and may be none of them.
const MEANT_FOR_REPLICAS: &[&str] = &[
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "te",
    "transfer-encoding",
    "upgrade",
    "x-api-key",
];

/// Each has some ten series per model and VM, of which there are not more than 12,288 in all but replicas'.
const MAX_CLASS_NAMES: usize = 256;

/// Every option: path, default as JSON (empty: required; `-`: absent), and unit. The README's
/// table is checked against this one.
pub const OPTIONS: &[(&str, &str, &str)] = &[
    ("models", "", "list"),
    ("models[].name", "", "text"),
    ("models[].aliases", "[]", "list of text"),
    ("models[].prepared.cluster", "", "Envoy cluster"),
    ("models[].prepared.path", "", "path"),
    ("models[].engine", "vllm", "vllm or sglang"),
    ("models[].content_format", "auto", "auto, string or openai"),
    ("models[].exclude_tools_when_tool_choice_none", "false", "true or false"),
    ("models[].template_arguments", "{}", "object"),
    ("models[].media.image.placeholder", "-", "text"),
    ("models[].media.image.tokens", "-", "tokens"),
    ("models[].media.audio.placeholder", "-", "text"),
    ("models[].media.audio.tokens", "-", "tokens"),
    ("models[].media.video.placeholder", "-", "text"),
    ("models[].media.video.tokens", "-", "tokens"),
    ("clusters", "", "list"),
    ("clusters[].name", "", "Envoy cluster"),
    ("clusters[].admin_cluster", "-", "Envoy cluster"),
    ("clusters[].replicas", "-", "list of ip:port"),
    ("clusters[].poll_cluster", "-", "Envoy cluster"),
    ("clusters[].poll_port", "-", "port"),
    ("clusters[].poll_authority", "-", "host name"),
    ("clusters[].poll_api_key", "-", "text"),
    ("poll_interval_ms", "500", "ms"),
    ("poll_timeout_ms", "2000", "ms"),
    ("cache_report.cluster", "-", "Envoy cluster"),
    ("cache_report.port", "9402", "port"),
    ("cache_report.port_offset", "-", "ports"),
    ("cache_report.token", "-", "text"),
    ("cache_report.interval_ms", "200", "ms"),
    ("cache_report.idle_interval_ms", "2000", "ms"),
    ("cache_report.lost_after_ms", "2000", "ms"),
    ("stale_after_ms", "3000", "ms"),
    ("passive_health.failures", "5", "failures"),
    ("passive_health.base_ms", "1000", "ms"),
    ("passive_health.max_ms", "30000", "ms"),
    ("learn_rates", "true", "true or false"),
    ("correction", "true", "true or false"),
    ("drift.differing", "5", "responses"),
    ("drift.window", "20", "responses"),
    ("drift.recovery", "20", "responses"),
    ("drift.hold_ms", "10000", "ms"),
    ("drift.canary_ms", "60000", "ms"),
    ("drift.sample_live", "true", "true or false"),
    ("max_body_bytes", "1000000", "bytes"),
    ("max_prompt_ms", "1000", "ms"),
    ("max_prompt_cpu_ms", "400", "ms"),
    ("memo_bytes", "8388608", "bytes"),
    ("default_block_size", "16", "tokens"),
    ("default_capacity_blocks", "8192", "blocks"),
    ("engine_utc_offset_minutes", "0", "minutes"),
    ("tenant_header", "-", "header name"),
    ("session_header", "-", "header name"),
    ("class_header", "-", "header name"),
    ("class_names", "[]", "list of text"),
    ("max_classes", "16", "names"),
    ("policy", "warmpath", "warmpath, least_loaded, prefix_only or round_robin"),
    ("shadow", "-", "as policy"),
    ("max_cost_s", "-", "s"),
    ("tie_ms", "5", "ms"),
    ("tie_share", "0.05", "share"),
    ("cost.prefill_tokens_per_s", "8000", "tokens/s"),
    ("cost.attention_tokens", "100000", "tokens"),
    ("cost.mean_uncached_tokens", "512", "tokens"),
    ("cost.mean_answer_tokens", "128", "tokens"),
    ("cost.decode_ms_per_token", "0.15", "ms"),
    ("cost.neighbour_weight", "1", "share"),
    ("cost.pressure_ms", "10", "ms"),
    ("cost.recent_weight", "0.1", "share"),
    ("cost.recent_half_life_ms", "5000", "ms"),
    ("cost.eviction_weight", "0.1", "share"),
    ("cost.adapter_load_ms", "100", "ms"),
    ("cost.transfer_tokens_per_s", "100000", "tokens/s"),
    ("explain.request_header", "-", "header name"),
    ("explain.secret", "-", "text"),
    ("scaling", "-", "object"),
    ("scaling.min_replicas", "1", "replicas"),
    ("scaling.max_replicas", "64", "replicas"),
    ("scaling.prefill_share", "0.7", "share"),
    ("scaling.backlog_s", "1", "s"),
    ("scaling.waiting", "2", "requests"),
    ("scaling.kv_usage", "0.8", "share"),
    ("scaling.first_token_ms", "-", "ms"),
    ("scaling.up_after_s", "15", "s"),
    ("scaling.down_after_s", "300", "s"),
];

impl Config {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn parse(json: &[u8]) -> Result<Self, ConfigError> {
        let value = read(json)?;
        let mut root = Fields::new("configuration", &value)?;
        let models = root.list("models", models::model)?;
        let clusters = root.list("clusters", clusters::cluster)?;
        let cost = match root.take("cost") {
            Some(value) => cost::cost(&mut Fields::new("cost", value)?)?,
            None => CostConfig::default(),
        };
        let passive_health = match root.take("passive_health") {
            Some(value) => health::passive_health(&mut Fields::new("passive_health", value)?)?,
            None => PassiveHealth::default(),
        };
        let drift = match root.take("drift") {
            Some(value) => health::drift(&mut Fields::new("drift", value)?)?,
            None => DriftConfig::default(),
        };
        let cache_report = match root.take("cache_report") {
            Some(value) => {
                Some(cache_report::cache_report(&mut Fields::new("cache_report", value)?)?)
            }
            None => None,
        };
        let explain = match root.take("explain") {
            Some(value) if value.is_object() => Some(explain(&mut Fields::new("explain", value)?)?),
            // Not shown: it may be the secret, one level too high.
            Some(_) => return Err(error("explain", "expected an object".to_owned())),
            None => None,
        };
        let scaling = match root.take("scaling") {
            Some(value) => Some(scaling::scaling(&mut Fields::new("scaling", value)?)?),
            None => None,
        };
        let route = RouteConfig {
            policy: root.one_of("policy", POLICIES)?,
            cost,
            tie_s: root.number("tie_ms", 5.0, 0.0, 10_000.0)? / 1000.0,
            tie_share: root.number("tie_share", 0.05, 0.0, 1.0)?,
            max_cost_s: root.optional_number("max_cost_s", 0.001, 86_400.0)?,
            stale_after: root.millis("stale_after_ms", 3000, 1, 600_000)?,
            default_block_size: root.block_size("default_block_size", 16)?,
        };
        let shadow = shadow(&mut root, &route)?;
        let config = Self {
            fingerprint: clusters::fingerprint(&clusters),
            models,
            clusters,
            route,
            shadow,
            passive_health,
            learn_rates: root.switch_or("learn_rates", true)?,
            correction: root.switch_or("correction", true)?,
            drift,
            default_capacity_blocks: root.integer("default_capacity_blocks", 8192, 1, 1 << 26)?
                as u32,
            poll_interval: root.millis("poll_interval_ms", 500, 50, 60_000)?,
            poll_timeout: root.millis("poll_timeout_ms", 2000, 50, 60_000)?,
            cache_report,
            max_body_bytes: root.integer("max_body_bytes", 1_000_000, 1, 256 << 20)? as usize,
            max_prompt: root.millis("max_prompt_ms", 1000, 1, 600_000)?,
            max_prompt_cpu: root.millis("max_prompt_cpu_ms", 400, 1, 600_000)?,
            memo_bytes: root.integer("memo_bytes", 8 << 20, 0, 1 << 30)? as usize,
            engine_utc_offset_s: 60
                * root.signed("engine_utc_offset_minutes", 0, -24 * 60, 24 * 60)?,
            tenant_header: root.optional_header("tenant_header")?,
            session_header: root.optional_header("session_header")?,
            classes: classes(&mut root)?,
            explain,
            scaling,
        };
        root.finish()?;
        config.check_names()?;
        config.check_reports()?;
        config.check_headers()?;
        Ok(config)
    }

    /// Names may stand for one thing only.
    fn check_names(&self) -> Result<(), ConfigError> {
        let mut seen = Vec::new();
        for (index, model) in self.models.iter().enumerate() {
            for name in &model.names {
                if seen.contains(&name) {
                    let problem = format!("{} is taken", shown(&name.as_str().into()));
                    return Err(error(&format!("models[{index}]"), problem));
                }
                seen.push(name);
            }
        }
        for (index, cluster) in self.clusters.iter().enumerate() {
            let earlier = self.clusters.iter().take(index).any(|other| other.name == cluster.name);
            if earlier {
                let path = format!("clusters[{index}].name");
                let name = shown(&cluster.name.as_str().into());
                return Err(error(&path, format!("{name} is there twice")));
            }
        }
        Ok(())
    }

    /// A report must last until the next one, where there are any.
    fn check_reports(&self) -> Result<(), ConfigError> {
        let is_polled = self.clusters.iter().any(|cluster| cluster.poll.is_some());
        let polls = is_polled.then_some(("poll_interval_ms", self.poll_interval));
        // What agents tell is the load, too, and then replicas are not asked for it.
        let reports = self.cache_report.as_ref();
        let reports = reports.map(|asked| ("cache_report.idle_interval_ms", asked.idle_interval));
        for (option, interval) in polls.into_iter().chain(reports) {
            if self.route.stale_after < interval {
                let problem = format!("expected at least {option} ({})", interval.as_millis());
                return Err(error("stale_after_ms", problem));
            }
        }
        Ok(())
    }

    /// Headers that are removed before anybody reads them say nothing.
    fn check_headers(&self) -> Result<(), ConfigError> {
        let explain = self.explain.as_ref().map(|explain| &explain.request_header);
        let read = [
            ("tenant_header", self.tenant_header.as_ref()),
            ("session_header", self.session_header.as_ref()),
            ("class_header", self.classes.header.as_ref()),
        ];
        for (path, name) in read.into_iter().chain([("explain.request_header", explain)]) {
            if name.is_some_and(|name| name == ROUTING_HEADER) {
                let problem = "is removed from every request, for it is set here".to_owned();
                return Err(error(path, problem));
            }
        }
        let Some(explain) = explain else { return Ok(()) };
        let path = "explain.request_header";
        if let Some((other, _)) = read.into_iter().find(|(_, name)| *name == Some(explain)) {
            let problem = format!("is {other}, too, and would be removed before that is read");
            return Err(error(path, problem));
        }
        if MEANT_FOR_REPLICAS.contains(&explain.as_str()) {
            let problem = "would be removed from requests that need it".to_owned();
            return Err(error(path, problem));
        }
        Ok(())
    }

    /// Tells apart configurations that may not read each other's shared values.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The model that a request names. A request without a name means the only model there is.
    pub fn model_named(&self, name: Option<&str>) -> Option<usize> {
        match name {
            Some(name) => {
                self.models.iter().position(|model| model.names.iter().any(|n| n == name))
            }
            None => (self.models.len() == 1).then_some(0),
        }
    }

    /// The names of the model at this place, its own first. None where there is no such place.
    pub fn model_names(&self, index: usize) -> &[String] {
        self.models.get(index).map(|model| model.names.as_slice()).unwrap_or_default()
    }

    /// The configuration of an Envoy cluster.
    pub fn cluster_named(&self, name: &str) -> Option<&ClusterConfig> {
        self.clusters.iter().find(|cluster| cluster.name == name)
    }
}

/// The whole of it, of which no part is there twice.
fn read(json: &[u8]) -> Result<Value, ConfigError> {
    let text = json.trim_ascii();
    if text.is_empty() {
        return Err(error("configuration", "missing".to_owned()));
    }
    let read = serde_json::from_slice(json).map(|unique::Unique(value)| value);
    read.map_err(|found| {
        let problem = match found.is_data() {
            true => found.to_string(),
            false if text.starts_with(b"{") => format!("not JSON: {found}"),
            // Such as a Struct, which comes as protobuf has it.
            false => format!("not JSON: {found}: expected a StringValue that holds an object"),
        };
        error("configuration", problem)
    })
}

/// The same choice by another policy, which turns nobody away.
fn shadow(
    fields: &mut Fields<'_>,
    route: &RouteConfig,
) -> Result<Option<RouteConfig>, ConfigError> {
    if fields.take("shadow").is_none() {
        return Ok(None);
    }
    let policy = fields.one_of("shadow", POLICIES)?;
    if policy == route.policy {
        return Err(error(
            &fields.path_of("shadow"),
            "expected another one than policy".to_owned(),
        ));
    }
    Ok(Some(RouteConfig { policy, max_cost_s: None, ..route.clone() }))
}

fn classes(fields: &mut Fields<'_>) -> Result<ClassConfig, ConfigError> {
    let header = fields.optional_header("class_header")?;
    let names = fields.texts("class_names")?.unwrap_or_default();
    let max_names = fields.integer("max_classes", 16, 0, 256)? as usize;
    if header.is_none() && !names.is_empty() {
        let problem = "of no use without class_header".to_owned();
        return Err(error(&fields.path_of("class_names"), problem));
    }
    if names.len() > MAX_CLASS_NAMES {
        let problem = format!("expected at most {MAX_CLASS_NAMES} names");
        return Err(error(&fields.path_of("class_names"), problem));
    }
    Ok(ClassConfig { header, names, max_names })
}

fn explain(fields: &mut Fields<'_>) -> Result<ExplainConfig, ConfigError> {
    let request_header = fields.header("request_header")?;
    let config = ExplainConfig { request_header, secret: fields.secret("secret")? };
    fields.finish()?;
    Ok(config)
}

fn error(path: &str, problem: String) -> ConfigError {
    ConfigError { path: path.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = r#"{"name":"m","prepared":{"cluster":"files","path":"/m"}}"#;
    const CLUSTER: &str = r#"{"name":"pool","replicas":["10.0.0.1:8000","[::1]:80"]}"#;

    fn with(more: &str) -> String {
        format!(r#"{{"models":[{MODEL}],"clusters":[{CLUSTER}]{more}}}"#)
    }

    #[track_caller]
    fn check_error(json: &str, expected: &str) {
        let error = Config::parse(json.as_bytes()).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn the_least_configuration_takes_every_default() {
        let config = Config::parse(with("").as_bytes()).unwrap();
        assert_eq!(config.route.cost, CostConfig::default());
        assert_eq!(config.max_body_bytes, 1_000_000);
        assert_eq!(config.poll_interval, Duration::from_millis(500));
        assert_eq!(config.explain, None);
    }

    #[test]
    fn every_refusal_names_the_field() {
        check_error("", "configuration: missing");
        check_error(
            "\nmodels",
            "configuration: not JSON: expected value at line 2 column 1: expected a StringValue that holds an object",
        );
        check_error("{", "configuration: not JSON: EOF while parsing an object at line 1 column 1");
        check_error(
            &with(r#","tie_ms":1,"tie_ms":2"#),
            "configuration: \"tie_ms\" is there twice at line 1 column 156",
        );
        check_error("[]", "configuration: expected an object, found []");
        check_error("{}", "models: missing");
        check_error(r#"{"models":[]}"#, "models: expected a list with at least one item, found []");
        check_error(r#"{"models":[{"name":7}]}"#, "models[0].name: expected a text, found 7");
        check_error(r#"{"models":[{"name":"m"}]}"#, "models[0].prepared: missing");
        check_error(
            r#"{"models":[{"name":"m","prepared":{"cluster":"files","path":"m"}}]}"#,
            "models[0].prepared.path: expected a path that begins with /, of visible ASCII characters, found \"m\"",
        );
        check_error(
            &format!(r#"{{"models":[{MODEL}],"clusters":[{{"name":"c"}}]}}"#),
            "clusters[0]: expected one of admin_cluster and replicas",
        );
        check_error(
            &format!(r#"{{"models":[{MODEL}],"clusters":[{{"name":"c","replicas":["h:1"]}}]}}"#),
            "clusters[0].replicas[0]: expected ip:port, found \"h:1\"",
        );
        check_error(
            &format!(r#"{{"models":[{MODEL}],"clusters":[{{"name":"c","replicas":[]}}]}}"#),
            "clusters[0].replicas: expected a list with at least one item, found []",
        );
        check_error(
            &with("").replace(r#""name":"m""#, r#""name":"m","aliases":["n",""]"#),
            "models[0].aliases: expected a list of texts, found [\"n\",\"\"]",
        );
        check_error(
            &with("").replace("\"/m\"", "\"/m v2\""),
            "models[0].prepared.path: expected a path that begins with /, of visible ASCII characters, found \"/m v2\"",
        );
        check_error(
            &with(r#","poll_interval_ms":5000"#)
                .replace("\"replicas\"", "\"poll_cluster\":\"p\",\"replicas\""),
            "stale_after_ms: expected at least poll_interval_ms (5000)",
        );
        // Where no replica is asked for its load, the interval is that of the admin's answers.
        assert!(Config::parse(with(r#","poll_interval_ms":5000"#).as_bytes()).is_ok());
        let reported = |options: &str| {
            with(&format!(
                r#","cache_report":{{"cluster":"agents"{options}}},"stale_after_ms":1500"#
            ))
        };
        check_error(
            &reported(""),
            "stale_after_ms: expected at least cache_report.idle_interval_ms (2000)",
        );
        assert!(Config::parse(reported(r#","idle_interval_ms":1500"#).as_bytes()).is_ok());
        check_error(&with(r#","max_body_byte":1"#), "max_body_byte: unknown option");
        check_error(
            &with(r#","cost":{"pressure_ms":-1}"#),
            "cost.pressure_ms: expected a number from 0 to 1000000, found -1",
        );
        check_error(&with(r#","cost":{"x":1}"#), "cost.x: unknown option");
        check_error(
            &with(r#","passive_health":{"failures":-1}"#),
            "passive_health.failures: expected a whole number from 0 to 1000, found -1",
        );
        check_error(
            &with(r#","passive_health":{"base_ms":31000}"#),
            "passive_health.max_ms: expected at least base_ms (31000)",
        );
        check_error(
            &with(r#","drift":{"window":65}"#),
            "drift.window: expected a whole number from 1 to 64, found 65",
        );
        check_error(
            &with(r#","drift":{"differing":9,"window":8}"#),
            "drift.differing: expected at most window (8)",
        );
        check_error(
            &with(r#","drift":{"sample_live":1}"#),
            "drift.sample_live: expected true or false, found 1",
        );
        check_error(
            &with(r#","poll_interval_ms":1"#),
            "poll_interval_ms: expected a whole number from 50 to 60000, found 1",
        );
        for wrong in ["0", "-1", "1000000000", "\"16\"", "1.5", "1e300", "[16]"] {
            let expected = "expected a whole number from 1 to 65536";
            let found: Value = serde_json::from_str(wrong).unwrap();
            check_error(
                &with(&format!(r#","default_block_size":{wrong}"#)),
                &format!("default_block_size: {expected}, found {found}"),
            );
        }
        assert!(Config::parse(with(r#","default_block_size":1"#).as_bytes()).is_ok());
        check_error(
            &with(r#","tenant_header":"a:b""#),
            "tenant_header: expected a header name, found \"a:b\"",
        );
        check_error(
            &with(r#","session_header":"a b""#),
            "session_header: expected a header name, found \"a b\"",
        );
        check_error(
            &with(r#","cost":{"neighbour_weight":-0.5}"#),
            "cost.neighbour_weight: expected a number from 0 to 100, found -0.5",
        );
        check_error(
            &with(r#","class_names":["rag"]"#),
            "class_names: of no use without class_header",
        );
        check_error(
            &with(r#","max_classes":257"#),
            "max_classes: expected a whole number from 0 to 256, found 257",
        );
        check_error(
            &with(r#","policy":"random""#),
            "policy: expected one of warmpath, least_loaded, prefix_only, round_robin, found \"random\"",
        );
        check_error(
            &with(r#","policy":"round_robin","shadow":"round_robin""#),
            "shadow: expected another one than policy",
        );
        check_error(
            &with(r#","max_cost_s":0"#),
            "max_cost_s: expected a number from 0.001 to 86400, found 0",
        );
        check_error(
            &with(r#","explain":{"request_header":"a b","secret":"s"}"#),
            "explain.request_header: expected a header name, found \"a b\"",
        );
        let explained =
            |name: &str| format!(r#","explain":{{"request_header":"{name}","secret":"s"}}"#);
        for other in ["tenant_header", "session_header", "class_header"] {
            check_error(
                &with(&format!(r#"{},"{other}":"x-who""#, explained("X-Who"))),
                &format!(
                    "explain.request_header: is {other}, too, and would be removed before that is read"
                ),
            );
            check_error(
                &with(&format!(r#","{other}":"X-Gateway-Destination-Endpoint""#)),
                &format!("{other}: is removed from every request, for it is set here"),
            );
        }
        for name in ["Content-Length", "authorization"] {
            check_error(
                &with(&explained(name)),
                "explain.request_header: would be removed from requests that need it",
            );
        }
    }

    #[test]
    fn how_many_replicas_there_should_be_is_asked_for_by_an_object() {
        let parse = |option: &str| Config::parse(with(option).as_bytes()).unwrap().scaling;
        assert_eq!(parse(""), None);
        assert_eq!(parse(r#","scaling":{}"#), Some(ScalingConfig::default()));
        let asked = parse(r#","scaling":{"first_token_ms":250,"max_replicas":9}"#).unwrap();
        assert_eq!((asked.first_token, asked.max_replicas), (Some(Duration::from_millis(250)), 9));
        check_error(
            &with(r#","scaling":{"min_replicas":3,"max_replicas":2}"#),
            "scaling.max_replicas: expected no less than min_replicas",
        );
        check_error(
            &with(r#","scaling":{"kv_usage":80}"#),
            "scaling.kv_usage: expected a number from 0.01 to 1, found 80",
        );
        check_error(&with(r#","scaling":{"up_after":1}"#), "scaling.up_after: unknown option");
        check_error(&with(r#","scaling":true"#), "scaling: expected an object, found true");
    }

    #[test]
    fn a_secret_is_not_repeated() {
        check_error(
            &with(r#","explain":{"request_header":"x","secret":1234}"#),
            "explain.secret: expected a text",
        );
        check_error(&with(r#","explain":"hush""#), "explain: expected an object");
    }

    #[test]
    fn a_refusal_fits_into_a_line_of_a_log() {
        let long = "é".repeat(10_000);
        let shown = "é".repeat(49);
        check_error(
            &format!(r#"["{long}"]"#),
            &format!("configuration: expected an object, found [\"{shown}..."),
        );
        check_error(
            &format!(r#"{{"models":"{long}"}}"#),
            &format!("models: expected a list with at least one item, found \"{shown}..."),
        );
        check_error(
            &with(&format!(r#","{long}":1"#)),
            &format!("{}...: unknown option", "é".repeat(50)),
        );
        check_error(
            &format!(r#"{{"models":[{MODEL}],"clusters":[{{"name":"c","replicas":["{long}"]}}]}}"#),
            &format!("clusters[0].replicas[0]: expected ip:port, found \"{shown}..."),
        );
    }

    #[test]
    fn addresses_are_written_as_envoy_writes_them() {
        let json = with("")
            .replace("[::1]:80", "[0:0:0:0:0:0:0:1]:080")
            .replace("10.0.0.1:8000", "[2001:DB8::1]:80");
        let config = Config::parse(json.as_bytes()).unwrap();
        let expected = Membership::Static(vec!["[2001:db8::1]:80".into(), "[::1]:80".into()]);
        assert_eq!(config.clusters[0].membership, expected);
    }

    #[test]
    fn how_replicas_are_asked_is_read() {
        let parse = |options: &str| {
            let json = with("").replace(r#""name":"pool""#, &format!(r#""name":"pool",{options}"#));
            Config::parse(json.as_bytes()).map(|config| config.clusters[0].poll.clone())
        };
        let all = parse(
            r#""poll_cluster":"p","poll_port":9000,"poll_authority":"a.svc","poll_api_key":"k1""#,
        );
        let poll = all.unwrap().unwrap();
        assert_eq!((poll.port, poll.authority.as_deref()), (Some(9000), Some("a.svc")));
        assert_eq!(poll.api_key.as_ref().map(Secret::reveal), Some("k1"));
        assert!(!format!("{poll:?}").contains("k1"));
        assert_eq!(parse(r#""poll_port":null"#), Ok(None));
        let refused = |options: &str| parse(options).unwrap_err().to_string();
        assert_eq!(
            refused(r#""poll_port":8000"#),
            "clusters[0].poll_port: of no use without poll_cluster"
        );
        assert_eq!(
            refused(r#""poll_cluster":"p","poll_port":70000"#),
            "clusters[0].poll_port: expected a whole number from 1 to 65535, found 70000"
        );
        assert_eq!(
            refused(r#""poll_cluster":"p","poll_authority":"a b""#),
            "clusters[0].poll_authority: expected a host name"
        );
        for key in ["7", "\"a\\nb\"", "\"\""] {
            let text = refused(&format!(r#""poll_cluster":"p","poll_api_key":{key}"#));
            assert_eq!(text, "clusters[0].poll_api_key: expected a text of visible characters");
        }
    }

    #[test]
    fn a_name_stands_for_one_thing() {
        check_error(
            &format!(r#"{{"models":[{MODEL},{MODEL}],"clusters":[{CLUSTER}]}}"#),
            "models[1]: \"m\" is taken",
        );
        check_error(
            &format!(r#"{{"models":[{MODEL}],"clusters":[{CLUSTER},{CLUSTER}]}}"#),
            "clusters[1].name: \"pool\" is there twice",
        );
    }

    #[test]
    fn a_request_without_a_name_means_the_only_model() {
        let one = Config::parse(with("").as_bytes()).unwrap();
        assert_eq!((one.model_named(None), one.model_named(Some("m"))), (Some(0), Some(0)));
        assert_eq!(one.model_named(Some("other")), None);
        let second = MODEL.replace("\"m\"", "\"n\"");
        let two = format!(r#"{{"models":[{MODEL},{second}],"clusters":[{CLUSTER}]}}"#);
        assert_eq!(Config::parse(two.as_bytes()).unwrap().model_named(None), None);
    }

    #[test]
    fn only_what_gives_shared_values_their_meaning_changes_the_fingerprint() {
        let fingerprint = |json: &str| Config::parse(json.as_bytes()).unwrap().fingerprint();
        assert_eq!(fingerprint(&with("")), fingerprint(&with(r#","tie_ms":9"#)));
        assert_eq!(fingerprint(&with("")), fingerprint(&with("").replace("/m", "/n")));
        assert_ne!(fingerprint(&with("")), fingerprint(&with("").replace("8000", "8001")));
        let polled = with("").replace(r#""replicas""#, r#""poll_cluster":"p","replicas""#);
        assert_ne!(fingerprint(&with("")), fingerprint(&polled));
    }

    /// A configuration with an option at a value, as JSON, and one that only has what it is part of.
    fn with_option(path: &str, value: &str) -> (String, String) {
        // What is not there unless it is named, or names a cluster.
        let cluster = r#""cluster":"agents""#;
        let (option, without) = match path.split_once('.') {
            Some(("cache_report", key)) => (
                format!(r#","cache_report":{{{cluster},"{key}":{value}}}"#),
                format!(r#","cache_report":{{{cluster}}}"#),
            ),
            Some((group, key)) => {
                (format!(r#","{group}":{{"{key}":{value}}}"#), format!(r#","{group}":{{}}"#))
            }
            None => (format!(r#","{path}":{value}"#), String::new()),
        };
        (with(&option), with(&without))
    }

    #[test]
    fn every_option_is_listed_with_its_default_and_heeded() {
        let mut changed = 0;
        for (path, default, _) in OPTIONS {
            if path.contains('[') || default.is_empty() || *default == "-" {
                continue;
            }
            let value = serde_json::from_str(default).unwrap_or_else(|_| Value::from(*default));
            let (listed, without) = with_option(path, &value.to_string());
            let (listed, without) =
                (Config::parse(listed.as_bytes()), Config::parse(without.as_bytes()));
            assert!(listed.is_ok(), "{path}: {listed:?}");
            assert_eq!(listed, without, "{path}");
            let other = match &value {
                Value::Bool(value) => Value::from(!value),
                Value::Number(number) => match number.as_u64() {
                    Some(number) => Value::from(number + 1),
                    None => Value::from(number.as_f64().unwrap() / 2.0),
                },
                // Each of the others has a test of its own.
                _ => continue,
            };
            changed += 1;
            let other = Config::parse(with_option(path, &other.to_string()).0.as_bytes());
            assert!(other.is_ok(), "{path}: {other:?}");
            assert_ne!(other, without, "{path} changes nothing");
        }
        assert!(changed >= 45, "{changed}");
    }
}
