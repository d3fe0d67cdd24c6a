"""Node 0's end of the meeting: it listens, hears newcomers out, has all try their ways, and says go.

It knows who may be one of us, and that everyone must have node 0 at the same address. How the job ends, from
the reports that follow, is decided in job_state.py; `_step` carries out what it says.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

from entrypoint.bitset import NONE, Bits
from entrypoint.errors import BadInput, Refusal, Unavailable
from entrypoint.meet import door, job_state, messages, reach
from entrypoint.meet.claims import Identity, ParticipantId, disagreement, missing
from entrypoint.meet.door import AuthListener, PendingConnection
from entrypoint.meet.job_state import JobState, Lost, Now, Say, Settle, StartTimer, TellAll
from entrypoint.meet.link import Link
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
from entrypoint.meet.terms import NAME_ADVICE, PORT_ADVICE
from entrypoint.meet.wire import Wire, WireError, greet
from entrypoint.plain import plain
from entrypoint.watch.reports import End, Failure

REPORTS = 16
"""Addresses of strangers that the hub names."""
CLOCKS = 1.0
"""Seconds by which the nodes' clocks may differ and still be believed."""
REPORT_KINDS = get_args(Report)
Timed = TypeVar("Timed", Failure, End)
LIST_ADVICE = "start every node with the same list of nodes"


