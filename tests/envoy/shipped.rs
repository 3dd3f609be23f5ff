//! The shipped configuration, changed only where every user must: addresses, paths, and the plugin's JSON.
//!
//! Each change insists on finding what it replaces, so a shipped file that moves on fails here by name.

use serde_json::Value;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The text of `envoy/envoy.yaml` on its way to a runnable one.
#[derive(Clone)]
pub struct Config {
    text: String,
    /// How much Envoy logs.
    pub log_level: &'static str,
    /// Where the admin is, if not at a port.
    pub admin_pipe: Option<PathBuf>,
}

impl Config {
    /// The file as it is shipped.
    pub fn read() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("envoy/envoy.yaml");
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self { text, log_level: "warning", admin_pipe: None }
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Replaces every occurrence of `old`.
    #[track_caller]
    pub fn replace(&mut self, old: &str, new: &str) {
        assert!(self.text.contains(old), "the shipped configuration has no {old:?}");
        self.text = self.text.replace(old, new);
    }

    /// Puts the two files where they are on this machine.
    pub fn set_files(&mut self, wasm: &Path, prepared: &Path) {
        self.replace("/etc/warmpath/warmpath.wasm", &wasm.display().to_string());
        self.replace("/etc/warmpath/qwen3.warmpath", &prepared.display().to_string());
    }

    /// Moves the listeners to free ports of the loopback.
    pub fn set_ports(&mut self, inference: u16, admin: u16, files: u16, metrics: u16) {
        let listener = "address: 0.0.0.0, port_value: 8080";
        self.replace(listener, &format!("address: 127.0.0.1, port_value: {inference}"));
        if self.admin_pipe.is_none() {
            self.replace("port_value: 9901", &format!("port_value: {admin}"));
        }
        self.replace("port_value: 9902", &format!("port_value: {files}"));
        let listener = "address: 0.0.0.0, port_value: 9903";
        self.replace(listener, &format!("address: 127.0.0.1, port_value: {metrics}"));
    }

    /// Puts the admin behind a unix socket.
    pub fn set_admin_pipe(&mut self, path: &Path) {
        let address = "socket_address: {address: 127.0.0.1, port_value: 9901}";
        self.replace(address, &format!("pipe: {{path: {}, mode: 384}}", path.display()));
        self.admin_pipe = Some(path.to_owned());
    }

    /// Puts these replicas in the place of the four examples, in both clusters.
    pub fn set_replicas(&mut self, replicas: &[SocketAddr]) {
        let is_example =
            |line: &str| line.contains("- endpoint:") && line.contains("port_value: 800");
        let mut text = String::new();
        let mut examples = 0;
        for line in self.text.lines() {
            if !is_example(line) {
                text.push_str(line);
                text.push('\n');
                continue;
            }
            examples += 1;
            if line.contains("port_value: 8001") {
                for replica in replicas {
                    let port = format!("port_value: {}", replica.port());
                    text.push_str(&line.replace("port_value: 8001", &port));
                    text.push('\n');
                }
            }
        }
        assert_eq!(examples, 8, "the shipped configuration names four replicas in two clusters");
        self.text = text;
    }

    /// Changes the filter's own configuration.
    pub fn change_plugin(&mut self, change: impl FnOnce(&mut Value)) {
        let marker = "value: |\n";
        let start = self.text.find(marker).expect("a plugin configuration") + marker.len();
        let rest = &self.text[start..];
        let indent = rest.len() - rest.trim_start_matches(' ').len();
        let belongs = |line: &&str| line.len() > indent && line[..indent].trim().is_empty();
        let length: usize = rest.split_inclusive('\n').take_while(belongs).map(str::len).sum();
        let mut plugin: Value = serde_json::from_str(&rest[..length]).expect("JSON");
        change(&mut plugin);
        let line = format!("{:indent$}{plugin}\n", "");
        self.text.replace_range(start..start + length, &line);
    }

    /// Lets a cluster's endpoints come from a file that is watched.
    pub fn set_eds(&mut self, cluster: &str, file: &Path) {
        let head = format!("  - name: {cluster}\n    type: STATIC\n");
        let start = self.text.find(&head).unwrap_or_else(|| panic!("no static cluster {cluster}"));
        let end = self.text[start..].find("\n\n").map_or(self.text.len(), |at| start + at + 1);
        let section = &self.text[start..end];
        let kept = section.split("    load_assignment:").next().unwrap_or_default();
        let folder = file.parent().expect("a folder");
        let eds = format!(
            "  - name: {cluster}\n    type: EDS\n    eds_cluster_config:\n      service_name: {cluster}\n      \
             eds_config:\n        resource_api_version: V3\n        path_config_source:\n          path: {}\n          \
             watched_directory: {{path: {}}}\n",
            file.display(),
            folder.display()
        );
        let section = kept.replace(&head, &eds);
        self.text.replace_range(start..end, &section);
    }
}

/// A file of endpoints for a cluster that [`Config::set_eds`] changed.
pub fn endpoints(cluster: &str, replicas: &[SocketAddr]) -> String {
    let endpoint = |replica: &SocketAddr| {
        serde_json::json!({"endpoint": {"address": {"socket_address": {
            "address": replica.ip().to_string(), "port_value": replica.port(),
        }}}})
    };
    serde_json::json!({
        "version_info": replicas.len().to_string(),
        "resources": [{
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": cluster,
            "endpoints": [{"lb_endpoints": replicas.iter().map(endpoint).collect::<Vec<_>>()}],
        }],
    })
    .to_string()
}
