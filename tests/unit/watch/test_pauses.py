"""When a pause is looked into, and when it is spoken of; on a clock that never waits."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.watch.pauses import Pauses
from entrypoint.watch.reports import Failure, Sighting
from tests.unit.scene import SIGHTINGS, Clock

WHY = "no step for 30 s"
BUSY = [replace(SIGHTINGS[0], waits_in=""), SIGHTINGS[1]]


class Judge:
    """Pauses of two participants with a rank each, which answer at once."""

    def __init__(self, sightings: list[Sighting]) -> None:
        self.clock = Clock()
        self.sightings = sightings
        self.silent: set[str] = set()
        """Who does not answer."""
        self.asked: list[float] = []
        self.said: list[float] = []
        self.verdicts: list[Failure] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.pauses = Pauses(
            ask=self._ask,
            everyone=lambda: ["a", "b"],
            ends=list,
            world=lambda: 2,
            say=lambda _: self.said.append(self._now()),
            end=self.verdicts.append,
            start=self._start,
            again=6.0,
            bound=5.0,
        )

    def _now(self) -> float:
        return round(self.clock.now, 2)

    def _ask(self) -> None:
        self.asked.append(self._now())
        for who, sighting in zip("ab", self.sightings, strict=True):
            if who not in self.silent:
                self.pauses.seen(who, [sighting])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def play(self, steps: Callable[["Judge"], Awaitable[None]]) -> None:
        async def played() -> None:
            await steps(self)
            for task in self.tasks:
                task.cancel()

        with asyncio.Runner(loop_factory=self.clock.loop) as runner:
            runner.run(played())


async def pausing(judge: Judge) -> None:
    judge.pauses.report("a", WHY)
    judge.pauses.report("b", WHY)
    await asyncio.sleep(50.0)


def test_it_is_looked_at_growing_intervals_and_said_once() -> None:
    judge = Judge(BUSY)
    judge.play(pausing)
    assert (judge.asked, judge.said, judge.verdicts) == ([0.0, 6.0, 18.0, 42.0], [0.0], [])


def test_two_looks_that_prove_a_deadlock_end_it() -> None:
    judge = Judge(SIGHTINGS)
    judge.play(pausing)
    assert (judge.asked, judge.said) == ([0.0, 6.0], [0.0])
    assert [(one.rank, one.status) for one in judge.verdicts] == [(1, 124)]


def test_without_everyones_answer_nothing_is_proven() -> None:
    judge = Judge(SIGHTINGS)
    judge.silent = {"b"}
    judge.play(pausing)
    assert (judge.asked, judge.said, judge.verdicts) == ([0.0, 11.0, 28.0], [5.0], [])


def test_what_would_be_wrong_to_say_is_looked_at_alone() -> None:
    async def ended(judge: Judge) -> None:
        judge.pauses.report("a", "")
        await asyncio.sleep(10.0)

    judge = Judge(BUSY)
    judge.play(ended)
    assert (judge.asked, judge.said) == ([0.0, 6.0], [])


@pytest.mark.parametrize(("later", "said"), [(15.0, [0.0]), (40.0, [0.0, 118.0])])
def test_a_pause_like_one_before_is_not_said_again(later: float, said: list[float]) -> None:
    """The evaluation of each epoch."""

    async def twice(judge: Judge) -> None:
        for seconds in (15.0, later):
            judge.pauses.report("a", WHY)
            judge.pauses.report("b", WHY)
            await asyncio.sleep(seconds)
            judge.pauses.report("a", None)
            judge.pauses.report("b", None)
            await asyncio.sleep(85.0)

    judge = Judge(BUSY)
    judge.play(twice)
    assert judge.said == said
    assert judge.asked[:5] == [0.0, 6.0, 100.0, 106.0, 118.0][: len(judge.asked[:5])]
