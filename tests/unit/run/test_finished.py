"""Who says how an attempt ended, and what: a table of cases."""

from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet.reports import Failure
from entrypoint.ranks.ranks import RankEnded
from entrypoint.run import endings
from entrypoint.run.endings import RankTrace
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


LEFT_EARLY = "ended with 0 after 8 steps while 3 others were still running: do all ranks make the same number of steps?"
ALONE = (
    "no rank joined a process group: each of the 2 ranks trained for itself, on what it took for all data "
    "(docs/own-script.md, Each rank for itself)"
)


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Outcome(status=0), []),
        (Outcome(status=0, alone=True), [ALONE]),
        (Outcome(status=75, alone=True), ["saved at a planned end: the same run directory continues"]),
        (Outcome(status=1, node="n1", error="no space"), ["n1: no space"]),
        (Outcome(status=1, error="no space"), ["no space"]),
        (Outcome(status=1, node="n1"), ["n1: no reason was told"]),
        (
            Outcome(status=3, rank=1, node="n1"),
            ["rank 1 on n1 failed first, status 3: nothing on stderr (/run/logs/2/n1.rank1.err)"],
        ),
        (
            Outcome(status=124, rank=1, node="n1", error="stuck, no step for 30 s"),
            ["rank 1 on n1, status 124: stuck, no step for 30 s", "where each rank was: /run/stacks/2"],
        ),
        (  # as of `timeout`, in a script that starts the program
            Outcome(status=124, rank=1, node="n1"),
            ["rank 1 on n1 failed first, status 124: nothing on stderr (/run/logs/2/n1.rank1.err)"],
        ),
        (Outcome(status=124, rank=1, node="n1", error=LEFT_EARLY), [f"rank 1 on n1 {LEFT_EARLY}"]),
        (Outcome(status=1, rank=1, node="n1", error=LEFT_EARLY), [f"rank 1 on n1 {LEFT_EARLY}"]),
    ],
)
def test_each_end_is_told_in_its_own_words(outcome: Outcome, told: list[str]) -> None:
    plan = replace(planned(), mode="torchrun", nproc_per_node=2, members=(0,))
    assert endings.in_words(outcome, plan, RunDirectory(Path("/run"), 2)) == told


def test_of_ranks_that_c10d_has_numbered_all_logs_of_the_node_are_named() -> None:
    plan = replace(planned(), mode="torchrun", nproc_per_node=2)
    plan = replace(plan, rendezvous=replace(plan.rendezvous, backend="c10d"))
    failed = Outcome(status=3, rank=1, node="n1")
    told = endings.in_words(failed, plan, RunDirectory(Path("/run"), 2))
    assert told == ["rank 1 on n1 failed first, status 3: nothing on stderr (/run/logs/2/n1.rank*.err)"]
    one = replace(plan, members=(0,))
    told = endings.in_words(failed, one, RunDirectory(Path("/run"), 2))
    assert told == ["rank 1 on n1 failed first, status 3: nothing on stderr (/run/logs/2/n1.rank1.err)"]


def test_in_mode_exec_the_program_of_a_node_is_named() -> None:
    plan = replace(planned(), mode="exec", nproc_per_node=4)
    assert [endings.named(plan, rank) for rank in (0, 3, 4)] == [
        "CMD of node 0",
        "CMD of node 0",
        "CMD of node 1",
    ]


@pytest.mark.parametrize(
    ("signal", "error", "shortage", "told"),
    [
        (0, "ValueError: x", "", "ValueError: x"),
        (0, "ValueError: x", "node: out of memory", "ValueError: x"),
        (9, "", "", "killed by SIGKILL"),
        (9, "ValueError: x", "out of memory", "killed by SIGKILL: out of memory: ValueError: x"),
        (15, "ValueError: x", "out of memory", "killed by SIGTERM: ValueError: x"),
        (99, "", "", "killed by signal 99"),
        (0, "DataLoader worker is killed by signal: Killed.", "out of memory",
         "DataLoader worker is killed by signal: Killed.: out of memory"),
    ],
)  # fmt: skip
def test_a_rank_that_was_killed_for_want_of_memory_says_so(
    signal: int, error: str, shortage: str, told: str
) -> None:
    ended = RankEnded(rank=5, status=7, signal=signal, time=4.0)
    said = RankTrace(error=error, at="in backward (train.py:31)", shortage=shortage)
    assert endings.failure_of("n1", 2, ended, said) == Failure(
        node_rank=2,
        node="n1",
        rank=5,
        status=7,
        signal=signal,
        time=4.0,
        error=told,
        at="in backward (train.py:31)",
    )


@pytest.mark.parametrize(
    ("same", "more"), [(0, ""), (1, "; 1 other rank: the same"), (3, "; 3 other ranks: the same")]
)
def test_a_failure_of_the_job_is_each_nodes_outcome_with_how_many_ranks_said_the_same(
    same: int, more: str
) -> None:
    outcome = Outcome(status=7, rank=5, node="n1", signal=9, time=4.0, error="x")
    failure = endings.to_failure(2, outcome)
    assert failure.node_rank == 2
    assert endings.to_outcome(replace(failure, same=same)) == replace(outcome, error="x" + more)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([3], "rank 3"),
        ([3, 4], "each of the ranks 3, 4"),
        (range(8), "each of the ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(10), "each of the ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_of_many_ranks_eight_are_listed(ranks: range, told: str) -> None:
    assert endings.listed(ranks) == told
