# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # pbs/host.sh and host/job.sh set what is not set here
# What starts one task on each host, and what stays with the tasks until all have ended. pbs/host.sh sources it.
#
# A way to start is a function start_NAME RANK that starts the task of that rank (or with rank 0 all) in the background
# and adds to `pids`. The task is "${task[@]}" RANK HOST. It must lead to a process that PBS does not signal with this
# script's (setsid) and that ends when the tasks end; `end_NAME RANK` asks it to end before.
#
# Files in the run directory, of this attempt: tasks/N.argv, what to run, and in which directory; tasks/N.env, the
# environment (from $hand/tasks.env, which `prepare` makes), removed at the end, or by the next attempt; tasks/N.RANK,
# the answer of a task: host, process, boot; tasks/N.RANK.said, what its starter printed; logs/N/HOST.task.log, what it
# prints.
readonly POLL=0.3 # s
readonly SETTLE=5 # s in which a shared file system may still show an answer,
readonly SETTLE_ALL=2 # and where no starter is left
readonly LOST=5 # s that a starter has to notice that its host is gone, once the first one's launch says so
readonly LINGER=120 # s that a starter has once the first host has ended: all hosts end together
readonly TO_END=10 # s from asking a starter to end to SIGKILL,
readonly PIECE=16384 # bytes of a line that are kept for its rest: a longer one is shown in pieces
readonly PIECES=256 # of all hosts together in one look
readonly DRAIN=60 # s for what has not been shown when all have ended
readonly LONG=999999 # and where ranks may save meanwhile, whose entrypoint has a bound of its own

start_pbsdsh() { begin "$1" setsid pbsdsh -n "${host_lines[$1]}" -- "${task[@]}" "$1" "${hosts[$1]}"; }

start_pbs_tmrsh() { begin "$1" setsid pbs_tmrsh "${hosts[$1]}" "${task[@]}" "$1" "${hosts[$1]}"; }

# The task ends when its standard input does: with this script, however that ends, but not if this host loses its
# power; then the other hosts' launchers notice. The line goes through it too, for
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
        ${start_words[@]+"${start_words[@]}"} -- "${hosts[$1]}" 'exec /bin/bash -s' <"$pipe"
}

# One mpiexec for all, in the words of its kind, which keep.sh ends with this script.
start_mpiexec() {
    local line fd pipe=$tmp/mpiexec
    (($1 == 0)) || return 0
    line=(mpiexec ${start_words[@]+"${start_words[@]}"} "${task[@]}" - "${hosts[@]}")
    if [[ -n $show_only ]]; then show "${line[@]}"; return; fi
    mkdir -- "$tmp/kept" && mkfifo -m 600 "$pipe"
    exec {fd}<>"$pipe"
    held[0]=$fd
    begin 0 setsid /bin/bash "$APPTRAIN_HOME/pbs/keep.sh" "$tmp/kept" "${line[@]}" 8<"$pipe"
}

end_pbsdsh() { end_process TERM "${pids[$1]}"; } # it passes that on to its task
end_pbs_tmrsh() { kill -KILL "${pids[$1]}"; } # nothing reaches its task; the first node's does not wait for it
end_mpiexec() { end_process TERM "${pids[$1]}"; }
end_ssh() {
    local fd=${held[$1]:-}
    if [[ -n ${pids[$1]:-} ]]; then kill -CONT "${pids[$1]}" 2>/dev/null || true; fi
    if [[ -n $fd ]]; then exec {fd}>&-; fi
    unset "held[$1]"
}

# Starts a task's starter, without the pipes of the others.
begin() {
    local rank=$1
    shift
    if [[ -n $show_only ]]; then show "$@"; return; fi
    (
        for fd in ${held[@]+"${held[@]}"}; do exec {fd}>&-; done
        exec "$@"
    ) <&0 >"$run_dir/tasks/$attempt.$rank.said" 2>&1 & # <&0: or bash would give it /dev/null
    pids[rank]=$!
}

# --- before ---------------------------------------------------------------------------------------------------

