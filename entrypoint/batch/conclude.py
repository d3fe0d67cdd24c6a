"""Decides what follows an attempt of a job: the end, another try, or a requeue, and what the user is told.
`verdict` is the rule.

It is applied once, on the first node. `leave` does so as the last act of that node's `launch`; if more must
be known that only the host can ask, the job script starts `conclude`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from entrypoint.batch.prepared import PreparedJob
from entrypoint.batch.slurm import job as slurm
from entrypoint.core.errors import BAD_INPUT, DONE, SAVED
from entrypoint.core.frozen import dataclass
from entrypoint.job import handover, outcome
from entrypoint.job.again import another_port_may_help, no_progress, too_many
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.record import reading

LATE, LATE_FAILED = 10, 2
"""Times LATE_PAUSE: what a shared file system may take to show a node's file, and where a failure is
known."""
LATE_PAUSE = 0.5
"""Seconds."""
DONE_LINE = "done: {}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows an attempt."""

    follows: Literal["end", "again", "requeue"]
    status: int
    said: tuple[tuple[str, str], ...] = ()
    """Lines to `say`, or to `tell`: these go to stdout."""
    forgets_restarts: bool = False
    """Whether a row of failures has come to an end."""
    counts: bool = False
    """Whether what follows is one of those that are bounded."""
    is_planned: bool = False
    """Whether what follows goes on from a planned end."""


def conclude(where: Path) -> int:
    """Leaves the verdict in this directory. Raises BadInput."""
    facts = handover.asked(where)
    job, signum = PreparedJob.read(where, int(facts.one("attempt"))), facts.one("asked")
    if signum:
        carry_out(where, job, ended(job, int(signum), facts.one("told")), asked=signum)
    else:
        run, of_job = last(job, LATE)
        is_planned = bool(facts.one("warned")) or run.stop.exists()
        carry_out(where, job, verdict(job, run, of_job, is_planned=is_planned, told=facts.one("told")))
    return 0


def leave(
    where: Path, attempt: int, run: RunDirectory, place: int, asked: int | None, lost: Iterable[int]
) -> None:
    """The last act of a node's `launch`, in this directory of its own: says that it is over and, on the first
    node, where nobody knows more, what follows. `attempt`: its first; `run`: of the last; `place`: this
    node's; `asked`: the status of the signal that ended it; `lost`: nodes, by their places."""
    if place != 0:
        last_of_all = RunDirectory(run.path, run.later_attempts())
        has_ended = last_of_all.outcome(0, None).exists()
        handover.write(where / handover.OVER, [("first", "ended")] * has_ended)
        return
    job = PreparedJob.read(where, attempt)
    over = [("lost", str(node)) for node in lost] + [("asked", "yes")] * bool(asked)
    handover.write(where / handover.OVER, over)
    if asked:
        if not job.may_be_asked:
            carry_out(where, job, ended(job, asked, ""), asked=str(asked))
        return
    run, of_job = last(job, LATE_FAILED)
    is_well = of_job.status in (DONE, SAVED) or of_job.is_unavailable
    if is_well or (_all_written(job, run) and not job.may_be_asked):
        carry_out(where, job, verdict(job, run, of_job, is_planned=run.stop.exists(), told=""))


def came_to_its_end(job: PreparedJob, attempt: int) -> bool:
    """Whether those that were left of this attempt, whose job script was lost with its node, have
    finished. False where one of them was no node of `job`, which has fewer: what is known is not all."""
    job = dataclasses.replace(job, attempt=attempt)
    run = RunDirectory(job.run_dir, RunDirectory(job.run_dir, attempt).later_attempts())
    if any(place >= len(job.hosts) for place in run.crew() or ()):
        return False
    return last(job, 0)[1].status == DONE


def last(job: PreparedJob, patience: int) -> tuple[RunDirectory, Outcome]:
    """(the last attempt, how it ended). After a restart inside the allocation the last attempt counts, and
    those that took part in it; files that are late are waited for, `patience` times LATE_PAUSE."""
    for late in range(patience + 1):
        with contextlib.suppress(OSError):
            list((job.run_dir / "outcome").iterdir())  # so that NFS looks anew
        first = RunDirectory(job.run_dir, job.attempt)
        run = RunDirectory(job.run_dir, first.later_attempts())
        found = _outcomes(job, run)
        missing = any(each is None for _, each in found)
        failed = any(each is not None and each.status not in (DONE, SAVED) for _, each in found)
        if not missing or late == patience or (failed and late >= LATE_FAILED):
            break
        time.sleep(LATE_PAUSE)
    return run, outcome.of_job(found, first=job.hosts[0])


