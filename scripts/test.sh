#!/usr/bin/env bash
# Sets up what is missing and runs every test: formatting, lints on both targets, unit and golden
# tests natively, the unit tests once more as wasm, docs, the wasm's size, and the built filter in a
# real Envoy. Needs Rust, Python 3 and, the first time, a network.
#
#   scripts/test.sh              everything
#   scripts/test.sh STEP...      only these: fmt clippy unit wasm docs manifests traps build envoy versions; watched compose
#
# Output of a step is kept in .work/test/STEP.log and shown when it fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The shipped module compressed is what goes over the wire; uncompressed is what Envoy compiles at
# load, some 0.35 s of CPU per megabyte of code.
WASM_BUDGET_BYTES=3700000
WASMTIME_VERSION=50.0.1

root=$PWD
logs=$root/.work/test
venv=$root/.work/venv
target=${CARGO_TARGET_DIR:-$root/target}
export CARGO_TERM_COLOR=never
mkdir -p "$logs"

all=(fmt clippy unit wasm docs manifests traps build envoy versions)
# Only by name: they want what few machines have (a Prometheus and a browser; a Docker engine), and minutes.
named=(watched compose)

# With the oldest every body, transport and wish is tried again, and with others that are named in its place. In those
# between it is enough that they take every shipped file.
TABLE_VERSIONS=${TABLE_VERSIONS:-1.36.4}
VALIDATE_VERSIONS="1.37.0 1.38.2 1.39.3"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'HELP'
usage: scripts/test.sh [STEP...]

Sets up what is missing and runs every step, or only those named. Stops at the first that fails.

  fmt        formatting
  clippy     lints, natively and for wasm
  unit       unit, document, golden and unguided fuzz tests, natively
  wasm       the unit tests once more as wasm
  docs       the API's documentation, without warnings
  manifests  those of envoy/kubernetes and envoy/istio against public schemas
  traps      a filter that traps on demand, for the step envoy
  build      the filter as released, its size and what it imports
  envoy      the filters that build and traps left, in a real Envoy; an envoy.yaml made of README's pieces
  versions   the same, shorter, in four older Envoys
  watched    only if named: rules and alerts by promtool; a dashboard on a real Prometheus, a page in a browser,
             a scaling loop (prometheus, chromium-headless-shell)
  compose    only if named: docker-compose.yml on a Docker engine of its own (root, dockerd, prometheus)

Needs Rust, Python 3 and, the first time, a network. ENVOY_BIN names an Envoy for the step envoy in
place of the pinned one, TABLE_VERSIONS others than 1.36.4 for the step versions ("1.36.4 1.38.2"). A step's output is kept in .work/test/STEP.log, its end shown when it fails.
HELP
    exit
fi
steps=("$@")
[ "${#steps[@]}" -gt 0 ] || steps=("${all[@]}")

fail() {
    echo "test.sh: $*" >&2
    exit 1
}

for step in "${steps[@]}"; do
    [[ " ${all[*]} ${named[*]} " == *" $step "* ]] || fail "no step '$step'; there are: ${all[*]} ${named[*]}"
