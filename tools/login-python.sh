#!/usr/bin/env bash
# Print a Python for what needs no torch: 3.9 or newer with PyYAML. Most login nodes have one;
# nothing is downloaded then.
#
# Usage: tools/login-python.sh [yaml]   from the Makefile and from apptrain
#        tools/login-python.sh any      one without PyYAML will do if there is no other; nothing is
#                                       made
# Reads: VENV (.venv) and PYTHON, which are tried first; IMAGE_VENV (.venv-image), which is made if
#        none of them will do
# Exit:  0 · 64 no Python is new enough · else tools/venv.sh's
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
need=${1:-yaml}
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
        exit
    fi
    plain=${plain:-$(show "$python")}
done
if [[ $need == any && -n $plain ]]; then
    echo "$plain"
    exit
fi
if [[ $need == any ]]; then
    refuse python-too-old "no python3 here is 3.9 or newer:" \
        "load the site's module for Python, or name one in PYTHON"
fi
echo "no python3 here has PyYAML (or python3 -m pip install --user pyyaml): making $image_venv" >&2
tools/venv.sh "$image_venv" image >&2
show "$image_venv/bin/python"
