"""Watches the signs that ranks give of going on, and tells which ranks have stopped to. Begin at
`Heartbeats`.

A rank may write the number of its step into a file of its own after every step:

    Path(os.environ["APPTRAIN_HEARTBEAT"], os.environ["RANK"]).write_text(str(step))

It counts that the file changes, not what it holds; the number is for the message. If a script writes no such
file, the steps of torch's optimizers are its sign (inside.py). They say less: nothing is known of evaluations
and saves. A rank that has never given a sign is not watched.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from entrypoint.ranks import hooks as inside

VARIABLE = inside.FOLDER
"""A directory on the node, in the environment of every rank."""


class _Signs:
    """What was seen of one file of each rank."""

    def __init__(self, folder: Path, suffix: str = ""):
        self._folder = folder
        self._suffix = suffix
        self._seen: dict[int, int] = {}
        self.quiet: dict[int, float] = {}
        """Seconds since the last sign of those ranks that have given one."""

    def observe(self, rank: int, passed: float) -> None:
        changed = self._changed(rank)
        if changed != self._seen.get(rank, 0):
            self._seen[rank], self.quiet[rank] = changed, 0.0
        elif rank in self.quiet:
            self.quiet[rank] += passed

    def forget(self, rank: int) -> None:
        self._seen[rank] = self._changed(rank)
        self.quiet.pop(rank, None)

    def numbers(self, rank: int) -> list[int]:
        """What the file holds; empty where there is none, or something else in it."""
        return _numbers(self._path(rank))

    def all_numbers(self) -> list[list[int]]:
        """What all files hold, also those of processes that call themselves another rank."""
        return [_numbers(path) for path in sorted(self._folder.glob(f"*{self._suffix}"))]

    def _path(self, rank: int) -> Path:
        return self._folder / f"{rank}{self._suffix}"

    def _changed(self, rank: int) -> int:
        """When the file was last written, in nanoseconds; 0 where it does not exist."""
        try:
            return self._path(rank).stat().st_mtime_ns
        except OSError:
            return 0


def _numbers(path: Path) -> list[int]:
    try:
        words = path.read_text().split()
    except (OSError, UnicodeError):
        return []
    fit = all(word.isascii() and word.isdecimal() and len(word) < 16 for word in words)
    return [int(word) for word in words] if fit else []


class Heartbeats:
    """What was seen of the signs of one node's ranks."""

    def __init__(self, folder: Path):
        self._own = _Signs(folder)
        self._steps = _Signs(folder, f".{inside.STEPS}")

    def observe(self, ranks: Iterable[int], passed: float) -> None:
        """Reads the signs of these ranks, which could run for `passed` seconds since the last time."""
        for rank in ranks:
            self._own.observe(rank, passed)
            self._steps.observe(rank, passed)

    def forget(self, rank: int) -> None:
        """The rank is started anew: it is not watched until it gives a sign again."""
        self._own.forget(rank)
        self._steps.forget(rank)

    def quiet(self, rank: int) -> float | None:
        """Seconds since the rank's last sign; None where it has never given one."""
        return self._own.quiet.get(rank, self._steps.quiet.get(rank))

    def stalled(self, bound: float) -> bool:
        """Whether a rank that writes itself was last heard longer ago than `bound` seconds."""
        return max(self._own.quiet.values(), default=0.0) > bound

    def paused(self, ranks: Iterable[int], bound: float) -> bool:
        """Whether one of these ranks that does not has made no optimizer step for so long."""
        known = (self._steps.quiet.get(rank, 0.0) for rank in ranks if rank not in self._own.quiet)
        return max(known, default=0.0) > bound

    def step(self, rank: int) -> int | None:
        """The number of the rank's last step; None where it has told none."""
        numbers = self._own.numbers(rank) or self._steps.numbers(rank)[:1]
        return numbers[0] if len(numbers) == 1 else None

    def pace(self) -> tuple[int, float] | None:
        """The optimizer steps of the first rank here that tells them, without its first one, and the seconds
        that they took, with all that the script did between them; None if there are none."""
        for numbers in self._steps.all_numbers():
            if len(numbers) == 6 and numbers[0] > 1 and numbers[5] > numbers[4]:
                return numbers[0] - 1, (numbers[5] - numbers[4]) / 1e6
        return None

    def trained_alone(self, rank: int) -> bool:
        """Whether the rank has made optimizer steps, and none of them in a process group with others."""
        return self._steps.numbers(rank)[1:2] == [1]

    def trained_apart(self, pids: Collection[int]) -> bool:
        """Whether steps were made here, all of them by other processes than the ranks, with these process
        ids, and in groups that a launcher on this node has started alone."""
        found = self._steps.all_numbers()
        return bool(found) and all(
            len(numbers) >= 4 and 0 < numbers[1] <= numbers[2] and numbers[3] not in pids for numbers in found
        )
