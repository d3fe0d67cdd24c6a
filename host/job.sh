# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # the job scripts read and set some
# What the job scripts of all schedulers share. slurm/multinode.sbatch sources it, and a script of the same shape can.
#
# It starts and ends what runs, catches signals and asks the scheduler; what any of it means, the image decides: before
# the job `entrypoint prepare`, after each attempt the first node's `launch` or, where more has to be known, `entrypoint
# conclude`. Both halves leave what they tell each other in $hand (entrypoint/job/handover.py has the names).
#
# A job script defines   describe_job      sets cluster, and `facts`, NAME=VALUE for the image; or refuses
#                        start WHAT        starts "${task[@]}" WHAT "${launch_words[@]}" for each task
#                        interrupt PID     ends what runs as PID, at once
#                        run_again         has the scheduler start this job once more, or says why not
#                        told_of_job       prints what the scheduler says of the job
#                        job_end           prints when it ends this job, in Unix seconds; nothing if unknown
# sets                   scheduler, is_batch (yes: not started by hand), and calls  run_job "$@"
# Reads: APPTRAIN_HOME      the checkout
#        APPTRAIN_IMAGE     (else the one of the profile's stack in containers/)
#        APPTRAIN_PROFILE, and --profile as a word of APPTRAIN_ARGS, APPTRAIN_ARGS_FILE and the arguments
# Sets:  APPTRAIN_HAND, APPTRAIN_ATTEMPT, and what the image says
# Needs: bash 4.2 and coreutils.
LC_ALL=C # bytes, not characters; srun's messages in English
# shellcheck source=host/common.sh
source "$APPTRAIN_HOME/host/common.sh"

readonly LOG_TRIES=50    # times LOG_PAUSE: what writing the rest of the log may take
readonly LOG_PAUSE=0.1   # s
readonly PREPARE=900     # s; a node that cannot mount the image unpacks it
readonly CONCLUDE=300    # s

say() { printf 'apptrain: %s\n' "${*//$'\n'/ }" >&2; }
tell() { printf 'apptrain: %s\n' "$*"; }

refuse() { say "$*"; exit "$REFUSED"; }

# --- the site: what must be known before there is an image ------------------------------------------------------

