"""How server and MoMs take messages."""

import socket
import socketserver
from collections.abc import Callable

from tests.pbs_double.wire import Line, Lost, Message

BACKLOG = 128


def listen(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port), backlog=BACKLOG)


def serve(listener: socket.socket, answer: Callable[[Line, Message], None]) -> None:
    """Hands the first message of each connection to `answer`, in a thread of its own, for ever."""

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
        daemon_threads = True

    server = Server(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.serve_forever()
