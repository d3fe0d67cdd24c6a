#!/usr/bin/env bash
# run on both machines: ./run.sh 0   and   ./run.sh 1
set -e
NODE_RANK=$1
source /opt/venv/bin/activate
export NCCL_DEBUG=WARN
export MASTER_ADDR=localhost
export MASTER_PORT=${MASTER_PORT:-29777}

python -m torch.distributed.run \
  --nnodes=2 --node_rank=$NODE_RANK --nproc_per_node=4 \
  --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \
  train.py --batch 64
