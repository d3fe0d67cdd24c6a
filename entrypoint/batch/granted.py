"""What a scheduler granted to a job script: the value that each scheduler's module returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from entrypoint.schedulers.allocation import JobName


@dataclass(frozen=True, kw_only=True)
class Granted:
    job: JobName
    hosts: tuple[str, ...]
    """Names as the scheduler lists them, in node-rank order."""
    nodelist: str
    """The same as a person reads it."""
    tasks: int = 1
    """Of each node."""
    ran_before: bool = False
    """Whether the scheduler has run this job before."""
    restarts: int = 0
    """How often."""
    start: tuple[str, ...] = ()
    """The words of the line that starts the tasks, as far as the scheduler's own program needs them."""
    plan: tuple[str, ...] = ()
    """The same for a dry run, in which each task speaks for itself."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the tasks."""
    host_side: tuple[tuple[str, str], ...] = ()
    """What the host half of this scheduler alone is told."""
    notes: tuple[str, ...] = ()
