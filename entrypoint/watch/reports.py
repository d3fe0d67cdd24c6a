"""What a node says of its ranks: one that failed, one that ended well, where one was found."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a node, or a lost node."""

    node_rank: int
    node: str
    rank: int | None
    """None: no rank's failure."""
    status: int
    signal: int
    """0: none."""
    time: float
    """Unix seconds; of a node that fell silent, when it was last heard."""
    error: str
    at: str = ""
    """Where the rank's script was, `in backward (train.py:31)`; empty where that is not known."""
    same: int = 0
    """How many other ranks failed with the same error."""


@dataclass(frozen=True, kw_only=True)
class End:
    """A rank that ended well, which is no failure unless others still needed it."""

    rank: int
    node_rank: int
    node: str
    status: int
    """0 or 75."""
    time: float
    """Unix seconds."""
    step: int | None
    """The last one that it told; None where it told none."""
    alone: bool = False
    """Whether it trained, and was in no process group with others."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """Where a rank was found when the job seemed to hang."""

    rank: int
    node_rank: int
    node: str
    step: int | None
    """The last one that it told; None where it tells none."""
    quiet: float
    """Seconds since its last sign; -1 where it has never given one."""
    state: str
    """The letter of /proc/PID/stat; empty where the process is gone."""
    at: str
    """The innermost line of the main thread that is not torch's, `train.py:88 advance`; empty: no stack."""
    waits_in: str
    """torch's function below that line which waits for other ranks; empty where there is none."""
    stack: str
    """A digest of the functions of the main thread: the same for ranks that do the same; empty: no stack."""
    cpu: float = 0.0
    """Seconds of CPU that the process has used so far."""
