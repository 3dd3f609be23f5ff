//! The plugin's JSON configuration, checked once into a [`Config`] that cannot be wrong.
//!
//! Every refusal names the field. Unknown keys are refused too: a misspelt option that is
//! silently ignored is the costliest kind of wrong configuration. What can only be known at run
//! time (whether a cluster exists, whether a tokenizer can be fetched) is not checked here.

mod fields;

use crate::route::RouteConfig;
use crate::score::CostConfig;
use crate::share::LAYOUT;
use fields::Fields;
use serde_json::Value;
use std::fmt;
use std::time::Duration;
use xxhash_rust::xxh3::Xxh3;

/// A checked configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Models whose prompts can be read.
    pub models: Vec<ModelConfig>,
    /// Envoy clusters whose replicas are chosen here.
    pub clusters: Vec<ClusterConfig>,
    /// How a choice is made.
    pub route: RouteConfig,
    /// Blocks assumed of a replica that has not said its capacity.
    pub default_capacity_blocks: u32,
    /// How often replicas are asked for their load.
    pub poll_interval: Duration,
    /// How long an answer to a poll may take.
    pub poll_timeout: Duration,
    /// Bodies up to this size are held and read.
    pub max_body_bytes: usize,
    /// How long a request waits for its turn to have its prompt read, and how long that may take.
    pub max_prompt: Duration,
    /// The engine's local time is this far from UTC, in seconds, positive to the east: templates
    /// may print the date.
    pub engine_utc_offset_s: i64,
    /// Who may see why a replica was chosen.
    pub explain: Option<ExplainConfig>,
    fingerprint: u64,
}

/// One model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    /// All names under which requests may ask for it, the first being its own.
    pub names: Vec<String>,
    /// Cluster that serves its prepared file.
    pub prepared_cluster: String,
    /// Path of the prepared file there.
    pub prepared_path: String,
}

/// One Envoy cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Its name, as the route names it.
    pub name: String,
    /// Where its members come from.
    pub membership: Membership,
    /// Cluster through which a single replica can be asked for its load; none: not asked.
    pub poll_cluster: Option<String>,
}

/// Where a cluster's members come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Membership {
    /// Envoy's admin interface, reached through this cluster.
    Admin(String),
    /// These addresses, for good.
    Static(Vec<String>),
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

/// Every option: path, default as JSON (empty: required; `-`: absent), and unit. The README's
/// table is checked against this one.
pub const OPTIONS: &[(&str, &str, &str)] = &[
    ("models", "", "list"),
    ("models[].name", "", "text"),
    ("models[].aliases", "[]", "list of text"),
    ("models[].prepared.cluster", "", "Envoy cluster"),
    ("models[].prepared.path", "", "path"),
    ("clusters", "", "list"),
    ("clusters[].name", "", "Envoy cluster"),
    ("clusters[].admin_cluster", "-", "Envoy cluster"),
    ("clusters[].replicas", "-", "list of ip:port"),
    ("clusters[].poll_cluster", "-", "Envoy cluster"),
    ("poll_interval_ms", "500", "ms"),
    ("poll_timeout_ms", "2000", "ms"),
    ("stale_after_ms", "3000", "ms"),
    ("max_body_bytes", "1000000", "bytes"),
    ("max_prompt_ms", "1000", "ms"),
    ("default_block_size", "16", "tokens"),
    ("default_capacity_blocks", "8192", "blocks"),
    ("engine_utc_offset_minutes", "0", "minutes"),
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
    ("explain.request_header", "-", "header name"),
    ("explain.secret", "-", "text"),
];

