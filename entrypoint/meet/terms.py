"""All nodes of a job meet before any rank starts, and stay in touch until the end.

The secret: who tells whom what. Node 0 is the hub: it listens, every other participant (a spoke)
connects, proves who it is and waits for the answer that all get. Afterwards the connections carry
heartbeats, the planned end, the first failure and the end. One event loop, no torch.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from entrypoint.errors import BAD_INPUT, BadInput, Refusal, Unavailable
from entrypoint.job import outcome
from entrypoint.meet import door, reach
from entrypoint.meet.claims import (
    End,
    Failure,
    Identity,
    Place,
    Sighting,
    disagreement,
    load,
    missing,
    pack,
    plain,
    unpack,
)
from entrypoint.meet.door import Door, Guest
from entrypoint.meet.wire import Closed, Wire, WireError, WrongKey, greet, set_options
from entrypoint.watch import blame
from entrypoint.watch.pauses import Pauses

REPORTS = 16
"""Addresses of strangers that the hub names."""
LOST = 1
"""Status of a participant that was lost while ranks ran: no port or peer that another attempt could have."""
PORT_ADVICE = "the next attempt uses another port; where it was chosen by hand, choose another --master-port"
LIST_ADVICE = "start every node with the same list of nodes"
NAME_ADVICE = "correct DNS or /etc/hosts, so that it is the same on all nodes, or give --master-addr"
VISIT, WELCOME = {"type": "visit"}, {"type": "welcome"}

CLOCKS = 1.0
"""Seconds by which the nodes' clocks may differ and still be believed."""
SIGHTINGS = 16
"""In one frame, whatever letters the names in them have."""

__all__ = [
    "AllDone",
    "Event",
    "Failed",
    "Failure",
    "Identity",
    "Link",
    "Look",
    "Muster",
    "Peek",
    "Stopped",
    "Timeouts",
    "meet",
]

Message = Mapping[str, Any]
Timed = TypeVar("Timed", Failure, End)
FAR = 1e15
"""Seconds: no clock is there."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Bounds in seconds."""

    join: float = 300.0
    """From the start of whoever began first to the meeting of all."""
    peer: float = 60.0
    """Silence after which a participant counts as lost."""
    connect: float = 15.0
    """From the first connection that is not refused to the hub's proof."""
    handshake: float = 10.0
    """What the hub allows a newcomer to prove who it is."""
    remind: float = 10.0
    """Between two lines that say who is missing."""
    poll: float = 1.0
    """Between two looks at who never started."""
    settle: float = 0.3
    """In which the hub collects failures before it calls one of them the first."""
    settle_echo: float = 1.5
    """The same where the first to come is that of a rank which has lost another one."""
    answer: float = 20.0
    """In which a hub must answer before the next candidate is tried."""
    look: float = 20.0
    """In which everyone looks where its ranks are when the job seems to hang."""
    again: float = 60.0
    """Between the first two looks at ranks that make no step."""
    reach: float = 8.0
    """In which a node reaches another, before the start."""
    refused: float = 45.0
    """In which a hub that has begun must listen: it looks at its GPUs before, for `gpu.ANSWER` at most."""


DEFAULTS = Timeouts()


@dataclass(frozen=True)
class Stopped:
    """A planned end was announced; who announced it gets this too."""

    left: float | None = None
    """Seconds to the end of the job that is to go on as another; None where nothing is known of that."""


@dataclass(frozen=True)
class Look:
    """The job seems to hang: say where your ranks are, with `seen`. `Failed` follows."""

    why: str


@dataclass(frozen=True)
class Peek:
    """The job makes no step: say where your ranks are, with `peeked`, and let them go on."""


@dataclass(frozen=True)
class Failed:
    """The first failure of all, the same for everyone. The last event."""

    failure: Failure
    lost: tuple[int, ...] = ()
    """The node ranks of the participants that are known to be lost."""


@dataclass(frozen=True)
class AllDone:
    """Every participant is done. The last event."""

    alone: bool = False
    """Whether there are several ranks, and each has trained without the others."""


Event = Stopped | Look | Peek | Failed | AllDone


@dataclass(frozen=True, kw_only=True)
class Muster:
    """A meeting of one task a node that goes on without nodes that do not come."""

    candidates: Sequence[int]
    """The nodes that may be the hub: each is tried until one answers, or it is this one."""
    address: Callable[[int], Awaitable[str]]
    """A node's address; of this one the address to listen on. Refusal: it has none."""
    absent: Collection[int] = ()
    """Nodes that are lost and not waited for; they may come all the same."""
    least: int
    """So many are enough when the time is up."""
    most: int
    """So many take part; the others are spares."""
    quorum: int = 0
    """Fewer wait until the time is up even where nobody else is expected: others may be cut off from them."""
    seal: Callable[[Sequence[int]], None]
    """The hub calls it with the nodes that take part before it says go; a Refusal ends the meeting."""


