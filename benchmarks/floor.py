"""What benchmarks/floor.sbatch runs on each node: torch is imported once; the ranks are forks, and sum once.

It prints what first_sum.py prints."""

import gc
import os
import sys
import time

began = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

imported = time.time()
ranks, nodes, node = int(sys.argv[1]), int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NODEID"])
gc.freeze()
children = []
for local_rank in range(ranks):
    pid = os.fork()
    if pid == 0:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(node * ranks + local_rank), str(nodes * ranks)
        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        marks = f"(began {began:.6f}, imported {imported:.6f})"
        print(
            f"first sum {ones.item():.0f} of {dist.get_world_size()} at {time.time():.6f} {marks}", flush=True
        )
        dist.destroy_process_group()
        os._exit(0)
    children.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
