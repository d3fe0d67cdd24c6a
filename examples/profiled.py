"""A trace of steps 3 and 4 of each rank, by torch's own profiler: trace.rankR.json in the run directory.

This machine:  apptrain run -- examples/profiled.py
Slurm:         sbatch -N 2 --gpus-per-node=4 slurm/multinode.sbatch -- examples/profiled.py
PBS:           APPTRAIN_ARGS='-- examples/profiled.py' qsub -v APPTRAIN_ARGS pbs/multinode.pbs
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
trace = f"{os.environ['APPTRAIN_RUN_DIR']}/trace.rank{dist.get_rank()}.json"
model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = schedule(wait=1, warmup=1, active=2, repeat=1)
with profile(schedule=steps, on_trace_ready=lambda profiler: profiler.export_chrome_trace(trace)) as profiler:
    for _ in range(5):
        model(torch.randn(16, 8, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
dist.destroy_process_group()
