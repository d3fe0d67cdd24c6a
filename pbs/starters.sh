# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # pbs/host.sh and host/job.sh set what is not set here
# What starts one task on each host, and what stays with the tasks until all have ended. pbs/host.sh
# sources it. Begin at `on_each_host`; `watch_tasks` has a step for each thing that is looked after.
#
# A way to start is a function start_NAME RANK that starts the task of that rank (or with rank 0
# all) in the background and adds to `pids`. The task is "${task[@]}" RANK HOST. It must lead to a
# process that PBS does not signal with this script's (setsid) and that ends when the tasks end;
# `end_NAME RANK` asks it to end before.
#
# Files in the run directory, of this attempt:
#   tasks/N.argv         what to run, and in which directory
#   tasks/N.env          the environment (from $handover_dir/tasks.env, which `prepare` makes),
#                        removed at the end, or by the next attempt
#   tasks/N.RANK         the answer of a task: host, process, boot
#   tasks/N.RANK.said    what its starter printed
#   tasks/N.end          made by `interrupt`: all tasks are to end
#   logs/N/HOST.task.log what the task prints
#
# Reads: hosts, host_lines, start_words, plan_words, starter, goes_on, stop_at, warned, show_only,
#        run_dir, attempt, handover_dir     of host/job.sh
#        ANSWER, and read_job_time's `now`  of pbs/host.sh
# Sets:  SETTLE        s
#        pids, held, gone_at and kill_at, which a trap on EXIT needs when bash has forgotten the
#        functions' own. Those below share what `on_each_host` and `watch_tasks` declare; each of
#        these two lists it.
readonly POLL=0.3     # s
readonly SETTLE=5     # s in which a shared file system may still show an answer,
readonly SETTLE_ALL=2 # and if no starter is left
readonly LOST=5       # s that a starter has once the first one's launch says that its host is gone
readonly LINGER=120   # s that a starter has once the first host has ended: all hosts end together
readonly TO_END=10    # s from asking a starter to end to SIGKILL,
readonly LONG=999999  # and if ranks may save meanwhile, whose entrypoint has a bound of its own
readonly PIECE=16384  # bytes of a line that are kept for its rest: a longer one is shown in pieces
readonly PIECES=256   # of all hosts together in one look
readonly DRAIN=60     # s for what has not been shown when all have ended

start_pbsdsh() {
    run_starter "$1" setsid pbsdsh -n "${host_lines[$1]}" -- "${task[@]}" "$1" "${hosts[$1]}"
}

start_pbs_tmrsh() {
    run_starter "$1" setsid pbs_tmrsh "${hosts[$1]}" "${task[@]}" "$1" "${hosts[$1]}"
}

# The task ends when its standard input does: with this script, however that ends, but not if this
# host loses its power; then the other hosts' launchers notice. The line goes through it too, for
# any login shell would understand what stands on ssh's own command line.
start_ssh() {
    local fd pipe=$tmp/ssh.$1
    if [[ -n $show_only ]]; then
        run_starter "$1" ssh -o BatchMode=yes -- "${hosts[$1]}" "${task[@]}" "$1" "${hosts[$1]}"
        return
    fi
    mkfifo -m 600 "$pipe"
    exec {fd}<>"$pipe"
    held[$1]=$fd
    printf 'exec %s\n' "$(printf '%q ' "${task[@]}" "$1" "${hosts[$1]}")" >&"$fd"
    run_starter "$1" setsid ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 \
        ${start_words[@]+"${start_words[@]}"} -- "${hosts[$1]}" 'exec /bin/bash -s' <"$pipe"
}

# One mpiexec for all, in the words of its kind, which keep.sh ends with this script.
start_mpiexec() {
    local line fd pipe=$tmp/mpiexec
    (($1 == 0)) || return 0
    line=(mpiexec ${start_words[@]+"${start_words[@]}"} "${task[@]}" - "${hosts[@]}")
    if [[ -n $show_only ]]; then
        print_command "${line[@]}"
        return
    fi
    mkdir -- "$tmp/kept" && mkfifo -m 600 "$pipe"
    exec {fd}<>"$pipe"
    held[0]=$fd
    run_starter 0 setsid /bin/bash "$APPTRAIN_HOME/pbs/keep.sh" "$tmp/kept" "${line[@]}" 8<"$pipe"
}

# It passes that on to its task.
end_pbsdsh() {
    end_process TERM "${pids[$1]}"
}

# Nothing reaches its task; the first node's does not wait for it.
end_pbs_tmrsh() {
    kill -KILL "${pids[$1]}"
}

end_mpiexec() {
    end_process TERM "${pids[$1]}"
}

end_ssh() {
    local fd=${held[$1]:-}
    if [[ -n ${pids[$1]:-} ]]; then
        kill -CONT "${pids[$1]}" 2>/dev/null || true
    fi
    if [[ -n $fd ]]; then
        exec {fd}>&-
    fi
    unset "held[$1]"
}

