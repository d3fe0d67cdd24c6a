#!/usr/bin/env bash
# Make the checkout's venv from the hash locks, or find that it is there already.
#
# Usage: tools/venv.sh DIR run      what training and launching need
#        tools/venv.sh DIR dev      that, and what `make test`, `lint` and `lock` need
#        tools/venv.sh DIR image    what building images needs, without torch; Python 3.9 will do
#        tools/venv.sh DIR remove   remove the venv, if this script made it
# Reads: PYTHON (else the first that fits of python3, python3.14 ... python3.11), and what pip
#        itself reads: its configuration, PIP_*, proxies, certificates.
# Exit:  0 the venv is ready · 64 it cannot be made here, with one message · 69 pip failed, or
#        another make did not end in time · 128+N ended by signal N.
#
# Nothing is created before all checks have passed. DIR/apptrain.venv says what the venv was made
# for, and is the lock of who makes it. While it is empty the venv is used by nobody, and it is
# removed if making it fails or is stopped.
set -euo pipefail

readonly GLIBC_MINOR=28 # manylinux_2_28, which torch's wheels need
readonly LOCK_WAIT=30   # min; about four times a first install over a slow line
readonly COMPILERS=8    # processes at most, of a login node that others use too
readonly ELSEWHERE="choose another place, make VENV=DIR"

say() {
    printf 'apptrain: %s\n' "$*" >&2
}

# refuse ID TEXT...: the id names the cause, and is not printed; so of `fail`.
refuse() {
    shift
    say "$*"
    exit 64
}

fail() {
    shift
    say "$*"
    exit 69
}

# --- what is there --------------------------------------------------------------------------------

# A later line replaces an earlier one.
field() {
    sed -n "s/^$1=//p" "$state" 2>/dev/null | tail -n 1 || true
}

digest() {
    sha256sum <"$checkout/requirements/$1.txt" | cut -d' ' -f1
}

