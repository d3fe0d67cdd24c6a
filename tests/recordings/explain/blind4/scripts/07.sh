#!/bin/bash
# single workstation with two GPUs, no scheduler
set -euo pipefail
source ~/venv/bin/activate
export PYTHONUNBUFFERED=1
torchrun --standalone --nproc_per_node=2 train.py "$@" 2>&1 | tee train.log
