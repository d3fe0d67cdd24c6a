#!/usr/bin/env bash
# Print a Python for apptrain: of the environment that is active, or of the login node.
#
# What needs no torch takes 3.9 or newer with PyYAML. Most login nodes have one; nothing is
# downloaded then. What trains takes the active environment (venv, conda) if its torch fits, before
# the venv of `make venv`. VENV=DIR takes that one, whatever it has.
#
# Usage: tools/login-python.sh [yaml]   from the Makefile and from apptrain
#        tools/login-python.sh any      one without PyYAML will do if there is no other; nothing is
#                                       made
#        tools/login-python.sh run|demo|launch|check   the same for these commands: the active
#                                       environment if it fits; a second line says so, or why not
#        tools/login-python.sh fits run|demo           status 0 if that fits, else 1; prints nothing
# Reads: VENV (.venv) and PYTHON, which are tried first; VIRTUAL_ENV, CONDA_PREFIX; IMAGE_VENV
#        (.venv-image), which is made if none of them will do
# Exit:  0 · 64 no Python is new enough · else tools/venv.sh's
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
need=${1:-yaml}
for_command=${2:-$need}
readonly PATIENCE=20 # s for a Python to say what it has: its files may lie on a slow disk
venv=${VENV:-.venv}
image_venv=${IMAGE_VENV:-.venv-image}
plain=

# refuse ID TEXT...: the id names the cause, and is not printed.
refuse() {
    shift
    echo "apptrain: $*" >&2
    exit 64
}

# Prints the path by which another directory finds it too.
show() {
    if [[ $1 == */* ]]; then
        realpath -sm -- "$1"
    else
        type -P -- "$1"
    fi
}

# Prints what an environment has for a command, from its packages' metadata: nothing is imported.
# `ok VERSION` of torch, or why it does not fit; nothing if it has no torch.
look_into() {
    local status=0
    timeout -k 1 "$PATIENCE" "$1/bin/python" -I - "$for_command" 2>/dev/null <<'END' || status=$?
import re
import sys

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""

try:
    from importlib import metadata
except ImportError:
    print("Python %d.%d is too old (3.11 is the oldest)" % sys.version_info[:2])
    sys.exit()
torch = version("torch") or ""
if torch:
    major, minor = (int(part) for part in re.findall(r"\d+", torch)[:2])
    needed = ["psutil"]
    if sys.argv[1] == "demo":
        needed += ["matplotlib", "pyyaml", "safetensors", "tensorboard", "torchvision", "tqdm"]
    lacking = [name for name in needed if not version(name)]
    if sys.version_info < (3, 11):
        print("its Python %d.%d is too old (3.11 is the oldest)" % sys.version_info[:2])
    elif not (2, 7) <= (major, minor) < (3, 0):
        print("torch %s does not fit (2.7 or newer, below 3)" % torch)
    elif lacking:
        print("torch %s is there, but not %s (pip install them)" % (torch, ", ".join(lacking)))
    else:
        print("ok", torch)
END
    if ((status >= 124)); then
        echo "its Python did not say within $PATIENCE s what it has"
    fi
}

# Sets `at_hand` to the active environment if that fits, and `note` to what has to be said.
choose_active() {
    local name prefix found
    for name in VIRTUAL_ENV CONDA_PREFIX; do
        prefix=${!name:-}
        if [[ $prefix != /* || ! -x $prefix/bin/python || $prefix -ef $venv ]]; then
            continue
        fi
        found=$(look_into "$prefix")
        if [[ $found == ok\ * ]]; then
            at_hand=$prefix
            note="Python of $name, $prefix, with torch ${found#ok } (VENV=DIR takes another)"
            return
        fi
        if [[ -n $found ]]; then
            note="$name, $prefix, is not taken: $found"
            PATH=:$PATH:
            PATH=${PATH//":$prefix/bin:"/:} # nor is its python3
        fi
    done
}

at_hand=
note=
if [[ $need =~ ^(fits|run|demo|launch|check)$ ]]; then
    if [[ -z ${VENV:-} ]]; then
        choose_active
    elif [[ $need != fits && -x $venv/bin/python ]]; then
        show "$venv/bin/python"
        exit
    fi
fi
if [[ $need == fits ]]; then
    [[ -n $at_hand ]]
    exit
fi
if [[ -n $at_hand ]]; then
    printf '%s\n' "$at_hand/bin/python" "$note"
    exit
fi
candidates=("$venv/bin/python" "${PYTHON:-}" python3 "$image_venv/bin/python")
for ((minor = 14; minor >= 9; minor--)); do
    candidates+=("python3.$minor")
done
for python in "${candidates[@]}"; do
    if [[ -z $python ]] || ! type -P -- "$python" >/dev/null; then
        continue
    fi
    said=$("$python" -c 'import os, sys
if sys.version_info < (3, 9): sys.exit("old")
here = os.path.realpath(sys.argv[1])
sys.path[:] = [path for path in sys.path if path and os.path.realpath(path) != here]
try: import yaml
except ImportError: print("plain")' "$from" 2>/dev/null) || continue
    if [[ -z $said ]]; then
        show "$python"
        [[ -z $note ]] || printf '%s\n' "$note"
        exit
    fi
    plain=${plain:-$(show "$python")}
done
if [[ $need != yaml && -n $plain ]]; then
    printf '%s\n' "$plain" ${note:+"$note"}
    exit
fi
if [[ $need != yaml ]]; then
    refuse python-too-old "no python3 here is 3.9 or newer:" \
        "load the site's module for Python, or name one in PYTHON"
fi
echo "no python3 here has PyYAML (or python3 -m pip install --user pyyaml): making $image_venv" >&2
tools/venv.sh "$image_venv" image >&2
show "$image_venv/bin/python"
