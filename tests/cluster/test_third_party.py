"""Programs of others, as they come from PyPI, under `slurm/multinode.sbatch`: Lightning, Accelerate and Transformers.

They find out by themselves that there are several nodes, each in its own way, and save by handlers of their own when
they are asked to stop; none knows of us. The image is the default stack's with `make image EXTRA=`; nothing of theirs is
edited. Needs root, for the test cluster.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.account import SCRIPT, Account, Ran, account

BOUND = 400.0
"""Seconds for a job that takes 20 on two cores with nothing else to do."""
TWO_RANKS: Mapping[str, tuple[Path | str, ...]] = {
    "torchrun": ("--cpus-per-task=2", SCRIPT, "--device=cpu", "--nproc-per-node=2"),
    "rank": ("--ntasks-per-node=2", "--cpus-per-task=1", SCRIPT, "--device=cpu"),
}
"""Two ranks on each node, in both launch modes."""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def all_tests_account(request: pytest.FixtureRequest) -> Iterator[Account]:
    with account(request, "extended") as found:
        yield found


def run(user: Account, *argv: Path | str, **how: Any) -> Ran:
    """A job on two nodes that is to end well."""
    ran = user.end(user.submit("--nodes=2", *argv, **how), BOUND)
    assert ran.ended == ("COMPLETED", 0), ran
    return ran


# The model and the data, 64 samples one by one, are Lightning's own.
LIGHTNING = """\
import hashlib

import lightning
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

trainer = lightning.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp", max_epochs=2)
model = DemoModel()
trainer.fit(model, datamodule=BoringDataModule())
place = f"{trainer.node_rank}.{trainer.local_rank}, {trainer.global_rank} of {trainer.world_size}"
found = type(trainer.strategy.cluster_environment).__name__
weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
print(f"{found}: {place}, {trainer.global_step} steps, weights {hashlib.sha256(weights).hexdigest()}")
"""


@pytest.mark.parametrize(
    ("mode", "found"), [("torchrun", "TorchElasticEnvironment"), ("rank", "SLURMEnvironment")]
)
def test_a_lightning_script_that_declares_two_nodes_trains_on_all_their_ranks(
    user: Account, mode: str, found: str
) -> None:
    user.write(f"my work/{mode}/lightning_script.py", LIGHTNING)
    ran = run(user, *TWO_RANKS[mode], "--", f"{mode}/lightning_script.py")
    lines = sorted(line for line in ran.lines if line.startswith(found))
    (weights,) = {line.rpartition(" ")[2] for line in lines}  # one for all: the gradients were averaged
    places = ("0.0, 0 of 4", "0.1, 1 of 4", "1.0, 2 of 4", "1.1, 3 of 4")
    assert lines == [f"{found}: {place}, 32 steps, weights {weights}" for place in places]


ACCELERATE_CPU = {"ACCELERATE_USE_CPU": "true"}
"""What `accelerate launch --cpu` sets; without it, and without a GPU, each rank would train alone."""


@pytest.mark.parametrize("mode", ["torchrun", "rank"])
def test_the_test_script_in_accelerates_own_wheel_passes_on_two_nodes(user: Account, mode: str) -> None:
    script = ("-m", "accelerate.test_utils.scripts.test_script")  # its test of splitting is for two ranks
    ran = run(
        user, "--cpus-per-task=1", SCRIPT, "--device=cpu", "--mode", mode, "--", *script, env=ACCELERATE_CPU
    )
    names = ("Distributed environment", "Num processes", "Process index", "Local process index")
    assert {name: sorted(re.findall(rf"^{name}: (.+)$", ran.text, re.M)) for name in names} == {
        "Distributed environment": ["DistributedType.MULTI_CPU  Backend: gloo"] * 2,
        "Num processes": ["2"] * 2,
        "Process index": ["0", "1"],
        "Local process index": ["0", "0"],
    }
    alike = "Training yielded the same results on one CPU or distributed setup with"
    assert [ran.text.count(f"{alike} {how} split.") for how in ("no batch", "batch")] == [4, 4]
    assert ran.text.count("**Breakpoint trigger test**") == 2


def test_accelerates_own_test_of_collectives_passes_on_two_nodes_with_two_ranks_each(user: Account) -> None:
    script = ("-m", "accelerate.test_utils.scripts.test_ops")
    ran = run(user, *TWO_RANKS["torchrun"], "--", *script, env=ACCELERATE_CPU)
    names = ("gather", "gather_object", "reduce_sum", "broadcast", "pad_across_processes")
    assert {name: ran.lines.count(f"testing {name}") for name in names} == dict.fromkeys(names, 4)


# --- planned ends -----------------------------------------------------------------------------------------------

# Both train until they are asked to stop; started again, ten steps more.
LIGHTNING_STOPS = """\
import os
import sys

