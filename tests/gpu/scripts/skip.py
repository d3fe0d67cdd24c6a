"""A rank that leaves out an all_reduce, for the hang detector: skip.py cpu|cuda. The others wait for it."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def read_more_data() -> None:
    time.sleep(3600)


rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
cuda = sys.argv[1] == "cuda"
if cuda:
    torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
for step in range(1, 1000):
    if step == 4 and rank == size - 1:
        read_more_data()
    dist.all_reduce(torch.ones(1, device=device))
    if cuda:
        torch.cuda.synchronize()
    Path(os.environ["APPTRAIN_HEARTBEAT"], str(rank)).write_text(str(step))
