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
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

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
    """Somebody who has connected."""

    def __init__(self, door: "AuthListener", connection: socket.socket, address: str) -> None:
        self._door = door
        self.connection, self.address = connection, address
        self.came_to = str(connection.getsockname()[0])
        """The address of ours that he has reached."""
        self.transport: asyncio.Transport | None = None
        self.belongs = False
        self.since = time.monotonic()
        self.bound = asyncio.timeout(door.seconds)

    def welcome(self, seconds: float | None = None) -> None:
        """He belongs: from now on he has these seconds, None for no bound, and goes for nobody else."""
        self.belongs = True
        self._door.unproved.pop(self, None)
        self.bound.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


Hear = Callable[[PendingConnection, asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class AuthListener:
    """Answers at listening sockets, from the moment when it is made in a running loop."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        hear: Hear,
        *,
        room: int,
        seconds: float,
        refuse: Callable[[str, str], None] = lambda _address, _why: None,
    ) -> None:
        """`hear` is what is done with a guest, within `seconds` until it makes him welcome. Who is not
        welcome goes when it ends, or raises WireError, EOFError or OSError. `room`: for so many at once that
        are not welcome. `refuse` is told of each that has to go: his address, and why."""
        self.seconds = seconds
        self.unproved: dict[PendingConnection, asyncio.Task[None]] = {}
        """In the order in which they came."""
        self._sockets, self._hear, self._room, self._refuse = sockets, hear, room, refuse
        self._takers = [asyncio.ensure_future(self._take(sock)) for sock in sockets]
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Lets nobody else in; who has proved nothing goes."""
        for taker in self._takers:
            taker.cancel()
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)  # before another file has its number
            sock.close()
        self._sockets = ()
        for task in self.unproved.values():
            task.cancel()

    async def end(self) -> None:
        """Closes, and hears nobody any more."""
        self.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._takers, *self._tasks, return_exceptions=True)

    async def _take(self, sock: socket.socket) -> None:
        """Takes those who come, a few in one go, and sees that there is room."""
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(BURST):
                try:
                    connection, address = await loop.sock_accept(sock)
                    guest = PendingConnection(self, connection, str(address[0]))
                except OSError as error:
                    if error.errno in _OUT_OF_FILES:
                        self._send_away(0)
                    await asyncio.sleep(0.01)
                    continue
                self._let_in(guest)
                while len(self.unproved) > self._room and not self._send_away(FAIR):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0)

    def _let_in(self, guest: PendingConnection) -> None:
        task = asyncio.ensure_future(self._attend(guest))
        self.unproved[guest] = task
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._see_off(guest, task))

    def _see_off(self, guest: PendingConnection, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.unproved.pop(guest, None)
        if guest.transport is None:
            guest.connection.close()
        elif not guest.belongs:
            guest.transport.abort()

    def _send_away(self, fair: float) -> bool:
        """Sends one away, if he has been here for so many seconds."""
        held = Counter(guest.address for guest in self.unproved)
        crowd = max(held, key=held.__getitem__, default=None)
        guest = next((guest for guest in self.unproved if guest.address == crowd), None)
        if guest is None or time.monotonic() - guest.since < fair:
            return False
        self._refuse(guest.address, "too many connections that prove nothing")
        self.unproved.pop(guest).cancel()
        return True

    async def _attend(self, guest: PendingConnection) -> None:
        loop, reader, why = asyncio.get_running_loop(), asyncio.StreamReader(limit=CHUNK), ""
        try:
            async with guest.bound:
                guest.transport, protocol = await loop.connect_accepted_socket(
                    lambda: _Frugal(reader), guest.connection
                )
                await self._hear(guest, reader, asyncio.StreamWriter(guest.transport, protocol, reader, loop))
        except TimeoutError:
            why = f"it did not prove who it is in {self.seconds:g} s"
        except (WireError, OSError, EOFError) as error:
            why = str(error)
        if why and guest in self.unproved:
            self._refuse(guest.address, why)


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
