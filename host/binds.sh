# shellcheck shell=bash disable=SC2034,SC2154 # containers/run.sh reads and sets some
# What of this node is shown inside the image, at the same paths, and why. Sourced by
# containers/run.sh.
# Reads: obeys_binds  yes if APPTAINER_BIND counts
#        binds        WHY SPEC WHY SPEC ..., what --bind gave
#        script, venv, compat, share, tmp, all_of_host, checkout, package, SHARED, SUBMIT_DIRS,
#        NODE_LISTS
# Sets:  OURS         where an image that is not ours finds our packages
#        sources, targets, modes (rw, ro), reasons    of each bind, by its number
#        venv         find_venv: its whole path
#        make_venv    find_venv: what makes it
#        venv_python  find_venv: the image's Python that it was made with
readonly OURS=/.apptrain
# Reasons that may hide a directory of the image.
readonly ASKED_FOR="@(APPTRAIN_BIND|APPTRAIN_CUDA_COMPAT|the profile's|*_BIND|*_BINDPATH)"

# Whether this path is shown already, by itself or in a directory that may be written.
is_shown() {
    local i
    for ((i = 0; i < ${#targets[@]}; i++)); do
        if [[ $1 == "${targets[i]}" ]]; then
            return
        fi
        if [[ ${modes[i]} == rw && ${sources[i]} == "${targets[i]}" &&
            $1 == "${targets[i]}"/* ]]; then
            return
        fi
    done
    return 1
}

# Whether a directory of this name belongs to the image, where the host's must not hide it.
is_of_image() {
    case $1 in
        / | /bin | /sbin | /lib | /lib64 | /opt | /var | /run | /home | /boot) ;;
        /usr | /usr/* | /etc | /etc/* | /dev | /dev/* | /proc | /proc/* | /sys | /sys/*) ;;
        *) return 1 ;;
    esac
}

# bind SOURCE TARGET MODE REASON: adds it to what is shown.
bind() {
    local source=$1 target=$2 mode=$3 reason=$4
    is_utf8 "$source$target" ||
        refuse bind-not-utf8 \
            "$reason $source: the name is not UTF-8, which $package cannot bind: rename it"
    sources+=("$source")
    targets+=("$target")
    modes+=("$mode")
    reasons+=("$reason")
}

# Whether a symlink stands on the way to this path, which has no `.` or `..` in it.
leads_elsewhere() {
    local path=$1
    while [[ $path == /?* ]]; do
        if [[ -L $path ]]; then
            return
        fi
        path=${path%/*}
    done
    return 1
}

# show REASON PATH [MODE]: shows a path inside as it is outside: as spelled, and what its symlinks
# lead to.
show() {
    local reason=$1 mode=${3:-rw} path real
    path=$2
    if [[ $path != /* || $path/ == */@(|.|..)/* ]]; then
        path=$(realpath -ms -- "$path")
    fi
    [[ -e $path ]] || refuse bind-missing "$reason $path is not there on this node: $SHARED"
    real=$path
    if leads_elsewhere "$path"; then
        real=$(readlink -f -- "$path")
    fi
    for path in "$real" "$path"; do
        # shellcheck disable=SC2053 # a pattern
        if [[ $reason != $ASKED_FOR ]] && is_of_image "$path"; then
            continue
        fi
        is_shown "$path" || bind "$path" "$path" "$mode" "$reason"
    done
}

# show_directory FILE: shows where a file of CMD lies; the working directory is shown already.
show_directory() {
    local folder=${1%/*}
    [[ $1 != */* ]] || show "the directory of CMD" "${folder:-/}"
}

bind_asked_for() {
    local line lines
    [[ -n ${APPTRAIN_BIND:-} ]] || return 0
    IFS=$'\n' read -r -d '' -a lines < <(printf '%s\0' "$APPTRAIN_BIND")
    for line in ${lines[@]+"${lines[@]}"}; do
        bind_one APPTRAIN_BIND "$line"
    done
}

# Shows what a site's module has in Apptainer's own variables, which are then empty: SRC[:DST[:ro]],
# with commas between them.
bind_for_module() {
    local name one words
    for name in {APPTAINER,SINGULARITY}_{BIND,BINDPATH}; do
        IFS=, read -r -d '' -a words < <(printf '%s\0' "${!name:-}")
        for one in ${words[@]+"${words[@]}"}; do
            [[ $one != *\\* ]] ||
                refuse bind-escaped "$name: $one has a backslash, which is not read here:" \
                    "give this path in APPTRAIN_BIND"
            bind_one "$name" "${one%:rw}"
        done
    done
}

# bind_one WHY SPEC: shows what SRC[:DST[:ro]] says.
bind_one() {
    local source=$2 target='' mode=''
    if [[ ! -e $2 ]]; then
        IFS=: read -r source target mode < <(printf '%s\n' "$2")
    fi
    target=${target:-$source}
    mode=${mode:-rw}
    [[ $source == /* && $target == /?* && $mode == @(rw|ro) ]] ||
        refuse bind-malformed "$1: $2 is not SRC[:DST[:ro]] with paths from /: give one bind a line"
    if [[ $source == "$target" ]]; then
        show "$1" "$source" "$mode"
    elif [[ -e $source ]]; then
        is_shown "$target" || bind "$source" "$target" "$mode" "$1"
    else
        refuse bind-missing "$1 $source is not there on this node: $SHARED"
    fi
}

# Sets `sources`, `targets`, `modes` and `reasons`. What is large comes first: the rest may lie in
# it.
find_binds() {
    local name at
    sources=()
    targets=()
    modes=()
    reasons=()
    bind_asked_for
    if [[ -n $obeys_binds ]]; then
        bind_for_module
    fi
    show HOME "$HOME"
    for name in /tmp /var/tmp; do
        if [[ -d $name ]]; then
            show "the node's" "$name"
        fi
    done
    for name in APPTRAIN_HOME "${SUBMIT_DIRS[@]}"; do
        if [[ -n ${!name:-} ]]; then
            show "$name" "${!name}"
        fi
    done
    show "the working directory" "$PWD"
    if [[ -n $script && -e $script ]]; then
        show_directory "$script"
        show_directory "$(readlink -f -- "$script")"
    fi
    if [[ -d ${APPTRAIN_HAND:-} && -O ${APPTRAIN_HAND:-} ]]; then
        show "the job's own directory" "$APPTRAIN_HAND"
    fi
    if [[ -n $all_of_host ]]; then
        show_host
    fi
    for ((at = 0; at < ${#binds[@]}; at += 2)); do
        bind_one "${binds[at]}" "${binds[at + 1]}"
    done
    if [[ -n $venv ]]; then
        show APPTRAIN_VENV "$venv"
    fi
    if [[ -n $compat ]]; then
        show APPTRAIN_CUDA_COMPAT "$compat" ro
        show APPTRAIN_CUDA_COMPAT "$(dirname -- "$(readlink -f -- "$compat/libcuda.so.1")")" ro
    fi
    if [[ -n $share ]]; then
        show TMPDIR "${tmp%/*}" # every task has its own in it
    else
        show TMPDIR "$tmp"
    fi
    # One that is missing is the entrypoint's to explain. PBS's lies in its spool.
    for name in "${NODE_LISTS[@]}" APPTRAIN_NODEFILE APPTRAIN_ARGS_FILE \
        APPTRAIN_JOIN_KEY_FILE APPTRAIN_SECRETS APPTRAIN_RUN_DIR; do
        if [[ -e ${!name:-} ]]; then
            show "$name" "${!name}"
        fi
    done
    bind "$checkout/entrypoint" "$OURS/entrypoint" ro "the checkout's"
    bind "$checkout/src/train" "$OURS/train" ro "the checkout's"
}

# Every top-level directory that the image does not have, but for an automounter's, which would
# mount all that it knows.
show_host() {
    local path line mounts automounted=$'\n'
    mapfile -t mounts </proc/self/mountinfo
    for line in ${mounts[@]+"${mounts[@]}"}; do
        if [[ $line == *' - autofs '* ]]; then
            read -r _ _ _ _ path _ < <(printf '%s\n' "$line")
            automounted+=$path$'\n'
        fi
    done
    for path in /*/; do
        path=${path%/}
        if [[ $automounted == *$'\n'"$path"$'\n'* || ! -x $path ]]; then
            continue
        fi
        case $path in
            /home) bind "$path" "$path" rw "the host's" ;;
            /root | /mnt | /media | /srv | /lost+found) ;;
            *) is_of_image "$path" || show "the host's" "$path" ;;
        esac
    done
}

# Sets `venv`, `make_venv` and `venv_python`.
find_venv() {
    local made
    [[ -n $venv ]] || return 0
    make_absolute venv
    made=$venv/pyvenv.cfg
    make_venv="make venv DIR=$(printf %q "$venv")"
    [[ -r $made && (-e $venv/bin/python || -L $venv/bin/python) ]] ||
        refuse venv-not-a-venv \
            "APPTRAIN_VENV=$venv is no venv, it has no pyvenv.cfg or no bin/python: $make_venv"
    [[ $venv != *:* ]] ||
        refuse venv-colon \
            "APPTRAIN_VENV=$venv has a colon in it, which PATH cannot hold: make it elsewhere"
    grep -Eqx 'include-system-site-packages *= *true' -- "$made" ||
        refuse venv-without-image \
            "APPTRAIN_VENV=$venv does not see the image's packages: $make_venv"
    venv_python=$(sed -nE 's/^home *= *//p' -- "$made")/python
    venv_python+=$(sed -nE 's/^version(_info)? *= *([0-9]+\.[0-9]+).*/\2/p' -- "$made")
}