minor_of() {
    "$1" -I -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# Why the venv has to be made anew; nothing if it can stay.
why_anew() {
    if [[ ! -s $state ]]; then
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
    anew=$(why_anew)
    add_dev=
    if [[ $level == dev && (-n $anew || $(field dev) != "$(digest dev)") ]]; then
        add_dev=yes
    fi
    [[ -z $anew && -z $add_dev && $(field checkout) == "$checkout" ]]
}

# --- checks ---------------------------------------------------------------------------------------

check_platform() {
    local here
    here="$(uname -sm), $(getconf GNU_LIBC_VERSION 2>/dev/null || echo "no glibc")"
    if [[ ! $here =~ ^Linux\ (x86_64|aarch64),\ glibc\ 2\.([0-9]+) ]] ||
        ((BASH_REMATCH[2] < GLIBC_MINOR)); then
        refuse venv-unfit-system \
            "this is $here: the locked wheels are for Linux on x86_64 and aarch64 with glibc" \
            "2.$GLIBC_MINOR or newer" \
            "(Debian 10, Ubuntu 20.04, RHEL 8 or later)"
    fi
}

# Prints one line about a Python: `ok VERSION`, or what is wrong with it.
probe() {
    "$1" -I - 2>/dev/null <<END || echo "does not run as a Python 3"
import sys
version = "%d.%d.%d" % sys.version_info[:3]
try:
    import venv, ssl, ctypes, zlib, bz2, lzma
    from ensurepip import bootstrap
    fits = (3, $first_minor) <= sys.version_info[:2] <= (3, 14)
    print("ok" if fits else "is", version)
except ImportError as error:
    print("is", version, "without", error.name)
END
}

# Sets `python` to the Python to use and `version` to its version.
choose_python() {
    local names=(python3 python3.{14..9}) name found all=
    [[ -z ${PYTHON:-} ]] || names=("$PYTHON")
    for name in "${names[@]}"; do
        python=$(command -v "$name") || continue
        found=$(probe "$python")
        version=${found#ok }
        if [[ $found == ok\ * ]]; then
            return
        fi
        all+="$python $found; "
    done
    refuse python-missing \
        "${all:-${PYTHON:-python3} not found; }Python 3.$first_minor to 3.14 with venv and pip" \
        "is needed: make PYTHON=/path/to/python3.$first_minor" \
        "(on a cluster see: module avail python; on Debian: apt install python3-venv)"
}

check_target() {
    local parent=$venv other
    [[ -e $venv ]] || parent=$(dirname "$venv")
    other=$(field checkout)
    if [[ ! -d $parent || ! -w $parent ]]; then
        refuse venv-unwritable \
            "VENV=$venv: $parent is no directory that you may write to: $ELSEWHERE"
    elif [[ ! -e $venv ]] && (($(basename -- "$venv" | wc -c) > 256)); then # with the newline
        refuse venv-name-too-long \
            "VENV=$venv: no file system takes a name of so many letters: $ELSEWHERE"
    elif [[ -d $venv && ! -e $state && -n $(find "$venv" -mindepth 1 -print -quit) ]]; then
        refuse venv-not-ours \
            "VENV=$venv: this exists and was not made here, so it is left alone: $ELSEWHERE"
    elif [[ $other != "$checkout" && -e $other/tools/venv.sh && $(field venv) == "$venv" ]]; then
        refuse venv-of-other-checkout \
            "VENV=$venv: this serves the checkout $other, where a job may use it: $ELSEWHERE"
    fi
}

size() {
    numfmt --to=si --suffix=B "${1}000000"
}

# Sets `download` and `installed`, in MB. pip's temporary files lie in DIR too (see install).
check_space() {
    local wanted=" ${anew:+$base} ${add_dev:+dev} " where=$venv free need
    read -r download installed < <(
        awk -v wanted="$wanted" 'index(wanted, " " $1 " ") { down += $2; disk += $3 }
            END { print down + 0, disk + 0 }' "$checkout/requirements/sizes"
    )
    need=$((download + installed))
    [[ -d $where ]] || where=$(dirname "$venv")
    free=$(df -B 1MB --output=avail -- "$where" | tail -n 1)
    if [[ -n $anew && -e $state ]]; then
        free=$((free + $(du -sm -- "$venv" | cut -f 1)))
    fi
    ((free >= need)) ||
        refuse venv-no-room \
            "$where has $(size "$free") free: $(size "$need") are needed" \
            "($(size "$installed") installed," \
            "$(size "$download") of downloads meanwhile): make VENV=DIR, on a larger file system"
}

# --- making it ------------------------------------------------------------------------------------

# Takes the venv's lock. What this script starts inherits it: if the script is killed and pip lives
# on, the next make waits for that pip.
hold() {
    local status
    until [[ $state -ef /dev/fd/9 ]]; do # the one who held it may have removed it
        mkdir -p -- "$venv"
        exec 9>>"$state"
        status=0
        flock -n 9 2>/dev/null || status=$? # above 1: this file system has no locks
        if ((status == 1)); then
            say "another make is at work on $venv: waiting for it, at most $LOCK_WAIT min"
            flock -w $((60 * LOCK_WAIT)) 9 ||
                fail venv-in-use "it still is; see who with: fuser -v $(printf %q "$state")"
        fi
    done
}

wipe() {
    find "$venv" -mindepth 1 -maxdepth 1 ! -name apptrain.venv -exec rm -rf {} +
}

discard() {
    : >"$state"
    wipe
    rm -f -- "$state"
    rmdir -- "$venv"
}

leave() {
    trap '' INT TERM HUP
    if [[ -s $state ]]; then
        return
    fi
    say "removing the unfinished $venv"
    discard
}

# python-hostlist comes as source alone: --no-build-isolation builds it with the locked setuptools.
# The variables unset here would send packages elsewhere than to the venv.
install() {
    local lock=$1
    shift
    env -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT PIP_USER=0 TMPDIR="$venv" \
        "$venv/bin/python" -I -m pip install --require-hashes --no-input --no-compile \
        --disable-pip-version-check --no-build-isolation "$@" \
        -r "$checkout/requirements/$lock.txt" ||
        fail pip-failed "pip could not install requirements/$lock.txt; the reason stands above"
    compile
}

# pip would do it on one core, a third of its time. What this Python cannot compile is left as it
# is, as by pip: one of torch's own tests is for a newer one.
compile() {
    local cores
    cores=$(nproc)
    "$venv/bin/python" -I -m compileall -qq -j $((cores < COMPILERS ? cores : COMPILERS)) \
        "$venv/lib" || true
}

make_it() {
    local minor
    if [[ -n $anew ]]; then
        say "making $venv with Python $version ($python)"
        : >"$state"
        wipe
        "$python" -I -m venv "$venv" ||
            fail venv-failed "$python -m venv failed; the reason stands above"
        install "$base" --only-binary :all:
        minor=$(minor_of "$venv/bin/python")
        printf '%s\n' "venv=$venv" "python=$minor" "$base=$(digest "$base")" >"$state"
    fi
    # Two paths in a .pth file start faster than the finder module of an editable install. A user's
    # train.py may lie in the checkout, so src is the first.
    printf '%s\n' "$checkout/src" "$checkout" \
        >"$venv/lib/python$(field python)/site-packages/apptrain.pth"
    ln -sfr -- "$checkout/apptrain" "$venv/bin/apptrain"
    echo "checkout=$checkout" >>"$state"
    if [[ -n $add_dev ]]; then
        say "adding requirements/dev.txt to $venv"
        echo dev= >>"$state" # until all of it is there
        install dev
        echo "dev=$(digest dev)" >>"$state"
    fi
}

main() {
    [[ $# == 2 && -n $1 && $2 =~ ^(run|dev|image|remove)$ ]] ||
        refuse venv-usage "usage: tools/venv.sh DIR run|dev|image|remove"
    [[ $1 != '~'* ]] ||
        refuse venv-tilde "VENV=$1: the shell did not expand ~: make VENV=\"\$HOME${1#\~}\""
    checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
    venv=$(realpath -m -- "$1")
    level=$2
    base=run
    first_minor=11
    state=$venv/apptrain.venv
    if [[ $level == image ]]; then
        base=image
        first_minor=9
    fi
    if [[ $level == remove ]]; then
        if [[ ! -e $venv ]]; then
            return
        fi
        [[ -e $state ]] ||
            refuse venv-not-ours "VENV=$venv: this was not made here, so it is left alone"
        hold
        say "removing $venv"
        discard
        return
    fi
    if is_ready; then
        return
    fi
    check_platform
    check_target
    choose_python
    check_space
    if [[ -e $state && -n $anew ]]; then
        say "$venv is made anew: $anew"
    fi
    hold
    if is_ready; then
        return
    fi
    trap leave EXIT
    trap 'exit $((128 + 1))' HUP
    trap 'exit $((128 + 2))' INT
    trap 'exit $((128 + 15))' TERM
    ((download == 0)) ||
        say "pip downloads up to $(size "$download") and installs $(size "$installed") in $venv;" \
            "pip's cache keeps a copy of the downloads (PIP_NO_CACHE_DIR=1: none)"
    make_it
    say "$venv is ready"
}

main "$@"