async def _stay(address: str) -> str:
    raise BadInput(f"this participant cannot take node 0 at {address}")


class _NoHub(Unavailable):
    """The hub cannot be had: another candidate may be."""


async def meet(
    me: Identity,
    *,
    nodes: Sequence[str],
    address: str,
    port: int,
    key: bytes | None,
    say: Callable[[str], None],
    timeouts: Timeouts = DEFAULTS,
    never_started: Callable[[], str | None] | None = None,
    begun: Callable[[], str | None] | None = None,
    everywhere: bool = False,
    move: Callable[[str], Awaitable[str]] = _stay,
    muster: Muster | None = None,
) -> "Link":
    """Meet all participants of the job; returns when each of them has proved itself and agreed.

    `nodes` are the names in node-rank order, `address` is node 0's, `key` is the run's join key (None:
    identity alone). `say` takes lines for the user. `never_started` is asked about once a second, in a
    thread; a text ends the wait. So is `begun`: where node 0 is about to listen; None before it has begun.
    With a `muster` the meeting is one without those who do not come.

    Node 0's name may mean another address to itself than to the others. `everywhere`: it listens on all of
    its own. Who has another than most have reached is told that one by `move`, which returns its contact
    then; a Refusal ends the meeting.

    BadInput: the participants do not agree, or two claim one place; everyone gets the same text.
    Unavailable: the port is taken, no hub can be reached or it is none, or too many do not come.
    """
    candidates = [*muster.candidates] if muster else [0]
    while True:
        hub = candidates.pop(0)
        try:
            where = await muster.address(hub) if muster else address
            return await _meet_at(
                hub,
                where,
                port,
                me=me,
                nodes=nodes,
                key=key or b"",
                timeouts=timeouts,
                say=say,
                waiting=_Waiting(timeouts, say, never_started, begun),
                everywhere=everywhere,
                move=move,
                muster=muster,
            )
        except _NoHub as error:
            if not candidates:
                raise Unavailable(str(error)) from error
            say(f"{error}: trying the next node")


async def _meet_at(hub: int, address: str, port: int, *, me: Identity, **given: Any) -> "Link":
    link = (_Hub if me.node_rank == hub and not me.local_rank else _Spoke)(
        me=me,
        hub=hub,
        endpoint=f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
        found=await _resolve(address, port),
        **given,
    )
    try:
        await link.meet()
    except BaseException:
        await link.close()
        raise
    return link


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
    waiting: "_Waiting"
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
        """Answer a Look."""
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
            await self.waiting.look()
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


