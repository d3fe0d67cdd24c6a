#!/usr/bin/env bash
# What a node does for its own copy of the image (docs/scale.md). The job script has it run on each
# node; it prints one line, which that reads.
#
# Usage: host/stage.sh look RANK FOLDER BYTES ID NEEDS NAMED   make room: prints `RANK have`,
#                                              `RANK room` or `RANK unfit WHY`
#        host/stage.sh check RANK FOLDER BYTES ID SHA256         prints `RANK have` or
#                                              `RANK unfit WHY`
#        host/stage.sh remove RANK FOLDER
#        host/stage.sh send RANK FOLDER SHARED [TARGET...]   copies it here if it is not, from
#                                              SHARED, and by ssh to each TARGET
#        host/stage.sh receive RANK FOLDER     takes it from standard input
#        RANK     of the node; - for SLURM_NODEID
#        NEEDS    bytes that must be free for it
#        NAMED    empty if nobody has chosen this directory: then it must be on a disk
# Exit:  0, whatever it prints
# Sets:  staged   the directory, for host/staged.sh
set -uo pipefail
here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=host/staged.sh
source "$here/staged.sh"
readonly STALE=1200   # s since its last use after which a copy that nobody holds is removed
readonly MEMORY=20    # an image in memory takes this part of what is free there, or less
readonly SSH=(ssh -o BatchMode=yes -o ConnectTimeout=20)
readonly MARK_WAIT=20 # times 0.1 s for another node to say whose a directory is
what=$1
rank=$2
folder=$3
staged=$folder
if [[ $rank == - ]]; then
    rank=${SLURM_NODEID:-0}
fi

# answer WORD [TEXT]: the last thing that is done.
answer() {
    local text=${2-}
    printf '%s %s %s\n' "$rank" "$1" "${text//[$'\n\r\t']/ }"
    exit 0
}

# unfit TEXT: this node reads the shared image.
unfit() {
    if [[ -n $made ]]; then
        rm -rf -- "$folder"
    fi
    answer unfit "$1"
}

# Removes what jobs have left that were killed: nobody holds their locks any more.
remove_stale() {
    local path now used
    printf -v now '%(%s)T' -1
    type -P flock >/dev/null || return 0
    for path in "${folder%/*}/apptrain-image-$EUID".*; do
        if [[ $path == "$folder" ]] || ! is_own_directory "$path"; then
            continue
        fi
        used=$(stat -c %Y -- "$path/lock" || stat -c %Y -- "$path") || continue
        ((now - used > STALE)) || continue
        if [[ ! -e $path/lock ]] || flock -n -x "$path/lock" true; then
            rm -rf -- "$path"
        fi
    done
} 2>/dev/null

# Refuses a directory that nodes share, or in memory if nobody has asked for it.
check_kind() {
    local parent=${folder%/*} bytes=$1 named=$2 kind available
    [[ -d ${parent:=/} ]] || unfit "$parent is no directory"
    kind=$(stat -f -c %T -- "$parent" 2>/dev/null)
    case $kind in
        nfs* | lustre | gpfs | beegfs | ceph | smb* | cifs | panfs | afs | pvfs2 | gfs* | ocfs2)
            unfit "$parent is on a file system that nodes share ($kind)"
            ;;
        tmpfs | ramfs)
            available=$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)
            [[ -n $named ]] || ((bytes * MEMORY <= ${available:-0} * 1024)) ||
                unfit "$parent is in memory, of which it would take more than a part in $MEMORY"
            ;;
    esac
}

# Makes the directory, or takes the one of an earlier attempt.
make_folder() {
    local owner mine error tries
    mine="$(uname -n) $(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
    if error=$(mkdir -m 700 -- "$folder" 2>&1); then
        made=yes
        { printf '%s\n' "$mine" >"$folder/node"; } 2>/dev/null ||
            unfit "${folder%/*} takes no file: it is full"
    elif [[ ! -e $folder ]]; then
        unfit "${error#mkdir: }"
    fi
    is_own_directory "$folder" || unfit "$folder is there, and not this job's"
    for ((tries = 0; tries < MARK_WAIT; tries++)); do
        owner=$(cat -- "$folder/node" 2>/dev/null)
        if [[ -n $owner ]]; then
            break
        fi
        sleep 0.1
    done
    if [[ $owner != "$mine" ]]; then
        unfit "${folder%/*} is shared with ${owner%% *}: give a directory of each node's own"
    fi
    { : >"$folder/lock"; } 2>/dev/null || unfit "${folder%/*} cannot be written"
}

look() {
    local bytes=$1 id=$2 needs=$3 named=$4 free
    remove_stale
    check_kind "$bytes" "$named"
    make_folder
    if is_copy "$folder/image.sif" "$bytes" "$id" 2>/dev/null; then
        answer have
    fi
    made=yes # an earlier attempt's, which is of no use
    rm -rf -- "$folder"/image.sif*
    free=$(stat -f -c '%a * %S' -- "$folder")
    free=$((free))
    ((free >= needs)) ||
        unfit "${folder%/*} has $((free / 1000000)) MB free of the $((needs / 1000000)) MB needed"
    answer room
}

# Gives the copy its name, by which it is known to be whole.
name_copy() {
    local bytes=$1 id=$2 path
    for path in "$folder"/image.sif "$folder"/image.sif.*; do
        if [[ ! -e $path ]]; then
            continue
        elif is_copy "$path" "$bytes" "$id" 2>/dev/null; then
            mv -n -- "$path" "$folder/image.sif" 2>/dev/null
            break
        fi
        size=$(stat -c %s -- "$path" 2>/dev/null)
        rm -f -- "$path"
    done
    is_copy "$folder/image.sif" "$bytes" "$id" 2>/dev/null
}

check() {
    local bytes=$1 id=$2 sha256=$3 found size=''
    made=yes
    if ! name_copy "$bytes" "$id"; then
        [[ -n $size ]] || unfit "it got no copy"
        unfit "its copy is not whole ($size of $bytes bytes)"
    fi
    if [[ -n $sha256 ]]; then
        found=$(sha256sum <"$folder/image.sif")
        [[ ${found%% *} == "$sha256" ]] ||
            unfit "the SHA-256 of its copy is ${found%% *}, not $sha256"
    fi
    touch -c -- "$folder/lock" 2>/dev/null
    answer have
}

# By another name until it is whole.
receive() {
    cat >"$folder/image.sif.part" && mv -- "$folder/image.sif.part" "$folder/image.sif"
}

send() {
    local shared=$1 target line pids=()
    if [[ ! -e $folder/image.sif ]]; then
        receive <"$shared" || exit
    fi
    line="exec /bin/bash $(printf '%q ' "$here/stage.sh" receive - "$folder")"
    for target in "${@:2}"; do
        "${SSH[@]}" -- "$target" "$line" <"$folder/image.sif" &
        pids+=($!)
    done
    for target in ${pids[@]+"${pids[@]}"}; do
        wait "$target"
    done
}

made=''
case $what in
    receive) receive ;;
    send) send "${@:4}" ;;
    look) look "${@:4}" ;;
    check) check "${@:4}" ;;
    remove)
        remove_copy
        ;;
esac
