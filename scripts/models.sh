#!/usr/bin/env bash
# Fetches the tokenizers and chat templates that the golden tests need and this repository does not hold, into
# .work/models. Some are under licences that are not open source (Llama 3.1 Community License, Gemma Terms of Use), which
# whoever runs this accepts. Everything is pinned and checked; a second run finds it there. What cannot be fetched is
# said on a line that begins with SKIPPED.
#
# Usage: scripts/models.sh [NAME...]     all, or only these: deepseek-v3 gemma3 glm-4.5 gpt-oss llama3.1 mistral-nemo
#                                        phi-4 qwen2.5 qwen3.5
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${1:-} == -* ]]; then
    sed -n '2,/^set /{/^#/s/^# \?//p;}' "scripts/models.sh"
    exit
fi
exec python3 scripts/models/fetch.py "$@"
