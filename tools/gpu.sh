#!/usr/bin/env bash
# Run a module of this checkout with the Python that has a CUDA torch on this machine; no venv is
# made.
#
# Usage: tools/gpu.sh MODULE [ARGUMENT ...]      such as tools/gpu.sh gpu --list, which
#                                                `make test-gpu` does
# Reads: PYTHON (the Python to take), else VENV/bin/python if that is there, else python3;
#        PYTHONPATH, which stays.
# Exit:  64 no Python 3.11 or newer · else the module's own
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# refuse ID TEXT...: the id names the cause, and is not printed.
refuse() {
    shift
    echo "apptrain: $*" >&2
    exit 64
}

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    if [[ -x ${VENV:-.venv}/bin/python ]]; then
        python=${VENV:-.venv}/bin/python
    fi
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    refuse gpu-python "$python is no Python 3.11 or newer:" \
        "give one that has a CUDA torch with PYTHON=FILE"
fi
# tests/ is no package: another one that is called so, in site-packages, would stand before it.
export PYTHONPATH="$here/src:$here:$here/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m "$@"
