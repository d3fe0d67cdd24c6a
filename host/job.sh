# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # the job scripts read and set some
# What the job scripts of all schedulers share. slurm/multinode.sbatch sources it, and a script of
# the same shape can.
#
# It starts and ends what runs, catches signals and asks the scheduler; what any of it means, the
# image decides: before the job `entrypoint prepare`, after each attempt the first node's `launch`
# or, if more has to be known, `entrypoint conclude`. Both halves leave what they tell each other in
# $handover_dir (entrypoint/job/handover.py has the names).
#
# A job script defines
#   describe_job     sets `cluster`, and `facts`, NAME=VALUE for the image; or refuses
#   start WHAT       starts "${task[@]}" WHAT "${launch_words[@]}" for each task
#   interrupt PID    ends what runs as PID, at once
#   run_again        has the scheduler start this job once more, or says why not
#   told_of_job      prints what the scheduler says of the job
#   job_end          prints when it ends this job, in Unix seconds; nothing if unknown
#   ask_site         adds to `facts` what programs of the scheduler and of the site's modules say,
#                    while the image starts
#   on_nodes, copy_to   as host/staging.sh has them
# sets `scheduler` and `is_batch` (yes: not started by hand), and calls run_job "$@".
#
# Reads: APPTRAIN_HOME      the checkout
#        APPTRAIN_IMAGE     (else the one of the profile's stack in containers/)
#        APPTRAIN_PROFILE, and --profile as a word of APPTRAIN_ARGS, APPTRAIN_ARGS_FILE and the
#        arguments
# Sets:  APPTRAIN_HAND, APPTRAIN_ATTEMPT, and, for the job scripts:
#        handover_dir      what APPTRAIN_HAND says
#        asked_to_end      the status of the signal that asked the job to end; empty if none did
#        warned            yes once the scheduler has warned of the end
#        interrupted       a signal came while a child was waited for
#        child             the process that is waited for
#        show_only         print_command if nothing is to be started
#        task              the command of a task, without its last words
#        container_words   options of run.sh for Apptainer, as the profile says
#        known             what Apptainer says of itself (host/image.sh); empty if not known
#        What the image says (entrypoint/job/handover.py):
#        run_dir, attempt, starter, stop_at, end_at
#        hosts, host_lines                       of each task, by its rank
#        start_words, plan_words, launch_words, chain_words
#        goes_on           nodes may be lost on the way
#        no_chain          why no job may follow
#        stage, stage_bytes, stage_id, stage_digest, stage_needs, stage_least, stage_by_name,
#        stage_named, each_node         how the nodes get the image (host/staging.sh)
# Needs: bash 4.2 and coreutils.
LC_ALL=C # bytes, not characters; srun's messages in English
# shellcheck source=host/common.sh
source "$APPTRAIN_HOME/host/common.sh"
# shellcheck source=host/staging.sh
source "$APPTRAIN_HOME/host/staging.sh"

readonly LOG_TRIES=50  # times LOG_PAUSE: what writing the rest of the log may take
readonly LOG_PAUSE=0.1 # s
readonly PREPARE=900   # s; a node that cannot mount the image unpacks it
readonly CONCLUDE=300  # s

say() {
    print_message "$*"
}

tell() {
    printf 'apptrain: %s\n' "$*"
}

# refuse ID TEXT...: the id names the cause, and is not printed.
refuse() {
    shift
    say "$*"
    exit "$REFUSED"
}

# --- the site: what must be known before there is an image ----------------------------------------

# Sets `profile`, a YAML file or empty: as --profile says, the one option that this half must know,
# else for this cluster.
find_profile() {
    profile=${APPTRAIN_PROFILE:-}
    find_option_of_environment
    find_option "$@"
    [[ -n $profile ]] || find_profile_of_cluster
    [[ -z $profile ]] || profile=$(profile_file)
}