@dataclass(eq=False, kw_only=True)
class _Hub(Link):
    _door: Door | None = field(init=False, default=None)
    _members: dict[Place, tuple[Identity, str]] = field(init=False)
    _reached: dict[Place, str] = field(init=False)
    """The address of ours at which each has us."""
    _sent: dict[Place, str] = field(init=False, default_factory=dict)
    """Who was asked to take another one."""
    _refused: list[Wire] = field(init=False, default_factory=list)
    _reported: set[str] = field(init=False, default_factory=set)
    _finished: set[Place] = field(init=False, default_factory=set)
    """Done, failed or lost: nothing that happens to their connections now is a loss."""
    _done: set[Place] = field(init=False, default_factory=set)
    _failures: list[Failure] = field(init=False, default_factory=list)
    _ends: dict[int, End] = field(init=False, default_factory=dict)
    """By rank: who has ended well."""
    _gone: set[int] = field(init=False, default_factory=set)
    """Nodes that were lost, those among them that had nothing to do."""
    _active: set[Place] = field(init=False, default_factory=set)
    """Who takes part; the others are spares, whose loss is no failure."""
    _stopping: bool = field(init=False, default=False)
    _trial: reach.Trial = field(init=False, default_factory=reach.Trial)
    _trying: frozenset[Place] = field(init=False, default=frozenset())
    """Who takes part in the trial."""
    _clocks: dict[Place, float] = field(init=False, default_factory=dict)
    """How far each participant's clock is behind ours, in seconds, by its last heartbeat."""
    _silent: set[Place] = field(init=False, default_factory=set)
    _looking: str = field(init=False, default="")
    """Why everyone was asked to look; empty before."""
    _looked: float = field(init=False, default=0.0)
    _sightings: list[Sighting] = field(init=False, default_factory=list)
    _answered: set[Place] = field(init=False, default_factory=set)
    _pauses: Pauses = field(init=False)

    def __post_init__(self) -> None:
        self._pauses = Pauses(
            ask=lambda: self._tell_all({"type": "peek"}),
            everyone=lambda: self._active,
            ends=lambda: list(self._ends.values()),
            world=lambda: self._world,
            say=self.say,
            end=self._take_deadlock,
            start=self._start,
            again=self.timeouts.again,
            bound=self.timeouts.look,
        )

    async def meet(self) -> None:
        self._members = {self.me.place: (self.me, self.endpoint)}
        self._reached = {self.me.place: str(self.found[1][0])}
        room = self._room()
        self._door = Door(
            self._open(), self._admit, room=room, seconds=self.timeouts.handshake, refuse=self._refuse
        )
        self._start(self._look_out())
        self._start(self._beat())
        self._go_if_complete()
        try:
            while not self._met.done():
                if self.muster and not self.waiting.left() and len(self._members) >= self.muster.least:
                    if self._trying != self._members.keys():
                        self._try_ways()
                    await asyncio.wait([self._met], timeout=0.2)
                else:
                    self.waiting.check(self._missing)
                    await asyncio.wait([self._met], timeout=self.waiting.nap())
            self._met.result()
        except Refusal as refusal:
            self._send_all(_end(refusal))
            raise

    async def close(self) -> None:
        self._decide()
        if self._door:
            await self._door.end()
        await asyncio.gather(super().close(), *(wire.close() for wire in self._refused))

    @property
    def elsewhere(self) -> dict[str, str]:
        return self._trial.elsewhere

    @property
    def _expected(self) -> int:
        return self.me.nnodes * len(self.me.local_ranks)

    def _room(self) -> int:
        """For how many that have proved nothing. BadInput: for too few."""
        wanted = self._expected + door.STRANGERS
        room = door.room(wanted, beside=self._expected)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if room < door.LEAST:
            raise BadInput(
                f"node 0 needs {door.files_for(door.LEAST, beside=self._expected)} open files to meet all "
                f"others and may have {hard} (ulimit -Hn): have the hard limit raised on the nodes"
            )
        if room < wanted:
            self.say(
                f"node 0 may have {hard} open files (ulimit -Hn): it listens to {room} at once that have not "
                f"proved who they are, instead of {wanted}"
            )
        return room

    def _open(self) -> list[socket.socket]:
        family, where = self.found
        places: list[tuple[socket.AddressFamily, Any]] = [(family, where)]
        if self.everywhere:
            port = where[1]
            places = [(socket.AF_INET, ("0.0.0.0", port)), (socket.AF_INET6, ("::", port))]
        with contextlib.ExitStack() as failed:
            sockets: list[socket.socket] = []
            for one, at in places:
                try:
                    sockets.append(failed.enter_context(door.listen(one, at)))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        text = f"the join port of {self.endpoint} is taken on {self.me}: {PORT_ADVICE}"
                        raise Unavailable(text) from error
                    if one != family:  # that a host may have none of
                        continue
                    raise BadInput(
                        f"{self.me} cannot listen on {self.endpoint}: {os.strerror(error.errno or 0)}: "
                        "the address must be one of node 0's own (--master-addr)"
                    ) from error
            failed.pop_all()
        return sockets

    async def _admit(self, guest: Guest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear a newcomer out: a participant stays, a stranger is named and sent away."""
        wire = await greet(reader, writer, self.key, hub=True)
        try:
            message = await wire.receive()
            if message == VISIT:
                wire.send(WELCOME)
                await wire.close()
                return
            claim, left = _hello(message)
            reach.check(claim.contact)
            if (claim.job_id, claim.attempt) != (self.me.job_id, self.me.attempt):
                wire.send(_end(Unavailable(self._other_run(claim))))
                raise WireError(f"it is of job {claim.job_id}, attempt {claim.attempt}")
        except WireError as error:
            self._refuse(guest.address, str(error))
            wire.send({"type": "refused"})  # does not verify with another key, and so tells it why
            await wire.close()
            return
        guest.welcome()
        await self._take(claim, guest, wire, left)

    async def _take(self, claim: Identity, guest: Guest, wire: Wire, left: float) -> None:
        if self._met.done() or (objection := self._objection(claim, guest.address)):
            self._refused.append(wire)
            if not self._met.done():
                self._met.set_exception(BadInput(plain(objection)))
            return
        self.waiting.shorten(left)
        self._members[claim.place], self._peers[claim.place] = (claim, guest.address), wire
        self._reached[claim.place] = guest.came_to
        wire.send(WELCOME)
        self._go_if_complete()
        await self._listen(claim.place, wire)

    def _objection(self, claim: Identity, address: str) -> str:
        """Why this participant cannot be one of us; empty where it can."""
        if text := disagreement(self.me, claim):
            return text
        local_ranks = self.me.local_ranks
        if claim.node_rank not in range(self.me.nnodes) or claim.local_rank not in local_ranks:
            return (
                f"a participant from {address} says it is {claim}, outside the {self.me.nnodes} nodes with "
                f"{len(local_ranks)} tasks each that {self.me} knows: {LIST_ADVICE}"
            )
        if claim.place in self._members:
            other, where = self._members[claim.place]
            return (
                f"two participants claim one place: {other} at {where} and {claim} at {address}: "
                "start each once, with its own --node-rank"
            )
        listed = self.nodes[claim.node_rank]
        if claim.name != listed:
            return (
                f"the nodes do not agree: node {claim.node_rank} is {listed} in the list of {self.me} "
                f"and calls itself {claim.name} at {address}: {LIST_ADVICE}"
            )
        return ""

    def _other_run(self, claim: Identity) -> str:
        return (
            f"the hub at {self.endpoint} is of job {self.me.job_id}, attempt {self.me.attempt}, "
            f"and {claim} is of job {claim.job_id}, attempt {claim.attempt}: {PORT_ADVICE}"
        )

    def _go_if_complete(self) -> None:
        if self.muster:
            present = self._present
            expected = set(range(self.me.nnodes)) - set(self.muster.absent)
            if expected <= present and len(present) >= max(self.muster.quorum, self.muster.least):
                self._try_ways()
        elif len(self._members) == self._expected:
            self._try_ways()

    @property
    def _present(self) -> set[int]:
        return {node for node, _ in self._members}

    @property
    def _address(self) -> str:
        """Node 0's: of those that the other nodes have reached the one that most have."""
        own = self._reached[self.me.place]
        found = Counter(where for (node, _), where in self._reached.items() if node != self.hub)
        return max(found, key=lambda where: (found[where], where == own, where), default=own)

    def _have_one_address(self) -> bool:
        """Whether everyone has us at the same one; those who do not are asked to take it."""
        if not self.everywhere:
            return True
        address = self._address
        astray = [place for place, where in self._reached.items() if where != address]
        if new := [place for place in astray if self._sent.get(place) != address]:
            self.say(self._two_addresses(new[0], address) + f": {address} is taken")
        for place in new:
            self._sent[place] = address
            if place == self.me.place:
                self._start(self._move_ourselves(address))
            else:
                self._peers[place].send({"type": "move", "address": address})
            bound = self.timeouts.reach + self.timeouts.handshake
            why = "it does not say how that went"
            asyncio.get_running_loop().call_later(bound, self._give_up, place, address, why)
        return not astray

    async def _move_ourselves(self, address: str) -> None:
        try:
            contact = await self.move(address)
        except (Refusal, OSError) as error:
            if not self._met.done():
                self._met.set_exception(error if isinstance(error, Refusal) else Unavailable(str(error)))
            return
        self.moved = address
        self._take_move(self.me.place, address, contact)

    def _take_move(self, place: Place, address: str, contact: str) -> None:
        if self._sent.get(place) != address or self._met.done():
            return
        claim, peer = self._members[place]
        self._members[place] = (replace(claim, contact=contact), peer)
        self._reached[place] = address
        self._go_if_complete()

    def _give_up(self, place: Place, address: str, why: str) -> None:
        """Where a participant cannot have us at this address, or has not for too long."""
        if self._sent.get(place) == address != self._reached[place] and not self._met.done():
            text = f"{self._two_addresses(place, address)}, which {self.nodes[place[0]]} cannot use: {why}"
            self._met.set_exception(BadInput(f"{text}: {NAME_ADVICE} with an address that all nodes reach"))

    def _two_addresses(self, place: Place, address: str) -> str:
        """What a participant takes for our address, and what another one does."""
        other = next(node for (node, _), where in self._reached.items() if where == address)
        first, here, there = (self.nodes[node] for node in (self.hub, place[0], other))
        return f"{first} is {self._reached[place]} on {here}, and {address} on {there}"

    def _try_ways(self) -> None:
        """Those who are there try to reach one another, once they agree where the hub is."""
        if not self._have_one_address():
            return
        claims = {node: claim.contact for (node, _), (claim, _) in self._members.items() if claim.contact}
        self._trial = trial = reach.Trial(claims, self.nodes, number=self._trial.number + 1)
        self._trying = frozenset(self._members)
        if trial.clash:
            self._met.set_exception(BadInput(trial.clash))
            return
        for place, (claim, _) in self._members.items():
            if claim.contact:
                order = trial.order(claim.node_rank)
                if place == self.me.place:
                    self._start(self._try(order))
                else:
                    self._peers[place].send(order)
        bound = self.timeouts.reach + self.timeouts.handshake
        asyncio.get_running_loop().call_later(bound, self._go_if_tried, trial, True)
        self._go_if_tried(trial)

    def _go_if_tried(self, trial: reach.Trial, late: bool = False) -> None:
        """Once all have said that they reach the others, they go."""
        if self._met.done() or trial is not self._trial or self._trying != self._members.keys():
            return
        if trial.complete or late:
            if text := trial.verdict():
                self._met.set_exception(Unavailable(text))
            else:
                self._go()

    def _go(self) -> None:
        present = self._ordered(self._present)
        members = present[: self.muster.most] if self.muster else present
        try:
            if self.muster:
                self.muster.seal(members)
        except Refusal as refusal:
            self._met.set_exception(refusal)
            return
        self.members = members
        self._active = {place for place in self._members if place[0] in members}
        self._met.set_result(None)
        self._send_all({"type": "go", "members": pack(members)})
        if self._door:
            self._door.close()

    def _missing(self) -> str:
        if self._trying == self._members.keys():
            return "all nodes have come, and try to reach one another"
        absent = self.muster.absent if self.muster else ()
        nodes = (node for node in range(self.me.nnodes) if node not in absent)
        places = ((node, local) for node in nodes for local in self.me.local_ranks)
        return missing([place for place in places if place not in self._members], self._expected, self.nodes)

    def _refuse(self, address: str, why: str) -> None:
        if self._met.done() or address in self._reported or len(self._reported) > REPORTS:
            return
        self._reported.add(address)
        if len(self._reported) > REPORTS:
            self.say("further strangers are refused without a word")
        else:
            self.say(f"refused a stranger from {address} on {self.endpoint}: {why}")

    def _send_all(self, message: Message) -> None:
        for wire in [*self._peers.values(), *self._refused]:
            wire.send(message)

    def _tell_all(self, message: Message) -> None:
        if not self._over:
            self._send_all(message)
            self._told(message)

    def _report(self, message: Message) -> None:
        self._hear(self.me.place, message)

    def _hear(self, place: Place, /, message: Message) -> None:
        match message:
            case {"type": "beat", "time": float(then)} if abs(then) < FAR:
                self._clocks[place] = time.time() - then
            case {"type": "tried"}:
                if not self._met.done():  # or it is late: whether they meet is decided
                    self._trial.take(place[0], message)
                    self._go_if_tried(self._trial)
            case {"type": "moved", "address": str(address), "contact": str(contact), "why": str(why)}:
                reach.check(contact)
                if why:
                    self._give_up(place, address, plain(why))
                else:
                    self._take_move(place, address, contact)
            case {"type": "stop", "left": int() | float() | None as left} if self._met.done():
                if not self._stopping:
                    self._stopping = True
                    self._tell_all({"type": "stop", "left": left})
            case {"type": "ended", "end": end} if self._met.done():
                one = self._by_our_clock(place, load(End, end))
                self._ends[one.rank] = one
            case {"type": "done"} if self._met.done():
                self._finished.add(place)
                self._done.add(place)
                if self._active <= self._done and not self._failures:
                    alone = [one.alone for one in self._ends.values()]
                    several = len(alone) == self._world > 1
                    self._tell_all({"type": "all done", "alone": several and all(alone)})
            case {"type": "fail", "failure": failure} if self._met.done():
                self._collect(self._by_our_clock(place, load(Failure, failure)))
                self._finished.add(place)
                self._judge_if_complete()
            case {"type": "stalled", "why": str(why)} if self._met.done():
                self._look(plain(why))
            case {"type": "silent", "why": str(why)} if self._met.done():
                (self._silent.add if why else self._silent.discard)(place)
                if self._active <= self._silent | self._finished:
                    self._look(plain(why))
            case {"type": "paused", "why": str() | None as why} if self._met.done():
                self._pauses.report(place, plain(why))
            case {"type": "peeked", "sightings": list(raw), "last": bool(last)} if self._met.done():
                self._pauses.seen(place, [load(Sighting, one) for one in raw], last=last)
            case {"type": "seen", "sightings": list(raw), "last": bool(last)} if self._looking:
                self._sightings += [load(Sighting, one) for one in raw]
                if last:
                    self._answered.add(place)
                self._judge_if_complete()
            case _:
                raise WireError("it sent a message that has no meaning here")

    def _lose(self, place: Place, /, why: str, at: float) -> None:
        if place not in self._members or place in self._finished & self._active:
            return
        lost, _ = self._members[place]
        if self._met.done() and place not in self._active:
            if lost.node_rank not in self._gone and not self._over:
                self.say(f"the spare {lost} is lost: {why}")
            self._gone.add(lost.node_rank)
        elif self._met.done():
            self._finished.add(place)
            self._gone.add(lost.node_rank)
            self._collect(_loss(lost.node_rank, lost.name, why, at))
            self._judge_if_complete()
        else:
            del self._members[place], self._reached[place]
            self._sent.pop(place, None)
            self._peers.pop(place).abort()
            self.say(f"{lost} left before the start ({why}): waiting for it again")

    def _look(self, why: str) -> None:
        if not self._looking and not self._failures:
            self._looking, self._looked = why, time.time()
            self._tell_all({"type": "look", "why": why})
            asyncio.get_running_loop().call_later(self.timeouts.look, self._judge)

    def _take_deadlock(self, failure: Failure) -> None:
        if not self._looking and not self._failures:
            self._tell_failure(load(Failure, asdict(failure)))

    def _judge_if_complete(self) -> None:
        if self._looking and self._active <= self._answered | self._finished:
            self._judge()

    def _judge(self) -> None:
        """Name the rank that the others wait for."""
        unseen = [
            self.nodes[node] for node, _ in sorted(self._members.keys() - self._answered - self._finished)
        ]
        found = blame.verdict(self._sightings, self._looking, unseen=unseen, now=time.time())
        if found is not None:
            self._tell_failure(load(Failure, asdict(found)))
        elif not self._failures:
            self._collect(
                _loss(self.hub, self.nodes[self.hub], f"{self._looking}, and no rank was found", time.time())
            )
        else:
            self._decide()

    def _collect(self, failure: Failure) -> None:
        """Take a failure; a rank that ends while everyone looks is not the first."""
        if self._looking and failure.rank is not None and failure.time >= self._looked:
            return
        self._failures.append(failure)
        if len(self._failures) == 1:
            # Who only lost another rank may end before that one does.
            follows = blame.is_consequence(failure.error)
            settle = self.timeouts.settle_echo if follows else self.timeouts.settle
            asyncio.get_running_loop().call_later(settle, self._decide)

    def _decide(self) -> None:
        if self._failures:
            self._tell_failure(blame.first(self._failures, list(self._ends.values()), world=self._world))

    def _by_our_clock(self, place: Place, what: Timed) -> Timed:
        """With its time by our clock, where the participant's differs: what came first is the cause."""
        apart = self._clocks.get(place, 0.0)
        return replace(what, time=what.time + apart) if abs(apart) > CLOCKS else what

    @property
    def _world(self) -> int:
        """How many ranks there are."""
        return len(self.members) * (1 if self.me.mode == "exec" else self.me.nproc_per_node)

    def _tell_failure(self, failure: Failure) -> None:
        self._tell_all({"type": "failed", "failure": asdict(failure), "lost": pack(self._gone)})


@dataclass(eq=False, kw_only=True)
class _Spoke(Link):
    _own: list[Failure] = field(init=False, default_factory=list)

    async def meet(self) -> None:
        self._start(self._look_out())
        hub = await self._reach()
        self._peers[self.hub, None] = hub
        self._start(self._listen((self.hub, None), hub))
        self._start(self._beat())
        # The hub decides within the time that is left to us; the rest is for one that does not.
        bound = self.waiting.left() + self.timeouts.handshake
        if self.muster:  # whose trial may begin when the time is up
            bound += self.timeouts.reach + self.timeouts.handshake
        if not (await asyncio.wait([self._met], timeout=bound))[0]:
            raise _NoHub(f"{self._hub} did not decide within {bound:g} s: see its output")
        self._met.result()

    @property
    def _hub(self) -> str:
        return f"node {self.hub} ({self.nodes[self.hub]}) at {self.endpoint}"

    async def _reach(self) -> Wire:
        """Connect until the hub has proved itself and taken us in."""
        pause, since, why = 0.1, None, ""
        reached = time.monotonic() + self.timeouts.answer
        while True:
            self.waiting.check(lambda: f"{self._hub} has not started yet")
            if self.muster and len(self.muster.candidates) > 1 and time.monotonic() > reached:
                raise _NoHub(f"{self._hub} did not answer within {self.timeouts.answer:g} s")
            nap = min(pause, self.waiting.nap())
            begun = since or time.monotonic()
            until = begun + self.timeouts.connect
            try:
                return await self._introduce(*await _dial(self.found, until), until)
            except ConnectionRefusedError as error:
                since, why = None, ""
                if self.waiting.since_begun() > self.timeouts.refused:
                    why = f"{os.strerror(errno.ECONNREFUSED)}, {self.timeouts.refused:g} s after it began"
                    raise self._out_of_reach(why) from error
            except (Closed, ConnectionError) as error:  # a hub that is just ending, or a stranger
                since, why = begun, why or str(error)
                if time.monotonic() + nap > until:
                    raise self._no_hub(why) from error
            except OSError as error:
                if why:
                    raise self._no_hub(why) from error
                raise self._out_of_reach(_reason(error)) from error
            await asyncio.sleep(nap)
            pause = min(1.0, 1.5 * pause)

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, until: float
    ) -> Wire:
        try:
            async with asyncio.timeout_at(until):
                wire = await greet(reader, writer, self.key, hub=False)
                wire.send({"type": "hello", "identity": asdict(self.me), "left": self.waiting.left()})
                answer = await wire.receive()
            if answer != WELCOME:
                raise _refusal(answer)
            return wire
        except BaseException as error:
            writer.transport.abort()
            match error:
                case TimeoutError():
                    raise Closed("it says nothing") from error
                case WrongKey():
                    raise Unavailable(
                        f"the hub at {self.endpoint} does not hold the join key of {self.me}: it is another "
                        f"run's, or the key file is not the same on both nodes: {PORT_ADVICE}"
                    ) from error
                case WireError() if not isinstance(error, Closed):
                    raise self._no_hub(str(error)) from error
            raise

    def _out_of_reach(self, why: str) -> Refusal:
        text, there = f"{self.me} cannot reach {self._hub}: {why}", self.waiting.begun_at
        if there not in (None, self.found[1][0]):
            first = self.nodes[self.hub]
            return BadInput(f"{text}; to itself {first} is {there}: {NAME_ADVICE} {there}")
        return _NoHub(
            f"{text}: is this a network that joins the nodes (--master-addr), or is a firewall between them?"
        )

    def _no_hub(self, why: str) -> Unavailable:
        return _NoHub(
            f"something that is no apptrain hub answers on {self.endpoint}, where node {self.hub} "
            f"({self.nodes[self.hub]}) should: {why}: {PORT_ADVICE}"
        )

    def _report(self, message: Message) -> None:
        if failure := message.get("failure"):
            self._own.append(load(Failure, failure))
        for hub in self._peers.values():
            hub.send(message)

    def _hear(self, _: Place, /, message: Message) -> None:
        match message:
            case {"type": "beat"}:
                pass
            case {"type": "try"} if not self._met.done() and reach.ways(message):
                self._start(self._try(message))
            case {"type": "move", "address": str(address)} if not self._met.done():
                self._start(self._move(plain(address)))
            case {"type": "go", "members": str(members)} if not self._met.done():
                self.members = self._ordered(unpack(members, len(self.nodes)))
                self._met.set_result(None)
            case {"type": "end"} if not self._met.done():
                self._met.set_exception(_refusal(message))
            case _:
                self._told(message)

    async def _move(self, address: str) -> None:
        """Take the hub's address for this one, if the hub is there, and say how that went."""
        contact, why = "", ""
        try:
            async with asyncio.timeout(self.timeouts.reach):
                await self._visit(address)
            contact = await self.move(address)
            self.moved = address
        except OSError as error:
            why = _reason(error)
        except (Refusal, WireError) as error:
            why = str(error)
        self._report({"type": "moved", "address": address, "contact": contact, "why": why})

    async def _visit(self, address: str) -> None:
        found = await _resolve(address, self.found[1][1])
        reader, writer = await _dial(found, asyncio.get_running_loop().time() + self.timeouts.reach)
        try:
            wire = await greet(reader, writer, self.key, hub=False)
            wire.send(VISIT)
            if await wire.receive() != WELCOME:
                raise WireError("it sent a message that has no meaning here")
        finally:
            writer.transport.abort()

    def _lose(self, _: Place, /, why: str, at: float) -> None:
        if self._met.done():
            loss = _loss(self.hub, self.nodes[self.hub], why, at)
            self._end(Failed(min([*self._own, loss], key=lambda failure: failure.time), (self.hub,)))
        else:
            text = f"{self._hub} was lost before the start: {why}: see its output"
            self._met.set_exception(_NoHub(text))


