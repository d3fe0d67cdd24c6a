#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --nodes=1
#SBATCH --gres=gpu:2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=3
#SBATCH --time=06:00:00

source .venv/bin/activate
# Trainer(accelerator="gpu", devices=2, strategy="ddp")
srun python train_lightning.py
