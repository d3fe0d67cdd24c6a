#!/usr/bin/env bash
# Run CMD in this session, and end all that came of it when CMD ends, or when nobody holds the pipe
# any more.
#
# Usage: setsid bash keep.sh TMP CMD [ARG...] 8<PIPE       whoever starts it holds the writing end
#        TMP   a directory of this call's own, removed at the end; it also marks all that is started
#              here
# Exit:  the status of CMD
#
# What is left is found by its session, and by the mark in its environment: ranks lead sessions of
# their own, and the image's FUSE process has no environment.
set -uo pipefail
# shellcheck source=host/common.sh
source "$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")/host/common.sh"
tmp=$1
shift

# Kills what is left. It looks only when what it started for that has ended, which it would find.
sweep() {
    local file pid tries marked
    local -a found members
    for ((tries = 0; tries < 100; tries++)); do
        found=()
        marked=$(grep -slzxF -- "APPTRAIN_TASK=$tmp" /proc/[0-9]*/environ)
        for file in $marked; do
            pid=${file#/proc/}
            found+=("${pid%/environ}")
        done
        find_session "$$"
        for pid in ${members[@]+"${members[@]}"}; do
            if [[ $pid != "$$" && $pid != "$BASHPID" ]]; then
                found+=("$pid")
            fi
        done
        if ((${#found[@]} == 0)); then
            break
        fi
        kill -KILL "${found[@]}" 2>/dev/null
        sleep 0.05
    done
    rm -rf -- "$tmp" 2>/dev/null || { chmod -R u+rwX -- "$tmp" && rm -rf -- "$tmp"; } 2>/dev/null
}

# shellcheck disable=SC2329 # a trap
on_end_signal() {
    is_asked_to_end=yes
    interrupted=yes
    if [[ -n $child ]]; then
        end_process TERM "$child" 2>/dev/null
    fi
}

is_asked_to_end=''
child=''
trap on_end_signal TERM
(
    export APPTRAIN_TASK=$tmp
    exec "$@"
) 8<&- &
child=$!
if [[ -n $is_asked_to_end ]]; then
    on_end_signal
fi
(
    trap '' TERM
    read -r -u 8
    sweep
) &
watcher=$!
exec 8<&-
await_end "$child" 143
disown "$watcher" # or bash would say that it was killed
kill -KILL "$watcher"
sweep
exit "$status"
