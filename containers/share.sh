# shellcheck shell=bash disable=SC2154 # what run.sh sets
# Have all tasks of a node look at the image through one mount. Sourced by containers/run.sh.
#
# Each `apptainer exec` mounts the image anew, with a process and a page cache of its own: with a task for each rank every
# rank would read torch for itself. Here the first task of a node starts a container that only waits, and every task
# enters its namespaces (nsenter), with the environment that Apptainer gave it and what passes. The first task waits for
# the others before it ends the container; where it dies, the container ends by itself.
#
# The tasks of a node meet in `share`, a directory of the user's alone:
#   binds    what the container shows: a task that needs anything else mounts the image itself
#   entry    the process to enter, once it is there
#   closed   it cannot be entered (any more)
#   lock     each task has a shared lock of it for as long as it needs the image
#   hold     a fifo: the container ends when nobody has it open for writing
#
# Where anything of this cannot be had, each task mounts the image itself, as one that is alone does.

readonly SHARE_WAIT=30 # s for the container to be there
readonly LINGER=10     # s that a first task that failed waits for the others

# Sets `share` where the tasks of this node can share a mount; all of them come to the same answer.
find_share() {
    local tasks=${SLURM_STEP_TASKS_PER_NODE:-1} attempt=${APPTRAIN_ATTEMPT:-${SLURM_RESTART_COUNT:-0}}
    share='' opened='' container='' lock='' hold='' entry=''
    tasks=${tasks%%(*}
    [[ -n $is_launch && -z $show_only && $tasks =~ ^[0-9]+$ && $tasks != 1 ]] || return 0
    [[ $kind == sif && $package == apptainer && -z $setuid$unmounted && $EUID != 0 && ! -t 0 ]] || return 0
    [[ ${SLURM_JOB_ID:-}.${SLURM_STEP_ID:-}.${SLURM_LOCALID:-}.$attempt =~ ^[0-9]+(\.[0-9]+){3}$ ]] || return 0
    nsenter=$(type -P nsenter) && type -P flock >/dev/null || return 0
    share=${tmp%/*}/apptrain-$EUID.$SLURM_JOB_ID.$SLURM_STEP_ID.$attempt
}

print_binds() {
    local i
    for ((i = 0; i < ${#targets[@]}; i++)); do printf '%s\0' "${sources[i]}" "${targets[i]}" "${modes[i]}"; done
}

# Starts the container that waits, with no more in its environment than the image's own and what Apptainer adds.
open_share() {
    local name
    mkdir -m 700 -- "$share" || return
    opened=yes
    print_binds >"$share/binds"
    printf '%s\n' "trap '' HUP INT TERM USR1 USR2" "echo \$\$ >$(quoted "$share/.entry")" 'read -r _' >"$share/.wait"
    mkfifo -m 600 -- "$share/hold" && exec {hold}<>"$share/hold" && exec {lock}>"$share/lock" && flock -s "$lock" || return
    (
        trap '' HUP INT TERM USR1 USR2
        for name in "${given[@]}"; do
            if [[ $name != LD_LIBRARY_PATH ]]; then unset "${prefix}ENV_$name"; fi
        done
        exec "${line[@]:0:${#line[@]}-${#command[@]}-1}" "$share/.wait" <"$share/hold" >/dev/null {hold}>&- {lock}>&-
    ) &
    container=$!
}

# Whether the container is there, or will not be; the first task says it to the others.
is_share_settled() {
    if [[ -n $opened ]]; then
        if [[ -s $share/.entry ]]; then
            mv -- "$share/.entry" "$share/entry"
        elif [[ -z $container ]] || ! kill -0 "$container"; then
            : >"$share/closed"
        fi
    elif [[ $SLURM_LOCALID == 0 || -e $share && ! (-O $share && -d $share && ! -L $share) ]]; then
        return
    elif [[ -z $lock && -e $share/lock ]]; then
        exec {lock}<"$share/lock" && flock -s "$lock"
    fi
    [[ -n $lock && -e $share/entry || -e $share/closed ]]
}

# Sets `entry`; empty where this task is to mount the image itself.
join_share() {
    local i
    if [[ $SLURM_LOCALID == 0 ]]; then open_share; fi
    for ((i = 0; i < SHARE_WAIT * 20; i++)); do
        if is_share_settled; then break; fi
        sleep 0.05
    done
    [[ -n $lock && -e $share/entry && ! -e $share/closed ]] || return
    cmp -s <(print_binds) "$share/binds" || return
    # In a namespace of process ids of its own its number is another process's here.
    [[ $(tr '\0' ' ' <"/proc/$(<"$share/entry")/cmdline") == *" $share/.wait "* ]] || return
    entry=$(<"$share/entry")
}

# Becomes CMD in the container, with the environment that Apptainer would have given it. To be called in a subshell. The
# names of its own are odd ones, which no variable that passes has.
enter() {
    local _word _name _given=() _other=(-u _ -u SHLVL)
    for _name in "${given[@]}"; do
        _word=${prefix}ENV_$_name
        if [[ $_name != LD_LIBRARY_PATH ]]; then _given+=("$_name=${!_word}"); fi
    done
    while IFS= read -r -d '' _word; do
        _name=${_word%%=*}
        if [[ $_name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then export -n "${_name?}"; else _other+=(-u "$_name"); fi
    done < <(env -0)
    exec {lock}>&-
    if [[ -n $hold ]]; then exec {hold}>&-; fi
    set -- "$(type -P env)" "${_other[@]}" "$nsenter" --target "$entry" --user --preserve-credentials --mount --root --wd \
        /bin/sh "$tmp/.start" "${command[@]}"
    while IFS= read -r -d '' _word; do
        if [[ ${_word%%=*} =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then export "${_word?}"; fi
    done <"/proc/$entry/environ"
    for _word in "${_given[@]}"; do export "${_word?}"; done
    exec "$@"
}

# Ends the container once no task needs the image. Where the first task failed the others have a while: Slurm ends them
# when it sees that.
close_share() {
    : >"$share/closed"
    if [[ -n $lock ]]; then exec {lock}>&-; fi
    if [[ ${status:-1} == @(0|75) ]]; then
        while [[ -e $share/lock ]] && ! flock -x -w 60 "$share/lock" true; do :; done
    else
        flock -x -w "$LINGER" "$share/lock" true
    fi
    if [[ -s $share/entry ]]; then kill -s KILL "$(<"$share/entry")"; fi
    if [[ -n $hold ]]; then exec {hold}>&-; fi
    if [[ -n $container ]]; then wait "$container"; fi
    rm -rf -- "$share"
}
