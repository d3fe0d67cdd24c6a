"""Tells whether the kernel has killed processes of this node's part of the job for want of memory. Begin at
`Memory`.

It reads the counters of control groups, versions 1 and 2. They count the kills inside a group, whoever set
the limit; a killed process itself says nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

GROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 has no word for it, only a number that no machine has."""


class Memory:
    """Counts from now on."""

    def __init__(self, groups: Path = GROUPS, mine: Path = MINE):
        self._folders = _folders(groups, mine)
        self._before = self._killed()

    def shortage(self) -> str:
        """`out of memory (the limit is 2.0 GiB)` if a process was killed for it; else empty."""
        if self._killed() <= self._before:
            return ""
        bytes_ = _least(self._folders)
        return "out of memory" + (f" (the limit is {bytes_ / 2**30:.1f} GiB)" if bytes_ else "")

    def _killed(self) -> int:
        """By all that this process may see of its group; the innermost knows it."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    lines = (folder / name).read_text().splitlines()
                    return int(dict(line.split() for line in lines)["oom_kill"])
        return 0


def limit(groups: Path = GROUPS, mine: Path = MINE) -> int | None:
    """The memory that this process's groups leave it, in bytes; None where there is no limit."""
    return _least(_folders(groups, mine))


def _least(folders: Sequence[Path]) -> int | None:
    return min((limit for folder in folders if (limit := _limit(folder)) < _UNLIMITED), default=None)


def _folders(groups: Path, mine: Path) -> list[Path]:
    """Of this process's group and those around it, the innermost first; a container may show some of them."""
    paths = []
    with contextlib.suppress(OSError):
        for line in filter(None, os.fsdecode(mine.read_bytes()).split("\n")):  # a group's name is any bytes
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                root = groups / "memory" if controllers else groups
                inner = root / path.strip("/")
                paths += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return paths


def _limit(folder: Path) -> int:
    """In bytes; _UNLIMITED where there is none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return _UNLIMITED
