"""Node 0's end of the meeting: it listens, hears newcomers out, has all try their ways, and says go.

It knows who may be one of us, and that everyone must have node 0 at the same address. How the job ends, from
the reports that follow, is decided in job_state.py; `_step` carries out what it says.
"""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, TypeVar, get_args

from entrypoint.core.bitset import NONE, Bits
from entrypoint.core.errors import BadInput, Refusal, Unavailable
from entrypoint.core.frozen import dataclass
from entrypoint.meet import door, job_state, messages, reach
from entrypoint.meet.door import AuthListener, ConnectionHandler, PendingConnection
from entrypoint.meet.identity import Identity, ParticipantId, disagreement, missing, named
from entrypoint.meet.job_state import FailuresCollected, JobState, Lost, Now, Say, StartTimer, TellAll
from entrypoint.meet.link import Crew, Link
from entrypoint.meet.messages import (
    Beat,
    Ended,
    Fail,
    Failed,
    Go,
    Hello,
    Message,
    Move,
    Moved,
    Refused,
    Report,
    Told,
    Tried,
    Visit,
    Welcome,
)
from entrypoint.meet.reports import End, Failure
from entrypoint.meet.terms import NAME_ADVICE
from entrypoint.meet.wire import Wire, WireError, encode, greet

REPORTS = 16
"""Addresses of strangers that the hub names."""
CLOCKS = 1.0
"""Seconds by which the nodes' clocks may differ and still be believed."""
BEATS = 12
"""How many heartbeats show how far a clock differs: a minute's. If the network is gone for a while, all of
that time are late, and an older one must be left."""
COLLECT_AFTER = 50_000
"""Python looks for garbage once so many objects more are there than before."""
REPORT_KINDS = get_args(Report)
Timed = TypeVar("Timed", Failure, End)
LIST_ADVICE = "start every node with the same list of nodes"


