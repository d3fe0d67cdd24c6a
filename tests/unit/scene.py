"""One node's supervisor among fakes, on a clock that never waits.

A log has what the supervisor did and when, in seconds: what it told the link, which signal it sent to which
rank, and at last the outcome that it returned.
"""

import asyncio
import contextlib
import functools
import math
import os
import selectors
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli import main as cli
from entrypoint.meet import terms
from entrypoint.meet.messages import (
    AllDone,
    Done,
    Ended,
    Fail,
    Failed,
    Look,
    LookCloser,
    NoOutput,
    Paused,
    Peek,
    Peeked,
    Report,
    Seen,
    Stalled,
    Stopped,
    Told,
)
from entrypoint.meet.reports import End, Failure, RankSnapshot
from entrypoint.node import processes
from entrypoint.plan.launch_plan import LaunchPlan, with_members
from entrypoint.plan.resolve import resolve
from entrypoint.ranks.ranks import AgentEnded, RankEnded, RankStarted
from entrypoint.run.node_state import HangPolicy
from entrypoint.run.signals import Signals
from entrypoint.run.supervise import Supervisor

Entry = tuple[Any, ...]
"""(seconds, what was done, with what)."""
Do = Callable[["Scene"], Awaitable[None] | None]
Step = RankStarted | RankEnded | AgentEnded | Told | signal.Signals | float | Do
"""What happens next; a number: so many seconds pass."""
AGENT = 5_000_000
"""Its process id. No process has one above 2**22: nothing real can be hit."""
PROGRAMS = 10_000_000
"""Of a rank that is a shell those of its programs: so much for each rank, and their number."""
NEVER = math.inf
STUCK = Failure(
    node_rank=2,
    node="127.0.0.3",
    rank=3,
    status=124,
    signal=0,
    time=1000.4,
    error="stuck, no step for 30 s: it is in data.py:3 read",
)
"""What the hub makes of a hang."""
SIGHTINGS = [
    RankSnapshot(
        rank=rank,
        node_rank=1,
        node="127.0.0.2",
        step=7,
        quiet=30.0 + rank,
        state="S",
        at="train.py:90 advance",
        waits_in="all_reduce",
        stack="5f0a",
    )
    for rank in (0, 1)
]
"""What this node makes of it."""


@functools.cache
def planned() -> LaunchPlan:
    """Of the second of three nodes, which has the ranks 0 and 1 since the first one was lost."""
    env = {
        "APPTRAIN_EMBEDDED_JOB_ID": "7",
        "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.[1-3]",
        "APPTRAIN_EMBEDDED_NODENAME": "127.0.0.2",
    }
    given = vars(cli.parser().parse_args(["launch", "--nproc-per-node", "2"]))
    given.pop("command_name")
    granted, _ = resolve(env, given, ["script.py"], hostname=None)
    return with_members(granted, [1, 2], 1)


class Clock(selectors.DefaultSelector):
    """Time that stands while anything can go on, and then jumps to what is due next, or a little later."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.patient = False
        """Whether a thread has something to say, which takes real time."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        due = 0.0 if timeout is None else max(timeout, 0.0)
        ready = super().select(5.0 if self.patient and due else 0.0)
        if due and not ready:
            self.now += due + 1e-7
        return ready

    def loop(self) -> asyncio.AbstractEventLoop:
        return Loop(self)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.clock = clock

    def time(self) -> float:
        return self.clock.now


