#!/bin/bash
# start by hand on each of the two nodes:  ./006.sh 0   and   ./006.sh 1
set -e
NODE_RANK=$1
export NCCL_SOCKET_IFNAME=lo
export NCCL_DEBUG=WARN
export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS=8

torchrun --nproc_per_node 8 --nnodes 2 --node_rank $NODE_RANK \
    --master_addr 10.20.0.11 --master_port 6000 \
    pretrain_gpt.py \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 \
    --micro-batch-size 1 --global-batch-size 256 \
    --data-path /data/my-gpt2_text_document \
    --save /data/ckpt --load /data/ckpt
