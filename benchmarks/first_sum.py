"""The shortest program with a collective: when was its first all_reduce done?

Started by torchrun, by one of our launch modes, or bare by srun; each rank prints the Unix times at which it
began, had imported torch, and had its sum."""

import os
import time

began = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

imported = time.time()

for name, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
    os.environ.setdefault(name, os.environ.get(slurm, ""))
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
marks = f"(began {began:.6f}, imported {imported:.6f})"
print(f"first sum {ones.item():.0f} of {dist.get_world_size()} at {time.time():.6f} {marks}", flush=True)
dist.destroy_process_group()
