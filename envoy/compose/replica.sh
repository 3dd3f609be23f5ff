#!/bin/sh
# A replica of docker-compose.yml: the mock engine, and beside it whatever belongs to a replica.
#
# About an 8B model on a large GPU, with a cache of 112,000 tokens. Told to end, it finishes what it
# has first: compose gives it 45 seconds for that.
set -eu
exec warmpath-mock-replica --listen "$(hostname)@0.0.0.0:8000" \
    --model Qwen/Qwen3-8B=/warmpath/qwen3.warmpath --model qwen3 \
    --block-size 16 --capacity-blocks 7000 --prefill-rate 60000 --attention-rate 2e9 \
    --step-ms 5 --decode-ms 0.15 --max-num-seqs 256 --drain-s 35
