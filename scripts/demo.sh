#!/usr/bin/env bash
# Four mock replicas, one real Envoy, one workload; five ways to route it; one table.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/demo.sh [options]

Builds the filter, gets Envoy, starts four mock replicas, and plays the same conversations
through round robin, least request, two ring hashes and Warmpath; then prompts without any reuse
through least request and Warmpath. Under three minutes once built.

  --seed N           equal seeds give equal requests (1)
  --json FILE        also write the figures there
  --serve            keep Envoy and the replicas up afterwards, until Ctrl-C
  --only A,B         only these policies: round_robin, least_request, ring_hash_session,
                     ring_hash_prefix, warmpath
  --concurrency N    Envoy's worker threads (2)
  --agents           Warmpath without and with an agent beside each replica that tells it what the
                     replica's cache holds: hit rates, and how often as much was cached as predicted
  --gateways N       with --agents: the same once more, with N gateways of one worker each, and any
                     request going to any of them

ENVOY_BIN names an Envoy to use in place of the pinned one, WARMPATH_WASM a built filter. Writes to .work/ and to cargo's
target directory, nowhere else.
EOF
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
run=$root/.work/demo
seed=1 json="" serve="" concurrency=2 agents="" gateways=1
only="" all=round_robin,least_request,ring_hash_session,ring_hash_prefix,warmpath

# What is played. At 1,500 conversation requests in 20 s round robin keeps up with some room left:
# its times are those of a working fleet, not of a collapsed one.
conversation_requests=1500 conversation_seconds=20
no_reuse_requests=800 no_reuse_seconds=16

# What the replicas are: about an 8B model on a large GPU, with a cache of 112,000 tokens each, so
# that what the conversations use at one time fits the four together and not any one.
prefill_rate=60000
replica_flags=(--block-size 16 --capacity-blocks 7000 --prefill-rate "$prefill_rate"
    --attention-rate 2e9 --step-ms 5 --decode-ms 0.15 --max-num-seqs 256)

say() { echo "demo: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

while [ "$#" -gt 0 ]; do
    case $1 in
    --seed | --json | --only | --concurrency | --gateways)
        [ "$#" -ge 2 ] || fail "$1 needs a value"
        case $1 in
        --seed) seed=$2 ;;
        --json) json=$2 ;;
        --only) only=$2 ;;
        --concurrency) concurrency=$2 ;;
        --gateways) gateways=$2 ;;
        esac
        shift 2
        ;;
    --serve) serve=1 && shift ;;
    --agents) agents=1 && shift ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
