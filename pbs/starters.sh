# shellcheck shell=bash
# shellcheck disable=SC2154 # pbs/host.sh and containers/job.sh set what is not set here
# What starts one task on each host, and what stays with the tasks until all have ended.
#
# A way to start is a function start_NAME RANK that starts the task of that rank (or with rank 0 all) in the background
# and adds to `pids`. The task is "${task[@]}" RANK HOST. It must lead to a process that PBS does not signal with this
# script's (setsid) and that ends when the tasks end; `end_NAME RANK` asks it to end before.
#
# Files in the run directory, of this attempt: tasks/N.argv, what to run, and in which directory; tasks/N.env, the
# environment, removed at the end; tasks/N.RANK, the answer of a task: host, process, boot; tasks/N.RANK.said, what its
# starter printed; logs/N/HOST.task.log, what it prints.
readonly POLL=0.3 # s
readonly SETTLE=5 # s in which a shared file system may still show an answer,
readonly SETTLE_ALL=2 # and where no starter is left
readonly LOOK=2 # s between two looks at the outcomes
readonly LOST=5 # s that a starter has to notice that its host is gone, once the other hosts say so
readonly LINGER=120 # s that a starter has once another host has ended: all hosts end together
readonly TO_END=10 # s from asking a starter to end to SIGKILL,
readonly LONG=999999 # and where ranks may save meanwhile, whose entrypoint has a bound of its own

start_pbsdsh() {
    begin "$1" setsid pbsdsh -n "${lines[$1]}" -- "${task[@]}" "$1" "${hosts[$1]}"
}

start_pbs_tmrsh() {
    begin "$1" setsid pbs_tmrsh "${hosts[$1]}" "${task[@]}" "$1" "${hosts[$1]}"
}

# The task ends when its standard input does: with this script, however that ends. The line goes through it too, for
# any login shell would understand what stands on ssh's own command line.
start_ssh() {
    local fd pipe=$tmp/ssh.$1
    if [[ -n $show_only ]]; then
        begin "$1" ssh -o BatchMode=yes -- "${hosts[$1]}" "${task[@]}" "$1" "${hosts[$1]}"
        return
    fi
    mkfifo -m 600 "$pipe"
    exec {fd}<>"$pipe"
    held[$1]=$fd
    printf 'exec %s\n' "$(printf '%q ' "${task[@]}" "$1" "${hosts[$1]}")" >&"$fd"
    begin "$1" setsid ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 \
        ${site_launcher_args[@]+"${site_launcher_args[@]}"} -- "${hosts[$1]}" 'exec /bin/bash -s' <"$pipe"
}

# One mpiexec for all, which keep.sh ends with this script.
start_mpiexec() {
    local all version line fd pipe=$tmp/mpiexec
    (($1 == 0)) || return 0
    all=$(IFS=, && printf '%s' "${hosts[*]}")
    version=$(timeout "$QSTAT" mpiexec --version 2>&1) || version=
    case $version in
        *'Open MPI'* | *OpenRTE* | *PRRTE*) line=(mpiexec -n "$nnodes" --host "$all" --map-by ppr:1:node --bind-to none) ;;
        *HYDRA* | *MPICH* | *'Intel(R) MPI'*) line=(mpiexec -n "$nnodes" -ppn 1 -hosts "$all") ;;
        *PALS* | *pals*) line=(mpiexec -n "$nnodes" --ppn 1 --hosts "$all" --cpu-bind none) ;;
        *) refuse_all "mpiexec says of itself: ${version:-nothing}: Open MPI, MPICH or PALS is needed: load its module, or use another --start" ;;
    esac
    line+=(${site_launcher_args[@]+"${site_launcher_args[@]}"} "${task[@]}" - -)
    if [[ -n $show_only ]]; then
        begin 0 "${line[@]}"
        return
    fi
    mkfifo -m 600 "$pipe"
    exec {fd}<>"$pipe"
    held[0]=$fd
    begin 0 setsid /bin/bash "$APPTRAIN_HOME/pbs/keep.sh" "$tmp" "${line[@]}" 8<"$pipe"
}

