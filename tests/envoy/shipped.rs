//! The shipped configurations, changed as their users change them: addresses, paths, the plugin's JSON, and the parts
//! that a deployment has other than the example.
//!
//! Each change insists on finding what it replaces, so a shipped file that moves on fails here by name.

use serde_json::Value;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A part of the configuration that Envoy can read from a file that it watches, in place of the bootstrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// ECDS: the filter's configuration alone.
    Filter,
    /// RDS: the routes of the listener for inference.
    Routes,
    /// LDS: all listeners.
    Listeners,
    /// CDS: all clusters.
    Clusters,
}

impl Part {
    /// In the order in which one is taken out of another.
    pub const ALL: [Self; 4] = [Self::Filter, Self::Routes, Self::Listeners, Self::Clusters];

    fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Routes => "routes",
            Self::Listeners => "listeners",
            Self::Clusters => "clusters",
        }
    }

    /// Its file. Each has a folder of its own, because Envoy watches folders for files that are moved into place.
    pub fn file(self, folder: &Path) -> PathBuf {
        folder.join(self.name()).join("resources.yaml")
    }
}

/// The text of a shipped file on its way to a runnable one.
#[derive(Clone)]
pub struct Config {
    text: String,
    watched: Vec<Part>,
    /// Envoy's command line, beyond what every test has.
    pub arguments: Vec<String>,
    /// How much Envoy logs.
    pub log_level: &'static str,
}

/// Between the listener for inference and its copies.
const LISTENER_COPY: &str = "\n  # A copy.\n";

/// The shipped files, by name: those of `envoy`, and one each in some folders.
pub fn shipped() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("envoy");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let inner = format!("{name}/envoy.yaml");
        if name.ends_with(".yaml") {
            names.push(name);
        } else if folder.join(&inner).exists() {
            names.push(inner);
        }
    }
    names.sort();
    names
}

impl Config {
    /// The main file as it is shipped.
    pub fn read() -> Self {
        Self::read_named("envoy.yaml")
    }

