"""What lies where in the run directory."""

from pathlib import Path

import pytest

from entrypoint.job.rundir import RunDirectory


@pytest.mark.parametrize(
    ("name", "part"), [("gpu-a01", "gpu-a01"), ("fd00::1", "fd00__1"), ("../räck 7/a", ".._r_ck_7_a")]
)
def test_each_rank_of_each_attempt_has_its_own_files(name: str, part: str) -> None:
    run = RunDirectory(Path("/run"), 2)
    assert run.stack(name, 13) == Path(f"/run/stacks/2/{part}.rank13.txt")
    assert run.log(name, "rank13", "out") == Path(f"/run/logs/2/{part}.rank13.out")


@pytest.mark.parametrize(("local_rank", "task"), [(None, "3"), (1, "3.1")])
def test_each_task_has_its_own_plan_and_outcome(local_rank: int | None, task: str) -> None:
    run = RunDirectory(Path("/run"), 2)
    assert run.plan(3, local_rank) == Path(f"/run/plan.{task}.json")
    assert run.outcome(3, local_rank) == Path(f"/run/outcome/2.{task}")
