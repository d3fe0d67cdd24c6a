#!/bin/bash
#PBS -N resnet
#PBS -P va77
#PBS -q gpu
#PBS -l select=1:ncpus=24:ngpus=2:mem=96gb
#PBS -l walltime=10:00:00
#PBS -j oe

cd "$PBS_O_WORKDIR" || exit 1
source /g/data/va77/envs/rn/bin/activate
export OMP_NUM_THREADS=12
torchrun --standalone --nnodes=1 --nproc_per_node=2 train.py --workers 10 --resume-if-exists
