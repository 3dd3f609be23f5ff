//! What a rig is made of: replicas of the shipped configuration's model, and how many of what.

use crate::shipped::Config;
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::net::TcpListener;
use warmpath::mock::engine::EngineConfig;
use warmpath::mock::{Handle, ReplicaConfig, serve};
use warmpath::model::Model;

/// The model's names in the shipped configuration.
pub const MODEL: &str = "Qwen/Qwen3-8B";
pub const ALIAS: &str = "qwen3";

/// The model, for the replicas and for what tests work out on their own.
pub static QWEN3: LazyLock<Arc<Model>> = LazyLock::new(|| {
    let path = super::PREPARED.as_ref().expect("WARMPATH_PREPARED");
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Arc::new(Model::load(bytes).unwrap_or_else(|error| panic!("{}: {}", path.display(), error.0)))
});

/// A replica that is fast enough not to be waited for, and otherwise as by default.
pub fn fast_replica(name: &str) -> ReplicaConfig {
    let engine = EngineConfig {
        step_base: Duration::from_millis(1),
        prefill_rate: 400_000.0,
        attention_rate: 0.0,
        decode_per_sequence: Duration::ZERO,
        ..EngineConfig::default()
    };
    replica_with(name, engine)
}

/// A replica of the model in the shipped configuration.
pub fn replica_with(name: &str, engine: EngineConfig) -> ReplicaConfig {
    ReplicaConfig {
        name: name.to_owned(),
        engine,
        served_names: vec![MODEL.to_owned(), ALIAS.to_owned()],
        model: Some(Arc::clone(&QWEN3)),
        ..ReplicaConfig::default()
    }
}

/// Starts a replica on a free port.
pub async fn start_replica(config: ReplicaConfig) -> Handle {
    serve(config, TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap()
}

/// What a rig is made of.
pub struct Plan {
    pub workers: usize,
    pub replicas: Vec<ReplicaConfig>,
    pub config: Config,
    /// Whether to return before the filter is ready.
    pub early: bool,
}

impl Plan {
    /// The shipped configuration with a poll interval for the impatient, in front of `count` fast replicas.
    pub fn new(workers: usize, count: usize) -> Self {
        let mut config = Config::read();
        config.change_plugin(|plugin| {
            plugin["poll_interval_ms"] = json!(100);
            // By what such replicas show, short prompts are computed in less than a tie: nothing would go by its prefix.
            plugin["learn_rates"] = json!(false);
        });
        let replicas = (0..count).map(|n| fast_replica(&format!("replica-{n}"))).collect();
        Self { workers, replicas, config, early: false }
    }

    /// Starts the replicas now and names them in the filter's configuration, so that nobody is polled and Envoy's
    /// health checks do not count.
    pub(super) async fn with_static_replicas(mut self) -> (Self, Vec<Handle>) {
        let mut replicas = Vec::new();
        for config in self.replicas.drain(..) {
            replicas.push(start_replica(config).await);
        }
        let listed: Vec<String> =
            replicas.iter().map(|handle| handle.address.to_string()).collect();
        let plan = self.plugin(|plugin| {
            plugin["clusters"] = json!([{"name": "replicas", "replicas": listed}]);
        });
        (plan, replicas)
    }

    /// Lets a prompt take as long as it may need on a machine that does other things too.
    pub fn patient(self) -> Self {
        self.plugin(|plugin| {
            plugin["max_prompt_ms"] = json!(60_000);
            plugin["max_prompt_cpu_ms"] = json!(60_000);
        })
    }

    /// Changes the filter's configuration.
    pub fn plugin(mut self, change: impl FnOnce(&mut Value)) -> Self {
        self.config.change_plugin(change);
        self
    }
}
