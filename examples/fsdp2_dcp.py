"""FSDP2 with checkpoints of which each rank writes its part: saves at a planned end and every 500 steps, and goes on.

This machine:  apptrain run -- examples/fsdp2_dcp.py
Slurm:         sbatch -N 2 --gpus-per-node=4 slurm/multinode.sbatch -- examples/fsdp2_dcp.py --steps 2000
PBS:           APPTRAIN_ARGS='-- examples/fsdp2_dcp.py --steps 2000' qsub -v APPTRAIN_ARGS pbs/multinode.pbs

Copy stop.py with it. It may go on with another number of ranks. A checkpoint is a folder that gets its name when
it is complete. It has a file with a pickle in it: load only what you have written yourself.
"""

import argparse
import os
from pathlib import Path

import stop

request = stop.listen()  # before the slow imports: until then the signal kills the process

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
given = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
rank, folder = dist.get_rank(), Path(os.environ["APPTRAIN_RUN_DIR"], "checkpoints")

torch.manual_seed(1)
mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(device)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)  # what no layer has taken
if not on_gpu:
    model.set_force_sum_reduction_for_comms(True)  # gloo has no average
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # after fully_shard: it needs the shards


def load():
    """The step of the newest checkpoint; 0: there is none."""
    saved = sorted(folder.glob("step-*"))
    if not saved:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(saved[-1].name.partition("-")[2])


def save():
    weights, moments = get_state_dict(model, optimizer)  # the same for any number of ranks
    partial = folder / f".step-{step:08}"  # with a dot, it does not count as a checkpoint
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=partial)
    if rank == 0:
        partial.rename(folder / f"step-{step:08}")
        print(f"step {step}: loss {loss.item():.6f}, saved", flush=True)
    dist.barrier()


step = load()
if rank == 0:
    print("begins after step", step, flush=True)
while step < given.steps:
    step += 1
    torch.manual_seed(1000 * step + rank)
    data = torch.randn(16, 64, device=device)
    loss = (model(data) - data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    status = stop.agreed(request)  # on every rank after the same step
    if status or step % 500 == 0 or step == given.steps:
        save()
    if status:
        stop.leave(status)

print(f"rank {rank}: {step} steps")
stop.leave(0)