    /// A file of the folder `envoy` as it is shipped.
    pub fn read_named(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("envoy").join(name);
        Self::of(
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())),
        )
    }

    /// A configuration of a test's own.
    pub fn of(text: String) -> Self {
        Self { text, watched: Vec::new(), arguments: Vec::new(), log_level: "warning" }
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The minor version of Envoy that the first lines ask for, if they do.
    pub fn needs_minor(&self) -> Option<u32> {
        let mut head = self.text.lines().take_while(|line| line.starts_with('#'));
        let version = head.find_map(|line| line.split("Needs Envoy 1.").nth(1))?;
        version.split(' ').next()?.parse().ok()
    }

    /// Replaces every occurrence of `old`.
    #[track_caller]
    pub fn replace(&mut self, old: &str, new: &str) {
        assert!(self.text.contains(old), "the shipped configuration has no {old:?}");
        self.text = self.text.replace(old, new);
    }

    /// Puts the two files where they are on this machine.
    pub fn set_files(&mut self, wasm: &Path, prepared: &Path) {
        self.text =
            self.text.replace("/etc/warmpath/filter/plugin.wasm", "/etc/warmpath/warmpath.wasm");
        self.text = self.text.replace("/etc/warmpath/tokenizers/", "/etc/warmpath/");
        self.replace("/etc/warmpath/warmpath.wasm", &wasm.display().to_string());
        self.replace("/etc/warmpath/qwen3.warmpath", &prepared.display().to_string());
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("envoy/live.html");
        for there in ["/etc/warmpath/live.html", "/etc/envoy/live.html"] {
            self.text = self.text.replace(there, &page.display().to_string());
        }
    }

    /// Moves the listeners to free ports of the loopback.
    pub fn set_ports(&mut self, inference: u16, admin: u16, files: u16, metrics: u16) {
        let listener = "address: 0.0.0.0, port_value: 8080";
        self.replace(listener, &format!("address: 127.0.0.1, port_value: {inference}"));
        self.replace("port_value: 9901", &format!("port_value: {admin}"));
        self.replace("port_value: 9902", &format!("port_value: {files}"));
        let listener = "address: 0.0.0.0, port_value: 9903";
        self.replace(listener, &format!("address: 127.0.0.1, port_value: {metrics}"));
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
                    let (ip, port) = (replica.ip(), replica.port());
                    let place = format!("address: \"{ip}\", port_value: {port}");
                    text.push_str(&line.replace("address: 127.0.0.1, port_value: 8001", &place));
                    text.push('\n');
                }
            }
        }
        assert_eq!(examples, 8, "the shipped configuration names four replicas in two clusters");
        self.text = text;
    }

    /// Changes the filter's own configuration, in the first listener that has one.
    pub fn change_plugin(&mut self, change: impl FnOnce(&mut Value)) {
        change_plugin(&mut self.text, change);
    }

    /// Puts a text in the place of the filter's own configuration, whatever it is.
    pub fn set_plugin_text(&mut self, plugin: &str) {
        let Range { start, end } = plugin_lines(&self.text);
        let head = self.text[..start].trim_end_matches("|\n").len();
        self.text.replace_range(head..end, &format!("{}\n", Value::from(plugin)));
    }

    /// Takes the inference listener out, to come from this file instead, and returns what belongs there.
    pub fn take_listener(&mut self, file: &Path) -> String {
        let start = self.text.find("  - name: inference\n").expect("the listener");
        let end = self.text.find("  # The prepared files, served").expect("the next listener");
        let listener: String = self.text[start..end]
            .split_inclusive('\n')
            .map(|line| line.strip_prefix("  ").unwrap_or(line))
            .collect();
        self.text.replace_range(start..end, "");
        let lds = format!(
            "dynamic_resources:\n  lds_config: {{resource_api_version: V3, path_config_source: {{path: {}}}}}\n\n\
             static_resources:\n",
            file.display()
        );
        self.replace("static_resources:\n", &lds);
        let kind = "\"@type\": type.googleapis.com/envoy.config.listener.v3.Listener";
        let body = listener.strip_prefix("- ").unwrap_or_default();
        format!("resources:\n- {kind}\n  {body}")
    }

    /// Lets a cluster's endpoints come from a file that is watched.
    pub fn set_eds(&mut self, cluster: &str, file: &Path) {
        let head = format!("  - name: {cluster}\n    type: STATIC\n");
        let eds = format!(
            "  - name: {cluster}\n    type: EDS\n    eds_cluster_config:\n      service_name: {cluster}\n      \
             eds_config: {}\n",
            watched_source(file)
        );
        let section = self.cluster(cluster);
        let kept = section.split("    load_assignment:").next().unwrap_or_default();
        let section = kept.replace(&head, &eds);
        self.set_cluster(cluster, &section);
    }

    fn cluster_range(&self, name: &str) -> Range<usize> {
        let head = format!("\n  - name: {name}\n    type: ");
        let start = self.text.find(&head).unwrap_or_else(|| panic!("no cluster {name}")) + 1;
        let end = self.text[start..].find("\n\n").map_or(self.text.len(), |at| start + at + 1);
        start..end
    }

    /// The text of one cluster.
    pub fn cluster(&self, name: &str) -> String {
        self.text[self.cluster_range(name)].to_owned()
    }

    /// Puts a text in the place of one cluster's.
    pub fn set_cluster(&mut self, name: &str, text: &str) {
        let range = self.cluster_range(name);
        self.text.replace_range(range, text);
    }

    /// Puts these endpoints in the place of a cluster's.
    pub fn set_endpoints(&mut self, name: &str, places: &[SocketAddr]) {
        let section = self.cluster(name);
        let (head, _) = section.split_once("      - lb_endpoints:").expect("endpoints");
        let mut text = format!("{head}      - lb_endpoints:\n");
        for place in places {
            text.push_str(&format!("        - {}\n", endpoint(place)));
        }
        self.set_cluster(name, &text);
    }

    /// Adds fields to a cluster.
    pub fn add_to_cluster(&mut self, name: &str, fields: &str) {
        let at = "    connect_timeout: 1s\n";
        let section = self.cluster(name);
        assert!(section.contains(at), "cluster {name} has no connect_timeout");
        self.set_cluster(name, &section.replacen(at, &format!("{at}{fields}"), 1));
    }

    /// Adds a cluster of these replicas and the one through which they are polled, both as those for `replicas` are.
    pub fn add_replicas(&mut self, name: &str, replicas: &[SocketAddr]) {
        for (like, name) in
            [("replicas", name.to_owned()), ("replicas_poll", format!("{name}_poll"))]
        {
            let section = self.cluster(like);
            let head = section.split("      - lb_endpoints:").next().unwrap_or_default();
            let head = head
                .replace(&format!("- name: {like}\n"), &format!("- name: {name}\n"))
                .replace(&format!("cluster_name: {like}\n"), &format!("cluster_name: {name}\n"));
            let mut text = format!("\n{head}      - lb_endpoints:\n");
            for replica in replicas {
                text.push_str(&format!("        - {}\n", endpoint(replica)));
            }
            self.text.push_str(&text);
        }
    }

    /// Puts these routes in front of the one that is shipped.
    pub fn add_routes(&mut self, routes: &[Value]) {
        let shipped = "              - match: {prefix: \"/\"}\n                route:\n";
        let lines: String =
            routes.iter().map(|route| format!("              - {route}\n")).collect();
        self.replace(shipped, &format!("{lines}{shipped}"));
    }

    /// The listener for inference once more, under another name and port, with a change of the filter's configuration.
    pub fn add_listener(&mut self, name: &str, port: u16, change: impl FnOnce(&mut Value)) {
        let start = self.text.find("  - name: inference\n").expect("the listener");
        let next = "\n  # The prepared files, served by Envoy";
        let last = self.text.find(next).expect("the listener behind it");
        let end = self.text[..last].find(LISTENER_COPY).unwrap_or(last);
        let mut listener = self.text[start..end].to_owned();
        let at = listener.find("port_value: ").expect("a port");
        let until = at + listener[at..].find('}').expect("an address");
        listener.replace_range(at..until, &format!("port_value: {port}"));
        let listener = listener.replacen("- name: inference\n", &format!("- name: {name}\n"), 1);
        let mut listener =
            listener.replace("stat_prefix: inference\n", &format!("stat_prefix: {name}\n"));
        change_plugin(&mut listener, change);
        self.text.insert_str(end, &format!("{LISTENER_COPY}{listener}"));
    }

    /// Serves a prepared file under one more path.
    pub fn serve_prepared_as(&mut self, path: &str) {
        let route = "              - match: {path: /qwen3.warmpath}\n";
        let at = self.text.find(route).expect("the route of the prepared file");
        let end = at + self.text[at..].match_indices('\n').nth(1).expect("two lines").0 + 1;
        let copy = self.text[at..end].replace("path: /qwen3.warmpath", &format!("path: {path}"));
        self.text.insert_str(end, &copy);
    }

    /// Serves another prepared file under a path.
    pub fn serve_file_as(&mut self, path: &str, file: &Path) {
        self.serve_prepared_as(path);
        let route = format!("- match: {{path: {path}}}\n");
        let at = self.text.find(&route).expect("the new route") + route.len();
        let line = self.text[at..].split('\n').next().expect("the response").to_owned();
        let other = line.replace("/etc/warmpath/qwen3.warmpath", &file.display().to_string());
        self.text.replace_range(at..at + line.len(), &other);
    }

    /// Lets Envoy read a part from a file that it watches.
    pub fn watch(&mut self, part: Part) {
        self.watched.push(part);
    }

    /// The text of the bootstrap, and of each part that is read from a file in this folder.
    pub fn split(&self, folder: &Path) -> (String, Vec<(Part, String)>) {
        let mut text = self.text.clone();
        let mut parts = Vec::new();
        let mut sources = String::new();
        for part in Part::ALL.into_iter().filter(|part| self.watched.contains(part)) {
            let source = watched_source(&part.file(folder));
            parts.push((part, take_part(&mut text, part, &source)));
            match part {
                Part::Listeners => sources.push_str(&format!("  lds_config: {source}\n")),
                Part::Clusters => sources.push_str(&format!("  cds_config: {source}\n")),
                Part::Filter | Part::Routes => (),
            }
        }
        if !sources.is_empty() {
            text.push_str(&format!("\ndynamic_resources:\n{sources}"));
        }
        (text, parts)
    }
}

