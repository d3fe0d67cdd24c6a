"""Messages between the processes: JSON, a line each, over TCP. The only module that knows sockets."""

import json
import socket
import socketserver
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
LIMIT = 20.0
"""Seconds for a connection and a plain answer."""


class Lost(Exception):
    """The other side is not there, or went away."""


class Line:
    """One connection."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._reader = connection.makefile("rb")

    def send(self, message: Message) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(str(error)) from None

    def receive(self) -> Message:
        """Blocks; Lost at the end."""
        try:
            text = self._reader.readline()
        except OSError as error:
            raise Lost(str(error)) from None
        if not text.endswith(b"\n"):
            raise Lost("the connection ended")
        message: Message = json.loads(text)
        return message

    def close(self) -> None:
        self._reader.close()
        self.connection.close()


def connect(address: str, port: int, limit: float = LIMIT) -> Line:
    try:
        connection = socket.create_connection((address, port), limit)
    except OSError as error:
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


def serve(
    address: str, port: int, answer: Callable[[Line, Message], None]
) -> socketserver.ThreadingTCPServer:
    """A server whose first message of each connection goes to `answer`, in a thread of its own."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            line = Line(self.request)
            try:
                answer(line, line.receive())
            except Lost:
                pass
            finally:
                line.close()

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 128

    return Server((address, port), Handler)
