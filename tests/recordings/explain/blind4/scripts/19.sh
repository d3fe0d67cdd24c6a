#!/bin/bash
# usage: salloc -N 2 --gpus-per-node=4 --ntasks-per-node=1 ./run.sh
set -euo pipefail
source ~/venv/bin/activate
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export MASTER_PORT=29500
srun --ntasks-per-node=1 --cpus-per-task=32 --kill-on-bad-exit=1 torchrun --nnodes=$SLURM_NNODES --nproc_per_node=8 \
  --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py
