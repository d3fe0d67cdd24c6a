"""Every event in every state of a node whose ranks run.

The log of a case has the seconds since its event; the events before it, which lead to its state, are not in it.
"""

import asyncio
import errno
import inspect
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.job.outcome import Outcome
from entrypoint.meet.link import Link
from entrypoint.meet.terms import AllDone, Failed, Look, Peek, Stopped
from entrypoint.node import processes
from entrypoint.run import ranks
from entrypoint.run.endings import asked_to_end, to_failure
from entrypoint.run.ranks import RankEnded, RankStarted, StarterEnded
from entrypoint.watch import heartbeat
from entrypoint.watch.reports import End, Failure
from tests.unit.scene import (
    AGENT,
    NEVER,
    SIGHTINGS,
    STUCK,
    Do,
    Entry,
    FakeHeartbeats,
    FakeLink,
    FakeRanks,
    Scene,
    Step,
    planned,
)

# The states, the failures, and what comes of them.


def started(rank: int) -> RankStarted:
    return RankStarted(rank=rank)


def ended(rank: int, status: int = 0, signum: int = 0, at: float = 1000.5) -> RankEnded:
    return RankEnded(rank=rank, status=status, signal=signum, time=at)


BOTH: list[Step] = [started(0), started(1)]
BOTH_SAVE: list[Step] = [ended(0, 75), ended(1, 75)]
NONE = "before any rank has started"
RUN = "while all run"
PART = "when the other has ended well"
DONE = "when all here have ended well"
SAVED = "when the other has saved"
STOP = "after a stop was asked for"
END = "while the ranks may save after SIGTERM"
STATES: dict[str, list[Step]] = {
    NONE: [1e-6],
    RUN: [*BOTH],
    PART: [*BOTH, ended(0, at=1000.1)],
    DONE: [*BOTH, ended(0, at=1000.1), ended(1, at=1000.2)],
    SAVED: [*BOTH, ended(0, 75, at=1000.1)],
    STOP: [*BOTH, Stopped()],
    END: [*BOTH, signal.SIGTERM],
}

CRASH = Failure(node_rank=1, node="127.0.0.2", rank=1, status=9, signal=0, time=1000.5, error="ValueError: x")
KILLED = replace(CRASH, status=137, signal=9, error="killed by SIGKILL: ValueError: x")
OURS = Failure(node_rank=1, node="127.0.0.2", rank=None, status=1, signal=0, time=1000.76, error="")
UNTOLD = replace(OURS, error="the ranks ended without a status")
BROKEN = replace(OURS, error="OSError: no space")
NO_PORT = replace(OURS, status=69, error="DistNetworkError: the port is taken")
TERMINATED = replace(OURS, status=143, signal=15, time=1000.51, error="ended by SIGTERM")
INTERRUPTED = replace(OURS, status=130, signal=2, time=1000.51, error="interrupted")
ELSEWHERE = Failure(
    node_rank=2, node="127.0.0.3", rank=3, status=7, signal=0, time=1000.4, error="KeyError: 'a'"
)
CANCELLED = replace(ELSEWHERE, rank=None, status=143, signal=15, error="ended by SIGTERM")


def as_outcome(failure: Failure) -> Outcome:
    return Outcome(
        status=failure.status,
        rank=failure.rank,
        node=failure.node,
        signal=failure.signal,
        time=failure.time,
        error=failure.error,
    )


def ends(after: float, failure: Failure) -> Entry:
    return (after, "ends", as_outcome(failure))


def well(after: float, rank: int | None, status: int = 0, at: float = 1000.5) -> Entry:
    return (after, "ends", Outcome(status=status, rank=rank, node="127.0.0.2", time=at))


NO_STEP = "no step for 30 s"
STAYS: list[Entry] = []
GRACE_GOES_ON = [(0.51, "kill"), ends(0.51, replace(TERMINATED, time=1000.0))]
"""While the ranks may save after SIGTERM, whatever happens: they have their time, and the outcome is that of
the signal."""
Logs = dict[tuple[str, ...], list[Entry]]
"""What follows an event in each of these states."""


def node_fails(failure: Failure, *, told: bool) -> Logs:
    """After a moment in which ranks may tell why. `told`: whether there are others, whose verdict is heard."""
    fail = [(0.25, "fail", failure)] if told else []
    to_0, to_1 = (0.25, "SIGTERM", 0), (0.25, "SIGTERM", 1)
    return {
        (NONE,): [*fail, (0.25, "kill"), ends(0.55 if told else 0.25, failure)],
        (RUN, STOP): [*fail, to_0, to_1, (1.27, "kill"), ends(1.27, failure)],
        (PART, SAVED): [*fail, to_1, (1.27, "kill"), ends(1.27, failure)],
        (DONE,): STAYS,
    }


def all_end(failure: Failure, *, told: bool) -> Logs:
    """At once. `told`: whether the others are told."""
    fail = [(0, "fail", failure)] if told else []
    to_0, to_1 = (0, "SIGTERM", 0), (0, "SIGTERM", 1)
    return {
        (NONE, DONE): [*fail, (0, "kill"), ends(0, failure)],
        (RUN, STOP): [*fail, to_0, to_1, (1.02, "kill"), ends(1.02, failure)],
        (PART, SAVED): [*fail, to_1, (1.02, "kill"), ends(1.02, failure)],
    }


