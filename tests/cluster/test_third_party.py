"""Programs of others, as they come from PyPI, under `slurm/multinode.sbatch`: PyTorch Lightning and Accelerate.

Both find out by themselves that there are several nodes, each in its own way, and neither knows of us. The image is
the default stack's with `make image EXTRA=`; nothing of theirs is edited. Needs root, for the test cluster.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.account import SCRIPT, Account, Ran, account, clear

BOUND = 280.0
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


@pytest.fixture
def user(all_tests_account: Account) -> Iterator[Account]:
    """The account, on a cluster that is idle before and after a test."""
    clear(all_tests_account)
    yield all_tests_account
    clear(all_tests_account)


def run(user: Account, *argv: Path | str, **how: Any) -> Ran:
    """A job on two nodes that is to end well."""
    ran = user.end(user.submit("--nodes=2", *argv, **how), BOUND)
    assert ran.ended == ("COMPLETED", 0), ran.text
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
