"""`apptrain submit --follow`: shows a job from the queue to its end, and ends with its status. `follow` is
the entry.

It asks the scheduler and reads the job's output. It does not change the job: whoever stops following leaves
it running. Runs with Python 3.9.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from entrypoint.batch import login
from entrypoint.batch.login import JobStatus
from entrypoint.core.errors import INTERRUPTED, BadInput, Unavailable
from entrypoint.plan.profile import Profile
from entrypoint.schedulers.known import KNOWN, words_of

SILENCE = 600.0
"""Seconds without an answer after which nobody follows any more."""
LEAST, MOST = 1.0, 15.0
"""Seconds between two questions: at first, and for a job that stays as it is."""
READ = 0.5
"""Seconds between two looks for new output."""
PART = 1 << 20
"""Bytes that are read of it at once: a login node may limit a user's memory."""


def find(scheduler: str = "") -> str:
    """This scheduler, or the one that is here. Raises BadInput where nobody here can tell of a job."""
    programs = {known.name: known.tells for known in KNOWN}
    for name in (scheduler,) if scheduler else programs:
        if shutil.which(programs[name]):
            return name
    lacking = (
        f"{programs[scheduler]} is not" if scheduler else f"neither {' nor '.join(programs.values())} is"
    )
    raise BadInput(
        "follow-no-scheduler", f"--follow: {lacking} in PATH: follow a job on a login node of its cluster"
    )


def follow(job: str, scheduler: str = "", site: Profile | None = None) -> int:
    """Shows the job until it ends; returns its status, 130 after Ctrl-C. `site`: the profile that the job was
    submitted with, if that is known here. Raises BadInput for what is no job, or where nobody here can tell
    of one, Unavailable where the scheduler does not answer."""
    if not any(re.fullmatch(known.job_id, job) for known in KNOWN if scheduler in ("", known.name)):
        programs = " or ".join(known.submits for known in KNOWN)
        raise BadInput("follow-job-id", f"--follow {job}: give a job's id, as {programs} has printed it")
    scheduler = find(scheduler)
    ask = login.of(scheduler).ask
    try:
        return _follow(job, lambda: ask(job, site))
    except KeyboardInterrupt:
        where, number = login.on_cluster(job)
        cancel = shlex.join([words_of(scheduler).cancels, *where, number])
        _say(f"job {job} goes on; again: {_again(job)}; to cancel it: {cancel}")
        return INTERRUPTED


def follow_submitted(answer: str, site: Profile) -> int:
    """The same for a job that was just submitted. `answer`: what sbatch or qsub has printed. Raises
    Unavailable if that names no job, or the scheduler does not answer."""
    words = words_of(site.scheduler)
    job = login.of(site.scheduler).submitted(answer)
    if not re.fullmatch(words.job_id, job):
        said = " ".join(answer.split()) or "nothing"
        raise Unavailable(
            "follow-no-id",
            f"{words.submits} has submitted the job, and its answer ({said}) names none: "
            f"{words.lists} shows its id: {_again('JOB')}",
        )
    return follow(job, site.scheduler, site)


def _again(job: str) -> str:
    return f"apptrain submit --follow {shlex.quote(job)}"


def _follow(job: str, ask: Callable[[], JobStatus | None]) -> int:
    shown: Path | None = None
    read: dict[Path, int] = {}
    state, pause = "", LEAST
    answered = time.monotonic()
    while True:
        seen = ask()
        if seen is None:
            if not state:
                state = "nobody tells of it yet"
                _say(f"job {job}: {state}")
            if time.monotonic() - answered > SILENCE:
                raise Unavailable(
                    "follow-silence",
                    f"nobody has told of job {job} for {SILENCE:.0f} s, it may go on: {_again(job)}",
                )
            time.sleep(pause)
            continue
        answered = time.monotonic()
        if seen.state != state:
            state, pause = seen.state, LEAST
            _say(f"job {job}: {state}")
        output = next((path for path in seen.output if path.exists()), shown)
        if output != shown:
            _show(shown, read)  # the rest of another element's
            shown = output
        if seen.status is not None:
            _show(shown or seen.late, read)
            _say(f"job {job} ended with status {seen.status}")
            return seen.status
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline:
            _show(shown, read)
            time.sleep(min(READ, pause))
        pause = min(MOST, pause * 1.5)


def _show(path: Path | None, read: dict[Path, int]) -> None:
    """Prints what was added to the file, byte for byte. `read`: bytes that were shown of each."""
    if path is None:
        return
    sys.stdout.flush()  # what was printed before stands in front of it
    while part := _part(path, read.get(path, 0)):
        sys.stdout.buffer.write(part)
        read[path] = read.get(path, 0) + len(part)
    sys.stdout.flush()


def _part(path: Path, begin: int) -> bytes:
    """At most PART bytes from there on; none at the file's end, or if it cannot be read now."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(PART)
    except OSError:
        return b""


def _say(text: str) -> None:
    print(f"apptrain: {text}", file=sys.stderr, flush=True)