end_pbsdsh() { kill -TERM "${pids[$1]}"; } # it passes that on to its task
end_pbs_tmrsh() { kill -KILL "${pids[$1]}"; } # nothing reaches its task; the first node's does not wait for it
end_mpiexec() { kill -TERM "${pids[$1]}"; }
end_ssh() {
    local fd=${held[$1]:-}
    if [[ -n $fd ]]; then exec {fd}>&-; fi
    unset "held[$1]"
}

# Starts a task's starter, without the pipes of the others.
begin() {
    local rank=$1
    shift
    if [[ -n $show_only ]]; then
        show "$@"
        return
    fi
    (
        for fd in ${held[@]+"${held[@]}"}; do exec {fd}>&-; done
        exec "$@"
    ) <&0 >"$run_dir/tasks/$attempt.$rank.said" 2>&1 & # <&0: or bash would give it /dev/null
    pids[rank]=$!
}

# --- before ---------------------------------------------------------------------------------------------------

# Runs CMD on each host, or shows what would; a plan needs no other host than this.
on_each_host() {
    local what=$1 starter=${APPTRAIN_START:-${site_start:-pbsdsh}} rank again tmp=
    local -a pids=() held=() task=()
    shift
    show_only=${show_only:-}
    use_site_gpus
    if [[ $what == plan ]]; then
        plan_each "$@"
        return
    fi
    type -P "$starter" >/dev/null ||
        refuse_all "--start $starter: there is no $starter in PATH ($PATH): load its module, or choose another"
    task=(/bin/bash "$APPTRAIN_HOME/pbs/task.sh" "$run_dir" "${attempt:-0}" "$starter")
    if [[ -z $show_only ]]; then
        again=$(attribute run_count)
        if [[ $again =~ ^[0-9]{1,9}$ ]] && ((again > 1)); then tell "PBS runs this job again (run_count is $again)"; fi
        trap : TERM INT HUP USR2 # what runs ends by itself, or through `interrupt`
        tmp=$(mktemp -d -- "${TMPDIR:-/tmp}/apptrain.XXXXXX")
        # shellcheck disable=SC2064 # the name as it is now
        trap "rm -rf -- $(printf %q "$tmp")" EXIT
        write_task_files "$@"
    fi
    for ((rank = 0; rank < nnodes; rank++)); do "start_$starter" "$rank"; done
    if [[ -z $show_only ]]; then stay; fi
}

write_task_files() {
    local file=$run_dir/tasks/$attempt
    (
        umask 077
        mkdir -p -- "$run_dir/tasks"
        printf '%s\0' "$PWD" "$@" >"$file.argv"
        printf '%s\n' "${hosts[@]}" >"$file.hosts"
        if [[ -n ${PBS_NODEFILE:-} ]]; then
            cat -- "$PBS_NODEFILE" >"$file.nodefile"
            export APPTRAIN_NODEFILE=$file.nodefile
        fi
        write_environment >"$file.env"
    )
}

# What a task has of its own, or must not have.
write_environment() {
    local entry name
    while IFS= read -r -d '' entry; do
        name=${entry%%=*}
        case $name in
            PBS_JOBCOOKIE | PBS_TASKNUM | PBS_NODENUM | PBS_NODEFILE | PBS_MOMPORT | SLURM_JWT) ;;
            TMPDIR | HOSTNAME | PWD | OLDPWD | SHLVL | _ | CUDA_VISIBLE_DEVICES | CUDA_DEVICE_ORDER) ;;
            *[!A-Za-z0-9_]* | [0-9]*) ;;
            *) printf '%s\0' "$entry" ;;
        esac
    done < <(env -0)
}

# The plans of all nodes, each line behind the node's rank.
plan_each() {
    local rank status=0 worst=0
    for ((rank = 0; rank < nnodes; rank++)); do
        (
            export PBS_NODENUM=$rank APPTRAIN_HOSTNAME=${hosts[rank]}
            if [[ -z ${PBS_JOBID:-} ]]; then
                unset PBS_NODENUM
                export APPTRAIN_NODE_RANK=$rank
            fi
            unset PBS_TASKNUM
            "$@" </dev/null 2>&1 | sed "s/^/$rank: /"
            exit "${PIPESTATUS[0]}"
        ) || status=$?
        if ((status > worst)); then worst=$status; fi
    done
    return "$worst"
}

