"""Reads files that others may have written: a regular file of bounded size, or an error at once.

`read`, `read_text`, `read_json` and `open_regular` are the entries; `mode_at` says what is at a path that
somebody gave. A FIFO would make `open` wait for ever, and a device never ends: both are refused before a byte
is read. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from entrypoint.core.errors import BadInput
from entrypoint.core.plain import plain

MOST_VALUES, MOST_DEPTH, MOST_DIGITS = 400_000, 32, 300
"""Of a JSON file: values, lists and objects in each other, and digits of a whole number."""


NOT_REACHED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""What is wrong with a path or with who asks for it, and not with us."""


class Unfit(ValueError):
    """A file that is not read: it is no regular file, or larger than is read. The text says which."""


def read(path: Path, most: int) -> bytes:
    """All bytes of a regular file of at most `most` bytes. Raises OSError, or Unfit for any other."""
    with open_regular(path) as file:
        content = file.read(most + 1)  # not its size alone: files of /proc have none, and others grow
    if len(content) > most:
        raise Unfit(f"it has more than {most} bytes")
    return content


def open_regular(path: Path) -> BinaryIO:
    """A regular file, to be read in parts. Raises OSError, or Unfit for any other."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise Unfit(f"it is {kind(mode)}, not a regular file")
    return io.BufferedReader(_Ready(descriptor, "rb"))


class _Ready(io.FileIO):
    """One that has bytes, or has ended: a regular file of /proc may have none for now, of which FileIO makes
    None."""

    def readinto(self, buffer: Any) -> int:
        if (size := super().readinto(buffer)) is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return size


def read_text(path: Path, most: int) -> str:
    """The same as text. Raises UnicodeDecodeError, a ValueError too, if it is not UTF-8."""
    return read(path, most).decode("utf-8")


def read_json(path: Path, most: int) -> Any:
    """The value in a JSON file of at most `most` bytes.

    Raises OSError, or a ValueError that says what is wrong: no UTF-8, no JSON (NaN and infinities are none),
    too many values, nested too deep, or a number with too many digits.
    """
    try:
        text = read_text(path, most)
    except UnicodeDecodeError as error:
        raise Unfit(f"it is no text (byte {error.start} is not UTF-8)") from None
    return parse_json(text)


def parse_json(text: str) -> Any:
    """The value in a JSON text. Raises a ValueError, as `read_json`."""
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:  # before they take memory
        raise Unfit(f"it has more than {MOST_VALUES} values")
    try:
        value = _JSON.decode(text)
    except RecursionError:
        raise Unfit(f"it is nested more than {MOST_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise Unfit(f"it is no JSON: {error}") from None
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        inner = [one for one in level if isinstance(one, (dict, list))]
        level = [item for one in inner for item in (one.values() if isinstance(one, dict) else one)]
        if not inner:
            return
    raise Unfit(f"it is nested more than {MOST_DEPTH} deep")


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise Unfit(f"a number in it has {len(text)} digits")
    return int(text)


def _no_number(text: str) -> NoReturn:
    raise Unfit(f"it has {text}, which is no JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise Unfit(f"a number in it is too large: {text[:20]}")
    return value


_JSON = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_no_number)


def exists(path: Path) -> bool:
    """Whether there is such a file. There is none with a name that no file can have, as a very long one."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def is_regular(path: Path) -> bool:
    """The same of a regular file."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_directory(path: Path) -> bool:
    """The same of a directory."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def mode_at(path: Path | str) -> int:
    """The `st_mode` of what is at a path that somebody gave; 0 for nothing. Raises BadInput where that cannot
    be seen: pathlib raises OSError then, and from Python 3.12 on it says that nothing is there."""
    try:
        return os.stat(path).st_mode  # noqa: PTH116 - Path takes the dot off DIR/.
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0
    except OSError as error:
        raise _not_reached(error) from None


def is_there(path: Path | str) -> bool:
    """Whether anything is at a path that somebody gave. Raises BadInput, as `mode_at`."""
    return mode_at(path) != 0


@contextlib.contextmanager
def refused_if_not_reached() -> Iterator[None]:
    """The last resort of a command: BadInput for a path that may not be read, or that no file can have."""
    try:
        yield
    except OSError as error:
        if error.errno in NOT_REACHED and isinstance(error.filename, str):
            raise _not_reached(error) from None
        raise


def _not_reached(error: OSError) -> BadInput:
    name = plain(str(error.filename).removesuffix("/."))
    return BadInput(
        "path-unreadable",
        f"{name} cannot be read ({error.strerror}): check the path, and that you may read it",
    )


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
