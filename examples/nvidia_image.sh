#!/usr/bin/env bash
# Train in NVIDIA's image instead of one of apptrain's: docs/nvidia-image.md has what that keeps and loses.
#
# This machine:  bash examples/nvidia_image.sh FILE.sif apptrain run --image -- examples/ddp.py
# Slurm:         bash examples/nvidia_image.sh FILE.sif sbatch -N 2 --gpus-per-node=4 slurm/multinode.sbatch -- examples/ddp.py
# PBS:           bash examples/nvidia_image.sh FILE.sif qsub -v APPTRAIN_IMAGE,APPTRAIN_ARGS pbs/multinode.pbs
#                with APPTRAIN_ARGS='-- examples/ddp.py' set before
#
# If FILE.sif is not there, it is pulled once, which takes some minutes and 20 GB in APPTAINER_CACHEDIR:
# do that on a login node. NOT TRIED with NVIDIA's own image; the test has a plain Debian with torch.
set -euo pipefail

readonly TAG=25.10-py3 # NVIDIA's release notes name the driver that each tag needs

if (($# < 2)); then
    echo "usage: nvidia_image.sh FILE.sif COMMAND..." >&2
    exit 64
fi
if [[ -z $(type -P apptainer) ]]; then
    echo "nvidia_image.sh: apptainer is not in PATH: load its module (module avail apptainer)" >&2
    exit 64
fi
image=$(realpath -m -- "$1")
shift
if [[ ! -e $image ]]; then
    apptainer pull -- "$image" "docker://nvcr.io/nvidia/pytorch:$TAG"
fi
if ! apptainer -q exec -- "$image" python3 -c 'import torch, psutil'; then
    echo "nvidia_image.sh: $image lacks torch or psutil: make venv DIR=\$HOME/mine IMAGE=$image, and --venv" >&2
    exit 64
fi
APPTRAIN_IMAGE=$image exec "$@"
