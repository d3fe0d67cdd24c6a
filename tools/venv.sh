#!/usr/bin/env bash
# Make the checkout's venv from the hash locks, or find that it is there already.
#
# Usage: tools/venv.sh DIR run      what training and launching need
#        tools/venv.sh DIR dev      that, and what `make test`, `lint` and `lock` need
#        tools/venv.sh DIR image    what building images needs, without torch; Python 3.9 will do
#        tools/venv.sh DIR remove   remove the venv, if this script made it
# Reads: PYTHON (else the first that fits of python3, python3.14 ... python3.11), and what pip itself reads:
#        its configuration, PIP_*, proxies, certificates.
# Exit:  0 the venv is ready · 64 it cannot be made here, with one message · 69 pip failed, or another make
#        did not end in time · 128+N ended by signal N.
#
# Nothing is created before all checks have passed. DIR/apptrain.venv says what the venv was made for; while
# it says `unfinished` the venv is used by nobody, and it is removed when making it fails or is stopped.
set -euo pipefail

readonly LAST_MINOR=14 # what the wheels in the locks serve
readonly GLIBC_MINOR=28               # manylinux_2_28, which torch's wheels need
readonly LOCK_WAIT=1800               # s; about four times a first install over a slow line

say() { printf 'venv: %s\n' "$*" >&2; }

refuse() {
    say "$*"
    exit 64
}

# --- what is there ---------------------------------------------------------------------------------------

field() { sed -n "s/^$1=//p" "$state" 2>/dev/null || true; }

digest() { sha256sum <"$checkout/requirements/$1.txt" | cut -d' ' -f1; }