@dataclass(eq=False, kw_only=True)
class Hub(Link, ConnectionHandler):
    """The first node's end of the links: it decides for all."""

    _door: AuthListener | None = field(init=False, default=None)
    _members: dict[ParticipantId, tuple[Identity, str]] = field(init=False)
    _reached: dict[ParticipantId, str] = field(init=False)
    """The address of ours at which each has us."""
    _sent: dict[ParticipantId, Move] = field(init=False, default_factory=dict)
    """Who was asked to take another one, and has not answered yet."""
    _refused: list[Wire] = field(init=False, default_factory=list)
    _reported: set[str] = field(init=False, default_factory=set)
    _trial: reach.ReachabilityTest = field(init=False, default_factory=reach.ReachabilityTest)
    _job: JobState | None = field(init=False, default=None)
    """Known when all have met; remade by `_step` alone."""
    _behind: dict[ParticipantId, deque[float]] = field(init=False, default_factory=dict)
    """How far each participant's clock is behind our steady one, in seconds, by each of its last heartbeats:
    the least is nearest to it, as it has the least of their time on the way."""

    def __post_init__(self) -> None:
        self._members = {self.me.participant: (self.me, self.endpoint)}
        self._reached = {self.me.participant: str(self.found[1][0])}

    async def meet(self) -> None:
        with _rare_garbage_collections():
            await self._meet()

    async def _meet(self) -> None:
        room = self._room()
        self._door = AuthListener(self._open(), self, room=room, seconds=self.timeouts.handshake)
        self._start(self._look_out())
        self._start(self._beat())
        self._go_if_complete()
        try:
            while not self._met.done():
                if self.muster and not self.waiting.left() and len(self._members) >= self.muster.least:
                    if self._trial.participants != self._members.keys():
                        self._try_ways()
                    await asyncio.wait([self._met], timeout=0.2)
                else:
                    if self.waiting.is_due():
                        self.waiting.tell(self._missing())
                    await asyncio.wait([self._met], timeout=self.waiting.nap())
            self._met.result()
        except Refusal as refusal:
            self._send_all(messages.end_of(refusal))
            raise

    async def close(self) -> None:
        if self._job:
            self._step(self.me.participant, FailuresCollected())
        if self._door:
            await self._door.end()
        await asyncio.gather(super().close(), *(wire.close() for wire in self._refused))

    @property
    def elsewhere(self) -> dict[str, str]:
        return self._trial.elsewhere

    @property
    def findings(self) -> dict[str, Mapping[str, str]]:
        everyone = [identity for _, (identity, _) in sorted(self._members.items())]
        found: dict[str, Mapping[str, str]] = {}
        for one in everyone:
            if one.findings:  # each task of a node may have its own
                found[one.name] = {**found.get(one.name, {}), **one.findings}
        return found

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
                "too-few-open-files",
                f"node 0 needs {door.files_for(door.LEAST, beside=self._expected)} open files to meet all "
                f"others and may have {hard} (ulimit -Hn): have the hard limit raised on the nodes",
            )
        if room < wanted:
            self.local.say(
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
                        text = f"the join port of {self.endpoint} is taken on {self.me}: "
                        text += self.local.port_advice
                        raise Unavailable("join-port-taken", text) from error
                    if one != family:  # that a host may have none of
                        continue
                    raise BadInput(
                        "join-address-not-own",
                        f"{self.me} cannot listen on {self.endpoint}: {os.strerror(error.errno or 0)}: "
                        "the address must be one of node 0's own (--master-addr)",
                    ) from error
            failed.pop_all()
        return sockets

    async def admit(
        self, pending: PendingConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Hear a newcomer out: a participant stays, a stranger is named and sent away."""
        wire = await greet(reader, writer, self.key, hub=True)
        try:
            message = messages.load(await wire.receive(), self._extent)
            if isinstance(message, Visit):
                wire.send(messages.pack(Welcome()))
                await wire.close()
                return
            if not isinstance(message, Hello):
                raise WireError("it did not say who it is")
            identity, left = message.identity, message.left
            reach.check(identity.contact)
            if (identity.job_id, identity.attempt) != (self.me.job_id, self.me.attempt):
                wire.send(
                    messages.pack(messages.end_of(Unavailable("join-other-run", self._other_run(identity))))
                )
                raise WireError(f"it is of job {identity.job_id}, attempt {identity.attempt}")
        except WireError as error:
            self.refuse(pending.address, str(error))
            wire.send(messages.pack(Refused()))
            await wire.close()
            return
        pending.authenticate()
        await self._take(identity, pending, wire, left)

    async def _take(self, identity: Identity, pending: PendingConnection, wire: Wire, left: float) -> None:
        if self._met.done() or (objection := self._objection(identity, pending.address)):
            self._refused.append(wire)
            if not self._met.done():
                self._met.set_exception(BadInput("join-disagreement", objection))
            return
        self.waiting.shorten(left)
        self._members[identity.participant], self._peers[identity.participant] = (
            (identity, pending.address),
            wire,
        )
        self._reached[identity.participant] = pending.came_to
        wire.send(messages.pack(Welcome()))
        self._go_if_complete()
        await self._listen(identity.participant, wire)

    def _objection(self, identity: Identity, address: str) -> str:
        """Why this participant cannot be one of us; empty where it can."""
        if text := disagreement(self.me, identity):
            return text
        local_ranks = self.me.local_ranks
        if identity.node_rank not in range(self.me.nnodes) or identity.local_rank not in local_ranks:
            return (
                f"a participant from {address} says it is {identity}, outside the {self.me.nnodes} nodes "
                f"with {len(local_ranks)} tasks each that {self.me} knows: {LIST_ADVICE}"
            )
        if identity.participant in self._members:
            other, where = self._members[identity.participant]
            return (
                f"two participants claim one place: {other} at {where} and {identity} at {address}: "
                "start each once, with its own --node-rank"
            )
        listed = self.nodes[identity.node_rank]
        if identity.name != listed:
            return (
                f"the nodes do not agree: node {identity.node_rank} is {listed} in the list of {self.me} "
                f"and calls itself {identity.name} at {address}: {LIST_ADVICE}"
            )
        return ""

    def _other_run(self, identity: Identity) -> str:
        return (
            f"the hub at {self.endpoint} is of job {self.me.job_id}, attempt {self.me.attempt}, "
            f"and {identity} is of job {identity.job_id}, attempt {identity.attempt}: "
            f"{self.local.port_advice}"
        )

    def _go_if_complete(self) -> None:
        if self._sent:
            return  # the last of them comes here again: a look at everyone at each answer would be too many
        if self.muster:
            absent = set(self.muster.absent)
            if len(self._members) < self.me.nnodes - len(absent):
                return  # without a look at everyone each time that somebody comes
            present = self._present
            expected = set(range(self.me.nnodes)) - absent
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
        own = self._reached[self.me.participant]
        found = Counter(where for (node, _), where in self._reached.items() if node != self.hub)
        return max(found, key=lambda where: (found[where], where == own, where), default=own)

    def _have_one_address(self) -> bool:
        """Whether everyone has us at the same one, and is not about to take another; those who do not are
        asked to take it."""
        if not self.everywhere:
            return True
        order = Move(self._address)
        astray = [one for one, where in self._reached.items() if where != order.address]
        if new := [one for one in astray if one not in self._sent]:  # one move at a time
            self.local.say(self._two_addresses(new[0], order.address) + f": {order.address} is taken")
        for participant in new:
            self._sent[participant] = order
            if participant == self.me.participant:
                self._start(self._move_ourselves(order))
            else:
                self._peers[participant].send(messages.pack(order))
            self._bound_move(participant, order)
        return not self._sent

    def _bound_move(self, participant: ParticipantId, order: Move) -> None:
        bound = self.timeouts.reach + self.timeouts.handshake
        asyncio.get_running_loop().call_later(bound, self._give_up, participant, order)

    async def _move_ourselves(self, order: Move) -> None:
        try:
            async with asyncio.timeout(self.timeouts.reach + self.timeouts.handshake):
                contact = await self.local.move(order.address)
        except (Refusal, OSError) as error:
            why = str(error) or "no answer"
            if order.address != self._address:  # those who had us there have left
                self._take_move(self.me.participant, Moved(order.address, "", why))
            elif not self._met.done():
                self._met.set_exception(
                    error if isinstance(error, Refusal) else Unavailable("join-no-new-address", why)
                )
            return
        self.moved = order.address
        self._take_move(self.me.participant, Moved(order.address, contact, ""))

    def _take_move(self, participant: ParticipantId, answer: Moved) -> None:
        order = self._sent.get(participant)
        if order is None or order.address != answer.address or self._met.done():
            return
        if answer.why:
            self._give_up(participant, order, answer.why)
            return
        identity, peer = self._members[participant]
        self._members[participant] = (replace(identity, contact=answer.contact), peer)
        self._reached[participant] = answer.address
        del self._sent[participant]
        self._go_if_complete()

    def _give_up(self, participant: ParticipantId, order: Move, why: str = "") -> None:
        """Where a participant cannot have us at this address, or (without `why`) has not answered for too
        long."""
        if self._sent.get(participant) is not order or self._met.done():
            return
        if order.address == self._address:
            node = self.nodes[participant[0]]
            text = f"{self._two_addresses(participant, order.address)}, which {node} cannot use: "
            text += why or "it does not say how that went"
            self._met.set_exception(
                BadInput("join-two-addresses", f"{text}: {NAME_ADVICE} with an address that all nodes reach")
            )
        elif why:  # those who had us there have left, and it may stay where it is
            del self._sent[participant]
            self._go_if_complete()
        else:  # it may take that address yet: nobody goes before that is known
            self._bound_move(participant, order)

    def _two_addresses(self, participant: ParticipantId, address: str) -> str:
        """What a participant takes for our address, and what others do: `_address`."""
        other = next(node for (node, _), where in self._reached.items() if where == address)
        first, here, there = (self.nodes[node] for node in (self.hub, participant[0], other))
        return f"{first} is {self._reached[participant]} on {here}, and {address} on {there}"

    def _try_ways(self) -> None:
        """Those who are there try to reach one another, once they agree where the hub is."""
        if not self._have_one_address():
            return
        contacts = {
            node: identity.contact for (node, _), (identity, _) in self._members.items() if identity.contact
        }
        self._trial = trial = reach.ReachabilityTest(
            contacts, self.nodes, number=self._trial.number + 1, participants=frozenset(self._members)
        )
        if trial.clash:
            self._met.set_exception(BadInput("join-address-clash", trial.clash))
            return
        for participant, (identity, _) in self._members.items():
            if identity.contact:
                order = trial.order(identity.node_rank)
                if participant == self.me.participant:
                    self._start(self._try(order))
                else:
                    self._peers[participant].send(messages.pack(order))
        bound = self.timeouts.reach + self.timeouts.handshake
        asyncio.get_running_loop().call_later(bound, self._go_if_tried, trial, True)
        self._go_if_tried(trial)

    def _go_if_tried(self, trial: reach.ReachabilityTest, late: bool = False) -> None:
        """Once all have said that they reach the others, they go."""
        if self._met.done() or trial is not self._trial or not (trial.complete or late):
            return
        # Last, as this looks at everyone: once, and not at each answer.
        if trial.participants == self._members.keys():
            if text := trial.verdict():
                self._met.set_exception(Unavailable("nodes-not-reachable", text))
            else:
                self._go()

    def _go(self) -> None:
        present = self._ordered(self._present)
        members = present[: self.muster.most] if self.muster else present
        try:
            if self.muster:
                self.local.seal(members)
        except Refusal as refusal:
            self._met.set_exception(refusal)
            return
        ranks = 1 if self.me.mode == "exec" else self.me.nproc_per_node
        self._job = self._state_of(members, world=len(members) * ranks)
        self._met.set_result(Crew(members=members, since=time.monotonic()))
        absent = set(range(self.me.nnodes)).difference(members)
        self._send_all(Go(tuple(sorted(absent))))
        if self._door:
            self._door.close()

    def _state_of(self, members: Sequence[int], world: int) -> JobState:
        state = JobState(
            nodes=self.nodes,
            hub=self.hub,
            local_ranks=len(self.me.local_ranks),
            bounds=self.timeouts,
            present=NONE,
            active=NONE,
            world=world,
        )
        present = Bits.of(state.index(one) for one in self._members)
        taking_part = set(members)
        active = Bits.of(state.index(one) for one in self._members if one[0] in taking_part)
        return replace(state, present=present, active=active)

    def _missing(self) -> str:
        if self._trial.participants == self._members.keys():
            return "all nodes have come, and try to reach one another"
        everyone = [(node, local) for node in range(self.me.nnodes) for local in self.me.local_ranks]
        gone = [one for one in everyone if one not in self._members]
        # Of those taken for lost none is missed, unless the others are too few without them.
        missed = [one for one in gone if not self.muster or one[0] not in self.muster.absent]
        if self._sent and not missed:
            who = named(list(self._sent), self.nodes)
            return f"all nodes have come, but another address of node 0's has not been taken by {who}"
        return missing(missed or gone, self._expected, self.nodes)

    def refuse(self, address: str, why: str) -> None:
        if self._met.done() or address in self._reported or len(self._reported) > REPORTS:
            return
        self._reported.add(address)
        if len(self._reported) > REPORTS:
            self.local.say("further strangers are refused without a word")
        else:
            self.local.say(f"refused a stranger from {address} on {self.endpoint}: {why}")

    def _send_all(self, message: Message) -> None:
        packed = encode(messages.pack(message))
        for wire in [*self._peers.values(), *self._refused]:
            wire.send(packed)

    def _report(self, message: Report | Tried | Moved) -> None:
        self._hear(self.me.participant, message)

    def _hear(self, participant: ParticipantId, /, message: Message) -> None:
        match message:
            case Beat(time=then):
                beats = self._behind.setdefault(participant, deque(maxlen=BEATS))
                beats.append(time.monotonic() - then)
            case Tried():
                if not self._met.done():  # or it is late: whether they meet is decided
                    self._trial.take(participant[0], message)
                    self._go_if_tried(self._trial)
            case Moved():
                reach.check(message.contact)
                self._take_move(participant, message)
            case Ended(end=end) if self._job:
                self._step(participant, Ended(self._by_our_clock(participant, end)))
            case Fail(failure=failure) if self._job:
                self._step(participant, Fail(self._by_our_clock(participant, failure)))
            case _ if self._job and isinstance(message, REPORT_KINDS):
                self._step(participant, message)
            case _:
                raise WireError(messages.UNKNOWN)

    def _lose(self, participant: ParticipantId, /, why: str, at: float) -> None:
        if participant not in self._members:
            return
        lost, _ = self._members[participant]
        if self._met.done():
            self._step(participant, Lost(name=lost.name, who=str(lost), why=why, at=at))
        else:
            del self._members[participant], self._reached[participant]
            self._peers.pop(participant).abort()
            self.local.say(f"{lost} left before the start ({why}): waiting for it again")
            # It may come again and have us elsewhere: what was tried before counts for nothing then.
            self._trial = reach.ReachabilityTest(number=self._trial.number)
            self._sent.pop(participant, None)
            self._go_if_complete()  # where all others have waited for its answer alone

    def _doubt(self, since: float) -> str:
        """If nothing was heard since then from any other node, this one may be cut off from all of them. One
        that is done may have left, and is not missed; as long as it is here it sends heartbeats, too."""
        job = self._job
        if job is None:
            return ""
        others = set()
        for participant, wire in self._peers.items():
            if participant[0] == self.hub:
                continue
            if wire.heard > since:
                return ""
            if job.index(participant) not in job.finished:
                others.add(participant[0])
        if not others:
            return ""
        if len(others) == 1:
            return f": it is gone, or {self.me.name} is cut off"
        return f", nor from any other node: {self.me.name} may be cut off"

    def _step(self, participant: ParticipantId, event: job_state.Event) -> None:
        """Takes what happened to the job into its state, and carries out what follows. WireError: the
        participant may not say that now."""
        if self._job is None or self._over:
            return
        loop = asyncio.get_running_loop()
        now = Now(wall=time.time(), steady=loop.time())
        try:
            self._job, effects = job_state.step(self._job, participant, event, now)
        except WireError:
            raise
        except Exception as error:  # nobody could decide anything any more: all end, and say why
            bug = job_state.loss(self.hub, self.nodes[self.hub], self._own_bug(error), now.wall)
            self._tell_all(Failed(bug))
            return
        for effect in effects:
            match effect:
                case TellAll(message):
                    self._tell_all(message)
                case Say(text):
                    self.local.say(text)
                case StartTimer(seconds, timer):
                    loop.call_later(seconds, self._step, self.me.participant, timer)

    def _tell_all(self, message: Told) -> None:
        self._send_all(message)
        self._told(message)

    def _by_our_clock(self, participant: ParticipantId, what: Timed) -> Timed:
        """With its time by our clock, if the participant's differs: what came first is the cause. No rank
        ended before all had met. Our clock may have been set since then: all is known by the steady one."""
        wall = time.time() - time.monotonic()
        beats = self._behind.get(participant)
        behind = min(beats) + wall if beats else 0.0
        if abs(behind) <= CLOCKS:
            return what
        return replace(what, time=max(what.time + behind, self._met.result().since + wall))


@contextlib.contextmanager
def _rare_garbage_collections() -> Iterator[None]:
    """For a time in which many objects are made and almost all of them stay. Python's own threshold (700) has
    it read again and again what thousands of participants keep: a fifth of the hub's CPU time with 16,384.
    What strangers leave is still collected."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
