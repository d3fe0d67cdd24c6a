"""Server and MoMs of one machine, from one interpreter, since most of their start is imports.

Usage: python -m tests.pbs_double.daemons CONFIG NAME=FD...    the server's name, or a host's, and its listening socket
Prints NAME PID of each, and ends them all when its standard input ends.
"""

import os
import signal
import socket
import sys

from tests.pbs_double import config as configs
from tests.pbs_double import mom, server


def main(path: str, *places: str) -> None:
    config = configs.read(path)
    listeners = {
        name: socket.socket(fileno=int(number)) for name, _, number in (p.partition("=") for p in places)
    }
    started = []
    for name, listener in listeners.items():
        pid = os.fork()
        if pid == 0:
            for other in listeners.values():
                if other is not listener:  # else who looks for a host that is gone would find its socket open
                    other.close()
            if name == config.server:
                server.run(config, listener)
            mom.run(config, name, listener)
        started.append(pid)
        print(name, pid, flush=True)
    for listener in listeners.values():
        listener.close()
    sys.stdin.read()
    for pid in started:  # each is there, if only as a zombie: no other process has its number
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
