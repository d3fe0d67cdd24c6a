#!/usr/bin/env bash
# Check the style and types of everything in the checkout; all checks run, whatever the first ones
# find.
#
# Usage: tools/lint.sh      with ruff, mypy, vermin and shellcheck on PATH (`make lint` does that)
# Exit:  0 nothing to say · 1 a check found something
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

status=0
check() {
    printf '+ %s\n' "$*" >&2
    "$@" || status=1
}

# Prints the files with shell, by name or by first line, each with a NUL behind it. Not through git,
# which refuses a checkout owned by another user.
shell_files() {
    local file
    while IFS= read -r -d '' file; do
        case $file in
            *.sh | *.sbatch | *.pbs) printf '%s\0' "$file" ;;
            *)
                if head -c 64 "$file" | head -n 1 | grep -aqE '^#!.*[/ ](ba|da)?sh( |$)'; then
                    printf '%s\0' "$file"
                fi
                ;;
        esac
    done < <(
        find . \( -name .git -o -name .cache -o -name runs -o -path ./tests/recordings -o \
            -exec test -e '{}/pyvenv.cfg' \; \) \
            -prune -o -type f \
            \( -name '*.sh' -o -name '*.sbatch' -o -name '*.pbs' -o ! -name '*.*' \) -print0 |
            sort -z
    )
}

mapfile -d '' -t shell < <(shell_files)
check ruff check
check ruff format --check
check mypy
check mypy --explicit-package-bases tools/ahead.py tools/catalogue.py tools/lock.py \
    tools/oldest.py tools/refusals.py tools/site.py tools/structure.py tools/troubleshooting.py \
    benchmarks containers tests
check python tools/oldest.py
check python tools/structure.py --lint
check python tools/refusals.py --lint
check python tools/catalogue.py --check
check shellcheck -- "${shell[@]}"
exit $status
