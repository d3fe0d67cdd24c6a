#!/bin/bash
# run this on each of the two nodes
export MASTER=$(hostname)
apptainer exec --bind /data train.sif torchrun \
  --nnodes=2 --nproc_per_node=4 \
  --rdzv_id=$RANDOM --rdzv_backend=c10d \
  --rdzv_endpoint=$MASTER:29500 train.py
