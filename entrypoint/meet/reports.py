"""What a node says of its ranks: one that failed, one that ended well, where one was found.

The types of the fields say what a peer may send (meet/messages.py checks it).
"""

from collections.abc import Iterable
from typing import Annotated, Protocol

from entrypoint.core.bitset import NONE, Bits
from entrypoint.core.frozen import dataclass


@dataclass(frozen=True)
class Range:
    """The bounds of a number that a peer may send, both included; in an `Annotated` type."""

    least: float
    most: float


NodeRank = Annotated[int, "node"]
"""A place in the allocation's list of nodes."""
Rank = Annotated[int, "rank"]
"""A rank of the job."""
Count = Annotated[int, Range(0, 1 << 62)]
Status = Annotated[int, Range(1, 255)]
"""Of something that failed: 0 would end a failed job well."""
Signal = Annotated[int, Range(0, 128)]
UnixTime = Annotated[float, Range(0, 1e10)]
"""Seconds, up to the year 2286."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a node, or a lost node."""

    node_rank: NodeRank
    node: str
    rank: Rank | None
    """None: no rank's failure."""
    status: Status
    signal: Signal
    """0: none."""
    time: UnixTime
    """Unix seconds; of a node that fell silent, when it was last heard."""
    error: str
    at: str = ""
    """Where the rank's script was, `in backward (train.py:31)`; empty where that is not known."""
    same: Rank = 0
    """How many other ranks failed with the same error."""


@dataclass(frozen=True, kw_only=True)
class End:
    """A rank that ended well, which is no failure unless others still needed it."""

    rank: Rank
    node_rank: NodeRank
    node: str
    status: Annotated[int, Range(0, 255)]
    """0 or 75."""
    time: UnixTime
    """Unix seconds."""
    step: Count | None
    """The last one that it told; None where it told none."""
    alone: bool = False
    """Whether it trained, and was in no process group with others."""


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """Where a rank was found when the job seemed to hang."""

    rank: Rank
    node_rank: NodeRank
    node: str
    step: Count | None
    """The last one that it told; None where it tells none."""
    quiet: Annotated[float, Range(-1, 1e10)]
    """Seconds since its last sign; -1 where it has never given one."""
    state: str
    """The letter of /proc/PID/stat; empty where the process is gone."""
    at: str
    """The innermost line of the main thread that is not torch's, `train.py:88 advance`; empty: no stack."""
    waits_in: str
    """torch's function below that line which waits for other ranks; empty where there is none."""
    stack: str
    """A digest of the functions of the main thread: the same for ranks that do the same; empty: no stack."""
    cpu: Annotated[float, Range(0, 1e12)] = 0.0
    """Seconds of CPU that the process has used so far."""


@dataclass(frozen=True)
class Ends:
    """The ranks that have ended well so far, as far as it matters who they are."""

    ranks: Bits = NONE
    first: End | None = None
    """The earliest; None if there is none."""
    alone: bool = True
    """Whether each of them trained for itself."""

    @classmethod
    def of(cls, ends: Iterable[End]) -> "Ends":
        found = cls()
        for end in ends:
            found = found.with_(end)
        return found

    def with_(self, end: End) -> "Ends":
        if end.rank in self.ranks:
            return self
        first = self.first
        if first is None or (end.time, end.rank) < (first.time, first.rank):
            first = end
        return Ends(self.ranks.with_(end.rank), first, self.alone and end.alone)

    def __len__(self) -> int:
        return len(self.ranks)


NO_ENDS = Ends()


class HasTime(Protocol):
    """What has happened at a time."""

    @property
    def time(self) -> float:
        """Unix seconds."""


def when(one: HasTime) -> float:
    """For sorting: what came first is the first."""
    return one.time