class _Waiting:
    """The bounds of waiting for others, the same for hub and spokes."""

    def __init__(
        self,
        timeouts: Timeouts,
        say: Callable[[str], None],
        never_started: Callable[[], str | None] | None,
        begun: Callable[[], str | None] | None,
    ) -> None:
        self._timeouts, self._say, self._never_started, self._begun = timeouts, say, never_started, begun
        self._gone: str | None = None
        self._seen: float | None = None
        self.begun_at: str | None = None
        """Where node 0 is about to listen; None where it was not seen to have begun."""
        self._began = time.monotonic()
        self._deadline = self._began + timeouts.join
        self._remind = self._began + timeouts.remind

    async def look(self) -> None:
        """Ask who never started, and whether node 0 has begun: in threads, for the file system that knows
        may stall."""
        with contextlib.suppress(OSError):
            if self._never_started:
                self._gone = await asyncio.to_thread(self._never_started)
            if self._begun and self._seen is None:
                self.begun_at = await asyncio.to_thread(self._begun)
                self._seen = None if self.begun_at is None else time.monotonic()

    def check(self, who: Callable[[], str]) -> None:
        """Say who is missing when it is time. Unavailable: the time is up, or someone never started."""
        now = time.monotonic()
        if self._gone:
            raise Unavailable(self._gone)
        if now >= self._deadline:
            bound = f"{self._timeouts.join:g} s (--join-timeout)"
            raise Unavailable(f"{who()} within {bound}: see the output of what is missing")
        if now >= self._remind:
            self._remind = now + self._timeouts.remind
            self._say(f"{who()} after {now - self._began:.0f} s: waiting {self._deadline - now:.0f} s more")

    def since_begun(self) -> float:
        """Seconds since node 0 was seen to have begun."""
        return 0.0 if self._seen is None else time.monotonic() - self._seen

    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def shorten(self, left: float) -> None:
        """Wait no longer than someone who began earlier."""
        self._deadline = min(self._deadline, time.monotonic() + left)

    def nap(self) -> float:
        """Seconds until something may be due."""
        due = min(self._deadline, self._remind) - time.monotonic()
        return max(0.0, min(due, self._timeouts.poll / 4))