# Sets `profile` as APPTRAIN_ARGS_FILE or APPTRAIN_ARGS says.
find_option_of_environment() {
    local word words=()
    if [[ -n ${APPTRAIN_ARGS_FILE:-} && -r $APPTRAIN_ARGS_FILE ]]; then
        while IFS= read -r -d '' word; do
            words+=("$word")
        done <"$APPTRAIN_ARGS_FILE"
    elif [[ -n ${APPTRAIN_ARGS:-} ]]; then
        # Quoted words without blanks, at least.
        read -r -d '' -a words < <(printf '%s\0' "${APPTRAIN_ARGS//[\'\"\\]/}")
    fi
    find_option ${words[@]+"${words[@]}"}
    # A quoted path with blanks is cut here: the image says which it is.
    if [[ ${APPTRAIN_ARGS:-} == *[\'\"\\]* && ! -r $(profile_file) ]]; then
        profile=${APPTRAIN_PROFILE:-}
    fi
}

# Sets `profile` to the one for `cluster`; empty if there is none.
find_profile_of_cluster() {
    local file found=()
    [[ -n $cluster ]] || return 0
    while IFS= read -r -d '' file; do
        found+=("${file%.host}.yaml")
    done < <(grep -FlsxZ -- "cluster=$cluster" "$APPTRAIN_HOME"/clusters/*.host)
    ((${#found[@]} < 2)) ||
        refuse profile-ambiguous \
            "${found[*]##*/} are all for the cluster $cluster: choose one with --profile"
    profile=${found[0]:-}
}

# Prints the file that `profile` means.
profile_file() {
    local file=$profile
    case $profile in
        */* | *.yaml) make_absolute file ;;
        *) file=$APPTRAIN_HOME/clusters/$profile.yaml ;;
    esac
    printf '%s' "$file"
}

# Sets `profile` as the last --profile of these words says. What follows a script or module is its
# own, also where -- was forgotten, which the image refuses.
find_option() {
    local before='' is_doubtful=''
    while (($#)); do
        case $1 in
            -- | -m) return ;;
            --profile) take_profile "${2:-$profile}" ;;
            --profile=?*) take_profile "${1#*=}" ;;
            -*) ;;
            *.py)
                [[ $before == -* && $before != *=* ]] || return 0
                # An option's value; or, if -- was forgotten, a script behind one that takes none.
                [[ " ${*:2} " == *' -- '* ]] || is_doubtful=yes
                ;;
        esac
        before=$1
        shift
    done
}

# Sets `profile` to this one; if that may be a script's own option, only if there is such a file.
take_profile() {
    local given=$profile
    profile=$1
    if [[ -n $is_doubtful && ! -r $(profile_file) ]]; then
        profile=$given
    fi
}

# Sets APPTRAIN_IMAGE and APPTRAIN_APPTAINER, and loads the modules, as the profile's host file says
# (entrypoint/cli/profiles.py).
use_site() {
    local image='' program='' paths=() modules=()
    container_words=()
    if [[ -n $profile ]]; then
        read_host_file "${profile%.yaml}.host"
    fi
    APPTRAIN_IMAGE=${given_image:-$(own_image "${image:-image.sif}")}
    make_absolute APPTRAIN_IMAGE
    if [[ -n $program && -z ${APPTRAIN_APPTAINER:-} ]]; then
        APPTRAIN_APPTAINER=$(expand "$program")
    fi
    export APPTRAIN_HOME APPTRAIN_IMAGE APPTRAIN_APPTAINER
    if ((${#modules[@]})); then
        load_modules
    fi
}

# own_image NAME: prints the image of that name in the checkout, for this node's processor.
# containers/stacks.py does the same.
own_image() {
    local image=$APPTRAIN_HOME/containers/$1 machine
    machine=$(uname -m)
    if [[ $machine != x86_64 ]]; then
        image=${image%.sif}-$machine.sif
    fi
    printf '%s' "$image"
}

# Sets `image`, `program`, `paths`, `modules` and `container_words`, as this file says.
read_host_file() {
    local file=$1 line value digest=''
    [[ -r $profile ]] ||
        refuse profile-missing \
            "there is no profile $profile: the sites are in $APPTRAIN_HOME/clusters"
    [[ -r $file ]] || refuse host-file-missing "$file is missing: $(remedy)"
    while IFS= read -r line || [[ -n $line ]]; do
        value=${line#*=}
        case $line in
            '#'* | cluster=* | profile=*) ;; # for who looks for it, and for the image
            digest=*) digest=$value ;;
            image=*) image=$value ;;
            apptainer=*) program=$value ;;
            module_path=*)
                value=$(expand "$value")
                paths+=("$value")
                ;;
            module=*) modules+=("$value") ;;
            option=*) container_words+=(--option "$value") ;;
            *) refuse host-file-line "$file: $line has no meaning here: $(remedy)" ;;
        esac
    done <"$file"
    [[ $digest == "$(sha256sum <"$profile" | cut -d ' ' -f 1)" ]] ||
        refuse host-file-outdated "$file is not made from $profile as that is now: $(remedy)"
}

# Prints what makes a profile's host file.
remedy() {
    printf 'make profiles'
    [[ ${profile%/*} == "$APPTRAIN_HOME/clusters" ]] || printf ' PROFILE=%q' "$profile"
}

# Prints a text with the variables' values in place of $NAME and ${NAME}; nothing else of a shell's
# syntax counts.
expand() {
    local rest=$1 done='' name
    while [[ $rest =~ \$(\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)) ]]; do
        name=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
        [[ -n ${!name:-} ]] ||
            refuse profile-variable-unset "$1 in the profile $profile: $name is not set here:" \
                "set it, or correct the profile"
        done+=${rest%%"${BASH_REMATCH[0]}"*}${!name}
        rest=${rest#*"${BASH_REMATCH[0]}"}
    done
    printf '%s' "$done$rest"
}

# Loads `modules` from `paths`; the nodes get what they change through the environment.
load_modules() {
    local file status=0
    set +eu # module systems are written without
    for file in "${LMOD_PKG:-/nowhere}/init/bash" "${MODULESHOME:-/nowhere}/init/bash" \
        /etc/profile.d/{lmod,z00_lmod,modules}.sh; do
        # shellcheck source=/dev/null
        if ! declare -F module >/dev/null && [[ -r $file ]]; then
            source "$file"
        fi
    done
    declare -F module >/dev/null || status=127
    ((status || ${#paths[@]} == 0)) || module use "${paths[@]}" || status=$?
    ((status)) || module load "${modules[@]}" || status=$?
    set -eu
    ((status == 0)) ||
        refuse module-load-failed \
            "module load ${modules[*]} of the profile $profile ended with status $status:" \
            "correct its modules (module avail lists them)"
}

# --- what the two halves tell each other ----------------------------------------------------------

# write_request NAME=VALUE...: leaves these entries, and what is always said, for the image, which
# waits for the file.
write_request() {
    (
        umask 077
        printf '%s\0' "scheduler=$scheduler" "home=$APPTRAIN_HOME" "image=$APPTRAIN_IMAGE" \
            "profile=$profile" "batch=$is_batch" "script=$$" "attempt=${APPTRAIN_ATTEMPT-}" \
            ${facts[@]+"${facts[@]}"} "$@" >"$handover_dir/.ask"
    ) && mv -- "$handover_dir/.ask" "$handover_dir/ask"
}

# read_answer FILE: sets what the image has left in this file; false if there is nothing. Nothing of
# it is run, and only a number is calculated with. Sets, beside what is listed above, `profile`,
# `outcome`, `dry_run`, `by_hand`, and
#   lines        what to say
#   follows      of a verdict: end, again (this job, other ports) or requeue (another job); a
#                restart inside the allocation is not the host's: the launchers make it
#   status       of the job
#   verdict_for  the value of `asked_to_end` that a verdict is for
#   tells_end    ranks that do not stop when asked are ended
#   over         nothing is left to do
read_answer() {
    local entry value number='^(0|[1-9][0-9]{0,14})$'
    lines=()
    follows=''
    status=''
    verdict_for=''
    [[ -s $handover_dir/$1 ]] || return 1
    while IFS= read -r -d '' entry; do
        value=${entry#*=}
        [[ $entry != @(attempt|status|stop_at|end_at|line)=* || $value =~ $number ]] &&
            [[ $entry != stage_@(bytes|needs|least)=* || $value =~ $number ]] ||
            refuse answer-not-a-number "the image says $entry: must be a number"
        case $entry in
            say=* | tell=*) lines+=("$entry") ;;
            run_dir=* | attempt=* | profile=* | outcome=* | starter=* | stop_at=* | end_at=* | \
                status=* | follows=* | goes_on=* | tells_end=* | over=* | dry_run=* | by_hand=* | \
                no_chain=* | stage=* | stage_bytes=* | stage_id=* | stage_digest=* | \
                stage_needs=* | stage_least=* | stage_by_name=* | \
                stage_named=*)
                printf -v "${entry%%=*}" %s "$value"
                ;;
            asked=*) verdict_for=$value ;;
            host=*) hosts+=("$value") ;;
            line=*) host_lines+=("$value") ;;
            start=*) start_words+=("$value") ;;
            plan=*) plan_words+=("$value") ;;
            run=*) task+=("$value") ;;
            launch=*) launch_words+=("$value") ;;
            chain=*) chain_words+=("$value") ;;
            each_node=*) each_node+=("$value") ;;
            export=APPTRAIN_*)
                [[ ${value%%=*} =~ ^[A-Z_]+$ ]] ||
                    refuse answer-variable "the image says $entry: no such variable"
                export "${value?}"
                exported+=("${value%%=*}")
                ;;
            *)
                refuse answer-unknown "the image says ${entry%%=*}, which means nothing here:" \
                    "it is of another version: make image"
                ;;
        esac
    done <"$handover_dir/$1"
}

say_lines() {
    local entry
    for entry in ${lines[@]+"${lines[@]}"}; do
        if [[ $entry == say=* ]]; then
            say "${entry#*=}"
        else
            tell "${entry#*=}"
        fi
    done
}

# run_in_image WHAT SECONDS [CMD...]: runs `entrypoint WHAT` in the image here, for so many seconds
# at most, and CMD while that starts. Sets `status`, `said` to what it said, and `known`.
run_in_image() {
    cutter='kill'
    begin "$asked_to_end" write_said timeout --kill-after=10 "$2" \
        "$APPTRAIN_HOME/containers/run.sh" --quiet --all-of-host \
        --tell "$handover_dir/apptainer" ${known:+--known "$known"} \
        ${container_words[@]+"${container_words[@]}"} \
        "$APPTRAIN_IMAGE" python -P -m entrypoint "$1" "$handover_dir"
    "${@:3}"
    await_begun
    cutter='interrupt'
    if [[ -s $handover_dir/apptainer ]]; then
        known=$(<"$handover_dir/apptainer")
    fi
    said=''
    if [[ -s $handover_dir/said ]]; then
        said=$(tail -c 2000 -- "$handover_dir/said" | tr '\n' ' ')
        said=${said% }
    fi
}

# Becomes a program that `await` starts, and whose words go to the file `said`. What a trap says
# meanwhile does not.
write_said() {
    exec "$@" >"$handover_dir/said" 2>&1
}

# await ASKED CMD...: starts it, and sets `status` at its end.
await() {
    begin "$@"
    await_begun
}

# begin ASKED CMD...: starts it in a process group of its own, for Ctrl-C is to reach it once,
# through here. It is ended if `asked_to_end` is not ASKED any more.
begin() {
    set -m
    "${@:2}" </dev/null 3>&- 4>&- &
    child=$!
    set +m
    if [[ $asked_to_end != "$1" ]]; then
        cut_short
    fi
}

await_begun() {
    await_end "$child" 0 # what a program of ours has left says how it ended
    child=
}

# --- before ---------------------------------------------------------------------------------------

# prepare ARGUMENT...: has the image decide what this job is; sets what it answers, `task`, and
# APPTRAIN_ATTEMPT.
prepare() {
    local given=$profile
    for ((;;)); do
        use_site
        ask_image "$@"
        if [[ -n $run_dir ]]; then
            break
        fi
        [[ $given != "$profile" ]] ||
            refuse profile-not-settled \
                "the image finds another profile ($profile) each time: give --profile"
        given=$profile
    done
    begin_attempts
}

# prepare_again ARGUMENT...: the same with further `facts`, in place of what the image has said.
prepare_again() {
    local entry name
    for name in ${exported[@]+"${exported[@]}"}; do
        unset "$name"
    done
    unset APPTRAIN_ATTEMPT
    exported=()
    for entry in ${given_options[@]+"${given_options[@]}"}; do
        export "${entry?}"
    done
    ask_image "$@"
    begin_attempts
}

# Sets `task`, APPTRAIN_ATTEMPT, and what the image has left in the run directory for whoever comes
# after a job script that is lost: the file `mark`, which holds `mark_of`.
begin_attempts() {
    local name
    given_options=()
    for name in APPTRAIN_ARGS APPTRAIN_ARGS_FILE; do
        if [[ -n ${!name+set} ]]; then
            given_options+=("$name=${!name}")
        fi
    done
    unset APPTRAIN_ARGS APPTRAIN_ARGS_FILE
    export APPTRAIN_ATTEMPT=$attempt
    if [[ -z $dry_run && -z $over ]]; then
        mark=$run_dir/unfinished
        mark_of=$attempt
    fi
    task=("$APPTRAIN_HOME/containers/run.sh" --outcome "$outcome" ${known:+--known "$known"}
        ${container_words[@]+"${container_words[@]}"} ${task[@]+"${task[@]}"} "$APPTRAIN_IMAGE")
    task+=(python -P -m entrypoint)
}

# Leaves nothing that the image has said, nor what came of it.
forget_answer() {
    run_dir=''
    hosts=()
    host_lines=()
    start_words=()
    plan_words=()
    task=()
    launch_words=()
    chain_words=()
    each_node=()
}

# ask_image ARGUMENT...: sets what the image answers; ends the job if it does not.
ask_image() {
    if [[ -e $handover_dir/ask ]]; then
        rm -f -- "$handover_dir/ask"
    fi
    run_in_image prepare "$PREPARE" make_first_request "$@"
    if [[ -n $asked_to_end ]]; then
        exit "$asked_to_end"
    fi
    # An older image does not know `prepare`, or does not wait for what it is asked.
    [[ $said != *"invalid choice: 'prepare'"* && $said != *"$handover_dir/ask cannot be read"* ]] ||
        refuse image-other-version \
            "the image $APPTRAIN_IMAGE is of another version than the checkout" \
            "$APPTRAIN_HOME: make image"
    case $status in
        0) [[ -z $said ]] || cat -- "$handover_dir/said" >&2 ;;
        "$REFUSED")
            cat -- "$handover_dir/said" >&2
            exit "$REFUSED"
            ;;
    esac
    if ((status == 0)); then
        forget_answer
    fi
    if ((status)) || ! read_answer answer; then
        say "the image $APPTRAIN_IMAGE does not start on $(uname -n) (status ${status:-0}):" \
            "${said:-it says nothing}"
        exit $((status ? status : 1))
    fi
}

# make_first_request ARGUMENT...: leaves these, and the environment, for the image. Where it has
# answered before, `facts` are known.
make_first_request() {
    if [[ -z $run_dir ]]; then
        ask_site
    fi
    write_first_request "$@" 2>/dev/null || [[ -n $asked_to_end ]] ||
        refuse job-dir-unwritable "the job's own directory $handover_dir cannot be written:" \
            "set TMPDIR to one of this node that has room"
}

write_first_request() {
    (umask 077 && env -0 >"$handover_dir/environment") && write_request "${@/#/arg=}"
}

# From here on, what this script and the ranks print goes to job.log too.
open_log() {
    [[ -d $run_dir ]] ||
        refuse run-dir-not-on-node \
            "the run directory $run_dir, which the image has made, is not there:" \
            "give one that all nodes share"
    mkfifo -m 600 "$handover_dir/out" "$handover_dir/err"
    exec 3>&1 4>&2
    copy_to_log "$handover_dir/out" 3
    exec >"$handover_dir/out"
    if [[ /dev/fd/3 -ef /dev/fd/4 ]]; then
        exec 2>&1 # one stream, in its order
    else
        copy_to_log "$handover_dir/err" 4
        exec 2>"$handover_dir/err"
    fi
    trap : PIPE
}

# copy_to_log PIPE FD: copies what comes through the pipe to job.log and to the open file FD. It
# ends when the last writer does, not by a signal to the job.
copy_to_log() {
    (
        trap '' HUP INT TERM USR1 USR2
        umask 077
        exec tee -a -- "$run_dir/job.log" <"$1" >&"$2" 3>&- 4>&-
    ) &
    loggers+=($!)
}

# A trap: removes what is this job's own, and waits for the log.
clean_up() {
    local waited=0 ending
    cut_short
    unstage
    trap '' HUP INT TERM # also for `sleep`, of whose end bash would tell
    rm -rf -- "$handover_dir"
    ending=(${loggers[@]+"${loggers[@]}"})
    if [[ -n $mark ]]; then
        finish_run </dev/null >/dev/null 2>&1 3>&- 4>&- &
        ending+=("$!")
    fi
    ((${#ending[@]})) || return 0
    if ((${#loggers[@]})); then
        exec >&3 2>&4 3>&- 4>&-
    fi
    while kill -0 "${ending[@]}" 2>/dev/null && ((waited++ < LOG_TRIES)); do
        sleep "$LOG_PAUSE"
    done
    kill -KILL "${ending[@]}" 2>/dev/null || true
}

# This script has come to an end of its own, without a verdict: whoever uses the run directory next
# need not say how it ended. What another job has begun there since stays.
finish_run() {
    if [[ -f $mark && $(<"$mark") == "$mark_of" ]]; then
        rm -f -- "$mark"
    fi
}

# --- the run --------------------------------------------------------------------------------------

# USR2, or a job's own USR1, is the scheduler's warning. CONT, which Slurm sends beside it, must not
# be trapped: bash loses one of the two.
catch_signals() {
    trap warn USR1 USR2
    trap 'on_end_signal 143' TERM
    trap 'on_end_signal 130; cut_short' INT
    trap 'on_end_signal 129; cut_short' HUP
}

# A trap.
warn() {
    warned=yes
    interrupted=yes
    if [[ -n $run_dir ]]; then
        request_stop
    fi
}

# Has the ranks save and stop; says so once.
request_stop() {
    if [[ -z $is_stop_said ]]; then
        is_stop_said=yes
        say "warned of the end: asking the ranks to save and stop"
    fi
    write_stop_file || say "$run_dir/stop cannot be written: they are not asked"
}

# Says in it when the job ends, if it is to go on as another: ranks that do not stop are ended
# before the scheduler does it.
write_stop_file() {
    local end=''
    if [[ -n $tells_end ]]; then
        end=$(job_end)
    fi
    (umask 077 && printf '%s' "${end:+end=$end}" >"$run_dir/.stop.$$") &&
        mv -- "$run_dir/.stop.$$" "$run_dir/stop"
}

# on_end_signal STATUS: a trap. In a batch job the scheduler sends TERM to the tasks itself.
on_end_signal() {
    asked_to_end=$1
    interrupted=yes
    if [[ $1 == 143 && -z $is_batch ]]; then
        cut_short
    fi
}

# Ends `child`, by `kill` or `interrupt`, as `cutter` says.
cut_short() {
    if [[ -n $child ]]; then
        "$cutter" "$child" 2>/dev/null || true
    fi
}

# Sets `status`.
run_attempt() {
    if [[ -e $handover_dir/verdict || -e $handover_dir/over ]]; then
        rm -f -- "$handover_dir/verdict" "$handover_dir/over"
    fi
    if [[ -n $warned ]]; then
        request_stop
    fi
    if [[ -z $asked_to_end ]]; then
        with_staged await '' start launch
    fi
}

# with_staged CMD...: with the words of `staged` in `task`.
with_staged() {
    local task=("${task[@]:0:3}" ${staged[@]+"${staged[@]}"} "${task[@]:3}")
    "$@"
}

# Sets `follows`, `status` and `lines`, as the image says. If it does not, a planned end goes on,
# and anything else has ended.
conclude() {
    local ended=$status
    if read_answer verdict && [[ $verdict_for == "$asked_to_end" ]]; then
        heed_verdict
        return
    fi
    rm -f -- "$handover_dir/verdict"
    said="$handover_dir cannot be written"
    if write_request "asked=$asked_to_end" "warned=$warned" "told=$(told_of_job)" 2>/dev/null; then
        run_in_image conclude "$CONCLUDE"
    fi
    if read_answer verdict; then
        heed_verdict
        return
    fi
    follows=end
    status=$((ended ? ended : 1))
    if [[ -n $asked_to_end ]]; then
        status=$asked_to_end
    elif ((ended == 0)) && [[ -n $warned || -e $run_dir/stop ]]; then
        follows=requeue
    fi
    said=${said:-nothing}
    ended=${asked_to_end:-$ended}
    lines=("say=the image does not say what follows ($said): ended with status $ended")
}

# The image has taken `mark` away, or begun the attempt that follows.
heed_verdict() {
    mark_of=$attempt
    if [[ $follows != again ]]; then
        mark=''
    fi
}

# shielded SECONDS CMD...: killed after these seconds. TERM, with which a scheduler ends the run
# that it is to run again, does not reach it: `timeout` by itself passes it on, whatever is trapped.
shielded() {
    timeout --signal=KILL "$1" /bin/sh -c "trap '' TERM; exec \"\$@\"" sh "${@:2}"
}

# Has the scheduler run the job again.
go_on() {
    local why
    # Slurm ends this run meanwhile, with TERM.
    if why=$(trap '' TERM && run_again 2>&1); then
        tell "the job will run again, and go on there"
    else
        why=${why:-no answer}
        say "$scheduler does not run it again (${why//$'\n'/ }); $by_hand"
    fi
}

# --dry-run: the launch line, and what each task's entrypoint makes of its place.
show_plans() {
    tell "the launch line, and below the plan of each task:"
    show_only=print_command start launch
    task=("${task[0]}" "${task[@]:3}") # a plan has no outcome
    SLURM_LABELIO=1 start plan 2>&1 | sort -s -n -t : -k 1,1
    exit "${PIPESTATUS[0]}"
}

print_command() {
    printf '%q ' "$@" && echo
}

# Sets all that this file, the signals and the image set, to what it is before a job.
begin_job() {
    asked_to_end=''
    warned=''
    is_stop_said=''
    child=''
    run_dir=''
    attempt=''
    mark=''
    mark_of=''
    show_only=''
    known=''
    cluster=''
    given_image=${APPTRAIN_IMAGE:-}
    goes_on=''
    tells_end=''
    over=''
    dry_run=''
    by_hand=''
    outcome=''
    starter=''
    stop_at=''
    end_at=''
    no_chain=''
    stage=''
    stage_left=''
    staged=()
    exported=()
    given_options=()
    each_node=()
    hosts=()
    host_lines=()
    start_words=()
    plan_words=()
    task=()
    launch_words=()
    chain_words=()
    facts=()
    loggers=()
}

# run_job ARGUMENT...: the whole job; ends this script.
run_job() {
    local status=0
    begin_job
    handover_dir=$(make_own_dir "apptrain.$(uname -n)") ||
        refuse no-temporary-directory \
            "no temporary directory can be made: set TMPDIR to a directory of this node"
    export APPTRAIN_HAND=$handover_dir
    trap clean_up EXIT
    describe_job
    find_profile "$@"
    catch_signals
    prepare "$@"
    if [[ -n $dry_run ]]; then
        show_plans
    fi
    trap - HUP INT TERM # what opens the log could be killed, and be waited for
    open_log
    catch_signals
    say_lines
    if [[ -n $over ]]; then
        exit 0
    fi
    follows=again
    while [[ $follows == again ]]; do
        stage_image "$@"
        run_attempt
        conclude
        say_lines
        export APPTRAIN_ATTEMPT=$attempt
    done
    if ((status)); then
        unstage # tasks that could not end by themselves, or await another attempt, have left theirs
    fi
    stage_left=''
    if [[ $follows == requeue && -n $is_batch ]]; then
        go_on
    elif [[ $follows == requeue ]]; then
        say "$by_hand"
    fi
    exit "$status"
}
