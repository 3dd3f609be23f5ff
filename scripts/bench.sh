#!/usr/bin/env bash
# Measures what takes time, in a real Envoy, and prints it as a table.
#
#   scripts/bench.sh [requests] [--quick] [--json FILE] [--connections N] [--seed N] [--model FOLDER]
#       What a request costs: CPU of the Envoy process and latency added, for prompts of 1,000, 10,000 and 100,000
#       tokens, new ones and the next turn of the same chats; and CPU per event of a streamed answer. One Envoy
#       with one worker each without the filter, with a filter that holds and copies bodies only, and with Warmpath, by
#       turns; replicas that answer at once. It fails where a count or prediction was not exact. A minute or two on two
#       idle cores, at most six; --quick is a try of half a minute, whose figures mean little. Linux only.
#
#   scripts/bench.sh stages [--model FOLDER] [--json FILE] [--only STAGE]
#       Each stage of a decision alone, natively and in Envoy's VM: parse, normalise, render, tokenize, hash and look
#       up, for prompts of 1,000, 10,000 and 100,000 tokens and for the worst that is let in, with the longest step. And
#       the decision for one of 10,000 tokens, with 8 and 64 full replicas that hold nothing of it, all, or a part each,
#       against hashing its blocks; --only decide is that alone.
#
#   scripts/bench.sh polls [--seconds N] [--json FILE] [--seed N] [--model FOLDER]
#       What it costs to ask the agents of 64 idle replicas for their cache reports: CPU of an Envoy that is asked nothing,
#       with agents as shipped, with each asked every 200 ms, with /metrics in their place and with neither, against
#       proxying requests. It fails where the poll costs 5 % of that. A minute.
#
#   scripts/bench.sh tokenizers [FOLDER]...
#       Loads tokenizers from tokenizer.json and from the prepared form: time, longest stall of a worker,
#       memory of a VM and of Envoy with one and four workers. A FOLDER is a Hugging Face model folder, or
#       holds several; default: tests/data/models.
#
#   scripts/bench.sh memory [FOLDER]...
#       Resident memory of Envoy with 1, 4 and 16 workers, without the filter and with 1 and 3 models, when all is
#       loaded and after some traffic. A FOLDER is a Hugging Face model folder; default: those of the golden tests
#       that are there. With fewer than three, some are loaded more than once, from files of their own.
#
#   scripts/bench.sh events [BLOCKS_A_SECOND] [SECONDS]
#       What warmpath-agent takes to follow an engine that stores and removes 20,000 blocks a second, over real sockets,
#       while a reader asks for what is new. It fails where the reader does not know what is held. Linux only.
#
# ENVOY_BIN names an Envoy to use in place of the pinned one. Compare figures within one run only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' scripts/bench.sh
}

case ${1:-} in
requests | stages | polls | tokenizers | memory | events) command=$1 && shift ;;
'' | --quick | --json | --connections | --seed | --model) command=requests ;;
-h | --help) usage && exit ;;
*) usage >&2 && exit 2 ;;
esac
target=${CARGO_TARGET_DIR:-target}

# What is written in the end is looked at now: what comes before takes minutes.
before=""
for argument in "$@"; do
    json=""
    [ "$before" != --json ] || json=$argument
    case $argument in --json=*) json=${argument#--json=} ;; esac
    before=$argument
    [ -n "$json" ] || continue
    [ -d "$(dirname "$json")" ] || { echo "bench.sh: --json $json: no such directory" >&2 && exit 2; }
    [ ! -d "$json" ] || { echo "bench.sh: --json $json: a directory" >&2 && exit 2; }
done

if [ "$command" = events ]; then
    cargo build --quiet --profile quick --features demo --bin warmpath-agent --example events
    exec "$target/quick/examples/events" "$target/quick/warmpath-agent" "$@"
fi

envoy=$(scripts/envoy.sh)
# One set of features for all programs: with another, cargo builds the library anew.
cargo build --quiet --profile quick --features demo --bin warmpath-prepare --bin warmpath-mock-replica \
    --example traffic --example stages

if [ "$command" = requests ]; then
    # WARMPATH_WASM names a built filter to measure in place of the released one.
    [ -n "${WARMPATH_WASM:-}" ] || cargo build --quiet --release --lib --target wasm32-wasip1
    cargo build --quiet --profile quick --features bench --example hold_and_copy --target wasm32-wasip1
    target=$(cd "$target" && pwd)
    exec python3 scripts/bench/requests.py --envoy "$envoy" \
        --wasm "${WARMPATH_WASM:-$target/wasm32-wasip1/release/warmpath.wasm}" \
        --copy "$target/wasm32-wasip1/quick/examples/hold_and_copy.wasm" \
        --prepare "$target/quick/warmpath-prepare" --traffic "$target/quick/examples/traffic" "$@"
fi

if [ "$command" = polls ]; then
    [ -n "${WARMPATH_WASM:-}" ] || cargo build --quiet --release --lib --target wasm32-wasip1
    target=$(cd "$target" && pwd)
    exec python3 scripts/bench/polls.py --envoy "$envoy" \
        --wasm "${WARMPATH_WASM:-$target/wasm32-wasip1/release/warmpath.wasm}" \
        --prepare "$target/quick/warmpath-prepare" --traffic "$target/quick/examples/traffic" "$@"
fi

if [ "$command" = stages ]; then
    cargo build --quiet --profile measured --features bench --example stages_plugin --target wasm32-wasip1
    exec python3 scripts/bench/stages.py --envoy "$envoy" --prepare "$target/quick/warmpath-prepare" \
        --plugin "$target/wasm32-wasip1/measured/examples/stages_plugin.wasm" --native "$target/quick/examples/stages" "$@"
fi

if [ "$command" = memory ]; then
    if [ "$#" -eq 0 ]; then
        scripts/models.sh >&2
        set -- tests/data/models/qwen3
        [ ! -e .work/models/llama3.1/tokenizer.json ] || set -- "$@" .work/models/llama3.1
    fi
    cargo build --quiet --release --lib --target wasm32-wasip1
    exec python3 scripts/bench/memory.py --envoy "$envoy" \
        --wasm "$(cd "$target" && pwd)/wasm32-wasip1/release/warmpath.wasm" \
        --prepare "$target/quick/warmpath-prepare" --mock "$target/quick/warmpath-mock-replica" "$@"
fi

[ "$#" -gt 0 ] || set -- tests/data/models
cargo build --quiet --profile measured --target wasm32-wasip1 --features bench --example tokenizer_load

exec python3 scripts/bench/tokenizers.py --envoy "$envoy" \
    --plugin "$target/wasm32-wasip1/measured/examples/tokenizer_load.wasm" \
    --prepare "$target/quick/warmpath-prepare" "$@"
