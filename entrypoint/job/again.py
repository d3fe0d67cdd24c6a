"""Decides how often a run may start again: `another_port_may_help` if a port or peer was not available,
`too_many` after failures, `no_progress` after planned ends.

The last two count in the run directory, so restarts inside a job and requeues add up. The job script waits
for this, so the imports here are quick.
"""

import itertools

from entrypoint.core.plain import counted
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory

TRIES = 3
"""Attempts of one job, if each finds a port or a peer that is not available."""
FRUITLESS = 3
"""Restarts in a row without a new checkpoint between them, or planned ends."""
BRIEF = 300
"""Seconds: a job that was told so soon to stop had little time to train. Its script may keep its checkpoints
elsewhere, where nobody can look for new ones."""


def another_port_may_help(ended: Outcome, tries: int, *, port_by_hand: bool) -> bool:
    """Whether another attempt follows at once, with other ports. `tries`: how many this job has made."""
    return ended.is_unavailable and tries < TRIES and not port_by_hand


def too_many(run: RunDirectory, bound: int | None) -> str:
    """Why no further restart of this run, nor a requeue after a failure, may follow; empty where one may.
    `bound`: --max-restarts."""
    before, newest = run.restarts(), run.newest_checkpoint()
    times = counted(len(before), "time")
    fruitless = len(list(itertools.takewhile(lambda then: then == newest, reversed(before))))
    if bound is not None and len(before) >= bound:
        return f"restarted {times} before, and --max-restarts is {bound}"
    if fruitless >= FRUITLESS and (bound is None or newest != "0"):
        return f"restarted {times} before, the last {FRUITLESS} without a new checkpoint"
    return ""


def no_progress(run: RunDirectory, *, seconds: float) -> str:
    """Why the run may not go on after this planned end; empty where it may. `seconds`: since the job
    began."""
    before, newest = run.planned_ends(), run.newest_checkpoint()
    fruitless = len(list(itertools.takewhile(lambda then: then == newest, reversed(before)))) + 1
    if fruitless < FRUITLESS or (newest == "0" and seconds > BRIEF):
        return ""
    return (
        f"{fruitless} planned ends in a row without a new checkpoint: the time limit is too short, "
        "or the warning comes too early (--signal, --stop-before)"
    )
