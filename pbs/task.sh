#!/usr/bin/env bash
# The task of one host: takes over what the job script left in the run directory, and runs what is
# to run there.
#
# Usage: /bin/bash task.sh RUN_DIR ATTEMPT STARTER RANK HOST     as pbs/starters.sh starts it
#        /bin/bash task.sh RUN_DIR ATTEMPT STARTER - HOST...      if one command starts all tasks
# Exit:  the status of what it ran (under mpiexec 0: another would have it end the others) ·
#        64 with an outcome that says why
#
# PBS signals every process of the session that it started, the image's FUSE process with the rest,
# at the very moment at which the program should save; and it forgets a process that left the
# session. So the work has a session of its own, this process passes a signal on to it once, and
# keep.sh ends it when this process is gone, however that was.
set -uo pipefail
# shellcheck source=host/common.sh
source "$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")/host/common.sh"
run_dir=$1
attempt=$2
starter=$3
rank=$4
host=$5
place=''
command=()
readonly TRIES=40       # times TRY_PAUSE: a shared file system may take as long to show files
readonly TRY_PAUSE=0.25 # s

say() {
    print_message "$(uname -n): $*"
}

# refuse ID TEXT...: the id names the cause, and is not printed.
refuse() {
    shift
    say "$*"
    [[ ! $rank =~ ^[0-9]+$ || ! -d $run_dir/outcome ]] ||
        write_outcome "$run_dir/outcome/$attempt.$rank" "$REFUSED" "$host" "$*"
    exit "$REFUSED"
}

# find_rank HOST...: sets `rank`, `host` and `place` if one command started all tasks. Whether that
# is this host, the entrypoint checks.
find_rank() {
    local hosts=("$@")
    rank=${OMPI_COMM_WORLD_RANK:-${PALS_RANKID:-${PMIX_RANK:-${PMI_RANK:-}}}}
    [[ $rank =~ ^[0-9]{1,6}$ && -n ${hosts[rank]:-} ]] ||
        refuse starter-no-rank "$starter tells no rank of one of ${hosts[*]}"
    host=${hosts[rank]}
    place=$rank
}

# Refuses if this is not the host that was meant: PBS counts hosts in the order of the node file.
check_host() {
    if [[ $starter == pbs* ]]; then
        [[ ${PBS_NODENUM:-} == "$rank" ]] ||
            refuse task-on-other-host "the task for $host, host $rank of this job, runs as host" \
                "${PBS_NODENUM:-?} on $(uname -n):" \
                "the node file has changed since the job began"
    else
        unset PBS_TASKNUM
        export PBS_NODENUM=$rank
    fi
}

# Becomes a command with the job script's variables, in a subshell: whatever they are called, they
# change nothing here. What PBS set is this host's own, but ours the job script may have changed
# since qsub -v.
become() {
    local _entry _name _rank=$rank _host=$host _place=$place
    for _name in "${!APPTRAIN_@}"; do
        unset "$_name"
    done
    while IFS= read -r -d '' _entry; do
        _name=${_entry%%=*}
        case $_name in
            PBS_* | NCPUS | OMP_NUM_THREADS | HOME)
                if [[ -n ${!_name+set} ]]; then
                    continue
                fi
                ;;
        esac
        export "${_entry?}"
    done <&5
    if [[ -n $_place ]]; then
        export APPTRAIN_PLACE=$_place
    fi
    if [[ -n ${PBS_JOBID:-} ]]; then
        export APPTRAIN_HOSTNAME=$_host
    else
        unset PBS_NODENUM
        export APPTRAIN_NODE_RANK=$_rank
    fi
    exec "$@" 5<&-
}

# Says to the job script that this task has started.
answer() {
    local file=$run_dir/tasks/$attempt.$rank partial=$run_dir/tasks/.$attempt.$rank boot=none
    { read -r boot </proc/sys/kernel/random/boot_id; } 2>/dev/null
    printf '%s %s %s\n' "$(uname -n)" $$ "$boot" >"$partial" && mv -- "$partial" "$file"
}

# shellcheck disable=SC2329 # traps
pass_on() {
    trap '' TERM HUP INT
    interrupted=yes
    end_process TERM "$child" 2>/dev/null
}

umask 077
for ((try = 0; try < TRIES; try++)); do
    if [[ -r $run_dir/tasks/$attempt.env ]]; then
        break
    fi
    sleep "$TRY_PAUSE"
done
if [[ ! -r $run_dir/tasks/$attempt.env ]] || ! cd -- "$run_dir"; then
    refuse run-dir-not-on-node "the run directory $run_dir is not there on this node:" \
        "give one that all nodes share in APPTRAIN_RUN_DIR"
fi
# Whoever may write to the folder of the run directory could put another in its place. What is read
# here comes from the one that is looked at.
if ! is_closed .; then
    rank='' # no outcome is left there
    refuse run-dir-of-another "the run directory $run_dir is not yours, and open to others:" \
        "give one of your own in APPTRAIN_RUN_DIR"
fi
exec 5<"tasks/$attempt.env" 6<"tasks/$attempt.argv"
if [[ $rank == - ]]; then
    find_rank "${@:5}"
fi
name_log "$run_dir/logs/$attempt" "$host"
exec >>"$log" 2>&1
check_host
while IFS= read -r -d '' word; do
    command+=("$word")
done <&6
exec 6<&-
cd -- "${command[0]}" 2>/dev/null ||
    refuse working-dir-not-on-node \
        "the working directory ${command[0]} is not there on this node:" \
        "submit from one that all nodes share"

trap 'rm -rf -- "${tmp:-}" 2>/dev/null' EXIT # keep.sh, which does so, may end before it could
tmp=$(make_own_dir apptrain) ||
    refuse no-temporary-directory \
        "no temporary directory can be made: set TMPDIR to a directory of this node"
mkfifo -m 600 "$tmp/held"
# shellcheck disable=SC2094 # a pipe, which must be open for both before it is for one
exec 7<>"$tmp/held" 8<"$tmp/held" 9>"$tmp/held" 7>&-
become env "TMPDIR=$tmp" setsid /bin/bash "${BASH_SOURCE[0]%/*}/keep.sh" "$tmp" \
    "${command[@]:1}" 9>&- </dev/null &
child=$!
exec 5<&- 8<&-
trap pass_on TERM HUP INT
answer
listener=
if [[ $starter == ssh ]]; then
    exec 6<&0 # a process in the background loses its standard input
    (
        trap - TERM HUP INT
        # Until the job script is gone.
        while read -r -u 6; do
            :
        done
        kill -TERM $$
    ) 9>&- &
    listener=$!
fi
await_end "$child" 143
trap '' TERM HUP INT
if [[ -n $listener ]]; then
    disown "$listener" # or bash would say that it was killed
    kill -KILL "$listener" 2>/dev/null
fi
if [[ $starter == mpiexec ]]; then
    exit 0
fi
exit "$status"
