"""Plain DDP: saves at a planned end, every 500 steps and at the end; started again, it goes on where it was.

This machine:  apptrain run -- examples/ddp.py
Slurm:         sbatch -N 2 --gpus-per-node=4 slurm/multinode.sbatch -- examples/ddp.py --steps 2000
PBS:           APPTRAIN_ARGS='-- examples/ddp.py --steps 2000' qsub -v APPTRAIN_ARGS pbs/multinode.pbs

Copy stop.py with it. A planned end comes before the walltime is over, or with `touch RUN/stop`.
"""

import argparse
import os
from pathlib import Path

import stop

request = stop.listen()  # before the slow imports: until then the signal kills the process

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--lr", type=float, default=0.01)
given = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
rank, state_file = dist.get_rank(), Path(os.environ["APPTRAIN_RUN_DIR"], "checkpoints", "state.pt")
state_file.parent.mkdir(exist_ok=True)

torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
step = 0
if state_file.exists():
    state = torch.load(state_file, map_location=device, weights_only=True)  # tensors, which execute nothing
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
if rank == 0:
    print("begins after step", step, flush=True)


def save():
    temporary = state_file.with_name(".state.pt")  # with a dot, it does not count as a checkpoint
    with temporary.open("wb") as file:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(state_file)  # complete, or not there


while step < given.steps:
    step += 1
    torch.manual_seed(1000 * step + rank)  # the data of a step, whoever computes it, and whenever
    images = torch.randn(16, 8, device=device)
    optimizer.zero_grad()
    loss = (model(images) - images.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    status = stop.agreed(request)  # on every rank after the same steps: each one, or every few
    if rank == 0 and (status or step % 500 == 0 or step == given.steps):
        save()
        print(f"step {step}: loss {loss.item():.6f}, saved", flush=True)
    if status:
        stop.leave(status)  # waits until all are here, so until the state is on the disk

print(f"rank {rank}: {step} steps, {sum(value.sum().item() for value in model.parameters()).hex()}")
stop.leave(0)
