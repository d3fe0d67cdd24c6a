"""Tests before any rank starts whether data passes between the nodes, on the network that gloo and NCCL will
use. `ReachabilityTest` is node 0's side; `Listener` and `carry_out` are those of every node.

Every node listens as gloo will, on the same address and a port that the system picks. Of those that take
part, the nodes 1, 2, 4, 8 ... places before it connect, prove that node 0 sent them, and exchange more data
than fits in one packet, as some networks lose only large packets. Nobody else gets a byte.
"""

import asyncio
import hmac
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType

from entrypoint.core.frozen import dataclass
from entrypoint.meet import door
from entrypoint.meet.door import AuthListener, ConnectionHandler, PendingConnection
from entrypoint.meet.identity import ParticipantId
from entrypoint.meet.messages import Tried, Try
from entrypoint.meet.wire import WireError

TOKEN_BYTES = 16
PROOF_BYTES = 32
PAYLOAD = bytes(1 << 16)
PROVE = 5.0
"""Seconds for who connects to prove that he was sent: he needs one packet."""
TRY = 10.0
"""Seconds for the rest: he gives up before."""
AGAIN = 0.1
"""Seconds until somebody who lost his place to strangers comes again."""
CALLER, LISTENER = b"caller", b"listener"
MTU = "small packets pass, large ones do not (is the MTU the same everywhere?)"
SHOWN = 4
"""Ways that do not pass, named in one message beside the first."""
ADVICE = "is this a network that joins the nodes (--interface), or is a firewall between them?"


@dataclass(frozen=True, kw_only=True)
class ProbeEndpoint:
    """Where a node listens to be tried."""

    interface: str
    address: str
    port: int
    token: str
    """Known to those whom the hub sends, and of no use elsewhere: each side proves first that it knows it."""

    def __str__(self) -> str:
        return f"{self.interface} {self.address} {self.port} {self.token}"

    @classmethod
    def parse(cls, text: str) -> "ProbeEndpoint":
        """From its text. WireError: it is none."""
        match text.split(" "):
            case [interface, address, port, token] if _is_place(address, port):
                return cls(interface=interface, address=address, port=int(port), token=token)
        raise WireError("it said where it listens in a form that has no meaning here")


def _is_place(address: str, port: str) -> bool:
    """Whether this is an IP address and a port: a name would be looked up by whoever is sent there."""
    plain, _, _ = address.partition("%")
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in plain else socket.AF_INET, plain)
    except (OSError, ValueError):  # a ValueError where it has a NUL, or a half of a character
        return False
    return re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) < 1 << 16


