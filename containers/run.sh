#!/usr/bin/env bash
# Run a command inside the image on this node. Whatever a job runs in the image, `apptainer exec` is
# called here.
#
# Usage: containers/run.sh [OPTION...] IMAGE CMD [ARG...]   IMAGE: a SIF file or an unpacked image
#        --show            print the command line, what is bound and why, and which variables pass;
#                          start nothing
#        --bind WHY SPEC   show a further path, SRC[:DST[:ro]]; WHY is for messages
#        --pass NAME       pass a further variable, NAME or PREFIX_*
#        --option WORD     a further option of `apptainer exec`, as a profile says
#        --obey-binds      show what a site's module has in APPTAINER_BIND, too
#        --wrapper FILE    a program inside that is started with CMD as its arguments
#        --venv DIR        make its bin/ the first in PATH (else APPTRAIN_VENV)
#        --staged DIR BYTES ID   take this node's own copy of IMAGE, if it is there, and remove
#                          it at the end (host/staged.sh)
#        --script FILE     what CMD runs, for its directory to be shown
#        --outcome FILE    what says how CMD ended, if it cannot; in FILE's name %a is the attempt,
#                          %n the node's rank and %t the task's number there
#        --cpu             no GPU is expected
#        --all-of-host     show every top-level directory of the host that the image lacks
#        --quiet           say nothing but why it cannot run
#        --tell FILE       leave there what Apptainer says of itself (host/image.sh)
#        --known LINE      what it has said so, also on another node
#        --help            print this, and nothing else
# Reads: APPTRAIN_APPTAINER   the program (else apptainer, else singularity, from PATH)
#        APPTRAIN_BIND        further paths to show inside, SRC[:DST[:ro]], one a line
#        APPTRAIN_PASS        further variables to pass, NAME or PREFIX_*
#        APPTRAIN_CUDA_COMPAT the node's directory with CUDA's forward compatibility, for a driver
#                             older than the stack
#        APPTRAIN_UNPACK=1    unpack the image for this run instead of mounting it
#        APPTRAIN_HOME, APPTRAIN_HAND, APPTRAIN_VENV, APPTRAIN_ATTEMPT
#        HOME, TMPDIR, APPTAINER_TMPDIR, and what Slurm or PBS say of this node
# Sets:  for its parts in host/, each of which lists what it sets itself:
#        _environment  every variable as it was at the start, NAME=VALUE
#        checkout, SHARED
#        node, node_rank, local_rank   main: as the scheduler numbers them; empty if none does
#        show_only, staged, staged_bytes, staged_id, outcome, venv, script, device, all_of_host,
#        binds, passes, known, tell   read_options
#        tmp_mb, shm_mb   read_rooms: MB that are to be free in `tmp`, and in /dev/shm
#        options, obeys_binds, wrappers   read_options
#        tmp           make_tmp: the run's own directory on the node's disk
#        answer        quote: the word
#        command       CMD and its arguments
#        line          assemble: the whole command line
#        status        run: how it ended
#        run_at        run: when it began
#        signalled, unpack, mount_tried, opened   empty until a part sets them
# Exit:  CMD's status, 128+N when signal N ended it · 64 it cannot run here, and one line says why ·
#        Apptainer's own status where it failed, after its own message and one of ours
#
# Paths are the same inside and outside, and of the variables only those pass that
# host/environment.sh names. docs/run.md has the reasons and the remedies.
# shellcheck disable=SC2034,SC2154 # its parts in host/ read and set some
set -euo pipefail
# What passes is read before a name of ours covers one of it.
_environment=()
while IFS= read -r -d '' _entry; do
    _environment+=("$_entry")
