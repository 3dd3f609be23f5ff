//! Envoy's process: its folder, its files and its ports.

use super::Files;
use crate::shipped::{Config, Part};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A running Envoy.
pub struct Envoy {
    pub(super) process: Child,
    pub(super) folder: PathBuf,
}

impl Envoy {
    /// Whether the process has ended.
    pub fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        let bytes = std::fs::read(self.folder.join("envoy.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let end = &lines[lines.len().saturating_sub(60)..];
            eprintln!("--- the end of Envoy's log ---\n{}\n---", end.join("\n"));
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A folder of this process alone, removed with the Envoy that uses it.
pub fn fresh_folder() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder =
        std::env::temp_dir().join(format!("warmpath-envoy-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// What `envoy --mode validate` says of a configuration.
pub fn validate(files: &Files, config: &Config) -> Result<(), String> {
    let folder = fresh_folder();
    let path = folder.join("envoy.yaml");
    std::fs::write(&path, config.text()).unwrap();
    let output = Command::new(&files.envoy)
        .args(["--mode", "validate", "-l", "warning", "-c"])
        .arg(&path)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", files.envoy.display()));
    let _ = std::fs::remove_dir_all(&folder);
    let text = [output.stdout, output.stderr].concat();
    output.status.success().then_some(()).ok_or_else(|| String::from_utf8_lossy(&text).into_owned())
}

/// Starts Envoy, with a folder that it takes over.
pub fn spawn(files: &Files, workers: usize, config: &Config, folder: PathBuf) -> Envoy {
    let path = folder.join("envoy.yaml");
    std::fs::write(&path, config.split(&folder).0).unwrap();
    let log = std::fs::File::create(folder.join("envoy.log")).unwrap();
    let has_base = config.arguments.iter().any(|argument| argument.contains("base-id"));
    let alone = (!has_base).then_some("--disable-hot-restart");
    let sets_drain = config.arguments.iter().any(|argument| argument == "--drain-time-s");
    let process = Command::new(&files.envoy)
        .args(["-l", config.log_level])
        .args(["--component-log-level", if config.log_level == "trace" { "" } else { "wasm:info" }])
        .args(&config.arguments)
        // File-based discovery wants to know who asks.
        .args(["--service-node", "test", "--service-cluster", "test"])
        .args(["--concurrency", &workers.to_string(), "-c"])
        .arg(&path)
        // Only a listener that comes from a file can be replaced.
        .args((!sets_drain).then_some(["--drain-time-s", "3"]).into_iter().flatten())
        .args(alone)
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", files.envoy.display()));
    Envoy { process, folder }
}

/// Writes the parts of a configuration that Envoy watches, each moved into place.
pub fn write_parts(config: &Config, folder: &Path, version: u32, is_wanted: impl Fn(Part) -> bool) {
    for (part, text) in config.split(folder).1.into_iter().filter(|(part, _)| is_wanted(*part)) {
        let (new, file) = (folder.join("new"), part.file(folder));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&new, format!("version_info: \"{version}\"\n{text}")).unwrap();
        std::fs::rename(new, file).unwrap();
    }
}

/// Ports that were free a moment ago, all different.
///
/// Below those that the system gives to outgoing connections: knocking at one of these until somebody listens there
/// sooner or later connects to itself, and then waits for its own answer.
pub fn free_ports<const N: usize>() -> [u16; N] {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    std::array::from_fn(|_| {
        loop {
            let number = std::process::id()
                .wrapping_mul(97)
                .wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
            let port = 10_000 + (number % 22_000) as u16;
            if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
                return port;
            }
        }
    })
}

/// Sends a process of ours a signal.
pub fn send_signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()), "kill -{name} {pid}");
}
