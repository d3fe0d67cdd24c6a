"""What benchmarks/floor.sbatch runs on each node: torch is imported once; the ranks are forks, and sum once.

It prints what first_sum.py prints. The first node listens for torch's store before it imports torch: a client
that finds nobody there waits up to a second, as chance has it, and the least has no such wait.
"""

import gc
import os
import socket
import sys
import time
from datetime import timedelta

began = time.time()
ranks, nodes, node = int(sys.argv[1]), int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NODEID"])
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
world = nodes * ranks
listening = socket.create_server((address, port), backlog=world) if node == 0 else None

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: E402

imported = time.time()
gc.freeze()
children = []
for local_rank in range(ranks):
    pid = os.fork()
    if pid == 0:
        rank = node * ranks + local_rank
        fd = listening.detach() if listening and rank == 0 else None
        store = TCPStore(address, port, world, rank == 0, timedelta(minutes=1), master_listen_fd=fd)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        marks = f"(began {began:.6f}, imported {imported:.6f})"
        print(f"first sum {ones.item():.0f} of {world} at {time.time():.6f} {marks}", flush=True)
        dist.destroy_process_group()
        os._exit(0)
    children.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