import lightning
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel
from lightning.pytorch.utilities.exceptions import SIGTERMException


class Tell(Callback):
    def on_train_start(self, trainer, *_):
        self.began = trainer.global_step
        print("begins at", self.began, flush=True)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            print("trains", flush=True)
        trainer.should_stop = 0 < self.began == trainer.global_step - 10


run_dir = os.environ["APPTRAIN_RUN_DIR"]
last = f"{run_dir}/on_exception.ckpt"
trainer = lightning.Trainer(
    accelerator="cpu", num_nodes=1, strategy="ddp", max_epochs=-1, enable_progress_bar=False,
    callbacks=[Tell(), OnExceptionCheckpoint(run_dir)],
)
try:
    trainer.fit(DemoModel(), datamodule=BoringDataModule(), ckpt_path=last if os.path.exists(last) else None)
except SIGTERMException:
    print("stopped at", trainer.global_step, flush=True)
    sys.exit(75)
print("ended at", trainer.global_step, flush=True)
"""

TRANSFORMERS_STOPS = """\
import os
import sys

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


class Tell(TrainerCallback):
    def on_train_begin(self, args, state, *_, **__):
        self.began = state.global_step
        print("begins at", self.began, flush=True)

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            print("trains", flush=True)
        if 0 < self.began == state.global_step - 10:
            control.should_training_stop = True


data = [{"x": torch.full((4,), i / 1000), "labels": torch.ones(1)} for i in range(1000)]
arguments = TrainingArguments(
    os.environ["APPTRAIN_RUN_DIR"], enable_jit_checkpoint=True, use_cpu=True, max_steps=1_000_000,
    save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
)
tell = Tell()
trainer = Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[tell])
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
if not tell.began:
    print("stopped at", trainer.state.global_step, flush=True)
    sys.exit(75)
print("ended at", trainer.state.global_step, flush=True)
"""


@pytest.mark.parametrize(
    ("name", "program"),
    # Their ranks do not stop together without fail (docs/own-script.md): one alone.
    [("Lightning", LIGHTNING_STOPS), ("Transformers", TRANSFORMERS_STOPS)],
)
def test_own_handlers_save_at_a_planned_end_and_the_job_goes_on(
    user: Account, name: str, program: str
) -> None:
    script = user.write(f"my work/{name}.py", program)
    options = ("--device=cpu", "--stop-signal=TERM")
    number = user.submit("--nodes=1", "--cpus-per-task=1", SCRIPT, *options, "--", script)
    user.until_printed(number, "trains\n", BOUND)
    user.run("scancel", "--batch", "--signal=USR2", str(number)).check_returncode()
    user.cluster.start_requeued(number, BOUND)
    ran = user.end(number, BOUND)
    assert (ran.ended, ran.job.restarts) == (("COMPLETED", 0), 1), ran.text
    said = re.findall(r"^(begins|stopped|ended) at (\d+)$", ran.text, re.M)
    stopped, saved = int(said[1][1]), int(said[2][1])
    assert saved > 3
    assert stopped - saved in (0, 1)  # Transformers takes one step more after it has saved
    parts = (("begins", 0), ("stopped", stopped), ("begins", saved), ("ended", saved + 10))
    assert said == [(what, str(step)) for what, step in parts], ran.text
