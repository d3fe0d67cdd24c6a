#!/usr/bin/env bash
# What a node does for its own copy of the image (docs/scale.md). The job script has it run on each
# node; it prints one line, which that reads.
#
# Usage: host/stage.sh look RANK FOLDER BYTES ID SHA256 NEEDS NAMED   make room: prints
#                                              `RANK have`, `RANK room` or `RANK unfit WHY`
#        host/stage.sh check RANK FOLDER BYTES ID SHA256         prints `RANK have` or
#                                              `RANK unfit WHY`
#        host/stage.sh clear RANK FOLDER NAMES   removes what a broadcast has left that is repeated,
#                                              but on nodes of these names, one a line
#        host/stage.sh remove RANK FOLDER
#        host/stage.sh send RANK FOLDER BYTES ID SHARED [TARGET...]   copies it here if it is not,
#                                              from SHARED, and by ssh to each TARGET
#        host/stage.sh receive RANK FOLDER BYTES   takes it from standard input
#        RANK     of the node; - for SLURM_NODEID
#        SHA256   empty if it is not compared
#        NEEDS    bytes that must be free for it
#        NAMED    empty if nobody has chosen this directory: then it must be on a disk
# Exit:  0, whatever it prints
# Sets:  staged   the directory, for host/staged.sh
set -uo pipefail
here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=host/common.sh
source "$here/common.sh"
# shellcheck source=host/staged.sh
source "$here/staged.sh"
readonly STALE=2700   # s since its last use after which a copy that nobody holds is removed; while
#                       nodes get theirs, nobody does (COPIES and CHECK of host/staging.sh)
readonly MEMORY=20    # an image in memory takes this part of what is free there, or less
readonly SSH=(ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15)
readonly MARK_WAIT=20 # times 0.1 s for another node to say whose a directory is
readonly MARK_AGE=60  # s after which nobody will: it went down
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
    local path now used owner
    printf -v now '%(%s)T' -1
    type -P flock >/dev/null || return 0
    for path in "${folder%/*}/apptrain-image-$EUID".*; do
        if [[ $path == "$folder" ]] || ! is_own_directory "$path"; then
            continue
        fi
        owner=$(cat -- "$path/node")
        if [[ -n $owner && ${owner%% *} != "$(uname -n)" ]]; then
            continue # the directory above is shared, and locks may not be
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
        nfs* | lustre | gpfs | beegfs | fhgfs | ceph | smb* | cifs | panfs | afs | k-afs | pvfs2 | \
            gfs* | ocfs2 | snfs | acfs | ibrix | vxfs)
            unfit "$parent is on a file system that nodes share ($kind)"
            ;;
        tmpfs | ramfs)
            available=$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)
            [[ -n $named ]] || ((bytes * MEMORY <= ${available:-0} * 1024)) ||
                unfit "$parent is in memory, of which it would take more than a part in $MEMORY"
            ;;
    esac
}

# Whether the directory is an earlier attempt's, from before this node went down: even if it could
# not say any more whose it is.
is_from_before() {
    local mine=$1 owner now made_at
    is_own_directory "$folder" || return
    owner=$(cat -- "$folder/node" 2>/dev/null)
    if [[ -n $owner ]]; then
        [[ ${owner% *} == "${mine% *}" && $owner != "$mine" ]]
        return
    fi
    printf -v now '%(%s)T' -1
    made_at=$(stat -c %Y -- "$folder" 2>/dev/null) && ((now - made_at > MARK_AGE))
}

# Makes the directory, or takes the one of an earlier attempt.
make_folder() {
    local owner mine error tries
    mine="$(uname -n) $(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
    if is_from_before "$mine"; then
        rm -rf -- "$folder"
    fi
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
    [[ -n $owner ]] || unfit "$folder is there, and no node says that it is its own"
    if [[ $owner != "$mine" ]]; then
        unfit "${folder%/*} is shared with ${owner%% *}: give a directory of each node's own"
    fi
    { : >"$folder/lock"; } 2>/dev/null || unfit "${folder%/*} cannot be written"
}

