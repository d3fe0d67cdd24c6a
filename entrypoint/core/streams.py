"""The standard streams as whoever starts a command leaves them: closed, full, or without a reader.

`make_usable` comes first in a command, and `lost` last. A closed stream would give its number to the next
file that is opened, and everything that is printed would go there. Runs with the Python of a login node, from
3.9 on.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys


def make_usable() -> None:
    """Opens closed streams on /dev/null, for the programs that we start too, and has stderr drop what cannot
    be written: no message is worth the status."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is sys.__stderr__:  # else a test has replaced it
        raw = io.BufferedWriter(_Forgiving(2, "wb", closefd=False))  # type: ignore[type-var]
        sys.stderr = io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True)


def lost(error: OSError) -> int:
    """The status of a command that could not write its output, after a word about a full disk. Raises any
    other error again."""
    if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        raise error
    # At the interpreter's end the rest would be tried once more, with a traceback.
    with contextlib.suppress(ValueError, OSError):  # a test may have replaced it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # as `| head` leaves it
        return 141
    print(f"apptrain: stdout cannot be written: {error.strerror}", file=sys.stderr)
    return 1


class _Forgiving(io.FileIO):
    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)
