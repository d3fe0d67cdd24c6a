"""Reads files that others may have written: a regular file of bounded size, or an error at once.

`read`, `read_text`, `read_json` and `open_regular` are the entries. A FIFO would make `open` wait for ever,
and a device never ends: both are refused before a byte is read. Runs with the Python of a login node, from
3.9 on.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

MOST_VALUES, MOST_DEPTH, MOST_DIGITS = 400_000, 32, 300
"""Of a JSON file: values, lists and objects in each other, and digits of a whole number."""


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
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, most: int) -> str:
    """The same as text. Raises UnicodeDecodeError, a ValueError too, if it is not UTF-8."""
    return read(path, most).decode("utf-8")


def read_json(path: Path, most: int) -> Any:
    """The value in a JSON file of at most `most` bytes.

    Raises OSError, or a ValueError that says what is wrong: no UTF-8, no JSON (NaN and infinities are none),
    too many values, nested too deep, or a number with too many digits.
    """
    return parse_json(read_text(path, most))


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
