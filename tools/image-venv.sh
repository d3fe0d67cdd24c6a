#!/usr/bin/env bash
# Make a venv on top of the image, for packages that the image lacks, without building it anew.
#
# Usage: tools/image-venv.sh DIR [IMAGE]     IMAGE is containers/image.sif if not given
# Exit:  0 the venv is there · 64 it cannot be made here, with one message ·
#        else the status of venv in the image
#
# It sees the image's packages and works in that image only. pip in it keeps the versions of
# everything that the image has: what does not go with them is pip's error, not a second torch in
# your home.
set -euo pipefail

# refuse ID TEXT...: the id names the cause, and is not printed.
refuse() {
    shift
    echo "apptrain: $*" >&2
    exit 64
}

if (($# < 1 || $# > 2)) || [[ -z $1 || $1 == -* ]]; then
    refuse image-venv-usage "usage: make venv DIR=DIR, or tools/image-venv.sh DIR [IMAGE]"
fi
run=$(dirname -- "${BASH_SOURCE[0]}")/../containers/run.sh
image=${2:-$(dirname -- "$run")/image.sif}
venv=$(realpath -m -- "$1")
if [[ -e $venv && ! -f $venv/pyvenv.cfg ]] && ! rmdir -- "$venv" 2>/dev/null; then
    refuse venv-not-ours "DIR=$1 exists and is no venv: choose another place, or remove it"
fi
mkdir -p -- "$venv"
export APPTRAIN_BIND="${APPTRAIN_BIND:+$APPTRAIN_BIND$'\n'}$venv"
"$run" "$image" python -m venv --clear --system-site-packages -- "$venv"
printf '[install]\nconstraint = /opt/apptrain/constraints.txt\n' >"$venv/pip.conf"
printf -v venv_word %q "$venv"
printf -v image_word %q "$image"
cat <<EOF
apptrain: the venv $venv is ready
apptrain: add packages:  APPTRAIN_VENV=$venv_word containers/run.sh $image_word pip install PACKAGE
apptrain: use it in a job:  --venv $venv_word
EOF
