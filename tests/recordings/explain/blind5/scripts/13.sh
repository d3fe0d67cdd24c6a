#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
source .venv/bin/activate

NGPU=$(nvidia-smi -L | wc -l)
export OMP_NUM_THREADS=$(( $(nproc) / NGPU ))

exec torchrun --standalone --nproc_per_node="$NGPU" train.py "$@"
