#!/usr/bin/env bash
# Scales the replicas of docker-compose.yml by what Warmpath recommends; also a recipe for your own.
#
# More are asked for: it sets the scale. Fewer: it takes the replica whose drain costs least, has its agent say
# that it drains, waits until nothing is in flight there, stops that container, and sets the scale. One at a time,
# since the others have to take over its prefixes; no request fails.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: scripts/scale.sh [options]

  --once         look once, take at most one step, and end (without: every --every seconds)
  --for N        end after so many seconds (3600)
  --every N      seconds between two looks (5)
  --service S    the service of the replicas (replica)
  --cluster C    Envoy's name of them (replicas)

COMPOSE is the command ("docker compose"), PROMETHEUS and METRICS where Prometheus and Envoy's metrics are
(http://127.0.0.1:9090, http://127.0.0.1:9903). Needs curl.
HELP
}

once="" limit=3600 every=5 service=replica cluster=replicas
prometheus=${PROMETHEUS:-http://127.0.0.1:9090}
metrics=${METRICS:-http://127.0.0.1:9903}
read -r -a compose <<<"${COMPOSE:-docker compose}"
# Longer than any answer; what is still in flight then is cut.
DRAIN_S=600

say() { echo "scale: $(date +%T) $*"; }
fail() {
    echo "scale: $*" >&2
    exit 1
}

while [ "$#" -gt 0 ]; do
    case $1 in
    --once) once=1 && shift ;;
    --for | --every | --service | --cluster)
        [ "$#" -ge 2 ] || fail "$1 needs a value"
        case $1 in
        --for) limit=$2 ;;
        --every) every=$2 ;;
        --service) service=$2 ;;
        --cluster) cluster=$2 ;;
        esac
        shift 2
        ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
done

# The value that Prometheus has for a query that has one; nothing where it has none.
ask() {
    curl -sf --max-time 5 "$prometheus/api/v1/query" --data-urlencode "query=$1" |
        sed -n 's/.*"value":\[[0-9.e+]*,"\([0-9.]*\)"\].*/\1/p'
}

# The value of one gauge of Envoy, straight from it: what Prometheus has may be some seconds old.
gauge() {
    curl -sf --max-time 5 "$metrics/stats/prometheus" |
        sed -n "s/^$1{.*replica=\"$2\".*} \([0-9]*\)\$/\1/p" | head -n 1
}

# Who is first to go: its address as Envoy knows it.
coldest() {
    curl -sf --max-time 5 "$metrics/stats/prometheus" |
        sed -n "s/^warmpath_replica_drain_rank{.*cluster=\"$cluster\".*replica=\"\([^\"]*\)\".*} 1\$/\1/p;
                s/^warmpath_replica_drain_rank{.*replica=\"\([^\"]*\)\".*cluster=\"$cluster\".*} 1\$/\1/p" | head -n 1
}

containers() { "${compose[@]}" ps -q "$service"; }

container_of() {
    local address=$1 id
    for id in $(containers); do
        if docker inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}' "$id" | grep -qw "${address%:*}"; then
            echo "$id"
            return
        fi
    done
}

# Has the agent in a container say that its replica drains. False where there is none.
drain() {
    docker exec "$1" bash -c 'exec 3<>/dev/tcp/127.0.0.1/9402 &&
        printf "POST /drain HTTP/1.1\r\nhost: agent\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" >&3 &&
        head -n 1 <&3 | grep -q " 200 "' 2>/dev/null
}

take_away() {
    local have=$1 address id tries=0
    address=$(coldest)
    [ -n "$address" ] || { say "nobody is coldest yet" && return; }
    id=$(container_of "$address")
    [ -n "$id" ] || { say "no container has $address" && return; }
    if drain "$id"; then
        say "$address drains"
        until [ "$(gauge warmpath_replica_drain_rank "$address")" = 0 ] && [ "$(gauge warmpath_replica_in_flight "$address")" = 0 ]; do
            tries=$((tries + 1))
            [ "$tries" -lt "$DRAIN_S" ] || break
            sleep 1
        done
    else
        # It finishes what it has when it is told to end, and what is sent meanwhile is tried elsewhere.
        say "$address has no agent that drains it: it is only told to end"
    fi
    docker stop --time "$DRAIN_S" "$id" >/dev/null
    docker rm "$id" >/dev/null
    set_scale $((have - 1))
    say "$address is gone: $((have - 1)) replicas"
}

set_scale() {
    "${compose[@]}" up -d --no-deps --no-recreate --scale "$service=$1" "$service" >/dev/null 2>&1 ||
        fail "the scale could not be set to $1"
}

look() {
    local want have
    want=$(ask "max(warmpath:recommended_replicas{cluster=\"$cluster\"})")
    want=${want%.*}
    have=$(containers | grep -c . || true)
    if [ -z "$want" ]; then
        say "no recommendation: $have replicas stay"
    elif [ "$want" -gt "$have" ]; then
        set_scale "$want"
        say "$want replicas, from $have"
    elif [ "$want" -lt "$have" ]; then
        take_away "$have"
    fi
}

command -v curl >/dev/null || fail "curl is needed"
end=$((SECONDS + limit))
while look && [ -z "$once" ] && [ "$SECONDS" -lt "$end" ]; do sleep "$every"; done
