"""How often a run may start again after failures, in its job or in another.

The secret: the bound. It is counted in the run directory, so that restarts and requeues are one row. The job
script waits for whoever asks: nothing here takes long to import.
"""

import itertools

from entrypoint.rundir import RunDirectory

FRUITLESS = 3
"""Restarts in a row without a new checkpoint between them."""


def too_many(run: RunDirectory, bound: int | None) -> str:
    """Why no further restart of this run, nor a requeue after a failure, may follow; empty where one may.
    `bound`: --max-restarts."""
    before, newest = run.restarts(), run.newest_checkpoint()
    times = f"{len(before)} time{'s' * (len(before) != 1)}"
    fruitless = len(list(itertools.takewhile(lambda then: then == newest, reversed(before))))
    if bound is not None and len(before) >= bound:
        return f"restarted {times} before, and --max-restarts is {bound}"
    if fruitless >= FRUITLESS and (bound is None or newest != "0"):
        return f"restarted {times} before, the last {FRUITLESS} without a new checkpoint"
    return ""
