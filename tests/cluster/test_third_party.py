"""The files of examples/ and what they use, as it comes from PyPI, under `slurm/multinode.sbatch` and in an environment.

Lightning, Accelerate and Transformers find out by themselves that there are several nodes, each in its own way; none
knows of us. They are in a venv on top of the image, as a user adds packages; nothing of theirs is edited. Each example runs
from its start over a planned end to its last step. examples/nvidia_image.sh is in test_own_image.py, venv.pbs in test_pbs.py.
Needs root, for the test cluster.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.account import REPOSITORY, SCRIPT, WORK, Account, Ran, account
from tests.cluster.images import ADDED, added, packages

BOUND = 400.0
"""Seconds for a job that takes 20 on two cores with nothing else to do."""
EXAMPLES = REPOSITORY / "examples"
ONE_RANK: tuple[Path | str, ...] = ("--cpus-per-task=1", SCRIPT, "--device=cpu", "--venv", ADDED)
"""On each node."""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def all_tests_account(request: pytest.FixtureRequest) -> Iterator[Account]:
    with account(request, binds=[packages(), added(request.getfixturevalue("default"))]) as found:
        yield found


def run(user: Account, *argv: Path | str, **how: Any) -> Ran:
    """A job on two nodes that is to end well."""
    ran = user.end(user.submit("--nodes=2", *argv, **how), BOUND)
    assert ran.ended == ("COMPLETED", 0), ran
    return ran


ACCELERATE_CPU = {"ACCELERATE_USE_CPU": "true"}
"""What `accelerate launch --cpu` sets; without it, and without a GPU, each rank would train alone."""


@pytest.mark.parametrize("mode", ["torchrun", "rank"])
def test_the_test_script_in_accelerates_own_wheel_passes_on_two_nodes(user: Account, mode: str) -> None:
    script = ("-m", "accelerate.test_utils.scripts.test_script")  # its test of splitting is for two ranks
    ran = run(user, *ONE_RANK, "--mode", mode, "--", *script, env=ACCELERATE_CPU)
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


# --- the examples -------------------------------------------------------------------------------------------------


def stopped(user: Account, number: int, run: Path, begun: str = "logs/0") -> Ran:
    """This job at its end; it has been asked to stop as its ranks started, and was queued again by itself.
    `begun`: what the first node makes of the run directory; without prepare any node may make the rest of it."""
    user.cluster.until((user.on_disk(run) / begun).exists, f"{run} to begin", BOUND)
    user.run("touch", run / "stop").check_returncode()
    user.cluster.start_requeued(number, BOUND)
    ran = user.end(number, BOUND)
    assert (ran.ended, ran.job.restarts) == (("COMPLETED", 0), 1), ran
    return ran


def reached(ran: Ran, steps: int) -> list[str]:
    """What each rank printed at its last step. The run began twice: anew, and where it had been saved."""
    first, second = map(int, re.findall(r"^begins after step (\d+)$", ran.text, re.M))
    assert first == 0 < second < steps, ran
    return sorted(set(re.findall(rf"^rank .*: {steps} steps.*$", ran.text, re.M)))


@pytest.mark.parametrize("name", ["fsdp2_dcp", "hf_trainer", "lightning_fit", "accelerate_loop"])
def test_an_example_goes_over_a_planned_end_to_its_last_step(user: Account, name: str) -> None:
    line = ("--nodes=2", *ONE_RANK, "--", EXAMPLES / f"{name}.py", "--steps", "100")
    number = user.submit(*line, env=ACCELERATE_CPU)
    ends = reached(stopped(user, number, WORK / f"runs/apptrain-{number}"), 100)
    assert [end.partition(":")[0][:6] for end in ends] == ["rank 0", "rank 1"]
    if name in ("lightning_fit", "accelerate_loop"):  # one model on both: the gradients were averaged
        assert len({end.rpartition(" ")[2] for end in ends}) == 1


def test_lightning_finds_slurms_variables_with_one_task_a_rank(user: Account) -> None:
    """In mode torchrun it finds torchrun's: the test above."""
    ran = run(user, *ONE_RANK, "--mode=rank", "--", EXAMPLES / "lightning_fit.py", "--steps", "100")
    ends = sorted(re.findall(r"^rank (\d) of 2, SLURMEnvironment: 100 steps, (\S+)$", ran.text, re.M))
    assert [rank for rank, _ in ends] == ["0", "1"], ran
    assert len({total for _, total in ends}) == 1


def test_a_venv_without_an_image_and_without_apptrain_trains_on_two_nodes(user: Account) -> None:
    env = {**user.environment(), "APPTRAIN_HOME": str(REPOSITORY), "APPTRAIN_DEVICE": "cpu"}
    number = user.submit(
        "--cpus-per-task=1", EXAMPLES / "venv.sbatch", EXAMPLES / "ddp.py", "--steps=3000", env=env
    )  # of which it makes 240 a second
    ends = reached(stopped(user, number, WORK / f"runs/venv-{number}", "manifest.json"), 3000)
    assert [end.partition(":")[0] for end in ends] == ["rank 0", "rank 1"]
    assert len({end.rpartition(" ")[2] for end in ends}) == 1


def test_the_results_of_a_sweep_are_collected(user: Account) -> None:
    line = ("--nodes=1", "--array=0,2", "--output=%x-%A_%a.out", *ONE_RANK, "--", EXAMPLES / "sweep.py")
    number = user.submit(*line)
    for one in (number, number + 1):
        assert user.end(one, BOUND).ended == ("COMPLETED", 0), user.see(one)
    runs = [WORK / f"runs/apptrain-{number}_{index}" for index in (0, 1, 2)]
    ended = user.run("python3", EXAMPLES / "sweep.py", *runs)
    assert (ended.returncode, ended.stderr) == (1, f"no result yet: {runs[1]}\n")
    found = re.findall(r"^index=(\d)\tlr=(\S+)\twidth=8\tsteps=200\tloss=(\S+)$", ended.stdout, re.M)
    assert sorted((index, lr) for index, lr, _ in found) == [("0", "0.1"), ("2", "0.01")]
    assert float(found[0][2]) < float(found[1][2])