BESIDE_OTHERS: dict[str, tuple[Step, Logs]] = {
    "rank 1 ends well": (ended(1), {(NONE, RUN, DONE, STOP): STAYS, (PART, SAVED): [(0, "done")]}),
    "rank 1 has saved": (ended(1, 75), {(NONE, RUN, DONE, STOP): STAYS, (PART, SAVED): [(0, "done")]}),
    "rank 1 fails": (
        ended(1, 9),
        {
            (NONE, PART, DONE, SAVED): [(0.25, "fail", CRASH), (0.25, "kill"), ends(0.55, CRASH)],
            (RUN, STOP): [(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, CRASH)],
        },
    ),
    "rank 1 is killed": (
        ended(1, 137, 9),
        {
            (NONE, PART, DONE): [(0.25, "fail", KILLED), (0.25, "kill"), ends(0.55, KILLED)],
            (RUN, STOP): [(0.25, "fail", KILLED), (0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, KILLED)],
            (SAVED,): [(0, "done")],
        },
    ),
    "rank 0 is started again": (
        started(0),
        {
            (NONE, RUN, PART, DONE, SAVED): [(0, "forget", 0)],
            (STOP,): [(0, "forget", 0), (0.09, "SIGUSR2", 0)],
            # Nobody has told the new process to end.
            (END,): [(6.49, "kill"), ends(6.49, replace(TERMINATED, time=1000.0))],
        },
    ),
    "the starter ends": (StarterEnded(), node_fails(UNTOLD, told=True)),
    "the starter ends with an error": (StarterEnded(error=BROKEN.error), node_fails(BROKEN, told=True)),
    "torch's store cannot be had": (
        StarterEnded(error=NO_PORT.error, unavailable=True),
        node_fails(NO_PORT, told=True),
    ),
    "a rank elsewhere fails": (Failed(ELSEWHERE, lost=(2,)), all_end(ELSEWHERE, told=False)),
    "another node gets SIGTERM": (Failed(CANCELLED), all_end(CANCELLED, told=False)),
    "SIGTERM comes": (signal.SIGTERM, all_end(TERMINATED, told=True)),
    "Ctrl-C comes": (
        signal.SIGINT,
        all_end(INTERRUPTED, told=True)
        | {(END,): [(0.01, "kill"), ends(0.01, replace(TERMINATED, time=1000.0))]},
    ),
    "the job seems to hang": (
        Look(NO_STEP),
        {
            (NONE,): [(0, "look"), (0, "seen", SIGHTINGS), (0.3, "kill"), ends(0.3, STUCK)],
            (RUN, STOP): [
                *[(0, "look"), (0, "seen", SIGHTINGS), (0.3, "SIGTERM", 0), (0.3, "SIGTERM", 1)],
                *[(0.3, "kill"), ends(0.3, STUCK)],
            ],
            (PART, SAVED): [
                *[(0, "look"), (0, "seen", SIGHTINGS), (0.3, "SIGTERM", 1), (0.3, "kill"), ends(0.3, STUCK)],
            ],
            (DONE,): [(0, "seen", []), (0.3, "kill"), ends(0.3, STUCK)],
        },
    ),
    "all nodes are done": (
        AllDone(),
        {
            (NONE, RUN, STOP): [(0, "wait", 10.0), well(0, None, at=1000.51)],
            (PART,): [(0, "wait", 10.0), well(0, 0, at=1000.1)],
            (DONE,): [(0, "wait", 10.0), well(0, 1, at=1000.2)],
            (SAVED,): [(0, "wait", 10.0), well(0, 0, 75, at=1000.1)],
        },
    ),
    "a stop is asked for elsewhere": (
        Stopped(),
        {
            (NONE, DONE, STOP): STAYS,
            (RUN,): [(0, "SIGUSR2", 0), (0, "SIGUSR2", 1)],
            (PART, SAVED): [(0, "SIGUSR2", 1)],
        },
    ),
    "SIGUSR2 comes": (
        signal.SIGUSR2,
        {
            (NONE, DONE, STOP): [(0, "stop", None)],
            (RUN,): [(0, "stop", None), (0, "SIGUSR2", 0), (0, "SIGUSR2", 1)],
            (PART, SAVED): [(0, "stop", None), (0, "SIGUSR2", 1)],
        },
    ),
}


def cases(rows: Mapping[str, tuple[Step, Logs]], states: Sequence[str]) -> list[Any]:
    """One for each event in each of the states; where a row does not tell, the grace goes on."""
    found = []
    for event, (step, logs) in rows.items():
        by_state = {END: GRACE_GOES_ON} | {state: log for group, log in logs.items() for state in group}
        found += [pytest.param(s, step, by_state[s], id=f"{event} {s}") for s in states]
    return found


@pytest.mark.parametrize(("state", "step", "log"), cases(BESIDE_OTHERS, list(STATES)))
def test_beside_other_nodes(state: str, step: Step, log: list[Entry]) -> None:
    assert Scene(errors={1: "ValueError: x"}).after(STATES[state], step) == log


ALONE_STATES = {name: steps for name, steps in STATES.items() if name != DONE}
ALONE_STATES[STOP] = [*BOTH, signal.SIGUSR2]
MIXED = "rank {} saved to go on, the others ended well"
ALONE: dict[str, tuple[Step, Logs]] = {
    "rank 1 ends well": (
        ended(1),
        {
            (NONE, RUN, STOP): STAYS,
            (PART,): [(0, "wait", 10.0), well(0, 1)],
            (SAVED,): [(0, "wait", 10.0), (0, "ends", Outcome(status=1, error=MIXED.format(0)))],
        },
    ),
    "rank 1 has saved": (
        ended(1, 75),
        {
            (NONE, RUN, STOP): STAYS,
            (PART,): [(0, "wait", 10.0), (0, "ends", Outcome(status=1, error=MIXED.format(1)))],
            (SAVED,): [(0, "wait", 10.0), well(0, 1, 75)],
        },
    ),
    "rank 1 fails": (
        ended(1, 9),
        {
            (NONE, PART, SAVED): [(0.25, "kill"), ends(0.25, CRASH)],
            (RUN, STOP): [(0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, CRASH)],
        },
    ),
    "rank 1 is killed": (
        ended(1, 137, 9),
        {
            (NONE, PART): [(0.25, "kill"), ends(0.25, KILLED)],
            (RUN, STOP): [(0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, KILLED)],
            (SAVED,): [(0, "wait", 10.0), well(0, 1, 75)],
        },
    ),
    "the starter ends": (StarterEnded(), node_fails(UNTOLD, told=False)),
    "the starter ends with an error": (StarterEnded(error=BROKEN.error), node_fails(BROKEN, told=False)),
    "SIGTERM comes": (signal.SIGTERM, all_end(TERMINATED, told=False)),
    "Ctrl-C comes": (
        signal.SIGINT,
        all_end(INTERRUPTED, told=False)
        | {(END,): [(0.01, "kill"), ends(0.01, replace(TERMINATED, time=1000.0))]},
    ),
    "SIGUSR2 comes": (
        signal.SIGUSR2,
        {
            (NONE, STOP): STAYS,
            (RUN,): [(0, "SIGUSR2", 0), (0, "SIGUSR2", 1)],
            (PART, SAVED): [(0, "SIGUSR2", 1)],
        },
    ),
}


@pytest.mark.parametrize(("state", "step", "log"), cases(ALONE, list(ALONE_STATES)))
def test_alone(state: str, step: Step, log: list[Entry]) -> None:
    scene = Scene(alone=True, errors={1: "ValueError: x"})
    assert scene.after(ALONE_STATES[state], step) == log


