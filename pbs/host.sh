# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # pbs/multinode.pbs and host/job.sh read and set these
# What the job script must do with PBS, in the words of host/job.sh, which is sourced before this.
# Reads: PBS_*, as PBS sets them for a job script, and what qstat -f says of the job
# Sets:  sources, targets   read_wave
#        reach             find_reach: what has other hosts do their part of staging: ssh, or the
#                          job's own starter, pbsdsh or pbs_tmrsh; empty until it is needed
#        answers           each_host, for its own process: where tasks of such a starter leave what
#                          they say; empty if nothing is read
#        scheduler, is_batch, asked_to_end   as host/job.sh has them
#        cluster, facts        describe_job, ask_site
#        wall, wall_at         describe_job: one moment, by the wall clock and by read_clock
#        now                   read_job_time
#        ANSWER                s for a task to say that it has started
#        job_script            this script's path
#        carried               facts about what a chained job was given
#
# pbsdsh runs one task for each line of the node file, a task starts with nearly no environment, and
# the job's output stays in a spool until its end: so each host gets one task, by the index of its
# first line, what it needs through files of the run directory, and a log there, which this script
# follows.
scheduler=pbs
# shellcheck source=pbs/starters.sh
source "$APPTRAIN_HOME/pbs/starters.sh"

readonly QSTAT=30   # s for an answer of the server
readonly REACH=30   # s for an answer of ssh
readonly SSH=(ssh -o BatchMode=yes -o ConnectTimeout=20 --)

reach=''
answers=''

job_script=$(realpath -ms -- "$0")
is_batch=
if [[ ${PBS_ENVIRONMENT:-} == PBS_BATCH && ${PBS_TASKNUM:-} == 1 ]]; then
    is_batch=yes
fi

# PBS starts a script in HOME; paths are meant as at qsub.
if [[ -n $is_batch && -d ${PBS_O_WORKDIR:-} ]]; then
    cd -- "$PBS_O_WORKDIR" || exit
fi

# A job of a chain takes up where the one that submitted it stopped.
carried=()
if [[ -n ${APPTRAIN_CHAIN_FILE:-} ]]; then
    [[ -r $APPTRAIN_CHAIN_FILE ]] ||
        refuse run-dir-not-on-node \
            "the run directory ${APPTRAIN_CHAIN_FILE%/*} is not there on this node:" \
            "give one that all nodes share in APPTRAIN_RUN_DIR"
    is_closed "${APPTRAIN_CHAIN_FILE%/*}" ||
        refuse run-dir-of-another \
            "the run directory ${APPTRAIN_CHAIN_FILE%/*} is not yours, and open to others:" \
            "give one of your own in APPTRAIN_RUN_DIR"
    while IFS= read -r -d '' word; do
        export "${word?}"
        carried+=("carried=${word%%=*}")
    done <"$APPTRAIN_CHAIN_FILE"
    unset APPTRAIN_CHAIN_FILE word
fi

# qsub -v carries no line break: `listed` of entrypoint/batch/pbs/qsub_environment.py gives each
# further line of APPTRAIN_BIND a variable of its own.
for ((number = 2; ; number++)); do
    word=APPTRAIN_BIND_$number
    [[ -n ${!word:-} ]] || break
    export APPTRAIN_BIND+=$'\n'${!word}
    unset "$word"
done
unset number word
readonly ANSWER=${APPTRAIN_ANSWER_TIMEOUT:-120}

