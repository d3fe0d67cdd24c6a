# shellcheck shell=bash disable=SC2034,SC2154 # those that source it read and set some
# A node's own copy of the image: whether it is whole, and how long it stays. Sourced by
# containers/run.sh and host/stage.sh; host/staging.sh brings the copies.
#
# The copy lies in a directory for this job alone, apptrain-image-UID.SCHEDULER-JOB:
#   image.sif   the copy; whoever finds its size and its header right takes it
#   checked     there once the copy was looked at: its SHA-256, if that was compared
#   node        whose it is: nodes that share the directory would write into one file
#   lock        each task holds it, shared, while it may need the image
#
# Reads: staged, staged_bytes, staged_id   --staged: the directory, and what the image is to be
#        local_rank, show_only, status, UNAVAILABLE
# Sets:  copy_lock   use_copy: the open file `lock`; empty if there is none

# is_copy FILE BYTES ID: whether this is our file, and as long as the image, with its header.
is_copy() {
    local header
    [[ -f $1 && ! -L $1 && -O $1 && $(stat -c %s -- "$1") == "$2" ]] || return
    header=$(od -An -v -tx1 -j32 -N32 -- "$1" | tr -d ' \n') || return
    [[ $header == 5349465f4d4147494300* ]] || return
    header=${header:32:8}-${header:40:4}-${header:44:4}-${header:48:4}-${header:52}
    [[ $header == "$3" ]]
}

# is_own_directory PATH: nobody else can have put something there. The directory above may hand its
# group's bit down.
is_own_directory() {
    [[ -d $1 && ! -L $1 && -O $1 && $(stat -c %a -- "$1") == @(700|2700) ]]
}

# Whether the directory is this job's and this node's.
is_of_this_node() {
    is_own_directory "$staged" && [[ $(cat -- "$staged/node") == "$(uname -n) "* ]]
} 2>/dev/null

# use_copy SHARED: whether this node has a copy; else the shared image is read. One that is not
# whole is removed.
use_copy() {
    copy_lock=''
    [[ -n $staged ]] && is_of_this_node && [[ -e $staged/checked ]] || return
    hold_copy
    if is_copy "$staged/image.sif" "$staged_bytes" "$staged_id" 2>/dev/null; then
        return
    fi
    say_for_node "its copy of the image in $staged is not whole: the image is read from $1"
    remove_copy
    return 1
}

# Says that the copy is in use, to later jobs of this user and to this node's other tasks.
hold_copy() {
    if [[ -w $staged/lock ]] && type -P flock >/dev/null; then
        exec {copy_lock}<>"$staged/lock"
        flock -s -w 5 "$copy_lock" || true
        touch -c -- "$staged/lock" 2>/dev/null || true
    fi
}

# The last task of a node removes it: another may be about to open it. After UNAVAILABLE another
# attempt may follow, which needs it.
drop_copy() {
    [[ -n $staged && -z $show_only && ${status:-1} != "$UNAVAILABLE" ]] || return 0
    if [[ -n ${copy_lock:-} ]]; then
        ! flock -n -x "$copy_lock" || remove_copy
    elif [[ ${local_rank:-0} == 0 ]]; then
        remove_copy
    fi
}

remove_copy() {
    local tries
    [[ ${staged##*/} == apptrain-image-* ]] && is_of_this_node || return 0
    for ((tries = 0; tries < 20; tries++)); do
        if rm -rf -- "$staged"; then
            break
        fi
        sleep 0.1 # what copies, and is just ending, has written a file meanwhile
    done
} 2>/dev/null
