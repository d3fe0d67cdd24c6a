#!/usr/bin/env bash
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec apptainer exec --nv --bind "$here:/work" --pwd /work train.sif \
  torchrun --standalone --nproc_per_node="${GPUS:-2}" train.py "$@"
