"""How a job ends, as a function: what two participants with a rank each say, and what follows, by the second."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.core.bitset import Bits
from entrypoint.meet import job_state
from entrypoint.meet.job_state import Event, JobState, Lost, Now, Say, StartTimer, TellAll
from entrypoint.meet.messages import (
    AllDone,
    Done,
    Ended,
    Fail,
    Failed,
    Look,
    NoOutput,
    Paused,
    Peek,
    Peeked,
    Seen,
    Stalled,
    Stopped,
)
from entrypoint.meet.reports import RankSnapshot
from entrypoint.meet.terms import JobBounds
from entrypoint.meet.wire import WireError
from tests.unit.meet.meeting import failure, left
from tests.unit.scene import SIGHTINGS

WHY = "no step for 30 s"
BUSY = [replace(SIGHTINGS[0], waits_in=""), SIGHTINGS[1]]
START = JobState(
    nodes=["a", "b", "c"],
    hub=0,
    local_ranks=1,
    bounds=JobBounds(again=6.0, look=5.0, collect=0.3, collect_echo=1.5),
    present=Bits.of([0, 1, 2]),
    active=Bits.of([0, 1]),
    world=2,
)
"""Of three nodes the last is a spare."""
Said = tuple[float, int, Event]
"""(second, node, what it says)."""


def play(
    *said: Said, sightings: Sequence[RankSnapshot] = (), mute: Sequence[int] = ()
) -> list[tuple[float, Any]]:
    """(second, what node 0 tells or says). `sightings`: a Peek is answered with, one by each node but `mute`."""
    state, count = START, 0
    log: list[tuple[float, Any]] = []
    due: list[tuple[float, int, int, Event]] = []

    def later(at: float, node: int, event: Event) -> None:
        nonlocal count
        count += 1
        heapq.heappush(due, (at, count, node, event))

    for what in said:
        later(*what)
    while due and due[0][0] < 50.0:
        at, _, node, event = heapq.heappop(due)
        state, effects = job_state.step(state, (node, None), event, Now(wall=1000.0 + at, steady=at))
        for effect in effects:
            match effect:
                case StartTimer(seconds, timer):
                    later(at + seconds, 0, timer)
                case TellAll(message):
                    log.append((round(at, 2), message))
                    if message == Peek():
                        for one, sighting in enumerate(sightings):
                            if one not in mute:
                                later(at, one, Peeked((sighting,), last=True))
                case Say(text):
                    log.append((round(at, 2), text))
    return log


def seconds(log: Sequence[tuple[float, Any]], kind: type[Any]) -> list[float]:
    return [at for at, what in log if isinstance(what, kind)]


BOTH_PAUSE: list[Said] = [(0.0, 0, Paused(WHY)), (0.0, 1, Paused(WHY))]


def test_a_pause_is_looked_at_growing_intervals_and_said_once() -> None:
    log = play(*BOTH_PAUSE, sightings=BUSY)
    assert (seconds(log, Peek), seconds(log, str), seconds(log, Failed)) == (
        [0.0, 6.0, 18.0, 42.0],
        [0.0],
        [],
    )


def test_two_looks_that_prove_a_deadlock_end_the_job() -> None:
    log = play(*BOTH_PAUSE, sightings=SIGHTINGS)
    assert (seconds(log, Peek), seconds(log, str)) == ([0.0, 6.0], [0.0])
    assert [(what.failure.rank, what.failure.status) for _, what in log if isinstance(what, Failed)] == [
        (1, 124)
    ]


def test_without_everyones_answer_nothing_is_proven() -> None:
    log = play(*BOTH_PAUSE, sightings=SIGHTINGS, mute=[1])
    assert (seconds(log, Peek), seconds(log, str), seconds(log, Failed)) == ([0.0, 11.0, 28.0], [5.0], [])


def test_a_pause_of_which_it_would_be_wrong_to_speak_is_looked_at_alone() -> None:
    log = play((0.0, 0, Paused("")), (10.0, 0, Paused(None)), sightings=BUSY)
    assert log == [(0.0, Peek()), (6.0, Peek())]


@pytest.mark.parametrize(("later", "said"), [(15.0, [0.0]), (35.0, [0.0, 38.0])])
def test_a_pause_like_one_before_is_not_said_again(later: float, said: list[float]) -> None:
    """The evaluation of each epoch: the second one is told only once it lasts longer than the first."""
    log = play(
        *BOTH_PAUSE,
        *((15.0, node, Paused(None)) for node in (0, 1)),
        *((20.0, node, Paused(WHY)) for node in (0, 1)),
        *((20.0 + later, node, Paused(None)) for node in (0, 1)),
        sightings=BUSY,
    )
    assert seconds(log, str) == said
    assert seconds(log, Peek)[:5] == [0.0, 6.0, 20.0, 26.0, 38.0][: len(seconds(log, Peek))]


def test_a_pause_that_ends_and_begins_again_at_once_is_looked_at_in_its_own_time() -> None:
    log = play((0.0, 0, Paused(WHY)), (1.0, 0, Paused(None)), (1.0, 0, Paused(WHY)), sightings=BUSY)
    assert seconds(log, Peek) == [0.0, 1.0, 7.0, 19.0, 43.0]


F0, F1 = failure(0, 1001.0, error="first"), failure(1, 1000.5, error="second, and earlier")
ECHO = failure(0, 1001.0, rank=0, error="RuntimeError: x Connection reset by peer")
GONE = Lost(name="b", who="node 1 (b)", why="it closed the connection", at=1000.9)
SPARE = Lost(name="c", who="node 2 (c)", why="it closed the connection", at=1000.9)
LOST = failure(1, 1000.9, node="b", rank=None, status=1, error="lost: it closed the connection")
NO_RANK = f"lost: {WHY}, and no rank was found"
NOT_FOUND = Failed(failure(0, 1006.0, node="a", rank=None, status=1, error=NO_RANK))

CASES: dict[str, tuple[list[Said], list[tuple[float, Any]]]] = {
    "a stop is told once": ([(1, 0, Stopped(9.0)), (2, 1, Stopped())], [(1, Stopped(9.0))]),
    "a stop is told again once the end of the job is known": (
        [(1, 0, Stopped()), (2, 0, Stopped()), (3, 1, Stopped(9.0)), (4, 0, Stopped(8.0)), (5, 1, Stopped())],
        [(1, Stopped()), (3, Stopped(9.0))],
    ),
    "all are done": ([(1, 0, Done()), (2, 1, Done())], [(2, AllDone())]),
    "all have saved": ([(1, 0, Done((0,))), (2, 1, Done((1,)))], [(2, AllDone())]),
    "one has saved beside one that ended well": (
        [(1, 0, Done()), (2, 1, Done((1,)))],
        [(2, AllDone(split="rank 1 saved to go on, the others ended well"))],
    ),
    "all are done, and each trained alone": (
        [(1, 0, Ended(left(0, alone=True))), (1, 1, Ended(left(1, alone=True))), (1, 0, Done()), (2, 1, Done())],
        [(2, AllDone(alone=True))],
    ),
    "a rank that says twice that it ended counts once": (
        [(1, 0, Ended(left(0, alone=True))), (1, 0, Ended(left(0, alone=True))), (1, 0, Done()), (2, 1, Done())],
        [(2, AllDone())],
    ),
    "the earliest failure counts, whoever tells first": (
        [(1, 0, Fail(F0)), (1.2, 1, Fail(F1))],
        [(1.3, Failed(F1))],
    ),
    "a failure after the verdict changes nothing": ([(1, 0, Fail(F0)), (2, 1, Fail(F1))], [(1.3, Failed(F0))]),
    "who only lost another one waits longer for its failure": (
        [(1, 0, Fail(ECHO)), (2, 1, Fail(F1))],
        [(2.5, Failed(F1))],
    ),
    "a lost node": ([(1, 1, GONE)], [(1.3, Failed(LOST, (1,)))]),
    "a node that is lost once it is done": ([(1, 1, Done()), (2, 1, GONE), (3, 0, Done())], [(3, AllDone())]),
    "a node that is lost once it is done is not among the lost": (
        [(1, 1, Done()), (2, 1, GONE), (3, 0, Fail(F0))],
        [(3.3, Failed(F0))],
    ),
    "a spare that is lost once all are done is not told": (
        [(1, 0, Done()), (2, 1, Done()), (3, 2, SPARE)],
        [(2, AllDone())],
    ),
    "a spare is lost": (
        [(1, 2, SPARE), (2, 2, SPARE), (3, 0, Fail(F0))],
        [(1, "the spare node 2 (c) is lost: it closed the connection"), (3.3, Failed(F0, (2,)))],
    ),
    "nobody answers a look": (
        [(1, 0, Stalled(WHY))],
        [(1, Look(WHY)), (6.3, NOT_FOUND)],
    ),
    "a second hang is none": ([(1, 0, Stalled(WHY)), (1.5, 1, Stalled("other"))], [(1, Look(WHY)), (6.3, NOT_FOUND)]),
    "a hang after a failure is none": ([(1, 0, Fail(F0)), (1.1, 1, Stalled(WHY))], [(1.3, Failed(F0))]),
    "a rank that ends while everyone looks is not the first": (
        [(1, 0, Stalled(WHY)), (2, 1, Fail(failure(1, 1001.0)))],
        [(1, Look(WHY)), (6.3, NOT_FOUND)],
    ),
    "a node that is lost while everyone looks is": (
        [(1, 0, Stalled(WHY)), (2, 1, replace(GONE, at=1001.5))],
        [(1, Look(WHY)), (2.3, Failed(replace(LOST, time=1001.5), (1,)))],
    ),
    "steps that go on where nothing paused": ([(1, 0, Paused(None)), (2, 0, Fail(F0))], [(2.3, Failed(F0))]),
    "silence of all that go on": (
        [(1, 0, Done()), (2, 1, NoOutput("quiet")), (2.1, 1, Fail(failure(1, 1001.5)))],
        [(2, Look("quiet")), (2.1, Failed(failure(1, 1001.5)))],
    ),
    "silence that is taken back": ([(1, 0, NoOutput("quiet")), (2, 0, NoOutput("")), (3, 1, NoOutput("quiet"))], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_follows(name: str) -> None:
    said, expected = CASES[name]
    log = play(*said)
    assert log[: len(expected)] == expected
    assert [what for _, what in log[len(expected) :] if isinstance(what, Failed | AllDone | Stopped)] == []


def test_an_answer_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(WireError, match="no meaning here"):
        job_state.step(START, (1, None), Seen((), last=True), Now(wall=1000.0, steady=0.0))