done
[[ $gateways =~ ^[1-9]$ ]] || fail "--gateways $gateways: expected 1 to 9"
[[ $seed =~ ^[0-9]{1,18}$ ]] || fail "--seed $seed: expected a number"
[[ $concurrency =~ ^[1-9][0-9]?$ ]] || fail "--concurrency $concurrency: expected 1 to 99"
[ "$gateways" = 1 ] || [ -n "$agents" ] || fail "--gateways needs --agents"
# With agents it is Warmpath against itself, unless others are asked for.
if [ -n "$agents" ]; then all=warmpath; fi
only=${only:-$all}
case $json in "" | /*) ;; *) json=$PWD/$json ;; esac
[ -z "$json" ] || [ -d "$(dirname "$json")" ] || fail "--json $json: no such directory"
[ ! -d "$json" ] || fail "--json $json: a directory"
for policy in ${only//,/ }; do
    case $policy in
    round_robin | least_request | ring_hash_session | ring_hash_prefix | warmpath) ;;
    *) fail "--only $policy: no such policy" ;;
    esac
done

# --- what must stop when we do -----------------------------------------------------------------
patience=30
. "$root/scripts/children.sh"

# In the background and waited for, so that a signal is acted on at once. Not for cargo: it would
# leave its compilers running.
attend() {
    local pid status=0 last
    "$@" &
    pid=$!
    last=${#pids[@]}
    pids[last]=$pid
    wait "$pid" || status=$?
    unset "pids[$last]"
    return "$status"
}

# --- build ---------------------------------------------------------------------------------------
cd "$root"
command -v cargo >/dev/null || fail "cargo is needed: https://rustup.rs"
target=${CARGO_TARGET_DIR:-$root/target}
wasm=${WARMPATH_WASM:-$target/wasm32-wasip1/release/warmpath.wasm}
bin=$target/quick
mkdir -p "$run"

if ! [ -d "$(rustc --print sysroot)/lib/rustlib/wasm32-wasip1" ]; then
    say "adding the Rust target wasm32-wasip1"
    rustup target add wasm32-wasip1 || fail "rustup could not add wasm32-wasip1"
fi
first=""
if ! [ -f "$wasm" ] || ! [ -x "$bin/warmpath-replay" ]; then
    say "building the filter and the demo's programs; the first time takes some minutes"
    first=1
fi
# Cargo says what it compiles, since that may take a while later, too; but not each time that there is nothing to do.
build() {
    if [ -n "$first" ]; then
        cargo build "$@"
    else
        cargo build "$@" 2> >(grep -v '^ *Finished ' >&2)
    fi
}
[ -n "${WARMPATH_WASM:-}" ] || build --lib --target wasm32-wasip1 --release
build --bins --features demo --profile quick
replay=$bin/warmpath-replay

tokenizer=$root/.work/qwen3.warmpath
if ! [ -f "$tokenizer" ] || [ "$bin/warmpath-prepare" -nt "$tokenizer" ]; then
    say "preparing the tokenizer"
    attend "$bin/warmpath-prepare" tests/data/models/qwen3 -o "$tokenizer" >"$run/prepare.log" 2>&1 || {
        tail -5 "$run/prepare.log" >&2
        fail "the tokenizer could not be prepared"
    }
fi
envoy=$(scripts/envoy.sh)

# --- start ---------------------------------------------------------------------------------------
# Always the same ports where they are free: replicas' addresses enter Warmpath's tie-breaking.
next_port=18080
is_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
free_port() {
    while is_taken "$next_port"; do next_port=$((next_port + 1)); done
    port=$next_port
    next_port=$((next_port + 1))
}
fill=()
allocate() {
    local name
    for name in "$@"; do
        free_port
        eval "$(echo "$name" | tr '[:upper:]' '[:lower:]')_port=$port"
        fill+=(-e "s|@${name}_PORT@|$port|")
    done
}
gateway_ports=(WARMPATH ROUND_ROBIN LEAST_REQUEST RING_HASH_SESSION RING_HASH_PREFIX ADMIN TOKENIZERS)
allocate "${gateway_ports[@]}"
gateway_fill=("${fill[@]}") fill=()
allocate REPLICA_1 REPLICA_2 REPLICA_3 REPLICA_4
replica_fill=("${fill[@]}")
replica_ports=("$replica_1_port" "$replica_2_port" "$replica_3_port" "$replica_4_port")

# How fast the replicas are is all that Warmpath is told of them; 33,333 is the attention rate over
# the prefill rate. The secret only shows that one is needed: whoever has it sees what is cached where.
configuration() {
    printf '%s' \
        '{"models": [{"name": "qwen3", "prepared": {"cluster": "tokenizers", "path": "/qwen3.warmpath"}}],' \
        ' "clusters": [{"name": "warmpath", "admin_cluster": "admin", "poll_cluster": "poll"}],'"$1" \
        ' "cost": {"prefill_tokens_per_s": '"$prefill_rate"', "attention_tokens": 33333},' \
        ' "explain": {"request_header": "x-warmpath-explain", "secret": "demo"}}'
}
agent_offset=1000
cache_report=' "cache_report": {"cluster": "agents", "port_offset": '$agent_offset'},'

# Starts an Envoy on the ports last allocated: a name for its files, what the filter is told besides,
# its workers. What only agents need is left out where there are none.
start_envoy() {
    local name=$1 more=$2 workers=$3 leave_out=()
    [ -n "$agents" ] || leave_out=(-e '/# agents: from here/,/# agents: to here/d')
    sed ${leave_out[@]+"${leave_out[@]}"} "${gateway_fill[@]}" "${replica_fill[@]}" \
        -e "s|@WASM@|$wasm|" -e "s|@TOKENIZER@|$tokenizer|" \
        -e "s|@CONFIGURATION@|$(configuration "$more")|" scripts/demo/envoy.yaml.in >"$run/$name.yaml"
    "$envoy" -c "$run/$name.yaml" --concurrency "$workers" --disable-hot-restart --log-level warn \
        >"$run/$name.log" 2>&1 &
    pids+=($!)
}

await_envoy() {
    local name=$1 workers=$2 admin=$3
    attend "$replay" ready --within 60 "http://127.0.0.1:$admin/ready" || {
        tail -5 "$run/$name.log" >&2
        fail "Envoy did not start"
    }
    case ,$only, in *,warmpath,*)
        # Each worker has a VM that loads the tokenizer; until then Warmpath routes by load alone.
        say "waiting until each worker has loaded the tokenizer"
        attend "$replay" ready --within 60 --containing "state=ready;warmpath_vms: $workers" \
            "http://127.0.0.1:$admin/stats?filter=warmpath_vms" || {
            tail -5 "$run/$name.log" >&2
            fail "Warmpath did not get ready"
        }
        ;;
    esac
}

replica_urls=() listen=() reset=()
for port in "${replica_ports[@]}"; do
    listen+=(--listen "127.0.0.1:$port")
    replica_urls+=("http://127.0.0.1:$port/health")
    reset+=(--reset "http://127.0.0.1:$port")
    replica_fill+=(-e "s|@AGENT_${#replica_urls[@]}_PORT@|$((port + agent_offset))|")
done
if [ -n "$agents" ]; then
    # Where replicas publish what becomes of their caches, and where it can be asked for again: each
    # replica takes the next port. vLLM binds to such an address, and connects to one without a `::`.
    events_port=19800 repeats_port=19900
    replica_flags+=(--events "tcp://[::ffff:127.0.0.1]:$events_port"
        --replay "tcp://[::ffff:127.0.0.1]:$repeats_port")
fi
say "starting four mock replicas and Envoy (logs in .work/demo)"
"$bin/warmpath-mock-replica" "${listen[@]}" --model "qwen3=$tokenizer" "${replica_flags[@]}" \
    >"$run/replicas.log" 2>&1 &
pids+=($!)
attend "$replay" ready --within 20 "${replica_urls[@]}" || {
    tail -5 "$run/replicas.log" >&2
    fail "the replicas did not start"
}
first_port=$warmpath_port
start_envoy envoy "" "$concurrency"
await_envoy envoy "$concurrency" "$admin_port"

# --- play ----------------------------------------------------------------------------------------
rm -f "$run/runs.json"
failed=""
play() {
    local workload=$1 policy=$2 requests=$3 seconds=$4 port
    case ,$only, in *",$policy,"*) ;; *) return 0 ;; esac
    eval "port=\$${policy}_port"
    attend "$replay" live --url "http://127.0.0.1:$port" --workload "$workload" \
        --policy "$policy" --requests "$requests" --duration "$seconds" --seed "$seed" \
        --model qwen3 "${reset[@]}" ${explain[@]+"${explain[@]}"} --json "$run/runs.json" || failed=1
}
explain=()
[ -z "$agents" ] || explain=(--explain demo)
say "playing $conversation_requests requests of conversations for each policy, seed $seed"
for policy in round_robin least_request ring_hash_session ring_hash_prefix warmpath; do
    play conversations "$policy" "$conversation_requests" "$conversation_seconds"
done
if [ -z "$agents" ]; then
    say "playing $no_reuse_requests prompts that have nothing in common"
    for policy in least_request warmpath; do
        play no-reuse "$policy" "$no_reuse_requests" "$no_reuse_seconds"
    done
fi

# The same conversations through gateways that start anew: their name in the table, how many, their
# workers, what their filters are told besides.
play_gateways() {
    local policy=$1 count=$2 workers=$3 more=$4 at first=${#pids[@]} urls=() admins=()
    for at in $(seq "$count"); do
        fill=()
        allocate "${gateway_ports[@]}"
        gateway_fill=("${fill[@]}")
        start_envoy "$policy-$at" "$more" "$workers"
        urls+=(--url "http://127.0.0.1:$warmpath_port")
        admins+=("$admin_port")
    done
    for at in $(seq "$count"); do
        await_envoy "$policy-$at" "$workers" "${admins[at - 1]}"
        [ -z "$more" ] || attend "$replay" ready --within 60 --containing "state=reporting;warmpath_agents: 4" \
            "http://127.0.0.1:${admins[at - 1]}/stats?filter=warmpath_agents" || {
            tail -5 "$run/$policy-$at.log" >&2
            fail "the agents' reports did not come"
        }
    done
    attend "$replay" live "${urls[@]}" --workload conversations --policy "$policy" \
        --requests "$conversation_requests" --duration "$conversation_seconds" --seed "$seed" \
        --model qwen3 "${reset[@]}" "${explain[@]}" --json "$run/runs.json" || failed=1
    for at in $(seq "$count"); do
        kill "${pids[first + at - 1]}" 2>/dev/null || true
        wait "${pids[first + at - 1]}" 2>/dev/null || true
    done
}
if [ -n "$agents" ]; then
    say "starting an agent beside each replica"
    at=0
    for port in "${replica_ports[@]}"; do
        "$bin/warmpath-agent" --listen "127.0.0.1:$((port + agent_offset))" \
            --engine-url "http://127.0.0.1:$port" --model qwen3 \
            --events "tcp://127.0.0.1:$((events_port + at))" \
            --replay "tcp://127.0.0.1:$((repeats_port + at))" >"$run/agent-$at.log" 2>&1 &
        pids+=($!)
        at=$((at + 1))
        attend "$replay" ready --within 20 "http://127.0.0.1:$((port + agent_offset))/healthz" || {
            tail -5 "$run/agent-$((at - 1)).log" >&2
            fail "an agent did not start"
        }
    done
    say "playing them through one gateway that the agents tell what replicas hold"
    play_gateways warmpath_agents 1 "$concurrency" "$cache_report"
    if [ "$gateways" -gt 1 ]; then
        say "playing them through $gateways gateways, without agents and with them"
        play_gateways warmpath_gateways "$gateways" 1 ""
        play_gateways warmpath_gateways_agents "$gateways" 1 "$cache_report"
    fi
fi

[ -f "$run/runs.json" ] || fail "nothing was played"
"$replay" table "$run/runs.json"
[ -z "$json" ] || cp "$run/runs.json" "$json"

curl_line="curl -si http://127.0.0.1:$first_port/v1/chat/completions -H 'content-type: application/json' -H 'x-warmpath-explain: demo' -d '{\"model\": \"qwen3\", \"max_tokens\": 20, \"messages\": [{\"role\": \"system\", \"content\": \"You answer questions of people who have lost their way in a large building with many floors, and you never send anybody to a floor that does not exist.\"}, {\"role\": \"user\", \"content\": \"Where did I go?\"}]}'"
echo
if [ -n "$serve" ]; then
    echo "Envoy and the replicas stay up until Ctrl-C. Try this twice: x-warmpath-explain says reason=cold, then reason=prefix."
    echo "  $curl_line"
    while :; do attend sleep 3600; done
fi
echo "To try it by hand: ./scripts/demo.sh --serve, then"
echo "  $curl_line"
[ -z "$failed" ] || fail "the figures do not count: see above"
