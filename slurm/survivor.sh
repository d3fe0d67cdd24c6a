#!/usr/bin/env bash
# Run a task of a step that goes on without the nodes that it loses. If it has lost the first
# node, and with it the job script, have Slurm run the job again when the task has ended: nobody
# else would end it before its time is over. `prepare` puts it in front of a task if the job may
# restart inside its allocation (entrypoint/batch/slurm/job.py).
#
# Usage: slurm/survivor.sh CMD [ARG...]
# Reads: SLURM_SRUN_COMM_HOST, SLURM_SRUN_COMM_PORT, APPTRAIN_HAND, and what slurm/name.sh reads
# Exit:  the status of CMD
set -uo pipefail
checkout=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
# shellcheck source=host/common.sh
source "$checkout/host/common.sh"
# shellcheck source=slurm/name.sh
source "$checkout/slurm/name.sh"
readonly ANSWER=10        # s for srun to answer
readonly ASKED=120        # s for Slurm to do what it is asked
readonly NOTICED=3600     # s for Slurm to notice a lost node (SlurmdTimeout, mostly 300)
readonly POLL=5           # s

# On the first node the job script is there, or its end is this task's too. host/job.sh makes its
# directory so.
if [[ ${APPTRAIN_HAND:-} == */"apptrain.$(uname -n)."* && -d $APPTRAIN_HAND ]]; then
    exec "$@"
fi

srun_answers() {
    # shellcheck disable=SC2016 # it is the inner one's to expand
    timeout "$ANSWER" bash -c 'exec 3<>"/dev/tcp/$1/$2"' \
        bash "${SLURM_SRUN_COMM_HOST:-}" "${SLURM_SRUN_COMM_PORT:-}" 2>/dev/null
}

# Waits until Slurm knows that the job script is lost; false if it is not. Sets `told`, what Slurm
# says of the job.
script_is_lost() {
    local until
    read_clock
    until=$((seconds + NOTICED))
    while ((seconds < until)); do
        told=$(timeout "$ANSWER" scontrol --oneliner show job "$(own_name)" 2>/dev/null) || told=
        [[ -z $told || $told == *' JobState=RUNNING '* ]] || return 1
        if [[ $told =~ \ BatchHost=([^ ]+) ]] && ! has_node "${BASH_REMATCH[1]}"; then
            return
        fi
        sleep "$POLL"
        read_clock
    done
    return 1
}

# Whether the job has this node still, by `told`, or that is not known.
has_node() {
    local nodes
    [[ $told =~ \ NodeList=([^ ]+) ]] || return 0
    nodes=$(timeout "$ANSWER" scontrol show hostnames "${BASH_REMATCH[1]}") || return 0
    [[ $'\n'$nodes$'\n' == *$'\n'"$1"$'\n'* ]]
}

# Every task that is left does this, and Slurm refuses the second one.
run_again() {
    local told=
    script_is_lost || return 0
    echo "apptrain: the first node and its job script are lost:" \
        "Slurm runs the job again, or ends it if Requeue=0" >&2
    if [[ $told == *' Requeue=0 '* ]]; then
        timeout "$ASKED" scancel "$(own_name)" && return
    fi
    timeout "$ASKED" scontrol requeue "$(own_name)" 2>/dev/null
}

# Where `launch` says whether it knew of the first node's end (entrypoint/job/handover.py).
handover_dir=$(make_own_dir "apptrain.$(uname -n)") || handover_dir=/nowhere
trap 'rm -rf -- "$handover_dir"' EXIT
APPTRAIN_HAND=$handover_dir run_child "$@"
trap - HUP INT TERM USR1 USR2
if ! grep -qszx 'first=ended' "$handover_dir/over" && ! srun_answers; then
    run_again
fi
exit "$status"