FAILED = "after it has failed"
AGAIN = "after torchrun has started all again"
CRASHED: list[Step] = [*BOTH, ended(1, 9)]
RESTART_STATES: dict[str, list[Step]] = {
    RUN: [*BOTH],
    FAILED: CRASHED,
    AGAIN: [*CRASHED, ended(0, 143, 15), *BOTH],
}
FAILS_FIRST = [(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, CRASH)]
RESTARTS: dict[str, tuple[Step, Logs]] = {
    "rank 1 fails": (ended(1, 9), {(RUN, FAILED, AGAIN): STAYS}),
    "rank 1 is killed": (ended(1, 137, 9), {(RUN, FAILED, AGAIN): STAYS}),
    "rank 1 ends well": (ended(1), {(RUN, FAILED, AGAIN): STAYS}),
    "rank 1 is started": (started(1), {(RUN, FAILED, AGAIN): [(0, "forget", 1)]}),
    "the starter ends": (
        StarterEnded(),
        {(RUN, AGAIN): node_fails(UNTOLD, told=True)[RUN, STOP], (FAILED,): FAILS_FIRST},
    ),
    "torch's store cannot be had": (
        StarterEnded(error=NO_PORT.error, unavailable=True),
        {(RUN, AGAIN): node_fails(NO_PORT, told=True)[RUN, STOP], (FAILED,): FAILS_FIRST},
    ),
}


@pytest.mark.parametrize(("state", "step", "log"), cases(RESTARTS, list(RESTART_STATES)))
def test_with_restarts_left_torchruns_agent_decides(state: str, step: Step, log: list[Entry]) -> None:
    scene = Scene(changes={"max_restarts": 1}, errors={1: "ValueError: x"})
    assert scene.after(RESTART_STATES[state], step) == log


# Ranks that make no step.

PAUSE = "no step for 30 s"


def test_a_pause_is_reported_once_and_its_end_too() -> None:
    scene = Scene(step=30.0)
    scene.heartbeats.pauses_from = 5.0

    def go_on(scene: Scene) -> None:
        scene.heartbeats.pauses_from = NEVER

    scene.play(*BOTH, 45.0, go_on, 10.0)
    assert [entry for entry in scene.log if entry[1] == "paused"] == [
        (35.0, "paused", PAUSE),
        (45.0, "paused", None),
    ]


def test_a_bound_that_the_user_chose_ends_a_pause_too() -> None:
    scene = Scene(step=30.0, is_chosen=True)
    scene.heartbeats.pauses_from = 5.0
    scene.play(*BOTH, 45.0)
    assert (35.0, "stalled", PAUSE) in scene.log
    assert "paused" not in {entry[1] for entry in scene.log}


def test_a_rank_that_ended_well_long_ago_has_the_others_looked_at_without_a_word() -> None:
    scene = Scene(step=30.0)
    scene.after([*BOTH, ended(0)], 45.0)
    assert [entry[1:] for entry in scene.log] == [("paused", "")]


WORKERS = (
    "rank 0 on 127.0.0.2 has started processes of its own, and they wait in init_process_group (train.py:9)"
)


def scene_of_workers(**changes: Any) -> Scene:
    scene = Scene(changes=changes)
    scene.heartbeats.steps = None
    scene.lasts = 200.0
    return scene


def test_ranks_whose_own_workers_wait_are_told_of_the_mode_for_them_once() -> None:
    scene = scene_of_workers()

    def wait(scene: Scene) -> None:
        scene.workers = WORKERS

    why = "torchrun starts one process for each rank, and a script that starts its own (mp.spawn) needs --mode exec"
    assert scene.play(30.0, wait) == [
        *[(20.0, "looks for workers"), (60.0, "looks for workers")],
        (60.0, "says", f"{WORKERS}: {why}"),
    ]


def test_workers_are_looked_for_only_so_often() -> None:
    assert scene_of_workers().play() == [(when, "looks for workers") for when in (20.0, 60.0, 140.0)]


@pytest.mark.parametrize("changes", [{"mode": "exec"}, {"mode": "rank"}, {"members": (0, 1, 2)}])
def test_workers_are_looked_for_under_torchrun_on_the_first_node_alone(changes: dict[str, Any]) -> None:
    assert scene_of_workers(**changes).play() == []


def test_a_rank_that_makes_steps_has_no_workers_that_wait() -> None:
    scene = scene_of_workers()
    scene.heartbeats.steps = 1
    assert scene.play() == []


def test_where_ranks_are_is_told_and_they_go_on() -> None:
    scene = Scene()
    assert scene.after(BOTH, Peek()) == [(0, "peek"), (0, "peeked", SIGHTINGS)]
    scene = Scene()
    assert scene.after(STATES[DONE], Peek()) == [(0, "peeked", [])]


def test_alone_a_pause_is_said_once_and_a_deadlock_ends_it() -> None:
    scene = Scene(alone=True, step=30.0)
    scene.heartbeats.pauses_from = 0.0
    scene.sightings = [replace(SIGHTINGS[0], waits_in=""), SIGHTINGS[1]]
    scene.play(*BOTH, 50.0)
    looks = [entry[0] for entry in scene.log if entry[1] == "peek"]
    assert looks == [30.0, 36.0, 48.0]
    assert [entry[0] for entry in scene.log if entry[1] == "says"] == [30.0]
    assert "ends" not in {entry[1] for entry in scene.log}

    scene = Scene(alone=True, step=30.0)
    scene.heartbeats.pauses_from = 0.0
    scene.play(*BOTH, 50.0)
    assert scene.log[-1][1] == "ends"
    assert (scene.log[-1][2].status, scene.log[-1][2].rank) == (124, 1)


# How ranks end.


def test_a_failure_that_torchrun_has_made_good_is_none() -> None:
    scene = Scene(changes={"max_restarts": 1})
    assert scene.after(RESTART_STATES[AGAIN], ended(0), ended(1), StarterEnded(), AllDone()) == [
        *[(0, "done"), (0, "wait", 10.0)],
        well(0, 0),
    ]


def test_a_rank_that_ends_well_beside_one_that_failed_leaves_the_failure() -> None:
    scene = Scene(changes={"max_restarts": 1})
    assert scene.after(CRASHED, ended(0)) == STAYS