class FakeRanks:
    """Ranks that end 1.01 s after SIGTERM, and of themselves when the test says so."""

    def __init__(self, scene: "Scene", ranks: Sequence[int]) -> None:
        self.scene = scene
        self.ranks = list(ranks)
        self.events: asyncio.Queue[object] = asyncio.Queue()
        self.pids: dict[int, int] = {}
        self.heard = -1.0
        self.errors: dict[int, str] = {}
        self.places: dict[int, str] = {}
        """Where their scripts were when they failed."""
        self.memory = ""
        """What is known of a want of it."""
        self.told: list[Failure] = []
        """What the output was told of a failure."""
        self.catching = dict.fromkeys(ranks, 0.0)
        """Since when each of them catches the stop signal."""
        self.programs: dict[int, list[tuple[float, float]]] = {}
        """Of a rank that is a shell, from when to when each of its programs catches it."""
        self.looks: list[float] = []
        """When it was looked who catches it."""
        self.saving = dict.fromkeys(ranks, 1.01)
        """How long each of them lives on after SIGTERM."""
        self.agent_leaves = 0.0
        """How long torchrun's agent stays after the last rank."""
        self._gone: set[int] = set()

    def take(self, event: RankStarted | RankEnded | AgentEnded) -> None:
        match event:
            case RankStarted(rank=rank):
                self.pids[rank] = AGENT + 1 + rank if rank not in self.pids else self.pids[rank] + 100
            case RankEnded(rank=rank) if rank in self.pids:
                self.die(self.pids[rank])
        self.events.put_nowait(event)

    def die(self, pid: int) -> None:
        self._gone.add(pid)

    def alive(self) -> list[int]:
        left = [pid for pid in self.pids.values() if pid not in self._gone]
        return [pid for pid in left if processes.is_running(pid)] if self.scene.real else left

    def terminate(self) -> None:
        processes.signal_groups(self.alive(), signal.SIGTERM)

    def are_ending(self) -> bool:
        return bool(self.alive())

    def first_error(self, rank: int) -> str:
        return self.errors.get(rank, "")

    def failed(self, failure: Failure) -> None:
        self.told.append(failure)

    def shortage(self) -> str:
        return self.memory

    def last_place(self, rank: int) -> str:
        return self.places.get(rank, "")

    async def wait(self, seconds: float) -> bool:
        self.scene.note("wait", seconds)
        await asyncio.sleep(min(seconds, self.agent_leaves))
        return self.agent_leaves <= seconds

    async def kill(self) -> None:
        self.scene.note("kill")
        self._gone |= set(self.pids.values())

    def signalled(self, pid: int, signum: int) -> None:
        """What the system does with a signal to the process, or to the group that it leads."""
        if pid in self._gone:
            raise ProcessLookupError
        rank = {pid: rank for rank, pid in self.pids.items()}.get(pid, "agent")
        if pid >= PROGRAMS:
            rank = f"{pid // PROGRAMS - 1}.{pid % PROGRAMS}"
        self.scene.note(signal.Signals(signum).name, rank)
        if signum == signal.SIGTERM and isinstance(rank, int) and self.saving[rank] < NEVER:
            asyncio.get_running_loop().call_later(self.saving[rank], self._end, rank, pid)

    def heeding(self, pids: Iterable[int], signum: int, told: Collection[int]) -> dict[int, tuple[int, ...]]:
        assert signum == self.scene.stop_signal
        self.looks.append(self.scene.clock.now)
        return {pid: self._heeding(pid, told) for pid in pids}

    def _heeding(self, pid: int, told: Collection[int]) -> tuple[int, ...]:
        rank, now = next(rank for rank, one in self.pids.items() if one == pid), self.scene.clock.now
        if rank in self.programs:
            first = PROGRAMS * (rank + 1)
            times = enumerate(self.programs[rank])
            return tuple(first + number for number, (since, until) in times if since <= now < until)
        catches = pid not in self._gone and now >= self.catching[rank]
        return (pid,) if pid in told or catches else ()

    def _end(self, rank: int, pid: int) -> None:
        if pid not in self._gone:
            self.die(pid)
            self.events.put_nowait(RankEnded(rank=rank, status=143, signal=15, time=self.scene.wall()))


