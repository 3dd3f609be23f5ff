#!/bin/sh
# Loads tokenizers in a real Envoy, from tokenizer.json and from the prepared form, and prints one table.
#
#   scripts/bench_tokenizers.sh [FOLDER]...
#
# A FOLDER is a Hugging Face model folder, or holds several; default: tests/data/models.
# ENVOY, PYTHON and TEXT name the Envoy binary, a Python 3 and a text to encode.
set -eu
cd "$(dirname "$0")/.."
: "${ENVOY:=.work/venv/bin/envoy}" "${PYTHON:=python3}" "${TEXT:=}"
[ $# -gt 0 ] || set -- tests/data/models
target="${CARGO_TARGET_DIR:-target}"

# opt-level 3 as released; fat LTO is left out, it takes minutes.
CARGO_PROFILE_QUICK_OPT_LEVEL=3 cargo build --quiet --profile quick --target wasm32-wasip1 --features bench --example tokenizer_load
cargo build --quiet --profile quick --features tools --bin warmpath-prepare

exec "$PYTHON" scripts/bench_tokenizers.py --envoy "$ENVOY" --text "$TEXT" \
    --plugin "$target/wasm32-wasip1/quick/examples/tokenizer_load.wasm" \
    --prepare "$target/quick/warmpath-prepare" "$@"
