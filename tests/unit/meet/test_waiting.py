"""How long a participant waits for the others, on a clock that a test sets."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.core.errors import Unavailable
from entrypoint.meet import waiting
from entrypoint.meet.terms import LocalNode
from entrypoint.meet.waiting import Begun, Waiting
from tests.unit.meet.meeting import SHORT, Place, who

BOUNDS = replace(SHORT, join=100.0, remind=30.0, poll=4.0)


class Node(LocalNode):
    """What it says, and what it knows of the others."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.gone: str | None = None
        self.where: str | None = None
        self.asked = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def never_started(self) -> str | None:
        return self.gone

    def begun(self) -> str | None:
        self.asked += 1
        return self.where


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock: Any = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(waiting, "time", clock)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_who_is_missing_is_said_from_time_to_time_until_the_time_is_up(clock: Clock) -> None:
    node = Node()
    wait = Waiting(BOUNDS, node)
    told = []
    for after in range(100):
        clock.now = 1000.0 + after
        if wait.is_due():
            wait.tell("n1 is missing")
            told.append(after)
    assert told == [30, 60, 90]
    assert node.said == [f"n1 is missing after {at} s: waiting {100 - at} s more" for at in told]
    clock.now = 1100.0
    assert wait.is_due()
    with pytest.raises(Unavailable) as refused:
        wait.tell("n1 is missing")
    assert str(refused.value) == (
        "n1 is missing within 100 s (--join-timeout): see the output of what is missing"
    )


def test_nobody_waits_longer_than_who_began_earlier(clock: Clock) -> None:
    wait = Waiting(BOUNDS, Node())
    assert wait.left() == 100.0
    wait.shorten(250.0)
    assert wait.left() == 100.0
    wait.shorten(40.0)
    clock.now += 15.0
    assert wait.left() == 25.0
    clock.now += 30.0
    assert (wait.left(), wait.is_due()) == (0.0, True)


def test_a_nap_is_a_quarter_of_a_look_unless_something_is_due_before(clock: Clock) -> None:
    wait = Waiting(BOUNDS, Node())
    naps = []
    for after in (0.0, 29.0, 29.75, 30.0, 31.0):
        clock.now = 1000.0 + after
        naps.append(wait.nap())
    assert naps == [1.0, 1.0, 0.25, 0.0, 0.0]
    wait.shorten(0.5)
    assert wait.nap() == 0.0
    late = Waiting(replace(BOUNDS, join=0.5), Node())
    assert late.nap() == 0.5


@pytest.mark.usefixtures("clock")
def test_a_node_that_never_started_ends_the_wait() -> None:
    node = Node()
    wait = Waiting(BOUNDS, node)
    node.gone = "n1 ended before it joined"
    assert not wait.is_due()
    asyncio.run(wait.ask())
    with pytest.raises(Unavailable, match=r"^n1 ended before it joined$"):
        wait.is_due()


def test_when_node_0_was_first_seen_to_have_begun_is_kept(clock: Clock) -> None:
    node = Node()
    wait = Waiting(BOUNDS, node)
    asyncio.run(wait.ask())
    clock.now += 5.0
    assert (wait.begun, wait.since_begun()) == (None, 0.0)
    node.where = "127.0.0.9"
    asyncio.run(wait.ask())
    clock.now += 7.0
    node.where = "127.0.0.1"
    asyncio.run(wait.ask())
    assert wait.begun == Begun(where="127.0.0.9", seen=1005.0)
    assert (wait.since_begun(), node.asked) == (7.0, 2)


@pytest.mark.usefixtures("clock")
def test_a_file_system_that_fails_leaves_what_is_known() -> None:
    class Broken(Node):
        def never_started(self) -> str | None:
            raise OSError(116, "Stale file handle")

    wait = Waiting(BOUNDS, Broken())
    asyncio.run(wait.ask())
    assert (wait.is_due(), wait.begun) == (False, None)


@pytest.mark.parametrize("asked", ["never_started", "begun"])
def test_a_file_system_that_hangs_keeps_no_meeting_that_fails_from_its_end(asked: str) -> None:
    """A thread of asyncio's own would: asyncio.run waits for those."""
    began, release, ended = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        release.wait(20)
        ended.set()

    with pytest.raises(Unavailable, match="have not come"):
        asyncio.run(Place().meet(who(0), timeouts=replace(SHORT, join=1), **{asked: hang}))
    assert (began.is_set(), ended.is_set()) == (True, False)
    release.set()