def _loss(node_rank: int, node: str, why: str, at: float) -> Failure:
    return Failure(
        node_rank=node_rank,
        node=node,
        rank=None,
        status=LOST,
        signal=0,
        time=at,
        error=f"{outcome.LOST}{why}",
    )


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else "no answer"  # asyncio's own texts hide the system's


def _end(refusal: Refusal) -> Message:
    return {"type": "end", "status": refusal.status, "text": str(refusal)}


def _refusal(message: Message) -> Exception:
    match message:
        case {"type": "end", "status": status, "text": str(text)}:
            refusal = BadInput(plain(text)) if status == BAD_INPUT else Unavailable(plain(text))
            refusal.told = True
            return refusal
    return WireError("it sent a message that has no meaning here")


def _hello(message: Message) -> tuple[Identity, float]:
    match message:
        case {"type": "hello", "identity": identity, "left": float(left)}:
            return load(Identity, identity), left
    raise WireError("it did not say who it is")


async def _resolve(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The family and socket address of the first address that the name has. BadInput: it has none."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        try:
            found = await asyncio.get_running_loop().getaddrinfo(address, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise BadInput(
                f"the rendezvous address {address} does not resolve to an address: "
                "give one that does (--master-addr, --nodes)"
            ) from error
    return found[0][0], found[0][4]


async def _dial(
    found: tuple[socket.AddressFamily, Any], until: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection. ConnectionRefusedError: nobody listens. OSError, TimeoutError among them: no way."""
    family, where = found
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        set_options(sock)
        async with asyncio.timeout_at(until):
            await asyncio.get_running_loop().sock_connect(sock, where)
        if sock.getsockname() == where:  # TCP's simultaneous open with itself
            raise ConnectionRefusedError
        return await asyncio.open_connection(sock=sock)
    except BaseException:
        sock.close()
        raise