def test_in_mode_rank_the_one_rank_of_a_task_is_told_with_its_own_number() -> None:
    """Its process is there before anything is said of it."""
    scene = Scene(changes={"mode": "rank"}, ranks=[5])
    scene.ranks.pids[5] = AGENT + 6
    crash = replace(CRASH, rank=5, error="")
    assert scene.play(Stopped(), ended(5, 9), StarterEnded()) == [
        *[(0, "SIGUSR2", 5), (0.25, "fail", crash), (0.25, "kill")],
        ends(0.55, crash),
    ]


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
def test_a_rank_that_ended_by_signal_before_another_had_saved_has_failed(alone: bool) -> None:
    scene = Scene(alone=alone)
    scene.after([*BOTH, ended(0, 75, at=1000.51)], ended(1, 143, 15, at=1000.5))
    killed = Outcome(status=143, rank=1, node="127.0.0.2", signal=15, time=1000.5, error="killed by SIGTERM")
    assert scene.log[-1][2] == killed


def test_a_rank_that_failed_by_itself_after_another_had_saved_has_failed() -> None:
    scene = Scene()
    scene.after([*BOTH, ended(0, 75, at=1000.1)], ended(1, 1, at=1000.5))
    assert scene.log[-1][2] == Outcome(status=1, rank=1, node="127.0.0.2", time=1000.5)


def test_the_earliest_75_counts() -> None:
    scene = Scene(alone=True, ranks=[0, 1, 2])
    steps = [ended(0, 75, at=1000.2), ended(1, 75, at=1000.4), ended(2, 143, 15, at=1000.3)]
    assert scene.play(*BOTH, started(2), *steps) == [
        *[(0, "forget", rank) for rank in (0, 1, 2)],
        (0, "wait", 10.0),
        well(0, 1, 75, at=1000.4),
    ]


@pytest.mark.parametrize(
    ("signum", "wrote", "error"),
    [
        (11, "", "killed by SIGSEGV"),
        (6, "ValueError: x", "killed by SIGABRT: ValueError: x"),
        (35, "", "killed by signal 35"),
    ],
)
def test_the_signal_that_ended_a_rank_is_named(signum: int, wrote: str, error: str) -> None:
    scene = Scene(alone=True, errors={1: wrote})
    scene.after(BOTH, ended(1, 128 + signum, signum))
    assert scene.log[-1] == ends(1.27, replace(CRASH, status=128 + signum, signal=signum, error=error))


SHORT = "out of memory (the limit is 2.0 GiB)"
WORKER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("signum", "wrote", "error"),
    [
        (9, "", f"killed by SIGKILL: {SHORT}"),
        (9, "step 7", f"killed by SIGKILL: {SHORT}: step 7"),
        (0, WORKER, f"{WORKER}: {SHORT}"),
        (11, "", "killed by SIGSEGV"),
        (0, "ValueError: x", "ValueError: x"),
    ],
)
def test_what_the_kernel_ended_for_want_of_memory_is_said_of_who_was_killed(
    signum: int, wrote: str, error: str
) -> None:
    scene = Scene(alone=True, errors={1: wrote})
    scene.ranks.memory = SHORT
    status = 128 + signum if signum else 1
    scene.after(BOTH, ended(1, status, signum))
    assert scene.log[-1] == ends(1.27, replace(CRASH, status=status, signal=signum, error=error))


def test_one_error_of_several_ranks_is_told_once_with_their_number() -> None:
    scene = Scene(alone=True, ranks=[0, 1, 2, 3], errors=dict.fromkeys(range(4), "ValueError: x"))
    scene.after(
        [started(rank) for rank in range(4)], *(ended(rank, 9, at=1000.4 + rank / 10) for rank in range(1, 4))
    )
    same = replace(CRASH, same=2)
    assert scene.log[-1] == ends(1.27, replace(CRASH, error="ValueError: x; 2 other ranks: the same"))
    assert scene.ranks.told == [same]


def test_the_output_is_told_of_a_failure_elsewhere_before_the_ranks_have_ended() -> None:
    scene = Scene()
    elsewhere = replace(ELSEWHERE, same=1)
    scene.after(BOTH, Failed(elsewhere))
    assert scene.ranks.told == [elsewhere]
    assert scene.log[-1] == ends(1.02, replace(elsewhere, error="KeyError: 'a'; 1 other rank: the same"))


def test_of_ranks_that_fail_together_the_earliest_is_named() -> None:
    scene = Scene(alone=True)
    scene.after(BOTH, ended(0, 3, at=1000.6), 0.2, ended(1, 9, at=1000.5))
    assert scene.log == [(0.25, "kill"), ends(0.25, replace(CRASH, error=""))]


def test_of_ranks_that_fail_together_the_one_that_the_others_follow_from_is_named() -> None:
    echo = "RuntimeError: [pair.cc:545] Connection reset by peer"
    scene = Scene(alone=True, errors={0: echo, 1: "ValueError: x"})
    scene.after(BOTH, ended(0, 1, at=1000.4), 0.2, ended(1, 9, at=1000.5))
    assert scene.log[-1] == ends(0.25, CRASH)


RESET = "RuntimeError: [pair.cc:545] Connection reset by peer"
WELL = End(rank=0, node_rank=1, node="127.0.0.2", status=0, time=1000.1, step=7)


def test_the_others_are_told_of_ranks_that_end_well() -> None:
    scene = Scene()
    scene.play(*BOTH, ended(0, at=1000.1), 0.1, ended(1, 75))
    assert scene.link.ends == [WELL, replace(WELL, rank=1, status=75, time=1000.5)]


def test_the_others_are_told_of_ranks_that_trained_alone() -> None:
    scene = Scene()
    scene.heartbeats.alone = {0}
    scene.play(*BOTH, ended(0, at=1000.1), ended(1))
    assert scene.link.ends == [replace(WELL, alone=True), replace(WELL, rank=1, time=1000.5)]


def test_that_each_rank_of_the_job_trained_alone_is_in_the_outcome() -> None:
    scene = Scene()
    scene.play(*BOTH, ended(0), ended(1), AllDone(alone=True))
    assert scene.log[-1] == (0, "ends", Outcome(status=0, rank=0, node="127.0.0.2", time=1000.5, alone=True))


@pytest.mark.parametrize(("alone", "said"), [({0, 1}, True), ({0}, False), (set(), False)])
def test_of_a_single_participant_its_own_ranks_count(alone: set[int], said: bool) -> None:
    scene = Scene(alone=True)
    scene.heartbeats.alone = alone
    scene.play(*BOTH, ended(0), ended(1))
    assert scene.log[-1] == (0, "ends", Outcome(status=0, rank=0, node="127.0.0.2", time=1000.5, alone=said))


