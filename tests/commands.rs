//! Native commands refuse at once what they could only refuse in the end.

#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::expect_used,
    reason = "a test fails by panicking, and clippy's exemption does not reach the functions that tests share"
)]

use std::process::Command;

const MISSING: &str = "no/such/folder/file";

/// Runs a command whose output is to go into a folder that is not there. It says nothing but that.
#[track_caller]
fn check(command: &mut Command, arguments: &[&str]) {
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).args(arguments).output();
    let output = output.expect("the command");
    let (said, refused) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success(), "{arguments:?}");
    assert_eq!((&*said, refused.lines().count()), ("", 1), "{arguments:?}: {refused}");
    assert!(refused.contains(MISSING), "{arguments:?}: {refused}");
}

#[test]
fn a_file_that_cannot_be_written_is_said_before_the_work() {
    let prepare = || Command::new(env!("CARGO_BIN_EXE_warmpath-prepare"));
    check(&mut prepare(), &["tests/data/models/none", "--output", MISSING]);
    let parity = || Command::new(env!("CARGO_BIN_EXE_warmpath-parity"));
    let engine = ["http://127.0.0.1:1", "--model", "m", "--prepared", "none", "--json", MISSING];
    check(&mut parity(), &engine);
    let replay = || Command::new(env!("CARGO_BIN_EXE_warmpath-replay"));
    check(&mut replay(), &["live", "--url", "http://127.0.0.1:1", "--json", MISSING]);
    check(&mut replay(), &["simulate", "--requests", "20", "--json", MISSING]);
    for option in ["--csv", "--json", "--markdown", "--svg"] {
        check(&mut replay(), &["grid", "--smoke", option, MISSING]);
    }
    let record = "tests/data/calibration/vllm-0.32.0-cpu.json";
    check(&mut replay(), &["calibrate", "--from", record, "--json", MISSING]);
    // Without what it would build with.
    let mut bench = Command::new("bash");
    bench.env("PATH", "/usr/bin:/bin").arg("scripts/bench.sh");
    check(&mut bench, &["stages", "--json", MISSING]);
}
