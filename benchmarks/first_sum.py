"""The shortest program with a collective: when was its first all_reduce done?

Started by torchrun, by one of our launch modes, or bare by srun; each rank prints the Unix time.
"""

import os
import time

import torch
import torch.distributed as dist

for name, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
    os.environ.setdefault(name, os.environ.get(slurm, ""))
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(f"first sum {ones.item():.0f} of {dist.get_world_size()} at {time.time():.6f}", flush=True)
dist.destroy_process_group()