def test_one_rank_cannot_join_others() -> None:
    scene = Scene(alone=True, ranks=[0])
    scene.heartbeats.alone = {0}
    scene.play(started(0), ended(0))
    assert scene.log[-1] == (0, "ends", Outcome(status=0, rank=0, node="127.0.0.2", time=1000.5))


def test_with_restarts_left_a_rank_that_ends_well_may_be_started_again() -> None:
    scene = Scene(changes={"max_restarts": 1})
    scene.play(*BOTH, ended(0))
    assert scene.link.ends == []


def test_the_others_are_told_where_the_script_of_a_failed_rank_was() -> None:
    scene = Scene(errors={1: RESET})
    scene.ranks.places[1] = "in backward (train.py:31)"
    scene.after(BOTH, ended(1, 1))
    crash = replace(CRASH, status=1, error=RESET, at="in backward (train.py:31)")
    assert scene.log[0] == (0.25, "fail", crash)


@pytest.mark.parametrize("later", [False, True])
def test_alone_a_rank_that_ended_well_while_another_needed_it_is_named(later: bool) -> None:
    """Its connections are closed some time before it has ended."""
    scene = Scene(alone=True, errors={1: RESET})
    scene.ranks.places[1] = "in backward (train.py:31)"
    steps = [ended(1, 1), 0.5, ended(0)] if later else [ended(0), ended(1, 1)]
    scene.after(BOTH, *steps)
    early = (
        "ended with 0 after 7 steps while 1 other was still in backward (train.py:31): "
        "do all ranks make the same number of steps?"
    )
    assert scene.log[-1] == ends(1.5, replace(CRASH, rank=0, status=1, error=early))


def test_a_rank_that_ends_well_while_others_run_is_no_failure() -> None:
    scene = Scene(alone=True, errors={1: "ValueError: x"})
    assert scene.play(*BOTH, ended(0)) == [(0, "forget", 0), (0, "forget", 1)]


def test_a_rank_that_fails_later_is_not_waited_for() -> None:
    scene = Scene(alone=True)
    scene.after(BOTH, ended(0, 3, at=1000.6), 0.3, ended(1, 9, at=1000.5))
    assert scene.log == [
        *[(0.25, "SIGTERM", 1), (0.31, "kill")],
        ends(0.31, replace(CRASH, rank=0, status=3, time=1000.6, error="")),
    ]


def test_what_else_happens_while_failures_are_told_apart_is_not_lost() -> None:
    scene = Scene()
    scene.after(BOTH, ended(1, 9), 0.1, Failed(ELSEWHERE, lost=(2,)))
    assert scene.log[-2:] == [(1.27, "kill"), ends(1.27, ELSEWHERE)]
    assert scene.supervisor.lost == (2,)


def test_why_a_command_cannot_be_started_is_the_error_of_its_rank() -> None:
    why = "./bad.py cannot be started: No such file or directory"
    scene = Scene(alone=True, changes={"mode": "exec"}, ranks=[0])
    scene.after([1e-6], ended(0, 127), StarterEnded(error=why))
    assert scene.log[-1] == ends(0.25, replace(CRASH, rank=0, status=127, error=why))


def test_a_rank_fails_while_its_starter_ends_with_an_error() -> None:
    scene = Scene(alone=True, errors={1: "ValueError: x"})
    scene.after(BOTH, StarterEnded(error="OSError: no space"), ended(1, 9))
    assert scene.log[-1] == ends(1.27, CRASH)


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
@pytest.mark.parametrize(("stays", "leaves"), [(0.0, 0.0), (3.0, 3.0), (NEVER, 10.0)])
def test_torchruns_agent_has_ten_seconds_to_leave(alone: bool, stays: float, leaves: float) -> None:
    scene = Scene(alone=alone)
    scene.ranks.agent_leaves = stays
    scene.lasts = 30.0
    scene.after(BOTH, ended(0), ended(1), *([] if alone else [AllDone()]))
    assert scene.log[-2:] == [(0, "wait", 10.0), well(leaves, 0)]


def test_what_comes_while_torchruns_agent_leaves_changes_nothing() -> None:
    scene = Scene(alone=True)
    scene.ranks.agent_leaves = 3.0
    scene.after(BOTH, ended(0), ended(1), 1.0, signal.SIGTERM)
    assert scene.log == [(0, "wait", 10.0), well(3.0, 0)]


# A failure here, and what all nodes make of it.