def verdict(job: PreparedJob, run: RunDirectory, of_job: Outcome, *, is_planned: bool, told: str) -> Verdict:
    """What follows this outcome of the job's last attempt. `told`: what Slurm says of the job."""
    status = of_job.status
    error = f"{of_job.whose}{of_job.reason}"
    if another_port_may_help(of_job, job.tries, port_by_hand=job.port_by_hand):
        again = f"trying again: attempt {run.attempt + 1}, with other ports"
        said = (("say", f"attempt {run.attempt}: {error}"), ("say", again))
        return Verdict(follows="again", status=status, said=said)
    if status == DONE:
        done = DONE_LINE.format(job.run_dir)
        return Verdict(follows="end", status=DONE, said=(("tell", done),), forgets_restarts=True)
    if status == SAVED and is_planned:
        return _after_planned_end(job, run)
    if status == SAVED:
        return _within_bounds(job, run, status, "saved at an end that was not asked for")
    if job.batch and status != BAD_INPUT and slurm.is_preempted(told):
        return _later(job, status, f"preempted: {error}", forgets=True)
    failed = f"status {status}: {error} (logs: {run.logs})"
    explained = _explained(of_job, job.run_dir) if of_job.rank is not None else ()
    if not job.policy.requeues or status == BAD_INPUT:
        lines = tuple(("say", line) for line in (failed, *explained))
        return Verdict(follows="end", status=status, said=lines)
    if job.policy.restarts_in_place:
        inside = "it does not go on inside the allocation: as with --on-failure requeue"
        return _within_bounds(job, run, status, failed, *explained, inside)
    return _within_bounds(job, run, status, failed, *explained)


def _explained(of_job: Outcome, run_dir: Path) -> tuple[str, ...]:
    from entrypoint.explain.run import in_lines  # which no start has to wait for

    return in_lines(of_job, run_dir)


def ended(job: PreparedJob, status: int, told: str) -> Verdict:
    """What is said where the job script was asked to end by a signal."""
    by = f"ended by a signal (status {status})"
    if job.may_be_asked and slurm.is_requeued(told, job.restarts):
        again = f"{by}: {job.scheduler} runs the job again, and it goes on there"
        return Verdict(follows="end", status=status, said=(("tell", again),))
    said = f"{by}, not run again by this script; {job.by_hand}"
    return Verdict(follows="end", status=status, said=(("say", said),))


def _later(
    job: PreparedJob, status: int, *lines: str, forgets: bool = False, counts: bool = False
) -> Verdict:
    said = tuple(("say", line) for line in (*lines, *([] if job.batch else [job.by_hand])))
    return Verdict(
        follows="requeue" if job.batch else "end",
        status=status,
        said=said,
        forgets_restarts=forgets,
        counts=counts,
    )


def _after_planned_end(job: PreparedJob, run: RunDirectory) -> Verdict:
    saved = "saved at a planned end"
    if why := no_progress(run, seconds=time.time() - job.began):
        said = (("say", saved), ("say", f"not run again: {why}; {job.by_hand}"))
        return Verdict(follows="end", status=SAVED, said=said, forgets_restarts=True)
    return dataclasses.replace(_later(job, SAVED, saved, forgets=True), is_planned=True)


def _within_bounds(job: PreparedJob, run: RunDirectory, status: int, *lines: str) -> Verdict:
    if why := too_many(run, job.bound):
        # Who starts it again may have corrected what failed.
        said = tuple(("say", line) for line in (*lines, f"not run again: {why}; {job.by_hand}"))
        return Verdict(follows="end", status=status, said=said, forgets_restarts=True)
    return _later(job, status, *lines, counts=True)


def carry_out(where: Path, job: PreparedJob, found: Verdict, asked: str = "") -> None:
    """Does what the verdict means for the run directory, and leaves it for the host half. `asked`: the status
    of the signal that it is about."""
    attempt = RunDirectory(job.run_dir, job.attempt).later_attempts() + 1
    reading.close(job.run_dir, attempt - 1, found.status)
    following = RunDirectory(job.run_dir, attempt)
    if found.forgets_restarts:
        following.forget_restarts()
    if found.counts:
        following.add_restart()
    if found.follows == "end":
        following.forget_planned_ends()
    elif found.is_planned:
        following.add_planned_end()
    if found.follows == "again":
        # No rank has seen a wish to stop that came while the nodes met.
        following.begin(restarts=job.policy.restarts_in_place, forgets_stop=False)
        following.note_begun()
        dataclasses.replace(job, attempt=attempt, tries=job.tries + 1, script=None, queued=None).write(where)
    else:
        RunDirectory(job.run_dir, attempt - 1).finish()
    entries = [("follows", found.follows), ("status", str(found.status)), ("attempt", str(attempt))]
    entries += [*found.said, ("by_hand", job.by_hand), ("asked", asked)]
    handover.answer(where / handover.VERDICT, entries)


def _outcomes(job: PreparedJob, run: RunDirectory) -> list[tuple[str, Outcome | None]]:
    """Each task's, with its node's name."""
    found = []
    everyone = range(len(job.hosts))
    for place in [place for place in run.crew() or everyone if place in everyone]:
        for task in range(job.tasks):
            # In mode `rank` a task names itself also where it is the only one of its node.
            names = [task] if job.tasks > 1 else [None, task]
            written = (outcome.read(run.outcome(place, name)) for name in names)
            found.append((job.hosts[place], next(filter(None, written), None)))
    return found


def _all_written(job: PreparedJob, run: RunDirectory) -> bool:
    return all(each is not None for _, each in _outcomes(job, run))
