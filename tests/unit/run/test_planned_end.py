"""The planned end, and the stop file."""

import asyncio
import errno
import itertools
import os
import signal
import threading
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.meet.messages import AllDone, Failed, Stopped
from entrypoint.ranks.ranks import AgentEnded
from entrypoint.run.node_state import Signalled
from tests.unit.run.attempts import (
    BOTH,
    CRASHED,
    ELSEWHERE,
    RUNS_ON,
    STATES,
    STOP,
    TERMINATED,
    ended,
    ends,
    started,
    well,
)
from tests.unit.scene import (
    NEVER,
    Do,
    FakeRanks,
    Scene,
    Step,
)

BOTH_SAVE: list[Step] = [ended(0, 75), ended(1, 75)]


@pytest.mark.parametrize("asked", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
def test_a_rank_is_told_once_as_soon_as_it_catches_the_signal(alone: bool, asked: signal.Signals) -> None:
    scene = Scene(alone=alone, stop_signal=signal.SIGUSR1)
    scene.ranks.catching[1] = 1.1
    log = scene.play(*BOTH, asked, 3.0, asked)
    assert [entry for entry in log if entry[1] == "SIGUSR1"] == [(0, "SIGUSR1", 0), (1.2, "SIGUSR1", 1)]
    assert log[-1][1] != "ends"


def test_a_rank_that_starts_after_the_stop_is_told() -> None:
    assert Scene().play(Stopped(), 0.9, *BOTH) == [
        *[(1.0, "SIGUSR2", 0), (1.0, "SIGUSR2", 1)],
    ]


def test_ranks_to_which_torchrun_has_given_other_numbers_are_told_and_none_is_said_to_run_on() -> None:
    """As c10d does, which goes by addresses."""
    scene = Scene()
    scene.ranks.catching = {2: 0.0, 3: 0.0}
    scene.lasts = 60.0
    log = scene.play(Stopped(), 0.9, started(2), started(3))
    assert [entry for entry in log if "looks for workers" not in entry] == [
        *[(1.0, "SIGUSR2", 2), (1.0, "SIGUSR2", 3)]
    ]
    scene = Scene()
    scene.ranks.catching = {2: 0.0, 3: NEVER}
    log = scene.play(Stopped(), 0.9, started(2), started(3), 1.0, ended(2, 75), ended(3), AllDone())
    said = [entry[2] for entry in log if entry[1] == "says"]
    assert said == ["a stop was asked for, but rank 3 on 127.0.0.2 caught no SIGUSR2 and has ended"]


@pytest.mark.parametrize("asked", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("state", [CRASHED, [*BOTH, Failed(ELSEWHERE)], [*BOTH, AllDone()]])
def test_a_wish_to_stop_that_comes_while_the_attempt_ends_is_for_the_one_that_may_follow(
    state: list[Step], asked: signal.Signals
) -> None:
    scene = Scene()
    scene.lasts = 60.0
    assert scene.play(*state, asked)[-1][1] == "ends"
    assert asyncio.run(asyncio.wait_for(scene.signals.next(), 1)) == Signalled(signum=asked)


def test_ranks_that_torchrun_starts_again_after_the_stop_are_told_once_they_catch_it() -> None:
    scene = Scene(changes={"max_restarts": 1})

    def import_torch(_: Scene) -> None:
        scene.ranks.catching = {0: 26.55, 1: 27.55}

    restart: list[Step] = [ended(1, 9), ended(0, 143, 15), import_torch, *BOTH]
    assert scene.after(STATES[STOP], 20.0, *restart, 9.0, *BOTH_SAVE, AllDone()) == [
        *[(20.0, "forget", 0), (20.0, "forget", 1), (26.09, "SIGUSR2", 0), (27.09, "SIGUSR2", 1)],
        *[(29.0, "done"), (29.0, "wait", 10.0), well(29.0, 0, 75)],
    ]


def test_a_rank_that_is_gone_before_its_end_is_known_takes_no_signal() -> None:
    scene = Scene()

    def heeding(pids: Iterable[int], signum: int, told: Collection[int]) -> dict[int, tuple[int, ...]]:
        """It dies right after it was looked at."""
        found = FakeRanks.heeding(scene.ranks, pids, signum, told)
        scene.ranks.die(scene.ranks.pids[0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scene.ranks, "heeding", heeding)
        assert scene.after(BOTH, Stopped(), 1.0, ended(0)) == [(0, "SIGUSR2", 1)]


def test_each_program_that_a_shell_starts_is_told_once() -> None:
    """The last one ends before the shell, which goes on for a moment: it was told all the same."""
    scene = Scene()
    scene.ranks.programs[1] = [(0.0, 5.0), (0.0, 3.0), (8.05, 20.0)]
    assert scene.after(BOTH, Stopped(), 22.0, *BOTH_SAVE, AllDone()) == [
        *[(0, "SIGUSR2", 0), (0, "SIGUSR2", "1.0"), (0, "SIGUSR2", "1.1"), (7.6, "SIGUSR2", "1.2")],
        *[(22.0, "done"), (22.0, "wait", 10.0), well(22.0, 0, 75)],
    ]


def test_a_shell_whose_next_program_catches_no_stop_is_as_a_rank_that_catches_none() -> None:
    scene = Scene()
    scene.ranks.programs[1] = [(0.0, 5.0)]
    scene.lasts = 90.0
    log = scene.after(BOTH, Stopped(60.0))
    assert log[:3] == [
        *[(0, "SIGUSR2", 0), (0, "SIGUSR2", "1.0"), (14.0, "says", RUNS_ON.format("rank 1"))],
    ]
    assert [(after, what) for after, what, *_ in log[3:]] == [
        *[(30.0, "fail"), (30.0, "SIGTERM"), (30.0, "SIGTERM"), (31.02, "kill"), (31.02, "ends")],
    ]


def test_ranks_that_save_after_a_stop_are_an_outcome_of_75_and_no_agent_was_signalled() -> None:
    scene = Scene()
    scene.ranks.agent_leaves = 0.5
    end: list[Step] = [ended(0, 75), ended(1, 143, 15, at=1000.6), AgentEnded(), AllDone()]
    assert scene.after(BOTH, Stopped(60.0), 2.0, *end) == [
        *[(0, "SIGUSR2", 0), (0, "SIGUSR2", 1), (2.0, "done"), (2.0, "wait", 10.0)],
        well(2.5, 1, 75, at=1000.6),
    ]
    assert scene.link.saved == (0, 1)


@pytest.mark.parametrize(
    ("count", "told", "named"),
    [
        (1, [], "rank 0"),
        (2, [0], "rank 1"),
        (2, [], "each of the ranks 0, 1"),
        (8, [], "each of the ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (11, [10], "each of the ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_ranks_that_catch_no_stop_signal_are_named_once_and_run_on(
    count: int, told: list[int], named: str
) -> None:
    scene = Scene(ranks=range(count))
    scene.ranks.catching = {rank: 0.0 if rank in told else NEVER for rank in range(count)}
    scene.lasts = 60.0
    assert scene.after([started(rank) for rank in range(count)], Stopped()) == [
        *[(0, "SIGUSR2", rank) for rank in told],
        (10.0, "says", RUNS_ON.format(named)),
    ]


@pytest.mark.parametrize(("catches", "often"), [(0.0, 0), (5.0, 5), (NEVER, 10)])
def test_it_is_looked_often_for_who_catches_the_stop_signal_only_while_one_is_awaited(
    catches: float, often: float
) -> None:
    """A look may cost CPU time, which the ranks lose."""
    scene = Scene()
    scene.ranks.catching[1] = catches
    scene.lasts = 60.0
    scene.after(BOTH, Stopped())
    looks = [round(look - scene.ranks.looks[0], 1) for look in scene.ranks.looks]
    gaps = [(one, round(following - one, 1)) for one, following in itertools.pairwise(looks)]
    assert {gap for one, gap in gaps if one < often - 1} <= {0.2}
    assert {gap for one, gap in gaps if one > often} == {2.0}


def test_a_rank_that_has_ended_is_not_said_to_run_on() -> None:
    scene = Scene()
    scene.ranks.catching = {0: NEVER, 1: NEVER}
    scene.lasts = 60.0
    assert scene.after(BOTH, Stopped(), 5.0, ended(0)) == [(10.0, "says", RUNS_ON.format("rank 1"))]
    scene = Scene()
    scene.ranks.catching = {0: NEVER, 1: 5.0}
    scene.lasts = 60.0
    assert scene.after(BOTH, Stopped(), 5.0, ended(0)) == [(4.6, "SIGUSR2", 1)]


def test_ranks_that_end_before_it_is_said_that_they_catch_no_stop_signal_are_named_at_the_end() -> None:
    scene = Scene()
    scene.ranks.catching = {0: 1.0, 1: NEVER}
    log = scene.after(BOTH, Stopped(), 5.0, ended(0), ended(1), AllDone())
    said = [entry[2] for entry in log if entry[1] == "says"]
    assert said == ["a stop was asked for, but rank 1 on 127.0.0.2 caught no SIGUSR2 and has ended"]


@pytest.mark.parametrize(
    ("left", "after"),
    [(0.0, 0.2), (2.0, 1.0), (20.0, 10.0), (60.0, 30.0), (100.0, 70.0)],
)
@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
def test_ranks_that_catch_no_stop_end_before_a_job_that_goes_on_as_another(
    tmp_path: Path, alone: bool, left: float, after: float
) -> None:
    """30 s before it, or in the half of what is left; as by SIGTERM."""
    scene = Scene(alone=alone)
    scene.ranks.catching[1] = NEVER
    scene.lasts = 90.0
    if alone:
        scene.stop_file = tmp_path / "stop"
        log = scene.after(BOTH, written(f"end={1000.51 + left}\n"))
    else:
        log = scene.after(BOTH, Stopped(left))
    why = "the job's time is up, and rank 1 on 127.0.0.2 catches no SIGUSR2: ended by SIGTERM"
    mine = replace(TERMINATED, time=1000.51 + after, error=why)
    told = [] if alone else [(after, "fail", mine)]
    assert [entry for entry in log if entry[1] != "says"] == [
        *[(0, "SIGUSR2", 0), *told, (after, "SIGTERM", 0), (after, "SIGTERM", 1)],
        *[(after + 1.02, "kill"), ends(after + 1.02, mine)],
    ]


def test_ranks_that_were_told_may_save_to_the_jobs_end() -> None:
    scene = Scene()
    scene.lasts = 120.0
    assert scene.after(BOTH, Stopped(100.0)) == [(0, "SIGUSR2", 0), (0, "SIGUSR2", 1)]


def test_the_jobs_warning_counts_that_comes_after_a_stop_by_hand(tmp_path: Path) -> None:
    scene = Scene()
    scene.ranks.catching[1] = NEVER
    scene.stop_file = tmp_path / "stop"
    scene.lasts = 60.0
    log = scene.after(BOTH, written(""), 20.0, written("end=1080.51\n"))
    assert log[:4] == [
        *[
            (0, "stop", None),
            (0, "SIGUSR2", 0),
            (10.0, "says", RUNS_ON.format("rank 1")),
            (20.0, "stop", 60.0),
        ],
    ]
    assert [(after, what) for after, what, *_ in log[4:]] == [
        *[(50.0, "fail"), (50.0, "SIGTERM"), (50.0, "SIGTERM"), (51.02, "kill"), (51.02, "ends")],
    ]


def written(text: str) -> Do:
    """The stop file is written, and the thread that looks for it has seen it."""

    async def write(scene: Scene) -> None:
        assert scene.stop_file is not None
        partial = scene.stop_file.with_name(".stop")
        partial.write_text(text)
        partial.rename(scene.stop_file)
        scene.clock.patient = True
        await asyncio.sleep(1e-6)
        scene.clock.patient = False

    return write


class Troubled(type(Path())):  # type: ignore[misc]
    """A file on a file system that fails first."""

    troubles: list[int]

    def exists(self, **how: Any) -> bool:
        if self.troubles:
            number = self.troubles.pop(0)
            raise OSError(number, os.strerror(number))
        return super().exists(**how)


@pytest.mark.parametrize(
    ("text", "left"),
    [("", None), ("end=1600.51\n", 600.0), ("end=900", 0.0), ("end=soon", None), ("begin=1600", None)],
)
def test_the_stop_file_asks_all_nodes_to_stop(tmp_path: Path, text: str, left: float | None) -> None:
    scene = Scene()
    scene.stop_file = tmp_path / "stop"
    log = scene.after(BOTH, written(text))
    told = [entry for entry in log if entry[1] == "says"]
    assert len(told) == (text in ("end=soon", "begin=1600"))
    assert log[len(told) :] == [(0, "stop", left), (0, "SIGUSR2", 0), (0, "SIGUSR2", 1)]


def test_the_stop_file_asks_a_single_node_to_stop(tmp_path: Path) -> None:
    scene = Scene(alone=True)
    scene.stop_file = tmp_path / "stop"
    assert scene.after(BOTH, written("")) == [(0, "SIGUSR2", 0), (0, "SIGUSR2", 1)]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_file_system_that_fails_once_does_not_end_the_watch_for_the_stop_file(
    tmp_path: Path, number: int
) -> None:
    scene = Scene()
    scene.stop_file = file = Troubled(tmp_path / "stop")
    file.troubles = [number]
    assert scene.after(BOTH, written(""))[:1] == [(0, "stop", None)]
    assert file.troubles == []


def test_the_watch_for_the_stop_file_ends_with_the_ranks(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    scene = Scene(alone=True)
    scene.stop_file = tmp_path / "stop"
    scene.play(*BOTH, ended(0), ended(1))
    _join_all_but(before)


def test_a_stop_file_that_a_slow_file_system_shows_after_the_end_does_no_harm(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    over = threading.Event()
    died: list[object] = []

    class Slow(type(Path())):  # type: ignore[misc]
        def exists(self, **_: Any) -> bool:
            return over.wait(5.0)

    scene = Scene(alone=True)
    scene.stop_file = Slow(tmp_path / "stop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", died.append)
        log = [*scene.play(*BOTH, ended(0), ended(1))]
        over.set()
        _join_all_but(before)
    assert (scene.log, died) == (log, [])


def _join_all_but(threads: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - threads:
        thread.join(5.0)
        assert not thread.is_alive()
