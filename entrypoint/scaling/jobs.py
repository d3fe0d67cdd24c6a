"""Submits a sweep to a cluster: `apptrain submit` for each size and repeat. `submit` is the entry.

Each job waits for the end of those before it, so that they do not slow each other down; what they have
measured, `apptrain scaling DIR` reads. A later call submits what no job has measured or is still to measure.
Runs with Python 3.9.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence

from entrypoint.batch import login
from entrypoint.core.checkout import HOME, apptrain
from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.core.plain import counted, plain
from entrypoint.scaling import measured
from entrypoint.scaling.measured import NotMeasured
from entrypoint.scaling.sweep import NoSuchSize, Sweep, SweepFolder, of_size
from entrypoint.schedulers.known import SchedulerWords

SECONDS = 300.0
"""For the submission of one job."""


def submit(
    folder: SweepFolder,
    sweep: Sweep,
    command: Sequence[str],
    options: Sequence[str],
    scheduler: SchedulerWords,
    *,
    batch: int,
    say: Callable[[str], None],
    env: Mapping[str, str],
) -> int:
    """Submits what is missing; returns the exit status, that of the first job that could not be.
    `command`, `options`: with their secrets."""
    done, going_on = _before(folder, scheduler, say, env)
    after = _after(scheduler, going_on.values())
    for nodes, repeat in sweep.order():
        if (nodes, repeat) in done or (nodes, repeat) in going_on:
            continue
        try:
            words = of_size(command, nodes, batch=batch)
        except NoSuchSize as why:
            say(f"left out: {counted(nodes, 'node')}: {why}")
            continue
        run = folder.new_run(nodes, repeat)
        words = [*after, "--run-dir", str(run), *options, "--", *words]
        status, out = _submit(["--cluster", sweep.cluster, "--nodes", str(nodes), *words])
        if status:
            with contextlib.suppress(OSError):
                run.rmdir()
            return status
        job = login.of(scheduler.name).submitted(out)
        if not re.fullmatch(scheduler.job_id, job):
            raise BadInput(
                "scaling-no-job", f"scaling: {scheduler.submits} said {plain(out[-200:])}, which names no job"
            )
        folder.note("jobs", nodes, repeat, {"run": run.name, "job": job})
        after = _after(scheduler, [job])
        say(f"job {job}: {counted(nodes, 'node')}, repeat {repeat}")
    say(f"{'once they have ended' if after else 'all have ended'}: {apptrain()} scaling {folder.path}")
    return 0


def _before(
    folder: SweepFolder, scheduler: SchedulerWords, say: Callable[[str], None], env: Mapping[str, str]
) -> tuple[Collection[tuple[int, int]], dict[tuple[int, int], str]]:
    """(what was measured, the jobs that wait or run), by (nodes, repeat). What is in neither, and was
    submitted, is said: a job that failed or was cancelled, or that the scheduler has forgotten. Raises
    Unavailable where nobody can tell whether a job goes on."""
    done: list[tuple[int, int]] = []
    going_on: dict[tuple[int, int], str] = {}
    side = login.of(scheduler.name)
    for place, run in folder.noted("jobs").items():
        try:
            measured.read(run, env)
            done.append(place)
            continue
        except NotMeasured as error:
            why = str(error)
        except BadInput:
            why = "it has left no manifest that can be read"
        job = folder.job(*place)
        is_id = re.fullmatch(scheduler.job_id, job)
        told = side.ask(job, None) if is_id else None
        if is_id and told is None and not side.has_forgotten(job):
            raise Unavailable(
                "scaling-job-unknown",
                f"scaling: {scheduler.tells} does not tell whether job {job} has ended, and another beside "
                f"it would slow both down: start this again once {scheduler.tells} answers",
            )
        if told and told.status is None:
            going_on[place] = job
            continue
        shown = f"job {plain(job)}"
        ended = f"{shown} ended with status {told.status}" if told else f"nobody tells of {shown}"
        say(f"again: {counted(place[0], 'node')}, repeat {place[1]}: {ended}: {why}")
    if done or going_on:
        say(f"{counted(len(done), 'run')} measured before, {counted(len(going_on), 'job')} still to end")
    return done, going_on


def _after(scheduler: SchedulerWords, jobs: Collection[str]) -> list[str]:
    """The words with which a job waits for the end of all these."""
    ids = ":".join(login.on_cluster(job)[1] for job in jobs)
    return [word.format(job=ids) for word in scheduler.after] if jobs else []


def _submit(arguments: Sequence[str]) -> tuple[int, str]:
    """(status, what it printed); its messages are shown."""
    try:
        done = subprocess.run(
            [str(HOME / "apptrain"), "submit", *arguments],
            check=False,
            stdout=subprocess.PIPE,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(
            "scaling-submit-slow",
            f"scaling: apptrain submit has not ended in {SECONDS:.0f} s: look which jobs are there before "
            "you start it again",
        ) from None
    return done.returncode, done.stdout.decode(errors="replace")
