"""What a scheduler says of its site: the value that `survey` in each scheduler's package returns. `of` finds
that module.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

from entrypoint.batch.survey.ask import LoginNode
from entrypoint.batch.survey.draft import Line
from entrypoint.core.frozen import dataclass


@dataclass(frozen=True)
class SiteSurvey:
    lines: Sequence[Line]
    name: str
    """Of the cluster."""
    node: str
    """One of its nodes; empty where none is known."""
    gpus: int
    """Of a node."""
    models: str
    switch: str = ""
    """The scheduler's own word for the network between the nodes; empty: it has none."""
    of_network: Sequence[Line] = ()
    """Further lines, if that network is a fast one."""


class Surveyor(Protocol):
    def survey(self, machine: LoginNode) -> SiteSurvey:
        """What the scheduler says. Raises BadInput if it does not answer."""


def of(scheduler: str) -> Surveyor:
    module: Surveyor = importlib.import_module(f"entrypoint.batch.{scheduler}.survey")
    return module
