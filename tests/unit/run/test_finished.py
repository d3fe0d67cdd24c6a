"""Who says how an attempt ended, and what: a table of cases."""

from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.run.finished import FinishedAttempt
from tests.unit.scene import planned


def ended(place: int, outcome: Outcome, lost: tuple[int, ...] = (), *, nnodes: int = 4) -> FinishedAttempt:
    """On this node of a job of `nnodes`, all of which took part."""
    plan = planned()
    names = tuple(f"n{number}" for number in range(nnodes))
    granted = replace(plan.allocation, nodes=names, node_rank=place)
    return FinishedAttempt(
        plan=replace(plan, allocation=granted, members=tuple(range(nnodes)), hosts=names),
        run_dir=RunDirectory(Path("/scratch/run"), 2),
        outcome=outcome,
        has_met=True,
        lost=lost,
    )


CRASH = Outcome(status=3, rank=1, node="n1", error="ValueError: no")
LOST_FIRST = Outcome(status=1, node="n0", error="lost: it is silent")


@pytest.mark.parametrize(
    ("outcome", "lost", "speak"),
    [
        (CRASH, (), [0]),
        (CRASH, (3,), [0]),
        (CRASH, (0,), [0, 1, 2]),
        (LOST_FIRST, (), [0, 1, 2]),
        (replace(LOST_FIRST, signal=15), (), [0]),  # node 0 was asked to end, and is there to say so
        (replace(LOST_FIRST, node="n1"), (1,), [0]),
    ],
)
def test_node_0_speaks_and_two_more_where_it_may_be_lost(
    outcome: Outcome, lost: tuple[int, ...], speak: list[int]
) -> None:
    assert [place for place in range(4) if ended(place, outcome, lost).speaks] == speak


def test_a_job_of_one_node_speaks_for_itself() -> None:
    assert ended(0, LOST_FIRST, (0,), nnodes=1).speaks


def test_the_failure_is_told_once_and_where_the_echoes_are() -> None:
    one = ended(0, CRASH)
    logs = "/scratch/run/logs/2"
    told = f"rank 1 on n1 failed first, status 3: ValueError: no ({logs}/n1.rank1.err)"
    assert one.in_words() == [told]
    hidden = f"tracebacks of lost connections are in {logs} alone"
    assert replace(one, has_echoes=True).in_words() == [told, hidden]
    assert replace(one, misfit="with 2 ranks the program refuses to run").in_words() == []
