#!/bin/bash
# run on every node by hand: bash run.sh <node_rank>
set -e
NODE_RANK=$1
export MASTER_ADDR=10.0.4.11
export MASTER_PORT=$((20000 + RANDOM % 20000))
export NCCL_SOCKET_IFNAME=eth0
export OMP_NUM_THREADS=8
ulimit -n 65535
source /data/venv/bin/activate
python -m torch.distributed.run --nnodes=2 --nproc_per_node=8 --node_rank=$NODE_RANK \
   --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \
   pretrain_gpt.py --tensor-model-parallel-size 8
