"""Files that only their owner can read, whole or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from entrypoint.core.errors import BadInput
from entrypoint.core.files import kind
from entrypoint.core.plain import plain


def write_private(path: Path, content: str | bytes) -> None:
    """Writes a file that only its owner can read, by rename. Raises OSError.

    Where others may write too, nobody can put a file or a link of the partial file's name there before.
    """
    raw = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(opened, "wb") as file:
            file.write(raw)
        partial.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_output(path: Path, content: str | bytes, command: str, *, follow: bool = True) -> None:
    """Writes what a command makes, where -o says. Raises BadInput if that cannot be.

    `follow`: what a link leads to is replaced, else the link: in a run directory it may be another's.
    """
    try:
        target = Path(os.path.realpath(path)) if follow and path.is_symlink() else path
        if why := _why_not(target, follow=follow):
            raise _unwritable(path, why, command)
        write_private(target, content)
    except OSError as error:
        raise _unwritable(path, str(error.strerror), command) from None


def _why_not(target: Path, *, follow: bool) -> str:
    """Why no file may take the place of what is there, such as a device; empty if one may. Raises OSError."""
    try:
        mode = (target.stat() if follow else target.lstat()).st_mode
    except FileNotFoundError:
        return ""
    if stat.S_ISDIR(mode):
        return os.strerror(errno.EISDIR)
    return "" if stat.S_ISREG(mode) or stat.S_ISLNK(mode) else f"it is {kind(mode)}, not a regular file"


def _unwritable(path: Path, why: str, command: str) -> BadInput:
    return BadInput(
        "output-unwritable",
        f"{command}: {plain(str(path))} cannot be written: {why}: give another file with -o",
    )
