#!/usr/bin/env bash
# Fuzzes what reads untrusted bytes, guided by coverage: tests/fuzz says what, and what must hold.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: scripts/fuzz.sh [TARGET...] [--seconds N] [--jobs N]

Runs each target (all of them by default; --list names them) for N seconds (60), that many at a time
(--jobs, 1). Inputs that reached new code are kept in .work/fuzz/TARGET and the next run starts from
them; an input that fails is kept in .work/fuzz/failures, and printed. Fails if there is any.

To run one input again:  scripts/fuzz.sh TARGET --input FILE   (--minimize FILE makes it smaller)

Needs Rust and a C++ compiler, the first time also a network: libFuzzer comes as a crate, and the
stable compiler puts its counters in. Without either, WARMPATH_FUZZ_SECONDS=60 cargo test --test fuzz
runs the same targets unguided.
USAGE
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
host=$(rustc -vV | sed -n 's/^host: //p')
work=$root/.work/fuzz
seconds=60 jobs=1 input="" minimize="" targets=()
all=$(sed -n 's/^tests! { \(.*\) }$/\1/p' tests/fuzz/main.rs)

fail() {
    echo "fuzz.sh: $*" >&2
    exit 1
}

while [ "$#" -gt 0 ]; do
    case $1 in
    --seconds) seconds=${2:-} && shift 2 || fail "--seconds needs a value" ;;
    --jobs) jobs=${2:-} && shift 2 || fail "--jobs needs a value" ;;
    --input) input=${2:-} && shift 2 || fail "--input needs a file" ;;
    --minimize) minimize=${2:-} && shift 2 || fail "--minimize needs a file" ;;
    --list) echo "$all" && exit ;;
    -h | --help) usage && exit ;;
    -*) usage >&2 && exit 2 ;;
    *) targets+=("$1") && shift ;;
    esac
done
[ "${#targets[@]}" -gt 0 ] || read -r -a targets <<<"$all"
for target in "${targets[@]}"; do
    [[ " $all " == *" $target "* ]] || fail "no target '$target'; there are: $all"
done

# Counters in every function, edges told from each other, and comparisons, so that a number or word
# that the code looks for is found. For the target alone: build scripts run without a fuzzer.
counters="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares"
binary=$(RUSTFLAGS=$(echo $counters) cargo test --quiet --no-run --message-format=json --profile fuzz \
    --target "$host" --features fuzz --test libfuzzer |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[ -x "$binary" ] || fail "the fuzzer was not built"

if [ -n "$input" ]; then
    WARMPATH_FUZZ_TARGET=${targets[0]} exec "$binary" -rss_limit_mb=4096 "$input"
fi
mkdir -p "$work/failures"
if [ -n "$minimize" ]; then
    WARMPATH_FUZZ_TARGET=${targets[0]} exec "$binary" -rss_limit_mb=4096 -minimize_crash=1 \
        -max_total_time="$seconds" -exact_artifact_path="$minimize.min" "$minimize"
fi

# The fuzzer puts the target's seeds into the folder first, since some come from code.
fuzz() {
    local target=$1 log=$work/$1.log
    mkdir -p "$work/$target"
    if WARMPATH_FUZZ_TARGET=$target "$binary" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=4096 \
        -max_len=65536 -len_control=20 -artifact_prefix="$work/failures/$target-" -print_final_stats=1 \
        "$work/$target" >"$log" 2>&1; then
        echo "$target: $(sed -n 's/^Done \([0-9]*\) runs in \([0-9]*\) .*/\1 inputs in \2 s/p' "$log"), $(
            grep -o 'cov: [0-9]* ft: [0-9]*' "$log" | tail -n 1 | sed 's/cov: \(.*\) ft: .*/\1 edges/'
        ), slowest $(sed -n 's/^stat::slowest_unit_time_sec: *//p' "$log") s"
    else
        echo "$target: FAILED, see ${log#"$root"/}"
        grep -E 'panicked at|ERROR|Test unit written' -A 2 "$log" | cut -c 1-300 | head -n 12
        return 1
    fi
}
export -f fuzz
export binary work root seconds
printf '%s\n' "${targets[@]}" | xargs -P "$jobs" -I{} bash -c 'fuzz {}'
