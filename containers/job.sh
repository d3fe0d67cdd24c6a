# shellcheck shell=bash
# shellcheck disable=SC2154 # the job script sets job_id and the like
# What the job scripts of all schedulers share. slurm/multinode.sbatch sources it, and a script of the same shape can.
#
# A job script defines   describe_job      sets job_id, run_id, job_name, submit_dir, cluster, nodelist, nnodes, tasks (of each
#                                          node), ran_before where the scheduler runs it again, or refuses
#                        start WHAT ARG... starts `python -P -m entrypoint WHAT ARG...` once for each task, in the image
#                        interrupt PID     ends what runs as PID, at once
#                        run_again         has the scheduler start this job once more
#                        is_requeued       whether the scheduler is about to start this job once more by itself
#                        is_preempted      whether it wants the nodes for another job, and this one to end before
#                        job_end           prints when the scheduler ends this job, in Unix seconds; nothing if unknown
#                        node_names        prints the names, a line each, in node-rank order
# sets                   scheduler, is_batch (yes: not started by hand), and calls  run_job "$@"
# Reads: APPTRAIN_HOME      the checkout
#        APPTRAIN_IMAGE     (else the one of the profile's stack in containers/)
#        APPTRAIN_PROFILE, APPTRAIN_RUN_DIR, APPTRAIN_ON_FAILURE, APPTRAIN_MAX_RESTARTS, APPTRAIN_DRY_RUN: as the options
#                           of the same names
#        APPTRAIN_ARGS_FILE options and CMD, one argument per NUL, before those of the command line
# Sets:  APPTRAIN_ATTEMPT, and the above as it decided, for run.sh and the entrypoint
# Needs: bash 4.2 and coreutils.
#
# The files' meanings are those of entrypoint/rundir.py and entrypoint/outcome.py.
LC_ALL=C # bytes, not characters; srun's messages in English

readonly ATTEMPTS=3      # after a port or peer that was not available
readonly FRUITLESS=3     # restarts in a row without a new checkpoint between them
readonly LATE=10         # times LATE_PAUSE: what a shared file system may take to show a node's file,
readonly LATE_FAILED=2   # and where a failure is known
readonly LATE_PAUSE=0.5  # s
readonly LOG_TRIES=50    # times LOG_PAUSE: what writing the rest of the log may take
readonly LOG_PAUSE=0.1   # s
readonly DONE=0 BAD_INPUT=64 UNAVAILABLE=69 SAVED=75

say() { printf 'apptrain: %s\n' "${*//$'\n'/ }" >&2; }
tell() { printf 'apptrain: %s\n' "$*"; }

refuse() {
    say "$*"
    exit "$BAD_INPUT"
}

