"""Messages between the processes: as marshal writes them, behind their length, over TCP.

The commands start with this module for every call, so it needs nothing that takes longer to import than they run.
"""

from __future__ import annotations

import marshal
from _socket import AF_INET, IPPROTO_TCP, SOCK_STREAM, TCP_NODELAY, socket

TYPE_CHECKING = False  # typing has it too
if TYPE_CHECKING:
    from typing import Any

    Message = dict[str, Any]
else:
    Message = dict

LIMIT = 20.0
"""Seconds for a connection and a plain answer."""
HEAD = 4
"""Bytes of a message's length."""


class Lost(Exception):
    """The other side is not there, or went away."""


class Line:
    """One connection."""

    def __init__(self, connection: socket):
        self.connection = connection

    def send(self, message: Message) -> None:
        body = marshal.dumps(message)
        try:
            self.connection.sendall(len(body).to_bytes(HEAD, "big") + body)
        except OSError as error:
            raise Lost(str(error)) from None

    def receive(self) -> Message:
        """Blocks; Lost at the end."""
        message: Message = marshal.loads(self._read(int.from_bytes(self._read(HEAD), "big")))
        return message

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            try:
                part = self.connection.recv(size - len(found))
            except OSError as error:
                raise Lost(str(error)) from None
            if not part:
                raise Lost("the connection ended")
            found += part
        return found

    def close(self) -> None:
        self.connection.close()


def connect(address: str, port: int, limit: float = LIMIT) -> Line:
    connection = socket(AF_INET, SOCK_STREAM)
    connection.settimeout(limit)
    try:
        connection.connect((address, port))
        connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    except OSError as error:
        connection.close()
        raise Lost(f"{address}:{port}: {error}") from None
    connection.settimeout(None)
    return Line(connection)


def call(address: str, port: int, message: Message, limit: float = LIMIT) -> Message:
    """One request and its answer. Raises Lost."""
    line = connect(address, port, limit)
    try:
        line.connection.settimeout(limit)
        line.send(message)
        return line.receive()
    finally:
        line.close()