class FakeLink:
    """A link whose hub answers a failure after 0.3 s, with that same failure."""

    timeouts = terms.Timeouts(join=300, peer=60)

    def __init__(self, scene: "Scene") -> None:
        self.scene = scene
        self.events: asyncio.Queue[Told] = asyncio.Queue()
        self.answers_after = 0.3
        self.verdict: Failed | None = None
        self.ends: list[End] = []
        """Which ranks were said to have ended well."""
        self.saved: tuple[int, ...] = ()
        """Which of them to have saved, once all are done."""
        self._over = False

    async def next(self) -> Told:
        if self._over:
            self.scene.note("asks for more than the last event")
        event = await self.events.get()
        self._over = isinstance(event, (Failed, AllDone))
        return event

    def report(self, report: Report) -> None:
        match report:
            case Stopped(left=left):
                self.scene.note("stop", left)
                self.events.put_nowait(report)
            case Fail(failure=failure):
                self.scene.note("fail", failure)
                self._answer(Failed(failure))
            case Ended(end=end):
                self.ends.append(end)
            case Done(saved=saved):
                self.saved = saved
                self.scene.note("done")
            case Stalled(why=why):
                self.scene.note("stalled", why)
                self.events.put_nowait(Look(why))
            case NoOutput(why=why):
                self.scene.note("silent", why)
            case Paused(why=why):
                self.scene.note("paused", why)
            case Peeked(sightings=sightings):
                self.scene.note("peeked", list(sightings))
            case Seen(sightings=sightings):
                self.scene.note("seen", list(sightings))
                self._answer(Failed(STUCK))

    def _answer(self, event: Failed) -> None:
        if self.answers_after < NEVER:
            loop = asyncio.get_running_loop()
            loop.call_later(self.answers_after, self.events.put_nowait, self.verdict or event)


class FakeHeartbeats:
    """Heartbeats of ranks that all go on, or all do not."""

    def __init__(self, scene: "Scene") -> None:
        self.scene = scene
        self.beating = True
        self.quiet = 0.0
        self.alone: set[int] = set()
        self.apart = False
        self.steps: int | None = 7
        self.pauses_from = NEVER
        """When the optimizers make their last step."""
        self.looks: list[tuple[float, list[int], float]] = []
        """(when, at which ranks, how many seconds they could run since the last one)."""

    def observe(self, ranks: Sequence[int], passed: float) -> None:
        self.looks.append((round(self.scene.clock.now, 2), list(ranks), round(passed, 2)))
        self.quiet = 0.0 if self.beating else self.quiet + passed

    def step(self, rank: int) -> int | None:
        return self.steps if rank < 2 else None

    def trained_alone(self, rank: int) -> bool:
        return rank in self.alone

    def trained_apart(self, pids: Collection[int]) -> bool:
        return self.apart and set(pids) == set(self.scene.ranks.pids.values())

    def stalled(self, bound: float) -> bool:
        return self.quiet > bound

    def paused(self, ranks: Sequence[int], bound: float) -> bool:
        return bool(ranks) and self.scene.clock.now >= self.pauses_from + bound

    def forget(self, rank: int) -> None:
        self.scene.note("forget", rank)


class FakeLook:
    """A last look that finds what the scene has; closer it finds that, and ranks that showed nothing."""

    def __init__(self, scene: "Scene") -> None:
        self.scene = scene

    async def first(self) -> list[RankSnapshot]:
        self.scene.note("look")
        await asyncio.sleep(self.scene.look_takes)
        return self.scene.sightings

    async def closer(self) -> list[RankSnapshot]:
        self.scene.note("look closer")
        await asyncio.sleep(self.scene.look_takes)
        return [*self.scene.sightings, *self.scene.closer]

    async def keep(self, say: Callable[[str], None]) -> None:
        say("kept")


class FakeStacks:
    """Finds what the scene has."""

    def __init__(self, scene: "Scene") -> None:
        self.scene = scene
        self.heartbeats = scene.heartbeats

    def last_look(self) -> FakeLook:
        return FakeLook(self.scene)

    async def workers(self) -> str:
        self.scene.note("looks for workers")
        return self.scene.workers

    async def peek(self) -> list[RankSnapshot]:
        self.scene.note("peek")
        return self.scene.sightings