class Listener(ConnectionHandler):
    """Answers those who try the way to this node, in an `async with`. OSError: it has no such address."""

    def __init__(self, interface: str, address: str):
        self._interface, self._address = interface, address
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._door: AuthListener | None = None

    async def __aenter__(self) -> ProbeEndpoint:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        sock = door.listen(family, (self._address, 0))
        port = sock.getsockname()[1]
        room = max(door.LEAST, door.room(door.STRANGERS))
        self._door = AuthListener([sock], self, room=room, seconds=PROVE)
        return ProbeEndpoint(interface=self._interface, address=self._address, port=port, token=self._token)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._door is not None
        await self._door.end()

    async def admit(
        self, pending: PendingConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not hmac.compare_digest(await reader.readexactly(PROOF_BYTES), _proof(self._token, CALLER)):
            return
        pending.authenticate(TRY)
        try:
            writer.write(_proof(self._token, LISTENER))  # a small packet of its own
            writer.write(PAYLOAD)
            await reader.readexactly(len(PAYLOAD))
            writer.write(b".")
            writer.close()
            await writer.wait_closed()
        finally:
            writer.transport.abort()

    def refuse(self, address: str, why: str) -> None:
        """Strangers may knock here: nobody need hear of it."""


def partners(place: int, count: int) -> list[int]:
    """The places that the node at this one tries to reach, of so many nodes that take part: 1, 2, 4 ... after
    it, so that the ways join all of them."""
    distances = (1 << power for power in range((count - 1).bit_length()))
    return list(dict.fromkeys((place + distance) % count for distance in distances))


class ReachabilityTest:
    """One go of all nodes at reaching one another: who tries which way, and what came of it."""

    def __init__(
        self,
        contacts: Mapping[int, str] = MappingProxyType({}),
        nodes: Sequence[str] = (),
        number: int = 0,
        participants: frozenset[ParticipantId] = frozenset(),
    ):
        """`contacts`: of each node that listens; the others take no part. `participants`: who had come when
        it began."""
        self.number = number
        self.participants = participants
        self._contacts = {node: ProbeEndpoint.parse(text) for node, text in sorted(contacts.items())}
        self._texts = {node: str(contact) for node, contact in self._contacts.items()}
        self._present = tuple(self._contacts)
        self._places = {node: place for place, node in enumerate(self._present)}
        self._nodes = nodes
        self._failed: dict[int, list[tuple[int, str]]] = {}

    @property
    def clash(self) -> str:
        """Which nodes have the same address, as bridges for containers have; empty where none do."""
        seen: dict[str, int] = {}
        for node, contact in self._contacts.items():
            if (other := seen.setdefault(contact.address, node)) != node:
                return (
                    f"{self._nodes[other]} and {self._nodes[node]} both have {contact.address} on "
                    f"{contact.interface}, which so does not join them: choose another (--interface)"
                )
        return ""

    @property
    def elsewhere(self) -> dict[str, str]:
        """Node to its interface, where that is another than the first one's."""
        names = {self._nodes[node]: contact.interface for node, contact in self._contacts.items()}
        return {node: name for node, name in names.items() if name != next(iter(names.values()))}

    def order(self, node: int) -> Try:
        """The message that asks a node to try its ways."""
        there = tuple((other, self._texts[other]) for other in self._chosen(node))
        return Try(number=self.number, ways=there)

    def _chosen(self, node: int) -> list[int]:
        """Counted over those that take part: where nodes are lost, each of the others still has partners."""
        return [self._present[place] for place in partners(self._places[node], len(self._present))]

    def take(self, node: int, answer: Tried) -> None:
        """A node's answer; one of an earlier trial counts for nothing. WireError: it names a node that takes
        no part."""
        if answer.number != self.number or node not in self._contacts:
            return  # it may name a node that has left since
        if not all(other in self._contacts for other, _ in answer.failed):
            raise WireError("it said which nodes it reaches in a form that has no meaning here")
        self._failed[node] = list(answer.failed)

    @property
    def complete(self) -> bool:
        return len(self._failed) == len(self._contacts)

    def verdict(self) -> str:
        """The ways that do not pass, in one line; empty where all do."""
        shut = [(node, other, why) for node, failed in self._failed.items() for other, why in failed]
        for node in self._contacts.keys() - self._failed.keys():
            shut += [(node, other, "it does not say how that went") for other in self._chosen(node)[:1]]
        if not shut:
            return ""
        (source, target, why), *others = sorted(shut)
        name, there = self._nodes, self._contacts[target]
        rest = [f"{name[one]} to {name[other]}" for one, other, _ in others]
        more = f", nor {', '.join(rest[:SHOWN])}" if rest else ""
        if len(rest) > SHOWN:
            more += f" and {len(rest) - SHOWN} more"
        return (
            f"{name[source]} cannot reach {name[target]} at {there.address} ({there.interface}): "
            f"{why}{more}: {ADVICE}"
        )


def ways(order: Try) -> dict[int, ProbeEndpoint]:
    """Node to where it listens, of a ReachabilityTest's order; empty where nobody else takes part. WireError:
    it makes no sense."""
    return {node: ProbeEndpoint.parse(text) for node, text in order.ways}


async def carry_out(order: Try, limit: float) -> Tried:
    """Tries the ways of a ReachabilityTest's order, each within `limit` seconds; returns the answer."""
    contacts = ways(order)
    found = await asyncio.gather(*(_try(contact, limit) for contact in contacts.values()))
    failed = tuple((node, why) for node, why in zip(contacts, found, strict=True) if why)
    return Tried(number=order.number, failed=failed)


def check(contact: str) -> None:
    """WireError: a node's contact is none, nor empty."""
    if contact:
        ProbeEndpoint.parse(contact)


async def _try(contact: ProbeEndpoint, limit: float) -> str:
    """Why this way does not pass; empty where it does."""
    why = f"no answer in {limit:g} s"
    try:
        async with asyncio.timeout(limit):
            while True:
                reader, writer = await asyncio.open_connection(contact.address, contact.port)
                try:
                    writer.write(_proof(contact.token, CALLER))
                    if not hmac.compare_digest(
                        await reader.readexactly(PROOF_BYTES), _proof(contact.token, LISTENER)
                    ):
                        return "another machine answers there"
                    why = MTU
                    await reader.readexactly(len(PAYLOAD))
                    writer.write(PAYLOAD)
                    await reader.readexactly(1)
                    return ""
                except (EOFError, ConnectionError) as error:
                    if why == MTU:
                        return _closed(error)
                    why = _closed(error)  # to make room for strangers, perhaps
                finally:
                    writer.transport.abort()
                await asyncio.sleep(AGAIN)
    except TimeoutError:
        return why
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _closed(error: EOFError | ConnectionError) -> str:
    number = error.errno if isinstance(error, ConnectionError) else None
    return os.strerror(number) if number else "the connection was closed"


def _proof(token: str, side: bytes) -> bytes:
    return hmac.digest(token.encode(), side, "sha256")