fn plugin_lines(text: &str) -> Range<usize> {
    let marker = "value: |\n";
    let start = text.find(marker).expect("a plugin configuration") + marker.len();
    let rest = &text[start..];
    let indent = rest.len() - rest.trim_start_matches(' ').len();
    let belongs = |line: &&str| line.len() > indent && line[..indent].trim().is_empty();
    let length: usize = rest.split_inclusive('\n').take_while(belongs).map(str::len).sum();
    start..start + length
}

fn change_plugin(text: &mut String, change: impl FnOnce(&mut Value)) {
    let lines = plugin_lines(text);
    let old = &text[lines.clone()];
    let indent = old.len() - old.trim_start_matches(' ').len();
    let mut plugin: Value = serde_json::from_str(old).expect("JSON");
    change(&mut plugin);
    text.replace_range(lines, &format!("{:indent$}{plugin}\n", ""));
}

/// Where Envoy finds a file whose changes it watches.
fn watched_source(file: &Path) -> Value {
    let folder = file.parent().expect("a folder");
    serde_json::json!({
        "resource_api_version": "V3",
        "path_config_source": {"path": file, "watched_directory": {"path": folder}},
    })
}

/// Takes a part out of the bootstrap, leaving where it is to be read from: the text of its file.
fn take_part(text: &mut String, part: Part, source: &Value) -> String {
    const API: &str = "type.googleapis.com/envoy";
    match part {
        Part::Filter => {
            let (body, at) =
                take_block(text, "          - name: warmpath\n", "            typed_config:\n");
            let body: String = body.lines().map(|line| format!("  {line}\n")).collect();
            text.insert_str(
                at,
                &format!(
                    "            config_discovery:\n              config_source: {source}\n              \
                     type_urls: [{API}.extensions.filters.http.wasm.v3.Wasm]\n"
                ),
            );
            let head = format!("{API}.config.core.v3.TypedExtensionConfig");
            format!("resources:\n- \"@type\": {head}\n  name: warmpath\n  typed_config:\n{body}")
        }
        Part::Routes => {
            let (body, at) =
                take_block(text, "          stat_prefix: inference\n", "          route_config:\n");
            text.insert_str(
                at,
                &format!(
                    "          rds: {{route_config_name: inference, config_source: {source}}}\n"
                ),
            );
            let head = format!("{API}.config.route.v3.RouteConfiguration");
            format!("resources:\n- \"@type\": {head}\n{body}")
        }
        Part::Listeners => {
            let (body, _) = take_block(text, "static_resources:\n", "  listeners:\n");
            resources(&body, &format!("{API}.config.listener.v3.Listener"))
        }
        Part::Clusters => {
            let (body, _) = take_block(text, "static_resources:\n", "  clusters:\n");
            resources(&body, &format!("{API}.config.cluster.v3.Cluster"))
        }
    }
}