impl Config {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn parse(json: &[u8]) -> Result<Self, ConfigError> {
        let value: Value = serde_json::from_slice(json).map_err(|error| ConfigError {
            path: "configuration".to_owned(),
            problem: format!("not JSON: {error}"),
        })?;
        let mut root = Fields::new("configuration", &value)?;
        let models = root.list("models", model)?;
        let clusters = root.list("clusters", cluster)?;
        let cost = match root.take("cost") {
            Some(value) => cost(&mut Fields::new("cost", value)?)?,
            None => CostConfig::default(),
        };
        let explain = match root.take("explain") {
            Some(value) => Some(explain(&mut Fields::new("explain", value)?)?),
            None => None,
        };
        let config = Self {
            fingerprint: fingerprint(&models, &clusters),
            models,
            clusters,
            route: RouteConfig {
                cost,
                tie_s: root.number("tie_ms", 5.0, 0.0, 10_000.0)? / 1000.0,
                tie_share: root.number("tie_share", 0.05, 0.0, 1.0)?,
                stale_after: root.millis("stale_after_ms", 3000, 1, 600_000)?,
                default_block_size: root.block_size("default_block_size", 16)?,
            },
            default_capacity_blocks: root.integer("default_capacity_blocks", 8192, 1, 1 << 26)?
                as u32,
            poll_interval: root.millis("poll_interval_ms", 500, 50, 60_000)?,
            poll_timeout: root.millis("poll_timeout_ms", 2000, 50, 60_000)?,
            max_body_bytes: root.integer("max_body_bytes", 1_000_000, 1, 256 << 20)? as usize,
            max_prompt: root.millis("max_prompt_ms", 1000, 1, 600_000)?,
            engine_utc_offset_s: 60
                * root.signed("engine_utc_offset_minutes", 0, -24 * 60, 24 * 60)?,
            explain,
        };
        root.finish()?;
        config.check_names()?;
        Ok(config)
    }

