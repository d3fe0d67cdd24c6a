#!/bin/bash
# run from node-a (no scheduler): bash 007.sh
set -x
export NCCL_IB_HCA=mlx5_0,mlx5_1
export NCCL_SOCKET_IFNAME=bond0

cat > hostfile <<EOT
node-a slots=8
node-b slots=8
EOT

deepspeed --hostfile hostfile \
    --master_addr 127.0.0.1 --master_port 29511 \
    train.py --deepspeed ds_z3.json --model_path /nfs/models/llama3-8b
