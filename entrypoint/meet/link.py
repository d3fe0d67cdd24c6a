"""A participant's connection to all others: what it may report, and what it is told.

What hub and spokes have in common: `next` gives what is told, `report` tells node 0. One event loop, no
torch.
"""

import asyncio
import contextlib
import socket
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain
from entrypoint.core.threads import run_in_thread
from entrypoint.meet import messages, reach
from entrypoint.meet.identity import Identity, ParticipantId
from entrypoint.meet.job_state import loss
from entrypoint.meet.messages import (
    MOST_SECONDS,
    AllDone,
    Beat,
    Extent,
    Fail,
    Failed,
    Message,
    Moved,
    Peeked,
    Report,
    Seen,
    Stalled,
    Stopped,
    Told,
    Tried,
    Try,
)
from entrypoint.meet.node_failures import NodeFailures
from entrypoint.meet.terms import LocalNode, MembershipPolicy, Timeouts
from entrypoint.meet.waiting import Waiting
from entrypoint.meet.wire import Wire, WireError, encode

SIGHTINGS = 16
"""In one frame, whatever letters the names in them have."""

SILENT_BEATS = 3
"""Heartbeats that do not come from a node which the scheduler has given up: then it is lost."""


@dataclass(frozen=True, kw_only=True)
class Crew:
    """All have met."""

    members: tuple[int, ...]
    """The nodes that take part, in the order of their ranks."""
    since: float
    """On the steady clock."""


