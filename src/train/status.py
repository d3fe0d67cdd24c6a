"""The exit statuses of a training process, and the error that carries a refusal."""

from __future__ import annotations

from entrypoint.core.plain import one_line
from train.stop import SAVED, TERMINATED

__all__ = ["BAD_INPUT", "DONE", "FAILED", "NOT_SAVED", "SAVED", "TERMINATED", "TrainingRefused"]

DONE = 0
FAILED = 1
BAD_INPUT = 64  # EX_USAGE of sysexits.h: trying again will not help
NOT_SAVED = 74  # EX_IOERR: came to its end, but the disk did not take the state


class TrainingRefused(Exception):
    """What the user gave cannot be run; exit 64.

    The text is one line without the leading `train: `. `rank` is the one rank that prints it, so that
    what all ranks find is said once. None: the rank that finds it.
    """

    def __init__(self, id: str, message: str, *, rank: int | None = 0) -> None:
        super().__init__(message)
        self.id = id
        """As that of `Refusal` in entrypoint."""
        self.rank = rank

    def __str__(self) -> str:
        return one_line(super().__str__())
