"""What follows a failure, as `--on-failure` says. `FailurePolicy` has the rules of each choice.

Runs with Python 3.9.
"""

from __future__ import annotations

from enum import Enum


class FailurePolicy(Enum):
    STOP = "stop"
    REQUEUE = "requeue"
    RESTART = "restart"

    def __str__(self) -> str:
        return self.value

    @property
    def requeues(self) -> bool:
        """Whether the scheduler is to run the job again after a failure; under `restart` only where the run
        cannot go on in the same job."""
        return self is not FailurePolicy.STOP

    @property
    def restarts_in_place(self) -> bool:
        """Whether the nodes that are left go on in the same job."""
        return self is FailurePolicy.RESTART