@pytest.mark.parametrize(
    ("answers_after", "found"),
    [(0.0, ELSEWHERE), (2.9, ELSEWHERE), (3.1, CRASH), (NEVER, CRASH)],
    ids=["that comes at once", "that comes late", "that comes too late", "that never comes"],
)
def test_the_verdict_of_all_nodes_has_three_seconds(answers_after: float, found: Failure) -> None:
    scene = Scene(errors={1: "ValueError: x"})
    scene.ranks.saving[0] = 0.0
    scene.link.answers_after = answers_after
    scene.link.verdict = Failed(ELSEWHERE, lost=(0, 2))
    scene.after(BOTH, ended(1, 9))
    assert scene.log[:3] == [(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (0.27, "kill")]
    assert scene.log[3:] == [ends(max(0.27, 0.25 + min(answers_after, 3.0)), found)]
    assert scene.supervisor.lost == ((0, 2) if found is ELSEWHERE else ())


def test_only_a_failure_is_the_verdict() -> None:
    scene = Scene(errors={1: "ValueError: x"})
    scene.link.answers_after = NEVER
    others: list[Step] = [Stopped(), Look(NO_STEP), signal.SIGTERM, ended(0, 3), StarterEnded()]
    scene.after(BOTH, ended(1, 9), 0.3, *others, 0.1, Failed(ELSEWHERE))
    assert scene.log == [
        *[(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (0.31, "kill")],
        ends(0.4, ELSEWHERE),
    ]


def test_ranks_that_do_not_end_are_killed_after_three_seconds_although_the_verdict_is_known() -> None:
    scene = Scene(errors={1: "ValueError: x"})
    scene.ranks.saving[0] = NEVER
    scene.after(BOTH, ended(1, 9))
    assert scene.log == [
        *[(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (3.25, "kill")],
        ends(3.25, CRASH),
    ]


@pytest.mark.parametrize(
    ("failure", "grace"),
    [
        (ELSEWHERE, 3.0),
        (CANCELLED, 7.0),
        (replace(CANCELLED, rank=3), 3.0),
        (replace(CANCELLED, signal=2, status=130), 3.0),
    ],
    ids=["fails", "is cancelled", "has a rank that got SIGTERM", "is interrupted"],
)
def test_ranks_may_save_where_another_node(failure: Failure, grace: float) -> None:
    scene = Scene()
    scene.ranks.saving = {0: 0.5, 1: NEVER}
    scene.lasts = 30.0
    scene.after(BOTH, Failed(failure, lost=(0,)))
    assert scene.log == [(0, "SIGTERM", 0), (0, "SIGTERM", 1), (grace, "kill"), ends(grace, failure)]
    assert scene.supervisor.lost == (0,)


# Signals to the node.


@pytest.mark.parametrize(
    ("signum", "error", "grace"),
    [
        (signal.SIGTERM, "ended by SIGTERM", 7.0),
        (signal.SIGINT, "interrupted", 3.0),
        (signal.SIGHUP, "ended by SIGHUP", 3.0),
    ],
)
@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
def test_ranks_that_do_not_end_are_killed_when_their_grace_is_over(
    alone: bool, signum: signal.Signals, error: str, grace: float
) -> None:
    scene = Scene(alone=alone)
    scene.ranks.saving = {0: NEVER, 1: NEVER}
    scene.lasts = 30.0
    mine = replace(OURS, status=128 + signum, signal=signum, time=1000.51, error=error)
    scene.after(BOTH, signum)
    told = [] if alone else [(0, "fail", mine)]
    assert scene.log == [*told, (0, "SIGTERM", 0), (0, "SIGTERM", 1), (grace, "kill"), ends(grace, mine)]


@pytest.mark.parametrize(
    ("first", "second", "after"),
    [
        (signal.SIGINT, signal.SIGINT, 1.02),
        (signal.SIGTERM, signal.SIGINT, 1.02),
        (signal.SIGINT, signal.SIGTERM, 3.0),
        (signal.SIGTERM, signal.SIGTERM, 7.0),
        (signal.SIGTERM, signal.SIGUSR2, 7.0),
    ],
)
def test_ctrl_c_ends_the_grace_of_an_earlier_signal(
    first: signal.Signals, second: signal.Signals, after: float
) -> None:
    scene = Scene(alone=True)
    scene.ranks.saving = {0: NEVER, 1: NEVER}
    scene.lasts = 30.0
    scene.after(BOTH, first, 1.01, second)
    assert scene.log[2] == (after, "kill")
    assert scene.log[3][2].signal == first


def test_ctrl_c_before_any_signal_ends_no_grace() -> None:
    """It is the failure's own, three seconds."""
    scene = Scene(alone=True, errors={1: "ValueError: x"})
    scene.ranks.saving[0] = NEVER
    scene.after(BOTH, ended(1, 9), 1.0, signal.SIGINT)
    assert scene.log[-1] == ends(3.25, CRASH)


def test_a_signal_that_came_before_there_was_anything_to_watch_is_answered() -> None:
    scene = Scene()
    scene.supervisor.signalled(signal.SIGTERM)
    mine = replace(TERMINATED, time=1000.0)
    assert scene.play() == [(0, "fail", mine), (0, "kill"), ends(0, mine)]


def test_what_the_others_say_during_the_grace_is_not_the_outcome() -> None:
    scene = Scene()
    scene.link.verdict = Failed(ELSEWHERE, lost=(2,))
    scene.after(BOTH, signal.SIGTERM)
    assert scene.log[-1] == ends(1.02, TERMINATED)
    assert scene.supervisor.lost == ()


def test_a_node_that_was_signalled_before_its_ranks_started_has_this_outcome() -> None:
    before = time.time()
    found = asked_to_end(planned(), signal.SIGHUP)
    assert before <= found.time <= time.time()
    assert found == Outcome(status=129, signal=1, node="127.0.0.2", time=found.time, error="ended by SIGHUP")
    assert asked_to_end(planned(), signal.SIGINT).error == "interrupted"


def test_an_outcome_is_told_with_the_nodes_place_which_is_not_its_node_rank() -> None:
    assert planned().node_rank == 0
    assert to_failure(planned(), as_outcome(CRASH)) == CRASH


# The planned end.


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
def test_a_rank_is_told_once_as_soon_as_it_catches_the_signal(alone: bool) -> None:
    scene = Scene(alone=alone, stop_signal=signal.SIGUSR1)
    scene.ranks.catching[1] = 1.1
    log = scene.play(*BOTH, signal.SIGUSR2, 3.0, signal.SIGUSR2)
    assert [entry for entry in log if entry[1] == "SIGUSR1"] == [(0, "SIGUSR1", 0), (1.2, "SIGUSR1", 1)]
    assert log[-1][1] != "ends"


def test_a_rank_that_starts_after_the_stop_is_told() -> None:
    assert Scene().play(Stopped(), 0.9, *BOTH) == [
        *[(0.9, "forget", 0), (0.9, "forget", 1)],
        *[(1.0, "SIGUSR2", 0), (1.0, "SIGUSR2", 1)],
    ]


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

    def catches(pid: int, signum: int) -> bool:
        """It dies right after it was looked at."""
        found = FakeRanks.catches(scene.ranks, pid, signum)
        if pid == scene.ranks.pids[0]:
            scene.ranks.die(pid)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scene.ranks, "catches", catches)
        assert scene.after(BOTH, Stopped(), 1.0, ended(0)) == [(0, "SIGUSR2", 1)]


def test_ranks_that_save_after_a_stop_are_an_outcome_of_75_and_no_agent_was_signalled() -> None:
    scene = Scene()
    scene.ranks.agent_leaves = 0.5
    end: list[Step] = [ended(0, 75), ended(1, 143, 15, at=1000.6), StarterEnded(), AllDone()]
    assert scene.after(BOTH, Stopped(60.0), 2.0, *end) == [
        *[(0, "SIGUSR2", 0), (0, "SIGUSR2", 1), (2.0, "done"), (2.0, "wait", 10.0)],
        well(2.5, 1, 75, at=1000.6),
    ]


RUNS_ON = "a stop was asked for, but {} on 127.0.0.2 catches no SIGUSR2 and runs on"


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


def test_a_rank_that_has_ended_is_not_said_to_run_on() -> None:
    scene = Scene()
    scene.ranks.catching = {0: NEVER, 1: NEVER}
    scene.lasts = 60.0
    assert scene.after(BOTH, Stopped(), 5.0, ended(0)) == [(10.0, "says", RUNS_ON.format("rank 1"))]
    scene = Scene()
    scene.ranks.catching = {0: NEVER, 1: 5.0}
    scene.lasts = 60.0
    assert scene.after(BOTH, Stopped(), 5.0, ended(0)) == [(4.6, "SIGUSR2", 1)]


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


def test_the_first_stop_counts() -> None:
    scene = Scene()
    scene.ranks.catching[1] = NEVER
    scene.lasts = 60.0
    log = scene.after(BOTH, Stopped(), Stopped(60.0))
    assert log == [(0, "SIGUSR2", 0), (10.0, "says", RUNS_ON.format("rank 1"))]


# The stop file.


def written(text: str) -> Do:
    """The stop file is written, and the thread that looks for it has seen it."""

    async def write(scene: Scene) -> None:
        assert scene.stop_file is not None
        assert scene.log == []
        partial = scene.stop_file.with_name(".stop")
        partial.write_text(text)
        partial.rename(scene.stop_file)
        if not scene.log:
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
    assert log == [(0, "stop", left), (0, "SIGUSR2", 0), (0, "SIGUSR2", 1)]


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


# Hangs.


def quiet(scene: Scene) -> None:
    """No rank gives a sign from now on."""
    scene.heartbeats.beating = False


def output(scene: Scene) -> None:
    """A rank writes something."""
    scene.ranks.heard = scene.clock.now


def suspended(scene: Scene) -> None:
    """Nothing of this process runs for an hour."""
    scene.clock.now += 3600.0


LIKE_ALL = "it gave its last sign first, and is in train.py:90 advance like all others"
HERE = Failure(
    node_rank=1,
    node="127.0.0.2",
    rank=1,
    status=124,
    signal=0,
    time=0.0,
    error=f"stuck, {NO_STEP} after step 7: {LIKE_ALL}",
)


def test_a_rank_without_a_step_for_too_long_makes_all_nodes_look() -> None:
    scene = Scene(step=30.0)
    scene.lasts = 60.0
    assert scene.play(*BOTH, quiet)[2:] == [
        *[(30.0, "stalled", NO_STEP), (30.0, "look"), (30.0, "seen", SIGHTINGS)],
        *[(30.3, "SIGTERM", 0), (30.3, "SIGTERM", 1), (30.3, "kill"), ends(30.3, STUCK)],
    ]


def test_alone_a_rank_without_a_step_is_sought_here() -> None:
    scene = Scene(step=30.0, alone=True)
    scene.lasts = 60.0
    assert scene.play(*BOTH, quiet)[2:] == [
        *[(30.0, "look"), (30.0, "SIGTERM", 0), (30.0, "SIGTERM", 1), (30.0, "kill")],
        ends(30.0, replace(HERE, time=1030.0)),
    ]


def test_a_job_in_which_no_rank_is_found_is_stuck_all_the_same() -> None:
    scene = Scene(step=30.0, alone=True)
    scene.sightings = []
    scene.lasts = 60.0
    stuck = Outcome(status=124, node="127.0.0.2", time=1030.0, error="stuck, no step for 30 s")
    assert scene.play(*BOTH, quiet)[-1] == (30.0, "ends", stuck)


@pytest.mark.parametrize(
    ("answers_after", "after", "found"),
    [
        (24.9, 24.9, STUCK),
        (25.1, 25.0, replace(HERE, time=1000.51)),
        (NEVER, 25.0, replace(HERE, time=1000.51)),
    ],
)
def test_the_verdict_on_a_hang_has_five_seconds_beyond_the_hubs_own_bound(
    answers_after: float, after: float, found: Failure
) -> None:
    scene = Scene()
    scene.link.answers_after = answers_after
    scene.link.verdict = Failed(STUCK, lost=(2,))
    scene.lasts = 60.0
    assert scene.after(BOTH, Look(NO_STEP))[-2:] == [(after, "kill"), ends(after, found)]
    assert scene.supervisor.lost == ((2,) if found is STUCK else ())


def test_without_a_verdict_and_a_rank_the_hang_is_the_outcome() -> None:
    scene = Scene()
    scene.link.answers_after = NEVER
    scene.lasts = 60.0
    stuck = Outcome(status=124, node="127.0.0.2", time=1025.51, error="stuck, no step for 30 s")
    assert scene.after(STATES[DONE], Look(NO_STEP)) == [
        *[(0, "seen", []), (25.0, "kill"), (25.0, "ends", stuck)],
    ]


def test_ranks_that_go_on_are_watched_once_a_second_and_those_that_have_ended_are_not() -> None:
    scene = Scene(step=30.0, silence=60.0)
    scene.lasts = 0.1
    begin: list[Step] = [1.5, started(0), 1.0, started(1), 1.0]
    scene.play(*begin, ended(0), 1.0, started(0), 1.0, ended(0), ended(1), 1.0)
    assert scene.heartbeats.looks == [
        *[(1.0, [], 1.0), (2.0, [0], 1.0), (3.0, [0, 1], 1.0), (4.0, [1], 1.0), (5.0, [0, 1], 1.0)],
        (6.0, [], 1.0),
    ]


@pytest.mark.parametrize(
    ("step", "silence", "interval"),
    [(30.0, 0.0, 1.0), (0.0, 30.0, 1.0), (2.0, 30.0, 0.5), (30.0, 1.0, 0.25), (1.0, 2.0, 0.25)],
)
def test_a_short_bound_is_looked_at_four_times_in_its_time(
    step: float, silence: float, interval: float
) -> None:
    scene = Scene(step=step, silence=silence)
    scene.lasts = 0.0
    scene.play(*BOTH, output, interval + 0.01)
    assert scene.heartbeats.looks == [(interval, [0, 1], interval)]


def test_without_bounds_no_rank_is_watched() -> None:
    scene = Scene()
    scene.play(*BOTH, quiet, 5.0)
    assert scene.heartbeats.looks == []


def test_steps_are_not_asked_for_where_silence_alone_counts() -> None:
    scene = Scene(silence=30.0)
    scene.lasts = 20.0
    assert scene.after(BOTH, quiet) == STAYS


def test_silence_does_not_count_where_steps_alone_do() -> None:
    scene = Scene(step=5.0)
    scene.lasts = 20.0
    assert scene.after(BOTH) == STAYS


def test_time_in_which_the_process_was_suspended_does_not_count() -> None:
    scene = Scene(step=30.0, silence=30.0)
    scene.lasts = 20.0
    assert scene.after(BOTH, quiet, 1.0, suspended) == STAYS
    assert max(passed for _, _, passed in scene.heartbeats.looks) == 2.0


QUIET = "no rank has written anything for 10 s (--silence-timeout)"


def test_silence_is_told_and_taken_back_when_a_rank_writes_again() -> None:
    scene = Scene(silence=10.0)
    scene.lasts = 12.4
    assert scene.after([*BOTH, output], 11.0, 4.0, output) == [
        *[(10.49, "silent", QUIET), (15.49, "silent", ""), (25.49, "silent", QUIET)],
    ]


def test_output_now_and_then_is_no_silence() -> None:
    scene = Scene(silence=10.0)
    now_and_then: list[Step] = [output, 9.0]
    scene.lasts = 0.0
    assert scene.after(BOTH, *(6 * now_and_then)) == STAYS


def test_alone_silence_is_a_hang() -> None:
    scene = Scene(silence=10.0, alone=True)
    scene.lasts = 20.0
    why = QUIET
    failure = replace(HERE, time=1011.0, error=f"stuck, {why} after step 7: {LIKE_ALL}")
    assert scene.play(*BOTH, output)[2:] == [
        *[(11.0, "look"), (11.0, "SIGTERM", 0), (11.0, "SIGTERM", 1), (11.0, "kill")],
        ends(11.0, failure),
    ]


def test_alone_output_that_comes_while_the_ranks_are_sought_does_not_end_the_search() -> None:
    scene = Scene(silence=10.0, alone=True)
    scene.look_takes = 5.0
    assert [(after, what) for after, what, *_ in scene.after([*BOTH, output], 12.0, output)] == [
        *[(10.49, "look"), (15.49, "SIGTERM"), (15.49, "SIGTERM"), (15.49, "kill"), (15.49, "ends")],
    ]


# A spare, and what may follow an end.


@pytest.mark.parametrize(
    ("step", "log"),
    [
        (AllDone(), [(0, "wait", 10.0), well(0, None, at=1000.51)]),
        (Failed(ELSEWHERE), [(0, "kill"), ends(0, ELSEWHERE)]),
        (Look(NO_STEP), [(0, "seen", []), (0.3, "kill"), ends(0.3, STUCK)]),
        (signal.SIGTERM, [(0, "fail", TERMINATED), (0, "kill"), ends(0, TERMINATED)]),
    ],
    ids=["all are done", "a rank fails", "the job hangs", "SIGTERM comes"],
)
def test_a_spare_stays_until(step: Step, log: list[Entry]) -> None:
    assert Scene(ranks=[]).after([1e-6], step) == log


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([ended(1, 9)], ""),
        ([ended(0), ended(1, 9)], ""),
        ([ended(0, 75), ended(1, 9)], "a rank has saved at a planned end"),
        ([Stopped(), ended(0, 75), ended(1, 9)], "a rank has saved at a planned end"),
        ([Stopped(), ended(1, 9)], "a planned end was asked for"),
    ],
)
def test_nothing_may_follow_a_planned_end_whatever_failed(steps: list[Step], why: str) -> None:
    scene = Scene()
    scene.play(*BOTH, *steps)
    assert scene.log[-1][1] == "ends"
    assert scene.supervisor.why_final == why


