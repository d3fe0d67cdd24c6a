"""Writes and reads how a task of an attempt ended, and makes the job's outcome of all of them. `write` and
`read` are for one task, `of_job` is the rule for the job.

Statuses travel in small files, since torchrun turns every failure into 1 and srun returns the highest status
of all tasks. Files are read, never sourced.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from entrypoint.core import files
from entrypoint.core.errors import DONE, SAVED, UNAVAILABLE
from entrypoint.core.frozen import dataclass

SPACE = 4096
"""Bytes that an outcome has at most, and that `reserve` takes for it."""


LOST = "lost: "
"""How the error of a node begins from which nothing is heard any more."""
ALONE = (
    "no rank joined a process group: each of the {} ranks trained for itself, on what it took for all data "
    "(docs/own-script.md, Each rank for itself)"
)
"""What is said of a job whose outcome is `alone`, with the number of its ranks."""
MOST_TASKS = 100_000
"""Of an attempt, whose outcomes are read."""
BOUND = 10**9
"""No attempt has a greater number."""
_NAMED = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(frozen=True)
class Outcome:
    """How one task of a job ended."""

    status: int
    """0, 75, or the failure's: the rank's own, 128+N for a signal N."""
    rank: int | None = None
    """The global rank that the status is of; None where no rank is to blame."""
    node: str = ""
    """Empty where whoever started the task says it, and knows its status alone."""
    signal: int = 0
    """The signal that ended the rank; 0 for none."""
    time: float = 0.0
    """Unix seconds at which it ended."""
    error: str = ""
    """The first error, one line."""
    alone: bool = False
    """Whether the job's ranks, of which there are several, trained without a process group."""

    @property
    def reason(self) -> str:
        """The first error, as a message has it: some ranks say nothing."""
        return self.error or ("nothing on stderr" if self.rank is not None else "no reason was told")

    @property
    def whose(self) -> str:
        """Whose it is, as a line has it before the reason: `rank 3 on b: `. Empty where only the status is
        known."""
        of_rank = f"rank {self.rank} on " if self.rank is not None else ""
        return of_rank + (f"{self.node}: " if self.node else "")

    @property
    def is_failure(self) -> bool:
        return self.status not in (DONE, SAVED)

    def is_loss_of(self, node: str) -> bool:
        """Whether this says of a node that nothing was heard from it."""
        return self.rank is None and self.node == node and self.error.startswith(LOST)

    @property
    def is_silence(self) -> bool:
        """Whether this says of a node that nothing was heard from it: its processes may live. Those of a node
        whose connection was closed do not, and the node may."""
        return self.is_loss_of(self.node) and "nothing was heard" in self.error

    @property
    def is_unavailable(self) -> bool:
        """Whether a port or a peer kept the ranks from starting: another attempt may help. A rank that ends
        with this status means something of its own."""
        return self.status == UNAVAILABLE and self.rank is None


def file_name(attempt: int, node_rank: int, local_rank: int | None) -> str:
    """ATTEMPT.NODE_RANK, in `rank` mode ATTEMPT.NODE_RANK.LOCAL_RANK."""
    return f"{attempt}.{node_rank}" if local_rank is None else f"{attempt}.{node_rank}.{local_rank}"


def reserve(path: Path) -> None:
    """Takes the space that `write` will need: a disk that fills up does not lose how the ranks ended. Raises
    OSError."""
    _fill(path, b" " * SPACE)


def release(path: Path) -> None:
    """Gives back what `reserve` took, where nothing was written."""
    with contextlib.suppress(OSError):
        _partial(path).unlink()


def write(path: Path, outcome: Outcome) -> None:
    """Writes by rename, so that a reader sees a whole file or none; into a folder that may have vanished.
    Raises OSError."""
    fields = {
        "status": outcome.status,
        "rank": "" if outcome.rank is None else outcome.rank,
        "node": outcome.node,
        "signal": outcome.signal,
        "time": f"{outcome.time:.6f}",
        "error": " ".join(outcome.error.split()),
    } | ({"process_group": "none"} if outcome.alone else {})
    text = "".join(f"{name}={value}\n" for name, value in fields.items())
    _fill(path, text.encode(errors="backslashreplace")[: SPACE - 1].removesuffix(b"\n") + b"\n")
    _partial(path).rename(path)


