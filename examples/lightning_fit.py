"""Lightning's Trainer on several nodes: saves at a planned end and every 500 steps, and goes on.

This machine:  apptrain run -- examples/lightning_fit.py
Slurm:         sbatch -N 2 --gpus-per-node=4 slurm/multinode.sbatch -- examples/lightning_fit.py --steps 2000
PBS:           APPTRAIN_ARGS='-- examples/lightning_fit.py --steps 2000' qsub -v APPTRAIN_ARGS pbs/multinode.pbs

The image lacks Lightning: make a venv that has it, and give the job --venv (docs/recipes.md, "conda").
Copy stop.py with it. Lightning's own handlers are not used: that of SIGTERM may hang on several ranks, and that of
SIGUSR1 calls scontrol, which an image lacks.
"""

import argparse
import os
from pathlib import Path

import stop

request = stop.listen()  # before the slow imports: until then the signal kills the process

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
given = parser.parse_args()
checkpoints = Path(os.environ["APPTRAIN_RUN_DIR"], "checkpoints")  # where apptrain looks for progress
last = checkpoints / "last.ckpt"


class SaveAndLeave(Callback):
    """Saves every 500 steps; ends the training on all ranks after the same step if any of them was asked to."""

    status = 0

    def on_train_start(self, trainer, _):
        if trainer.is_global_zero:
            print("begins after step", trainer.global_step, flush=True)

    def on_train_batch_end(self, trainer, *_):
        self.status = stop.agreed(request)
        if self.status or trainer.global_step % 500 == 0 or trainer.global_step == given.steps:
            trainer.save_checkpoint(last)  # on all ranks; it is complete, or not there
        trainer.should_stop = bool(self.status)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(1)
data = torch.utils.data.DataLoader(torch.randn(4096, 8), batch_size=8)
leaver = SaveAndLeave()
ranks = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = lightning.Trainer(
    devices=ranks,  # both numbers must be said: without num_nodes every node trains for itself
    num_nodes=int(os.environ["WORLD_SIZE"]) // ranks,
    strategy="ddp",
    max_epochs=-1,
    max_steps=given.steps,
    callbacks=[leaver],
    enable_checkpointing=False,
    enable_model_summary=False,
    logger=False,
    enable_progress_bar=False,
    # One task a rank (mode `rank`): Slurm's variables are found first, and Lightning would requeue the job itself.
    plugins=[SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else [],
)
resumed = last if last.exists() else None
model = Model()
trainer.fit(model, data, ckpt_path=resumed, weights_only=True)

found = type(trainer.strategy.cluster_environment).__name__
total = sum(value.sum().item() for value in model.parameters()).hex()
print(f"rank {trainer.global_rank} of {trainer.world_size}, {found}: {trainer.global_step} steps, {total}")
stop.leave(leaver.status)
