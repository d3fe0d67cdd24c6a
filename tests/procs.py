"""What /proc says of the processes of this machine, any of which may end while it is read."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def files(name: str) -> Iterator[tuple[int, bytes]]:
    """(process id, content) of /proc/PID/NAME, of each process that has not ended and lets us read it."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / name).read_bytes()