look() {
    local bytes=$1 id=$2 sha256=$3 needs=$4 named=$5 free
    remove_stale
    check_kind "$bytes" "$named"
    make_folder
    if is_copy "$folder/image.sif" "$bytes" "$id" 2>/dev/null && was_checked "$sha256"; then
        answer have
    fi
    made=yes # an earlier attempt's, which is of no use
    rm -rf -- "$folder"/image.sif* "$folder/checked"
    free=$(stat -f -c '%a * %S' -- "$folder")
    free=$((free))
    ((free >= needs)) ||
        unfit "${folder%/*} has $((free / 1000000)) MB free of the $((needs / 1000000)) MB needed"
    answer room
}

# was_checked SHA256: whether the copy was looked at in an earlier attempt.
was_checked() {
    local found
    found=$(cat -- "$folder/checked" 2>/dev/null) && [[ -z $1 || $found == "$1" ]]
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
    rm -f -- "$folder"/image.sif.* # what a broadcast left beside it
    is_copy "$folder/image.sif" "$bytes" "$id" 2>/dev/null
}

check() {
    local bytes=$1 id=$2 sha256=$3 found size=''
    is_of_this_node || unfit "it got no copy"
    made=yes
    if ! name_copy "$bytes" "$id"; then
        [[ -n $size ]] || unfit "it got no copy"
        [[ $size != "$bytes" ]] || unfit "its copy is of another image than the job began with"
        unfit "its copy is not whole ($size of $bytes bytes)"
    fi
    if [[ -n $sha256 ]]; then
        found=$(sha256sum <"$folder/image.sif")
        [[ ${found%% *} == "$sha256" ]] ||
            unfit "the SHA-256 of its copy is ${found%% *}, not $sha256"
    fi
    touch -c -- "$folder/lock" 2>/dev/null
    { printf '%s\n' "$sha256" >"$folder/checked"; } 2>/dev/null ||
        unfit "${folder%/*} takes no file: it is full"
    answer have
}

clear_copies() {
    if [[ $'\n'$1$'\n' != *$'\n'"${SLURMD_NODENAME:-}"$'\n'* ]] && is_of_this_node; then
        rm -f -- "$folder"/image.sif.*
    fi
}

# receive BYTES: by another name until it is whole.
receive() {
    local part=$folder/image.sif.part
    is_own_directory "$folder" && cat >"$part" && [[ $(stat -c %s -- "$part") == "$1" ]] &&
        mv -- "$part" "$folder/image.sif"
}

send() {
    local bytes=$1 id=$2 shared=$3 target line pids=() group
    is_own_directory "$folder" || exit 1
    read -r _ _ _ _ group _ </proc/$$/stat
    printf '%s\n' "$group" >"$folder/sender"
    if ! is_copy "$folder/image.sif" "$bytes" "$id" 2>/dev/null; then
        receive "$bytes" <"$shared" || exit
    fi
    line="exec /bin/bash $(printf '%q ' "$here/stage.sh" receive - "$folder" "$bytes")"
    for target in "${@:4}"; do
        "${SSH[@]}" -- "$target" "$line" <"$folder/image.sif" &
        pids+=($!)
    done
    for target in ${pids[@]+"${pids[@]}"}; do
        wait "$target"
    done
    rm -f -- "$folder/sender"
}

# Ends what still sends the image on: it outlives the ssh that started it.
end_sender() {
    local group words tries
    is_own_directory "$folder" && read -r group <"$folder/sender" || return 0
    [[ $group =~ ^[1-9][0-9]{0,9}$ ]] || return 0
    words=$(tr '\0' ' ' <"/proc/$group/cmdline")
    if [[ $words == *" send - $folder "* ]]; then
        kill -TERM -- "-$group"
        for ((tries = 0; tries < 20; tries++)); do
            kill -0 -- "-$group" || break
            sleep 0.1
        done
    fi
} 2>/dev/null

made=''
case $what in
    receive) receive "${@:4}" ;;
    send) send "${@:4}" ;;
    look) look "${@:4}" ;;
    check) check "${@:4}" ;;
    clear) clear_copies "${4-}" ;;
    remove)
        end_sender
        remove_copy
        # A look that was ended has not said yet whose it is.
        rmdir -- "$folder" 2>/dev/null || true
        ;;
esac