absolute() { if [[ $1 == /* ]]; then printf '%s' "$1"; else printf '%s' "${PWD%/}/$1"; fi; }

# What a file or a variable holds is calculated with only if it is one: bash would run what stands in an index.
is_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,8})$ ]]; }

# The smallest of the numbers in a list like 64(x2),32.
least() {
    local part least=
    for part in ${1//,/ }; do
        part=${part%%(*}
        [[ $part =~ ^[0-9]+$ ]] || continue
        if [[ -z $least ]] || ((part < least)); then least=$part; fi
    done
    printf '%s' "${least:-1}"
}

# Replaces $NAME and ${NAME} by the variables' values; nothing else of a shell's syntax counts.
expand() {
    local rest=$1 done='' name
    while [[ $rest =~ \$(\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)) ]]; do
        name=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
        [[ -n ${!name:-} ]] || refuse "$1 in the profile $profile: $name is not set here: set it, or correct the profile"
        done+=${rest%%"${BASH_REMATCH[0]}"*}${!name}
        rest=${rest#*"${BASH_REMATCH[0]}"}
    done
    printf '%s' "$done$rest"
}

# --- what is asked for ------------------------------------------------------------------------------------------

# Sets `arguments`, what the entrypoint gets; what only this half knows becomes a variable.
read_arguments() {
    local word from_file=() before=() cmd=()
    if [[ -n ${APPTRAIN_ARGS_FILE:-} ]]; then
        [[ -r $APPTRAIN_ARGS_FILE ]] || refuse "APPTRAIN_ARGS_FILE=$APPTRAIN_ARGS_FILE cannot be read: give a path that exists"
        while IFS= read -r -d '' word || [[ -n $word ]]; do from_file+=("$word"); done <"$APPTRAIN_ARGS_FILE"
        unset APPTRAIN_ARGS_FILE APPTRAIN_ARGS
    fi
    take ${from_file[@]+"${from_file[@]}"}
    take "$@"
    arguments=(${before[@]+"${before[@]}"})
    if ((${#cmd[@]})); then arguments+=(-- "${cmd[@]}"); fi
    on_failure=${APPTRAIN_ON_FAILURE:-stop} dry_run=${APPTRAIN_DRY_RUN:-0} port_by_hand=${APPTRAIN_MASTER_PORT:-}
    if [[ " ${before[*]-} ${APPTRAIN_ARGS:-}" == *" --master"[_-]port[\ =]* ]]; then port_by_hand=yes; fi
    [[ $on_failure == @(stop|requeue|restart) ]] ||
        refuse "--on-failure $on_failure: must be one of stop, requeue, restart"
    max_restarts=${APPTRAIN_MAX_RESTARTS:-}
    [[ $max_restarts =~ ^[0-9]{0,9}$ ]] || refuse "--max-restarts $max_restarts: must be a number from 0"
    [[ $dry_run == @(0|1|true|false) ]] || refuse "APPTRAIN_DRY_RUN=$dry_run: must be 1 or 0"
}

# Adds to `before` and `cmd`.
take() {
    local name value
    while (($#)) && [[ $1 != -- ]]; do
        name=${1%%=*}
        name=${name//_/-}
        case $name in
            --dry-run) APPTRAIN_DRY_RUN=1 ;;
            --profile | --run-dir | --start | --stop-before | --on-failure | --max-restarts)
                if [[ $1 == *=* ]]; then value=${1#*=}; else value=${2-}; fi
                [[ -n $value ]] || refuse "$name is empty: give a value, or leave it out"
                if [[ $name == --@(on-failure|max-restarts) ]]; then before+=("$name=$value"); fi
                if [[ $1 != *=* ]]; then shift; fi
                name=${name#--} name=${name//-/_}
                printf -v "APPTRAIN_${name^^}" %s "$value"
                ;;
            *) before+=("$1") ;;
        esac
        shift
    done
    if (($# > 1)); then
        ((${#cmd[@]} == 0)) || refuse "CMD stands both on the command line and in APPTRAIN_ARGS_FILE: give it once"
        cmd=("${@:2}")
    fi
}

# --- the site ---------------------------------------------------------------------------------------------------

# Sets `profile`, a YAML file or empty, and site_* from the host file that was made of it.
find_profile() {
    local file found=()
    profile=${APPTRAIN_PROFILE:-}
    if [[ -z $profile ]]; then
        for file in "$APPTRAIN_HOME"/clusters/*.host; do
            if [[ -n $cluster && -r $file ]] && grep -Fqx -- "cluster=$cluster" "$file"; then found+=("${file%.host}.yaml"); fi
        done
        ((${#found[@]} < 2)) ||
            refuse "${found[*]##*/} are all for the cluster $cluster: choose one with --profile"
        profile=${found[0]:-}
    elif [[ $profile == */* || $profile == *.yaml ]]; then
        profile=$(absolute "$profile")
    else
        profile=$APPTRAIN_HOME/clusters/$profile.yaml
    fi
    [[ -n $profile ]] || return 0
    [[ -r $profile ]] || refuse "there is no profile $profile: the sites are in $APPTRAIN_HOME/clusters"
    file=${profile%.yaml}.host
    [[ -r $file ]] || refuse "$file is missing: $(remedy "$profile")"
    read_site "$file"
    [[ $site_digest == "$(sha256sum <"$profile" | cut -d ' ' -f 1)" ]] ||
        refuse "$file is not made from $profile as that is now: $(remedy "$profile")"
    [[ $site_scheduler == "$scheduler" ]] ||
        refuse "the profile $profile is for $site_scheduler, and this is a job of $scheduler: choose another with --profile"
    export APPTRAIN_PROFILE=$profile
    if [[ $profile != "$APPTRAIN_HOME"/* ]]; then add_bind "$profile"; fi
}

# Sets site_* from a host file (clusters/render.py): lines NAME=VALUE, of which a repeated name makes a list. Nothing is run.
read_site() {
    local line value
    while IFS= read -r line || [[ -n $line ]]; do
        value=${line#*=}
        case $line in
            '#'*) ;;
            cluster=*) ;; # for who looks for it
            module_path=*) site_module_paths+=("$value") ;;
            module=*) site_modules+=("$value") ;;
            bind=*) site_binds+=("$value") ;;
            pass=*) site_pass+=("$value") ;;
            launcher_arg=*) site_launcher_args+=("$value") ;;
            digest=* | scheduler=* | apptainer=* | image=* | scratch=* | start=* | gpus=*)
                printf -v "site_${line%%=*}" %s "$value"
                ;;
            *) refuse "$1: $line has no meaning here: $(remedy "$profile")" ;;
        esac
    done <"$1"
}

# What makes a profile's host file.
remedy() {
    printf 'make profiles'
    if [[ ${1%/*} != "$APPTRAIN_HOME/clusters" ]]; then printf ' PROFILE=%q' "$1"; fi
}

add_bind() { export APPTRAIN_BIND=${APPTRAIN_BIND:+$APPTRAIN_BIND$'\n'}$1; }

# The image, the binds and the program; the variables for the workers are the entrypoint's to read.
use_profile() {
    local bind path
    export APPTRAIN_HOME APPTRAIN_IMAGE=${APPTRAIN_IMAGE:-$APPTRAIN_HOME/containers/${site_image:-image.sif}}
    APPTRAIN_IMAGE=$(absolute "$APPTRAIN_IMAGE")
    for bind in ${site_binds[@]+"${site_binds[@]}"}; do
        path=$(expand "$bind")
        add_bind "$path"
    done
    if [[ -n ${site_pass[*]-} ]]; then export APPTRAIN_PASS="${APPTRAIN_PASS:-} ${site_pass[*]}"; fi
    if [[ -n $site_apptainer && -z ${APPTRAIN_APPTAINER:-} ]]; then
        APPTRAIN_APPTAINER=$(expand "$site_apptainer")
        export APPTRAIN_APPTAINER
    fi
    # Whole nodes, whose GPUs the request did not name.
    if [[ -n $site_gpus && -z ${APPTRAIN_NGPUS:-}${CUDA_VISIBLE_DEVICES:-} ]]; then export APPTRAIN_NGPUS=$site_gpus; fi
}

# Loads the profile's modules; the nodes get what they change through the environment.
load_modules() {
    local file path paths=() status=0
    ((${#site_modules[@]})) || return 0
    for path in ${site_module_paths[@]+"${site_module_paths[@]}"}; do
        path=$(expand "$path")
        paths+=("$path")
    done
    set +eu # module systems are written without
    for file in "${LMOD_PKG:-/nowhere}/init/bash" "${MODULESHOME:-/nowhere}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh; do
        # shellcheck source=/dev/null
        if ! declare -F module >/dev/null && [[ -r $file ]]; then source "$file"; fi
    done
    if ! declare -F module >/dev/null; then
        status=127
    elif ((${#paths[@]} == 0)) || module use "${paths[@]}"; then
        module load "${site_modules[@]}" || status=$?
    else
        status=$?
    fi
    set -eu
    ((status == 0)) ||
        refuse "module load ${site_modules[*]} of the profile $profile ended with status $status: correct its modules (module avail lists them)"
}

# --- the run directory ------------------------------------------------------------------------------------------

# Sets `run_dir`: given, or the name that entrypoint/plan.py gives too.
find_run_dir() {
    local name=$job_name-$run_id base=$submit_dir
    if [[ -n ${APPTRAIN_RUN_DIR:-} ]]; then
        run_dir=$(absolute "$APPTRAIN_RUN_DIR")
    else
        name=${name//[$'\x80'-$'\xbf']/} # of a character of several bytes, the first counts
        if [[ -n ${site_scratch:-} ]]; then base=$(expand "$site_scratch"); fi
        run_dir=${base%/}/runs/${name//[^A-Za-z0-9._-]/_}
    fi
    export APPTRAIN_RUN_DIR=$run_dir
}

make_run_dir() {
    local error
    [[ -z $ran_before || -d $run_dir ]] ||
        say "WARNING: this job has run before, but its run directory $run_dir is not there: it begins anew"
    error=$({
        mkdir -p -- "${run_dir%/*}/" && umask 077 && mkdir -p -- "$run_dir/outcome" "$run_dir/logs" && chmod 700 -- "$run_dir" &&
            { [[ -s $run_dir/join.key ]] || make_key; }
    } 2>&1) ||
        refuse "the run directory $run_dir cannot be made or written (${error##*: }): give another in APPTRAIN_RUN_DIR, which all nodes share"
}

# The secret by which the nodes know each other. Whole or not at all: a requeued job keeps it.
make_key() {
    od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n' >"$run_dir/.join.key.$$" &&
        mv -- "$run_dir/.join.key.$$" "$run_dir/join.key"
}

# Sets `attempt`, one more than any before in this run directory.
count_attempts() {
    local path number
    attempt=0
    for path in "$run_dir"/logs/[0-9]* "$run_dir"/outcome/[0-9]*; do
        if [[ $path == *.nodes && ! -s $path ]]; then continue; fi # an attempt that nobody may begin
        number=${path##*/} number=${number%%.*}
        if is_number "$number" && ((number >= attempt)); then attempt=$((number + 1)); fi
    done
}

# From here on, what this script and the ranks print goes to job.log too.
open_log() {
    local pipes
    pipes=$(mktemp -d -- "${TMPDIR:-/tmp}/apptrain.XXXXXX") ||
        refuse "no temporary directory can be made: set TMPDIR to a directory of this node"
    mkfifo -m 600 "$pipes/out" "$pipes/err"
    loggers=()
    exec 3>&1 4>&2
    copy_to_log "$pipes/out" 3
    exec >"$pipes/out"
    if [[ /dev/fd/3 -ef /dev/fd/4 ]]; then
        exec 2>&1 # one stream, in its order
    else
        copy_to_log "$pipes/err" 4
        exec 2>"$pipes/err"
    fi
    rm -rf -- "$pipes"
    trap : PIPE
    trap close_log EXIT
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

close_log() {
    local waited=0
    trap '' HUP INT TERM # also for `sleep`, of whose end bash would tell
    exec >&3 2>&4 3>&- 4>&-
    while kill -0 "${loggers[@]}" 2>/dev/null && ((waited++ < LOG_TRIES)); do sleep "$LOG_PAUSE"; done
    kill -KILL "${loggers[@]}" 2>/dev/null || true
}

# --- the run ----------------------------------------------------------------------------------------------------

announce() {
    local log=$run_dir/job.log
    tell "run directory $run_dir"
    tell "to follow it: tail -f $(printf %q "$log")"
    tell "job $job_id, attempt $attempt, $nnodes nodes ($nodelist), profile ${profile:-none}, image $APPTRAIN_IMAGE"
    if ((attempt > 0)); then tell "this run directory has been used before: the run goes on there"; fi
}

# USR2 is the scheduler's warning. CONT, which Slurm sends beside it, must not be trapped: bash loses one of the two.
catch_signals() {
    asked='' warned='' child=''
    trap warn USR2
    trap 'end 143' TERM
    trap 'end 130; cut_short' INT
    trap 'end 129; cut_short' HUP
}

warn() {
    warned=yes
    say "warned of the end: asking the ranks to save and stop"
    ask_to_stop || say "$run_dir/stop cannot be written: they are not asked"
}

# With when the job ends, if it is to go on as another: ranks that do not stop are ended before the scheduler does it.
ask_to_stop() {
    local end=''
    if [[ $on_failure != stop && -n $is_batch ]]; then end=$(job_end); fi
    (umask 077 && printf '%s' "${end:+end=$end}" >"$run_dir/.stop.$$") && mv -- "$run_dir/.stop.$$" "$run_dir/stop"
}

# In a batch job the scheduler sends TERM to the tasks itself.
end() {
    asked=$1
    if [[ $1 == 143 && -z $is_batch ]]; then cut_short; fi
}

cut_short() { if [[ -n $child ]]; then interrupt "$child" 2>/dev/null || true; fi; }

# Starts one attempt and waits for its end.
run_attempt() {
    export APPTRAIN_ATTEMPT=$attempt
    (
        umask 077
        mkdir -p -- "$run_dir/logs/$attempt"
        # Nodes of before that still run, cut off from the others, cannot claim this attempt for themselves.
        if [[ $on_failure == restart ]]; then
            : >"$run_dir/outcome/$attempt.nodes"
            echo "$attempt" >"$run_dir/unfinished"
        fi
    )
    rm -f -- "$run_dir/stop"
    if [[ -n $warned ]]; then ask_to_stop; fi
    if [[ -n $asked ]]; then return; fi
    set -m # a process group of its own: Ctrl-C reaches it once, through here
    start launch ${arguments[@]+"${arguments[@]}"} </dev/null 3>&- 4>&- &
    child=$!
    set +m
    if [[ -n $asked ]]; then cut_short; fi
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
    child=
}

# Sets the fields of one outcome file; false where there is none.
read_outcome() {
    local line
    o_status='' o_rank='' o_node='' o_time='' o_error=''
    [[ -r $1 ]] || return 1
    while IFS= read -r line || [[ -n $line ]]; do
        case $line in
            status=*) o_status=${line#*=} ;;
            rank=*) o_rank=${line#*=} ;;
            node=*) o_node=${line#*=} ;;
            time=*) o_time=${line#*=} ;;
            error=*) o_error=${line#*=} ;;
        esac
    done <"$1"
    [[ $o_status =~ ^[0-9]{1,3}$ ]] || return 1
    if [[ $o_time =~ ^([0-9]{1,10})\.([0-9]{6})$ ]]; then o_time=$((10#${BASH_REMATCH[1]}${BASH_REMATCH[2]})); else o_time=0; fi
}

# Sets `attempt` and `crew`, the nodes that take part in it by their places in the list: after a restart inside the
# allocation the last attempt counts (entrypoint/rundir.py).
find_last() {
    local place _
    while [[ -s $run_dir/outcome/$((attempt + 1)).nodes ]]; do attempt=$((attempt + 1)); done
    crew=()
    if [[ -s $run_dir/outcome/$attempt.nodes ]]; then
        while read -r place _; do
            if is_number "$place"; then crew+=("$place"); fi
        done <"$run_dir/outcome/$attempt.nodes"
    else
        for ((place = 0; place < nnodes; place++)); do crew+=("$place"); done
    fi
}

# Sets `status`, `failed_rank` (empty: no rank's), `error`, `missing` and `earliest`, the first failure's time: the job's
# outcome, from those of all tasks (entrypoint/outcome.py has the rule).
judge() {
    local node task file well='' saved='' first=''
    status='' failed_rank='' error='' missing=() earliest=''
    for node in "${crew[@]}"; do
        for ((task = 0; task < tasks; task++)); do
            file=$run_dir/outcome/$attempt.$node
            if ((tasks > 1)) || [[ ! -e $file ]]; then file+=.$task; fi
            if ! read_outcome "$file"; then
                missing+=("$node")
            elif ((o_status == DONE)); then
                well=yes
            elif ((o_status == SAVED)); then
                saved+="${saved:+, }${o_node:-$node}"
            elif [[ -n $first && -z $o_rank && $o_error == 'lost: '* && $o_node == "$(named 0)" ]]; then
                : # cut off, it takes node 0 for lost, which is here and knows better
            elif [[ -z $earliest ]] || ((o_time < earliest)); then
                if ((node == 0)); then first=yes; fi
                earliest=$o_time status=$o_status failed_rank=$o_rank
                error="${o_rank:+rank $o_rank on }${o_node:+$o_node: }$o_error"
            fi
        done
    done
    if [[ -n $earliest ]]; then
        return
    elif ((${#missing[@]})); then
        status=1 error="no outcome was written by $(named "${missing[@]}")"
    elif [[ -n $saved && -n $well ]]; then
        status=1 error="$saved saved to go on, the others ended well"
    elif [[ -n $saved ]]; then
        status=$SAVED
    else
        status=$DONE
    fi
}

# The names of the nodes of these ranks; of many the first four.
named() {
    local names ranks node shown=''
    mapfile -t names < <(node_names)
    mapfile -t ranks < <(printf '%s\n' "$@" | sort -nu)
    for node in "${ranks[@]:0:4}"; do shown+="${shown:+, }${names[node]:-node $node}"; done
    if ((${#ranks[@]} > 4)); then shown+=" and $((${#ranks[@]} - 4)) more"; fi
    printf '%s' "$shown"
}

run_attempts() {
    local try late
    for ((try = 1; ; try++)); do
        run_attempt
        for ((late = 0; late < LATE; late++)); do
            ls -- "$run_dir/outcome" >/dev/null || true # so that NFS looks anew
            find_last
            judge
            if ((${#missing[@]} == 0)) || [[ -n $asked || (-n $earliest && $late -ge $LATE_FAILED) ]]; then break; fi
            sleep "$LATE_PAUSE"
        done
        # A rank's own 69 is not ours (entrypoint/outcome.py has the same rule).
        if ((status != UNAVAILABLE || try == ATTEMPTS)) || [[ -n $failed_rank$asked$port_by_hand ]]; then return; fi
        say "attempt $attempt: $error"
        attempt=$((attempt + 1))
        say "trying again: attempt $attempt, with other ports"
    done
}

# When the newest checkpoint was written, in Unix seconds; 0 where there is none.
newest_checkpoint() {
    local newest
    newest=$(stat -c %.9Y -- "$run_dir"/checkpoints/* 2>/dev/null | sort -n | tail -n 1) || true
    printf '%s' "${newest:-0}"
}

# Why no restart of this run may follow; nothing where one may (entrypoint/restart.py has the same rule for its own).
too_many_restarts() {
    local newest stamp times=0 fruitless=0
    newest=$(newest_checkpoint)
    if [[ -s $run_dir/restarts ]]; then
        while read -r _ stamp; do
            times=$((times + 1))
            if [[ $stamp == "$newest" ]]; then fruitless=$((fruitless + 1)); else fruitless=0; fi
        done <"$run_dir/restarts"
    fi
    if [[ -n $max_restarts ]] && ((times >= 10#$max_restarts)); then
        printf 'restarted %s times before, and --max-restarts is %s' "$times" "$max_restarts"
    elif ((fruitless >= FRUITLESS)) && [[ -z $max_restarts || $newest != 0 ]]; then
        printf 'restarted %s times before, the last %s without a new checkpoint' "$times" "$FRUITLESS"
    fi
}

# Where a job script was lost with its node, those that were left may have come to the end: then nothing is left to do.
conclude_unfinished() {
    local next=$attempt last
    [[ -s $run_dir/unfinished ]] || return 0
    read -r last <"$run_dir/unfinished" || true
    is_number "$last" || return 0
    attempt=$last
    find_last
    judge
    if ((status == DONE)); then conclude; fi
    attempt=$next
}

# Says how it ended, and has the scheduler run the job again where that was asked for.
conclude() {
    local again
    rm -f -- "$run_dir/unfinished"
    again="to go on: the same line again with APPTRAIN_RUN_DIR=$(printf %q "$run_dir")"
    if [[ -n $asked ]]; then
        if [[ -n $is_batch ]] && is_requeued; then
            tell "ended by a signal (status $asked): $scheduler runs the job again, and it goes on there"
        else
            say "ended by a signal (status $asked), not run again by this script; $again"
        fi
        exit "$asked"
    fi
    case $status in
        "$DONE")
            rm -f -- "$run_dir/restarts"
            tell "done: $run_dir"
            ;;
        "$SAVED")
            if [[ -n $warned || -e $run_dir/stop ]]; then
                rm -f -- "$run_dir/restarts"
                say "saved at a planned end"
                continue_later "$again"
            else
                say "saved at an end that was not asked for"
                continue_within_bounds "$again"
            fi
            ;;
        *)
            if [[ -n $is_batch && $status != "$BAD_INPUT" ]] && is_preempted; then
                rm -f -- "$run_dir/restarts"
                say "preempted: $error"
                continue_later "$again"
                exit "$status"
            fi
            say "status $status: $error (logs: $run_dir/logs/$attempt)"
            if [[ $on_failure == stop || $status == "$BAD_INPUT" ]]; then exit "$status"; fi
            if [[ $on_failure == restart ]]; then say "it does not go on inside the allocation: as with --on-failure requeue"; fi
            continue_within_bounds "$again"
            ;;
    esac
    exit "$status"
}

continue_within_bounds() {
    local why
    why=$(too_many_restarts)
    if [[ -n $why ]]; then
        rm -f -- "$run_dir/restarts" # who starts it again may have corrected what failed
        say "not run again: $why; $1"
    else
        (umask 077 && printf '%s %s\n' "$((attempt + 1))" "$(newest_checkpoint)" >>"$run_dir/restarts")
        continue_later "$1"
    fi
}

continue_later() {
    local why
    if [[ -z $is_batch ]]; then
        say "$1"
    elif why=$(trap '' TERM && run_again 2>&1); then # which ends this run with TERM
        tell "the job will run again, and go on there"
    else
        say "$scheduler does not run it again (${why//$'\n'/ }); $1"
    fi
}

# --dry-run: the launch line, and what each task's entrypoint makes of its place.
show_plans() {
    load_modules
    export APPTRAIN_ATTEMPT=0
    if [[ -d $run_dir ]]; then count_attempts && APPTRAIN_ATTEMPT=$attempt; fi
    tell "the launch line, and below the plan of each task:"
    show_only=show start launch ${arguments[@]+"${arguments[@]}"}
    SLURM_LABELIO=1 start plan ${arguments[@]+"${arguments[@]}"} 2>&1 | sort -s -n -t : -k 1,1
    exit "${PIPESTATUS[0]}"
}

show() {
    printf '%q ' "$@"
    echo
}

run_job() {
    # shellcheck disable=SC2034 # the job scripts read some
    ran_before='' site_scheduler='' site_module_paths=() site_modules=() site_binds=() site_pass=() \
        site_start='' site_launcher_args=() site_gpus='' \
        site_apptainer='' site_image='' site_scratch='' site_digest=''
    read_arguments "$@"
    describe_job
    find_profile
    use_profile
    find_run_dir
    if [[ $dry_run == @(1|true) ]]; then show_plans; fi
    make_run_dir
    count_attempts
    open_log
    catch_signals # not before: what opens the log could be killed, and be waited for
    announce
    conclude_unfinished
    load_modules
    run_attempts
    conclude
}
