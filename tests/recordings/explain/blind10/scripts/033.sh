#!/bin/bash
# start on each of the two hosts: NODE_RANK=0|1 bash run_good.sh
set -euo pipefail
: "${NODE_RANK:?set NODE_RANK}"
export MASTER_ADDR=10.0.4.11 MASTER_PORT=29531
export OMP_NUM_THREADS=8
source /data/venv/bin/activate
cd /data/code
exec torchrun --nnodes=2 --nproc_per_node=8 --node_rank="$NODE_RANK" \
  --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" train.py --config base.yaml
