#!/usr/bin/env bash
# one workstation, all GPUs; standalone rendezvous picks a free port itself
set -euo pipefail
cd "$(dirname "$0")"
source .venv/bin/activate

NGPU=$(nvidia-smi -L | wc -l)
export OMP_NUM_THREADS=$(( $(nproc) / NGPU ))
export WANDB_MODE=offline
mkdir -p logs

torchrun --standalone --nnodes=1 --nproc-per-node="$NGPU" \
  ppo_isaac.py --task Ant --num-envs 4096 2>&1 | tee "logs/$(date +%Y%m%d-%H%M%S).log"