@dataclass(eq=False, kw_only=True)
class Link(ABC):
    """A participant's connection to all others, from their meeting to the end."""

    me: Identity
    hub: int
    nodes: Sequence[str]
    endpoint: str
    found: tuple[socket.AddressFamily, Any]
    key: bytes
    timeouts: Timeouts
    local: LocalNode
    waiting: Waiting
    everywhere: bool
    muster: MembershipPolicy | None
    moved: str = field(init=False, default="")
    """Node 0's address, if another one was looked up here; known when all have met."""
    _peers: dict[ParticipantId, Wire] = field(init=False, default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _events: asyncio.Queue[Told] = field(init=False, default_factory=asyncio.Queue)
    _met: asyncio.Future[Crew] = field(init=False, default_factory=lambda: asyncio.Future())
    _over: bool = field(init=False, default=False)
    _given_up: set[int] = field(init=False, default_factory=set)
    """Nodes that the scheduler takes for lost; grows."""

    @property
    def members(self) -> tuple[int, ...]:
        """The nodes that take part, in the order of their ranks, once all have met."""
        return self._met.result().members

    async def next(self) -> Told:
        """The next event; the last one again and again."""
        event = await self._events.get()
        if isinstance(event, Failed | AllDone):
            self._events.put_nowait(event)
        return event

    @property
    def elsewhere(self) -> dict[str, str]:
        """Node to its interface, where that is another than node 0's; known to node 0 alone."""
        return {}

    @property
    def findings(self) -> dict[str, Mapping[str, str]]:
        """Node to what it has found wrong with itself; known to node 0 alone."""
        return {}

    @property
    def _extent(self) -> Extent:
        return Extent(nodes=self.me.nnodes, ranks=self.me.nnodes * self.me.nproc_per_node)

    def report(self, report: Report) -> None:
        """Tell the hub, in as many frames as it needs; texts are told as one line of bounded length."""
        match report:
            case Stopped(left=left):
                self._report(Stopped(None if left is None else min(max(left, 0.0), MOST_SECONDS)))
            case Fail(failure=failure):
                self._report(Fail(replace(failure, error=plain(failure.error), at=plain(failure.at))))
            case Stalled(why=why):
                self._report(Stalled(plain(why)))
            case Seen(sightings=sightings) | Peeked(sightings=sightings):
                begins = range(0, max(1, len(sightings)), SIGHTINGS)
                for begin in begins:
                    part = sightings[begin : begin + SIGHTINGS]
                    self._report(type(report)(part, last=begin == begins[-1]))
            case _:
                self._report(report)

    def watch(self, failures: NodeFailures) -> None:
        """Ask once a second which nodes the scheduler has given up since. Who is among them and silent too is
        lost sooner than others; who is not silent is not."""
        self._start(self._watch(failures))

    async def _watch(self, failures: NodeFailures) -> None:
        while not self._over:
            with contextlib.suppress(OSError, ValueError):
                # Without a bound: beside a look that a file system holds each further one would be held too.
                self._given_up |= {*await run_in_thread(failures.look)}
            await asyncio.sleep(self.timeouts.poll)

    async def close(self) -> None:
        """Leave once the others have read what was sent. Without done or fail before it, this is a loss."""
        for task in self._tasks:
            task.cancel()
        self._met.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(wire.close() for wire in self._peers.values()))

    @abstractmethod
    async def meet(self) -> None:
        """Return when everyone has met."""

    @abstractmethod
    def _report(self, message: Report | Tried | Moved) -> None:
        """Tell the hub."""

    @abstractmethod
    def _hear(self, participant: ParticipantId, /, message: Message) -> None:
        """Take what this participant sent. WireError: it makes no sense."""

    @abstractmethod
    def _lose(self, participant: ParticipantId, /, why: str, at: float) -> None:
        """Take that this participant is lost since `at`, in Unix seconds."""

    async def _look_out(self) -> None:
        while not self._met.done():
            await self.waiting.ask()
            await asyncio.sleep(self.timeouts.poll)

    async def _try(self, order: Try) -> None:
        """Try the ways to other nodes as the hub asks, and report."""
        self._report(await reach.carry_out(order, self.timeouts.reach))

    def _told(self, message: Told) -> None:
        """Take what the hub tells everyone; nothing after the last message."""
        if not self._over:
            self._over = isinstance(message, Failed | AllDone)
            self._events.put_nowait(message)

    def _ordered(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """In the order of their ranks: the hub is the first."""
        return tuple(sorted(nodes, key=lambda node: (node != self.hub, node)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_work)

    def _ended_work(self, task: asyncio.Task[None]) -> None:
        """If it ended by a bug of ours, says so and ends the job: nobody waits for this work."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if not isinstance(error, Exception):
            return
        why = self._own_bug(error)
        if not self._met.done():
            self._met.set_exception(error)
        elif not self._over:
            self.report(Fail(loss(self.me.node_rank, self.me.name, why, time.time())))

    def _own_bug(self, error: Exception) -> str:
        """Says what no message of a peer should cause, with where that was; returns it in short."""
        trace = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(trace.filename).name}:{trace.lineno}"
        why = str(plain(f"a bug of apptrain: {type(error).__name__} in {where}: {error}"))
        self.local.say(f"{why}: please report it")
        return why

    async def _listen(self, participant: ParticipantId, wire: Wire) -> None:
        try:
            while True:
                self._hear(participant, messages.load(await wire.receive(), self._extent))
        except WireError as error:
            self._lose(participant, str(error), time.time())
        except Exception as error:  # a bug of ours must not leave a participant that nobody listens to
            self._lose(participant, self._own_bug(error), time.time())

    def _doubt(self, since: float) -> str:  # noqa: ARG002
        """What else the silence of a peer may mean. `since`: on the steady clock, by when others were to be
        heard."""
        return ""

    async def _beat(self) -> None:
        """Tell every peer that we are here, and find those that fell silent."""
        bound = self.timeouts.peer
        interval = min(self.timeouts.beat, bound / 6)
        while True:
            before = time.monotonic()
            beat = encode(messages.pack(Beat(time.time())))
            for wire in self._peers.values():
                wire.send(beat)
            await asyncio.sleep(interval)
            now = time.monotonic()
            doubt = self._doubt(now - SILENT_BEATS * interval)
            for participant, wire in list(self._peers.items()):
                if now - before > 2 * interval:  # we were suspended: that is not the peer's silence
                    wire.heard = now
                elif now - wire.heard > bound:
                    why = f"nothing was heard from it for {bound:g} s{doubt}"
                    self._lose(participant, why, time.time() - (now - wire.heard))
                elif participant[0] in self._given_up and now - wire.heard > SILENT_BEATS * interval:
                    silent = f"nothing was heard from it for {SILENT_BEATS * interval:g} s"
                    why = f"the scheduler reports that the node failed, and {silent}"
                    self._lose(participant, why, time.time() - (now - wire.heard))
