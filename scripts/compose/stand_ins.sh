#!/usr/bin/env bash
# Makes the images that docker-compose.yml and the Dockerfile name, under those names, from programs of this machine.
#
#   ENVOY=... TARGET=... stand_ins.sh FOLDER     into the engine that DOCKER_HOST names, which must be a test's own
#
# Each is a tree with the programs it needs and the libraries these load; no image is fetched. They stand in for the real
# ones in what the files rely on: the entry points, the users, the paths, the commands of a build.
set -euo pipefail
images=$1
case ${DOCKER_HOST:-} in unix:///*) ;; *) echo "stand_ins.sh: not without an engine of its own" >&2 && exit 2 ;; esac
basic=(sh cat chmod cp hostname id ln ls mkdir mv rm sleep)

# Copies programs, and what the loader loads for them, under the same paths.
tree() {
    local folder=$1 program path library
    shift
    rm -rf "$folder"
    mkdir -p "$folder"/{etc,tmp,usr/bin,usr/local/bin}
    chmod 1777 "$folder/tmp"
    echo 'root:x:0:0::/:/bin/sh' >"$folder/etc/passwd"
    echo 'hosts: files dns' >"$folder/etc/nsswitch.conf"
    for program in "$@"; do
        path=$(command -v "$program")
        cp -L "$path" "$folder/usr/bin/"
        libraries "$path" "$folder"
    done
    # Where scripts look for it.
    [ -e "$folder/bin" ] || ln -s usr/bin "$folder/bin"
}

libraries() {
    local library
    for library in $(ldd "$1" 2>/dev/null | grep -o '/[^ ]*'); do
        [ -e "$2$library" ] || cp -L --parents "$library" "$2"
    done
}

image() {
    local folder=$1 name=$2
    shift 2
    local changes=() change
    for change in 'ENV PATH=/usr/local/bin:/usr/bin:/bin' "$@"; do changes+=(--change "$change"); done
    tar -C "$folder" -c . | docker import "${changes[@]}" - "$name" >/dev/null
    rm -rf "$folder"
}

name() { sed -n "s#^ *\(image:\|FROM\) *\($1:[^ ]*\).*#\2#p" docker-compose.yml Dockerfile | head -n 1; }

# Envoy: its entry point takes arguments of Envoy's, and its user is 101.
tree "$images/envoy" "${basic[@]}"
cp "$ENVOY" "$images/envoy/usr/local/bin/envoy"
libraries "$ENVOY" "$images/envoy"
echo 'envoy:x:101:101::/:/bin/sh' >>"$images/envoy/etc/passwd"
cat >"$images/envoy/docker-entrypoint.sh" <<'SH'
#!/bin/sh
set -e
case ${1:-} in -*) set -- envoy "$@" ;; esac
exec "$@"
SH
chmod +x "$images/envoy/docker-entrypoint.sh"
image "$images/envoy" "$(name envoyproxy/envoy)" 'ENTRYPOINT ["/docker-entrypoint.sh"]' 'CMD ["envoy", "-c", "/etc/envoy/envoy.yaml"]'

tree "$images/prometheus" "${basic[@]}" prometheus
mkdir -m 777 "$images/prometheus/prometheus"
image "$images/prometheus" "$(name prom/prometheus)" 'USER 65534:65534' 'WORKDIR /prometheus' 'ENTRYPOINT ["prometheus"]' \
    'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]'

# Grafana: nothing but a process that ends when told.
tree "$images/grafana" "${basic[@]}"
image "$images/grafana" "$(name grafana/grafana)" 'USER 472:0' \
    'ENTRYPOINT ["sh", "-c", "trap \"exit 0\" TERM; echo not Grafana; while :; do sleep 1 & wait; done"]'

tree "$images/debian" "${basic[@]}" bash grep head
for program in agent mock-replica prepare replay; do libraries "$TARGET/quick/warmpath-$program" "$images/debian"; done
image "$images/debian" "$(name debian)"

# Rust: commands that put what was built outside where a build would have put it, and know no other.
tree "$images/rust" "${basic[@]}"
mkdir -p "$images/rust/built"
cp "$TARGET/wasm32-wasip1/release/warmpath.wasm" "$images/rust/built/"
for program in agent mock-replica prepare replay; do
    cp "$TARGET/quick/warmpath-$program" "$images/rust/built/"
    libraries "$TARGET/quick/warmpath-$program" "$images/rust"
done
cat >"$images/rust/usr/local/bin/cargo" <<'SH'
#!/bin/sh
set -eu
test -f Cargo.lock && test -f src/lib.rs
case "$*" in
"build --locked --release --lib --target wasm32-wasip1") to=target/wasm32-wasip1/release from=warmpath.wasm ;;
"build --locked --profile quick --features demo --bins") to=target/quick from="warmpath-*" ;;
*) echo "this stand-in has nothing for: cargo $*" >&2 && exit 1 ;;
esac
mkdir -p "$to"
cp /built/$from "$to"
SH
cat >"$images/rust/usr/local/bin/rustup" <<'SH'
#!/bin/sh
test "$*" = "target add wasm32-wasip1"
SH
chmod +x "$images/rust/usr/local/bin/"*
image "$images/rust" "$(name rust)"
