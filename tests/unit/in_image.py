"""The program in the image, for stand-ins of run.sh: forks of one process that has imported it.

A job script starts it twice and more, and most of what it computes then is importing. Each fork has the arguments,
directory, umask, PATH, file systems and standard files of the stand-in, and ends it with its status.
"""

import atexit
import functools
import marshal
import os
import socket
import socketserver
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from entrypoint.batch import conclude, prepare  # noqa: F401  # imported before the forks
from entrypoint.cli import main as cli
from tests import spaces

CHECKOUT = Path(__file__).resolve().parents[2]
CLIENT = """\
import _signal, _socket, marshal, os, sys
if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
umask = os.umask(0o077)
own = _socket.socket(_socket.AF_UNIX)
own.connect({address!r})
files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
own.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
own.sendall(marshal.dumps((sys.argv[-2:], os.environ["PATH"], os.getcwd(), umask)))
sys.exit((own.recv(1) or bytes([1]))[0])
"""


@functools.cache
def client() -> str:
    """For `python -IS`, what runs the command that its last two words are; starts the process that forks.

    That imports what stands above too: this module is its main program.
    """
    folder = tempfile.TemporaryDirectory(prefix="in-image-")
    address = f"{folder.name}/socket"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(CHECKOUT), "APPTRAIN_STACK": "/none"}
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.unit.in_image", address],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the tests, which end it
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"listens\n"

    def end() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return CLIENT.format(address=address)


class _Command(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        _, files, *_ = socket.recv_fds(self.request, 1, 3)
        with self.request.makefile("rb") as sent:
            argv, path, directory, umask = marshal.load(sent)
        for number, file in enumerate(files):
            os.dup2(file, number)
        pid, _, _ = struct.unpack("3i", self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        spaces.enter(pid)
        os.environ["PATH"] = path
        os.chdir(directory)
        os.umask(umask)
        status = cli.main(argv)
        sys.stdout.flush()
        self.request.sendall(bytes([status]))


class _Forks(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    request_queue_size = 100
    parent = os.getppid()

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self.parent:  # the tests were killed
            sys.exit()


def _serve(address: str) -> None:
    conclude.LATE_PAUSE = 0.02  # a shared file system shows late what stands there, which this one does not
    with _Forks(address, _Command) as server:
        print("listens", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    _serve(sys.argv[1])
