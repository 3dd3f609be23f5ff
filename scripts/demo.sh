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

ENVOY_BIN names an Envoy to use in place of the pinned one. Writes to .work/ and to cargo's
target directory, nowhere else.
EOF
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
run=$root/.work/demo
seed=1 json="" serve="" concurrency=2
only=round_robin,least_request,ring_hash_session,ring_hash_prefix,warmpath

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
    --seed | --json | --only | --concurrency)
        [ "$#" -ge 2 ] || fail "$1 needs a value"
        case $1 in
        --seed) seed=$2 ;;
        --json) json=$2 ;;
        --only) only=$2 ;;
        --concurrency) concurrency=$2 ;;
        esac
        shift 2
        ;;
    --serve) serve=1 && shift ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
done
case $json in "" | /*) ;; *) json=$PWD/$json ;; esac
[ -z "$json" ] || [ -d "$(dirname "$json")" ] || fail "--json $json: no such directory"
for policy in ${only//,/ }; do
    case $policy in
    round_robin | least_request | ring_hash_session | ring_hash_prefix | warmpath) ;;
    *) fail "--only $policy: no such policy" ;;
    esac
done

# --- what must stop when we do -----------------------------------------------------------------
pids=()
stop() {
    local pid tries
    trap '' INT TERM
    for pid in ${pids[@]+"${pids[@]}"}; do kill "$pid" 2>/dev/null || true; done
    for pid in ${pids[@]+"${pids[@]}"}; do
        tries=0
        while kill -0 "$pid" 2>/dev/null && [ "$tries" -lt 30 ]; do
            sleep 0.1
            tries=$((tries + 1))
        done
        # What does not go within three seconds is made to.
        kill -9 "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

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
wasm=$target/wasm32-wasip1/release/warmpath.wasm
bin=$target/quick
mkdir -p "$run"

if ! [ -d "$(rustc --print sysroot)/lib/rustlib/wasm32-wasip1" ]; then
    say "adding the Rust target wasm32-wasip1"
    rustup target add wasm32-wasip1 || fail "rustup could not add wasm32-wasip1"
fi
quiet=--quiet
if ! [ -f "$wasm" ] || ! [ -x "$bin/warmpath-replay" ]; then
    say "building the filter and the demo's programs; the first time takes some minutes"
    quiet=
fi
cargo build $quiet --lib --target wasm32-wasip1 --release
cargo build $quiet --bins --features demo --profile quick
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
free_port() {
    while (exec 3<>"/dev/tcp/127.0.0.1/$next_port") 2>/dev/null; do next_port=$((next_port + 1)); done
    port=$next_port
    next_port=$((next_port + 1))
}
fill=()
for name in WARMPATH ROUND_ROBIN LEAST_REQUEST RING_HASH_SESSION RING_HASH_PREFIX ADMIN TOKENIZERS \
    REPLICA_1 REPLICA_2 REPLICA_3 REPLICA_4; do
    free_port
    eval "$(echo "$name" | tr '[:upper:]' '[:lower:]')_port=$port"
    fill+=(-e "s|@${name}_PORT@|$port|")
done

# How fast the replicas are is all that Warmpath is told of them; 33,333 is the attention rate over
# the prefill rate. The secret only shows that one is needed: whoever has it sees what is cached where.
configuration=$(printf '%s' \
    '{"models": [{"name": "qwen3", "prepared": {"cluster": "tokenizers", "path": "/qwen3.warmpath"}}],' \
    ' "clusters": [{"name": "warmpath", "admin_cluster": "admin", "poll_cluster": "poll"}],' \
    ' "cost": {"prefill_tokens_per_s": '"$prefill_rate"', "attention_tokens": 33333},' \
    ' "explain": {"request_header": "x-warmpath-explain", "secret": "demo"}}')
sed "${fill[@]}" -e "s|@WASM@|$wasm|" -e "s|@TOKENIZER@|$tokenizer|" \
    -e "s|@CONFIGURATION@|$configuration|" scripts/demo/envoy.yaml.in >"$run/envoy.yaml"

replica_urls=() listen=() reset=()
for port in "$replica_1_port" "$replica_2_port" "$replica_3_port" "$replica_4_port"; do
    listen+=(--listen "127.0.0.1:$port")
    replica_urls+=("http://127.0.0.1:$port/health")
    reset+=(--reset "http://127.0.0.1:$port")
done
say "starting four mock replicas and Envoy (logs in .work/demo)"
"$bin/warmpath-mock-replica" "${listen[@]}" --model "qwen3=$tokenizer" "${replica_flags[@]}" \
    >"$run/replicas.log" 2>&1 &
pids+=($!)
attend "$replay" ready --within 20 "${replica_urls[@]}" || {
    tail -5 "$run/replicas.log" >&2
    fail "the replicas did not start"
}
"$envoy" -c "$run/envoy.yaml" --concurrency "$concurrency" --disable-hot-restart --log-level warn \
    >"$run/envoy.log" 2>&1 &
pids+=($!)
attend "$replay" ready --within 60 "http://127.0.0.1:$admin_port/ready" || {
    tail -5 "$run/envoy.log" >&2
    fail "Envoy did not start"
}
case ,$only, in *,warmpath,*)
    # Each worker has a VM that loads the tokenizer; until then Warmpath routes by load alone.
    say "waiting until each worker has loaded the tokenizer"
    attend "$replay" ready --within 60 --containing "state=ready;warmpath_vms: $concurrency" \
        "http://127.0.0.1:$admin_port/stats?filter=warmpath_vms" || {
        tail -5 "$run/envoy.log" >&2
        fail "Warmpath did not get ready"
    }
    ;;
esac

# --- play ----------------------------------------------------------------------------------------
rm -f "$run/runs.json"
failed=""
play() {
    local workload=$1 policy=$2 requests=$3 seconds=$4 port
    case ,$only, in *",$policy,"*) ;; *) return 0 ;; esac
    eval "port=\$${policy}_port"
    attend "$replay" live --url "http://127.0.0.1:$port" --workload "$workload" \
        --policy "$policy" --requests "$requests" --duration "$seconds" --seed "$seed" \
        --model qwen3 "${reset[@]}" --json "$run/runs.json" || failed=1
}
say "playing $conversation_requests requests of conversations for each policy, seed $seed"
for policy in round_robin least_request ring_hash_session ring_hash_prefix warmpath; do
    play conversations "$policy" "$conversation_requests" "$conversation_seconds"
done
say "playing $no_reuse_requests prompts that have nothing in common"
for policy in least_request warmpath; do
    play no-reuse "$policy" "$no_reuse_requests" "$no_reuse_seconds"
done

[ -f "$run/runs.json" ] || fail "nothing was played"
"$replay" table "$run/runs.json"
[ -z "$json" ] || cp "$run/runs.json" "$json"

curl_line="curl -si http://127.0.0.1:$warmpath_port/v1/chat/completions -H 'content-type: application/json' -H 'x-warmpath-explain: demo' -d '{\"model\": \"qwen3\", \"max_tokens\": 20, \"messages\": [{\"role\": \"system\", \"content\": \"You answer questions of people who have lost their way in a large building with many floors, and you never send anybody to a floor that does not exist.\"}, {\"role\": \"user\", \"content\": \"Where did I go?\"}]}'"
echo
if [ -n "$serve" ]; then
    echo "Envoy and the replicas stay up until Ctrl-C. Try this twice: x-warmpath-explain says reason=cold, then reason=prefix."
    echo "  $curl_line"
    while :; do attend sleep 3600; done
fi
echo "To try it by hand: ./scripts/demo.sh --serve, then"
echo "  $curl_line"
[ -z "$failed" ] || fail "the figures do not count: see above"
