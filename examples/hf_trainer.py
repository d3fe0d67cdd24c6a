"""Transformers' Trainer on several ranks: saves at a planned end and every 500 steps, and goes on.

This machine:  ACCELERATE_USE_CPU=true apptrain run -- examples/hf_trainer.py      (with GPUs without that variable)
Slurm:         sbatch -N 2 --gpus-per-node=4 slurm/multinode.sbatch -- examples/hf_trainer.py --steps 2000
PBS:           APPTRAIN_ARGS='-- examples/hf_trainer.py --steps 2000' qsub -v APPTRAIN_ARGS pbs/multinode.pbs

The image lacks Transformers and Accelerate: make a venv that has them, and give the job --venv (docs/recipes.md, "conda").
Copy stop.py with it. Trainer's own handler (enable_jit_checkpoint) does not make the ranks agree on a step: on
several ranks it may hang. Its checkpoints contain pickles: load only what you have written yourself.
"""

import argparse
import os

import stop

request = stop.listen()  # before the slow imports: until then the signal kills the process

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
given = parser.parse_args()


class SaveAndLeave(TrainerCallback):
    """Ends the training on all ranks after the same step, with a checkpoint, if any of them was asked to."""

    status = 0

    def on_step_end(self, args, state, control, **_):
        self.status = stop.agreed(request)
        if self.status:
            control.should_save = True
            control.should_training_stop = True
        return control


class Model(torch.nn.Module):  # in its place yours, as AutoModel.from_pretrained gives it
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


torch.manual_seed(1)
data = [{"x": torch.randn(4), "labels": torch.ones(1)} for _ in range(4096)]
checkpoints = os.path.join(os.environ["APPTRAIN_RUN_DIR"], "checkpoints")  # where apptrain looks for progress
arguments = TrainingArguments(
    checkpoints,
    max_steps=given.steps,
    save_steps=500,
    save_total_limit=2,
    per_device_train_batch_size=8,
    logging_steps=500,
    ddp_find_unused_parameters=False,
    dataloader_pin_memory=torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
)
leaver = SaveAndLeave()
trainer = Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[leaver])
last = get_last_checkpoint(checkpoints) if os.path.isdir(checkpoints) else None
if trainer.is_world_process_zero():
    print("begins after step", last.rpartition("-")[2] if last else 0, flush=True)
trainer.train(resume_from_checkpoint=last)

said = "saved" if leaver.status else "done"
print(f"rank {arguments.process_index} of {arguments.world_size}: {trainer.state.global_step} steps, {said}")
stop.leave(leaver.status)
