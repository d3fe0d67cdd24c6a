"""What a scheduler granted to a job script: the value that `granted` in `job` of each scheduler's package
returns. `of` finds that module.
"""

import importlib
from collections.abc import Mapping
from dataclasses import field
from typing import Protocol

from entrypoint.core.frozen import dataclass
from entrypoint.job.handover import Facts
from entrypoint.plan.profile import Profile
from entrypoint.plan.sources import Settings
from entrypoint.schedulers.allocation import JobName


@dataclass(frozen=True, kw_only=True)
class Granted:
    """What the scheduler has given a job."""

    job: JobName
    hosts: tuple[str, ...]
    """Names as the scheduler lists them, in node-rank order."""
    nodelist: str
    """The same as a person reads it."""
    tasks: int = 1
    """Of each node."""
    ran_before: bool = False
    """Whether this job goes on by itself: the scheduler has run it before, or another of a chain has."""
    restarts: int = 0
    """How often the scheduler has run it before."""
    queued: float | None = None
    """Seconds from its submission, or from when the scheduler took it back, to its start; None: unknown, or
    the job script was started by hand in the job."""
    start: tuple[str, ...] = ()
    """The words of the line that starts the tasks, as far as the scheduler's own program needs them."""
    plan: tuple[str, ...] = ()
    """The same for a dry run, in which each task speaks for itself."""
    each_node: tuple[str, ...] = ()
    """The same for a short command, once a node."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the tasks."""
    host_side: tuple[tuple[str, str], ...] = ()
    """What the host half of this scheduler alone is told."""
    notes: tuple[str, ...] = ()


class JobSide(Protocol):
    """What `job` in a scheduler's package offers for every scheduler."""

    def granted(self, env: Mapping[str, str], facts: Facts, settings: Settings, site: Profile) -> Granted:
        """What this job script has to start. Raises BadInput."""


def of(scheduler: str) -> JobSide:
    module: JobSide = importlib.import_module(f"entrypoint.batch.{scheduler}.job")
    return module
