"""Which nodes Slurm has given up, as srun says it in the job's output.

`NodeFailures.look` is the entry: it reads what `job.log` of the run directory has got since the last look.
Slurm often knows of a lost node before its silence has lasted for --peer-timeout. A rank may print the same
words, so they alone prove nothing: Link.watch takes a node for lost only if it is silent too.
"""

import re
import stat
from collections.abc import Sequence
from pathlib import Path

from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.schedulers import hostlist

LINE = re.compile(rb"^srun: error: Node failure on ([\w.,\[\]-]{1,1000})$", re.MULTILINE)
"""srun's words; it lists several nodes as Slurm does, a[1-3]."""
CHUNK = 1 << 20
"""Bytes that are read at a time. Of what is longer between two looks, the end counts."""
LONGEST = 2048
"""Bytes of a line that may go on."""


class NodeFailures:
    """Of one attempt; `nodes` are the job's. What stands in the log at the first look counts for nothing.
    Each look moves on to the log's end."""

    def __init__(self, log: Path, nodes: Sequence[str]):
        self._log, self._nodes = log, nodes
        self._rest = b""
        self._at: int | None = None

    def look(self) -> list[int]:
        """The places of the nodes that were given up since the last look. Raises OSError, or files.Unfit."""
        size = self._size()
        if self._at is None or size == self._at:
            self._at = size
            return []
        if not self._at <= size <= self._at + CHUNK:
            self._at, self._rest = max(0, size - CHUNK), b""
        with files.open_regular(self._log) as file:
            file.seek(self._at)
            text = self._rest + file.read(size - self._at)
        self._at = size
        whole, newline, rest = text.rpartition(b"\n")
        self._rest = rest[-LONGEST:]
        names = {name for found in LINE.findall(whole + newline) for name in _expanded(found.decode("ascii"))}
        return [place for place, name in enumerate(self._nodes) if name in names]

    def _size(self) -> int:
        """0 if there is no such file."""
        try:
            found = self._log.stat()
        except FileNotFoundError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _expanded(text: str) -> Sequence[str]:
    try:
        return hostlist.expand(text, "srun")
    except BadInput:
        return ()