# Real processes.

AGENT_OF_TWO = """
setsid sh -c 'trap "exit 75" USR2; echo ready; while :; do sleep 0.05; done' & echo catching $!
setsid sh -c 'sleep 60 & echo child $!; echo ready; wait' & echo deaf $!
wait
"""


class Processes:
    """An agent, which the stop signal would end, and its two ranks: one catches it, the other has a child."""

    def __init__(self, agent: subprocess.Popen[str]) -> None:
        self.agent = agent
        assert agent.stdout is not None
        said = [agent.stdout.readline().split() for _ in range(5)]
        self.pids = {words[0]: int(words[1]) for words in said if words != ["ready"]}

    @property
    def alive(self) -> set[str]:
        return {name for name, pid in self.pids.items() if processes.is_running(pid)}

    def until(self, alive: set[str]) -> None:
        deadline = time.monotonic() + 10.0
        while self.alive != alive:
            assert time.monotonic() < deadline, f"after 10 s these are alive: {self.alive}"
            time.sleep(0.005)


@pytest.fixture
def real() -> Iterator[Processes]:
    with subprocess.Popen(["sh", "-c", AGENT_OF_TWO], stdout=subprocess.PIPE, text=True) as agent:
        real = Processes(agent)
        yield real
        processes.signal_groups((real.pids[name] for name in real.alive), signal.SIGKILL)
        agent.kill()


