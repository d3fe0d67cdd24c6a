#!/bin/bash -l
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=05:00:00

module load cuda/12.1
module load anaconda/2023.09
module purge
conda activate torch2
srun python train.py --amp
