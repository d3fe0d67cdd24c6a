#!/bin/bash
#SBATCH --job-name=vit-l
#SBATCH --account=ml-prj4
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=48
#SBATCH --mem=0
#SBATCH --time=08:00:00
#SBATCH --output=%x-%j.out

set -eo pipefail
module purge
module load python/3.11
source /work/ml-prj4/envs/vit/bin/activate

export OMP_NUM_THREADS=12
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node=4 \
  --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$head_node:$port" \
  train.py --resume auto --out /work/ml-prj4/runs/vit-l