done
running="" lane=""
stop() {
    local group
    for group in $running $lane; do kill -TERM -- "-$group" 2>/dev/null || true; done
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
wants() { [[ " ${steps[*]} " == *" $1 "* ]]; }

# The steps that build the filter, which unit and wasm do not need, are begun beside these: to link it keeps one core busy,
# and they build into folders of their own. Each step still has its turn, and says then how long it was waited for.
begin_lane() {
    local step
    set -m
    (
        set +e
        for step in traps build; do
            wants "$step" || continue
            # Not within a condition, as below.
            (set -e && "step_$step") >"$logs/$step.log" 2>&1
            [ "$?" -eq 0 ] || exit 1
            touch "$logs/$step.done"
        done
    ) </dev/null &
    lane=$!
    set +m
}

# Runs one step's function; its output goes to a log, its runners' own lines to the terminal.
run_step() {
    local step=$1 began=$SECONDS log=$logs/$1.log status
    printf '%-10s' "$step"
    if [ -n "$lane" ] && [[ $step == traps || $step == build ]]; then
        wait "$lane" || true
        [ -e "$logs/$step.done" ] || step_failed "$step" "$began"
        step_passed "$step" "$began"
        return
    fi
    # Not within a condition: there bash would ignore `set -e`, and a step its own failures. In a
    # process group of its own, so that a signal ends all that the step has started.
    set +e -m
    (set -e && "step_$step") >"$log" 2>&1 </dev/null &
    running=$!
    wait "$running"
    status=$?
    running=""
    set -e +m
    [ "$status" -eq 0 ] || step_failed "$step" "$began"
    step_passed "$step" "$began"
}

step_failed() {
    echo "FAILED after $((SECONDS - $2)) s; the end of ${logs#"$root"/}/$1.log:"
    tail -n 80 "$logs/$1.log"
    exit 1
}

step_passed() {
    echo "ok, $((SECONDS - $2)) s"
    grep -E '^(test result:|SKIPPED)' "$logs/$1.log" | sed 's/^/       /' || true
}

set_up() {
    command -v cargo >/dev/null || fail "Rust is needed: https://rustup.rs"
    command -v python3 >/dev/null || fail "Python 3 is needed"
    if command -v rustup >/dev/null && ! rustup target list --installed | grep -qx wasm32-wasip1; then
        echo "getting Rust's wasm32-wasip1 target"
        rustup --quiet target add wasm32-wasip1
    fi
    if (wants wasm || wants build) && ! "$venv/bin/python" -c 'import wasmtime' 2>/dev/null; then
        echo "getting wasmtime $WASMTIME_VERSION from PyPI into .work/venv"
        [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
        cat >"$root/.work/wasmtime-requirements.txt" <<EOF
wasmtime==$WASMTIME_VERSION \\
    --hash=sha256:cc14c3a17654e0394e0225b11813532ef0cd7bd1e222a0c5494cdedaabeddac4 \\
    --hash=sha256:675484e525c028dc02762b777f1db4477ea70caa3fec6775426daff4d64edfb1 \\
    --hash=sha256:ff4fc58ed3cbdb919d056accd4d280be13962a542754aaefd8a9b4654efa9bd9
EOF
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
            --require-hashes -r "$root/.work/wasmtime-requirements.txt"
    fi
    if wants unit; then
        "$root/scripts/models.sh" || true # says by itself what is skipped without it
    fi
    if wants envoy || wants watched; then
        ENVOY_BIN=$("$root/scripts/envoy.sh")
        export ENVOY_BIN
    fi
    if wants watched; then
        # Where these are not to be had, the tests that need them say SKIPPED.
        PROMETHEUS_BIN=$("$root/scripts/prometheus.sh" && echo /prometheus) || PROMETHEUS_BIN=""
        PROMETHEUS_BIN=${PROMETHEUS_BIN//$'\n'/}
        CHROMIUM_BIN=${CHROMIUM_BIN:-$(command -v chromium-headless-shell || command -v chromium || command -v google-chrome || true)}
        export PROMETHEUS_BIN CHROMIUM_BIN
    fi
    if wants versions; then
        local version
        for version in $TABLE_VERSIONS $VALIDATE_VERSIONS; do
            "$root/scripts/envoy.sh" "$version" >/dev/null
        done
    fi
}

step_fmt() { cargo fmt --check; }

step_clippy() {
    cargo clippy --quiet --all-targets --features demo -- -D warnings
    cargo clippy --quiet --lib --target wasm32-wasip1 -- -D warnings
    cargo clippy --quiet --example tokenizer_load --example hold_and_copy --example stages_plugin --features bench --target wasm32-wasip1 -- -D warnings
}

# Everything but the tests that need an Envoy.
step_unit() {
    cargo test --features demo --lib --bins --test golden --test golden_apis --test parity --test commands --test documents --test fuzz --test agent --test events
    # Some seconds: the simulation's orders, whatever is tuned. By the program that the tests have built: what `cargo run` builds is
    # another one, since it takes the tests' own features of its dependencies away.
    "$target/debug/warmpath-replay" grid --smoke
}

# What is fuzzed runs as wasm too: stack and pointers are smaller there. The feature leaves the filter's entry points out,
# which no test runner can link.
step_wasm() {
    local fuzz=(cargo test --test fuzz --features bench --target wasm32-wasip1) fuzzing
    "${fuzz[@]}" --no-run
    cargo test --lib --target wasm32-wasip1 --no-run
    # Each has but one thread.
    "${fuzz[@]}" >"$logs/wasm-fuzz.log" 2>&1 &
    fuzzing=$!
    cargo test --lib --target wasm32-wasip1 || { kill "$fuzzing"; return 1; }
    wait "$fuzzing" || { cat "$logs/wasm-fuzz.log"; return 1; }
    cat "$logs/wasm-fuzz.log"
}

step_docs() { RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps --lib --features demo; }

step_manifests() { scripts/manifests.sh; }

step_compose() { scripts/compose.sh; }

# The filter with traps on demand: what the tests of traps load. In the profile of what is released, which so needs no
# dependencies of its own, and lies where that belongs: the step build comes behind it, and is made up for where it is not wanted.
trap_wasm=$root/.work/warmpath-trap.wasm
step_traps() {
    local wasm=$target/wasm32-wasip1/release/warmpath.wasm
    cargo build --release --features trap --lib --target wasm32-wasip1
    cp "$wasm" "$trap_wasm"
    # What the build step looks for is there when it is there.
    grep -q x-warmpath-trap "$trap_wasm"
    if ! wants build; then
        cargo build --release --lib --target wasm32-wasip1
        ! grep -q x-warmpath-trap "$wasm"
    fi
}

step_build() {
    cargo build --release --lib --target wasm32-wasip1
    local wasm=$target/wasm32-wasip1/release/warmpath.wasm size
    size=$(wc -c <"$wasm")
    echo "$wasm: $size bytes of $WASM_BUDGET_BYTES"
    if grep -q x-warmpath-trap "$wasm"; then
        echo "it traps on demand"
        return 1
    fi
    if [ "$size" -gt "$WASM_BUDGET_BYTES" ]; then
        echo "over the budget"
        return 1
    fi
    # What Envoy 1.36 offers of WASI and this module uses. It refuses a module that imports more,
    # and a dependency's new file system call is such an import, even if it is never made.
    "$venv/bin/python" - "$wasm" <<'PY'
import sys
import wasmtime

offered = """clock_time_get environ_get environ_sizes_get fd_close fd_fdstat_get fd_prestat_dir_name
    fd_prestat_get fd_read fd_write path_open proc_exit random_get""".split()
module = wasmtime.Module.from_file(wasmtime.Engine(), sys.argv[1])
used = {item.name for item in module.imports if item.module == "wasi_snapshot_preview1"}
if used - set(offered):
    sys.exit(f"imports that Envoy 1.36 refuses: {sorted(used - set(offered))}")
print(f"{len(used)} WASI imports, all of which Envoy 1.36 has")
PY
}

# Tests in a real Envoy: all, or those whose names contain one of the arguments.
in_envoy() {
    local prepared=$root/.work/qwen3.warmpath wasm=$target/wasm32-wasip1/release/warmpath.wasm
    [ -f "$wasm" ] || { echo "there is no filter: scripts/test.sh build makes it" && return 1; }
    # With it the programs that it uses are built, as the step unit has built them.
    cargo test --features demo --test envoy --no-run
    [ -f "$prepared" ] || "$target/debug/warmpath-prepare" tests/data/models/qwen3 -o "$prepared"
    WARMPATH_WASM=$wasm WARMPATH_PREPARED=$prepared \
        WARMPATH_TRAP_WASM=$trap_wasm \
        cargo test --features demo --test envoy -- --test-threads=1 "$@"
}

step_envoy() {
    rm -f "$root/.work/qwen3.warmpath"
    in_envoy --skip watched::
    if grep -q '^SKIPPED' "$logs/envoy.log"; then
        echo "nothing may be skipped here"
        return 1
    fi
}

step_watched() {
    local promtool=${PROMETHEUS_BIN%/*}/promtool
    # Nobody who runs this step by its name has to know of the one that builds.
    cargo build --release --lib --target wasm32-wasip1
    if [ -n "$PROMETHEUS_BIN" ]; then
        "$promtool" check config envoy/prometheus/prometheus.yml
        "$promtool" test rules tests/prometheus/warmpath.yml
    else
        echo "SKIPPED promtool: there is none (Debian: apt-get install prometheus)"
    fi
    in_envoy watched::
    # The tests have built these programs.
    if [ -n "$PROMETHEUS_BIN" ]; then
        python3 scripts/scale/try.py "$ENVOY_BIN" "$PROMETHEUS_BIN" "$target/wasm32-wasip1/release/warmpath.wasm" \
            "$root/.work/qwen3.warmpath" "$target/debug" "$root/.work/scale"
    else
        echo "SKIPPED scale.sh: there is no Prometheus"
    fi
    [ -n "$CHROMIUM_BIN" ] || echo "SKIPPED live page: there is no Chromium (Debian: apt-get install chromium-headless-shell)"
    echo "SKIPPED Grafana: not run; every query of its dashboard is"
}

step_versions() {
    local version
    export WARMPATH_OLDER=1
    for version in $TABLE_VERSIONS; do
        echo "Envoy $version"
        ENVOY_BIN=$("$root/scripts/envoy.sh" "$version") in_envoy bodies:: leaving:: framing:: security:: shapes:: configuration_is_valid
    done
    for version in $VALIDATE_VERSIONS; do
        echo "Envoy $version"
        ENVOY_BIN=$("$root/scripts/envoy.sh" "$version") in_envoy configuration_is_valid
    done
    if grep -q '^SKIPPED' "$logs/versions.log"; then
        echo "nothing may be skipped here"
        return 1
    fi
}

set_up
rm -f "$logs"/{traps,build}.done
for step in "${steps[@]}"; do
    if [[ $step == unit ]] && (wants traps || wants build); then begin_lane; fi
    run_step "$step"
done
echo "all passed; logs in .work/test"
