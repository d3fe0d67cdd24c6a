"""Ports that no program is given by chance: below those that the kernel hands out, and each worker has its own.

A port that was bound once to find it free, and is opened later, may be another connection's by then.
"""

import itertools
import os
import re
import socket

FIRST, EACH = 12000, 1000
_WORKER = int((re.findall(r"\d+", os.environ.get("PYTEST_XDIST_WORKER", "")) or ["0"])[0])
_OFFSETS = itertools.count(
    2 * os.getpid(), 2
)  # two sessions rarely try the same; the join takes the next one too


def free_port(address: str = "127.0.0.1") -> int:
    """A port at which nobody listens, and which is not given again soon."""
    for _ in range(EACH // 2):
        port = FIRST + _WORKER % 20 * EACH + next(_OFFSETS) % EACH
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            try:
                sock.bind((address, port))
            except OSError:
                continue
        return port
    raise OSError(f"no port from {FIRST + _WORKER % 20 * EACH} on is free at {address}")
