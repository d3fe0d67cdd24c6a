"""The side of a participant that is not the hub: it finds the hub, proves itself, and then hears what all are
told. Begin at `Spoke.meet`.

`_reach` tells a hub from a stranger at its address, and decides when to give one up.
"""

import asyncio
import errno
import os
import socket
import time
from dataclasses import field, replace
from typing import Any

from entrypoint.core.errors import BadInput, Refusal, Unavailable
from entrypoint.core.frozen import dataclass
from entrypoint.core.threads import run_in_thread
from entrypoint.meet import messages, reach
from entrypoint.meet.identity import ParticipantId
from entrypoint.meet.job_state import loss
from entrypoint.meet.link import Crew, Link
from entrypoint.meet.messages import (
    AllDone,
    Beat,
    EndMeeting,
    Fail,
    Failed,
    Go,
    Hello,
    Look,
    LookCloser,
    Message,
    Move,
    Moved,
    Peek,
    Report,
    Stopped,
    Tried,
    Try,
    Visit,
    Welcome,
)
from entrypoint.meet.reports import Failure, when
from entrypoint.meet.terms import NAME_ADVICE
from entrypoint.meet.wire import FIRST_BODY, Closed, Wire, WireError, WrongKey, encode, greet, set_options

SHORT = 200
"""Letters of a preflight's finding, where all do not fit."""


class NoHub(Unavailable):
    """The hub cannot be had: another candidate may be."""


@dataclass(eq=False, kw_only=True)
class Spoke(Link):
    """Another node's end of its link to the hub."""

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
            raise NoHub("join-no-decision", f"{self._hub} did not decide within {bound:g} s: see its output")
        self._met.result()

    @property
    def _hub(self) -> str:
        return f"node {self.hub} ({self.nodes[self.hub]}) at {self.endpoint}"

    async def _reach(self) -> Wire:
        """Connect until the hub has proved itself and taken us in."""
        pause, since, why = 0.1, None, ""
        reached = time.monotonic() + self.timeouts.answer
        while True:
            if self.waiting.is_due():
                self.waiting.tell(f"{self._hub} has not started yet")
            if self.muster and len(self.muster.candidates) > 1 and time.monotonic() > reached:
                raise NoHub("join-no-answer", f"{self._hub} did not answer within {self.timeouts.answer:g} s")
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

    def _hello(self) -> bytes:
        """With the preflight's findings cut short where it would be too large for a first frame; nobody
        compares them."""
        left = self.waiting.left()
        whole = encode(messages.pack(Hello(self.me, left)))
        if len(whole) <= FIRST_BODY:
            return whole
        short = {name: text[:SHORT] for name, text in self.me.findings.items()}
        return encode(messages.pack(Hello(replace(self.me, findings=short), left)))

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, until: float
    ) -> Wire:
        try:
            async with asyncio.timeout_at(until):
                wire = await greet(reader, writer, self.key, hub=False)
                wire.send(self._hello())
                answer = messages.load(await wire.receive(), self._extent)
            if isinstance(answer, EndMeeting):
                raise messages.refusal_of(answer)
            if not isinstance(answer, Welcome):
                raise WireError(messages.UNKNOWN)
            return wire
        except BaseException as error:
            writer.transport.abort()
            match error:
                case TimeoutError():
                    raise Closed("it says nothing") from error
                case WrongKey():
                    raise Unavailable(
                        "join-key-differs",
                        f"the hub at {self.endpoint} does not hold the join key of {self.me}: it is another "
                        f"run's, or the key file is not the same on both nodes: {self.local.port_advice}",
                    ) from error
                case WireError() if not isinstance(error, Closed):
                    raise self._no_hub(str(error)) from error
            raise

    def _out_of_reach(self, why: str) -> Refusal:
        text = f"{self.me} cannot reach {self._hub}: {why}"
        there = self.waiting.begun.where if self.waiting.begun else None
        if there not in (None, self.found[1][0]):
            first = self.nodes[self.hub]
            return BadInput(
                "join-two-addresses", f"{text}; to itself {first} is {there}: {NAME_ADVICE} {there}"
            )
        return NoHub(
            "join-out-of-reach",
            f"{text}: is this a network that joins the nodes (--master-addr), or is a firewall between them?",
        )

    def _no_hub(self, why: str) -> Unavailable:
        return NoHub(
            "join-no-hub",
            f"something that is no apptrain hub answers on {self.endpoint}, where node {self.hub} "
            f"({self.nodes[self.hub]}) should: {why}: {self.local.port_advice}",
        )

    def _report(self, message: Report | Tried | Moved) -> None:
        if isinstance(message, Fail):
            self._own.append(message.failure)
        for hub in self._peers.values():
            hub.send(messages.pack(message))

    def _hear(self, _: ParticipantId, /, message: Message) -> None:
        match message:
            case Beat():
                pass
            case Try() if not self._met.done():
                reach.ways(message)  # its WireError loses the hub; in the task it would be a bug of ours
                self._start(self._try(message))
            case Move(address=address) if not self._met.done():
                self._start(self._move(address))
            case Go(absent=absent) if not self._met.done() and self.hub not in absent:
                members = self._ordered(set(range(self.me.nnodes)).difference(absent))
                self._met.set_result(Crew(members=members, since=time.monotonic()))
            case EndMeeting() if not self._met.done():
                self._met.set_exception(messages.refusal_of(message))
            case Stopped() | Look() | LookCloser() | Peek() | Failed() | AllDone():
                self._told(message)
            case _:
                raise WireError(messages.UNKNOWN)

    async def _move(self, address: str) -> None:
        """Take the hub's address for this one, if the hub is there, and say how that went."""
        contact, why = "", ""
        try:
            async with asyncio.timeout(self.timeouts.reach):
                await self._visit(address)
            contact = await self.local.move(address)
            self.moved = address
        except OSError as error:
            why = _reason(error)
        except (Refusal, WireError) as error:
            why = str(error)
        self._report(Moved(address, contact, why))

    async def _visit(self, address: str) -> None:
        found = await resolve(address, self.found[1][1])
        reader, writer = await _dial(found, asyncio.get_running_loop().time() + self.timeouts.reach)
        try:
            wire = await greet(reader, writer, self.key, hub=False)
            wire.send(messages.pack(Visit()))
            if messages.load(await wire.receive(), self._extent) != Welcome():
                raise WireError(messages.UNKNOWN)
        finally:
            writer.transport.abort()

    def _lose(self, _: ParticipantId, /, why: str, at: float) -> None:
        if self._met.done():
            lost = loss(self.hub, self.nodes[self.hub], why, at)
            self._told(Failed(min([*self._own, lost], key=when), (self.hub,)))
        else:
            text = f"{self._hub} was lost before the start: {why}: see its output"
            self._met.set_exception(NoHub("join-hub-lost", text))


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else "no answer"  # asyncio's own texts hide the system's


async def resolve(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The family and socket address of the first address that the name has. BadInput: it has none."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        try:
            found = await run_in_thread(socket.getaddrinfo, address, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise BadInput(
                "join-address-unresolved",
                f"the rendezvous address {address} does not resolve to an address: "
                "give one that does (--master-addr, --nodes)",
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