# run_starter RANK CMD...: starts a task's starter, without the pipes of the others; adds to `pids`.
run_starter() {
    local rank=$1
    shift
    if [[ -n $show_only ]]; then
        print_command "$@"
        return
    fi
    # <&0: or bash would give it /dev/null.
    (
        for fd in ${held[@]+"${held[@]}"}; do
            exec {fd}>&-
        done
        exec "$@"
    ) <&0 >"$run_dir/tasks/$attempt.$rank.said" 2>&1 &
    pids[rank]=$!
}

# --- before ---------------------------------------------------------------------------------------

# on_each_host WHAT CMD...: runs CMD on each host, or shows what would; a plan needs no other host
# than this. What the ways to start share:
#   task     the command of a task, without its last two words
#   tmp      a directory of this attempt on this host
#   pids     of the starters, by rank
#   held     open files of the pipes that end a task, by rank
#   gone_at  when its starter had ended
#   kill_at  when a starter that was asked to end is killed
#   unwritten  of a rank whose outcome could not be written: that was said
on_each_host() {
    local what=$1 nnodes=${#hosts[@]} tmp=
    local -a task=()
    pids=()
    held=()
    gone_at=()
    kill_at=()
    unwritten=()
    shift
    if [[ $what == plan ]]; then
        # The image has made them: no host is asked.
        printf '%s\n' ${plan_words[@]+"${plan_words[@]}"}
        return
    fi
    check_starter
    task=(/bin/bash "$APPTRAIN_HOME/pbs/task.sh" "$run_dir" "$attempt" "$starter")
    if [[ -n $show_only ]]; then
        start_tasks
        return
    fi
    trap : TERM INT HUP USR1 USR2 # what runs ends by itself, or through `interrupt`
    trap : PIPE                   # what shows the lines may be killed with the job script
    trap leave_tasks EXIT
    tmp=$handover_dir/$attempt
    mkdir -- "$tmp"
    write_task_files "$@"
    start_tasks
    watch_tasks
    exit # before 5.1 bash runs no EXIT trap where what it has started with & returns
}

check_starter() {
    local error="--start $starter: there is no $starter in PATH ($PATH):"
    error+=" load its module, or choose another"
    if type -P "$starter" >/dev/null; then
        return
    fi
    if [[ -z $show_only ]]; then
        tell_outcome 0 "$error" "$REFUSED"
    fi
    refuse starter-missing "$error"
}

# A pipe and a log are open for each host.
allow_open_files() {
    local need=$((4 * nnodes + 256)) soft
    soft=$(ulimit -Sn)
    [[ $soft == unlimited ]] || ((soft >= need)) ||
        ulimit -Sn "$need" 2>/dev/null || ulimit -Sn "$(ulimit -Hn)" || true
}

start_tasks() {
    local rank
    allow_open_files
    for ((rank = 0; rank < nnodes; rank++)); do
        "start_$starter" "$rank"
    done
}

# write_task_files CMD...
write_task_files() {
    local file=$run_dir/tasks/$attempt
    (
        umask 077
        mkdir -p -- "$run_dir/tasks"
        # Of a script that was killed with all that it had started.
        rm -f -- "$run_dir"/tasks/*.env{,.new}
        printf '%s\0' "$PWD" "$@" >"$file.argv"
        if [[ -n ${PBS_NODEFILE:-} ]]; then
            cat -- "$PBS_NODEFILE" >"$file.nodefile"
        fi
        printf '%s\0' "APPTRAIN_ATTEMPT=$attempt" \
            ${PBS_NODEFILE:+"APPTRAIN_NODEFILE=$file.nodefile"} |
            cat -- "$handover_dir/tasks.env" - >"$file.env.new"
        mv -- "$file.env.new" "$file.env"
    )
}

# --- while they run -------------------------------------------------------------------------------

# Shows what the tasks print, in whole lines, and looks after them, until no starter is left. Its
# steps share, by rank:
#   files     the logs, and `fds`, the open ones
#   rests     the begin of a line whose rest is waited for
#   answered  host and boot of a task that has answered; "none" if it will not
#   grace     s that a starter on a lost host has
# and, of all:
#   alive          a starter is left
#   more           there is more to show
#   unfinished     the rank of a line that is shown up to its middle
#   waiting_since  since when answers are waited for
#   has_warned     the end of the walltime has been told
#   patience       s that starters get if all tasks are to end
#   ended_at       when the first host ended
#   linger         s that the others have from then on
watch_tasks() {
    local alive=yes more='' unfinished='' waiting_since has_warned=$warned patience=$LONG
    local ended_at='' linger=$LINGER clock seconds now
    local -a files=() fds=() rests=() answered=() grace=()
    name_logs
    mkfifo -m 600 "$tmp/clock"
    exec {clock}<>"$tmp/clock"
    read_clock
    waiting_since=$seconds
    while [[ -n $alive ]]; do
        if [[ -z $more ]]; then
            pause
        fi
        read_clock
        find_ended_starters
        show_lines
        read_answers
        warn_of_walltime
        end_if_interrupted
        end_waiting
        kill -0 $$ 2>/dev/null || exit 1 # the job script was killed
    done
    await_last_answers
    show_rest
}

# Sets `files`.
name_logs() {
    local rank log
    for ((rank = 0; rank < nnodes; rank++)); do
        name_log "$run_dir/logs/$attempt" "${hosts[rank]}"
        files[rank]=$log
    done
}

# Without a process, which PBS would signal, and of whose end bash would tell.
pause() {
    read -r -t "$POLL" -u "$clock" || true
}

# Sets `alive` and `gone_at`.
find_ended_starters() {
    local rank
    alive=
    for rank in "${!pids[@]}"; do
        if [[ -n ${gone_at[rank]:-} ]]; then
            continue
        fi
        if kill -0 "${pids[rank]}" 2>/dev/null; then
            alive=yes
        else
            gone_at[rank]=$seconds
        fi
    done
}

# PBS warns nobody of the end of the walltime: this clock does, by the time that `prepare` has set.
warn_of_walltime() {
    read_job_time
    if [[ -n $stop_at && -z $has_warned ]] && ((now >= stop_at)); then
        has_warned=yes
        kill -USR2 $$ || true
    fi
}

# The second time that `interrupt` asks, starters are killed.
end_if_interrupted() {
    if [[ -e $run_dir/tasks/$attempt.end ]]; then
        rm -f -- "$run_dir/tasks/$attempt.end"
        ask_all_to_end "$patience"
        patience=0
    fi
}

# A trap: however the watching ends. If the job script was killed, nobody else would end the tasks
# and remove what is its own.
leave_tasks() {
    read_clock
    ask_all_to_end "$TO_END"
    rm -f -- "$run_dir/tasks/$attempt.env"
    if ! kill -0 $$ 2>/dev/null; then
        rm -rf -- "$handover_dir"
    fi
}

await_last_answers() {
    read_clock
    waiting_since=$seconds
    while ((${#answered[@]} < nnodes && seconds - waiting_since <= SETTLE)); do
        read_answers
        if ((${#answered[@]} < nnodes)); then
            pause
        fi
        read_clock
    done
}

# Ends starters that would wait for ever: pbsdsh does so for a host that is lost, of which PBS says
# nothing for minutes.
end_waiting() {
    local rank
    for rank in "${!kill_at[@]}"; do
        [[ -n ${gone_at[rank]:-} ]] || ((seconds < kill_at[rank])) ||
            kill -KILL "${pids[rank]}" 2>/dev/null || true
    done
    # The other tasks may wait for the outcome of one that has ended.
    for rank in "${!gone_at[@]}"; do
        [[ -n $goes_on ]] || ((seconds - gone_at[rank] < SETTLE)) ||
            tell_outcome "$rank" "its task ended and left no outcome"
    done
    find_end
    [[ -n $ended_at ]] || return 0
    for rank in "${!pids[@]}"; do
        if ((seconds - ended_at >= ${grace[rank]:-linger})); then
            ask_to_end "$rank" "$TO_END"
        fi
    done
}

# Sets `ended_at`; also `grace` and `linger`, if the first one's launch says more.
find_end() {
    local entry
    [[ -z $ended_at ]] || return 0
    if [[ -e $handover_dir/over ]]; then
        ended_at=$seconds
        while IFS= read -r -d '' entry; do
            if [[ $entry =~ ^lost=(0|[1-9][0-9]{0,5})$ ]]; then
                grace[BASH_REMATCH[1]]=$LOST
            elif [[ $entry == asked=yes ]]; then
                linger=$LONG # ranks have as long as --term-grace says
            fi
        done <"$handover_dir/over"
    elif [[ -z $goes_on ]]; then
        ended_at=${gone_at[0]:-}
    fi
}

# ask_all_to_end SECONDS: like ask_to_end.
ask_all_to_end() {
    local rank
    for rank in "${!pids[@]}"; do
        ask_to_end "$rank" "$1"
    done
}

# ask_to_end RANK SECONDS: asks its starter to end, which is killed after so many seconds.
ask_to_end() {
    local deadline=$((seconds + $2))
    if [[ -z ${pids[$1]:-} || -n ${gone_at[$1]:-} ]]; then
        return
    fi
    if [[ -z ${kill_at[$1]:-} ]]; then
        "end_$starter" "$1" 2>/dev/null || true
    fi
    if ((deadline < ${kill_at[$1]:-deadline + 1})); then
        kill_at[$1]=$deadline
    fi
}

# Shows what the tasks have printed since the last look, but of a flood only a part: the clock of
# the walltime and the ends of tasks are looked at in between. Sets `more` if there is more.
show_lines() {
    local rank fd piece left
    more=''
    for rank in "${!files[@]}"; do
        # NFS looks anew when a file is opened.
        { : <"${files[rank]}"; } 2>/dev/null || continue
        if [[ -z ${fds[rank]:-} ]]; then
            exec {fd}<"${files[rank]}"
            fds[rank]=$fd
        fi
        left=$((PIECES / nnodes + 1))
        while IFS= read -r -N "$PIECE" -u "${fds[rank]}" piece || [[ -n $piece ]]; do
            show_piece "$rank" "$piece"
            if ((${#piece} < PIECE)); then
                break # the end of the file
            fi
            if ((--left == 0)); then
                more=yes
                break
            fi
        done
    done
}

# show_piece RANK TEXT: shows whole lines. One that is not complete waits for its rest, unless it is
# long: then it is shown as it comes, and `unfinished` is its rank.
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
    if [[ -n $unfinished && $unfinished != "$1" ]]; then
        put $'\n'
    fi
    put "$shown"
    unfinished=''
    if [[ $shown != *"$newline" ]]; then
        unfinished=$1
    fi
}

# put TEXT: shows it, if what shows it still runs.
put() {
    printf '%s' "$1" 2>/dev/null || true
}

# Shows what the tasks that have ended printed last. One that was not to be ended may print for
# ever.
show_rest() {
    local rank deadline
    read_clock
    deadline=$((seconds + DRAIN))
    show_lines
    while [[ -n $more ]] && ((seconds < deadline)); do
        show_lines
        read_clock
    done
    for rank in "${!rests[@]}"; do
        if [[ -n ${rests[rank]} ]]; then
            show_piece "$rank" $'\n'
        fi
    done
    if [[ -n $unfinished ]]; then
        put $'\n'
    fi
    if [[ -n $more ]]; then
        say "not all that the tasks printed is shown: it is in $run_dir/logs/$attempt"
    fi
}

# Reads who has answered, and gives an outcome to those that will not.
read_answers() {
    if ((${#answered[@]} < nnodes)); then
        read_new_answers
        give_up_silent
    fi
}

# Sets `answered` of those that have. Two tasks on one host are an error; PBS counts its hosts
# itself.
read_new_answers() {
    local path rank other host twice
    for path in "$run_dir/tasks/$attempt".*; do
        rank=${path##*.}
        [[ $rank =~ ^(0|[1-9][0-9]{0,5})$ && -z ${answered[rank]:-} ]] || continue
        ((rank < nnodes)) || continue
        read -r host _ other <"$path" || continue
        host+=" $other"
        for other in "${!answered[@]}"; do
            if [[ ${answered[other]} == "$host" && $starter != pbs* ]]; then
                twice="tasks of ${hosts[other]} and ${hosts[rank]} both run on ${host%% *}"
                tell_outcome "$rank" "$twice: name it once"
            fi
        done
        answered[rank]=$host
    done
}

# Gives up on tasks that should have answered.
give_up_silent() {
    local rank settle=$SETTLE
    if ((${#pids[@]} == ${#gone_at[@]})); then
        settle=$SETTLE_ALL
    fi
    for ((rank = 0; rank < nnodes; rank++)); do
        if [[ -n ${answered[rank]:-} ]]; then
            continue
        elif [[ -n ${gone_at[rank]:-} ]] && ((seconds - gone_at[rank] >= settle)); then
            give_up "$rank" "its task ended before it said that it had started"
        elif ((seconds - waiting_since >= ANSWER)); then
            give_up "$rank" "no task has answered there for $ANSWER s"
        fi
    done
}

# give_up RANK WHY: ends its starter, and gives it an outcome with what that said.
give_up() {
    local said file=$run_dir/tasks/$attempt.$1.said
    answered[$1]=none
    [[ -e $file ]] || file=$run_dir/tasks/$attempt.0.said
    said=$(tail -c 400 -- "$file" 2>/dev/null | tr '\n' ' ') || true
    tell_outcome "$1" "$2: $starter said: ${said:-nothing}"
    ask_to_end "$1" "$TO_END"
}

# tell_outcome RANK ERROR [STATUS]: for a task that cannot. Where it cannot be written, that is said
# once, however often it is tried.
tell_outcome() {
    write_outcome "$run_dir/outcome/$attempt.$1" "${3:-1}" "${hosts[$1]}" "$2" && return
    [[ -n ${unwritten[$1]:-} ]] || say "${hosts[$1]}: $2 (not written)"
    unwritten[$1]=yes
}