@dataclass(eq=False, kw_only=True)
class Hub(Link):
    _door: AuthListener | None = field(init=False, default=None)
    _members: dict[ParticipantId, tuple[Identity, str]] = field(init=False)
    _reached: dict[ParticipantId, str] = field(init=False)
    """The address of ours at which each has us."""
    _sent: dict[ParticipantId, str] = field(init=False, default_factory=dict)
    """Who was asked to take another one."""
    _refused: list[Wire] = field(init=False, default_factory=list)
    _reported: set[str] = field(init=False, default_factory=set)
    _trial: reach.ReachabilityTest = field(init=False, default_factory=reach.ReachabilityTest)
    _trying: frozenset[ParticipantId] = field(init=False, default=frozenset())
    """Who takes part in the trial."""
    _job: JobState | None = field(init=False, default=None)
    """Known when all have met; remade by `_step` alone."""
    _behind: dict[ParticipantId, float] = field(init=False, default_factory=dict)
    """How far each participant's clock is behind ours, in seconds, by its last heartbeat."""
    _began: float = field(init=False, default=0.0)
    """When all had met, in Unix seconds."""

    def __post_init__(self) -> None:
        self._members = {self.me.place: (self.me, self.endpoint)}
        self._reached = {self.me.place: str(self.found[1][0])}

    async def meet(self) -> None:
        room = self._room()
        self._door = AuthListener(
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
            self._send_all(messages.end_of(refusal))
            raise

    async def close(self) -> None:
        if self._job:
            self._step(self.me.place, Settle())
        if self._door:
            await self._door.end()
        await asyncio.gather(super().close(), *(wire.close() for wire in self._refused))

    @property
    def elsewhere(self) -> dict[str, str]:
        return self._trial.elsewhere

    @property
    def findings(self) -> dict[str, Mapping[str, str]]:
        claims = [claim for _, (claim, _) in sorted(self._members.items())]
        return {claim.name: claim.findings for claim in claims if claim.findings}

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

    async def _admit(
        self, guest: PendingConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
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
            claim, left = message.identity, message.left
            reach.check(claim.contact)
            if (claim.job_id, claim.attempt) != (self.me.job_id, self.me.attempt):
                wire.send(messages.pack(messages.end_of(Unavailable(self._other_run(claim)))))
                raise WireError(f"it is of job {claim.job_id}, attempt {claim.attempt}")
        except WireError as error:
            self._refuse(guest.address, str(error))
            wire.send(messages.pack(Refused()))
            await wire.close()
            return
        guest.welcome()
        await self._take(claim, guest, wire, left)

    async def _take(self, claim: Identity, guest: PendingConnection, wire: Wire, left: float) -> None:
        if self._met.done() or (objection := self._objection(claim, guest.address)):
            self._refused.append(wire)
            if not self._met.done():
                self._met.set_exception(BadInput(plain(objection)))
            return
        self.waiting.shorten(left)
        self._members[claim.place], self._peers[claim.place] = (claim, guest.address), wire
        self._reached[claim.place] = guest.came_to
        wire.send(messages.pack(Welcome()))
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
                self._peers[place].send(messages.pack(Move(address)))
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

    def _take_move(self, place: ParticipantId, address: str, contact: str) -> None:
        if self._sent.get(place) != address or self._met.done():
            return
        claim, peer = self._members[place]
        self._members[place] = (replace(claim, contact=contact), peer)
        self._reached[place] = address
        self._go_if_complete()

    def _give_up(self, place: ParticipantId, address: str, why: str) -> None:
        """Where a participant cannot have us at this address, or has not for too long."""
        if self._sent.get(place) == address != self._reached[place] and not self._met.done():
            text = f"{self._two_addresses(place, address)}, which {self.nodes[place[0]]} cannot use: {why}"
            self._met.set_exception(BadInput(f"{text}: {NAME_ADVICE} with an address that all nodes reach"))

    def _two_addresses(self, place: ParticipantId, address: str) -> str:
        """What a participant takes for our address, and what another one does."""
        other = next(node for (node, _), where in self._reached.items() if where == address)
        first, here, there = (self.nodes[node] for node in (self.hub, place[0], other))
        return f"{first} is {self._reached[place]} on {here}, and {address} on {there}"

    def _try_ways(self) -> None:
        """Those who are there try to reach one another, once they agree where the hub is."""
        if not self._have_one_address():
            return
        claims = {node: claim.contact for (node, _), (claim, _) in self._members.items() if claim.contact}
        self._trial = trial = reach.ReachabilityTest(claims, self.nodes, number=self._trial.number + 1)
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
                    self._peers[place].send(messages.pack(order))
        bound = self.timeouts.reach + self.timeouts.handshake
        asyncio.get_running_loop().call_later(bound, self._go_if_tried, trial, True)
        self._go_if_tried(trial)

    def _go_if_tried(self, trial: reach.ReachabilityTest, late: bool = False) -> None:
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
        ranks = 1 if self.me.mode == "exec" else self.me.nproc_per_node
        self._job = self._state_of(members, world=len(members) * ranks)
        self._began = time.time()
        self._met.set_result(None)
        self._send_all(Go(members))
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
        present = Bits.of(state.index(place) for place in self._members)
        active = Bits.of(state.index(place) for place in self._members if place[0] in members)
        return replace(state, present=present, active=active)

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
        packed = messages.pack(message)
        for wire in [*self._peers.values(), *self._refused]:
            wire.send(packed)

    def _report(self, message: Report | Tried | Moved) -> None:
        self._hear(self.me.place, message)

    def _hear(self, place: ParticipantId, /, message: Message) -> None:
        match message:
            case Beat(time=then):
                self._behind[place] = time.time() - then
            case Tried():
                if not self._met.done():  # or it is late: whether they meet is decided
                    self._trial.take(place[0], message)
                    self._go_if_tried(self._trial)
            case Moved(address=address, contact=contact, why=why):
                reach.check(contact)
                if why:
                    self._give_up(place, address, why)
                else:
                    self._take_move(place, address, contact)
            case Ended(end=end) if self._job:
                self._step(place, Ended(self._by_our_clock(place, end)))
            case Fail(failure=failure) if self._job:
                self._step(place, Fail(self._by_our_clock(place, failure)))
            case _ if self._job and isinstance(message, REPORT_KINDS):
                self._step(place, message)
            case _:
                raise WireError(messages.UNKNOWN)

    def _lose(self, place: ParticipantId, /, why: str, at: float) -> None:
        if place not in self._members:
            return
        lost, _ = self._members[place]
        if self._met.done():
            self._step(place, Lost(name=lost.name, who=str(lost), why=why, at=at))
        else:
            del self._members[place], self._reached[place]
            self._sent.pop(place, None)
            self._peers.pop(place).abort()
            self.say(f"{lost} left before the start ({why}): waiting for it again")

    def _step(self, place: ParticipantId, event: job_state.Event) -> None:
        """Takes what happened to the job into its state, and carries out what follows. WireError: the
        participant may not say that now."""
        if self._job is None or self._over:
            return
        loop = asyncio.get_running_loop()
        now = Now(wall=time.time(), steady=loop.time())
        try:
            self._job, effects = job_state.step(self._job, place, event, now)
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
                    self.say(text)
                case StartTimer(seconds, timer):
                    loop.call_later(seconds, self._step, self.me.place, timer)

    def _tell_all(self, message: Told) -> None:
        self._send_all(message)
        self._told(message)

    def _by_our_clock(self, place: ParticipantId, what: Timed) -> Timed:
        """With its time by our clock, if the participant's differs: what came first is the cause. No rank
        ended before all had met."""
        behind = self._behind.get(place, 0.0)
        if abs(behind) <= CLOCKS:
            return what
        return replace(what, time=max(what.time + behind, self._began))
