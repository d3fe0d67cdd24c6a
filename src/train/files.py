"""Files that are whole or absent, and that only their owner reads."""

import errno
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

OLD_S: Final = 3600.0
"""More than a write may pause, and than clocks are apart."""
_OWNER: Final = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.tmp")


def temporary(path: Path, what: str = "") -> Path:
    """A name beside `path` that no other process gives: `.NAME[.WHAT].HOST.PID.tmp`."""
    middle = f".{what}" if what else ""
    return path.with_name(f".{path.name}{middle}.{os.uname().nodename}.{os.getpid()}.tmp")


def is_left_behind(path: Path) -> bool:
    """Whether the process that gave this temporary name has ended. Where it cannot be seen, because it ran on
    another host, it has if nothing was written for OLD_S."""
    owner = _OWNER.fullmatch(path.name)
    if owner is not None and owner["name"].endswith(f".{os.uname().nodename}"):
        # In a container our own id may have been another's before.
        return int(owner["pid"]) == os.getpid() or not Path("/proc", owner["pid"]).exists()
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.glob("*")))
    except OSError:  # Its owner removes it at the moment.
        return False
    return time.time() - newest > OLD_S


def make_directory(path: Path) -> None:
    """Make a directory and its parents, mode 700; those that exist are left as they are."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(PermissionError):  # One may enter and write to a directory that one may not read.
            sync_directory(folder.parent)


def revive(path: Path) -> None:
    """Make a directory anew if it has vanished, but not its parent: a file system that is gone stays gone.

    Raises OSError where it cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file, mode 600, and bring it to the disk."""
    with open(path, "xb", opener=private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file under a temporary name, then put it in place in one step."""
    partial = temporary(path)
    partial.unlink(missing_ok=True)
    try:
        write(partial)
        partial.chmod(0o600)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def replace_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    replace(path, lambda partial: write_bytes(partial, text.encode()))


def sync_directory(path: Path) -> None:
    """Bring the directory's names to the disk, where the file system has such a thing."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def private(path: str, flags: int) -> int:
    """An `opener` that gives new files mode 600."""
    return os.open(path, flags, 0o600)
