"""Submits a sweep to a cluster: `apptrain submit` for each size and repeat. `submit` is the entry.

Each job waits for the end of the one before it, so that they do not slow each other down; what they have
measured, `apptrain scaling DIR` reads. Runs with Python 3.9.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Sequence

from entrypoint.core.checkout import HOME, apptrain
from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.core.plain import counted, plain
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
) -> int:
    """Submits what was not submitted yet; returns the exit status, that of the first job that could not be.
    The first of a later call waits for none: a scheduler may no longer know the one before it.
    `command`, `options`: with their secrets."""
    before = folder.noted("jobs")
    after: list[str] = []
    for nodes, repeat in sweep.order():
        if (nodes, repeat) in before:
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
        job = (out.split() or [""])[-1].partition(";")[0]
        if not re.fullmatch(scheduler.job_id, job):
            raise BadInput(
                "scaling-no-job", f"scaling: {scheduler.submits} said {plain(out[-200:])}, which names no job"
            )
        folder.note("jobs", nodes, repeat, {"run": run.name, "job": job})
        after = [word.format(job=job) for word in scheduler.after]
        say(f"job {job}: {counted(nodes, 'node')}, repeat {repeat}")
    say(f"once they have ended: {apptrain()} scaling {folder.path}")
    return 0


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