# Sets `profile`, a YAML file or empty: as --profile says, the one option that this half must know, else for this
# cluster.
find_profile() {
    local file words=() found=()
    profile=${APPTRAIN_PROFILE:-}
    if [[ -n ${APPTRAIN_ARGS_FILE:-} && -r $APPTRAIN_ARGS_FILE ]]; then
        while IFS= read -r -d '' file; do words+=("$file"); done <"$APPTRAIN_ARGS_FILE"
    elif [[ -n ${APPTRAIN_ARGS:-} ]]; then
        read -r -d '' -a words < <(printf '%s\0' "${APPTRAIN_ARGS//[\'\"\\]/}") # quoted words without blanks, at least
    fi
    find_option ${words[@]+"${words[@]}"}
    # A quoted path with blanks is cut here: the image says which it is.
    if [[ ${APPTRAIN_ARGS:-} == *[\'\"\\]* && ! -r $(profile_file) ]]; then profile=${APPTRAIN_PROFILE:-}; fi
    find_option "$@"
    if [[ -z $profile ]]; then
        for file in "$APPTRAIN_HOME"/clusters/*.host; do
            if [[ -n $cluster ]] && grep -Fsqx -- "cluster=$cluster" "$file"; then found+=("${file%.host}.yaml"); fi
        done
        ((${#found[@]} < 2)) || refuse "${found[*]##*/} are all for the cluster $cluster: choose one with --profile"
        profile=${found[0]:-}
    fi
    [[ -z $profile ]] || profile=$(profile_file)
}

profile_file() {
    if [[ $profile == */* || $profile == *.yaml ]]; then absolute "$profile"; return; fi
    printf '%s' "$APPTRAIN_HOME/clusters/$profile.yaml"
}

find_option() {
    while (($#)) && [[ $1 != -- ]]; do
        if [[ $1 == --profile ]]; then profile=${2:-$profile}; elif [[ $1 == --profile=?* ]]; then profile=${1#*=}; fi
        shift
    done
}

# Sets the image and the program, and loads the modules, as the profile's host file says (entrypoint/cli/profiles.py).
use_site() {
    local file=${profile%.yaml}.host line value digest='' image='' program='' paths=() modules=()
    if [[ -n $profile ]]; then
        [[ -r $profile ]] || refuse "there is no profile $profile: the sites are in $APPTRAIN_HOME/clusters"
        [[ -r $file ]] || refuse "$file is missing: $(remedy)"
        while IFS= read -r line || [[ -n $line ]]; do
            value=${line#*=}
            case $line in
                '#'* | cluster=* | profile=*) ;; # for who looks for it, and for the image
                digest=*) digest=$value ;;
                image=*) image=$value ;;
                apptainer=*) program=$value ;;
                module_path=*) value=$(expand "$value"); paths+=("$value") ;;
                module=*) modules+=("$value") ;;
                *) refuse "$file: $line has no meaning here: $(remedy)" ;;
            esac
        done <"$file"
        [[ $digest == "$(sha256sum <"$profile" | cut -d ' ' -f 1)" ]] ||
            refuse "$file is not made from $profile as that is now: $(remedy)"
    fi
    APPTRAIN_IMAGE=$(absolute "${given_image:-$APPTRAIN_HOME/containers/${image:-image.sif}}")
    if [[ -n $program && -z ${APPTRAIN_APPTAINER:-} ]]; then APPTRAIN_APPTAINER=$(expand "$program"); fi
    export APPTRAIN_HOME APPTRAIN_IMAGE APPTRAIN_APPTAINER
    if ((${#modules[@]})); then load_modules; fi
}

# What makes a profile's host file.
remedy() {
    printf 'make profiles'
    [[ ${profile%/*} == "$APPTRAIN_HOME/clusters" ]] || printf ' PROFILE=%q' "$profile"
}

# Replaces $NAME and ${NAME} by the variables' values; nothing else of a shell's syntax counts.
expand() {
    local rest=$1 done='' name
    while [[ $rest =~ \$(\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)) ]]; do
        name=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
        [[ -n ${!name:-} ]] ||
            refuse "$1 in the profile $profile: $name is not set here: set it, or correct the profile"
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
        if ! declare -F module >/dev/null && [[ -r $file ]]; then source "$file"; fi
    done
    declare -F module >/dev/null || status=127
    ((status || ${#paths[@]} == 0)) || module use "${paths[@]}" || status=$?
    ((status)) || module load "${modules[@]}" || status=$?
    set -eu
    ((status == 0)) ||
        refuse "module load ${modules[*]} of the profile $profile ended with status $status:" \
            "correct its modules (module avail lists them)"
}

# --- what the two halves tell each other --------------------------------------------------------------------------

# Leaves NAME=VALUE entries for the image.
ask() {
    (umask 077 && printf '%s\0' "scheduler=$scheduler" "home=$APPTRAIN_HOME" "image=$APPTRAIN_IMAGE" \
        "profile=$profile" "batch=$is_batch" "script=$$" "attempt=${APPTRAIN_ATTEMPT-}" \
        ${facts[@]+"${facts[@]}"} "$@" >"$hand/ask")
}

# Reads what the image has left in this file; false where there is nothing. Nothing of it is run, and only a number is
# calculated with. Of a verdict, `follows` is end, again (this job, other ports) or requeue (another job); a restart
# inside the allocation is not the host's: the launchers make it. `goes_on`: nodes may be lost on the way. `tells_end`:
# ranks that do not stop when asked are ended. `over`: nothing is left to do. `no_chain`: why no job may follow.
hear() {
    local entry value
    lines=() follows='' status='' asked_for=''
    [[ -s $hand/$1 ]] || return 1
    while IFS= read -r -d '' entry; do
        value=${entry#*=}
        [[ $entry != @(attempt|status|stop_at|end_at|line)=* || $value =~ ^(0|[1-9][0-9]{0,14})$ ]] ||
            refuse "the image says $entry: must be a number"
        case $entry in
            say=* | tell=*) lines+=("$entry") ;;
            run_dir=* | attempt=* | profile=* | status=* | follows=* | goes_on=* | tells_end=* | over=* | \
                dry_run=* | by_hand=* | outcome=* | starter=* | stop_at=* | end_at=* | no_chain=*)
                printf -v "${entry%%=*}" %s "$value" ;;
            asked=*) asked_for=$value ;;
            host=*) hosts+=("$value") ;;
            line=*) host_lines+=("$value") ;;
            start=*) start_words+=("$value") ;;
            plan=*) plan_words+=("$value") ;;
            run=*) task+=("$value") ;;
            launch=*) launch_words+=("$value") ;;
            chain=*) chain_words+=("$value") ;;
            export=APPTRAIN_*)
                [[ ${value%%=*} =~ ^[A-Z_]+$ ]] || refuse "the image says $entry: no such variable"
                export "${value?}" ;;
            *) refuse "the image says ${entry%%=*}, which means nothing here: it is of another version: make image" ;;
        esac
    done <"$hand/$1"
}

say_lines() {
    local entry
    for entry in ${lines[@]+"${lines[@]}"}; do
        if [[ $entry == say=* ]]; then say "${entry#*=}"; else tell "${entry#*=}"; fi
    done
}

# Runs `entrypoint WHAT` in the image here, for so many seconds at most. Sets `status`; what it said is in `said`.
inside() {
    cutter='kill'
    await "$asked" timeout --kill-after=10 "$2" "$APPTRAIN_HOME/containers/run.sh" --quiet --all-of-host \
        "$APPTRAIN_IMAGE" python -P -m entrypoint "$1" "$hand" >"$hand/said" 2>&1
    cutter='interrupt'
    said=$(tail -c 2000 -- "$hand/said" | tr '\n' ' ') said=${said% }
}

# await ASKED CMD...: starts it in a process group of its own, for Ctrl-C is to reach it once, through here; sets
# `status` at its end. It is ended where `asked` is another than was known.
await() {
    set -m
    "${@:2}" </dev/null 3>&- 4>&- &
    child=$!
    set +m
    if [[ $asked != "$1" ]]; then cut_short; fi
    await_end "$child" 0 # what a program of ours has left says how it ended
    child=
}

# --- before -------------------------------------------------------------------------------------------------------

# Has the image decide what this job is; sets what `hear` sets.
prepare() {
    local given=$profile
    for ((;;)); do
        use_site
        if declare -F ask_site >/dev/null; then ask_site; fi
        { (umask 077 && env -0 >"$hand/environment") && ask "${@/#/arg=}"; } 2>/dev/null || [[ -n $asked ]] ||
            refuse "the job's own directory $hand cannot be written: set TMPDIR to one of this node that has room"
        inside prepare "$PREPARE"
        if [[ -n $asked ]]; then exit "$asked"; fi
        [[ $said != *"invalid choice: 'prepare'"* ]] ||
            refuse "the image $APPTRAIN_IMAGE is of another version than the checkout $APPTRAIN_HOME: make image"
        if ((status == 0 || status == REFUSED)); then cat -- "$hand/said" >&2; fi
        if ((status == REFUSED)); then exit "$REFUSED"; fi
        if ((status)) || ! hear answer; then
            say "the image $APPTRAIN_IMAGE does not start on $(uname -n) (status $status): ${said:-it says nothing}"
            exit $((status ? status : 1))
        fi
        if [[ -n $run_dir ]]; then break; fi
        [[ $given != "$profile" ]] || refuse "the image finds another profile ($profile) each time: give --profile"
        given=$profile
    done
    unset APPTRAIN_ARGS APPTRAIN_ARGS_FILE
    export APPTRAIN_ATTEMPT=$attempt
    task=("$APPTRAIN_HOME/containers/run.sh" --outcome "$outcome" "${task[@]}" "$APPTRAIN_IMAGE")
    task+=(python -P -m entrypoint)
}

# From here on, what this script and the ranks print goes to job.log too.
open_log() {
    [[ -d $run_dir ]] ||
        refuse "the run directory $run_dir, which the image has made, is not there: give one that all nodes share"
    mkfifo -m 600 "$hand/out" "$hand/err"
    exec 3>&1 4>&2
    copy_to_log "$hand/out" 3
    exec >"$hand/out"
    if [[ /dev/fd/3 -ef /dev/fd/4 ]]; then
        exec 2>&1 # one stream, in its order
    else
        copy_to_log "$hand/err" 4
        exec 2>"$hand/err"
    fi
    trap : PIPE
}

# It ends when the last writer does, not by a signal to the job.
copy_to_log() {
    (
        trap '' HUP INT TERM USR1 USR2
        umask 077
        exec tee -a -- "$run_dir/job.log" <"$1" >&"$2" 3>&- 4>&-
    ) &
    loggers+=($!)
}

clean_up() {
    local waited=0
    trap '' HUP INT TERM # also for `sleep`, of whose end bash would tell
    rm -rf -- "$hand"
    ((${#loggers[@]})) || return 0
    exec >&3 2>&4 3>&- 4>&-
    while kill -0 "${loggers[@]}" 2>/dev/null && ((waited++ < LOG_TRIES)); do sleep "$LOG_PAUSE"; done
    kill -KILL "${loggers[@]}" 2>/dev/null || true
}

# --- the run ------------------------------------------------------------------------------------------------------

# USR2, or a job's own USR1, is the scheduler's warning. CONT, which Slurm sends beside it, must not be trapped: bash loses one of the two.
catch_signals() {
    trap warn USR1 USR2
    trap 'end 143' TERM
    trap 'end 130; cut_short' INT
    trap 'end 129; cut_short' HUP
}

warn() {
    warned=yes interrupted=yes
    if [[ -n $run_dir ]]; then heed; fi
}

heed() {
    if [[ -z $heeded ]]; then heeded=yes && say "warned of the end: asking the ranks to save and stop"; fi
    ask_to_stop || say "$run_dir/stop cannot be written: they are not asked"
}

# With when the job ends, if it is to go on as another: ranks that do not stop are ended before the scheduler does it.
ask_to_stop() {
    local end=''
    if [[ -n $tells_end ]]; then end=$(job_end); fi
    (umask 077 && printf '%s' "${end:+end=$end}" >"$run_dir/.stop.$$") && mv -- "$run_dir/.stop.$$" "$run_dir/stop"
}

# In a batch job the scheduler sends TERM to the tasks itself.
end() { asked=$1 interrupted=yes; if [[ $1 == 143 && -z $is_batch ]]; then cut_short; fi; }

cut_short() { if [[ -n $child ]]; then "$cutter" "$child" 2>/dev/null || true; fi; }

run_attempt() {
    rm -f -- "$hand/verdict" "$hand/over"
    if [[ -n $warned ]]; then heed; fi
    if [[ -z $asked ]]; then await '' start launch; fi
}

# Sets what follows, as the image says. Where it does not, a planned end goes on, and anything else has ended.
conclude() {
    local ended=$status
    if hear verdict && [[ $asked_for == "$asked" ]]; then return; fi
    rm -f -- "$hand/verdict"
    said="$hand cannot be written"
    if ask "asked=$asked" "warned=$warned" "told=$(told_of_job)" 2>/dev/null; then inside conclude "$CONCLUDE"; fi
    if hear verdict; then return; fi
    follows=end status=$((ended ? ended : 1))
    if [[ -n $asked ]]; then
        status=$asked
    elif ((ended == 0)) && [[ -n $warned || -e $run_dir/stop ]]; then
        follows=requeue
    fi
    lines=("say=the image does not say what follows (${said:-nothing}): ended with status ${asked:-$ended}")
}

# Has the scheduler run the job again.
go_on() {
    local why
    if why=$(trap '' TERM && run_again 2>&1); then # which ends this run with TERM
        tell "the job will run again, and go on there"
    else
        say "$scheduler does not run it again (${why//$'\n'/ }); $by_hand"
    fi
}

# --dry-run: the launch line, and what each task's entrypoint makes of its place.
show_plans() {
    tell "the launch line, and below the plan of each task:"
    show_only=show start launch
    task=("${task[0]}" "${task[@]:3}") # a plan has no outcome
    SLURM_LABELIO=1 start plan 2>&1 | sort -s -n -t : -k 1,1
    exit "${PIPESTATUS[0]}"
}

show() { printf '%q ' "$@" && echo; }

run_job() {
    local status=0
    asked='' warned='' heeded='' child='' run_dir='' attempt='' show_only='' cluster='' given_image=${APPTRAIN_IMAGE:-}
    goes_on='' tells_end='' over='' dry_run='' by_hand='' outcome='' starter='' stop_at='' end_at='' no_chain=''
    hosts=() host_lines=() start_words=() plan_words=() task=() launch_words=() chain_words=() facts=() loggers=()
    hand=$(mktemp -d -- "${TMPDIR:-/tmp}/apptrain.$(uname -n).XXXXXX") ||
        refuse "no temporary directory can be made: set TMPDIR to a directory of this node"
    export APPTRAIN_HAND=$hand
    trap clean_up EXIT
    describe_job
    find_profile "$@"
    catch_signals
    prepare "$@"
    if [[ -n $dry_run ]]; then show_plans; fi
    trap - HUP INT TERM # what opens the log could be killed, and be waited for
    open_log
    catch_signals
    say_lines
    if [[ -n $over ]]; then exit 0; fi
    follows=again
    while [[ $follows == again ]]; do
        run_attempt
        conclude
        say_lines
        export APPTRAIN_ATTEMPT=$attempt
    done
    if [[ $follows == requeue ]]; then if [[ -n $is_batch ]]; then go_on; else say "$by_hand"; fi; fi
    exit "$status"
}
