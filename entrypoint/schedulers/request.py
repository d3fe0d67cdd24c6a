"""What the command line adds to what a scheduler says, the same for each of them."""

from __future__ import annotations

from pathlib import Path

from entrypoint.core.frozen import dataclass


@dataclass(frozen=True)
class PlacementRequest:
    """What the command line adds to the environment; None where an option is not given."""

    nodes: str | None = None
    """`--nodes`: a node list in rank order."""
    node_rank: int | None = None
    nodefile: Path | None = None
    """`--nodefile`: read in place of the file that the scheduler names."""
    hostname: str | None = None
    """`--hostname`, in the live environment else this machine's own name. PBS and manual look for it
    in the list; the others know their node without."""
