#!/bin/sh
# A replica of docker-compose.yml: the mock engine, and beside it the agent that reports what is in its cache.
#
# The engine is about an 8B model on a large GPU, with a cache of 112,000 tokens. Told to end, it finishes what it has
# first: compose gives it 45 seconds for that.
set -eu

warmpath-mock-replica --listen "$(hostname)@0.0.0.0:8000" \
    --model Qwen/Qwen3-8B=/warmpath/qwen3.warmpath --model qwen3 \
    --block-size 16 --capacity-blocks 7000 --prefill-rate 60000 --attention-rate 2e9 \
    --step-ms 5 --decode-ms 0.15 --max-num-seqs 256 --drain-s 35 \
    --events 'tcp://*:5557' --replay 'tcp://*:5558' &
engine=$!
# Without a token: nobody but Envoy and Prometheus is on this network, and what a demo has cached is no secret.
warmpath-agent --listen 0.0.0.0:9402 --insecure --model Qwen/Qwen3-8B &
agent=$!

trap 'kill -TERM "$engine"' TERM INT
# A signal ends the wait and not the engine.
while kill -0 "$engine" 2>/dev/null; do wait "$engine" || true; done
kill -TERM "$agent" 2>/dev/null || true
