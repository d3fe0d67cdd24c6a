#!/usr/bin/env bash
# run on every node:  ssh nodeX bash run_accel.sh
set -e
cd /nfs/projects/ner
source .venv/bin/activate

export NCCL_SOCKET_IFNAME=eno1
export OMP_NUM_THREADS=4
export HF_DATASETS_OFFLINE=1

accelerate launch \
    --multi_gpu \
    --num_machines 2 \
    --num_processes 4 \
    --machine_rank 0 \
    --main_process_ip 10.1.4.11 \
    --main_process_port 29777 \
    --mixed_precision bf16 \
    run_ner.py --model_name_or_path /nfs/models/deberta --per_device_train_batch_size 32 --output_dir out
