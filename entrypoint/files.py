"""Reads files that others may have written: a regular file of bounded size, or an error at once.

`read` and `read_text` are the entries. A FIFO would make `open` wait for ever, and a device never ends: both
are refused before a byte is read. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class Unfit(ValueError):
    """A file that is not read: it is no regular file, or larger than is read. The text says which."""


def read(path: Path, most: int) -> bytes:
    """All bytes of a regular file of at most `most` bytes. Raises OSError, or Unfit for any other."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise Unfit(f"it is {kind(mode)}, not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most + 1)  # not its size alone: files of /proc have none, and others grow
    if len(content) > most:
        raise Unfit(f"it has more than {most} bytes")
    return content


def read_text(path: Path, most: int) -> str:
    """The same as text. Raises UnicodeDecodeError, a ValueError too, if it is not UTF-8."""
    return read(path, most).decode("utf-8")


def kind(mode: int) -> str:
    """What a file of this `st_mode` is, as an error names it."""
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")