describe_job() {
    local now
    [[ $ANSWER =~ ^[1-9][0-9]{0,6}$ ]] ||
        refuse answer-timeout "APPTRAIN_ANSWER_TIMEOUT=$ANSWER: must be seconds (without it 120)"
    printf -v now '%(%s)T %(%z)T' -1 -1
    read_clock
    wall=${now% *}
    wall_at=$seconds
    facts+=("began=$((${now% *} - SECONDS))" "zone=${now#* }" ${carried[@]+"${carried[@]}"})
    if is_pbs_job && [[ $PBS_JOBID == *.* ]]; then
        cluster=${PBS_JOBID#*.}
    fi
}

# Whether this is a job's main task, and not a shell of Slurm that has a variable of PBS.
is_pbs_job() {
    [[ -n ${PBS_JOBID:-} && ${PBS_TASKNUM:-1} == 1 ]] &&
        [[ -z ${SLURM_JOB_ID:-} || -n ${PBS_ENVIRONMENT:-} ]]
}

# Also what the profile's modules bring, which are loaded by now.
ask_site() {
    if is_pbs_job; then
        facts+=("told=$(answer_of qstat -f "$PBS_JOBID" 2>/dev/null)")
        facts+=("queue=$(answer_of qstat -Q -f "${PBS_QUEUE:-workq}" 2>/dev/null)")
        if [[ -r ${PBS_NODEFILE:-} ]]; then
            facts+=("nodefile=$(<"$PBS_NODEFILE")")
        fi
    fi
    if type -P mpiexec >/dev/null; then
        facts+=("mpiexec=$(answer_of mpiexec --version 2>&1)")
    fi
}

# answer_of CMD...: prints what it says; nothing if the job is to end, or it does not answer.
answer_of() {
    if [[ -z ${asked_to_end:-} ]]; then
        timeout "$QSTAT" "$@" || true
    fi
}

# Sets `now`, in Unix seconds as the wall clock was when the job began, whatever it was set to
# since: `prepare` has calculated stop_at and end_at from that.
read_job_time() {
    read_clock
    now=$((wall + seconds - wall_at))
}

# As the wall clock is now, which the ranks read.
job_end() {
    local now today
    [[ -n $end_at ]] || return 0
    read_job_time
    printf -v today '%(%s)T' -1
    printf '%s' "$((end_at + today - now))"
}

# PBS says nothing that would matter at the end.
told_of_job() {
    :
}

# TERM reaches tasks of the first host only, and none if they were not started by PBS. INT and HUP
# have `cut_short` in their traps: a second one would end ranks that save.
on_end_signal() {
    asked_to_end=$1
    interrupted=yes
    if [[ $1 == 143 ]]; then
        cut_short
    fi
}

# Has the first node's entrypoint end, which tells all others; if it is not there (any more), all
# that are.
interrupt() {
    local name='' pid=''
    { read -r name pid _ <"$run_dir/tasks/$attempt.0"; } 2>/dev/null || true
    if [[ $name == "$(uname -n)" && $pid =~ ^[1-9][0-9]*$ ]] &&
        end_process TERM "$pid" 2>/dev/null; then
        return
    fi
    (umask 077 && mkdir -p -- "$run_dir/tasks" && touch -- "$run_dir/tasks/$attempt.end")
}

# Submits this script once more, for the same run directory, with what this job asked for.
run_again() {
    local file=$run_dir/chain
    if [[ -n $no_chain ]]; then
        printf '%s' "$no_chain"
        return 1
    fi
    (
        umask 077
        cat -- "$handover_dir/chain.env" >"$file.env" &&
            cat -- "$handover_dir/chain.args" >"$file.args"
    ) || return 1
    # The values from the environment: commas and quotes of one that stands in -v itself would be
    # taken for qsub's.
    cd -- "${PBS_O_WORKDIR:-.}" && APPTRAIN_CHAIN_FILE=$file.env timeout -s KILL "$QSTAT" \
        qsub "${chain_words[@]}" -v APPTRAIN_HOME,APPTRAIN_CHAIN_FILE "$job_script" >>"$file.jobs"
}

# on_nodes WHAT [WORD...]: see host/staging.sh. ssh does it, also in a job of PBS, for who has the
# image can send it on. Where it does not reach the hosts, PBS's own starter has each copy it from
# the shared file system, but not for `auto`: to read it there is faster.
on_nodes() {
    if [[ -z $reach ]]; then
        find_reach
    fi
    if [[ $reach != ssh && -z $stage_named ]]; then
        copy_error="ssh does not reach ${hosts[1]}"
    elif [[ $reach != ssh ]] && ! type -P "$reach" >/dev/null; then
        copy_error="ssh does not reach ${hosts[1]}, and there is no $reach in PATH"
    else
        await_all each_host "$@"
    fi
}

# Sets `reach`. One host is asked for all: ssh goes between the hosts of a cluster, or does not.
find_reach() {
    reach='ssh'
    if ((${#hosts[@]} == 1)) || [[ $starter != pbs* ]]; then
        return
    fi
    cutter='kill'
    await "$asked_to_end" timeout --kill-after=10 "$REACH" "${SSH[@]}" "${hosts[1]}" true \
        >/dev/null 2>&1
    cutter='interrupt'
    if ((status)); then
        reach=$starter
    fi
}

# copy_to NAME...: by a tree of hosts, in which who has the image sends it to others, or in waves of
# hosts that take it from the shared file system. The plan is for all hosts: its places are taken by
# those that have the image, then by those that have room for it, and the last stay empty.
copy_to() {
    local wave=0 bound file=copies rank state deadline
    local -A places=()
    order=()
    for rank in "${!hosts[@]}"; do
        places[${hosts[rank]}]=$rank
    done
    for state in have room; do
        for rank in "${!hosts[@]}"; do
            if [[ ${states[rank]} == "$state" ]]; then
                order+=("$rank")
            fi
        done
    done
    read_clock
    deadline=$((seconds + COPIES))
    if [[ $reach != ssh ]]; then
        file='copies.shared'
    fi
    while [[ -z $asked_to_end ]] && read_wave "$wave" "$file"; do
        if [[ $reach != ssh && $wave == 0 ]]; then
            tell "image: copied from the shared file system, to ${#sources[@]} nodes at once," \
                "as ssh does not reach ${hosts[1]}"
        fi
        read_clock
        bound=$((deadline - seconds < COPY ? deadline - seconds : COPY))
        if ((bound <= 0)); then
            tell "image: no further node gets a copy after $COPIES s"
            break
        fi
        await_all each_source
        wave=$((wave + 1))
    done
}

# read_wave NUMBER FILE: sets `sources`, the ranks of those that send, and `targets`, the hosts to
# which each does, with blanks between them; false if there is no such wave.
read_wave() {
    local number source target from to i found=''
    sources=()
    targets=()
    while IFS= read -r -d '' number && IFS= read -r -d '' source && IFS= read -r -d '' target; do
        [[ $number == "$1" ]] || continue
        found=yes
        to=${order[${places[$target]}]-}
        [[ -n $to && ${states[to]} == room ]] || continue
        from=${order[${places[${source:-$target}]}]}
        for ((i = 0; i < ${#sources[@]}; i++)); do
            if [[ ${sources[i]} == "$from" ]]; then
                break
            fi
        done
        sources[i]=$from
        if [[ $from != "$to" ]]; then
            targets[i]="${targets[i]:-} ${hosts[to]}"
        fi
    done <"$handover_dir/$2"
    [[ -n $found ]]
}

# await_all FUNCTION [WORD...]: runs it; all that it starts ends with a signal to this script.
await_all() {
    cutter='kill'
    await "$asked_to_end" end_together "$@"
    cutter='interrupt'
}

end_together() {
    trap 'end_jobs; exit 143' TERM
    "$@" 2>"$handover_dir/said"
}

# Each `timeout` leads a process group of its own. It would not pass on a signal that comes just as
# it starts what it bounds, so the whole group gets it.
end_jobs() {
    local pid
    for pid in $(jobs -p); do
        kill -TERM -- "-$pid" || kill -TERM "$pid" || true
    done 2>/dev/null
    wait
}

# each_host WHAT [WORD...]: prints what they say. All are asked at once, as all get their tasks at
# once: `bound` is for the whole, and a host that hangs takes nothing of it from another.
each_host() {
    local rank
    if [[ $reach != ssh && $1 != remove ]]; then
        answers=$run_dir/tasks/$attempt.$1
        trap 'rm -rf -- "$answers"' EXIT
        rm -rf -- "$answers" # of a script that was killed
        (umask 077 && mkdir -p -- "$answers")
    fi
    for rank in "${!hosts[@]}"; do
        run_on "$rank" "$1" "$rank" "$stage" "${@:2}"
    done
    wait
    if [[ -n $answers ]]; then
        print_answers
    fi
    exit 0 # as in on_each_host
}

# Prints what the tasks have left. A shared file system may show it later.
print_answers() {
    local rank line deadline
    read_clock
    deadline=$((seconds + SETTLE))
    for ((rank = 1; rank < ${#hosts[@]}; rank++)); do
        while ! { IFS= read -r line <"$answers/$rank"; } 2>/dev/null; do
            line=''
            read_clock
            if ((seconds >= deadline)); then
                break
            fi
            sleep 0.1
        done
        printf '%s\n' "$line"
    done
}

each_source() {
    local i names
    for i in "${!sources[@]}"; do
        read -r -a names <<<"${targets[i]:-}"
        run_on "${sources[i]}" send - "$stage" "$stage_bytes" "$stage_id" "$APPTRAIN_IMAGE" \
            ${names[@]+"${names[@]}"}
    done
    wait
}

# run_on RANK WORD...: starts host/stage.sh there.
run_on() {
    local line
    line="/bin/bash $(printf '%q ' "$APPTRAIN_HOME/host/stage.sh" "${@:2}")"
    if (($1 == 0)); then
        start_bounded /bin/bash -c "exec $line"
    elif [[ $reach == ssh ]]; then
        # Its end does not reach what it has started: that is bounded there, too.
        start_bounded "${SSH[@]}" "${hosts[$1]}" "exec timeout --kill-after=10 $bound $line"
    elif [[ $reach == pbsdsh ]]; then
        start_bounded pbsdsh -n "${host_lines[$1]}" -- /bin/bash -c "$(as_task "$1" "$line")" >&2
    else
        start_bounded pbs_tmrsh "${hosts[$1]}" /bin/bash -c "$(as_task "$1" "$line")"
    fi
}

start_bounded() {
    timeout --kill-after=10 "$bound" "$@" &
}

# as_task RANK LINE: prints the line for a task of PBS's own starters. They pass on nothing of what
# it prints, so that goes into a file, which gets its name once it is whole. It has the bound itself
# too: pbs_tmrsh ends without its task.
as_task() {
    local file=/dev/null name
    if [[ -n $answers ]]; then
        printf -v name '%q' "$answers/$1"
        file=$name.new
    fi
    printf '%s' "umask 077; timeout --kill-after=10 $bound $2 >$file 2>/dev/null"
    if [[ -n $answers ]]; then
        printf '%s' " && mv -- $file $name"
    fi
}
