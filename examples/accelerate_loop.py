"""Accelerate: saves at a planned end and every 500 steps, and goes on.

This machine:  ACCELERATE_USE_CPU=true apptrain run -- examples/accelerate_loop.py   (with GPUs without it)
Slurm:         sbatch -N 2 --gpus-per-node=4 slurm/multinode.sbatch -- examples/accelerate_loop.py --steps 2000
PBS:           APPTRAIN_ARGS='-- examples/accelerate_loop.py --steps 2000' qsub -v APPTRAIN_ARGS pbs/multinode.pbs

The image lacks Accelerate: make a venv that has it, and give the job --venv (docs/recipes.md, "conda").
Copy stop.py with it. `accelerate launch` and the file of `accelerate config` are not used: its settings are
ACCELERATE_ variables. The checkpoints contain pickles: load only what you have written yourself.
"""

import argparse
import os
import shutil
from pathlib import Path

import stop

request = stop.listen()  # before the slow imports: until then the signal kills the process

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
given = parser.parse_args()
folder = Path(os.environ["APPTRAIN_RUN_DIR"], "checkpoints")  # where apptrain looks for progress

set_seed(1)
accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(4096, 8), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
saved = sorted(folder.glob("step-*"))
if saved:
    accelerator.load_state(saved[-1])
    step = int(saved[-1].name.partition("-")[2])
if accelerator.is_main_process:
    print("begins after step", step, flush=True)


def save():
    partial = folder / f".step-{step:08}"  # with a dot, it does not count as a checkpoint
    accelerator.save_state(partial)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial.rename(folder / f"step-{step:08}")
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)
        print(f"step {step}: saved", flush=True)
    accelerator.wait_for_everyone()


while step < given.steps:
    epoch, done = divmod(step, len(loader))
    loader.set_epoch(epoch)
    for batch in accelerator.skip_first_batches(loader, done):
        step += 1
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        status = stop.agreed(request)  # on every rank after the same step
        if status or step % 500 == 0 or step == given.steps:
            save()
        if status:
            stop.leave(status)
        if step == given.steps:
            break

total = sum(value.sum().item() for value in model.parameters()).hex()
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {step} steps, {total}")
stop.leave(0)
