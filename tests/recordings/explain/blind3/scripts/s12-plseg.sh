#!/bin/bash
#SBATCH --job-name=pl-seg
#SBATCH --account=imgproc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --mem=240G
#SBATCH --time=1-00:00:00
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

module purge
module load python/3.11
source /projects/imgproc/envs/pl25/bin/activate
export HF_HOME=/scratch/imgproc/hf HF_HUB_OFFLINE=1
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# Trainer(num_nodes=2, devices=4, strategy="ddp"), SLURMEnvironment auto_requeue
srun python fit.py --num-nodes "$SLURM_NNODES" --devices 4 --ckpt-dir /scratch/imgproc/pl-seg