def _fill(path: Path, content: bytes) -> None:
    """Overwrites in place what stands in the partial file: its blocks are ours already."""
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(_partial(path), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(content)
        file.truncate()
        os.fsync(file.fileno())


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def read(path: Path) -> Outcome | None:
    """The outcome in a file; None where it does not exist or is not one."""
    try:
        lines = files.read(path, 4 * SPACE).decode("utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return None
    found = dict(line.partition("=")[::2] for line in lines)
    try:
        return Outcome(
            status=int(found["status"]),
            rank=int(found["rank"]) if found.get("rank") else None,
            node=found.get("node", ""),
            signal=int(found.get("signal") or 0),
            time=float(found.get("time") or 0),
            error=found.get("error", ""),
            alone=found.get("process_group") == "none",
        )
    except (KeyError, ValueError):
        return None


def of_attempt(folder: Path, attempt: int, most: int = MOST_TASKS) -> dict[str, Outcome]:
    """What tasks of an attempt have left in this folder, each by the name of its file; of `most` at most,
    those of the first nodes. Raises OSError."""
    names = sorted(_names(folder, attempt), key=place)[:most]
    return {name: one for name in names if (one := read(folder / name))}


def places(folder: Path, attempt: int) -> set[int]:
    """The nodes that have left an outcome of this attempt, whether or not it can be read. Raises OSError."""
    return {place(name) for name in _names(folder, attempt)}


def of_newest_attempt(folder: Path) -> tuple[int, dict[str, Outcome]]:
    """(the newest attempt of which a task has left an outcome, the same for it). -1 where there is none.
    Raises OSError."""
    bound = BOUND
    while bound >= 0:
        numbers = (_number(name) for name in _names(folder))
        bound = max((number for number in numbers if number < bound), default=-1)
        if bound >= 0 and (found := of_attempt(folder, bound)):
            return bound, found
    return -1, {}


def place(name: str) -> int:
    """Of the node in the allocation, by the name of its file (`file_name`)."""
    return int(name.split(".")[1])


def _number(name: str) -> int:
    return int(name.partition(".")[0])


def _names(folder: Path, attempt: int | None = None) -> Iterator[str]:
    """Files that are named as outcomes are, of this attempt or of all."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _NAMED.fullmatch(entry.name) and attempt in (None, _number(entry.name)):
                yield entry.name


def of_job(outcomes: Iterable[tuple[str, Outcome | None]], first: str = "") -> Outcome:
    """The job's outcome from every expected file, each with whose it is; None for a missing one. `first` is
    the first node, whose outcomes bear its name.

    0 if all say 0; 75 only if all say 75; else the failure with the earliest time. A missing file is a
    failure with status 1, later than any written one; 0 beside 75 is 1. Nodes that are cut off take the first
    one for lost: where that has failed itself, it knows better. Of any other node that is taken for lost, the
    status of its task alone says less, whoever noticed it first.
    """
    found = list(outcomes)
    written = [(name, outcome) for name, outcome in found if outcome is not None]
    failures = [(name, outcome) for name, outcome in written if outcome.is_failure]
    if any(name == first for name, _ in failures):
        failures = [(name, ended) for name, ended in failures if name == first or not ended.is_loss_of(first)]
    lost = {ended.node for _, ended in failures if ended.is_loss_of(ended.node)}
    failures = [(name, ended) for name, ended in failures if ended.node or name not in lost]
    if failures:
        return min((outcome for _, outcome in failures), key=lambda outcome: outcome.time)
    if missing := [name for name, outcome in found if outcome is None]:
        return Outcome(status=1, error=f"no outcome was written by {_listed(missing)}")
    statuses = {outcome.status for _, outcome in written}
    if statuses == {DONE, SAVED}:
        return split(name for name, outcome in written if outcome.status == SAVED)
    return max((outcome for _, outcome in written), key=lambda outcome: outcome.time)


def split(saved: Iterable[str]) -> Outcome:
    """The outcome of a job of which only these saved to go on, and the others ended well."""
    return Outcome(status=1, error=f"{_listed(saved)} saved to go on, the others ended well")


def _listed(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
