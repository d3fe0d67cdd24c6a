#!/bin/bash
#SBATCH -J ddp4n
#SBATCH -N 4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH -c 32
#SBATCH -t 1-00:00:00

module load python/3.11 cuda/12.4
source $HOME/env/bin/activate
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)

torchrun --nnodes=4 --nproc_per_node=4 --rdzv_backend=c10d \
  --rdzv_endpoint=$MASTER_ADDR:29871 --rdzv_id=$SLURM_JOB_ID train.py