# --- while they run -------------------------------------------------------------------------------------------

# Shows what the tasks print, in whole lines, and looks after them, until no starter is left.
stay() {
    local alive=yes rank since=$SECONDS rang=$warned clock look=0 first='' patience=$LONG
    local -a files=() fds=() rests=() answered=() gone=() over=() lost=() ending=()
    for ((rank = 0; rank < nnodes; rank++)); do
        files[rank]=$run_dir/logs/$attempt/${hosts[rank]//[^A-Za-z0-9._-]/_}.task.log
    done
    mkfifo -m 600 "$tmp/clock"
    exec {clock}<>"$tmp/clock"
    if ((nnodes > 100)); then ulimit -Sn "$(ulimit -Hn)" || true; fi
    while [[ -n $alive ]]; do
        rest
        alive=
        for rank in "${!pids[@]}"; do
            if kill -0 "${pids[rank]}" 2>/dev/null; then alive=yes; elif [[ -z ${gone[rank]:-} ]]; then gone[rank]=$SECONDS; fi
        done
        show_lines
        hear_answers
        if [[ -n $ends && -z $rang ]] && ((SECONDS >= ends)); then
            rang=yes
            kill -USR2 $$
        fi
        if [[ -n $alive && $on_failure == restart ]] && ((${#gone[@]})) && only_lost_are_left; then
            kill -KILL "${pids[@]}" 2>/dev/null || true # of the others none is left
            alive=
        fi
        if [[ -e $run_dir/tasks/$attempt.end ]]; then
            rm -f -- "$run_dir/tasks/$attempt.end"
            for rank in "${!pids[@]}"; do ask_to_end "$rank" "$patience"; done
            patience=0
        fi
        end_waiting
        if ! kill -0 $$ 2>/dev/null; then # the job script was killed: nobody would end the tasks
            for rank in "${!pids[@]}"; do ask_to_end "$rank"; done
            exit 1
        fi
    done
    since=$SECONDS
    while ((${#answered[@]} < nnodes && SECONDS - since <= SETTLE)); do
        hear_answers
        if ((${#answered[@]} < nnodes)); then rest; fi
    done
    show_lines
    for rank in "${!rests[@]}"; do
        if [[ -n ${rests[rank]} ]]; then printf '%s\n' "${rests[rank]}"; fi
    done
    rm -f -- "$run_dir/tasks/$attempt.env"
}

# Whether only starters of hosts are left that the others went on without: of a lost one PBS says nothing for minutes.
only_lost_are_left() (
    ((${#pids[@]} == nnodes)) || exit 1
    find_last
    [[ -s $run_dir/outcome/$attempt.nodes ]] || exit 1
    for rank in "${crew[@]}"; do [[ -n ${gone[rank]:-} ]] || exit 1; done
)

# Without a process, which PBS would signal, and of whose end bash would tell.
rest() { read -r -t "$POLL" -u "$clock" || true; }

# Ends starters that would wait for ever: pbsdsh does so for a host that is lost.
end_waiting() {
    local path rank other
    for rank in "${!ending[@]}"; do
        if [[ -z ${gone[rank]:-} ]] && ((SECONDS >= ending[rank])); then kill -KILL "${pids[rank]}" 2>/dev/null || true; fi
    done
    ((SECONDS >= look)) || return 0
    look=$((SECONDS + LOOK))
    for path in "$run_dir/outcome/$attempt".*; do
        rank=${path##*.}
        if ! is_number "$rank" || [[ -n ${over[rank]:-} ]] || ! read_outcome "$path"; then continue; fi
        over[rank]=yes
        # After a signal to us the ranks have as long as --term-grace says, which this half does not know.
        if [[ -n $o_rank || $o_status != @(129|130|143) ]]; then first=${first:-$SECONDS}; fi
        # Only the first knows who is lost: another that is cut off from it takes that one for lost.
        for other in "${!hosts[@]}"; do
            if [[ $rank == 0 && $o_error == 'lost: '* && ${hosts[other]} == "$o_node" ]]; then lost[other]=$SECONDS; fi
        done
    done
    for rank in "${!gone[@]}"; do # for the others, which may wait for it
        if [[ -z ${over[rank]:-} && $on_failure != restart ]] && ((SECONDS - gone[rank] >= SETTLE)); then write_outcome "$rank" "its task ended and left no outcome"; fi
    done
    for rank in "${!pids[@]}"; do
        if [[ -n ${lost[rank]:-} ]] && ((SECONDS - lost[rank] >= LOST)); then
            ask_to_end "$rank"
        elif [[ -n $first && $on_failure != restart ]] && ((SECONDS - first >= LINGER)); then # where others go on
            ask_to_end "$rank"
        fi
    done
}

# Asks the starter of this rank to end, which is killed after so many seconds.
ask_to_end() {
    local until=$((SECONDS + ${2:-$TO_END}))
    if [[ -z ${pids[$1]:-} || -n ${gone[$1]:-} ]]; then return; fi
    if [[ -z ${ending[$1]:-} ]]; then "end_$starter" "$1" 2>/dev/null || true; fi
    if ((until < ${ending[$1]:-until + 1})); then ending[$1]=$until; fi
}

# A line that is not complete waits for its rest.
show_lines() {
    local rank last fd
    local -a got
    for rank in "${!files[@]}"; do
        { : <"${files[rank]}"; } 2>/dev/null || continue # NFS looks anew when a file is opened
        if [[ -z ${fds[rank]:-} ]]; then
            exec {fd}<"${files[rank]}"
            fds[rank]=$fd
        fi
        mapfile -u "${fds[rank]}" got
        ((${#got[@]})) || continue
        got[0]=${rests[rank]:-}${got[0]} rests[rank]=''
        last=$((${#got[@]} - 1))
        if [[ ${got[last]} != *$'\n' ]]; then
            rests[rank]=${got[last]}
            unset "got[$last]"
        fi
        if ((${#got[@]})); then printf '%s' "${got[@]}"; fi
    done
}

# Reads who has answered, and gives an outcome to those that will not.
hear_answers() {
    local path rank other host
    ((${#answered[@]} < nnodes)) || return 0
    for path in "$run_dir/tasks/$attempt".*; do
        rank=${path##*.}
        is_number "$rank" && [[ -z ${answered[rank]:-} ]] || continue
        read -r host _ other <"$path" || continue
        host+=" $other"
        for other in "${!answered[@]}"; do
            if [[ ${answered[other]} == "$host" && $starter != pbs* ]]; then # PBS counts its hosts itself
                write_outcome "$rank" "the tasks of ${hosts[other]} and ${hosts[rank]} both run on ${host%% *}: give each host once"
            fi
        done
        answered[rank]=$host
    done
    for ((rank = 0; rank < nnodes; rank++)); do
        [[ -z ${answered[rank]:-} ]] || continue
        if [[ -n ${gone[rank]:-} ]] && ((SECONDS - gone[rank] >= SETTLE || ${#pids[@]} == ${#gone[@]} && SECONDS - gone[rank] >= SETTLE_ALL)); then
            answered[rank]=none
            write_outcome "$rank" "its task ended before it said that it had started: $starter said: $(starter_said "$rank")"
        elif ((SECONDS - since >= ANSWER)); then
            answered[rank]=none
            write_outcome "$rank" "no task has answered there for $ANSWER s: $starter said: $(starter_said "$rank")"
            ask_to_end "$rank"
        fi
    done
}

starter_said() {
    local text file=$run_dir/tasks/$attempt.$1.said
    [[ -e $file ]] || file=$run_dir/tasks/$attempt.0.said
    text=$(tail -c 400 -- "$file" 2>/dev/null | tr '\n' ' ')
    printf '%s' "${text:-nothing}"
}

# For a task that cannot (entrypoint/outcome.py reads it): its rank, the error, the status.
write_outcome() {
    local file=$run_dir/outcome/$attempt.$1
    [[ ! -e $file ]] || return 0
    printf '%s\n' "status=${3:-1}" rank= "node=${hosts[$1]}" signal=0 "time=$(date +%s.%6N)" "error=${2//[$'\n\r\t']/ }" >"$file.new"
    mv -- "$file.new" "$file"
}

refuse_all() {
    if [[ -z $show_only ]]; then write_outcome 0 "$*" "$BAD_INPUT"; fi
    refuse "$*"
}
