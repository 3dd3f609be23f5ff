//! A running Envoy, changed: a part of its configuration, or the process itself.

use super::process::{Envoy, fresh_folder, spawn, write_parts};
use super::{Files, LOOK, PATIENCE, Rig};
use crate::client::{Ask, Connection};
use crate::shipped::{Config, Part};
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep};

impl Rig {
    /// Gives Envoy a changed configuration in the files that it watches, and waits for its verdict on this part: whether
    /// it was taken.
    pub async fn push(&mut self, part: Part, config: &Config) -> bool {
        let before = self.verdicts(part).await;
        self.pushes += 1;
        write_parts(config, &self.envoy.folder, self.pushes, |other| other == part);
        let end = Instant::now() + PATIENCE;
        loop {
            let after = self.verdicts(part).await;
            if after != before {
                let taken = after.0 > before.0 && after.1 == before.1;
                if taken {
                    self.config = config.clone();
                }
                return taken;
            }
            assert!(Instant::now() < end, "no verdict on {part:?}");
            sleep(LOOK).await;
        }
    }

    /// Updates taken and refused.
    async fn verdicts(&self, part: Part) -> (f64, f64) {
        let prefix = match part {
            Part::Filter => "extension_config_discovery.http_filter.warmpath.",
            Part::Routes => "http.inference.rds.inference.",
            Part::Listeners => "listener_manager.lds.",
            Part::Clusters => "cluster_manager.cds.",
        };
        let taken = if part == Part::Filter { "config_reload" } else { "update_success" };
        let refused = if part == Part::Filter { "config_fail" } else { "update_rejected" };
        let stats = self.plain_stats(&format!("{prefix}.*")).await;
        let of = |name: &str| {
            let is = |(full, _): &&(String, f64)| *full == format!("{prefix}{name}");
            stats.iter().find(is).map_or(0.0, |(_, value)| *value)
        };
        (of(taken), of(refused))
    }

    /// Starts a second process that takes over from the first, which goes on until it is drained: that one.
    pub async fn restart_hot(&mut self, files: &Files) -> Envoy {
        let mut config = self.config.clone();
        config.arguments.extend(["--restart-epoch", "1"].map(str::to_owned));
        let new = spawn(files, self.workers, &config, fresh_folder());
        let old = std::mem::replace(&mut self.envoy, new);
        let end = Instant::now() + PATIENCE;
        while !self.is_second().await || self.admin_get("/ready").await.status != 200 {
            assert!(Instant::now() < end, "the new process does not take over");
            sleep(LOOK).await;
        }
        self.vms_created = self.vms_created().await;
        old
    }

    /// Whether it is the second process that has the admin port. That goes over when it is about to serve: for a moment the port
    /// is nobody's, and what was asked of the first process may stay without an answer.
    async fn is_second(&self) -> bool {
        let ask = Ask::get("/stats?filter=server.hot_restart_generation");
        let Ok(mut connection) = Connection::try_open(self.admin).await else { return false };
        let Ok(answer) = connection.try_begin(&ask).await else { return false };
        let Ok(body) = answer.into_body().collect().await else { return false };
        body.to_bytes().ends_with(b"hot_restart_generation: 2\n")
    }
}