    /// Names may stand for one thing only.
    fn check_names(&self) -> Result<(), ConfigError> {
        let mut seen = Vec::new();
        for (index, model) in self.models.iter().enumerate() {
            for name in &model.names {
                if seen.contains(&name) {
                    return Err(error(&format!("models[{index}]"), format!("{name:?} is taken")));
                }
                seen.push(name);
            }
        }
        for (index, cluster) in self.clusters.iter().enumerate() {
            let earlier = self.clusters.iter().take(index).any(|other| other.name == cluster.name);
            if earlier {
                let path = format!("clusters[{index}].name");
                return Err(error(&path, format!("{:?} is there twice", cluster.name)));
            }
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

    /// The configuration of an Envoy cluster.
    pub fn cluster_named(&self, name: &str) -> Option<&ClusterConfig> {
        self.clusters.iter().find(|cluster| cluster.name == name)
    }
}

/// Only what gives shared values their meaning: a change of a cost must not lose what was learned.
fn fingerprint(models: &[ModelConfig], clusters: &[ClusterConfig]) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(&LAYOUT.to_le_bytes());
    let mut part = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    for model in models {
        part("model");
        model.names.iter().for_each(|name| part(name));
        part(&model.prepared_cluster);
        part(&model.prepared_path);
    }
    for cluster in clusters {
        part("cluster");
        part(&cluster.name);
        match &cluster.membership {
            Membership::Admin(admin) => part(admin),
            Membership::Static(addresses) => addresses.iter().for_each(|address| part(address)),
        }
    }
    hasher.digest()
}

fn model(fields: &mut Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut names = vec![fields.text("name")?];
    names.extend(fields.texts("aliases")?.unwrap_or_default());
    let prepared = fields.require("prepared")?;
    let mut prepared = Fields::new(&fields.path_of("prepared"), prepared)?;
    let model = ModelConfig {
        names,
        prepared_cluster: prepared.text("cluster")?,
        prepared_path: prepared.text("path")?,
    };
    prepared.finish()?;
    Ok(model)
}

fn cluster(fields: &mut Fields<'_>) -> Result<ClusterConfig, ConfigError> {
    let name = fields.text("name")?;
    let admin = fields.optional_text("admin_cluster")?;
    let replicas = fields.texts("replicas")?;
    let membership = match (admin, replicas) {
        (Some(admin), None) => Membership::Admin(admin),
        (None, Some(replicas)) => {
            for (index, address) in replicas.iter().enumerate() {
                if address.parse::<std::net::SocketAddr>().is_err() {
                    let path = format!("{}[{index}]", fields.path_of("replicas"));
                    return Err(error(&path, format!("expected ip:port, found {address:?}")));
                }
            }
            Membership::Static(replicas)
        }
        _ => {
            let problem = "expected one of admin_cluster and replicas".to_owned();
            return Err(error(&fields.path, problem));
        }
    };
    Ok(ClusterConfig { name, membership, poll_cluster: fields.optional_text("poll_cluster")? })
}

fn cost(fields: &mut Fields<'_>) -> Result<CostConfig, ConfigError> {
    let config = CostConfig {
        prefill_tokens_per_s: fields.number("prefill_tokens_per_s", 8000.0, 1.0, 1e9)?,
        attention_tokens: fields.number("attention_tokens", 100_000.0, 1.0, 1e12)?,
        mean_uncached_tokens: fields.number("mean_uncached_tokens", 512.0, 0.0, 1e9)?,
        mean_answer_tokens: fields.number("mean_answer_tokens", 128.0, 0.0, 1e9)?,
        decode_s_per_token: fields.number("decode_ms_per_token", 0.15, 0.0, 1e6)? / 1000.0,
        neighbour_weight: fields.number("neighbour_weight", 1.0, 0.0, 100.0)?,
        pressure_s: fields.number("pressure_ms", 10.0, 0.0, 1e6)? / 1000.0,
        recent_weight: fields.number("recent_weight", 0.1, 0.0, 1.0)?,
        recent_half_life: fields.millis("recent_half_life_ms", 5000, 1, 600_000)?,
    };
    fields.finish()?;
    Ok(config)
}

fn explain(fields: &mut Fields<'_>) -> Result<ExplainConfig, ConfigError> {
    let request_header = fields.text("request_header")?.to_ascii_lowercase();
    let token = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !request_header.bytes().all(token) {
        let problem = format!("expected a header name, found {request_header:?}");
        return Err(error(&fields.path_of("request_header"), problem));
    }
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
        check_error("", "configuration: not JSON: EOF while parsing a value at line 1 column 0");
        check_error("[]", "configuration: expected an object, found []");
        check_error("{}", "models: missing");
        check_error(r#"{"models":[]}"#, "models: expected a list with at least one item, found []");
        check_error(r#"{"models":[{"name":7}]}"#, "models[0].name: expected a text, found 7");
        check_error(r#"{"models":[{"name":"m"}]}"#, "models[0].prepared: missing");
        check_error(
            &format!(r#"{{"models":[{MODEL}],"clusters":[{{"name":"c"}}]}}"#),
            "clusters[0]: expected one of admin_cluster and replicas",
        );
        check_error(
            &format!(r#"{{"models":[{MODEL}],"clusters":[{{"name":"c","replicas":["h:1"]}}]}}"#),
            "clusters[0].replicas[0]: expected ip:port, found \"h:1\"",
        );
        check_error(&with(r#","max_body_byte":1"#), "max_body_byte: unknown option");
        check_error(
            &with(r#","cost":{"pressure_ms":-1}"#),
            "cost.pressure_ms: expected a number from 0 to 1000000, found -1",
        );
        check_error(&with(r#","cost":{"x":1}"#), "cost.x: unknown option");
        check_error(
            &with(r#","poll_interval_ms":1"#),
            "poll_interval_ms: expected a whole number from 50 to 60000, found 1",
        );
        check_error(
            &with(r#","explain":{"request_header":"a b","secret":"s"}"#),
            "explain.request_header: expected a header name, found \"a b\"",
        );
    }

    #[test]
    fn a_secret_is_not_repeated() {
        check_error(
            &with(r#","explain":{"request_header":"x","secret":1234}"#),
            "explain.secret: expected a text",
        );
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
        assert_ne!(fingerprint(&with("")), fingerprint(&with("").replace("/m", "/n")));
        assert_ne!(fingerprint(&with("")), fingerprint(&with("").replace("8000", "8001")));
    }

    #[test]
    fn every_option_is_listed_with_its_default() {
        for (path, default, _) in OPTIONS {
            let Some(key) =
                path.strip_prefix("cost.").or((!path.contains(['.', '['])).then_some(path))
            else {
                continue;
            };
            if default.is_empty() || *default == "-" {
                continue;
            }
            let option = format!("\"{key}\":{default}");
            let json = if path.starts_with("cost.") {
                with(&format!(r#","cost":{{{option}}}"#))
            } else {
                with(&format!(",{option}"))
            };
            let listed = Config::parse(json.as_bytes());
            assert_eq!(listed, Config::parse(with("").as_bytes()), "{path}");
        }
    }
}
