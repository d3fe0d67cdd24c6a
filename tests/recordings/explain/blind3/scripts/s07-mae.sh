#!/bin/bash
#SBATCH --job-name=mae
set -e
cd /scratch/$USER/mae
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=16
#SBATCH --mem=120G
#SBATCH --time=24:00:00

source env/bin/activate
torchrun --standalone --nproc_per_node=4 pretrain.py
