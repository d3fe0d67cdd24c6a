#!/bin/bash
#PBS -N unet3d
#PBS -q gpuq
#PBS -l select=2:ncpus=16:ngpus=2:mem=128gb
#PBS -l walltime=24:00:00
#PBS -j oe

module load anaconda3 cuda/11.8
source activate unet
cd $PBS_O_WORKDIR

export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)
export MASTER_PORT=29500
torchrun --nnodes=2 --nproc_per_node=2 --node_rank=0 --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT train.py