done </proc/self/environ
LC_ALL=C # bytes, not characters
checkout=$(readlink -f -- "${BASH_SOURCE[0]}")
checkout=${checkout%/*/*}
# shellcheck source=host/common.sh
source "$checkout/host/common.sh"
# shellcheck source=host/schedulers.sh
source "$checkout/host/schedulers.sh"
# shellcheck source=host/staged.sh
source "$checkout/host/staged.sh"
# shellcheck source=host/image.sh
source "$checkout/host/image.sh"
# shellcheck source=host/binds.sh
source "$checkout/host/binds.sh"
# shellcheck source=host/environment.sh
source "$checkout/host/environment.sh"
# shellcheck source=host/driver.sh
source "$checkout/host/driver.sh"
# shellcheck source=host/share.sh
source "$checkout/host/share.sh"

readonly SHARED='correct it, or use a directory that all nodes share'
# How many MB a run is to find free, which Python reads too.
readonly ROOMS=$checkout/entrypoint/doctor/room.txt

# --- what is said, and how it ends ----------------------------------------------------------------

say() {
    local text=$*
    print_message "$node: ${text//$'\n'/\\n}"
}

# Say what is the same for all tasks of a node, or of the job: by the first of them.
say_for_node() {
    if [[ -z $quiet && ${local_rank:-0} == 0 ]]; then
        say "$*"
    fi
}

say_for_job() {
    if [[ ${node_rank:-0} == 0 ]]; then
        say_for_node "$*"
    fi
}

# refuse ID TEXT...: the id names the cause, and is not printed.
refuse() {
    shift
    say "$*"
    tell_outcome "$REFUSED" "$*"
    exit "$REFUSED"
}

# tell_outcome STATUS ERROR: a node whose entrypoint left no outcome ends the others' wait.
tell_outcome() {
    [[ -z $outcome ]] || write_outcome "$outcome" "$1" "$node" "$2" ||
        say "the outcome (status $1) could not be written to $outcome"
}

clean_up() {
    trap '' HUP INT TERM USR1 USR2
    if [[ -n $opened ]]; then
        close_share 2>/dev/null || true
    fi
    drop_copy
    [[ -n $tmp ]] || return 0
    rm -rf -- "$tmp" 2>/dev/null && return
    # What was unpacked may hold directories without write permission.
    chmod -R u+rwX -- "$tmp" 2>/dev/null || true
    rm -rf -- "$tmp" 2>/dev/null || say "$tmp could not be removed"
}

# --- what is to run -------------------------------------------------------------------------------

# Prints the usage that stands at the top of this file.
show_usage() {
    sed -n '/^# Usage: /,/^# Reads: /{/^# Reads: /d; s/^# //; p}' -- "$checkout/containers/run.sh"
}

# Sets what the options say (see above), `quiet`, and `rest`, what stands behind them.
read_options() {
    show_only=''
    staged=''
    staged_bytes=''
    staged_id=''
    outcome=''
    venv=${APPTRAIN_VENV:-}
    script=''
    device=''
    all_of_host=''
    quiet=''
    known=''
    tell=''
    binds=()
    passes=()
    options=()
    obeys_binds=''
    wrappers=()
    while (($#)) && [[ $1 == --* ]]; do
        case $1 in
            --help)
                show_usage
                exit
                ;;
            --show) show_only=yes ;;
            --cpu) device=cpu ;;
            --all-of-host) all_of_host=yes ;;
            --obey-binds) obeys_binds=yes ;;
            --quiet) quiet=yes ;;
            --bind)
                binds+=("${2-}" "${3-}")
                shift $(($# > 2 ? 2 : $# - 1))
                ;;
            --pass)
                passes+=("${2-}")
                shift
                ;;
            --option)
                options+=("${2-}")
                shift
                ;;
            --wrapper)
                wrappers+=("${2-}")
                shift
                ;;
            --staged)
                staged=${2-}
                staged_bytes=${3-}
                staged_id=${4-}
                shift $(($# > 3 ? 3 : $# - 1))
                ;;
            --venv | --script | --outcome | --known | --tell)
                printf -v "${1#--}" %s "${2-}"
                shift
                ;;
            *)
                refuse run-sh-unknown-option \
                    "$1 is no option of run.sh: an option of CMD comes behind it"
                ;;
        esac
        if (($#)); then
            shift
        fi
    done
    rest=("$@")
}

# Sets the name of `outcome` for this task; removes what an earlier run left there.
find_outcome() {
    local name=${outcome##*/}
    [[ -n $outcome ]] || return 0
    name=${name//%a/${APPTRAIN_ATTEMPT:-0}}
    name=${name//%n/${node_rank:-0}}
    name=${name//%t/${local_rank:-0}}
    if [[ -n $show_only || ! $name =~ ^[0-9.]+$ ]]; then
        outcome=''
        return
    fi
    outcome=${outcome%/*}/$name
    if ! clear_outcome 2>/dev/null; then
        name=${outcome%/*/*}
        outcome=''
        refuse run-dir-not-made "the run directory $name cannot be made:" \
            "give another in APPTRAIN_RUN_DIR, which all nodes share"
    fi
}

# Makes the directory of `outcome`, and removes the file.
clear_outcome() {
    if [[ ! -d ${outcome%/*} ]]; then
        mkdir -p -- "${outcome%/*/*/*}/" && (umask 077 && mkdir -p -- "${outcome%/*}") || return
    fi
    if [[ -e $outcome || -L $outcome ]]; then
        rm -f -- "$outcome"
    fi
}

# --- the run's own directory on the node's disk ---------------------------------------------------

# find_free PATH...: sets `free` to how many MB are free at each; false if one does not say.
find_free() {
    local blocks size
    free=()
    while read -r blocks size; do
        free+=($((blocks * size / 1000000)))
    done < <(stat -f -c '%a %S' -- "$@")
    ((${#free[@]} == $#))
}

# Sets `tmp_mb` and `shm_mb`.
read_rooms() {
    local what mb
    tmp_mb=''
    shm_mb=''
    if [[ -r $ROOMS ]]; then
        while read -r what mb; do
            case $what in
                TMPDIR) tmp_mb=$mb ;;
                /dev/shm) shm_mb=$mb ;;
            esac
        done <"$ROOMS"
    fi
    [[ $tmp_mb =~ ^[0-9]+$ && $shm_mb =~ ^[0-9]+$ ]] ||
        refuse checkout-incomplete "$ROOMS is not there or cannot be read: use a whole checkout"
}

# Sets `tmp`, in the first place that has room and lets programs run, and `free`, there and in
# /dev/shm.
make_tmp() {
    local place why unfit='' seen=: shm=()
    [[ ! -d /dev/shm ]] || shm=(/dev/shm)
    first_set "${NODE_DISKS[@]}"
    for place in "$answer" "${TMPDIR:-}" /tmp; do
        [[ $place == /* && $seen != *":$place:"* ]] || continue
        seen+=$place:
        if ! { tmp=$(mktemp -d -- "${place%/}/apptrain.XXXXXX"); } 2>/dev/null; then
            why="is no directory that may be written"
            tmp=''
        elif find_free "$tmp" ${shm[@]+"${shm[@]}"} && ((free[0] < tmp_mb)); then
            why="has less than $tmp_mb MB free"
            rmdir -- "$tmp" && tmp=''
        elif ! can_run_programs 2>/dev/null; then
            why="is full, or lets no program run (noexec)"
            rm -rf -- "$tmp"
            tmp=''
        else
            [[ -z $unfit ]] || say_for_node "$unfit: temporary files go to $place"
            return
        fi
        unfit+="${unfit:+, }$place $why"
    done
    refuse tmpdir-unfit "$unfit: give a directory on the node's own disk in TMPDIR"
}

# Whether `tmp` has room for a program, and lets it run.
can_run_programs() {
    printf '#!/bin/sh\n' >"$tmp/.start" && chmod 700 "$tmp/.start" && "$tmp/.start"
}

check_shm() {
    local why=''
    if [[ ! -d /dev/shm || ! -w /dev/shm ]]; then
        why="is not there or may not be written"
    elif [[ -n ${free[1]-} ]] && ((free[1] < shm_mb)); then
        why="has ${free[1]} MB free, less than $shm_mb"
    fi
    [[ -z $why ]] ||
        say_for_node "/dev/shm $why: DataLoader's workers and NCCL may fail" \
            "(use fewer workers or none, NCCL_SHM_DISABLE=1)"
}

# --- the start ------------------------------------------------------------------------------------

# quote TEXT: sets `answer` to it as one word of a shell.
quote() {
    local q="'" r="'\\''"
    answer="'${1//$q/$r}'"
}

# Sets `named`, the paths that CMD names and this node has: as given, behind a =, and where a new
# file is to come.
find_named() {
    local word path paths
    named=()
    for word in "${command[@]}"; do
        paths=("$word")
        if [[ $word == *=* ]]; then
            paths+=("${word#*=}")
        fi
        for path in "${paths[@]}"; do
            if [[ ! -e $path && $path == /?*/* && -d ${path%/*} ]]; then
                path=${path%/*}
            fi
            if [[ -e $path ]]; then
                named+=("$path")
            fi
        done
    done
}

# Writes what runs first inside: it alone can say what the image has of its own. It leaves
# `started`, or `lacking`. An image that is not ours gets our packages from the checkout, which then
# has no more than those two names in PYTHONPATH. It may have Python as python3 alone, as Debian
# does, and one older than 3.11, which does not know -P.
write_start() {
    local path started='' in_tmp home here is_ours="[ -n \"\${APPTRAIN_STACK:-}\" ]"
    find_named
    quote "$tmp" && in_tmp=$answer
    quote "$HOME" && home=$answer
    quote "$PWD" && here=$answer
    # shellcheck disable=SC2016 # for the shell inside
    {
        echo "$is_ours || export PYTHONPATH=$OURS\"\${PYTHONPATH:+:\$PYTHONPATH}\""
        echo ": >$in_tmp/.started"
        echo "lacks() { printf %s \"\$1\" >$in_tmp/.lacking; exit $REFUSED; }"
        # Apptainer's own directory is where symlinks lead.
        echo "export HOME=$home; cd $here; unset OLDPWD"
        if [[ -n $venv ]]; then
            quote "$venv_python"
            echo "[ -x $answer ] || lacks venv"
            quote "$venv"
            echo "export VIRTUAL_ENV=$answer PATH=$answer/bin:\"\$PATH\""
        fi
        echo '[ "$1" != python ] || command -v python >/dev/null || { shift; set -- python3 "$@"; }'
        echo "case \"\$2 \$3 \$4\" in '-P -m entrypoint'*)$is_ours ||" \
            '"$1" -PSc "" 2>/dev/null || lacks python;; esac'
        for path in ${named[@]+"${named[@]}"}; do
            quote "$path"
            echo "[ -e $answer ] || lacks 'path '$answer"
        done
        for path in ${wrappers[@]+"${wrappers[@]}"}; do
            quote "$path"
            echo "[ -x $answer ] || lacks 'wrapper '$answer"
            started+=" $answer"
        done
        echo "command -v \"\$1\" >/dev/null || lacks program; exec$started \"\$@\""
    } >"$tmp/.start"
}

# Sets `line`, the whole command line.
assemble() {
    local i field q='"'
    line=(${cleared[@]+env "${cleared[@]}"} ${shield:+env "PATH=$shield:$PATH"})
    line+=("$apptainer" -q exec --cleanenv --no-eval --no-mount 'home,cwd,tmp')
    line+=(${userns:+"$userns"} ${options[@]+"${options[@]}"} ${nv:+"$nv"} ${unpack:+"$unpack"})
    for ((i = 0; i < ${#targets[@]}; i++)); do
        field="type=bind,\"source=${sources[i]//$q/$q$q}\",\"destination=${targets[i]//$q/$q$q}\""
        if [[ ${modes[i]} == ro ]]; then
            field+=,ro
        fi
        line+=(--mount "$field")
    done
    line+=(--pwd "$PWD" "$image" /bin/sh "$tmp/.start" "${command[@]}")
}

show_all() {
    local i path
    printf 'image    %s (%s%s)\nwith     %s (%s %s)\nstarts   in %s\n\nbinds\n' \
        "$image" "$kind" "${image_id:+ $image_id}" "$apptainer" "$package" "$version" "$PWD"
    for ((i = 0; i < ${#targets[@]}; i++)); do
        if [[ ${sources[i]} == "${targets[i]}" ]]; then
            path=${targets[i]}
        else
            path=${sources[i]}:${targets[i]}
        fi
        printf '  %s, %s  [%s]\n' "$path" "${modes[i]}" "${reasons[i]}"
    done
    printf '\nvariables\n'
    printf '  %s\n' "${given[@]}" | sort
    printf '\ncommand\n '
    printf ' %q' "${line[@]}"
    printf '\n'
}

# Runs `line`; sets `status` and `run_at`. From a terminal in the foreground, where Ctrl-C reaches
# CMD by itself.
run() {
    status=0
    read_clock
    run_at=$seconds
    if [[ ! -t 0 ]]; then
        run_child "${line[@]}"
        return
    fi
    trap : HUP INT TERM USR1 USR2
    { "${line[@]}" 2>&3 3>&- || status=$?; } 3>&2 2>/dev/null
}

# Refuses what the start found lacking in the image.
explain() {
    local lacking path folder
    [[ -e $tmp/.lacking ]] || return 0
    lacking=$(<"$tmp/.lacking")
    case $lacking in
        venv)
            refuse venv-other-python \
                "APPTRAIN_VENV=$venv was made with $venv_python, which the image lacks:" \
                "remove it, $make_venv"
            ;;
        python)
            refuse image-no-python \
                "the image $image has no Python 3.11 or newer, as python or python3:" \
                "give another image"
            ;;
        wrapper*)
            refuse wrapper-missing \
                "the profile's container wrappers:" \
                "${lacking#wrapper } is no program in the image:" \
                "load the module that brings it (container modules, obey_binds), or leave it out"
            ;;
        program)
            refuse cmd-not-in-image "CMD ${command[0]} is no program in the image:" \
                "check the spelling, or bind it: APPTRAIN_BIND"
            ;;
    esac
    lacking=${lacking#path }
    path=$(readlink -f -- "$lacking")
    folder=$(dirname -- "$path")
    if [[ ! -d $path ]] && ! is_of_image "$folder"; then
        path=$folder
    fi
    refuse cmd-not-shown "CMD names $lacking, which this node has but the image does not show:" \
        "add a line to APPTRAIN_BIND: $path"
}

# Says how it ended if CMD did not end well.
conclude() {
    local why="the entrypoint ended with status $status and left no outcome"
    ((status)) || return 0
    if [[ ! -e $tmp/.started && -z $signalled ]]; then
        why="$package ended with status $status before CMD began"
        say "$why: its own message stands above"
    fi
    tell_outcome "$status" "$why"
}

# Has `line` enter the container that the tasks of this node share, if this task may.
use_share() {
    [[ -n $share ]] || return 0
    { join_share 2>/dev/null || entry=''; } 4>&2
    if [[ -n $entry ]]; then
        line=(enter_share)
    else
        release_share
    fi
}

# True if joining the shared container failed.
share_failed() {
    [[ -n $entry && ! -e $tmp/.started && $status != 0 && -z $signalled ]] || return 1
    if [[ -z $opened ]]; then
        release_share
    fi
    say "nsenter ended with status $status: this task mounts the image itself"
}

main() {
    local name
    first_set "${NODE_NAMES[@]}"
    node=$answer
    if [[ -z $node ]]; then
        node=$(uname -n) # not HOSTNAME, which Slurm carries over from the login node
        node=${node%%.*}
    fi
    first_set "${NODE_RANKS[@]}"
    node_rank=$answer
    first_set "${LOCAL_RANKS[@]}"
    local_rank=$answer
    tmp=''
    unpack=''
    signalled=''
    opened=''
    mount_tried=''
    status=''
    staged=''
    show_only=''
    trap clean_up EXIT
    for name in HUP:1 INT:2 TERM:15 USR1:10 USR2:12; do
        # shellcheck disable=SC2064
        trap "exit $((128 + ${name#*:}))" "${name%:*}"
    done
    read_options "$@"
    find_outcome
    set -- ${rest[@]+"${rest[@]}"}
    (($# > 1)) ||
        refuse run-sh-usage \
            "usage: containers/run.sh [--show | --help] [OPTION...] IMAGE CMD [ARG...]"
    is_utf8 "$*" ||
        refuse argument-not-utf8 \
            "an argument is not UTF-8, which would arrive changed: rename or encode it otherwise"
    if [[ -z ${HOME:-} ]]; then
        unset HOME
        HOME=~
    fi
    [[ -n ${PWD:-} && $PWD -ef . ]] ||
        refuse no-current-directory \
            "the current directory is not there any more: change to one that is"
    # PBS starts a task in a directory of its own. find_binds refuses one that is not there.
    [[ ${PBS_ENVIRONMENT:-} != PBS_BATCH || ! . -ef ${PBS_JOBDIR:-$HOME} ]] ||
        cd -- "${PBS_O_WORKDIR:-.}" 2>/dev/null || true
    command=("${@:2}")
    ask_apptainer
    if use_copy "$1"; then
        check_image "$staged/image.sif"
    else
        check_image "$1"
    fi
    read_rooms
    make_tmp
    check_shm
    find_venv
    find_gpus
    find_compat
    find_apptainer
    check_user_namespaces
    [[ -z $userns ]] ||
        say_for_job "$libexec/starter-suid has no setuid bit: $package is called with $userns"
    find_mount
    find_share
    find_binds
    read_environment
    pass_environment
    [[ -z $unmounted ]] || choose_unpacking
    write_start
    shield_mount
    assemble
    if [[ -n $show_only ]]; then
        show_all
        return
    fi
    use_share
    run
    if share_failed; then
        entry=''
        assemble
        run
    fi
    while mount_failed; do
        if [[ -z $again ]]; then
            choose_unpacking
        fi
        assemble
        run
    done
    explain
    conclude
    exit "$status"
}

main "$@"
