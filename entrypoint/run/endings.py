"""How an attempt ended, in each form that it takes.

The node's outcome, what the other nodes are told, and what the user reads.
"""

import signal
from collections.abc import Sequence

from entrypoint.core.errors import DONE, SAVED, STUCK, of_signal
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.job.outcome import ALONE, Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet import blame
from entrypoint.meet.reports import Failure
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.ranks.ranks import RankEnded


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What a rank that has failed left behind; each is empty if there is nothing."""

    error: str
    """The line on its stderr that tells best why."""
    at: str
    """Where its script was, `in backward (train.py:31)`."""
    shortage: str
    """That a process of this node was ended for want of memory."""


def asked_to_end(node: str, signum: int, at: float) -> Outcome:
    """The outcome of a node that was signalled at that time, in Unix seconds."""
    error = "interrupted" if signum == signal.SIGINT else f"ended by {signal_name(signum)}"
    return Outcome(status=of_signal(signum), signal=signum, node=node, time=at, error=error)


def failure_of(node: str, place: int, ended: RankEnded, said: RankTrace) -> Failure:
    """A rank's failure, with what it said of it. `place`: of its node in the allocation."""
    parts = [said.error]
    if ended.signal == signal.SIGKILL or "Killed" in said.error:  # of DataLoader's workers torch says that
        parts.insert(0 if ended.signal else 1, said.shortage)
    if ended.signal:
        parts.insert(0, f"killed by {signal_name(ended.signal)}")
    return Failure(
        node_rank=place,
        node=node,
        rank=ended.rank,
        status=ended.status,
        signal=ended.signal,
        time=ended.time,
        error=": ".join(part for part in parts if part),
        at=said.at,
    )


def to_failure(place: int, ended: Outcome) -> Failure:
    """A node's outcome as the others are told it."""
    return Failure(
        node_rank=place,
        node=ended.node,
        rank=ended.rank,
        status=ended.status,
        signal=ended.signal,
        time=ended.time,
        error=ended.error,
    )


def to_outcome(failure: Failure) -> Outcome:
    """The same back: the outcome of every node whose job has failed so."""
    same = f"; {counted(failure.same, 'other rank')}: the same" if failure.same else ""
    return Outcome(
        status=failure.status,
        rank=failure.rank,
        node=failure.node,
        signal=failure.signal,
        time=failure.time,
        error=failure.error + same,
    )


def in_words(ended: Outcome, plan: LaunchPlan, run: RunDirectory) -> list[str]:
    """The end as the user reads it."""
    if ended.alone and ended.status == DONE:
        return [ALONE.format(plan.world_size)]
    if ended.status == DONE:
        return []
    if ended.status == SAVED:
        return ["saved at a planned end: the same run directory continues"]
    if ended.rank is None:
        return [f"{ended.node + ': ' if ended.node else ''}{ended.reason}"]
    who = named(plan, ended.rank)
    if blame.has_left_early(ended.error):
        return [f"{who} on {ended.node} {ended.error}"]
    if ended.status == STUCK and ended.error.startswith("stuck, "):  # a program may end with 124, too
        return [
            f"{who} on {ended.node}, status {ended.status}: {ended.error}",
            f"where each rank was: {run.stacks}",
        ]
    # c10d's rank is not the one in the log's name, and only the failed node knows which that is.
    number = "*" if plan.rendezvous.backend == "c10d" and plan.nnodes > 1 else ended.rank
    log = run.log(ended.node, f"rank{number}", "err")
    failed = f"{who} on {ended.node} failed first, status {ended.status}"
    return [f"{failed}: {ended.reason} ({log})"]


def signal_name(signum: int) -> str:
    """SIGTERM for 15; `signal 99` for a number that has no name."""
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


def named(plan: LaunchPlan, rank: int) -> str:
    """This rank; in mode `exec`, where one stands for the whole CMD of a node, that CMD."""
    return f"CMD of node {rank // plan.nproc_per_node}" if plan.mode == "exec" else f"rank {rank}"


def listed(ranks: Sequence[int]) -> str:
    """`rank 3`, `each of the ranks 3, 4`; at most eight numbers."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"each of the ranks {shown}"
