# shellcheck shell=bash disable=SC2034 # what sources it uses REFUSED, seconds and status
# What the scripts of the host have in common: the status of a refusal, a clock, an outcome in an
# entrypoint's place, a child that gets its parent's signals, the wait for one. Sourced by
# host/job.sh, host/stage.sh, containers/run.sh, slurm/survivor.sh, pbs/task.sh and pbs/keep.sh.
# Sets: REFUSED      the status of bad input,
#       UNAVAILABLE  and the one that another attempt may follow; what others mean, the image knows
#       log          name_log
#       seconds      read_clock: since this node has started
#       members      find_session: processes
#       status       await_end, run_child: how the child ended
#       interrupted  a signal came while a child was waited for; traps set it too
#       signalled    run_child: a signal came
#       child        run_child: the process
# A user's file of BASH_ENV, SHELLOPTS or BASHOPTS may have changed how bash splits, matches and
# writes, or export all: ours write some files twice, and find others by a pattern.
IFS=$' \t\n'
set +aCf
shopt -u failglob nullglob nocasematch nocaseglob dotglob
readonly REFUSED=64
readonly UNAVAILABLE=69
# With this a site ends idle shells. It would end each `read` too, also one that waits for as
# long as a task runs.
unset TMOUT 2>/dev/null || true

# Prints a message on stderr, in one line. All of ours begin with `apptrain: `, whoever started what
# says it; one that a node of a job says goes on with the node.
print_message() {
    printf 'apptrain: %s\n' "${*//$'\n'/ }" >&2
}

# is_closed DIR: whether it is the user's own, or lets nobody but its owner in. One that another
# user has put in its place is neither, where it can be read at all.
is_closed() {
    [[ -O $1 || $(stat -L -c %a -- "$1") == *00 ]]
}

# make_absolute NAME: has the path in this variable begin at /.
make_absolute() {
    if [[ ${!1} != /* ]]; then
        printf -v "$1" '%s/%s' "${PWD%/}" "${!1}"
    fi
}

# make_own_dir NAME: makes a private directory NAME.XXXXXX, and prints its path. It is in /tmp if
# TMPDIR, which may come from a login node, is not there; run.sh says so.
make_own_dir() {
    mktemp -d -- "${TMPDIR:-/tmp}/$1.XXXXXX" 2>/dev/null || mktemp -d -- "/tmp/$1.XXXXXX"
}

# name_log DIR HOST: sets `log`, where that host's task prints. Its name has of HOST what file_part
# of entrypoint/core/plain.py leaves of a name.
name_log() {
    log=$1/${2//[^A-Za-z0-9._-]/_}.task.log
}

# Sets `seconds`, since this node has started. All waits count these: bash's own SECONDS follows the
# wall clock, which may be set at any time.
read_clock() {
    read -r seconds _ </proc/uptime
    seconds=${seconds%.*}
}

# Sets `members`, the processes of this session that have not ended. A process chooses its name,
# which stands in parentheses: with blanks, newlines, parentheses and bytes that are no characters
# in it.
find_session() {
    local LC_ALL=C file text
    local fields='.*\) ([^ ]) -?[0-9]+ -?[0-9]+ ([0-9]+) '
    members=()
    for file in /proc/[0-9]*/stat; do
        text=''
        IFS= read -r -d '' text 2>/dev/null <"$file" || true # up to the end of the file
        [[ $text =~ $fields && ${BASH_REMATCH[2]} == "$1" ]] || continue
        [[ ${BASH_REMATCH[1]} != [ZX] ]] || continue
        file=${file#/proc/}
        members+=("${file%/stat}")
    done 2>/dev/null
}

# Sends a signal that ends a process. One that was stopped would not hear it: it goes on to do so.
end_process() {
    kill -s "$1" "$2" || return
    kill -s CONT "$2" || true
}

# write_outcome FILE STATUS NODE ERROR: writes how a task ended whose entrypoint cannot say so, in
# the file that entrypoint/job/outcome.py reads; one that is there already stays. False if it cannot
# be written.
write_outcome() {
    local file=$1 status=$2 signal=0 partial
    if [[ -e $file ]]; then
        return
    fi
    if ((status > 128 && status < 160)); then
        signal=$((status - 128))
    fi
    partial=${file%/*}/.${file##*/}.$(uname -n).$$
    {
        (
            umask 077
            printf '%s\n' "status=$status" rank= "node=$3" "signal=$signal" \
                "time=$(date +%s.%6N)" "error=${4//[$'\n\r\t']/ }" >"$partial"
        ) && mv -n -- "$partial" "$file"
    } 2>/dev/null || true
    rm -f -- "$partial" && [[ -e $file ]]
}

# Runs a command in a process group of its own, to which every signal goes once, through here. Sets
# `status`, and `signalled` if one came. A child of bash in the background would ignore SIGINT
# without `set -m`.
run_child() {
    local name
    child=''
    held=() # names of signals that came before there was a child
    # shellcheck disable=SC2064 # the name is meant as it is now
    for name in HUP INT TERM USR1 USR2; do
        trap "pass_on $name" "$name"
    done
    set -m
    "$@" <&0 &
    child=$!
    set +m
    for name in ${held[@]+"${held[@]}"}; do
        pass_on "$name"
    done
    await_end "$child" 143 2>/dev/null # or bash would say which signal has ended it
}

# await_end CHILD UNKNOWN: waits until it has ended, through signals whose traps set `interrupted`;
# sets `status`. bash loses the status of a child that ends at the very moment at which such a
# signal comes, and would wait for that child for ever. So it is not waited for again once it is
# gone: its status is UNKNOWN then. (No $(...) here, on which bash stumbles when a trap runs.)
await_end() {
    for ((;;)); do
        interrupted=''
        status=0
        wait "$1" || status=$?
        if ((status <= 128)); then
            return
        fi
        # A signal came, or one has ended the child.
        if ! kill -0 "$1" 2>/dev/null; then
            break
        fi
    done
    if [[ -n $interrupted ]]; then
        status=$2
    fi
}

# A trap: gives the signal to the child.
pass_on() {
    interrupted=yes
    signalled=yes
    if [[ -z $child ]]; then
        held+=("$1")
    elif [[ $1 == USR? ]]; then
        kill -s "$1" "$child" 2>/dev/null || true
    else
        end_process "$1" "$child" 2>/dev/null || true
    fi
}
