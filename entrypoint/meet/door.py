"""Listens on a port that anybody can reach, and protects it from strangers. Begin at `AuthListener`; hub.py
and reach.py say what is done with a connection.

Whoever connects has a short time to prove who they are. The number of unproven connections is bounded. If one
more comes, the oldest of the address with the most connections is closed, so nobody can keep others out.
Little is read at a time of what they send. If the process runs out of open files, strangers are closed, and
nothing is printed.
"""

import asyncio
import errno
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from entrypoint.meet.wire import WireError, set_options
from entrypoint.node import processes

STRANGERS = 256
"""Connections at once that have proved nothing."""
LEAST = 32
"""With less room for them a burst of those who belong would take too long."""
RESERVE = 256
"""Open files that are left to the rest of this process."""
BACKLOG = 4096
"""Connections that wait outside, in the kernel, which has a bound of its own."""
FAIR = 0.1
"""Seconds in which nobody has to go for another."""
BURST = 16
"""Connections that are taken in one go."""
CHUNK = 4096
"""Bytes that are read at a time."""
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class PendingConnection:
    """A connection that has been accepted."""

    def __init__(self, listener: "AuthListener", connection: socket.socket, address: str) -> None:
        self._listener = listener
        self.connection = connection
        self.address = address
        """The other end's."""
        self.came_to = str(connection.getsockname()[0])
        """The address of ours that was reached."""
        self.transport: asyncio.Transport | None = None
        """Set once, when the connection is read from."""
        self.is_authenticated = False
        self.since = time.monotonic()
        self.bound = asyncio.timeout(listener.seconds)

    def authenticate(self, seconds: float | None = None) -> None:
        """Marks the connection as authenticated: it is no longer evicted, and it times out after `seconds`
        (None: never)."""
        self.is_authenticated = True
        self._listener.strike(self)
        self.bound.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


class ConnectionHandler(Protocol):
    """Decides about the connections of an AuthListener."""

    async def admit(
        self, pending: PendingConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Talks to whoever has connected, and authenticates the connection in time. One that is not
        authenticated is closed when this returns, or raises WireError, EOFError or OSError."""

    def refuse(self, address: str, why: str) -> None:
        """Hears of each connection that had to be closed: where it came from, and why."""


class AuthListener:
    """Answers at listening sockets, from the moment when it is made in a running loop."""

    def __init__(
        self, sockets: Sequence[socket.socket], handler: ConnectionHandler, *, room: int, seconds: float
    ) -> None:
        """`room`: for so many connections at once that are not authenticated. `seconds`: that each of them
        has for it."""
        self.seconds = seconds
        self.unproved: dict[PendingConnection, asyncio.Task[None]] = {}
        """In the order in which they came; `strike` takes one out."""
        self.held: Counter[str] = Counter()
        """How many of them each address has."""
        self._sockets = list(sockets)
        self._handler = handler
        self._room = room
        self._takers = [asyncio.ensure_future(self._take(sock)) for sock in sockets]
        self._tasks: dict[asyncio.Task[None], PendingConnection] = {}

    def close(self) -> None:
        """Accepts no further connection; those that are not authenticated are closed."""
        for taker in self._takers:
            taker.cancel()
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)  # before another file has its number
            sock.close()
        self._sockets.clear()
        for task in self.unproved.values():
            task.cancel()

    async def end(self) -> None:
        """Closes, and ends what is heard on all connections."""
        self.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._takers, *self._tasks, return_exceptions=True)

    async def _take(self, sock: socket.socket) -> None:
        """Accepts connections, a few in one go, and sees that there is room."""
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(BURST):
                try:
                    connection, address = await loop.sock_accept(sock)
                    pending = PendingConnection(self, connection, str(address[0]))
                except OSError as error:
                    if error.errno in _OUT_OF_FILES:
                        self._evict_oldest(0)
                    await asyncio.sleep(0.01)
                    continue
                self._let_in(pending)
                while len(self.unproved) > self._room and not self._evict_oldest(FAIR):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0)

    def _let_in(self, pending: PendingConnection) -> None:
        task = asyncio.ensure_future(self._attend(pending))
        self.unproved[pending] = task
        self.held[pending.address] += 1
        self._tasks[task] = pending
        task.add_done_callback(self._on_closed)

    def strike(self, pending: PendingConnection) -> None:
        """Counts a connection no longer among those that have proved nothing."""
        if self.unproved.pop(pending, None) is None:
            return
        self.held[pending.address] -= 1
        if not self.held[pending.address]:
            del self.held[pending.address]

    def _on_closed(self, task: asyncio.Task[None]) -> None:
        pending = self._tasks.pop(task)
        self.strike(pending)
        if pending.transport is None:
            pending.connection.close()
        elif not pending.is_authenticated:
            pending.transport.abort()

    def _evict_oldest(self, fair: float) -> bool:
        """Closes the oldest connection of the address that has most, if it is there for so many seconds."""
        crowd = max(self.held.values(), default=0)
        oldest = next((one for one in self.unproved if self.held[one.address] == crowd), None)
        if oldest is None or time.monotonic() - oldest.since < fair:
            return False
        self._handler.refuse(oldest.address, "too many connections that prove nothing")
        self.unproved[oldest].cancel()
        self.strike(oldest)
        return True

    async def _attend(self, pending: PendingConnection) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK)
        why = ""
        try:
            async with pending.bound:
                pending.transport, protocol = await loop.connect_accepted_socket(
                    lambda: _Frugal(reader), pending.connection
                )
                writer = asyncio.StreamWriter(pending.transport, protocol, reader, loop)
                await self._handler.admit(pending, reader, writer)
        except TimeoutError:
            why = f"it did not prove who it is in {self.seconds:g} s"
        except (WireError, OSError, EOFError) as error:
            why = str(error)
        if why and pending in self.unproved:
            self._handler.refuse(pending.address, why)


def listen(family: socket.AddressFamily, where: Any) -> socket.socket:
    """A socket that listens there. OSError: the address is not ours, or the port is taken."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        set_options(sock)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def room(wanted: int, *, beside: int = 0) -> int:
    """For how many strangers there are open files, `wanted` at most, beside those who belong. The soft limit
    is raised for them, which our children inherit."""
    limit = processes.allow_open_files(files_for(wanted, beside=beside))
    return min(wanted, (limit - files_for(0, beside=beside)) // 2)


def files_for(strangers: int, *, beside: int = 0) -> int:
    """Open files: those that there are, those of other doors and of connections that are just ending, too."""
    return processes.open_files() + RESERVE + beside + 2 * strangers


class _Frugal(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """asyncio would read 256 KiB at a time for each of them."""

    _buffer = bytearray(CHUNK)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))
