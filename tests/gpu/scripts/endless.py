"""A rank alone whose kernels do not end, for the hang detector: endless.py cuda."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

CYCLES = 2_000_000_000
"""About a second: a process that is killed waits for the kernel that runs."""

rank = os.environ["RANK"]
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
for step in (1, 2, 3):
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    Path(os.environ["APPTRAIN_HEARTBEAT"], rank).write_text(str(step))
while True:
    for _ in range(100):
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
