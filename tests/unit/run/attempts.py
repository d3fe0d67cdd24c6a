"""Every event in every state of a node whose ranks run.

The log of a case has the seconds since its event; the events before it, which lead to its state, are not in it.
"""

import signal
from dataclasses import replace

from entrypoint.job.outcome import Outcome
from entrypoint.meet.messages import Stopped
from entrypoint.meet.reports import Failure
from entrypoint.ranks.ranks import RankEnded, RankStarted
from tests.unit.scene import (
    Entry,
    Step,
)


def started(rank: int) -> RankStarted:
    return RankStarted(rank=rank)


def ended(rank: int, status: int = 0, signum: int = 0, at: float = 1000.5) -> RankEnded:
    return RankEnded(rank=rank, status=status, signal=signum, time=at)


BOTH: list[Step] = [started(0), started(1)]
NONE = "before any rank has started"
RUN = "while all run"
PART = "when the other has ended well"
DONE = "when all here have ended well"
SAVED = "when the other has saved"
STOP = "after a stop was asked for"
END = "while the ranks may save after SIGTERM"
STATES: dict[str, list[Step]] = {
    NONE: [1e-6],
    RUN: [*BOTH],
    PART: [*BOTH, ended(0, at=1000.1)],
    DONE: [*BOTH, ended(0, at=1000.1), ended(1, at=1000.2)],
    SAVED: [*BOTH, ended(0, 75, at=1000.1)],
    STOP: [*BOTH, Stopped()],
    END: [*BOTH, signal.SIGTERM],
}
CRASH = Failure(node_rank=1, node="127.0.0.2", rank=1, status=9, signal=0, time=1000.5, error="ValueError: x")
OURS = Failure(node_rank=1, node="127.0.0.2", rank=None, status=1, signal=0, time=1000.76, error="")
TERMINATED = replace(OURS, status=143, signal=15, time=1000.51, error="ended by SIGTERM")
ELSEWHERE = Failure(
    node_rank=2, node="127.0.0.3", rank=3, status=7, signal=0, time=1000.4, error="KeyError: 'a'"
)


def as_outcome(failure: Failure) -> Outcome:
    return Outcome(
        status=failure.status,
        rank=failure.rank,
        node=failure.node,
        signal=failure.signal,
        time=failure.time,
        error=failure.error,
    )


def ends(after: float, failure: Failure) -> Entry:
    return (after, "ends", as_outcome(failure))


def well(after: float, rank: int | None, status: int = 0, at: float = 1000.5) -> Entry:
    return (after, "ends", Outcome(status=status, rank=rank, node="127.0.0.2", time=at))


NO_STEP = "no step for 30 s"
STAYS: list[Entry] = []
FAILED = "after it has failed"
AGAIN = "after torchrun has started all again"
CRASHED: list[Step] = [*BOTH, ended(1, 9)]
RESTART_STATES: dict[str, list[Step]] = {
    RUN: [*BOTH],
    FAILED: CRASHED,
    AGAIN: [*CRASHED, ended(0, 143, 15), *BOTH],
}
RUNS_ON = "a stop was asked for, but {} on 127.0.0.2 catches no SIGUSR2 and runs on"
