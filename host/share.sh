# shellcheck shell=bash disable=SC2034,SC2154 # containers/run.sh reads and sets some
# Have all tasks of a node look at the image through one mount. Sourced by containers/run.sh.
#
# Each `apptainer exec` mounts the image anew, with a process and a page cache of its own: with a
# task for each rank every rank would read torch for itself. Here the first task of a node starts a
# container that only waits, and every task enters its namespaces (nsenter), with the environment
# that Apptainer gave it and what passes. The first task waits for the others before it ends the
# container; if it dies, the container ends by itself.
#
# The tasks of a node meet in `share`, a directory of the user's alone in the node's /tmp, which
# every container shows:
#   shown    the image, and what the container shows of the node: a task that needs more mounts the
#            image itself
#   entry    the process to enter, once that was tried
#   closed   it cannot be entered (any more)
#   lock     each task has a shared lock of it for as long as it needs the image
#   hold     a fifo: the container ends when nobody has it open for writing
#
# If anything of this cannot be had, each task mounts the image itself, as one that is alone does.
#
# Reads: outcome, show_only, kind, package, setuid, unmounted   whether tasks may share a mount
#        image, image_id, nv, compat, sources, targets, modes   what the container shows
#        options                                                of `apptainer exec`
#        line, command, given, prefix, tmp                      how Apptainer would start CMD
#        status                                                 how CMD ended
# Sets:  share      find_share: the directory; empty if tasks may not share a mount
#        nsenter    find_share: the program
#        opened     open_share: yes if this task has made the directory
#        container  open_share: the process that started the container
#        lock, hold open files of these names, which release_share closes
#        entry      join_share: the process to enter; empty if this task is to mount the image

# s for the container to be there.
readonly SHARE_WAIT=30
# s to enter it.
readonly ENTRY=10
readonly INTO=(--user --preserve-credentials --mount --root --wd)
# s that a first task that failed waits for the others.
readonly LINGER=10

