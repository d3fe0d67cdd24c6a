"""Measures where the time of a start goes, from the job script's first line to the first node's ranks. Begin
at `StartTimes`.

`PARTS` names the parts. Each ends where the next begins, so together they are the whole.
"""

import contextlib
import os
import time
from collections.abc import Mapping

from entrypoint.batch.prepared import PreparedJob
from entrypoint.core.errors import Refusal
from entrypoint.job import handover
from entrypoint.node import processes

PARTS: Mapping[str, str] = {
    "script": "job script",
    "task": "task",
    "plan": "plan and addresses",
    "nodes": "nodes",
    "torch": "torch",
    "ranks": "ranks",
}
"""`script`: until the image has decided what the job is; `task`: until `launch` is there, so the scheduler's
start of a task, the container and Python; `plan`: until this node has its addresses; `nodes`: until all have
met; `torch`: what its import takes longer than that; `ranks`: until torchrun has started them all."""


class StartTimes:
    def __init__(self, began: float):
        """`began`: Unix seconds."""
        self._end = began
        self.queued: float | None = None
        """Seconds that the job waited before; None: unknown, or an earlier attempt's."""
        self.parts: dict[str, float] = {}
        """Seconds by the names of PARTS, of those that were."""

    def mark(self, part: str, at: float | None = None) -> None:
        """This part ends, now or at this time in Unix seconds."""
        end = time.time() if at is None else at
        self.parts[part] = round(max(0.0, end - self._end), 2)
        self._end = max(end, self._end)

    def in_words(self) -> str:
        of = ", ".join(f"{PARTS[part]} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"the ranks started after {sum(self.parts.values()):.1f} s: {of}"


def of_launch(env: Mapping[str, str]) -> StartTimes:
    """The start of this process's first attempt, up to now."""
    start = StartTimes(time.time() - (processes.age(os.getpid()) or 0.0))
    if where := handover.folder(env):
        with contextlib.suppress(Refusal, ValueError):
            job = PreparedJob.read(where, int(env.get("APPTRAIN_ATTEMPT", "")))
            if job.script is not None:
                start = StartTimes(job.script)
                start.mark("script", job.began)
            start.queued = job.queued
    start.mark("task")
    return start