class Scene:
    """One node's supervisor among the fakes."""

    def __init__(
        self,
        *,
        alone: bool = False,
        ranks: Sequence[int] = (0, 1),
        changes: Mapping[str, Any] | None = None,
        errors: Mapping[int, str] | None = None,
        step: float = 0.0,
        silence: float = 0.0,
        is_chosen: bool = False,
        stop_signal: signal.Signals = signal.SIGUSR2,
        pids: Sequence[int] = (),
    ) -> None:
        """`alone`: a single participant. `changes`: to the plan. `errors`: what ranks wrote. `pids`: of real
        processes, for ranks that run already."""
        self.clock = Clock()
        self.plan = replace(planned(), **(changes or {}))
        self.ranks = FakeRanks(self, ranks)
        self.ranks.errors.update(errors or {})
        self.ranks.pids.update(enumerate(pids))
        self.real = bool(pids)
        self.link = FakeLink(self)
        self.heartbeats = FakeHeartbeats(self)
        self.sightings = SIGHTINGS
        self.closer: list[RankSnapshot] = []
        self.look_takes = 0.0
        self.workers = ""
        """What the processes that a rank started look like."""
        self.stop_signal = stop_signal
        self.stop_file: Path | None = None
        self.log: list[Entry] = []
        self.lasts = 8.0
        """Seconds for which the supervisor is watched after the last step."""
        self._since = 0.0
        fakes: Any = self.ranks
        link: Any = None if alone else self.link
        policy = HangPolicy(step=step, silence=silence, start=20.0, is_chosen=is_chosen, again=6.0)
        stacks: Any = FakeStacks(self)
        self.signals = Signals()
        say = functools.partial(self.note, "says")
        self.supervisor = Supervisor(
            self.plan, fakes, link, self.signals, say, stop_signal, policy, stacks, 7.0
        )

    def note(self, what: str, *with_what: object) -> None:
        self.clock.patient = False
        self.log.append((round(self.clock.now - self._since, 2), what, *with_what))

    def wall(self) -> float:
        return round(1000.0 + self.clock.now, 2)

    def play(self, *steps: Step) -> list[Entry]:
        """The log of these steps; without `ends` at its end where the supervisor stays with its ranks."""
        return self.after([], *steps)

    def after(self, state: Sequence[Step], *steps: Step) -> list[Entry]:
        """The same, of what happens 0.51 s after other steps that lead to a state."""
        with self._fake_system(), asyncio.Runner(loop_factory=self.clock.loop) as runner:
            runner.run(self._play(state, steps))
        return self.log

    async def _play(self, state: Sequence[Step], steps: Sequence[Step]) -> None:
        running = asyncio.create_task(self._run())
        await self._take(state)
        if state:
            await asyncio.sleep(0.51)
        self._since = self.clock.now
        self.log.clear()
        await self._take(steps)
        await asyncio.wait([running], timeout=self.lasts)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def _run(self) -> None:
        self.note("ends", await self.supervisor.run(self.stop_file, 0.001))

    async def _take(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case RankStarted() | RankEnded() | AgentEnded():
                    self.ranks.take(step)
                case Stopped() | Look() | LookCloser() | Peek() | Failed() | AllDone():
                    self.link.events.put_nowait(step)
                case signal.Signals():
                    self.signals.take(step)
                case float():
                    await asyncio.sleep(step)
                case _:
                    if (work := step(self)) is not None:
                        await work
            await asyncio.sleep(1e-6)

    @contextlib.contextmanager
    def _fake_system(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", self.wall)
            if self.real:
                yield
                return
            patch.setattr(os, "kill", self.ranks.signalled)
            patch.setattr(os, "killpg", self.ranks.signalled)
            patch.setattr(processes, "heeding", self.ranks.heeding)
            yield