# Sets `share` and `nsenter`, and empties what the others set.
find_share() {
    local tasks=${SLURM_STEP_TASKS_PER_NODE:-1} step
    step=${SLURM_JOB_ID:-}.${SLURM_STEP_ID:-}
    step+=.${APPTRAIN_ATTEMPT:-${SLURM_RESTART_COUNT:-0}}.${SLURM_NODEID:-}
    share=''
    opened=''
    container=''
    lock=''
    hold=''
    entry=''
    tasks=${tasks%%(*}
    [[ -n $outcome && -z $show_only && $tasks =~ ^[0-9]+$ && $tasks != 1 ]] || return 0
    [[ $kind == sif && $package == apptainer && -z $setuid$unmounted ]] || return 0
    [[ $EUID != 0 && ! -t 0 && " ${options[*]-} " != *' --fakeroot '* ]] || return 0
    [[ $step.${SLURM_LOCALID:-} =~ ^[0-9]+(\.[0-9]+){4}$ ]] || return 0
    nsenter=$(type -P nsenter) && type -P flock >/dev/null || return 0
    share=/tmp/apptrain-$EUID.$step
}

# Prints what the container shows.
print_shown() {
    local i
    printf '%q\n' "$image" "$image_id" "$nv" "$compat"
    for ((i = 0; i < ${#targets[@]}; i++)); do
        printf '%q %q %q\n' "${sources[i]}" "${targets[i]}" "${modes[i]}"
    done
}

# Whether this number is, here, the process that waits in the container: not another in its own
# namespace, or later.
is_waiting() {
    [[ $1 =~ ^[0-9]+$ && $(tr '\0' ' ' <"/proc/$1/cmdline") == *" $share/.wait "* ]]
}

# Starts the container that waits, with no more in its environment than the image's own and what
# Apptainer adds.
open_share() {
    local name
    mkdir -m 700 -- "$share" || return
    opened=yes
    print_shown >"$share/shown"
    quote "$share/.entry"
    printf '%s\n' "trap '' HUP INT TERM USR1 USR2" "echo \$\$ >$answer" \
        'read -r _' >"$share/.wait"
    mkfifo -m 600 -- "$share/hold" && exec {hold}<>"$share/hold" &&
        exec {lock}>"$share/lock" && flock -s -w 5 "$lock" || return
    (
        trap '' HUP INT TERM USR1 USR2
        for name in "${given[@]}"; do
            if [[ $name != LD_LIBRARY_PATH ]]; then
                unset "${prefix}ENV_$name"
            fi
        done
        exec "${line[@]:0:${#line[@]}-${#command[@]}-1}" "$share/.wait" \
            <"$share/hold" >/dev/null {hold}>&- {lock}>&- 4>&-
    ) &
    container=$!
}

# Says to the others whether the container that is there can be entered.
try_entry() {
    local pid why
    pid=$(cat "$share/.entry")
    if is_waiting "$pid" &&
        why=$(timeout "$ENTRY" "$nsenter" "${INTO[@]}" --target "$pid" /bin/sh -c : 2>&1); then
        mv -- "$share/.entry" "$share/entry"
    else
        : >"$share/closed"
        say_for_node "each task of this node mounts the image for itself: nsenter:" \
            "${why:-finds another process}" 2>&4
    fi
}

# Whether the container is there, or will not be.
is_share_settled() {
    if [[ -n $opened ]]; then
        if [[ -s $share/.entry && ! -e $share/closed ]]; then
            try_entry
        elif [[ -z $container ]] || ! kill -0 "$container"; then
            : >"$share/closed"
        fi
    elif [[ $SLURM_LOCALID == 0 ]]; then
        return
    elif [[ -e $share && $(stat -c %u:%F -- "$share") != "$EUID:directory" ]]; then
        return # it is someone else's
    elif [[ -z $lock && -e $share/lock ]]; then
        exec {lock}<"$share/lock" && flock -s -w 5 "$lock"
    fi
    [[ -n $lock && -e $share/entry || -e $share/closed ]]
}

# Sets `entry`; false if there is none.
join_share() {
    local i
    if [[ $SLURM_LOCALID == 0 ]]; then
        open_share
    elif [[ ! -e $share ]]; then # nor could the first task make one
        mkdir -m 700 -- "$share.$SLURM_LOCALID" && rmdir -- "$share.$SLURM_LOCALID" || return
    fi
    for ((i = 0; i < SHARE_WAIT * 20; i++)); do
        if is_share_settled; then
            break
        fi
        sleep 0.05
    done
    if [[ -n $opened && ! -e $share/entry ]]; then
        : >"$share/closed"
    fi
    [[ -n $lock && -e $share/entry && ! -e $share/closed ]] || return
    [[ $(cat "$share/shown") == "$(print_shown)" ]] || return
    is_waiting "$(cat "$share/entry")" && entry=$(cat "$share/entry")
}

# Gives up what a task holds of this; CMD holds none of it, or the others would wait for its last
# process.
release_share() {
    if [[ -n $lock ]]; then
        exec {lock}>&-
    fi
    lock=''
    release_hold
}

release_hold() {
    if [[ -n $hold ]]; then
        exec {hold}>&-
    fi
    hold=''
}

# Becomes CMD in the container, with the environment that Apptainer would have given it. To be
# called in a subshell. The names of its own are odd ones, which no variable that passes has.
enter_share() {
    local _word _name _given=() _other=(-u _ -u SHLVL)
    for _name in "${given[@]}"; do
        _word=${prefix}ENV_$_name
        if [[ $_name != LD_LIBRARY_PATH ]]; then
            _given+=("$_name=${!_word}")
        fi
    done
    while IFS= read -r -d '' _word; do
        _name=${_word%%=*}
        if [[ $_name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
            export -n "${_name?}"
        else
            _other+=(-u "$_name")
        fi
    done < <(env -0)
    release_share
    set -- "$(type -P env)" "${_other[@]}" \
        "$nsenter" "${INTO[@]}" --target "$entry" /bin/sh "$tmp/.start" "${command[@]}"
    # Not heard: the host may lack the image's locale, of which bash would say so.
    while IFS= read -r -d '' _word; do
        if [[ ${_word%%=*} =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
            export "${_word?}"
        fi
    done 2>/dev/null <"/proc/$entry/environ"
    for _word in "${_given[@]}"; do
        export "${_word?}"
    done
    exec "$@"
}

# Ends the container once no task needs the image. If the first task failed the others have a while
# only: Slurm ends them when it sees that. If it was ended they are still saving.
close_share() {
    local i pid
    : >"$share/closed"
    if [[ -n $lock ]]; then
        exec {lock}>&-
    fi
    if [[ ${status:-1} == @(0|130|143) ]]; then
        while [[ -e $share/lock ]] && ! flock -x -w 60 "$share/lock" true; do
            :
        done
    else
        flock -x -w "$LINGER" "$share/lock" true
    fi
    if [[ -s $share/entry ]]; then
        pid=$(cat "$share/entry")
        if is_waiting "$pid"; then
            kill -s KILL "$pid"
        fi
    fi
    release_hold
    for ((i = 0; i < 50; i++)); do
        if [[ -z $container ]] || ! kill -0 "$container"; then
            break
        fi
        sleep 0.1
    done
    if [[ -n $container ]]; then
        kill -s KILL "$container"
    fi
    rm -rf -- "$share"
}