/// Takes a key and the lines that belong to it, the first behind `after`: the lines, and where they were.
fn take_block(text: &mut String, after: &str, key: &str) -> (String, usize) {
    let from = text.find(after).unwrap_or_else(|| panic!("no {after:?}"));
    let start = from + text[from..].find(key).unwrap_or_else(|| panic!("no {key:?}"));
    let depth = |line: &str| line.len() - line.trim_start().len();
    let indent = depth(key);
    // A list may be as deep as the key that it belongs to.
    let belongs = |line: &&str| {
        let text = line.trim_start();
        let listed = depth(line) == indent && (text.starts_with("- ") || text.starts_with('#'));
        text.is_empty() || depth(line) > indent || listed
    };
    let rest = &text[start + key.len()..];
    let lines: Vec<&str> = rest.split_inclusive('\n').take_while(belongs).collect();
    let length: usize = lines.iter().map(|line| line.len()).sum();
    let strip = |line: &&str| line.get(indent..).unwrap_or("\n").to_owned();
    let body = lines.iter().map(strip).collect();
    text.replace_range(start..start + key.len() + length, "");
    (body, start)
}

/// A list of static resources as a discovery file.
fn resources(list: &str, kind: &str) -> String {
    list.replace("\n- name: ", &format!("\n- \"@type\": {kind}\n  name: ")).replacen(
        "- name: ",
        &format!("resources:\n- \"@type\": {kind}\n  name: "),
        1,
    )
}

/// One endpoint of a cluster.
pub fn endpoint(replica: &SocketAddr) -> Value {
    serde_json::json!({"endpoint": {"address": {"socket_address": {
        "address": replica.ip().to_string(), "port_value": replica.port(),
    }}}})
}

/// A file of endpoints for a cluster that [`Config::set_eds`] changed.
pub fn endpoints(cluster: &str, replicas: &[SocketAddr]) -> String {
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