minor_of() { "$1" -I -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# Why what stands in DIR has to be made anew; nothing where it can stay.
why_anew() {
    if [[ ! -e $state ]]; then
        echo "it is not there"
    elif [[ $(field state) == unfinished ]]; then
        echo "an earlier make was cut off before it was finished"
    elif [[ $(field venv) != "$venv" ]]; then
        echo "it was made as $(field venv), and a venv cannot be moved"
    elif [[ $(field "$base") != "$(digest "$base")" ]]; then
        echo "requirements/$base.txt has changed"
    elif [[ $(minor_of "$venv/bin/python") != "$(field python)" ]]; then
        echo "its Python $(field python) is gone"
    elif [[ -n ${PYTHON:-} && $(minor_of "$PYTHON") != "$(field python)" ]]; then
        echo "it has Python $(field python), not that of PYTHON=$PYTHON"
    fi
}

# Sets `anew` (see above) and `add_dev` (whether the development packages have to be added).
is_ready() {
    anew=$(why_anew) add_dev=
    if [[ $level == dev ]] && [[ -n $anew || $(field dev) != "$(digest dev)" ]]; then add_dev=yes; fi
    [[ -z $anew && -z $add_dev && $(field checkout) == "$checkout" && $venv/bin/apptrain -ef $checkout/apptrain ]] &&
        [[ $(head -qn1 -- "$venv"/lib/python*/site-packages/apptrain.pth 2>/dev/null) == "$checkout/src" ]]
}

# --- checks: nothing is created before they have passed ----------------------------------------------------

check_platform() {
    local libc
    [[ $(uname -s) == Linux ]] || refuse "this is $(uname -s): the locked torch runs on Linux with an NVIDIA GPU or without; use a Linux machine"
    case $(uname -m) in
        x86_64 | aarch64) ;;
        *) refuse "this machine is $(uname -m): the locked wheels are for x86_64 and aarch64; use such a machine" ;;
    esac
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) ||
        refuse "this system has no glibc: the locked wheels need glibc 2.$GLIBC_MINOR or newer; use a Debian, Ubuntu or RHEL of 2019 or later"
    ((${libc##*.} >= GLIBC_MINOR)) ||
        refuse "this system has $libc: the locked wheels need 2.$GLIBC_MINOR or newer; use a newer system (Debian 10, Ubuntu 20.04, RHEL 8 or later)"
}

# One line about a Python: `ok VERSION`, or what is wrong with it.
probe() {
    "$1" -I - 2>/dev/null <<EOF || echo "does not run as a Python 3"
import sys
missing = []
for name in ("venv", "ensurepip", "ssl", "ctypes", "zlib", "bz2", "lzma"):
    try:
        if __import__(name).__spec__.origin is None:  # an empty folder that a removed package left
            missing.append(name)
    except (ImportError, AttributeError):
        missing.append(name)
version = "%d.%d.%d" % sys.version_info[:3]
if not (3, $first_minor) <= sys.version_info[:2] <= (3, $LAST_MINOR):
    print("is " + version)
elif getattr(sys, "implementation").name != "cpython" or sys.maxsize < 2**32:
    print("is %s, not a 64-bit CPython" % version)
elif missing:
    print("is %s without %s" % (version, ", ".join(missing)))
else:
    print("ok " + version)
EOF
}

# Sets `python` to the Python to use and `version` to its version.
choose_python() {
    local candidates=("$PYTHON") name path file seen=: found debian=() said=() minor
    if [[ -z $PYTHON ]]; then
        candidates=(python3)
        for ((minor = LAST_MINOR; minor >= first_minor; minor--)); do candidates+=("python3.$minor"); done
    fi
    for name in "${candidates[@]}"; do
        path=$(command -v "$name") || continue
        file=$(readlink -f -- "$path")
        [[ $seen != *":$file:"* ]] || continue
        seen+=$file:
        found=$(probe "$path")
        if [[ $found == ok\ * ]]; then
            python=$path version=${found#ok }
            return
        fi
        [[ $found == "does not run"* && -z $PYTHON ]] || said+=("$path $found")
        if [[ $found =~ ^is\ (3\.[0-9]+).*ensurepip && -e /etc/debian_version ]] &&
            [[ $file == /usr/bin/* ]]; then
            debian+=("python${BASH_REMATCH[1]}-venv")
        fi
    done
    refuse_python
}

# Uses choose_python's variables.
refuse_python() {
    local found need="Python 3.$first_minor to 3.$LAST_MINOR with venv and pip is needed" root="sudo "
    ((EUID)) || root=
    found=$(printf '%s; ' "${said[@]}")
    found=${found%; }
    if ((${#debian[@]})); then
        refuse "$found: $need: ${root}apt install ${debian[0]} (without root: make PYTHON=/path/to/another/python3)"
    elif [[ -n $PYTHON ]]; then
        refuse "PYTHON=$PYTHON: ${found:-not found}: $need: make PYTHON=/path/to/python3.$first_minor"
    elif ((${#said[@]} == 0)) && [[ -e /etc/debian_version ]]; then
        refuse "no working python3 on PATH: $need: ${root}apt install python3 python3-venv"
    fi
    refuse "${found:-no working python3 on PATH}: $need: make PYTHON=/path/to/python3.$first_minor (on a cluster see: module avail python)"
}

# Whether the venv is that of another checkout which is still there.
serves_another() {
    local other
    other=$(field checkout)
    [[ -n $other && $other != "$checkout" && $(field state) != unfinished && -e $other/tools/venv.sh && $(field venv) == "$venv" ]]
}

check_target() {
    local parent
    parent=$(dirname "$venv")
    case $venv in
        *:* | *$'\n'*) refuse "VENV=$venv: a venv's path cannot have a colon or a line break: choose another, make VENV=DIR" ;;
    esac
    if [[ ! -e $venv ]]; then
        [[ -d $parent ]] || refuse "VENV=$venv: there is no directory $parent: mkdir -p $(printf %q "$parent")"
        [[ -w $parent && -x $parent ]] || refuse "VENV=$venv: $parent is not writable: choose another place, make VENV=DIR"
    elif [[ ! -d $venv ]]; then
        refuse "VENV=$venv: this is not a directory: choose another place, make VENV=DIR"
    elif [[ ! -e $state && -n $(find "$venv" -mindepth 1 ! -name .lock -print -quit) ]]; then
        refuse "VENV=$venv: this exists and was not made here, so it is left alone: choose another place, make VENV=DIR"
    elif serves_another; then
        refuse "VENV=$venv: this serves the checkout $(field checkout), where a job may use it: choose another place, make VENV=DIR"
    elif [[ ! -w $venv || ! -x $venv ]]; then
        refuse "VENV=$venv: this is not writable: choose another place, make VENV=DIR"
    fi
}

# Adds up what is to be fetched and installed: sets `download` and `installed`, in MB.
add_up() {
    local name fetch disk
    download=0 installed=0
    while read -r name fetch disk; do
        if [[ $name == "$base" && -n $anew ]] || [[ $name == dev && -n $add_dev ]]; then
            download=$((download + fetch)) installed=$((installed + disk))
        fi
    done < <(grep -v '^#' "$checkout/requirements/sizes")
}

# MB in words.
size() { if (($1 < 1000)); then printf '%d MB' "$1"; else printf '%d.%d GB' $(($1 / 1000)) $(($1 % 1000 / 100)); fi; }

nearest_directory() {
    local path=$1
    until [[ -d $path ]]; do path=$(dirname "$path"); done
    echo "$path"
}

free_mb() {
    local blocks size
    read -r blocks size < <(stat -f -c '%a %S' -- "$1")
    echo $((blocks * size / 1000000))
}

# Sets `cache` to where pip keeps its downloads, empty where it keeps none.
find_cache() {
    cache=
    case ${PIP_NO_CACHE_DIR:-} in
        '' | 0 | false | no | off) cache=${PIP_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-~}/.cache}/pip} ;;
    esac
}

# pip's temporary files stand in DIR too (see install), so that two file systems are all that matter.
check_space() {
    local target free need shared=0
    target=$(nearest_directory "$venv")
    free=$(free_mb "$target")
    if [[ -n $anew && -e $state ]]; then free=$((free + $(du -sm -- "$venv" | cut -f1))); fi
    need=$((installed + download))
    ((free >= need)) ||
        refuse "$target has $(size "$free") free: $(size "$need") are needed ($(size "$installed") installed, $(size "$download") of downloads meanwhile): make VENV=DIR, on a larger file system"
    [[ -n $cache ]] || return 0
    target=$(nearest_directory "$cache")
    if [[ $(stat -c %d -- "$target") == $(stat -c %d -- "$(nearest_directory "$venv")") ]]; then shared=$need; fi
    ((shared)) || free=$(free_mb "$target")
    ((free >= shared + download)) ||
        refuse "$target has $(size "$free") free: pip's cache $cache takes $(size "$download")$( ((shared)) && echo " beside the venv's $(size "$need")"): make PIP_NO_CACHE_DIR=1, which keeps no copy"
}

announce() {
    if [[ -n $anew ]]; then
        [[ ! -e $state ]] || say "$venv is made anew: $anew"
        say "making $venv with Python $version ($python)"
    elif [[ -n $add_dev ]]; then
        say "adding requirements/dev.txt to $venv"
    fi
    if [[ -z $anew && $(field checkout) != "$checkout" ]]; then
        say "$venv served $(field checkout) until now; it serves $checkout from here on"
    fi
    ((download == 0)) || say "pip downloads up to $(size "$download") and installs $(size "$installed") there${cache:+; it keeps a copy of the downloads in $cache (PIP_NO_CACHE_DIR=1: none)}"
}

# --- making it -----------------------------------------------------------------------------------------------

# Takes the venv's lock. What this script starts inherits it: where the script is killed and pip lives on, the
# next make waits for that pip.
hold() {
    local status
    until [[ $venv/.lock -ef /dev/fd/9 ]]; do # the one who held it may have removed it
        exec 9>>"$venv/.lock" || refuse "VENV=$venv: this is not writable: choose another place, make VENV=DIR"
        status=0
        flock -n -E 200 9 2>/dev/null || status=$?
        if ((status == 200)); then
            say "another make is at work on $venv: waiting for it, at most $((LOCK_WAIT / 60)) min"
            status=0
            flock -w "$LOCK_WAIT" -E 200 9 || status=$?
        fi
        if ((status == 200)); then
            say "another make still holds $venv/.lock after $((LOCK_WAIT / 60)) min: see who does with: fuser -v $(printf %q "$venv/.lock")"
            exit 69
        elif ((status)); then
            say "$venv cannot be locked (flock: status $status): start no second make meanwhile"
            return
        fi
    done
}

wipe() { find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock ! -name "${state##*/}" -exec rm -rf {} +; }

discard() {
    wipe
    rm -f -- "$state" "$venv/.lock"
    ! $made_directory || rmdir -- "$venv"
}

write_state() {
    printf '%s\n' "$@" >"$state.new"
    mv -f -- "$state.new" "$state"
}

# Runs a command in a process group of its own, so that `stop` can end all of it.
child=
run() {
    local status=0
    set -m
    "$@" </dev/null &
    child=$!
    set +m
    wait "$child" || status=$?
    child=
    return $status
}

end_child() {
    local tries
    [[ -n $child ]] || return 0
    kill -TERM -- "-$child" 2>/dev/null || true
    for ((tries = 0; tries < 100; tries++)); do
        kill -0 -- "-$child" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL -- "-$child" 2>/dev/null || true
}

stop() {
    trap '' INT TERM HUP
    say "stopped"
    end_child
    exit $((128 + $1))
}

leave() {
    trap '' INT TERM HUP
    if [[ -d $venv/.tmp ]]; then rm -rf -- "$venv/.tmp"; fi
    [[ $(field state) == unfinished ]] || return 0
    say "removing the unfinished $venv"
    discard
}

fail() {
    say "$*"
    exit 69
}

# python-hostlist comes as source alone: --no-build-isolation builds it with the locked setuptools. The variables
# unset here would send packages elsewhere than to the venv.
install() {
    local lock=$1
    shift
    mkdir -p "$venv/.tmp"
    run env -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT PIP_USER=0 TMPDIR="$venv/.tmp" \
        "$venv/bin/python" -I -m pip install --require-hashes --no-input --disable-pip-version-check \
        --no-build-isolation "$@" -r "$checkout/requirements/$lock.txt" ||
        fail "pip could not install requirements/$lock.txt; the reason stands above"
}

make_it() {
    local minor dev
    if [[ -n $anew ]]; then
        write_state state=unfinished
        wipe
        run "$python" -I -m venv "$venv" || fail "$python -m venv failed; the reason stands above"
        install "$base" --only-binary :all:
    fi
    minor=$(minor_of "$venv/bin/python")
    # Two paths in a .pth file start faster than the finder module of an editable install. A user's train.py may lie in
    # the checkout, so src is the first.
    printf '%s\n' "$checkout/src" "$checkout" >"$venv/lib/python$minor/site-packages/apptrain.pth"
    ln -sfr -- "$checkout/apptrain" "$venv/bin/apptrain"
    dev=$(field dev)
    if [[ -n $add_dev ]]; then dev=; fi
    local done=("venv=$venv" "checkout=$checkout" "python=$minor" "$base=$(digest "$base")")
    write_state "${done[@]}" ${dev:+"dev=$dev"}
    [[ -n $add_dev ]] || return 0
    install dev
    write_state "${done[@]}" "dev=$(digest dev)"
}

remove_it() {
    if [[ ! -e $venv ]]; then return; fi
    [[ -e $state ]] || refuse "VENV=$venv: this was not made here, so it is left alone"
    hold
    say "removing $venv"
    write_state state=unfinished
    made_directory=true
    discard
}

main() {
    [[ $# == 2 && $2 =~ ^(run|dev|image|remove)$ ]] || refuse "usage: tools/venv.sh DIR run|dev|image|remove"
    case $1 in
        '') refuse "VENV is empty: make VENV=DIR" ;;
        '~'*) refuse "VENV=$1: the shell did not expand ~: make VENV=\"\$HOME${1#\~}\"" ;;
    esac
    checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
    venv=$(realpath -m -- "$1")
    base=run first_minor=11
    if [[ $2 == image ]]; then base=image first_minor=9; fi
    level=$2 state=$venv/apptrain.venv made_directory=false PYTHON=${PYTHON:-}
    if [[ $level == remove ]]; then
        remove_it
        return
    fi
    if is_ready; then return; fi
    if [[ -e $venv/.lock && -w $venv/.lock ]]; then hold; fi
    if is_ready; then return; fi
    check_platform
    check_target
    choose_python
    add_up
    find_cache
    check_space
    announce
    if [[ ! -d $venv ]]; then mkdir -- "$venv" && made_directory=true; fi
    hold
    if is_ready; then return; fi
    trap leave EXIT
    trap 'stop 1' HUP
    trap 'stop 2' INT
    trap 'stop 15' TERM
    make_it
    say "$venv is ready"
}

main "$@"
