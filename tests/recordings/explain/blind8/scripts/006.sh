#!/usr/bin/env bash
# start the training on all machines of hosts.txt (8 GPUs each), from the head node
set -eu
cd "$(dirname "$0")"

mapfile -t HOSTS < hosts.txt
HEAD=${HOSTS[0]}
N=${#HOSTS[@]}
PORT=$((20000 + RANDOM % 20000))
GPUS=8

for i in "${!HOSTS[@]}"; do
  ssh "${HOSTS[$i]}" "cd $PWD && source .venv/bin/activate && \
    OMP_NUM_THREADS=8 torchrun --nnodes=$N --nproc-per-node=$GPUS \
      --node-rank=0 \
      --master-addr=$HEAD --master-port=$PORT \
      train_gpt.py --data /data/fineweb" > "log.$i" 2>&1
done
wait
