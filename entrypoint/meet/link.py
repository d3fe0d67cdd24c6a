"""A participant's connection to all others: what it may report, and what it is told.

It knows the messages that hub and spokes have in common. One event loop, no torch.
"""

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from entrypoint.errors import BAD_INPUT, BadInput, Refusal, Unavailable
from entrypoint.job import outcome
from entrypoint.meet import reach
from entrypoint.meet.claims import Identity, Place, load, unpack
from entrypoint.meet.terms import AllDone, Event, Failed, Look, LookCloser, Muster, Peek, Stopped, Timeouts
from entrypoint.meet.waiting import Waiting
from entrypoint.meet.wire import Wire, WireError
from entrypoint.plain import plain
from entrypoint.watch.reports import End, Failure, Sighting

LOST = 1
"""Status of a participant that was lost while ranks ran: no port or peer that another attempt could have."""
SIGHTINGS = 16
"""In one frame, whatever letters the names in them have."""
VISIT, WELCOME = {"type": "visit"}, {"type": "welcome"}

Message = Mapping[str, Any]


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
    say: Callable[[str], None]
    waiting: Waiting
    everywhere: bool
    move: Callable[[str], Awaitable[str]]
    muster: Muster | None
    members: tuple[int, ...] = field(init=False, default=())
    """The nodes that take part, in the order of their ranks; known when all have met."""
    moved: str = field(init=False, default="")
    """Node 0's address, if another one was looked up here; known when all have met."""
    _peers: dict[Place, Wire] = field(init=False, default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _events: asyncio.Queue[Event] = field(init=False, default_factory=asyncio.Queue)
    _met: asyncio.Future[None] = field(init=False, default_factory=lambda: asyncio.Future())
    _over: bool = field(init=False, default=False)

    async def next(self) -> Event:
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

    def stop(self, left: float | None) -> None:
        """Announce a planned end to everyone; `left` as in Stopped."""
        self._report({"type": "stop", "left": left})

    def fail(self, failure: Failure) -> None:
        """Report this participant's first failure; its error is told as one line."""
        self._report({"type": "fail", "failure": asdict(load(Failure, asdict(failure)))})

    def ended(self, end: End) -> None:
        """Report that a rank of this participant ended well."""
        self._report({"type": "ended", "end": asdict(end)})

    def done(self) -> None:
        """Report that this participant's ranks ended well."""
        self._report({"type": "done"})

    def stalled(self, why: str) -> None:
        """Report that a rank of this participant does not go on."""
        self._report({"type": "stalled", "why": plain(why)})

    def silent(self, why: str) -> None:
        """Report that all ranks of this participant have said nothing for too long; empty: they speak again.
        When this is so of everyone, the job seems to hang."""
        self._report({"type": "silent", "why": why})

    def paused(self, why: str | None) -> None:
        """Report that ranks of this participant make no step, or with None that they go on; as of Pauses."""
        self._report({"type": "paused", "why": why})

    def seen(self, sightings: Sequence[Sighting]) -> None:
        """Answer a Look, or a LookCloser."""
        self._answer("seen", sightings)

    def peeked(self, sightings: Sequence[Sighting]) -> None:
        """Answer a Peek."""
        self._answer("peeked", sightings)

    def _answer(self, how: str, sightings: Sequence[Sighting]) -> None:
        chunks = range(0, max(1, len(sightings)), SIGHTINGS)
        for begin in chunks:
            chunk = [asdict(one) for one in sightings[begin : begin + SIGHTINGS]]
            self._report({"type": how, "sightings": chunk, "last": begin == chunks[-1]})

    async def close(self) -> None:
        """Leave once the others have read what was sent. Without done or fail before it, this is a loss."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(wire.close() for wire in self._peers.values()))

    @abstractmethod
    async def meet(self) -> None:
        """Return when everyone has met."""

    @abstractmethod
    def _report(self, message: Message) -> None:
        """Tell the hub."""

    @abstractmethod
    def _hear(self, place: Place, /, message: Message) -> None:
        """Take what the peer in this place sent. WireError: it makes no sense."""

    @abstractmethod
    def _lose(self, place: Place, /, why: str, at: float) -> None:
        """Take that the peer in this place is lost since `at`, in Unix seconds."""

    async def _look_out(self) -> None:
        while not self._met.done():
            await self.waiting.ask()
            await asyncio.sleep(self.timeouts.poll)

    async def _try(self, order: Message) -> None:
        """Try the ways to other nodes as the hub asks, and report."""
        self._report(await reach.carry_out(order, self.timeouts.reach))

    def _told(self, message: Message) -> None:
        """Take what the hub tells everyone."""
        match message:
            case {"type": "stop", "left": int() | float() | None as left}:
                self._events.put_nowait(Stopped(left))
            case {"type": "look", "why": str(why)}:
                self._events.put_nowait(Look(plain(why)))
            case {"type": "look closer"}:
                self._events.put_nowait(LookCloser())
            case {"type": "peek"}:
                self._events.put_nowait(Peek())
            case {"type": "failed", "failure": failure, "lost": str(lost)}:
                self._end(Failed(load(Failure, failure), unpack(lost, len(self.nodes))))
            case {"type": "all done", "alone": bool(alone)}:
                self._end(AllDone(alone))
            case _:
                raise WireError("it sent a message that has no meaning here")

    def _end(self, event: Event) -> None:
        if not self._over:
            self._over = True
            self._events.put_nowait(event)

    def _ordered(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """In the order of their ranks: the hub is the first."""
        return tuple(sorted(nodes, key=lambda node: (node != self.hub, node)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, place: Place, wire: Wire) -> None:
        try:
            while True:
                self._hear(place, await wire.receive())
        except WireError as error:
            self._lose(place, str(error), time.time())

    async def _beat(self) -> None:
        """Tell every peer that we are here, and find those that fell silent."""
        bound = self.timeouts.peer
        interval = min(5.0, bound / 6)
        while True:
            before = time.monotonic()
            for wire in self._peers.values():
                wire.send({"type": "beat", "time": time.time()})
            await asyncio.sleep(interval)
            now = time.monotonic()
            for place, wire in list(self._peers.items()):
                if now - before > 2 * interval:  # we were suspended: that is not the peer's silence
                    wire.heard = now
                elif now - wire.heard > bound:
                    why = f"nothing was heard from it for {bound:g} s"
                    self._lose(place, why, time.time() - (now - wire.heard))


def loss(node_rank: int, node: str, why: str, at: float) -> Failure:
    """A participant that was lost at that time, in Unix seconds."""
    return Failure(
        node_rank=node_rank,
        node=node,
        rank=None,
        status=LOST,
        signal=0,
        time=at,
        error=f"{outcome.LOST}{why}",
    )


def end_of(refusal: Refusal) -> Message:
    """What ends the meeting for everyone."""
    return {"type": "end", "status": refusal.status, "text": str(refusal)}


def refusal_in(message: Message) -> Exception:
    """What `end_of` has packed."""
    match message:
        case {"type": "end", "status": status, "text": str(text)}:
            refusal = BadInput(plain(text)) if status == BAD_INPUT else Unavailable(plain(text))
            refusal.told = True
            return refusal
    return WireError("it sent a message that has no meaning here")
