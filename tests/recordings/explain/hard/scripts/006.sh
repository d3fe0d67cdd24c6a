#!/usr/bin/env bash
# usage: run on BOTH nodes by hand:  bash run.sh 0   /   bash run.sh 1
set -u
RANK=$1
HEAD=192.168.12.41
PORT=29500

export NCCL_DEBUG=INFO
export NCCL_SOCKET_IFNAME=eno1
export OMP_NUM_THREADS=4
source .venv/bin/activate

torchrun \
  --nnodes=2 \
  --nproc_per_node=2 \
  --rdzv_backend=c10d \
  --rdzv_id=$RANDOM \
  --rdzv_endpoint=$HEAD:$PORT \
  train.py --epochs 90 --batch-size 128 2>&1 | tee log.$RANK
