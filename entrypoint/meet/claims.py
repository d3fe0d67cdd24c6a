"""What the participants of a join tell about themselves, and whether it fits together.

The secret: the shape of these values on the wire, and what counts as a disagreement. Pure functions.
"""

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from entrypoint.meet.wire import WireError
from entrypoint.plain import plain
from entrypoint.watch.reports import End, Failure, Sighting

Place = tuple[int, int | None]
"""Node rank, and local rank where each task is a participant."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a participant claims; texts are empty where it does not know."""

    job_id: str
    attempt: int
    node_rank: int
    local_rank: int | None
    """None: one task a node."""
    name: str
    """The node's name as the scheduler lists it."""
    nnodes: int
    nproc_per_node: int
    mode: str
    device: str
    image_id: str
    """Of the SIF's header: every build makes it anew, every copy keeps it."""
    lock_digest: str
    """SHA-256 of what the image was locked to."""
    versions: Mapping[str, str]
    contact: str = ""
    """Where it listens to be tried by others (reach.Contact); not compared."""
    findings: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with the node, by what was looked at; not compared."""

    @property
    def place(self) -> Place:
        return self.node_rank, self.local_rank

    @property
    def local_ranks(self) -> Sequence[int | None]:
        """The participants of each node."""
        return (None,) if self.local_rank is None else range(self.nproc_per_node)

    def __str__(self) -> str:
        task = "" if self.local_rank is None else f", local rank {self.local_rank}"
        return f"node {self.node_rank} ({self.name}{task})"


def disagreement(mine: Identity, theirs: Identity) -> str:
    """What two participants of one job do not agree on, both values beside each other; empty if nothing."""
    names = ("nnodes", "nproc_per_node", "mode", "device", "image_id", "lock_digest")
    pairs = [(name, getattr(mine, name), getattr(theirs, name)) for name in names]
    for name in sorted({*mine.versions, *theirs.versions}):
        pairs.append((f"version of {name}", mine.versions.get(name, ""), theirs.versions.get(name, "")))
    differ = [
        f"{name} is {one or 'unknown'} on {mine} and {two or 'unknown'} on {theirs}"
        for name, one, two in pairs
        if one != two
    ]
    if not differ:
        return ""
    more = f"; and {len(differ) - 5} more" if len(differ) > 5 else ""
    advice = "start every node with the same options, profile and image"
    return f"the nodes do not agree: {'; '.join(differ[:5])}{more}: {advice}"


def missing(absent: Sequence[Place], expected: int, nodes: Sequence[str], shown: int = 8) -> str:
    """`2 of 4 nodes have not come: 1 (b), 3 (d)`; of tasks `1.0 (b)`; a count after the first `shown`."""
    labels = [
        f"{node}{'' if local is None else f'.{local}'} ({nodes[node]})" for node, local in absent[:shown]
    ]
    more = f" and {len(absent) - shown} more" if len(absent) > shown else ""
    kind = "nodes" if absent and absent[0][1] is None else "tasks"
    return f"{len(absent)} of {expected} {kind} have not come: {', '.join(labels)}{more}"


def pack(nodes: Iterable[int]) -> str:
    """A set of nodes as one hexadecimal number with a bit for each: 4 KiB for 16,384, whichever they are."""
    return f"{sum(1 << node for node in nodes):x}"


def unpack(text: str, nnodes: int) -> tuple[int, ...]:
    """The nodes of that number, in order. WireError: it is none, or names nodes that there are not."""
    if text and set(text) <= set(string.hexdigits) and len(text) <= nnodes // 4 + 1:
        bits = f"{int(text, 16):b}"
        if len(bits) <= nnodes:
            return tuple(node for node, bit in enumerate(reversed(bits)) if bit == "1")
    raise WireError("it sent nodes that are none")


_FITS: Mapping[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    int: lambda value: type(value) is int,
    bool: lambda value: type(value) is bool,
    int | None: lambda value: value is None or type(value) is int,
    float: lambda value: type(value) in (int, float) and abs(value) < 1e15,  # no NaN either
    Mapping[str, str]: lambda value: (
        isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    ),
}


_HINTS: Mapping[Any, Mapping[str, Any]] = {
    kind: get_type_hints(kind) for kind in (Identity, Failure, End, Sighting)
}


def load(kind: type[T], raw: object) -> T:
    """One of these values as a peer sent it, its texts fit for a terminal. WireError: another shape."""
    hints = _HINTS[kind]
    if not isinstance(raw, dict) or raw.keys() != hints.keys():
        raise WireError(f"it sent no {kind.__name__}")
    if wrong := [name for name, hint in hints.items() if not _FITS[hint](raw[name])]:
        raise WireError(f"it sent a wrong {wrong[0]}")
    return kind(**{name: plain(value) for name, value in raw.items()})
