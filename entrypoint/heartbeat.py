"""How ranks say that they go on, and which of them have stopped to.

The secret: the sign. A rank writes its step's number into a file of its own after every step:

    Path(os.environ["APPTRAIN_HEARTBEAT"], os.environ["RANK"]).write_text(str(step))

That the file changes counts, not what it holds; the number is for the message. A rank that has never written
is not watched, so a script that knows nothing of this is left alone.
"""

from collections.abc import Iterable
from pathlib import Path

VARIABLE = "APPTRAIN_HEARTBEAT"
"""A directory on the node, in the environment of every rank."""


class Heartbeats:
    """What was seen of the files of one node's ranks."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._seen: dict[int, int] = {}
        self._quiet: dict[int, float] = {}

    def look(self, ranks: Iterable[int], passed: float) -> None:
        """Looks at the files of these ranks, which could run for `passed` seconds since the last look."""
        for rank in ranks:
            changed = self._changed(rank)
            if changed != self._seen.get(rank, 0):
                self._seen[rank], self._quiet[rank] = changed, 0.0
            elif rank in self._quiet:
                self._quiet[rank] += passed

    def forget(self, rank: int) -> None:
        """The rank is started anew: it is not watched until it writes again."""
        self._seen[rank] = self._changed(rank)
        self._quiet.pop(rank, None)

    def quiet(self, rank: int) -> float | None:
        """Seconds since the rank's last sign; None where it has never given one."""
        return self._quiet.get(rank)

    def stalled(self, bound: float) -> bool:
        """Whether a rank's last sign is longer ago than `bound` seconds."""
        return max(self._quiet.values(), default=0.0) > bound

    def step(self, rank: int) -> int | None:
        """The number in the rank's file; None where there is none."""
        try:
            text = (self._folder / str(rank)).read_text().strip()
        except (OSError, UnicodeError):
            return None
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None

    def _changed(self, rank: int) -> int:
        """When the file was last written, in nanoseconds; 0 where it does not exist."""
        try:
            return (self._folder / str(rank)).stat().st_mtime_ns
        except OSError:
            return 0
