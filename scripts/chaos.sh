#!/usr/bin/env bash
# Ten minutes of chaos: six mock replicas that are killed, stopped and made to lie, behind a real Envoy that is
# reconfigured meanwhile, and clients that must not notice. What is done and what it is judged by is said in
# tests/envoy/chaos/mod.rs; the short form of the same run is one of the tests of scripts/test.sh.
#
#   scripts/chaos.sh [--seed N] [--minutes N]     by default seed 1 and 10 minutes
#
# Prints a report, and fails when a rule is broken. Needs what scripts/test.sh needs. WARMPATH_WASM, if set, is the
# filter to run; ENVOY_BIN the Envoy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' scripts/chaos.sh
}
fail() {
    echo "chaos.sh: $*" >&2
    exit 1
}

seed=1
minutes=10
while [ "$#" -gt 0 ]; do
    case $1 in
    --seed) seed=${2:-} ;;
    --minutes) minutes=${2:-} ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
    [[ ${2:-} =~ ^[0-9]+$ ]] || fail "$1 needs a number"
    shift 2
done
[ "$minutes" -gt 0 ] || fail "--minutes must be above 0"

command -v cargo >/dev/null || fail "Rust is needed: https://rustup.rs"
ENVOY_BIN=$(scripts/envoy.sh)
export ENVOY_BIN
export CARGO_TERM_COLOR=never
mkdir -p .work
if [ -z "${WARMPATH_WASM:-}" ]; then
    if command -v rustup >/dev/null; then
        rustup --quiet target add wasm32-wasip1
    fi
    cargo build --quiet --release --lib --target wasm32-wasip1
    WARMPATH_WASM=${CARGO_TARGET_DIR:-$PWD/target}/wasm32-wasip1/release/warmpath.wasm
fi
export WARMPATH_WASM
export WARMPATH_PREPARED=$PWD/.work/qwen3.warmpath
# With the features of the tests: with others, cargo builds the library anew.
cargo run --quiet --features demo --bin warmpath-prepare -- tests/data/models/qwen3 -o "$WARMPATH_PREPARED"
WARMPATH_CHAOS_SEED=$seed WARMPATH_CHAOS_SECONDS=$((minutes * 60)) \
    cargo test --quiet --features demo --test envoy -- --test-threads=1 --exact \
    chaos::chaos_costs_no_client_an_answer_that_another_replica_could_give