# Runs CMD on each host, or shows what would; a plan needs no other host than this.
on_each_host() {
    local what=$1 nnodes=${#hosts[@]} rank tmp=
    local -a pids=() held=() task=()
    shift
    if [[ $what == plan ]]; then
        printf '%s\n' ${plan_words[@]+"${plan_words[@]}"} # the image has made them: no host is asked
        return
    fi
    if ! type -P "$starter" >/dev/null; then
        said="--start $starter: there is no $starter in PATH ($PATH): load its module, or choose another"
        if [[ -z $show_only ]]; then tell_outcome 0 "$said" "$REFUSED"; fi
        refuse "$said"
    fi
    task=(/bin/bash "$APPTRAIN_HOME/pbs/task.sh" "$run_dir" "$attempt" "$starter")
    if [[ -z $show_only ]]; then
        trap : TERM INT HUP USR1 USR2 # what runs ends by itself, or through `interrupt`
        tmp=$hand/$attempt
        mkdir -- "$tmp"
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
        rm -f -- "$run_dir"/tasks/*.env{,.new} # of a script that was killed with all that it had started
        printf '%s\0' "$PWD" "$@" >"$file.argv"
        if [[ -n ${PBS_NODEFILE:-} ]]; then cat -- "$PBS_NODEFILE" >"$file.nodefile"; fi
        printf '%s\0' "APPTRAIN_ATTEMPT=$attempt" ${PBS_NODEFILE:+"APPTRAIN_NODEFILE=$file.nodefile"} |
            cat -- "$hand/tasks.env" - >"$file.env.new"
        mv -- "$file.env.new" "$file.env"
    )
}

# --- while they run -------------------------------------------------------------------------------------------

# Shows what the tasks print, in whole lines, and looks after them, until no starter is left. PBS warns nobody of the
# end of the walltime: this clock does, by the time that `prepare` has set.
stay() {
    local alive=yes rank since seconds now rang=$warned clock ended='' linger=$LINGER patience=$LONG
    local more='' unfinished=''
    local -a files=() fds=() rests=() answered=() gone=() lost=() ending=()
    for ((rank = 0; rank < nnodes; rank++)); do
        files[rank]=$run_dir/logs/$attempt/${hosts[rank]//[^A-Za-z0-9._-]/_}.task.log
    done
    mkfifo -m 600 "$tmp/clock"
    exec {clock}<>"$tmp/clock"
    if ((nnodes > 100)); then ulimit -Sn "$(ulimit -Hn)" || true; fi
    read_clock
    since=$seconds
    while [[ -n $alive ]]; do
        if [[ -z $more ]]; then rest; fi
        read_clock
        alive=
        for rank in "${!pids[@]}"; do
            if [[ -n ${gone[rank]:-} ]]; then continue; fi
            if kill -0 "${pids[rank]}" 2>/dev/null; then alive=yes; else gone[rank]=$seconds; fi
        done
        show_lines
        hear_answers
        read_job_time
        if [[ -n $stop_at && -z $rang ]] && ((now >= stop_at)); then rang=yes; kill -USR2 $$ || true; fi
        if [[ -e $run_dir/tasks/$attempt.end ]]; then
            rm -f -- "$run_dir/tasks/$attempt.end"
            for rank in "${!pids[@]}"; do ask_to_end "$rank" "$patience"; done
            patience=0
        fi
        end_waiting
        if ! kill -0 $$ 2>/dev/null; then # the job script was killed: nobody would end the tasks
            for rank in "${!pids[@]}"; do ask_to_end "$rank"; done
            rm -rf -- "$hand" "$run_dir/tasks/$attempt.env"
            exit 1
        fi
    done
    read_clock
    since=$seconds
    while ((${#answered[@]} < nnodes && seconds - since <= SETTLE)); do
        hear_answers
        if ((${#answered[@]} < nnodes)); then rest; fi
        read_clock
    done
    show_rest
    rm -f -- "$run_dir/tasks/$attempt.env"
}

# Without a process, which PBS would signal, and of whose end bash would tell.
rest() { read -r -t "$POLL" -u "$clock" || true; }

# Ends starters that would wait for ever: pbsdsh does so for a host that is lost, of which PBS says nothing for minutes.
end_waiting() {
    local rank entry
    for rank in "${!ending[@]}"; do
        [[ -n ${gone[rank]:-} ]] || ((seconds < ending[rank])) || kill -KILL "${pids[rank]}" 2>/dev/null || true
    done
    for rank in "${!gone[@]}"; do # for the others, which may wait for it
        [[ -n $goes_on ]] || ((seconds - gone[rank] < SETTLE)) ||
            tell_outcome "$rank" "its task ended and left no outcome"
    done
    if [[ -z $ended && -e $hand/over ]]; then
        ended=$seconds
        while IFS= read -r -d '' entry; do
            if [[ $entry =~ ^lost=(0|[1-9][0-9]{0,5})$ ]]; then lost[BASH_REMATCH[1]]=$LOST; fi
            if [[ $entry == asked=yes ]]; then linger=$LONG; fi # ranks have as long as --term-grace says
        done <"$hand/over"
    elif [[ -z $ended && -z $goes_on && -n ${gone[0]:-} ]]; then
        ended=${gone[0]}
    fi
    [[ -n $ended ]] || return 0
    for rank in "${!pids[@]}"; do
        if ((seconds - ended >= ${lost[rank]:-linger})); then ask_to_end "$rank"; fi
    done
}

# Asks the starter of this rank to end, which is killed after so many seconds.
ask_to_end() {
    local until=$((seconds + ${2:-$TO_END}))
    if [[ -z ${pids[$1]:-} || -n ${gone[$1]:-} ]]; then return; fi
    if [[ -z ${ending[$1]:-} ]]; then "end_$starter" "$1" 2>/dev/null || true; fi
    if ((until < ${ending[$1]:-until + 1})); then ending[$1]=$until; fi
}

# Shows what the tasks have printed since the last look, but of a flood only a part: the clock of the walltime and the
# ends of tasks are looked at in between. Sets `more` if there is more.
show_lines() {
    local rank fd piece left
    more=''
    for rank in "${!files[@]}"; do
        { : <"${files[rank]}"; } 2>/dev/null || continue # NFS looks anew when a file is opened
        if [[ -z ${fds[rank]:-} ]]; then
            exec {fd}<"${files[rank]}"
            fds[rank]=$fd
        fi
        left=$((PIECES / nnodes + 1))
        while IFS= read -r -N "$PIECE" -u "${fds[rank]}" piece || [[ -n $piece ]]; do
            show_piece "$rank" "$piece"
            if ((${#piece} < PIECE)); then break; fi # the end of the file
            if ((--left == 0)); then
                more=yes
                break
            fi
        done
    done
}

# show_piece RANK TEXT: whole lines. One that is not complete waits for its rest, unless it is long: then it is shown as
# it comes, and `unfinished` is its rank.
show_piece() {
    local text=${rests[$1]:-}$2 shown newline=$'\n'
    if [[ $text == *"$newline"* ]]; then
        shown=${text%"$newline"*}$newline
        rests[$1]=${text:${#shown}}
    elif ((${#text} < PIECE)); then
        rests[$1]=$text
        return
    else
        shown=$text
        rests[$1]=''
    fi
    if [[ -n $unfinished && $unfinished != "$1" ]]; then printf '\n'; fi
    printf '%s' "$shown"
    unfinished=''
    if [[ $shown != *"$newline" ]]; then unfinished=$1; fi
}

# What the tasks that have ended printed last. One that was not to be ended may print for ever.
show_rest() {
    local rank until
    read_clock
    until=$((seconds + DRAIN))
    show_lines
    while [[ -n $more ]] && ((seconds < until)); do
        show_lines
        read_clock
    done
    for rank in "${!rests[@]}"; do
        if [[ -n ${rests[rank]} ]]; then show_piece "$rank" $'\n'; fi
    done
    if [[ -n $unfinished ]]; then printf '\n'; fi
    if [[ -n $more ]]; then say "not all that the tasks printed is shown: it is in $run_dir/logs/$attempt"; fi
}

# Reads who has answered, and gives an outcome to those that will not.
hear_answers() {
    local path rank other host why file said settle=$SETTLE
    ((${#answered[@]} < nnodes)) || return 0
    if ((${#pids[@]} == ${#gone[@]})); then settle=$SETTLE_ALL; fi
    for path in "$run_dir/tasks/$attempt".*; do
        rank=${path##*.}
        [[ $rank =~ ^(0|[1-9][0-9]{0,5})$ && -z ${answered[rank]:-} ]] || continue
        ((rank < nnodes)) || continue
        read -r host _ other <"$path" || continue
        host+=" $other"
        for other in "${!answered[@]}"; do
            if [[ ${answered[other]} == "$host" && $starter != pbs* ]]; then # PBS counts its hosts itself
                tell_outcome "$rank" "tasks of ${hosts[other]} and ${hosts[rank]} both run on ${host%% *}: name it once"
            fi
        done
        answered[rank]=$host
    done
    for ((rank = 0; rank < nnodes; rank++)); do
        why='' file=$run_dir/tasks/$attempt.$rank.said
        if [[ -n ${answered[rank]:-} ]]; then
            continue
        elif [[ -n ${gone[rank]:-} ]] && ((seconds - gone[rank] >= settle)); then
            why="its task ended before it said that it had started"
        elif ((seconds - since >= ANSWER)); then
            why="no task has answered there for $ANSWER s"
        fi
        [[ -n $why ]] || continue
        answered[rank]=none
        [[ -e $file ]] || file=$run_dir/tasks/$attempt.0.said
        said=$(tail -c 400 -- "$file" 2>/dev/null | tr '\n' ' ')
        tell_outcome "$rank" "$why: $starter said: ${said:-nothing}"
        ask_to_end "$rank"
    done
}

# For a task that cannot: its rank, the error, the status.
tell_outcome() {
    write_outcome "$run_dir/outcome/$attempt.$1" "${3:-1}" "${hosts[$1]}" "$2" || say "${hosts[$1]}: $2 (not written)"
}
