#!/usr/bin/env bash
# Measures what takes time, in a real Envoy, and prints it as a table.
#
#   scripts/bench.sh tokenizers [FOLDER]...
#       Loads tokenizers from tokenizer.json and from the prepared form: time, longest stall of a worker,
#       memory of a VM and of Envoy with one and four workers. A FOLDER is a Hugging Face model folder, or
#       holds several; default: tests/data/models.
#
# ENVOY_BIN names an Envoy to use in place of the pinned one. Compare figures within one run only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed 1d >&2
    exit 2
}

[ "${1:-}" = tokenizers ] || usage
shift
[ "$#" -gt 0 ] || set -- tests/data/models
target=${CARGO_TARGET_DIR:-target}
envoy=$(scripts/envoy.sh)

# opt-level 3 as released; fat LTO is left out, it takes minutes.
CARGO_PROFILE_QUICK_OPT_LEVEL=3 cargo build --quiet --profile quick --target wasm32-wasip1 \
    --features bench --example tokenizer_load
cargo build --quiet --profile quick --features tools --bin warmpath-prepare

exec python3 scripts/bench/tokenizers.py --envoy "$envoy" \
    --plugin "$target/wasm32-wasip1/quick/examples/tokenizer_load.wasm" \
    --prepare "$target/quick/warmpath-prepare" "$@"