def test_the_stop_signal_reaches_a_process_that_catches_it_and_no_other(real: Processes) -> None:
    scene = Scene(pids=[real.pids["catching"], real.pids["deaf"]])
    scene.lasts = 11.0
    log = scene.play(Stopped(), lambda _: real.until({"deaf", "child"}))
    assert log == [(10.0, "says", RUNS_ON.format("rank 1"))]
    assert real.agent.poll() is None


def test_sigterm_reaches_the_processes_of_each_rank_and_not_the_agent(real: Processes) -> None:
    scene = Scene(pids=[real.pids["catching"], real.pids["deaf"]])
    log = scene.play(Failed(ELSEWHERE), lambda _: real.until(set()))
    assert [what for _, what, *_ in log] == ["kill", "ends"]
    assert real.agent.wait(10.0) == 0


# The fakes.


@pytest.mark.parametrize(
    ("fake", "real", "names"),
    [
        (
            FakeRanks,
            ranks.Ranks,
            ["alive", "first_error", "last_place", "shortage", "failed", "wait", "kill"],
        ),
        (
            FakeLink,
            Link,
            ["next", "stop", "fail", "done", "stalled", "silent", "seen", "ended", "paused", "peeked"],
        ),
        (
            FakeHeartbeats,
            heartbeat.Heartbeats,
            ["look", "stalled", "paused", "trained_alone", "step", "forget"],
        ),
    ],
)
def test_a_fake_is_called_as_what_it_stands_for(fake: type, real: type, names: list[str]) -> None:
    for name in names:
        one, other = getattr(fake, name), getattr(real, name)
        assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters)
        assert inspect.iscoroutinefunction(one) == inspect.iscoroutinefunction(other)
