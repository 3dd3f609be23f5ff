# What a script starts ends when the script does. To be sourced: the script adds the ids of its children to `pids`, and sets
# `patience`, the tenths of a second that each of them has to go when it is asked to.
pids=()
stop() {
    local pid tries
    trap '' INT TERM
    for pid in ${pids[@]+"${pids[@]}"}; do kill "$pid" 2>/dev/null || true; done
    for pid in ${pids[@]+"${pids[@]}"}; do
        tries=0
        while kill -0 "$pid" 2>/dev/null && [ "$tries" -lt "$patience" ]; do
            sleep 0.1
            tries=$((tries + 1))
        done
        # What does not go by then is made to, with all of its group if it leads one.
        kill -9 -- "-$pid" 2>/dev/null || kill -9 "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
