"""Where the time of a start goes: the parts add up, and those that were not are not shown."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from entrypoint.batch.prepared import PreparedJob
from entrypoint.job import handover
from entrypoint.node import processes
from entrypoint.plan.failure_policy import FailurePolicy
from entrypoint.run.start import StartTimes, of_launch


def test_a_part_ends_where_the_next_begins() -> None:
    start = StartTimes(1000.0)
    for part, at in (("plan", 1000.21), ("nodes", 1002.0), ("torch", 1003.5), ("ranks", 1003.62)):
        start.mark(part, at)
    assert start.parts == {"plan": 0.21, "nodes": 1.79, "torch": 1.5, "ranks": 0.12}
    assert start.in_words() == (
        "the ranks started after 3.6 s: plan and addresses 0.2, nodes 1.8, torch 1.5, ranks 0.1"
    )


def test_a_clock_that_goes_back_makes_no_part_negative() -> None:
    start = StartTimes(1000.0)
    start.mark("script", 999.0)
    start.mark("task", 1001.0)
    assert start.parts == {"script": 0.0, "task": 1.0}


def test_a_mark_without_a_time_is_now() -> None:
    start = StartTimes(time.time() - 2)
    start.mark("plan")
    assert 2 <= start.parts["plan"] < 60


@pytest.fixture
def hand(tmp_path: Path) -> Path:
    """The job script's directory on this node."""
    folder = tmp_path / f"apptrain.{os.uname().nodename}.x"
    folder.mkdir()
    return folder


def job(hand: Path, **known: float | None) -> dict[str, str]:
    """The variables of a task of a job that was prepared."""
    of = {"attempt": 0, "hosts": ("n1",), "tasks": 1, "bound": None, "port_by_hand": False}
    of |= {"policy": FailurePolicy.STOP, "scheduler": "slurm", "batch": True}
    PreparedJob(run_dir=hand, **of, **known).write(hand)  # type: ignore[arg-type]
    return {handover.VARIABLE: str(hand), "APPTRAIN_ATTEMPT": "0"}


def test_in_a_job_the_start_began_with_the_job_script(hand: Path) -> None:
    now = time.time()
    start = of_launch(job(hand, script=now - 100.5, began=now - 60.0))
    assert start.parts.keys() == {"script", "task"}
    assert start.parts["script"] == 40.5
    assert 60 <= start.parts["task"] < 90


@pytest.mark.parametrize("case", ["no job", "later attempt", "nothing prepared"])
def test_else_with_this_process(hand: Path, case: str) -> None:
    env = {} if case == "no job" else {handover.VARIABLE: str(hand)}
    if case == "later attempt":
        env = job(hand, script=None, began=time.time() - 9000)
    start = of_launch(env)
    assert start.parts.keys() == {"task"}
    assert start.parts["task"] == pytest.approx(processes.age(os.getpid()), abs=5)


def test_the_age_of_a_process_is_counted_from_its_fork() -> None:
    before = time.monotonic()
    with subprocess.Popen(["sleep", "60"]) as child:
        time.sleep(0.1)
        age = processes.age(child.pid)
        assert age is not None
        assert 0.05 < age <= time.monotonic() - before + 0.05
        child.kill()
    assert processes.age(child.pid) is None
