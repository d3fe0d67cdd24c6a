"""Who a participant of a join claims to be, and whether two of them fit together.

`disagreement` is what refuses a job whose nodes differ. Pure functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field

from entrypoint.core.frozen import dataclass

ParticipantId = tuple[int, int | None]
"""Node rank, and local rank where each task is a participant."""


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
    """Where it listens to be tried by others (reach.ProbeEndpoint); not compared."""
    findings: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with the node, by what was looked at; not compared."""

    @property
    def participant(self) -> ParticipantId:
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


def named(participants: Sequence[ParticipantId], nodes: Sequence[str], shown: int = 8) -> str:
    """`1 (b), 3 (d)`; of tasks `1.0 (b)`; a count after the first `shown`."""
    labels = [
        f"{node}{'' if local is None else f'.{local}'} ({nodes[node]})"
        for node, local in participants[:shown]
    ]
    more = f" and {len(participants) - shown} more" if len(participants) > shown else ""
    return f"{', '.join(labels)}{more}"


def missing(absent: Sequence[ParticipantId], expected: int, nodes: Sequence[str], shown: int = 8) -> str:
    """`2 of 4 nodes have not come: 1 (b), 3 (d)`, or tasks, as `named` has them."""
    kind = "nodes" if absent and absent[0][1] is None else "tasks"
    return f"{len(absent)} of {expected} {kind} have not come: {named(absent, nodes, shown)}"
