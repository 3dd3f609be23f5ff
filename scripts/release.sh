#!/usr/bin/env bash
# Builds what a release consists of, and prints the size and SHA-256 of each part.
#
#   scripts/release.sh [MODEL...]    into .work/release; each MODEL a folder with tokenizer.json, Qwen3's unless named
#
#   warmpath.wasm           the filter
#   warmpath.oci.tar        an OCI image of it, FROM scratch, with /plugin.wasm: what `oci://` in Istio and volumes made of images take
#   NAME.warmpath           a prepared tokenizer for each model
#   tokenizers.oci.tar      an OCI image of these
#   SHA256SUMS
#
# The images are made here, without Docker, and equal files give equal images. `skopeo copy oci-archive:FILE docker://...` pushes one,
# `docker load` reads one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' scripts/release.sh
}
case ${1:-} in
-h | --help) usage && exit ;;
-*) usage >&2 && exit 2 ;;
esac
release=.work/release
target=${CARGO_TARGET_DIR:-target}
[ "$#" -gt 0 ] || set -- tests/data/models/qwen3

cargo build --quiet --locked --release --lib --target wasm32-wasip1
# It is not released, only run.
cargo build --quiet --locked --profile quick --features tools --bin warmpath-prepare
rm -rf "$release"
mkdir -p "$release"
cp "$target/wasm32-wasip1/release/warmpath.wasm" "$release/"
prepared=()
for model in "$@"; do
    name=$(basename "$model")
    "$target/quick/warmpath-prepare" "$model" -o "$release/$name.warmpath" >&2
    prepared+=("$release/$name.warmpath")
done
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
python3 scripts/release/oci.py "$release/warmpath.oci.tar" "warmpath:$version" "$release/warmpath.wasm=plugin.wasm"
files=()
for file in "${prepared[@]}"; do files+=("$file=$(basename "$file")"); done
python3 scripts/release/oci.py "$release/tokenizers.oci.tar" "warmpath-tokenizers:$version" "${files[@]}"

cd "$release"
sha256sum -- *.wasm *.warmpath *.tar >SHA256SUMS
while read -r sum file; do printf '%10d  %s  %s\n' "$(wc -c <"$file")" "$sum" "$file"; done <SHA256SUMS
