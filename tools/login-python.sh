#!/usr/bin/env bash
# Print a Python that reads profiles: 3.9 or newer with PyYAML. Most login nodes have one; nothing is downloaded then.
#
# Usage: tools/login-python.sh    from the Makefile
# Reads: PYTHON (tried first), VENV, IMAGE_VENV, which is made where none of them will do
# Exit:  0 · else tools/venv.sh's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for python in "${PYTHON:-}" python3 "$IMAGE_VENV/bin/python" "$VENV/bin/python"; do
    if [[ -n $python ]] && "$python" -c 'import sys, yaml; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
        echo "$python"
        exit
    fi
done
echo "no python3 here has PyYAML (or python3 -m pip install --user pyyaml): making $IMAGE_VENV" >&2
tools/venv.sh "$IMAGE_VENV" image >&2
echo "$IMAGE_VENV/bin/python"
