#!/bin/bash
#SBATCH --job-name=dyn2d
#SBATCH --partition=preempted
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=15
#SBATCH --time=3-00:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

# Lightning should checkpoint and requeue on USR1
source /hpc/envs/dyn/bin/activate
srun python fit.py trainer.devices=4 trainer.max_epochs=500
